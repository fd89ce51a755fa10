"""The block formats of GGUF as numpy: from packed bytes to quants with scales, and to float32.

Knows the byte layout of each format, in one table (`BLOCKS`). Refuses to know files, tensors' names, devices and
matmuls: the packed matmuls take what `as_scale_min` gives.

Every quantised format here is the same sentence, `value = scale * q + minimum`, with a scale for each group of
values and a small unsigned q. So a format is only the function that unpacks those three; `dequantise` is written once.

Why that is not an approximation: a scale is a float16 (11 significant bits) times a sub-block scale (at most 7 bits),
q has at most 8 bits where the scale is plain and 6 where it is not. The product has at most 11 + 7 + 6 = 24 bits, which
float32 holds, and a symmetric format's `scale * q - offset * scale` ends in a number that needs no more. What is left
is the one rounding of adding a true minimum, the same one that the formats' definition has.
(Only for finite scales: with an infinite one the symmetric formats give NaN where the definition gives infinity.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

# numpy.typing costs 10 ms to import and is needed by the checker only.
if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]
    ScaleMin = tuple[Bytes, Floats, Floats]

# Blocks are handled in pieces whose float32 result stays in the second-level cache (64k values = 256 KB).
_VALUES_PER_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One storage format: how many values a block holds, in how many bytes, and how they are unpacked.

    `group` is the number of neighbouring values that share a scale and a minimum (0: not a quantised format).
    `unpack` maps raw blocks [n, bytes_per_block] to quants uint8 [n, values_per_block], scale and minimum
    float32 [n, values_per_block / group]; it is None for the plain float formats.
    `widen` maps raw blocks to float32 [n, values_per_block] where the format is a plain float.
    """

    name: str
    values_per_block: int
    bytes_per_block: int
    group: int = 0
    unpack: Callable[[Bytes], ScaleMin] | None = None
    widen: Callable[[Bytes], Floats] | None = None

    @property
    def bits_per_value(self) -> float:
        """Storage bits for each value, scales included."""
        return 8 * self.bytes_per_block / self.values_per_block

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of `shape` (row-major; the last axis is cut into blocks).

        Raises ValueError when the last axis is not a multiple of the block.
        """
        count = 1
        for size in shape:
            count *= size
        row = shape[-1] if len(shape) else 1
        if row % self.values_per_block:
            raise ValueError(f"a row of {row} values is not a multiple of the {self.values_per_block} of {self.name}")
        return count // self.values_per_block * self.bytes_per_block

    def dequantise(self, raw: Bytes) -> Floats:
        """Raw blocks uint8 [n, bytes_per_block] -> float32 [n, values_per_block]; changes nothing."""
        out = np.empty((len(raw), self.values_per_block), np.float32)
        piece = max(1, _VALUES_PER_PIECE // self.values_per_block)
        for start in range(0, len(raw), piece):
            self._dequantise_piece(raw[start : start + piece], out[start : start + piece])
        return out

    def _dequantise_piece(self, raw: Bytes, out: Floats) -> None:
        if self.widen is not None:
            out[:] = self.widen(raw)
            return
        assert self.unpack is not None
        quants, scale, minimum = self.unpack(raw)
        grouped = out.reshape(len(raw), -1, self.group)
        np.multiply(quants.reshape(grouped.shape), scale[:, :, None], out=grouped, dtype=np.float32)
        grouped += minimum[:, :, None]


def dequantise(raw: NDArray[np.generic], format: str, shape: Sequence[int]) -> Floats:
    """Float32 values of `shape` from the bytes of a tensor; changes nothing, copies always.

    raw: the tensor's bytes, any shape, uint8. Raises KeyError for a format that is not in `BLOCKS`, ValueError when
    the number of bytes is not what `shape` needs.
    """
    block = BLOCKS[format]
    return block.dequantise(_as_blocks(raw, block, shape)).reshape(tuple(shape))


def as_scale_min(raw: NDArray[np.generic], format: str) -> tuple[Bytes, Floats, Floats, int]:
    """Splits packed blocks into (quants, scale, minimum, group); changes nothing.

    raw: uint8, any shape, a whole number of blocks. Result, for n blocks of k values in groups of g: quants uint8
    [n, k], scale float32 [n, k/g], minimum float32 [n, k/g], g. The values in row-major order are
    `scale * quants + minimum`, exact for symmetric formats and with one float32 rounding for the others.
    Raises KeyError for an unknown format and ValueError for one that has no scales (F32, F16, BF16).
    """
    block = BLOCKS[format]
    if block.unpack is None:
        raise ValueError(f"{format} is not a quantised format: it has no scales")
    blocks = _as_blocks(raw, block, None)
    return (*block.unpack(blocks), block.group)


def _as_blocks(raw: NDArray[np.generic], block: BlockFormat, shape: Sequence[int] | None) -> Bytes:
    flat = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    if flat.size % block.bytes_per_block:
        raise ValueError(f"{flat.size} bytes are not a whole number of {block.name} blocks of {block.bytes_per_block}")
    if shape is not None and block.nbytes(shape) != flat.size:
        raise ValueError(f"{tuple(shape)} in {block.name} needs {block.nbytes(shape)} bytes, not {flat.size}")
    return flat.reshape(-1, block.bytes_per_block)


# ---------------------------------------------------------------------------------------------------- the formats
#
# Legend: d = the block's float16 scale, m = its float16 minimum, qs = low four bits, qh = the bits above them.
# The formats' shapes are those of ggml's block structures.


def _half(raw: Bytes, offset: int) -> Floats:
    """The float16 at `offset` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(raw[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """uint8 [n, b] -> [n, 2b]: `width` bytes give `width` low nibbles and then their `width` high nibbles."""
    n, nbytes = packed.shape
    out = np.empty((n, nbytes // width, 2, width), np.uint8)
    split = packed.reshape(n, -1, width)
    np.bitwise_and(split, 15, out=out[:, :, 0])
    np.right_shift(split, 4, out=out[:, :, 1])
    return out.reshape(n, 2 * nbytes)


def _q4_0(raw: Bytes) -> ScaleMin:
    # d:2 | qs:16                                 value = d * (q - 8)
    d = _half(raw, 0)
    return _nibbles(raw[:, 2:18], 16), d, -8.0 * d


def _q4_1(raw: Bytes) -> ScaleMin:
    # d:2 | m:2 | qs:16                           value = d * q + m
    return _nibbles(raw[:, 4:20], 16), _half(raw, 0), _half(raw, 2)


def _fifth_bits(qh: Bytes) -> Bytes:
    """Four bytes a block -> the 32 bits in order, each worth 16."""
    bits = np.unpackbits(np.ascontiguousarray(qh), axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)


def _q5_0(raw: Bytes) -> ScaleMin:
    # d:2 | qh:4 | qs:16                          value = d * (q - 16)
    d = _half(raw, 0)
    quants = _nibbles(raw[:, 6:22], 16)
    quants |= _fifth_bits(raw[:, 2:6])
    return quants, d, -16.0 * d


def _q5_1(raw: Bytes) -> ScaleMin:
    # d:2 | m:2 | qh:4 | qs:16                    value = d * q + m
    quants = _nibbles(raw[:, 8:24], 16)
    quants |= _fifth_bits(raw[:, 4:8])
    return quants, _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Bytes) -> ScaleMin:
    # d:2 | qs:32 signed                          value = d * q; the unsigned q here is q + 128: the top bit flipped
    d = _half(raw, 0)
    return raw[:, 2:34] ^ np.uint8(0x80), d, -128.0 * d


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum [n, 8] of the eight sub-blocks of Q4_K and Q5_K, from `d | dmin | 12 bytes`.

    Six bits each. Bytes 0-3 hold the scales of sub-blocks 0-3 and bytes 4-7 their minima in their low six bits;
    bytes 8-11 hold the low four bits of sub-blocks 4-7 (scale low nibble, minimum high nibble), whose upper two
    bits sit in the top of bytes 0-3 and 4-7.
    """
    low, mid, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=1)
    return _half(raw, 0) * scale.astype(np.float32), -(_half(raw, 2) * minimum.astype(np.float32))


def _q4_k(raw: Bytes) -> ScaleMin:
    # d:2 | dmin:2 | scales:12 | qs:128           32 bytes of qs hold sub-blocks 2i (low nibbles) and 2i+1 (high)
    scale, minimum = _k_scales(raw)
    return _nibbles(raw[:, 16:144], 32), scale, minimum


def _q5_k(raw: Bytes) -> ScaleMin:
    # d:2 | dmin:2 | scales:12 | qh:32 | qs:128   bit s of qh[i] is the fifth bit of value i of sub-block s
    scale, minimum = _k_scales(raw)
    quants = _nibbles(raw[:, 48:176], 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    quants |= (((raw[:, None, 16:48] >> shifts) & 1) << 4).reshape(-1, 256)
    return quants, scale, minimum


def _q6_k(raw: Bytes) -> ScaleMin:
    # ql:128 | qh:64 | scales:16 signed | d:2     value = d * scale[i // 16] * (q - 32)
    # Each half of 128 values has 64 bytes of ql (low nibbles: values 0-63, high: 64-127) and 32 bytes of qh, where
    # the bit pair 2j of byte i belongs to value 32 j + i.
    quants = _nibbles(raw[:, 0:128], 64).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    quants |= ((raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    scale = _half(raw, 208) * scales
    return quants.reshape(-1, 256), scale, -32.0 * scale


def _f32(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float32)


def _f16(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _bf16(raw: Bytes) -> Floats:
    bits = np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32)
    return np.left_shift(bits, 16, out=bits).view(np.float32)


BLOCKS: dict[str, BlockFormat] = {
    block.name: block
    for block in (
        BlockFormat("BF16", 1, 2, widen=_bf16),
        BlockFormat("F16", 1, 2, widen=_f16),
        BlockFormat("F32", 1, 4, widen=_f32),
        BlockFormat("Q4_0", 32, 18, group=32, unpack=_q4_0),
        BlockFormat("Q4_1", 32, 20, group=32, unpack=_q4_1),
        BlockFormat("Q4_K", 256, 144, group=32, unpack=_q4_k),
        BlockFormat("Q5_0", 32, 22, group=32, unpack=_q5_0),
        BlockFormat("Q5_1", 32, 24, group=32, unpack=_q5_1),
        BlockFormat("Q5_K", 256, 176, group=32, unpack=_q5_k),
        BlockFormat("Q6_K", 256, 210, group=16, unpack=_q6_k),
        BlockFormat("Q8_0", 32, 34, group=32, unpack=_q8_0),
    )
}


# -------------------------------------------------------------------------------------- the way back (reference only)


def quantise_q4_0(values: Floats) -> Bytes:
    """Packs float32 [..., multiple of 32] as Q4_0 -> uint8 [..., blocks * 18]; changes nothing.

    The value of the largest magnitude becomes q = 0 exactly, so the scale takes its sign (and -8 is used).
    """
    blocks = _to_blocks(values)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    d = peak / np.float32(-8)
    q = np.trunc(blocks * _inverse(d) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
    return _packed(values, d.astype(np.float16).view(np.uint8), q[:, :16] | (q[:, 16:] << 4))


def quantise_q4_1(values: Floats) -> Bytes:
    """Packs float32 [..., multiple of 32] as Q4_1 -> uint8 [..., blocks * 20]; changes nothing."""
    blocks = _to_blocks(values)
    low = blocks.min(axis=1, keepdims=True)
    d = (blocks.max(axis=1, keepdims=True) - low) / np.float32(15)
    q = np.trunc((blocks - low) * _inverse(d) + np.float32(0.5)).clip(0, 15).astype(np.uint8)
    head = np.concatenate([d, low], axis=1).astype(np.float16).view(np.uint8)
    return _packed(values, head, q[:, :16] | (q[:, 16:] << 4))


def quantise_q8_0(values: Floats) -> Bytes:
    """Packs float32 [..., multiple of 32] as Q8_0 -> uint8 [..., blocks * 34]; changes nothing.

    Rounds half away from zero.
    """
    blocks = _to_blocks(values)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(d)
    # Not trunc(x + 0.5): 0.49999997 + 0.5 rounds up to 1 in float32.
    whole = np.trunc(scaled)
    q = (whole + np.sign(scaled) * (np.abs(scaled - whole) >= 0.5)).astype(np.int8)
    return _packed(values, d.astype(np.float16).view(np.uint8), q.view(np.uint8))


def _to_blocks(values: Floats) -> Floats:
    if values.ndim == 0 or values.shape[-1] % 32:
        raise ValueError(f"the last axis of {values.shape} is not a multiple of 32")
    if not np.isfinite(values).all():
        raise ValueError("values to quantise must be finite")
    return np.ascontiguousarray(values, np.float32).reshape(-1, 32)


def _inverse(d: Floats) -> Floats:
    """1/d where d is not zero, else 0: a block of zeros is quants of zero."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _packed(values: Floats, *parts: Bytes) -> Bytes:
    joined = np.concatenate(parts, axis=1)
    return joined.reshape(*values.shape[:-1], -1)
