"""GGUF files: one mapped read of header, metadata and tensor list, and a small writer.

Knows the byte layout of GGUF versions 2 and 3, little-endian. Refuses to know architectures, tokenizers and
arithmetic, and refuses files that lie: each check names the byte where the file stopped making sense.

Long arrays (token lists of 50k to 260k strings) are only stepped over; they are decoded when somebody asks.

    magic "GGUF" | version u32 | tensors u64 | pairs u64
    pairs:   key string | type u32 | value             string = length u64 | bytes; array = type u32 | count u64 | ...
    tensors: name string | dims u32 | sizes u64... (innermost first) | type u32 | offset u64 (from the data's start)
    padding to `general.alignment` | data, every tensor at a multiple of the alignment
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tradewind.quantization.blocks import BLOCKS
from tradewind.weights.tensor import CheckpointError, RawTensor, format_nbytes, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# Limits far above any real model and far below what would stall a machine that reads a damaged file.
MAX_TENSORS = 1 << 20
MAX_PAIRS = 1 << 20
MAX_STRINGS = 1 << 24
MAX_DIMS = 4
MAX_NESTING = 4

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, tuple[str, struct.Struct, np.dtype[np.generic]]] = {
    number: (name, struct.Struct("<" + code), np.dtype("<" + kind))
    for number, name, code, kind in (
        (0, "uint8", "B", "u1"),
        (1, "int8", "b", "i1"),
        (2, "uint16", "H", "u2"),
        (3, "int16", "h", "i2"),
        (4, "uint32", "I", "u4"),
        (5, "int32", "i", "i4"),
        (6, "float32", "f", "f4"),
        (7, "bool", "?", "u1"),
        (10, "uint64", "Q", "u8"),
        (11, "int64", "q", "i8"),
        (12, "float64", "d", "f8"),
    )
}
_BOOL = 7
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

TENSOR_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    30: "BF16",
}
# Types that exist and are not read here: only so that the refusal can name them.
_FOREIGN_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open GGUF file; tensors are views of the mapping, which lives as long as any of them.

    `metadata` decodes arrays when asked: strings as a tuple of str, numbers as a read-only numpy array.
    """

    path: Path
    version: int
    alignment: int
    metadata: GGUFMetadata
    tensors: Mapping[str, RawTensor]


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that was stepped over: `count` items of type `kind` in bytes [start, end) of the file."""

    kind: int
    count: int
    start: int
    end: int


class GGUFMetadata(Mapping[str, object]):
    """Read-only mapping of metadata; an array is decoded on first access and kept.

    Raises CheckpointError on access to strings that are not UTF-8.
    """

    __slots__ = ("_buffer", "_path", "_values")

    def __init__(self, path: Path, buffer: mmap.mmap, values: dict[str, object]) -> None:
        self._path = path
        self._buffer = buffer
        self._values = values

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = _decode_array(self._path, self._buffer, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __repr__(self) -> str:
        return f"GGUFMetadata({len(self._values)} pairs of {self._path.name})"

    def array_length(self, key: str) -> int | None:
        """Items of the array at `key` without decoding it; None where there is no array. Changes nothing."""
        value = self._values.get(key)
        if isinstance(value, _Array):
            return value.count
        return len(value) if isinstance(value, (tuple, np.ndarray)) else None


def open_gguf(path: Path | str) -> GGUFFile:
    """Maps a GGUF file and reads everything but the weights; changes nothing.

    Raises CheckpointError (file, byte, reason) for a file that is not GGUF 2 or 3, is truncated, or says something
    that cannot be true.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise CheckpointError(path, "the file is empty", offset=0)
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(path, f"cannot be opened: {error.strerror or error}") from None
    return _Reader(path, buffer).read()


class _Reader:
    """One pass over the head of a file; `at` is the byte that is read next."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def fail(self, reason: str, *, at: int | None = None) -> CheckpointError:
        return CheckpointError(self.path, reason, offset=self.at if at is None else at)

    def read(self) -> GGUFFile:
        version = self._version()
        tensor_count = self._count("tensors", limit=MAX_TENSORS, least_bytes=24)
        pair_count = self._count("metadata pairs", limit=MAX_PAIRS, least_bytes=13)
        values = self._pairs(pair_count)
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {shown(str(alignment))}; it must be a power of two")
        tensors = self._tensors(tensor_count, alignment)
        metadata = GGUFMetadata(self.path, self.buffer, values)
        return GGUFFile(self.path, version, alignment, metadata, tensors)

    def _version(self) -> int:
        magic = self.buffer[:4]
        if magic != MAGIC:
            raise self.fail(f"starts with {magic!r}, not {MAGIC!r}: this is not a GGUF file")
        self.at = 4
        version = self._u32("version")
        if version in (2, 3):
            return version
        if version & 0xFFFF == 0 and version:
            raise self.fail("big-endian GGUF is not read here; convert it to little-endian first", at=4)
        raise self.fail(f"GGUF version {version} is not read here, only 2 and 3", at=4)

    # -------------------------------------------------------------------------------------------- small readings

    def _u32(self, what: str) -> int:
        return int(self._scalar(_U32, what))

    def _u64(self, what: str) -> int:
        return int(self._scalar(_U64, what))

    def _scalar(self, layout: struct.Struct, what: str) -> int | float | bool:
        end = self.at + layout.size
        if end > self.size:
            raise self.fail(f"the file ends inside {what} (it has {self.size} bytes)")
        (value,) = layout.unpack_from(self.buffer, self.at)
        self.at = end
        return value  # type: ignore[no-any-return]

    def _count(self, what: str, *, limit: int, least_bytes: int) -> int:
        start = self.at
        count = self._u64(f"the number of {what}")
        room = (self.size - self.at) // least_bytes
        if count > min(limit, room):
            raise self.fail(f"{count} {what} cannot be: the rest of the file has room for {room}", at=start)
        return count

    def _string(self, what: str) -> str:
        start = self.at
        length = self._u64(f"the length of {what}")
        if length > self.size - self.at:
            raise self.fail(f"{what} is {length} bytes long and {self.size - self.at} are left", at=start)
        raw = self.buffer[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8", at=start + 8 + error.start) from None

    # -------------------------------------------------------------------------------------------------- metadata

    def _pairs(self, count: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for number in range(count):
            start = self.at
            key = self._string(f"metadata key {number}")
            if key in values:
                raise self.fail(f"metadata key {shown(key)!r} appears twice", at=start)
            kind = self._u32(f"the type of {shown(key)}")
            values[key] = self._value(kind, shown(key))
        return values

    def _value(self, kind: int, key: str) -> object:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind][1], key)
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise self.fail(f"{key} has the unknown type {kind}", at=self.at - 4)
        start = self.at
        inner = self._u32(f"the item type of {key}")
        if inner == _ARRAY:
            self.at = start
            return self._nested(key, depth=0)
        return self._step_over(inner, key)

    def _nested(self, key: str, *, depth: int) -> object:
        """An array of arrays: rare and short, so decoded at once, as tuples."""
        if depth == MAX_NESTING:
            raise self.fail(f"{key} holds arrays nested more than {MAX_NESTING} deep")
        inner = self._u32(f"the item type of {key}")
        if inner != _ARRAY:
            return _decode_array(self.path, self.buffer, self._step_over(inner, key))
        count = self._count(f"arrays in {key}", limit=MAX_PAIRS, least_bytes=12)
        return tuple(self._nested(key, depth=depth + 1) for _ in range(count))

    def _step_over(self, kind: int, key: str) -> _Array:
        if kind in _SCALARS:
            width = _SCALARS[kind][1].size
            count = self._count(f"items in {key}", limit=self.size, least_bytes=width)
            start = self.at
            self.at += count * width
        elif kind == _STRING:
            count = self._count(f"strings in {key}", limit=MAX_STRINGS, least_bytes=8)
            start = self.at
            self.at = self._after_strings(count, key)
        else:
            raise self.fail(f"{key} is an array of the unknown type {kind}", at=self.at - 4)
        return _Array(kind, count, start, self.at)

    def _after_strings(self, count: int, key: str) -> int:
        """The byte after `count` strings: the one loop that runs for each token of a vocabulary."""
        length_at, buffer = _U64.unpack_from, self.buffer
        at = last = self.at
        try:
            for _ in range(count):
                last = at
                at += 8 + length_at(buffer, at)[0]
        except (struct.error, OverflowError):
            # `last` is the place where no length could be read: at or beyond the end of the file.
            at = self.size + 1
        if at > self.size:
            where = min(last, self.size)
            raise self.fail(f"the strings of {key} run over the end of the file ({self.size} bytes)", at=where)
        return at

    # --------------------------------------------------------------------------------------------------- tensors

    def _tensors(self, count: int, alignment: int) -> dict[str, RawTensor]:
        entries: dict[str, tuple[tuple[int, ...], str, int, int, int]] = {}
        for number in range(count):
            start = self.at
            name = self._string(f"the name of tensor {number}")
            if name in entries:
                raise self.fail(f"tensor {shown(name)!r} appears twice", at=start)
            entries[name] = self._tensor_entry(shown(name), alignment, start)
        data_start = -(-self.at // alignment) * alignment
        self._check_ranges(entries, data_start)
        whole = np.frombuffer(self.buffer, np.uint8)
        return {
            name: RawTensor(
                name,
                shape,
                format,
                whole[data_start + offset : data_start + offset + nbytes],
                file=self.path,
                offset=data_start + offset,
            )
            for name, (shape, format, offset, nbytes, _) in entries.items()
        }

    def _tensor_entry(self, name: str, alignment: int, start: int) -> tuple[tuple[int, ...], str, int, int, int]:
        """-> shape (row-major), format, offset from the data's start, bytes, byte of the entry."""
        dims_at = self.at
        dims = self._u32(f"the number of dimensions of {name}")
        if dims > MAX_DIMS:
            raise self.fail(f"tensor {name} has {dims} dimensions; at most {MAX_DIMS} are possible", at=dims_at)
        shape = tuple(self._u64(f"the shape of {name}") for _ in range(dims))[::-1]
        if 0 in shape:
            raise self.fail(f"tensor {name} has a dimension of 0: {shape}", at=dims_at + 4)
        type_at = self.at
        number = self._u32(f"the type of {name}")
        format = TENSOR_TYPES.get(number)
        if format is None:
            called = _FOREIGN_TYPES.get(number, "which no GGUF version defines")
            able = ", ".join(sorted(BLOCKS))
            raise self.fail(f"tensor {name} has type {number} ({called}), not read here; read are {able}", at=type_at)
        try:
            nbytes = format_nbytes(format, shape)
        except ValueError as error:
            raise self.fail(f"tensor {name}: {error}", at=dims_at) from None
        offset_at = self.at
        offset = self._u64(f"the offset of {name}")
        if offset % alignment:
            raise self.fail(f"tensor {name} has offset {offset}, not a multiple of {alignment}", at=offset_at)
        return shape, format, offset, nbytes, start

    def _check_ranges(self, entries: Mapping[str, tuple[tuple[int, ...], str, int, int, int]], data_start: int) -> None:
        #   data_start                                             size
        #   | tensor a ....... | padding | tensor b ..... | ... |   every tensor inside, none over another
        end, before = 0, ""
        for name, (shape, format, offset, nbytes, entry) in sorted(entries.items(), key=lambda item: item[1][2]):
            if data_start + offset + nbytes > self.size:
                raise self.fail(
                    f"tensor {shown(name)} ({format} {shape}) ends at byte {data_start + offset + nbytes} "
                    f"of a file of {self.size}: the file is truncated or lies",
                    at=entry,
                )
            if offset < end:
                raise self.fail(f"tensors {shown(before)} and {shown(name)} overlap at offset {offset}", at=entry)
            end, before = offset + nbytes, name


def _decode_array(path: Path, buffer: mmap.mmap, array: _Array) -> tuple[str, ...] | NDArray[np.generic]:
    if array.kind != _STRING:
        numbers = np.frombuffer(buffer[array.start : array.end], _SCALARS[array.kind][2])
        return numbers != 0 if array.kind == _BOOL else numbers
    raw = buffer[array.start : array.end]
    length_at = _U64.unpack_from
    strings = []
    at = 0
    try:
        for _ in range(array.count):
            start = at + 8
            at = start + length_at(raw, at)[0]
            strings.append(raw[start:at].decode())
    except UnicodeDecodeError:
        raise CheckpointError(path, "a string of an array is not UTF-8", offset=array.start + start) from None
    return tuple(strings)


# ------------------------------------------------------------------------------------------------------------ writing


def write_gguf(
    path: Path | str,
    metadata: Mapping[str, object],
    tensors: Mapping[str, RawTensor | NDArray[np.generic]],
    *,
    version: int = 3,
) -> None:
    """Writes a GGUF file, replacing `path` only when it is complete.

    metadata: str, bool, int, float, numpy scalars (their type is kept) and lists, tuples or 1-D arrays of one of
    these. An int is written as uint32 where it fits, else as int32, int64 or uint64; a float as float32.
    tensors: RawTensor, or an array of float32, float16, float64 or a signed integer. `general.alignment` is obeyed.
    Raises TypeError or ValueError for what GGUF cannot hold.
    """
    path = Path(path)
    given = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(given, (int, np.integer)) or given <= 0 or int(given) & (int(given) - 1):
        raise ValueError(f"general.alignment must be a power of two, not {given!r}")
    alignment = int(given)
    raws = [as_raw_tensor(name, tensor) for name, tensor in tensors.items()]
    head = bytearray(MAGIC + _U32.pack(version) + _U64.pack(len(raws)) + _U64.pack(len(metadata)))
    for key, value in metadata.items():
        head += _string_bytes(key) + _value_bytes(key, value)
    offset = 0
    for raw in raws:
        number = next((n for n, name in TENSOR_TYPES.items() if name == raw.format), None)
        if number is None:
            raise ValueError(f"GGUF has no type for {raw.format} (tensor {raw.name})")
        if len(raw.shape) > MAX_DIMS:
            raise ValueError(f"GGUF holds at most {MAX_DIMS} dimensions (tensor {raw.name}: {raw.shape})")
        head += _string_bytes(raw.name) + _U32.pack(len(raw.shape))
        head += b"".join(_U64.pack(size) for size in raw.shape[::-1])
        head += _U32.pack(number) + _U64.pack(offset)
        offset += -(-raw.nbytes // alignment) * alignment
    head += bytes(-len(head) % alignment)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(head)
            for raw in raws:
                file.write(raw.data.data)
                file.write(bytes(-raw.nbytes % alignment))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def as_raw_tensor(name: str, tensor: RawTensor | NDArray[np.generic]) -> RawTensor:
    """The tensor under a new name; a numpy array by its dtype (no copy where it is contiguous)."""
    if isinstance(tensor, RawTensor):
        return RawTensor(name, tensor.shape, tensor.format, tensor.data)
    names = {"f4": "F32", "f2": "F16", "f8": "F64", "i1": "I8", "i2": "I16", "i4": "I32", "i8": "I64"}
    format = names.get(f"{tensor.dtype.kind}{tensor.dtype.itemsize}")
    if format is None:
        raise TypeError(f"GGUF has no type for {tensor.dtype} (tensor {name})")
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return RawTensor(name, tuple(tensor.shape), format, data)


def _string_bytes(text: str) -> bytes:
    raw = text.encode()
    return _U64.pack(len(raw)) + raw


def _value_bytes(key: str, value: object) -> bytes:
    """Type number and value."""
    if isinstance(value, str):
        return _U32.pack(_STRING) + _string_bytes(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value) and len(value):
        items = b"".join(_string_bytes(item) for item in value)
        return _U32.pack(_ARRAY) + _U32.pack(_STRING) + _U64.pack(len(value)) + items
    array = _typed(key, value)
    if array.dtype == np.bool_:
        kind, raw = _BOOL, array.astype("u1").tobytes()
    else:
        kind = next((n for n, (_, _, dtype) in _SCALARS.items() if n != _BOOL and dtype == array.dtype), -1)
        raw = array.tobytes()
    if kind < 0 or array.ndim > 1:
        raise TypeError(f"metadata {key!r}: GGUF cannot hold {type(value).__name__} of {array.dtype} {array.shape}")
    if array.ndim == 0:
        return _U32.pack(kind) + raw
    return _U32.pack(_ARRAY) + _U32.pack(kind) + _U64.pack(array.size) + raw


def _typed(key: str, value: object) -> NDArray[np.generic]:
    """The value as an array of the number type that it is written in."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    array = np.asarray(value)
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.kind in "iu":
        low, high = int(array.min()), int(array.max())
        wanted = (np.uint32,) if array.ndim == 0 else ()
        for kind in (*wanted, np.int32, np.int64, np.uint64):
            if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
                return array.astype(kind)
    if array.dtype == np.bool_:
        return array
    raise TypeError(f"metadata {key!r}: GGUF cannot hold {type(value).__name__}")
