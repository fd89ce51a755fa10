"""Paged attention of the CPU library against float64 numpy, and its promise: a token's result is the same in any company, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, error, floats
from tradewind.kernels.cpu.ops import CpuOps
from tradewind.kernels.ops import KVLayer, PagedRows


@dataclass
class Case:
    """Rows of (new tokens, length) over random pages; `keys` and `values` are what the pages hold, by row."""

    heads: int
    kv: KVLayer
    rows: PagedRows
    q: Any
    keys: list[Any]
    values: list[Any]


def bf16(x: Any) -> Any:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def put(kv: KVLayer, slots: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Writes k and v [n, G, D] at token slots; returns what the pages then hold as float64."""
    page, at = slots // kv.page_tokens, slots % kv.page_tokens
    if kv.format == "bf16":
        k, v = bf16(k), bf16(v)
    kv.k[page, :, at // 16, :, at % 16] = k.astype(kv.k.dtype)
    kv.v[page, :, at, :] = v.astype(kv.v.dtype)

    def back(x: Any) -> Any:
        x = x.astype(kv.k.dtype)
        return ((x.astype(np.uint32) << 16).view(np.float32) if kv.format == "bf16" else x).astype(np.float64)

    return back(k), back(v)


def make(
    ops: CpuOps,
    rng: np.random.Generator,
    shapes: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    page_tokens: int = 16,
    format: str = "f32",
    shared: int = 0,
) -> Case:
    """shapes: (new tokens, length) of each row. shared: so many leading tokens lie in the same pages for all rows."""
    pages = [-(-length // page_tokens) for _, length in shapes]
    total = sum(pages) + 1
    kv = ops.kv_layer(pages=total, page_tokens=page_tokens, kv_heads=kv_heads, head_dim=dim, format=format)
    # Unwritten keys hold large garbage: whoever reads them is seen.
    kv.k[:] = 0x4700 if format == "bf16" else 30000
    kv.v[:] = 0x4700 if format == "bf16" else 30000
    free = iter(rng.permutation(np.arange(1, total)))
    table = np.zeros((len(shapes), max(pages) + 1), np.int32)
    for row in range(len(shapes)):
        table[row, : pages[row]] = [next(free) for _ in range(pages[row])]
        table[row, : shared // page_tokens] = table[0, : shared // page_tokens]
    keys, values = [], []
    for row, (_, length) in enumerate(shapes):
        k, v = floats(rng, length, kv_heads, dim), floats(rng, length, kv_heads, dim)
        if row:
            k[:shared], v[:shared] = keys[0][:shared], values[0][:shared]
        slots = table[row, np.arange(length) // page_tokens] * page_tokens + np.arange(length) % page_tokens
        k, v = put(kv, slots, k, v)
        keys.append(k)
        values.append(v)
    starts = np.concatenate([[0], np.cumsum([n for n, _ in shapes])]).astype(np.int32)
    rows = PagedRows(
        query_start=starts,
        lengths=np.array([length for _, length in shapes], np.int32),
        page_table=table,
        rows=count(len(shapes)),
    )
    return Case(heads, kv, rows, floats(rng, int(starts[-1]), heads * dim), keys, values)


def oracle(
    case: Case,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Any = None,
) -> Any:
    out = np.zeros(case.q.shape)
    dim, group = case.kv.head_dim, case.heads // case.kv.kv_heads
    for row, length in enumerate(case.rows.lengths):
        begin, end = case.rows.query_start[row : row + 2]
        for token in range(begin, end):
            position = length - (end - begin) + token - begin
            first = first_seen(position, window, chunked=chunked)
            for head in range(case.heads):
                q = case.q[token, head * dim : (head + 1) * dim].astype(np.float64)
                s = case.keys[row][first : position + 1, head // group] @ q * scale
                if softcap:
                    s = softcap * np.tanh(s / softcap)
                peak = max(s.max(), -np.inf if sinks is None else sinks[head])
                p = np.exp(s - peak)
                total = p.sum() + (0 if sinks is None else np.exp(sinks[head] - peak))
                out[token, head * dim : (head + 1) * dim] = (
                    p @ case.values[row][first : position + 1, head // group] / total
                )
    return out


def first_seen(position: int, window: int | None, *, chunked: bool) -> int:
    if window is None:
        return 0
    return position // window * window if chunked else max(0, position - window + 1)


def run(ops: CpuOps, case: Case, **options: Any) -> Any:
    out = np.full_like(case.q, np.nan)
    given = {"scale": case.kv.head_dim**-0.5, "window": None, "softcap": None, "sinks": None} | options
    ops.attention(case.q, case.kv, case.rows, heads=case.heads, out=out, **given)
    return out


MIXED = [(1, 1), (1, 17), (7, 7), (1, 300), (33, 290), (1, 513), (20, 20)]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_mixed_rows(isa: int, threads: int) -> None:
    rng = np.random.default_rng(threads)
    with cpu_ops(threads=threads, isa=isa) as ops:
        for format, limit in (("f32", 1e-6), ("f16", 1e-6), ("bf16", 1e-6)):  # against what the pages hold
            case = make(ops, rng, MIXED, heads=9, kv_heads=3, dim=64, format=format)
            assert error(run(ops, case), oracle(case, scale=0.125)) < limit


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_tokens"),
    [
        (1, 1, 32, 16),
        (4, 4, 48, 32),
        (8, 2, 80, 16),
        (7, 1, 96, 48),
        (16, 1, 112, 64),
        (5, 5, 128, 16),
        (4, 1, 256, 256),
        (71, 1, 16, 16),
    ],
)
def test_shapes(isa: int, heads: int, kv_heads: int, dim: int, page_tokens: int) -> None:
    rng = np.random.default_rng(dim)
    with cpu_ops(isa=isa) as ops:
        for format in ("f32", "f16"):
            case = make(
                ops,
                rng,
                [(1, 270), (5, 9), (1, 40), (18, 275)],
                heads=heads,
                kv_heads=kv_heads,
                dim=dim,
                page_tokens=page_tokens,
                format=format,
            )
            assert error(run(ops, case), oracle(case, scale=dim**-0.5)) < 1e-6


@pytest.mark.parametrize("isa", LEVELS)
def test_window_softcap_sinks(isa: int) -> None:
    rng = np.random.default_rng(5)
    sinks = floats(rng, 6)
    with cpu_ops(isa=isa) as ops:
        for window in (None, 1, 5, 16, 100, 257, 1000):
            for softcap in (None, 2.0):
                for given in (None, sinks):
                    case = make(
                        ops, rng, [(1, 1), (3, 300), (1, 530), (40, 60)], heads=6, kv_heads=2, dim=32, format="f16"
                    )
                    options: dict[str, Any] = {"scale": 0.4, "window": window, "softcap": softcap, "sinks": given}
                    expected = oracle(case, **options)
                    if window is not None:
                        # Pages that no token of the step sees any more were dropped.
                        for row, length in enumerate(case.rows.lengths):
                            new = case.rows.query_start[row + 1] - case.rows.query_start[row]
                            case.rows.page_table[row, : max(0, length - new - window + 1) // 16] = 0
                        case.kv.k[0] = np.nan
                        case.kv.v[0] = np.nan
                    assert error(run(ops, case, **options), expected) < 2e-6, (window, softcap)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("threads", [1, 3])
def test_windows_that_restart(isa: int, threads: int) -> None:
    """Chunks that end within a page, a part of 256 keys, a tile of queries, or never; the pages of older chunks are gone."""
    rng = np.random.default_rng(11)
    sinks = floats(rng, 6)
    shapes = [(1, 1), (3, 300), (1, 530), (40, 60), (1, 257), (100, 512), (1, 512), (1, 513)]
    with cpu_ops(threads=threads, isa=isa) as ops:
        for window in (1, 5, 16, 24, 100, 256, 257, 1000):
            for given in (None, sinks):
                case = make(ops, rng, shapes, heads=6, kv_heads=2, dim=32, format="f16")
                options: dict[str, Any] = {"scale": 0.4, "window": window, "chunked": True, "sinks": given}
                expected = oracle(case, **options)
                for row, length in enumerate(case.rows.lengths):
                    new = case.rows.query_start[row + 1] - case.rows.query_start[row]
                    case.rows.page_table[row, : first_seen(int(length - new), window, chunked=True) // 16] = 0
                case.kv.k[0] = np.nan
                case.kv.v[0] = np.nan
                assert error(run(ops, case, **options), expected) < 2e-6, window


@pytest.mark.parametrize("isa", LEVELS)
def test_restarting_windows_agree_bit_for_bit(isa: int) -> None:
    """Token by token, in pieces or all at once."""
    length, window = 300, 70
    with cpu_ops(threads=2, isa=isa) as ops:
        case = make(ops, np.random.default_rng(12), [(length, length)], heads=6, kv_heads=2, dim=32)
        whole = run(ops, case, window=window, chunked=True)
        for piece in (1, 7, 64):
            for begin in range(0, length, piece):
                end = min(length, begin + piece)
                rows = PagedRows(
                    query_start=np.array([0, end - begin], np.int32),
                    lengths=np.array([end], np.int32),
                    page_table=case.rows.page_table[:1].copy(),
                    rows=count(1),
                )
                part = Case(case.heads, case.kv, rows, case.q[begin:end].copy(), [], [])
                got = run(ops, part, window=window, chunked=True)
                assert got.tobytes() == whole[begin:end].tobytes(), (piece, begin)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
def test_decode_chunk_and_prompt_agree_bit_for_bit(isa: int, format: str) -> None:
    """Token by token, in chunks of any size or all at once; alone or in a batch; on any number of threads."""
    rng = np.random.default_rng(6)
    length = 600
    with cpu_ops(threads=2, isa=isa) as ops:
        case = make(ops, rng, [(length, length), (1, 200), (1, 5)], heads=6, kv_heads=2, dim=32, format=format)
        whole = run(ops, case)[:length]
        for threads in (1, 2, 3):
            with cpu_ops(threads=threads, isa=isa) as other:
                for chunk in (1, 7, 64, 599):
                    begins = range(0, length, chunk) if chunk > 1 else [0, 1, 15, 16, 255, 256, 257, 511, 512, 598, 599]
                    for begin in begins:
                        end = min(length, begin + chunk)
                        rows = PagedRows(
                            query_start=np.array([0, end - begin], np.int32),
                            lengths=np.array([end], np.int32),
                            page_table=case.rows.page_table[:1].copy(),
                            rows=count(1),
                        )
                        part = Case(case.heads, case.kv, rows, case.q[begin:end].copy(), [], [])
                        assert run(other, part).tobytes() == whole[begin:end].tobytes(), (threads, chunk, begin)


@pytest.mark.parametrize("isa", LEVELS)
def test_rows_that_share_pages(isa: int) -> None:
    """Rows with a common prefix are computed together, and get what each gets alone."""
    rng = np.random.default_rng(7)
    shapes = [(1, 512 + 3 * i) for i in range(1, 17)]
    results = []
    for threads in (1, 2, 3):
        with cpu_ops(threads=threads, isa=isa) as ops:
            case = make(ops, np.random.default_rng(8), shapes, heads=9, kv_heads=3, dim=64, format="f16", shared=512)
            together = run(ops, case)
            results.append(together.tobytes())
            if threads == 1:
                assert error(together, oracle(case, scale=0.125)) < 1e-6
            order = rng.permutation(16)
            for picked in (order, order[:1], order[:5], order[6:8]):
                rows = PagedRows(
                    query_start=np.arange(len(picked) + 1, dtype=np.int32),
                    lengths=case.rows.lengths[picked].copy(),
                    page_table=case.rows.page_table[picked].copy(),
                    rows=count(len(picked)),
                )
                some = run(ops, Case(9, case.kv, rows, case.q[picked].copy(), [], []))
                assert some.tobytes() == together[picked].tobytes()
    assert results[0] == results[1] == results[2]


def test_long_row_alone_is_spread_over_threads() -> None:
    results = []
    for threads in (1, 2, 3):
        with cpu_ops(threads=threads) as ops:
            case = make(
                ops, np.random.default_rng(9), [(1, 3000)], heads=4, kv_heads=2, dim=64, format="f16", page_tokens=64
            )
            results.append(run(ops, case, sinks=np.array([0.5, 1, -1, 3], np.float32)))
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
    assert error(results[0], oracle(case, scale=0.125, sinks=[0.5, 1, -1, 3])) < 1e-6


def test_nan_stays_in_its_row_and_counts_follow() -> None:
    rng = np.random.default_rng(10)
    with cpu_ops() as ops:
        case = make(ops, rng, [(1, 40), (1, 300), (2, 20)], heads=4, kv_heads=2, dim=32)
        clean = run(ops, case)
        case.q[1] = np.nan
        spoiled = run(ops, case)
        assert np.isnan(spoiled[1]).all()
        assert spoiled[[0, 2, 3]].tobytes() == clean[[0, 2, 3]].tobytes()
        case.rows.rows[0] = 1
        fewer = run(ops, case)
        assert fewer[0].tobytes() == clean[0].tobytes()
        assert np.isnan(fewer[1:]).all()  # left alone
        case.rows.rows[0] = 0
        assert np.isnan(run(ops, case)).all()
