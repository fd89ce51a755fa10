"""From a step's columns to what kernels read, on the device: ids, positions, write slots, row tables; and sampled tokens back to slots.

Knows: the arithmetic of device/layout.py. Refuses to know: why a row is there. The host sends slot, start, count per row and the number of
rows; everything else is read from the slots' own tables, so that a steady decode step copies a header only.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous


@triton.jit
def _lay_out_kernel(
    slot_ptr, start_ptr, count_ptr, rows_ptr, tokens_ptr, table_ptr,
    ids_ptr, positions_ptr, query_start_ptr, lengths_ptr, write_slots_ptr, page_table_ptr, total_ptr,
    T, R, tokens_stride, table_stride, out_stride, TOKEN_BLOCKS,
    B: tl.constexpr, BT: tl.constexpr, R_P2: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    program = tl.program_id(0)
    rows = tl.load(rows_ptr)
    r = tl.arange(0, R_P2)
    counts = tl.load(count_ptr + r, mask=r < rows, other=0)
    if program < TOKEN_BLOCKS:
        ends = tl.cumsum(counts, 0)
        if program == 0:
            tl.store(query_start_ptr + 1 + r, ends, mask=r < R)  # rows beyond the live ones are empty
            tl.store(query_start_ptr, 0)
            tl.store(total_ptr, tl.sum(counts, 0))
        t = program * BT + tl.arange(0, BT)
        live = t < tl.sum(counts, 0)
        row = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
        before = tl.sum(tl.where(ends[None, :] <= t[:, None], counts[None, :], 0), 1)
        slot = tl.load(slot_ptr + row, mask=live, other=0).to(tl.int64)
        position = tl.load(start_ptr + row, mask=live, other=0) + t - before
        page = tl.load(table_ptr + slot * table_stride + position // B, mask=live, other=0)
        tl.store(positions_ptr + t, position, mask=live)
        tl.store(ids_ptr + t, tl.load(tokens_ptr + slot * tokens_stride + position, mask=live, other=0), mask=live)
        tl.store(write_slots_ptr + t, page * B + position % B, mask=live)
    else:
        r_one = program - TOKEN_BLOCKS
        live_one = r_one < rows
        slot_one = tl.load(slot_ptr + r_one, mask=live_one, other=0).to(tl.int64)
        length = tl.load(start_ptr + r_one, mask=live_one, other=0) + tl.load(count_ptr + r_one, mask=live_one, other=0)
        tl.store(lengths_ptr + r_one, length)
        used = tl.cdiv(length, B)
        for first in range(0, used, BP):
            p = first + tl.arange(0, BP)
            entry = tl.load(table_ptr + slot_one * table_stride + p, mask=p < used, other=0)
            tl.store(page_table_ptr + r_one.to(tl.int64) * out_stride + p, entry, mask=p < used)


def lay_out(
    slot: Tensor,
    start: Tensor,
    count: Tensor,
    rows: Tensor,
    tokens: Tensor,
    table: Tensor,
    *,
    page_tokens: int,
    ids: Tensor,
    positions: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    write_slots: Tensor,
    page_table: Tensor,
    total: Tensor,
    pdl: bool = False,
) -> None:
    """Fills ids, positions, write_slots (int32 [T]), query_start [R + 1], lengths [R], page_table [R, P] and total [1] for one KV group.

    Header: slot, start, count int32 [R], rows int32 [1]. Slots: tokens int32 [S, C], table int32 [S, P]. Rows beyond the live ones get
    length 0 and an empty range; of page_table only the used entries are written. R <= 1024. Oracle: device/layout.py:lay_out.
    """
    capacity, limit = ids.shape[0], lengths.shape[0]
    assert limit <= 1024, f"{limit} rows in a step, at most 1024"
    block = 64 if limit > 128 else 128
    token_blocks = triton.cdiv(capacity, block)
    _lay_out_kernel[(token_blocks + limit,)](
        slot, start, count, rows, tokens, table, ids, positions, query_start, lengths, write_slots, page_table, total,
        capacity, limit, tokens.stride(0), table.stride(0), page_table.stride(0), token_blocks,
        B=page_tokens, BT=block, R_P2=pow2(limit, 16), BP=128, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit
def _store_sampled_kernel(
    sampled_ptr,
    slot_ptr,
    position_ptr,
    rows_ptr,
    tokens_ptr,
    known_ptr,
    tokens_stride,
    R: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    r = tl.arange(0, R)
    live = r < tl.load(rows_ptr)
    token = tl.load(sampled_ptr + r, mask=live, other=-1)
    live = live & (token >= 0)
    slot = tl.load(slot_ptr + r, mask=live, other=0).to(tl.int64)
    position = tl.load(position_ptr + r, mask=live, other=0)
    tl.store(tokens_ptr + slot * tokens_stride + position, token, mask=live)
    tl.store(known_ptr + slot, (position + 1).to(tl.int32), mask=live)


def store_sampled(
    sampled: Tensor, slot: Tensor, position: Tensor, rows: Tensor, *, tokens: Tensor, known: Tensor, pdl: bool = False
) -> None:
    """tokens[slot[i], position[i]] = sampled[i] and known[slot[i]] = position[i] + 1 for live rows with a token (not -1).

    sampled int32 [L], slot int32 [L], position int32 or int64 [L], rows int32 [1]; tokens int32 [S, C], known int32 [S].
    """
    _store_sampled_kernel[(1,)](
        sampled,
        slot,
        position,
        rows,
        tokens,
        known,
        tokens.stride(0),
        R=pow2(sampled.shape[0]),
        **launch_options(pdl=pdl, warps=4),
    )
