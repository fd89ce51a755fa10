"""Whether the rows of a step may share a prefix: a guess of the host, so that only such steps have a pass over shared keys.

Knows: one page of each slot. Refuses to know: how many keys are shared, which the device finds out (kernels/triton/shared.py); a guess that
is wrong costs time and changes no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tradewind.contract.kv import KVGroup
from tradewind.contract.step import Ints


class SharedPages:
    """The page of each slot that is whole when as many keys are shared as are wanted, in the first group that drops none."""

    def __init__(self, groups: Sequence[KVGroup], *, slots: int, least_keys: int | None) -> None:
        """least_keys: None when nobody asks; then nothing is kept."""
        full = next((group for group in groups if group.kind == "full"), None)
        self.wanted = least_keys is not None and full is not None
        self._group = full.index if full is not None else -1
        self._index = max(0, (least_keys or 0) - 1) // full.page_tokens if full is not None else -1
        self._page = np.zeros(slots, np.int32)

    def leave(self, slot: int) -> None:
        """The slot has no pages any more."""
        self._page[slot] = 0

    def enter(self, group: int, entries: Ints) -> None:
        """Takes note of page-table entries, columns (slot, index, page)."""
        if self.wanted and group == self._group:
            slot, index, page = entries
            mine = index == self._index
            self._page[slot[mine]] = page[mine]

    def possible(self, slot: Ints, *, least_rows: int) -> bool:
        """Whether so many of the rows have one page in common."""
        if not self.wanted or len(slot) < least_rows:
            return False
        page = self._page[slot]
        return bool(page[0] > 0 and (page == page[0]).all())
