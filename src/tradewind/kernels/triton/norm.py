"""Residual add, RMS or layer norm and optional per-token FP8 quantisation in one pass over a row.

Knows: the row arithmetic. Refuses to know: which norm of which layer this is.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton import blocks
from tradewind.kernels.triton.blocks import quantised_columns, store_scales
from tradewind.kernels.triton.launch import FP8, launch_options, let_next_start, pow2, wait_for_previous


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, delta_ptr, delta_weight_ptr, weight_ptr, out_ptr, scale_ptr, count_ptr, E, delta_eps, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, DELTA_NORM: tl.constexpr, QUANT: tl.constexpr, COUNTED: tl.constexpr, BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < E
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if DELTA_NORM:
        delta_weight = tl.load(delta_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    x = tl.load(x_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        delta = tl.load(delta_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
        if DELTA_NORM:
            delta = delta * tl.rsqrt(tl.sum(delta * delta, 0) / E + delta_eps) * delta_weight
        x += delta
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(x_ptr + row * E + column, x.to(x_ptr.dtype.element_ty), mask=inside)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / E + eps) * weight
    if QUANT:
        scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-10) / 448.0
        y = tl.clamp(y / scale, -448.0, 448.0)
        tl.store(scale_ptr + row, scale)
    if BLOCKED:
        y, scales = quantised_columns(y, BLOCK)
        store_scales(scale_ptr, row, scales, E, BLOCK)
    tl.store(out_ptr + row * E + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    out: Tensor,
    delta_weight: Tensor | None = None,
    delta_eps: float = 0.0,
    scale: Tensor | None = None,
    count: Tensor | None = None,
    pdl: bool = False,
    warps: int | None = None,
) -> None:
    """x += delta (in place, when given); out = x / rms(x) * weight. With delta_weight [E], delta is normed by it first.

    x [T, E] float32 or bf16, delta [T, E] bf16 or float32 (may be `out`), weight [E], out [T, E] bf16, or e4m3 with `scale` float32 [T]
    (value = scale * out, scale = absmax / 448; [T, E / 128]: of 128 columns). count: int32 [1] on the device, rows beyond it are left
    alone. The norm sees the residual as it is stored. Sums in float32. Source: Zhang & Sennrich 2019.
    """
    tokens, width = x.shape
    assert (out.dtype == FP8) == (scale is not None), "an FP8 output has a scale, others have none"
    blocked = scale is not None and scale.ndim == 2
    block = pow2(width, blocks.COLUMNS if blocked else 1)
    _add_rms_norm_kernel[(tokens,)](
        x, delta if delta is not None else x, delta_weight if delta_weight is not None else weight, weight, out,
        scale if scale is not None else x, count if count is not None else x, width, delta_eps, eps,
        BLOCK=block, ADD=delta is not None, DELTA_NORM=delta_weight is not None, QUANT=scale is not None and not blocked,
        COUNTED=count is not None, BLOCKED=blocked, **launch_options(pdl=pdl, warps=warps or max(1, min(16, block // 512))),
    )  # fmt: skip


@triton.jit
def _rms_norm_span_kernel(
    x_ptr, weight_ptr, count_ptr, stride, start, E, eps, BLOCK: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < E
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    place = x_ptr + row * stride + start + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / E + eps) * weight
    tl.store(place, y.to(x_ptr.dtype.element_ty), mask=inside)


def rms_norm_span(
    x: Tensor, weight: Tensor, *, start: int, eps: float, count: Tensor | None = None, pdl: bool = False
) -> None:
    """RMS norm in place of the columns start .. start + len(weight) of x [T, N] bf16 or float32; the others stay as they are."""
    width = len(weight)
    block = pow2(width)
    _rms_norm_span_kernel[(x.shape[0],)](
        x, weight, count if count is not None else x, x.stride(0), start, width, eps,
        BLOCK=block, COUNTED=count is not None, **launch_options(pdl=pdl, warps=max(1, min(16, block // 512))),
    )  # fmt: skip


@triton.jit
def _add_layer_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, bias_ptr, out_ptr, count_ptr, E, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, STORE_X: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < E
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    x = tl.load(x_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        if STORE_X:
            tl.store(x_ptr + row * E + column, x.to(x_ptr.dtype.element_ty), mask=inside)
    centred = tl.where(inside, x - tl.sum(x, 0) / E, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 0) / E + eps) * weight + bias
    tl.store(out_ptr + row * E + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def add_layer_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    out: Tensor,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x += delta (in place, when given); out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; out may be x or delta.

    x [T, E] float32 or bf16, delta [T, E], weight and bias [E], out [T, E] bf16 or float32. Sums in float32. Source: Ba et al. 2016.
    """
    tokens, width = x.shape
    block = pow2(width)
    _add_layer_norm_kernel[(tokens,)](
        x, delta if delta is not None else x, weight, bias, out, count if count is not None else x, width, eps,
        BLOCK=block, ADD=delta is not None, STORE_X=out.data_ptr() != x.data_ptr(), COUNTED=count is not None,
        **launch_options(pdl=pdl, warps=max(1, min(16, block // 512))),
    )  # fmt: skip


@triton.jit
def _quantise_kernel(
    x_ptr, out_ptr, scale_ptr, count_ptr, E, BLOCK: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    column = tl.arange(0, BLOCK)
    inside = column < E
    x = tl.load(x_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-10) / 448.0
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * E + column, tl.clamp(x / scale, -448.0, 448.0).to(out_ptr.dtype.element_ty), mask=inside)


def quantise_tokens(
    x: Tensor, *, out: Tensor, scale: Tensor, count: Tensor | None = None, pdl: bool = False, warps: int | None = None
) -> None:
    """out [T, E] e4m3 and scale float32 [T] with x ~ scale * out; scale = absmax / 448 per token. x [T, E] bf16 or float32."""
    tokens, width = x.shape
    block = pow2(width)
    _quantise_kernel[(tokens,)](
        x, out, scale, count if count is not None else x, width,
        BLOCK=block, COUNTED=count is not None, **launch_options(pdl=pdl, warps=warps or max(1, min(16, block // 512))),
    )  # fmt: skip
