"""bf16 and FP8 as a GPU has them, for Triton's interpreter. Test-only: it patches private classes of triton 3.7.1.

Knows: where the interpreter is wrong about bf16 (tl.dot, arithmetic, round-to-nearest stores) and how to be right. Import it after setting
TRITON_INTERPRET=1 and before importing any kernel; it raises on a version it was not written for.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

KNOWN_VERSIONS = ("3.7.1",)

if triton.__version__ not in KNOWN_VERSIONS:
    raise RuntimeError(f"the bf16 shim knows triton {', '.join(KNOWN_VERSIONS)}, found {triton.__version__}")

Handle, Builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


def is_bf16(handle):
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def widened(handle):
    """A bf16 handle (bits in uint16) as float32; others as they are."""
    if not is_bf16(handle):
        return handle
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def bf16_bits(values):
    """float32 -> bf16 bits, round to nearest even."""
    values = np.ascontiguousarray(np.asarray(values, np.float32))
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def fp8_bits(values):
    """float32 -> e4m3 bits, round to nearest even (the interpreter truncates)."""
    values = torch.from_numpy(np.ascontiguousarray(np.asarray(values, np.float32)))
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


_binary_op, _unary_op, _cast_impl = Builder.binary_op, Builder.unary_op, Builder.cast_impl


def binary_op(self, lhs, rhs, op):
    if not (is_bf16(lhs) or is_bf16(rhs)):
        return _binary_op(self, lhs, rhs, op)
    out = op(widened(lhs).data, widened(rhs).data)
    return Handle(out, tl.int1) if op in _COMPARISONS else Handle(bf16_bits(out), tl.bfloat16)


def unary_op(self, arg, op):
    return Handle(bf16_bits(op(widened(arg).data)), tl.bfloat16) if is_bf16(arg) else _unary_op(self, arg, op)


def create_dot(self, a, b, d, *args):
    def as_float(handle):
        if handle.dtype.is_int():
            return handle.data.astype(np.int32)
        if handle.dtype.primitive_bitwidth == 8:
            half = interpreter._convert_float(handle.data, handle.dtype, tl.float16, None)
            return half.view(np.float16).astype(np.float32)
        return widened(handle).data.astype(np.float32)

    return Handle((np.matmul(as_float(a), as_float(b)) + d.data).astype(d.data.dtype), d.dtype.scalar)


def cast_impl(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if target == tl.bfloat16 and source != tl.bfloat16:
        values = src.data
        if source.primitive_bitwidth == 8 and source.is_floating():
            values = interpreter._convert_float(src.data, source, tl.float32, None).view(np.float32)
        return Handle(bf16_bits(values), tl.bfloat16)
    if target == tl.float8e4nv and source.is_floating() and source != target:
        return Handle(fp8_bits(widened(src).data), tl.float8e4nv)
    if source == tl.bfloat16 and target != tl.bfloat16:
        wide = widened(src)
        return wide if target == tl.float32 else _cast_impl(self, wide, dst_type)
    return _cast_impl(self, src, dst_type)


_create_fp_to_fp = Builder.create_fp_to_fp


def create_fp_to_fp(self, src, dst_type, rounding_mode):
    if dst_type.scalar in (tl.float8e4nv, tl.bfloat16):
        return cast_impl(self, src, dst_type)
    return _create_fp_to_fp(self, src, dst_type, rounding_mode)


Builder.create_fp_to_fp = create_fp_to_fp
Builder.binary_op, Builder.unary_op, Builder.create_dot, Builder.cast_impl = binary_op, unary_op, create_dot, cast_impl
for _name in (
    "create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui", "create_fp_ext", "create_fp_trunc", "create_int_cast",
):  # fmt: skip
    setattr(Builder, _name, lambda self, src, dst_type, *args: self.cast_impl(src, dst_type))
if not hasattr(Builder, "get_bf16"):
    Builder.get_bf16 = lambda self, value: Handle(bf16_bits(np.array([value], np.float32)), tl.bfloat16)
