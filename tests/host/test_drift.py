"""The drift guard is silent on traffic as planned, notices a doubling within a stated time, and the next plan is better."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from plans import SMOLLM2, machine
from support_engine import Engine, request

from tradewind.config.goals import Goals, Means
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError
from tradewind.contract.events import Arrived, Event, FinishReason, Scheduled, TokensOut
from tradewind.observability.attainment import Timed
from tradewind.observability.drift import BATCH, FEWEST, Arrival, Drift, DriftGuard, DriftListener, Envelope, limit_for
from tradewind.observability.lives import Lives
from tradewind.simulate.simulator import SimulateOptions
from tradewind.simulate.steptime import KNOTS, StepTime, roofline
from tradewind.simulate.trace_columns import poisson_trace
from tradewind.tune.propose import arrivals_of, differences, envelope_of, propose, trace_of
from tradewind.tune.trial import Trial
from tradewind.tune.whatif import simulated


def traffic(
    requests: int,
    *,
    per_s: float = 4.0,
    prompt: float = 60.0,
    output: float = 120.0,
    share: float = 0.3,
    cv: float = 1.0,
    begin_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Gamma gaps (cv 1: Poisson), log-normal lengths, a part of the prompts mostly in the cache."""
    draw = np.random.default_rng(seed)
    at = begin_s + np.cumsum(draw.gamma(1 / cv**2, cv**2 / per_s, requests))
    prompts = np.maximum(1, np.rint(draw.lognormal(math.log(prompt), 1.1, requests))).astype(int)
    outputs = np.maximum(1, np.rint(draw.lognormal(math.log(output), 0.8, requests))).astype(int)
    cached = np.where(draw.random(requests) < share, prompts * 4 // 5, 0)
    for when, one, two, found in zip(at.tolist(), prompts.tolist(), outputs.tolist(), cached.tolist(), strict=True):
        yield Arrival(at_s=when, prompt_tokens=one, output_tokens=two, cached_tokens=found)


def first_drift(guard: DriftGuard, arrivals: Iterator[Arrival]) -> Drift | None:
    return next((found for one in arrivals if (found := guard.take(one)) is not None), None)


def noticed(*, cv: float, seed: int, **changed: Any) -> tuple[Drift | None, float]:
    """Quarter of an hour as planned, then otherwise; the drift, and how long after the change it was noticed."""
    guard = DriftGuard(Envelope.of(traffic(1000, cv=cv, seed=seed)))
    begin_s = 0.0
    for one in traffic(3600, cv=cv, seed=seed + 1):
        assert guard.take(one) is None
        begin_s = one.at_s
    found = first_drift(guard, traffic(4000, begin_s=begin_s, seed=seed + 2, **{"cv": cv, **changed}))
    return found, math.inf if found is None else found.at_s - begin_s


def test_no_false_alarm_in_400_hours() -> None:
    """None in 400 hours: the rate is under 0.75 % an hour with 95 % certainty (3 / 400)."""
    hours = 0.0
    for seed in range(8):
        cv = 1.0 if seed % 2 else 2.0
        guard = DriftGuard(Envelope.of(traffic(1000, per_s=1.0, cv=cv, seed=1000 + seed)))
        last = 0.0
        for one in traffic(50 * 3600, per_s=1.0, cv=cv, seed=seed):
            assert guard.take(one) is None, guard.found
            last = one.at_s
        hours += last / 3600
    assert hours > 390


@pytest.mark.parametrize(
    ("what", "changed", "within_s", "factor"),
    [
        ("rate", {"per_s": 8.0}, 120, 2.0),
        ("rate", {"per_s": 2.0}, 400, 0.5),
        ("prompt length", {"prompt": 120.0}, 240, 2.0),
        ("answer length", {"output": 240.0}, 180, 2.0),
        ("prefix share", {"share": 0.7}, 300, 2.3),
    ],
)
def test_a_doubling_is_noticed_in_time(what: str, changed: dict[str, float], within_s: float, factor: float) -> None:
    for seed in range(0, 30, 3):
        found, after_s = noticed(cv=1.0, seed=seed, **changed)
        assert found is not None
        assert found.what == what
        assert after_s < within_s
        assert found.now / found.planned == pytest.approx(factor, rel=0.35)
        assert what in found.described()
        assert found.since_s <= found.at_s


def test_bursty_traffic_takes_longer() -> None:
    for seed in range(0, 15, 3):
        found, after_s = noticed(cv=2.0, seed=seed, per_s=8.0)
        assert found is not None
        assert found.what == "rate"
        assert after_s < 600


def test_what_is_within_the_tolerance_is_no_drift() -> None:
    for changed in ({"per_s": 4.6}, {"prompt": 68.0}, {"output": 105.0}, {"share": 0.34}):
        assert noticed(cv=1.0, seed=7, **changed)[0] is None, changed


def test_silence_is_noticed() -> None:
    guard = DriftGuard(Envelope.of(traffic(1000)))
    assert first_drift(guard, traffic(500, seed=1)) is None
    now = 500 / 4.0
    assert guard.quiet(now + 60) is None
    found = guard.quiet(now + 3600)
    assert found is not None
    assert found.what == "rate"
    assert found.now < 0.1


def test_one_burst_is_no_drift() -> None:
    guard = DriftGuard(Envelope.of(traffic(1000)))
    assert first_drift(guard, traffic(640, seed=1)) is None
    begin_s = 640 / 4.0
    assert first_drift(guard, traffic(BATCH, per_s=400.0, begin_s=begin_s, seed=2)) is None
    assert first_drift(guard, traffic(4000, begin_s=begin_s + 1, seed=3)) is None


def test_it_tells_once_until_it_is_settled() -> None:
    guard = DriftGuard(Envelope.of(traffic(1000)))
    assert first_drift(guard, traffic(2000, per_s=16.0, seed=1)) is not None
    assert first_drift(guard, traffic(2000, per_s=16.0, seed=2)) is None
    guard.settle(Envelope.of(traffic(1000, per_s=16.0, seed=3)))
    assert first_drift(guard, traffic(4000, per_s=16.0, seed=4)) is None


def test_too_little_traffic_makes_no_envelope() -> None:
    with pytest.raises(UserError, match=f"{FEWEST - 1} requests are too few"):
        Envelope.of(traffic(FEWEST - 1))


def test_the_limit_is_siegmunds() -> None:
    """Against a simulated CUSUM: the mean run is what was asked for, to within a quarter."""
    limit = limit_for(runs=300, slack=0.5)
    draw = np.random.default_rng(0)
    runs = []
    for _ in range(300):
        total, run = 0.0, 0
        while total <= limit:
            total = max(0.0, total + float(draw.standard_normal()) - 0.5)
            run += 1
        runs.append(run)
    assert np.mean(runs) == pytest.approx(300, rel=0.25)


def test_an_engine_feeds_the_guard() -> None:
    ends: list[Timed] = []
    listener = DriftListener(
        Envelope.of(traffic(1000)), on_ended=lambda arrived_s, timed, left: ends.append(timed) if not left else None
    )
    engine = Engine()
    handles = [engine.client.submit(request(str(i), range(10 + i), max_tokens=5)) for i in range(4)]
    for handle in handles:
        handle.result()
    Lives([listener]).take_reports(engine.events)
    assert sorted((one.prompt_tokens, one.output_tokens) for one in listener.recent) == [
        (10, 5),
        (11, 5),
        (12, 5),
        (13, 5),
    ]
    assert listener.found is None
    assert len(ends) == 4 and all(one.ttft_s is not None and one.e2e_s is not None for one in ends)
    assert all(one.e2e_s >= one.ttft_s >= 0 and not one.failed for one in ends)


def told(arrivals: Iterator[Arrival], *, token_s: float = 0.01) -> Iterator[Event]:
    """What an engine with enough slots tells of these requests, in the order of its clock: they overlap, and end in another order."""
    ends: list[tuple[float, int, Arrival]] = []

    def ended(until_s: float) -> Iterator[Event]:
        while ends and ends[0][0] <= until_s:
            at_s, number, one = heapq.heappop(ends)
            last = one.output_tokens
            yield TokensOut(
                request_id=str(number),
                at_s=at_s,
                tokens=(1,),
                finish="stop",
                prompt_tokens=one.prompt_tokens,
                generated_tokens=last,
            )

    for number, one in enumerate(arrivals):
        yield from ended(one.at_s)
        yield Arrived(request_id=str(number), at_s=one.at_s, prompt_tokens=one.prompt_tokens)
        yield Scheduled(request_id=str(number), at_s=one.at_s, step=0, cached_tokens=one.cached_tokens, waited_s=0.0)
        heapq.heappush(ends, (one.at_s + token_s * one.output_tokens, number, one))
    yield from ended(math.inf)


@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_noise_is_no_drift_for_a_server_that_learns_from_its_own_traffic(cv: float) -> None:
    """The listener's whole path, as `serve` has it: 14 hours at 1 request/s a seed, and what is usual learnt from the first 1000."""
    for seed in range(4):
        found: list[Drift] = []
        learnt: list[Envelope] = []
        listener = DriftListener(on_drift=found.append, on_learnt=learnt.append)
        Lives([listener]).take_reports(told(traffic(20_000, per_s=1.0, cv=cv, seed=seed)))
        assert len(learnt) == 1 and found == [] and listener.learnt == (1000, 1000)
        assert learnt[0].requests_per_s == pytest.approx(1.0, rel=0.2)


def test_a_server_that_learns_notices_a_doubling_and_learns_anew() -> None:
    for seed in range(3):
        found: list[Drift] = []
        learnt: list[Envelope] = []
        listener = DriftListener(on_drift=found.append, on_learnt=learnt.append)
        lives = Lives([listener])
        calm = list(traffic(3000, seed=seed))
        busy = list(traffic(3000, per_s=8.0, begin_s=calm[-1].at_s, seed=seed + 100))
        lives.take_reports(told(iter(calm + busy)))
        assert [one.what for one in found] == ["rate"]
        assert found[0].at_s - busy[0].at_s < 200
        assert not learnt[0].near(Envelope.of(busy))
        since = listener.traffic(busy[-500].at_s)
        assert len(since) == 500 and since == sorted(since, key=lambda one: one.at_s)
        listener.relearn(busy[-1].at_s)
        more = list(traffic(2500, per_s=8.0, begin_s=busy[-1].at_s + 1, seed=seed + 200))
        lives.take_reports(told(iter(more)))
        assert len(found) == 1 and len(learnt) == 2 and learnt[1].near(Envelope.of(busy[500:]))


def test_who_leaves_counts_for_the_rate_alone() -> None:
    """A third of the clients leave: what is usual has their requests, but not their lengths."""
    learnt: list[Envelope] = []
    listener = DriftListener(on_learnt=learnt.append, learn=500)
    lives = Lives([listener])
    for number, one in enumerate(traffic(1200, per_s=4.0, seed=5)):
        lives.take(Arrived(request_id=str(number), at_s=one.at_s, prompt_tokens=100))
        finish: FinishReason = "abort" if number % 3 == 0 else "stop"
        said = 1 if finish == "abort" else 50
        lives.take(TokensOut(request_id=str(number), at_s=one.at_s, tokens=(), finish=finish, generated_tokens=said))
    (usual,) = learnt
    assert usual.requests_per_s == pytest.approx(4.0, rel=0.15)
    assert math.exp(usual.figures["rate"].mean) == pytest.approx(4.0, rel=0.15)
    assert math.exp(usual.figures["answer length"].mean) == pytest.approx(50)
    assert "answers of 50" in usual.described()


# ------------------------------------------------------------------------------------------------------- the next plan

GOALS = Goals(model="m", scenario="latency", max_context=2048)
SLOW_START = {"": {"ttft": 1.0}}


def test_more_traffic_gets_another_plan_and_the_same_gets_none() -> None:
    """Steps of 20 ms whatever is in them: 16 slots make 800 tokens a second, and more slots more."""
    plan = resolve(GOALS, SMOLLM2, machine())
    times = StepTime(source="made up", curve_s=(0.02,) * (len(KNOTS) + 1), extra_s=(1e-9,) * 5, steps=1)
    shape: dict[str, Any] = {"prompt": (30, 0.5), "output": (40, 0.3), "longest_output": 80, "seed": 1}
    calm = poisson_trace(requests=60, per_s=8.0, **shape)
    stays = propose(GOALS, plan, calm, times=times, targets=SLOW_START)
    assert not stays.changed
    assert stays.plan is plan
    assert stays.why.startswith("the plan in force stays")
    busy = poisson_trace(requests=200, per_s=40.0, **shape)
    drift = Drift(what="rate", at_s=60, since_s=30, planned=8.0, now=40.0)
    found = propose(GOALS, plan, busy, times=times, targets=SLOW_START, drift=drift)
    assert found.changed
    assert "rate went from 8 requests/s" in found.why
    assert found.plan.schedule.max_running > plan.schedule.max_running
    assert any(text.startswith("max_running 16 -> ") for text in found.differs)
    assert max(one.attained for one in found.tries) > found.tries[0].attained + 0.02


def test_pins_stay_pinned() -> None:
    goals = Goals(model="m", scenario="latency", max_context=2048, means=Means(max_running=16))
    plan = resolve(goals, SMOLLM2, machine())
    busy = poisson_trace(requests=60, per_s=4.0, longest_prompt=200, longest_output=60, seed=1)
    found = propose(goals, plan, busy, times=roofline(plan), targets=SLOW_START)
    assert found.plan.schedule.max_running == 16


def test_a_plans_envelope_and_newest_traffic_as_a_trace() -> None:
    plan = resolve(GOALS, SMOLLM2, machine())
    trace = poisson_trace(requests=200, per_s=2.0, prefixes=3, prefix_blocks=2, longest_output=40, longest_prompt=200)
    envelope = envelope_of(trace, plan, times=roofline(plan))
    assert envelope.requests == 200
    assert envelope.requests_per_s == pytest.approx(2.0, rel=0.2)
    run = simulated(trace, plan, times=roofline(plan), options=SimulateOptions())
    arrivals = arrivals_of(run.outcome)
    assert sum(one.cached_tokens for one in arrivals) > 0
    again = trace_of(arrivals)
    assert again.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    with pytest.raises(UserError, match="no request has ended yet"):
        trace_of([])


def test_a_trial_is_kept_or_undone() -> None:
    old, new = resolve(GOALS, SMOLLM2, machine()), resolve(Goals(model="m"), SMOLLM2, machine())
    assert differences(old, old) == ()
    good = Trial(old, new, before=0.6, requests=100)
    for index in range(100):
        assert good.verdict is None
        good.done(index % 10 != 0)
    assert good.verdict is new
    bad = Trial(old, new, before=0.9, requests=100)
    told = 0
    while bad.verdict is None:
        bad.done(False)
        told += 1
    assert bad.verdict is old
    assert told < 20, "what is plainly worse is undone early"
