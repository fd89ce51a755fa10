"""The ops that encoders add (add_layer_norm, gelu, attention that is not causal): reference, plain and C++ against torch and numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, error, floats
from tests.kernels.test_cpu_attention import make, run
from tests.kernels.test_reference import DIM, HEADS, KV_HEADS, paged_case
from tradewind.kernels import reference
from tradewind.kernels.ops import PagedRows
from tradewind.kernels.plain import PlainOps
from tradewind.kernels.table import OPS


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight + bias


def gelu(x: Any) -> Any:
    x = x.astype(np.float64)
    return x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2))


def test_reference_is_torchs() -> None:
    x, delta = torch.randn(5, 33, dtype=torch.float64), torch.randn(5, 33, dtype=torch.float64)
    weight, bias = torch.randn(33, dtype=torch.float64), torch.randn(33, dtype=torch.float64)
    added, normed = reference.add_layer_norm(x, delta, weight, bias, eps=1e-12)
    torch.testing.assert_close(added, x + delta)
    torch.testing.assert_close(normed, F.layer_norm(x + delta, (33,), weight, bias, 1e-12))
    torch.testing.assert_close(
        reference.add_layer_norm(x, None, weight, bias, eps=0.5)[1], F.layer_norm(x, (33,), weight, bias, 0.5)
    )
    torch.testing.assert_close(reference.gelu(9 * x), F.gelu(9 * x))


def test_reference_attention_to_all_is_torchs() -> None:
    lengths = [1, 20, 33, 16]
    q, k, v, start, length, table = paged_case(lengths, lengths)
    out = reference.attention(q, k, v, start, length, table, heads=HEADS, scale=0.3, causal=False)
    for row, n in enumerate(lengths):
        keys, values = (pages[table[row].long()].flatten(0, 1)[:n].transpose(0, 1) for pages in (k, v))
        query = q[start[row] : start[row + 1]].reshape(n, HEADS, DIM).transpose(0, 1)
        wanted = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], scale=0.3, enable_gqa=HEADS != KV_HEADS
        )[0]
        torch.testing.assert_close(out[start[row] : start[row + 1]].reshape(n, HEADS, DIM).transpose(0, 1), wanted)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("columns", [1, 15, 16, 48, 97, 384, 768])
def test_add_layer_norm_matches(isa: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    for threads, rows, live in ((1, 1, 1), (2, 5, 3), (3, 7, 7)):
        with cpu_ops(threads=threads, isa=isa) as ops:
            # A mean far from 0: the difference of sums of squares would lose the variance.
            x, delta = floats(rng, rows, columns) + 100, floats(rng, rows, columns)
            weight, bias = floats(rng, columns), floats(rng, columns)
            out, new_x = np.full_like(x, 7), x.copy()
            ops.add_layer_norm(new_x, delta, weight, bias, eps=1e-5, out=out, count=count(live))
            assert (new_x[:live] == (x + delta)[:live]).all()
            assert (new_x[live:] == x[live:]).all()
            assert (out[live:] == 7).all()
            assert error(out[:live], layer_norm(new_x[:live], weight, bias, 1e-5)) < OPS["add_layer_norm"].tolerance
            # over x, as a post-norm stream; over delta; without delta
            stream = x.copy()
            ops.add_layer_norm(stream, delta, weight, bias, eps=1e-5, out=stream, count=count(live))
            assert (stream[:live] == out[:live]).all()
            assert (stream[live:] == x[live:]).all()
            over = delta.copy()
            ops.add_layer_norm(x.copy(), over, weight, bias, eps=1e-5, out=over, count=count(live))
            assert (over[:live] == out[:live]).all()
            plain = new_x.copy()
            ops.add_layer_norm(plain, None, weight, bias, eps=1e-5, out=plain, count=count(live))
            assert (plain[:live] == out[:live]).all()


@pytest.mark.parametrize("isa", LEVELS)
def test_gelu_matches_over_the_whole_range(isa: int) -> None:
    x = np.concatenate(
        [np.linspace(-12, 12, 6001), np.geomspace(1e-6, 1e3, 995), [0.0, np.inf, -np.inf, np.nan]]
    ).astype(np.float32)
    x = x.reshape(4, -1)
    with cpu_ops(isa=isa) as ops:
        out = x.copy()
        ops.gelu(out, count=count(3))
        expected = gelu(x[:3])
        assert error(out[:3], expected) < 3e-7
        assert np.abs(out[:3] - expected).max() < 1e-6
        assert out[3:].tobytes() == x[3:].tobytes()
        ops.gelu(out, count=count(4))
        assert out[3, -3:-1].tolist() == [np.inf, 0]
        assert np.isnan(out[3, -1])


def all_to_all(case: Any, *, scale: float, softcap: float | None = None) -> Any:
    """What every token of a row gets from all keys of the row, in float64."""
    out = np.zeros(case.q.shape)
    dim, group = case.kv.head_dim, case.heads // case.kv.kv_heads
    for row in range(len(case.rows.lengths)):
        begin, end = case.rows.query_start[row : row + 2]
        for head in range(case.heads):
            at = slice(head * dim, (head + 1) * dim)
            s = case.q[begin:end, at].astype(np.float64) @ case.keys[row][:, head // group].T * scale
            s = s if softcap is None else softcap * np.tanh(s / softcap)
            p = np.exp(s - s.max(-1, keepdims=True))
            out[begin:end, at] = p @ case.values[row][:, head // group] / p.sum(-1, keepdims=True)
    return out


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_attention_to_all(isa: int, threads: int) -> None:
    """Whole texts of every size, and rows whose last tokens alone ask; also spread over threads by parts."""
    rng = np.random.default_rng(threads)
    shapes = [(1, 1), (7, 7), (17, 17), (300, 300), (2, 40), (1, 530), (513, 513)]
    with cpu_ops(threads=threads, isa=isa) as ops:
        for format, heads, kv_heads, dim in (("f32", 12, 12, 32), ("f16", 6, 2, 64), ("bf16", 4, 1, 16)):
            case = make(ops, rng, shapes, heads=heads, kv_heads=kv_heads, dim=dim, format=format)
            for softcap in (None, 2.0):
                got = run(ops, case, scale=0.2, softcap=softcap, causal=False)
                assert error(got, all_to_all(case, scale=0.2, softcap=softcap)) < 1e-6
        alone = make(ops, rng, [(3, 700)], heads=4, kv_heads=4, dim=32)
        assert error(run(ops, alone, scale=0.2, causal=False), all_to_all(alone, scale=0.2)) < 1e-6
        with pytest.raises(AssertionError, match="window"):
            run(ops, alone, window=5, causal=False)


def test_a_text_does_not_know_its_neighbours() -> None:
    results = []
    for threads in (1, 2, 3):
        with cpu_ops(threads=threads) as ops:
            case = make(ops, np.random.default_rng(3), [(40, 40), (9, 9), (300, 300)], heads=4, kv_heads=4, dim=32)
            together = run(ops, case, causal=False)
            results.append(together.tobytes())
            for row in range(3):
                begin, end = case.rows.query_start[row : row + 2]
                rows = PagedRows(
                    query_start=np.array([0, end - begin], np.int32),
                    lengths=case.rows.lengths[row : row + 1].copy(),
                    page_table=case.rows.page_table[row : row + 1].copy(),
                    rows=count(1),
                )
                case_alone = type(case)(4, case.kv, rows, case.q[begin:end].copy(), [], [])
                assert run(ops, case_alone, causal=False).tobytes() == together[begin:end].tobytes()
    assert results[0] == results[1] == results[2]


def test_plain_ops_do_the_same() -> None:
    torch.set_num_threads(1)
    ops, rng = PlainOps(), np.random.default_rng(4)
    x, delta, weight, bias = floats(rng, 5, 48), floats(rng, 5, 48), floats(rng, 48), floats(rng, 48)
    stream = x.copy()
    ops.add_layer_norm(stream, delta, weight, bias, eps=1e-12, out=stream, count=count(3))
    assert error(stream[:3], layer_norm((x + delta)[:3], weight, bias, 1e-12)) < 1e-6
    assert (stream[3:] == x[3:]).all()
    ops.gelu(stream, count=count(4))
    assert error(stream[3], gelu(x[3])) < 1e-6
    assert (stream[4] == x[4]).all()
    kv = ops.kv_layer(pages=3, page_tokens=16, kv_heads=2, head_dim=16, format="f32")
    kv.k.normal_(), kv.v.normal_()
    rows = PagedRows(
        query_start=np.array([0, 20, 23], np.int32), lengths=np.array([20, 3], np.int32),
        page_table=np.array([[2, 1], [1, 0]], np.int32), rows=count(2),
    )  # fmt: skip
    q, out = floats(rng, 23, 64), np.zeros((23, 64), np.float32)
    ops.attention(q, kv, rows, heads=4, scale=0.25, window=None, softcap=None, sinks=None, out=out, causal=False)
    wanted = reference.attention(
        torch.tensor(q).double(), kv.k.double(), kv.v.double(),
        *(torch.tensor(a) for a in (rows.query_start, rows.lengths, rows.page_table)),
        heads=4, scale=0.25, causal=False,
    )  # fmt: skip
    assert error(out, wanted) < 1e-6
