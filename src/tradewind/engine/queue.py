"""Who is served next, and who gives way.

Knows: the order of waiting sequences under a policy. Refuses to know: pages, slots, budgets.

A policy brings its queue. Where the order is a number that each sequence has from the moment it waits, smaller is sooner, the queue is a
sorted list with binary insertion, never sorted again. Ageing fits in, because "priority minus seconds waited / age_s" orders two sequences
the same way at any time:

      p1 - (now - t1) / a  <  p2 - (now - t2) / a     <=>     p1 * a + t1  <  p2 * a + t2

Fairness between tenants does not fit in, because whose turn it is changes with every token: that policy has a queue for each tenant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from tradewind.engine.accounts import Account, Accounts
from tradewind.engine.sequence import Sequence

AGE_S_PER_LEVEL = 10.0
"""Waiting this long is worth one level of priority."""


class WaitingQueue(Protocol):
    """Waiting sequences in the policy's order; written by the scheduler only."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def first(self, count: int) -> list[Sequence]:
        """A copy of the first `count`, as if each of them were taken in its turn; safe to walk while the queue changes."""

    def push(self, sequence: Sequence) -> None:
        """Puts a sequence at its place: behind those that came before it, whatever happened to it since."""

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out that does not start."""

    def take(self, sequence: Sequence, *, start: int) -> None:
        """Takes a sequence out that starts, computing its tokens from `start` on."""


class Policy(Protocol):
    """The queue's order and the choice of a victim."""

    preempts: bool
    """Whether a waiting sequence may evict running ones to get in."""
    accounts: Accounts | None
    """Who is charged for generated tokens; None where the order does not depend on service."""

    def queue(self) -> WaitingQueue:
        """A new, empty queue in this order."""

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """Who gives its pages back first; None when nobody is there."""


class ArrivalPolicy:
    """First come, first served; the last to come gives way."""

    preempts = False
    accounts: Accounts | None = None

    def queue(self) -> WaitingQueue:
        return SortedQueue(lambda sequence: sequence.arrived_s)

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        return max(running, key=_key, default=None)


class FairPolicy:
    """The tenant that was served least comes next (virtual token counters); the last to come of the one served most gives way."""

    preempts = False

    def __init__(self) -> None:
        self.accounts: Accounts | None = Accounts()

    def queue(self) -> WaitingQueue:
        assert self.accounts is not None
        return FairQueue(self.accounts)

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        return max(running, key=lambda s: (s.account.served if s.account else 0, *_arrival(s)), default=None)


class PriorityPolicy:
    """Lower numbers first, with ageing so that nothing starves; the least urgent gives way."""

    preempts = True
    accounts: Accounts | None = None

    def queue(self) -> WaitingQueue:
        return SortedQueue(lambda sequence: sequence.request.priority * AGE_S_PER_LEVEL + sequence.arrived_s)

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        return max(running, key=_key, default=None)


POLICIES: dict[str, type[Policy]] = {
    "arrival": ArrivalPolicy,
    "fair": FairPolicy,
    "priority": PriorityPolicy,
}


def _key(sequence: Sequence) -> tuple[float, int]:
    return (sequence.order, sequence.place)


def _arrival(sequence: Sequence) -> tuple[float, int]:
    return (sequence.arrived_s, sequence.place)


class SortedQueue:
    """A queue in the order of one number per sequence, which must not change while it waits."""

    def __init__(self, order: Callable[[Sequence], float]) -> None:
        self._order = order
        self._sorted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sorted)

    def first(self, count: int) -> list[Sequence]:
        """See WaitingQueue."""
        return self._sorted[:count]

    def push(self, sequence: Sequence) -> None:
        """See WaitingQueue."""
        sequence.order = self._order(sequence)
        insort(self._sorted, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """See WaitingQueue."""
        _take_out(self._sorted, sequence, _key)

    def take(self, sequence: Sequence, *, start: int) -> None:
        """See WaitingQueue."""
        self.remove(sequence)


class FairQueue:
    """A queue for each tenant, in order of arrival; the tenant served least comes next, among equals the one that waits longest.

    tenant   served   waiting                   first(4), prompts of 100 tokens each
    x           900   x7 x8 x9                  y1 (y: 850 + 100), x7 (x: 900 + 100), y2, x8
    y           850   y1 y2
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._tenants: dict[Account, list[Sequence]] = {}
        """Those that have somebody waiting."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.first(self._count))

    def first(self, count: int) -> list[Sequence]:
        """See WaitingQueue. A start is counted with its whole prompt, whatever part of it the prefix cache will have."""
        turns = [(account.served, *_arrival(own[0]), 0, account) for account, own in self._tenants.items()]
        heapify(turns)  # a sequence's place is unique, so that accounts are never compared
        out: list[Sequence] = []
        while turns and len(out) < count:
            served, _, _, at, account = turns[0]
            own = self._tenants[account]
            out.append(own[at])
            if at + 1 < len(own):
                heapreplace(turns, (served + _owes(own[at], start=0), *_arrival(own[at + 1]), at + 1, account))
            else:
                heappop(turns)
        return out

    def push(self, sequence: Sequence) -> None:
        """See WaitingQueue. A tenant that had nobody waiting is lifted to the level of the others."""
        account = sequence.account
        if account is None:  # one that comes back has its account, and its tenant was not idle
            account = sequence.account = self._accounts.of(sequence.request.tenant)
            if account not in self._tenants:
                self._accounts.lift(account, among=self._tenants)
        insort(self._tenants.setdefault(account, []), sequence, key=_arrival)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """See WaitingQueue."""
        account = sequence.account
        assert account is not None, f"{sequence.id} was never in the queue"
        own = self._tenants.get(account, [])
        _take_out(own, sequence, _arrival)
        self._count -= 1
        if not own:
            del self._tenants[account]
            self._accounts.last = account

    def take(self, sequence: Sequence, *, start: int) -> None:
        """See WaitingQueue. Charges the prompt; its place among the running ones is the level at which its tenant had its turn."""
        self.remove(sequence)
        assert sequence.account is not None
        sequence.order = float(sequence.account.served)
        sequence.account.served += _owes(sequence, start=start)


def _owes(sequence: Sequence, *, start: int) -> int:
    """What a start is charged: the prompt tokens that it computes, once; who was preempted does not pay for being computed again."""
    return 0 if sequence.preemptions else max(0, sequence.known - start)


def _take_out(own: list[Sequence], sequence: Sequence, key: Callable[[Sequence], tuple[float, int]]) -> None:
    at = bisect_left(own, key(sequence), key=key)
    assert at < len(own) and own[at] is sequence, f"{sequence.id} is not in the queue"
    del own[at]
