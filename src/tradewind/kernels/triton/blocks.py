"""FP8 with a scale for each block of weights and each 128 columns of a token: the layout "fp8_block".

Knows: how scales lie, and how activations are rounded to meet such weights. Refuses to know: matmuls (skinny, moe), files
(weights/block_scales.py).

    weights   e4m3 [N, K] as published, scales float32 [N / 16, K / 128]: 16 rows share one, so that a block of 128 rows is repeated eight
              times, and matrices whose rows are no multiple of 128 can be stacked (2 permille more memory, nothing more to read)
    tokens    e4m3 [T, K], scales float32 [T, K / 128]: absmax of the 128 columns / 448
    product   sum over the blocks of K of (e4m3 by e4m3, added in the tensor core) * token's scale * weights' scale, added in float32

The last block of K may be shorter. Source of the form: DeepSeek-V3 report 2024, section 3.3.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.launch import FP8, FP8_MAX, launch_options, let_next_start, pow2, wait_for_previous

COLUMNS = 128
"""Columns that share a scale."""
ROWS = 16
"""Rows of weights that share a scale in memory."""
VALUES_AT_ONCE = 1 << 24
"""Values quantised at once: bounds the float32 temporaries."""


@triton.jit
def scale_row(scale_ptr, line, K: tl.constexpr):
    """Where the scales of a weight row begin; its neighbours of the same 16 rows have the same."""
    return scale_ptr + line // 16 * ((K + 127) // 128)


@triton.jit
def quantised_columns(y, BLOCK: tl.constexpr):
    """A row y [BLOCK], zeros beyond its width -> what is stored in e4m3 [BLOCK], and scales [BLOCK / 128]."""
    parts = tl.reshape(y, (BLOCK // 128, 128))
    scale = tl.maximum(tl.max(tl.abs(parts), 1), 1e-10) / 448.0
    stored = tl.clamp(parts / scale[:, None], -448.0, 448.0)
    return tl.reshape(stored, (BLOCK,)), scale


@triton.jit
def store_scales(scale_ptr, row, scale, E, BLOCK: tl.constexpr):
    """Scales of one row of a token's e4m3 twin."""
    part = tl.arange(0, BLOCK // 128)
    many = (E + 127) // 128
    tl.store(scale_ptr + row * many + part, scale, mask=part < many)


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
    stored, scale = quantised_columns(x, BLOCK)
    store_scales(scale_ptr, row, scale, E, BLOCK)
    tl.store(out_ptr + row * E + column, stored.to(out_ptr.dtype.element_ty), mask=inside)


def quantise_columns(x: Tensor, *, out: Tensor, scale: Tensor, count: Tensor | None = None, pdl: bool = False) -> None:
    """out [T, E] e4m3 and scale float32 [T, E / 128] with x ~ scale * out; scale = absmax / 448 of 128 columns. x [T, E] bf16 or float32.

    count: int32 [1] on the device, rows beyond it are left alone.
    """
    tokens, width = x.shape
    assert scale.shape == (tokens, parts(width)), (scale.shape, x.shape)
    block = pow2(width, COLUMNS)
    _quantise_kernel[(tokens,)](
        x, out, scale, count if count is not None else x, width,
        BLOCK=block, COUNTED=count is not None, **launch_options(pdl=pdl, warps=max(1, min(16, block // 512))),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- packing


def parts(width: int) -> int:
    """Scales of a row of so many columns."""
    return -(-width // COLUMNS)


def fits(n: int, k: int) -> bool:
    """Whether a matrix [n, k] can be kept so: rows end with a group that shares a scale, pieces of 16 bytes are whole."""
    return n % ROWS == 0 and k % 16 == 0


def repeated(scales: Tensor, into: Tensor) -> None:
    """Scales of blocks [N / 128, K / 128], any float type -> into float32 [N / 16, K / 128]."""
    each = COLUMNS // ROWS
    into.copy_(scales.to(into.device).float().repeat_interleave(each, 0)[: len(into)])


def quantise_blocks(values: Tensor, stored: Tensor, scale: Tensor) -> None:
    """values [N, K] of any float type -> stored e4m3 [N, K] and scale float32 [N / 16, K / 128], blocks of 128 x 128 by absmax / 448."""
    n, k = values.shape
    at_once = max(1, VALUES_AT_ONCE // (COLUMNS * k)) * COLUMNS
    for first in range(0, n, at_once):
        some = values[first : first + at_once].float()
        rows, down = len(some), -len(some) % COLUMNS
        whole = torch.nn.functional.pad(some, (0, parts(k) * COLUMNS - k, 0, down))
        whole = whole.view(-1, COLUMNS, parts(k), COLUMNS)
        each = (whole.abs().amax((1, 3)) / FP8_MAX).clamp_min_(2.0**-100)
        repeated(each, scale[first // ROWS : (first + rows) // ROWS])
        rounded = (whole / each[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(rows + down, -1)
        stored[first : first + rows] = rounded[:rows, :k].to(FP8)
