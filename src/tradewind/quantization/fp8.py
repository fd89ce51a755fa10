"""FP8 at load: float weights as e4m3 with one float32 scale per output channel.

Knows: the rule, in numpy (`quantise_fp8`; op sets on a device must agree with it bit for bit). Refuses to know: how a device packs it,
and how activations are rounded (per token, in the kernels).

    scale[n] = max |w[n]| / 448;   stored = e4m3(w / scale);   value = scale * stored

e4m3 (Micikevicius et al. 2022): 1 sign, 4 exponent and 3 mantissa bits, largest number 448, smallest normal 2^-6, below it steps of 2^-9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tradewind.contract.errors import UserError
from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.blocks import BLOCKS
from tradewind.quantization.numerics import Numerics, Ops, Stored
from tradewind.quantization.plain import PLAIN_FORMATS, PlainScheme, as_float

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

E4M3_MAX = 448.0
MULTIPLE = 16
"""Matrices whose sides are no multiples of this stay bf16: FP8 matmuls read rows in pieces of 16 bytes."""
LEAST_SCALE = np.float32(2.0**-100)
"""Keeps a row of zeros (or of nearly nothing) from a division by zero."""


class FP8Scheme:
    """Weights rounded to FP8 at load where the op set multiplies FP8, also those that were blocks of integers before; sensitive matrices
    arrive here as plain ones."""

    name = "fp8"

    def why_not(self, formats: Sequence[str], numerics: Numerics) -> str | None:
        stored = [format for format in formats if format.startswith("F8_")]
        if stored:
            return f"{stored[0]} weights with stored scales are not read yet; take the bf16 checkpoint and quantise it at load"
        if numerics.quantization != "fp8":
            return f"quantisation at load is {numerics.quantization}"
        other = [format for format in formats if format not in BLOCKS]
        return f"{other[0]} is not read here" if other else None

    def expects(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        return {"weight": shape}

    def pack(
        self, parts: Sequence[Mapping[str, Stored]], *, ops: Ops, numerics: Numerics, gated: bool = False
    ) -> PackedMatrix:
        tensors = [part["weight"] for part in parts]
        if not all(fits_fp8(tensor.shape) for tensor in tensors):
            return PlainScheme().pack(parts, ops=ops, numerics=numerics, gated=gated)
        device: Any = ops
        floats = all(tensor.format in PLAIN_FORMATS for tensor in tensors)
        if floats and hasattr(ops, "pack_stored"):
            return cast(PackedMatrix, device.pack_stored(tensors, layout="fp8", gated=gated))
        if gated:
            return ops.pack_gated(*(self.pack([part], ops=ops, numerics=numerics) for part in parts))
        if not hasattr(ops, "pack_fp8"):
            raise UserError(
                f"The backend '{ops.name}' does not multiply FP8 weights; take quantization none, int8 or int4, or the cuda backend."
            )
        return cast(PackedMatrix, device.pack_fp8(as_float(tensors)))


def fits_fp8(shape: Sequence[int]) -> bool:
    """Whether a matrix of this shape can be kept as FP8."""
    return all(size % MULTIPLE == 0 for size in shape)


def quantise_fp8(weights: Floats) -> tuple[Floats, Floats]:
    """Float32 [N, K] -> stored e4m3 numbers (as float32) [N, K] and scale [N]; changes nothing."""
    scale = np.maximum(np.abs(weights).max(1) / np.float32(E4M3_MAX), LEAST_SCALE)
    return round_e4m3(weights / scale[:, None]), scale


def round_e4m3(values: Floats) -> Floats:
    """The nearest e4m3 number of each value, ties to the even mantissa; beyond 448 it is 448."""
    clipped = np.clip(values, -E4M3_MAX, E4M3_MAX)
    _, exponent = np.frexp(clipped)  # |value| = m * 2^exponent with m in [0.5, 1): the leading bit is 2^(exponent - 1)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, -6) - 3).astype(np.float32)
    rounded: Floats = np.rint(clipped / step) * step
    return rounded
