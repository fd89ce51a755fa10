"""Matmul for few rows at the speed of memory: GEMV for one row, tensor-core tiles with swapped operands for 2..64.

Knows: how to stream a row-major weight matrix [N, K] once, and what can be folded into that pass: the RMS norm of the input (GEMV: every
program sees the whole row anyway; in the tiles it cost more than a launch), SiLU-mul of gate and up, per-channel scales, the residual add.
Refuses to know: which layer it computes.

    GEMV     program = ROWS outputs; weights of its of its first BLOCK_K columns are loaded before the wait for the previous kernel
    tiles    program = BN weight rows x all input rows x one of SPLIT pieces of K; W [BN, BK] is the left operand, so the tall side of the
             tensor core is filled by weights; the last program of a tile to arrive adds the pieces in order (bit-equal from run to run)

The residual may be the output: each element is read and written by one program only.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton import blocks
from tradewind.kernels.triton.blocks import scale_row
from tradewind.kernels.triton.elementwise import activated
from tradewind.kernels.triton.launch import (
    FP8,
    launch_options,
    let_next_start,
    wait_for_previous,
)
from tradewind.kernels.triton.tuning import GemvConfig, TileConfig


@triton.jit
def _weights(pointers, mask, MASKED: tl.constexpr):
    """A tile of weights: each byte is used once, so it shall not push the shared input out of L1."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["zero"])
def _gemv_kernel(
    x_ptr, w_ptr, scale_ptr, norm_ptr, residual_ptr, bias_ptr, out_ptr, zero, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, NARROW: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    LATE: tl.constexpr, BLOCKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not LATE:
        let_next_start(PDL)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = n < N
    column = tl.arange(0, BLOCK_K)
    if NARROW:
        # The compiler may only assume an alignment of 4 elements: then weights, x and norm are held alike, 4 neighbours in a thread.
        # Wider loads of FP8 would put 16 there, and every weight would travel through shared memory to meet its x.
        w_ptr += 4 * zero
        x_ptr += 4 * zero
        norm_ptr += 4 * zero
    at = w_ptr + n[:, None] * K + column[None, :]
    inside = live[:, None] & (column < K)[None, :]
    w = _weights(at, inside, MASKED)
    if GATED:
        u = _weights(at + N * K, inside, MASKED)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=column < K, other=0.0)
    if SCALED:
        scale = tl.load(scale_ptr + n, mask=live, other=0.0)
        if GATED:
            scale_u = tl.load(scale_ptr + N + n, mask=live, other=0.0)
    if BLOCKED:  # the rows of a program share their scales, which go to x
        scale_at = scale_row(scale_ptr, tl.program_id(0) * ROWS, K) + column // 128
        scale = tl.load(scale_at, mask=column < K, other=0.0)
        if GATED:
            scale_u_at = scale_row(scale_ptr, N + tl.program_id(0) * ROWS, K) + column // 128
            scale_u = tl.load(scale_u_at, mask=column < K, other=0.0)
    wait_for_previous(PDL)
    if LATE:
        let_next_start(PDL)
    if RESIDUAL:
        residual = tl.load(residual_ptr + n, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK_K], tl.float32)
    total_u = tl.zeros([ROWS, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_ptr + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * norm.to(tl.float32)
        x_u = x
        if BLOCKED:
            if GATED:
                x_u = x * scale_u
            x = x * scale
        total += w.to(tl.float32) * x[None, :]
        if GATED:
            total_u += u.to(tl.float32) * x_u[None, :]
        if start + BLOCK_K < K:
            inside = live[:, None] & (start + BLOCK_K + column < K)[None, :]
            w = _weights(at + start + BLOCK_K, inside, MASKED)
            if GATED:
                u = _weights(at + N * K + start + BLOCK_K, inside, MASKED)
            if NORM:
                norm = tl.load(norm_ptr + start + BLOCK_K + column, mask=start + BLOCK_K + column < K, other=0.0)
            if BLOCKED:
                ahead = start + BLOCK_K + column < K
                scale = tl.load(scale_at + (start + BLOCK_K) // 128, mask=ahead, other=0.0)
                if GATED:
                    scale_u = tl.load(scale_u_at + (start + BLOCK_K) // 128, mask=ahead, other=0.0)
    y = tl.sum(total, 1)
    y_u = tl.sum(total_u, 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= factor
        y_u *= factor
    if SCALED:
        y *= scale
        if GATED:
            y_u *= scale_u
    if BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
        if GATED:
            y_u += tl.load(bias_ptr + N + n, mask=live, other=0.0).to(tl.float32)
    if GATED:
        y = activated(y, GELU) * y_u
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["zero"])
def _half_gemv_kernel(
    x_ptr, w_ptr, scale_ptr, norm_ptr, residual_ptr, bias_ptr, out_ptr, zero, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr, RUN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    LATE: tl.constexpr, BLOCKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A GEMV whose FP8 weights are multiplied in float16, two at a time: conversion gives pairs, and RUN products are summed as pairs.

    x is scaled to at most 16: a sum of 8 products stays below 8 * 448 * 16 < 65504. Runs are summed in float32.
    """
    if not LATE:
        let_next_start(PDL)
    CHUNKS: tl.constexpr = K // BLOCK_K
    HELD: tl.constexpr = K <= 4096  # x stays in registers between the two passes
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = n < N
    column = tl.arange(0, BLOCK_K)
    w_ptr += 4 * zero  # see NARROW above
    x_ptr += 4 * zero
    norm_ptr += 4 * zero
    at = w_ptr + n[:, None] * K + column[None, :]
    inside = live[:, None] & (column < K)[None, :]
    ws = ()
    us = ()
    for c in tl.static_range(AHEAD):
        ws = ws + (_weights(at + c * BLOCK_K, inside, MASKED),)  # noqa: RUF005
        if GATED:
            us = us + (_weights(at + N * K + c * BLOCK_K, inside, MASKED),)  # noqa: RUF005
    norms = ()
    if NORM:
        for c in tl.static_range(CHUNKS):
            norms = norms + (tl.load(norm_ptr + c * BLOCK_K + column),)  # noqa: RUF005
    if SCALED:
        scale = tl.load(scale_ptr + n, mask=live, other=0.0)
        if GATED:
            scale_u = tl.load(scale_ptr + N + n, mask=live, other=0.0)
    scales = ()
    scales_u = ()
    EARLY_SCALES: tl.constexpr = K * (2 if GATED else 1) <= 4096  # as many as there are registers for
    if BLOCKED:
        scale_at = scale_row(scale_ptr, tl.program_id(0) * ROWS, K) + column // 128
        scale_u_at = scale_row(scale_ptr, N + tl.program_id(0) * ROWS, K) + column // 128
        if EARLY_SCALES:
            for c in tl.static_range(CHUNKS):
                scales = scales + (tl.load(scale_at + c * (BLOCK_K // 128)),)  # noqa: RUF005
                if GATED:
                    scales_u = scales_u + (tl.load(scale_u_at + c * (BLOCK_K // 128)),)  # noqa: RUF005
    wait_for_previous(PDL)
    if LATE:
        let_next_start(PDL)
    if RESIDUAL:
        residual = tl.load(residual_ptr + n, mask=live, other=0.0).to(tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    peak = tl.zeros([BLOCK_K], tl.float32)
    xs = ()
    xus = ()
    for c in tl.static_range(CHUNKS):
        x = tl.load(x_ptr + c * BLOCK_K + column).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * norms[c]
        if BLOCKED:
            if GATED:
                x_u = x * (scales_u[c] if EARLY_SCALES else tl.load(scale_u_at + c * (BLOCK_K // 128)))
                peak = tl.maximum(peak, tl.abs(x_u))
                if HELD:
                    xus = xus + (x_u,)  # noqa: RUF005
            x = x * (scales[c] if EARLY_SCALES else tl.load(scale_at + c * (BLOCK_K // 128)))
        peak = tl.maximum(peak, tl.abs(x))
        if HELD:
            xs = xs + (x,)  # noqa: RUF005
    top = tl.maximum(tl.max(peak, 0), 1e-30)
    shrink = 16.0 / top
    total = tl.zeros([ROWS, BLOCK_K], tl.float32)
    total_u = tl.zeros([ROWS, BLOCK_K], tl.float32)
    part = tl.zeros([ROWS, BLOCK_K], tl.float16)
    part_u = tl.zeros([ROWS, BLOCK_K], tl.float16)
    for c in tl.static_range(CHUNKS):
        if c + AHEAD < CHUNKS:
            ws = ws + (_weights(at + (c + AHEAD) * BLOCK_K, inside, MASKED),)  # noqa: RUF005
            if GATED:
                us = us + (_weights(at + N * K + (c + AHEAD) * BLOCK_K, inside, MASKED),)  # noqa: RUF005
        if HELD:
            y = (xs[c] * shrink).to(tl.float16)
            y_u = y
            if BLOCKED and GATED:
                y_u = (xus[c] * shrink).to(tl.float16)
        else:
            x = tl.load(x_ptr + c * BLOCK_K + column).to(tl.float32)
            if NORM:
                x = x * norms[c]
            x_u = x
            if BLOCKED:
                if GATED:
                    x_u = x * tl.load(scale_u_at + c * (BLOCK_K // 128))
                x = x * tl.load(scale_at + c * (BLOCK_K // 128))
            y = (x * shrink).to(tl.float16)
            y_u = (x_u * shrink).to(tl.float16)
        part += ws[c].to(tl.float16) * y[None, :]
        if GATED:
            part_u += us[c].to(tl.float16) * y_u[None, :]
        if c % RUN == RUN - 1 or c == CHUNKS - 1:
            total += part.to(tl.float32)
            part = tl.zeros([ROWS, BLOCK_K], tl.float16)
            if GATED:
                total_u += part_u.to(tl.float32)
                part_u = tl.zeros([ROWS, BLOCK_K], tl.float16)
    factor = top / 16.0
    if NORM:
        factor *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y = tl.sum(total, 1) * factor
    y_u = tl.sum(total_u, 1) * factor
    if SCALED:
        y *= scale
        if GATED:
            y_u *= scale_u
    if BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
        if GATED:
            y_u += tl.load(bias_ptr + N + n, mask=live, other=0.0).to(tl.float32)
    if GATED:
        y = activated(y, GELU) * y_u
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _tile_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, residual_ptr, bias_ptr, out_ptr, part_ptr, arrived_ptr, M, N,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, DOT: tl.constexpr,
    X_SCALED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    LATE: tl.constexpr, BLOCKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not LATE:
        let_next_start(PDL)
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    OUT: tl.constexpr = BN // 2 if GATED else BN  # outputs of a tile
    PIECE: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT * BK
    PARTS: tl.constexpr = (K + 127) // 128
    begin = piece * PIECE
    end = tl.minimum(begin + PIECE, K)
    j = tl.arange(0, BN)
    m = tl.arange(0, BM)
    live_m = m < M
    column = tl.arange(0, BK)
    # Outputs beyond N read the last row; what they compute is not stored. Gated: the upper half of the tile are the outputs' up rows.
    line = tl.minimum(tile * OUT + j % OUT, N - 1)
    if GATED:
        line += j // OUT * N
    row = w_ptr + line[:, None] * K
    wait_for_previous(PDL)
    if LATE:
        let_next_start(PDL)
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(begin, end, BK):
        if K % BK == 0:
            w = tl.load(row + (start + column)[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + m[:, None] * K + (start + column)[None, :], mask=live_m[:, None], other=0.0)
        else:
            inside = (start + column < K)[None, :]
            w = tl.load(row + (start + column)[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + m[:, None] * K + (start + column)[None, :], mask=live_m[:, None] & inside, other=0.0)
        if BLOCKED:
            by_row = tl.load(scale_row(scale_ptr, line, K) + start // 128)
            by_token = tl.load(x_scale_ptr + m * PARTS + start // 128, mask=live_m, other=0.0)
            acc += tl.dot(w.to(DOT), tl.trans(x.to(DOT))) * (by_row[:, None] * by_token[None, :])
        else:
            if tl.float16 == DOT and x.dtype != tl.float16:
                x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0)
            acc = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), acc)

    if SPLIT > 1:  # part: [tiles, SPLIT, BN, BM]
        inner = j[:, None] * BM + m[None, :]
        base = part_ptr + tile * (SPLIT * BN * BM)
        tl.store(base + piece * (BN * BM) + inner, acc)
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
        if before != SPLIT - 1:
            return
        tl.store(arrived_ptr + tile, 0)
        acc = tl.zeros([BN, BM], tl.float32)
        for other in tl.static_range(SPLIT):
            acc += tl.load(base + other * (BN * BM) + inner, cache_modifier=".cg")

    if X_SCALED:
        acc *= tl.load(x_scale_ptr + m, mask=live_m, other=0.0)[None, :]
    if SCALED:
        acc *= tl.load(scale_ptr + line)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + line).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUT, BM)), (1, 2, 0)))
        acc = activated(gate, GELU) * up
    n = tile * OUT + tl.arange(0, OUT)
    place = m[None, :] * N + n[:, None]
    live = live_m[None, :] & (n < N)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=live)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    activation: str = "silu",
    residual: Tensor | None = None,
    config: GemvConfig | TileConfig,
    workspace: Tensor | None = None,
    arrived: Tensor | None = None,
    pdl: bool = False,
    late: bool = False,
) -> None:
    """out[M, N] = epilogue(x @ weight.T) for few rows.

    x [M, K] bf16 or float32; weight [N, K] bf16 or e4m3 with `scale` float32 [N] (weight = scale * stored), or [N / 16, K / 128]
    (blocks.py), or [2N, K] when gated: gate's rows, then up's; then out = activation(gate) * up. bias [N] ([2N] when gated). residual
    [M, N] is added last and may be `out`. Sums in float32. norm [K] (GEMV only): x is divided by its rms and multiplied by norm first.
    config: a GemvConfig (M = 1) or a TileConfig (M <= bm). Tiles multiply in bf16; FP8 weights in fp16 (exact for them; x saturates at
    65504), or in FP8 when x is e4m3 with `x_scale` float32 [M] (by blocks always so, `x_scale` [M, K / 128]). A TileConfig with split > 1
    needs `workspace` (float32, `workspace_floats`) and `arrived` (int32, one zero per tile; left zero).
    late: with pdl, the next kernel starts only when every program of this one has seen the end of its predecessor; what earlier kernels
    wrote may then be read by the next kernel before its own wait.
    """
    rows, depth = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    assert weight.shape[1] == depth and weight.numel() < 2**31, f"weight {tuple(weight.shape)} for x {tuple(x.shape)}"
    assert out.shape == (rows, features), f"out {tuple(out.shape)}, expected {(rows, features)}"
    blocked = scale is not None and scale.ndim == 2
    flags = {
        "GATED": gated, "GELU": activation == "gelu_tanh", "SCALED": scale is not None and not blocked, "RESIDUAL": residual is not None,
        "BIAS": bias is not None, "LATE": late, "BLOCKED": blocked,
    }  # fmt: skip
    extra = [t if t is not None else x for t in (residual, bias)]
    if isinstance(config, GemvConfig):
        assert rows == 1, f"a GEMV has one row, not {rows}"
        block = min(config.block_k, triton.next_power_of_2(depth))
        assert not blocked or (blocks.ROWS % config.rows == 0 and (block % blocks.COLUMNS == 0 or block >= depth)), (
            config
        )
        if config.half and weight.dtype == FP8 and depth % block == 0:
            chunks = depth // block
            _half_gemv_kernel[(triton.cdiv(features, config.rows),)](
                x, weight, scale if scale is not None else x, norm if norm is not None else x, *extra, out, 0, features, eps,
                K=depth, ROWS=config.rows, BLOCK_K=block, MASKED=features % config.rows != 0, AHEAD=min(config.ahead, chunks), RUN=8,
                NORM=norm is not None, **flags, **launch_options(pdl=pdl, warps=config.warps),
            )  # fmt: skip
            return
        _gemv_kernel[(triton.cdiv(features, config.rows),)](
            x, weight, scale if scale is not None else x, norm if norm is not None else x, *extra, out, 0, features, eps,
            K=depth, NARROW=config.narrow, ROWS=config.rows, BLOCK_K=block, MASKED=depth % block != 0 or features % config.rows != 0,
            NORM=norm is not None,
            **flags, **launch_options(pdl=pdl, warps=config.warps),
        )  # fmt: skip
        return
    assert norm is None, "tiles take a normed input"
    assert rows <= config.bm, f"{rows} rows in a tile of {config.bm}"
    assert depth % config.bk == 0 or blocked, f"K = {depth} is no multiple of {config.bk}"
    assert not blocked or (x.dtype == FP8 and blocks.COLUMNS % config.bk == 0), f"blocks of {config} and {x.dtype}"
    if config.split > 1:
        need = workspace_floats(features, config=config, gated=gated)
        assert workspace is not None and workspace.numel() >= need, f"split needs {need} floats of workspace"
        assert arrived is not None, "split needs arrival counters"
    outputs = config.bn // 2 if gated else config.bn
    dot = tl.bfloat16 if weight.dtype != FP8 else (tl.float8e4nv if x.dtype == FP8 else tl.float16)
    assert (x_scale is None) == (x.dtype != FP8), "an FP8 input has a scale, others have none"
    _tile_kernel[(triton.cdiv(features, outputs), config.split)](
        x, weight, x_scale if x_scale is not None else x, scale if scale is not None else x, *extra, out,
        workspace if workspace is not None else x, arrived if arrived is not None else x, rows, features,
        K=depth, BM=config.bm, BN=config.bn, BK=config.bk, SPLIT=config.split, DOT=dot, X_SCALED=x_scale is not None and not blocked,
        **flags, **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


def workspace_floats(features: int, *, config: TileConfig, gated: bool) -> int:
    """How many floats of workspace `skinny_linear` needs for a split tile config."""
    return triton.cdiv(features, config.bn // 2 if gated else config.bn) * config.split * config.bn * config.bm


FIXED = TileConfig(bm=64, bn=64, bk=128, split=1, warps=4, stages=3)
"""The tile of `fixed_linear`, for every shape and every number of rows: nothing is chosen."""


@triton.jit
def _fixed_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, residual_ptr, bias_ptr, out_ptr, count_ptr, M, N,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr,
    X_SCALED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    COUNTED: tl.constexpr, BLOCKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    OUT: tl.constexpr = BN // 2 if GATED else BN  # outputs of a tile
    PARTS: tl.constexpr = (K + 127) // 128
    # Programs in flight share weights: GROUP row tiles of one weight tile are neighbours.
    tiles = tl.cdiv(N, OUT)
    group = tl.program_id(0) // (GROUP * tiles)
    height = tl.minimum(tl.cdiv(M, BM) - group * GROUP, GROUP)
    inner = tl.program_id(0) % (GROUP * tiles)
    block = group * GROUP + inner % height
    tile = inner // height
    j = tl.arange(0, BN)
    m = block * BM + tl.arange(0, BM)
    column = tl.arange(0, BK)
    line = tl.minimum(tile * OUT + j % OUT, N - 1)
    if GATED:
        line += j // OUT * N
    row = w_ptr + line[:, None] * K
    wait_for_previous(PDL)
    rows = M
    if COUNTED:
        rows = tl.minimum(tl.load(count_ptr), M)
        if block * BM >= rows:
            return
    live_m = m < rows
    x_row = x_ptr + m.to(tl.int64)[:, None] * K
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(0, K, BK):
        at = start + column
        if K % BK == 0:
            w = tl.load(row + at[None, :])
            x = tl.load(x_row + at[None, :], mask=live_m[:, None], other=0.0)
        else:
            w = tl.load(row + at[None, :], mask=(at < K)[None, :], other=0.0)
            x = tl.load(x_row + at[None, :], mask=live_m[:, None] & (at < K)[None, :], other=0.0)
        if BLOCKED:
            by_row = tl.load(scale_row(scale_ptr, line, K) + start // 128)
            by_token = tl.load(x_scale_ptr + m.to(tl.int64) * PARTS + start // 128, mask=live_m, other=0.0)
            acc += tl.dot(w.to(DOT), tl.trans(x.to(DOT))) * (by_row[:, None] * by_token[None, :])
        else:
            if tl.float16 == DOT and x.dtype != tl.float16:
                x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0)
            acc = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), acc)

    if X_SCALED:
        acc *= tl.load(x_scale_ptr + m, mask=live_m, other=0.0)[None, :]
    if SCALED:
        acc *= tl.load(scale_ptr + line)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + line).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUT, BM)), (1, 2, 0)))
        acc = activated(gate, GELU) * up
    n = tile * OUT + tl.arange(0, OUT)
    place = m.to(tl.int64)[None, :] * N + n[:, None]
    live = live_m[None, :] & (n < N)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=live)


def fixed_linear(
    x: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    activation: str = "silu",
    residual: Tensor | None = None,
    count: Tensor | None = None,
    tile: TileConfig = FIXED,
    pdl: bool = False,
) -> None:
    """out[M, N] = epilogue(x @ weight.T) for any number of rows; the bits of a row do not depend on how many others there are.

    x [M, K] bf16 or float32, or e4m3 with `x_scale` float32 [M]; weight [N, K] bf16, or e4m3 with `scale` float32 [N]; by blocks
    (blocks.py) x is e4m3, `x_scale` [M, K / 128] and `scale` [N / 16, K / 128]; when gated [2N, K]: gate's rows, then up's.
    bias [N] ([2N] when gated), residual [M, N] is added last and may be `out`; out bf16 or float32. Any K and N. count: int32 [1] on
    the device, rows beyond it are left alone. Number formats as in `skinny_linear`.
    Every output is one sum over K in ascending steps of one tile, by one program and one matrix instruction: no split, no constant that
    depends on M. `tile` (its split is ignored; another than FIXED where speed counts and bits do not) must be the same in all calls that
    shall agree.
    """
    rows, depth = x.shape
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    assert weight.shape[1] == depth and weight.numel() < 2**31, f"weight {tuple(weight.shape)} for x {tuple(x.shape)}"
    assert out.shape == (rows, features), f"out {tuple(out.shape)}, expected {(rows, features)}"
    assert (x_scale is None) == (x.dtype != FP8), "an FP8 input has a scale, others have none"
    assert x.dtype != FP8 or weight.dtype == FP8, "an FP8 input wants FP8 weights"
    dot = tl.bfloat16 if weight.dtype != FP8 else (tl.float8e4nv if x.dtype == FP8 else tl.float16)
    outputs = tile.bn // 2 if gated else tile.bn
    blocked = scale is not None and scale.ndim == 2
    assert not blocked or (x.dtype == FP8 and blocks.COLUMNS % tile.bk == 0), f"blocks of {tile} and {x.dtype}"
    _fixed_kernel[(triton.cdiv(features, outputs) * triton.cdiv(rows, tile.bm),)](
        x, weight, x_scale if x_scale is not None else x, scale if scale is not None else x,
        residual if residual is not None else x, bias if bias is not None else x, out, count if count is not None else x, rows, features,
        K=depth, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=8, DOT=dot, X_SCALED=x_scale is not None and not blocked,
        GATED=gated, GELU=activation == "gelu_tanh", SCALED=scale is not None and not blocked, RESIDUAL=residual is not None,
        BIAS=bias is not None, BLOCKED=blocked, COUNTED=count is not None, **launch_options(pdl=pdl, warps=tile.warps, stages=tile.stages),
    )  # fmt: skip
