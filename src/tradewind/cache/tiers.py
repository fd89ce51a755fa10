"""Places other than the device where computed pages can be kept: host memory, disk, a remote store, a peer engine.

Knows: the four verbs every tier answers. Refuses to know: any particular tier. The scheduler asks `match` when a request waits, holds it
BLOCKED while proposed moves fly, and learns that they landed from `StepResult.moved`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tradewind.cache.radix import Namespace
from tradewind.contract.step import Move


class Tier(Protocol):
    """One place for pages beside the device. Decides what it keeps; moves no bytes itself."""

    def match(self, namespace: Namespace, keys: Sequence[bytes], *, first: int) -> int:
        """How many chunks from `first` on the tier could deliver in a row; changes nothing."""

    def reserve(self, namespace: Namespace, keys: Sequence[bytes], *, first: int, count: int) -> int:
        """Keeps those chunks from being forgotten until their moves landed; returns a ticket."""

    def propose(self, ticket: int, *, targets: Sequence[Sequence[int]]) -> tuple[Move, ...]:
        """The moves that bring reserved chunks into device pages, `targets` by group; to be put into the next Step."""

    def forget(self, ticket: int) -> None:
        """Ends a reservation, whether its moves landed or not."""
