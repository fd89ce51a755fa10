"""What if: changes are what they say, what breaks is named right, more traffic is never better, and a real engine agrees."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plans import GEMMA_270M, SMOLLM2, MiB, machine
from tiny_engine import write_checkpoint

from tradewind import cli_whatif
from tradewind.assemble import make_plan
from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import LimitError, UserError
from tradewind.contract.events import Held, StepDone
from tradewind.kernels.cpu import library
from tradewind.observability.strain import Strain, summed
from tradewind.simulate.simulator import SimulateOptions
from tradewind.simulate.steplog import StepLog, host_time_of
from tradewind.simulate.steptime import KNOTS, HostTime, StepTime, fit, roofline
from tradewind.simulate.trace_columns import Trace, TraceLine, make_trace, poisson_trace
from tradewind.simulate.traces import write_trace
from tradewind.tune.live import run_live, with_plan
from tradewind.tune.whatif import Change, changed_trace, count, factor, judged, simulated, whatif, with_memory

NO_HOST = HostTime(decide_s=0, decide_row_s=0, decide_enter_s=0, absorb_s=0, absorb_row_s=0, loop_s=0)


def times(step_s: float = 0.02, *, token_s: float = 0.0, host: HostTime = NO_HOST) -> StepTime:
    curve = [step_s + token_s * tokens for tokens in KNOTS]
    return StepTime(source="made up", curve_s=(step_s, *curve), extra_s=(0.0,) * 5, host=host)


def plan_of(*, pages: int | None = None, max_context: int = 1024, **means: Any) -> Plan:
    plan = resolve(Goals(model="m", max_context=max_context, means=Means(**means)), SMOLLM2, machine())
    if pages is not None:
        plan = msgspec.structs.replace(plan, cache=msgspec.structs.replace(plan.cache, pages=(pages,)))
    return plan


def traffic(requests: int = 80, *, per_s: float = 10.0, prompt: float = 40, output: float = 20) -> Trace:
    return poisson_trace(
        requests=requests,
        per_s=per_s,
        prompt=(prompt, 0.2),
        output=(output, 0.2),
        longest_prompt=900,
        longest_output=90,
    )


TARGETS = {"": {"ttft": 0.5, "tpot": 0.1}}


# --------------------------------------------------------------------------------------------------------------- changes


def test_factors_and_counts_as_people_write_them() -> None:
    for text, value in (
        ("x2", 2),
        ("2x", 2),
        ("1.3", 1.3),
        ("+20%", 1.2),
        ("-10%", 0.9),
        ("150%", 1.5),
        (" x .5", 0.5),
    ):
        assert factor(text, name="--rate") == pytest.approx(value)
    for text in ("", "two", "x", "-1", "0", "-100%", "1e9", "x-2", "nan"):
        with pytest.raises(UserError, match="--rate is"):
            factor(text, name="--rate")
    for text, number in (("4", 4), ("+1", 3), ("-1", 1), ("x2", 4)):
        assert count(text, name="--replicas", now=2) == number
    for text in ("-2", "0", "1.5", "many", "x0"):
        with pytest.raises(UserError, match="--replicas"):
            count(text, name="--replicas", now=2)


def test_traffic_is_changed_as_said() -> None:
    trace = traffic()
    made = changed_trace(trace, Change(rate=2, prompt=1.5, output=0.5))
    assert made.duration_s == pytest.approx(trace.duration_s / 2)
    assert made.prompt_tokens.sum() == pytest.approx(1.5 * trace.prompt_tokens.sum(), rel=0.02)
    assert made.output_tokens.sum() == pytest.approx(0.5 * trace.output_tokens.sum(), rel=0.03)


@pytest.mark.parametrize("card", [SMOLLM2, GEMMA_270M], ids=lambda card: card.name)
def test_memory_becomes_pages_or_is_refused_with_what_is_needed(card: Any) -> None:
    plan = resolve(Goals(model="m", max_context=1024), card, machine())
    total = sum(line.bytes for line in plan.ledger)
    fixed = sum(line.bytes for line in plan.ledger if not line.name.startswith("KV"))
    half = with_memory(plan, fixed + (total - fixed) // 2)
    for now, then in zip(plan.cache.pages, half.cache.pages, strict=True):
        assert then == pytest.approx(now / 2, abs=1)
    assert sum(line.bytes for line in half.ledger) <= fixed + (total - fixed) // 2
    assert with_memory(plan, None) is plan
    with pytest.raises(LimitError, match=r"do not hold one sequence of 1024 tokens beside .* give at least"):
        with_memory(plan, fixed + MiB)


# ---------------------------------------------------------------------------------------------------------- what breaks

BREAKS: list[tuple[str, Plan, Trace, StepTime]] = [
    ("slots", plan_of(max_running=4), traffic(per_s=30), times()),
    ("pages", plan_of(max_running=64, pages=65), traffic(per_s=30, prompt=200, output=60), times()),
    (
        "step budget",
        plan_of(max_running=64, max_tokens_per_step=64),
        traffic(per_s=30, prompt=300, output=4),
        times(),
    ),
    (
        "host",
        plan_of(max_running=64),
        traffic(per_s=10),
        times(0.005, host=HostTime(decide_s=0.02, absorb_s=0.01, loop_s=0.0)),
    ),
    ("step time", plan_of(max_running=64), traffic(per_s=10), times(0.02, token_s=2e-4)),
]


@pytest.mark.parametrize(("resource", "plan", "trace", "step"), BREAKS, ids=[case[0] for case in BREAKS])
def test_what_is_short_is_named(resource: str, plan: Plan, trace: Trace, step: StepTime) -> None:
    run = simulated(trace, plan, times=step, options=SimulateOptions())
    side = judged(run, plan, targets={"": {"ttft": 0.05, "tpot": 0.01}}, enough=0.9)
    assert not side.holds
    assert side.binding == resource
    if resource in ("slots", "pages", "step budget"):
        assert run.strain.first_s[resource] < run.outcome.end_s / 2


def test_more_traffic_is_not_better_and_more_engines_are_not_worse() -> None:
    plan, trace = plan_of(max_running=8), traffic(160)
    shares = []
    for rate in (1.0, 2.0, 4.0):
        found = whatif(trace, plan, Change(rate=rate), times=times(), targets=TARGETS, headroom=False)
        shares.append(found.then.attained.share)
    assert shares == sorted(shares, reverse=True)
    more = whatif(trace, plan, Change(rate=4, replicas=4), times=times(), targets=TARGETS, headroom=False)
    assert more.then.attained.share > shares[-1]
    assert more.then.replicas == 4
    assert more.today.replicas == 1


def test_nothing_changed_is_today() -> None:
    plan, trace = plan_of(), traffic()
    found = whatif(trace, plan, Change(), times=times(), headroom=False)
    assert msgspec.json.encode(found.then) == msgspec.json.encode(found.today)
    assert found.targets_are.startswith("none stated")
    assert found.then.holds, "today's p99 is met today"


def test_headroom_is_the_capacity() -> None:
    """4 slots, 20 ms a step, answers of 20 tokens: 4 / (20 * 0.02) = 10 requests a second. At 2 a second there is room for 5 times."""
    plan = plan_of(max_running=4)
    lines = [TraceLine(arrival_s=0.5 * index, prompt_tokens=30, output_tokens=20) for index in range(200)]
    trace = make_trace(lines, name="even", block_tokens=16)
    found = whatif(trace, plan, Change(), times=times(), targets={"": {"ttft": 0.3}})
    room = found.headroom
    assert room is not None
    assert room.holds_at is not None
    assert room.breaks_at is not None
    assert 4.2 < room.holds_at < room.breaks_at < 5.8
    assert room.breaks_at / room.holds_at < 1.05
    assert room.breaks == "slots"
    said = cli_whatif.verdict(found)
    assert said.startswith("It holds: 100.0 %")
    assert "First to break is slots, at " in said


def test_classes_have_their_own_targets() -> None:
    lines = [
        TraceLine(
            arrival_s=0.01 * index, prompt_tokens=20, output_tokens=10, traffic_class="chat" if index % 2 else "bulk"
        )
        for index in range(100)
    ]
    trace = make_trace(lines, name="two", block_tokens=16)
    targets = {"chat": {"ttft": 0.001}, "bulk": {"ttft": 100.0}}
    found = whatif(trace, plan_of(), Change(), times=times(), targets=targets, headroom=False)
    assert found.then.attained.share == pytest.approx(0.5)
    assert {one.traffic_class: one.attained.share for one in found.then.classes if one.attained} == {
        "bulk": 1.0,
        "chat": 0.0,
    }


# ---------------------------------------------------------------------------------------------------------------- strain


def step(number: int, at_s: float, device_s: float, *, waiting: int = 1) -> StepDone:
    return StepDone(
        number=number, at_s=at_s, rows=1, tokens=1, prompt_tokens=0, decide_s=0, absorb_s=0, device_s=device_s,
        running=1, waiting=waiting, pages_used=(1,), pages_total=(9,), decided_s=at_s - device_s,
    )  # fmt: skip


def test_seconds_are_added_up() -> None:
    strain = Strain()
    strain.take_reports([step(1, 11, 1), Held(at_s=11, cause="slot"), step(2, 12, 1), Held(at_s=12, cause="pages")])
    strain.take_reports([step(3, 16, 2), Held(at_s=16, cause=None), step(4, 17, 1, waiting=0)])
    report = strain.report()
    assert report.held_s == {"slots": 1, "pages": 4}
    assert report.first_s == {"slots": 11, "pages": 12}
    assert (report.working_s, report.device_s) == (7, 5)
    assert report.binding == "pages"
    both = summed([report, report])
    assert (both.held_s["pages"], both.first_s["pages"], both.steps) == (8, 12, 8)
    strain.forget()
    assert strain.report().held_s == {}


# ------------------------------------------------------------------------------------------------------ a real CPU engine


@pytest.mark.parametrize("resource", ["slots", "pages"])
def test_a_real_engine_agrees_on_what_is_short(resource: str, tmp_path: Path) -> None:
    """A tiny engine on this machine's CPU, and the simulation with the step times that it logged."""
    if why := library.why_not():
        pytest.skip(why)
    planned = make_plan(
        Goals(
            model=str(write_checkpoint("full", tmp_path / "model")),
            max_context=256,
            means=Means(backend="cpu", compute="f32", threads=1, max_running=2 if resource == "slots" else 24),
        )
    )
    plan = planned.plan
    if resource == "pages":
        plan = msgspec.structs.replace(plan, cache=msgspec.structs.replace(plan.cache, pages=(25,)))
    trace = poisson_trace(
        requests=60, per_s=400.0, prompt=(60, 0.3), output=(60, 0.2), longest_prompt=120, longest_output=100, seed=2
    )
    log = StepLog(groups=plan.cache.groups, steps_in_flight=plan.schedule.steps_in_flight)
    live = run_live(trace, with_plan(planned, plan), sinks=(log,))
    assert not live.outcome.refused
    fitted = fit(list(log.steps), prior=roofline(plan), host=host_time_of(log.steps))
    run = simulated(trace, plan, times=fitted, options=SimulateOptions())
    assert live.strain.binding == run.strain.binding == resource


# --------------------------------------------------------------------------------------------------------------- command


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli_whatif.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["whatif", *words])
    code: int = arguments.run(arguments)
    return code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(traffic(40), tmp_path / "t.jsonl")
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan_of(max_running=4)))
    times().save(tmp_path / "times.json")
    words = (str(tmp_path / "t.jsonl"), "--plan", str(tmp_path / "plan.json"), "--times", str(tmp_path / "times.json"))
    assert command(*words, "--rate", "x8", "--target", "ttft=0.3s") == 1
    said = capsys.readouterr().out
    assert "It breaks" in said
    assert "short of slots" in said
    assert command(*words, "--gpus", "+1", "--json", "--no-headroom", "--target", "ttft=10s") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["simulated"]["then"]["replicas"] == 2
    assert answer["measured"] is None
    for wrong, message in (
        (("--rate", "fast"), "--rate is 'fast'"),
        (("--gpus", "-1"), "--replicas -1 makes 0 of 1"),
        (("--memory", "1MiB"), "do not hold one sequence"),
        (("--enough", "2"), "--enough is 2"),
        (("--requests", "0"), "--requests is 0"),
        (("--measure", "--replicas", "2"), "--measure runs one engine"),
    ):
        with pytest.raises(UserError, match=message):
            command(*words, *wrong)
