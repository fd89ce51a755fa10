"""Which adapter lies in which slot of the banks, and which running sequence uses it.

Knows: that an adapter is loaded when the first sequence needs it and stays until its place is needed. Refuses to know: files (`read`).
Called between steps, by the runner alone, so a bank is never written while a step reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

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

    def begin(self, adapters: Mapping[str, str]) -> None:
        """Loads adapters (name -> `Enter.adapter`) before the first step, as many as there is room for, and checks the others. Raises
        UserError naming the first that cannot be used."""
        for name, key in adapters.items():
            try:
                if key in self._held or len(self._held) == self._adapters.slots:
                    self.check(key)
                else:
                    self._load(key)
            except UserError as error:
                raise UserError(f"adapter {name!r}: {error}") from None

    def check(self, adapter: str) -> None:
        """Raises UserError where the model cannot take an adapter; reads its files and changes nothing. From any thread."""
        self._adapters.check(self._read(adapter))

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

    def needed(self, slots: Ints, refused: dict[int, str]) -> bool:
        """Whether a step of these sequence slots has an adapter; rows whose adapter is not there are added to `refused` with the reason."""
        for slot, reason in self.failed.items():
            refused.update((int(row), reason) for row in np.flatnonzero(slots == slot))
        return bool((self.slot[slots] >= 0).any())

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


def check_adapter(slots: AdapterSlots | None, adapter: str) -> None:
    """As `AdapterSlots.check`, also where there is no room for any."""
    if slots is None:
        raise UserError("this engine has no room for adapters")
    slots.check(adapter)
