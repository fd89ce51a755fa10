"""A file of goals: what it may say, what is refused and where, and that opposed goals give plans that win on their own traffic."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.host.plans import SMOLLM2, machine
from tradewind.cli_plan_goals import add_arguments, chosen_plan, is_goals_file, latency_lines, price_text, trace_for
from tradewind.config.goals import Goals, Match, Means, TrafficClass
from tradewind.config.goals_file import parse_goals, parse_ms, read_goals, tenant_of_key
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.config.targets import class_of_request
from tradewind.contract.errors import UserError
from tradewind.simulate.choosing import better, choose
from tradewind.simulate.crossing import BACKLOG, SHAPES, Score, cross, duels, made_up
from tradewind.simulate.forecast import forecast, trace_of
from tradewind.simulate.simulator import SimulateOptions
from tradewind.simulate.steptime import KNOTS, StepTime
from tradewind.simulate.traces import write_trace

EXAMPLES = Path(__file__).parents[2] / "examples" / "goals"
NAMES = ("bulk", "chat", "long-context")
TRAINED = 80
"""Requests of each trace that plans are made from and judged by."""

WHOLE = """\
model = "smollm2"
requests_per_s = 4
quality = "1%"

[hardware]
memory = "2GiB"
device = "cpu"

[[class]]
name = "chat"
match = { header = "X-Tier: chat", priority = 0 }
ttft = "500ms"
tpot = "0.05s"
share = "70%"
late = "refuse"

[[class]]
name = "partner"
[class.match]
key = "sk-secret"

[[class]]
name = "bulk"
e2e = "2min"

[tenants]
alice = 3
"b.c" = 1.5

[means]
max_running = 8
"""


def cpu_times(plan: Plan) -> StepTime:
    """About what two cores need for SmolLM2: 2 ms for the weights, 0.4 ms a token in int16 and 0.24 in int8."""
    token_s = {"int16": 0.0004, "int8": 0.00024}[plan.numerics.compute]
    return StepTime(
        source="round numbers",
        curve_s=(0.002, *(0.002 + token_s * k for k in KNOTS)),
        extra_s=(4e-7, 2e-7, 4e-4, 1e-4, 0),
    )


def planned(goals: Goals) -> Plan:
    return resolve(goals, SMOLLM2, machine())


def test_everything_that_a_file_may_say() -> None:
    goals = parse_goals(WHOLE)
    assert (goals.model, goals.scenario, goals.requests_per_s) == ("smollm2", "balanced", 4)
    assert goals.memory_limit_bytes == 2 << 30 and goals.quality_loss_percent == 1.0
    assert goals.means == Means(max_running=8, backend="cpu")
    assert goals.tenants == {"alice": 3.0, "b.c": 1.5}
    chat, partner, bulk = goals.classes
    assert chat == TrafficClass(
        name="chat",
        match=Match(header=("x-tier", "chat"), priority=0),
        ttft_ms=500,
        tpot_ms=50,
        share=0.7,
        late="refuse",
    )
    assert partner.match == Match(tenant=tenant_of_key("sk-secret"))
    assert bulk.e2e_ms == 120_000 and bulk.match == Match()
    assert "sk-secret" not in str(msgspec.json.encode(goals)), "a key never leaves the file"
    bare = parse_goals('model = "m"')
    assert bare.quality_loss_percent == 0.0 and bare.classes == () and bare.scenario == "balanced"
    assert parse_goals('model = "m"\n[[class]]\nname = "night"').scenario == "throughput", "nobody waits for a token"


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("ttft =", "tftt =", 12, "did you mean ttft?"),
        ('"500ms"', "500", 12, 'a time with its unit, such as "500ms"'),
        ('"500ms"', '"0ms"', 12, "over 0"),
        ('"70%"', '"170%"', 14, "a part of all requests"),
        ('"refuse"', '"refuze"', 15, "did you mean refuse?"),
        ("X-Tier: chat", "X-Tier chat", 11, "a name and a value"),
        ("priority = 0", "prio = 0", 11, "did you mean priority?"),
        ("priority = 0", "priority = true", 11, "a whole number"),
        ('key = "sk-secret"', 'key = "sk-secret"\ntenant = "t"', 20, "leave one out"),
        ('[class.match]\nkey = "sk-secret"\n', "", 21, "matches every request"),
        ('name = "bulk"', 'name = "chat"', 23, "tell classes apart"),
        ('name = "partner"\n', "", 17, "has no name"),
        ('"2GiB"', '"2 potatoes"', 6, "is no size"),
        ('device = "cpu"', 'device = "tpu"', 7, "did you mean cpu?"),
        ('"1%"', '"good"', 3, '"lossless" or by how much'),
        ("alice = 3", "alice = -1", 27, "a number over 0"),
        ("max_running = 8", "max_runing = 8", 31, "did you mean max_running?"),
        ("max_running = 8", 'max_running = "x"', 31, "expected `int | null`"),
        ("max_running = 8", 'backend = "plain"', 31, "leave one out"),
        ("requests_per_s = 4", "requests_per_s = 0", 2, "a number over 0"),
        ("requests_per_s = 4", "request_per_s = 4", 2, "did you mean requests_per_s?"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(old: str, new: str, line: int, told: str) -> None:
    assert WHOLE.count(old) >= 1
    with pytest.raises(UserError) as caught:
        parse_goals(WHOLE.replace(old, new, 1), name="g.toml")
    text = str(caught.value)
    assert text.startswith(f"g.toml, line {line}: "), text
    assert told in text and "\n" not in text and "sk-secret" not in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model = ", "is not TOML"),
        ("", "has no model"),
        ('model = "m"\nclass = 3', "begin each class with [[class]]"),
        ('model = "m"\n[means]\nmax_running = 0', "max_running is 0"),
        ('model = "m"\n[means]\ncompute = "int8"', "costs about 0.5 % of perplexity, but the quality budget is 0 %"),
        (
            'model = "m"\n[[class]]\nname = "a"\nshare = 0.7\nmatch={priority=1}\n[[class]]\nname = "b"\nshare = 0.7',
            "1.4 together",
        ),
    ],
)
def test_whole_files_that_are_refused(text: str, told: str) -> None:
    with pytest.raises(UserError, match=None) as caught:
        parse_goals(text)
    assert told in str(caught.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_goals(tmp_path / "none.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        read_goals(tmp_path / "b.toml")
    assert is_goals_file("a.toml") and not is_goals_file("smollm2") and not is_goals_file(None)


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("1.5 s", 1500), ("2min", 120_000), (".5s", 500), ("50us", 0.05)]
)
def test_times(text: str, ms: float) -> None:
    assert parse_ms(text) == pytest.approx(ms)


def test_a_request_belongs_to_the_first_class_that_it_matches() -> None:
    classes = parse_goals(WHOLE).classes
    assert class_of_request(classes, headers={"x-tier": "chat"}) == "chat"
    assert class_of_request(classes, headers={"x-tier": "chat"}, priority=1) == "bulk", "all that is stated must hold"
    assert class_of_request(classes, tenant=tenant_of_key("sk-secret")) == "partner"
    assert class_of_request(classes) == "bulk"
    assert class_of_request(classes[:2]) == ""


def test_the_tenant_of_a_key_is_the_servers() -> None:
    from tradewind.serving.http.edge import KeyRing

    assert KeyRing(["sk-secret"]).tenant_of(b"sk-secret") == tenant_of_key("sk-secret")


# -- from goals to a plan ----------------------------------------------------------------------------------------------


def reason(plan: Plan, choice: str) -> Any:
    return next(item for item in plan.reasons if item.choice == choice)


def test_the_policy_follows_what_is_stated() -> None:
    target, plain = TrafficClass(name="a", ttft_ms=100), TrafficClass(name="b")
    by_priority = TrafficClass(name="c", match=Match(priority=1))
    for classes, tenants, policy, rejected in (
        ((target, plain), {"x": 2.0}, "slo", "fair: weights then share what those with targets leave"),
        ((plain,), {"x": 2.0}, "fair", "arrival"),
        ((by_priority,), {}, "priority", "arrival"),
        ((plain,), {}, "arrival", "slo: no class has a target"),
    ):
        plan = planned(Goals(model="m", classes=classes, tenants=tenants))
        assert plan.schedule.policy == policy
        assert rejected in reason(plan, "policy").rejected
        assert (plan.schedule.step_cost is not None) == (policy == "slo")
    pinned = planned(Goals(model="m", classes=(target,), means=Means(policy="length")))
    assert pinned.schedule.policy == "length" and reason(pinned, "policy").pinned
    inherited = planned(Goals(model="m", tpot_ms=40, classes=(target,))).schedule
    assert inherited.classes[0].tpot_s == 0.04 and inherited.classes[0].ttft_s == 0.1


def test_quality_is_spent_only_where_it_is_allowed() -> None:
    for loss, compute in ((0.0, "int16"), (0.2, "int16"), (1.0, "int8")):
        plan = planned(Goals(model="m", scenario="throughput", quality_loss_percent=loss))
        assert plan.numerics.compute == compute and reason(plan, "quality").pinned
    assert planned(Goals(model="m", scenario="throughput")).numerics.compute == "int8", "nobody stated a budget"


def test_pages_are_sized_for_the_requests_that_are_expected() -> None:
    short, long = (
        planned(Goals(model="m", memory_limit_bytes=4 << 30, classes=(TrafficClass(name="a", prompt_tokens=tokens),)))
        for tokens in (100, 4000)
    )
    assert long.cache.pages[0] > 4 * short.cache.pages[0]


# -- three opposed goals -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def goals_by_name() -> dict[str, Goals]:
    return {name: read_goals(EXAMPLES / f"{name}.toml") for name in NAMES}


@pytest.fixture(scope="module")
def plans(goals_by_name: dict[str, Goals]) -> dict[str, Plan]:
    """What `tradewind plan` would take: alternatives simulated on a trace of the goals, which nobody is judged by."""
    return {
        name: choose(goals, trace=made_up(goals, seed=0, requests=TRAINED), make=planned, times_of=cpu_times).plan
        for name, goals in goals_by_name.items()
    }


def test_three_opposed_goals_give_three_plans(goals_by_name: dict[str, Goals], plans: dict[str, Plan]) -> None:
    at_once = {name: planned(goals) for name, goals in goals_by_name.items()}
    for made in (at_once, plans):
        shapes = {
            (p.schedule.policy, p.schedule.max_tokens_per_step, p.schedule.max_running, p.cache.pages)
            for p in made.values()
        }
        assert len(shapes) == 3
        assert made["bulk"].schedule.max_tokens_per_step > made["chat"].schedule.max_tokens_per_step
        assert made["long-context"].cache.pages[0] > made["chat"].cache.pages[0]
        for name, plan in made.items():
            limit = goals_by_name[name].memory_limit_bytes
            assert limit is not None and sum(line.bytes for line in plan.ledger) <= limit


def test_each_plan_wins_on_traffic_of_its_own_that_it_was_not_made_from(
    goals_by_name: dict[str, Goals], plans: dict[str, Plan]
) -> None:
    """The diagonal on held-out traces: other seeds, as planned, in bursts, more of it and with wider lengths. By attainment, or by rate."""
    scores = cross(goals_by_name, plans, seeds=(1,), times_of=cpu_times, requests=TRAINED)
    assert len(scores) == 3 * 3 * len(SHAPES)
    found = duels(scores, goals_by_name)
    for one in found:
        assert one.won == one.of == len(SHAPES), one
    worth = {(one.traffic, one.other): one for one in found}
    for other in ("bulk", "long-context"):
        assert worth["chat", other].better == len(SHAPES) and worth["chat", other].margin > 0.1, worth
    for other in ("chat", "long-context"):
        assert worth["bulk", other].margin > 0.2, "int8, which the others' goals do not allow"
    assert worth["long-context", "chat"].better == len(SHAPES) and worth["long-context", "chat"].margin > 0.05, worth
    assert worth["long-context", "bulk"].margin > 0, (
        "also against one that computes 1.6 times as fast, and is not allowed to"
    )


def test_a_duel_counts_pairs_of_the_same_trace(goals_by_name: dict[str, Goals]) -> None:
    goals = {name: goals_by_name[name] for name in ("bulk", "chat")}
    values = {
        ("bulk", "bulk"): (110.0, 300.0),
        ("bulk", "chat"): (100.0, 300.0),
        ("chat", "chat"): (0.9, 0.5),
        ("chat", "bulk"): (0.5, 0.6),
    }
    scores = [
        Score(traffic=traffic, plan=plan, shape="as planned", seed=seed, value=value)
        for (traffic, plan), own in values.items()
        for seed, value in enumerate(own)
    ]
    by_rate, by_share = duels(scores, goals)
    assert (by_rate.traffic, by_rate.other, by_rate.won, by_rate.drawn, by_rate.of) == ("bulk", "chat", 1, 1, 2)
    assert by_rate.margin == pytest.approx(0.05) and by_rate.least == 0
    assert by_share.won == 1 and by_share.margin == pytest.approx(0.15) and by_share.least == pytest.approx(-0.1)
    assert by_share.margin_low <= by_share.margin <= by_share.margin_high
    barred = [msgspec.structs.replace(one, allowed=one.traffic == one.plan) for one in scores]
    assert [(one.won, one.better, one.of) for one in duels(barred, goals)] == [(2, 1, 2), (2, 1, 2)]


def test_held_out_traffic_is_what_it_says(goals_by_name: dict[str, Goals]) -> None:
    goals = goals_by_name["chat"]
    by_shape = {shape.name: made_up(goals, seed=3, requests=4000, shape=shape) for shape in SHAPES}
    gaps = {name: np.diff(trace.arrival_s) for name, trace in by_shape.items()}
    for name, scatter, rate in (("as planned", 1, 1), ("bursts", 2, 1), ("more", 1, 1.15), ("wider lengths", 1, 0.85)):
        assert gaps[name].std() / gaps[name].mean() == pytest.approx(scatter, rel=0.1), name
        assert 1 / gaps[name].mean() == pytest.approx(rate * 1.8, rel=0.1), name
    wide, usual = by_shape["wider lengths"].output_tokens, by_shape["as planned"].output_tokens
    assert np.log(wide).std() > 1.2 * np.log(usual).std()
    bulk = goals_by_name["bulk"]
    assert len(made_up(bulk, seed=3, requests=10)) == BACKLOG * 10, "a rate is seen while more wait than can run"
    assert made_up(goals, seed=3, requests=50).arrival_s[7] != made_up(goals, seed=4, requests=50).arrival_s[7]


def test_what_is_given_up_for_less_does_not_add_up(goals_by_name: dict[str, Goals], plans: dict[str, Plan]) -> None:
    """A night's work keeps its rate: shorter waits in the mean are nothing that it asked for."""
    goals = goals_by_name["bulk"]
    trace = made_up(goals, seed=0, requests=TRAINED)
    price = forecast(
        trace, plan=plans["bulk"], goals=goals, times=cpu_times(plans["bulk"]), options=SimulateOptions(noise=False)
    )
    sooner = msgspec.structs.replace(price, e2e_s=msgspec.structs.replace(price.e2e_s, mean=price.e2e_s.mean / 2))
    assert not better(sooner, price, goals) and better(sooner, price, goals_by_name["chat"])
    slower = msgspec.structs.replace(sooner, output_tokens_per_s=0.995 * price.output_tokens_per_s)
    assert not better(slower, price, goals_by_name["chat"]), "half a per cent of the rate is not given for it"


# -- the search and the command ----------------------------------------------------------------------------------------


def test_alternatives_are_simulated_and_told_with_what_they_lost_by(goals_by_name: dict[str, Goals]) -> None:
    goals = goals_by_name["chat"]
    trace = trace_of(goals, requests=40)
    told: list[str] = []
    made = choose(goals, trace=trace, make=planned, times_of=cpu_times, progress=told.append)
    start = choose(goals, trace=trace, make=planned, times_of=cpu_times, search=False)
    assert start.tried == 1 and made.tried == len(told) + 1 >= 6
    assert not better(start.price, made.price, goals), "the search never makes it worse"
    policy = reason(made.plan, "policy")
    assert policy.value == "slo" and "arrival: " in policy.rejected and not policy.pinned
    assert reason(made.plan, "max_running").rejected.count(":") >= 2
    again = choose(goals, trace=trace, make=planned, times_of=cpu_times)
    assert again.plan.schedule == made.plan.schedule and again.price == made.price, "same arguments, same plan"
    pinned = msgspec.structs.replace(goals, means=Means(policy="arrival", max_running=16, max_tokens_per_step=256))
    assert choose(pinned, trace=trace, make=planned, times_of=cpu_times).tried == 1, "what is pinned is not tried"


def test_the_price_names_the_four_goals(goals_by_name: dict[str, Goals], tmp_path: Path) -> None:
    from rich.console import Console

    goals = goals_by_name["chat"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    write_trace(trace_of(goals, requests=40), tmp_path / "t.jsonl")
    arguments = parser.parse_args(["--trace", str(tmp_path / "t.jsonl"), "--requests", "20", "--rate", "2"])
    trace = trace_for(arguments, goals)
    assert len(trace) == 20 and set(trace.classes) == {"chat", "other"}
    cpu_times(planned(goals)).save(tmp_path / "times.json")
    chosen = chosen_plan(goals, trace=trace, make=planned, times=tmp_path / "times.json", search=False)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(price_text(chosen, goals))
    console.file.close()
    text = console.export_text()
    for word in (
        "latency",
        "throughput",
        "memory",
        "quality",
        "lossless",
        "chat:",
        "meet all targets",
        "outside what was measured",
    ):
        assert word in text, word
    assert len(latency_lines(chosen.price, goals)) == 3
