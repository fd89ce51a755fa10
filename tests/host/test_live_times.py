"""Step times that follow a running engine: learnt from its steps, used by its scheduler, not trusted beyond them, kept in a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import SMOLLM2, machine
from support_engine import cache_plan, group, request, schedule_plan
from test_steptime import step

from tradewind.config.goals import Goals, Means, TrafficClass
from tradewind.config.plan import ClassPlan, Plan, StepCostPlan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError
from tradewind.contract.request import Request
from tradewind.contract.step import Step, StepResult, Wants, frozen_ints
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.pacing import Pacer, planned_seconds
from tradewind.engine.scheduler import Scheduler
from tradewind.engine.step_watch import StepTimeStats
from tradewind.simulate.clock import VirtualClock
from tradewind.simulate.features import FeatureReader, Features
from tradewind.simulate.live_times import FIRST, FittedSeconds, LiveTimes, live_times_of, made_for, read_times
from tradewind.simulate.scripted import ScriptedExecutor
from tradewind.simulate.steptime import StepTime, flat_prior, roofline

SLOTS = 16


def law(features: Features) -> float:
    """What steps take: not what a prior of 10 ms and 1 % a token says."""
    return (
        0.004
        + 0.0005 * features.tokens
        + 1e-6 * features.decode_context
        + 2e-7 * features.prefill_context
        + 1e-4 * features.rows
    )


def random_step(draw: np.random.Generator, number: int, *, longest: int = 64, rows: int = 8) -> Step:
    """Decode rows, and often a chunk of a prompt."""
    decoding = [(int(draw.integers(1, 300)), 1, 0, Wants.LAST) for _ in range(int(draw.integers(1, rows)))]
    chunk = []
    if draw.random() < 0.5:
        chunk = [(int(draw.integers(0, 200)), int(draw.integers(2, longest)), 0, Wants.LAST)]
    return step([*decoding, *chunk], number=number)


def result_of(step: Step, seconds: float) -> StepResult:
    none = frozen_ints([])
    return StepResult(
        number=step.number,
        slot=step.slot,
        epoch=step.epoch,
        offset=frozen_ints([0] * (len(step.slot) + 1)),
        tokens=none,
        device_s=0.9 * seconds,
        host_s=0.1 * seconds,
    )


def at_once(job: Callable[[], None]) -> None:
    job()


@dataclass
class Fed:
    """LiveTimes and what feeds it: steps of a law, on a clock."""

    times: LiveTimes
    clock: VirtualClock
    paced: list[Any] = field(default_factory=list)
    reader: FeatureReader = field(default_factory=lambda: FeatureReader(groups=(group(),), slots=SLOTS))
    number: int = 0

    def feed(self, count: int, *, noise: float = 0.0, seed: int = 0, times: float = 1.0, **shape: Any) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(count):
            self.number += 1
            made = random_step(draw, self.number, **shape)
            seconds = times * law(self.reader.read(made)) * float(np.exp(noise * draw.normal()))
            self.times.submitted(made)
            self.clock.advance(seconds)
            self.times.collected(result_of(made, seconds))


def fed(**more: Any) -> Fed:
    clock, paced = VirtualClock(), list[Any]()
    options: dict[str, Any] = {"prior": flat_prior(), "run": at_once, "pace": paced.append, **more}
    made = LiveTimes(groups=(group(),), slots=SLOTS, clock=clock.now, **options)
    return Fed(times=made, clock=clock, paced=paced)


# -- it learns -----------------------------------------------------------------------------------------------------------


def test_it_converges_to_what_steps_take() -> None:
    made = fed()
    made.feed(FIRST - 1)
    assert made.times.stats() == StepTimeStats() and not made.paced, "too few to say anything"
    made.feed(4000, noise=0.05, seed=1)
    stats = made.times.stats()
    assert stats.refits >= 4 and stats.steps >= 400 and stats.held_out >= 100 and stats.paces
    assert stats.error_median is not None and stats.error_median < 0.06, "little more than the noise"
    assert stats.error_p90 is not None and stats.error_p90 < 0.13
    seconds = made.paced[-1]
    for rows, context, chunk, start in ((1, 100, 0, 0), (6, 900, 0, 0), (4, 500, 32, 0), (2, 300, 60, 120)):
        features = Features(
            tokens=rows + chunk,
            rows=rows + (chunk > 0),
            prefill_tokens=chunk,
            decode_context=context,
            prefill_context=chunk * start + chunk * (chunk + 1) // 2,
            prefill_rows=int(chunk > 0),
            prefill_keys=(start + chunk) * (chunk > 0),
            logit_rows=rows + (chunk > 0),
        )
        found = seconds(rows=rows, context=context, chunk=chunk, start=start)
        assert found == pytest.approx(law(features), rel=0.08), (rows, context, chunk, start)


def test_it_follows_an_engine_that_becomes_slower() -> None:
    made = fed()
    made.feed(1500, noise=0.02)
    before = made.paced[-1](rows=4, context=500, chunk=0, start=0)
    made.feed(6000, noise=0.02, seed=3, times=2.0)
    after = made.paced[-1](rows=4, context=500, chunk=0, start=0)
    assert after / before == pytest.approx(2.0, rel=0.1)


def test_fits_are_rare_and_apart() -> None:
    jobs: list[Callable[[], None]] = []
    made = fed(run=jobs.append)
    made.feed(3000)
    assert len(jobs) == 1, "the next one waits for this one"
    jobs.pop()()
    made.feed(1)
    begun = [made.clock.now()]
    for _ in range(4000):
        made.feed(1, seed=made.number)
        if jobs:
            begun.append(made.clock.now())
            jobs.pop()()
    assert 2 <= len(begun) <= 8 and all(later - sooner >= 2.0 for sooner, later in pairwise(begun[1:]))


def test_steps_that_wait_for_kernels_are_not_learnt_from() -> None:
    prepared = False
    made = fed(prepared=lambda: prepared)
    made.feed(300, times=50.0)
    assert made.times.stats().steps == 0
    prepared = True
    made.feed(3000, seed=2)
    error = made.times.stats().error_median
    assert error is not None and error < 0.02


# -- beyond what was measured --------------------------------------------------------------------------------------------


def fitted_model() -> tuple[StepTime, StepTime]:
    made = fed()
    made.feed(2000)
    online = made.times._online
    return online.model, flat_prior()


FITTED, PRIOR = fitted_model()
SECONDS = FittedSeconds(FITTED, prior=PRIOR, scale=1.3)


def test_within_what_was_fitted_it_is_the_model() -> None:
    features = Features(
        tokens=36, rows=5, prefill_tokens=32, decode_context=400, prefill_context=528 + 320, prefill_rows=1, prefill_keys=42,
        logit_rows=5,
    )  # fmt: skip
    assert FITTED.trustworthy(features)
    assert SECONDS(rows=4, context=400, chunk=32, start=10) == pytest.approx(FITTED.device_s(features), rel=1e-12)


def test_beyond_it_the_prior_goes_on_from_the_edge() -> None:
    """A chunk of ten times what was seen: what the prior says it costs more is added, scaled as the fitted steps are to the prior."""
    long = Features(
        tokens=600, rows=1, prefill_tokens=600, prefill_context=600 * 601 // 2, prefill_rows=1, prefill_keys=600, logit_rows=1
    )  # fmt: skip
    assert not FITTED.trustworthy(long) and "not trustworthy here" in (FITTED.why_not(long) or "")
    found = SECONDS(rows=0, context=0, chunk=600, start=0)
    high = FITTED.high
    edge = Features(
        tokens=round(high.prefill_tokens * 1.05),
        rows=1,
        prefill_context=round(high.prefill_context * 1.05),
        prefill_rows=1,
        prefill_keys=round(high.prefill_keys * 1.05),
        logit_rows=1,
    )
    more = 1.3 * (PRIOR.device_s(long) - PRIOR.device_s(edge))
    assert found == pytest.approx(FITTED.device_s(edge) + more, rel=0.02)
    assert found != pytest.approx(FITTED.device_s(long), rel=0.05), "the fitted curve says nothing there"


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(0, 40),
    context=st.integers(0, 20_000),
    chunk=st.integers(0, 700),
    start=st.integers(0, 2000),
    more=st.tuples(st.integers(0, 30), st.integers(0, 5000), st.integers(0, 400), st.integers(0, 900)),
)
def test_no_step_is_predicted_shorter_than_a_smaller_one(
    rows: int, context: int, chunk: int, start: int, more: tuple[int, int, int, int]
) -> None:
    """The pacer looks for the longest chunk by halving."""
    small = {"rows": rows, "context": context, "chunk": chunk, "start": start}
    for (name, value), much in zip(small.items(), more, strict=True):
        assert SECONDS(**{**small, name: value + much}) >= SECONDS(**small) * (1 - 1e-9), name


# -- the scheduler uses it -----------------------------------------------------------------------------------------------


class Timed:
    """A scripted device that also says what its steps took."""

    def __init__(self, device: ScriptedExecutor, cost: Callable[[Step], float]) -> None:
        self._device, self._cost = device, cost
        self._flying: list[Step] = []

    def submit(self, step: Step) -> None:
        self._flying.append(step)
        self._device.submit(step)

    def collect(self) -> StepResult:
        seconds = self._cost(self._flying.pop(0))
        return msgspec.structs.replace(self._device.collect(), device_s=seconds)

    def close(self) -> None:
        self._device.close()


def cost(step: Step) -> float:
    """A prompt's tokens are dear, which the plan does not know: it says that rows are."""
    return 0.004 + 0.001 * float(step.count[step.count > 1].sum()) + 0.0002 * len(step.slot)


def paced_run(*, learns: bool) -> tuple[Scheduler, list[tuple[int, int]], LiveTimes | None]:
    """One chat after another with 60 ms a token beside a queue of long prompts; (decode rows, prompt tokens) of each step."""
    clock = VirtualClock()
    cache = cache_plan(pages=(2000,), page_tokens=4, prefix_cache=False)
    schedule = msgspec.structs.replace(
        schedule_plan(max_running=8, max_tokens_per_step=256, max_context=1024, steps_in_flight=1),
        policy="slo",
        classes=(ClassPlan(name="chat", ttft_s=2.0, tpot_s=0.06),),
        step_cost=StepCostPlan(base_s=0.02, token_s=0.0001),
    )
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=8, clock=clock, delay_s=cost)
    watch = None
    if learns:
        prior = StepTime(source="plan", curve_s=flat_prior(0.02).curve_s, extra_s=flat_prior().extra_s)
        watch = LiveTimes(
            prior=prior, groups=cache.groups, slots=8, clock=clock.now, pace=scheduler.pace_by, run=at_once
        )
    loop = EngineLoop(scheduler=scheduler, executor=Timed(device, cost), clock=clock.now, watch=watch)
    steps: list[tuple[int, int]] = []
    for number in range(60):
        loop.post(Add(chat(f"c{number}", number)))
        loop.post(Add(request(f"b{number}", [number + 5] * 700, max_tokens=2)))
        while loop.busy:
            loop.run_once()
    for made in device.steps:
        chunk = int(made.count[made.count > 1].sum())
        steps.append((int((made.count == 1).sum()), chunk))
    loop.close()
    return scheduler, steps, watch


def chat(name: str, number: int) -> Request:
    return request(name, [number] * 20, max_tokens=24, traffic_class="chat")


def test_the_scheduler_paces_by_the_refitted_model() -> None:
    plain, plain_steps, _ = paced_run(learns=False)
    taught, taught_steps, watch = paced_run(learns=True)
    assert watch is not None and watch.stats().paces
    assert taught._pacer is not None and isinstance(taught._pacer._seconds, FittedSeconds)
    assert plain._pacer is not None and not isinstance(plain._pacer._seconds, FittedSeconds)
    # What it expects of a step is what such a step takes ...
    for chunk in (16, 40):
        expected = taught._pacer.step_s(rows=1, context=30, chunk=chunk, start=0)
        assert expected == pytest.approx(0.004 + 0.001 * chunk + 0.0004, rel=0.15)
    # ... so that beside a chat's rows prompts get what its 60 ms leave, no more and not much less, in the run's second half.
    beside = [chunk for rows, chunk in taught_steps[len(taught_steps) // 2 :] if rows and chunk]
    took = [0.0042 + 0.001 * chunk for chunk in beside]
    assert 0.035 < median(took) <= 0.06, median(took)
    assert plain_steps != taught_steps, "it decides otherwise"


def test_a_refit_is_no_reason_to_believe_the_next_step() -> None:
    """Fitted times are corrected slowly: one step that a neighbour held up is noise."""
    schedule = msgspec.structs.replace(schedule_plan(max_running=4), policy="slo")
    pacer = Pacer(schedule, page_tokens=4, seconds=planned_seconds(StepCostPlan(base_s=0.01, token_s=0.0)))
    pacer._ratio[False] = 3.0
    pacer.submitted(rows=2, context=10, chunk=0, start=0, now=0.0)
    pacer.use(lambda *, rows, context, chunk, start: 0.03)
    assert pacer.step_s(rows=2, context=10) == pytest.approx(0.03)
    rows: Any = type("R", (), {"generated": np.zeros(4, np.int32), "sequences": [None] * 4})()
    pacer.absorbed(frozen_ints([]), rows, 0.03)  # the flying step took what the old times and their factor had said
    assert pacer.step_s(rows=2, context=10) == pytest.approx(0.03, rel=1e-6)
    pacer.submitted(rows=2, context=10, chunk=0, start=0, now=1.0)
    pacer.absorbed(frozen_ints([]), rows, 1.3)
    assert pacer.step_s(rows=2, context=10) < 0.05


def test_worse_times_than_the_plans_own_are_not_paced_by(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = planned_seconds(StepCostPlan(base_s=0.01, token_s=0.0))
    made = fed(plain=plain)
    made.feed(200)
    assert isinstance(made.paced[-1], FittedSeconds) and made.times.stats().paces
    monkeypatch.setattr(made.times, "_judged", lambda model: None)
    made.feed(4000, seed=5)
    assert made.paced[-1] is plain and not made.times.stats().paces


def test_a_fit_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = fed()
    monkeypatch.setattr(made.times._online, "refit", lambda: 1 / 0)
    made.feed(500)
    assert made.times.stats() == StepTimeStats() and "could not be fitted" in caplog.text


# -- what it costs -------------------------------------------------------------------------------------------------------


def test_a_step_costs_less_than_deciding_it() -> None:
    """Both are measured on the same steps, one beside the other: about 10 us against 100, on a quiet machine."""
    clock = VirtualClock()
    cache = cache_plan(pages=(4000,), page_tokens=16, prefix_cache=False)
    schedule = schedule_plan(max_running=SLOTS, max_tokens_per_step=256, max_context=2048, steps_in_flight=1)
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    watch = LiveTimes(prior=flat_prior(), groups=cache.groups, slots=SLOTS, clock=clock.now, run=lambda job: None)
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=SLOTS, clock=clock, delay_s=0.01)
    for number in range(SLOTS):
        scheduler.add(request(f"r{number}", [number] * 40, max_tokens=1000), 0.0)
    deciding, watching = [], []
    for _ in range(600):
        t0 = time.perf_counter()
        made = scheduler.decide(clock.now())
        t1 = time.perf_counter()
        assert made is not None
        device.submit(made)
        t2 = time.perf_counter()
        watch.submitted(made)
        t3 = time.perf_counter()
        back = msgspec.structs.replace(device.collect(), device_s=0.01)
        t4 = time.perf_counter()
        watch.collected(back)
        t5 = time.perf_counter()
        scheduler.absorb(back, clock.now())
        t6 = time.perf_counter()
        deciding.append(t1 - t0 + t6 - t5)
        watching.append(t3 - t2 + t5 - t4)
    assert median(watching) < 0.5 * median(deciding), (median(watching), median(deciding))


def test_steps_may_come_while_a_fit_runs() -> None:
    clock = VirtualClock()
    made = LiveTimes(prior=flat_prior(), groups=(group(),), slots=SLOTS, clock=clock.now)
    one = Fed(times=made, clock=clock)
    limit_s = time.monotonic() + 60
    while made.stats().refits < 3 and time.monotonic() < limit_s:
        one.feed(200, noise=0.1, seed=one.number)
    assert made.stats().refits >= 3
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "tradewind-step-times"]


# -- kept in a file ------------------------------------------------------------------------------------------------------


def slo_plan_of(**means: Any) -> Plan:
    goals = Goals(
        model="m",
        classes=(TrafficClass(name="chat", ttft_ms=500, tpot_ms=50), TrafficClass(name="bulk")),
        means=Means(**means),
    )
    return resolve(goals, SMOLLM2, machine())


def test_what_was_learnt_is_kept_and_used_by_the_next_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "times.json"
    plan = slo_plan_of()
    first = fed(file=file, made_for=made_for(plan))
    first.feed(3000, noise=0.02)
    first.times.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["times.json"], "nothing half written is left"
    kept = StepTime.load(file)
    assert kept.made_for == made_for(plan) and "SmolLM2" not in kept.made_for and kept.steps > 300
    paced: list[Any] = []
    second = live_times_of(plan, clock=lambda: 0.0, pace=paced.append, file=file)
    assert second is not None and second.stats().paces and second.stats().steps == kept.steps
    features = Features(tokens=4, rows=4, decode_context=500, logit_rows=4)
    assert paced[0](rows=4, context=500, chunk=0, start=0) == pytest.approx(law(features), rel=0.05)


def test_a_run_with_small_steps_does_not_make_it_forget_the_large_ones(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    first = fed(file=file)
    first.feed(3000)
    first.times.close()
    known = StepTime.load(file)
    second = fed(file=file, known=known)
    second.feed(2000, longest=4, rows=3, seed=9)
    second.times.close()
    again = StepTime.load(file)
    assert again.high == known.high
    long = Features(tokens=56, rows=6, prefill_tokens=50, decode_context=800, prefill_context=1275, logit_rows=6)
    assert again.device_s(long) == pytest.approx(law(long), rel=0.1)


def test_times_of_something_else_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    plan, other = slo_plan_of(), slo_plan_of(compute="int8")
    msgspec.structs.replace(roofline(plan), made_for=made_for(plan)).save(file)
    assert read_times(file, plan) is not None and read_times(tmp_path / "none.json", plan) is None
    with pytest.raises(UserError, match="name another file"):
        read_times(file, other)
    with pytest.raises(UserError, match="there is no folder"):
        read_times(tmp_path / "no" / "times.json", plan)
    file.write_text("{}")
    with pytest.raises(UserError, match="is not a step-time model"):
        read_times(file, plan)


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    made = fed(file=folder / "times.json")
    made.feed(6000)
    assert made.times.broken is not None and made.times.stats().refits > 2
    assert caplog.text.count("are not written any more") == 1


# -- by the plan ---------------------------------------------------------------------------------------------------------


def test_the_plan_says_whether_times_are_fitted() -> None:
    def watch(plan: Plan, **more: Any) -> LiveTimes | None:
        return live_times_of(plan, clock=lambda: 0.0, pace=lambda seconds: None, **more)

    assert slo_plan_of().schedule.fit_steps and watch(slo_plan_of()) is not None
    assert not slo_plan_of(fit_steps=False).schedule.fit_steps and watch(slo_plan_of(fit_steps=False)) is None
    plain = resolve(Goals(model="m"), SMOLLM2, machine())
    assert not plain.schedule.fit_steps and watch(plain) is None
    assert watch(plain, file=Path("times.json")) is not None, "a file wants to be filled whoever paces"
    asked = resolve(Goals(model="m", means=Means(fit_steps=True)), SMOLLM2, machine())
    (reason,) = [one for one in asked.reasons if one.choice == "fit_steps"]
    assert reason.pinned and "arrival paces nothing" in reason.why and watch(asked) is not None


def test_the_loop_shows_each_step_once_and_closes() -> None:
    seen: list[tuple[str, int]] = []

    class Watch:
        def submitted(self, step: Step) -> None:
            seen.append(("submitted", step.number))

        def collected(self, result: StepResult) -> None:
            seen.append(("collected", result.number))

        def stats(self) -> StepTimeStats:
            return StepTimeStats(steps=7)

        def close(self) -> None:
            seen.append(("close", 0))

    clock = VirtualClock()
    cache = cache_plan()
    loop = EngineLoop(
        scheduler=Scheduler(schedule=schedule_plan(), cache=cache, clock=clock.now),
        executor=ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=8, clock=clock, delay_s=0.01),
        clock=clock.now,
        watch=Watch(),
    )
    loop.post(Add(request("a", [1, 2, 3], max_tokens=5)))
    while loop.busy:
        loop.run_once()
    assert loop.step_times == StepTimeStats(steps=7)
    loop.post(Add(request("b", [1, 2, 3], max_tokens=5)))
    loop.run_once()
    loop.close()
    loop.close()
    submitted, collected = ([n for what, n in seen if what == kind] for kind in ("submitted", "collected"))
    assert submitted == collected == list(range(1, len(submitted) + 1)) and seen.count(("close", 0)) == 1
    assert seen[-1] == ("close", 0)
