"""Waiting sequences in order: by one number each, by tenants' turns, or by the slack that is left.

Knows: how an order is kept as sequences come, go and time passes. Refuses to know: which order is wanted (policies), pages, slots, budgets.

Where the order is a number that each sequence has from the moment it waits, smaller is sooner, the queue is a sorted list with binary
insertion, never sorted again. Ageing fits in, because "priority minus seconds waited / age_s" orders two sequences the same way always:

      p1 - (now - t1) / a  <  p2 - (now - t2) / a     <=>     p1 * a + t1  <  p2 * a + t2

Fairness between tenants does not fit in, because whose turn it is changes with every token: that queue has a list for each tenant. Nor does
slack, because who cannot meet its target any more must not hold up those that can: that queue has two lists, and time moves from one to the
other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Protocol

from tradewind.engine.accounts import Account, Accounts
from tradewind.engine.sequence import Sequence

OVERDUE_EVERY = 4
"""Each so many-th start goes to those behind the ones with targets, once they have waited too long."""


BEHIND_S = 1e9
"""Who has no target comes after all that have, also among those that run: so much later than it came."""


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

    def advance(self, now: float) -> None:
        """Lets time pass: who is too late for its target changes place."""


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

    def advance(self, now: float) -> None:
        """See WaitingQueue. Nothing changes: all grow older alike."""


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
                heapreplace(
                    turns, (served + owes(own[at], start=0) / account.weight, *_arrival(own[at + 1]), at + 1, account)
                )
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
        sequence.account.charge(owes(sequence, start=start))

    def advance(self, now: float) -> None:
        """See WaitingQueue. Whose turn it is depends on service, not on time."""


class SlackQueue:
    """Those that can still meet their target by the latest moment they may start; behind them the others, in the order of `rest`.

         timely    c3 (start by 4.1)   c1 (4.4)   c7 (6.0)           rest    b1   b2   c2 (was too late at 3.9)
         starts    c3 c1 c7 b1 b2 c2                                 while nobody in `rest` is overdue
                   c3 c1 c7 b1 c8 c9 c10 b2                          once the next of it waited longer than `patience_s`

    So who waits in `rest` longer than that, with k before it there, starts within OVERDUE_EVERY * (k + 1) starts.
    """

    def __init__(
        self,
        *,
        latest: Callable[[Sequence], float],
        stays: Callable[[Sequence], bool],
        rest: WaitingQueue,
        patience_s: float,
        accounts: Accounts | None = None,
    ) -> None:
        """`latest(sequence)`: when it must start to meet its target, inf without one; `stays`: it keeps its place when that has passed.

        `accounts` are those of `rest`, where that has any: who is served before it is charged, too.
        """
        self._latest, self._stays, self._rest, self._patience_s = latest, stays, rest, patience_s
        self._accounts = accounts
        self._timely: list[Sequence] = []
        self._behind: set[Sequence] = set()
        """Those in `rest`."""
        self._since = 0
        """Starts since the last one out of `rest`."""
        self._now = -inf

    def __len__(self) -> int:
        return len(self._timely) + len(self._rest)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.first(len(self)))

    def urgent_tokens(self, most: int, *, before: float) -> int:
        """Tokens of prompts that must start before then, as far as `most`; changes nothing."""
        total = 0
        for sequence in self._timely:
            if total >= most or sequence.order >= before:
                break
            total += sequence.known
        return min(total, most)

    def before(self, order: float) -> list[Sequence]:
        """Timely ones that must start by `order` or sooner: those before one that comes now and must, too. Changes nothing."""
        return self._timely[: bisect_left(self._timely, (order, inf), key=_key)]

    @property
    def timely(self) -> int:
        """How many can still meet their targets."""
        return len(self._timely)

    def first(self, count: int) -> list[Sequence]:
        """See WaitingQueue."""
        rest = self._rest.first(count)
        if not rest:
            return self._timely[:count]
        out: list[Sequence] = []
        timely = own = 0
        since = self._since
        while len(out) < count and (timely < len(self._timely) or own < len(rest)):
            overdue = own < len(rest) and self._now - rest[own].arrived_s > self._patience_s
            if own < len(rest) and (timely == len(self._timely) or (overdue and since >= OVERDUE_EVERY - 1)):
                out.append(rest[own])
                own, since = own + 1, 0
            else:
                out.append(self._timely[timely])
                timely, since = timely + 1, since + 1
        return out

    def push(self, sequence: Sequence) -> None:
        """See WaitingQueue."""
        latest = self._latest(sequence)
        if latest == inf or (latest < self._now and not self._stays(sequence)):
            self._put_behind(sequence)
        else:
            sequence.order = latest
            insort(self._timely, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """See WaitingQueue."""
        if sequence in self._behind:
            self._behind.remove(sequence)
            self._rest.remove(sequence)
        else:
            _take_out(self._timely, sequence, _key)

    def take(self, sequence: Sequence, *, start: int) -> None:
        """See WaitingQueue."""
        if sequence in self._behind:
            self._since = 0
            self._behind.remove(sequence)
            self._rest.take(sequence, start=start)
            # Beside those with targets it comes last, whatever the order among its like is made of.
            sequence.order = BEHIND_S + sequence.arrived_s
        else:
            self._since += 1
            _take_out(self._timely, sequence, _key)
            if self._accounts is not None:
                if sequence.account is None:
                    sequence.account = self._accounts.of(sequence.request.tenant)
                sequence.account.charge(owes(sequence, start=start))

    def demote(self, sequence: Sequence) -> None:
        """Puts a timely one behind, as if it were too late."""
        _take_out(self._timely, sequence, _key)
        self._put_behind(sequence)

    def advance(self, now: float) -> None:
        """See WaitingQueue."""
        self._now = now
        late = bisect_left(self._timely, (now, -1), key=_key)
        for sequence in [s for s in self._timely[:late] if not self._stays(s)]:
            self.demote(sequence)

    def _put_behind(self, sequence: Sequence) -> None:
        self._behind.add(sequence)
        self._rest.push(sequence)
        if self._accounts is not None:
            sequence.order = BEHIND_S + sequence.arrived_s


def owes(sequence: Sequence, *, start: int) -> int:
    """What a start is charged: the prompt tokens that it computes, once; who was preempted does not pay for being computed again."""
    return 0 if sequence.preemptions else max(0, sequence.known - start)


def _take_out(own: list[Sequence], sequence: Sequence, key: Callable[[Sequence], tuple[float, int]]) -> None:
    at = bisect_left(own, key(sequence), key=key)
    assert at < len(own) and own[at] is sequence, f"{sequence.id} is not in the queue"
    del own[at]
