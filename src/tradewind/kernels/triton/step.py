"""From a step's columns to what kernels read, on the device: ids, positions, write slots, row tables; and sampled tokens back to slots.

Knows: the arithmetic of device/layout.py. Refuses to know: why a row is there. The host sends slot, start, count per row and the number of
rows; everything else is read from the slots' own tables, so that a steady decode step copies a header only.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous


def width(rows: int) -> int:
    """A block that holds `rows`: one of few sizes, because each is a kernel of its own."""
    return next(size for size in (16, 64, 256, 1024) if rows <= size)


@triton.jit(do_not_specialize=["T", "R", "tokens_stride", "table_stride", "out_stride", "TOKEN_BLOCKS"])
def _lay_out_kernel(
    slot_ptr, start_ptr, count_ptr, rows_ptr, tokens_ptr, table_ptr,
    ids_ptr, positions_ptr, query_start_ptr, lengths_ptr, write_slots_ptr, page_table_ptr, total_ptr, begun_ptr,
    T, R, tokens_stride, table_stride, out_stride, TOKEN_BLOCKS,
    B: tl.constexpr, BT: tl.constexpr, R_P2: tl.constexpr, BP: tl.constexpr, BEGUN: tl.constexpr, PDL: tl.constexpr,
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
        start_one = tl.load(start_ptr + r_one, mask=live_one, other=0)
        count_one = tl.load(count_ptr + r_one, mask=live_one, other=0)
        length = start_one + count_one
        tl.store(lengths_ptr + r_one, length)
        if BEGUN:
            tl.store(begun_ptr + r_one, tl.where((start_one == 0) & (count_one > 1), count_one, 0))
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
    begun: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Fills ids, positions, write_slots (int32 [T]), query_start [R + 1], lengths [R], page_table [R, P] and total [1] for one KV group.
    begun [R], where wanted: the tokens of rows of several that begin in this step, 0 for all others.

    Header: slot, start, count int32 [R], rows int32 [1]. Slots: tokens int32 [S, C], table int32 [S, P]. Rows beyond the live ones get
    length 0 and an empty range; of page_table only the used entries are written. R <= 1024. Oracle: device/layout.py:lay_out.
    """
    capacity, limit = ids.shape[0], lengths.shape[0]
    assert limit <= 1024, f"{limit} rows in a step, at most 1024"
    block = 64 if width(limit) > 64 else 128
    token_blocks = triton.cdiv(capacity, block)
    _lay_out_kernel[(token_blocks + limit,)](
        slot, start, count, rows, tokens, table, ids, positions, query_start, lengths, write_slots, page_table, total,
        begun if begun is not None else lengths, capacity, limit, tokens.stride(0), table.stride(0), page_table.stride(0), token_blocks,
        B=page_tokens, BT=block, R_P2=width(limit), BP=128, BEGUN=begun is not None, **launch_options(pdl=pdl, warps=4),
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


# ---------------------------------------------------------------------------------------------- header in, tokens out
#
# Both cross the bus by themselves: the first kernel of a step reads its header from pinned host memory, the last one writes the tokens
# there. A graph has fixed addresses and two steps may be in flight, so header and tokens lie in rings of RING entries; a counter on the
# device says whose turn it is, and the last kernel of a step moves it on.

RING = 4
"""Steps whose headers may lie in host memory at once; one more than can be in flight, rounded up."""
HEADER_FIELDS = 5
"""Rows of a header [5, R]: counts (rows at 0, samples at SAMPLES_AT), slot, start, count, then for each sample the row that wants it."""
SAMPLES_AT = 4
"""Sixteen bytes behind the first, so that kernels find both counts aligned alike."""
VALUE_WORDS = 16
"""Words of a slot's sampling values, see VALUE_FIELDS; floats as their bits."""
VALUE_FIELDS = (
    "temperature", "top_p", "min_p", "repetition", "presence", "frequency", "top_k", "prompt", "penalised", "seed_low", "seed_high",
)  # fmt: skip


@triton.jit(do_not_specialize=["R", "n"])
def _fetch_header_kernel(
    ring_ptr,
    turn_ptr,
    header_ptr,
    R,
    n,
    RING: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(
        PDL
    )  # after the wait: the kernel behind may read, before its own wait, what all those before us wrote
    turn = tl.load(turn_ptr)
    field = tl.arange(0, 8)[:, None]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (field < FIELDS) & (i < n)
    words = tl.load(ring_ptr + (turn * FIELDS + field) * R + i, mask=inside, other=0, cache_modifier=".cv")
    tl.store(header_ptr + field * R + i, words, mask=inside)


def fetch_header(ring: Tensor, turn: Tensor, header: Tensor, *, rows: int, pdl: bool = False) -> None:
    """header [FIELDS, R] = ring[turn], its first `rows` columns (at least those of the counts). int32; ring is pinned host memory."""
    limit = header.shape[1]
    needed = min(limit, max(rows, SAMPLES_AT + 1))
    block = 32 if needed <= 32 else 256
    _fetch_header_kernel[(triton.cdiv(needed, block),)](
        ring,
        turn,
        header,
        limit,
        needed,
        RING=RING,
        FIELDS=HEADER_FIELDS,
        BLOCK=block,
        **launch_options(pdl=pdl, warps=4),
    )


@triton.jit
def _word(values, i: tl.constexpr, live):
    return tl.load(values + i, mask=live, other=0)


@triton.jit
def _real(values, i: tl.constexpr, live):
    return tl.load(values + i, mask=live, other=0).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["R", "L"])
def _lay_out_samples_kernel(
    header_ptr, query_start_ptr, values_ptr, index_ptr, slot_ptr, position_ptr,
    temperature_ptr, top_p_ptr, min_p_ptr, repetition_ptr, presence_ptr, frequency_ptr, top_k_ptr, prompt_ptr, length_ptr, seed_ptr,
    R, L, SAMPLES_AT: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    i = tl.arange(0, BLOCK)
    inside = i < L
    live = i < tl.load(header_ptr + SAMPLES_AT)
    row = tl.load(header_ptr + 4 * R + i, mask=live, other=0)
    slot = tl.load(header_ptr + R + row, mask=live, other=0)
    position = tl.load(header_ptr + 2 * R + row, mask=live, other=0) + tl.load(
        header_ptr + 3 * R + row, mask=live, other=0
    )
    last = tl.load(query_start_ptr + row + 1, mask=live, other=1) - 1
    tl.store(index_ptr + i, last, mask=inside)  # samples beyond the live ones read token 0, and nobody reads theirs
    tl.store(slot_ptr + i, slot, mask=inside)
    tl.store(position_ptr + i, position.to(tl.int64), mask=inside)
    if COLUMNS:
        values = values_ptr + slot.to(tl.int64) * WORDS
        tl.store(temperature_ptr + i, _real(values, 0, live), mask=inside)
        tl.store(top_p_ptr + i, _real(values, 1, live), mask=inside)
        tl.store(min_p_ptr + i, _real(values, 2, live), mask=inside)
        tl.store(repetition_ptr + i, _real(values, 3, live), mask=inside)
        tl.store(presence_ptr + i, _real(values, 4, live), mask=inside)
        tl.store(frequency_ptr + i, _real(values, 5, live), mask=inside)
        tl.store(top_k_ptr + i, _word(values, 6, live), mask=inside)
        tl.store(prompt_ptr + i, _word(values, 7, live), mask=inside)
        tl.store(length_ptr + i, tl.where(_word(values, 8, live) != 0, position, 0), mask=inside)
        low = _word(values, 9, live).to(tl.int64) & 0xFFFFFFFF
        tl.store(seed_ptr + i, low | (_word(values, 10, live).to(tl.int64) << 32), mask=inside)


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """What sampling reads of each row that wants a token, [L]: where its hidden state and its token go, and its sampling values."""

    index: Tensor
    """int32: row of the hidden states."""
    slot: Tensor
    position: Tensor
    """int64: of the token that is drawn."""
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    prompt: Tensor
    length: Tensor
    """Known tokens, where penalties are asked; else 0."""
    seed: Tensor

    @staticmethod
    def allocate(rows: int, *, device: torch.device | str) -> SampleRows:
        """Fresh columns."""
        real = {"temperature", "top_p", "min_p", "repetition", "presence", "frequency"}
        return SampleRows(
            **{
                name: torch.zeros(
                    rows,
                    dtype=torch.float32
                    if name in real
                    else torch.int64
                    if name in ("seed", "position")
                    else torch.int32,
                    device=device,
                )
                for name in SampleRows.__dataclass_fields__
            }
        )

    def first(self, rows: int) -> SampleRows:
        """Views of the first `rows`."""
        return SampleRows(**{name: getattr(self, name)[:rows] for name in self.__dataclass_fields__})


def lay_out_samples(
    header: Tensor, query_start: Tensor, values: Tensor, *, out: SampleRows, columns: bool, pdl: bool = False
) -> None:
    """Fills `out` [L] for the samples of the header; columns=False: only index, slot and position (every row is greedy).

    values int32 [slots, VALUE_WORDS]. query_start as `lay_out` wrote it.
    """
    o = out
    _lay_out_samples_kernel[(1,)](
        header, query_start, values, o.index, o.slot, o.position,
        o.temperature, o.top_p, o.min_p, o.repetition, o.presence, o.frequency, o.top_k, o.prompt, o.length, o.seed,
        header.shape[1], len(o.index), SAMPLES_AT=SAMPLES_AT, WORDS=VALUE_WORDS, BLOCK=width(len(o.index)), COLUMNS=columns,
        **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens_stride", "R"])
def _publish_kernel(
    sampled_ptr, slot_ptr, position_ptr, header_ptr, tokens_ptr, ring_ptr, turn_ptr, tokens_stride, R,
    RING: tl.constexpr, SAMPLES_AT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    let_next_start(PDL)
    i = tl.arange(0, BLOCK)
    live = i < tl.load(header_ptr + SAMPLES_AT)
    turn = tl.load(turn_ptr)
    token = tl.load(sampled_ptr + i, mask=live, other=-1)
    tl.store(ring_ptr + turn * R + i, token, mask=live)
    slot = tl.load(slot_ptr + i, mask=live, other=0).to(tl.int64)
    position = tl.load(position_ptr + i, mask=live, other=0)
    tl.store(tokens_ptr + slot * tokens_stride + position, token, mask=live & (token >= 0))
    tl.debug_barrier()
    tl.store(turn_ptr, (turn + 1) % RING)


def publish(
    sampled: Tensor, rows: SampleRows, header: Tensor, *, tokens: Tensor, ring: Tensor, turn: Tensor, pdl: bool = False
) -> None:
    """The end of a step: sampled tokens go to their slots (tokens int32 [S, C]; -1 goes nowhere) and to ring[turn] (pinned host
    memory int32 [RING, R]), and turn moves on.
    """
    _publish_kernel[(1,)](
        sampled, rows.slot, rows.position, header, tokens, ring, turn, tokens.stride(0), ring.shape[1],
        RING=RING, SAMPLES_AT=SAMPLES_AT, BLOCK=width(len(sampled)), **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- changes of slots


@triton.jit(do_not_specialize=["n", "stride"])
def _write_rows_kernel(table_ptr, where_ptr, data_ptr, n, stride, BLOCK: tl.constexpr):
    entry = tl.program_id(0)
    row = tl.load(where_ptr + entry).to(tl.int64)
    first = tl.load(where_ptr + n + entry)
    count = tl.load(where_ptr + 2 * n + entry)
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(table_ptr + row * stride + i, tl.load(data_ptr + first + i, mask=i < count, other=0), mask=i < count)


def write_rows(table: Tensor, where: Tensor, data: Tensor) -> None:
    """table[row, :count] = data[first : first + count] for each column (row, first, count) of `where` int32 [3, n]. All int32."""
    entries = where.shape[1]
    _write_rows_kernel[(entries, 8)](table, where, data, entries, table.stride(0), BLOCK=256, num_warps=4)


@triton.jit(do_not_specialize=["n", "stride"])
def _write_entries_kernel(table_ptr, where_ptr, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    row = tl.load(where_ptr + i, mask=live, other=0).to(tl.int64)
    column = tl.load(where_ptr + n + i, mask=live, other=0)
    tl.store(table_ptr + row * stride + column, tl.load(where_ptr + 2 * n + i, mask=live, other=0), mask=live)


def write_entries(table: Tensor, where: Tensor) -> None:
    """table[row, column] = value for each column (row, column, value) of `where` int32 [3, n]; no place twice."""
    entries = where.shape[1]
    _write_entries_kernel[(triton.cdiv(entries, 256),)](table, where, entries, table.stride(0), BLOCK=256, num_warps=4)
