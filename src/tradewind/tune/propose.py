"""The next plan, when traffic has left what the last one was made for: candidates, simulated on the newest traffic, the best kept.

Knows: which plans are worth trying and when another one is worth the change. Refuses to know: how drift is noticed (observability.drift)
and how a plan is put into service (tune.guard, serving.replan).

A proposal is a plan and the goals that make it: whoever plans anew for these, where the machine may have another amount of free memory,
gets the same choices with true reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from tradewind.config.card import ModelCard
from tradewind.config.goals import Goals
from tradewind.config.habits import HABITS
from tradewind.config.hardware import Hardware
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError
from tradewind.observability.attainment import Timed, attainment
from tradewind.observability.drift import Arrival, Drift, Envelope
from tradewind.simulate.forecast import run_classes
from tradewind.simulate.outcome import Outcome
from tradewind.simulate.simulator import SimulateOptions
from tradewind.simulate.steptime import StepTime
from tradewind.simulate.trace_columns import Trace, TraceLine, make_trace
from tradewind.tune.trial import Try
from tradewind.tune.variants import times_for, values_of
from tradewind.tune.whatif import Targets, simulated

WORTH = 0.02
"""Part of the requests by which attainment must rise for a change of plan ..."""
FASTER = 0.9
"""... or, where it does not, how much less of their times the requests must need ..."""
ENOUGH = 0.9
"""... which in service counts only where fewer than this meet their targets: a change of plan is not for nothing."""
BLOCK = 16
ANSWERS = (
    "backend", "compute", "deterministic", "graphs", "kv_format", "load_format", "page_tokens", "policy", "prefix_cache",
    "quantization", "tape", "threads",
)  # fmt: skip
"""What a plan in service keeps: what answers, or who comes first, depend on."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about a drift."""

    plan: Plan
    """The plan in force where none is worth the change."""
    goals: Goals
    """What this plan is planned from."""
    changed: bool
    differs: tuple[str, ...]
    """What the new plan chooses otherwise, one text each: "max_running 64 -> 128"."""
    tries: tuple[Try, ...]
    """The plan in force first."""
    why: str


def arrivals_of(outcome: Outcome) -> list[Arrival]:
    """A simulated (or replayed) trace as a guard sees requests: the envelope of a plan is made of them."""
    trace = outcome.trace
    return [
        Arrival(
            at_s=float(trace.arrival_s[index]),
            prompt_tokens=int(trace.prompt_tokens[index]),
            output_tokens=int(trace.output_tokens[index]),
            cached_tokens=int(outcome.cached_tokens[index]),
        )
        for index in range(len(trace))
    ]


def envelope_of(trace: Trace, plan: Plan, *, times: StepTime) -> Envelope:
    """What is usual where this plan serves this trace. Raises UserError for too short a trace."""
    run = simulated(trace, plan, times=times, options=SimulateOptions())
    return Envelope.of(arrivals_of(run.outcome))


def trace_of(recent: Sequence[Arrival], *, name: str = "newest traffic") -> Trace:
    """Traffic that a guard has kept, as a trace: what was found in the cache is taken to be one common beginning of that length."""
    lines = [
        TraceLine(
            arrival_s=one.at_s,
            prompt_tokens=max(1, one.prompt_tokens),
            output_tokens=max(1, one.output_tokens),
            blocks=tuple(range(one.cached_tokens // BLOCK)),
            traffic_class=one.traffic_class,
        )
        for one in sorted(recent, key=lambda one: one.at_s)
    ]
    if not lines:
        raise UserError("no request has ended yet, so there is no traffic to plan for")
    lines = [msgspec.structs.replace(line, arrival_s=line.arrival_s - lines[0].arrival_s) for line in lines]
    return make_trace(lines, name=name, block_tokens=BLOCK)


def candidates(
    goals: Goals, card: ModelCard, hardware: Hardware, *, plan: Plan, in_service: bool = False
) -> Iterator[tuple[str, Goals, Plan]]:
    """Plans worth trying: of every scenario, and with half and twice the slots and the step of the one in force. Pins are kept.

    `in_service`: only such as clients notice by nothing but time; how answers are computed, the longest context and who comes first stay.
    """
    means = goals.means
    tried: list[tuple[str, Goals]] = [
        (f"scenario {scenario}", msgspec.structs.replace(goals, scenario=scenario)) for scenario in sorted(HABITS)
    ]
    for name in ("max_running", "max_tokens_per_step"):
        if getattr(means, name) is not None:
            continue
        for times in (0.5, 2.0):
            value = max(1, int(getattr(plan.schedule, name) * times))
            other = "max_tokens_per_step" if name == "max_running" else "max_running"
            pins = {name: value, other: getattr(plan.schedule, other)}
            tried.append(
                (f"{name} {value}", msgspec.structs.replace(goals, means=msgspec.structs.replace(means, **pins)))
            )
    if in_service:
        tried.sort(key=lambda one: one[0].startswith("scenario"))  # of two that are as good the smaller change is taken
    seen = [(plan.schedule, plan.cache, plan.numerics)]
    for label, asked in tried:
        try:
            made = resolve(asked, card, hardware)
            if in_service:
                asked = _as_in_service(asked, made, plan=plan)
                made = resolve(asked, card, hardware)
        except UserError:
            continue
        if in_service and _as_in_service(asked, made, plan=plan) != asked:
            continue
        key = (made.schedule, made.cache, made.numerics)
        if key not in seen:
            seen.append(key)
            yield label, asked, made


def _as_in_service(asked: Goals, made: Plan, *, plan: Plan) -> Goals:
    """The same goals with those choices pinned that would be others than the plan's in force and may not be."""
    here, there = values_of(plan), values_of(made)
    pins = {name: here[name] for name in ANSWERS if here[name] != there[name]}
    context = plan.schedule.max_context
    return msgspec.structs.replace(
        asked,
        max_context=asked.max_context if made.schedule.max_context == context else context,
        means=msgspec.structs.replace(asked.means, **pins),
    )


def propose(
    goals: Goals,
    plan: Plan,
    recent: Trace,
    *,
    times: StepTime,
    targets: Targets,
    drift: Drift | None = None,
    in_service: bool = False,
    told: Callable[[str], None] = lambda what: None,
) -> Proposal:
    """Simulates the newest traffic under the plan in force and every candidate, and takes the best when that is worth a change."""
    best: tuple[Goals, Plan, Try] | None = None
    tries: list[Try] = []
    others = candidates(goals, plan.card, plan.hardware, plan=plan, in_service=in_service)
    for name, asked, made in (("as it is", goals, plan), *others):
        told(name)
        outcome = run_classes(recent, plan=made, times=times_for(made, plan=plan, times=times))
        one = _tried(name, outcome, targets)
        tries.append(one)
        if best is None or _better(one, best[2], by=0.0):
            best = asked, made, one
    assert best is not None
    now, (asked, made, one) = tries[0], best
    because = f" after {drift.described()}" if drift is not None else ""
    for_time_alone = one.attained <= now.attained + WORTH
    if made is plan or not _better(one, now, by=WORTH) or (in_service and for_time_alone and now.attained >= ENOUGH):
        why = f"the plan in force stays{because}: {_words(now)}, and no other plan does clearly better"
        return Proposal(plan=plan, goals=goals, changed=False, differs=(), tries=tuple(tries), why=why)
    why = f"{one.name}{because}: {_words(one)}; under the plan in force {_words(now)}"
    return Proposal(plan=made, goals=asked, changed=True, differs=differences(plan, made), tries=tuple(tries), why=why)


def differences(was: Plan, becomes: Plan) -> tuple[str, ...]:
    """What two plans choose differently, one text each."""
    old = {reason.choice: reason.value for reason in was.reasons}
    return tuple(
        f"{reason.choice} {old.get(reason.choice, '-')} -> {reason.value}"
        for reason in becomes.reasons
        if reason.value != old.get(reason.choice)
    )


def timed_of(outcome: Outcome) -> list[Timed]:
    """A simulated outcome as attainment judges requests."""

    def some(value: float) -> float | None:
        return None if math.isnan(value) else float(value)

    trace = outcome.trace
    return [
        Timed(
            traffic_class=trace.classes[trace.traffic_class[index]],
            ttft_s=some(outcome.ttft_s[index]),
            tpot_s=some(outcome.tpot_s[index]),
            e2e_s=some(outcome.e2e_s[index]),
            failed=bool(np.isnan(outcome.finish_s[index])),
        )
        for index in range(len(trace))
    ]


def attained(requests: Sequence[Timed], targets: Mapping[str, Mapping[str, float]]) -> float:
    """Part of all requests that met the targets of their class; one without any has met them."""
    reports = attainment(requests, targets)
    met = sum(one.requests if one.attained is None else one.attained.met for one in reports)
    return met / max(1, len(requests))


def _tried(name: str, outcome: Outcome, targets: Targets) -> Try:
    def p90(values: np.ndarray) -> float:
        own = values[~np.isnan(values)]
        return float(np.quantile(own, 0.9)) if len(own) else math.inf

    return Try(
        name=name,
        attained=attained(timed_of(outcome), targets),
        ttft_p90_s=p90(outcome.ttft_s),
        tpot_p90_s=p90(outcome.tpot_s),
    )


def _better(one: Try, other: Try, *, by: float) -> bool:
    """More requests meet their targets; or as many, in clearly less time."""
    if one.attained > other.attained + by:
        return True
    if one.attained < other.attained:
        return False
    ratio = (max(one.ttft_p90_s, 1e-9) / max(other.ttft_p90_s, 1e-9)) * (
        max(one.tpot_p90_s, 1e-9) / max(other.tpot_p90_s, 1e-9)
    )
    return ratio < (FASTER if by else 1.0)


def _words(one: Try) -> str:
    return (
        f"{100 * one.attained:.1f} % of the requests meet their targets (p90 TTFT {1e3 * one.ttft_p90_s:.0f} ms, "
        f"TPOT {1e3 * one.tpot_p90_s:.1f} ms)"
    )
