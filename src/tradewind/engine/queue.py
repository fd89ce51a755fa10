"""Who is served next, and who gives way.

Knows: the order of waiting sequences under a policy. Refuses to know: pages, slots, budgets.

A policy gives each sequence one number when it starts to wait, smaller is sooner, and that number does not change while it waits; so the
queue is a sorted list with binary insertion, never sorted again. Ageing fits in, because "priority minus seconds waited / age_s" orders two
sequences the same way at any time:

      p1 - (now - t1) / a  <  p2 - (now - t2) / a     <=>     p1 * a + t1  <  p2 * a + t2
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Protocol

from tradewind.engine.sequence import Sequence

AGE_S_PER_LEVEL = 10.0
"""Waiting this long is worth one level of priority."""


class Policy(Protocol):
    """The queue's order and the choice of a victim; stateless."""

    preempts: bool
    """Whether a waiting sequence may evict running ones to get in."""

    def order(self, sequence: Sequence) -> float:
        """The sequence's place, smaller is sooner; must not change while it waits."""

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """Who gives its pages back first; None when nobody is there."""


class ArrivalPolicy:
    """First come, first served; the last to come gives way."""

    preempts = False

    def order(self, sequence: Sequence) -> float:
        return sequence.arrived_s

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        return max(running, key=lambda s: (s.order, s.place), default=None)


class PriorityPolicy:
    """Lower numbers first, with ageing so that nothing starves; the least urgent gives way."""

    preempts = True

    def order(self, sequence: Sequence) -> float:
        return sequence.request.priority * AGE_S_PER_LEVEL + sequence.arrived_s

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        return max(running, key=lambda s: (s.order, s.place), default=None)


POLICIES: dict[str, type[Policy]] = {
    "arrival": ArrivalPolicy,
    "priority": PriorityPolicy,
}


def _key(sequence: Sequence) -> tuple[float, int]:
    return (sequence.order, sequence.place)


class WaitingQueue:
    """Waiting sequences in the policy's order; written by the scheduler only."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sorted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sorted)

    def first(self, count: int) -> list[Sequence]:
        """A copy of the first `count`, safe to walk while the queue changes."""
        return self._sorted[:count]

    def push(self, sequence: Sequence) -> None:
        """Puts a sequence at its place: behind those that came before it, whatever happened to it since."""
        sequence.order = self._policy.order(sequence)
        insort(self._sorted, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out."""
        at = bisect_left(self._sorted, _key(sequence), key=_key)
        assert self._sorted[at] is sequence, f"{sequence.id} is not in the queue"
        del self._sorted[at]
