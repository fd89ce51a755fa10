"""The production scheduler, cache and policies on a virtual clock: one engine or a fleet, from a trace to what each request lived through.

Knows: when the clock moves and what a device without a model answers. Refuses to know: how long a step takes (steptime), which replica is
best (router), what the numbers mean (report).

One replica is the engine's own `EngineLoop` with its `Scheduler`; only the executor and the clock are ours:

      host     |absorb|decide|            wait            |absorb|decide| ...
      device          |-------- step N, model.device_s ---|             |---- step N+1 ...           one step in flight
      device          |-------- step N ------|------ step N+1 ------|-- ...                          two: the host works beside it

A fleet is several of them and a router. Their clocks are apart; before a request is sent, every replica's clock has come to its arrival.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tradewind.config.plan import CachePlan, Plan, SchedulePlan
from tradewind.contract.errors import UserError
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Enter, Ints, Step, StepResult, Wants
from tradewind.engine.columns import ReportSink
from tradewind.engine.degrade import degrader_of
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.simulate.clock import VirtualClock
from tradewind.simulate.features import FeatureReader, Features
from tradewind.simulate.outcome import BINS_PER_DECADE, GAP_BINS, Outcome, Witness
from tradewind.simulate.router import ROUTERS, Router
from tradewind.simulate.steptime import StepTime
from tradewind.simulate.trace_columns import FIRST_TOKEN, Trace

END_TOKEN = 2
"""What a made-up answer ends with when more tokens were asked for than came."""
NEVER = 2**31 - 1
LAST, ALL = int(Wants.LAST), int(Wants.ALL)
"""Plain numbers: looking a member up costs a step as much as the sum that it is needed for."""

Finish = Callable[[Step, Features, float], float]
"""(step, its features, when the device can begin) -> when it is done."""
Submit = Callable[[Step, Features], float]
"""Host time that a step needs before it is submitted."""


def nothing_s(step: Step, features: Features) -> float:
    """A host that takes no time."""
    return 0.0


class SimulatedExecutor:
    """contract.Executor that computes nothing: answers are made up, and time passes on a virtual clock.

    `answer_of(request id)` gives the token its answer consists of and how many there are; the last is END_TOKEN where more were asked for.
    Where what an answer says matters, because later prompts continue it, `answers` has its tokens, or `blocks_of` the ids of its and its
    prompt's blocks (see traces). Guesses are right with probability `acceptance`, one after the
    other, until the first that is wrong.
    """

    def __init__(
        self,
        *,
        clock: VirtualClock,
        slots: int,
        reader: FeatureReader,
        answer_of: Callable[[str], tuple[int, int]],
        finish: Finish,
        submit_s: Submit = nothing_s,
        acceptance: float = 0.7,
        seed: int = 0,
        answers: Mapping[str, Sequence[int]] | None = None,
        blocks_of: Callable[[str], Ints] | None = None,
        block_tokens: int = 1,
        watch: Callable[[Step, Features], None] | None = None,
    ) -> None:
        self._answers = answers or {}
        self._blocks_of, self._block_tokens = blocks_of, block_tokens
        self._ids: Ints = np.zeros((slots, 16), np.int32)
        """By slot, the ids of its blocks, as far as ..."""
        self._covered: Ints = np.zeros(slots, np.int32)
        """... positions before this."""
        self._said: dict[int, Ints] = {}
        """Slot -> the tokens of its answer, where they are given."""
        self._clock = clock
        self._reader = reader
        self._answer_of = answer_of
        self._finish = finish
        self._submit_s = submit_s
        self._acceptance = acceptance
        self._draw = np.random.default_rng(seed)
        self._watch = watch
        self._prompt: Ints = np.zeros(slots, np.int32)
        self._filler: Ints = np.zeros(slots, np.int32)
        self._length: Ints = np.full(slots, NEVER, np.int32)
        self._last_s: npt.NDArray[np.float64] = np.zeros(slots)
        """When the slot's newest token came."""
        self._flying: deque[tuple[StepResult, float, Ints]] = deque()
        self._free_s = 0.0
        self._numbers: Ints = np.arange(slots + 1, dtype=np.int32)
        self._ones: Ints = np.ones(slots, np.int32)
        self.busy_s = 0.0
        self.submitted = self.collected = 0
        self.gaps: npt.NDArray[np.int64] = np.zeros(GAP_BINS, np.int64)
        """Histogram of the times between a request's tokens, see GAP_BINS."""

    def submit(self, step: Step) -> None:
        """See contract.Executor."""
        features = self._reader.read(step)
        for enter in step.enter:
            self._enter(enter)
        self._clock.advance(self._submit_s(step, features))
        begin_s = max(self._clock.now(), self._free_s)
        self._free_s = self._finish(step, features, begin_s)
        device_s = self._free_s - begin_s
        self.busy_s += device_s
        result = self._made_up(step, features, device_s)
        self._flying.append((result, self._free_s, step.slot))
        self.submitted = step.number
        if self._watch is not None:
            self._watch(step, features)

    def collect(self) -> StepResult:
        """See contract.Executor; moves the clock to when the step is done."""
        result, done_s, slots = self._flying.popleft()
        clock = self._clock
        wait = done_s - clock.now()
        if wait > 0:
            clock.advance(wait)
        self.collected = result.number
        self._count_gaps(slots, result, clock.now())
        return result

    def close(self) -> None:
        """See contract.Executor."""
        self._flying.clear()

    # -- inside

    def _enter(self, enter: Enter) -> None:
        slot = enter.slot
        filler, length = self._answer_of(enter.request_id)
        self._prompt[slot] = enter.prompt_tokens
        self._filler[slot] = filler
        self._length[slot] = length if enter.prompt_tokens + length < enter.capacity_tokens else NEVER
        if self._answers:
            self._said[slot] = np.array(self._answers.get(enter.request_id, ()), dtype=np.int32)
        if len(enter.tokens) == enter.prompt_tokens:
            self._last_s[slot] = -1.0
        if self._blocks_of is not None:
            ids = self._blocks_of(enter.request_id)
            if len(ids) > self._ids.shape[1]:
                wider = np.zeros((len(self._ids), 2 * len(ids)), np.int32)
                wider[:, : self._ids.shape[1]] = self._ids
                self._ids = wider
            self._ids[slot, : len(ids)] = ids
            self._covered[slot] = len(ids) * self._block_tokens

    def _made_up(self, step: Step, features: Features, device_s: float) -> StepResult:
        slot = step.slot
        rows = len(slot)
        # Which token of its answer is the row's first, counted from 1.
        at = step.start + step.count - step.drafts - self._prompt[slot] + 1
        if features.prefill_tokens == 0 and features.logit_rows == rows:  # every row brings one token
            tokens = self._said_by(slot, at)
            ends = at == self._length[slot]
            if ends.any():
                tokens[ends] = END_TOKEN
            if self._said:
                self._speak(slot, at, tokens)
            return StepResult(
                number=step.number,
                slot=slot,
                epoch=step.epoch,
                offset=self._numbers[: rows + 1],
                tokens=tokens,
                device_s=device_s,
            )
        wants = step.wants
        number = ((wants == LAST) | (wants == ALL)).astype(np.int32)
        guessing = step.drafts > 0
        if guessing.any():
            right = self._draw.geometric(1 - min(self._acceptance, 1 - 1e-9), rows) - 1
            number += np.where(guessing, np.minimum(right, step.drafts), 0).astype(np.int32)
        offset = np.zeros(rows + 1, np.int32)
        np.cumsum(number, out=offset[1:])
        row = np.repeat(np.arange(rows), number)
        place = np.arange(len(row), dtype=np.int32) - offset[row] + at[row]
        tokens = self._said_by(slot[row], place)
        tokens[place == self._length[slot[row]]] = END_TOKEN
        if self._said:
            self._speak(slot[row], place, tokens)
        return StepResult(
            number=step.number, slot=slot, epoch=step.epoch, offset=offset, tokens=tokens, device_s=device_s
        )

    def _said_by(self, slots: Ints, places: Ints) -> Ints:
        """Made-up tokens of answers at these places, which count from 1."""
        tokens = self._filler[slots]
        if self._blocks_of is not None:
            position = self._prompt[slots] + places - 1
            known = position < self._covered[slots]
            if known.any():
                tokens[known] = self._ids[slots[known], position[known] // self._block_tokens] + FIRST_TOKEN
        return tokens

    def _speak(self, slots: Ints, places: Ints, tokens: Ints) -> None:
        """Puts given answers in the place of made-up ones; `places` count from 1."""
        for index, (slot, place) in enumerate(zip(slots.tolist(), places.tolist(), strict=True)):
            said = self._said.get(slot)
            if said is not None and place <= len(said):
                tokens[index] = said[place - 1]

    def _count_gaps(self, slot: Ints, result: StepResult, now: float) -> None:
        if not len(result.tokens):
            return
        if len(result.tokens) != len(slot):
            slot = slot[np.diff(result.offset) > 0]
        last = self._last_s[slot]
        self._last_s[slot] = now
        later = last >= 0
        gap = now - (last if later.all() else last[later])
        if len(gap):
            place = np.clip((np.log10(np.maximum(gap, 1e-6)) + 6) * BINS_PER_DECADE, 0, GAP_BINS - 1).astype(np.int64)
            self.gaps += np.bincount(place, minlength=GAP_BINS)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """How to simulate, beside trace, plan and times."""

    replicas: int = 1
    router: str = "round_robin"
    noise: bool = True
    """Step times scatter as the model's held-out steps did; otherwise all are the model's means."""
    host: bool = True
    """Whether the host's own time counts."""
    seed: int = 0
    drafts_per_row: int = 0
    acceptance: float = 0.7
    load_bound: float = 1.25
    """Of the prefix-aware router: most open requests of a replica, relative to the mean of all."""


class Replica:
    """One simulated engine."""

    def __init__(
        self,
        *,
        schedule: SchedulePlan,
        cache: CachePlan,
        times: StepTime,
        outcome: Outcome,
        options: SimulateOptions,
        index: int = 0,
        ended: Callable[[int, float], None] | None = None,
        watch: Callable[[Step, Features], None] | None = None,
        listen: ReportSink | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self._times, self._outcome, self._host = times, outcome, options.host
        self._draw = random.Random(options.seed * 1_000_003 + index)
        self._noise = options.noise and len(times.ratios) > 1
        self.scheduler = Scheduler(
            schedule=schedule,
            cache=cache,
            clock=self.clock.now,
            drafts_per_row=options.drafts_per_row,
            degrade=degrader_of(schedule, drafts=options.drafts_per_row > 0, log=None),
        )
        trace = outcome.trace
        lengths = trace.output_tokens

        def answer_of(request_id: str) -> tuple[int, int]:
            request = int(request_id)
            return trace.filler(request), int(lengths[request])

        self.executor = SimulatedExecutor(
            clock=self.clock,
            slots=schedule.max_running,
            reader=FeatureReader(groups=cache.groups, slots=schedule.max_running),
            answer_of=answer_of,
            finish=self._done_s,
            submit_s=self._before_s if options.host else nothing_s,
            acceptance=options.acceptance,
            seed=options.seed + index,
            blocks_of=(lambda request_id: trace.block_ids(int(request_id))) if trace.answers_known else None,
            block_tokens=trace.block_tokens,
            watch=watch,
        )
        self.witness = Witness(outcome, ended=ended)
        self.loop = EngineLoop(
            scheduler=self.scheduler,
            executor=self.executor,
            clock=self.clock.now,
            sinks=(self.witness,) if listen is None else (self.witness, listen),
        )

    @property
    def busy(self) -> bool:
        return self.loop.busy

    def wake(self, now: float) -> None:
        """A request comes: a replica that rests lets its clock catch up."""
        if not self.loop.busy and self.clock.now() < now:
            self.witness.rested_until(now)
            self.clock.advance(now - self.clock.now())

    def turn(self) -> None:
        """One turn of the engine's loop."""
        collected = self.executor.collected
        self.loop.run_once()
        if self._host and self.executor.collected != collected:
            self.clock.advance(self._times.host.after_s(rows=self.scheduler.running))

    def _before_s(self, step: Step, features: Features) -> float:
        return self._times.host.before_s(rows=features.rows, entered=len(step.enter))

    def _done_s(self, step: Step, features: Features, begin_s: float) -> float:
        times, outcome = self._times, self._outcome
        seconds = times.device_s(features)
        if self._noise:
            seconds *= times.ratio(self._draw.random(), prompts=features.prefill_tokens > 0)
        if features.tokens and not times.trustworthy(features):
            outcome.untrusted_steps += 1
            outcome.untrusted = outcome.untrusted or times.why_not(features) or ""
        return begin_s + seconds


def request_of(trace: Trace, index: int, *, sampling: SamplingParams) -> Request:
    """One request of a trace, with made-up tokens."""
    return Request(
        id=str(index),
        # A column instead of a tuple: a million prompts of thousands of tokens would be made of Python integers otherwise. The
        # scheduler takes its length and copies it into a column of its own.
        tokens=cast("tuple[int, ...]", trace.prompt(index)),
        sampling=sampling,
        max_tokens=int(trace.max_tokens[index]),
        eos_ids=(END_TOKEN,),
        priority=int(trace.priority[index]),
        tenant=trace.tenants[trace.tenant[index]],
        arrived_s=float(trace.arrival_s[index]),
    )


def simulate(
    trace: Trace,
    *,
    schedule: SchedulePlan,
    cache: CachePlan,
    times: StepTime,
    options: SimulateOptions | None = None,
    progress: Callable[[int], None] | None = None,
    watch: Callable[[int, Step, Features], None] | None = None,
    listen: Callable[[int], ReportSink] | None = None,
) -> Outcome:
    """Runs a trace through as many engines as asked for and returns what each request lived through. Same arguments, same outcome.

    `progress` is told now and then how many requests were sent; `watch` is shown every step with its replica; `listen` makes one
    more listener for each. Requests that can never run are in `Outcome.refused`.
    """
    options = options or SimulateOptions()
    if options.replicas < 1:
        raise UserError(f"{options.replicas} replicas cannot serve anything; give at least 1")
    if options.router not in ROUTERS:
        raise UserError(f"there is no router {options.router!r}, only {', '.join(ROUTERS)}")
    began = time.perf_counter()
    outcome = Outcome.empty(trace)
    outcome.replicas, outcome.times = options.replicas, times.described()
    outcome.router = options.router if options.replicas > 1 else ""
    fleet = _Fleet(trace, outcome, schedule, cache, times, options, watch, listen)
    sampling = SamplingParams(temperature=0.0)
    for index in range(len(trace)):
        fleet.send(index, request_of(trace, index, sampling=sampling))
        if progress is not None and index % 1024 == 0:
            progress(index)
    fleet.run_out()
    outcome.wall_s = time.perf_counter() - began
    return outcome


def simulate_plan(
    trace: Trace, plan: Plan, *, times: StepTime, options: SimulateOptions | None = None, **more: Any
) -> Outcome:
    """The same with a whole plan."""
    return simulate(trace, schedule=plan.schedule, cache=plan.cache, times=times, options=options, **more)


class _Fleet:
    """Replicas and the router before them."""

    def __init__(
        self,
        trace: Trace,
        outcome: Outcome,
        schedule: SchedulePlan,
        cache: CachePlan,
        times: StepTime,
        options: SimulateOptions,
        watch: Callable[[int, Step, Features], None] | None,
        listen: Callable[[int], ReportSink] | None,
    ) -> None:
        self._trace, self._outcome = trace, outcome
        self._router: Router = ROUTERS[options.router](
            replicas=options.replicas,
            cache_tokens=(cache.pages[0] - 1) * cache.page_tokens,
            load_bound=options.load_bound,
        )
        self._single = options.replicas == 1
        self._over: list[tuple[float, int, int]] = []
        """(when, replica, tokens) of requests that ended, which the router hears of at that time."""
        self._due: list[tuple[float, int]] = []
        """(clock, replica) of those that have something to do."""

        def ended(replica: int) -> Callable[[int, float], None] | None:
            if self._single:
                return None
            return lambda index, at_s: heapq.heappush(
                self._over, (at_s, replica, int(trace.prompt_tokens[index] + trace.output_tokens[index]))
            )

        def watching(replica: int) -> Callable[[Step, Features], None] | None:
            return None if watch is None else lambda step, features: watch(replica, step, features)

        self._replicas = [
            Replica(
                schedule=schedule,
                cache=cache,
                times=times,
                outcome=outcome,
                options=options,
                index=index,
                ended=ended(index),
                watch=watching(index),
                listen=None if listen is None else listen(index),
            )
            for index in range(options.replicas)
        ]

    def send(self, index: int, request: Request) -> None:
        """Lets every replica come to the request's arrival, then gives it to one of them."""
        now = float(self._trace.arrival_s[index])
        self._run_until(now)
        if self._single:
            place = 0
        else:
            while self._over and self._over[0][0] <= now:
                _, replica, tokens = heapq.heappop(self._over)
                self._router.ended(replica, tokens=tokens)
            blocks, size = self._trace.prompt_ids(index), self._trace.block_tokens
            place = self._router.choose(blocks, block_tokens=size)
            self._router.sent(
                place,
                blocks,
                block_tokens=size,
                tokens=int(self._trace.prompt_tokens[index] + self._trace.output_tokens[index]),
            )
            self._outcome.replica[index] = place
        replica_chosen = self._replicas[place]
        if not replica_chosen.busy:
            replica_chosen.wake(now)
            heapq.heappush(self._due, (replica_chosen.clock.now(), place))
        replica_chosen.loop.post(Add(request))

    def _run_until(self, now: float) -> None:
        due = self._due
        while due and due[0][0] < now:
            _, place = due[0]
            replica = self._replicas[place]
            clock = replica.clock
            # A replica that is alone on the way runs on without the heap.
            limit = now if len(due) == 1 else min(now, due[1][0], due[2][0] if len(due) > 2 else now)
            while True:
                replica.turn()
                if not replica.busy:
                    heapq.heappop(due)
                    break
                if clock.now() >= limit:
                    heapq.heapreplace(due, (clock.now(), place))
                    break

    def run_out(self) -> None:
        """Nothing comes any more: runs until everything has ended."""
        self._run_until(float("inf"))
        outcome = self._outcome
        for replica in self._replicas:
            replica.loop.close()
            outcome.device_busy_s += replica.executor.busy_s
            outcome.gaps += replica.executor.gaps
            outcome.recomputed_tokens += replica.scheduler.recomputed_tokens
            outcome.end_s = max(outcome.end_s, replica.clock.now())
        for replica in self._replicas:
            replica.witness.rested_until(outcome.end_s)
