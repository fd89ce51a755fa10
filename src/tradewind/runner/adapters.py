"""Which adapter lies in which slot of the banks, and which running sequence uses it.

Knows: that an adapter is loaded when the first sequence needs it and stays until its place is needed. Refuses to know: files (`read`).
Called between steps, by the runner alone, so a bank is never written while a step reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from tradewind.contract.errors import UserError
from tradewind.contract.step import Ints
from tradewind.layers.adapters import Adapters, Changes

NONE = -1


class AdapterSlots:
    """A bank slot for each sequence slot. An adapter that nobody uses stays until another needs its place, the longest unused first."""

    def __init__(self, adapters: Adapters, *, read: Callable[[str], Changes], slots: int) -> None:
        """read: an adapter's changes by `Enter.adapter`; raises UserError. slots: of sequences."""
        self._adapters = adapters
        self._read = read
        self.slot: Ints = np.full(slots, NONE, np.int32)
        """By sequence slot: the bank slot of its adapter, or NONE."""
        self.failed: dict[int, str] = {}
        """By sequence slot: why its adapter is not there."""
        self._held: OrderedDict[str, int] = OrderedDict()
        """Adapter -> bank slot, the longest unused first."""

    def enter(self, slot: int, adapter: str) -> None:
        """A sequence takes a slot; its adapter ("" is none) is loaded where it is not yet."""
        self.slot[slot] = NONE
        if not adapter:
            return
        try:
            place = self._held[adapter] if adapter in self._held else self._load(adapter)
        except UserError as error:
            self.failed[slot] = str(error)
            return
        self._held.move_to_end(adapter)
        self.slot[slot] = place

    def leave(self, slot: int) -> None:
        """The sequence is gone."""
        self.slot[slot] = NONE
        self.failed.pop(slot, None)

    def _load(self, adapter: str) -> int:
        changes = self._read(adapter)
        self._adapters.check(changes)
        if len(self._held) < self._adapters.slots:
            place = len(self._held)
        else:
            idle = next((name for name, place in self._held.items() if not (self.slot == place).any()), None)
            if idle is None:
                raise UserError(
                    f"{self._adapters.slots} other adapters are in use, as many as this engine has room for; ask again later"
                )
            place = self._held.pop(idle)
        self._adapters.put(place, changes)
        self._held[adapter] = place
        return place
