"""SiLU-mul (with optional FP8 output) and the embedding gather.

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
def _gated_kernel(
    x_ptr, out_ptr, count_ptr, F, BLOCK: tl.constexpr, GELU: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x_ptr + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * F + column, (activated(gate, GELU) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_quant_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    count_ptr,
    F,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    column = tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x_ptr + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    y = activated(gate, GELU) * up
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-10) / 448.0
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * F + column, tl.clamp(y / scale, -448.0, 448.0).to(out_ptr.dtype.element_ty), mask=inside)


def gated_activation(
    x: Tensor,
    *,
    out: Tensor,
    activation: str = "silu",
    scale: Tensor | None = None,
    count: Tensor | None = None,
    block: int = 1024,
    warps: int = 4,
    pdl: bool = False,
) -> None:
    """out[T, F] = activation(x[:, :F]) * x[:, F:]; x [T, 2F] is gate then up.

    out bf16, or e4m3 with `scale` float32 [T] = absmax / 448 per token. count: int32 [1] on the device.
    """
    tokens, width = x.shape[0], x.shape[1] // 2
    assert (out.dtype == FP8) == (scale is not None), "an FP8 output has a scale, others have none"
    counted = count if count is not None else x
    flags = {"GELU": activation == "gelu_tanh", "COUNTED": count is not None}
    if scale is not None:
        block = pow2(width)
        _gated_quant_kernel[(tokens,)](
            x,
            out,
            scale,
            counted,
            width,
            BLOCK=block,
            **flags,
            **launch_options(pdl=pdl, warps=max(1, min(16, block // 512))),
        )
    else:
        block = min(block, pow2(width))
        _gated_kernel[(triton.cdiv(width, block), tokens)](
            x, out, counted, width, BLOCK=block, **flags, **launch_options(pdl=pdl, warps=warps)
        )


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
    tl.store(out_ptr + row * E + column, tl.load(x_ptr + source * E + column, mask=inside), mask=inside)


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor, count: Tensor | None = None, pdl: bool = False) -> None:
    """out[i] = x[index[i]]; index int32 [L], x and out [*, E] of one dtype."""
    width = x.shape[1]
    block = min(1024, pow2(width))
    _gather_kernel[(triton.cdiv(width, block), out.shape[0])](
        x, index, out, count if count is not None else index, width,
        BLOCK=block, COUNTED=count is not None, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip
