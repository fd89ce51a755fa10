"""The degrade ladder: it climbs under overload and comes back, protects the class that matters, and says what it does."""

from __future__ import annotations

import logging
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support_engine import cache_plan, request, schedule_plan

from tradewind.config.plan import ClassPlan, SchedulePlan
from tradewind.contract.events import Arrived, TokensOut
from tradewind.contract.request import Request
from tradewind.contract.step import Step, Wants
from tradewind.engine.degrade import FREE, RUNGS, Change, Degrader, Ladder
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.pacing import OverloadedError
from tradewind.engine.scheduler import Scheduler
from tradewind.engine.sequence import Sequence, State
from tradewind.simulate.clock import VirtualClock
from tradewind.simulate.scripted import ScriptedExecutor

HIGH, MIDDLE, LOW = -1, 0, 5
NONE = np.zeros(8, np.int32)
"""No slot has written anything."""
TTFT_S, TPOT_S = 0.5, 0.08


def plan(**more: Any) -> SchedulePlan:
    return schedule_plan(**{"policy": "priority", "max_running": 8, "max_tokens_per_step": 64, **more})


def waiting(name: str, *, since: float = 0.0, priority: int = HIGH, **more: Any) -> Sequence:
    return Sequence(request(name, [1, 2, 3], priority=priority, **more), arrived_s=since, place=0)


def pressed(degrader: Degrader, sequence: Sequence, *, begin: float, seconds: float) -> None:
    """Lets somebody wait for so long, looked at each 50 ms."""
    for place in range(round(seconds / 0.05)):
        degrader(begin + 0.05 * place, [sequence], flying=0, generated=NONE)


def ladder(**more: Any) -> Ladder:
    return Ladder(**{"ttft_s": TTFT_S, "up_s": 0.2, "down_s": 1.0, **more})


# -- the ladder alone ----------------------------------------------------------------------------------------------------


def test_it_climbs_a_rung_at_a_time_and_comes_back_a_rung_at_a_time() -> None:
    heard: list[Change] = []
    degrader = Degrader(plan(), ladder(), told=heard.append)
    degrader.come(request("h", [1], priority=HIGH), 0.0)
    pressed(degrader, waiting("h"), begin=1.0, seconds=3.0)
    assert degrader.level == len(RUNGS) - 1 and degrader.pressure > 1
    ups = [(change.was, change.now) for change in heard]
    assert ups == list(pairwise(RUNGS)), "no rung is left out"
    assert all(later.at_s - sooner.at_s >= 0.2 - 1e-9 for sooner, later in pairwise(heard))
    at = 10.0
    while degrader.level:
        assert at < 30
        degrader(at, [], flying=0, generated=NONE)
        at += 0.05
    downs = heard[len(ups) :]
    assert [(change.was, change.now) for change in downs] == [(b, a) for a, b in reversed(ups)]
    assert all(later.at_s - sooner.at_s >= 1.0 - 1e-9 for sooner, later in pairwise(downs))
    assert degrader(at + 1, [], flying=0, generated=NONE) is FREE and list(degrader.changes) == heard


def test_between_the_thresholds_nothing_changes() -> None:
    degrader = Degrader(plan(), ladder(wait_part=0.6, wait_down=0.3))
    degrader.come(request("h", [1], priority=HIGH), 0.0)
    pressed(degrader, waiting("h"), begin=0.5, seconds=0.3)
    level = degrader.level
    assert level >= 1
    for place in range(400):  # always 0.4 of the target
        now = 2 + 0.05 * place
        degrader(now, [waiting("h", since=now - 0.4 * TTFT_S)], flying=0, generated=NONE)
    assert degrader.level == level


def test_a_rung_that_was_taken_back_too_early_is_kept_longer_the_next_time() -> None:
    degrader = Degrader(plan(), ladder(down_s=1.0, most_down_s=4.0))
    degrader.come(request("h", [1], priority=HIGH), 0.0)
    for place in range(1200):  # whoever takes the only rung back is under pressure at once
        now = 0.05 * place
        degrader(now, [waiting("h", since=now - 0.5)] if degrader.level == 0 else [], flying=0, generated=NONE)
        degrader.come(request("h", [1], priority=HIGH), now)
    kept = [down.at_s - up.at_s for up, down in pairwise(degrader.changes) if up.now == "drafts"]
    assert kept[0] == pytest.approx(1.0, abs=0.11)
    assert kept[1] == pytest.approx(2.0, abs=0.2) and all(3.8 < one < 4.2 for one in kept[2:])


def test_a_short_peak_is_no_overload() -> None:
    degrader = Degrader(plan(), ladder(up_s=0.5))
    degrader.come(request("h", [1], priority=HIGH), 0.0)
    for place in range(200):
        now = 0.05 * place
        degrader(now, [waiting("h", since=now - 0.4)] if place % 8 < 4 else [], flying=0, generated=NONE)
    assert degrader.level == 0


def test_only_the_highest_class_counts() -> None:
    degrader = Degrader(plan(), ladder())
    degrader.come(request("h", [1], priority=HIGH), 0.0)
    pressed(degrader, waiting("l", priority=LOW), begin=5.0, seconds=3.0)
    assert degrader.level == 0
    pressed(degrader, waiting("l", priority=LOW), begin=70.0, seconds=3.0)
    assert degrader.level == 0, "nobody of any class came for a minute: there is nobody to protect"


def test_a_slow_step_counts_against_the_time_of_a_token() -> None:
    degrader = Degrader(plan(), ladder(tpot_s=0.1))
    running = waiting("h")
    degrader.come(running.request, 0.0)
    running.state, running.slot = State.RUNNING, 0
    for place in range(20):
        degrader(0.2 * place, [running], flying=1, generated=NONE + 1)
    assert degrader.level > 0 and "a step takes" in degrader.changes[0].why


def test_classes_of_the_plan_say_who_is_protected_and_by_what() -> None:
    classes = (ClassPlan(name="chat", ttft_s=0.2), ClassPlan(name="bulk"))
    degrader = Degrader(_with_classes(classes), ladder(ttft_s=99.0))
    chat, bulk = request("c", [1], traffic_class="chat"), request("b", [1], traffic_class="bulk")
    assert degrader.rank(chat) < degrader.rank(bulk)
    for one in (chat, bulk):
        degrader.come(one, 0.0)
    pressed(degrader, Sequence(chat, arrived_s=0.0, place=0), begin=0.2, seconds=3.0)
    assert degrader.level == len(RUNGS) - 1
    with pytest.raises(OverloadedError, match="too busy"):
        degrader.come(bulk, 3.0)
    assert degrader.come(chat, 3.0) is chat


def _with_classes(classes: tuple[ClassPlan, ...]) -> SchedulePlan:
    import msgspec

    return msgspec.structs.replace(plan(), classes=classes)


def test_what_each_rung_gives_up() -> None:
    degrader = Degrader(plan(), ladder())
    requests = {p: request(str(p), [1], priority=p, max_tokens=500) for p in (HIGH, MIDDLE, LOW)}
    for one in requests.values():
        degrader.come(one, 0.0)
    high, low, cut = waiting("h"), waiting("l", priority=LOW), waiting("cut", priority=LOW)
    cut.generated = 3
    seen: dict[int, Any] = {}
    for place in range(60):
        now = 1.0 + 0.05 * place
        limits = degrader(now, [high, low, cut], flying=0, generated=NONE)
        seen.setdefault(degrader.level, limits)
    assert [seen[level].drafts for level in (1, 5)] == [0, 0]
    assert seen[1].chunk_tokens is None and seen[2].chunk_tokens == 16
    assert seen[2].admits is None and seen[3].admits is not None
    assert not seen[3].admits(low, 4) and seen[3].admits(low, 3) and seen[3].admits(high, 8)
    assert list(seen[3].ended) == [] and list(seen[4].ended) == [low], "what was begun is never cut"
    assert "too busy" in seen[4].why
    assert (
        degrader.come(requests[MIDDLE], 4.0).max_tokens == 64 and degrader.come(requests[HIGH], 4.0).max_tokens == 500
    )
    with pytest.raises(OverloadedError) as refused:
        degrader.come(requests[LOW], 4.0)
    assert refused.value.http_status == 429


def test_where_all_are_alike_nobody_is_refused() -> None:
    degrader = Degrader(plan(), ladder())
    only = request("a", [1])
    degrader.come(only, 0.0)
    pressed(degrader, waiting("a", priority=0), begin=1.0, seconds=3.0)
    assert degrader.level == 5 and degrader.come(only, 4.0) is only
    assert list(degrader(4.1, [waiting("a", priority=0)], flying=0, generated=NONE).ended) == []


def test_every_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    degrader = Degrader(plan(), ladder())
    degrader.come(request("h", [1], priority=HIGH), 0.0)
    with caplog.at_level(logging.WARNING, logger="tradewind.engine"):
        pressed(degrader, waiting("h"), begin=1.0, seconds=0.3)
    record = caplog.records[0]
    assert len(caplog.records) == len(degrader.changes) == degrader.level
    assert "rung 1 of 5" in record.message and "gives up drafts" in record.message and "has waited" in record.message


def test_priorities_are_the_clients_numbers_and_are_forgotten() -> None:
    degrader = Degrader(plan(), ladder())
    for number in range(5000):
        degrader.come(request("x", [1], priority=number), float(number))
    assert len(degrader._seen) <= 64


# -- in the scheduler ----------------------------------------------------------------------------------------------------


class Overloaded:
    """A device whose steps cost time for each token, and traffic of a high and a low class, on a virtual clock."""

    def __init__(self, *, degrade: bool, drafts: int = 0, slots: int = 8, policy: str = "priority") -> None:
        self.clock = VirtualClock()
        self.schedule = plan(policy=policy, max_running=slots, max_tokens_per_step=256, max_context=512)
        cache = cache_plan(pages=(801,), page_tokens=16, prefix_cache=False)
        self.degrader = Degrader(self.schedule, ladder(down_s=2.0, tpot_s=TPOT_S)) if degrade else None
        self.scheduler = Scheduler(
            schedule=self.schedule, cache=cache, clock=self.clock.now, drafts_per_row=drafts, degrade=self.degrader
        )
        self.device = ScriptedExecutor(
            groups=cache.groups,
            pages=cache.pages,
            max_running=slots,
            clock=self.clock,
            delay_s=self.cost,
            accept=lambda *_: 0,
        )
        self.loop = EngineLoop(scheduler=self.scheduler, executor=self.device, clock=self.clock.now, sinks=(self,))
        self.arrived: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.ended: dict[str, TokensOut] = {}

    @staticmethod
    def cost(step: Step) -> float:
        return 0.010 + 0.0006 * float(step.count.sum())

    def take(self, event: Any) -> None:
        if isinstance(event, Arrived):
            self.arrived[event.request_id] = event.at_s
        elif isinstance(event, TokensOut):
            if event.tokens:
                self.first.setdefault(event.request_id, event.at_s)
            if event.finish is not None:
                self.ended[event.request_id] = event

    def run(self, traffic: list[tuple[float, Request]], *, check_every: int = 50) -> None:
        left, turn = sorted(traffic, key=lambda pair: pair[0])[::-1], 0
        while left or self.loop.busy:
            now = self.clock.now()
            if left and not self.loop.busy and left[-1][0] > now:
                self.clock.advance(left[-1][0] - now)
            while left and left[-1][0] <= self.clock.now():
                self.loop.post(Add(left.pop()[1]))
            self.loop.run_once()
            turn += 1
            if turn % check_every == 0:
                self.scheduler.check()
            assert turn < 200_000
        self.scheduler.check()

    def attained(self, name: str) -> float:
        """Of the requests of a class, the part that met both targets."""
        mine = [key for key in self.arrived if key.startswith(name)]
        return sum(self._met(key) for key in mine) / len(mine)

    def _met(self, key: str) -> bool:
        end = self.ended[key]
        if key not in self.first or end.finish == "error":
            return False
        tpot_s = (end.at_s - self.first[key]) / max(1, end.generated_tokens - 1)
        return self.first[key] - self.arrived[key] <= TTFT_S and tpot_s <= TPOT_S


def traffic(*, overload_until: float, end: float, seed: int = 0) -> list[tuple[float, Request]]:
    """High: 2/s all the time. Low: 8/s of long prompts and answers until `overload_until`, then none."""
    rng = random.Random(seed)
    out: list[tuple[float, Request]] = []
    for name, rate, last, prompt, answer, priority in (
        ("high", 2.0, end, 64, 16, HIGH),
        ("low", 8.0, overload_until, 300, 20, LOW),
    ):
        at, number = rng.expovariate(rate), 0
        while at < last:
            tokens = [rng.randrange(1000) for _ in range(prompt)]
            out.append((at, request(f"{name}{number}", tokens, max_tokens=answer, priority=priority)))
            at, number = at + rng.expovariate(rate), number + 1
    return out


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("policy", ["arrival", "priority"])
def test_the_high_class_keeps_its_target_under_overload_and_all_is_given_back(policy: str, seed: int) -> None:
    load = traffic(overload_until=20.0, end=60.0, seed=seed)
    without, with_ladder = (Overloaded(degrade=degrade, policy=policy) for degrade in (False, True))
    for one in (without, with_ladder):
        one.run(load)
    kept, lost = with_ladder.attained("high"), without.attained("high")
    # Without preemption the protected wait for slots that others have, each time that a rung is tried without.
    # With priorities the engine without a ladder loses less, since no step begins slivers of the low class's prompts.
    assert kept >= (0.95 if policy == "priority" else 0.85) and lost < kept - 0.1, (kept, lost)
    degrader = with_ladder.degrader
    assert degrader is not None and degrader.changes, "it was needed"
    now = with_ladder.clock.now()
    for place in range(2 * 2400):
        degrader(now + 0.05 * place, [], flying=0, generated=NONE)
    assert degrader.level == 0 and degrader.changes[-1].now == "none", "and all is given back"
    refused = [event for event in with_ladder.ended.values() if event.finish == "error"]
    assert all("too busy" in (event.error or "") and event.request_id.startswith("low") for event in refused)
    assert all(not event.generated_tokens for event in refused), "no answer that had begun was cut"
    assert len(with_ladder.ended) == len(load), "everybody got an end"
    assert [k for k, e in with_ladder.ended.items() if k.startswith("high") and e.finish != "length"] == []


def test_without_overload_the_ladder_changes_nothing() -> None:
    """The same steps with it and without it."""
    load = traffic(overload_until=0.0, end=10.0)
    without, with_ladder = Overloaded(degrade=False), Overloaded(degrade=True)
    for one in (without, with_ladder):
        one.run(load)
    assert with_ladder.degrader is not None and not with_ladder.degrader.changes
    assert [(s.number, s.slot.tolist(), s.count.tolist()) for s in with_ladder.device.steps] == [
        (s.number, s.slot.tolist(), s.count.tolist()) for s in without.device.steps
    ]


def test_shed_drafts_leave_the_answers_as_they_were() -> None:
    answers: list[dict[str, int]] = []
    widths: list[set[int]] = []
    for degrade in (False, True):
        made = Overloaded(degrade=degrade, drafts=2)
        if made.degrader is not None:
            made.degrader.level = 1
            made.degrader._limits = made.degrader._limits_at(1)
        made.run([(0.0, request("high0", range(40), max_tokens=12, priority=HIGH))])
        answers.append({key: event.generated_tokens for key, event in made.ended.items()})
        widths.append(
            {int(c) for s in made.device.steps for c, w in zip(s.count, s.wants, strict=True) if w == Wants.ALL}
        )
    assert answers[0] == answers[1] == {"high0": 12}
    assert max(widths[0]) == 3 and widths[1] == {1}


def test_held_requests_start_when_nothing_else_runs() -> None:
    """The unprotected are never held beside an empty engine: nobody would wake it."""
    made = Overloaded(degrade=True)
    assert made.degrader is not None
    made.degrader.come(request("high", [1], priority=HIGH), 0.0)
    made.degrader.level = 3
    made.degrader._limits = made.degrader._limits_at(3)
    made.run([(0.0, request(f"low{n}", range(50 + n), max_tokens=10, priority=LOW)) for n in range(12)])
    assert len(made.ended) == 12 and {event.finish for event in made.ended.values()} == {"length"}
    running = [len(step.slot) for step in made.device.steps]
    assert max(running) <= made.schedule.max_running // 2 + 1
