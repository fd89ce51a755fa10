"""Two matrices by one token in one launch: where both read the same input, and the smaller has too few rows to be worth a launch.

Knows: how to stream both once, the input's norm folded in. Refuses to know: what the two results are, other layouts of weights than bf16
(skinny.py).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.tuning import GemvConfig


@triton.jit
def _weights(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def _pair_kernel(
    x_ptr, first_ptr, second_ptr, norm_ptr, first_out_ptr, second_out_ptr, N, M, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    tiles = tl.cdiv(N, ROWS)
    second = tl.program_id(0) >= tiles
    n = tl.where(second, tl.program_id(0) - tiles, tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    live = n < tl.where(second, M, N)
    column = tl.arange(0, BLOCK_K)
    at = tl.where(second, second_ptr, first_ptr) + n[:, None] * K + column[None, :]
    w = _weights(at, live[:, None] & (column < K)[None, :], MASKED)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=column < K, other=0.0)
    wait_for_previous(PDL)
    total = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_ptr + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * norm.to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
        if start + BLOCK_K < K:
            ahead = start + BLOCK_K + column
            w = _weights(at + start + BLOCK_K, live[:, None] & (ahead < K)[None, :], MASKED)
            if NORM:
                norm = tl.load(norm_ptr + ahead, mask=ahead < K, other=0.0)
    y = tl.sum(total, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    out = tl.where(second, second_out_ptr, first_out_ptr) + n
    tl.store(out, y.to(first_out_ptr.dtype.element_ty), mask=live)


def pair_linear(
    x: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    out: tuple[Tensor, Tensor],
    norm: Tensor | None = None,
    eps: float = 0.0,
    config: GemvConfig,
    pdl: bool = False,
) -> None:
    """out = (x first^T [1, N], x second^T [1, M]) of x [1, K] bf16 or float32 and bf16 weights [N, K], [M, K]; norm [K]: x is divided by
    its rms and multiplied by norm first."""
    (rows, depth), n, m = x.shape, len(first), len(second)
    assert rows == 1 and first.shape == (n, depth) and second.shape == (m, depth), (x.shape, first.shape, second.shape)
    assert out[0].shape == (1, n) and out[1].shape == (1, m) and out[0].dtype == out[1].dtype, (
        out[0].shape,
        out[1].shape,
    )
    block = min(config.block_k, pow2(depth))
    _pair_kernel[(triton.cdiv(n, config.rows) + triton.cdiv(m, config.rows),)](
        x, first, second, norm if norm is not None else x, *out, n, m, eps,
        K=depth, ROWS=config.rows, BLOCK_K=block, MASKED=bool(depth % block or n % config.rows or m % config.rows), NORM=norm is not None,
        **launch_options(pdl=pdl, warps=config.warps),
    )  # fmt: skip
