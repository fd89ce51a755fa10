"""latent_store and latent_attention: both forms against plain numpy, plain and C++ against the reference, and the same in any company."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, error, floats
from tradewind.kernels import reference_mla
from tradewind.kernels.ops import KVLayer, LatentUp, PagedRows
from tradewind.kernels.plain import PlainOps
from tradewind.kernels.table import OPS

SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "few heads": (3, 48, 16, 24, 32),
    "one head": (1, 16, 16, 8, 16),
    "as deepseek_v2_lite": (16, 512, 64, 128, 128),
    "many heads": (80, 64, 32, 40, 48),
}
"""Name -> heads, numbers of a latent, rotated dims, other dims of a query, dims of a value."""

MIXED = [(1, 1), (1, 17), (7, 7), (1, 300), (33, 290), (1, 513), (200, 200), (3, 600), (20, 20)]
"""(new tokens, length) of each row; some are computed in one form, some in the other."""


@dataclass(frozen=True)
class Case:
    """Rows over random pages, and what the pages hold of each row as float64."""

    q: Any
    kv: KVLayer
    rows: PagedRows
    k_up: Any
    v_up: Any
    latents: list[Any]

    @property
    def scale(self) -> float:
        return float(self.q.shape[1] // len(self.k_up)) ** -0.5


def make(
    ops: Any,
    shapes: list[tuple[int, int]],
    *,
    size: tuple[int, int, int, int, int] = SIZES["few heads"],
    page_tokens: int = 16,
    format: str = "f32",
    seed: int = 0,
    exact_up: bool = True,
) -> Case:
    rng = np.random.default_rng(seed)
    heads, rank, rope, nope, value = size
    pages = [-(-length // page_tokens) for _, length in shapes]
    kv = ops.latent_layer(pages=sum(pages) + 1, page_tokens=page_tokens, width=rank + rope, format=format)
    held = np.full(kv.k.shape, np.nan, np.float32)  # whoever reads what was not written is seen
    free = iter(rng.permutation(np.arange(1, sum(pages) + 1)))
    table = np.zeros((len(shapes), max(pages) + 1), np.int32)
    latents = []
    for row, (_, length) in enumerate(shapes):
        table[row, : pages[row]] = [next(free) for _ in range(pages[row])]
        values = torch.from_numpy(floats(rng, length, rank + rope))
        values = values.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[format]).float().numpy()
        position = np.arange(length)
        held[table[row, position // page_tokens], position % page_tokens] = values
        latents.append(values.astype(np.float64))
    if isinstance(kv.k, torch.Tensor):
        kv.k.copy_(torch.from_numpy(held))
    elif format == "bf16":
        kv.k[:] = held.view(np.uint32) >> 16
    else:
        kv.k[:] = held
    starts = np.concatenate([[0], np.cumsum([n for n, _ in shapes])]).astype(np.int32)
    rows = PagedRows(
        query_start=starts,
        lengths=np.array([length for _, length in shapes], np.int32),
        page_table=table,
        rows=count(len(shapes)),
    )
    k_up, v_up = floats(rng, heads, nope, rank, scale=rank**-0.5), floats(rng, heads, value, rank, scale=rank**-0.5)
    if not exact_up:  # what a checkpoint in bf16 holds
        k_up, v_up = ((x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for x in (k_up, v_up))
    return Case(floats(rng, int(starts[-1]), heads * (nope + rope)), kv, rows, k_up, v_up, latents)


def oracle(case: Case) -> Any:
    """Keys and values made one by one, in float64."""
    k_up, v_up = case.k_up.astype(np.float64), case.v_up.astype(np.float64)
    heads, _, rank = k_up.shape
    q = case.q.astype(np.float64).reshape(len(case.q), heads, -1)
    out = np.zeros((len(q), heads, v_up.shape[1]))
    for row, latents in enumerate(case.latents):
        begin, end = case.rows.query_start[row : row + 2]
        for head in range(heads):
            keys = np.concatenate([latents[:, :rank] @ k_up[head].T, latents[:, rank:]], 1)
            values = latents[:, :rank] @ v_up[head].T
            scores = q[begin:end, head] @ keys.T * case.scale
            n, length = scores.shape
            scores[np.arange(length) > length - n + np.arange(n)[:, None]] = -np.inf
            p = np.exp(scores - scores.max(1, keepdims=True))
            out[begin:end, head] = p @ values / p.sum(1, keepdims=True)
    return out.reshape(len(q), -1)


def run(ops: Any, case: Case, up: LatentUp | None = None) -> Any:
    up = up or ops.pack_latent(case.k_up, case.v_up)
    out = np.full((len(case.q), up.heads * up.value), np.nan, np.float32)
    ops.latent_attention(case.q, case.kv, case.rows, up, scale=case.scale, out=out)
    return out


def cheaper(case: Case) -> list[bool]:
    _, nope, rank = case.k_up.shape
    value, rope = case.v_up.shape[1], case.kv.head_dim - rank
    return [
        reference_mla.naive_is_cheaper(int(n), int(length), rank=rank, rope=rope, nope=nope, value=value)
        for n, length in zip(np.diff(case.rows.query_start), case.rows.lengths, strict=True)
    ]


def test_both_forms_are_one_sum() -> None:
    rng = np.random.default_rng(0)
    for n, length in ((1, 1), (1, 40), (12, 40), (40, 40)):
        q, latents, k_up, v_up = (
            torch.from_numpy(floats(rng, *shape)).double()
            for shape in ((n, 3, 40), (length, 64), (3, 24, 48), (3, 32, 48))
        )
        naive = reference_mla.naive(q, latents, k_up, v_up, scale=0.1)
        assert error(reference_mla.absorbed(q, latents, k_up, v_up, scale=0.1), naive) < 1e-13
        assert naive.shape == (n, 3, 32)


def test_the_cheaper_form() -> None:
    """Counted by hand: one token makes no keys, a whole prompt does, and a piece of a long one from some length on."""
    lite = {"rank": 512, "rope": 64, "nope": 128, "value": 128}
    assert not reference_mla.naive_is_cheaper(1, 2, **lite)
    assert not reference_mla.naive_is_cheaper(1, 100_000, **lite)
    assert reference_mla.naive_is_cheaper(500, 500, **lite)
    first = next(n for n in range(1, 1000) if reference_mla.naive_is_cheaper(n, 100_000, **lite))
    for n in (first - 1, first):
        pairs = sum(100_000 - n + i + 1 for i in range(n))
        naive, absorbed = 100_000 * 512 * 256 + pairs * 320, n * 512 * 256 + pairs * 1088
        assert (naive < absorbed) == (n == first)
    # Small latents, large heads: keys are never worth making.
    assert not reference_mla.naive_is_cheaper(500, 500, rank=16, rope=16, nope=64, value=64)


@pytest.mark.parametrize("name", [name for name in SIZES if name != "as deepseek_v2_lite"])
def test_reference_and_plain(name: str) -> None:
    ops = PlainOps()
    case = make(ops, MIXED, size=SIZES[name])
    assert set(cheaper(case)) == {False, True} or name == "one head"
    assert error(run(ops, case), oracle(case)) < 1e-6


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_mixed_rows(isa: int, threads: int) -> None:
    with cpu_ops(threads=threads, isa=isa) as ops:
        for format in ("f32", "f16", "bf16"):
            case = make(ops, MIXED, format=format, seed=threads, exact_up=format != "bf16")
            assert error(run(ops, case), oracle(case)) < OPS["latent_attention"].tolerance / 4


@pytest.mark.parametrize("page_tokens", [16, 48, 256])
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, page_tokens: int) -> None:
    with cpu_ops() as ops:
        shapes = [(1, 70), (70, 70), (9, 300)] if name == "as deepseek_v2_lite" else MIXED
        case = make(ops, shapes, size=SIZES[name], page_tokens=page_tokens)
        assert error(run(ops, case), oracle(case)) < 1e-6


def test_what_makes_keys_is_kept_in_bf16_only_where_that_is_exact() -> None:
    with cpu_ops() as ops:
        exact, rounded = make(ops, [(1, 9)]), make(ops, [(1, 9)], exact_up=False)
        kept = [ops.pack_latent(case.k_up, case.v_up) for case in (exact, rounded)]
        assert kept[0].nbytes == 2 * kept[1].nbytes == exact.k_up.nbytes + exact.v_up.nbytes


def test_a_result_is_the_same_in_any_company() -> None:
    """Bit for bit: alone, with neighbours, with any number of threads; and absorbed rows in pieces of any length."""
    shapes = [(1, 300), (1, 513), (4, 700), (1, 40), (90, 90), (2, 2000)]
    with cpu_ops(threads=1) as ops:
        case = make(ops, shapes)
        wanted = run(ops, case)
        for row, (n, length) in enumerate(shapes):
            begin = int(case.rows.query_start[row])
            for pieces in ([n],) if cheaper(case)[row] else ([n], [1] * n):
                done = 0
                for piece in pieces:
                    alone = replace(
                        case,
                        q=np.ascontiguousarray(case.q[begin + done : begin + done + piece]),
                        rows=PagedRows(
                            query_start=np.array([0, piece], np.int32),
                            lengths=np.array([length - n + done + piece], np.int32),
                            page_table=np.ascontiguousarray(case.rows.page_table[row : row + 1]),
                            rows=count(1),
                        ),
                    )
                    assert np.array_equal(run(ops, alone), wanted[begin + done : begin + done + piece]), (row, pieces)
                    done += piece
    for threads in (2, 5):
        with cpu_ops(threads=threads) as ops:
            assert np.array_equal(run(ops, case), wanted)


def test_no_rows() -> None:
    with cpu_ops() as ops:
        case = make(ops, [(1, 5)])
        empty = replace(case, rows=replace(case.rows, rows=count(0)))
        assert np.isnan(run(ops, empty)).all()


@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("isa", [*LEVELS, None])
def test_latent_store(isa: int | None, format: str) -> None:
    """q turned in place and latents in their slots, others untouched; isa None is plain."""
    heads, rank, rope, nope, live = 3, 48, 16, 24, 5
    rng = np.random.default_rng(7)
    q, latent = floats(rng, 7, heads * (nope + rope)), floats(rng, 7, rank + rope)
    angles = np.concatenate([np.cos(a := floats(rng, 7, rope // 2)), np.sin(a)], 1)
    weight, slots = floats(rng, rank), np.array([17, 3, 40, 18, 63, 0, 0], np.int32)

    def check(ops: Any) -> None:
        kv = ops.latent_layer(pages=4, page_tokens=16, width=rank + rope, format=format)
        mine = q.copy()
        ops.latent_store(mine, latent, angles, slots, kv, heads=heads, weight=weight, eps=1e-6, count=count(live))
        given = [torch.from_numpy(each[:live]) for each in (q, latent, angles, slots)]
        pages = torch.zeros(4, 16, rank + rope)
        turned, stored = reference_mla.latent_store(
            *given, pages, heads=heads, weight=torch.from_numpy(weight), eps=1e-6
        )
        assert error(mine[:live], turned) < OPS["latent_store"].tolerance / 10
        assert np.array_equal(mine[live:], q[live:])
        held = ops.host(kv.k).astype(np.float64)
        assert error(held, stored) < {"f32": 1e-6, "f16": 5e-4, "bf16": 4e-3}[format]
        assert (held != 0).any(-1).sum() == live

    if isa is None:
        check(PlainOps())
    else:
        with cpu_ops(isa=isa) as ops:
            check(ops)


def test_pairs_are_turned_as_complex_numbers() -> None:
    rng = np.random.default_rng(1)
    x, angle = floats(rng, 6, 2, 10), floats(rng, 6, 5)
    angles = torch.from_numpy(np.concatenate([np.cos(angle), np.sin(angle)], 1))
    turned = reference_mla.rotate_pairs(torch.from_numpy(x), angles).numpy()
    wanted = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
    assert error(turned[..., 0::2], wanted.real) < 1e-6
    assert error(turned[..., 1::2], wanted.imag) < 1e-6


def test_pages_of_latents_are_copied() -> None:
    """Copy-on-write moves the one tensor that there is."""
    with cpu_ops() as cpu:
        for ops in (PlainOps(), cpu):
            case = make(ops, [(1, 40), (1, 9)])
            source, target = (case.rows.page_table[row, :1] for row in (0, 1))
            before = ops.host(case.kv.k).copy()
            ops.copy_pages(case.kv, source, target)
            before[target[0]] = before[source[0]]
            assert np.array_equal(ops.host(case.kv.k), before, equal_nan=True)
