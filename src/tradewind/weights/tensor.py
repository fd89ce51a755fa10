"""A tensor as it lies in a file, and the error for a file that cannot be trusted.

Knows: names of storage formats, how many bytes a shape takes in each. Refuses to know file layouts and arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tradewind.contract.errors import UserError
from tradewind.quantization.blocks import BLOCKS

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bits of one value in the formats that are not in BLOCKS. Names are those of safetensors (GGUF's integers agree).
PLAIN_BITS: dict[str, int] = {
    "BOOL": 8,
    "C64": 64,
    "F4": 4,
    "F64": 64,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "I32": 32,
    "I64": 64,
    "I8": 8,
    "U16": 16,
    "U32": 32,
    "U64": 64,
    "U8": 8,
}


class CheckpointError(UserError):
    """A model file or folder that is damaged, incomplete or of a kind that is not read here.

    Carries `path`, `offset` (byte in that file, None where there is no one place) and `reason`.
    """

    def __init__(self, path: Path | str, reason: str, *, offset: int | None = None) -> None:
        self.path = Path(path)
        self.offset = offset
        self.reason = reason
        where = "" if offset is None else f" at byte {offset}"
        # ascii() of a damaged name may hold lone surrogates' escapes but never the surrogates: always printable.
        super().__init__(f"{shown(str(path), limit=1000)}{where}: {reason}")


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """A tensor's bytes, unchanged, as a view of the mapped file.

    name: as the file spells it. shape: row-major (numpy order; GGUF's own order reversed). format: a name of
    `BLOCKS` or `PLAIN_BITS`. data: uint8 [nbytes], read-only, no copy. file, offset: where the same bytes can be read
    without the mapping; None where they lie in no file as they are.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: NDArray[np.uint8]
    file: Path | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.data.nbytes

    @property
    def count(self) -> int:
        """Number of values."""
        return count_of(self.shape)


def count_of(shape: Sequence[int]) -> int:
    """Product of a shape in Python integers (a lying file must not overflow it)."""
    count = 1
    for size in shape:
        count *= size
    return count


def format_nbytes(format: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of `shape` stored as `format`; changes nothing.

    Raises KeyError for an unknown format and ValueError for a shape that the format cannot hold.
    """
    if format in BLOCKS:
        return BLOCKS[format].nbytes(shape)
    bits = count_of(shape) * PLAIN_BITS[format]
    if bits % 8:
        raise ValueError(f"{count_of(shape)} values of {format} do not end on a whole byte")
    return bits // 8


def shown(name: str, *, limit: int = 80) -> str:
    """A name from a file as it may be printed: short, and without control characters or broken Unicode."""
    text = name if name.isprintable() else ascii(name)[1:-1]
    return text if len(text) <= limit else f"{text[:limit]}… ({len(name)} characters)"
