"""Paged attention for rows of many tokens (prefill, chunks, mixed steps): causal, over pages, query heads packed.

Knows: tiles of queries against tiles of keys. Refuses to know: schedules and page owners.

    tile t of the grid    the t-th block of BQ tokens; row r's first tile is query_start[r] // BQ + r, an upper bound that never overlaps
                          with r + 1's; tiles beyond a row's tokens leave at once. T // BQ + R tiles serve any split of T tokens to R rows
    rows of the tile      BQ tokens x H / G query heads of one kv head
    keys                  whole tiles that all queries see first, then the diagonal ones with a mask
    splits                few tokens against many keys make too few tiles to fill a card: each tile is cut over its keys, and a second
                          launch merges the pieces in their order, so that no bit depends on which was done first

What cutting can bring, for T tokens at L keys of a layer with H heads, G kv heads of D dims, in bf16: 4 T L H D operations, 4 L G D bytes
of pages if they are read once. Llama-3.1-8B (H 32, G 8, D 128) at 131,072 keys on an H200 (675 TFLOP/s, 4.2 TB/s):

    T             32        64        256       1024      8192
    operations    102 us    204 us    814 us    3.3 ms    26 ms         below 40 tokens the pages' bytes are the floor: 128 us
    programs      8         16        64        256       2048          of 264 places (two a multiprocessor)

The pieces cost (D + 2) * 4 bytes for each of T * H * splits, written and read once: with T * splits <= 1024, 17 MB, which stay in the L2.
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

MERGED = 8
"""Rows (tokens x packed heads) that one program merges: few, so that the pieces come through many multiprocessors."""


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
def _row_of(tile, starts_ptr, count, BQ: tl.constexpr, LAST: tl.constexpr, STEPS: tl.constexpr):
    """The last row r of the LAST ones (0: of all) with query_start[r] // BQ + r <= tile, both counted from the first of those; that row and
    its query_start."""
    base = 0
    origin = 0
    if LAST:
        base = tl.maximum(count - LAST, 0)
        origin = tl.load(starts_ptr + base)
    low = base
    high = count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        if low < high - 1:
            if (tl.load(starts_ptr + middle) - origin) // BQ + middle - base <= tile:
                low = middle
            else:
                high = middle
    return low, base, origin


@triton.jit
def _piece(keys, splits, BN: tl.constexpr, LEAST: tl.constexpr):
    """Keys of one split, whole tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, BN), splits), LEAST // BN) * BN


@triton.jit(do_not_specialize=["T", "splits"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, lengths_ptr, starts_ptr, rows_ptr, sinks_ptr, part_ptr,
    R, T, splits, table_stride, scale, window, cap, k_scale, v_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    BQ: tl.constexpr, RATIO: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, STEPS: tl.constexpr,
    LAST: tl.constexpr, CUT: tl.constexpr, LEAST: tl.constexpr,
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
    row, base, origin = _row_of(tile, starts_ptr, count, BQ, LAST, STEPS)
    if count == 0:
        return
    first = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - first
    block = (tile - ((first - origin) // BQ + row - base)) * BQ
    if block >= tokens:
        return
    if not SINGLES:
        if tokens == 1:
            return
    length = tl.load(lengths_ptr + row)
    if not BEGUN:
        if length == tokens:
            return
    oldest = length - tokens + block  # position of the tile's first query; its last one sees `end` keys
    end = tl.minimum(length - tokens + block + BQ, length)
    lowest = 0
    whole = (oldest + 1) // BN * BN  # keys that every query of the tile sees, in whole tiles
    begin = 0
    stop = end
    pieces = 1
    split = tl.program_id(2)
    if WINDOW:
        lowest = first_seen(oldest, window, WINDOW)
        begin = lowest // BN * BN
    if CUT:
        piece = _piece(end - begin, splits, BN, LEAST)
        pieces = tl.cdiv(end - begin, piece)
        begin += split * piece
        if begin >= end:
            return
        stop = tl.minimum(begin + piece, end)
        whole = tl.maximum(tl.minimum(whole, stop), begin)

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

    if WINDOW:
        for start in range(begin, stop, BN):
            top, total, acc = _block(
                q, k_ptr, v_ptr, table, start, lowest, end, position, top, total, acc, g, window, factor_k, cap,
                G, D, DP, B, BN, DOT, True, WINDOW, CAP, TMA,
            )  # fmt: skip
    else:
        if PAIRS:
            paired = begin + (whole - begin) // (2 * BN) * (2 * BN)
            for start in range(begin, paired, 2 * BN):
                top, total, acc = _pair(
                    q, k_ptr, v_ptr, table, start, top, total, acc, g, factor_k, cap, G, B, BN, DOT, CAP
                )
            begin = paired
        for start in range(begin, whole, BN):
            top, total, acc = _block(
                q, k_ptr, v_ptr, table, start, lowest, end, position, top, total, acc, g, window, factor_k, cap,
                G, D, DP, B, BN, DOT, False, WINDOW, CAP, TMA,
            )  # fmt: skip
        for start in range(whole, stop, BN):
            top, total, acc = _block(
                q, k_ptr, v_ptr, table, start, lowest, end, position, top, total, acc, g, window, factor_k, cap,
                G, D, DP, B, BN, DOT, True, WINDOW, CAP, TMA,
            )  # fmt: skip
    if CUT:
        if pieces > 1:
            # [splits, T, H, D] sums, then [splits, T, H] tops, then totals; tokens are counted from the first of the LAST rows on.
            place = (split * T + first - origin + token).to(tl.int64) * H + head
            sums = splits * T.to(tl.int64) * H
            tl.store(part_ptr + place[:, None] * D + d[None, :], acc, mask=mask)
            tl.store(part_ptr + sums * D + place, top, mask=live)
            tl.store(part_ptr + sums * (D + 1) + place, total, mask=live)
            return
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - top)
    # Behind a window, rows of the tile that are no tokens may see no key at all; every token's total is at least 1.
    result = acc * (v_scale / tl.maximum(total, 1e-30))[:, None]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sums_of(
    part_ptr, split, pieces, at, head, live, mask, sums, T, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """What a piece has left of some tokens and heads; nothing, where there are fewer pieces."""
    there = split < pieces
    place = (split * T + at).to(tl.int64) * H + head
    d = tl.arange(0, DP)
    top = tl.load(part_ptr + sums * D + place, mask=live & there, other=float("-inf"))
    total = tl.load(part_ptr + sums * (D + 1) + place, mask=live & there, other=0.0)
    acc = tl.load(part_ptr + place[:, None] * D + d[None, :], mask=mask & there, other=0.0)
    return top, total, acc


@triton.jit
def _together(top, total, acc, top_s, total_s, acc_s):
    """Sums so far and those of the next piece."""
    both = tl.maximum(top, top_s)
    safe = tl.where(both == float("-inf"), 0.0, both)  # of a piece that a token sees nothing of
    mine, theirs = tl.exp2(top - safe), tl.exp2(top_s - safe)
    return both, total * mine + total_s * theirs, acc * mine[:, None] + acc_s * theirs[:, None]


@triton.jit(do_not_specialize=["T", "splits"])
def _merge_kernel(
    out_ptr, lengths_ptr, starts_ptr, rows_ptr, sinks_ptr, part_ptr,
    R, T, splits, window, v_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BQ: tl.constexpr, RATIO: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
    LAST: tl.constexpr, LEAST: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SINGLES: tl.constexpr, BEGUN: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BM of a tile's rows: its pieces, one after the other. Finds out again what the kernel before knew of the tile."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    count = R
    if COUNTED:
        count = tl.minimum(tl.load(rows_ptr), R)
    row, base, origin = _row_of(tile, starts_ptr, count, BQ, LAST, STEPS)
    if count == 0:
        return
    first = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - first
    block = (tile - ((first - origin) // BQ + row - base)) * BQ
    if block >= tokens:
        return
    if not SINGLES:
        if tokens == 1:
            return
    length = tl.load(lengths_ptr + row)
    if not BEGUN:
        if length == tokens:
            return
    begin = 0
    if WINDOW:
        begin = first_seen(length - tokens + block, window, WINDOW) // BN * BN
    keys = tl.minimum(length - tokens + block + BQ, length) - begin
    pieces = tl.cdiv(keys, _piece(keys, splits, BN, LEAST))
    if pieces == 1:
        return  # it is there already
    j = tl.program_id(2) * BM + tl.arange(0, BM)
    token = block + j // RATIO
    head = g * (H // G) + j % RATIO
    live = (token < tokens) & (j % RATIO < H // G)
    d = tl.arange(0, DP)
    mask = live[:, None] & (d < D)[None, :]
    sums = splits * T.to(tl.int64) * H
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    at = first - origin + token
    for split in range(0, pieces, 4):  # loads of four under way at once: what is waited for is memory
        top_0, total_0, acc_0 = _sums_of(part_ptr, split, pieces, at, head, live, mask, sums, T, H, D, DP)
        top_1, total_1, acc_1 = _sums_of(part_ptr, split + 1, pieces, at, head, live, mask, sums, T, H, D, DP)
        top_2, total_2, acc_2 = _sums_of(part_ptr, split + 2, pieces, at, head, live, mask, sums, T, H, D, DP)
        top_3, total_3, acc_3 = _sums_of(part_ptr, split + 3, pieces, at, head, live, mask, sums, T, H, D, DP)
        top, total, acc = _together(top, total, acc, top_0, total_0, acc_0)
        top, total, acc = _together(top, total, acc, top_1, total_1, acc_1)
        top, total, acc = _together(top, total, acc, top_2, total_2, acc_2)
        top, total, acc = _together(top, total, acc, top_3, total_3, acc_3)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - top)
    result = acc * (v_scale / tl.maximum(total, 1e-30))[:, None]
    at = (first + token).to(tl.int64)[:, None] * (H * D) + head[:, None] * D + d[None, :]
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
    last: int = 0,
    last_tokens: int | None = None,
    config: PrefillConfig,
    workspace: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out [T, H D] = causal attention of every row over its own pages, keys of this step included. Same records as kernels/ops.py.

    q [T, H D], its capacity T sets the grid; query_start int32 [R + 1], lengths int32 [R], page_table int32 [R, P], rows int32 [1] live
    rows, all on the device. Pages [pages, G, B, D] bf16, f16, float32 or e4m3 (value = stored * scale). singles=False leaves rows of one
    token to `paged_decode`, begun=False those without older keys to `library.fresh_attention`. workspace float32
    (`prefill_workspace_floats`): only for config.splits > 1, where a second launch merges what the first has left there. last: only so many
    rows, the last live ones, are computed (0: all), which have at most last_tokens tokens (rows of one token among them not counted);
    programs for rows that are not there would outnumber those of a few split ones. Sources: FlashAttention 2 (Dao 2023); the tile search
    as in vLLM's unified kernel, rewritten.
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
    assert config.splits == 1 or workspace is not None, "splits need a workspace"
    last = last if last < count else 0
    several, kind = last or count, window_kind(window, chunked=chunked)
    tokens = capacity
    if last and last_tokens is not None:  # with fewer prompts than `last`, rows of one token are among the last ones
        tokens = min(last_tokens + last - 1, capacity)
    tiles, steps = tokens // block_q + several, max(1, several.bit_length())
    live, sink = rows if rows is not None else lengths, sinks if sinks is not None else lengths
    part = workspace if workspace is not None else q
    _prefill_kernel[(tiles, kv_heads, config.splits)](
        q, keys, values, out, page_table, lengths, query_start, live, sink, part,
        count, tokens, config.splits, page_table.stride(0), scale, window or 0, softcap or 0.0, k_scale, v_scale,
        H=heads, G=kv_heads, D=dim, DP=pow2(dim, 16), B=page_tokens,
        BQ=block_q, RATIO=ratio, BN=config.block_n, DOT=dot, STEPS=steps,
        LAST=last, CUT=config.splits > 1, LEAST=max(config.block_n, config.least_keys),
        WINDOW=kind, CAP=softcap is not None, SINKS=sinks is not None, SINGLES=singles, BEGUN=begun,
        COUNTED=rows is not None, TMA=tma, PAIRS=tma and config.pairs,
        **launch_options(pdl=pdl, warps=config.warps, stages=config.stages), **({"maxnreg": config.registers} if config.registers else {}),
    )  # fmt: skip
    if config.splits == 1:
        return
    merged = min(MERGED, config.block_m)
    _merge_kernel[(tiles, kv_heads, config.block_m // merged)](
        out, lengths, query_start, live, sink, part, count, tokens, config.splits, window or 0, v_scale,
        H=heads, G=kv_heads, D=dim, DP=pow2(dim, 16), BQ=block_q, RATIO=ratio, BN=config.block_n, BM=merged,
        STEPS=steps, LAST=last, LEAST=max(config.block_n, config.least_keys),
        WINDOW=kind, SINKS=sinks is not None, SINGLES=singles, BEGUN=begun, COUNTED=rows is not None,
        **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


def prefill_workspace_floats(tokens: int, *, heads: int, head_dim: int, splits: int) -> int:
    """How many floats of workspace `paged_prefill` needs. tokens: T, or where only the last rows are computed, last_tokens + last - 1."""
    return tokens * heads * splits * (head_dim + 2) if splits > 1 else 0
