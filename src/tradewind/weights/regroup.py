"""Matrices that a file holds in another form than a model wants them: transposed, alternating with others, or as 4-bit floats.

Knows: the forms, one function each, and that a matrix is made only when it is asked for, so that one is in memory at a time. Refuses to
know: which families store what so; that is a table beside each model.

    columns      [X, K, N]                   each expert transposed; where several parts share it, their columns alternate
    spans        [X, K, N]                   each expert transposed; where several parts share it, each has its own span of columns
    alternate    [X, N]                      vectors; where several parts share them, their values alternate
    row          [K] or [1, K]               a matrix of one row, whose first axis a file may leave out
    mxfp4        [X, N, K / 32, 16] blocks   two 4-bit floats a byte (low first), 32 share a power of two; rows alternate.
                 [X, N, K / 32] scales       Open Compute Project, Microscaling Formats 1.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tradewind.contract.errors import UserError
from tradewind.weights.split import NUMBER
from tradewind.weights.tensor import RawTensor, shown

Regroup = Mapping[str, tuple[str, tuple[str, ...]]]
"""Place of a tensor -> its form, and the places of its parts; of an expert's part the place has one number more."""

WIDTHS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; 8 to 15 are their negatives."""
FP4_BLOCK = 32


class RegroupError(UserError):
    """A tensor that is not of the form its family's table says."""


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor that is made from another one when it is taken; `nbytes` are those in the file."""

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    make: Callable[[], NDArray[np.generic]]

    def made(self) -> RawTensor:
        """The tensor in memory of its own."""
        values = np.ascontiguousarray(self.make())
        return RawTensor(self.name, self.shape, self.format, values.view(np.uint8).reshape(-1))


def regrouped(at: Mapping[str, RawTensor], table: Regroup) -> dict[str, RawTensor | Derived]:
    """The tensors by place, those of `table` replaced by their parts; reads and copies nothing yet. Raises RegroupError."""
    found: dict[str, RawTensor | Derived] = dict(at)
    for place, tensor in at.items():
        form, parts = table.get(NUMBER.sub("{}", place), ("", ()))
        if not form:
            continue
        del found[place]
        numbers = NUMBER.findall(place)
        if form == "mxfp4":
            beside = place.removesuffix("blocks") + "scales"
            if beside not in at:
                raise RegroupError(f"tensor '{shown(tensor.name)}' has no scales beside it")
            del found[beside]
            made = mxfp4_parts(tensor, at[beside], count=len(parts))
        elif form == "row":
            made = [[one_row(tensor)]]
        else:
            made = strided_parts(tensor, form, count=len(parts))
        for expert, row in enumerate(made):
            for part, derived in zip(parts, row, strict=True):
                found[part.format(*numbers, expert)] = derived
    return found


def strided_parts(tensor: RawTensor, form: str, *, count: int) -> list[list[Derived]]:
    """For each expert, its `count` parts of a tensor of the form "columns", "spans" or "alternate"."""
    dims = 2 if form == "alternate" else 3
    if len(tensor.shape) != dims or tensor.shape[-1] % count or tensor.format not in WIDTHS:
        raise RegroupError(
            f"tensor '{shown(tensor.name)}' is {tensor.format} of shape {tensor.shape}; it must be F32, F16 or BF16 in {dims} axes, the "
            f"last a multiple of {count}"
        )
    values = tensor.data.view(WIDTHS[tensor.format]).reshape(tensor.shape)
    shape = (*tensor.shape[-1:], *tensor.shape[1:-1])
    each = shape[0] // count
    share = tensor.nbytes // (tensor.shape[0] * count) if tensor.shape[0] else 0

    def part(expert: int, index: int) -> Derived:
        mine = slice(index * each, (index + 1) * each) if form == "spans" else slice(index, None, count)
        return Derived(
            name=tensor.name,
            shape=(each, *shape[1:]),
            format=tensor.format,
            nbytes=share,
            make=lambda: values[expert][..., mine].T,
        )

    return [[part(expert, index) for index in range(count)] for expert in range(tensor.shape[0])]


def one_row(tensor: RawTensor) -> Derived:
    """A matrix [1, K] of the same bytes."""
    if tensor.shape[:-1] not in ((), (1,)) or not tensor.shape:
        raise RegroupError(f"tensor '{shown(tensor.name)}' has the shape {tensor.shape}; it must be one row")
    shape = (1, tensor.shape[-1])
    return Derived(tensor.name, shape, tensor.format, tensor.nbytes, make=lambda: tensor.data)


def mxfp4_parts(blocks: RawTensor, scales: RawTensor, *, count: int) -> list[list[Derived]]:
    """For each expert, its `count` matrices [N / count, K] as BF16, which holds every 4-bit float times a power of two exactly."""
    if (
        (blocks.format, scales.format) != ("U8", "U8")
        or len(blocks.shape) != 4
        or blocks.shape[:3] != scales.shape
        or blocks.shape[3] != FP4_BLOCK // 2
        or blocks.shape[1] % count
    ):
        raise RegroupError(
            f"tensors '{shown(blocks.name)}' and '{shown(scales.name)}' are {blocks.format} of {blocks.shape} and {scales.format} of "
            f"{scales.shape}; they must be U8 of (experts, rows, blocks, {FP4_BLOCK // 2}) and (experts, rows, blocks)"
        )
    experts, rows, per_row, _ = blocks.shape
    codes, exponents = blocks.data.reshape(blocks.shape), scales.data.reshape(scales.shape)

    def part(expert: int, index: int) -> Derived:
        return Derived(
            name=blocks.name,
            shape=(rows // count, per_row * FP4_BLOCK),
            format="BF16",
            nbytes=(blocks.nbytes + scales.nbytes) // (experts * count),
            make=lambda: fp4_values(codes[expert, index::count], exponents[expert, index::count]),
        )

    return [[part(expert, index) for index in range(count)] for expert in range(experts)]


def fp4_values(codes: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The bits of the BF16 values, two in each uint32 in the order of memory: codes [N, blocks, 16], exponents [N, blocks]."""
    return pairs_by_exponent()[exponents[..., None], codes]


@cache
def pairs_by_exponent() -> NDArray[np.uint32]:
    """[256, 256]: for a scale and a byte of two codes, both values. A scale of 255 is not a number."""
    positive = np.array(FP4_VALUES, np.float32)
    values = np.concatenate([positive, -positive])
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.ldexp(values, np.arange(256)[:, None] - 127).astype(np.float32)
    scaled[255] = np.nan
    bits = scaled.view(np.uint32) >> 16  # exact: a value has three significant bits
    byte = np.arange(256)
    return np.ascontiguousarray(bits[:, byte & 15] | (bits[:, byte >> 4] << 16))
