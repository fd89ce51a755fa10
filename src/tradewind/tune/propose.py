"""The next plan, when traffic has left what the last one was made for: candidates, simulated on the newest traffic, the best kept.

Knows: which plans are worth trying and when another one is worth the change. Refuses to know: how drift is noticed (observability.drift)
and how a plan is put into service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from tradewind.config.card import ModelCard
from tradewind.config.goals import Goals
from tradewind.config.habits import HABITS
from tradewind.config.hardware import Hardware
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError
from tradewind.observability.attainment import wilson
from tradewind.observability.drift import Arrival, Drift, Envelope
from tradewind.simulate.outcome import Outcome
from tradewind.simulate.simulator import SimulateOptions
from tradewind.simulate.steptime import StepTime
from tradewind.simulate.trace_columns import Trace, TraceLine, make_trace
from tradewind.tune.variants import times_for
from tradewind.tune.whatif import ENOUGH, Side, Targets, judged, simulated

WORTH = 0.02
"""Part of the requests by which attainment must rise for a change of plan ..."""
FASTER = 0.9
"""... or, where it does not, how much less of their times the requests must need."""
BLOCK = 16


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate and how it did."""

    name: str
    attained: float
    ttft_p90_s: float
    tpot_p90_s: float


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about a drift."""

    plan: Plan
    """The plan in force where none is worth the change."""
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
        )
        for one in sorted(recent, key=lambda one: one.at_s)
    ]
    if not lines:
        raise UserError("no request has ended yet, so there is no traffic to plan for")
    return make_trace(lines, name=name, block_tokens=BLOCK)


def candidates(goals: Goals, card: ModelCard, hardware: Hardware, *, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans worth trying: of every scenario, and with half and twice the slots and the step of the one in force. Pins are kept."""
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
    seen = [(plan.schedule, plan.cache, plan.numerics)]
    for label, asked in tried:
        try:
            made = resolve(asked, card, hardware)
        except UserError:
            continue
        key = (made.schedule, made.cache, made.numerics)
        if key not in seen:
            seen.append(key)
            yield label, made


def propose(
    goals: Goals,
    plan: Plan,
    recent: Trace,
    *,
    times: StepTime,
    targets: Targets,
    drift: Drift | None = None,
    told: Callable[[str], None] = lambda what: None,
) -> Proposal:
    """Simulates the newest traffic under the plan in force and every candidate, and takes the best when that is worth a change."""
    best: tuple[Plan, Try] | None = None
    tries: list[Try] = []
    for name, made in (("as it is", plan), *candidates(goals, plan.card, plan.hardware, plan=plan)):
        told(name)
        run = simulated(recent, made, times=times_for(made, plan=plan, times=times), options=SimulateOptions())
        one = _tried(name, run.outcome, judged(run, made, targets=targets, enough=ENOUGH))
        tries.append(one)
        if best is None or _better(one, best[1], by=0.0):
            best = made, one
    assert best is not None
    now, (made, one) = tries[0], best
    because = f" after {drift.described()}" if drift is not None else ""
    if made is plan or not _better(one, now, by=WORTH):
        why = f"the plan in force stays{because}: {_words(now)}, and no other plan does clearly better"
        return Proposal(plan=plan, changed=False, differs=(), tries=tuple(tries), why=why)
    why = f"{one.name}{because}: {_words(one)}; under the plan in force {_words(now)}"
    return Proposal(plan=made, changed=True, differs=differences(plan, made), tries=tuple(tries), why=why)


def differences(was: Plan, becomes: Plan) -> tuple[str, ...]:
    """What two plans choose differently, one text each."""
    old = {reason.choice: reason.value for reason in was.reasons}
    return tuple(
        f"{reason.choice} {old.get(reason.choice, '-')} -> {reason.value}"
        for reason in becomes.reasons
        if reason.value != old.get(reason.choice)
    )


def _tried(name: str, outcome: Outcome, side: Side) -> Try:
    def p90(values: np.ndarray) -> float:
        own = values[~np.isnan(values)]
        return float(np.quantile(own, 0.9)) if len(own) else math.inf

    return Try(name=name, attained=side.attained.share, ttft_p90_s=p90(outcome.ttft_s), tpot_p90_s=p90(outcome.tpot_s))


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


# ------------------------------------------------------------------------------------------------------ on trial, back


class Trial:
    """A new plan in service on trial: kept when it does at least as well as the old one did on the same kind of traffic, else undone.

    Whoever serves calls `done` for each request and does what `verdict` says; nothing is changed here.
    """

    def __init__(self, old: Plan, new: Plan, *, before: float, requests: int = 200, loss: float = 0.05) -> None:
        """before: part of the requests that met their targets under the old plan since the drift."""
        self.old, self.new = old, new
        self._before, self._requests, self._loss = before, requests, loss
        self._met = self._of = 0

    def done(self, met: bool) -> None:
        """One more request is over under the new plan."""
        self._met, self._of = self._met + met, self._of + 1

    @property
    def verdict(self) -> Plan | None:
        """The plan to serve with from now on; None while it is not sure.

        Undone early when even the best that the interval allows is worse than before by the loss (Wilson at 95 %).
        """
        if not self._of:
            return None
        share = wilson(self._met, self._of)
        if share.high < self._before - self._loss:
            return self.old
        if self._of < self._requests:
            return None
        return self.new if share.share >= self._before - self._loss else self.old
