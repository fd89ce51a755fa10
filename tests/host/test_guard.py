"""The guard's round on a clock of its own: drift, proposal, change, trial, and from there kept or undone; and it does not flap."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from plans import SMOLLM2, machine

from tradewind.config.goals import Goals, Means, TrafficClass
from tradewind.config.resolve import resolve
from tradewind.contract.events import Arrived, FinishReason, Scheduled, TokensOut
from tradewind.observability.attainment import Timed
from tradewind.observability.drift import Arrival, Drift, Envelope
from tradewind.observability.lives import Lives
from tradewind.observability.metrics import Page
from tradewind.simulate.trace_columns import TraceLine
from tradewind.tune.guard import Mode, Patience, PlanGuard, Proposed, Targets, met_by, targets_of, usual_targets
from tradewind.tune.planner import AskPlan, AskUsual, Planned, Question, Refused, Usual, answer
from tradewind.tune.trial import Try

GOALS = Goals(model="m", ttft_ms=100.0)
OTHER = Goals(model="m", ttft_ms=100.0, means=Means(max_running=128))
THIRD = Goals(model="m", ttft_ms=100.0, means=Means(max_running=256))
PATIENCE = Patience(learn=256, gather=64, trial=40, pause_s=100.0, put_off_s=10.0)
TRIES = (
    Try(name="as it is", attained=0.2, ttft_p90_s=1.0, tpot_p90_s=0.1),
    Try(name="max_running 128", attained=0.9, ttft_p90_s=0.1, tpot_p90_s=0.1),
)


class Hands:
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.simulations: list[dict[str, Any]] = []
        self.changes: list[tuple[Goals, bool]] = []
        self.kept = 0

    def simulate(
        self, drift: Drift, traffic: list[Arrival], *, usual: list[Arrival], targets: Targets, goals: Goals
    ) -> None:
        self.simulations.append(
            {"drift": drift, "traffic": traffic, "usual": usual, "targets": targets, "goals": goals}
        )

    def change(self, goals: Goals, *, trial: bool) -> None:
        self.changes.append((goals, trial))

    def keep(self) -> None:
        self.kept += 1


class Served:
    """A server as the guard sees it, on a clock that is only told."""

    def __init__(self, mode: Mode = "apply", *, goals: Goals = GOALS, patience: Patience = PATIENCE) -> None:
        self.now = 0.0
        self.hands = Hands()
        self.said: list[tuple[str, str]] = []
        self.guard = PlanGuard(
            mode=mode,
            goals=goals,
            hands=self.hands,
            patience=patience,
            clock=lambda: self.now,
            wall=lambda: 1e9 + self.now,
            log=lambda what, says: self.said.append((what, says)),
        )
        self.lives = Lives([self.guard.listener])
        self.draw = np.random.default_rng(0)
        self.number = 0

    def serve(
        self,
        requests: int,
        *,
        per_s: float = 4.0,
        ttft_s: float = 0.05,
        prompt: int = 100,
        finish: FinishReason = "stop",
        until: Callable[[], bool] = lambda: False,
    ) -> int:
        """So many requests, one after the other; how many it took until `until` was true."""
        for count in range(requests):
            self.now += float(self.draw.exponential(1 / per_s))
            self.number += 1
            name = str(self.number)
            length = max(1, int(self.draw.normal(prompt, prompt / 10)))
            said = max(2, int(self.draw.normal(50, 5)))
            at_s = self.now
            tokens = TokensOut(request_id=name, at_s=at_s + ttft_s, tokens=(1,), generated_tokens=1)
            self.lives.take_reports(
                (
                    Arrived(request_id=name, at_s=at_s, prompt_tokens=length),
                    Scheduled(request_id=name, at_s=at_s, step=1, cached_tokens=0, waited_s=0.0),
                    *(() if finish in ("abort", "error") else (tokens,)),
                    TokensOut(
                        request_id=name, at_s=at_s + ttft_s + 0.5, tokens=(1,), finish=finish, generated_tokens=said
                    ),
                )
            )
            self.guard.tick()
            if until():
                return count + 1
        return requests

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.guard.tick()

    def kinds(self) -> list[str]:
        return [what for what, _ in self.said]

    def learn(self) -> None:
        self.serve(1000, until=lambda: self.guard.state == "watching")
        assert self.guard.state == "watching"

    def drift(self, *, ttft_s: float = 0.5, per_s: float = 16.0) -> None:
        """The rate is four times what it was, and first tokens are late."""
        self.serve(2000, per_s=per_s, ttft_s=ttft_s, until=lambda: self.guard.state in ("gathering", "simulating"))
        assert self.guard.state in ("gathering", "simulating")

    def asked(self, *, ttft_s: float = 0.5, per_s: float = 16.0) -> None:
        """Up to the question what to do."""
        self.learn()
        self.drift(ttft_s=ttft_s, per_s=per_s)
        self.serve(500, per_s=per_s, ttft_s=ttft_s, until=lambda: self.guard.state == "simulating")
        assert self.guard.state == "simulating"

    def on_trial(self, goals: Goals = OTHER) -> None:
        self.asked()
        self.guard.simulated(proposed(goals))
        assert self.guard.state == "changing" and self.hands.changes[-1] == (goals, True)
        self.now += 3
        self.guard.changed("changed", took_s=3.0, waited=7)
        assert self.guard.state == "trial"


def proposed(goals: Goals = OTHER, *, changed: bool = True) -> Proposed:
    return Proposed(
        goals=goals,
        changed=changed,
        differs=("max_running 64 -> 128",) if changed else (),
        why="max_running 128 after the drift" if changed else "the plan in force stays",
        tries=TRIES,
        targets=targets_of(goals),
        step_times="step times: made up",
    )


# ----------------------------------------------------------------------------------------------------------------- rounds


def test_calm_traffic_changes_nothing_and_asks_nothing() -> None:
    for seed in range(5):
        served = Served()
        served.draw = np.random.default_rng(seed)
        served.serve(5000)
        assert served.kinds() == ["learnt"] and served.guard.says is None
        assert not served.hands.simulations and not served.hands.changes


def test_tell_only_tells_once_and_says_when_it_is_over() -> None:
    served = Served("tell")
    served.learn()
    served.serve(2000, per_s=16.0, until=lambda: served.guard.drift is not None)
    assert served.kinds() == ["learnt", "drift"]
    assert "rate went from" in served.said[-1][1]
    served.serve(3000, per_s=16.0)
    assert served.kinds() == ["learnt", "drift", "learnt"]  # what came to stay is told once
    assert served.guard.says is not None and "rate" in served.guard.says  # but the plan was made for something else
    served.serve(6000, per_s=4.0)
    assert served.kinds()[3:] == ["drift", "learnt", "back"]
    assert served.guard.says is None and not served.hands.simulations
    assert served.guard.noticed["rate"] == 2


def test_a_better_plan_is_applied_and_kept() -> None:
    served = Served()
    served.asked()
    (question,) = served.hands.simulations
    assert question["goals"] is GOALS and question["targets"] == {"": {"ttft": 0.1}}
    drift = question["drift"]
    assert drift.what == "rate" and len(question["traffic"]) >= PATIENCE.gather
    assert all(one.at_s >= drift.since_s for one in question["traffic"])
    served.guard.simulated(proposed())
    assert served.hands.changes == [(OTHER, True)] and served.guard.says == "the plan is being changed"
    served.guard.changed("changed", took_s=2.5, waited=7)
    assert "after 2.5 s, for which 7 requests waited" in served.said[-1][1]
    served.serve(39, per_s=16.0, ttft_s=0.05)
    assert served.guard.state == "trial" and "39 of 39" in (served.guard.says or "")
    served.serve(1, per_s=16.0, ttft_s=0.05)
    assert served.kinds()[-1] == "kept" and served.guard.state == "learning"
    assert served.hands.changes == [(OTHER, True)] and served.hands.kept == 1  # nothing else was done
    served.serve(3000, per_s=16.0)
    assert served.guard.state == "watching" and served.guard.says is None, "the new plan is for this traffic"
    assert served.kinds()[-2:] == ["kept", "learnt"]
    assert served.guard.counts == {"applied": 1, "failed": 0, "kept": 1, "put off": 0, "undone": 0}


def test_a_worse_plan_is_undone_early_and_not_tried_again() -> None:
    served = Served()
    served.asked(ttft_s=0.05)  # all is well under the old plan
    served.guard.simulated(proposed())
    served.guard.changed("changed")
    took = served.serve(40, per_s=16.0, ttft_s=0.5, until=lambda: served.guard.state == "going back")
    assert served.guard.state == "going back" and took < 10, "what is plainly worse is undone early"
    assert served.hands.changes[-1] == (GOALS, False)
    served.guard.changed("changed", took_s=2.0)
    assert served.kinds()[-1] == "undone" and "under the new one 0 of" in served.said[-1][1]
    assert served.guard.state == "learning" and served.guard.counts["undone"] == 1
    # The same drift is not told again; another one is, and the plan that was undone is not taken.
    served.serve(2000, per_s=16.0)
    assert served.guard.state == "watching"
    served.drift(per_s=64.0)
    served.serve(4000, per_s=64.0, until=lambda: served.guard.state == "simulating")
    served.guard.simulated(proposed())
    assert served.hands.changes[-1] == (GOALS, False) and "was undone before" in served.said[-1][1]


def test_what_waited_for_the_change_is_not_held_against_the_new_plan() -> None:
    served = Served()
    served.asked(ttft_s=0.05)
    served.guard.simulated(proposed())
    for number in range(30):
        served.lives.take(Arrived(request_id=f"w{number}", at_s=served.now, prompt_tokens=100))
    served.now += 5
    served.guard.changed("changed", waited=30)
    assert served.guard.state == "trial"
    served.serve(20, per_s=16.0, ttft_s=0.5)  # behind those that waited, and so late themselves
    assert "works off 30 requests before its trial begins" in (served.guard.says or "")
    for number in range(30):
        served.lives.take(TokensOut(request_id=f"w{number}", at_s=served.now, tokens=(1,), finish="stop"))
    served.guard.tick()
    served.serve(39, per_s=16.0, ttft_s=0.05)
    assert "39 of 39" in (served.guard.says or "")
    served.serve(1, per_s=16.0, ttft_s=0.05)
    assert served.kinds()[-1] == "kept"


def test_a_backlog_that_never_ends_does_not_keep_the_trial_from_beginning() -> None:
    served = Served()
    served.asked(ttft_s=0.05)
    served.guard.simulated(proposed())
    served.lives.take(Arrived(request_id="w", at_s=served.now, prompt_tokens=100))
    served.guard.changed("changed", waited=1)
    served.wait(299)
    served.serve(1, ttft_s=0.05)
    assert "works off 1 requests" in (served.guard.says or "")
    served.wait(2)
    served.serve(1, ttft_s=0.05)
    assert "1 of 1" in (served.guard.says or "")


def test_who_leaves_is_held_against_it_only_when_a_target_was_missed() -> None:
    served = Served()
    served.on_trial()
    served.serve(50, per_s=16.0, ttft_s=-0.5 + 0.05, finish="abort")  # gone after 50 ms
    assert "0 of 0" in (served.guard.says or "")
    served.serve(5, per_s=16.0, ttft_s=0.0, finish="abort")  # gone after half a second without a token
    assert "0 of 5" in (served.guard.says or "")
    served.serve(2, per_s=16.0, finish="error")
    assert "0 of 7" in (served.guard.says or "")


def test_a_plan_that_does_not_start_is_given_up() -> None:
    served = Served()
    served.asked()
    served.guard.simulated(proposed())
    served.guard.changed("failed", "the context does not fit")
    assert served.guard.state == "learning" and served.kinds()[-1] == "failed"
    assert "the context does not fit" in served.said[-1][1] and served.guard.counts["failed"] == 1
    assert len(served.hands.changes) == 1


def test_a_change_that_is_put_off_is_tried_three_times() -> None:
    served = Served()
    served.asked()
    served.guard.simulated(proposed())
    served.guard.changed("put off", "3 requests still ran after 30 s")
    assert served.guard.state == "put off" and "again in 10 s" in served.said[-1][1]
    served.wait(9)
    assert len(served.hands.changes) == 1
    served.wait(2)
    assert len(served.hands.changes) == 2 and served.guard.state == "changing"
    served.guard.changed("put off", "3 requests still ran after 30 s")
    served.wait(21)
    served.guard.changed("put off", "3 requests still ran after 30 s")
    assert served.guard.state == "learning" and "given up" in served.said[-1][1]
    assert served.guard.counts["put off"] == 3 and len(served.hands.changes) == 3


def test_going_back_is_not_given_up() -> None:
    served = Served()
    served.asked(ttft_s=0.05)
    served.guard.simulated(proposed())
    served.guard.changed("changed")
    served.serve(40, per_s=16.0, ttft_s=0.5, until=lambda: served.guard.state == "going back")
    for _ in range(6):
        served.guard.changed("put off", "a request runs")
        assert served.guard.state == "put off"
        served.wait(10_000)
        assert served.guard.state == "going back" and served.hands.changes[-1] == (GOALS, False)
    served.guard.changed("changed")
    assert served.kinds()[-1] == "undone"


def test_an_engine_that_dies_on_trial_takes_its_plan_with_it() -> None:
    served = Served()
    served.guard.engine_died("before anything")
    assert served.kinds() == []
    served.on_trial()
    served.guard.engine_died("killed by SIGKILL")
    assert served.kinds()[-1] == "undone" and "SIGKILL" in served.said[-1][1]
    assert served.guard.state == "learning" and len(served.hands.changes) == 1
    served.serve(2000, per_s=16.0)
    served.drift(per_s=64.0)
    served.serve(4000, per_s=64.0, until=lambda: served.guard.state == "simulating")
    assert served.hands.simulations[-1]["goals"] is GOALS


def test_changes_keep_a_distance_that_grows_with_each_that_was_undone() -> None:
    served = Served()
    served.asked(ttft_s=0.05)
    paused: list[float] = []
    rate = 16.0
    for goals in (OTHER, THIRD):
        served.guard.simulated(proposed(goals))
        served.guard.changed("changed")
        served.serve(40, per_s=rate, ttft_s=0.5, until=lambda: served.guard.state == "going back")
        served.guard.changed("changed")
        undone_s = served.now
        served.serve(2000, per_s=rate, until=lambda: served.guard.state == "watching")
        rate *= 4
        served.drift(per_s=rate, ttft_s=0.05)
        served.serve(200_000, per_s=rate, until=lambda: served.guard.state == "simulating")
        assert served.guard.state == "simulating"
        paused.append(served.now - undone_s)
    assert paused[0] >= PATIENCE.pause_s and paused[1] >= 2 * PATIENCE.pause_s


def test_propose_changes_nothing() -> None:
    served = Served("propose")
    served.asked()
    served.guard.simulated(proposed())
    assert served.kinds()[-1] == "proposal" and "max_running 64 -> 128" in served.said[-1][1]
    assert served.guard.state == "learning" and not served.hands.changes
    assert served.guard.proposal is not None and served.guard.proposal.goals == OTHER


def test_a_plan_that_is_still_the_best_becomes_the_plan_for_this_traffic() -> None:
    served = Served()
    served.asked()
    served.guard.simulated(proposed(GOALS, changed=False))
    assert served.kinds()[-1] == "plan stays"
    served.serve(3000, per_s=16.0)
    assert served.guard.says is None and not served.hands.changes


def test_a_simulation_that_fails_is_told() -> None:
    served = Served()
    served.asked()
    served.guard.simulated("the simulation took longer than 300 s")
    assert served.said[-1] == ("plan stays", "no other plan was found: the simulation took longer than 300 s")
    assert served.guard.state == "learning"


def test_silence_ends_in_nothing() -> None:
    served = Served()
    served.learn()
    served.serve(10)
    served.wait(100_000)
    assert served.guard.state == "gathering" and served.kinds()[-1] == "drift"
    served.wait(10_000)
    assert "too few to plan for" in served.said[-1][1] and not served.hands.simulations


def test_without_targets_what_was_usual_is_the_target() -> None:
    served = Served(goals=Goals(model="m"))
    served.asked(ttft_s=0.5)
    (question,) = served.hands.simulations
    (own,) = question["targets"].values()
    assert own["ttft"] == pytest.approx(0.055) and 0 < own["tpot"] < 0.1
    assert 128 <= len(question["usual"]) <= PATIENCE.simulate
    served.guard.simulated(proposed(Goals(model="m", means=Means(max_running=128))))
    served.guard.changed("changed")
    assert "0.0 % met their targets under the old one" in served.said[-1][1]


def test_a_trace_says_what_is_usual() -> None:
    served = Served("tell")
    calm = [Arrival(at_s=t, prompt_tokens=100, output_tokens=50) for t in np.cumsum(np.full(400, 0.25)).tolist()]
    served.guard.use(Envelope.of(calm))
    assert served.guard.state == "watching" and served.kinds() == ["learnt"]
    served.serve(500, per_s=40.0)
    assert "drift" in served.kinds()


# ---------------------------------------------------------------------------------------------------------------- tellers


def test_metrics_and_the_document() -> None:
    served = Served()
    before = json.loads(served.guard.json())
    assert before["state"] == "learning" and before["learnt"] == 0 and before["learnt_of"] == 256
    assert before["drift"] is None and before["history"] == []
    served.on_trial()
    told = json.loads(served.guard.json())
    assert told["mode"] == "apply" and told["state"] == "trial" and told["drift"]["what"] == "rate"
    assert told["proposal"]["tries"][1]["attained"] == 0.9
    assert [one["what"] for one in told["history"]] == ["learnt", "drift", "proposal", "applied"]
    assert told["history"][0]["at"] > 1e9
    page = Page({})
    served.guard.metrics(page)
    text = page.text()
    assert "tradewind:traffic_drifted 1" in text
    assert 'tradewind:traffic_drifts_total{figure="rate"} 1' in text
    assert 'tradewind:plan_changes_total{outcome="applied"} 1' in text
    assert 'tradewind:plan_changes_total{outcome="undone"} 0' in text


def test_the_history_is_bounded() -> None:
    served = Served()
    for number in range(200):
        served.guard._note("drift", str(number))
    told = json.loads(served.guard.json())["history"]
    assert len(told) == 64 and told[-1]["says"] == "199"


def test_targets() -> None:
    goals = Goals(
        model="m",
        ttft_ms=500.0,
        classes=(TrafficClass(name="chat", tpot_ms=50.0), TrafficClass(name="bulk", ttft_ms=9000.0, e2e_ms=60_000.0)),
    )
    targets = targets_of(goals)
    assert targets == {"": {"ttft": 0.5}, "chat": {"ttft": 0.5, "tpot": 0.05}, "bulk": {"ttft": 9.0, "e2e": 60.0}}
    assert met_by(Timed(traffic_class="chat", ttft_s=0.4, tpot_s=0.05, e2e_s=99.0), targets)
    assert not met_by(Timed(traffic_class="chat", ttft_s=0.4, tpot_s=0.06), targets)
    assert met_by(Timed(traffic_class="unheard of", ttft_s=0.5, tpot_s=9.0), targets)
    assert not met_by(Timed(traffic_class="bulk", failed=True), targets)
    assert met_by(Timed(traffic_class=""), {})
    assert usual_targets([]) == {} == targets_of(Goals(model="m"))


# ---------------------------------------------------------------------------------------------------- the planner's answer

PLANNED = Goals(model="m", scenario="latency", max_context=2048, ttft_ms=1000.0)


def crowd(requests: int, *, per_s: float, seed: int = 1) -> list[Arrival]:
    draw = np.random.default_rng(seed)
    at = np.cumsum(draw.exponential(1 / per_s, requests)).tolist()
    return [
        Arrival(at_s=1000.0 + when, prompt_tokens=int(draw.integers(20, 50)), output_tokens=int(draw.integers(20, 60)))
        for when in at
    ]


def through_a_pipe(question: Question) -> Question:
    made: Question = msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=Question)
    return made


def test_the_planner_keeps_what_clients_would_notice() -> None:
    plan = resolve(PLANNED, SMOLLM2, machine())
    drift = Drift(what="rate", at_s=1010, since_s=1000, planned=2.0, now=200.0)
    asked = AskPlan(
        goals=PLANNED, plan=plan, drift=drift, traffic=crowd(250, per_s=200.0), usual=[], targets={}, steps=[]
    )
    found = answer(through_a_pipe(asked))
    assert isinstance(found, Planned)
    made = found.proposed
    assert made.tries[0].name == "as it is" and len(made.tries) >= 4
    assert made.changed and made.differs and "rate went from 2" in made.why
    again = resolve(made.goals, SMOLLM2, machine())
    assert again.numerics == plan.numerics and again.schedule.max_context == plan.schedule.max_context
    assert again.schedule.policy == plan.schedule.policy and again.cache.page_tokens == plan.cache.page_tokens
    assert again.schedule.max_running > plan.schedule.max_running
    assert made.goals.ttft_ms == PLANNED.ttft_ms and "roofline" in made.step_times


def test_the_planner_without_targets_takes_what_was_usual() -> None:
    goals = msgspec.structs.replace(PLANNED, ttft_ms=None)
    plan = resolve(goals, SMOLLM2, machine())
    drift = Drift(what="rate", at_s=1010, since_s=1000, planned=2.0, now=200.0)
    asked = AskPlan(
        goals=goals,
        plan=plan,
        drift=drift,
        traffic=crowd(150, per_s=200.0),
        usual=crowd(100, per_s=2.0),
        targets={},
        steps=[],
    )
    found = answer(asked)
    assert isinstance(found, Planned)
    assert set(found.proposed.targets[""]) == {"ttft", "tpot"}
    assert found.proposed.tries[0].attained < 0.9, "a hundred times the traffic is not served as before"


def test_the_planner_refuses_in_words() -> None:
    plan = resolve(PLANNED, SMOLLM2, machine())
    drift = Drift(what="rate", at_s=1, since_s=0, planned=2.0, now=1.0)
    found = answer(AskPlan(goals=PLANNED, plan=plan, drift=drift, traffic=[], usual=[], targets={}, steps=[]))
    assert isinstance(found, Refused) and "no traffic to plan for" in found.why
    lines = [TraceLine(arrival_s=float(t), prompt_tokens=30, output_tokens=20) for t in range(200)]
    usual = answer(AskUsual(goals=PLANNED, plan=plan, trace=lines, block_tokens=16))
    assert isinstance(usual, Usual) and usual.envelope.requests_per_s == pytest.approx(1.0, rel=0.05)
    few = answer(AskUsual(goals=PLANNED, plan=plan, trace=lines[:50], block_tokens=16))
    assert isinstance(few, Refused) and "50 requests are too few" in few.why
