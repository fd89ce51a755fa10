"""From goals to a plan: every choice has its reason, pins are kept or refused, and nothing is planned that does not fit."""

from __future__ import annotations

import io
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.host.plans import CARDS, GEMMA_270M, LLAMA_8B, SMOLLM2, SMOLLM2_BF16, GiB, MiB, machine
from tradewind.config.card import ModelCard
from tradewind.config.choices import HABITS
from tradewind.config.goals import Goals, Means
from tradewind.config.hardware import Hardware
from tradewind.config.kv_sizing import sequence_pages
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.config.sizes import parse_bytes
from tradewind.contract.errors import LimitError, UserError
from tradewind.plan_view import plan_text

SCENARIOS = sorted(HABITS)


def planned(
    card: ModelCard = SMOLLM2, *, hardware: Hardware | None = None, means: Means | None = None, **goals: Any
) -> Plan:
    return resolve(Goals(model=card.name, means=means or Means(), **goals), card, hardware or machine())


def reason(plan: Plan, choice: str) -> Any:
    (found,) = [item for item in plan.reasons if item.choice == choice]
    return found


def total(plan: Plan) -> int:
    return sum(line.bytes for line in plan.ledger)


# ------------------------------------------------------------------------------------------------------------- defaults


def test_defaults_of_the_embedded_model() -> None:
    plan = planned()
    assert (plan.numerics.backend, plan.numerics.compute, plan.numerics.quantization, plan.numerics.kv_format) == (
        "cpu",
        "int16",
        "none",
        "f16",
    )
    assert (plan.cache.page_tokens, plan.cache.prefix_cache, plan.numerics.tape, plan.numerics.threads) == (
        16,
        True,
        True,
        2,
    )
    assert (plan.schedule.max_tokens_per_step, plan.schedule.max_running, plan.schedule.max_context) == (512, 64, 8192)
    assert (plan.schedule.policy, plan.schedule.steps_in_flight) == ("arrival", 1)
    resident = sum(line.bytes for line in plan.ledger if not line.name.startswith("KV"))
    assert resident < 300 * MiB, "what is touched at start stays far under 700 MB"


def test_every_choice_has_a_reason_and_pins_are_marked() -> None:
    means = set(Means.__struct_fields__)
    plan = planned()
    assert means <= {item.choice for item in plan.reasons}
    assert all(item.why and item.value for item in plan.reasons)
    assert not any(item.pinned for item in plan.reasons)
    pins = Means(
        kv_format="bf16",
        page_tokens=32,
        max_running=3,
        policy="priority",
        tape=False,
        overlap=False,
        threads=1,
        prefix_cache=False,
    )
    plan = planned(means=pins, memory_limit_bytes=GiB, max_context=100)
    pinned = {item.choice for item in plan.reasons if item.pinned}
    assert pinned == {
        "kv_format",
        "page_tokens",
        "max_running",
        "policy",
        "tape",
        "overlap",
        "threads",
        "prefix_cache",
        "memory_limit",
        "max_context",
    }
    assert (plan.numerics.kv_format, plan.cache.page_tokens, plan.schedule.max_running) == ("bf16", 32, 3)
    assert (plan.schedule.policy, plan.numerics.tape, plan.schedule.steps_in_flight, plan.numerics.threads) == (
        "priority",
        False,
        1,
        1,
    )
    assert (plan.cache.prefix_cache, plan.schedule.max_context) == (False, 100)


def test_compute_follows_weights_and_machine() -> None:
    assert planned(SMOLLM2_BF16).numerics.compute == "bf16"
    old = machine(features=("avx2",))
    assert planned(SMOLLM2_BF16, hardware=old).numerics.compute == "f32"
    assert "avx512_bf16" in reason(planned(SMOLLM2_BF16, hardware=old), "compute").rejected
    assert planned(SMOLLM2, hardware=old).numerics.compute == "int16"
    assert planned(SMOLLM2_BF16, means=Means(quantization="int4")).numerics.compute == "int16"
    for scenario in ("throughput", "memory"):
        assert planned(SMOLLM2, scenario=scenario).numerics.compute == "int8"
    assert planned(SMOLLM2_BF16, means=Means(compute="int16")).numerics.quantization == "int8"
    assert planned(SMOLLM2_BF16, means=Means(compute="int8")).numerics.quantization == "int8"
    exact = planned(SMOLLM2, means=Means(compute="f32")).numerics
    assert (exact.compute, exact.kv_format) == ("f32", "f32")


def test_scenarios_pull_in_their_directions() -> None:
    latency, balanced, throughput, memory = (
        planned(SMOLLM2_BF16, scenario=name) for name in ("latency", "balanced", "throughput", "memory")
    )
    assert (
        latency.schedule.max_tokens_per_step
        < balanced.schedule.max_tokens_per_step
        < throughput.schedule.max_tokens_per_step
    )
    assert latency.schedule.max_running < balanced.schedule.max_running < throughput.schedule.max_running
    assert total(memory) < min(total(latency), total(balanced)) < total(throughput)
    assert memory.numerics.quantization == "int4"
    assert "quality" in reason(memory, "quantization").why
    assert {latency.numerics.quantization, balanced.numerics.quantization, throughput.numerics.quantization} == {"none"}


def test_targets_are_answered_with_the_machines_limits() -> None:
    plan = planned(tpot_ms=1.0, ttft_ms=100.0)
    assert "cannot be met" in reason(plan, "target tpot").why
    assert plan.schedule.max_tokens_per_step < 512
    assert "tokens" in reason(plan, "target ttft").why
    assert "can be met" in reason(planned(tpot_ms=50.0), "target tpot").why


def test_overlap_wants_a_core_that_does_not_compute() -> None:
    assert planned(hardware=machine(cores=4)).schedule.steps_in_flight == 1
    assert planned(hardware=machine(cores=4), means=Means(threads=3)).schedule.steps_in_flight == 2
    assert "all 4 cores compute" in reason(planned(hardware=machine(cores=4)), "overlap").why


def test_one_core_does_not_overlap() -> None:
    plan = planned(hardware=machine(cores=1))
    assert plan.schedule.steps_in_flight == 1
    assert planned(hardware=machine(cores=1), means=Means(overlap=True)).schedule.steps_in_flight == 2


def test_without_the_library_torch_computes() -> None:
    missing = {"cpu": "the C++ library was not built"}
    plan = resolve(Goals(model="x"), SMOLLM2, machine(), missing=missing)
    assert (plan.numerics.backend, plan.numerics.compute, plan.numerics.tape) == ("plain", "f32", False)
    assert missing["cpu"] in reason(plan, "backend").rejected
    with pytest.raises(UserError, match="backend cpu cannot be used: the C"):
        resolve(Goals(model="x", means=Means(backend="cpu")), SMOLLM2, machine(), missing=missing)
    with pytest.raises(UserError, match="no backend can be used"):
        resolve(Goals(model="x"), SMOLLM2, machine(), missing={**missing, "plain": "torch is not installed"})


def test_gemma_gets_two_pools() -> None:
    plan = planned(GEMMA_270M)
    full, window = plan.cache.groups
    assert (full.kind, window.kind, window.window) == ("full", "window", 512)
    need = sequence_pages(
        window, tokens=plan.schedule.max_context, max_tokens_per_step=plan.schedule.max_tokens_per_step
    )
    assert plan.cache.pages[1] > need
    assert plan.cache.pages[0] > plan.schedule.max_context // 16


def test_same_input_same_plan() -> None:
    assert planned() == planned()
    encoded = msgspec.json.encode(planned(GEMMA_270M))
    assert msgspec.json.decode(encoded, type=Plan) == planned(GEMMA_270M)


# ------------------------------------------------------------------------------------------------------------- refusals

IMPOSSIBLE: list[tuple[ModelCard, dict[str, Any], str]] = [
    (SMOLLM2, {"backend": "cuda"}, "backend cuda cannot be used: no usable GPU was found; use --backend cpu"),
    (SMOLLM2, {"kv_format": "fp8"}, "kv_format fp8 is not supported by the cpu backend; use f16, bf16 or f32"),
    (SMOLLM2, {"page_tokens": 20}, "page_tokens is 20; the cpu backend needs a multiple of 16, for example 16"),
    (SMOLLM2, {"page_tokens": 0}, "page_tokens is 0; it must be a whole number from 1 to 1024"),
    (SMOLLM2, {"threads": 0}, "threads is 0"),
    (SMOLLM2, {"max_running": 600, "max_tokens_per_step": 512}, "max_running is 600, over max_tokens_per_step 512"),
    (SMOLLM2, {"quantization": "int4"}, "the file of 'smollm2' is quantised already"),
    (SMOLLM2, {"backend": "plain", "tape": True}, "the plain backend has none: leave tape off"),
    (SMOLLM2_BF16, {"quantization": "none", "compute": "int8"}, "compute int8 needs quantised weights"),
    (SMOLLM2, {"compute": "f64"}, "compute is 'f64'; it must be one of bf16, f32, int16, int8"),
]


@pytest.mark.parametrize(("card", "pins", "message"), IMPOSSIBLE, ids=lambda value: str(value)[:30])
def test_impossible_pins_are_refused(card: ModelCard, pins: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        planned(card, means=Means(**pins))


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        ({"max_context": 0}, "max_context is 0"),
        ({"max_context": 2.5}, "max_context is 2.5"),
        ({"memory_limit_bytes": -1}, "memory_limit_bytes is -1"),
        ({"tpot_ms": float("nan")}, "tpot_ms is nan"),
        ({"ttft_ms": 0}, "ttft_ms is 0"),
        ({"scenario": "fast"}, "scenario is 'fast'; it must be one of balanced, latency, memory, throughput"),
        (
            {"memory_limit_bytes": 64 * GiB},
            "this machine has 24.0 GiB (22.0 GiB free): use at most --memory-limit 24576MiB",
        ),
    ],
)
def test_goals_out_of_range_are_refused(goals: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        planned(**goals)


def test_a_context_over_the_models_is_refused_with_numbers() -> None:
    with pytest.raises(
        LimitError,
        match=r"max_context is 9000 tokens, but 'smollm2' was made for 8192, 808 fewer: use --max-context 8192",
    ):
        planned(max_context=9000)
    assert planned(max_context=8192).schedule.max_context == 8192


SIZE = r"[0-9.]+ [KMGT]iB"


def test_weights_that_do_not_fit_are_called_so() -> None:
    """User case A11: no advice about the cache when the model itself is too big."""
    with pytest.raises(LimitError) as refusal:
        planned(memory_limit_bytes=64 * MiB)
    text = str(refusal.value)
    limits = rf"the memory limit is 64.0 MiB, {SIZE} short. Use --memory-limit \d+MiB .* or "
    assert re.match(rf"The weights of 'smollm2' do not fit: .* need {SIZE}, {limits}", text)
    assert "KV" not in text
    assert "max-context" not in text
    with pytest.raises(LimitError, match=r"Use --quantization int4 \(.* in all\) or --memory-limit"):
        planned(LLAMA_8B, memory_limit_bytes=8 * GiB)
    with pytest.raises(LimitError, match=r"Use --compute int8 \(.* in all\) or --memory-limit"):
        planned(means=Means(compute="f32"), memory_limit_bytes=300 * MiB)


def test_pages_that_do_not_fit_are_called_so() -> None:
    """User case A10: need, have, shortfall and two settings."""
    with pytest.raises(LimitError) as refusal:
        planned(memory_limit_bytes=300 * MiB, max_context=8192)
    what = rf"A context of 8192 tokens does not fit beside the weights of 'smollm2': {SIZE} and {SIZE} of KV pages need {SIZE}"
    advice = r"Use --max-context \d+ or --memory-limit \d+MiB \(context 8192\)\."
    assert re.match(rf"{what}, the memory limit is 300 MiB, {SIZE} short\. {advice}", str(refusal.value))
    assert refusal.value.exit_code == 2


def test_no_limit_is_advised_that_the_machine_does_not_have() -> None:
    with pytest.raises(
        LimitError, match=r"what is free allows 1.8 GiB.* This machine has 4.0 GiB: use a smaller model"
    ):
        planned(LLAMA_8B, hardware=machine(total=4 * GiB, free=2 * GiB), means=Means(quantization="none"))


def test_short_memory_shrinks_what_nobody_asked_for() -> None:
    plan = planned(memory_limit_bytes=230 * MiB)
    assert total(plan) <= 230 * MiB
    assert plan.schedule.max_context < 8192
    assert "what fits" in reason(plan, "max_context").why
    plan = planned(GEMMA_270M, memory_limit_bytes=1100 * MiB, max_context=2048)
    assert plan.schedule.max_context == 2048


def test_a_long_context_is_cut_to_the_share_of_memory() -> None:
    """Llama 3.1's 131,072 tokens take 16 GiB: not without being asked."""
    plan = planned(LLAMA_8B, hardware=machine(total=40 * GiB, free=32 * GiB))
    pages = sum(line.bytes for line in plan.ledger if line.name.startswith("KV"))
    assert pages <= 16 * GiB
    assert plan.schedule.max_context < 131072


# ----------------------------------------------------------------------------------------------------------- properties


def pin(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly not pinned, so that combinations of few pins are common and impossible ones do not hide the rest."""
    return st.one_of(*[st.none()] * 5, values)


BOOLS = st.booleans()
MEANS = st.builds(
    Means,
    kv_format=pin(st.sampled_from(["f32", "f16", "bf16"])),
    compute=pin(st.sampled_from(["f32", "bf16", "int16", "int8"])),
    quantization=pin(st.sampled_from(["none", "int8", "int4", "fp8"])),
    backend=pin(st.sampled_from(["cpu", "plain"])),
    page_tokens=pin(st.sampled_from([16, 48, 64])),
    max_tokens_per_step=pin(st.integers(1, 5000)),
    max_running=pin(st.integers(1, 500)),
    policy=pin(st.sampled_from(["arrival", "fair", "priority"])),
    prefix_cache=pin(BOOLS),
    overlap=pin(BOOLS),
    tape=pin(BOOLS),
    threads=pin(st.integers(1, 64)),
    deterministic=pin(BOOLS),
    graphs=pin(BOOLS),
    load_format=pin(st.sampled_from(["auto", "dummy", "dummy-flat"])),
)
ANYTHING = st.builds(
    Means,
    kv_format=pin(st.sampled_from(["f32", "fp8"])),
    backend=pin(st.sampled_from(["cpu", "plain", "cuda"])),
    page_tokens=pin(st.integers(-5, 2000)),
    max_tokens_per_step=pin(st.integers(-5, 1 << 40)),
    max_running=pin(st.integers(-5, 1 << 40)),
    threads=pin(st.integers(-5, 1 << 40)),
)
SIZES = st.one_of(*(st.integers(1 << bits, 1 << (bits + 1)) for bits in range(26, 36)), st.integers(1, 1 << 50))
GOALS = st.builds(
    Goals,
    model=st.just("m"),
    scenario=st.sampled_from(SCENARIOS),
    ttft_ms=pin(st.floats(0.001, 1e6)),
    tpot_ms=pin(st.floats(0.001, 1e6)),
    memory_limit_bytes=st.none() | SIZES,
    max_context=st.none() | st.integers(1, 200_000) | st.integers(1, 4096),
    means=st.one_of(MEANS, MEANS, ANYTHING),
)
HARDWARE = st.builds(
    machine,
    total=st.sampled_from([4, 16, 64, 256]).map(lambda size: size * GiB),
    free=st.integers(27, 31).flatmap(lambda bits: st.integers(1 << bits, 1 << (bits + 1))),
    cores=st.integers(1, 256),
    features=st.sampled_from([(), ("avx2",), None]),
)


@settings(max_examples=400)
@given(goals=GOALS, card=st.sampled_from(CARDS), hardware=HARDWARE)
def test_any_goals_give_a_plan_that_fits_or_one_clear_refusal(
    goals: Goals, card: ModelCard, hardware: Hardware
) -> None:
    try:
        plan = resolve(goals, card, hardware)
    except UserError as error:
        check_advice(error, goals=goals, card=card, hardware=hardware)
        return
    means, schedule = goals.means, plan.schedule
    assert total(plan) <= (goals.memory_limit_bytes or hardware.memory_free_bytes)
    assert 1 <= schedule.max_running <= schedule.max_tokens_per_step
    assert 1 <= schedule.max_context <= card.max_positions
    for group, pages in zip(plan.cache.groups, plan.cache.pages, strict=True):
        assert pages - 1 >= sequence_pages(
            group, tokens=schedule.max_context, max_tokens_per_step=schedule.max_tokens_per_step
        )
    for name in ("kv_format", "compute", "backend", "quantization", "tape", "threads", "deterministic", "graphs"):
        assert getattr(means, name) in (None, getattr(plan.numerics, name)), name
    for name in ("max_tokens_per_step", "max_running", "policy"):
        assert getattr(means, name) in (None, getattr(schedule, name)), name
    assert goals.max_context in (None, schedule.max_context)
    assert means.prefix_cache in (None, plan.cache.prefix_cache)
    assert all(item.why for item in plan.reasons)
    if plan.numerics.backend == "cpu":
        assert plan.cache.page_tokens % 16 == 0


def check_advice(error: UserError, *, goals: Goals, card: ModelCard, hardware: Hardware) -> None:
    """One sentence or three, no line breaks; and every setting that is named does work."""
    text = str(error)
    assert text
    assert "\n" not in text
    if "Use " not in text or not isinstance(error, LimitError):
        return
    settings_named = re.findall(
        r"--(memory-limit|max-context|kv-format|quantization|compute) (\w+)(?: --compute (\w+))?(?: \(context (\d+)\))?",
        text,
    )
    assert settings_named
    for option, value, compute, context in settings_named:
        changed = goals
        if context and goals.max_context is None:
            changed = msgspec.structs.replace(changed, max_context=int(context))
        if option == "memory-limit":
            changed = msgspec.structs.replace(changed, memory_limit_bytes=parse_bytes(value))
        elif option == "max-context":
            changed = msgspec.structs.replace(changed, max_context=int(value))
        else:
            pins = {option.replace("-", "_"): value, **({"compute": compute} if compute else {})}
            changed = msgspec.structs.replace(changed, means=msgspec.structs.replace(changed.means, **pins))
        resolve(changed, card, hardware)


@pytest.mark.parametrize("width", [72, 200])
def test_the_view_shows_sum_reasons_and_rejections(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    plan = planned(GEMMA_270M, means=Means(policy="priority"), tpot_ms=1.0)
    console.print(plan_text(plan))
    text = console.export_text()
    assert all(line.name.split(",")[0] in text for line in plan.ledger)
    assert all(item.choice in text for item in plan.reasons)
    assert "together" in text
    assert "pinned" in "".join(text.split())
