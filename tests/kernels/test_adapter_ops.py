"""add_low_rank and glue: plain and C++ against the reference, many adapters in one step, and the same in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, error, floats
from tradewind.kernels import reference, reference_lora
from tradewind.kernels.plain import PlainOps
from tradewind.kernels.table import OPS

SLOTS, RANK, K = 5, 20, 40
SIZES = (610, 16, 33)
"""Outputs of three matrices that are multiplied together."""
WIDTH = sum(SIZES)
Changes = list[list[tuple[Any, Any]]]


def adapters_of(rng: np.random.Generator) -> Changes:
    """A and B of each slot's parts, of different ranks; one is of the largest, and some change nothing."""
    ranks = [(1, 8, 0), (8, 0, 3), (RANK, RANK, RANK), (0, 0, 0), (3, 16, 17)]
    return [[(floats(rng, r, K), floats(rng, n, r)) for r, n in zip(each, SIZES, strict=True)] for each in ranks]


def filled(ops: Any, adapters: Changes, *, exact: bool = True) -> Any:
    bank = ops.low_rank_bank(slots=SLOTS, rank=RANK, sizes=SIZES, k=K, exact=exact)
    for slot, parts in enumerate(adapters):
        for part, (a, b) in enumerate(parts):
            before = np.random.default_rng(0)
            ops.set_low_rank(bank, slot, part, floats(before, RANK, K), floats(before, SIZES[part], RANK))
            ops.set_low_rank(bank, slot, part, a, b)  # nothing of who was here before is left
    return bank


def wanted(x: Any, out: Any, adapters: Changes, ids: Any) -> Any:
    a, b = np.zeros((SLOTS, len(SIZES), RANK, K)), np.zeros((SLOTS, WIDTH, RANK))
    starts = np.cumsum([0, *SIZES])
    for slot, parts in enumerate(adapters):
        for part, (each_a, each_b) in enumerate(parts):
            a[slot, part, : len(each_a)] = each_a
            b[slot, starts[part] : starts[part + 1], : len(each_a)] = each_b
    given = (torch.from_numpy(each) for each in (x.astype(np.float64), a, b, ids, out.astype(np.float64)))
    return reference_lora.add_low_rank(*given, sizes=SIZES).numpy()


def case(rows: int, seed: int = 0) -> tuple[Any, Any, Any, Changes]:
    """x, out, the adapter of each row (some without), adapters."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, SLOTS, rows).astype(np.int32)
    return floats(rng, rows, K), floats(rng, rows, WIDTH), ids, adapters_of(rng)


def test_reference_by_hand() -> None:
    x, out, ids, adapters = case(9)
    got = wanted(x, out, adapters, ids)
    for row, adapter in enumerate(ids):
        by_hand = out[row].astype(np.float64)
        if adapter >= 0:
            added = [b.astype(np.float64) @ (a.astype(np.float64) @ x[row]) for a, b in adapters[adapter]]
            by_hand += np.concatenate(added)
        assert error(got[row], by_hand) < 1e-14


@pytest.mark.parametrize("isa", [*LEVELS, None])
@pytest.mark.parametrize("rows", [1, 2, 37, 200])
def test_add_low_rank(rows: int, isa: int | None) -> None:
    """isa None is plain. Rows beyond the count stay as they are."""
    x, out, ids, adapters = case(rows)
    live = max(1, rows - 3)

    def check(ops: Any) -> None:
        got = out.copy()
        ops.add_low_rank(x, filled(ops, adapters), ids, out=got, count=count(live))
        assert error(got[:live], wanted(x, out, adapters, ids)[:live]) < OPS["add_low_rank"].tolerance / 10
        assert np.array_equal(got[live:], out[live:])
        assert np.array_equal(got[:live][ids[:live] < 0], out[:live][ids[:live] < 0]), "rows without an adapter"

    if isa is None:
        check(PlainOps())
    else:
        with cpu_ops(isa=isa) as ops:
            check(ops)


@pytest.mark.parametrize("isa", LEVELS)
def test_a_bank_in_bfloat16(isa: int) -> None:
    """Matrices that are exact in bfloat16 lose nothing; half the bytes."""
    x, out, ids, adapters = case(50, seed=4)
    rounded = [
        [tuple(torch.from_numpy(each).bfloat16().float().numpy() for each in pair) for pair in parts]
        for parts in adapters
    ]
    with cpu_ops(isa=isa) as ops:
        exact, half = filled(ops, rounded), filled(ops, adapters, exact=False)  # type: ignore[arg-type]
        assert half.nbytes * 2 == exact.nbytes
        got = [out.copy(), out.copy()]
        for bank, each in zip((exact, half), got, strict=True):
            ops.add_low_rank(x, bank, ids, out=each, count=count(50))
        assert np.array_equal(*got)


def test_a_row_is_the_same_in_any_company() -> None:
    x, out, ids, adapters = case(80, seed=1)
    with cpu_ops(threads=3) as ops:
        bank, together = filled(ops, adapters), out.copy()
        ops.add_low_rank(x, bank, ids, out=together, count=count(80))
        for row in range(80):
            alone = out[row : row + 1].copy()
            ops.add_low_rank(x[row : row + 1], bank, ids[row : row + 1], out=alone, count=count(1))
            assert np.array_equal(alone[0], together[row])


def test_adapters_follow_the_step_in_a_recording() -> None:
    """A tape reads which rows have which adapter, and what an adapter holds, when it runs."""
    x, out, ids, adapters = case(12, seed=2)
    with cpu_ops() as ops:
        mine, live, got = ops.constant(ids), count(12), ops.constant(out)
        bank = ops.low_rank_bank(slots=SLOTS, rank=RANK, sizes=SIZES, k=K, exact=True)
        with ops.record() as tape:
            ops.add_low_rank(x, bank, mine, out=got, count=live)
        tape.run()
        assert np.array_equal(got, out), "an empty bank adds nothing"
        for slot, parts in enumerate(adapters):
            for part, (a, b) in enumerate(parts):
                ops.set_low_rank(bank, slot, part, a, b)
        mine[:] = ids[::-1]
        tape.run()
        assert error(got, wanted(x, out, adapters, ids[::-1].copy())) < 1e-6


@pytest.mark.parametrize("isa", [*LEVELS, None])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_glue(activation: Any, isa: int | None) -> None:
    """What gated_linear does at its end."""
    rng = np.random.default_rng(3)
    x = floats(rng, 7, 2 * 50, scale=6)

    def check(ops: Any) -> None:
        out = np.full((7, 50), -9, np.float32)
        ops.glue(x, activation=activation, out=out, count=count(5))
        gate, up = (torch.from_numpy(each[:5]).double() for each in (x[:, :50], x[:, 50:]))
        assert error(out[:5], reference.glue(gate, up, activation)) < OPS["glue"].tolerance / 10
        assert (out[5:] == -9).all()

    if isa is None:
        check(PlainOps())
    else:
        with cpu_ops(isa=isa) as ops:
            check(ops)
