"""Every Triton kernel against kernels/reference.py on tiny shapes: on a GPU as compiled, on a CPU through the interpreter.

Without a GPU it is skipped unless TRITON_INTERPRET=1 is set before Python starts; test_triton_interpreter.py does that. A green run through
the interpreter proves indexing and logic, not numerics: tests/gpu has the real shapes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_interpreter  # noqa: F401
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 set before Python starts", allow_module_level=True)

from tradewind.kernels import reference  # noqa: E402
from tradewind.kernels.triton import decode, elementwise, norm, prefill, rope, skinny, step  # noqa: E402
from tradewind.kernels.triton import sample as sampling  # noqa: E402
from tradewind.kernels.triton.tuning import DecodeConfig, GemvConfig, PrefillConfig, TileConfig  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
BF16_TOLERANCE = 6e-3
"""bf16 keeps 8 bits: a rounded output is up to 2^-9 off, a product of rounded ones somewhat more."""


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(torch.seed() % 2**31)


def normal(rng, *shape, dtype=BF16, scale=1.0):
    return (torch.randn(*shape, generator=rng) * scale).to(dtype).to(DEVICE)


def difference(found, truth):
    """||a - b|| / ||b||; a NaN never passes."""
    found, truth = found.double().cpu(), truth.double().cpu()
    return ((found - truth).norm() / truth.norm()).item()


def wide(x):
    return None if x is None else x.double().cpu()


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# ---------------------------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("residual", [F32, BF16])
@pytest.mark.parametrize("width", [64, 576])
@pytest.mark.parametrize("add", [True, False])
def test_add_rms_norm(rng, residual, width, add):
    x, delta, weight = normal(rng, 4, width, dtype=residual), normal(rng, 4, width), normal(rng, width)
    truth_x, truth = reference.add_rms_norm(wide(x), wide(delta) if add else None, wide(weight), eps=1e-5)
    out = torch.full((4, width), 7.0, dtype=BF16, device=DEVICE)
    norm.add_rms_norm(x, delta if add else None, weight, eps=1e-5, out=out, count=ints([3]))
    assert difference(out[:3], truth[:3]) < BF16_TOLERANCE
    assert difference(x[:3], truth_x[:3]) < (BF16_TOLERANCE if residual == BF16 else 1e-6)
    assert (out[3] == 7).all(), "a row beyond count was written"


def test_add_rms_norm_to_fp8(rng):
    x, delta, weight = normal(rng, 3, 128, dtype=F32), normal(rng, 3, 128), normal(rng, 128)
    _, truth = reference.add_rms_norm(wide(x), wide(delta), wide(weight), eps=1e-5)
    out, scale = torch.zeros(3, 128, dtype=FP8, device=DEVICE), torch.zeros(3, device=DEVICE)
    norm.add_rms_norm(x, delta, weight, eps=1e-5, out=out, scale=scale)
    assert difference(out.float() * scale[:, None], truth) < 0.04
    assert difference(scale, truth.abs().amax(1) / 448) < 1e-5


def test_quantise_tokens(rng):
    x = normal(rng, 3, 96)
    out, scale = torch.zeros(3, 96, dtype=FP8, device=DEVICE), torch.zeros(3, device=DEVICE)
    norm.quantise_tokens(x, out=out, scale=scale)
    assert difference(out.float() * scale[:, None], x) < 0.04


# --------------------------------------------------------------------------------------------------------- elementwise


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(rng, activation):
    x = normal(rng, 3, 2 * 72)
    truth = reference.activate(wide(x)[:, :72], activation) * wide(x)[:, 72:]
    out = torch.full((3, 72), 7.0, dtype=BF16, device=DEVICE)
    elementwise.gated_activation(x, out=out, activation=activation, count=ints([2]), block=32)
    assert difference(out[:2], truth[:2]) < BF16_TOLERANCE and (out[2] == 7).all()
    small, scale = torch.zeros(3, 72, dtype=FP8, device=DEVICE), torch.zeros(3, device=DEVICE)
    elementwise.gated_activation(x, out=small, activation=activation, scale=scale)
    assert difference(small.float() * scale[:, None], truth) < 0.04


def test_embed_and_gather(rng):
    table, ids = normal(rng, 10, 48), ints([3, 9, 3, 0])
    out = torch.zeros(4, 48, dtype=F32, device=DEVICE)
    elementwise.embed(ids, table, scale=2.0, out=out)
    assert torch.equal(out.cpu(), reference.embed(ids.cpu(), table.float().cpu(), scale=2.0))
    out = torch.zeros(2, 48, dtype=BF16, device=DEVICE)
    elementwise.gather_rows(table, ints([7, 1]), out=out)
    assert torch.equal(out, table[[7, 1]])


# ---------------------------------------------------------------------------------------------------------------- rope

PAGE = 16


def pages(rng, count, kv_heads, dim, dtype=BF16):
    """Pages in the physical layout [pages, G, B, D], and a function to the logical one of the references."""
    return normal(rng, count, kv_heads, PAGE, dim).to(dtype)


def logical(paged):
    return wide(paged.float()).transpose(1, 2).contiguous()


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "width"), [(4, 2, 16, 16), (3, 1, 24, 24), (4, 4, 32, 16)])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("kv", [BF16, FP8])
def test_rope_store(rng, heads, kv_heads, dim, width, with_norm, kv):
    tokens = 4
    qkv = normal(rng, tokens, (heads + 2 * kv_heads) * dim)
    positions, slots = ints([0, 5, 17, 30]), ints([PAGE + 3, 2 * PAGE + 15, 3 * PAGE, 9])
    inv_freq = 10000.0 ** (-torch.arange(0, width, 2) / width)
    table = reference.rope_angles(torch.arange(40), inv_freq, scale=1.0).float().to(DEVICE)
    weights = (normal(rng, dim), normal(rng, dim)) if with_norm else (None, None)
    k, v = pages(rng, 5, kv_heads, dim, kv), pages(rng, 5, kv_heads, dim, kv)
    truth_q, truth_k, truth_v = reference.rope_store(
        wide(qkv), wide(table)[positions.cpu().long()], slots.cpu(), logical(k).clone(), logical(v).clone(),
        heads=heads, q_weight=wide(weights[0]), k_weight=wide(weights[1]), eps=1e-6,
    )  # fmt: skip
    out = torch.zeros(tokens, heads * dim, dtype=BF16, device=DEVICE)
    rope.rope_store(
        qkv,
        table,
        slots,
        k,
        v,
        heads=heads,
        q_weight=weights[0],
        k_weight=weights[1],
        eps=1e-6,
        positions=positions,
        out=out,
    )
    assert difference(out, truth_q) < BF16_TOLERANCE
    tolerance = BF16_TOLERANCE if kv == BF16 else 0.04
    assert difference(logical(k), truth_k) < tolerance and difference(logical(v), truth_v) < tolerance


# -------------------------------------------------------------------------------------------------------------- skinny


def linear_truth(x, weight, scale, norm_weight, bias, residual, gated):
    x, weight = wide(x), wide(weight.float())
    weight = weight if scale is None else weight * wide(scale)[:, None]
    x = x if norm_weight is None else reference.rms_norm(x, wide(norm_weight), eps=1e-5)
    y = reference.linear(x, weight, wide(bias))
    if gated:
        half = len(weight) // 2
        y = reference.activate(y[:, :half], "silu") * y[:, half:]
    return y if residual is None else y + wide(residual)


@pytest.mark.parametrize(
    ("gated", "with_norm", "with_residual", "with_bias"),
    [(False, False, False, True), (True, True, False, True), (False, False, True, False), (False, True, False, False)],
)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        GemvConfig(rows=4, block_k=64, warps=2),
        GemvConfig(rows=2, block_k=128, warps=4, narrow=True),
        GemvConfig(rows=4, block_k=32, warps=2, narrow=True, half=True, ahead=1),
        GemvConfig(rows=2, block_k=64, warps=2, narrow=True, half=True, ahead=8),
        TileConfig(bm=16, bn=16, bk=32, split=1, warps=4, stages=3),
        TileConfig(bm=8, bn=16, bk=32, split=2, warps=4, stages=2),
    ],
)
def test_skinny_linear(rng, gated, with_norm, with_residual, with_bias, fp8, config):
    rows = 1 if isinstance(config, GemvConfig) else 5
    features, depth = 20, 192
    x = normal(rng, rows, depth, dtype=F32 if with_norm and rows == 1 else BF16)
    weight = normal(rng, features * (2 if gated else 1), depth)
    scale = None
    if fp8:
        scale = (weight.float().abs().amax(1) / 448).contiguous()
        weight = (weight.float() / scale[:, None]).clamp(-448, 448).to(FP8)
    norm_weight = normal(rng, depth) if with_norm and rows == 1 else None
    bias = normal(rng, len(weight)) if with_bias else None
    out = normal(rng, rows, features, dtype=F32 if with_residual else BF16)
    residual = out if with_residual else None
    truth = linear_truth(x, weight, scale, norm_weight, bias, residual, gated)
    workspace = arrived = None
    if isinstance(config, TileConfig) and config.split > 1:
        workspace = torch.full(
            (skinny.workspace_floats(features, config=config, gated=gated),), float("nan"), device=DEVICE
        )
        arrived = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    skinny.skinny_linear(
        x, weight, out=out, scale=scale, bias=bias, norm=norm_weight, eps=1e-5, gated=gated, residual=residual,
        config=config, workspace=workspace, arrived=arrived,
    )  # fmt: skip
    assert difference(out, truth) < BF16_TOLERANCE
    assert arrived is None or not arrived.any(), "counters must be zero for the next replay"


def test_tiles_with_fp8_inputs(rng):
    rows, features, depth = 5, 24, 192
    weight, x = normal(rng, 2 * features, depth), normal(rng, rows, depth)
    scale = weight.float().abs().amax(1) / 448
    weight8 = (weight.float() / scale[:, None]).clamp(-448, 448).to(FP8)
    x8, x_scale = torch.zeros(rows, depth, dtype=FP8, device=DEVICE), torch.zeros(rows, device=DEVICE)
    norm.quantise_tokens(x, out=x8, scale=x_scale)
    out = torch.zeros(rows, features, dtype=BF16, device=DEVICE)
    skinny.skinny_linear(
        x8,
        weight8,
        out=out,
        scale=scale,
        x_scale=x_scale,
        gated=True,
        config=TileConfig(bm=16, bn=32, bk=32, split=1, warps=4, stages=2),
    )
    exact = linear_truth(x8.float() * x_scale[:, None], weight8, scale, None, None, None, True)
    assert difference(out, exact) < BF16_TOLERANCE


@pytest.mark.parametrize(
    ("gated", "with_bias", "form"),
    [(True, True, "bf16"), (False, False, "bf16"), (False, True, "w8"), (True, False, "w8a8")],
)
@pytest.mark.parametrize(
    ("depth", "tile"),
    [(128, skinny.FIXED), (200, skinny.FIXED), (200, TileConfig(32, 64, 64, 1, 4, 3))],
)
def test_fixed_linear_gives_a_row_the_same_bits_in_any_batch(rng, gated, with_bias, form, depth, tile):
    features, most = 72, 70
    x = normal(rng, most, depth)
    weight, scale, x_scale = normal(rng, features * (2 if gated else 1), depth), None, None
    if form != "bf16":
        scale = (weight.float().abs().amax(1) / 448).contiguous()
        weight = (weight.float() / scale[:, None]).clamp(-448, 448).to(FP8)
    exact = x
    if form == "w8a8":
        small, x_scale = torch.zeros(most, depth, dtype=FP8, device=DEVICE), torch.zeros(most, device=DEVICE)
        norm.quantise_tokens(x, out=small, scale=x_scale)
        x, exact = small, small.float() * x_scale[:, None]
    bias = normal(rng, len(weight)) if with_bias else None
    residual = normal(rng, most, features, dtype=F32) if not gated else None
    truth = linear_truth(exact, weight, scale, None, bias, residual, gated)
    found = {}
    for first, rows in ((0, 1), (0, 5), (0, 70), (69, 1)):
        here = slice(first, first + rows)
        out = residual[here].clone() if residual is not None else torch.zeros(rows, features, dtype=BF16, device=DEVICE)
        skinny.fixed_linear(
            x[here], weight, out=out, scale=scale, x_scale=None if x_scale is None else x_scale[here], bias=bias, gated=gated,
            residual=out if residual is not None else None, tile=tile,
        )  # fmt: skip
        found[first, rows] = out
        assert difference(out, truth[here]) < BF16_TOLERANCE
    whole = found[0, 70]
    assert (
        torch.equal(found[0, 1], whole[:1])
        and torch.equal(found[0, 5], whole[:5])
        and torch.equal(found[69, 1], whole[69:])
    )
    out = torch.full((most, features), 7.0, dtype=F32, device=DEVICE)
    count = ints([3])
    skinny.fixed_linear(
        x, weight, out=out, scale=scale, x_scale=x_scale, bias=bias, gated=gated, count=count, tile=tile
    )
    assert (out[3:] == 7).all() and (out[:3] != 7).any(), "rows beyond count are left alone"


# ----------------------------------------------------------------------------------------------------------- attention


def paged_case(rng, *, counts, lengths, heads, kv_heads, dim, kv=BF16, max_pages=8):
    """q, k, v, query_start, lengths, page table: pages in random order, page 0 is the null page and full of NaN."""
    need = [-(-length // PAGE) for length in lengths]
    order = (torch.randperm(sum(need), generator=rng) + 1).tolist()
    table = torch.zeros(len(counts), max_pages, dtype=torch.int32)
    for row, amount in enumerate(need):
        table[row, :amount] = torch.tensor([order.pop() for _ in range(amount)])
    k, v = pages(rng, sum(need) + 1, kv_heads, dim, kv), pages(rng, sum(need) + 1, kv_heads, dim, kv)
    if kv == BF16:
        k[0], v[0] = float("nan"), float("nan")
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    q = normal(rng, int(starts[-1]), heads * dim)
    return q, k, v, starts.to(DEVICE), ints(lengths), table.to(DEVICE)


def attention_truth(q, k, v, starts, lengths, table, **options):
    clean = [torch.nan_to_num(logical(x), nan=0.0) for x in (k, v)]
    return reference.attention(wide(q), *clean, starts.cpu(), lengths.cpu(), table.cpu(), **options)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 1, 24)])
@pytest.mark.parametrize("extra", ["none", "window", "chunked", "softcap", "sinks", "fp8"])
def test_paged_decode(rng, splits, heads, kv_heads, dim, extra):
    lengths = [1, 40, 97]
    kv = FP8 if extra == "fp8" else BF16
    q, k, v, starts, length, table = paged_case(
        rng, counts=[1] * 3, lengths=lengths, heads=heads, kv_heads=kv_heads, dim=dim, kv=kv
    )
    options = {
        "heads": heads, "scale": dim**-0.5, "window": 33 if extra in ("window", "chunked") else None,
        "chunked": extra == "chunked", "softcap": 2.0 if extra == "softcap" else None,
        "sinks": normal(rng, heads, dtype=F32) if extra == "sinks" else None,
    }  # fmt: skip
    truth = attention_truth(q, k, v, starts, length, table, **{**options, "sinks": wide(options["sinks"])})
    if extra == "window":
        table[2, : (97 - 33) // PAGE] = 0  # dropped pages
    if extra == "chunked":
        table[1, : 33 // PAGE] = table[2, : 66 // PAGE] = 0
    out = torch.zeros_like(q)
    workspace = torch.full(
        (decode.decode_workspace_floats(3, heads=heads, head_dim=dim, splits=splits),), float("nan"), device=DEVICE
    )
    arrived = torch.zeros(3 * kv_heads, dtype=torch.int32, device=DEVICE)
    decode.paged_decode(
        q, k, v, lengths=length, page_table=table, **options, out=out, rows=ints([2]), query_start=starts,
        config=DecodeConfig(splits=splits, block_n=16, warps=4, stages=2), workspace=workspace, arrived=arrived,
    )  # fmt: skip
    assert not out[2].any(), "a row beyond the live ones was written"
    decode.paged_decode(
        q, k, v, lengths=length, page_table=table, **options, out=out,
        config=DecodeConfig(splits=splits, block_n=16, warps=4, stages=2), workspace=workspace, arrived=arrived,
    )  # fmt: skip
    assert difference(out, truth) < 1.5 * BF16_TOLERANCE
    assert not arrived.any(), "counters must be zero for the next replay"


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("kv", "early"), [(BF16, False), (BF16, True), (FP8, True)])
def test_fused_decode_equals_rope_store_then_decode(rng, splits, with_norm, kv, early):
    heads, kv_heads, dim, lengths = 4, 2, 32, [1, 17, 64, 90]
    _, k, v, starts, length, table = paged_case(
        rng, counts=[1] * 4, lengths=lengths, heads=heads, kv_heads=kv_heads, dim=dim, kv=kv
    )
    qkv = normal(rng, 4, (heads + 2 * kv_heads) * dim)
    weights = (normal(rng, dim), normal(rng, dim)) if with_norm else (None, None)
    angles = (
        reference.rope_angles(torch.arange(100), 10000.0 ** (-torch.arange(0, dim, 2) / dim), scale=1.0)
        .float()
        .to(DEVICE)
    )
    last = [length - 1 for length in lengths]
    slots = ints([int(table[r, p // PAGE]) * PAGE + p % PAGE for r, p in enumerate(last)])
    truth_q, truth_k, truth_v = reference.rope_store(
        wide(qkv), wide(angles)[last], slots.cpu(), torch.nan_to_num(logical(k)), torch.nan_to_num(logical(v)),
        heads=heads, q_weight=wide(weights[0]), k_weight=wide(weights[1]), eps=1e-6,
    )  # fmt: skip
    truth = reference.attention(
        truth_q, truth_k, truth_v, starts.cpu(), length.cpu(), table.cpu(), heads=heads, scale=dim**-0.5
    )
    out = torch.zeros(4, heads * dim, dtype=BF16, device=DEVICE)
    workspace = torch.full(
        (decode.decode_workspace_floats(4, heads=heads, head_dim=dim, splits=splits),), float("nan"), device=DEVICE
    )
    decode.paged_decode(
        qkv, k, v, lengths=length, page_table=table, heads=heads, scale=dim**-0.5, angles=angles, q_weight=weights[0],
        k_weight=weights[1], eps=1e-6, out=out, config=DecodeConfig(splits=splits, block_n=16, warps=4, stages=2),
        workspace=workspace, arrived=torch.zeros(4 * kv_heads, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    tolerance = 1.5 * BF16_TOLERANCE if kv == BF16 else 0.04
    assert difference(out, truth) < tolerance
    assert difference(logical(k)[1:], truth_k[1:]) < tolerance and difference(logical(v)[1:], truth_v[1:]) < tolerance


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 1, 24)])
@pytest.mark.parametrize("extra", ["none", "window", "chunked", "softcap", "sinks", "fp8"])
@pytest.mark.parametrize(
    ("block_n", "tma", "pairs"), [(16, False, False), (32, False, False), (16, True, False), (16, True, True)]
)
def test_paged_prefill(rng, heads, kv_heads, dim, extra, block_n, tma, pairs):
    counts, lengths = [20, 1, 7], [20, 35, 60]
    kv = FP8 if extra == "fp8" else BF16
    q, k, v, starts, length, table = paged_case(
        rng, counts=counts, lengths=lengths, heads=heads, kv_heads=kv_heads, dim=dim, kv=kv
    )
    options = {
        "heads": heads, "scale": dim**-0.5, "window": 18 if extra in ("window", "chunked") else None,
        "chunked": extra == "chunked", "softcap": 2.0 if extra == "softcap" else None,
        "sinks": normal(rng, heads, dtype=F32) if extra == "sinks" else None,
    }  # fmt: skip
    truth = attention_truth(q, k, v, starts, length, table, **{**options, "sinks": wide(options["sinks"])})
    if extra == "window":
        table[2, : (60 - 7 - 18 + 1) // PAGE] = 0
    if extra == "chunked":  # 53 .. 59 see from 36, 54 on
        table[2, : 36 // PAGE] = 0
    out = torch.zeros_like(q)
    config = PrefillConfig(block_m=16, block_n=block_n, warps=4, stages=2, tma=tma, pairs=pairs)
    starts = torch.cat([starts, starts[-1:]])  # an empty row beyond the live ones
    length, table = torch.cat([length, ints([0])]), torch.cat([table, table[:1] * 0])
    prefill.paged_prefill(
        q,
        k,
        v,
        query_start=starts,
        lengths=length,
        page_table=table,
        **options,
        out=out,
        rows=ints([3]),
        singles=False,
        config=config,
    )
    assert not out[20].any(), "singles=False leaves rows of one token alone"
    prefill.paged_prefill(
        q, k, v, query_start=starts, lengths=length, page_table=table, **options, out=out, config=config
    )
    assert difference(out, truth) < 1.5 * BF16_TOLERANCE


# ------------------------------------------------------------------------------------------------------------ sampling


def columns_of(rows, **values):
    """DeviceColumns from one list per name, defaults elsewhere."""
    default = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
    kind = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    made = {
        name: torch.tensor(values.get(name, [value] * rows), dtype=kind.get(name, F32), device=DEVICE)
        for name, value in default.items()
    }
    return sampling.DeviceColumns(**made, **{name: value for name, value in values.items() if name not in default})


VOCABULARY = 2100


@pytest.mark.parametrize("candidates", [1024, 64])
@pytest.mark.parametrize("shape", ["flat", "peaked", "ties"])
def test_sample_equals_the_reference(rng, monkeypatch, shape, candidates):
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)  # few: the search takes several passes over the row
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.5, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 1},
    ]
    logits = torch.randn(len(settings), VOCABULARY, generator=rng) * {"flat": 0.5, "peaked": 6.0, "ties": 1.0}[shape]
    if shape == "ties":
        logits = (logits * 2).round() / 2
    workspace = sampling.SampleWorkspace.allocate(len(settings), VOCABULARY, device=DEVICE, penalties=False)
    for trial in range(3):
        seeds = [(1 << 61) * trial + 17 * row for row in range(len(settings))]
        positions = [row + (trial << 33) for row in range(len(settings))]
        names = {name for setting in settings for name in setting}
        base = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        columns = columns_of(
            len(settings),
            seed=seeds,
            position=positions,
            **{name: [s.get(name, base[name]) for s in settings] for name in names},
        )
        out = torch.full((len(settings),), -7, dtype=torch.int32, device=DEVICE)
        sampling.sample(logits.clone().to(DEVICE), columns, out=out, workspace=workspace)
        truth = [
            reference.sample(logits[row], seed=seeds[row], position=positions[row], **settings[row])
            for row in range(len(settings))
        ]
        assert out.tolist() == truth
        assert not workspace.arrived.any()


def test_greedy_ties_nan_and_count(rng):
    logits = torch.randn(5, VOCABULARY, generator=rng)
    logits[0, [1500, 1033, 2099]] = 9.0
    logits[1, 700] = float("nan")
    logits[2] = float("-inf")
    logits[3, :2099] = float("-inf")
    truth = [1033, -1, -1, 2099]
    workspace = sampling.SampleWorkspace.allocate(5, VOCABULARY, device=DEVICE, penalties=False)
    out = torch.full((5,), -7, dtype=torch.int32, device=DEVICE)
    sampling.sample(logits.clone().to(DEVICE), None, out=out, workspace=workspace, count=ints([4]))
    assert out.tolist() == [*truth, -7]
    for temperature in (0.0, 1.0):
        out.fill_(-7)
        columns = columns_of(5, temperature=[0.0, temperature, temperature, temperature, 0.0], top_k=[0, 3, 3, 3, 0])
        sampling.sample(logits.clone().to(DEVICE), columns, out=out, workspace=workspace, count=ints([4]))
        assert out.tolist() == [*truth, -7]


def test_penalties_bias_and_mask_equal_the_reference(rng):
    rows = 4
    logits = torch.randn(rows, VOCABULARY, generator=rng) * 2
    history = torch.randint(0, 40, (6, 64), generator=rng, dtype=torch.int32)
    logits[:, :40] += 4  # the history's tokens are likely, so that penalties matter
    lengths, prompts, which = [50, 0, 64, 10], [20, 0, 0, 10], [5, 0, 2, 3]
    values = {"repetition": [1.3, 1.0, 0.8, 2.0], "presence": [0.5, 0.0, 0.0, 1.0], "frequency": [0.1, 0.0, 0.4, 0.0]}
    biases = [{3: 2.5}, {7: float("-inf"), 2099: 8.0}, {}, {int(logits[3].argmax()): float("-inf")}]
    allowed = torch.rand(rows, VOCABULARY, generator=rng) < 0.5
    words = torch.zeros(rows, -(-VOCABULARY // 32) * 32, dtype=torch.int64)
    words[:, :VOCABULARY] = allowed
    words = (words.view(rows, -1, 32) << torch.arange(32)).sum(-1)
    mask = torch.where(words >= 1 << 31, words - (1 << 32), words).int().to(DEVICE)
    workspace = sampling.SampleWorkspace.allocate(rows, VOCABULARY, device=DEVICE, penalties=True)
    for temperature in (0.0, 0.8):
        columns = columns_of(
            rows, temperature=[temperature] * rows, seed=[11, 12, 13, 14], top_k=[0, 20, 0, 0],
            **{name: torch.tensor(column, device=DEVICE) for name, column in values.items()},
            history=history.to(DEVICE), history_row=ints(which), history_prompt=ints(prompts), history_length=ints(lengths),
            bias_start=ints([0, 1, 3, 3, 4]), bias_token=ints([token for bias in biases for token in bias]),
            bias_value=torch.tensor([value for bias in biases for value in bias.values()], device=DEVICE), mask=mask,
        )  # fmt: skip
        out = torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)
        sampling.sample(logits.clone().to(DEVICE), columns, out=out, workspace=workspace)
        truth = [
            reference.sample(
                logits[row], temperature=temperature, seed=11 + row, top_k=[0, 20, 0, 0][row], repetition=values["repetition"][row],
                presence=values["presence"][row], frequency=values["frequency"][row], history=history[which[row], : lengths[row]],
                history_prompt=prompts[row], bias=biases[row], allowed=allowed[row],
            )
            for row in range(rows)
        ]  # fmt: skip
        assert out.tolist() == truth
        assert not workspace.counts.any(), "scratch counts must be zero for the next replay"


def test_logprobs(rng):
    rows, top = 3, 5
    logits = torch.randn(rows, VOCABULARY, generator=rng)
    logits[1] = (logits[1] * 2).round()  # ties
    tokens = ints([0, 1500, 2099])
    truth = reference.logprobs(logits.double(), tokens.cpu(), top=top)
    blocks = -(-VOCABULARY // sampling.BLOCK)
    made = {
        "logprob": torch.zeros(rows),
        "rank": ints([0] * rows),
        "ids": torch.zeros(rows, top, dtype=torch.int32),
        "top": torch.zeros(rows, top),
    }
    made = {f"out_{name}": value.to(DEVICE) for name, value in made.items()}
    arrived = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    sampling.logprobs(
        logits.to(DEVICE), tokens, top=top, **made, workspace=torch.zeros(rows * blocks * (2 + top), device=DEVICE),
        workspace_ids=torch.zeros(rows * blocks * (1 + top), dtype=torch.int32, device=DEVICE), arrived=arrived,
    )  # fmt: skip
    assert difference(made["out_logprob"], truth[0]) < 1e-5 and difference(made["out_top"], truth[3]) < 1e-5
    assert made["out_rank"].tolist() == truth[1].tolist() and made["out_ids"].tolist() == truth[2].tolist()
    assert not arrived.any()


# ---------------------------------------------------------------------------------------------------------------- step


def test_lay_out_equals_the_host(rng):
    slots, capacity, limit, context, page = 6, 40, 5, 200, 16
    tokens = torch.randint(0, 1000, (slots, context), generator=rng, dtype=torch.int32)
    table = torch.randint(1, 500, (slots, context // page + 1), generator=rng, dtype=torch.int32)
    slot, start, count = [4, 0, 2], [7, 150, 0], [1, 3, 20]
    made = {
        "ids": torch.zeros(capacity),
        "positions": torch.zeros(capacity),
        "query_start": torch.zeros(limit + 1),
        "lengths": torch.full((limit,), 9),
        "write_slots": torch.zeros(capacity),
        "page_table": torch.zeros(limit, table.shape[1]),
        "total": torch.zeros(1),
    }
    made = {name: value.int().to(DEVICE) for name, value in made.items()}
    pad = [99, 99]
    step.lay_out(
        ints(slot + pad),
        ints(start + pad),
        ints(count + pad),
        ints([3]),
        tokens.to(DEVICE),
        table.to(DEVICE),
        page_tokens=page,
        **made,
    )
    positions = [p for s, n in zip(start, count, strict=True) for p in range(s, s + n)]
    owner = [s for s, n in zip(slot, count, strict=True) for _ in range(n)]
    assert made["total"].tolist() == [24] and made["query_start"].tolist() == [0, 1, 4, 24, 24, 24]
    assert made["lengths"].tolist() == [8, 153, 20, 0, 0]
    assert made["positions"].tolist()[:24] == positions
    assert made["ids"].tolist()[:24] == [int(tokens[s, p]) for s, p in zip(owner, positions, strict=True)]
    assert made["write_slots"].tolist()[:24] == [
        int(table[s, p // page]) * page + p % page for s, p in zip(owner, positions, strict=True)
    ]
    for row, used in enumerate([1, 10, 2]):
        assert torch.equal(made["page_table"][row, :used].cpu(), table[slot[row], :used])
        assert not made["page_table"][row, used:].any()


def test_store_sampled():
    tokens, known = torch.zeros(4, 8, dtype=torch.int32, device=DEVICE), ints([1, 1, 1, 1])
    step.store_sampled(
        ints([50, -1, 60, 70]), ints([2, 1, 0, 3]), ints([3, 4, 5, 6]), ints([3]), tokens=tokens, known=known
    )
    assert tokens[2, 3] == 50 and tokens[0, 5] == 60 and tokens.sum() == 110 and known.tolist() == [6, 1, 4, 1]
