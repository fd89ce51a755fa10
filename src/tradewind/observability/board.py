"""The live board: what the page at / shows, as one small JSON document a second.

Knows: the last two minutes, second by second. Refuses to know: HTTP and how it is drawn.
A step costs some additions; quantiles come from counts in buckets 5 % wide, so a number shown is within 2.5 % of the true one.
Attainment by class (live_attainment) and the latest steps (timeline) are kept beside it, fed from here, and told in the same document.

      one bucket a second   | tokens in, tokens out | steps, rows | waits {bucket: count} | gaps {bucket: count} | running, waiting, pages |
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from tradewind.config.plan import ClassPlan, LedgerLine, Plan, Reason
from tradewind.contract.events import Arrived, Delayed, Held, Preempted, Scheduled, StepDone, Woken
from tradewind.observability.live_attainment import AttainmentState, LiveAttainment
from tradewind.observability.lives import Life, Listener
from tradewind.observability.metrics import DegradeFacts, EngineFacts, StepTimeFacts
from tradewind.observability.proc import resident_bytes
from tradewind.observability.timeline import Timeline, TimelineState

SECONDS = 120
"""So long the board remembers."""
RECENT_S = 10
"""Throughput "now" is the mean of so many whole seconds, or of those since the first report if fewer."""
WIDTH = math.log(1.05)
SMALLEST_S = 1e-6


def bucket_of(seconds: float) -> int:
    """The bucket of a time; buckets are 5 % wide."""
    return int(math.log(max(seconds, SMALLEST_S) / SMALLEST_S) / WIDTH)


def middle_of(bucket: int) -> float:
    """The time, in seconds, that stands for a bucket: its geometric middle."""
    return SMALLEST_S * math.exp((bucket + 0.5) * WIDTH)


def quantile(counts: Mapping[int, int], q: float) -> float | None:
    """The q-quantile of counted buckets, in seconds (nearest rank); None when nothing was counted."""
    total = sum(counts.values())
    if not total:
        return None
    rank = max(1, math.ceil(q * total))
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return middle_of(bucket)
    raise AssertionError("the counts do not add up")


@dataclass(slots=True)
class Second:
    """What one second brought."""

    at: int
    tokens_in: int = 0
    """Prompt tokens computed or found in the cache."""
    tokens_out: int = 0
    cached: int = 0
    prompt: int = 0
    finished: int = 0
    preempted: int = 0
    steps: int = 0
    device_s: float = 0.0
    waits: dict[int, int] = field(default_factory=dict)
    gaps: dict[int, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of the last two minutes, in milliseconds; null when nothing was measured."""

    p50_ms: float | None
    p95_ms: float | None
    count: int


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second, the mean of the last whole seconds."""

    in_per_s: float
    out_per_s: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `planned_bytes` is the sum of the plan's ledger."""

    front_bytes: int | None
    engine_bytes: int | None
    planned_bytes: int | None
    kv_pages_used: int
    kv_pages_total: int
    kv_used: float
    """Of the fullest group, 0 to 1."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Second by second, oldest first; the last one is the last whole second. Null: nothing was measured in that second."""

    ttft_p50_ms: list[float | None]
    ttft_p95_ms: list[float | None]
    itl_p50_ms: list[float | None]
    itl_p95_ms: list[float | None]
    in_per_s: list[int]
    out_per_s: list[int]
    running: list[int]
    waiting: list[int]
    kv_used: list[float]
    resident_bytes: list[int | None]


class Overload(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine stands on its degrade ladder."""

    level: int
    """0: nothing is given up."""
    most: int
    gives_up: str
    """The name of the rung."""
    pressure: float
    """From 1 on rungs are taken."""
    changes: int
    refused: int
    shortened: int


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How well step times are known. Errors are parts of the measured time; null: not fitted yet."""

    steps: int
    error_p50: float | None
    error_p90: float | None
    paces: bool


class BoardState(msgspec.Struct, frozen=True, kw_only=True):
    """What GET /board answers."""

    model: str
    version: str
    status: str
    """"ok", or why nothing is served."""
    uptime_s: float
    running: int
    waiting: int
    max_running: int
    finished: int
    preempted: int
    cache_hit_rate: float | None
    """Of prompt tokens, in the last two minutes, 0 to 1; null without prompts."""
    device_busy: float
    """Part of the last seconds that the device worked, 0 to 1."""
    ttft: Times
    itl: Times
    throughput: Throughput
    memory: Memory
    series: Series
    attainment: AttainmentState
    overload: Overload | None = None
    """Null where the plan has no ladder."""
    step_times: StepTimes | None = None
    """Null where they are not fitted."""
    timeline: TimelineState | None = None
    """Only where it was asked for."""


class Board(Listener):
    """Fed by `lives.Lives`; `json` is what the page polls. Reader and writer are one thread."""

    def __init__(
        self,
        *,
        model: str,
        version: str,
        max_running: int,
        facts: Callable[[], EngineFacts],
        why_dead: Callable[[], str | None] | None = None,
        engine_pid: Callable[[], int | None] | None = None,
        plan: Plan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` must be the engine's."""
        self._model, self._version, self._max_running = model, version, max_running
        self._facts, self._why_dead, self._engine_pid, self._clock = facts, why_dead, engine_pid, clock
        self._planned_bytes = sum(line.bytes for line in plan.ledger) if plan is not None else None
        self._began_s = clock()
        self._finished = self._preempted = 0
        self._seconds: deque[Second] = deque(maxlen=SECONDS + 1)
        """The last one is the running second; seconds in which nothing happened are not there."""
        self._resident: deque[tuple[int, int]] = deque(maxlen=SECONDS + 1)
        """(second, bytes), noted when somebody looks."""
        self.attainment = LiveAttainment(plan.schedule.classes if plan is not None else ())
        self.timeline = Timeline(began_s=self._began_s)
        self._encode = msgspec.json.Encoder().encode

    def replanned(self, plan: Plan | None, *, max_running: int) -> None:
        """Another plan is in force."""
        self._max_running = max_running
        self._planned_bytes = sum(line.bytes for line in plan.ledger) if plan is not None else None

    # -- what happened -----------------------------------------------------------------------------------------------

    def _now(self, at_s: float) -> Second:
        at = int(at_s)
        if self._seconds and self._seconds[-1].at >= at:  # a report may be a moment older than the one before
            return self._seconds[-1]
        second = Second(at=at)
        self._seconds.append(second)
        return second

    def arrived(self, life: Life, event: Arrived) -> None:
        """See Listener."""
        self.attainment.add(life, event.traffic_class)
        self.timeline.add(life)

    def delayed(self, event: Delayed) -> None:
        """See Listener."""
        self.timeline.delayed(event)

    def woken(self, event: Woken) -> None:
        """See Listener."""
        self.timeline.woken(event)

    def held(self, event: Held) -> None:
        """See Listener."""
        self.timeline.held(event)

    def scheduled(self, life: Life, event: Scheduled, recomputed_tokens: int) -> None:
        """See Listener."""
        self.timeline.started(event)
        if not event.resumed:
            second = self._now(event.at_s)
            second.prompt += life.prompt_tokens
            second.cached += event.cached_tokens
            second.tokens_in += event.cached_tokens

    def first_token(self, life: Life, at_s: float) -> None:
        """See Listener."""
        waits, bucket = self._now(at_s).waits, bucket_of(at_s - life.arrived_s)
        waits[bucket] = waits.get(bucket, 0) + 1

    def tokens(self, count: int, at_s: float) -> None:
        """See Listener."""
        self._now(at_s).tokens_out += count

    def gap(self, seconds: float, count: int) -> None:
        """See Listener."""
        gaps, bucket = self._seconds[-1].gaps, bucket_of(seconds)  # `tokens` was told just before
        gaps[bucket] = gaps.get(bucket, 0) + count

    def preempted(self, life: Life, event: Preempted) -> None:
        """See Listener."""
        self._preempted += 1
        self._now(event.at_s).preempted += 1

    def step(self, event: StepDone) -> None:
        """See Listener."""
        second = self._now(event.at_s)
        second.steps += 1
        second.tokens_in += event.prompt_tokens
        second.device_s += event.device_s
        second.running = max(second.running, event.running)
        second.waiting = max(second.waiting, event.waiting)
        second.kv_used = max(second.kv_used, _share(event.pages_used, event.pages_total))
        self.timeline.step(event)

    def ended(self, life: Life) -> None:
        """See Listener."""
        self._finished += 1
        self._now(life.ended_s).finished += 1
        self.attainment.ended(life)
        self.timeline.ended(life)

    # -- as a document -----------------------------------------------------------------------------------------------

    def state(
        self, tenant: str = "", *, steps_since: int | None = None, targets: Mapping[str, float] | None = None
    ) -> BoardState:
        """The board at this moment, as the holder of a key may see it ("" on a server without keys).

        `steps_since`: with the steps after this one, and who was in them. `targets`: seconds by metric, for classes without their own.
        """
        now_s = self._clock()
        now, facts = int(now_s), self._facts()
        front = resident_bytes()
        pid = self._engine_pid() if self._engine_pid is not None else None
        engine = resident_bytes(pid) if pid is not None else None
        if front is not None and (not self._resident or self._resident[-1][0] < now):
            self._resident.append((now, front + (engine or 0)))
        first = now - SECONDS
        kept = {second.at: second for second in self._seconds if first <= second.at <= now}
        whole = [kept.get(at) for at in range(first, now)]
        waits: dict[int, int] = {}
        gaps: dict[int, int] = {}
        prompt = cached = 0
        for second in kept.values():
            prompt += second.prompt
            cached += second.cached
            _merge(waits, second.waits)
            _merge(gaps, second.gaps)
        recent_s = max(1, min(RECENT_S, now - int(self._began_s)))
        recent = [second for second in whole[-recent_s:] if second is not None]
        dead = self._why_dead() if self._why_dead is not None else None
        used, total = sum(facts.pages_used), sum(facts.pages_total)
        return BoardState(
            model=self._model,
            version=self._version,
            status=dead or "ok",
            uptime_s=round(now_s - self._began_s, 1),
            running=facts.running,
            waiting=facts.waiting,
            max_running=self._max_running,
            finished=self._finished,
            preempted=self._preempted,
            cache_hit_rate=round(cached / prompt, 4) if prompt else None,
            device_busy=round(min(1.0, sum(second.device_s for second in recent) / recent_s), 4),
            ttft=_times(waits),
            itl=_times(gaps),
            throughput=Throughput(
                in_per_s=round(sum(second.tokens_in for second in recent) / recent_s, 1),
                out_per_s=round(sum(second.tokens_out for second in recent) / recent_s, 1),
            ),
            memory=Memory(
                front_bytes=front,
                engine_bytes=engine,
                planned_bytes=self._planned_bytes,
                kv_pages_used=used,
                kv_pages_total=total,
                kv_used=_share(facts.pages_used, facts.pages_total),
            ),
            series=self._series(whole, first),
            attainment=self.attainment.state(now_s, targets=targets),
            overload=_overload(facts.degrade),
            step_times=_known(facts.step_times),
            timeline=None if steps_since is None else self.timeline.state(tenant, since=steps_since, now_s=now_s),
        )

    def _series(self, whole: list[Second | None], first: int) -> Series:
        blank = Second(at=0)
        seconds = [second or blank for second in whole]
        resident = dict(self._resident)
        return Series(
            ttft_p50_ms=[_ms(quantile(second.waits, 0.5)) for second in seconds],
            ttft_p95_ms=[_ms(quantile(second.waits, 0.95)) for second in seconds],
            itl_p50_ms=[_ms(quantile(second.gaps, 0.5)) for second in seconds],
            itl_p95_ms=[_ms(quantile(second.gaps, 0.95)) for second in seconds],
            in_per_s=[second.tokens_in for second in seconds],
            out_per_s=[second.tokens_out for second in seconds],
            running=[second.running for second in seconds],
            waiting=[second.waiting for second in seconds],
            kv_used=[second.kv_used for second in seconds],
            resident_bytes=[resident.get(first + place) for place in range(SECONDS)],
        )

    def json(
        self, tenant: str = "", *, steps_since: int | None = None, targets: Mapping[str, float] | None = None
    ) -> bytes:
        """The same as JSON."""
        return self._encode(self.state(tenant, steps_since=steps_since, targets=targets))


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What GET /plan answers: the plan as far as people read it."""

    model: str
    scenario: str
    family: str
    parameters: int
    layers: int
    max_context: int
    max_running: int
    max_tokens_per_step: int
    machine: str
    cores: int
    memory_bytes: int
    policy: str
    classes: tuple[ClassPlan, ...]
    ledger: tuple[LedgerLine, ...]
    reasons: tuple[Reason, ...]


def plan_json(plan: Plan | None) -> bytes:
    """The plan's choices with their reasons and its ledger, as JSON; `null` where nothing was planned (a script is served)."""
    if plan is None:
        return b"null"
    return msgspec.json.encode(
        PlanFacts(
            model=plan.model,
            scenario=plan.scenario,
            family=plan.card.family,
            parameters=plan.card.parameters,
            layers=plan.card.layers,
            max_context=plan.schedule.max_context,
            max_running=plan.schedule.max_running,
            max_tokens_per_step=plan.schedule.max_tokens_per_step,
            machine=plan.hardware.name,
            cores=plan.hardware.cores,
            memory_bytes=plan.hardware.memory_bytes,
            policy=plan.schedule.policy,
            classes=plan.schedule.classes,
            ledger=plan.ledger,
            reasons=plan.reasons,
        )
    )


def _overload(ladder: DegradeFacts | None) -> Overload | None:
    if ladder is None:
        return None
    return Overload(
        level=ladder.level,
        most=ladder.most,
        gives_up=ladder.name,
        pressure=ladder.pressure,
        changes=ladder.ups + ladder.downs,
        refused=ladder.refused,
        shortened=ladder.shortened,
    )


def _known(times: StepTimeFacts | None) -> StepTimes | None:
    if times is None:
        return None
    return StepTimes(steps=times.steps, error_p50=times.error_median, error_p90=times.error_p90, paces=times.paces)


def _share(used: tuple[int, ...], total: tuple[int, ...]) -> float:
    return round(max((u / t for u, t in zip(used, total, strict=True) if t), default=0.0), 4)


def _merge(into: dict[int, int], counts: Mapping[int, int]) -> None:
    for bucket, count in counts.items():
        into[bucket] = into.get(bucket, 0) + count


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds * 1e3:.4g}")


def _times(counts: Mapping[int, int]) -> Times:
    return Times(p50_ms=_ms(quantile(counts, 0.5)), p95_ms=_ms(quantile(counts, 0.95)), count=sum(counts.values()))
