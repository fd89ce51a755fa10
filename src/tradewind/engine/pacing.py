"""How much of a step prompts may have, so that running answers keep their pace; and whether a request that comes can be in time.

Knows: when each running answer's next token is due, what a step of given size takes, how fast prompts were served lately. Refuses to know:
where step times come from (a callable is handed in), and who is first (policies).

An answer with a TPOT target owes its n-th token at  first token + n * TPOT.  One that is ahead of that has credit, and a prompt may use it:

      due of each row        |.......now..........|------ allowed ------|due
      step with chunk c      |-- decode rows ----- + c tokens of prompts --|        the largest c that ends before the first due

Without targets a bound on each step by itself may be planned (`StepLimit`): in proportion to the same step without prompts, or a time.
A prompt's token costs the more the more tokens are before it, so both make chunks shorter the deeper a prompt is: of Llama-3.1-8B on an
H200, beside 16 answers of 1k, steps of 9 ms hold some 300 tokens where a prompt begins, and 16 to 32 where it ends at 128k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf, nan
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tradewind.config.plan import ClassPlan, PacePlan, SchedulePlan, StepCostPlan
from tradewind.contract.errors import UserError
from tradewind.contract.step import Ints
from tradewind.engine.queue import OVERDUE_EVERY
from tradewind.engine.rows import Rows
from tradewind.engine.sequence import Sequence

ANSWER_SHARE = 0.5
"""Part of an e2e target that is meant for the answer; the rest is for queue and prompt."""
MARGIN = 0.95
"""Part of a TPOT target that is aimed at: steps scatter."""
LIMIT_MARGIN = 0.97
"""Part of a bound on each step that is aimed at: no later step can make up for one that took longer. Steps of like shape scatter by some
2 %, and times fitted to them are off by about as much."""
KEYS_SHARE = 0.5
"""Part of the time to read a prompt's keys once that multiplying does not hide (simulate/steptime.py has the figures)."""
STALL = 4.0
"""However much credit an answer has, no step holds it up for more than so many times its TPOT."""
CATCH_UP = 0.75
"""An answer that is behind asks for steps of this part of its TPOT, not for less: then prompts would stand still."""
DOORSTEP = 0.2
"""No step is longer than this part of the shortest TTFT target: whoever comes waits for the step that runs."""
HORIZON = 2.0
"""A prompt is urgent when its latest start is nearer than so many times the shortest TTFT target."""
LEAST_SHARE = 32
"""Prompts get as long as this part of the step's budget takes where a prompt begins, whatever is due ..."""
LEAST_TOKENS = 16
"""However little time there is, a step goes on with so many tokens of a prompt: fewer take as long, for a tile of them reads all keys."""
ROUND = 8
"""Chunks of fewer pages are of few lengths: a GPU captures each size of step that is new to it while answers wait."""
PROBE = 64
"""After so many steps with prompts that are bound by those without, one is without: while a long prompt is computed there would be none for
a minute, whose answers grow, and what is not measured is guessed wrong. It costs under 1 % of the prompt's time."""
DEEP = 16384
"""From so many tokens into a prompt on `PacePlan.whole` holds; before it, attention is a small part of a step."""
UNTARGETED_SHARE = 8
"""... and this part of the running answers without a target goes on in each step, in turn."""
SMOOTH = 0.05
"""Weight of the newest step in what is learnt from steps."""
FITTED_SEEN = round(1 / SMOOTH)
"""Fitted times count as if so many steps had agreed with them already."""
SPREAD = (0.1, 10.0)
"""Measured / predicted of one step is believed between these."""


class StepSeconds(Protocol):
    """How long a step takes on the device. Must answer within microseconds and be no shorter for more of anything."""

    def __call__(self, *, rows: int, context: int, chunk: int, start: int) -> float:
        """`rows` decode rows that read `context` tokens together, and `chunk` tokens of a prompt from position `start` on."""


class OverloadedError(UserError):
    """A request that could not meet its target now; the message says what is in the way."""

    http_status = 429


def planned_seconds(cost: StepCostPlan) -> StepSeconds:
    """Step times by the plan's three figures."""

    def seconds(*, rows: int, context: int, chunk: int, start: int) -> float:
        pairs = chunk * start + chunk * chunk // 2
        took = max(cost.base_s, cost.token_s * (rows + chunk)) + cost.context_s * context
        if cost.pair_s is None:
            return took + cost.context_s * pairs
        return took + cost.pair_s * pairs + (KEYS_SHARE * cost.context_s * (start + chunk) if chunk else 0.0)

    return seconds


def pace_s(own: ClassPlan) -> float:
    """Seconds between tokens that a class needs: its TPOT target, or its e2e target shared out over a typical answer; inf for none."""
    if own.tpot_s is not None:
        return own.tpot_s
    return inf if own.e2e_s is None else ANSWER_SHARE * own.e2e_s / own.output_tokens


class StepClock:
    """What steps take: times that were handed in, corrected by what steps took. Written by the scheduler, of which it is a part."""

    def __init__(self, seconds: StepSeconds) -> None:
        self._seconds = seconds
        self._flights: deque[tuple[float, bool, float]] = deque()
        """(predicted seconds before correction, has prompts, when decided) of the steps that fly."""
        self._free_s = 0.0
        """When the device will be done with what was submitted, as predicted."""
        self._ratio = {False: 1.0, True: 1.0}
        """Measured / predicted, of steps without and with prompts ..."""
        self._seen = {False: 0, True: 0}
        """... and how many of them there were."""
        self._absorbed_s = 0.0

    def use(self, seconds: StepSeconds) -> None:
        """Better step times from now on, as after a refit; what was learnt about the old ones is forgotten.

        These were fitted to steps, so that one that differs is noise before it is news. What flies is judged by what it was expected to
        take.
        """
        self._seconds = seconds
        self._flights = deque(
            (expected_s * self._ratio[mixed], mixed, at_s) for expected_s, mixed, at_s in self._flights
        )
        self._ratio, self._seen = {False: 1.0, True: 1.0}, {False: FITTED_SEEN, True: FITTED_SEEN}

    def step_s(self, *, rows: int, context: int, chunk: int = 0, start: int = 0) -> float:
        """A step's time, corrected by what steps took."""
        if not rows and not chunk:
            return 0.0
        return self._ratio[chunk > 0] * self._seconds(rows=rows, context=context, chunk=chunk, start=start)

    def longest(self, allowed_s: float, *, rows: int, context: int, least: int, most: int, start: int) -> int:
        """The longest chunk up to `most` of a step within the time; never under `least`."""
        low, high = min(most, least), most
        if allowed_s == inf or self.step_s(rows=rows, context=context, chunk=high, start=start) <= allowed_s:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.step_s(rows=rows, context=context, chunk=middle, start=start) <= allowed_s:
                low = middle
            else:
                high = middle - 1
        return low

    def submitted(self, *, rows: int, context: int, chunk: int, start: int, now: float) -> None:
        """A step flies."""
        self._flights.append((self._seconds(rows=rows, context=context, chunk=chunk, start=start), chunk > 0, now))
        begin = max(now, self._free_s) if len(self._flights) > 1 else now
        self._free_s = begin + self._flights[-1][0] * self._ratio[chunk > 0]

    def returned(self, now: float) -> None:
        """The oldest flying step came back."""
        predicted, mixed, decided_s = self._flights.popleft()
        took = now - max(decided_s, self._absorbed_s)
        self._absorbed_s = now
        if predicted > 0 and took > 0:
            ratio = min(max(took / predicted, SPREAD[0]), SPREAD[1])
            self._seen[mixed] += 1
            self._ratio[mixed] += max(SMOOTH, 1 / self._seen[mixed]) * (ratio - self._ratio[mixed])
        self._free_s = now + sum(seconds * self._ratio[prompts] for seconds, prompts, _ in self._flights)

    def forget_flights(self) -> None:
        """The executor is gone."""
        self._flights.clear()


class StepLimit:
    """A bound on each step in which prompts go on beside running answers. Written by the scheduler, of which it is a part."""

    def __init__(self, plan: PacePlan, clock: StepClock, *, budget: int, page_tokens: int) -> None:
        self._plan, self._clock, self._budget, self._page = plan, clock, budget, page_tokens
        self._since = 0
        """Steps with prompts since one without."""

    def allowed_s(self, *, rows: int, context: int, start: int) -> float:
        """How long a step with these decode rows may take; inf where nobody waits for a token."""
        plan, clock = self._plan, self._clock
        if not rows:
            return inf
        allowed = inf if plan.step_s is None else LIMIT_MARGIN * plan.step_s
        if plan.slowdown is not None:
            allowed = min(allowed, LIMIT_MARGIN * plan.slowdown * clock.step_s(rows=rows, context=context))
        if plan.whole and start >= DEEP:
            allowed = min(allowed, clock.step_s(rows=0, context=0, chunk=self._budget))
        return allowed

    def chunk(self, slots: Ints, rows: Rows, *, most: int, start: int) -> int:
        """Most tokens of prompts, up to `most`, in the next step beside these decode rows. Under ROUND pages it is a power of
        two, or from two pages on one and a half of that: so chunks end on page borders again, no tile of a few tokens is left for the
        next step, and few sizes of steps do for a long prompt. To be asked once a step: now and then it is 0."""
        if most <= 0 or not len(slots):
            return most
        count, context = len(slots), int(rows.next[slots].sum())
        allowed = self.allowed_s(rows=count, context=context, start=start)
        if allowed == inf:
            return most
        found = self._clock.longest(allowed, rows=count, context=context, least=LEAST_TOKENS, most=most, start=start)
        if self._plan.slowdown is not None:
            self._since += 1
            if self._since > PROBE:
                self._since = 0
                return 0
        if found >= min(most, ROUND * self._page):
            return found
        power = 1 << found.bit_length() - 1
        return power * 3 // 2 if power >= 2 * self._page and found >= power * 3 // 2 else power


class Pacer(StepClock):
    """Due times of the running answers and what steps take. Written by the scheduler, of which it is a part."""

    def __init__(self, schedule: SchedulePlan, *, page_tokens: int, seconds: StepSeconds) -> None:
        super().__init__(seconds)
        self._classes = {one.name: one for one in schedule.classes}
        self._budget = schedule.max_tokens_per_step
        self._least = min(self._budget, max(2 * page_tokens, self._budget // LEAST_SHARE))
        self._doorstep_s = min(
            (DOORSTEP * one.ttft_s for one in schedule.classes if one.ttft_s is not None), default=inf
        )
        self.horizon_s = min((HORIZON * one.ttft_s for one in schedule.classes if one.ttft_s is not None), default=0.0)
        """Prompts that must start within this go before answers without a target."""
        slots = schedule.max_running
        self._tpot: npt.NDArray[np.float64] = np.full(slots, inf)
        """By slot, aimed at; inf where there is no target."""
        self._first: npt.NDArray[np.float64] = np.full(slots, nan)
        """By slot, when the first token came."""
        self._computed = 1.0
        """Part of the prompt tokens that was not in the prefix cache, lately."""
        self._ended = 0.0
        """Requests that ended lately, older ones count less; per `window_s`."""
        self._ended_s = 0.0
        self._turn = 0

    # -- what prompts take ---------------------------------------------------------------------------------------------

    def prompt_s(self, tokens: int) -> float:
        """How long a prompt takes that has the engine to itself: in chunks of the whole budget."""
        whole, rest = divmod(max(1, tokens), self._budget)
        total = sum(self.step_s(rows=0, context=0, chunk=self._budget, start=at * self._budget) for at in range(whole))
        if rest:
            total += self.step_s(rows=0, context=0, chunk=rest, start=whole * self._budget)
        return total

    def token_s(self, own: ClassPlan, rows: Rows) -> float:
        """Seconds that a prompt token of this class takes beside the running answers with targets; the others make way for it."""
        slots = np.flatnonzero(rows.decoding & (self._tpot < inf))
        count, context = len(slots), int(rows.next[slots].sum())
        allowed = min(float(self._tpot[slots].min(initial=inf)), MARGIN * pace_s(own))
        chunk = self._longest(allowed, rows=count, context=context, most=max(1, self._budget - count), start=0)
        return self.step_s(rows=count, context=context, chunk=chunk) / chunk / (1 - 1 / (2 * OVERDUE_EVERY))

    # -- slots ---------------------------------------------------------------------------------------------------------

    def entered(self, sequences: Iterable[Sequence]) -> None:
        """These got their slots."""
        for sequence in sequences:
            own = self._classes.get(sequence.request.traffic_class)
            self._tpot[sequence.slot] = inf if own is None else MARGIN * pace_s(own)
            if not sequence.preemptions:
                self._computed += SMOOTH * (1 - sequence.cached_tokens / sequence.known - self._computed)
            self._first[sequence.slot] = nan if sequence.first_s is None else sequence.first_s

    def left(self, slot: int) -> None:
        """Nobody sits there any more."""
        self._tpot[slot], self._first[slot] = inf, nan

    # -- deciding ------------------------------------------------------------------------------------------------------

    def allowed_s(self, slots: Ints, rows: Rows, now: float) -> float:
        """How long the next step may take so that no answer in these slots misses its due, and nobody who comes waits long for its end."""
        tpot = self._tpot[slots]
        some = tpot < inf
        if not some.any():
            return self._doorstep_s
        own, tpot = slots[some], tpot[some]
        begin = max(now, self._free_s) if self._flights else now
        ahead = self._first[own] + tpot * (rows.generated[own] + rows.flying[own]) - begin
        ahead = np.where(np.isnan(ahead), tpot, ahead)  # the first token is on its way
        return min(self._doorstep_s, float(np.clip(ahead, CATCH_UP * tpot, STALL * tpot).min()))

    def rows(self, slots: Ints, rows: Rows, now: float, *, urgent: int) -> Ints:
        """Those of the decode rows that go on in the next step: all that have a target, of the others as many as leave time for them.

        urgent: tokens of prompts with targets, which go before answers without.
        """
        allowed = self.allowed_s(slots, rows, now)
        context = rows.next[slots]
        urgent = min(urgent, max(0, self._budget - len(slots)))
        if allowed == inf or self.step_s(rows=len(slots), context=int(context.sum()), chunk=urgent) <= allowed:
            return slots
        bound = self._tpot[slots] < inf
        must, may = slots[bound], slots[~bound]
        if not len(may):
            return slots
        base, each = int(context[bound].sum()), float(context[~bound].mean())
        low, high = -(-len(may) // UNTARGETED_SHARE), len(may)
        while low < high:
            middle = (low + high + 1) // 2
            if self.step_s(rows=len(must) + middle, context=base + int(middle * each), chunk=urgent) <= allowed:
                low = middle
            else:
                high = middle - 1
        self._turn = (self._turn + low) % len(may)
        return np.sort(np.concatenate((must, np.roll(may, -self._turn)[:low]))).astype(np.int32)

    def chunk(self, slots: Ints, rows: Rows, now: float, *, most: int, start: int) -> int:
        """Most tokens of prompts, up to `most`, in the next step beside these decode rows."""
        allowed = self.allowed_s(slots, rows, now)
        if most <= 0 or allowed == inf:
            return most
        return self._longest(allowed, rows=len(slots), context=int(rows.next[slots].sum()), most=most, start=start)

    def _longest(self, allowed_s: float, *, rows: int, context: int, most: int, start: int) -> int:
        """The longest chunk up to `most` of a step within the time; never under what prompts get whatever is due."""
        if allowed_s != inf:
            allowed_s = max(allowed_s, self.step_s(rows=rows, context=context, chunk=min(most, self._least)))
        return self.longest(
            allowed_s, rows=rows, context=context, least=min(self._least, LEAST_TOKENS), most=most, start=start
        )

    # -- absorbing -----------------------------------------------------------------------------------------------------

    def absorbed(self, slots: Ints, rows: Rows, now: float) -> None:
        """The oldest flying step came back, with tokens for these slots."""
        self.returned(now)
        fresh = slots[np.isnan(self._first[slots]) & (rows.generated[slots] > 0)]
        for slot in fresh.tolist():
            sequence = rows.sequences[slot]
            if sequence is not None:
                sequence.first_s = self._first[slot] = now

    # -- the verdict on who comes --------------------------------------------------------------------------------------

    RATE_S = 10.0

    def ended(self, now: float) -> None:
        """A request that ran is over."""
        self._ended = self._decayed(now) + 1.0
        self._ended_s = now

    def _decayed(self, now: float) -> float:
        return self._ended * float(np.exp(-(now - self._ended_s) / self.RATE_S))

    def slot_wait_s(self, turns: int, now: float) -> float:
        """How long until so many running requests have ended, by the rate of the last seconds; 0 where that is not known."""
        rate = self._decayed(now) / self.RATE_S
        return turns / rate if turns > 0 and rate > 0 else 0.0

    def verdict(
        self,
        own: ClassPlan,
        sequence: Sequence,
        rows: Rows,
        *,
        cached: int,
        filling: int,
        waiting: int,
        turns: int,
        now: float,
    ) -> str | None:
        """Why a request that comes cannot meet its TTFT target; None where it can, as far as can be seen.

        cached: its tokens that the prefix cache has; filling, waiting: tokens of prompts before it, of those that run and of those that do
        not yet; turns: requests that must end before it has a slot.
        """
        if own.ttft_s is None:
            return None
        tokens_before = filling + int(waiting * self._computed)
        token_s = self.token_s(own, rows)
        queue_s = max(tokens_before * token_s, self.slot_wait_s(turns, now))
        tokens = sequence.known - cached
        prompt_s = max(self.prompt_s(tokens), tokens * token_s)
        late_s = now - sequence.arrived_s + queue_s + prompt_s
        if late_s <= own.ttft_s:
            return None
        before = f"{tokens_before} prompt tokens" + (f" and {turns} requests for a slot" if turns > 0 else "")
        return (
            f"its first token cannot come within {1000 * own.ttft_s:.0f} ms ({own.name}): about {1000 * late_s:.0f} ms are needed, "
            f"for {before} before it and {tokens} of its own"
        )
