"""What a plan will cost on a trace, in the four goals: latency with the attainment of each class, throughput, memory, quality.

Knows: which class a traced request belongs to, and how a simulated outcome is judged. Refuses to know: how plans are chosen, and files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from tradewind.config.choices import QUALITY_LOSS_PERCENT
from tradewind.config.goals import Goals
from tradewind.config.plan import Plan, SchedulePlan
from tradewind.config.targets import class_of_request, computing
from tradewind.contract.request import SamplingParams
from tradewind.contract.step import Ints
from tradewind.engine.loop import Add
from tradewind.engine.pacing import StepSeconds
from tradewind.observability.attainment import ClassReport, Share, Targets, Timed, attainment, wilson
from tradewind.simulate.features import Features
from tradewind.simulate.outcome import Outcome
from tradewind.simulate.report import Spread
from tradewind.simulate.simulator import Replica, SimulateOptions, request_of
from tradewind.simulate.steptime import StepTime, roofline
from tradewind.simulate.trace_columns import Trace

DEFAULT_RATE_S = 2.0
"""Requests per second of a made-up trace where the goals name none."""
SPREAD_OF_LENGTHS = 0.5
"""Sigma of the log-normal lengths of a made-up trace."""


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's predicted price in the four goals. Times in seconds."""

    requests: int
    finished: int
    refused: int
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    classes: tuple[ClassReport, ...]
    """Attainment by class, against the goals' targets, whatever targets the plan was made for."""
    attained: Share | None
    """All requests of classes with targets; None where no class has any."""
    output_tokens_per_s: float
    makespan_s: float
    memory_bytes: int
    """All lines of the ledger."""
    quality_loss_percent: float
    untrusted_steps: float
    """Part of the steps outside what the step times were fitted to; 1 for a roofline."""
    step_times: str


def step_seconds_of(times: StepTime) -> StepSeconds:
    """The model as the pacer asks for it."""

    def seconds(*, rows: int, context: int, chunk: int, start: int) -> float:
        return times.device_s(
            Features(
                tokens=rows + chunk,
                rows=rows + (chunk > 0),
                prefill_tokens=chunk,
                decode_context=context,
                prefill_context=chunk * start + chunk * (chunk + 1) // 2,
                prefill_rows=1 if chunk else 0,
                prefill_keys=start + chunk if chunk else 0,
                logit_rows=rows + (chunk > 0),
            )
        )

    return seconds


def planned_times(plan: Plan) -> StepTime:
    """The roofline of a plan, with the speed of the way it computes; where nothing was measured."""
    machine = computing(plan.hardware, compute=plan.numerics.compute)
    return roofline(msgspec.structs.replace(plan, hardware=machine))


def classified(trace: Trace, goals: Goals) -> Trace:
    """The trace with the goals' classes: by the recorded name, or else by tenant and priority. Those of no class keep theirs."""
    known = {one.name for one in goals.classes}
    names: dict[str, int] = {}
    column = np.zeros(len(trace), np.int32)
    seen: dict[tuple[int, int, int], int] = {}
    for index in range(len(trace)):
        key = (int(trace.traffic_class[index]), int(trace.tenant[index]), int(trace.priority[index]))
        if key not in seen:
            name = trace.classes[key[0]]
            if name not in known:
                name = (
                    class_of_request(goals.classes, tenant=trace.tenants[key[1]], priority=key[2], model=goals.model)
                    or name
                )
            seen[key] = names.setdefault(name, len(names))
        column[index] = seen[key]
    return replace(trace, traffic_class=column, classes=tuple(names) or ("",))


def run_classes(
    trace: Trace,
    *,
    plan: Plan,
    times: StepTime,
    options: SimulateOptions | None = None,
    schedule: SchedulePlan | None = None,
) -> Outcome:
    """Runs a trace whose classes are known through one engine. Same arguments, same outcome."""
    options = options or SimulateOptions()
    outcome = Outcome.empty(trace)
    outcome.times = times.described()
    replica = Replica(
        schedule=schedule or plan.schedule, cache=plan.cache, times=times, outcome=outcome, options=options
    )
    if (schedule or plan.schedule).fit_steps:  # what a running engine would have learnt
        replica.scheduler.pace_by(step_seconds_of(times))
    sampling = SamplingParams(temperature=0.0)
    for index in range(len(trace)):
        now = float(trace.arrival_s[index])
        while replica.busy and replica.clock.now() < now:
            replica.turn()
        replica.wake(now)
        request = request_of(trace, index, sampling=sampling)
        name = trace.classes[trace.traffic_class[index]]
        replica.loop.post(Add(msgspec.structs.replace(request, traffic_class=name)))
    while replica.busy:
        replica.turn()
    replica.loop.close()
    outcome.device_busy_s = replica.executor.busy_s
    outcome.gaps += replica.executor.gaps
    outcome.recomputed_tokens = replica.scheduler.recomputed_tokens
    outcome.end_s = replica.clock.now()
    return outcome


def targets_of(goals: Goals) -> Targets:
    """The goals' targets as attainment wants them."""
    out: dict[str, dict[str, float]] = {}
    for one in goals.classes:
        own = {
            "ttft": one.ttft_ms if one.ttft_ms is not None else goals.ttft_ms,
            "tpot": one.tpot_ms if one.tpot_ms is not None else goals.tpot_ms,
            "e2e": one.e2e_ms,
        }
        stated = {metric: ms / 1000 for metric, ms in own.items() if ms is not None}
        if stated:
            out[one.name] = stated
    return out


def price_of(outcome: Outcome, *, plan: Plan, goals: Goals) -> Price:
    """Judges an outcome by the goals; changes nothing."""
    trace = outcome.trace
    ttft, tpot, e2e = outcome.ttft_s, outcome.tpot_s, outcome.e2e_s
    failed = np.isnan(outcome.finish_s)
    timed = [
        Timed(
            traffic_class=trace.classes[trace.traffic_class[index]],
            ttft_s=_number(ttft[index]),
            tpot_s=_number(tpot[index]),
            e2e_s=_number(e2e[index]),
            failed=bool(failed[index]),
        )
        for index in range(len(trace))
    ]
    targets = targets_of(goals)
    reports = attainment(timed, targets)
    judged = [one.attained for one in reports if one.attained is not None]
    finished = int((~failed).sum())
    makespan = float(np.nanmax(outcome.finish_s)) if finished else 0.0
    return Price(
        requests=len(trace),
        finished=finished,
        refused=len(outcome.refused),
        ttft_s=Spread.of(ttft),
        tpot_s=Spread.of(tpot),
        e2e_s=Spread.of(e2e),
        classes=reports,
        attained=wilson(sum(one.met for one in judged), sum(one.of for one in judged)) if judged else None,
        output_tokens_per_s=int(outcome.generated_tokens.sum()) / makespan if makespan else 0.0,
        makespan_s=makespan,
        memory_bytes=sum(line.bytes for line in plan.ledger),
        quality_loss_percent=QUALITY_LOSS_PERCENT.get(plan.numerics.compute, 0.0),
        untrusted_steps=outcome.untrusted_steps / max(1, outcome.steps),
        step_times=outcome.times,
    )


def forecast(
    trace: Trace, *, plan: Plan, goals: Goals, times: StepTime, options: SimulateOptions | None = None
) -> Price:
    """Simulates a trace under a plan and judges it by the goals."""
    return price_of(
        run_classes(classified(trace, goals), plan=plan, times=times, options=options), plan=plan, goals=goals
    )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


# -------------------------------------------------------------------------------------------------------------- made up


def trace_of(
    goals: Goals, *, requests: int = 300, seed: int = 0, burst: float = 1.0, spread: float = SPREAD_OF_LENGTHS
) -> Trace:
    """A made-up trace of the classes' shares and typical lengths: random arrivals, log-normal lengths, fixed by its seed.

    burst: coefficient of variation of the time between arrivals, which are gamma distributed; 1 is Poisson, more comes in bursts.
    spread: sigma of the logarithm of lengths.
    """
    draw = np.random.default_rng(seed)
    classes = goals.classes
    names = tuple(one.name for one in classes) or ("",)
    share = np.array(shares_of([one.share for one in classes])) if classes else np.ones(1)
    which = draw.choice(len(names), size=requests, p=share / share.sum()).astype(np.int32)
    gap_s = 1 / (goals.requests_per_s or DEFAULT_RATE_S)
    shape = 1 / burst**2
    arrival = np.cumsum(draw.exponential(gap_s, requests) if burst == 1 else draw.gamma(shape, gap_s / shape, requests))

    def lengths(typical: Callable[[int], int]) -> Ints:
        medians = np.array([typical(place) for place in range(len(names))], dtype=np.float64)[which]
        drawn = np.rint(medians * np.exp(draw.normal(0.0, spread, requests)))
        out: Ints = np.maximum(1, drawn).astype(np.int32)
        return out

    prompt = lengths(lambda place: classes[place].prompt_tokens if classes else 256)
    output = lengths(lambda place: classes[place].output_tokens if classes else 128)
    if goals.max_context is not None:
        prompt = np.minimum(prompt, max(1, goals.max_context * 3 // 4)).astype(np.int32)
        output = np.minimum(output, goals.max_context - prompt).astype(np.int32)
    zeros = np.zeros(requests, np.int32)
    return Trace(
        name="made up from the goals",
        arrival_s=arrival - arrival[0],
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output,
        priority=zeros,
        tenant=zeros,
        traffic_class=which,
        tenants=("",),
        classes=names,
        block_tokens=64,
        blocks=np.zeros(0, np.int32),
        block_start=np.zeros(requests + 1, np.int64),
    )


def shares_of(stated: Sequence[float | None]) -> list[float]:
    """The shares of classes; those that state none have equal parts of what the others leave."""
    left = max(0.0, 1.0 - sum(share or 0.0 for share in stated))
    unstated = sum(share is None for share in stated)
    return [left / unstated if share is None else share for share in stated]
