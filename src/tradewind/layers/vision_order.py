"""How an image is cut for the tower: colors to numbers, squares to patches, patches to windows.

Knows: the order in which patches stand. Refuses to know: weights and attention. Plain arithmetic in numpy.

Patches stand square by square (a square of merge x merge patches becomes one token), squares row by row. The tower computes them window
by window, windows row by row and the squares of each row by row; those at the right and at the bottom may be smaller:

      squares of 3 x 5, windows of 2 x 2        0  1 | 2  3 | 4
                                                5  6 | 7  8 | 9         window order: 0 1 5 6 | 2 3 7 8 | 4 9 | 10 11 | 12 13 | 14
                                               10 11 |12 13 |14
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tradewind.config.card_vision import VisionFacts

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def patches_of(pixels: NDArray[np.uint8], facts: VisionFacts) -> Floats:
    """Colors [height, width, 3] -> patches [rows * columns * merge^2, 3 * patch^2] of one frame, in the order of squares.

    A color becomes (color / 255 - mean) / std. Both edges are whole squares.
    """
    height, width, _ = pixels.shape
    edge, merge = facts.patch, facts.merge
    rows, columns = height // facts.edge, width // facts.edge
    assert (rows * facts.edge, columns * facts.edge) == (height, width), (pixels.shape, facts.edge)
    color = np.arange(256, dtype=np.float32)[:, None] / np.float32(255)
    table = (color - np.array(facts.mean, np.float32)) / np.array(facts.std, np.float32)
    cut = pixels.reshape(rows, merge, edge, columns, merge, edge, 3)
    # rows, columns, down and across within the square, color, down and across within the patch
    ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
    out = np.empty(ordered.shape, np.float32)
    for index in range(3):
        out[:, :, :, :, index] = table[ordered[:, :, :, :, index], index]
    return out.reshape(rows * columns * merge**2, 3 * edge**2)


def patch_places(rows: int, columns: int, merge: int) -> tuple[Ints, Ints]:
    """Row and column of every patch of an image of rows x columns squares, in the order of squares."""
    shape = (rows, columns, merge, merge)
    within = np.arange(merge, dtype=np.int32)
    down: Ints = np.arange(rows, dtype=np.int32)[:, None, None, None] * merge + within[:, None]
    across: Ints = np.arange(columns, dtype=np.int32)[:, None, None] * merge + within
    return np.broadcast_to(down, shape).reshape(-1), np.broadcast_to(across, shape).reshape(-1)


def window_order(rows: int, columns: int, *, size: int) -> tuple[Ints, Ints]:
    """(squares in the order of windows, squares of each window) for windows of size x size squares."""
    squares = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    windows = [
        squares[row : row + size, column : column + size].reshape(-1)
        for row in range(0, rows, size)
        for column in range(0, columns, size)
    ]
    return np.concatenate(windows), np.array([len(window) for window in windows], np.int32)
