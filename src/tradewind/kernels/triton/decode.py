"""Paged attention for rows of one token: split over keys, query heads of a kv head packed into one tile, merged in the same launch.

Knows: pages, splits, the merge by the last program to arrive. Refuses to know: schedules, page owners, rows of several tokens (prefill.py).

    program  (split, kv head, row); keys of split s: [s C, (s + 1) C), C = the row's length over SPLITS, rounded up to whole tiles, and no
             less than LEAST: so a short row beside a long one is not cut into crumbs
    tile     the H / G query heads of one kv head against BN keys: the pages' bytes are read once for all of them
    shared   leading keys that all rows share were another kernel's (shared.py): the first split folds in what that left, in order
    fresh    with FUSED the row's own new key and value come from qkv: rotated and stored by the program that holds the last split, and
             attended from registers, so that no program waits for another's write

Only the row's own length and SPLITS decide how its sum is cut: batch mates change nothing.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous
from tradewind.kernels.triton.rope import stored
from tradewind.kernels.triton.tuning import DecodeConfig


def multiplied_as(pages: Tensor) -> tl.dtype:
    """The type in which queries meet these pages. FP8 becomes float16: exact, and one instruction converts two values; bf16 takes eight."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}.get(pages.dtype, tl.float16)


@triton.jit
def narrowed(x, DOT: tl.constexpr):
    """x as DOT; beyond float16's range it saturates instead of becoming infinite."""
    if tl.float16 == DOT and x.dtype != tl.float16:
        x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0)
    return x.to(DOT)


@triton.jit
def capped(score, CAP: tl.constexpr, cap):
    """cap * tanh(score / cap), by exp: tanh z = 1 - 2 / (exp(2 z) + 1)."""
    if CAP:
        score = cap * (1.0 - 2.0 / (tl.exp(2.0 * score / cap) + 1.0))
    return score


@triton.jit
def _fold(score, value, top, total, acc, DOT: tl.constexpr):
    """One step of the online softmax: scores [BM, BN] of keys with values [BN, D]."""
    new = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(top - safe)
    p = tl.exp2(score - safe[:, None])
    acc = tl.dot(p.to(DOT), value, acc * shrink[:, None])
    return new, total * shrink + tl.sum(p, 1), acc


@triton.jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """The first position that a position sees through a window."""
    if WINDOW == 2:
        return position - position % window
    return tl.maximum(position - window + 1, 0)


@triton.jit
def shared_chunk(shared, BN: tl.constexpr, SPLITS: tl.constexpr):
    """Keys of one split of the shared ones, whole tiles; at least 1."""
    return tl.maximum(tl.cdiv(tl.cdiv(shared, BN), SPLITS) * BN, 1)


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, lengths_ptr, rows_ptr, starts_ptr, sinks_ptr, part_ptr, arrived_ptr,
    found_ptr, shared_part_ptr,
    angles_ptr, q_weight_ptr, k_weight_ptr, eps,
    table_stride, scale, window, cap, k_scale, v_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, TOGETHER: tl.constexpr,
    DOT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, STARTS: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr, COUNTED: tl.constexpr, SHARED: tl.constexpr, SHARED_BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    split = tl.program_id(0)
    g = tl.program_id(1)
    row = tl.program_id(2)
    RATIO: tl.constexpr = H // G
    HALF_D: tl.constexpr = D // 2
    i = tl.arange(0, HALF)
    live_d = i < HALF_D
    j = tl.arange(0, BM)
    live_h = j < RATIO
    q_mask = live_h[:, None] & live_d[None, :]
    d = tl.arange(0, 2 * HALF)
    live_v = d < D
    n = tl.arange(0, BN)
    if FUSED and NORM:
        w1 = tl.load(q_weight_ptr + i, mask=live_d, other=0.0).to(tl.float32)
        w2 = tl.load(q_weight_ptr + HALF_D + i, mask=live_d, other=0.0).to(tl.float32)
        kw1 = tl.load(k_weight_ptr + i, mask=live_d, other=0.0).to(tl.float32)
        kw2 = tl.load(k_weight_ptr + HALF_D + i, mask=live_d, other=0.0).to(tl.float32)
    if not EARLY:
        wait_for_previous(PDL)
    if COUNTED:
        if row >= tl.load(rows_ptr):
            if EARLY:
                wait_for_previous(PDL)
            return
    token = row
    if STARTS:  # rows of several tokens are another kernel's
        token = tl.load(starts_ptr + row)
        if tl.load(starts_ptr + row + 1) - token != 1:
            if EARLY:
                wait_for_previous(PDL)
            return
    length = tl.load(lengths_ptr + row)
    first = 0
    if WINDOW:
        lowest = first_seen(length - 1, window, WINDOW)
        first = lowest // BN * BN
    if SHARED > 0:
        first = tl.load(found_ptr)
    chunk = tl.cdiv(tl.cdiv(length - first, BN), SPLITS) * BN
    if LEAST > BN:
        chunk = tl.maximum(chunk, LEAST // BN * BN)
    begin = first + split * chunk
    if begin >= length:
        if EARLY:
            wait_for_previous(PDL)
        return
    splits = tl.cdiv(length - first, chunk)
    end = tl.minimum(begin + chunk, length)
    stop = end
    if FUSED:  # the last key is not in the pages yet
        stop = tl.minimum(end, length - 1)
    table = table_ptr + row.to(tl.int64) * table_stride
    last = length - 1
    if FUSED:
        last_page = tl.load(table + last // B).to(tl.int64)
        angle = angles_ptr + last.to(tl.int64) * D
        cos = tl.load(angle + i, mask=live_d, other=0.0)
        sin = tl.load(angle + HALF_D + i, mask=live_d, other=0.0)
    position = begin + n
    if EARLY:  # older keys were written long ago: their way from memory overlaps the matmul before us
        seen = position < stop
        if WINDOW:
            seen = seen & (position >= lowest)
        page = tl.load(table + position // B, mask=seen, other=0).to(tl.int64)
        at = (page * G + g) * (B * D) + (position % B) * D
        k1 = tl.load(k_ptr + at[None, :] + i[:, None], mask=seen[None, :] & live_d[:, None], other=0.0)
        k2 = tl.load(k_ptr + at[None, :] + HALF_D + i[:, None], mask=seen[None, :] & live_d[:, None], other=0.0)
        value = tl.load(v_ptr + at[:, None] + d[None, :], mask=seen[:, None] & live_v[None, :], other=0.0)
        wait_for_previous(PDL)

    if FUSED:
        base = q_ptr + token.to(tl.int64) * ((H + 2 * G) * D)
        # All programs load the new key and value, so that the one that needs them does not wait for them later.
        new_k = base + (H + g) * D + i
        ka = tl.load(new_k, mask=live_d, other=0.0).to(tl.float32)
        kb = tl.load(new_k + HALF_D, mask=live_d, other=0.0).to(tl.float32)
        new_v = tl.load(base + (H + G + g) * D + d, mask=live_v, other=0.0).to(tl.float32)
    else:
        base = q_ptr + token.to(tl.int64) * (H * D)
    q_at = base + (g * RATIO + j)[:, None] * D + i[None, :]
    q1 = tl.load(q_at, mask=q_mask, other=0.0)
    q2 = tl.load(q_at + HALF_D, mask=q_mask, other=0.0)
    if FUSED:
        a = q1.to(tl.float32)
        b = q2.to(tl.float32)
        if NORM:
            factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
            a = a * factor * w1[None, :]
            b = b * factor * w2[None, :]
        q1 = a * cos[None, :] - b * sin[None, :]
        q2 = b * cos[None, :] + a * sin[None, :]
    q1 = narrowed(q1, DOT)
    q2 = narrowed(q2, DOT)

    # Scores are kept in units of log 2, so that exp2 serves; with a cap they stay natural until it has been applied.
    LOG2E: tl.constexpr = 1.4426950408889634
    factor_k = scale * k_scale
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, 2 * HALF], tl.float32)
    rest = begin
    if EARLY:
        score = tl.dot(q2, k2.to(DOT), tl.dot(q1, k1.to(DOT)))
        score = capped(score * factor_k, CAP, cap) * LOG2E
        score = tl.where(seen[None, :], score, float("-inf"))
        top, total, acc = _fold(score, value.to(DOT), top, total, acc, DOT)
        rest = begin + BN
    for start in range(rest, stop, BN):
        position = start + n
        seen = position < stop
        if WINDOW:
            seen = seen & (position >= lowest)
        page = tl.load(table + position // B, mask=seen, other=0).to(tl.int64)
        at = (page * G + g) * (B * D) + (position % B) * D
        k1 = tl.load(k_ptr + at[None, :] + i[:, None], mask=seen[None, :] & live_d[:, None], other=0.0)
        k2 = tl.load(k_ptr + at[None, :] + HALF_D + i[:, None], mask=seen[None, :] & live_d[:, None], other=0.0)
        value = tl.load(v_ptr + at[:, None] + d[None, :], mask=seen[:, None] & live_v[None, :], other=0.0)
        score = tl.dot(q2, k2.to(DOT), tl.dot(q1, k1.to(DOT)))
        score = capped(score * factor_k, CAP, cap) * LOG2E
        score = tl.where(seen[None, :], score, float("-inf"))
        top, total, acc = _fold(score, value.to(DOT), top, total, acc, DOT)
    acc *= v_scale

    if SHARED > 0:  # splits of the shared keys, in their order; with none, nothing is loaded and nothing changes
        SHARED_PART: tl.constexpr = SHARED * RATIO * (D + 2)
        theirs = shared_part_ptr + (row * G + g).to(tl.int64) * SHARED_PART
        used = tl.where(split == 0, tl.cdiv(first, shared_chunk(first, SHARED_BN, SHARED)), 0)
        for s_shared in tl.static_range(SHARED):
            live_s = live_h & (s_shared < used)
            place = s_shared * RATIO + j
            top_s = tl.load(theirs + SHARED * RATIO * D + place, mask=live_s, other=float("-inf"))
            total_s = tl.load(theirs + SHARED * RATIO * (D + 1) + place, mask=live_s, other=0.0)
            mask_s = live_s[:, None] & live_v[None, :]
            acc_s = tl.load(theirs + place[:, None] * D + d[None, :], mask=mask_s, other=0.0)
            both = tl.maximum(top, top_s)
            shrink_mine = tl.exp2(top - both)
            shrink_s = tl.exp2(top_s - both)
            acc = acc * shrink_mine[:, None] + acc_s * shrink_s[:, None]
            total = total * shrink_mine + total_s * shrink_s
            top = both

    if FUSED:
        if end == length:
            if NORM:
                k_factor = tl.rsqrt((tl.sum(ka * ka, 0) + tl.sum(kb * kb, 0)) / D + eps)
                ka = ka * k_factor * kw1
                kb = kb * k_factor * kw2
            k_1 = stored(ka * cos - kb * sin, k_scale, k_ptr)
            k_2 = stored(kb * cos + ka * sin, k_scale, k_ptr)
            v_new = stored(new_v, v_scale, v_ptr)
            last_at = (last_page * G + g) * (B * D) + (last % B) * D
            tl.store(k_ptr + last_at + i, k_1, mask=live_d)
            tl.store(k_ptr + last_at + HALF_D + i, k_2, mask=live_d)
            tl.store(v_ptr + last_at + d, v_new, mask=live_v)
            k_1_wide = k_1.to(DOT).to(tl.float32)
            k_2_wide = k_2.to(DOT).to(tl.float32)
            last_score = tl.sum(q1.to(tl.float32) * k_1_wide[None, :], 1) + tl.sum(
                q2.to(tl.float32) * k_2_wide[None, :], 1
            )
            last_score = capped(last_score * factor_k, CAP, cap) * LOG2E
            new_top = tl.maximum(top, last_score)
            last_shrink = tl.exp2(top - new_top)
            last_p = tl.exp2(last_score - new_top)
            acc = acc * last_shrink[:, None] + last_p[:, None] * (v_new.to(tl.float32) * v_scale)[None, :]
            total = total * last_shrink + last_p
            top = new_top

    head = g * RATIO + j
    out_at = out_ptr + token.to(tl.int64) * (H * D)
    if splits == 1:
        if SINKS:
            total += tl.exp2(tl.load(sinks_ptr + head, mask=live_h, other=0.0).to(tl.float32) * LOG2E - top)
        result = acc / total[:, None]
        tl.store(
            out_at + head[:, None] * D + d[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=live_h[:, None] & live_v[None, :],
        )
        return

    # part of one (row, kv head): [SPLITS, RATIO, D] sums, then [SPLITS, RATIO] tops, then totals.
    PART: tl.constexpr = SPLITS * RATIO * (D + 2)
    part = part_ptr + (row * G + g).to(tl.int64) * PART
    tl.store(part + (split * RATIO + j)[:, None] * D + d[None, :], acc, mask=live_h[:, None] & live_v[None, :])
    tl.store(part + SPLITS * RATIO * D + split * RATIO + j, top, mask=live_h)
    tl.store(part + SPLITS * RATIO * (D + 1) + split * RATIO + j, total, mask=live_h)
    tl.debug_barrier()
    counter = arrived_ptr + row * G + g
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    if before != splits - 1:
        return
    tl.store(counter, 0)
    s = tl.arange(0, SPLITS)
    there = s < splits
    # Heads of a group are loaded before the first of them is stored: a store between would make each head a way to the L2 of its own.
    for first_h in tl.static_range(0, RATIO, TOGETHER):
        tops = ()
        totals = ()
        sums = ()
        for u in tl.static_range(TOGETHER):
            if first_h + u < RATIO:
                slot = s * RATIO + first_h + u
                top_at = part + SPLITS * RATIO * D + slot
                tops = tops + (tl.load(top_at, mask=there, other=float("-inf"), cache_modifier=".cg"),)  # noqa: RUF005
                total_at = part + SPLITS * RATIO * (D + 1) + slot
                totals = totals + (tl.load(total_at, mask=there, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
                sum_at = part + slot[:, None] * D + d[None, :]
                seen_sum = there[:, None] & live_v[None, :]
                sums = sums + (tl.load(sum_at, mask=seen_sum, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
        for u in tl.static_range(TOGETHER):
            if first_h + u < RATIO:
                best = tl.max(tops[u], 0)
                weight = tl.exp2(tops[u] - best)
                whole = tl.sum(weight * totals[u], 0)
                if SINKS:
                    whole += tl.exp2(tl.load(sinks_ptr + g * RATIO + first_h + u).to(tl.float32) * LOG2E - best)
                merged = tl.sum(sums[u] * weight[:, None], 0) / whole
                tl.store(out_at + (g * RATIO + first_h + u) * D + d, merged.to(out_ptr.dtype.element_ty), mask=live_v)


@dataclass(frozen=True)
class SharedKeys:
    """What `paged_decode` folds in of keys that all its rows share: found int32 [>= 2] (keys, row), parts float32 of shared.py, cut into at
    most `splits` pieces of whole tiles of `block_n` keys."""

    found: Tensor
    parts: Tensor
    splits: int
    block_n: int


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
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
    angles: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor,
    rows: Tensor | None = None,
    query_start: Tensor | None = None,
    config: DecodeConfig,
    workspace: Tensor | None = None,
    arrived: Tensor | None = None,
    pdl: bool = False,
    early: bool = False,
    shared: SharedKeys | None = None,
) -> None:
    """out [T, H D] = attention of each one-token row over its pages; other rows (by query_start int32 [R + 1]) are left alone.

    q [T, H D] rotated, its key already in the pages; or, with angles float32 [positions, D] (a table, cos half | sin half), the raw qkv
    row [T, (H + 2G) D]: then head norms (q_weight, k_weight), rotation and the KV write happen here too. Pages [pages, G, B, D] bf16, f16,
    float32 or e4m3 (value = stored * scale). lengths int32 [R] counts the new token. page_table int32 [R, P]. rows: int32 [1] on the
    device, live rows. Without query_start row r is token r. sinks [H]: exp(sink) joins the denominator.
    workspace float32 (`decode_workspace_floats`), arrived int32 [R G] zeros (left zero): only for config.splits > 1.
    early (fused only): lengths, page table and the first tile of older keys are read before the wait for the previous kernel; that kernel
    must have been launched with `late`, and must not write any of them.
    shared (neither fused nor with a window): keys before shared.found[0] are not read; their sums come from shared.parts, which
    `shared_attention` has written.
    Source: FlashAttention 2 (Dao 2023), split-KV decode.
    """
    count, kv_heads, page_tokens, dim = lengths.shape[0], *k_pages.shape[1:]
    assert dim % 2 == 0 and heads % kv_heads == 0
    fused = angles is not None
    assert fused or not early, "only the fused kernel reads older keys alone"
    assert not fused or angles.shape[1] == dim, "the fused rotation covers the whole head"
    assert shared is None or not (fused or window is not None), (
        "shared keys are for rotated queries that see everything"
    )
    assert pow2(config.splits) == config.splits, f"{config.splits} splits are no power of two"
    assert config.splits == 1 or (workspace is not None and arrived is not None), "splits need workspace and counters"
    dot = multiplied_as(k_pages)
    half, ratio = pow2(dim // 2, 16), heads // kv_heads
    together = max(1, min(ratio, 2048 * config.warps // (config.splits * 2 * half)))  # up to 64 registers a thread
    _decode_kernel[(config.splits, kv_heads, count)](
        q, k_pages, v_pages, out, page_table, lengths, rows if rows is not None else lengths,
        query_start if query_start is not None else lengths, sinks if sinks is not None else lengths,
        workspace if workspace is not None else q, arrived if arrived is not None else lengths,
        shared.found if shared is not None else lengths, shared.parts if shared is not None else q,
        angles if fused else q, q_weight if q_weight is not None else q, k_weight if k_weight is not None else q, eps,
        page_table.stride(0), scale, window or 0, softcap or 0.0, k_scale, v_scale,
        H=heads, G=kv_heads, D=dim, B=page_tokens,
        BM=pow2(ratio, 16), BN=config.block_n, HALF=half, SPLITS=config.splits, LEAST=config.least_keys, TOGETHER=together, DOT=dot,
        WINDOW=window_kind(window, chunked=chunked), CAP=softcap is not None, SINKS=sinks is not None, STARTS=query_start is not None,
        FUSED=fused, NORM=q_weight is not None, EARLY=early, COUNTED=rows is not None,
        SHARED=shared.splits if shared is not None else 0, SHARED_BN=shared.block_n if shared is not None else 1,
        **launch_options(pdl=pdl, warps=config.warps, stages=config.stages),
    )  # fmt: skip


def window_kind(window: int | None, *, chunked: bool) -> int:
    """What kernels are compiled for: 0 no window, 1 one that slides, 2 one that restarts at multiples of its size."""
    assert window is not None or not chunked, "chunks are windows"
    return 0 if window is None else 2 if chunked else 1


def decode_workspace_floats(rows: int, *, heads: int, head_dim: int, splits: int) -> int:
    """How many floats of workspace `paged_decode` needs."""
    return rows * heads * splits * (head_dim + 2)
