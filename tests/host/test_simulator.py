"""The simulator: the same decisions as engines that ran, times that can be computed by hand, fleets, reports, the command."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from plans import SMOLLM2, machine
from support_engine import cache_plan, schedule_plan

from tradewind.cli_simulate import add_parser
from tradewind.config.goals import Goals
from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import MissingExtraError, UserError
from tradewind.contract.executor import Executor, Resting
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Step, StepResult
from tradewind.engine.client import LocalClient
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.simulate.clock import RealClock, VirtualClock
from tradewind.simulate.features import FeatureReader, Features
from tradewind.simulate.outcome import Outcome, Series
from tradewind.simulate.report import SimulationReport, draw, report_text, show_s, summarise
from tradewind.simulate.router import PrefixAware
from tradewind.simulate.scripted import ScriptedExecutor
from tradewind.simulate.simulator import END_TOKEN, SimulateOptions, request_of, simulate
from tradewind.simulate.steplog import StepLog, digest_of, host_time_of, read_step_log, replay
from tradewind.simulate.steptime import KNOTS, HostTime, StepTime, fit, flat_prior
from tradewind.simulate.trace_columns import Trace, TraceLine, make_trace, poisson_trace
from tradewind.simulate.traces import write_trace

NO_HOST = HostTime(decide_s=0, decide_row_s=0, decide_enter_s=0, absorb_s=0, absorb_row_s=0, loop_s=0)


def times(step_s: float = 0.01, *, token_s: float = 0.0, context_s: float = 0.0, host: HostTime = NO_HOST) -> StepTime:
    """Each step takes step_s and token_s for each of its tokens."""
    curve = [step_s + token_s * tokens for tokens in KNOTS]
    return StepTime(source="made up", curve_s=(step_s, *curve), extra_s=(context_s, 0, 0, 0, 0), host=host)


def trace_of(*lines: tuple[float, int, int], **more: Any) -> Trace:
    """Requests of (arrival, prompt tokens, output tokens)."""
    made = [TraceLine(arrival_s=at, prompt_tokens=p, output_tokens=o, **more) for at, p, o in lines]
    return make_trace(made, name="t", block_tokens=4)


def chat(requests: int = 60, *, per_s: float = 20.0, seed: int = 0, **more: Any) -> Trace:
    shape: dict[str, Any] = {"prompt": (30, 0.8), "output": (12, 0.6), "longest_prompt": 200, "longest_output": 60}
    return poisson_trace(requests=requests, per_s=per_s, seed=seed, block_tokens=4, **{**shape, **more})


# ------------------------------------------------------------------------------------------------ the same as the engine


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("pages", [400, 70])
def test_decisions_are_those_of_a_device_that_checks_the_contract(steps_in_flight: int, pages: int) -> None:
    """The scripted device on a virtual clock, its steps as long as the model says, decides step for step as the simulation does."""
    trace = chat(prefixes=4, prefix_blocks=3)
    schedule = schedule_plan(steps_in_flight=steps_in_flight, max_tokens_per_step=48)
    cache = cache_plan(pages=(pages,), windows=(None,))
    model = times(0.004, token_s=1e-4)
    steps: list[Step] = []
    outcome = simulate(
        trace, schedule=schedule, cache=cache, times=model, watch=lambda replica, step, features: steps.append(step)
    )
    clock = VirtualClock()
    reader = FeatureReader(groups=cache.groups, slots=schedule.max_running)
    free_s = [0.0]
    ends: dict[int, float] = {}

    class Timed(ScriptedExecutor):
        def submit(self, step: Step) -> None:
            super().submit(step)
            free_s[0] = max(free_s[0], clock.now()) + model.device_s(reader.read(step))
            ends[step.number] = free_s[0]

    device = Timed(
        groups=cache.groups,
        pages=cache.pages,
        max_running=schedule.max_running,
        clock=clock,
        delay_s=lambda step: max(0.0, ends[step.number] - clock.now()),
        script={str(i): [trace.filler(i)] * 80 for i in range(len(trace))},
    )
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    loop = EngineLoop(scheduler=scheduler, executor=device, clock=clock.now)
    due = list(range(len(trace)))
    sampling = SamplingParams(temperature=0.0)
    while due or loop.busy:
        if not loop.busy:
            clock.advance(max(0.0, trace.arrival_s[due[0]] - clock.now()))
        while due and trace.arrival_s[due[0]] <= clock.now():
            request = request_of(trace, due.pop(0), sampling=sampling)
            loop.post(Add(msgspec.structs.replace(request, tokens=tuple(np.asarray(request.tokens).tolist()))))
        loop.run_once()
        scheduler.check()
    assert [digest_of(step) for step in steps] == [digest_of(step) for step in device.steps]
    assert all(np.array_equal(a.page_id, b.page_id) for a, b in zip(steps, device.steps, strict=True))
    if pages == 70:
        assert outcome.preemptions.sum() > 0, "a tight cache preempts"


class Recording:
    """An executor that keeps the steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[Step] = []

    def submit(self, step: Step) -> None:
        self.steps.append(step)
        self._executor.submit(step)

    def collect(self) -> StepResult:
        return self._executor.collect()

    def close(self) -> None:
        self._executor.close()


def run_live(
    make: Callable[[], Executor],
    *,
    schedule: SchedulePlan,
    cache: CachePlan,
    requests: list[tuple[float, Request]],
    cancel: tuple[str, ...] = (),
    stop: tuple[str, ...] = (),
) -> tuple[StepLog, list[Step], dict[str, list[int]]]:
    """Sends requests at their times to an engine in a thread of its own, on the machine's clock; some are cancelled or stopped midway."""
    log = StepLog(groups=cache.groups, slots=schedule.max_running, steps_in_flight=schedule.steps_in_flight)
    recording = Recording(make())
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=time.monotonic)
    loop = EngineLoop(scheduler=scheduler, executor=log.watching(recording), clock=time.monotonic, sinks=(log,))
    with LocalClient(loop) as client:
        client.start()
        began = time.monotonic()
        handles = {}
        later: list[threading.Timer] = []
        for at_s, request in requests:
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            handles[request.id] = client.submit(request, stream=False)
            for names, act in ((cancel, client.cancel), (stop, client.finish)):
                if request.id in names:
                    later.append(threading.Timer(0.02, act, (request.id,)))
                    later[-1].start()
        for handle in handles.values():
            handle.result()
        for timer in later:
            timer.join()
    return log, recording.steps, {name: handle.tokens for name, handle in handles.items()}


def same_columns(one: Step, other: Step) -> bool:
    columns = ("slot", "epoch", "start", "count", "drafts", "wants", "page_slot", "page_group", "page_index", "page_id")
    return (
        one.number == other.number
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)
        and [(e.slot, e.epoch, e.request_id) for e in one.enter]
        == [(e.slot, e.epoch, e.request_id) for e in other.enter]
        and one.leave == other.leave
    )


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("policy", ["arrival", "fair", "priority"])
def test_with_the_logged_times_it_decides_as_the_live_run_did(steps_in_flight: int, policy: Any) -> None:
    """Live: real clock, threads, steps of 1 to 3 ms, requests at any moment, cancellations, a cache that is too small."""
    trace = chat(40, per_s=90.0, seed=steps_in_flight, prefixes=3, prefix_blocks=4)
    schedule = schedule_plan(steps_in_flight=steps_in_flight, max_tokens_per_step=40, policy=policy)
    cache = cache_plan(pages=(90,))
    sampling = SamplingParams(temperature=0.0)
    draw = np.random.default_rng(5)
    requests = []
    for index in range(len(trace)):
        request = request_of(trace, index, sampling=sampling)
        more = {"tokens": tuple(np.asarray(request.tokens).tolist()), "arrived_s": 0.0, "tenant": f"t{index % 3}"}
        requests.append((float(trace.arrival_s[index]), msgspec.structs.replace(request, **more, priority=index % 2)))
    script = {
        str(i): [*[trace.filler(i)] * int(n), *([END_TOKEN] if i % 4 == 0 else [])]
        for i, n in enumerate(draw.integers(1, 12, 40))
    }
    log, steps, answers = run_live(
        lambda: ScriptedExecutor(
            groups=cache.groups,
            pages=cache.pages,
            max_running=schedule.max_running,
            clock=RealClock(),
            delay_s=lambda step: 0.001 + 0.002 * (step.number % 7) / 7,
            script=script,
        ),
        schedule=schedule,
        cache=cache,
        requests=requests,
        cancel=("3", "17"),
        stop=("8", "21"),
    )
    again: list[Step] = []
    asked = {request.id: request for _, request in requests}
    replayed = replay(log.steps, log.requests, asked, schedule=schedule, cache=cache, answers=answers, watch=again)
    assert replayed.differs_at is None
    assert len(again) == len(steps) > 20
    assert all(same_columns(one, other) for one, other in zip(steps, again, strict=True))


def test_a_replay_that_differs_says_where() -> None:
    trace = chat(20, per_s=200.0)
    schedule, cache = schedule_plan(max_tokens_per_step=40), cache_plan(pages=(200,))
    sampling = SamplingParams(temperature=0.0)
    requests = [
        msgspec.structs.replace(r, tokens=tuple(np.asarray(r.tokens).tolist()), arrived_s=0.0)
        for r in (request_of(trace, i, sampling=sampling) for i in range(20))
    ]
    log, _, _ = run_live(
        lambda: ScriptedExecutor(
            groups=cache.groups, pages=cache.pages, max_running=8, clock=RealClock(), delay_s=0.001
        ),
        schedule=schedule,
        cache=cache,
        requests=[(float(at), r) for at, r in zip(trace.arrival_s, requests, strict=True)],
    )
    asked = {r.id: r for r in requests}
    other = msgspec.structs.replace(schedule, max_tokens_per_step=16)
    assert replay(log.steps, log.requests, asked, schedule=schedule, cache=cache).differs_at is None
    assert replay(log.steps, log.requests, asked, schedule=other, cache=cache).differs_at is not None
    with pytest.raises(UserError, match="begins at step 2 or has gaps"):
        replay(list(log.steps)[1:], log.requests, asked, schedule=schedule, cache=cache)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_with_the_logged_times_it_decides_as_the_cpu_engine_did(tmp_path: Path, steps_in_flight: int) -> None:
    """The same with the real runner and kernels on a tiny checkpoint, random weights, answers that end of themselves."""
    from tiny_engine import write_checkpoint

    from tradewind.assemble import make_executor, make_ops, make_plan
    from tradewind.config.goals import Means
    from tradewind.kernels.cpu import library
    from tradewind.phases import Phases

    if why := library.why_not():
        pytest.skip(why)
    folder = write_checkpoint("windowed", tmp_path / "tiny")
    means = Means(backend="cpu", threads=1, kv_format="f32", compute="f32", overlap=steps_in_flight == 2)
    planned = make_plan(Goals(model=str(folder), means=means))
    schedule = msgspec.structs.replace(planned.plan.schedule, max_tokens_per_step=48, max_running=6)
    cache = msgspec.structs.replace(planned.plan.cache, pages=tuple(min(80, own) for own in planned.plan.cache.pages))
    planned = type(planned)(
        path=planned.path,
        checkpoint=planned.checkpoint,
        plan=msgspec.structs.replace(planned.plan, schedule=schedule, cache=cache),
    )
    draw = np.random.default_rng(3)
    shared = draw.integers(0, 256, 40).tolist()
    requests = []
    for index in range(24):
        own = draw.integers(0, 256, int(draw.integers(4, 60))).tolist()
        sampling = SamplingParams(temperature=1.0, seed=index)
        tokens = tuple([*shared, *own] if index % 3 else own)
        made = Request(
            id=f"r{index}",
            tokens=tokens,
            sampling=sampling,
            max_tokens=int(draw.integers(2, 40)),
            eos_ids=(259, 5, 6, 7),
            seed=index,
        )
        requests.append((0.004 * index, made))
    log, steps, answers = run_live(
        lambda: make_executor(planned, make_ops(planned.plan)[0], phases=Phases()),
        schedule=schedule,
        cache=cache,
        requests=requests,
        cancel=("r7",),
    )
    again: list[Step] = []
    asked = {request.id: request for _, request in requests}
    replayed = replay(log.steps, log.requests, asked, schedule=schedule, cache=cache, answers=answers, watch=again)
    assert replayed.differs_at is None
    assert len(again) == len(steps) > 20
    assert all(same_columns(one, other) for one, other in zip(steps, again, strict=True))
    assert all(record.device_s > 0 for record in log.steps)


# ------------------------------------------------------------------------------------------------- what it has not seen


def device_law(features: Features) -> float:
    """Steps as a device might take them, which no coefficient of the model says alone: flat, a bend, then steep; and attention."""
    tokens = features.tokens
    curve_s = 0.003 + 1.5e-4 * tokens + 1.2e-4 * max(0, tokens - 24)
    return curve_s + 2e-6 * features.decode_context + 1e-6 * features.prefill_context + 1e-4 * features.logit_rows


def noisy_run(trace: Trace, *, schedule: SchedulePlan, cache: CachePlan, seed: int) -> StepLog:
    """The trace on an engine whose device scatters by 8 %, and stalls for three times as long in one step of a hundred. Virtual clock."""
    draw = np.random.default_rng(seed)
    clock = VirtualClock(1.0)
    log = StepLog(groups=cache.groups, slots=schedule.max_running, steps_in_flight=1)
    reader = FeatureReader(groups=cache.groups, slots=schedule.max_running)
    took: dict[int, float] = {}

    class Scattering(ScriptedExecutor):
        def submit(self, step: Step) -> None:
            stall = 3.0 if draw.random() < 0.01 else 1.0
            took[step.number] = device_law(reader.read(step)) * stall * float(np.exp(draw.normal(0, 0.08)))
            super().submit(step)

        def collect(self) -> StepResult:
            result = super().collect()
            return msgspec.structs.replace(result, device_s=took[result.number])

    device = Scattering(
        groups=cache.groups,
        pages=cache.pages,
        max_running=schedule.max_running,
        clock=clock,
        delay_s=lambda step: took[step.number],
        script={str(i): [trace.filler(i)] * 80 for i in range(len(trace))},
    )
    loop = EngineLoop(
        scheduler=Scheduler(schedule=schedule, cache=cache, clock=clock.now),
        executor=log.watching(device),
        clock=clock.now,
        sinks=(log,),
    )
    begin_s, arrival_s = clock.now(), trace.arrival_s.tolist()
    due = list(range(len(trace)))
    sampling = SamplingParams(temperature=0.0)
    while due or loop.busy:
        if not loop.busy:
            clock.advance(max(0.0, begin_s + arrival_s[due[0]] - clock.now()))
        while due and begin_s + arrival_s[due[0]] <= clock.now():
            made = request_of(trace, due.pop(0), sampling=sampling)
            tokens = tuple(np.asarray(made.tokens).tolist())
            loop.post(Add(msgspec.structs.replace(made, tokens=tokens, arrived_s=begin_s + made.arrived_s)))
        loop.run_once()
    return log


def test_a_held_out_trace_is_foretold_within_a_tenth() -> None:
    """Fitted to a sweep of rates, told of traffic with other lengths and common prefixes: p50 and p99 of TTFT and TPOT."""
    schedule = schedule_plan(steps_in_flight=1, max_tokens_per_step=64)
    cache = cache_plan(pages=(600,), windows=(None,))
    plans: dict[str, Any] = {"schedule": schedule, "cache": cache}
    sweep = chat(500, per_s=1.0, seed=1)
    sweep = replace(sweep, arrival_s=np.cumsum(1 / np.linspace(3.0, 40.0, 500)))
    log = noisy_run(sweep, seed=2, **plans)
    model = fit(log.steps, prior=flat_prior(), host=NO_HOST)
    assert model.error_median is not None and model.error_median < 0.08
    assert len(model.prompt_ratios) > 2, "steps with prompts have a scatter of their own"

    held_out = chat(500, per_s=14.0, seed=3, prompt=(16, 0.9), output=(16, 0.6), prefixes=6, prefix_blocks=2)
    # What 500 requests meet of stalls is chance, so the engine runs three times.
    logs = [noisy_run(held_out, seed=seed, **plans) for seed in (4, 5, 6)]
    real = [record for log in logs for record in log.requests]
    assert len(real) == 3 * len(held_out)
    measured = {
        "ttft": np.array([one.first_token_s - one.arrived_s for one in real]),
        "tpot": np.array(
            [(one.finished_s - one.first_token_s) / (one.output_tokens - 1) for one in real if one.output_tokens > 1]
        ),
    }
    told = [simulate(held_out, times=model, options=SimulateOptions(seed=seed), **plans) for seed in range(4)]
    for name, truth in measured.items():
        for quantile in (0.5, 0.99):
            simulated = float(np.mean([np.nanquantile(getattr(one, f"{name}_s"), quantile) for one in told]))
            assert simulated == pytest.approx(float(np.quantile(truth, quantile)), rel=0.1), (name, quantile)


# ----------------------------------------------------------------------------------------------------------- the step log


def test_events_alone_tell_nearly_what_the_columns_say() -> None:
    """The same run, once watched and once only heard of."""
    trace = chat(30, per_s=300.0)
    schedule, cache = schedule_plan(max_tokens_per_step=40, steps_in_flight=1), cache_plan(pages=(300,))
    clock = VirtualClock(1.0)
    watched = StepLog(groups=cache.groups, slots=8)
    heard = StepLog()
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=8, clock=clock, delay_s=0.005)
    loop = EngineLoop(scheduler=scheduler, executor=watched.watching(device), clock=clock.now, sinks=(watched, heard))
    for index in range(30):
        request = request_of(trace, index, sampling=SamplingParams(temperature=0.0))
        loop.post(Add(msgspec.structs.replace(request, tokens=tuple(np.asarray(request.tokens).tolist()))))
    while loop.busy:
        loop.run_once()
    assert len(heard.steps) == len(watched.steps) > 20
    for seen, told in zip(watched.steps, heard.steps, strict=True):
        assert told.features == seen.features
        assert told.collected_s - told.decided_s == pytest.approx(0.005)
        assert told.took_s == pytest.approx(0.005), (
            "one step in flight: between submission and result there was nothing else"
        )
        assert (told.digest, seen.digest != 0) == (0, True)
    assert len(heard.requests) == 30
    one = heard.requests[0]
    assert one.output_tokens == trace.output_tokens[int(one.id)] and one.first_token_s > one.taken_s


def test_a_watched_executor_can_what_it_could() -> None:
    class Rests(ScriptedExecutor):
        prepared = False
        rested = False

        def rest(self) -> None:
            self.rested = True

    plain = ScriptedExecutor(groups=cache_plan().groups, pages=(65,), max_running=8)
    resting = Rests(groups=cache_plan().groups, pages=(65,), max_running=8)
    log = StepLog(groups=cache_plan().groups, slots=8)
    assert not isinstance(log.watching(plain), Resting)
    watched = log.watching(resting)
    assert isinstance(watched, Resting)
    watched.rest()
    assert resting.rested
    assert getattr(watched, "prepared", True) is False
    assert getattr(log.watching(plain), "prepared", True) is True
    watched.close()
    assert resting.closed


def test_logs_are_kept_in_files(tmp_path: Path) -> None:
    schedule, cache = schedule_plan(), cache_plan(pages=(300,))
    clock = VirtualClock()
    log = StepLog(groups=cache.groups, slots=8, model="m", file=tmp_path / "log", most_bytes=4000)
    whole = StepLog(groups=cache.groups, slots=8, model="m")
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=8, clock=clock, delay_s=0.005)
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    executor = whole.watching(log.watching(device))
    loop = EngineLoop(scheduler=scheduler, executor=executor, clock=clock.now, sinks=(log, whole))
    for index in range(12):
        loop.post(
            Add(Request(id=str(index), tokens=(7, 8, 9), sampling=SamplingParams(temperature=0.0), max_tokens=20))
        )
    while loop.busy:
        loop.run_once()
    log.close()
    assert (tmp_path / "log").stat().st_size <= 4200, "it began anew"
    assert (tmp_path / "log.1").stat().st_size <= 4200
    newest = read_step_log(tmp_path / "log")
    assert newest.head.model == "m"
    assert newest.steps == tuple(whole.steps)[-len(newest.steps) :]
    whole.save(tmp_path / "whole")
    loaded = read_step_log(tmp_path / "whole")
    assert loaded.steps == tuple(whole.steps) and loaded.requests == tuple(whole.requests)
    text = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(text[:-20])
    assert len(read_step_log(tmp_path / "cut").requests) == len(whole.requests) - 1, "a last line may be cut off"
    (tmp_path / "bad").write_bytes(text.replace(b'"kind":"step"', b'"kind":"stop"', 1))
    with pytest.raises(UserError, match="line 2: this is no line of a step log"):
        read_step_log(tmp_path / "bad")
    (tmp_path / "none").write_bytes(b"")
    with pytest.raises(UserError, match="no header"):
        read_step_log(tmp_path / "none")


def test_a_log_is_bounded_and_a_full_disk_stops_only_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome_log = StepLog(most=5, file=tmp_path / "log")
    writer = outcome_log._file
    assert writer is not None

    def full(record: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write", full)
    clock = VirtualClock()
    cache, schedule = cache_plan(), schedule_plan()
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=8, clock=clock, delay_s=0.005)
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    loop = EngineLoop(scheduler=scheduler, executor=device, clock=clock.now, sinks=(outcome_log,))
    loop.post(Add(Request(id="a", tokens=(7, 8, 9), sampling=SamplingParams(temperature=0.0), max_tokens=20)))
    while loop.busy:
        loop.run_once()
    assert len(outcome_log.steps) == 5
    assert "No space left" in (outcome_log.broken or "")
    outcome_log.close()


def test_the_fit_of_a_simulated_log_gives_the_model_back() -> None:
    """Simulated with one model, logged, fitted without it: the same times."""
    model = times(0.004, token_s=2e-4, context_s=1e-6)
    taken: list[tuple[Features, float]] = []
    trace = chat(120, per_s=30.0)
    simulate(
        trace,
        schedule=schedule_plan(),
        cache=cache_plan(pages=(400,)),
        times=model,
        watch=lambda replica, step, features: taken.append((features, model.device_s(features))),
    )

    class One(msgspec.Struct):
        features: Features
        took_s: float

    fitted = fit([One(f, s) for f, s in taken if f.tokens], prior=flat_prior())
    assert fitted.error_p90 is not None and fitted.error_p90 < 0.02


def test_host_times_are_read_off_a_log() -> None:
    clock = VirtualClock(1.0)
    log = StepLog(steps_in_flight=1)
    schedule, cache = schedule_plan(steps_in_flight=1), cache_plan(pages=(400,))
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=8, clock=clock, delay_s=0.005)
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    loop = EngineLoop(scheduler=scheduler, executor=device, clock=clock.now, sinks=(log,))
    for index in range(8):
        loop.post(
            Add(Request(id=str(index), tokens=(7, 8, 9), sampling=SamplingParams(temperature=0.0), max_tokens=30))
        )
    while loop.busy:
        loop.run_once()
        clock.advance(0.002)
    assert host_time_of(log.steps).loop_s == pytest.approx(0.002)


# ---------------------------------------------------------------------------------------------------------- by hand


def test_one_request_alone_takes_what_its_steps_take() -> None:
    trace = trace_of((0.0, 30, 11))
    model = times(0.010, token_s=0.001)
    got = simulate(trace, schedule=schedule_plan(steps_in_flight=1), cache=cache_plan(), times=model)
    assert got.ttft_s[0] == pytest.approx(0.010 + 30 * 0.001)
    assert got.tpot_s[0] == pytest.approx(0.011)
    assert got.e2e_s[0] == pytest.approx(0.040 + 10 * 0.011)
    assert got.generated_tokens[0] == 11 and got.steps == 11 and not got.refused
    assert got.device_busy_s == pytest.approx(got.e2e_s[0])


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_overlap_hides_the_shorter_of_host_and_device(steps_in_flight: int) -> None:
    trace = trace_of((0.0, 5, 101))
    for device_s, host_s in ((0.010, 0.004), (0.004, 0.010)):
        host = HostTime(
            decide_s=host_s / 2,
            decide_row_s=0,
            decide_enter_s=0,
            absorb_s=host_s / 4,
            absorb_row_s=0,
            loop_s=host_s / 4,
        )
        got = simulate(
            trace,
            schedule=schedule_plan(steps_in_flight=steps_in_flight),
            cache=cache_plan(),
            times=times(device_s, host=host),
        )
        each = device_s + host_s if steps_in_flight == 1 else max(device_s, host_s)
        assert got.tpot_s[0] == pytest.approx(each, rel=0.02)
    without = simulate(
        trace,
        schedule=schedule_plan(steps_in_flight=1),
        cache=cache_plan(),
        times=times(0.010, host=HostTime(decide_s=1.0)),
        options=SimulateOptions(host=False),
    )
    assert without.tpot_s[0] == pytest.approx(0.010)


def test_waiting_is_that_of_queueing_theory() -> None:
    """One slot, one step of constant length each: M/D/1, whose mean wait Pollaczek and Khinchine give as rho D / (2 (1 - rho))."""
    service_s, rho = 0.010, 0.7
    trace = poisson_trace(requests=5000, per_s=rho / service_s, prompt=(6, 0.0), output=(1, 0.0), seed=2)
    got = simulate(
        trace,
        schedule=schedule_plan(max_running=1, steps_in_flight=1),
        cache=cache_plan(prefix_cache=False),
        times=times(service_s),
    )
    expected = service_s + rho * service_s / (2 * (1 - rho))
    assert float(got.ttft_s.mean()) == pytest.approx(expected, rel=0.08)
    report = summarise(got)
    assert report.device_busy == pytest.approx(rho, rel=0.05)
    # Little's law: those who wait = arrival rate x time they wait. What runs is not counted among them.
    arrival_rate = len(trace) / trace.duration_s
    assert report.waiting_mean == pytest.approx(arrival_rate * (expected - service_s), rel=0.35)


def test_answers_that_end_before_they_must() -> None:
    trace = trace_of((0.0, 9, 5), (0.0, 9, 3), max_tokens=50)
    got = simulate(trace, schedule=schedule_plan(), cache=cache_plan(), times=times())
    assert got.generated_tokens.tolist() == [5, 3]


def test_prefixes_are_found_in_the_cache() -> None:
    lines = [
        TraceLine(arrival_s=float(i), prompt_tokens=40, output_tokens=2, blocks=(1, 2, 3, i + 10)) for i in range(4)
    ]
    trace = make_trace(lines, name="t", block_tokens=8)
    got = simulate(trace, schedule=schedule_plan(), cache=cache_plan(pages=(200,)), times=times())
    assert got.cached_tokens.tolist() == [0, 24, 24, 24]
    off = simulate(trace, schedule=schedule_plan(), cache=cache_plan(pages=(200,), prefix_cache=False), times=times())
    assert off.cached_tokens.sum() == 0
    assert summarise(got).cache_hit_rate == pytest.approx(72 / 160)


@pytest.mark.parametrize(("known", "found"), [((1, 2, 3, 4), 28), ((1, 2), 16)])
def test_a_conversation_finds_the_answers_it_goes_on_from(known: tuple[int, ...], found: int) -> None:
    """The answer's 16 tokens lie in blocks 3 and 4; the KV of its last one is never computed, so 7 pages of 4 tokens are whole."""
    lines = [
        TraceLine(arrival_s=0.0, prompt_tokens=16, output_tokens=16, blocks=known),
        TraceLine(arrival_s=9.0, prompt_tokens=40, output_tokens=16, blocks=(1, 2, 3, 4, 5)),
    ]
    trace = make_trace(lines, name="t", block_tokens=8)
    assert trace.answers_known == (len(known) > 2)
    for guesses in (0, 3):
        got = simulate(
            trace,
            schedule=schedule_plan(),
            cache=cache_plan(pages=(200,)),
            times=times(),
            options=SimulateOptions(drafts_per_row=guesses, acceptance=1.0),
        )
        assert got.cached_tokens.tolist() == [0, found]


def test_requests_that_can_never_run_are_told() -> None:
    trace = trace_of((0.0, 9, 5), (0.1, 5000, 3), (0.2, 9, 5))
    got = simulate(trace, schedule=schedule_plan(), cache=cache_plan(), times=times())
    assert list(got.refused) == [1] and "context limit" in got.refused[1]
    report = summarise(got)
    assert (report.finished, report.refused) == (2, 1)
    assert np.isnan(got.ttft_s[1])


def test_the_same_arguments_give_the_same_outcome_and_another_seed_another() -> None:
    model = msgspec.structs.replace(times(), ratios=tuple(np.linspace(0.5, 1.5, 11).tolist()))

    def run(**options: Any) -> list[float]:
        got = simulate(
            chat(),
            schedule=schedule_plan(),
            cache=cache_plan(pages=(300,)),
            times=model,
            options=SimulateOptions(**options),
        )
        return [*got.ttft_s.tolist(), *got.e2e_s.tolist()]

    assert run(seed=1) == run(seed=1)
    assert run(seed=1) != run(seed=2)
    assert run(noise=False, seed=1) == run(noise=False, seed=2)


def test_priority_is_served_first_under_its_policy() -> None:
    lines = [
        TraceLine(
            arrival_s=0.001 * i,
            prompt_tokens=20,
            output_tokens=10,
            priority=i % 2,
            traffic_class="low" if i % 2 else "high",
        )
        for i in range(60)
    ]
    trace = make_trace(lines, name="t", block_tokens=4)
    high = trace.priority == 0

    def ttft(policy: Any) -> float:
        got = simulate(trace, schedule=schedule_plan(policy=policy), cache=cache_plan(pages=(300,)), times=times())
        return float(got.ttft_s[high].mean())

    assert ttft("priority") < 0.7 * ttft("arrival")


def test_right_guesses_shorten_answers() -> None:
    trace = trace_of((0.0, 9, 81))
    for acceptance, steps in ((1.0, 1 + 20), (0.0, 81)):
        got = simulate(
            trace,
            schedule=schedule_plan(),
            cache=cache_plan(),
            times=times(),
            options=SimulateOptions(drafts_per_row=3, acceptance=acceptance),
        )
        assert got.generated_tokens[0] == 81
        assert got.steps == steps


def test_times_between_tokens_are_counted_in_a_histogram() -> None:
    got = simulate(chat(), schedule=schedule_plan(steps_in_flight=1), cache=cache_plan(pages=(300,)), times=times(0.02))
    report = summarise(got)
    assert report.itl_s.p50 == pytest.approx(0.02, rel=0.05)
    assert got.gaps.sum() == (got.generated_tokens - 1).sum()


def test_steps_outside_the_fit_are_counted() -> None:
    high = Features(tokens=10, rows=8, prefill_tokens=10, decode_context=10**6, prefill_context=10**6, logit_rows=8)
    model = msgspec.structs.replace(times(), steps=100, low=Features(tokens=1), high=high)
    report = summarise(simulate(chat(), schedule=schedule_plan(), cache=cache_plan(pages=(300,)), times=model))
    assert 0 < report.untrusted_steps < 1
    assert report.untrusted_why.endswith("fitted up to 10")


# ---------------------------------------------------------------------------------------------------------------- fleets


def test_replicas_behind_a_round_are_engines_of_their_own() -> None:
    trace = chat(90, per_s=60.0, prefixes=5, prefix_blocks=2)
    plans: dict[str, Any] = {"schedule": schedule_plan(), "cache": cache_plan(pages=(120,))}
    model = times(0.006, token_s=1e-4, host=HostTime())
    fleet = simulate(trace, times=model, options=SimulateOptions(replicas=3), **plans)
    for place in range(3):
        which = np.arange(place, len(trace), 3)
        alone = simulate(trace.select(which), times=model, **plans)
        shift = float(trace.arrival_s[which[0]])
        assert np.allclose(alone.ttft_s, fleet.ttft_s[which], atol=1e-9), shift
        assert np.allclose(alone.e2e_s, fleet.e2e_s[which], atol=1e-9)
        assert np.array_equal(alone.cached_tokens, fleet.cached_tokens[which])
    assert fleet.replica.tolist() == [i % 3 for i in range(len(trace))]


def test_prefix_aware_routing_finds_more_and_stays_within_its_bound() -> None:
    trace = chat(300, per_s=60.0, prompt=(8, 0.3), prefixes=24, prefix_blocks=12)
    plans: dict[str, Any] = {
        "schedule": schedule_plan(),
        "cache": cache_plan(pages=(160,)),
        "times": times(0.004, token_s=2e-4),
    }

    def run(router: str) -> SimulationReport:
        return summarise(simulate(trace, options=SimulateOptions(replicas=4, router=router), **plans))

    aware, around, least = run("prefix_aware"), run("round_robin"), run("least_load")
    assert aware.cache_hit_rate > 1.3 * max(around.cache_hit_rate, least.cache_hit_rate)
    assert aware.ttft_s.p50 is not None and around.ttft_s.p50 is not None
    assert aware.ttft_s.p50 < around.ttft_s.p50
    assert aware.load_spread < 2.0
    assert all(report.finished == len(trace) for report in (aware, around, least))


def test_a_fleet_of_hundreds_is_one_simulation() -> None:
    """More engines than requests at a time: each one's clock is its own, prefixes stay together, and idle ones cost nothing."""
    trace = chat(600, per_s=1200.0, prompt=(8, 0.3), prefixes=60, prefix_blocks=8)
    plans: dict[str, Any] = {"schedule": schedule_plan(), "cache": cache_plan(pages=(160,)), "times": times(0.004)}

    def run(router: str) -> SimulationReport:
        return summarise(simulate(trace, options=SimulateOptions(replicas=256, router=router), **plans))

    aware, least = run("prefix_aware"), run("least_load")
    assert aware.finished == least.finished == len(trace)
    assert aware.cache_hit_rate > 1.5 * least.cache_hit_rate
    again = msgspec.structs.replace(run("prefix_aware"), simulated_requests_per_s=aware.simulated_requests_per_s)
    assert again == aware, "same arguments, same fleet"


def test_least_load_beats_a_round_where_lengths_differ_much() -> None:
    trace = chat(300, per_s=60.0, output=(12, 1.4), longest_output=200)
    plans: dict[str, Any] = {
        "schedule": schedule_plan(max_running=4),
        "cache": cache_plan(pages=(400,)),
        "times": times(0.006),
    }
    p99 = [
        summarise(simulate(trace, options=SimulateOptions(replicas=4, router=router), **plans)).ttft_s.p99
        for router in ("least_load", "round_robin")
    ]
    assert p99[0] is not None and p99[1] is not None and p99[0] < 0.8 * p99[1]


def test_the_prefix_aware_router_by_hand() -> None:
    router = PrefixAware(replicas=3, cache_tokens=64, load_bound=1.25)

    def ids(*blocks: int) -> Any:
        return np.array(blocks, np.int32)

    assert router.choose(ids(1, 2), block_tokens=16) == 0
    router.sent(0, ids(1, 2), block_tokens=16, tokens=40)
    assert router.choose(ids(3), block_tokens=16) == 1, "unknown: to the least loaded"
    router.sent(1, ids(1, 9), block_tokens=16, tokens=10)
    router.ended(0, tokens=40)
    assert router.choose(ids(1, 2, 7), block_tokens=16) == 0, "the longest match"
    for _ in range(5):
        assert router.choose(ids(1, 2, 7), block_tokens=16) == 0
        router.sent(0, ids(1, 2), block_tokens=16, tokens=1)
    # 5 of 6 open requests are there, the bound is 1.25 * 7 / 3 + 2 = 4.9.
    assert router.choose(ids(1, 2, 7), block_tokens=16) == 2, "that one is too busy"
    router.sent(0, ids(10, 11, 12, 13), block_tokens=16, tokens=1)
    for _ in range(6):
        router.ended(0, tokens=1)
    router.ended(1, tokens=10)
    assert router.choose(ids(1, 2), block_tokens=16) == 1, "replica 0 has forgotten what no longer fits into its cache"
    assert 2 not in router._where
    router.sent(2, ids(20, 21, 22, 23, 24), block_tokens=16, tokens=1)
    assert router._where.get(24) is None and router._where[20] == {2}, "the end is forgotten before the beginning"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"replicas": 0}, "0 replicas cannot serve"),
        ({"router": "magic"}, "no router 'magic', only least_load, prefix_aware"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        simulate(
            chat(3), schedule=schedule_plan(), cache=cache_plan(), times=times(), options=SimulateOptions(**options)
        )


# --------------------------------------------------------------------------------------------------------------- reports


def outcome() -> Outcome:
    lines = [
        TraceLine(
            arrival_s=0.05 * i,
            prompt_tokens=20,
            output_tokens=6,
            traffic_class=("chat", "bulk")[i % 2],
            tenant=f"t{i % 3}",
        )
        for i in range(30)
    ]
    trace = make_trace(lines, name="mixed", block_tokens=4)
    return simulate(trace, schedule=schedule_plan(), cache=cache_plan(), times=times(0.01))


def test_the_report_adds_up() -> None:
    got = outcome()
    report = summarise(got)
    assert report.requests == report.finished == 30
    assert sum(row.requests for row in report.classes) == sum(row.requests for row in report.tenants) == 30
    assert {row.name for row in report.classes} == {"chat", "bulk"}
    assert report.ttft_s.p50 == pytest.approx(float(np.median(got.ttft_s)))
    assert report.duration_s == pytest.approx(float(got.finish_s.max()))
    assert report.output_tokens_per_s == pytest.approx(180 / report.duration_s)
    assert report.requests_per_s == pytest.approx(30 / report.duration_s)
    again = msgspec.json.decode(report.json(), type=SimulationReport)
    assert again == report


def test_an_empty_outcome_has_a_report() -> None:
    trace = trace_of((0.0, 5000, 3))
    report = summarise(simulate(trace, schedule=schedule_plan(), cache=cache_plan(), times=times()))
    assert report.finished == 0 and report.ttft_s.p50 is None and report.requests_per_s == 0
    assert "was refused" in text_of(report) or "were refused" in text_of(report)


def text_of(report: SimulationReport) -> str:
    from rich.console import Console

    console = Console(width=140)
    with console.capture() as captured:
        console.print(report_text(report))
    return captured.get()


def test_the_report_is_shown() -> None:
    text = text_of(summarise(outcome()))
    for word in ("mixed: 30 requests", "TTFT", "TPOT", "By class", "chat", "bulk", "By tenant", "p99", "preemptions"):
        assert word in text, word
    assert "not trustworthy here: nothing was fitted" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0.00 us"),
        (3.4e-5, "34.0 us"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (2.0, "2.00 s"),
        (314.2, "314 s"),
    ],
)
def test_times_are_shown_with_three_digits(seconds: float | None, text: str) -> None:
    assert show_s(seconds) == text


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(summarise(outcome()), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MissingExtraError, match=r"tradewind\[plot\]"):
        draw(summarise(outcome()), tmp_path / "p.png")


def test_series_join_neighbours_instead_of_growing() -> None:
    series = Series(("a",), points=4)
    for second in range(100):
        series.add(float(second), second + 1.0, (float(second),))
    at, means = series.columns()
    assert len(at) <= 8
    assert series.width_s == 16.0
    assert float((means[:, 0] * np.diff([0.0, *np.minimum(at, 100)])).sum()) == pytest.approx(sum(range(100)), rel=0.05)


# ----------------------------------------------------------------------------------------------------------- the command


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["simulate", *words])
    code: int = arguments.run(arguments)
    return code


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    plan = resolve(Goals(model="smollm2", max_context=2048), SMOLLM2, machine())
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    write_trace(chat(40, prefixes=3, prefix_blocks=4), tmp_path / "trace.jsonl")
    return tmp_path / "plan.json", tmp_path / "trace.jsonl"


def test_the_command(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plan, trace = map(str, files)
    model, out, picture = (str(tmp_path / name) for name in ("times.json", "report.json", "p.png"))
    assert command(trace, "--plan", plan, "--save-times", model, "--out", out, "--plot", picture) == 0
    shown = capsys.readouterr().out
    assert "trace.jsonl: 40 requests" in shown and "TTFT" in shown
    assert json.loads(Path(out).read_text())["finished"] == 40
    assert Path(picture).stat().st_size > 1000
    assert (
        command(trace, "--plan", plan, "--times", model, "--replicas", "3", "--requests", "30", "--rate", "2", "--json")
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["replicas"], report["router"]) == (30, 3, "prefix_aware")


def test_the_command_fits_a_step_log(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = VirtualClock(1.0)
    log = StepLog(steps_in_flight=1)
    schedule, cache = schedule_plan(steps_in_flight=1), cache_plan(pages=(400,))
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=8, clock=clock, delay_s=0.05)
    loop = EngineLoop(
        scheduler=Scheduler(schedule=schedule, cache=cache, clock=clock.now),
        executor=device,
        clock=clock.now,
        sinks=(log,),
    )
    for index in range(8):
        loop.post(
            Add(Request(id=str(index), tokens=(7, 8, 9), sampling=SamplingParams(temperature=0.0), max_tokens=30))
        )
    while loop.busy:
        loop.run_once()
    log.save(tmp_path / "steps.jsonl")
    plan, trace = map(str, files)
    assert command(trace, "--plan", plan, "--times", str(tmp_path / "steps.jsonl")) == 0
    shown = capsys.readouterr().out
    assert "fitted on" in shown
    assert "lie outside what the step times were fitted to" in shown


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{trace}", "--plan", "{plan}", "--rate", "0"], "--rate is 0"),
        (["{trace}", "--plan", "{plan}", "--requests", "0"], "--requests is 0"),
        (["{trace}", "--plan", "{plan}", "--model", "x"], "leave one out"),
        (["{trace}", "--plan", "{plan}", "--acceptance", "2"], "a probability"),
        (["{trace}", "--plan", "{trace}"], "is no plan"),
        (["{trace}", "--plan", "none.json"], "none.json cannot be read"),
        (["none.jsonl", "--plan", "{plan}"], "none.jsonl cannot be read"),
        (["{trace}", "--plan", "{plan}", "--times", "none"], "the step times none cannot be read"),
        (["{trace}", "--plan", "{plan}", "--times", "{trace}"], "is not a step-time model"),
        (["{trace}", "--plan", "{plan}", "--replicas", "0"], "0 replicas"),
    ],
)
def test_the_command_refuses_with_one_sentence(files: tuple[Path, Path], words: list[str], why: str) -> None:
    plan, trace = map(str, files)
    with pytest.raises(UserError) as refused:
        command(*(word.format(plan=plan, trace=trace) for word in words))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
