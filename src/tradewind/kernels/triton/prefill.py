"""Paged attention for rows of many tokens (prefill, chunks, mixed steps): causal, over pages, query heads packed.

Knows: tiles of queries against tiles of keys. Refuses to know: schedules and page owners.

    tile t of the grid    the t-th block of BQ tokens; row r's first tile is query_start[r] // BQ + r, an upper bound that never overlaps
                          with r + 1's; tiles beyond a row's tokens leave at once. T // BQ + R tiles serve any split of T tokens to R rows
    rows of the tile      BQ tokens x H / G query heads of one kv head
    keys                  whole tiles that all queries see first, then the diagonal ones with a mask
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tradewind.kernels.triton.decode import capped, first_seen, multiplied_as, narrowed, window_kind
from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.tuning import PrefillConfig


@triton.jit
def _block(
    q, k_ptr, v_ptr, table, start, lowest, length, position, top, total, acc, g, window, factor_k, cap,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr,
    MASK: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BN)
    d = tl.arange(0, DP)
    key = start + n
    if TMA:
        # A tile lies in one page: one copy by the tensor engine. Values beyond the row's end may be anything finite or not.
        line = (tl.load(table + start // B) * G + g) * B + start % B
        k = tl.trans(k_ptr.load([line, 0]))
        v = v_ptr.load([line, 0])
        if MASK:
            v = tl.where(((key >= lowest) & (key < length))[:, None], v, 0.0)
    elif B % BN == 0:
        # A tile lies in one page: one scalar look-up.
        page = tl.load(table + start // B).to(tl.int64)
        at = (page * G + g) * (B * D) + (start % B + n) * D
    else:
        page = tl.load(table + key // B, mask=(key >= lowest) & (key < length), other=0).to(tl.int64)
        at = (page * G + g) * (B * D) + (key % B) * D
    if TMA:
        pass
    elif MASK:
        inside = (key >= lowest) & (key < length)  # what a dropped page holds must not matter
        if D == DP:
            k = tl.load(k_ptr + at[None, :] + d[:, None], mask=inside[None, :], other=0.0)
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_ptr + at[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    else:
        if D == DP:
            k = tl.load(k_ptr + at[None, :] + d[:, None])
            v = tl.load(v_ptr + at[:, None] + d[None, :])
        else:
            k = tl.load(k_ptr + at[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    score = tl.dot(q, k.to(DOT))
    factor = factor_k * 1.4426950408889634
    if CAP:
        score = capped(score * factor_k, CAP, cap)
        factor = 1.4426950408889634
    if MASK:
        seen = key[None, :] <= position[:, None]
        if WINDOW == 1:
            seen = seen & (key[None, :] > position[:, None] - window)
        if WINDOW == 2:
            seen = seen & (key[None, :] >= (position - position % window)[:, None])
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1) * factor)
        safe = tl.where(new == float("-inf"), 0.0, new)
    else:
        new = tl.maximum(top, tl.max(score, 1) * factor)
        safe = new
    shrink = tl.exp2(top - safe)
    p = tl.exp2(score * factor - safe[:, None])
    acc = tl.dot(p.to(DOT), v.to(DOT), acc * shrink[:, None])
    return new, total * shrink + tl.sum(p, 1), acc


@triton.jit
def _line(table, start, g, G: tl.constexpr, B: tl.constexpr):
    """First row of a tile of keys in the pages seen as [pages G B, D]; the tile lies in one page."""
    return (tl.load(table + start // B) * G + g) * B + start % B


@triton.jit
def _pair(
    q, k_ptr, v_ptr, table, start, top, total, acc, g, factor_k, cap,
    G: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Two tiles that all queries see, in one step of the online softmax: sums are rescaled half as often. Tiles may lie in two pages."""
    first = _line(table, start, g, G, B)
    second = _line(table, start + BN, g, G, B)
    k = tl.trans(k_ptr.load([first, 0]))
    score = tl.dot(q, k.to(DOT))
    k_2 = tl.trans(k_ptr.load([second, 0]))
    score_2 = tl.dot(q, k_2.to(DOT))
    factor = factor_k * 1.4426950408889634
    if CAP:
        score = capped(score * factor_k, CAP, cap)
        score_2 = capped(score_2 * factor_k, CAP, cap)
        factor = 1.4426950408889634
    new = tl.maximum(top, tl.max(tl.maximum(score, score_2), 1) * factor)
    shrink = tl.exp2(top - new)
    p = tl.exp2(score * factor - new[:, None])
    v = v_ptr.load([first, 0])
    acc = tl.dot(p.to(DOT), v.to(DOT), acc * shrink[:, None])
    p_2 = tl.exp2(score_2 * factor - new[:, None])
    v_2 = v_ptr.load([second, 0])
    acc = tl.dot(p_2.to(DOT), v_2.to(DOT), acc)
    return new, total * shrink + tl.sum(p + p_2, 1), acc


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, lengths_ptr, starts_ptr, rows_ptr, sinks_ptr,
    R, table_stride, scale, window, cap, k_scale, v_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    BQ: tl.constexpr, RATIO: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, STEPS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SINGLES: tl.constexpr, BEGUN: tl.constexpr, COUNTED: tl.constexpr,
    TMA: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see more keys: start them first
    g = tl.program_id(1)
    count = R
    if COUNTED:
        count = tl.minimum(tl.load(rows_ptr), R)
    low = 0  # the last row r with query_start[r] // BQ + r <= tile
    high = count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        if low < high - 1:
            if tl.load(starts_ptr + middle) // BQ + middle <= tile:
                low = middle
            else:
                high = middle
    if count == 0:
        return
    row = low
    first = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - first
    block = (tile - (first // BQ + row)) * BQ
    if block >= tokens:
        return
    if not SINGLES:
        if tokens == 1:
            return
    length = tl.load(lengths_ptr + row)
    if not BEGUN:
        if length == tokens:
            return
    j = tl.arange(0, BQ * RATIO)
    token = block + j // RATIO
    head = g * (H // G) + j % RATIO
    live = (token < tokens) & (j % RATIO < H // G)
    position = length - tokens + token
    d = tl.arange(0, DP)
    at = (first + token).to(tl.int64)[:, None] * (H * D) + head[:, None] * D + d[None, :]
    mask = live[:, None] & (d < D)[None, :]
    q = narrowed(tl.load(q_ptr + at, mask=mask, other=0.0), DOT)
    top = tl.full([BQ * RATIO], float("-inf"), tl.float32)
    total = tl.zeros([BQ * RATIO], tl.float32)
    acc = tl.zeros([BQ * RATIO, DP], tl.float32)
    table = table_ptr + row.to(tl.int64) * table_stride
    factor_k = scale * k_scale

    oldest = length - tokens + block  # position of the tile's first query; its last one sees `end` keys
    end = tl.minimum(length - tokens + block + BQ, length)
    lowest = 0
    if WINDOW:
        lowest = first_seen(oldest, window, WINDOW)
        for start in range(lowest // BN * BN, end, BN):
            top, total, acc = _block(
                q, k_ptr, v_ptr, table, start, lowest, end, position, top, total, acc, g, window, factor_k, cap,
                G, D, DP, B, BN, DOT, True, WINDOW, CAP, TMA,
            )  # fmt: skip
    else:
        whole = (oldest + 1) // BN * BN  # keys that every query of the tile sees, in whole tiles
        begin = 0
        if PAIRS:
            begin = whole // (2 * BN) * (2 * BN)
            for start in range(0, begin, 2 * BN):
                top, total, acc = _pair(
                    q, k_ptr, v_ptr, table, start, top, total, acc, g, factor_k, cap, G, B, BN, DOT, CAP
                )
        for start in range(begin, whole, BN):
            top, total, acc = _block(
                q, k_ptr, v_ptr, table, start, lowest, end, position, top, total, acc, g, window, factor_k, cap,
                G, D, DP, B, BN, DOT, False, WINDOW, CAP, TMA,
            )  # fmt: skip
        for start in range(whole, end, BN):
            top, total, acc = _block(
                q, k_ptr, v_ptr, table, start, lowest, end, position, top, total, acc, g, window, factor_k, cap,
                G, D, DP, B, BN, DOT, True, WINDOW, CAP, TMA,
            )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - top)
    # Behind a window, rows of the tile that are no tokens may see no key at all; every token's total is at least 1.
    result = acc * (v_scale / tl.maximum(total, 1e-30))[:, None]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    query_start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    chunked: bool = False,
    out: Tensor,
    rows: Tensor | None = None,
    singles: bool = True,
    begun: bool = True,
    config: PrefillConfig,
    pdl: bool = False,
) -> None:
    """out [T, H D] = causal attention of every row over its own pages, keys of this step included. Same records as kernels/ops.py.

    q [T, H D], its capacity T sets the grid; query_start int32 [R + 1], lengths int32 [R], page_table int32 [R, P], rows int32 [1] live
    rows, all on the device. Pages [pages, G, B, D] bf16, f16, float32 or e4m3 (value = stored * scale). singles=False leaves rows of one
    token to `paged_decode`, begun=False those without older keys to `library.fresh_attention`. Sources: FlashAttention 2 (Dao 2023); the
    tile search as in vLLM's unified kernel, rewritten.
    """
    capacity, count = q.shape[0], lengths.shape[0]
    kv_heads, page_tokens, dim = k_pages.shape[1:]
    ratio = pow2(heads // kv_heads)
    assert config.block_m % ratio == 0, f"{config.block_m} rows a tile, {ratio} heads packed"
    block_q = config.block_m // ratio
    dot = multiplied_as(k_pages)
    tma = config.tma and page_tokens % config.block_n == 0 and dim == pow2(dim, 16)
    keys, values = k_pages, v_pages
    if tma:
        flat = (-1, dim)
        keys = TensorDescriptor.from_tensor(k_pages.view(flat), [config.block_n, dim])
        values = TensorDescriptor.from_tensor(v_pages.view(flat), [config.block_n, dim])
    _prefill_kernel[(capacity // block_q + count, kv_heads)](
        q, keys, values, out, page_table, lengths, query_start, rows if rows is not None else lengths,
        sinks if sinks is not None else lengths, count, page_table.stride(0), scale, window or 0, softcap or 0.0, k_scale, v_scale,
        H=heads, G=kv_heads, D=dim, DP=pow2(dim, 16), B=page_tokens,
        BQ=block_q, RATIO=ratio, BN=config.block_n, DOT=dot, STEPS=max(1, count.bit_length()),
        WINDOW=window_kind(window, chunked=chunked), CAP=softcap is not None, SINKS=sinks is not None, SINGLES=singles, BEGUN=begun,
        COUNTED=rows is not None, TMA=tma, PAIRS=tma and config.pairs,
        **launch_options(pdl=pdl, warps=config.warps, stages=config.stages), **({"maxnreg": config.registers} if config.registers else {}),
    )  # fmt: skip
