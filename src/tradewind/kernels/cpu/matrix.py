"""Packed matrices of the CPU library: made here, described to the matmul ops here.

Knows: which packed layout a matrix becomes, memory for it, the argument words of `linear` and `gated_linear`. Refuses to know: how the
library is found (the handle is passed in), tapes, models. The layout itself is written down in csrc/pack.h.

Int8 compute: x is quantised per 32 values, sx = absmax / 127 and q = round_to_even(x * (127 / absmax)) in float32; then
y = sum over groups of scale * sx * dot(q_weight, q) + minimum * sx * sum(q). A group of x with a value that is not finite makes the whole
row of y NaN (and no other row); one with absmax below 1e-30 counts as zeros.

Int16 compute: what the int8 term leaves over, x - sx * q, is quantised in the same way as a second term, and the two results are added.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tradewind.kernels.ops import Activation, Layout, PackedExperts, PackedMatrix

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LINE = 64
"""Bytes of a cache line and of a vector: every packed matrix starts on one."""

_LAYOUTS: dict[str, int] = {"bf16": 1, "f32": 0, "quant": 2}
_SCALES_F16, _SCALES_F32 = 0, 1
_ACTIVATIONS: dict[str, int] = {"gelu_tanh": 1, "silu": 0, "swiglu_clamped": 2}
_FLOAT_SOURCES: dict[str, int] = {"BF16": 2, "F16": 1, "F32": 0}
_FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_BLOCK_FORMATS: dict[str, int] = {
    "Q4_0": 0,
    "Q4_1": 1,
    "Q4_K": 5,
    "Q5_0": 2,
    "Q5_1": 3,
    "Q5_K": 6,
    "Q6_K": 7,
    "Q8_0": 4,
}
FORMATS = tuple(sorted([*_BLOCK_FORMATS, *_FLOAT_SOURCES]))
"""What `pack_blocks` takes."""


def aligned_bytes(nbytes: int) -> Bytes:
    """Fresh bytes on a cache line, not initialised; a view that keeps its memory alive."""
    memory = np.empty(nbytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + nbytes]


def pack_f32(lib: ctypes.CDLL, weights: npt.NDArray[Any], *, threads: int | None = None) -> PackedMatrix:
    """Packs [N, K] without loss for float32 compute."""
    raw = np.ascontiguousarray(weights, np.float32)
    return _pack_float(lib, raw, "F32", "f32", n=raw.shape[0], k=raw.shape[1], threads=threads)


def pack_bf16(lib: ctypes.CDLL, weights: npt.NDArray[Any], *, threads: int | None = None) -> PackedMatrix:
    """Packs [N, K] rounded to bfloat16; the activations are rounded too when the matmul runs."""
    raw = np.ascontiguousarray(weights, np.float32)
    return _pack_float(lib, raw, "F32", "bf16", n=raw.shape[0], k=raw.shape[1], threads=threads)


def pack_quant(
    lib: ctypes.CDLL,
    quants: npt.NDArray[np.uint8],
    scale: Floats,
    minimum: Floats,
    bits: int,
    *,
    threads: int | None = None,
) -> PackedMatrix:
    """Packs quants [N, K] below 2**bits with scale and minimum [N, K / group], value = scale * q + minimum, exactly.

    bits is 4, 5, 6 or 8; group is 16 or a multiple of 32. Scales are kept as float16 where that loses nothing, and the minimum is not kept
    where it is -2**(bits - 1) * scale. Raises ValueError for other shapes.
    """
    n, k = quants.shape
    if bits not in (4, 5, 6, 8):
        raise ValueError(f"quants of {bits} bits cannot be packed: it must be 4, 5, 6 or 8")
    groups = scale.shape[1] if scale.ndim == 2 else 0
    group = k // groups if groups else 0
    if (
        scale.shape != (n, groups)
        or minimum.shape != scale.shape
        or group * groups != k
        or (group != 16 and group % 32)
        or not group
    ):
        raise ValueError(
            f"quants {quants.shape} with scale {scale.shape} and minimum {minimum.shape}: "
            f"groups along K must be of 16 or of a multiple of 32"
        )
    if quants.size and int(quants.max()) >> bits:
        raise ValueError(f"a quant of {int(quants.max())} does not fit in {bits} bits")
    if group > 32:
        scale, minimum = (np.repeat(values, group // 32, axis=1) for values in (scale, minimum))
    scale, minimum = (np.ascontiguousarray(values, np.float32) for values in (scale, minimum))
    symmetric = bool(np.array_equal(minimum, np.float32(-(1 << (bits - 1))) * scale))
    halves = 2 if group == 16 else 1
    narrow = halves == 1 and _fits_half(scale) and (symmetric or _fits_half(minimum))
    scales = _SCALES_F16 if narrow else _SCALES_F32
    data, call = _prepare(lib, "quant", bits, halves, scales, symmetric, n=n, k=k, threads=threads)
    quants = np.ascontiguousarray(quants)
    call(
        lib.tw_pack_quant,
        _at(quants),
        _at(scale),
        _at(minimum),
        bits,
        halves,
        scales,
        int(symmetric),
        ctypes.c_int64(n),
        ctypes.c_int64(k),
    )
    return _record("quant", data, n=n, k=k, bits=bits, group=32 // halves)


def pack_blocks(
    lib: ctypes.CDLL,
    raw: npt.NDArray[np.uint8],
    format: str,
    n: int,
    k: int,
    *,
    float_layout: Layout = "bf16",
    threads: int | None = None,
) -> PackedMatrix:
    """Packs GGUF blocks of a matrix [N, K], bytes as in the file. Quantised formats keep their quants and scales exactly.

    F32, F16 and BF16 become `float_layout` (bf16 rounds). Raises KeyError for an unknown format, ValueError for a wrong number of bytes.
    """
    raw = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    if format in _FLOAT_SOURCES:
        _expect_bytes(raw, n * k * _FLOAT_BYTES[format], format, n, k)
        return _pack_float(lib, raw, format, float_layout, n=n, k=k, threads=threads)
    code = _BLOCK_FORMATS[format]
    facts = (ctypes.c_int * 6)()
    lib.tw_format_layout(code, facts)
    bits, halves, scales, symmetric, values, nbytes = facts
    if k % values:
        raise ValueError(f"{format}: K = {k} is not a multiple of the block of {values} values")
    _expect_bytes(raw, n * (k // values) * nbytes, format, n, k)
    data, call = _prepare(lib, "quant", bits, halves, scales, bool(symmetric), n=n, k=k, threads=threads)
    call(lib.tw_pack_blocks, _at(raw), code, ctypes.c_int64(n), ctypes.c_int64(k))
    return _record("quant", data, n=n, k=k, bits=bits, group=32 // halves)


def pack_gated(lib: ctypes.CDLL, gate: PackedMatrix, up: PackedMatrix, *, threads: int | None = None) -> PackedMatrix:
    """Interleaves gate and up for `gated_linear`; a new matrix. Raises ValueError unless both have one shape and packed layout."""
    if gate.n != up.n or gate.gated or up.gated or _traits(gate) != _traits(up):
        raise ValueError(f"gate and up cannot be interleaved: {_sentence(gate)}, and {_sentence(up)}")
    data = aligned_bytes(gate.nbytes + up.nbytes - LINE)
    lib.tw_pack_gated(_at(gate.data[0]), _at(up.data[0]), _at(data), _threads(threads))
    return PackedMatrix(
        layout=gate.layout,
        n=2 * gate.n,
        k=gate.k,
        bits=gate.bits,
        group=gate.group,
        gated=True,
        data=(data,),
        nbytes=data.nbytes,
    )


def pack_stacked(lib: ctypes.CDLL, parts: Sequence[PackedMatrix], *, threads: int | None = None) -> PackedMatrix:
    """Stacks matrices along N (query, key, value); a new matrix.

    Raises ValueError unless they share K and packed layout, and N of every part but the last is a multiple of 16.
    """
    if not parts or any(part.gated or _traits(part) != _traits(parts[0]) for part in parts):
        raise ValueError(f"matrices of different packed layouts cannot be stacked: {', '.join(map(_sentence, parts))}")
    if any(part.n % 16 for part in parts[:-1]):
        raise ValueError(f"cannot stack {[part.n for part in parts]} outputs: all but the last must be multiples of 16")
    data = aligned_bytes(sum(part.nbytes - LINE for part in parts) + LINE)
    addresses = (ctypes.c_void_p * len(parts))(*(part.data[0].ctypes.data for part in parts))
    lib.tw_pack_stacked(addresses, len(parts), _at(data), _threads(threads))
    first = parts[0]
    return _record(first.layout, data, n=sum(part.n for part in parts), k=first.k, bits=first.bits, group=first.group)


def pack_experts(parts: Sequence[PackedMatrix]) -> PackedExperts:
    """The parts as they lie, with a table of their addresses. Raises ValueError unless they share shape and packed layout."""
    first = parts[0]
    if any((part.n, part.gated, _traits(part)) != (first.n, first.gated, _traits(first)) for part in parts):
        raise ValueError(
            f"experts of different shapes or packed layouts: {', '.join(sorted(set(map(_sentence, parts))))}"
        )
    table = np.array([part.data[0].ctypes.data for part in parts], np.int64)
    return PackedExperts(
        experts=len(parts),
        n=first.n,
        k=first.k,
        layout=first.layout,
        gated=first.gated,
        data=(table, *(part.data[0] for part in parts)),
        nbytes=sum(part.nbytes for part in parts),
    )


def can_combine(parts: Sequence[PackedMatrix]) -> bool:
    """Whether `pack_stacked` (and, with equal N, `pack_gated`) takes these parts together."""
    return all(not part.gated and _traits(part) == _traits(parts[0]) for part in parts) and not any(
        part.n % 16 for part in parts[:-1]
    )


def unpack(lib: ctypes.CDLL, packed: PackedMatrix, *, threads: int | None = None) -> Floats:
    """The values as float32 [N, K]; of a gated matrix the gate rows, then the up rows."""
    out = np.empty((packed.n, packed.k), np.float32)
    lib.tw_unpack(_at(packed.data[0]), _at(out), _threads(threads))
    return out


# ------------------------------------------------------------------------------------------------------- argument words


def scratch_bytes(lib: ctypes.CDLL, packed: PackedMatrix, capacity_rows: int, *, terms: int = 1) -> int:
    """Bytes of scratch (on a cache line) that one matmul of up to `capacity_rows` rows needs; it may be shared by ops that run in turn."""
    function = lib.tw_matmul_scratch
    function.restype = ctypes.c_int64
    return max(LINE, int(function(_at(packed.data[0]), ctypes.c_int64(capacity_rows), ctypes.c_int64(terms))))


def experts_scratch_bytes(
    lib: ctypes.CDLL, gate_up: PackedExperts, down: PackedExperts, pairs: int, *, terms: int = 1
) -> int:
    """Bytes of scratch (on a cache line) that `experts` needs for up to `pairs` pairs of a token and an expert."""
    function = lib.tw_experts_scratch
    function.restype = ctypes.c_int64
    numbers = (ctypes.c_int64(pairs), ctypes.c_int64(gate_up.experts), ctypes.c_int64(terms))
    return int(function(_at(gate_up.data[1]), _at(down.data[1]), *numbers))


def activation_code(activation: Activation) -> int:
    """The library's number of an activation."""
    return _ACTIVATIONS[activation]


def linear_words(
    x_ptr: int,
    x_stride: int,
    packed: PackedMatrix,
    bias_ptr: int,
    out_ptr: int,
    out_stride: int,
    count_ptr: int,
    scratch_ptr: int,
    terms: int = 1,
) -> tuple[int, ...]:
    """The argument words of op `linear`. Strides are in float32 values from row to row; bias_ptr 0 means no bias.

    terms: int8 terms of an activation that meets quants; 1 (int8) or 2 (int16: the second is what the first left over).
    """
    assert not packed.gated, "a gated matrix belongs to gated_linear"
    return (x_ptr, x_stride, packed.data[0].ctypes.data, bias_ptr, out_ptr, out_stride, count_ptr, scratch_ptr, terms)


def gated_linear_words(
    x_ptr: int,
    x_stride: int,
    packed: PackedMatrix,
    bias_ptr: int,
    out_ptr: int,
    out_stride: int,
    count_ptr: int,
    scratch_ptr: int,
    activation: Activation,
    terms: int = 1,
) -> tuple[int, ...]:
    """The argument words of op `gated_linear`: those of `linear`, then the activation. `packed` is from `pack_gated`."""
    assert packed.gated, "gated_linear needs a matrix from pack_gated"
    words = (x_ptr, x_stride, packed.data[0].ctypes.data, bias_ptr, out_ptr, out_stride, count_ptr, scratch_ptr, terms)
    return (*words, _ACTIVATIONS[activation])


# -------------------------------------------------------------------------------------------------------------- helpers


def _at(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _threads(threads: int | None) -> ctypes.c_int:
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ctypes.c_int(threads)


def _prepare(
    lib: ctypes.CDLL,
    layout: Layout,
    bits: int,
    halves: int,
    scales: int,
    symmetric: bool,
    *,
    n: int,
    k: int,
    threads: int | None,
) -> tuple[Bytes, Callable[..., None]]:
    """Memory for a packed matrix, and a caller that adds the two last arguments of every packing function: where to, and threads."""
    size = lib.tw_packed_bytes
    size.restype = ctypes.c_int64
    data = aligned_bytes(
        size(_LAYOUTS[layout], bits, halves, scales, int(symmetric), ctypes.c_int64(n), ctypes.c_int64(k))
    )

    def call(function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments, _at(data), _threads(threads))

    return data, call


def _pack_float(
    lib: ctypes.CDLL, raw: npt.NDArray[Any], source: str, layout: Layout, *, n: int, k: int, threads: int | None
) -> PackedMatrix:
    if layout == "quant":
        raise ValueError(f"{source} values are not quants; quantise them first or pack them as f32 or bf16")
    bits = 32 if layout == "f32" else 16
    data, call = _prepare(lib, layout, bits, 1, _SCALES_F16, False, n=n, k=k, threads=threads)
    call(lib.tw_pack_float, _at(raw), _FLOAT_SOURCES[source], _LAYOUTS[layout], ctypes.c_int64(n), ctypes.c_int64(k))
    return _record(layout, data, n=n, k=k, bits=bits, group=0)


def _record(layout: Layout, data: Bytes, *, n: int, k: int, bits: int, group: int) -> PackedMatrix:
    return PackedMatrix(layout=layout, n=n, k=k, bits=bits, group=group, gated=False, data=(data,), nbytes=data.nbytes)


def _fits_half(values: Floats) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _traits(packed: PackedMatrix) -> tuple[int, bytes]:
    # Bytes 4..8 of the header: layout, bits, halves, scales, symmetric.
    return packed.k, packed.data[0][4:9].tobytes()


def _sentence(packed: PackedMatrix) -> str:
    kind = f"{packed.bits}-bit quants in groups of {packed.group}" if packed.layout == "quant" else packed.layout
    return f"[{packed.n}, {packed.k}] of {kind}{' (gated)' if packed.gated else ''}"


def _expect_bytes(raw: Bytes, nbytes: int, format: str, n: int, k: int) -> None:
    if raw.size != nbytes:
        raise ValueError(f"[{n}, {k}] in {format} needs {nbytes} bytes, not {raw.size}")
