"""Gated activation (with optional bias and FP8 output), GELU, softcap, scale, additions to the stream, row gathers.

Knows: elementwise arithmetic. Refuses to know: the matmuls around it.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.launch import FP8, launch_options, let_next_start, pow2, wait_for_previous


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """silu: x sigmoid(x). gelu_tanh: 0.5 x (1 + tanh(z)) = x sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)."""
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    return gate / (1.0 + tl.exp(-inner))


@triton.jit
def _gate_and_up(x_ptr, bias_ptr, row, column, inside, F, BIAS: tl.constexpr):
    """Columns of gate and up of one row, float32; row holds gate, then up."""
    gate = tl.load(x_ptr + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        gate += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + F + column, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _gated_kernel(
    x_ptr, bias_ptr, out_ptr, count_ptr, F,
    BLOCK: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate, up = _gate_and_up(x_ptr, bias_ptr, row, column, inside, F, BIAS)
    tl.store(out_ptr + row * F + column, (activated(gate, GELU) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_quant_kernel(
    x_ptr, bias_ptr, out_ptr, scale_ptr, count_ptr, F,
    BLOCK: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    column = tl.arange(0, BLOCK)
    inside = column < F
    gate, up = _gate_and_up(x_ptr, bias_ptr, row, column, inside, F, BIAS)
    y = activated(gate, GELU) * up
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-10) / 448.0
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * F + column, tl.clamp(y / scale, -448.0, 448.0).to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation(
    x: Tensor,
    *,
    out: Tensor,
    activation: str = "silu",
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    count: Tensor | None = None,
    block: int = 1024,
    warps: int = 4,
    pdl: bool = False,
) -> None:
    """out[T, F] = activation(x[:, :F]) * x[:, F:]; x [T, 2F] is gate then up; bias [2F] is added to x first.

    out bf16, or e4m3 with `scale` float32 [T] = absmax / 448 per token. count: int32 [1] on the device.
    """
    tokens, width = x.shape[0], x.shape[1] // 2
    assert (out.dtype == FP8) == (scale is not None), "an FP8 output has a scale, others have none"
    counted = count if count is not None else x
    added = bias if bias is not None else x
    flags = {"GELU": activation == "gelu_tanh", "BIAS": bias is not None, "COUNTED": count is not None}
    if scale is not None:
        block = pow2(width)
        _gated_quant_kernel[(tokens,)](
            x, added, out, scale, counted, width, BLOCK=block, **flags, **launch_options(pdl=pdl, warps=max(1, min(16, block // 512)))
        )  # fmt: skip
    else:
        block = min(block, pow2(width))
        _gated_kernel[(triton.cdiv(width, block), tokens)](
            x, added, out, counted, width, BLOCK=block, **flags, **launch_options(pdl=pdl, warps=warps)
        )  # fmt: skip


@triton.jit
def _embed_kernel(
    ids_ptr, table_ptr, out_ptr, count_ptr, E, scale, BLOCK: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    token = tl.load(ids_ptr + row).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    value = tl.load(table_ptr + token * E + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + column, (value * scale).to(out_ptr.dtype.element_ty), mask=inside)


def embed(
    ids: Tensor, table: Tensor, *, scale: float = 1.0, out: Tensor, count: Tensor | None = None, pdl: bool = False
) -> None:
    """out[t] = scale * table[ids[t]]; ids int32 [T] (every id valid), table [V, E], out [T, E] bf16 or float32."""
    width = table.shape[1]
    block = min(1024, pow2(width))
    _embed_kernel[(triton.cdiv(width, block), out.shape[0])](
        ids, table, out, count if count is not None else ids, width, scale,
        BLOCK=block, COUNTED=count is not None, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    x_ptr, index_ptr, out_ptr, count_ptr, E, BLOCK: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    source = tl.load(index_ptr + row).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    value = tl.load(x_ptr + source * E + column, mask=inside)
    tl.store(out_ptr + row * E + column, value.to(out_ptr.dtype.element_ty), mask=inside)


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor, count: Tensor | None = None, pdl: bool = False) -> None:
    """out[i] = x[index[i]]; index int32 [L], x and out [*, E] bf16 or float32."""
    width = x.shape[1]
    block = min(1024, pow2(width))
    _gather_kernel[(triton.cdiv(width, block), out.shape[0])](
        x, index, out, count if count is not None else index, width,
        BLOCK=block, COUNTED=count is not None, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit
def _in_place_kernel(
    x_ptr, bias_ptr, count_ptr, E, cap, every,
    BLOCK: tl.constexpr, KIND: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    x = tl.load(x_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "gelu":
        x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "scale":
        x = x * cap
    elif KIND == "temper":  # the vector is positions
        steps = (tl.load(bias_ptr + row) + 1) // every
        x = x * (1.0 + cap * tl.log(1.0 + steps.to(tl.float32)))
    elif KIND == "softcap":  # tanh z = 1 - 2 / (exp(2 z) + 1)
        x = cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))
    else:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * E + column, x.to(x_ptr.dtype.element_ty), mask=inside)


def _in_place(
    x: Tensor, bias: Tensor, cap: float, kind: str, *, count: Tensor | None, pdl: bool, every: int = 1
) -> None:
    width = x.shape[1]
    block = min(1024, pow2(width))
    _in_place_kernel[(triton.cdiv(width, block), x.shape[0])](
        x, bias, count if count is not None else x, width, cap, every,
        BLOCK=block, KIND=kind, COUNTED=count is not None, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


def gelu(x: Tensor, *, count: Tensor | None = None, pdl: bool = False) -> None:
    """x = x Phi(x) in place, Phi the normal distribution function; x [T, F] bf16 or float32."""
    _in_place(x, x, 1.0, "gelu", count=count, pdl=pdl)


def softcap(x: Tensor, *, cap: float, count: Tensor | None = None, pdl: bool = False) -> None:
    """x = cap tanh(x / cap) in place; x [T, V] bf16 or float32."""
    _in_place(x, x, cap, "softcap", count=count, pdl=pdl)


def scale(x: Tensor, *, factor: float, count: Tensor | None = None, pdl: bool = False) -> None:
    """x = factor x in place; x [T, N] bf16 or float32."""
    _in_place(x, x, factor, "scale", count=count, pdl=pdl)


def temper(
    x: Tensor, positions: Tensor, *, every: int, slope: float, count: Tensor | None = None, pdl: bool = False
) -> None:
    """x[t] *= 1 + slope ln(1 + floor((positions[t] + 1) / every)); x [T, N] bf16 or float32, positions int32 [T]."""
    _in_place(x, positions, slope, "temper", count=count, pdl=pdl, every=every)


def add_bias(x: Tensor, bias: Tensor, *, count: Tensor | None = None, pdl: bool = False) -> None:
    """x += bias in place, where a library matmul cannot add it; x [T, N] bf16 or float32, bias [N]."""
    _in_place(x, bias, 1.0, "bias", count=count, pdl=pdl)


@triton.jit
def _add_kernel(
    x_ptr, delta_ptr, gate_ptr, out_ptr, count_ptr, E,
    BLOCK: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, OUT: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    at = row * E + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            delta = delta / (1.0 + tl.exp(-tl.load(gate_ptr + row).to(tl.float32)))
        x += delta
        tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=inside)
    if OUT:
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def add(
    x: Tensor,
    delta: Tensor | None,
    *,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x += sigmoid(gate) * delta in place (without gate x += delta, without delta nothing); then out = x, when given.

    x, delta, out [T, E] bf16 or float32, gate [T, 1].
    """
    width = x.shape[1]
    block = min(1024, pow2(width))
    _add_kernel[(triton.cdiv(width, block), x.shape[0])](
        x, delta if delta is not None else x, gate if gate is not None else x, out if out is not None else x,
        count if count is not None else x, width,
        BLOCK=block, ADD=delta is not None, GATE=gate is not None, OUT=out is not None, COUNTED=count is not None,
        **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip
