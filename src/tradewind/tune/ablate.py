"""What each technique brings to the four goals on a user's own traffic: simulated and measured, never mixed.

Knows: how a whole is shared out among its parts. Refuses to know: how a plan is changed (variants), how time passes (simulate), engines.

      figures(on)      TTFT, TPOT, throughput, memory of the plan with just these techniques on
      leave one out    figures(all) - figures(all but it)                          what switching it off now would change
      Shapley          mean over all orders of what it adds when it comes          parts that sum to figures(all) - figures(none of them)

Of two techniques that do the same, leaving one out changes nothing, so both get nothing; Shapley gives each half (Shapley, "A value for
n-person games", 1953). Intervals: the trace is cut into stretches, each is attributed by itself, and Student's t says how far the mean
of so many may be off. One seed for all variants of a stretch: what changes nothing gets exactly nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.simulate.outcome import SERIES, Outcome
from tradewind.simulate.simulator import SimulateOptions, simulate_plan
from tradewind.simulate.steptime import StepTime
from tradewind.simulate.trace_columns import Trace
from tradewind.tune import variants

MOST_SHARED = 8
"""Techniques that Shapley values are computed of: 2 ** 8 plans for each stretch."""
AUTOMATIC = 3
STRETCHES = 4
FEWEST = 10
"""Requests of a stretch."""
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 % for 1, 2, .. 9 degrees of freedom."""
At = Literal["mean", "p50", "p90", "p99"]
Reals = npt.NDArray[np.float64]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The four goals in numbers."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    """Output tokens, with all requests there at once: what the engine could do, not what was asked of it."""
    memory_bytes: float
    """The ledger without its pages, and the pages that sequences held when they held most."""


GOALS: tuple[str, ...] = Figures.__struct_fields__
LOWER_IS_BETTER = ("ttft_s", "tpot_s", "memory_bytes")
Worth = Callable[[frozenset[str]], Figures]
"""Figures with just these techniques on (and everything that is not up for question)."""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """What one technique adds to one figure, and how far that may be off at 95 %; None where one stretch cannot say."""

    value: float
    off_by: float | None = None


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one technique adds to each of the four figures. Negative seconds and bytes are a gain."""

    technique: str
    amounts: dict[str, Amount]


class Ablation(msgspec.Struct, frozen=True, kw_only=True):
    """One attribution, all of it simulated or all of it measured."""

    how: Literal["simulated", "measured"]
    about: str
    """Trace, times and what TTFT and TPOT mean here; one sentence each."""
    with_all: Figures
    stretches: int
    leave_one_out: tuple[Share, ...]
    shapley: tuple[Share, ...] = ()
    whole: Share | None = None
    """All that Shapley values are given of together: their sum."""
    left_out: dict[str, str] = {}
    """Techniques that the plan has and this attribution says nothing about, and why."""


# ------------------------------------------------------------------------------------------------------- sharing it out


def leave_one_out(techniques: Sequence[str], worth: Worth) -> dict[str, Figures]:
    """For each technique, what all have and all but it lack."""
    all_on = frozenset(techniques)
    whole = worth(all_on)
    return {name: minus(whole, worth(all_on - {name})) for name in techniques}


def shapley(techniques: Sequence[str], worth: Worth, *, always: frozenset[str] = frozenset()) -> dict[str, Figures]:
    """Each technique's mean contribution over all orders in which they could have come; `always` are on throughout.

    The parts sum to the whole. Asks for 2 ** n figures, each once if `worth` remembers them.
    """
    count = len(techniques)
    out = {}
    for name in techniques:
        others = [other for other in techniques if other != name]
        total = np.zeros(len(GOALS))
        for size in range(count):
            weight = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
            for before in combinations(others, size):
                on = always | frozenset(before)
                total += weight * (_array(worth(on | {name})) - _array(worth(on)))
        out[name] = _figures(total)
    return out


def remembered(worth: Worth) -> Worth:
    """Asks for each set once."""
    known: dict[frozenset[str], Figures] = {}

    def ask(on: frozenset[str]) -> Figures:
        if on not in known:
            known[on] = worth(on)
        return known[on]

    return ask


def attribute(
    techniques: Sequence[str],
    whole: Worth,
    stretches: Sequence[Worth],
    *,
    shared: Sequence[str] | None = None,
) -> tuple[tuple[Share, ...], tuple[Share, ...], Share | None]:
    """Leave-one-out of all, Shapley values of some (None: of those that matter most) and their sum; values from the whole trace,
    intervals from its stretches. Raises UserError when too many are to be shared out."""
    unknown = sorted(set(shared or ()) - set(techniques))
    if unknown:
        raise UserError(
            f"{', '.join(unknown)} cannot be attributed here; there {'is' if len(techniques) == 1 else 'are'} "
            f"{', '.join(techniques) or 'nothing'}"
        )
    if shared is not None and len(shared) > MOST_SHARED:
        raise UserError(
            f"{len(shared)} techniques are {2 ** len(shared)} plans for Shapley values; name at most {MOST_SHARED}"
        )
    ask = remembered(whole)
    parts = [remembered(worth) for worth in stretches]
    all_on = frozenset(techniques)
    single = leave_one_out(techniques, ask)
    each = [leave_one_out(techniques, part) for part in parts]
    alone = tuple(_share(name, single[name], [own[name] for own in each]) for name in techniques)
    chosen = tuple(shared) if shared is not None else _foremost(single, ask(all_on))
    if not chosen:
        return alone, (), None
    always = all_on - frozenset(chosen)
    values = shapley(chosen, ask, always=always)
    each = [shapley(chosen, part, always=always) for part in parts]
    shares = tuple(_share(name, values[name], [own[name] for own in each]) for name in chosen)
    together = _share(
        "together",
        minus(ask(all_on), ask(always)),
        [minus(part(all_on), part(always)) for part in parts],
    )
    return alone, shares, together


def _foremost(single: Mapping[str, Figures], whole: Figures) -> tuple[str, ...]:
    """The few techniques whose absence changes most, relative to what there is."""
    scale = np.maximum(np.abs(_array(whole)), 1e-12)
    weight = {name: float((np.abs(_array(figures)) / scale).sum()) for name, figures in single.items()}
    ranked = sorted((name for name in weight if weight[name] > 0), key=lambda name: (-weight[name], name))
    return tuple(sorted(ranked[:AUTOMATIC]))


def minus(left: Figures, right: Figures) -> Figures:
    """The difference, figure by figure."""
    return _figures(_array(left) - _array(right))


def _share(name: str, value: Figures, samples: Sequence[Figures]) -> Share:
    own = np.array([_array(sample) for sample in samples]).reshape(-1, len(GOALS))
    amounts = {}
    for place, goal in enumerate(GOALS):
        off_by = None
        if len(own) > 1:
            t = T975[min(len(own) - 1, len(T975)) - 1]
            off_by = float(t * own[:, place].std(ddof=1) / math.sqrt(len(own)))
        amounts[goal] = Amount(value=float(getattr(value, goal)), off_by=off_by)
    return Share(technique=name, amounts=amounts)


def _array(figures: Figures) -> Reals:
    return np.array([getattr(figures, goal) for goal in GOALS], dtype=np.float64)


def _figures(values: Reals) -> Figures:
    return Figures(**dict(zip(GOALS, values.tolist(), strict=True)))


# ------------------------------------------------------------------------------------------------------------ simulated


def ablate(
    trace: Trace,
    plan: Plan,
    *,
    times: StepTime,
    at: At = "p90",
    shared: Sequence[str] | None = None,
    stretches: int = STRETCHES,
    seed: int = 0,
    told: Callable[[str], None] = lambda what: None,
) -> Ablation:
    """The attribution on a simulated trace: several simulations for each technique. `told` hears what begins."""
    techniques = [name for name in variants.techniques_of(plan) if name in variants.FELT]
    left_out = {
        name: "a simulation does not feel it; --measure does"
        for name in variants.techniques_of(plan)
        if name not in variants.FELT
    }
    longest = int(trace.prompt_tokens.max())
    plans: dict[frozenset[str], tuple[Plan, StepTime]] = {}
    for name in list(techniques):
        try:
            variants.without(plan, (name,), longest_prompt=longest)
        except UserError as error:
            techniques.remove(name)
            left_out[name] = f"there is no plan without it: {error}"

    def variant(on: frozenset[str]) -> tuple[Plan, StepTime]:
        if on not in plans:
            made = variants.without(plan, sorted(set(techniques) - on), longest_prompt=longest)
            plans[on] = made, variants.times_for(made, plan=plan, times=times)
        return plans[on]

    def worth_of(part: Trace, name: str) -> Worth:
        def worth(on: frozenset[str]) -> Figures:
            told(f"{name} without {', '.join(sorted(set(techniques) - on)) or 'nothing'}")
            made, own = variant(on)
            return figures_of(part, made, times=own, at=at, seed=seed)

        return worth

    cut = cut_up(trace, stretches)
    on_all = remembered(worth_of(trace, "whole trace"))
    alone, shares, whole = attribute(
        techniques,
        on_all,
        [worth_of(part, f"stretch {place}") for place, part in enumerate(cut, 1)],
        shared=shared,
    )
    refused = _unservable(trace, plan)
    return Ablation(
        how="simulated",
        about=(
            f"{trace.name}: {len(trace)} requests{refused}; {times.described()}; TTFT and TPOT: {at} over requests as they arrive; "
            "throughput: all requests at once"
        ),
        with_all=on_all(frozenset(techniques)),
        stretches=len(cut),
        leave_one_out=alone,
        shapley=shares,
        whole=whole,
        left_out=left_out,
    )


def _unservable(trace: Trace, plan: Plan) -> str:
    long = int((trace.prompt_tokens + trace.output_tokens > plan.schedule.max_context).sum())
    return f", {long} of them too long for the plan and not counted" if long else ""


def cut_up(trace: Trace, stretches: int) -> list[Trace]:
    """Consecutive parts of equal numbers of requests, as many as have enough of them each; none when that is only one."""
    count = min(stretches, len(trace) // FEWEST)
    if count < 2:
        return []
    edges = [round(place * len(trace) / count) for place in range(count + 1)]
    return [trace.part(first, last) for first, last in pairwise(edges)]


def figures_of(trace: Trace, plan: Plan, *, times: StepTime, at: At, seed: int) -> Figures:
    """Two simulations: as the requests arrive, and all at once."""
    options = SimulateOptions(seed=seed)
    open_ = simulate_plan(trace, plan, times=times, options=options)
    at_once = simulate_plan(replace(trace, arrival_s=np.zeros(len(trace))), plan, times=times, options=options)
    span = float(np.nanmax(at_once.finish_s, initial=0.0, where=~np.isnan(at_once.finish_s))) or math.inf
    return Figures(
        ttft_s=statistic(open_.ttft_s, at),
        tpot_s=statistic(open_.tpot_s, at),
        tokens_per_s=float(at_once.generated_tokens.sum()) / span,
        memory_bytes=held_bytes(open_, plan),
    )


def held_bytes(outcome: Outcome, plan: Plan) -> float:
    """Bytes of everything but pages, and of the pages that sequences held in the fullest stretch of time."""
    _, means = outcome.series.columns()
    fullest = float(means[:, SERIES.index("pages")].max()) if len(means) else 0.0
    pages = sum(group.bytes_per_page * count for group, count in zip(plan.cache.groups, plan.cache.pages, strict=True))
    fixed = sum(line.bytes for line in plan.ledger if not line.name.startswith("KV"))
    return fixed + fullest * pages


def statistic(values: Reals, at: At) -> float:
    """A mean or percentile of what is there; 0 where nothing is."""
    own = values[~np.isnan(values)]
    if not len(own):
        return 0.0
    return float(own.mean() if at == "mean" else np.quantile(own, float(at[1:]) / 100))
