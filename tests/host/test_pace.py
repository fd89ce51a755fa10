"""Bounds on steps in which prompts go on beside running answers: what is chosen, how chunks follow, and a prompt of 128k simulated."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.host.plans import LLAMA_8B, SMOLLM2, gpu, machine
from tradewind.config.goals import Goals, Means, TrafficClass
from tradewind.config.goals_file import parse_goals
from tradewind.config.plan import PacePlan, Plan, StepCostPlan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Step
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.pacing import LEAST_TOKENS, LIMIT_MARGIN, PROBE, StepClock, StepLimit, planned_seconds
from tradewind.engine.rows import Rows
from tradewind.engine.scheduler import Scheduler
from tradewind.simulate.clock import VirtualClock
from tradewind.simulate.features import FeatureReader, Features
from tradewind.simulate.live_times import live_times_of
from tradewind.simulate.simulator import SimulatedExecutor

LONG = 131072
CARD = msgspec.structs.replace(LLAMA_8B, max_positions=LONG + 1024)
COST = StepCostPlan(base_s=0.004, token_s=20e-6, context_s=30e-9, pair_s=1.2e-9)


def plan_of(**stated: Any) -> Plan:
    return resolve(Goals(model="x", **stated), CARD, gpu())


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_what_bounds_steps_by_scenario_and_by_what_is_stated() -> None:
    paces = {
        "balanced": plan_of(),
        "latency": plan_of(scenario="latency"),
        "throughput": plan_of(scenario="throughput"),
        "stated": plan_of(slowdown=3),
        "tpot": plan_of(tpot_ms=10.0),
        "both": plan_of(tpot_ms=10.0, slowdown=1.5, scenario="latency"),
    }
    assert {name: plan.schedule.pace for name, plan in paces.items()} == {
        "balanced": PacePlan(whole=True),
        "latency": PacePlan(slowdown=2.0),
        "throughput": None,
        "stated": PacePlan(slowdown=3.0),
        "tpot": PacePlan(step_s=0.01),
        "both": PacePlan(slowdown=1.5, step_s=0.01),
    }
    fits = {name for name, plan in paces.items() if plan.schedule.fit_steps}
    assert fits == {"latency", "stated", "tpot", "both"}, "steps are learnt from where each is bound"
    assert all((plan.schedule.step_cost is None) == (name == "throughput") for name, plan in paces.items())
    said = {name: next(r for r in plan.reasons if r.choice == "pace") for name, plan in paces.items()}
    assert said["both"].value == "1.5 times a step without prompts and 10 ms" and said["both"].pinned
    assert said["latency"].value.startswith("2 times") and not said["latency"].pinned


def test_targets_of_classes_pace_by_themselves() -> None:
    chat = (TrafficClass(name="chat", tpot_ms=20.0),)
    plan = plan_of(classes=chat, scenario="latency")
    assert plan.schedule.policy == "slo" and plan.schedule.pace is None
    assert plan_of(classes=chat, slowdown=2).schedule.pace == PacePlan(slowdown=2.0)


def test_a_cpu_is_bound_only_where_that_is_asked_for() -> None:
    found = [
        resolve(Goals(model="x", **stated), SMOLLM2, machine()).schedule.pace
        for stated in ({}, {"scenario": "latency"}, {"slowdown": 4.0})
    ]
    assert found == [None, None, PacePlan(slowdown=4.0)]


@pytest.mark.parametrize("value", [1.0, 0, -2, float("nan"), float("inf"), True])
def test_a_slowdown_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"slowdown is .*; it must be a number from 1\.1"):
        plan_of(slowdown=value)


def test_slowdown_in_a_file_of_goals() -> None:
    assert parse_goals('model = "x"\nslowdown = 2.5\n').slowdown == 2.5
    with pytest.raises(UserError, match="slowdown"):
        parse_goals('model = "x"\nslowdown = "twice"\n')


# -- how chunks follow -------------------------------------------------------------------------------------------------


def test_a_chunk_costs_its_pairs_and_half_of_reading_the_keys_once() -> None:
    seconds = planned_seconds(COST)
    alone = seconds(rows=16, context=16000, chunk=0, start=0)
    assert alone == pytest.approx(0.004 + 16000 * 30e-9)
    few, many = (seconds(rows=16, context=16000, chunk=chunk, start=100_000) - alone for chunk in (16, 64))
    assert few == pytest.approx(100_016 * 15e-9 + (16 * 100_000 + 128) * 1.2e-9)
    assert many == pytest.approx(100_064 * 15e-9 + (64 * 100_000 + 2048) * 1.2e-9)
    old = planned_seconds(msgspec.structs.replace(COST, pair_s=None))
    assert old(rows=0, context=0, chunk=64, start=1000) == pytest.approx(0.004 + (64_000 + 2048) * 30e-9)


def limit_of(plan: PacePlan, *, rows: int = 16, each: int = 1000) -> tuple[StepLimit, Rows, Any]:
    clock = StepClock(planned_seconds(COST))
    table = Rows(slots=rows)
    table.next[:] = each
    return StepLimit(plan, clock, budget=8192, page_tokens=64), table, np.arange(rows, dtype=np.int32)


def test_chunks_shrink_with_depth_and_end_on_borders() -> None:
    limit, rows, slots = limit_of(PacePlan(slowdown=2.0))
    seconds = planned_seconds(COST)
    allowed = LIMIT_MARGIN * 2 * seconds(rows=16, context=16000, chunk=0, start=0)
    chunks = [limit.chunk(slots, rows, most=8000, start=start) for start in range(0, LONG, 4096)]
    assert chunks == sorted(chunks, reverse=True) and 256 <= chunks[0] <= 384 and LEAST_TOKENS <= chunks[-1] <= 64
    for start, chunk in zip(range(0, LONG, 4096), chunks, strict=True):
        took = seconds(rows=16, context=16000, chunk=chunk, start=start)
        assert took <= allowed or chunk == LEAST_TOKENS
        assert chunk >= 512 or chunk & (chunk - 1) == 0 or (chunk >= 128 and chunk % 3 == 0)
    assert limit.chunk(slots, rows, most=10, start=0) == 10, "the end of a prompt is no power of two"
    assert limit.chunk(slots[:0], rows, most=8000, start=100_000) == 8000, "nobody waits"
    assert limit.chunk(slots, rows, most=0, start=0) == 0


def test_a_whole_step_bounds_only_deep_prompts() -> None:
    limit, rows, slots = limit_of(PacePlan(whole=True))
    assert limit.chunk(slots, rows, most=8000, start=8192) == 8000
    deep = limit.chunk(slots, rows, most=8000, start=120_000)
    assert 800 < deep < 1400
    whole = planned_seconds(COST)(rows=0, context=0, chunk=8192, start=0)
    assert planned_seconds(COST)(rows=16, context=16000, chunk=deep, start=120_000) <= whole


def test_the_least_of_two_bounds_holds() -> None:
    found = [
        limit_of(plan)[0].allowed_s(rows=16, context=16000, start=0)
        for plan in (PacePlan(slowdown=2.0), PacePlan(step_s=0.006), PacePlan(slowdown=2.0, step_s=0.006))
    ]
    assert found[2] == min(found) == pytest.approx(LIMIT_MARGIN * 0.006) and found[0] > found[1]


# -- 16 answers of 1k, and a prompt of 128k -----------------------------------------------------------------------------

MATMULS_S = {
    16: 4.6e-3,
    32: 4.6e-3,
    48: 5.25e-3,
    80: 5.3e-3,
    128: 5.4e-3,
    256: 7.6e-3,
    320: 9.2e-3,
    512: 14.5e-3,
    8704: 0.196,
}
"""An H200's times for all of the 8B shape but attention, by tokens of a step ..."""
KEY_S, BESIDE_S = 1.2 * 131072 / 4.2e12, 0.35e-3
"""... for a key that a decoding row reads, for decoding rows and a prompt being one step, and ..."""
TILES = (16, 32, 64, 128, 256, 512)
FIRST_US, EACH_US = (25, 30, 33, 30, 36, 63), (1.05e-3, 1.32e-3, 2.23e-3, 4.3e-3, 8.4e-3, 16.2e-3)
"""... for attention of so many tokens of a prompt in each of 32 layers: whatever its keys, and for each of them
(benchmarks/results/long-rounds-h200.json)."""


def attention_s(tokens: int, keys: int) -> float:
    tiles = 16 if tokens <= 16 else -(-tokens // 32) * 32
    first, each = (float(np.interp(tiles, TILES, column)) for column in (FIRST_US, EACH_US))
    return 32e-6 * (first + each * (keys - tokens / 2) * max(1.0, tiles / TILES[-1]))


def matmuls_s(tokens: int) -> float:
    return float(np.interp(-(-tokens // 16) * 16, list(MATMULS_S), list(MATMULS_S.values())))


class Ran:
    """What the steps of a simulated run took, with what each would have taken without its chunk."""

    def __init__(self, plan: Plan) -> None:
        self.took: list[float] = []
        self.alone: list[float] = []
        self.chunk: list[int] = []
        clock = VirtualClock()
        slots = plan.schedule.max_running
        executor = SimulatedExecutor(
            clock=clock,
            slots=slots,
            reader=FeatureReader(groups=plan.cache.groups, slots=slots),
            answer_of=lambda name: (7, 1 << 20),
            finish=self.finish,
        )
        scheduler = Scheduler(schedule=plan.schedule, cache=plan.cache, clock=clock.now)
        self.noise = np.random.default_rng(1)
        self.watch = live_times_of(plan, clock=clock.now, pace=scheduler.pace_by, run=lambda job: job())
        loop = EngineLoop(scheduler=scheduler, executor=executor, clock=clock.now, watch=self.watch)
        for number in range(16):
            loop.post(Add(asked(f"short{number}", 1024, number, out=20_000)))
        for _ in range(300):
            loop.run_once()
        began, self.before = clock.now(), len(self.took)
        loop.post(Add(asked("long", LONG, 99, out=1)))
        loop.run_once()
        while scheduler.state_of("long") is not None:
            loop.run_once()
        self.prefill_s = clock.now() - began

    def finish(self, step: Step, features: Features, begin_s: float) -> float:
        one = step.count == 1
        keys_s = KEY_S * float((step.start[one] + 1).sum())
        alone = matmuls_s(int(one.sum())) + keys_s
        took = matmuls_s(int(step.count.sum())) + keys_s + BESIDE_S * bool(one.any() and not one.all())
        took += sum(
            attention_s(count, start + count) for start, count in zip(step.start[~one], step.count[~one], strict=True)
        )
        took *= float(np.exp(0.01 * self.noise.normal()))
        self.took.append(took)
        self.alone.append(alone)
        self.chunk.append(int(step.count[~one].sum()))
        return begin_s + took

    def ratios(self) -> Any:
        """Of each step with a chunk of the long prompt to the same step without."""
        some = [index for index in range(self.before, len(self.took)) if self.chunk[index]]
        return np.array([self.took[index] / self.alone[index] for index in some])


def asked(name: str, tokens: int, seed: int, *, out: int) -> Request:
    ids = np.random.default_rng(seed).integers(100, 100_000, tokens)
    sampling = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
    return Request(id=name, tokens=tuple(ids.tolist()), sampling=sampling, max_tokens=out, seed=seed)


def test_answers_keep_within_twice_their_pace_while_128k_are_computed() -> None:
    means = Means(max_running=32)
    bound, free = (Ran(plan_of(max_context=LONG + 512, means=means, **more)) for more in ({"slowdown": 2}, {}))
    ratios = bound.ratios()
    assert np.quantile(ratios, 0.99) <= 2.0 and ratios.max() <= 2.1, (np.quantile(ratios, 0.99), ratios.max())
    assert np.median(ratios) > 1.7, "and no step is much shorter than it may be"
    # By these times chunks of 64 tokens fit until 40k, of 32 until 130k, of 16 nowhere: 43 s if every step took twice as long exactly.
    assert bound.prefill_s < 50.0, bound.prefill_s
    assert bound.watch is not None and (bound.watch.stats().error_p90 or 1.0) < 0.04
    chunks = np.array(bound.chunk[bound.before :])
    assert (chunks == 16).sum() < 0.4 * len(chunks) and (chunks == 0).sum() < 0.02 * len(chunks)
    assert free.prefill_s < 14.0, "9.3 s at the matmul ceiling; 12.1 s measured"
    assert max(free.took[free.before :]) < 1.8 * matmuls_s(8192), (
        "deep in the prompt no step is much longer than at its beginning"
    )
    unbound = Ran(plan_of(max_context=LONG + 512, means=means, scenario="throughput"))
    assert max(unbound.took[unbound.before :]) > 5 * matmuls_s(8192)


def test_now_and_then_a_step_is_without_a_prompt_to_be_measured() -> None:
    """Only where steps are bound by those without."""
    for plan, some in ((PacePlan(slowdown=2.0), True), (PacePlan(step_s=0.009), False)):
        limit, rows, slots = limit_of(plan)
        found = [limit.chunk(slots, rows, most=8000, start=100_000) for _ in range(3 * (PROBE + 1))]
        assert [place for place, chunk in enumerate(found) if not chunk] == (
            [PROBE, 2 * PROBE + 1, 3 * PROBE + 2] if some else []
        )
