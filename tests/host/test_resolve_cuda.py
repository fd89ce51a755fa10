"""Plans for a GPU: what is chosen there, what is refused, and a ledger that follows from the shapes of the buffers."""

from __future__ import annotations

import io
import re
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.host.plans import CARDS, GEMMA_270M, LLAMA_8B, SMOLLM2, SMOLLM2_BF16, GiB, MiB, bf16, gpu, machine
from tests.host.test_resolve import SCENARIOS, check_advice, pin, reason, total
from tradewind.config import ledger, ledger_cuda
from tradewind.config.card import ModelCard, MoeFacts
from tradewind.config.choices import device_wanted, reads_weights
from tradewind.config.goals import Goals, LoadFormat, Means
from tradewind.config.hardware import Hardware
from tradewind.config.kv_sizing import sequence_pages
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import LimitError, UserError
from tradewind.plan_view import plan_text

MIXTURE = bf16(
    msgspec.structs.replace(
        SMOLLM2, name="mixture", moe=MoeFacts(experts=8, per_token=2, intermediate=512, layers=(True,) * 30)
    )
)
AMPERE = gpu(features=("sm_80",), name="Old GPU")


def planned(
    card: ModelCard = LLAMA_8B, *, hardware: Hardware | None = None, means: Means | None = None, **goals: Any
) -> Plan:
    return resolve(Goals(model=card.name, means=means or Means(), **goals), card, hardware or gpu())


def line(plan: Plan, name: str) -> int:
    (found,) = [item.bytes for item in plan.ledger if item.name == name]
    return found


# ------------------------------------------------------------------------------------------------------------- defaults


def test_defaults_on_a_gpu() -> None:
    plan = planned()
    n = plan.numerics
    assert (n.backend, n.compute, n.quantization, n.kv_format) == ("cuda", "bf16", "none", "bf16")
    assert (n.graphs, n.tape, n.deterministic, n.threads) == (True, False, False, 1)
    assert (plan.cache.page_tokens, plan.cache.prefix_cache, plan.load_format) == (64, True, "auto")
    schedule = plan.schedule
    assert (schedule.max_tokens_per_step, schedule.max_running, schedule.max_context) == (8192 + 512, 512, 131072)
    assert schedule.steps_in_flight == 2
    assert set(Means.__struct_fields__) <= {item.choice for item in plan.reasons}
    assert all(item.why and item.value for item in plan.reasons)
    assert not any(item.pinned for item in plan.reasons)


def test_scenarios_pull_in_their_directions() -> None:
    plans = {name: planned(scenario=name) for name in SCENARIOS}
    steps = {name: plan.schedule.max_tokens_per_step for name, plan in plans.items()}
    rows = {name: plan.schedule.max_running for name, plan in plans.items()}
    assert steps["latency"] < steps["balanced"] <= steps["throughput"]
    assert rows["memory"] < rows["latency"] < rows["balanced"] < rows["throughput"]
    assert [name for name, plan in plans.items() if plan.numerics.quantization == "fp8"] == ["memory"]
    assert "quality" in reason(plans["memory"], "quantization").why


def test_deterministic_is_off_unless_asked_for() -> None:
    assert "neighbours" in reason(planned(), "deterministic").why
    asked = planned(means=Means(deterministic=True))
    assert asked.numerics.deterministic
    assert "slower" in reason(asked, "deterministic").why
    assert resolve(Goals(model="x"), SMOLLM2, machine()).numerics.deterministic, "on a CPU it costs nothing"


def test_pins_are_kept_and_marked() -> None:
    pins = Means(
        backend="cuda", compute="bf16", quantization="fp8", kv_format="fp8", page_tokens=32, graphs=False, overlap=False,
        deterministic=True, load_format="dummy", max_running=8, max_tokens_per_step=512,
    )  # fmt: skip
    plan = planned(means=pins)
    named = {name for name in Means.__struct_fields__ if getattr(pins, name) is not None}
    assert {item.choice for item in plan.reasons if item.pinned} == named
    n = plan.numerics
    assert (n.quantization, n.kv_format, n.graphs, n.deterministic) == ("fp8", "fp8", False, True)
    assert (plan.load_format, plan.cache.page_tokens, plan.schedule.steps_in_flight) == ("dummy", 32, 1)
    assert "noise" in reason(plan, "load_format").why
    assert "multiples of 64" in reason(plan, "page_tokens").why


def test_fp8_halves_what_it_says_it_halves() -> None:
    plain, small = planned(), planned(means=Means(quantization="fp8", kv_format="fp8"))
    tables = 2 * LLAMA_8B.vocab_size * LLAMA_8B.hidden
    assert line(small, "weights") - tables == pytest.approx((line(plain, "weights") - tables) / 2, rel=0.002)
    assert small.cache.groups[0].bytes_per_page * 2 == plain.cache.groups[0].bytes_per_page
    assert small.cache.pages[0] > 2 * plain.cache.pages[0]
    assert "4 significant bits" in reason(small, "kv_format").why


def test_quantised_files_are_expanded() -> None:
    plan = planned(SMOLLM2)
    assert "expanded to bf16" in reason(plan, "quantization").why
    again = planned(SMOLLM2, means=Means(quantization="fp8"))
    assert again.numerics.quantization == "fp8"
    assert "a second time" in reason(again, "quantization").why
    assert planned(SMOLLM2, scenario="memory").numerics.quantization == "none", "not rounded twice without being asked"


def test_targets_are_answered_by_the_gpu() -> None:
    plan = planned(tpot_ms=2.0, ttft_ms=100.0)
    assert "cannot be met" in reason(plan, "target tpot").why
    assert "the GPU's bf16 speed" in reason(plan, "target ttft").why
    assert "can be met" in reason(planned(tpot_ms=2.2, means=Means(quantization="fp8")), "target tpot").why
    assert plan.schedule.max_tokens_per_step == 256, "fewer tokens make no step shorter: the weights are read anyway"
    assert "the GPU's bf16 speed" in reason(plan, "max_tokens_per_step").why
    assert (
        "the measured float32 speed" in reason(resolve(Goals(model="x"), SMOLLM2, machine()), "max_tokens_per_step").why
    )


def test_which_device_is_asked_for() -> None:
    assert device_wanted(Means(), card=LLAMA_8B) is None
    assert device_wanted(Means(backend="cuda"), card=LLAMA_8B) == "cuda"
    assert device_wanted(Means(backend="plain"), card=LLAMA_8B) == "cpu"
    assert device_wanted(Means(), card=MIXTURE) is None


def test_on_a_cpu_the_reason_says_why_no_gpu_computes() -> None:
    missing = {"cuda": "no NVIDIA driver (libcuda.so.1 was not found)"}
    plan = resolve(Goals(model="x"), SMOLLM2, machine(), missing=missing)
    assert plan.numerics.backend == "cpu"
    assert missing["cuda"] in reason(plan, "backend").rejected


@pytest.mark.parametrize("load_format", get_args(LoadFormat))
def test_each_load_format_says_what_it_is_for(load_format: LoadFormat) -> None:
    plan = planned(MIXTURE, means=Means(load_format=load_format))
    said = reason(plan, "load_format")
    assert plan.load_format == said.value == load_format and said.pinned
    assert reads_weights(load_format) == (load_format == "auto") == ("noise" not in said.why)


# ------------------------------------------------------------------------------------------------------------- refusals

ON_A_GPU: list[tuple[ModelCard, Hardware, dict[str, Any], str]] = [
    (LLAMA_8B, gpu(), {"quantization": "int8"}, "quantization int8 is for the cpu backend; on a GPU use fp8 or none"),
    (LLAMA_8B, gpu(), {"quantization": "int4"}, "quantization int4 is for the cpu backend"),
    (LLAMA_8B, gpu(), {"compute": "int16"}, "compute int16 is for the cpu and plain backends; the cuda backend computes in bf16"),
    (LLAMA_8B, gpu(), {"compute": "f32"}, "compute f32 is for the cpu and plain backends"),
    (LLAMA_8B, gpu(), {"kv_format": "f32"}, "kv_format f32 is not supported by the cuda backend; use bf16 or fp8"),
    (LLAMA_8B, gpu(), {"kv_format": "f16"}, "kv_format f16 is not supported by the cuda backend"),
    (LLAMA_8B, gpu(), {"tape": True}, "the cuda backend has none: leave tape off"),
    (LLAMA_8B, gpu(), {"threads": 4}, "threads is 4, but with the cuda backend the GPU computes: leave threads out"),
    (LLAMA_8B, gpu(), {"page_tokens": 40}, "page_tokens is 40; the cuda backend needs a multiple of 16, for example 32"),
    (LLAMA_8B, gpu(), {"page_tokens": 1}, "a multiple of 16, for example 16, and is fastest with multiples of 64"),
    (LLAMA_8B, gpu(), {"max_running": 2000}, "max_running is 2000; the cuda backend lays out at most 1024 rows in a step"),
    (LLAMA_8B, gpu(), {"backend": "cpu"}, "backend cpu computes on the CPU, but this plan is asked for Test GPU"),
    (LLAMA_8B, AMPERE, {"quantization": "fp8"}, "quantization fp8 needs fp8 tensor cores, and Old GPU has none; use none"),
    (LLAMA_8B, AMPERE, {"kv_format": "fp8"}, "kv_format fp8 needs a GPU of compute capability 8.9, and Old GPU is older; use bf16"),
    (SMOLLM2_BF16, machine(), {"quantization": "fp8"}, "quantization fp8 needs a GPU's fp8 tensor cores, and the cpu backend has none"),
    (SMOLLM2, machine(), {"graphs": True}, "graphs are CUDA graphs; the cpu backend has none: leave graphs off"),
    (SMOLLM2, machine(), {"backend": "plain", "graphs": True}, "the plain backend has none: leave graphs off"),
    (SMOLLM2, machine(), {"backend": "cuda"}, "backend cuda cannot be used: no usable GPU was found; use --backend cpu"),
    (SMOLLM2, gpu(), {"load_format": "random"}, "load_format is 'random'; it must be one of auto, dummy, dummy-flat, dummy-one-route"),
    (LLAMA_8B, gpu(), {"load_format": "dummy-one-route"}, "'llama-3.1-8b' has no experts; use dummy or dummy-flat"),
]  # fmt: skip


@pytest.mark.parametrize(("card", "hardware", "pins", "message"), ON_A_GPU, ids=lambda value: str(value)[:30])
def test_impossible_pins_are_refused(card: ModelCard, hardware: Hardware, pins: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as refusal:
        planned(card, hardware=hardware, means=Means(**pins))
    assert "\n" not in str(refusal.value)


def test_a_backend_that_is_missing_says_why() -> None:
    with pytest.raises(UserError, match="backend cuda cannot be used: triton is not installed; use --backend cpu"):
        resolve(Goals(model="x"), LLAMA_8B, gpu(), missing={"cuda": "triton is not installed"})


def test_a_limit_over_what_is_free_is_refused() -> None:
    """What others hold of a GPU's memory cannot be moved out of the way."""
    full = gpu(free=20 * GiB)
    with pytest.raises(
        LimitError,
        match=re.escape(
            "the memory limit is 30.0 GiB, but Test GPU has 140 GiB (20.0 GiB free): use at most --memory-limit 20480MiB"
        ),
    ):
        planned(hardware=full, memory_limit_bytes=30 * GiB)
    assert total(planned(hardware=full, memory_limit_bytes=20 * GiB)) <= 20 * GiB


def test_weights_that_do_not_fit_name_what_is_around_them() -> None:
    with pytest.raises(LimitError) as refusal:
        planned(memory_limit_bytes=12 * GiB)
    text = str(refusal.value)
    assert re.match(
        r"The weights of 'llama-3.1-8b' do not fit: 14.0 GiB of weights in bf16 and \S+ GiB around them \(", text
    )
    assert "embedding table 1002 MiB, CUDA 520 MiB" in text
    assert re.search(r"Use --quantization fp8 \(\S+ GiB in all\) or --memory-limit \d+MiB", text)
    with pytest.raises(LimitError, match=r"Use --memory-limit"):
        planned(memory_limit_bytes=12 * GiB, hardware=AMPERE)
    with pytest.raises(LimitError, match=r"This GPU has free 8.0 GiB: use a smaller model"):
        planned(hardware=gpu(free=8 * GiB), means=Means(quantization="none"))


def test_pages_that_do_not_fit_offer_fp8() -> None:
    with pytest.raises(LimitError) as refusal:
        planned(memory_limit_bytes=28 * GiB, max_context=131072)
    text = str(refusal.value)
    assert "A context of 131072 tokens does not fit beside the weights" in text
    assert re.search(r"Use --max-context \d+ or --kv-format fp8 \(\S+ GiB in all\)", text)


# --------------------------------------------------------------------------------------------------------------- ledger


def test_pages_take_what_the_limit_leaves() -> None:
    plan = planned()
    limit = int(139 * GiB * 0.9)
    assert limit - plan.cache.groups[0].bytes_per_page < total(plan) <= limit
    small = planned(SMOLLM2)
    assert small.cache.pages[0] - 2 == 512 * 8192 // 64, (
        "every slot at full context: more could not be used by running requests"
    )
    for item in plan.ledger:
        assert "taken at start" in item.how or not item.name.startswith("KV")


def test_the_ledger_is_the_sum_of_the_buffers() -> None:
    """The same shapes, added up another way: buffer by buffer as the runner and the op set allocate them."""
    card, tokens, rows, context = LLAMA_8B, 8192 + 512, 512, 131072
    plan = planned()
    e, f, v, h, g, d = card.hidden, card.intermediate, card.vocab_size, card.heads, card.kv_heads, card.head_dim
    layer = 2 * ((h + 2 * g) * d * e + h * d * e + 3 * e * f) + 4 * 2 * e
    assert line(plan, "weights") == card.layers * layer + 2 * v * e + 4 * e
    assert line(plan, "embedding table") == 2 * v * e
    halves = {
        "normed": e,
        "qkv": (h + 2 * g) * d,
        "q": h * d,
        "mixed": h * d,
        "gated": f,
        "both": 2 * f,
        "delta": e,
        "hidden": e,
    }
    scratch = 2 * sum(halves.values()) + 4 * (e + d) + 3 * 4
    assert line(plan, "activations") == (tokens + rows) * scratch, "and of the rows at the last layer's end"
    assert line(plan, "logits") == 4 * rows * v
    pages = context // 64 + 1 + 3  # in fours
    assert line(plan, "slots") == 4 * rows * (context + 4 + 2 * pages + 32)
    cut = (
        4 * 2 * 132 * 128
    )  # prompts cut over their keys: tokens x packed heads of four times the programs that run at once
    assert line(plan, "workspaces") == 4 * max(4 * rows * h, 64 * 32 * h, cut) * (d + 2) + 2 * 32 * MiB
    assert line(plan, "shared keys") == 4 * max(rows * h, 2 * 132 * 64) * (d + 2), (
        "parts of all rows, or of what runs at once"
    )


def test_a_tied_head_is_counted_once_and_fp8_twins_are_counted() -> None:
    tied = planned(SMOLLM2_BF16)
    assert "embedding table" not in [item.name for item in tied.ledger]
    assert line(tied, "weights") == pytest.approx(2 * SMOLLM2_BF16.parameters, rel=0.001)
    plain = ledger_cuda.activation_bytes_per_token(LLAMA_8B, quantization="none", kv_groups=1)
    fp8 = ledger_cuda.activation_bytes_per_token(LLAMA_8B, quantization="fp8", kv_groups=1)
    assert fp8 - plain == 4096 + 32 * 128 + 14336 + 12
    scales = line(planned(means=Means(quantization="fp8")), "weights")
    assert scales == ledger.matmul_bytes(LLAMA_8B, compute="bf16", quantization="fp8")


def test_without_graphs_there_is_no_line_for_them() -> None:
    assert "graphs" in [item.name for item in planned().ledger]
    assert "graphs" not in [item.name for item in planned(means=Means(graphs=False)).ledger]


def test_gemma_gets_two_pools() -> None:
    plan = planned(GEMMA_270M)
    assert [group.kind for group in plan.cache.groups] == ["full", "window"]
    assert total(plan) > 0.98 * int(139 * GiB * 0.9)


def test_a_mixture_reads_only_the_experts_that_a_token_is_sent_to() -> None:
    whole = ledger.matmul_bytes(MIXTURE, compute="bf16", quantization="none")
    idle = 30 * 3 * 6 * 576 * 512
    assert ledger.read_bytes(MIXTURE, compute="bf16", quantization="none") == pytest.approx(whole - 2 * idle, rel=1e-6)
    vectors = 30 * 2 * 576 + 576
    assert ledger.matmul_parameters(MIXTURE) == MIXTURE.parameters - idle - 49152 * 576 - vectors
    dense = ledger.matmul_bytes(LLAMA_8B, compute="bf16", quantization="none")
    assert ledger.read_bytes(LLAMA_8B, compute="bf16", quantization="none") == dense


# ----------------------------------------------------------------------------------------------------------- properties

BOOLS = st.booleans()
MEANS = st.builds(
    Means,
    kv_format=pin(st.sampled_from(["bf16", "fp8", "f16"])),
    compute=pin(st.sampled_from(["bf16", "f32"])),
    quantization=pin(st.sampled_from(["none", "fp8", "int8"])),
    backend=pin(st.sampled_from(["cuda", "cpu"])),
    page_tokens=pin(st.sampled_from([16, 48, 64, 20])),
    max_tokens_per_step=pin(st.integers(1, 30000)),
    max_running=pin(st.integers(1, 1500)),
    graphs=pin(BOOLS),
    overlap=pin(BOOLS),
    tape=pin(BOOLS),
    threads=pin(st.integers(1, 64)),
    deterministic=pin(BOOLS),
    load_format=pin(st.sampled_from(["auto", "dummy", "dummy-flat"])),
)
GOALS = st.builds(
    Goals,
    model=st.just("m"),
    scenario=st.sampled_from(SCENARIOS),
    ttft_ms=pin(st.floats(0.001, 1e6)),
    tpot_ms=pin(st.floats(0.001, 1e6)),
    memory_limit_bytes=st.none() | st.integers(1 << 28, 1 << 37),
    max_context=st.none() | st.integers(1, 200_000) | st.integers(1, 4096),
    means=MEANS,
)
HARDWARE = st.builds(
    gpu,
    free=st.integers(29, 37).flatmap(lambda bits: st.integers(1 << bits, min(140 * GiB, 1 << (bits + 1)))),
    features=st.sampled_from([("fp8", "sm_90"), ("sm_80",)]),
)


@settings(max_examples=300)
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
    assert 1 <= schedule.max_running <= min(schedule.max_tokens_per_step, 1024)
    assert 1 <= schedule.max_context <= card.max_positions
    for group, pages in zip(plan.cache.groups, plan.cache.pages, strict=True):
        assert pages - 1 >= sequence_pages(
            group, tokens=schedule.max_context, max_tokens_per_step=schedule.max_tokens_per_step
        )
    for name in ("kv_format", "compute", "backend", "quantization", "tape", "deterministic", "graphs"):
        assert getattr(means, name) in (None, getattr(plan.numerics, name)), name
    assert means.load_format in (None, plan.load_format)
    assert goals.max_context in (None, schedule.max_context)
    assert plan.cache.page_tokens % 16 == 0
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_the_view_shows_the_gpu_and_its_host() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_text(planned()))
    text = console.export_text()
    assert (
        "Test GPU, 132 multiprocessors, 139 GiB of 140 GiB free, reads 4.0 TB/s, 700 TFLOP/s in bf16, 1300 in fp8"
        in text
    )
    assert "host: 16 cores, 100 GiB of 128 GiB free" in text
    assert "on the GPU, taken at start" in text
