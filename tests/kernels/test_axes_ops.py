"""rope_angles_axes: plain and C++ against the reference, and the same bits as rope_angles where all positions are one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.cpu_support import LEVELS, count, cpu_ops, error
from tradewind.kernels import reference_axes
from tradewind.kernels.plain import PlainOps
from tradewind.kernels.table import OPS

CAPACITY, HALF = 37, 20
SECTIONS = (4, 7, 9)
AXES = np.repeat(np.arange(3, dtype=np.int32), SECTIONS)
INV_FREQ = (10000.0 ** (-np.arange(HALF) / HALF)).astype(np.float32)


def positions(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 5000, (3, CAPACITY)).astype(np.int32)


def run(ops: object, places: np.ndarray, *, live: int, scale: float) -> np.ndarray:
    out = ops.constant(np.full((CAPACITY, 2 * HALF), 7.0, np.float32))  # type: ignore[attr-defined]
    constants = [ops.constant(each) for each in (places, AXES, INV_FREQ)]  # type: ignore[attr-defined]
    ops.rope_angles_axes(*constants, scale=scale, out=out, count=count(live))  # type: ignore[attr-defined]
    return ops.host(out)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("live", [0, 1, 16, CAPACITY])
def test_plain_and_cpu_are_the_reference(live: int) -> None:
    places = positions(live)
    wanted = reference_axes.rope_angles_axes(
        torch.from_numpy(places), torch.from_numpy(AXES), torch.from_numpy(INV_FREQ), scale=1.25
    ).numpy()
    with cpu_ops() as cpu:
        for ops in (PlainOps(), cpu):
            got = run(ops, places, live=live, scale=1.25)
            if live:
                assert error(got[:live], wanted[:live]) <= OPS["rope_angles_axes"].tolerance
            assert (got[live:] == 7.0).all(), "rows beyond the count are left alone"


@pytest.mark.parametrize("level", LEVELS)
def test_one_position_for_all_is_rope_angles(level: int) -> None:
    places = np.repeat(positions()[:1], 3, axis=0)
    with cpu_ops(isa=level) as ops:
        got = run(ops, places, live=CAPACITY, scale=1.0)
        wanted = ops.constant(np.zeros((CAPACITY, 2 * HALF), np.float32))
        ops.rope_angles(ops.constant(places[0]), ops.constant(INV_FREQ), scale=1.0, out=wanted, count=count(CAPACITY))
        assert np.array_equal(got, wanted)


def test_sections_turn_by_their_own_position() -> None:
    """Where one axis moves, only its pairs move."""
    places = positions(3)
    with cpu_ops() as ops:
        before = run(ops, places, live=CAPACITY, scale=1.0).copy()
        for axis in range(3):
            moved = places.copy()
            moved[axis] += 11
            changed = (run(ops, moved, live=CAPACITY, scale=1.0) != before).any(axis=0)
            assert (changed == np.tile(axis == AXES, 2)).all()
