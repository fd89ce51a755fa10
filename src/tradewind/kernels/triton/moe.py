"""Mixtures of experts, second half: chosen experts' gated MLPs, and the weighted sum of their answers.

Knows: which weights a step reads, and that each is read once. Refuses to know: how experts are chosen and pairs are sorted (route.py).
Weights of a layer: gate_up [X, 2F, E] (gate's rows, then up's) and down [X, E, F], bf16 or e4m3 with a float32 scale per output, or by
blocks (blocks.py): then `scale` has a third axis and each token has a scale for 128 columns.

    1 token         one_gate_up    program = some inner values of one chosen expert         x (normed on the way) -> inner [K, F]
                    one_down       program = some outputs, all chosen experts in order      inner -> out, weighed, + residual
    2..16 tokens    few            a program for each (weight tile, pair); of the pairs that share an expert the first one works for all
    more            sorted         a program for each (weight tile, block of pairs of one expert)
                                   x -> inner, then inner -> answers [T K, E]
                    combine        out[t] = sum over k, in order, of weights[t, k] * answers[t K + k]

Tiles have the weights as left operand, as in skinny.py. No sum depends on the order in which programs run.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tradewind.kernels.triton import blocks as fp8_blocks
from tradewind.kernels.triton.blocks import quantised_columns, scale_row, store_scales
from tradewind.kernels.triton.launch import FP8, launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.tuning import ExpertGemvConfig, TileConfig

FIXED = TileConfig(bm=32, bn=64, bk=64, split=1, warps=4, stages=4)
"""The tile of deterministic mode, for every number of tokens (bk: the largest of 64 and 32 that divides the depth)."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_clamped": 2}


@triton.jit
def _glue(gate, up, ACTIVATION: tl.constexpr):
    """kernels/reference.py: glue."""
    if ACTIVATION == 2:
        gate = tl.minimum(gate, 7.0)
        return (tl.clamp(up, -7.0, 7.0) + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    if ACTIVATION == 1:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-inner)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _stream(pointers, mask, MASKED: tl.constexpr):
    """Weights that are used once."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


# ----------------------------------------------------------------------------------------------------------- one token


@triton.jit(do_not_specialize=["zero"])
def _one_gate_up_kernel(
    x_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, norm_ptr, bias_ptr, out_ptr, zero, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr, NARROW: tl.constexpr,
    ACTIVATION: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, WEIGHED: tl.constexpr, BIAS: tl.constexpr, LATE: tl.constexpr,
    BLOCKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if not LATE:
        let_next_start(PDL)
    CHUNKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    tiles = tl.cdiv(N, ROWS)
    slot = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    live = n < N
    column = tl.arange(0, BLOCK)
    if NARROW:  # see skinny.py
        w_ptr += 4 * zero
        x_ptr += 4 * zero
        norm_ptr += 4 * zero
    wait_for_previous(PDL)
    if LATE:
        let_next_start(PDL)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    at = w_ptr + expert * (2 * N * K) + n[:, None] * K + column[None, :]
    up_at = at + N * K
    ws = ()
    us = ()
    scales = ()
    scales_u = ()
    if BLOCKED:  # the rows of a program share their scales, which go to x
        first = expert * (2 * N) + tl.program_id(0) % tiles * ROWS
        scale_at = scale_row(scale_ptr, first, K) + column // 128
        scale_u_at = scale_row(scale_ptr, first + N, K) + column // 128
    for c in tl.static_range(AHEAD):
        inside = live[:, None] & (c * BLOCK + column < K)[None, :]
        if BLOCKED:
            scales = scales + (tl.load(scale_at + c * (BLOCK // 128), mask=c * BLOCK + column < K, other=0.0),)  # noqa: RUF005
            scales_u = scales_u + (tl.load(scale_u_at + c * (BLOCK // 128), mask=c * BLOCK + column < K, other=0.0),)  # noqa: RUF005
        ws = ws + (_stream(at + c * BLOCK, inside, MASKED),)  # noqa: RUF005
        us = us + (_stream(up_at + c * BLOCK, inside, MASKED),)  # noqa: RUF005
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    total_u = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(CHUNKS):
        if c + AHEAD < CHUNKS:
            inside = live[:, None] & ((c + AHEAD) * BLOCK + column < K)[None, :]
            ws = ws + (_stream(at + (c + AHEAD) * BLOCK, inside, MASKED),)  # noqa: RUF005
            us = us + (_stream(up_at + (c + AHEAD) * BLOCK, inside, MASKED),)  # noqa: RUF005
            if BLOCKED:
                there = (c + AHEAD) * BLOCK + column < K
                scales = scales + (tl.load(scale_at + (c + AHEAD) * (BLOCK // 128), mask=there, other=0.0),)  # noqa: RUF005
                scales_u = scales_u + (tl.load(scale_u_at + (c + AHEAD) * (BLOCK // 128), mask=there, other=0.0),)  # noqa: RUF005
        here = c * BLOCK + column
        x = tl.load(x_ptr + here, mask=here < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + here, mask=here < K, other=0.0).to(tl.float32)
        x_u = x
        if BLOCKED:
            x_u = x * scales_u[c]
            x = x * scales[c]
        total += ws[c].to(tl.float32) * x[None, :]
        total_u += us[c].to(tl.float32) * x_u[None, :]
    y = tl.sum(total, 1)
    u = tl.sum(total_u, 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= factor
        u *= factor
    line = expert * (2 * N) + n
    if SCALED:
        y *= tl.load(scale_ptr + line, mask=live, other=0.0)
        u *= tl.load(scale_ptr + N + line, mask=live, other=0.0)
    if WEIGHED:
        weight = tl.load(weights_ptr + slot)
        y *= weight
        u *= weight
    if BIAS:
        y += tl.load(bias_ptr + line, mask=live, other=0.0).to(tl.float32)
        u += tl.load(bias_ptr + N + line, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + slot * N + n, _glue(y, u, ACTIVATION).to(out_ptr.dtype.element_ty), mask=live)


def one_gate_up(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "silu",
    weights: Tensor | None = None,
    config: ExpertGemvConfig,
    pdl: bool = False,
    late: bool = False,
) -> None:
    """out [K, F] = glue(gate_e x, up_e x) for the experts e of ids int32 [1, K]; x [1, E] bf16 or float32.

    weight [X, 2F, E], with `scale` [X, 2F] when e4m3 (by blocks [X, 2F / 16, E / 128]); bias [X, 2F]. norm [E]: x is divided by
    its rms and multiplied by norm first.
    weights [1, K]: factors on what gate and up make, before the bias.
    late: as in skinny.skinny_linear.
    """
    depth, features, chosen = x.shape[1], weight.shape[1] // 2, ids.shape[1]
    assert len(x) == 1 and weight.shape[2] == depth, (x.shape, weight.shape)
    assert out.shape == (chosen, features), (out.shape, chosen, features)
    block = min(config.block, pow2(depth))
    blocked = _blocked(scale, config.rows, block, depth)
    _one_gate_up_kernel[(triton.cdiv(features, config.rows) * chosen,)](
        x, ids, weights if weights is not None else x, weight, scale if scale is not None else x, norm if norm is not None else x,
        bias if bias is not None else x, out, 0,
        features, eps, K=depth, ROWS=config.rows, BLOCK=block, AHEAD=min(config.ahead, triton.cdiv(depth, block)),
        MASKED=depth % block != 0 or features % config.rows != 0, NARROW=config.narrow, ACTIVATION=ACTIVATIONS[activation],
        NORM=norm is not None, SCALED=scale is not None and not blocked, WEIGHED=weights is not None, BIAS=bias is not None, LATE=late,
        BLOCKED=blocked, **launch_options(pdl=pdl, warps=config.warps),
    )  # fmt: skip


def _blocked(scale: Tensor | None, rows: int, block: int, depth: int) -> bool:
    """Whether scales are by blocks; then the rows of a program must share them, and its columns end where blocks do."""
    if scale is None or scale.ndim == 2:
        return False
    assert fp8_blocks.ROWS % rows == 0 and (block % fp8_blocks.COLUMNS == 0 or block >= depth), (rows, block, depth)
    return True


@triton.jit(do_not_specialize=["zero"])
def _one_down_kernel(
    x_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, zero, N,
    K: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr,
    NARROW: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr, BLOCKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    CHUNKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = n < N
    column = tl.arange(0, BLOCK)
    if NARROW:
        w_ptr += 4 * zero
        x_ptr += 4 * zero
    if not EARLY:
        wait_for_previous(PDL)
    experts = ()
    shares = ()
    for k in tl.static_range(CHOSEN):  # from the L2: an L1 may still hold what the layer before was routed to
        experts = experts + (tl.load(ids_ptr + k, cache_modifier=".cg").to(tl.int64),)  # noqa: RUF005
        shares = shares + (tl.load(weights_ptr + k, cache_modifier=".cg"),)  # noqa: RUF005
    row = w_ptr + n[:, None] * K + column[None, :]
    ws = ()
    scales = ()
    if BLOCKED:  # see above
        scale_at = scale_row(scale_ptr, tl.program_id(0) * ROWS, K) + column // 128
        EACH: tl.constexpr = (K + 127) // 128  # scales of a row
    for i in tl.static_range(AHEAD):
        inside = live[:, None] & (i % CHUNKS * BLOCK + column < K)[None, :]
        if BLOCKED:
            place = scale_at + experts[i // CHUNKS] * (N // 16 * EACH) + i % CHUNKS * (BLOCK // 128)
            scales = scales + (tl.load(place, mask=i % CHUNKS * BLOCK + column < K, other=0.0),)  # noqa: RUF005
        ws = ws + (_stream(row + experts[i // CHUNKS] * (N * K) + i % CHUNKS * BLOCK, inside, MASKED),)  # noqa: RUF005
    if EARLY:  # so far nothing that the kernel before has written
        wait_for_previous(PDL)
    if RESIDUAL:
        residual = tl.load(residual_ptr + n, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN * CHUNKS):
        if i + AHEAD < CHOSEN * CHUNKS:
            inside = live[:, None] & ((i + AHEAD) % CHUNKS * BLOCK + column < K)[None, :]
            ahead = row + experts[(i + AHEAD) // CHUNKS] * (N * K) + (i + AHEAD) % CHUNKS * BLOCK
            ws = ws + (_stream(ahead, inside, MASKED),)  # noqa: RUF005
            if BLOCKED:
                place = (
                    scale_at + experts[(i + AHEAD) // CHUNKS] * (N // 16 * EACH) + (i + AHEAD) % CHUNKS * (BLOCK // 128)
                )
                scales = scales + (tl.load(place, mask=(i + AHEAD) % CHUNKS * BLOCK + column < K, other=0.0),)  # noqa: RUF005
        here = i % CHUNKS * BLOCK + column
        x = tl.load(x_ptr + i // CHUNKS * K + here, mask=here < K, other=0.0).to(tl.float32) * shares[i // CHUNKS]
        if SCALED:
            each = tl.load(scale_ptr + experts[i // CHUNKS] * N + n, mask=live, other=0.0)
            total += ws[i].to(tl.float32) * x[None, :] * each[:, None]
        else:
            if BLOCKED:
                x = x * scales[i]
            total += ws[i].to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if BIAS:
        for k in tl.static_range(CHOSEN):
            y += shares[k] * tl.load(bias_ptr + experts[k] * N + n, mask=live, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=live)


def one_down(
    inner: Tensor,
    ids: Tensor,
    weights: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    config: ExpertGemvConfig,
    pdl: bool = False,
    early: bool = False,
) -> None:
    """out [1, E] = residual + sum over k of weights[0, k] * (down_e inner[k] + bias_e), e = ids[0, k]; residual may be `out`.

    inner [K, F] bf16, weight [X, E, F], with `scale` [X, E] when e4m3 (by blocks [X, E / 16, F / 128]); bias [X, E].
    early: ids, weights and the first expert weights are read before the wait for the kernel that makes `inner`; that one is `late`.
    """
    chosen, depth = inner.shape
    features = weight.shape[1]
    assert weight.shape[2] == depth and out.shape == (1, features), (weight.shape, inner.shape, out.shape)
    block = min(config.block, pow2(depth))
    blocked = _blocked(scale, config.rows, block, depth)
    _one_down_kernel[(triton.cdiv(features, config.rows),)](
        inner, ids, weights, weight, scale if scale is not None else weights, bias if bias is not None else weights,
        residual if residual is not None else out, out, 0, features,
        K=depth, CHOSEN=chosen, ROWS=config.rows, BLOCK=block, AHEAD=min(config.ahead, chosen * triton.cdiv(depth, block)),
        MASKED=depth % block != 0 or features % config.rows != 0, NARROW=config.narrow, SCALED=scale is not None and not blocked,
        BIAS=bias is not None, RESIDUAL=residual is not None, EARLY=bool(early and pdl), BLOCKED=blocked,
        **launch_options(pdl=pdl, warps=config.warps),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- more tokens


@triton.jit(do_not_specialize=["T", "MOST"])
def _tile_kernel(
    x_ptr, w_ptr, x_scale_ptr, scale_ptr, bias_ptr, weights_ptr, ids_ptr, blocks_ptr, used_ptr, count_ptr, out_ptr, T, MOST, N,
    K: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_P2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, DOT: tl.constexpr, FEW: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, X_SCALED: tl.constexpr,
    WEIGHED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, ONCE: tl.constexpr, TMA: tl.constexpr,
    BLOCKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    OUT: tl.constexpr = BN // 2 if GATED else BN  # outputs of a tile
    tiles = tl.cdiv(N, OUT)
    m = tl.arange(0, BM)
    j = tl.arange(0, BN)
    column = tl.arange(0, BK)
    wait_for_previous(PDL)
    if FEW:
        tile = tl.program_id(0) % tiles
        slot = tl.program_id(0) // tiles
        rows = T
        if COUNTED:
            rows = tl.minimum(tl.load(count_ptr), T)
        if slot >= rows * CHOSEN:
            return
        expert = tl.load(ids_ptr + slot)
        k = tl.arange(0, CHOSEN_P2)
        pairs = m[:, None] * CHOSEN + k[None, :]
        chosen = tl.load(ids_ptr + pairs, mask=(m < rows)[:, None] & (k < CHOSEN)[None, :], other=-1)
        same = (chosen == expert).to(tl.int32)
        if tl.sum(tl.sum(tl.where(pairs < slot, same, 0), 1), 0) > 0:
            return  # an earlier pair has this expert
        live = tl.sum(same, 1) > 0
        pair = m * CHOSEN + tl.sum(same * k[None, :], 1)
        token = m
        source = token if GATED else pair
        target = pair
    else:
        # Programs in flight share weights and rows: GROUP blocks of one weight tile are neighbours.
        group = tl.program_id(0) // (GROUP * tiles)
        height = tl.minimum(MOST - group * GROUP, GROUP)
        inner = tl.program_id(0) % (GROUP * tiles)
        block = group * GROUP + inner % height
        tile = inner // height
        if block >= tl.load(used_ptr):
            return
        expert = tl.load(blocks_ptr + block)
        place = tl.load(blocks_ptr + MOST + block) + m
        live = place < tl.load(blocks_ptr + 2 * MOST + block)
        pair = tl.load(ids_ptr + place, mask=live, other=0)  # ids is the order here
        source = pair // CHOSEN if GATED else place
        target = place if GATED else pair
    first = expert.to(tl.int64) * N  # of the expert's rows
    if GATED:
        first = first * 2
    x_row = x_ptr + source.to(tl.int64)[:, None] * K
    x_scales = x_scale_ptr + source.to(tl.int64) * ((K + 127) // 128)
    if TMA and GATED:
        # The copy engine loads boxes: gate and up are two, and meet the same rows of x.
        top = (first + tile * OUT).to(tl.int32)
        acc = tl.zeros([OUT, BM], tl.float32)
        up = tl.zeros([OUT, BM], tl.float32)
        # Outputs beyond N meet rows of others; what they compute is not stored.
        line = tl.minimum(tile * OUT + tl.arange(0, OUT), N - 1)
        for start in range(0, K, BK):
            at = start + column
            x = tl.load(x_row + at[None, :], mask=live[:, None] & (at < K)[None, :], other=0.0)
            xt = tl.trans(x.to(DOT))
            if BLOCKED:
                by_token = tl.load(x_scales + start // 128, mask=live, other=0.0)[None, :]
                by_row = tl.load(scale_row(scale_ptr, first + line, K) + start // 128)[:, None]
                acc += tl.dot(w_ptr.load([top, start]), xt) * (by_row * by_token)
                by_row = tl.load(scale_row(scale_ptr, first + N + line, K) + start // 128)[:, None]
                up += tl.dot(w_ptr.load([top + N, start]), xt) * (by_row * by_token)
            else:
                acc = tl.dot(w_ptr.load([top, start]), xt, acc)
                up = tl.dot(w_ptr.load([top + N, start]), xt, up)
        if X_SCALED:
            each = tl.load(x_scale_ptr + source, mask=live, other=0.0)[None, :]
            acc *= each
            up *= each
        if WEIGHED:
            weight = tl.load(weights_ptr + pair, mask=live, other=0.0)[None, :]
            acc *= weight
            up *= weight
        if SCALED:
            acc *= tl.load(scale_ptr + first + line)[:, None]
            up *= tl.load(scale_ptr + first + N + line)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + first + line).to(tl.float32)[:, None]
            up += tl.load(bias_ptr + first + N + line).to(tl.float32)[:, None]
        acc = _glue(acc, up, ACTIVATION)
    else:
        # Outputs beyond N read the last row (by TMA the next ones). Gated: the upper half of the tile are the outputs' up rows.
        line = tl.minimum(tile * OUT + j % OUT, N - 1)
        if GATED:
            line += j // OUT * N
        if not TMA:
            row = w_ptr + first * K + line[:, None] * K
        acc = tl.zeros([BN, BM], tl.float32)
        for start in range(0, K, BK):
            at = start + column
            if K % BK == 0:
                x = tl.load(x_row + at[None, :], mask=live[:, None], other=0.0)
            else:
                x = tl.load(x_row + at[None, :], mask=live[:, None] & (at < K)[None, :], other=0.0)
            if TMA:
                w = w_ptr.load([(first + tile * OUT).to(tl.int32), start])
            elif K % BK != 0:
                w = tl.load(row + at[None, :], mask=(at < K)[None, :], other=0.0)
            elif ONCE:
                w = tl.load(row + at[None, :], eviction_policy="evict_first")
            else:
                w = tl.load(row + at[None, :])
            if BLOCKED:
                by_row = tl.load(scale_row(scale_ptr, first + line, K) + start // 128)
                by_token = tl.load(x_scales + start // 128, mask=live, other=0.0)
                acc += tl.dot(w.to(DOT), tl.trans(x.to(DOT))) * (by_row[:, None] * by_token[None, :])
            else:
                acc = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), acc)
        if X_SCALED:
            acc *= tl.load(x_scale_ptr + source, mask=live, other=0.0)[None, :]
        if WEIGHED:
            acc *= tl.load(weights_ptr + pair, mask=live, other=0.0)[None, :]
        if SCALED:
            acc *= tl.load(scale_ptr + first + line)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + first + line).to(tl.float32)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUT, BM)), (1, 2, 0)))
            acc = _glue(gate, up, ACTIVATION)
    n = tile * OUT + tl.arange(0, OUT)
    at_out = out_ptr + target.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at_out, acc.to(out_ptr.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


def expert_tiles(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    out: Tensor,
    gated: bool,
    order: Tensor | None = None,
    blocks: Tensor | None = None,
    used: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    weights: Tensor | None = None,
    count: Tensor | None = None,
    config: TileConfig,
    pdl: bool = False,
) -> None:
    """Every pair's row by its expert's matrix. gated: x [T, E] by gate_up [X, 2F, E] -> out [T K, F]; else x [T K, F] by down [X, E, F]
    -> out [T K, E], unweighed.

    ids int32 [T, K]. With `order`, `blocks` and `used` of `sort_pairs` (block = config.bm) inner rows lie in sorted order; answers always
    lie by pair. Without them T <= config.bm and all rows lie by pair; then `count` (int32 [1], on the device) bounds the live tokens.
    Numbers as in skinny.fixed_linear: bf16 by bf16, or e4m3 by e4m3 with `x_scale` [rows of x] and `scale` [X, N], by blocks with
    `x_scale` [rows of x, K / 128] and `scale` [X, N / 16, K / 128]; bias [X, N].
    weights [T, K], only where `gated`: factors on what gate and up make of a pair's row, before the bias.
    A row's bits depend on neither its neighbours nor their number, for one config.
    """
    tokens, chosen = ids.shape
    depth = x.shape[1]
    stored = weight.shape[1]
    features = stored // 2 if gated else stored
    few = order is None
    assert weight.shape[2] == depth, (weight.shape, x.shape)
    assert out.shape == (tokens * chosen, features), (out.shape, tokens * chosen, features)
    assert len(x) == (tokens if gated else tokens * chosen), (x.shape, tokens, chosen)
    assert (x_scale is None) == (x.dtype != FP8) and (x.dtype == FP8) == (weight.dtype == FP8), (x.dtype, weight.dtype)
    assert not few or tokens <= config.bm, f"{tokens} tokens in a tile of {config.bm}"
    blocked = scale is not None and scale.ndim == 3
    assert not blocked or fp8_blocks.COLUMNS % config.bk == 0, (
        f"blocks of {fp8_blocks.COLUMNS} columns in steps of {config.bk}"
    )
    tiles = triton.cdiv(features, config.bn // 2 if gated else config.bn)
    most = tokens * chosen if blocks is None else blocks.shape[1]
    source = weight
    if config.tma:
        box = [config.bn // 2 if gated else config.bn, config.bk]
        source = TensorDescriptor.from_tensor(weight.view(-1, depth), box)
    _tile_kernel[(tiles * most,)](
        x, source, x_scale if x_scale is not None else x, scale if scale is not None else x, bias if bias is not None else x,
        weights if weights is not None else ids, ids if order is None else order, blocks if blocks is not None else ids,
        used if used is not None else ids,
        count if count is not None else ids, out, tokens, most, features,
        K=depth, CHOSEN=chosen, CHOSEN_P2=pow2(chosen), BM=config.bm, BN=config.bn, BK=config.bk, GROUP=8,
        DOT=tl.float8e4nv if x.dtype == FP8 else tl.bfloat16, FEW=few, GATED=gated, ACTIVATION=ACTIVATIONS[activation],
        X_SCALED=x_scale is not None and not blocked, WEIGHED=weights is not None, SCALED=scale is not None and not blocked,
        BIAS=bias is not None, COUNTED=count is not None, ONCE=config.bm <= 32, BLOCKED=blocked,
        TMA=config.tma, **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- combine


@triton.jit
def _mixed(answers_ptr, weights_ptr, row, column, inside, E, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of one token's weighted sum, float32."""
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(CHOSEN):
        answer = tl.load(answers_ptr + (row * CHOSEN + k) * E + column, mask=inside, other=0.0)
        total += tl.load(weights_ptr + row * CHOSEN + k) * answer.to(tl.float32)
    return total


@triton.jit
def _combine_kernel(
    answers_ptr, weights_ptr, out_ptr, count_ptr, E,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    total = _mixed(answers_ptr, weights_ptr, row, column, inside, E, CHOSEN, BLOCK)
    tl.store(out_ptr + row * E + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(answers: Tensor, weights: Tensor, *, out: Tensor, count: Tensor | None = None, pdl: bool = False) -> None:
    """out [T, E] = sum over k of weights[t, k] * answers[t K + k]; answers [T K, E]. count: int32 [1] on the device."""
    tokens, width = out.shape
    block = min(1024, pow2(width))
    _combine_kernel[(triton.cdiv(width, block), tokens)](
        answers, weights, out, count if count is not None else weights, width,
        CHOSEN=weights.shape[1], BLOCK=block, COUNTED=count is not None, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit
def _combine_norm_kernel(
    x_ptr, answers_ptr, weights_ptr, weight_ptr, beside_ptr, gate_ptr, out_ptr, scale_ptr, count_ptr, E, eps,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr, COUNTED: tl.constexpr, BLOCKED: tl.constexpr, BESIDE: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < E
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    x = tl.load(x_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
    x += _mixed(answers_ptr, weights_ptr, row, column, inside, E, CHOSEN, BLOCK)
    if BESIDE:
        beside = tl.load(beside_ptr + row * E + column, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            beside = beside / (1.0 + tl.exp(-tl.load(gate_ptr + row).to(tl.float32)))
        x += beside
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


def combine_norm(
    x: Tensor,
    answers: Tensor,
    weights: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: Tensor,
    scale: Tensor | None = None,
    beside: Tensor | None = None,
    gate: Tensor | None = None,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x += the weighted sum of `combine`, + beside [T, E], times sigmoid(gate [T, 1]) where given; out = x / rms(x) * weight, as
    norm.add_rms_norm does (out e4m3 with `scale` [T] or [T, E / 128], or bf16)."""
    tokens, width = x.shape
    assert (out.dtype == FP8) == (scale is not None), "an FP8 output has a scale, others have none"
    blocked = scale is not None and scale.ndim == 2
    block = pow2(width, fp8_blocks.COLUMNS if blocked else 1)
    _combine_norm_kernel[(tokens,)](
        x, answers, weights, weight, beside if beside is not None else x, gate if gate is not None else x, out,
        scale if scale is not None else x, count if count is not None else x, width, eps,
        CHOSEN=weights.shape[1], BESIDE=beside is not None, GATE=gate is not None, BLOCK=block,
        QUANT=scale is not None and not blocked, COUNTED=count is not None, BLOCKED=blocked,
        **launch_options(pdl=pdl, warps=max(1, min(16, block // 512))),
    )  # fmt: skip
