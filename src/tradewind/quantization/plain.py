"""Weights that are multiplied as numbers of their own: F32, F16, BF16, and, for exact compute, any format dequantised.

Knows: one tensor "weight" per matrix. Refuses to know: how the op set lays it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.blocks import BLOCKS, dequantise
from tradewind.quantization.numerics import Numerics, Ops, Stored

INT8_GROUP = 32
PLAIN_FORMATS = ("BF16", "F16", "F32")


class PlainScheme:
    """Dequantises to float32 and lets `ops.pack_matrix` store it for the chosen compute type.

    An op set that takes tensors as they lie in the file (`pack_stored`: a device that computes in bf16) converts them itself.
    """

    name = "plain"

    def why_not(self, formats: Sequence[str], numerics: Numerics) -> str | None:
        unknown = [format for format in formats if format not in BLOCKS]
        return f"{unknown[0]} is not read here" if unknown else None

    def expects(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        return {"weight": shape}

    def pack(
        self, parts: Sequence[Mapping[str, Stored]], *, ops: Ops, numerics: Numerics, gated: bool = False
    ) -> PackedMatrix:
        tensors = [part["weight"] for part in parts]
        if hasattr(ops, "pack_stored"):
            device: Any = ops
            return cast(PackedMatrix, device.pack_stored(tensors, layout="bf16", gated=gated))
        if gated:
            return ops.pack_gated(*(self.pack([part], ops=ops, numerics=numerics) for part in parts))
        values = as_float(tensors)
        whole_groups = values.shape[1] % INT8_GROUP == 0
        compute = numerics.compute if whole_groups or numerics.compute != "int8" else "bf16"
        return ops.pack_matrix(values, compute=compute)


def as_float(tensors: Sequence[Stored]) -> NDArray[np.float32]:
    """Float32 values of the tensors, stacked along the first axis."""
    values = [dequantise(tensor.data, tensor.format, tensor.shape) for tensor in tensors]
    return values[0] if len(values) == 1 else np.concatenate(values)
