"""What is given up under overload, rung by rung, so that the class that matters most keeps its targets; and taken back afterwards.

Knows: which requests are protected, how near they are to missing their targets, what each rung gives up. Refuses to know: how a step is
made (scheduler), which order the queue has (policies), how a target was chosen (plan).

      rung  name        gives up                                                          what it costs whom
      0     none        nothing
      1     drafts      guesses: their rows are computed for nothing where they fail      answers come more slowly, alone
      2     chunks      most of a step's room for prompts                                 prompts take more steps
      3     admission   starts of the unprotected beyond half of the slots                they wait
      4     refusal     the lowest class: what waits of it ends, what comes is refused    they are told "too busy"
      5     answers     long answers of the unprotected that come from now on             they end with "length"

      pressure   |          one rung up for each up_s at 1 and more
           1     |--------------/\\--/\\----
                 |             /  \\/  \\        between the two lines nothing changes: hysteresis
          down   |-----------/----------\\-----
           0     |__________/            \\____    one rung down for each down_s below; doubled when it had to be taken again at once

Pressure is the greater of two: the longest that a protected request waits for its first token, against `wait_part` of its TTFT target, so
that there is time to help it; and a step's time, against `step_part` of the least TPOT target. One that is over its part has been so since
it went over, whenever that is seen: long steps leave few moments to look. All requests are walked over each `every_s`.

A plan says how far it goes: "lossless" ends with rung 3, for a refused request and a shortened answer are losses; "full" goes on. An idle
engine decides nothing, so `rest` lets time pass there: what is given up comes back though nobody asks.

Every change is told, logged and remembered. Nothing that has begun is ever cut: under a policy without preemption the protected still wait
for the slots of others; they themselves are never refused, held or shortened.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tradewind.config.goals import DegradeName
from tradewind.config.plan import ClassPlan, SchedulePlan
from tradewind.contract.request import Request
from tradewind.contract.step import Ints
from tradewind.engine.pacing import OverloadedError
from tradewind.engine.sequence import Sequence, State

LOG = logging.getLogger("tradewind.engine")

RUNGS = ("none", "drafts", "chunks", "admission", "refusal", "answers")
NO_DRAFTS, SMALL_CHUNKS, LOW_ADMISSION, REFUSAL, SHORT_ANSWERS = range(1, 6)
FAR: dict[DegradeName, int] = {"full": SHORT_ANSWERS, "lossless": LOW_ADMISSION, "off": 0}
"""The highest rung of each way that a plan names."""
REMEMBER_S = 60.0
"""So long after its last request a class still counts as the highest."""
SMOOTH = 0.2
TOO_BUSY = "the server is too busy: requests of this class are refused so that more important ones are in time; try again later"

Rank = tuple[int, int]
"""Smaller is more important: (0 with a target, 1 without; priority)."""


class Ladder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When rungs are taken, and how far they go."""

    wait_part: float = 0.5
    step_part: float = 0.9
    wait_down: float = 0.4
    step_down: float = 0.85
    """Nearer to 1, because steps that take half of what they may are nothing unusual, and the rungs themselves shorten them."""
    up_s: float = 0.2
    down_s: float = 3.0
    most_down_s: float = 60.0
    every_s: float = 0.05
    chunk_part: int = 4
    """Rung 2 leaves a step this part of its tokens for prompts."""
    short_tokens: int = 64
    """Rung 5 ends answers there."""
    most: int = SHORT_ANSWERS
    """No rung above this one is taken."""
    ttft_s: float | None = 1.0
    """Of a protected request whose class the plan does not know; None: it has no target."""
    tpot_s: float | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One rung up or down."""

    at_s: float
    was: str
    now: str
    pressure: float
    why: str


class DegradeStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The ladder in numbers; counts are since the start."""

    level: int = 0
    most: int = SHORT_ANSWERS
    pressure: float = 0.0
    """1 and more: the protected are about to miss a target."""
    ups: int = 0
    downs: int = 0
    refused: int = 0
    """Requests that were told "too busy" ..."""
    shortened: int = 0
    """... and those that were taken with a shorter answer."""

    @property
    def name(self) -> str:
        """Of the rung."""
        return RUNGS[self.level]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may do; the scheduler keeps to it."""

    drafts: int | None = None
    """Most guesses of a row; None: the engine's own."""
    chunk_tokens: int | None = None
    """Most tokens of prompts in a step; None: what the step's budget leaves."""
    admits: Callable[[Sequence, int], bool] | None = None
    """Whether one that waits may start beside so many that run; None: everybody."""
    ended: Many[Sequence] = ()
    """Waiting sequences that are to be ended now, as refused."""
    why: str = ""
    """What those are told."""
    changed: bool = False
    """Another rung than in the step before: who was held may start now."""


FREE = Limits()


class Degrade(Protocol):
    """What the scheduler asks; `Degrader` is the one answer to it."""

    def __call__(self, now: float, live: Collection[Sequence], *, flying: int, generated: Ints) -> Limits:
        """Before each step; `generated` tokens by slot."""

    def come(self, request: Request, now: float, *, idle: bool = False) -> Request:
        """A request comes: the one that is taken in its place, itself where nothing is given up. `idle`: no other is open.

        Raises OverloadedError.
        """

    def rest(self, now: float) -> float | None:
        """Nothing is open: takes back what may be by now. Seconds until there is more to take back; None: nothing is given up."""

    def stats(self) -> DegradeStats:
        """The ladder in numbers; changes nothing."""


@dataclass(frozen=True, slots=True)
class _Pressure:
    """Of one moment."""

    wait: float
    step: float
    overdue_s: float
    """How long somebody has been over its part of the TTFT target."""
    why: str


class Degrader:
    """The ladder's state. One writer: the scheduler's thread."""

    def __init__(
        self,
        schedule: SchedulePlan,
        ladder: Ladder | None = None,
        *,
        drafts: bool = True,
        told: Callable[[Change], None] | None = None,
        log: logging.Logger | None = LOG,
    ) -> None:
        """`drafts`: there are guesses to give up; without them that rung is left out. `told` hears each change; it must return at once."""
        self._schedule = schedule
        self._first, self._log = (NO_DRAFTS if drafts else SMALL_CHUNKS), log
        self._ladder = ladder or Ladder()
        self._classes = {one.name: one for one in schedule.classes}
        self._told = told
        self.level = 0
        self.pressure = 0.0
        self.changes: deque[Change] = deque(maxlen=64)
        """The last ones, oldest first."""
        self._seen: dict[Rank, float] = {}
        """When each rank's last request came."""
        self._looked_s = float("-inf")
        self._high_since: float | None = None
        self._low_since: float | None = None
        self._down_s = self._ladder.down_s
        self._changed_s = float("-inf")
        self._down_at: float | None = None
        """When a rung was last taken back, unless one was taken since."""
        self._decided_s: float | None = None
        self._step_s = 0.0
        self._limits = FREE
        self._ups = self._downs = self._refused = self._shortened = 0

    # -- Degrade -------------------------------------------------------------------------------------------------------

    def __call__(self, now: float, live: Collection[Sequence], *, flying: int, generated: Ints) -> Limits:
        """See Degrade."""
        if flying and self._decided_s is not None:
            self._step_s += SMOOTH * (now - self._decided_s - self._step_s)
        self._decided_s = now
        if now - self._looked_s < self._ladder.every_s:
            return self._limits
        self._looked_s = now
        before = self.level
        self._climb(now, self._measure(now, live, generated))
        self._limits = self._limits_at(self.level)
        if self.level == before and self.level < REFUSAL:
            return self._limits
        lowest = self._lowest(now) if self.level >= REFUSAL else None
        ended = () if lowest is None else [s for s in live if _unborn(s) and self.rank(s.request) == lowest]
        self._refused += len(ended)
        return Limits(
            drafts=self._limits.drafts,
            chunk_tokens=self._limits.chunk_tokens,
            admits=self._limits.admits,
            ended=ended,
            why=TOO_BUSY,
            changed=self.level != before,
        )

    def come(self, request: Request, now: float, *, idle: bool = False) -> Request:
        """See Degrade."""
        if idle:
            self.rest(now)
        rank = self.rank(request)
        self._seen[rank] = now
        if len(self._seen) > 64:  # priorities are the clients' numbers
            del self._seen[min(self._seen, key=self._seen.__getitem__)]
        if self.level < REFUSAL or not self._unprotected(rank, now):
            return request
        if rank == self._lowest(now):
            self._refused += 1
            raise OverloadedError(TOO_BUSY)
        if self.level >= SHORT_ANSWERS and request.max_tokens > self._ladder.short_tokens:
            self._shortened += 1
            return msgspec.structs.replace(request, max_tokens=self._ladder.short_tokens)
        return request

    def rest(self, now: float) -> float | None:
        """See Degrade."""
        self.pressure, self._high_since, self._step_s = 0.0, None, 0.0
        if not self.level:
            return None
        if self._low_since is None:  # idle since somebody looked last, at the latest
            seen_s = max(self._looked_s, self._changed_s)
            self._low_since = seen_s if seen_s > float("-inf") else now
        while self.level and (due_s := self._low_since + self._down_s) <= now:
            self._low_since = self._down_at = due_s
            self._go(self._below, due_s, "nothing is open")
        self._limits = self._limits_at(self.level)
        return self._low_since + self._down_s - now if self.level else None

    def stats(self) -> DegradeStats:
        """See Degrade."""
        return DegradeStats(
            level=self.level,
            most=self._ladder.most,
            pressure=round(self.pressure, 3),
            ups=self._ups,
            downs=self._downs,
            refused=self._refused,
            shortened=self._shortened,
        )

    # -- who matters ---------------------------------------------------------------------------------------------------

    def rank(self, request: Request) -> Rank:
        """Its place among the classes, smaller first."""
        own = self._class_of(request)
        return (0 if own is not None and (own.ttft_s is not None or own.tpot_s is not None) else 1, request.priority)

    def _class_of(self, request: Request) -> ClassPlan | None:
        return self._classes.get(request.traffic_class)

    def _ranks(self, now: float) -> list[Rank]:
        return [rank for rank, at_s in self._seen.items() if now - at_s <= REMEMBER_S]

    def _unprotected(self, rank: Rank, now: float) -> bool:
        return rank > min(self._ranks(now), default=rank)

    def _lowest(self, now: float) -> Rank | None:
        """The class that is refused first; None where there is only the one that matters."""
        ranks = self._ranks(now)
        return max(ranks) if len(ranks) > 1 else None

    def _ttft_s(self, request: Request) -> float | None:
        own = self._class_of(request)
        return self._ladder.ttft_s if own is None else own.ttft_s

    # -- pressure and rungs --------------------------------------------------------------------------------------------

    def _measure(self, now: float, live: Collection[Sequence], generated: Ints) -> _Pressure:
        """How near the protected are to missing their targets; changes nothing."""
        highest = min(self._ranks(now), default=None)
        worst, why, overdue_s = 0.0, "nobody waits", 0.0
        tpot_s = self._ladder.tpot_s
        running = False
        for sequence in live:
            request = sequence.request
            if self.rank(request) != highest:
                continue
            own = self._class_of(request)
            if own is not None and own.tpot_s is not None:
                tpot_s = own.tpot_s if tpot_s is None else min(tpot_s, own.tpot_s)
            if sequence.state is State.RUNNING:
                running = True
            ttft_s = self._ttft_s(request)
            silent = not sequence.generated and (sequence.slot < 0 or not generated[sequence.slot])
            if ttft_s is not None and silent:
                waited_s = now - sequence.arrived_s
                allowed_s = self._ladder.wait_part * ttft_s
                overdue_s = max(overdue_s, waited_s - allowed_s)
                if waited_s / allowed_s > worst:
                    worst = waited_s / allowed_s
                    said = f"{waited_s / ttft_s:.0%} of the {1e3 * ttft_s:.0f} ms to its first token"
                    why = f"{request.id} has waited {said}"
        step = 0.0
        if tpot_s is not None and running:
            part = self._step_s / tpot_s
            step = part / self._ladder.step_part
            if step > worst:
                why = f"a step takes {1e3 * self._step_s:.0f} ms, {part:.0%} of the {1e3 * tpot_s:.0f} ms for a token"
        return _Pressure(wait=worst, step=step, overdue_s=overdue_s, why=why)

    def _climb(self, now: float, found: _Pressure) -> None:
        ladder = self._ladder
        self.pressure = max(found.wait, found.step)
        if self.pressure >= 1.0:
            since_s = now - found.overdue_s
            self._high_since = since_s if self._high_since is None else min(self._high_since, since_s)
        else:
            self._high_since = None
        low = found.wait < ladder.wait_down and found.step < ladder.step_down
        self._low_since = (now if self._low_since is None else self._low_since) if low else None
        ripe = self._high_since is not None and now - max(self._high_since, self._changed_s) >= ladder.up_s
        above = max(self.level + 1, self._first)
        if ripe and above <= min(self._ladder.most, len(RUNGS) - 1):
            # What was taken back too early is not tried again so soon.
            early = self._down_at is not None and now - self._down_at <= self._down_s
            if early:
                self._down_s = min(2 * self._down_s, ladder.most_down_s)
            elif not self.level:
                self._down_s = ladder.down_s
            self._down_at = None
            self._go(above, now, found.why)
        elif self._low_since is not None and now - self._low_since >= self._down_s and self.level:
            self._down_at = now
            self._go(self._below, now, found.why)
            self._low_since = now

    @property
    def _below(self) -> int:
        """The rung under the one that it stands on."""
        return self.level - 1 if self.level > self._first else 0

    def _go(self, level: int, now: float, why: str) -> None:
        change = Change(at_s=now, was=RUNGS[self.level], now=RUNGS[level], pressure=self.pressure, why=why)
        verb = "gives up" if level > self.level else "takes back"
        rung = RUNGS[max(level, self.level)]
        if self._log is not None:
            self._log.warning(f"overload, rung {level} of {self._ladder.most}: the engine {verb} {rung}, for {why}")
        if level > self.level:
            self._ups += 1
        else:
            self._downs += 1
        self.level, self._changed_s = level, now
        self.changes.append(change)
        if self._told is not None:
            self._told(change)

    def _limits_at(self, level: int) -> Limits:
        if not level:
            return FREE
        schedule, ladder = self._schedule, self._ladder
        most = max(1, schedule.max_running // 2)
        chunk = None
        if level >= SMALL_CHUNKS and not schedule.whole_prompts:
            chunk = max(1, schedule.max_tokens_per_step // ladder.chunk_part)

        def admits(sequence: Sequence, running: int) -> bool:
            return running < most or not self._unprotected(self.rank(sequence.request), self._looked_s)

        return Limits(drafts=0, chunk_tokens=chunk, admits=admits if level >= LOW_ADMISSION else None)


def _unborn(sequence: Sequence) -> bool:
    """It waits and nothing of its answer was written: ending it cuts nothing."""
    return sequence.state in (State.WAITING, State.BLOCKED) and not sequence.generated


def pinned(ladder: Ladder | None, far: DegradeName | None) -> Ladder | None:
    """A script's ladder, as far as it was asked to go; None: nothing is given up."""
    if far is None:
        return ladder
    return None if far == "off" else msgspec.structs.replace(ladder or Ladder(), most=FAR[far])


def degrader_of(schedule: SchedulePlan, *, drafts: bool = False, log: logging.Logger | None = LOG) -> Degrader | None:
    """The ladder that a plan names; None where nothing is given up."""
    plan = schedule.degrade
    if plan is None:
        return None
    ladder = Ladder(most=FAR[plan.far], ttft_s=plan.ttft_s, tpot_s=plan.tpot_s)
    return Degrader(schedule, ladder, drafts=drafts, log=log)
