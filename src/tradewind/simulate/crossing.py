"""Plans made for opposed goals, each on everybody's traffic: whether a plan wins where it was made to win.

Knows: how a plan's price on foreign traffic is one number, and what a win is. Refuses to know: how plans are made, and pictures.

                     plan of bulk   plan of chat   plan of long
      traffic bulk       [win]           .              .            judged by the goals of the traffic: attainment of its targets,
      traffic chat         .           [win]            .            or the rate of output tokens where it has none
      traffic long         .             .            [win]

A plan whose numbers cost more quality than the goals of the traffic allow has lost there, however fast it is.

The traffic is held out: other seeds and another shape than the trace that the plans were made from, otherwise the winner is who fits noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.config.goals import Goals
from tradewind.config.plan import Plan
from tradewind.simulate.forecast import SPREAD_OF_LENGTHS, Price, forecast, trace_of
from tradewind.simulate.simulator import SimulateOptions
from tradewind.simulate.steptime import StepTime
from tradewind.simulate.trace_columns import Trace


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How traffic of the same goals may differ from what a plan was made for."""

    name: str
    burst: float = 1.0
    """Coefficient of variation of the time between arrivals."""
    spread: float = SPREAD_OF_LENGTHS
    """Sigma of the logarithm of lengths."""
    rate: float = 1.0
    """Times as many requests a second."""


SHAPES = (
    Shape(name="as planned"),
    Shape(name="bursts", burst=2.0),
    Shape(name="more", rate=1.15),
    Shape(name="wider lengths", spread=0.8, rate=0.85),
)
"""Held-out traffic. Wider lengths have a longer mean (sigma 0.8 instead of 0.5: 1.22 times), so they come that much slower."""
BACKLOG = 3
RESAMPLED = 2000


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One plan on one trace of one kind of traffic."""

    traffic: str
    plan: str
    shape: str
    seed: int
    value: float
    """Attainment, or output tokens per second; more is better."""
    allowed: bool = True
    """Whether the plan stays within the quality that the goals of the traffic allow."""


class Duel(msgspec.Struct, frozen=True, kw_only=True):
    """The own plan against one other on the same traces, all shapes and seeds."""

    traffic: str
    other: str
    won: int
    """Traces on which it is better, or the other is not allowed."""
    better: int
    drawn: int
    """By the figures alone."""
    of: int
    margin: float
    """Mean of own minus other: in attainment, or as a part of the other's rate."""
    margin_low: float
    margin_high: float
    """At 95 %, over traces."""
    least: float
    """The smallest margin of all traces."""


def within_quality(price: Price, goals: Goals) -> bool:
    """Whether a plan costs no more quality than the goals allow; where they state no budget, any plan is allowed."""
    budget = goals.quality_loss_percent
    return budget is None or price.quality_loss_percent <= budget


def value_of(price: Price) -> float:
    """What a price is worth by the goals that it was judged by."""
    return price.attained.share if price.attained is not None else price.output_tokens_per_s


def made_up(goals: Goals, *, seed: int, requests: int, shape: Shape = SHAPES[0]) -> Trace:
    """Traffic of these goals. Without targets there are BACKLOG times as many requests: a rate is seen while far more wait than can run."""
    number = requests if has_targets(goals) else BACKLOG * requests
    trace = trace_of(goals, requests=number, seed=seed, burst=shape.burst, spread=shape.spread)
    return trace.speed_up(shape.rate)


def cross(
    goals: Mapping[str, Goals],
    plans: Mapping[str, Plan],
    *,
    seeds: Iterable[int],
    times_of: Callable[[Plan], StepTime],
    shapes: Sequence[Shape] = SHAPES,
    requests: int = 200,
    told: Callable[[str], None] = lambda what: None,
) -> list[Score]:
    """Every plan on traces of every goals, of each shape and seed; goals and plans have the same names. Same arguments, same scores."""
    options = SimulateOptions(noise=False)
    out: list[Score] = []
    for seed in seeds:
        for shape in shapes:
            for traffic, own in goals.items():
                trace = made_up(own, seed=seed, requests=requests, shape=shape)
                for name, plan in plans.items():
                    told(f"{traffic} traffic, {shape.name}, seed {seed}: plan of {name}")
                    price = forecast(trace, plan=plan, goals=own, times=times_of(plan), options=options)
                    out.append(
                        Score(
                            traffic=traffic,
                            plan=name,
                            shape=shape.name,
                            seed=seed,
                            value=value_of(price),
                            allowed=within_quality(price, own),
                        )
                    )
    return out


def duels(scores: Iterable[Score], goals: Mapping[str, Goals]) -> list[Duel]:
    """Own plan against each other plan, pair by pair of the same trace."""
    by = {(one.traffic, one.plan, one.shape, one.seed): one for one in scores}
    traces = sorted({(shape, seed) for _, _, shape, seed in by})
    out = []
    for traffic in goals:
        for other in goals:
            if other == traffic:
                continue
            own = np.array([by[traffic, traffic, *trace].value for trace in traces])
            foreign = np.array([by[traffic, other, *trace].value for trace in traces])
            barred = np.array([not by[traffic, other, *trace].allowed for trace in traces])
            # Shares are compared as they are, rates by their ratio: traces of the same goals differ in what there is to do.
            margins = own - foreign if has_targets(goals[traffic]) else own / foreign - 1
            low, high = interval_of_mean(margins)
            out.append(
                Duel(
                    traffic=traffic,
                    other=other,
                    won=int(((margins > 0) | barred).sum()),
                    better=int((margins > 0).sum()),
                    drawn=int((margins == 0).sum()),
                    of=len(margins),
                    margin=float(margins.mean()),
                    margin_low=low,
                    margin_high=high,
                    least=float(margins.min()),
                )
            )
    return out


def has_targets(goals: Goals) -> bool:
    """Whether some class has a target."""
    own = any(one.ttft_ms or one.tpot_ms or one.e2e_ms for one in goals.classes)
    return own or bool(goals.classes and (goals.ttft_ms or goals.tpot_ms))


def interval_of_mean(values: npt.NDArray[np.float64], *, seed: int = 0) -> tuple[float, float]:
    """The mean's interval at 95 % by resampling the values (Efron 1979). Same values, same interval."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLED, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
