"""The op set "cuda": every op against kernels/reference.py, and whole tiny models, recorded and planned, against `PlainOps`.

Without a GPU it is skipped unless TRITON_INTERPRET=1 is set before Python starts; test_triton_interpreter.py does that. On the interpreter
it proves indexing, logic and the data flow of fused programs, not numerics.
"""

from __future__ import annotations

import os
import sys
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_interpreter  # noqa: F401
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 set before Python starts", allow_module_level=True)

from tradewind.attention.paged import PagedAttention  # noqa: E402
from tradewind.config.card import ModelCard, RopeFacts  # noqa: E402
from tradewind.config.kv_sizing import groups_of  # noqa: E402
from tradewind.device.batch import ForwardBatch, Scratch  # noqa: E402
from tradewind.device.kv import KVStorage  # noqa: E402
from tradewind.kernels import reference  # noqa: E402
from tradewind.kernels.ops import PagedRows, SampleColumns  # noqa: E402
from tradewind.kernels.plain import PlainOps  # noqa: E402
from tradewind.kernels.triton.ops import CudaOps  # noqa: E402
from tradewind.kernels.triton.planning import plan  # noqa: E402
from tradewind.kernels.triton.program import Bucket  # noqa: E402
from tradewind.kernels.triton.tuning import TileConfig, Tuning  # noqa: E402
from tradewind.layers.build import Build  # noqa: E402
from tradewind.models.registry import FAMILIES  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
BF16_TOLERANCE = 6e-3
PAGE = 16


@dataclass(frozen=True, kw_only=True)
class SmallTiles(Tuning):
    """Tiles for the tiny widths of these tests, in two pieces where that is possible. FP8 products want 32 columns a step."""

    def tile(self, rows: int, weight_rows: int, depth: int, *, fp8: bool) -> TileConfig | None:
        if rows > self.tile_rows or depth % (32 if fp8 else 16):
            return None
        if depth % 32:
            return TileConfig(16, 32, 16, 1, 4, 2)
        return TileConfig(16, 32, 32, 2 if depth % 64 == 0 else 1, 4, 2)


@dataclass(frozen=True, kw_only=True)
class SmallWide(Tuning):
    """For every matmul of more than one row the tiles that are for many."""

    def wide(self, rows: int, weight_rows: int, depth: int, *, fp8: bool) -> TileConfig | None:
        return TileConfig(16, 32, 32, 1, 4, 2)


LIBRARY = Tuning(multiprocessors=132, tile_rows=0)
WIDE = SmallWide(multiprocessors=132, tile_rows=0)
TILES = SmallTiles(multiprocessors=132, tile_rows=16)
TUNED = {"fixed": LIBRARY, "library": LIBRARY, "tiles": TILES, "wide": WIDE}


def make_ops(**options: Any) -> CudaOps:
    torch.set_num_threads(1)
    return CudaOps(device=DEVICE, **options)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def difference(found: Any, truth: Any) -> float:
    """||a - b|| / ||b||; a NaN never passes."""
    found, truth = (np.asarray(x, np.float64) for x in (found, truth))
    assert found.shape == truth.shape, (found.shape, truth.shape)
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def buffer(ops: CudaOps, values: np.ndarray, dtype: str = "bf16") -> Any:
    """The values in a buffer of the op set."""
    out = ops.empty(values.shape, dtype)
    out.copy_(torch.from_numpy(values))
    return out


def seen(values: Any) -> torch.Tensor:
    """The values of a buffer as the references want them."""
    return values.double().cpu()


def live(n: int) -> np.ndarray:
    return np.array([n], np.int32)


# ------------------------------------------------------------------------------------------------------------- packing


def test_packing_keeps_values():
    ops = make_ops()
    w = normal(48, 32)
    packed = ops.pack_matrix(w, compute="bf16")
    assert (packed.layout, packed.n, packed.k, packed.nbytes) == ("bf16", 48, 32, 48 * 32 * 2)
    assert torch.equal(packed.data[0].cpu(), torch.from_numpy(w).bfloat16())
    raw = torch.from_numpy(w).bfloat16().view(torch.uint8).numpy().reshape(-1)
    raw.flags.writeable = False
    assert torch.equal(ops.pack_blocks(raw, "BF16", n=48, k=32).data[0], packed.data[0])
    table = ops.row_table(raw, "BF16", rows=48, cols=32)
    assert (table.rows, table.cols) == (48, 32) and torch.equal(table.data, packed.data[0])
    assert torch.equal(ops.row_table(w.view(np.uint8), "F32", rows=48, cols=32).data, packed.data[0])
    both = ops.pack_gated(packed, ops.pack_matrix(2 * w, compute="bf16"))
    assert both.gated and both.n == 96 and torch.equal(both.data[0][48:], 2 * both.data[0][:48])
    stacked = ops.pack_stacked((packed, both))
    assert stacked.n == 144 and torch.equal(stacked.data[0][48:], both.data[0])
    with pytest.raises(AssertionError, match="multiplies in bf16"):
        ops.pack_matrix(w, compute="f32")
    with pytest.raises(AssertionError, match="make no pair"):
        ops.pack_gated(packed, stacked)
    with pytest.raises(ValueError, match="cannot read Q4_0"):
        ops.row_table(raw, "Q4_0", rows=48, cols=32)


def test_quants_are_dequantised():
    ops = make_ops()
    quants = np.random.default_rng(0).integers(0, 16, (4, 64)).astype(np.uint8)
    scale, minimum = normal(4, 2, seed=1), normal(4, 2, seed=2)
    truth = quants.reshape(4, 2, 32) * scale[..., None] + minimum[..., None]
    packed = ops.pack_quant(quants, scale, minimum, bits=4)
    assert torch.equal(packed.data[0].cpu(), torch.from_numpy(truth.reshape(4, 64)).bfloat16())

    def read_blocks(raw: Any, format: str, shape: Any) -> Any:
        return np.full(shape, len(raw), np.float32)

    blocks = make_ops(read_blocks=read_blocks)
    assert (blocks.pack_blocks(np.zeros(34, np.uint8), "Q8_0", n=1, k=32).data[0] == 34).all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_pack_fp8(as_tensor):
    ops = make_ops()
    w = normal(32, 48)
    w[3] = 0
    packed = ops.pack_fp8(buffer(ops, w, "f32") if as_tensor else w)
    assert packed.layout == "fp8" and packed.nbytes == 32 * 48 + 32 * 4
    value = packed.data[0].float() * packed.data[1][:, None]
    assert difference(value.cpu(), w) < 0.04
    assert (value[3] == 0).all() and torch.isfinite(packed.data[1]).all()
    assert np.allclose(packed.data[1].cpu()[:3], np.abs(w[:3]).max(1) / 448)
    both = ops.pack_gated(packed, packed)
    assert both.layout == "fp8" and both.n == 64 and torch.equal(both.data[1][32:], packed.data[1])
    assert ops.pack_fp8(normal(32, 40)).layout == "bf16", "a side that is no multiple of 16 stays bf16"


def test_random_weights_repeat():
    ops = make_ops()
    a, b = (ops.random_matrix(64, 32, layout="bf16", gated=True, seed=5, scale=0.5) for _ in range(2))
    assert a.gated and torch.equal(a.data[0], b.data[0]) and 0.45 < a.data[0].float().std() < 0.55
    assert ops.random_matrix(64, 32, layout="fp8", seed=5, scale=0.5).layout == "fp8"
    assert ops.random_rows(10, 16, seed=1, scale=1.0).data.shape == (10, 16)
    assert abs(float(ops.random_vector(1000, seed=1, scale=0.1, mean=1.0).mean()) - 1) < 0.02


def test_memory():
    ops = make_ops()
    assert (ops.host(ops.empty((2, 3), "f32")) == 0).all()
    values = np.arange(6, dtype=np.int32)
    there = ops.constant(values)
    back = ops.host(there)
    back[0] = 9
    assert (ops.host(there) == values).all(), "host gives a copy"
    assert ops.host(buffer(ops, normal(2, 2))).dtype == np.float32
    for format in ("bf16", "fp8"):
        kv = ops.kv_layer(pages=5, page_tokens=PAGE, kv_heads=2, head_dim=8, format=format)
        assert kv.k.shape == (5, 2, PAGE, 8)
        kv.k.copy_(torch.arange(5).view(5, 1, 1, 1).expand_as(kv.k))
        ops.copy_pages(kv, np.array([1, 2], np.int32), np.array([2, 4], np.int32))
        assert kv.k.float()[:, 0, 0, 0].tolist() == [0, 1, 1, 3, 2]


# ---------------------------------------------------------------------------------------------------------- single ops


def test_norms_gelu_softcap_rows():
    ops = make_ops()
    x, delta, w, bias = normal(3, 48), normal(3, 48, seed=1), normal(48, seed=2), normal(48, seed=3)
    weight, shift = ops.constant(w), ops.constant(bias)
    stream, added = buffer(ops, x, "f32"), buffer(ops, delta)
    new, normed = reference.add_rms_norm(seen(stream), seen(added), seen(weight), eps=1e-5)
    out = ops.empty((3, 48), "bf16")
    ops.add_rms_norm(stream, added, weight, eps=1e-5, out=out, count=live(3))
    assert difference(seen(out), normed) < BF16_TOLERANCE and difference(seen(stream), new) < 1e-6

    new, normed = reference.add_layer_norm(seen(stream) + 50, seen(added), seen(weight), seen(shift), eps=1e-5)
    for target in ("apart", "x", "delta"):
        moved, other = buffer(ops, seen(stream).numpy() + 50, "f32"), added.clone()
        out = {"apart": ops.empty((3, 48), "f32"), "x": moved, "delta": other}[target]
        ops.add_layer_norm(moved, other, weight, shift, eps=1e-5, out=out, count=live(3))
        assert difference(seen(out), normed) < (BF16_TOLERANCE if target == "delta" else 1e-4)
        if target != "x":
            assert difference(seen(moved), new) < 1e-6

    stream, gate = buffer(ops, x, "f32"), buffer(ops, normal(3, 1, seed=4))
    for some, by in ((None, None), (added, None), (added, gate)):
        out = ops.empty((3, 48), "bf16")
        new = reference.add(seen(stream), None if some is None else seen(some), None if by is None else seen(by))
        ops.add(stream, some, gate=by, out=out, count=live(3))
        assert difference(seen(stream), new) < 1e-6 and difference(seen(out), new) < BF16_TOLERANCE
    ops.add(stream, added, gate=None, out=None, count=live(3))
    assert difference(seen(stream), new + seen(added)) < 1e-6
    span = reference.rms_norm_span(seen(stream), seen(weight)[:20], start=8, eps=1e-5)
    ops.rms_norm_span(stream, weight[:20], start=8, eps=1e-5, count=live(3))
    assert difference(seen(stream), span) < 1e-6

    positions = ops.constant(np.array([0, 63, 700], np.int32))
    values = buffer(ops, x, "f32")
    truth = reference.temper(seen(values), seen(positions), every=64, slope=0.1)
    ops.temper(values, positions, every=64, slope=0.1, count=live(3))
    assert difference(seen(values), truth) < 1e-6

    operations = (
        ("gelu", reference.gelu, {}),
        ("scale", reference.scale, {"factor": 0.25}),
        ("softcap", reference.softcap, {"cap": 2.0}),
    )
    for name, op, options in operations:
        values = buffer(ops, 3 * x, "f32")
        truth = op(seen(values), **options)
        getattr(ops, name)(values, count=live(3), **options)
        assert difference(seen(values), truth) < 1e-5

    table = ops.row_table(normal(10, 48).view(np.uint8), "F32", rows=10, cols=48)
    ids = ops.constant(np.array([3, 9, 0], np.int32))
    out = ops.empty((3, 48), "f32")
    ops.embed(ids, table, scale=2.0, out=out, count=live(3))
    assert torch.equal(seen(out), 2 * seen(table.data)[[3, 9, 0]])
    rows = ops.empty((2, 48), "bf16")
    ops.gather_rows(out, ids[2:].repeat(2), out=rows, count=live(2))
    assert torch.equal(seen(rows), seen(out)[[0, 0]])


def test_rope_angles_are_the_references():
    ops = make_ops()
    inv_freq = 10000.0 ** (-np.arange(0, 16, 2, dtype=np.float32) / 16)
    positions = np.array([0, 1, 77, 100_000], np.int32)
    out = ops.empty((4, 16), "f32")
    ops.rope_angles(ops.constant(positions), ops.constant(inv_freq), scale=1.5, out=out, count=live(4))
    truth = reference.rope_angles(torch.from_numpy(positions), torch.from_numpy(inv_freq), scale=1.5)
    assert difference(out.cpu(), truth) < 1e-6


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("way", sorted(TUNED))
@pytest.mark.parametrize("fp8", [False, True])
def test_linear(rows, way, fp8):
    ops = make_ops(tuning=TUNED[way], deterministic=way == "fixed")
    pack = ops.pack_fp8 if fp8 else ops.pack_matrix
    w, up = (pack(normal(48, 64, seed=s, scale=0.2)) for s in (1, 2))
    bias, both = ops.constant(normal(48, seed=3)), ops.constant(normal(96, seed=4))
    x = buffer(ops, normal(rows, 64, seed=5))
    value, value_up = (seen(m.data[0].float() if not fp8 else m.data[0].float() * m.data[1][:, None]) for m in (w, up))
    tolerance = 0.06 if fp8 else BF16_TOLERANCE
    for dtype in ("bf16", "f32"):
        for b in (None, bias):
            out = ops.empty((rows, 48), dtype)
            ops.linear(x, w, bias=b, out=out, count=live(rows))
            truth = reference.linear(seen(x), value, None if b is None else seen(b))
            assert difference(seen(out), truth) < tolerance
    gated = ops.pack_gated(w, up)
    for activation in ("silu", "gelu_tanh"):
        for b in (None, both):
            out = ops.empty((rows, 48), "bf16")
            ops.gated_linear(x, gated, activation=activation, bias=b, out=out, count=live(rows))
            truth = reference.gated_linear(
                seen(x), value, value_up, activation=activation, bias=None if b is None else seen(b)
            )
            assert difference(seen(out), truth) < 2 * tolerance
    wide = buffer(ops, normal(rows, 64, seed=5), "f32")  # an encoder's stream
    out = ops.empty((rows, 48), "bf16")
    ops.linear(wide, w, bias=bias, out=out, count=live(rows))
    assert difference(seen(out), reference.linear(seen(x), value, seen(bias))) < tolerance


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_rope_store_and_attention(causal, format, deterministic):
    ops = make_ops(deterministic=deterministic)
    heads, kv_heads, dim, tokens = 6, 2, 16, [5, 1, 20]
    lengths = [5, 9, 40] if causal else tokens
    kv = ops.kv_layer(pages=10, page_tokens=PAGE, kv_heads=kv_heads, head_dim=dim, format=format)
    for pages, seed in ((kv.k, 1), (kv.v, 2)):
        pages.copy_(torch.from_numpy(normal(*pages.shape, seed=seed)))
    table = np.zeros((4, 4), np.int32)
    table[:3, :3] = 1 + np.random.default_rng(0).permutation(9).reshape(3, 3)  # no two rows write one page
    table[0, 2] = 0
    starts = np.cumsum([0, *tokens, 0]).astype(np.int32)
    total = int(starts[-1])
    positions = np.concatenate([np.arange(n - t, n) for n, t in zip(lengths, tokens, strict=True)])
    owner = np.repeat(np.arange(3), tokens)
    slots = (table[owner, positions // PAGE] * PAGE + positions % PAGE).astype(np.int32)
    qkv = buffer(ops, normal(total, (heads + 2 * kv_heads) * dim, seed=3))
    inv_freq = torch.from_numpy(10000.0 ** (-np.arange(0, dim, 2, dtype=np.float32) / dim))
    angles = reference.rope_angles(torch.from_numpy(positions), inv_freq, scale=1.0)
    q_weight, k_weight = ops.constant(normal(dim, seed=4)), ops.constant(normal(dim, seed=5))
    logical = [seen(pages.float()).transpose(1, 2).contiguous() for pages in (kv.k, kv.v)]
    truth_q, truth_k, truth_v = reference.rope_store(
        seen(qkv), angles.double(), torch.from_numpy(slots), *logical, heads=heads, q_weight=seen(q_weight),
        k_weight=seen(k_weight), eps=1e-6,
    )  # fmt: skip
    q, out = ops.empty((total, heads * dim), "bf16"), ops.empty((total, heads * dim), "bf16")
    ops.rope_store(
        qkv, buffer(ops, angles.numpy(), "f32"), ops.constant(slots), kv, heads=heads, q_weight=q_weight,
        k_weight=k_weight, eps=1e-6, out=q, count=live(total),
    )  # fmt: skip
    tolerance = 0.04 if format == "fp8" else BF16_TOLERANCE
    assert difference(seen(q), truth_q) < BF16_TOLERANCE
    for pages, truth in ((kv.k, truth_k), (kv.v, truth_v)):
        assert difference(seen(pages.float()).transpose(1, 2), truth) < tolerance
    rows = PagedRows(
        query_start=ops.constant(starts),
        lengths=ops.constant(np.array([*lengths, 0], np.int32)),
        page_table=ops.constant(table),
        rows=live(3),
    )
    window = 12 if causal else None
    sinks = ops.constant(normal(heads, seed=6))
    ops.attention(
        q, kv, rows, heads=heads, scale=0.3, window=window, softcap=4.0, sinks=sinks, out=out, causal=causal
    )  # fmt: skip
    truth = reference.attention(
        seen(q), seen(kv.k.float()).transpose(1, 2), seen(kv.v.float()).transpose(1, 2), torch.from_numpy(starts)[:4],
        torch.tensor(lengths), torch.from_numpy(table), heads=heads, scale=0.3, window=window, softcap=4.0,
        sinks=seen(sinks), causal=causal,
    )  # fmt: skip
    assert difference(seen(out), truth) < 2 * BF16_TOLERANCE


def test_sample_and_logprobs():
    ops = make_ops()
    logits = normal(3, 163)
    history = np.array([5, 7, 7], np.int32)
    columns = SampleColumns(
        temperature=np.array([0, 1, 0.7], np.float32),
        top_k=np.array([0, 0, 5], np.int32),
        top_p=np.array([1, 0.9, 1], np.float32),
        min_p=np.zeros(3, np.float32),
        repetition=np.array([1.3, 1, 1], np.float32),
        presence=np.array([0.5, 0, 0], np.float32),
        frequency=np.zeros(3, np.float32),
        seed=np.array([1, 2**63 + 5, 3], np.uint64),
        position=np.array([3, 4, 5], np.int64),
        history=np.array([history.ctypes.data, 0, 0], np.int64),
        history_prompt=np.array([1, 0, 0], np.int32),
        history_length=np.array([3, 0, 0], np.int32),
        bias_start=np.array([0, 1, 1, 1], np.int32),
        bias_token=np.array([int(logits[0].argmax())], np.int32),
        bias_value=np.array([-np.inf], np.float32),
        mask=None,
    )
    plain, found = PlainOps(), ops.empty((3,), "i32")
    truth = plain.constant(np.zeros(3, np.int32))
    plain.sample(plain.constant(logits), columns, out=truth, count=live(3))
    ops.sample(ops.constant(logits), columns, out=found, count=live(3))
    assert ops.host(found).tolist() == truth.tolist()
    outs = [ops.empty(shape, kind) for shape, kind in (((3,), "f32"), ((3,), "i32"), ((3, 4), "i32"), ((3, 4), "f32"))]
    ops.logprobs(
        ops.constant(logits), found, top=4, out_logprob=outs[0], out_rank=outs[1], out_ids=outs[2], out_top=outs[3],
        count=live(3),
    )  # fmt: skip
    for out, wanted in zip(outs, reference.logprobs(torch.from_numpy(logits), truth, top=4), strict=True):
        assert difference(ops.host(out), wanted) < 1e-5


# ------------------------------------------------------------------------------------------------- whole tiny models

BASE = {
    "name": "tiny", "source": "hf", "vocab_size": 99, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "intermediate": 96, "max_positions": 512, "norm_eps": 1e-5, "tied_embeddings": False, "layer_windows": (None, None),
}  # fmt: skip
CARDS: dict[str, ModelCard] = {
    "gemma3": ModelCard(
        **BASE
        | {
            "family": "gemma3", "activation": "gelu_tanh", "qk_norm": True, "sandwich_norms": True, "embedding_scale": 8.0,
            "layer_windows": (None, 12), "rope_local": RopeFacts(theta=1e4), "rope": RopeFacts(theta=1e6), "tied_embeddings": True,
            "logit_softcap": 20.0, "heads": 3, "kv_heads": 1,
        }
    ),
    "llama": ModelCard(**BASE | {"family": "llama", "output_bias": True, "mlp_bias": True, "qkv_bias": True}),
    "granite": ModelCard(
        **BASE | {"family": "granite", "residual_scale": 0.5, "logit_scale": 0.25, "embedding_scale": 3.0}
    ),
    "olmo2": ModelCard(**BASE | {"family": "olmo2", "qk_norm_whole": True}),
    "qwen3": ModelCard(**BASE | {"family": "qwen3", "qk_norm": True, "intermediate": 80}),
    "smollm2": ModelCard(**BASE | {"family": "llama", "hidden": 72, "heads": 9, "kv_heads": 3, "head_dim": 8}),
    "bert": ModelCard(
        **BASE
        | {
            "family": "bert", "activation": "gelu", "qkv_bias": True, "output_bias": True, "mlp_bias": True, "kv_heads": 4,
            "causal": False, "rope": RopeFacts(kind="absent"), "position_rows": 64, "token_types": 2,
        }
    ),
}  # fmt: skip


class RandomWeights:
    """Weights by place, the same numbers for every op set; FP8 ones are rounded for those that have none."""

    def __init__(self, ops: Any, *, fp8: bool = False, inside: str = "") -> None:
        self.ops, self.fp8, self.inside = ops, fp8, inside

    def _drawn(self, name: str, *shape: int) -> np.ndarray:
        return normal(*shape, seed=zlib.crc32((self.inside + name).encode()), scale=1.4 * shape[-1] ** -0.5)

    def at(self, place: str) -> RandomWeights:
        return RandomWeights(self.ops, fp8=self.fp8, inside=f"{self.inside}{place}.")

    def _pack(self, values: np.ndarray, *, fp8: bool) -> Any:
        if not fp8:
            return self.ops.pack_matrix(values, compute="bf16")
        small = make_ops().pack_fp8(values)
        if isinstance(self.ops, CudaOps) or small.layout != "fp8":
            return self.ops.pack_fp8(values) if isinstance(self.ops, CudaOps) else self._pack(values, fp8=False)
        rounded = small.data[0].float() * small.data[1][:, None]
        return self.ops.pack_matrix(rounded.cpu().numpy(), compute="f32")

    def matrix(self, sizes: dict[str, int], *, k: int, sensitive: bool = False) -> Any:
        values = np.concatenate([self._drawn(name, n, k) for name, n in sizes.items()])
        return self._pack(values, fp8=self.fp8 and not sensitive)

    def gated(self, gate: str, up: str, *, n: int, k: int) -> Any:
        return self.ops.pack_gated(*(self._pack(self._drawn(name, n, k), fp8=self.fp8) for name in (gate, up)))

    def vector(self, sizes: dict[str, int], *, offset: float = 0.0) -> Any:
        values = np.concatenate([self._drawn(name, n) * n**0.5 * 0.3 for name, n in sizes.items()])
        return self.ops.constant(values + np.float32(0 if "bias" in next(iter(sizes)) else 1))

    def rows(self, name: str, *, rows: int, cols: int) -> Any:
        bits = torch.from_numpy(self._drawn(name, rows, cols)).bfloat16().view(torch.uint8).numpy().reshape(-1)
        return self.ops.row_table(bits, "BF16", rows=rows, cols=cols)

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._drawn(name, *shape)


class Runner:
    """Steps of rows over one model: op by op, or by programs of buckets from a recorded tape."""

    def __init__(
        self,
        card: ModelCard,
        ops: Any,
        *,
        fp8: bool = False,
        kv_format: str = "bf16",
        tokens: int = 40,
        rows: int = 4,
    ) -> None:
        self.card, self.ops, self.tokens, self.rows = card, ops, tokens, rows
        attention = PagedAttention(ops, name=ops.name, formats=(kv_format,))
        build = Build(card=card, ops=ops, weights=RandomWeights(ops, fp8=fp8), attention=attention)
        self.model = FAMILIES[card.family].model(build)
        self.groups = groups_of(card, page_tokens=PAGE, format=kv_format)
        self.per_row = 4
        self.kv = KVStorage(ops, self.groups, [1 + self.rows * self.per_row] * len(self.groups))
        self.lengths = [0] * self.rows
        count = ops.constant(live(0))
        make = lambda *shape: ops.constant(np.zeros(shape, np.int32))  # noqa: E731
        starts, lengths, live_rows = make(self.rows + 1), make(self.rows), make(1)
        self.table = [make(self.rows, self.per_row) for _ in self.groups]
        self.batch = ForwardBatch(
            capacity=tokens,
            tokens=count,
            ids=make(tokens),
            positions=make(tokens),
            rows=tuple(
                PagedRows(query_start=starts, lengths=lengths, page_table=t, rows=live_rows) for t in self.table
            ),
            write_slots=tuple(make(tokens) for _ in self.groups),
            kv=self.kv.layers,
            layer_group=self.kv.layer_group,
            scratch=Scratch(ops),
        )
        self.index = ops.constant(np.arange(tokens, dtype=np.int32))
        self.head_rows = ops.empty((tokens, card.hidden), ops.activation)
        self.logits = ops.empty((tokens, card.vocab_size), "f32")
        self.body = self.head = None
        self.programs: dict[Any, Any] = {}
        if isinstance(ops, CudaOps):
            with ops.record() as self.body:
                self.hidden = self.model.forward(self.batch)
            if card.causal:
                with ops.record() as self.head:
                    self._head()

    def _head(self) -> None:
        self.ops.gather_rows(self.hidden, self.index, out=self.head_rows, count=self.batch.tokens)
        self.model.logits(self.head_rows, out=self.logits, count=self.batch.tokens)

    def _write(self, target: Any, values: Any) -> None:
        values = np.asarray(values, np.int32)
        view = target[: len(values)]
        view.copy_(torch.from_numpy(values))

    def step(self, rows: list[tuple[int, list[int]]], bucket: Bucket | None = None, *, fuse: bool = True) -> np.ndarray:
        """rows: (sequence, its next tokens) -> logits of every token (of an encoder: hidden states)."""
        ids, positions, starts, lengths = [], [], [0], []
        slots: list[list[int]] = [[] for _ in self.groups]
        for sequence, tokens in rows:
            first = self.lengths[sequence]
            at = np.arange(first, first + len(tokens))
            ids += tokens
            positions += at.tolist()
            for group in range(len(self.groups)):
                slots[group] += (self._pages(sequence, group)[at // PAGE] * PAGE + at % PAGE).tolist()
            starts.append(len(ids))
            self.lengths[sequence] = first + len(tokens)
            lengths.append(first + len(tokens))
        b = self.batch
        self._write(b.tokens, [len(ids)])
        self._write(b.ids, ids)
        self._write(b.positions, positions)
        self._write(b.rows[0].query_start, starts + [starts[-1]] * (self.rows - len(rows)))
        self._write(b.rows[0].lengths, lengths + [0] * (self.rows - len(rows)))
        self._write(b.rows[0].rows, [len(rows)])
        for group in range(len(self.groups)):
            self._write(b.write_slots[group], slots[group])
            self._write(self.table[group], [self._pages(sequence, group) for sequence, _ in rows])
        if bucket is None:
            self.hidden = self.model.forward(b)
            if self.card.causal:
                self._head()
        else:
            for program in self.program(bucket, fuse=fuse):
                program.run()
        found = self.logits if self.card.causal else self.hidden
        return self.ops.host(found)[: len(ids)].copy()

    def program(self, bucket: Bucket, *, fuse: bool = True) -> list[Any]:
        """Programs of the body and of the head."""
        if (bucket, fuse) not in self.programs:
            assert self.body is not None
            tapes = [tape for tape in (self.body, self.head) if tape is not None]
            self.programs[bucket, fuse] = [plan(tape, bucket, fuse=fuse) for tape in tapes]
        return self.programs[bucket, fuse]

    def _pages(self, sequence: int, group: int) -> np.ndarray:
        order = np.random.default_rng(group).permutation(self.rows * self.per_row)
        return 1 + order[sequence * self.per_row : (sequence + 1) * self.per_row]


MIXED = Bucket(tokens=24, rows=4, singles=False, longest=64)
FEW = Bucket(tokens=4, rows=4, singles=True, longest=64)
ONE = Bucket(tokens=1, rows=1, singles=True, longest=64)
LONE = Bucket(tokens=24, rows=1, singles=False, longest=64)
ids = lambda seed, n: np.random.default_rng(seed).integers(0, 99, n).tolist()  # noqa: E731

STEPS: list[tuple[list[tuple[int, list[int]]], Bucket]] = [
    ([(0, ids(0, 17)), (1, ids(1, 3)), (2, ids(2, 1))], MIXED),
    ([(0, ids(3, 1)), (2, ids(4, 1)), (1, ids(5, 1))], FEW),
    ([(3, ids(6, 18))], LONE),
    ([(0, ids(7, 1)), (3, ids(8, 4)), (1, ids(9, 1))], MIXED),
    ([(3, ids(10, 1))], ONE),
]


def answers(runner: Runner, *, planned: bool, fuse: bool = True) -> list[np.ndarray]:
    return [runner.step(rows, bucket if planned else None, fuse=fuse) for rows, bucket in STEPS]


PLANNED = [
    ("gemma3", "tiles"),
    ("granite", "tiles"),
    ("llama", "library"),
    ("llama", "tiles"),
    ("olmo2", "library"),
    ("smollm2", "tiles"),
    ("qwen3", "wide"),
]


@pytest.mark.parametrize(("family", "tuning"), PLANNED)
def test_programs_compute_the_model(family, tuning):
    card = CARDS[family]
    truth = answers(Runner(card, PlainOps()), planned=False)
    ops = make_ops(tuning=TUNED[tuning])
    fused = answers(Runner(card, ops), planned=True)
    for found, wanted in zip(fused, truth, strict=True):
        assert difference(found, wanted) < 0.02
    if (family, tuning) == ("llama", "tiles"):
        for found, wanted in zip(answers(Runner(card, ops), planned=True, fuse=False), truth, strict=True):
            assert difference(found, wanted) < 0.02
    assert ops.workspace_bytes() > 0
    assert ops.workspace.counters(1).count_nonzero() == 0, "arrival counters are left zero"


@pytest.mark.parametrize("tuning", sorted(TUNED))
def test_fp8_programs_compute_the_model(tuning):
    card = CARDS["qwen3"]
    truth = answers(Runner(card, PlainOps(), fp8=True), planned=False)
    ops = make_ops(tuning=TUNED[tuning], deterministic=tuning == "fixed")
    runner = Runner(card, ops, fp8=True, kv_format="fp8" if tuning == "tiles" else "bf16")
    for found, wanted in zip(answers(runner, planned=True), truth, strict=True):
        assert difference(found, wanted) < 0.15  # activations and keys keep 4 bits
    text = runner.program(MIXED)[0].describe()
    assert "rms_norm [24, 64] -> fp8" in text or "+ delta -> fp8" in text
    if tuning == "library":
        assert "silu of gate, by up [24, 80] -> fp8" in text
    if tuning == "wide":
        assert "wide [24, 64] -> 80 fp8 + silu" in text and "library" not in text


@pytest.mark.parametrize("tuning", ["tiles", "library"])
def test_an_encoder(tuning):
    card = CARDS["bert"]
    steps = [([(0, ids(0, 17)), (1, ids(1, 3)), (2, ids(2, 1))], MIXED), ([(3, ids(3, 20))], LONE)]
    plain = Runner(card, PlainOps())
    runner = Runner(card, make_ops(tuning=TUNED[tuning]))
    for rows, bucket in steps:
        assert difference(runner.step(rows, bucket), plain.step(rows)) < 0.02


@pytest.fixture
def exact_sums(monkeypatch):
    """The interpreter multiplies by a library whose float32 sums depend on a row's place in a tile; a GPU's do not. In float64 the sums of
    bf16 products are exact, in any order."""
    if INTERPRETED:
        product = np.matmul
        monkeypatch.setattr(np, "matmul", lambda a, b: product(a.astype(np.float64), b.astype(np.float64)))


@pytest.mark.usefixtures("exact_sums")
@pytest.mark.parametrize("fp8", [False, True])
def test_deterministic_rows_do_not_depend_on_their_neighbours(fp8):
    card = CARDS["qwen3"]
    runner = Runner(card, make_ops(deterministic=True), fp8=fp8)
    prompts = [ids(seed, 3 + 5 * seed) for seed in range(2)]
    alone, batched = [], []
    for row, prompt in enumerate(prompts):
        runner.lengths = [0] * 4
        parts = [runner.step([(row, prompt)], LONE), runner.step([(row, [7])], ONE)]
        alone.append(np.concatenate(parts))
    runner.lengths = [0] * 4
    first = runner.step(list(enumerate(prompts)), MIXED)
    second = runner.step([(1, [7]), (0, [7])], FEW)
    starts = np.cumsum([0, *map(len, prompts)])
    for row, (begin, end) in enumerate(pairwise(starts)):
        batched.append(np.concatenate([first[begin:end], second[1 - row][None]]))
    for one, many in zip(alone, batched, strict=True):
        assert np.array_equal(one, many)


# ------------------------------------------------------------------------------------------------------------- fusion


def lines(runner: Runner, bucket: Bucket, **options: Any) -> list[str]:
    return runner.program(bucket, **options)[0].describe().splitlines()


def test_what_is_fused():
    card = CARDS["qwen3"]
    runner = Runner(card, make_ops(tuning=TILES, pdl=False))
    one, few, mixed = (lines(runner, bucket) for bucket in (ONE, FEW, MIXED))
    # embed; per layer: qkv, attention, output, gate_up, down; the last norm
    assert len(one) == 1 + 5 * card.layers + 1
    assert sum("norm" in line and line.startswith("gemv") for line in one) == 2 * card.layers
    assert sum("+ residual" in line for line in one) == 2 * card.layers
    assert sum("+ rope" in line for line in one) == card.layers
    assert not any("rope_angles" in line for line in one + few + mixed)
    assert len(few) == 1 + 7 * card.layers + 1 and not any("delta" in line for line in few)
    # above the tiles: embed; norm, qkv, rope, two attentions, output, norm, gate_up, product, down; the last norm
    assert len(mixed) == 1 + 10 * card.layers + 1
    assert sum("+ delta" in line for line in mixed) == 2 * card.layers
    assert sum(line.startswith(("prefill", "decode")) for line in mixed) == 2 * card.layers
    unfused = lines(runner, ONE, fuse=False)
    assert "rope_angles" in unfused[0] and not any(w in line for line in unfused for w in ("residual", "+ norm"))
    wide = lines(runner, replace(FEW, rows=17, tokens=17))
    assert not any("+ rope" in line for line in wide), "many rows: rope is a launch of its own"


def test_the_head_in_one_tape():
    """One row: the last norm is folded into the head, which reads a shorter view of the hidden states."""
    runner = Runner(CARDS["qwen3"], make_ops(tuning=TILES))
    runner.step([(0, ids(0, 5))], LONE)
    wanted = runner.step([(0, [7])], ONE)
    runner.lengths[0] = 5
    with runner.ops.record() as tape:
        hidden = runner.model.forward(runner.batch)
        runner.model.logits(hidden[:4], out=runner.logits[:4], count=runner.batch.tokens)
    whole = [plan(tape, bucket) for bucket in (ONE, FEW)]
    assert "gemv [1, 64] -> 99 bf16 + norm" in whole[0].describe().splitlines()[-1]
    for program in whole:
        runner.logits.zero_()
        program.run()
        assert difference(runner.ops.host(runner.logits)[:1], wanted) < 0.02


def test_norms_on_both_sides_are_one_launch():
    card = CARDS["gemma3"]
    runner = Runner(card, make_ops(tuning=TILES))
    for bucket, each, folded in ((ONE, 7, 1), (FEW, 7, 0), (MIXED, 10, 0)):
        found = lines(runner, bucket)
        assert len(found) == 1 + each * card.layers + 1 - folded, found  # one row: the first norm is in its matmul
        assert sum("+ delta normed" in line for line in found) == 2 * card.layers


def test_the_chain_of_dependent_launches():
    """Old keys are read before the wait only behind a launch that starts its successor late."""
    runner = Runner(CARDS["qwen3"], make_ops(tuning=TILES, pdl=True))
    for bucket in (ONE, FEW):
        program = runner.program(bucket)[0]
        for before, launch in zip((None, *program.launches), program.launches, strict=False):
            assert launch.options["pdl"]
            if launch.options.get("early"):
                assert before is not None and before.options.get("late")
        assert sum(bool(launch.options.get("early")) for launch in program.launches) == 2
    assert not any(launch.options.get("early") for launch in runner.program(MIXED)[0].launches)


def tape_of(ops: CudaOps, say: Any) -> Any:
    with ops.record() as tape:
        say()
    return tape


def test_nothing_is_folded_that_somebody_else_reads():
    ops = make_ops(tuning=TILES)
    weight = ops.pack_matrix(normal(64, 64))
    gain, count = ops.constant(normal(64)), ops.constant(live(1))
    x, stream = (ops.empty((2, 64), "f32") for _ in range(2))
    a, b, c = (ops.empty((2, 64), "bf16") for _ in range(3))

    def linear(source: Any, out: Any) -> None:
        ops.linear(source, weight, bias=None, out=out, count=count)

    def norm(source: Any, delta: Any, out: Any) -> None:
        ops.add_rms_norm(source, delta, gain, eps=1e-5, out=out, count=count)

    def said(say: Any, keep: Any = None) -> list[str]:
        tape = tape_of(ops, say)
        if keep is not None:
            tape.keep(keep)
        return [line.split(",")[0] for line in plan(tape, ONE).describe().splitlines()]

    folded = said(lambda: (norm(x, None, a), linear(a, b)))
    assert len(folded) == 1
    assert len(said(lambda: (norm(x, None, a), linear(a, b)), keep=a)) == 2, "a is a result"
    assert len(said(lambda: (norm(x, None, a), linear(a, b), ops.gather_rows(a, a, out=c, count=count)))) == 3
    assert len(said(lambda: (norm(x, None, a), norm(x, b, c), linear(a, b)))) == 3, "x changes before a is read"
    assert len(said(lambda: (linear(a, b), norm(x, b, c)))) == 2
    text = plan(tape_of(ops, lambda: (linear(a, b), norm(x, b, c))), ONE)
    assert "+ residual" in text.describe()
    for say in (
        lambda: (linear(a, b), norm(x, b, c), linear(b, c)),  # b is read again
        lambda: (linear(a, b), norm(x, None, c), norm(x, b, c)),  # x is read before b is added
        lambda: (linear(x, b), norm(x, b, c)),  # the matmul reads all of x
        lambda: (linear(a, b), ops.gelu(b, count=count), norm(x, b, c)),
        lambda: (linear(a, b), norm(b, None, c), norm(x, c, a)),  # a norm of its own first
    ):
        assert "+ residual" not in plan(tape_of(ops, say), ONE).describe()
    assert "+ residual" not in plan(tape_of(ops, lambda: (linear(a, stream), norm(c, stream, b))), ONE).describe()


def test_recording_is_closed_to_memory():
    ops = make_ops()
    with ops.record() as tape:
        ops.gelu(ops.empty((1, 4), "f32"), count=None)
        for forbidden in (
            lambda: ops.constant(np.zeros(1)),
            lambda: ops.host(np.zeros(1)),
            lambda: ops.pack_matrix(normal(2, 2), compute="bf16"),
        ):
            with pytest.raises(AssertionError, match="recorded"):
                forbidden()
        with pytest.raises(AssertionError, match="already"), ops.record():
            pass
    assert [call.op for call in tape.calls] == ["gelu"]
    assert ops._recording is None
