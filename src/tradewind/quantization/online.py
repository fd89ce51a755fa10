"""Quantising at load: float weights to integers in groups of 32 along K.

Knows: how scale and minimum are found. Refuses to know: calibration data; what needs some is another scheme's business.

    int8   symmetric   scale = absmax / 127, q = round(w / scale) + 128
    int4   min / max   value = scale * q + minimum with q in 0 .. 15; of a few narrower ranges the one with the least squared error is
                       taken, because one outlier should not cost the other 31 weights their resolution

Scale and minimum are rounded to float16 before the quants are chosen for them, so op sets can keep them in two bytes each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.numerics import Numerics, Ops, Stored
from tradewind.quantization.plain import PLAIN_FORMATS, PlainScheme, as_float

if TYPE_CHECKING:
    from tradewind.quantization.blocks import ScaleMin

GROUP = 32
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Widths of the int4 range that are tried, as a part of max - min, narrowed about its middle."""
ROWS_PER_PIECE = 1024
"""Rows quantised at once: bounds the float32 temporaries."""


class OnlineScheme:
    """Float weights quantised at load to `bits` bits; kept packed for int8 compute, dequantised again for the others."""

    def __init__(self, *, bits: int) -> None:
        self.bits = bits
        self.name = f"int{bits}"

    def why_not(self, formats: Sequence[str], numerics: Numerics) -> str | None:
        if numerics.quantization != self.name:
            return f"quantisation at load is {numerics.quantization}"
        other = [format for format in formats if format not in PLAIN_FORMATS]
        return f"{other[0]} is quantised already or not a float" if other else None

    def expects(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        return {"weight": shape}

    def pack(
        self, parts: Sequence[Mapping[str, Stored]], *, ops: Ops, numerics: Numerics, gated: bool = False
    ) -> PackedMatrix:
        if gated:
            return ops.pack_gated(*(self.pack([part], ops=ops, numerics=numerics) for part in parts))
        weights = as_float([part["weight"] for part in parts])
        if weights.shape[1] % GROUP:
            return PlainScheme().pack(parts, ops=ops, numerics=numerics)
        quants, scale, minimum = quantise(weights, bits=self.bits)
        if numerics.compute == "int8":
            return ops.pack_quant(quants, scale, minimum, bits=self.bits)
        grouped = quants.reshape(*scale.shape, GROUP) * scale[..., None] + minimum[..., None]
        return ops.pack_matrix(grouped.reshape(weights.shape), compute=numerics.compute)


def quantise(weights: NDArray[np.float32], *, bits: int) -> ScaleMin:
    """Float32 [N, K] -> quants uint8 [N, K], scale and minimum float32 [N, K / 32]; changes nothing. K is a multiple of 32."""
    n, k = weights.shape
    quants = np.empty((n, k), np.uint8)
    scale = np.empty((n, k // GROUP), np.float32)
    minimum = np.empty_like(scale)
    method = {4: quantise_int4, 8: quantise_int8}[bits]
    for start in range(0, n, ROWS_PER_PIECE):
        rows = slice(start, start + ROWS_PER_PIECE)
        grouped = np.ascontiguousarray(weights[rows]).reshape(-1, GROUP)
        q, s, m = method(grouped)
        quants[rows], scale[rows], minimum[rows] = (
            q.reshape(-1, k),
            s.reshape(-1, k // GROUP),
            m.reshape(-1, k // GROUP),
        )
    return quants, scale, minimum


def quantise_int8(groups: NDArray[np.float32]) -> ScaleMin:
    """Symmetric: groups [n, 32] -> quants [n, 32], scale [n], minimum [n] = -128 scale."""
    scale = as_half(np.abs(groups).max(1) / np.float32(127))
    q = np.rint(groups * inverse(scale)[:, None]).clip(-127, 127) + np.float32(128)
    return q.astype(np.uint8), scale, np.float32(-128) * scale


def quantise_int4(groups: NDArray[np.float32]) -> ScaleMin:
    """Asymmetric with a search over the range: groups [n, 32] -> quants [n, 32], scale [n], minimum [n]."""
    low, high = groups.min(1), groups.max(1)
    best_error = np.full(len(groups), np.inf, np.float32)
    best_q = np.zeros(groups.shape, np.uint8)
    best_scale, best_low = np.zeros_like(low), low.copy()
    for shrink in SHRINKS:
        start = as_half(low + (high - low) * np.float32((1 - shrink) / 2))
        scale = as_half((high - low) * np.float32(shrink / 15))
        q = np.rint((groups - start[:, None]) * inverse(scale)[:, None]).clip(0, 15)
        error = np.square(q * scale[:, None] + start[:, None] - groups).sum(1)
        better = error < best_error
        best_error[better] = error[better]
        best_q[better] = q[better].astype(np.uint8)
        best_scale[better], best_low[better] = scale[better], start[better]
    return best_q, best_scale, best_low


def as_half(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to what float16 can hold, as float32."""
    return values.clip(-65504, 65504).astype(np.float16).astype(np.float32)


def inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / scale, and 0 where the scale is 0: a group that is all one value."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
