"""Sizes for which a step is planned and captured: a step runs in the smallest bucket that holds it.

Knows: the ladder of sizes. Refuses to know: kernels and graphs.

A graph has fixed grids, so a step of 100 tokens replayed in a bucket of 128 computes 28 rows for nothing. Finer steps waste less and
capture more; decode steps are cheap to pad (they read weights), prompts are not (they multiply), but a busy engine fills its steps anyway.
"""

from __future__ import annotations

from bisect import bisect_left

from tradewind.contract.errors import UserError

LONGEST = (512, 2048, 4096, 8192, 32768)
"""Lengths of keys at which decode attention is cut differently (kernels/triton/tuning.py)."""
FEW_ROWS = 16
"""Steps with prompts: grids are made for one row, for so few rows, or for all."""


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 16 that are an eighth to a quarter apart, up to and including `most`. Multiples of 16 share kernels."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128) if size < most]
    size = 128
    while size < most:
        step = max(32, size // 8 if size < 1024 else size // 4)
        for _ in range(4 if size >= 1024 else 8):
            size += step
            if size < most:
                sizes.append(size)
    return (*sizes, most)


def smallest(sizes: tuple[int, ...], wanted: int) -> int:
    """The first of ascending `sizes` that is at least `wanted`."""
    place = bisect_left(sizes, wanted)
    if place == len(sizes):
        raise UserError(f"{wanted} is over the largest bucket, {sizes[-1]}")
    return sizes[place]
