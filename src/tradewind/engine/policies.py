"""Who is served next, and who gives way: one class for each policy, one table.

Knows: what each policy orders by and why nothing starves under it. Refuses to know: how an order is kept (queue), pages, slots, budgets.

    policy      sooner                                  gives way            nobody starves, because
    arrival     came first                              came last            nothing that comes later is served sooner
    fair        its tenant was served least             served most          counters of tenants that wait stay close (accounts)
    length      is shorter                              is longest           being short is worth at most age_limit_s of waiting
    priority    lower number                            least urgent         AGE_S_PER_LEVEL of waiting are worth a level
    slo         must start soonest to meet its target   without a target     each fourth start is for those that waited too long
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf, log1p
from typing import Protocol

from tradewind.config.plan import ClassPlan, SchedulePlan
from tradewind.engine.accounts import Accounts
from tradewind.engine.queue import BEHIND_S, FairQueue, SlackQueue, SortedQueue, WaitingQueue
from tradewind.engine.sequence import Sequence

AGE_S_PER_LEVEL = 10.0
"""Waiting this long is worth one level of priority."""
EVICT_AT = 0.5
"""Under `slo`, who waits for a slot may evict somebody without a target when this part of its slack is gone."""

RESERVE_SHARE = 4
"""Under `slo`, this part of slots and pages is kept from those without a TTFT or TPOT target."""


class Policy(Protocol):
    """The queue's order and the choice of a victim."""

    preempts: bool
    """Whether a waiting sequence may evict running ones to get in."""
    timed: bool
    """Whether time alone changes who may start, so that the queue is looked at though nothing was given back."""
    accounts: Accounts | None
    """Who is charged for generated tokens; None where the order does not depend on service."""

    def queue(self) -> WaitingQueue:
        """A new, empty queue in this order."""

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """Who gives its pages back first; None when nobody is there."""

    def preempts_for(self, waiting: Sequence, now: float) -> bool:
        """Whether a waiting sequence may evict anybody at all; spares the question about each of those that run."""

    def may_evict(self, running: Sequence, waiting: Sequence, now: float) -> bool:
        """Whether a waiting sequence may take the place of a running one; asked only where the policy preempts for it."""

    def reserved_slots(self, waiting: Sequence) -> int:
        """So many slots are kept free from a waiting sequence, for others."""


class _Quiet:
    """What most policies are."""

    preempts = False
    timed = False
    accounts: Accounts | None = None

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """See Policy."""
        return max(running, key=_place, default=None)

    def preempts_for(self, waiting: Sequence, now: float) -> bool:
        """See Policy."""
        return self.preempts

    def may_evict(self, running: Sequence, waiting: Sequence, now: float) -> bool:
        """See Policy."""
        return False

    def reserved_slots(self, waiting: Sequence) -> int:
        """See Policy."""
        return 0


class ArrivalPolicy(_Quiet):
    """First come, first served; the last to come gives way."""

    def queue(self) -> WaitingQueue:
        """See Policy."""
        return SortedQueue(_arrived)


class FairPolicy(_Quiet):
    """The tenant that was served least for its weight comes next; the last to come of the one served most gives way."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.accounts: Accounts | None = Accounts(weights)

    def queue(self) -> WaitingQueue:
        """See Policy."""
        assert self.accounts is not None
        return FairQueue(self.accounts)

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """See Policy."""
        return max(running, key=lambda s: (s.account.served if s.account else 0, s.arrived_s, s.place), default=None)


class LengthPolicy(_Quiet):
    """Short before long, as far as that does not keep a long one waiting: being shorter is worth at most `age_limit_s`.

        place = arrival + age_limit_s * log(1 + tokens) / log(1 + longest)

    so whoever comes more than age_limit_s later never passes. The logarithm, because prompts differ by orders of magnitude. What counts is
    what is known: the tokens to be computed. How long an answer becomes is not, and a limit that nobody set says nothing.
    """

    def __init__(self, *, age_limit_s: float, longest: int) -> None:
        self._age_limit_s, self._longest = age_limit_s, log1p(longest)

    def queue(self) -> WaitingQueue:
        """See Policy."""
        return SortedQueue(self._order)

    def _order(self, sequence: Sequence) -> float:
        return sequence.arrived_s + self._age_limit_s * min(1.0, log1p(sequence.known) / self._longest)


class PriorityPolicy(_Quiet):
    """Lower numbers first, with ageing so that nothing starves; the least urgent gives way."""

    preempts = True

    def queue(self) -> WaitingQueue:
        """See Policy."""
        return SortedQueue(lambda sequence: sequence.request.priority * AGE_S_PER_LEVEL + sequence.arrived_s)

    def may_evict(self, running: Sequence, waiting: Sequence, now: float) -> bool:
        """See Policy. Of lower priority, also when ageing is counted."""
        return running.request.priority > waiting.request.priority and running.order > waiting.order


class SloPolicy(_Quiet):
    """Least slack first: who must start soonest to meet its target, then those that have none or cannot meet it any more.

        must start by    arrival + TTFT - time of its own prompt          or  arrival + e2e - prompt - answer, whichever is sooner

    Who is too late goes behind (`late` of its class: "demote"), so that one missed target does not become a queue of them, or keeps its
    place ("serve"). Those behind are served by arrival, where having had a target is worth `patience_s`; or fairly between tenants where
    weights are stated. A few slots are kept from those for whose next token nobody waits, for others that may come.
    """

    preempts = True
    timed = True

    def __init__(
        self,
        classes: Iterable[ClassPlan],
        *,
        prompt_s: Callable[[int], float],
        patience_s: float,
        slots: int = 0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`prompt_s(tokens)`: how long a prompt takes that has the engine to itself."""
        self._reserved = slots // RESERVE_SHARE
        self._classes = {one.name: one for one in classes}
        self._prompt_s, self._patience_s = prompt_s, patience_s
        self.accounts = Accounts(weights) if weights else None

    def class_of(self, sequence: Sequence) -> ClassPlan | None:
        """The sequence's class; None where the plan has none of that name."""
        return self._classes.get(sequence.request.traffic_class)

    def has_target(self, sequence: Sequence) -> bool:
        """Whether anything is promised to it."""
        own = self.class_of(sequence)
        return own is not None and (own.ttft_s is not None or own.tpot_s is not None or own.e2e_s is not None)

    def queue(self) -> SlackQueue:
        """See Policy."""
        rest = FairQueue(self.accounts) if self.accounts is not None else SortedQueue(self._behind)
        return SlackQueue(
            latest=self.latest, stays=self._stays, rest=rest, patience_s=self._patience_s, accounts=self.accounts
        )

    def latest(self, sequence: Sequence) -> float:
        """When a sequence must start, or go on, to meet its targets; inf without any."""
        own = self.class_of(sequence)
        if own is None or sequence.late:
            return inf
        if sequence.generated:  # its first token is out: what counts is when the next must come
            if own.tpot_s is None or sequence.first_s is None:
                return inf
            return sequence.first_s + own.tpot_s * (sequence.generated + 1)
        prompt_s = self._prompt_s(sequence.known)
        by = inf if own.ttft_s is None else sequence.arrived_s + own.ttft_s - prompt_s
        if own.e2e_s is not None:
            answer_s = min(sequence.request.max_tokens, own.output_tokens) * (own.tpot_s or 0.0)
            by = min(by, sequence.arrived_s + own.e2e_s - prompt_s - answer_s)
        return by

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        """See Policy. Those without targets first."""
        return max(running, key=lambda s: (not self.has_target(s), s.order, s.place), default=None)

    def preempts_for(self, waiting: Sequence, now: float) -> bool:
        """See Policy. For one with a TTFT target whose slack runs out."""
        own = self.class_of(waiting)
        if own is None or own.ttft_s is None or waiting.generated:
            return False
        by = self.latest(waiting)
        return now <= by < inf and now - waiting.arrived_s >= EVICT_AT * (by - waiting.arrived_s)

    def may_evict(self, running: Sequence, waiting: Sequence, now: float) -> bool:
        """See Policy. One without a target gives way."""
        return not self.has_target(running)

    def reserved_slots(self, waiting: Sequence) -> int:
        """See Policy."""
        own = self.class_of(waiting)
        return 0 if own is not None and (own.ttft_s is not None or own.tpot_s is not None) else self._reserved

    def _behind(self, sequence: Sequence) -> float:
        return BEHIND_S + sequence.arrived_s + (0.0 if self.has_target(sequence) else self._patience_s)

    def _stays(self, sequence: Sequence) -> bool:
        own = self.class_of(sequence)
        return own is not None and own.late == "serve"


Maker = Callable[[SchedulePlan, Callable[[int], float]], Policy]
"""(schedule, seconds of a prompt of so many tokens) -> policy."""

POLICIES: dict[str, Maker] = {
    "arrival": lambda schedule, prompt_s: ArrivalPolicy(),
    "fair": lambda schedule, prompt_s: FairPolicy(schedule.tenant_weights),
    "length": lambda schedule, prompt_s: LengthPolicy(age_limit_s=schedule.age_limit_s, longest=schedule.max_context),
    "priority": lambda schedule, prompt_s: PriorityPolicy(),
    "slo": lambda schedule, prompt_s: SloPolicy(
        schedule.classes,
        prompt_s=prompt_s,
        patience_s=schedule.patience_s,
        slots=schedule.max_running,
        weights=schedule.tenant_weights,
    ),
}


def _arrived(sequence: Sequence) -> float:
    return sequence.arrived_s


def _place(sequence: Sequence) -> tuple[float, int]:
    return (sequence.order, sequence.place)
