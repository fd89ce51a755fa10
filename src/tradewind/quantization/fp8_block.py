"""FP8 as it is published: e4m3 with a float32 scale for each block of 128 x 128, kept packed where an op set multiplies it so.

Knows: which tensors make up such a matrix. Refuses to know: how scales lie on a device (kernels), and who dequantises for the others
(weights/block_scales.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.fp8 import fits_fp8
from tradewind.quantization.numerics import Numerics, Ops, Stored

BLOCK = 128
STORED = "F8_E4M3"
SCALE_SUFFIX = "weight_scale_inv"


class FP8BlockScheme:
    """Nothing is rounded: stored numbers and scales go to the device as they are."""

    name = "fp8_block"

    def why_not(self, formats: Sequence[str], numerics: Numerics) -> str | None:
        other = [format for format in formats if format != STORED]
        if other:
            return f"{other[0]} is not {STORED} with scales by blocks"
        if numerics.compute != "bf16" or numerics.quantization != "none":
            return f"compute {numerics.compute} with quantization {numerics.quantization} is not what blocks are multiplied in"
        return None

    def expects(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        return {"weight": shape, SCALE_SUFFIX: (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))}

    def pack(
        self, parts: Sequence[Mapping[str, Stored]], *, ops: Ops, numerics: Numerics, gated: bool = False
    ) -> PackedMatrix:
        device: Any = ops
        pairs = [(part["weight"], part[SCALE_SUFFIX]) for part in parts]
        return cast(PackedMatrix, device.pack_stored_blocks(pairs, gated=gated))


def fits_blocks(shape: Sequence[int]) -> bool:
    """Whether a matrix of this shape can be kept so, and stacked: sixteen of its rows share a scale in memory."""
    return len(shape) == 2 and fits_fp8(shape)
