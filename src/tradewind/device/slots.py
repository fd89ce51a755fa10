"""The permanent row of every live sequence: tokens, page table, and who holds it.

Knows: what a slot contains and how a Step's changes alter it. Refuses to know: why a sequence enters or leaves (engine) and what its tokens
mean (sampling reads its own columns beside these).

A step sends only changes: `leave`, `enter`, new page-table entries. Positions, ids and write slots are derived here, from the slot's own
token table, so a sampled token never has to come back from the host:

    tokens[slot]      p p p p p p | g g g g .       p prompt, g generated, written by the device itself
    known[slot]                            ^        next position to be sampled

Single writer: the runner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tradewind.contract.kv import KVGroup
from tradewind.contract.step import Enter, Ints, Step

FREE = -1


class Slots:
    """Host-memory slot tables, for op sets that compute where the host can write (cpu, plain)."""

    def __init__(self, *, slots: int, max_context: int, groups: Sequence[KVGroup]) -> None:
        self.groups = tuple(groups)
        self.max_context = max_context
        # np.zeros is lazily touched memory: a slot that never holds a long sequence costs nothing.
        self.tokens = np.zeros((slots, max_context + 1), dtype=np.int32)
        self.known = np.zeros(slots, dtype=np.int32)
        self.prompt = np.zeros(slots, dtype=np.int32)
        self.epoch = np.full(slots, FREE, dtype=np.int32)
        self.page_table = tuple(
            np.zeros((slots, -(-(max_context + 1) // group.page_tokens)), dtype=np.int32) for group in groups
        )

    def enter(self, enter: Enter) -> None:
        """A sequence takes its slot; the slot must be free."""
        slot, count = enter.slot, len(enter.tokens)
        assert self.epoch[slot] == FREE, f"slot {slot} is still held by epoch {self.epoch[slot]}"
        assert count <= self.max_context, f"{count} tokens enter a slot of {self.max_context}"
        self.tokens[slot, :count] = enter.tokens
        self.known[slot] = count
        self.prompt[slot] = enter.prompt_tokens
        self.epoch[slot] = enter.epoch
        for table in self.page_table:
            table[slot] = 0

    def leave(self, slot: int) -> None:
        """The slot is free for the next `enter`; its contents are dead."""
        assert self.epoch[slot] != FREE, f"slot {slot} leaves but is not held"
        self.epoch[slot] = FREE

    def turn_pages(self, step: Step) -> None:
        """Applies the step's new page-table entries."""
        if len(step.page_slot) == 0:
            return
        for group, table in enumerate(self.page_table):
            mine = step.page_group == group
            table[step.page_slot[mine], step.page_index[mine]] = step.page_id[mine]

    def append(self, slots: Ints, positions: Ints, tokens: Ints) -> None:
        """Sampled tokens take their place; `positions` must be each slot's next one or (resumed late) already known."""
        self.tokens[slots, positions] = tokens
        self.known[slots] = positions + 1
