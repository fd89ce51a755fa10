"""Shares of a whole: nothing for what does nothing, halves for twins, sums that are the whole; on made-up games, simulations, engines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import LLAMA_8B, SMOLLM2, SMOLLM2_BF16, gpu, machine
from rich.console import Console

from tradewind import cli_ablate
from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.config.techniques import TECHNIQUES, Technique
from tradewind.contract.errors import UserError
from tradewind.simulate.steptime import KNOTS, StepTime, roofline
from tradewind.simulate.trace_columns import Trace, poisson_trace
from tradewind.simulate.traces import write_trace
from tradewind.tune import variants
from tradewind.tune.ablate import (
    GOALS,
    Ablation,
    Figures,
    Share,
    Worth,
    ablate,
    attribute,
    cut_up,
    figures_of,
    leave_one_out,
    shapley,
)
from tradewind.tune.ablate_view import ablation_text
from tradewind.tune.measured import ablate_measured, goals_of, prompt_of, workload_of


def figures(value: float) -> Figures:
    return Figures(ttft_s=-value, tpot_s=-value / 10, tokens_per_s=100 * value, memory_bytes=-(2**20) * value)


def game(values: dict[frozenset[str], float]) -> Worth:
    return lambda on: figures(values[on])


def speed(share: Figures) -> float:
    return share.tokens_per_s / 100


# --------------------------------------------------------------------------------------------------------- made-up games


def test_a_no_op_gets_nothing_and_twins_share() -> None:
    """a and b do the same; c adds by itself; d does nothing."""

    def worth(on: frozenset[str]) -> Figures:
        return figures(3.0 * bool(on & {"a", "b"}) + 2.0 * ("c" in on))

    alone = leave_one_out("abcd", worth)
    assert [speed(alone[name]) for name in "abcd"] == [0, 0, 2, 0]
    parts = shapley("abcd", worth)
    assert [speed(parts[name]) for name in "abcd"] == pytest.approx([1.5, 1.5, 2, 0])


NAMES = ("a", "b", "c", "d")
SETS = [frozenset(n for i, n in enumerate(NAMES) if mask >> i & 1) for mask in range(16)]


@settings(max_examples=60)
@given(st.lists(st.floats(-10, 10), min_size=16, max_size=16))
def test_parts_sum_to_the_whole_of_any_game(values: list[float]) -> None:
    worth = game(dict(zip(SETS, values, strict=True)))
    parts = shapley(NAMES, worth)
    for goal in GOALS:
        whole = getattr(worth(frozenset(NAMES)), goal) - getattr(worth(frozenset()), goal)
        assert sum(getattr(part, goal) for part in parts.values()) == pytest.approx(whole, abs=1e-6 * (1 + abs(whole)))


@settings(max_examples=40)
@given(st.lists(st.floats(-10, 10), min_size=8, max_size=8))
def test_a_no_op_gets_nothing_in_any_game_and_equals_get_the_same(values: list[float]) -> None:
    three = dict(zip([s for s in SETS if "d" not in s], values, strict=True))
    parts = shapley(NAMES, lambda on: figures(three[on - {"d"}]))
    assert speed(parts["d"]) == pytest.approx(0, abs=1e-9)

    def equal(on: frozenset[str]) -> Figures:  # a and b are interchangeable
        return figures(values[len(on & {"a", "b"}) + 3 * ("c" in on)])

    parts = shapley(("a", "b", "c"), equal)
    assert speed(parts["a"]) == pytest.approx(speed(parts["b"]), abs=1e-9)


def test_what_is_always_on_stays_on() -> None:
    seen: set[frozenset[str]] = set()

    def worth(on: frozenset[str]) -> Figures:
        seen.add(on)
        return figures(len(on))

    parts = shapley(("a", "b"), worth, always=frozenset("z"))
    assert all("z" in on for on in seen)
    assert [speed(part) for part in parts.values()] == pytest.approx([1, 1])


def test_intervals_come_from_the_stretches() -> None:
    """Three stretches in which a brings 1, 2 and 3: Student's t at 2 degrees of freedom, 4.303 / sqrt(3)."""
    stretches = [lambda on, v=value: figures(v * ("a" in on)) for value in (1.0, 2.0, 3.0)]
    alone, shares, whole = attribute(("a", "b"), lambda on: figures(2.0 * ("a" in on)), stretches, shared=("a", "b"))
    a = alone[0].amounts["ttft_s"]
    assert (a.value, a.off_by) == (pytest.approx(-2), pytest.approx(4.303 / 3**0.5))
    assert (alone[1].amounts["ttft_s"].value, alone[1].amounts["ttft_s"].off_by) == (0, 0)
    assert whole is not None
    total = sum(share.amounts["tokens_per_s"].value for share in shares)
    assert total == pytest.approx(whole.amounts["tokens_per_s"].value)
    assert attribute(("a",), lambda on: figures(len(on)), [])[0][0].amounts["ttft_s"].off_by is None


def test_too_many_or_unknown_ones_are_refused() -> None:
    names = tuple("abcdefghi")
    with pytest.raises(UserError, match="9 techniques are 512 plans"):
        attribute(names, lambda on: figures(0), [], shared=names)
    with pytest.raises(UserError, match="wings cannot be attributed here; there are a, b"):
        attribute(("a", "b"), lambda on: figures(0), [], shared=("wings",))


# -------------------------------------------------------------------------------------------------------------- variants


def plan_of(**means: Any) -> Plan:
    return resolve(Goals(model="m", max_context=1024, means=Means(**means)), SMOLLM2, machine())


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(),
        plan_of(policy="fair", compute="int8", max_running=8),
        resolve(Goals(model="m"), SMOLLM2_BF16, machine()),
        resolve(Goals(model="m", means=Means(kv_format="fp8", quantization="fp8")), LLAMA_8B, gpu()),
    ],
    ids=["smollm2", "pinned", "bf16", "gpu"],
)
def test_a_variant_lacks_one_technique_and_fits(plan: Plan) -> None:
    had = variants.techniques_of(plan)
    assert {"continuous_batching", "prefix_cache"} <= set(had)
    limit = sum(line.bytes for line in plan.ledger)
    for name in had:
        made = variants.without(plan, (name,), longest_prompt=700)
        values = variants.values_of(made)
        assert all(values[pin] == value for pin, value in TECHNIQUES[name].off.items()), name
        assert sum(line.bytes for line in made.ledger) <= max(limit, plan.hardware.memory_free_bytes * 0.9)
        if name not in ("continuous_batching", "chunked_prefill"):
            assert made.schedule.max_running == plan.schedule.max_running
        times = variants.times_for(made, plan=plan, times=roofline(plan))
        assert all(seconds > 0 for seconds in times.curve_s)
    assert variants.without(plan, (), longest_prompt=1) is plan
    nothing = variants.without(plan, had, longest_prompt=700)
    assert nothing.schedule.max_running == 1
    assert not nothing.cache.prefix_cache


def test_a_policys_row_is_switched_off_by_its_pin() -> None:
    plan = plan_of(policy="priority")
    assert "priority_ageing" in variants.techniques_of(plan)
    assert "tenant_fairness" not in variants.techniques_of(plan)
    assert variants.without(plan, ("priority_ageing",), longest_prompt=9).schedule.policy == "arrival"


def test_fitted_times_are_carried_over_by_the_roofline() -> None:
    plan = plan_of()
    fitted = StepTime(
        source="fitted", curve_s=tuple(2 * s for s in roofline(plan).curve_s), extra_s=(1e-6,) * 5, steps=9
    )
    exact = variants.without(plan, ("packed_weights",), longest_prompt=9)
    moved = variants.times_for(exact, plan=plan, times=fitted)
    assert moved.curve_s[0] / fitted.curve_s[0] == pytest.approx(roofline(exact).curve_s[0] / roofline(plan).curve_s[0])
    assert variants.times_for(plan, plan=plan, times=fitted) is fitted


# ------------------------------------------------------------------------------------------------------------- simulated


def shared_trace(requests: int = 60) -> Trace:
    return poisson_trace(
        requests=requests, per_s=6.0, prompt=(20, 0.5), output=(10, 0.4), longest_prompt=80, longest_output=20,
        prefixes=2, prefix_blocks=4, block_tokens=64, seed=3,
    )  # fmt: skip


QUICK = StepTime(
    source="made up", curve_s=(0.01, *(0.01 + 2e-4 * tokens for tokens in KNOTS)), extra_s=(1e-9,) * 5, steps=1
)


def by_name(shares: tuple[Share, ...]) -> dict[str, Share]:
    return {share.technique: share for share in shares}


@pytest.fixture(scope="module")
def simulated() -> Ablation:
    """With two plants: a technique that changes nothing, and one more row that is switched like the prefix cache."""
    plan = plan_of(max_running=8)
    planted = Technique(
        layer="schedule",
        switch="means.tape",
        helps="-",
        hurts="-",
        metric="-",
        test="-",
        off={"overlap": False, "tape": False},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TECHNIQUES, "planted_no_op", planted)
        patch.setitem(variants.FELT, "planted_no_op", "not at all")
        return ablate(
            shared_trace(), plan, times=QUICK, at="mean", shared=("planted_no_op", "prefix_cache", "small_pass_big")
        )


def test_a_planted_no_op_gets_nothing(simulated: Ablation) -> None:
    for shares in (simulated.leave_one_out, simulated.shapley):
        planted = by_name(shares)["planted_no_op"]
        assert all(planted.amounts[goal].value == 0 for goal in GOALS)
        assert all(planted.amounts[goal].off_by == 0 for goal in GOALS)


def test_what_helps_is_told_with_its_interval(simulated: Ablation) -> None:
    cache = by_name(simulated.leave_one_out)["prefix_cache"]
    assert cache.amounts["ttft_s"].value < 0 < cache.amounts["tokens_per_s"].value
    off_by = cache.amounts["tokens_per_s"].off_by
    assert off_by is not None
    assert cache.amounts["tokens_per_s"].value > off_by > 0
    batching = by_name(simulated.leave_one_out)["continuous_batching"]
    assert batching.amounts["tokens_per_s"].value > 0
    assert batching.amounts["tpot_s"].value > 0, "its price"
    assert by_name(simulated.leave_one_out)["kv_f16"].amounts["memory_bytes"].value < 0
    assert simulated.how == "simulated"
    assert simulated.stretches == 4
    assert "does not feel it" in simulated.left_out["fused_kernels"]


def test_simulated_parts_sum_to_the_whole(simulated: Ablation) -> None:
    assert simulated.whole is not None
    for goal in GOALS:
        total = sum(share.amounts[goal].value for share in simulated.shapley)
        assert total == pytest.approx(simulated.whole.amounts[goal].value, rel=1e-9, abs=1e-9)


def test_simulated_twins_share_the_credit() -> None:
    """Two techniques either of which makes the engine find prefixes again: simulations, not sums."""
    plan = plan_of(max_running=8)
    bare = variants.without(plan, ("prefix_cache",), longest_prompt=400)
    trace = shared_trace(40)

    def worth(on: frozenset[str]) -> Figures:
        return figures_of(trace, plan if on & {"one", "other"} else bare, times=QUICK, at="mean", seed=0)

    alone, shares, whole = attribute(("one", "other"), worth, [], shared=("one", "other"))
    assert whole is not None
    for goal in GOALS:
        assert [share.amounts[goal].value for share in alone] == [0, 0]
        half = whole.amounts[goal].value / 2
        assert [share.amounts[goal].value for share in shares] == pytest.approx([half, half])
    assert whole.amounts["tokens_per_s"].value > 0


def test_short_traces_have_no_stretches() -> None:
    assert cut_up(shared_trace(19), 4) == []
    assert [len(part) for part in cut_up(shared_trace(45), 4)] == [11, 11, 12, 11]


def test_the_view_names_everything(simulated: Ablation) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(ablation_text([simulated]))
    text = captured.get()
    for word in ("Simulated", "prefix_cache", "together", "Shapley", "Not told: ", "±", "MiB"):
        assert word in text


# -------------------------------------------------------------------------------------------------------------- measured


class FakeEngine:
    """Answers at once; its clock says that a prompt takes twice as long without the prefix cache."""

    def __init__(self, goals: Goals) -> None:
        self.plan = resolve(goals, SMOLLM2, machine())
        self.engine = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=SMOLLM2.vocab_size), checkpoint_path=Path())
        self.phases = None

    def forget(self) -> None:
        pass

    def generate(self, prompts: Any, sampling: Any, *, progress: bool = False) -> list[Any]:
        first = 0.1 if self.plan.cache.prefix_cache else 0.2
        return [
            SimpleNamespace(
                completions=[SimpleNamespace(error=None, tokens=[7] * own.max_tokens)],
                cached_tokens=0,
                arrived_s=5.0,
                first_token_s=5.0 + first,
                finished_s=5.0 + first + 0.01 * (own.max_tokens - 1),
            )
            for own in sampling
        ]


def test_measured_and_simulated_are_kept_apart() -> None:
    opened: list[Goals] = []

    @contextmanager
    def open_engine(goals: Goals) -> Iterator[Any]:
        opened.append(goals)
        yield FakeEngine(goals)

    trace = shared_trace(6)
    found = ablate_measured(trace, plan_of(max_running=8), open_engine=open_engine, rounds=2, at="mean")
    assert found.how == "measured"
    assert found.shapley == ()
    shares = by_name(found.leave_one_out)
    assert len(opened) == 2 * (len(shares) + 1)
    assert shares["prefix_cache"].amounts["ttft_s"].value == pytest.approx(-0.1)
    assert shares["tape"].amounts["ttft_s"].value == pytest.approx(0, abs=1e-12)
    assert shares["kv_f16"].amounts["memory_bytes"].off_by == 0
    assert found.left_out["small_pass_big"] == "it is switched in the plan, not by a pin"


def test_goals_lead_back_to_the_plan() -> None:
    for plan in (plan_of(), plan_of(policy="priority", max_running=5)):
        again = resolve(goals_of(plan), plan.card, plan.hardware)
        assert (again.schedule, again.numerics) == (plan.schedule, plan.numerics)


def test_prompts_share_what_the_trace_says() -> None:
    trace = shared_trace(12)
    work = workload_of(trace, vocab_size=260, max_context=1024)
    assert max(max(prompt) for prompt in work.prompts) < 260
    for left in range(12):
        for right in range(left):
            one, two = trace.prompt(left), trace.prompt(right)
            size = min(len(one), len(two))
            same = int(np.argmin(np.append(one[:size] == two[:size], False)))
            a, b = (np.array(prompt_of(trace, i, vocab_size=260)) for i in (left, right))
            assert (a[:same] == b[:same]).all()
            assert same == size or not (a[:size] == b[:size]).all()
    with pytest.raises(UserError, match="no request of poisson fits"):
        workload_of(trace, vocab_size=260, max_context=10)


# --------------------------------------------------------------------------------------------------------------- command


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli_ablate.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["ablate", *words])
    code: int = arguments.run(arguments)
    return code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(shared_trace(24), tmp_path / "t.jsonl")
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan_of(max_running=8)))
    QUICK.save(tmp_path / "times.json")
    words = ("--plan", str(tmp_path / "plan.json"), "--times", str(tmp_path / "times.json"), "--shapley", "none")
    assert command(str(tmp_path / "t.jsonl"), *words, "--json", "--out", str(tmp_path / "o.json")) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert said["how"] == "simulated"
    assert said["shapley"] == []
    assert msgspec.json.decode((tmp_path / "o.json").read_bytes(), type=list[Ablation])[0].stretches == 2
    assert command(str(tmp_path / "t.jsonl"), *words) == 0
    assert "prefix_cache" in capsys.readouterr().out
    for wrong, said in (
        (("--requests", "0"), "--requests is 0"),
        (("--rate", "-1"), "--rate is -1"),
        (("--no-simulate",), "leaves nothing to do"),
        (("--shapley", "wings"), "wings cannot be attributed here"),
    ):
        with pytest.raises(UserError, match=said):
            command(str(tmp_path / "t.jsonl"), *words, *wrong)
