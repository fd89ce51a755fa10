"""The plan that serves a trace best by the stated goals: what `resolve` chose, and its alternatives simulated one choice at a time.

Knows: which choices a simulation can judge, and when an alternative is worth taking. Refuses to know: files, and how plans are shown.

    resolve's plan -> policy: others simulated, the best kept -> tokens per step: likewise -> running requests: likewise

What the user pinned is not tried. Every alternative that lost is told with the figures that it lost by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan, Reason
from tradewind.contract.errors import UserError
from tradewind.simulate.forecast import Price, classified, forecast
from tradewind.simulate.report import show_s
from tradewind.simulate.simulator import SimulateOptions
from tradewind.simulate.steptime import StepTime
from tradewind.simulate.trace_columns import Trace

WORTH = 0.01
"""Part of the requests, or of the rate, that an alternative must bring to be taken: simulations are not more exact."""
GIVEN_UP = 0.002
"""Part of what counts first that may be lost for what counts after it. Less than WORTH: several alternatives that each lose almost that
would otherwise add up to a plan that is worse in what counts (a night's work lost 1 % of its rate for shorter waits)."""
FACTORS = (0.25, 0.5, 2.0)
"""Sizes that are tried beside the chosen one."""
LEAST_STEP, MOST_STEP = 32, 8192
LEAST_RUNNING, MOST_RUNNING = 2, 512
CHOICES = ("policy", "max_tokens_per_step", "max_running")


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that was kept, its price, and how many simulations it took."""

    plan: Plan
    price: Price
    tried: int
    pins: dict[str, int | str]
    """What differs from what `resolve` chose by itself."""


def choose(
    goals: Goals,
    *,
    trace: Trace,
    make: Callable[[Goals], Plan],
    times_of: Callable[[Plan], StepTime],
    options: SimulateOptions | None = None,
    search: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Chosen:
    """The best plan for a trace. Same arguments, same plan; `progress` is told what is being simulated.

    `make` turns goals into a plan (resolve with card and machine); alternatives that it refuses are left out.
    """
    options = options or SimulateOptions(noise=False)
    trace = classified(trace, goals)

    def simulated(plan: Plan) -> Price:
        return forecast(trace, plan=plan, goals=goals, times=times_of(plan), options=options)

    best = make(goals)
    price = simulated(best)
    tried, pins = 1, dict[str, int | str]()
    reasons: dict[str, Reason] = {}
    for choice in CHOICES if search else ():
        if getattr(goals.means, choice) is not None:
            continue
        losers: list[str] = []
        before = getattr(best.schedule, choice)
        for value in alternatives(choice, best, goals):
            if progress is not None:
                progress(f"{choice} {value}")
            try:
                other = make(_pinned(goals, {**pins, choice: value}))
            except UserError as error:
                losers.append(f"{value}: {error}")
                continue
            tried += 1
            found = simulated(other)
            if better(found, price, goals):
                losers.append(f"{getattr(best.schedule, choice)}: {_lost(price, found, goals)}")
                best, price, pins = other, found, {**pins, choice: value}
            else:
                losers.append(f"{value}: {_lost(found, price, goals)}")
        kept = getattr(best.schedule, choice)
        chosen = next(reason for reason in best.reasons if reason.choice == choice)
        if losers:
            why = (
                chosen.why
                if kept == before
                else f"simulated better than {before}, which would be chosen without a trace"
            )
            if choice == "policy" and kept != before:
                why += f"; {chosen.why.removeprefix('as asked; ')}"
            reasons[choice] = Reason(
                choice=choice, value=str(kept), why=f"{why}; {_figures(price)}", rejected="; ".join(losers)
            )
    plan = msgspec.structs.replace(best, reasons=tuple(reasons.get(reason.choice, reason) for reason in best.reasons))
    return Chosen(plan=plan, price=price, tried=tried, pins=pins)


def alternatives(choice: str, plan: Plan, goals: Goals) -> Iterator[int | str]:
    """What is tried beside the plan's own choice."""
    schedule = plan.schedule
    if choice == "policy":
        useful = {
            "arrival": True,
            "fair": bool(goals.tenants),
            "length": True,
            "priority": any(one.match.priority is not None for one in goals.classes),
            "slo": any(one.ttft_s or one.tpot_s or one.e2e_s for one in schedule.classes),
        }
        yield from (name for name, is_useful in useful.items() if is_useful and name != schedule.policy)
        return
    now = getattr(schedule, choice)
    low, high = (LEAST_STEP, MOST_STEP) if choice == "max_tokens_per_step" else (LEAST_RUNNING, MOST_RUNNING)
    if choice == "max_running":
        high = min(high, schedule.max_tokens_per_step)
    else:
        low = max(low, schedule.max_running)
    for factor in FACTORS:
        value = int(now * factor)
        if low <= value <= high and value != now:
            yield value


def better(one: Price, other: Price, goals: Goals) -> bool:
    """Whether a price is so much better than another that the change is worth it: targets, then the rate, then the time of the answers."""
    for mine, theirs in zip(_worth(one, goals), _worth(other, goals), strict=True):
        scale = max(abs(mine), abs(theirs))
        if mine > theirs + WORTH * scale:
            return True
        if mine < theirs - GIVEN_UP * scale:
            return False
    return False


def _worth(price: Price, goals: Goals) -> tuple[float, ...]:
    """More is better, the first that differs decides."""
    finished = price.finished / max(1, price.requests)
    attained = price.attained.share if price.attained is not None else finished
    memory = -float(price.memory_bytes) if goals.scenario == "memory" else 0.0
    # Where only the rate is wanted nobody waits for an answer. Short ones first would look better, and end the night later: whoever has
    # most to say then begins last.
    soon = 0.0 if goals.scenario == "throughput" else -(price.e2e_s.mean or 0.0)
    return (attained, finished, memory, price.output_tokens_per_s, soon)


def _lost(price: Price, winner: Price, goals: Goals) -> str:
    """By what figure one was rejected for another."""
    mine, theirs = _worth(price, goals), _worth(winner, goals)
    for place, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        if -GIVEN_UP <= (left - right) / (max(abs(left), abs(right)) or 1.0) <= WORTH:
            continue
        if place == 0 and price.attained is not None:
            return f"attains {100 * left:.0f} % instead of {100 * right:.0f} %"
        if place <= 1:
            return f"answers {100 * left:.0f} % instead of {100 * right:.0f} %"
        if place == 3:
            return f"{left:.0f} output tokens/s instead of {right:.0f}"
        if place == 4:
            return f"answers take {show_s(-left)} instead of {show_s(-right)} in the mean"
        return "more memory"
    return "no difference that counts"


def _figures(price: Price) -> str:
    if price.attained is not None:
        return f"attains {100 * price.attained.share:.0f} % at {price.output_tokens_per_s:.0f} output tokens/s"
    return f"{price.output_tokens_per_s:.0f} output tokens/s, answers take {show_s(price.e2e_s.mean)} in the mean"


def _pinned(goals: Goals, pins: dict[str, int | str]) -> Goals:
    means: Means = msgspec.structs.replace(goals.means, **pins)
    return msgspec.structs.replace(goals, means=means)
