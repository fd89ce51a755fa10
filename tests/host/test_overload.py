"""Overload as the plan has it: who is protected, how far the ladder goes, what an idle engine takes back, and what is told of it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from plans import SMOLLM2, machine
from support_engine import cache_plan, request, schedule_plan
from support_reports import Facts

from tradewind.config.goals import Goals, Match, Means, TrafficClass
from tradewind.config.goals_file import parse_goals
from tradewind.config.plan import ClassPlan, DegradePlan, Plan, SchedulePlan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError
from tradewind.contract.events import TokensOut
from tradewind.engine.degrade import LOW_ADMISSION, SHORT_ANSWERS, DegradeStats, Ladder, degrader_of, pinned
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.pacing import OverloadedError
from tradewind.engine.scheduler import Scheduler
from tradewind.engine.step_watch import StepTimeStats
from tradewind.observability.board import Board
from tradewind.observability.metrics import Metrics
from tradewind.simulate.clock import VirtualClock
from tradewind.simulate.forecast import Price, forecast, trace_of
from tradewind.simulate.scripted import ScriptedExecutor
from tradewind.simulate.simulator import SimulateOptions
from tradewind.simulate.steptime import KNOTS, StepTime

CHAT = TrafficClass(
    name="chat", match=Match(header=("x-tier", "chat")), ttft_ms=500, tpot_ms=40, share=0.7, prompt_tokens=150, output_tokens=60
)  # fmt: skip
BULK = TrafficClass(name="bulk", share=0.3, prompt_tokens=1200, output_tokens=120)


def planned(*classes: TrafficClass, means: Means | None = None, **goals: Any) -> Plan:
    return resolve(Goals(model="m", classes=classes, means=means or Means(), **goals), SMOLLM2, machine())


def reason(plan: Plan) -> Any:
    (found,) = [one for one in plan.reasons if one.choice == "degrade"]
    return found


# -- the choice ----------------------------------------------------------------------------------------------------------


def test_it_is_off_where_nobody_could_give_way() -> None:
    for plan, why in (
        (planned(), "no class has a TTFT or TPOT target"),
        (planned(BULK), "no class has a TTFT or TPOT target"),
        (planned(msgspec.structs.replace(CHAT, match=Match())), "all requests are alike"),
        (planned(ttft_ms=200.0), "no class has"),
    ):
        assert plan.schedule.degrade is None and why in reason(plan).why and not reason(plan).pinned


def test_it_is_lossless_unless_the_quality_budget_allows_more() -> None:
    for quality in (None, 0.0):
        plan = planned(CHAT, BULK, quality_loss_percent=quality)
        assert plan.schedule.degrade == DegradePlan(far="lossless")
        assert "for chat: " in reason(plan).why and reason(plan).rejected.startswith("full: refuses")
    plan = planned(CHAT, BULK, quality_loss_percent=1.0)
    assert plan.schedule.degrade == DegradePlan(far="full") and "budget of 1 %" in reason(plan).why


def test_requests_of_no_class_are_below_one_with_a_target() -> None:
    assert planned(CHAT).schedule.degrade is not None
    vip = msgspec.structs.replace(CHAT, name="vip", match=Match(priority=-1))
    rest = msgspec.structs.replace(CHAT, name="rest", match=Match(), share=0.3)
    plan = planned(vip, rest)
    assert plan.schedule.degrade is not None and "for vip: " in reason(plan).why, "priorities tell alike classes apart"


def test_it_can_be_asked_for_and_refused() -> None:
    off = planned(CHAT, BULK, means=Means(degrade="off"))
    assert off.schedule.degrade is None and reason(off).pinned
    asked = planned(means=Means(degrade="full"))
    assert asked.schedule.degrade == DegradePlan(far="full", ttft_s=1.0), "of whoever has the highest priority"
    stated = planned(means=Means(degrade="lossless"), ttft_ms=300.0, tpot_ms=50.0)
    assert stated.schedule.degrade == DegradePlan(far="lossless", ttft_s=0.3, tpot_s=0.05)
    with pytest.raises(UserError, match="state a quality budget over 0 or use degrade lossless"):
        planned(CHAT, BULK, means=Means(degrade="full"), quality_loss_percent=0.0)
    assert planned(CHAT, means=Means(degrade="full"), quality_loss_percent=0.1).schedule.degrade is not None


def test_the_file_of_goals_says_it_too() -> None:
    text = 'model = "m"\n{}[[class]]\nname = "chat"\nmatch = {{ priority = -1 }}\nttft = "500ms"\n[means]\ndegrade = "{}"\n'
    assert parse_goals(text.format("", "lossless")).means.degrade == "lossless"
    assert parse_goals(text.format('quality = "1%"\n', "full")).means.degrade == "full"
    with pytest.raises(UserError, match="quality_loss_percent is 0"):
        parse_goals(text.format("", "full"))
    with pytest.raises(UserError, match="degrade"):
        parse_goals(text.format("", "sometimes"))


# -- the ladder of a plan ------------------------------------------------------------------------------------------------


def ladder_plan(far: str, **more: Any) -> SchedulePlan:
    return msgspec.structs.replace(
        schedule_plan(policy="priority", max_running=4, steps_in_flight=1),
        classes=(ClassPlan(name="chat", ttft_s=0.2),),
        degrade=DegradePlan(far=far, **more),  # type: ignore[arg-type]
    )


def pressed(schedule: SchedulePlan, *, seconds: float) -> tuple[Scheduler, VirtualClock, ScriptedExecutor, EngineLoop]:
    """An engine in which a chat request waits for a slot that four others of its class have, for so long."""
    clock = VirtualClock()
    cache = cache_plan(pages=(400,))
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=4, clock=clock, delay_s=0.05)
    loop = EngineLoop(scheduler=scheduler, executor=device, clock=clock.now)
    for number in range(8):
        loop.post(Add(request(f"chat{number}", [number, 2], max_tokens=round(seconds / 0.05), traffic_class="chat")))
    loop.post(Add(request("bulk", [99, 2], max_tokens=200)))
    until = clock.now() + seconds
    while clock.now() < until:
        loop.run_once()
    return scheduler, clock, device, loop


@pytest.mark.parametrize(("far", "most"), [("lossless", LOW_ADMISSION), ("full", SHORT_ANSWERS)])
def test_it_goes_as_far_as_planned(far: str, most: int) -> None:
    scheduler, clock, _, _ = pressed(ladder_plan(far), seconds=4.0)
    state = scheduler.degraded
    assert state is not None and state.level == state.most == most and state.pressure > 1
    assert state.ups == most - 1, "there are no guesses to give up"
    if far == "lossless":
        assert state.refused == 0 and scheduler.state_of("bulk") is not None
        scheduler.add(request("late", [7, 7]), clock.now())
        return
    assert state.refused == 1 and scheduler.state_of("bulk") is None
    with pytest.raises(OverloadedError, match="too busy"):
        scheduler.add(request("late", [7, 7]), clock.now())
    assert scheduler.degraded is not None and scheduler.degraded.refused == 2


def test_who_waits_and_is_refused_is_told_to_come_again() -> None:
    """As an overload, like whoever is refused when it comes: HTTP makes 429 of both."""
    events: list[Any] = []

    class Keep:
        def take(self, event: Any) -> None:
            events.append(event)

    clock, cache, schedule = VirtualClock(), cache_plan(pages=(400,)), ladder_plan("full")
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=4, clock=clock, delay_s=0.05)
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    loop = EngineLoop(scheduler=scheduler, executor=device, clock=clock.now, sinks=(Keep(),))
    for number in range(8):
        loop.post(Add(request(f"chat{number}", [number, 2], max_tokens=60, traffic_class="chat")))
    loop.post(Add(request("bulk", [99, 2], max_tokens=60)))
    for _ in range(60):
        loop.run_once()
    (end,) = [e for e in events if isinstance(e, TokensOut) and e.request_id == "bulk" and e.finish]
    assert end.finish == "error" and end.overloaded and "too busy" in (end.error or "")
    loop.close()


def test_an_idle_engine_takes_everything_back_by_itself() -> None:
    scheduler, clock, _, loop = pressed(ladder_plan("full"), seconds=2.0)
    scheduler.cancel_all(clock.now())
    while loop.busy:
        loop.run_once()
    began = clock.now()
    state = scheduler.degraded
    assert state is not None and state.level == SHORT_ANSWERS
    waits: list[float] = []
    while (wait := loop.rest()) is not None:
        waits.append(wait)
        clock.advance(wait)
    state = scheduler.degraded
    assert state == DegradeStats(level=0, pressure=0.0, ups=4, downs=4, refused=1, shortened=0)
    assert len(waits) == 4 and 9 < clock.now() - began <= 12.1, "a rung for each 3 s"
    scheduler.add(request("bulk2", [7, 7]), clock.now())


def test_whoever_comes_to_an_idle_engine_is_not_refused_for_a_flood_long_past() -> None:
    """Where nobody calls `rest` (the Python API), the next request finds what time has given back."""
    scheduler, clock, _, loop = pressed(ladder_plan("full"), seconds=2.0)
    scheduler.cancel_all(clock.now())
    while loop.busy:
        loop.run_once()
    clock.advance(1.0)
    with pytest.raises(OverloadedError):
        scheduler.add(request("soon", [7, 7]), clock.now())
    clock.advance(6.0)
    scheduler.add(request("later", [7, 7]), clock.now())
    assert scheduler.degraded is not None and 0 < scheduler.degraded.level < 4


def test_requests_without_a_target_are_no_reason_to_climb() -> None:
    schedule = msgspec.structs.replace(ladder_plan("full"), classes=(ClassPlan(name="chat", ttft_s=0.2),))
    degrader = degrader_of(schedule)
    assert degrader is not None and degrader_of(schedule_plan()) is None
    clock, cache = VirtualClock(), cache_plan(pages=(400,))
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=4, clock=clock, delay_s=0.05)
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock.now)
    loop = EngineLoop(scheduler=scheduler, executor=device, clock=clock.now)
    for number in range(20):
        loop.post(Add(request(f"b{number}", [number, 2], max_tokens=30)))
    while loop.busy:
        loop.run_once()
    assert scheduler.degraded == DegradeStats()


def test_a_scripts_ladder_goes_as_far_as_asked() -> None:
    own = Ladder(ttft_s=0.1)
    assert pinned(own, None) is own and pinned(None, None) is None and pinned(own, "off") is None
    assert pinned(own, "lossless") == Ladder(ttft_s=0.1, most=LOW_ADMISSION)
    assert pinned(None, "full") == Ladder()


# -- goals to attainment -------------------------------------------------------------------------------------------------

TIMES = StepTime(source="t", curve_s=(0.002, *(0.002 + 0.0004 * k for k in KNOTS)), extra_s=(2e-7, 4e-8, 8e-4, 1e-4, 0))


def priced(degrade: str, *, policy: str, rate: float, requests: int = 200) -> Price:
    goals = Goals(
        model="m", requests_per_s=rate, classes=(CHAT, BULK), means=Means(policy=policy, degrade=degrade)  # type: ignore[arg-type]
    )  # fmt: skip
    plan = resolve(goals, SMOLLM2, machine())
    trace = trace_of(goals, requests=requests)
    return forecast(trace, plan=plan, goals=goals, times=TIMES, options=SimulateOptions(noise=False))


def attained(price: Price) -> float:
    assert price.attained is not None
    return price.attained.share


@pytest.mark.parametrize("policy", ["arrival", "slo"])
def test_the_plans_ladder_keeps_the_chat_class_in_time(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Twice what the machine can do, on a virtual clock: the same figures on every machine."""
    without = priced("off", policy=policy, rate=5.0)
    with caplog.at_level(logging.WARNING, logger="tradewind.engine"):
        helped = priced("full", policy=policy, rate=5.0)
    assert attained(helped) > attained(without) + 0.05, (attained(helped), attained(without))
    assert without.refused == 0 and 0 < helped.refused <= 0.35 * helped.requests
    (chat,) = [one for one in helped.classes if one.traffic_class == "chat"]
    assert chat.failed == 0, "nobody of the protected is refused"
    assert not caplog.records, "a simulation logs what its engine would"


@pytest.mark.parametrize("policy", ["arrival", "slo"])
def test_the_lossless_ladder_costs_no_answer_and_hardly_any_speed(policy: str) -> None:
    without, helped = (priced(degrade, policy=policy, rate=3.0) for degrade in ("off", "lossless"))
    assert helped.finished == helped.requests and helped.refused == 0
    assert attained(helped) >= attained(without) - 0.01
    assert helped.output_tokens_per_s > 0.95 * without.output_tokens_per_s


# -- what is told --------------------------------------------------------------------------------------------------------


def test_metrics_and_board_tell_rung_and_step_times() -> None:
    facts = Facts(
        degrade=DegradeStats(level=2, pressure=1.4, ups=3, downs=1, refused=7, shortened=2),
        step_times=StepTimeStats(steps=400, held_out=100, error_median=0.04, error_p90=0.2, refits=3, paces=True),
    )
    metrics = Metrics(model="m", version="1", facts=lambda: facts)
    text = metrics.text()
    for line in (
        'tradewind:degrade_level{model_name="m"} 2',
        'tradewind:degrade_pressure{model_name="m"} 1.4',
        'tradewind:degrade_changes_total{model_name="m",direction="up"} 3',
        'tradewind:degrade_changes_total{model_name="m",direction="down"} 1',
        'tradewind:degrade_refused_total{model_name="m"} 7',
        'tradewind:degrade_shortened_total{model_name="m"} 2',
        'tradewind:step_time_error_ratio{model_name="m",quantile="0.5"} 0.04',
        'tradewind:step_time_error_ratio{model_name="m",quantile="0.9"} 0.2',
        'tradewind:step_time_fitted_steps{model_name="m"} 400',
        'tradewind:step_time_refits_total{model_name="m"} 3',
        'tradewind:step_time_paces{model_name="m"} 1',
    ):
        assert line in text.splitlines(), line
    state = Board(model="m", version="1", max_running=4, facts=lambda: facts, clock=lambda: 0.0).state()
    assert state.overload is not None and (state.overload.level, state.overload.gives_up) == (2, "chunks")
    assert (state.overload.changes, state.overload.refused) == (4, 7)
    assert state.step_times is not None and state.step_times.error_p50 == 0.04 and state.step_times.paces


def test_where_there_is_neither_nothing_is_told() -> None:
    text = Metrics(model="m", version="1", facts=Facts).text()
    assert "degrade" not in text and "step_time" not in text
    state = Board(model="m", version="1", max_running=4, facts=Facts, clock=lambda: 0.0).state()
    assert state.overload is None and state.step_times is None


def test_an_engine_that_has_not_fitted_yet_tells_no_error() -> None:
    text = Metrics(model="m", version="1", facts=lambda: Facts(step_times=StepTimeStats())).text()
    assert "step_time_error_ratio" not in text and 'step_time_fitted_steps{model_name="m"} 0' in text
