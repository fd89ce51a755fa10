"""Safetensors files, single or sharded: mapped, without a framework.

Knows the layout (header length u64 | header JSON | data) and the index file of sharded checkpoints. Refuses to know
tensor names' meaning and dtypes' arithmetic, and refuses files whose header and bytes disagree.

Own reader: the library's zero-copy path needs a framework to hold bfloat16, and its errors name no file and no byte.
The rules checked are the format's own: offsets in range, no overlap, no gap, size = shape x dtype.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from pathlib import Path

import numpy as np

from tradewind.weights.tensor import PLAIN_BITS, CheckpointError, RawTensor, format_nbytes, shown

INDEX_NAME = "model.safetensors.index.json"

# The format's reference implementation refuses longer headers too.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 64

# Safetensors' dtype names that are called otherwise here; all others are the same word.
_RENAMED = {"F8_E4M3FN": "F8_E4M3"}
_DTYPES = frozenset(PLAIN_BITS) | {"BF16", "F16", "F32"}
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")


def open_safetensors(path: Path | str) -> dict[str, RawTensor]:
    """Maps one file and checks its whole header; changes nothing.

    The tensors are views of the mapping, in the file's order. Raises CheckpointError (file, byte, reason).
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise CheckpointError(path, f"{size} bytes cannot hold a header length of 8", offset=0)
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(path, f"cannot be opened: {error.strerror or error}") from None
    header_bytes = int.from_bytes(buffer[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(path, f"the header says {header_bytes} bytes and {size - 8} are left", offset=0)
    header = parse_json(path, buffer[8 : 8 + header_bytes], base=8)
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    whole = np.frombuffer(buffer, np.uint8)
    tensors: dict[str, RawTensor] = {}
    ends: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        format, shape, begin, end = _entry(path, name, entry, size - data_start)
        data = whole[data_start + begin : data_start + end]
        tensors[name] = RawTensor(name, shape, format, data, file=path, offset=data_start + begin)
        ends.append((begin, end, name))
    _check_ranges(path, ends, data_start, size)
    return tensors


def open_sharded(folder: Path | str) -> dict[str, RawTensor]:
    """All tensors of a folder: by its index file, else one file, else a complete numbered set; changes nothing.

    Raises CheckpointError for a missing shard, a tensor that its shard lacks, a name in two shards, or files of which
    it is not clear which belong together.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    if index.is_file():
        return _by_index(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return open_safetensors(files[0])
    if (folder / "model.safetensors") in files:
        return open_safetensors(folder / "model.safetensors")
    if not files:
        raise CheckpointError(folder, "holds no *.safetensors file")
    return _numbered(folder, files)


def parse_json(path: Path, raw: bytes, *, base: int = 0) -> dict[str, object]:
    """A JSON object of which no key appears twice; `base` is where `raw` starts in the file. Raises CheckpointError."""
    try:
        parsed = json.loads(raw, object_pairs_hook=_no_twice)
    except json.JSONDecodeError as error:
        offset = base + len(error.doc[: error.pos].encode(errors="surrogatepass"))
        raise CheckpointError(path, f"broken JSON: {error.msg}", offset=offset) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(path, "broken JSON: not UTF-8", offset=base + error.start) from None
    except RecursionError:
        raise CheckpointError(path, "broken JSON: nested too deep", offset=base) from None
    except ValueError as error:
        raise CheckpointError(path, f"broken JSON: {error}", offset=base) from None
    if not isinstance(parsed, dict):
        raise CheckpointError(path, f"broken JSON: an object is needed, not {type(parsed).__name__}", offset=base)
    return parsed


def _no_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    merged = dict(pairs)
    if len(merged) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {shown(again)!r} appears twice")
    return merged


def _entry(path: Path, name: str, entry: object, room: int) -> tuple[str, tuple[int, ...], int, int]:
    """One header entry, checked -> format, shape, begin, end."""
    what = f"tensor {shown(name)!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(path, f"{what} has no dtype, shape and data_offsets", offset=8)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(size) for size in shape):
        raise CheckpointError(path, f"{what} has a shape that is not a list of sizes", offset=8)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(path, f"{what} has data_offsets that are not two byte positions", offset=8)
    begin, end = offsets
    if not begin <= end <= room:
        raise CheckpointError(
            path, f"{what} lies at {begin} to {end} of {room} data bytes: the file is truncated or lies", offset=8
        )
    format = _RENAMED.get(dtype, dtype) if isinstance(dtype, str) else ""
    if format not in _DTYPES:
        raise CheckpointError(path, f"{what} has the unknown dtype {shown(str(dtype))!r}", offset=8)
    try:
        nbytes = format_nbytes(format, shape)
    except ValueError as error:
        raise CheckpointError(path, f"{what}: {error}", offset=8) from None
    if nbytes != end - begin:
        raise CheckpointError(
            path, f"{what} ({format} {tuple(shape)}) needs {nbytes} bytes and has {end - begin}", offset=8
        )
    return format, tuple(shape), begin, end


def _is_size(value: object) -> bool:
    # type, not isinstance: JSON's true is an int to Python. Below 2^63, so that a product stays printable.
    return type(value) is int and 0 <= value < 1 << 63


def _check_ranges(path: Path, ends: list[tuple[int, int, str]], data_start: int, size: int) -> None:
    #   data_start                 size
    #   | tensor | tensor | tensor |      every byte belongs to exactly one tensor
    before = 0
    for begin, end, name in sorted(ends):
        if begin != before:
            fault = "overlaps the tensor before it" if begin < before else "leaves a gap before it"
            raise CheckpointError(path, f"tensor {shown(name)!r} {fault}", offset=data_start + begin)
        before = end
    if data_start + before != size:
        raise CheckpointError(
            path, f"{size - data_start - before} bytes after the last tensor belong to none", offset=data_start + before
        )


def _by_index(folder: Path, index: Path) -> dict[str, RawTensor]:
    weight_map = parse_json(index, _read_bytes(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "has no weight_map from tensor names to files")
    shards: dict[str, dict[str, RawTensor]] = {}
    tensors: dict[str, RawTensor] = {}
    for name, shard in weight_map.items():
        # Only plain names: an index must not lead out of its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard or "\\" in shard:
            raise CheckpointError(
                index, f"tensor {shown(name)!r} is said to be in {shown(str(shard))!r}, not a file name"
            )
        if shard not in shards:
            if not (folder / shard).is_file():
                there = len({other for other in weight_map.values() if (folder / str(other)).is_file()})
                needed = len(set(map(str, weight_map.values())))
                raise CheckpointError(folder / shard, f"this shard is missing; {there} of {needed} shards are there")
            shards[shard] = open_safetensors(folder / shard)
        if name not in shards[shard]:
            raise CheckpointError(folder / shard, f"lacks tensor {shown(name)!r}, which {INDEX_NAME} says is in it")
        tensors[name] = shards[shard][name]
    return tensors


def _numbered(folder: Path, files: list[Path]) -> dict[str, RawTensor]:
    matches = [_SHARD.fullmatch(file.name) for file in files]
    groups: dict[tuple[str, int], set[int]] = {}
    for match in matches:
        if match:
            groups.setdefault((match["stem"], int(match["total"])), set()).add(int(match["number"]))
    names = ", ".join(file.name for file in files[:4]) + (", …" if len(files) > 4 else "")
    if len(groups) != 1 or None in matches:
        raise CheckpointError(folder, f"{len(files)} files and no {INDEX_NAME}: which belong together? ({names})")
    ((_, total), numbers) = next(iter(groups.items()))
    missing = sorted(set(range(1, total + 1)) - numbers)
    if missing or len(numbers) != total:
        raise CheckpointError(folder, f"shards {missing[:8]} of {total} are missing")
    tensors: dict[str, RawTensor] = {}
    for file in files:
        for name, tensor in open_safetensors(file).items():
            if name in tensors:
                raise CheckpointError(file, f"tensor {shown(name)!r} is in an earlier shard too")
            tensors[name] = tensor
    return tensors


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
