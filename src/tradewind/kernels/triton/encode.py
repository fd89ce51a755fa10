"""Attention of every token of a row to all keys of the row, over pages: what an encoder asks of a step.

Knows: tiles of queries against tiles of keys. Refuses to know: schedules and page owners. Correct first: nothing here was tuned.

    tile t of the grid   as in prefill.py: row r's first tile is query_start[r] // BQ + r, an upper bound that never overlaps r + 1's
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.decode import capped
from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous

BLOCK_QUERIES, BLOCK_KEYS = 32, 32


@triton.jit
def _encode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, lengths_ptr, starts_ptr, rows_ptr, sinks_ptr,
    table_stride, scale, cap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, DOT: tl.constexpr, STEPS: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(rows_ptr)
    if count == 0:
        return
    low = 0  # the last row r with query_start[r] // BQ + r <= tile
    high = count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        if low < high - 1:
            if tl.load(starts_ptr + middle) // BQ + middle <= tile:
                low = middle
            else:
                high = middle
    row = low
    first = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - first
    block = (tile - (first // BQ + row)) * BQ
    if block >= tokens:
        return
    length = tl.load(lengths_ptr + row)
    g = head // (H // G)
    token = block + tl.arange(0, BQ)
    d = tl.arange(0, DP)
    n = tl.arange(0, BN)
    at = (first + token).to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    mask = (token < tokens)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(DOT)
    top = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], tl.float32)
    acc = tl.zeros([BQ, DP], tl.float32)
    table = table_ptr + row.to(tl.int64) * table_stride
    LOG2E: tl.constexpr = 1.4426950408889634
    for start in range(0, length, BN):
        key = start + n
        seen = key < length
        page = tl.load(table + key // B, mask=seen, other=0).to(tl.int64)
        place = (page * G + g) * (B * D) + (key % B) * D
        k = tl.load(k_ptr + place[None, :] + d[:, None], mask=seen[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_ptr + place[:, None] + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        score = capped(tl.dot(q, k.to(DOT)) * scale, CAP, cap) * LOG2E
        score = tl.where(seen[None, :], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new)
        p = tl.exp2(score - new[:, None])
        acc = tl.dot(p.to(DOT), v.to(DOT), acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        top = new
    if SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E - top)
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def paged_encode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    query_start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    rows: Tensor,
    heads: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """out [T, H D] = attention of every token to all `lengths` keys of its row; no mask, no window.

    q [T, H D], query_start int32 [R + 1], lengths int32 [R], page_table int32 [R, P], rows int32 [1] live rows. Pages [pages, G, B, D].
    """
    capacity, count = q.shape[0], lengths.shape[0]
    kv_heads, page_tokens, dim = k_pages.shape[1:]
    dot = {"float32": tl.float32, "float16": tl.float16}.get(str(k_pages.dtype).removeprefix("torch."), tl.bfloat16)
    _encode_kernel[(capacity // BLOCK_QUERIES + count, heads)](
        q, k_pages, v_pages, out, page_table, lengths, query_start, rows, sinks if sinks is not None else q,
        page_table.stride(0), scale, softcap or 0.0,
        H=heads, G=kv_heads, D=dim, DP=pow2(dim, 16), B=page_tokens, BQ=BLOCK_QUERIES, BN=BLOCK_KEYS, DOT=dot,
        STEPS=max(1, count.bit_length()), CAP=softcap is not None, SINKS=sinks is not None, **launch_options(pdl=pdl, warps=4, stages=2),
    )  # fmt: skip
