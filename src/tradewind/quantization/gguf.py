"""GGUF blocks kept packed: quantised weights are multiplied as they lie in the file.

Knows: when blocks can be stacked as bytes and when they need one common layout. Refuses to know: byte layouts (blocks.py, C++).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.blocks import BLOCKS, as_scale_min
from tradewind.quantization.numerics import Numerics, Ops, Stored
from tradewind.quantization.plain import PlainScheme

if TYPE_CHECKING:
    from tradewind.quantization.blocks import ScaleMin

BITS: dict[str, int] = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q4_K": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q5_K": 5,
    "Q6_K": 6,
    "Q8_0": 8,
}
"""Bits of a quant in each block format."""
SYMMETRIC = frozenset({"Q4_0", "Q5_0", "Q6_K", "Q8_0"})
"""Formats without a minimum of their own: it is -2 ** (bits - 1) times the scale."""


class GGUFScheme:
    """Blocks go to `ops.pack_blocks` as bytes; parts of unlike formats meet in the widest quants and the finest groups.

    The common layout is exact: each part stays scale * q + minimum, a scale is only repeated for finer groups.
    """

    name = "gguf"

    def why_not(self, formats: Sequence[str], numerics: Numerics) -> str | None:
        if numerics.compute != "int8":
            return f"compute {numerics.compute} multiplies dequantised weights"
        plain = [format for format in formats if format not in BITS]
        return f"{plain[0]} is not a block format" if plain else None

    def expects(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        return {"weight": shape}

    def pack(
        self, parts: Sequence[Mapping[str, Stored]], *, ops: Ops, numerics: Numerics, gated: bool = False
    ) -> PackedMatrix:
        tensors = [part["weight"] for part in parts]
        formats = {tensor.format for tensor in tensors}
        if gated:
            # Two block formats cannot be interleaved as they lie. No file in use has that, so the simple way is taken.
            scheme = self if len(formats) == 1 else PlainScheme()
            return ops.pack_gated(*(scheme.pack([part], ops=ops, numerics=numerics) for part in parts))
        n, k = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        if len(formats) == 1:
            raw = tensors[0].data if len(tensors) == 1 else np.concatenate([tensor.data for tensor in tensors])
            return ops.pack_blocks(raw, tensors[0].format, n=n, k=k)
        bits, group = max(BITS[format] for format in formats), min(BLOCKS[format].group for format in formats)
        pieces = [quants_of(tensor, bits=bits, group=group) for tensor in tensors]
        quants, scale, minimum = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return ops.pack_quant(quants, scale, minimum, bits=bits)


def quants_of(tensor: Stored, *, bits: int, group: int) -> ScaleMin:
    """A block tensor as wider quants in finer groups: quants [N, K], scale and minimum [N, K / group]; the values stay what they are.

    bits and group are at least as wide and as fine as the format's own. A symmetric format stays symmetric (its zero moves to the middle
    of the wider quants), so that op sets need not keep its minimum.
    """
    n, k = tensor.shape
    quants, scale, minimum, own_group = as_scale_min(tensor.data, tensor.format)
    if tensor.format in SYMMETRIC:
        middle = 1 << (bits - 1)
        quants = quants + np.uint8(middle - (1 << (BITS[tensor.format] - 1)))
        minimum = scale * np.float32(-middle)
    scale, minimum = (np.repeat(values.reshape(n, -1), own_group // group, axis=1) for values in (scale, minimum))
    return quants.reshape(n, k), scale, minimum
