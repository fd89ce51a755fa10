"""From a Step's columns to the arrays that ops read: ids, positions, write slots, row tables.

Knows: the arithmetic of rows. Refuses to know: models and sampling. Written in place into arrays of fixed address, so that a tape
recorded once reads every later step.

    row r of the step        start[r] ... start[r] + count[r] - 1            positions
    token t of the batch     query_start[r] <= t < query_start[r + 1]        packed, no padding anywhere
    write slot of t, group g page_table[g][slot, position // B] * B + position % B
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tradewind.contract.step import Ints, Step
from tradewind.device.slots import Slots
from tradewind.kernels.ops import Count


@dataclass(frozen=True, kw_only=True)
class StepArrays:
    """Arrays of fixed address, filled anew for every step. T token capacity, R row capacity, P pages per row."""

    tokens: Count
    rows: Count
    ids: Ints
    positions: Ints
    query_start: Ints
    lengths: Ints
    write_slots: tuple[Ints, ...]
    page_table: tuple[Ints, ...]
    token_slot: Ints
    """The sequence slot of each token."""

    @staticmethod
    def allocate(*, capacity: int, rows: int, slots: Slots) -> StepArrays:
        """Zeroed arrays for steps of at most `capacity` tokens and `rows` rows."""
        return StepArrays(
            tokens=np.zeros(1, np.int32),
            rows=np.zeros(1, np.int32),
            ids=np.zeros(capacity, np.int32),
            positions=np.zeros(capacity, np.int32),
            query_start=np.zeros(rows + 1, np.int32),
            lengths=np.zeros(rows, np.int32),
            write_slots=tuple(np.zeros(capacity, np.int32) for _ in slots.groups),
            page_table=tuple(np.zeros((rows, table.shape[1]), np.int32) for table in slots.page_table),
            token_slot=np.zeros(capacity, np.int32),
        )


def lay_out(step: Step, slots: Slots, into: StepArrays) -> None:
    """Fills `into` for the step's rows; reads slots, changes only `into`. Every token's id must be known to its slot."""
    rows, slot, start, count = step.rows, step.slot, step.start, step.count
    ends = np.cumsum(count, dtype=np.int32)
    total = int(ends[-1]) if rows else 0
    into.rows[0] = rows
    into.tokens[0] = total
    if not rows:
        return
    into.query_start[1 : rows + 1] = ends
    np.add(start, count, out=into.lengths[:rows])
    if total == rows:  # pure decode: one token per row, no repeats needed
        token_slot, positions = slot, start
    else:
        token_slot = np.repeat(slot, count)
        positions = np.arange(total, dtype=np.int32) + np.repeat(start + count - ends, count)
    into.token_slot[:total] = token_slot
    into.positions[:total] = positions
    into.ids[:total] = slots.tokens[token_slot, positions]
    for index, group in enumerate(slots.groups):
        size = group.page_tokens
        table = slots.page_table[index]
        page, offset = np.divmod(positions, np.int32(size))
        np.multiply(table[token_slot, page], size, out=page)
        np.add(page, offset, out=into.write_slots[index][:total])
        used = (int(into.lengths[:rows].max()) + size - 1) // size
        into.page_table[index][:rows, :used] = table[slot, :used]
