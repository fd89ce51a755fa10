"""PlainOps: buffers, counts, packing and columns. The formulas themselves are the reference's and are tested there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tradewind.kernels import reference
from tradewind.kernels.ops import PagedRows, SampleColumns
from tradewind.kernels.plain import PlainOps
from tradewind.quantization.blocks import dequantise, quantise_q4_1, quantise_q8_0

UNTOUCHED = 77.0


@pytest.fixture
def ops() -> PlainOps:
    return PlainOps(read_blocks=dequantise)


def count(n: int) -> np.ndarray:
    return np.array([n], np.int32)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def buffer(*shape: int) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED)


def close(got: Any, wanted: Any, *, tolerance: float = 1e-5) -> bool:
    """Whether ||got - wanted|| <= tolerance ||wanted||."""
    got, wanted = (torch.as_tensor(values, dtype=torch.float64) for values in (got, wanted))
    return float((got - wanted).norm()) <= tolerance * float(wanted.norm())


def test_ops_write_live_rows_only_and_read_the_count_when_they_run(ops: PlainOps) -> None:
    x, out, live = ops.constant(floats(4, 32)), buffer(4, 8), count(3)
    weight = ops.pack_matrix(floats(8, 32, seed=1), compute="f32")
    ops.linear(x, weight, bias=None, out=out, count=live)
    assert close(out[:3], x[:3] @ weight.data[0].T)
    assert (out[3] == UNTOUCHED).all()
    live[0] = 4
    ops.linear(x, weight, bias=None, out=out, count=live)
    assert not (out == UNTOUCHED).any()
    live[0] = 0
    ops.linear(x * np.nan, weight, bias=None, out=out, count=live)
    assert out.isfinite().all()


def test_numpy_buffers_are_used_in_place(ops: PlainOps) -> None:
    x, out = floats(3, 32), np.zeros((3, 32), np.float32)
    weight = floats(32, seed=1)
    before = x.copy()
    ops.add_rms_norm(x, x.copy(), weight, eps=1e-5, out=out, count=count(2))
    np.testing.assert_allclose(x[:2], 2 * before[:2])
    np.testing.assert_array_equal(x[2], before[2])
    assert out[:2].all()
    assert not out[2].any()
    host = ops.host(ops.constant(x))
    assert host is not x
    np.testing.assert_array_equal(host, x)


def test_norm_may_write_over_delta(ops: PlainOps) -> None:
    x, delta, weight = (
        torch.tensor(floats(2, 32)),
        torch.tensor(floats(2, 32, seed=1)),
        torch.tensor(floats(32, seed=2)),
    )
    added, normed = reference.add_rms_norm(x.double(), delta.double(), weight.double(), eps=1e-5)
    ops.add_rms_norm(x, delta, weight, eps=1e-5, out=delta, count=count(2))
    assert close(x, added)
    assert close(delta, normed)


@pytest.mark.parametrize(("compute", "error"), [("f32", 1e-6), ("bf16", 1e-2), ("int8", 2e-2)])
def test_compute_types_lose_what_they_should(ops: PlainOps, compute: Any, error: float) -> None:
    x, w, out = floats(16, 128), floats(24, 128, seed=1), buffer(16, 24)
    packed = ops.pack_matrix(w, compute=compute)
    ops.linear(ops.constant(x), packed, bias=ops.constant(floats(24, seed=2)), out=out, count=count(16))
    wanted = x.astype(np.float64) @ w.T + floats(24, seed=2)
    assert close(out, wanted, tolerance=error)
    if compute != "f32":
        assert not close(out, wanted, tolerance=error / 20)
    assert (packed.n, packed.k) == (24, 128)


def test_quants_and_blocks_are_the_same_values(ops: PlainOps) -> None:
    w = floats(8, 64)
    raw = quantise_q4_1(w).reshape(-1)
    blocks = ops.pack_blocks(raw, "Q4_1", n=8, k=64)
    assert close(blocks.data[0], dequantise(raw, "Q4_1", (8, 64)))
    quants = np.random.default_rng(0).integers(0, 16, (8, 64)).astype(np.uint8)
    scale, minimum = floats(8, 2, seed=1), floats(8, 2, seed=2)
    packed = ops.pack_quant(quants, scale, minimum, bits=4)
    wanted = np.repeat(scale, 32, 1) * quants + np.repeat(minimum, 32, 1)
    assert close(packed.data[0], wanted)
    assert (packed.layout, packed.bits, packed.group) == ("quant", 4, 32)
    stacked = ops.pack_stacked((packed, packed))
    assert close(stacked.data[0], np.concatenate([wanted, wanted]))


def test_gated(ops: PlainOps) -> None:
    x, gate, up, bias = floats(3, 32), floats(16, 32, seed=1), floats(16, 32, seed=2), floats(32, seed=3)
    packed = ops.pack_gated(ops.pack_matrix(gate, compute="f32"), ops.pack_matrix(up, compute="f32"))
    assert packed.gated
    out = buffer(3, 16)
    ops.gated_linear(ops.constant(x), packed, activation="silu", bias=ops.constant(bias), out=out, count=count(3))
    wanted = reference.gated_linear(*(torch.tensor(v).double() for v in (x, gate, up)), activation="silu",
                                    bias=torch.tensor(bias).double())  # fmt: skip
    assert close(out, wanted)


@pytest.mark.parametrize("format", ["BF16", "F16", "F32", "Q8_0"])
def test_embedding_tables(ops: PlainOps, format: str) -> None:
    w = floats(10, 32)
    raw = {
        "BF16": lambda: torch.tensor(w).bfloat16().view(torch.uint8).numpy(),
        "F16": lambda: w.astype(np.float16).view(np.uint8),
        "F32": lambda: w.view(np.uint8),
        "Q8_0": lambda: quantise_q8_0(w),
    }[format]().reshape(-1)
    for made in [ops] if format == "Q8_0" else [ops, PlainOps()]:
        table = made.row_table(raw, format, rows=10, cols=32)
        out = buffer(3, 32)
        made.embed(np.array([7, 0, 9], np.int32), table, scale=2.0, out=out, count=count(2))
        assert close(out[:2], 2 * w[[7, 0]], tolerance=1e-2)
        assert close(out[:2], 2 * dequantise(raw, format, (10, 32))[[7, 0]])
    with pytest.raises(ValueError, match="cannot read Q8_0"):
        PlainOps().row_table(quantise_q8_0(w).reshape(-1), "Q8_0", rows=10, cols=32)


@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
def test_attention_over_what_rope_stored(ops: PlainOps, format: str) -> None:
    """Two rows through store and attention in pages against the pure functions on float64."""
    heads, kv_heads, dim, page = 4, 2, 16, 16
    kv = ops.kv_layer(pages=5, page_tokens=page, kv_heads=kv_heads, head_dim=dim, format=format)
    tokens = 20 + 3
    slots = np.array(
        [2 * page + i for i in range(16)] + [4 * page + i for i in range(4)] + [page + i for i in range(3)]
    )
    qkv, angles = floats(tokens, (heads + 2 * kv_heads) * dim), floats(tokens, dim, seed=1)
    rows = PagedRows(
        query_start=np.array([0, 20, 23, 0], np.int32),
        lengths=np.array([20, 3, 0], np.int32),
        page_table=np.array([[2, 4], [1, 0], [0, 0]], np.int32),
        rows=count(2),
    )
    q, out = buffer(tokens + 1, heads * dim), buffer(tokens + 1, heads * dim)
    ops.rope_store(
        qkv, angles, slots.astype(np.int32), kv, heads=heads, q_weight=None, k_weight=None, eps=0.0, out=q,
        count=count(tokens),
    )  # fmt: skip
    ops.attention(q, kv, rows, heads=heads, scale=0.25, window=9, softcap=None, sinks=None, out=out)
    empty = torch.zeros(5, page, kv_heads, dim, dtype=torch.float64)
    exact_q, k, v = reference.rope_store(
        torch.tensor(qkv).double(), torch.tensor(angles).double(), torch.tensor(slots), empty, empty, heads=heads
    )
    wanted = reference.attention(
        exact_q, k, v, *(torch.tensor(a) for a in (rows.query_start, rows.lengths[:2], rows.page_table)),
        heads=heads, scale=0.25, window=9,
    )  # fmt: skip
    assert close(q[:tokens], exact_q)
    assert close(out[:tokens], wanted, tolerance={"bf16": 1e-2, "f16": 1e-3, "f32": 1e-5}[format])
    assert (out[tokens] == UNTOUCHED).all()
    ops.copy_pages(kv, np.array([2], np.int32), np.array([3], np.int32))
    assert torch.equal(kv.k[3], kv.k[2])


def columns(rows: int, **values: Any) -> SampleColumns:
    """Columns that change nothing, but for `values`."""
    neutral: dict[str, Any] = {
        "temperature": np.ones(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "repetition": np.ones(rows, np.float32),
        "presence": np.zeros(rows, np.float32),
        "frequency": np.zeros(rows, np.float32),
        "seed": np.arange(rows, dtype=np.uint64),
        "position": np.full(rows, 5, np.int64),
        "history": np.zeros(rows, np.int64),
        "history_prompt": np.zeros(rows, np.int32),
        "history_length": np.zeros(rows, np.int32),
        "bias_start": np.zeros(rows + 1, np.int32),
        "bias_token": np.zeros(1, np.int32),
        "bias_value": np.zeros(1, np.float32),
        "mask": None,
    }
    return SampleColumns(**(neutral | values))


def sampled(ops: PlainOps, logits: np.ndarray, c: SampleColumns) -> list[int]:
    out = torch.full((len(logits),), -9, dtype=torch.int32)
    ops.sample(ops.constant(logits), c, out=out, count=count(len(logits)))
    return out.tolist()


def test_each_row_samples_by_its_own_columns(ops: PlainOps) -> None:
    logits = floats(4, 40)
    history = np.array([3, 3, 8], np.int32)
    c = columns(
        4,
        temperature=np.array([0, 1, 0, 0], np.float32),
        frequency=np.array([0, 0, 100, 0], np.float32),
        history=np.full(4, history.ctypes.data),
        history_length=np.array([0, 0, 3, 0], np.int32),
        bias_start=np.array([0, 0, 0, 1, 3], np.int32),
        bias_token=np.array([3, 7, 7], np.int32),
        bias_value=np.array([150, 50, 50], np.float32),
    )
    logits[2, [8, 20]] = 60, 50
    got = sampled(ops, logits, c)
    assert got[0] == logits[0].argmax()
    assert got[1] == reference.sample(torch.tensor(logits[1]), seed=1, position=5)
    assert got[2] == 20  # 8 was seen once (-100), 3 is raised by 150 and lowered by 200
    assert got[3] == 7  # two entries of one token add up


def test_mask_bits(ops: PlainOps) -> None:
    logits = floats(2, 70)
    allowed = np.zeros((2, 70), np.bool_)
    allowed[0, [0, 33, 69]] = True
    bits = np.zeros((2, 96), np.bool_)
    bits[:, :70] = allowed
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    got = sampled(ops, logits, columns(2, temperature=np.zeros(2, np.float32), mask=mask))
    assert got == [max((0, 33, 69), key=lambda i: logits[0, i]), -1]


def test_a_bad_row_does_not_touch_its_neighbours(ops: PlainOps) -> None:
    logits = floats(3, 40)
    alone = sampled(ops, logits, columns(3))
    logits[1, 4] = np.nan
    assert sampled(ops, logits, columns(3)) == [alone[0], -1, alone[2]]


def test_logprobs_into_wider_buffers(ops: PlainOps) -> None:
    logits = floats(3, 50)
    value, rank = buffer(3), torch.zeros(3, dtype=torch.int32)
    ids, top = torch.full((3, 5), -9, dtype=torch.int32), buffer(3, 5)
    ops.logprobs(
        ops.constant(logits), np.array([1, 2, 3], np.int32), top=2, out_logprob=value, out_rank=rank, out_ids=ids,
        out_top=top, count=count(2),
    )  # fmt: skip
    exact = torch.tensor(logits).double().log_softmax(-1)
    assert close(value[:2], exact[[0, 1], [1, 2]])
    assert close(top[:2, :2], exact[:2].topk(2).values)
    assert ids[:2, :2].tolist() == exact[:2].topk(2).indices.tolist()
    assert (ids[:, 2:] == -9).all()
    assert (ids[2] == -9).all()
    assert value[2] == UNTOUCHED
