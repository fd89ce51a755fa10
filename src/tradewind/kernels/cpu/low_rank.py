"""How banks of low-rank adapters lie in memory for csrc/low_rank.cpp.

Knows: panels of 16 columns, padding, bfloat16. Refuses to know: who is in which slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tradewind.kernels.ops import LowRankBank

W = 16
"""Columns of a panel."""

Floats = npt.NDArray[np.float32]
Empty = Callable[[tuple[int, ...], str], Any]


def whole(size: int) -> int:
    """Rounded up to whole panels."""
    return -(-size // W) * W


def new_bank(empty: Empty, *, slots: int, rank: int, sizes: tuple[int, ...], k: int, exact: bool) -> LowRankBank:
    """Data: A [S, panels of all parts' ranks, K, 16]; B [S, panels of all parts' outputs, R, 16]; outputs of each part; ranks in use
    [S, parts]. Untouched pages cost nothing."""
    kind, ranks = "f32" if exact else "bf16", whole(rank)
    panels = sum(whole(n) for n in sizes) // W
    a = empty((slots, len(sizes) * ranks // W, k, W), kind)
    b = empty((slots, panels, ranks, W), kind)
    each, used = empty((len(sizes),), "i32"), empty((slots, len(sizes)), "i32")
    each[:] = sizes
    data = (a, b, each, used)
    return LowRankBank(slots=slots, rank=rank, sizes=sizes, k=k, data=data, nbytes=a.nbytes + b.nbytes)


def write(bank: LowRankBank, slot: int, part: int, a: Floats, b: Floats) -> None:
    """Writes A [r, K] and B [N, r] of one part over what was there."""
    all_a, all_b, _, used = bank.data
    rank, ranks = len(a), whole(bank.rank)
    assert rank <= bank.rank, (rank, bank.rank)
    assert a.shape == (rank, bank.k), (a.shape, rank, bank.k)
    assert b.shape == (bank.sizes[part], rank), (b.shape, bank.sizes, rank)
    used[slot, part] = whole(rank)
    if not rank:
        return
    first, count = sum(whole(n) for n in bank.sizes[:part]) // W, whole(len(b)) // W
    down, up = np.zeros((bank.k, ranks), np.float32), np.zeros((ranks, count * W), np.float32)
    down[:, :rank], up[:rank, : len(b)] = a.T, b.T
    for target, matrix in (
        (all_a[slot, part * ranks // W : (part + 1) * ranks // W], down),
        (all_b[slot, first : first + count], up),
    ):
        panels = matrix.reshape(len(matrix), -1, W).swapaxes(0, 1)
        target[:] = panels if target.dtype == np.float32 else to_bf16(panels)


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """To the nearest even, as uint16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
