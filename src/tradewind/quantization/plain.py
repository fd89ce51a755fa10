"""Weights that are multiplied as numbers of their own: F32, F16, BF16, and, for exact compute, any format dequantised.

Knows: one tensor "weight" per matrix. Refuses to know: how the op set lays it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.blocks import BLOCKS, dequantise
from tradewind.quantization.numerics import Numerics, Ops, Stored

INT8_GROUP = 32


class PlainScheme:
    """Dequantises to float32 and lets `ops.pack_matrix` store it for the chosen compute type."""

    name = "plain"

    def why_not(self, formats: Sequence[str], numerics: Numerics) -> str | None:
        unknown = [format for format in formats if format not in BLOCKS]
        return f"{unknown[0]} is not read here" if unknown else None

    def expects(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        return {"weight": shape}

    def pack(self, parts: Sequence[Mapping[str, Stored]], *, ops: Ops, numerics: Numerics) -> PackedMatrix:
        values = as_float([part["weight"] for part in parts])
        whole_groups = values.shape[1] % INT8_GROUP == 0
        compute = numerics.compute if whole_groups or numerics.compute != "int8" else "bf16"
        return ops.pack_matrix(values, compute=compute)


def as_float(tensors: Sequence[Stored]) -> NDArray[np.float32]:
    """Float32 values of the tensors, stacked along the first axis."""
    values = [dequantise(tensor.data, tensor.format, tensor.shape) for tensor in tensors]
    return values[0] if len(values) == 1 else np.concatenate(values)
