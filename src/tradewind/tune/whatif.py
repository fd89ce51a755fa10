"""What would become of a user's traffic if it, or the engine, were otherwise: attainment, what breaks first, how far it is until then.

Knows: how traffic and plan are changed, and what it means to break. Refuses to know: how time passes (simulate) and what an engine lacks
(observability.strain).

      trace --- rate, lengths ---> trace'  \\
      plan  --- memory, replicas -> plan'   >--- simulation ---> attainment, strain ---> what broke
                                            |
      headroom: the same, at more and more traffic until it breaks, and what broke there
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tradewind.config.kv_sizing import sequence_pages
from tradewind.config.plan import Plan
from tradewind.config.sizes import show_bytes
from tradewind.contract.errors import LimitError, UserError
from tradewind.observability.attainment import EVERY, ClassReport, Share, Timed, attainment, percentile, wilson
from tradewind.observability.strain import Resource, Strain, StrainReport, summed
from tradewind.simulate.outcome import Outcome
from tradewind.simulate.simulator import SimulateOptions, simulate_plan
from tradewind.simulate.steptime import StepTime
from tradewind.simulate.trace_columns import Trace

Targets = dict[str, dict[str, float]]

ENOUGH = 0.9
"""Part of the requests that has to meet its targets; below that it is broken."""
MOST, LEAST = 64.0, 1 / 64
"""How far traffic is raised or lowered to find where it breaks."""
HALVINGS = 4
"""The last step is a factor of 2; each halving takes the root of it: 2, 1.41, 1.19, 1.09, 1.04."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What is otherwise. Factors of 1 change nothing."""

    rate: float = 1.0
    prompt: float = 1.0
    output: float = 1.0
    replicas: int | None = None
    memory_bytes: int | None = None
    """Ceiling of one engine; None: as planned."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two that are compared."""

    requests: int
    refused: int
    replicas: int
    pages: tuple[int, ...]
    attained: Share
    """Of all requests, by the targets of their classes."""
    classes: tuple[ClassReport, ...]
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    output_tokens_per_s: float
    strain: StrainReport
    holds: bool
    """Enough requests meet their targets."""

    @property
    def binding(self) -> Resource:
        return self.strain.binding


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """How much traffic the changed engine takes, as a factor of the changed traffic."""

    holds_at: float | None
    """The most that held; None when nothing did."""
    breaks_at: float | None
    """The least that did not; None when everything held."""
    breaks: Resource | None
    """What was short there."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    trace: str
    step_times: str
    targets: Targets
    targets_are: str
    change: Change
    today: Side
    then: Side
    headroom: Headroom | None
    untrusted_steps: float
    """Part of the changed simulation's steps outside what the step times were fitted to."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A simulation with what the engines lacked."""

    outcome: Outcome
    strain: StrainReport


# --------------------------------------------------------------------------------------------------------------- change


def factor(text: str, *, name: str) -> float:
    """A factor as it is written: x2, 2x, 1.3, 150%, +20%, -10%. Raises UserError."""
    found = re.fullmatch(r"\s*(?:x\s*)?([+-]?)(\d+(?:\.\d*)?|\.\d+)\s*(x|%)?\s*", text)
    value = math.nan
    if found is not None:
        sign, number, unit = found[1], float(found[2]), found[3]
        if unit == "%":
            value = 1 + (-number if sign == "-" else number) / 100 if sign else number / 100
        elif not sign:
            value = number
    if not (math.isfinite(value) and 0 < value <= 1e6):
        raise UserError(f"{name} is {text!r}; write a factor such as x2, 1.3, +20% or -10%")
    return value


def count(text: str, *, name: str, now: int) -> int:
    """A number of replicas as it is written: 4, +1, -1, x2. Raises UserError."""
    found = re.fullmatch(r"\s*([+x-]?)(\d+)\s*", text)
    if found is None:
        raise UserError(f"{name} is {text!r}; write a number such as 4, or a change such as +1, -1 or x2")
    value = int(found[2])
    value = {"": value, "+": now + value, "-": now - value, "x": now * value}[found[1]]
    if not 1 <= value <= 4096:
        raise UserError(f"{name} {text} makes {value} of {now}; there must be 1 to 4096")
    return value


def changed_trace(trace: Trace, change: Change) -> Trace:
    """The same requests, faster and longer."""
    return trace.speed_up(change.rate).longer(prompt=change.prompt, output=change.output)


def with_memory(plan: Plan, memory_bytes: int | None) -> Plan:
    """The plan with as many pages as another ceiling leaves. Raises LimitError when one sequence would not fit."""
    if memory_bytes is None:
        return plan
    fixed = sum(line.bytes for line in plan.ledger if not line.name.startswith("KV"))
    groups, pages = plan.cache.groups, plan.cache.pages
    own = sum(group.bytes_per_page * count for group, count in zip(groups, pages, strict=True))
    part = (memory_bytes - fixed) / own
    schedule = plan.schedule
    least = [
        1 + sequence_pages(group, tokens=schedule.max_context, max_tokens_per_step=schedule.max_tokens_per_step)
        for group in groups
    ]
    made = [math.floor(count * part) for count in pages]
    if any(have < need for have, need in zip(made, least, strict=True)):
        need = fixed + sum(group.bytes_per_page * count for group, count in zip(groups, least, strict=True))
        raise LimitError(
            f"{show_bytes(memory_bytes)} do not hold one sequence of {schedule.max_context} tokens beside {show_bytes(fixed)} of "
            f"weights and work space: give at least {show_bytes(need)}, or plan a shorter context"
        )
    ledger = []
    for line in plan.ledger:
        if line.name.startswith("KV"):
            line = msgspec.structs.replace(line, bytes=math.floor(line.bytes * part))
        ledger.append(line)
    return msgspec.structs.replace(
        plan, cache=msgspec.structs.replace(plan.cache, pages=tuple(made)), ledger=tuple(ledger)
    )


# ---------------------------------------------------------------------------------------------------------------- judge


def targets_of(plan: Plan) -> Targets:
    """The plan's own targets by class, where its goals had classes."""
    out: Targets = {}
    for one in plan.schedule.classes:
        own = {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2e": one.e2e_s}
        stated = {metric: value for metric, value in own.items() if value is not None}
        if stated:
            out[one.name] = stated
    return out


def targets_as_today(outcome: Outcome) -> Targets:
    """What 99 of 100 requests get now, with a tenth of room: the answer is then how much of today's service is left."""
    out: dict[str, float] = {}
    for metric, values in (("ttft", outcome.ttft_s), ("tpot", outcome.tpot_s)):
        worst = percentile(values[~np.isnan(values)].tolist(), 99)
        if worst is not None:
            out[metric] = 1.1 * worst
    return {EVERY: out}


def judged(run: Run, plan: Plan, *, targets: Mapping[str, Mapping[str, float]], enough: float) -> Side:
    """What became of the requests, by the targets."""
    outcome, trace = run.outcome, run.outcome.trace
    ttft, tpot, e2e = outcome.ttft_s, outcome.tpot_s, outcome.e2e_s

    def some(value: float) -> float | None:
        return None if math.isnan(value) else float(value)

    timed = [
        Timed(
            traffic_class=trace.classes[trace.traffic_class[index]],
            ttft_s=some(ttft[index]),
            tpot_s=some(tpot[index]),
            e2e_s=some(e2e[index]),
            failed=bool(np.isnan(outcome.finish_s[index])),
        )
        for index in range(len(trace))
    ]
    classes = attainment(timed, targets)
    met = sum(one.attained.met for one in classes if one.attained is not None)
    of = sum(one.attained.of for one in classes if one.attained is not None)
    free = sum(one.requests for one in classes if one.attained is None)
    attained = wilson(met + free, of + free)
    done = ~np.isnan(outcome.finish_s)
    span = float(outcome.finish_s[done].max()) if done.any() else math.inf
    first, gap = ttft[done].tolist(), tpot[~np.isnan(tpot)].tolist()
    return Side(
        requests=len(trace),
        refused=len(outcome.refused),
        replicas=outcome.replicas,
        pages=plan.cache.pages,
        attained=attained,
        classes=classes,
        ttft_p50_s=percentile(first, 50),
        ttft_p99_s=percentile(first, 99),
        tpot_p50_s=percentile(gap, 50),
        tpot_p99_s=percentile(gap, 99),
        output_tokens_per_s=float(outcome.generated_tokens.sum()) / span,
        strain=run.strain,
        holds=attained.share >= enough,
    )


# -------------------------------------------------------------------------------------------------------------- what if


def simulated(trace: Trace, plan: Plan, *, times: StepTime, options: SimulateOptions) -> Run:
    """A simulation, and what its engines lacked in sum."""
    strains: list[Strain] = []

    def listen(replica: int) -> Strain:
        strains.append(Strain())
        return strains[-1]

    outcome = simulate_plan(trace, plan, times=times, options=options, listen=listen)
    return Run(outcome=outcome, strain=summed(strain.report() for strain in strains))


def whatif(
    trace: Trace,
    plan: Plan,
    change: Change,
    *,
    times: StepTime,
    options: SimulateOptions | None = None,
    targets: Targets | None = None,
    enough: float = ENOUGH,
    headroom: bool = True,
    told: Callable[[str], None] = lambda what: None,
) -> WhatIf:
    """Simulates today and then, and with `headroom` looks for the traffic at which the changed engine breaks."""
    options = options or SimulateOptions()
    told("as it is")
    now = simulated(trace, plan, times=times, options=options)
    targets_are = "as stated"
    if not targets:
        targets, targets_are = targets_of(plan), "the plan's own"
    if not targets:
        targets, targets_are = targets_as_today(now.outcome), "none stated: today's p99 and a tenth"
    after = with_memory(plan, change.memory_bytes)
    replicas = options.replicas if change.replicas is None else change.replicas
    then_options = SimulateOptions(**{**vars(options), "replicas": replicas})
    wanted = changed_trace(trace, change)
    known: dict[float, Side] = {}
    untrusted: list[float] = []

    def at(more: float) -> Side:
        if more not in known:
            told(f"changed, at {more:.3g} times that traffic")
            run = simulated(wanted.speed_up(more), after, times=times, options=then_options)
            untrusted.append(run.outcome.untrusted_steps / max(1, run.outcome.steps))
            known[more] = judged(run, after, targets=targets, enough=enough)
        return known[more]

    then = at(1.0)
    return WhatIf(
        trace=trace.name,
        step_times=times.described(),
        targets=targets,
        targets_are=targets_are,
        change=change,
        today=judged(now, plan, targets=targets, enough=enough),
        then=then,
        headroom=find_headroom(at) if headroom else None,
        untrusted_steps=untrusted[0],
    )


def find_headroom(at: Callable[[float], Side]) -> Headroom:
    """Doubles (or halves) the traffic until it breaks (or holds), then closes in on the border."""
    holds: float | None = None
    breaks: float | None = None
    more = 1.0
    while LEAST <= more <= MOST and (holds is None or breaks is None):
        if at(more).holds:
            holds = more
            if breaks is None:
                more *= 2
        else:
            breaks = more
            if holds is None:
                more /= 2
    if holds is not None and breaks is not None:
        for _ in range(HALVINGS):
            middle = math.sqrt(holds * breaks)
            if at(middle).holds:
                holds = middle
            else:
                breaks = middle
    return Headroom(holds_at=holds, breaks_at=breaks, breaks=None if breaks is None else at(breaks).binding)


def targets_text(targets: Mapping[str, Mapping[str, float]], show: Callable[[float], str]) -> Sequence[str]:
    """One text for each class."""
    return [
        f"{name or 'every class'}: {', '.join(f'{metric.upper()} {show(value)}' for metric, value in own.items())}"
        for name, own in targets.items()
    ]
