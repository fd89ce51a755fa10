"""What only a GPU shows of the Triton kernels: graphs, dependent launches, real widths. Run by hand; results in benchmarks/results.

The small cases of tests/kernels/test_triton_kernels.py run there too (`pytest tests/kernels/test_triton_kernels.py tests/gpu`).
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tradewind.kernels import reference
from tradewind.kernels.triton import decode, norm, prefill, skinny
from tradewind.kernels.triton import sample as sampling
from tradewind.kernels.triton.tuning import DecodeConfig, GemvConfig, PrefillConfig, TileConfig

pytestmark = pytest.mark.gpu
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def difference(found, truth):
    found, truth = found.double(), truth.double()
    return ((found - truth).norm() / truth.norm()).item()


def captured(call):
    """The call as a CUDA graph, after one eager run."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize(
    "config",
    [
        GemvConfig(2, 1024, 2),
        GemvConfig(4, 2048, 8),
        TileConfig(16, 64, 128, 1, 4, 4),
        TileConfig(16, 64, 128, 4, 4, 4),
    ],
)
def test_a_chain_of_dependent_launches_is_ordered(config):
    """64 dependent matmuls and norms in one graph with pdl equal the same chain without it, bit for bit, in 50 replays."""
    rows, width = (1, 4096) if isinstance(config, GemvConfig) else (8, 4096)
    weights = [torch.randn(width, width, device="cuda", dtype=BF16) * width**-0.5 for _ in range(4)]
    gain = torch.rand(width, device="cuda", dtype=BF16) + 0.5
    start = torch.randn(rows, width, device="cuda", dtype=F32)
    work = arrived = None
    if isinstance(config, TileConfig):
        work = torch.empty(skinny.workspace_floats(width, config=config, gated=False), device="cuda")
        arrived = torch.zeros(width // config.bn, dtype=torch.int32, device="cuda")
    x, normed = torch.empty_like(start), torch.empty(rows, width, device="cuda", dtype=BF16)

    def chain(pdl):
        x.copy_(start)
        for index in range(64):
            norm.add_rms_norm(x, None, gain, eps=1e-5, out=normed, pdl=pdl)
            skinny.skinny_linear(
                normed, weights[index % 4], out=x, residual=x, config=config, workspace=work, arrived=arrived, pdl=pdl
            )

    chain(False)
    torch.cuda.synchronize()
    truth = x.clone()
    graph = captured(lambda: chain(True))
    for _ in range(50):
        x.fill_(float("nan"))
        graph.replay()
        assert torch.equal(x, truth)


@pytest.mark.parametrize(("splits", "stages"), [(1, 2), (8, 2), (1, 5), (1, 7), (4, 7)])
def test_one_graph_serves_other_lengths_and_fewer_rows(splits, stages):
    heads, kv_heads, dim, page, rows, most = 32, 8, 128, 64, 6, 16
    k, v = (torch.randn(rows * most + 1, kv_heads, page, dim, device="cuda", dtype=BF16) for _ in range(2))
    table = (torch.randperm(rows * most, device="cuda") + 1).int().view(rows, most)
    q = torch.randn(rows, heads * dim, device="cuda", dtype=BF16)
    out, lengths = torch.empty_like(q), torch.ones(rows, dtype=torch.int32, device="cuda")
    live = torch.tensor([rows], dtype=torch.int32, device="cuda")
    work = torch.empty(decode.decode_workspace_floats(rows, heads=heads, head_dim=dim, splits=splits), device="cuda")
    arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device="cuda")
    graph = captured(
        lambda: decode.paged_decode(
            q,
            k,
            v,
            lengths=lengths,
            page_table=table,
            heads=heads,
            scale=dim**-0.5,
            out=out,
            rows=live,
            config=DecodeConfig(splits, 64, 4, stages),
            workspace=work,
            arrived=arrived,
            pdl=True,
        )
    )
    logical = [x.double().transpose(1, 2).contiguous().cpu() for x in (k, v)]
    for count in (6, 3, 5):
        lengths.copy_(torch.randint(1, page * most, (rows,)))
        live.fill_(count)
        out.fill_(7)
        graph.replay()
        truth = reference.attention(
            q[:count].double().cpu(),
            *logical,
            torch.arange(count + 1),
            lengths[:count].cpu(),
            table.cpu(),
            heads=heads,
            scale=dim**-0.5,
        )
        assert difference(out[:count].cpu(), truth) < 1e-2
        assert (out[count:] == 7).all()


def test_a_row_does_not_depend_on_its_batch():
    """Attention, sampling and tiles: row 0 alone and among others, bit for bit."""
    heads, kv_heads, dim, page = 16, 8, 128, 64
    k, v = (torch.randn(65, kv_heads, page, dim, device="cuda", dtype=BF16) for _ in range(2))
    table = (torch.randperm(64, device="cuda") + 1).int().view(4, 16)
    q, lengths = (
        torch.randn(4, heads * dim, device="cuda", dtype=BF16),
        torch.tensor([900, 5, 64, 1000], dtype=torch.int32, device="cuda"),
    )

    def attend(rows):
        out = torch.empty(rows, heads * dim, device="cuda", dtype=BF16)
        decode.paged_decode(
            q[:rows],
            k,
            v,
            lengths=lengths[:rows],
            page_table=table[:rows],
            heads=heads,
            scale=0.1,
            out=out,
            config=DecodeConfig(8, 64, 4, 2),
            workspace=torch.empty(
                decode.decode_workspace_floats(rows, heads=heads, head_dim=dim, splits=8), device="cuda"
            ),
            arrived=torch.zeros(rows * kv_heads, dtype=torch.int32, device="cuda"),
        )
        return out

    assert torch.equal(attend(1)[0], attend(4)[0])
    weight, x = torch.randn(1024, 2048, device="cuda", dtype=BF16), torch.randn(16, 2048, device="cuda", dtype=BF16)
    outs = []
    for rows in (1, 16):
        outs.append(torch.empty(rows, 1024, device="cuda", dtype=F32))
        skinny.skinny_linear(x[:rows], weight, out=outs[-1], config=TileConfig(16, 32, 128, 1, 4, 4))
    assert torch.equal(outs[0][0], outs[1][0])


@pytest.mark.parametrize("form", ["bf16", "w8", "w8a8"])
@pytest.mark.parametrize(("gated", "depth"), [(False, 4096), (True, 1000)])
def test_fixed_linear_gives_a_row_the_same_bits_in_any_batch(form, gated, depth):
    features, most = 1024, 333
    x = torch.randn(most, depth, device="cuda", dtype=BF16)
    weight, scale, x_scale = (
        torch.randn(features * (2 if gated else 1), depth, device="cuda", dtype=BF16) * depth**-0.5,
        None,
        None,
    )
    if form != "bf16":
        scale = weight.float().abs().amax(1) / 448
        weight = (weight.float() / scale[:, None]).clamp(-448, 448).to(FP8)
    exact = x.float()
    if form == "w8a8":
        small, x_scale = torch.empty(most, depth, device="cuda", dtype=FP8), torch.empty(most, device="cuda")
        norm.quantise_tokens(x, out=small, scale=x_scale)
        x, exact = small, small.float() * x_scale[:, None]
    truth = exact.double() @ (weight.float() if scale is None else weight.float() * scale[:, None]).double().T
    if gated:
        truth = torch.nn.functional.silu(truth[:, :features]) * truth[:, features:]

    def run(first, rows):
        here = slice(first, first + rows)
        out = torch.full((rows, features), float("nan"), device="cuda", dtype=F32)
        x_scales = None if x_scale is None else x_scale[here].clone()
        skinny.fixed_linear(x[here].clone(), weight, scale=scale, x_scale=x_scales, out=out, gated=gated, pdl=True)
        return out

    whole = run(0, most)
    assert difference(whole, truth) < 1e-2
    for first, rows in ((0, 1), (0, 5), (0, 70), (200, 1), (332, 1), (60, 128)):
        assert torch.equal(run(first, rows), whole[first : first + rows])


@pytest.mark.parametrize("outlier", [1.0, 3000.0])
@pytest.mark.parametrize(
    "config",
    [
        GemvConfig(4, 512, 4, narrow=True),
        GemvConfig(8, 512, 4, narrow=True, half=True),
        GemvConfig(8, 256, 2, narrow=True, half=True, ahead=4),
        GemvConfig(8, 1024, 8, narrow=True, half=True),
    ],
)
def test_one_row_of_fp8_weights_keeps_its_precision(config, outlier):
    """Float16 products also with an input of one huge and many tiny values: the scale is the row's own."""
    features, depth = 4096, 14336
    weight = torch.randn(features, depth, device="cuda") * depth**-0.5
    scale = weight.abs().amax(1) / 448
    weight8 = (weight / scale[:, None]).clamp(-448, 448).to(FP8)
    x = torch.randn(1, depth, device="cuda", dtype=BF16)
    x[0, 17] *= outlier
    out = torch.empty(1, features, device="cuda", dtype=F32)
    skinny.skinny_linear(x, weight8, scale=scale, out=out, config=config)
    truth = x.double() @ (weight8.float() * scale[:, None]).double().T
    assert difference(out, truth) < 1e-3


@pytest.mark.parametrize(
    "config",
    [
        PrefillConfig(128, 64, 4, 3, True),
        PrefillConfig(128, 64, 8, 3, True, pairs=True),
        PrefillConfig(64, 64, 4, 2, True, pairs=True),
        PrefillConfig(128, 64, 8, 3, True, registers=128),
    ],
)
def test_long_rows_at_real_widths(config):
    heads, kv_heads, dim, page = 32, 8, 128, 64
    counts, lengths = [700, 1, 130, 65], [700, 900, 1000, 65]
    most = 16
    k, v = (torch.randn(4 * most + 1, kv_heads, page, dim, device="cuda", dtype=BF16) for _ in range(2))
    k[0], v[0] = float("nan"), float("nan")
    table = (torch.randperm(4 * most, device="cuda") + 1).int().view(4, most)
    for row, length in enumerate(lengths):
        table[row, -(-length // page) :] = 0
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.randn(sum(counts), heads * dim, device="cuda", dtype=BF16)
    out = torch.full_like(q, float("nan"))
    prefill.paged_prefill(
        q, k, v, query_start=starts.cuda(), lengths=torch.tensor(lengths, dtype=torch.int32, device="cuda"), page_table=table,
        heads=heads, scale=dim**-0.5, out=out, config=config,
    )  # fmt: skip
    logical = [torch.nan_to_num(x.float()).transpose(1, 2).contiguous().cpu() for x in (k, v)]
    truth = reference.attention(
        q.float().cpu(), *logical, starts, torch.tensor(lengths), table.cpu(), heads=heads, scale=dim**-0.5
    )
    assert difference(out.cpu(), truth) < 1e-2


def test_the_draw_at_a_real_vocabulary_equals_the_reference():
    rows, vocabulary = 16, 151936
    logits = torch.randn(rows, vocabulary) * torch.linspace(0.5, 4, rows)[:, None]
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    ]
    base = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    each = [settings[row % 4] for row in range(rows)]
    columns = sampling.DeviceColumns(
        **{
            n: torch.tensor([s.get(n, d) for s in each], dtype=torch.int32 if n == "top_k" else F32, device="cuda")
            for n, d in base.items()
        },
        seed=torch.arange(rows, device="cuda") * 1234567,
        position=torch.arange(rows, device="cuda") + 100,
    )
    work = sampling.SampleWorkspace.allocate(rows, vocabulary, device="cuda", penalties=False)
    out = torch.zeros(rows, dtype=torch.int32, device="cuda")
    sampling.sample(logits.cuda(), columns, out=out, workspace=work, pdl=True)
    truth = [reference.sample(logits[row], seed=row * 1234567, position=row + 100, **each[row]) for row in range(rows)]
    assert out.tolist() == truth
