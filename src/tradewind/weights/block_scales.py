"""Matrices stored in FP8 with a float32 scale for each block of 128 x 128, as DeepSeek-V3 and others publish them.

Knows: the form, and that a matrix is made only when it is asked for. Refuses to know: families; any may store its matrices so.

    NAME            F8_E4M3 [N, K]
    NAME_scale_inv  F32 [N / 128, K / 128], rounded up         value = stored * scale of its block (the name has it upside down);
                    BF16 in some files

Where an op set multiplies them as they are stored (`kept`), nothing is made. Else values are made as float32, which holds the
product of a number of 4 significant bits and a float32 but for one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tradewind.contract.errors import UserError
from tradewind.quantization.blocks import dequantise
from tradewind.quantization.fp8_block import BLOCK, STORED, fits_blocks
from tradewind.weights.regroup import Derived
from tradewind.weights.tensor import RawTensor, shown

SCALES = "_scale_inv"
"""What the name of a matrix' scales has more than that of the matrix."""
SCALE_FORMATS = ("BF16", "F32")


class BlockScalesError(UserError):
    """An FP8 matrix whose scales are missing or do not fit."""


def dequantised(at: Mapping[str, RawTensor | Derived]) -> dict[str, RawTensor | Derived]:
    """The tensors by place, matrices with block scales replaced by float32 ones; reads and copies nothing yet. Raises BlockScalesError."""
    found: dict[str, RawTensor | Derived] = {}
    for place, tensor in at.items():
        if place.endswith(SCALES):
            if place.removesuffix(SCALES) not in at:
                raise BlockScalesError(f"tensor '{shown(tensor.name)}' has no matrix beside it")
            continue
        scales = at.get(place + SCALES)
        if tensor.format != STORED and scales is None:
            found[place] = tensor
            continue
        if scales is None:
            raise BlockScalesError(f"tensor '{shown(tensor.name)}' is {STORED} without scales by blocks beside it")
        found[place] = one_matrix(tensor, scales)
    return found


def kept(at: Mapping[str, RawTensor | Derived], *, but: Callable[[str], bool]) -> dict[str, RawTensor]:
    """By place, matrices that an op set can keep as they are stored, and their scales; `but`: those whose rows must be put in order."""
    found: dict[str, RawTensor] = {}
    for place, tensor in at.items():
        scales = at.get(place + SCALES)
        if tensor.format != STORED or scales is None or not fits_blocks(tensor.shape) or but(place):
            continue
        if isinstance(tensor, RawTensor) and isinstance(scales, RawTensor):
            found |= {place: tensor, place + SCALES: scales}
    return found


def one_matrix(tensor: RawTensor | Derived, scales: RawTensor | Derived) -> Derived:
    """A matrix to be made of its stored numbers and scales."""
    wanted = tuple(-(-size // BLOCK) for size in tensor.shape)
    fits = (tensor.format, scales.shape) == (STORED, wanted) and scales.format in SCALE_FORMATS and len(wanted) == 2
    if not fits or isinstance(tensor, Derived) or isinstance(scales, Derived):
        raise BlockScalesError(
            f"tensors '{shown(tensor.name)}' and '{shown(scales.name)}' are {tensor.format} of {tensor.shape} and {scales.format} of "
            f"{scales.shape}; they must be {STORED} of (N, K) and {' or '.join(SCALE_FORMATS)} with one scale for {BLOCK} x {BLOCK}"
        )

    stored, shape = tensor.data.reshape(tensor.shape), tensor.shape
    source = scales

    def make() -> NDArray[np.float32]:
        factors = dequantise(source.data, source.format, wanted)
        values = e4m3_values()[stored]
        for row in range(wanted[0]):
            values[row * BLOCK : (row + 1) * BLOCK] *= np.repeat(factors[row], BLOCK)[: shape[1]]
        return values

    return Derived(tensor.name, tensor.shape, "F32", tensor.nbytes + scales.nbytes, make)


@cache
def e4m3_values() -> NDArray[np.float32]:
    """The 256 numbers of e4m3 (Micikevicius et al. 2022): 1 sign, 4 exponent, 3 mantissa bits; all ones below the sign is not a number."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size[byte & 127 == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)
