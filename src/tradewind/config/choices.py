"""The choices, one small pure function each: what was pinned is checked, what was not is chosen, and both get a reason.

Knows: what each means costs and brings. Refuses to know: how choices are fitted into memory (resolve) and carried out (everybody else).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from tradewind.config import choices_cuda, ledger
from tradewind.config.card import ModelCard
from tradewind.config.goals import Goals, LoadFormat, Means, PolicyName
from tradewind.config.habits import HABITS, Habits
from tradewind.config.hardware import Hardware
from tradewind.config.plan import Reason
from tradewind.config.sizes import MiB, show_bytes
from tradewind.contract.errors import LimitError, UserError
from tradewind.contract.kv import KVFormat

Backend = Literal["cpu", "plain", "cuda"]
Compute = Literal["f32", "bf16", "int16", "int8"]
PACKED: tuple[Compute, ...] = ("int8", "int16")
"""Ways to compute that multiply packed quants."""
Quantization = Literal["none", "int8", "int4", "fp8"]
Value = TypeVar("Value")
Choice = tuple[Value, Reason]


CPU_PAGE_TOKENS = 16
LIMITS: dict[str, tuple[int, int]] = {
    "max_running": (1, 4096),
    "max_tokens_per_step": (1, 1 << 16),
    "page_tokens": (1, 1024),
    "threads": (1, 1024),
}


# ------------------------------------------------------------------------------------------------------- range of goals


MOST_ADAPTERS, MOST_RANK = 1024, 512
"""Adapters at once and the rank of one that can be asked for."""


def check_goals(goals: Goals) -> None:
    """Raises UserError naming the first goal that is out of range."""
    if goals.scenario not in HABITS:
        raise UserError(f"scenario is {goals.scenario!r}; it must be one of {', '.join(sorted(HABITS))}")
    for name in ("ttft_ms", "tpot_ms"):
        value = getattr(goals, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9):
            raise UserError(f"{name} is {value!r}; it must be a number of milliseconds over 0")
    for name in ("memory_limit_bytes", "max_context"):
        value = getattr(goals, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{name} is {value!r}; it must be a whole number over 0")
    for name, (low, high) in LIMITS.items():
        value = getattr(goals.means, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise UserError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
    if goals.adapters is not None:
        for name, value, most in (
            ("slots", goals.adapters.slots, MOST_ADAPTERS),
            ("rank", goals.adapters.rank, MOST_RANK),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UserError(f"adapter {name} is {value!r}; it must be a whole number from 1 to {most}")
    check_classes(goals)
    for name, known in WORDS.items():
        value = getattr(goals.means, name)
        if value is not None and value not in known:
            raise UserError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def check_classes(goals: Goals) -> None:
    """Raises UserError naming the first class, tenant or budget that is out of range."""
    names = [one.name for one in goals.classes]
    for name in names:
        if not name or names.count(name) > 1:
            raise UserError(f"the class name {name!r} is empty or taken twice; names tell classes apart")
    for one in goals.classes:
        for field in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(one, field)
            if value is not None and not 0 < value < 1e9:
                raise UserError(f"{field} of class {one.name} is {value!r}; it must be a number of milliseconds over 0")
        if one.share is not None and not 0 < one.share <= 1:
            raise UserError(f"the share of class {one.name} is {one.share!r}; it must be over 0 and at most 1")
        if one.prompt_tokens < 1 or one.output_tokens < 1:
            raise UserError(
                f"class {one.name} has prompts of {one.prompt_tokens} and answers of {one.output_tokens} tokens; at least 1"
            )
    shares = sum(one.share or 0 for one in goals.classes)
    if shares > 1 + 1e-6:
        raise UserError(f"the shares of all classes are {shares:g} together; at most 1")
    for tenant, weight in goals.tenants.items():
        if not 0 < weight < 1e6:
            raise UserError(f"the weight of tenant {tenant!r} is {weight!r}; it must be over 0")
    if goals.requests_per_s is not None and not 0 < goals.requests_per_s < 1e7:
        raise UserError(f"requests_per_s is {goals.requests_per_s!r}; it must be a number over 0")
    loss = goals.quality_loss_percent
    if loss is not None:
        if not 0 <= loss <= 100:
            raise UserError(f"quality_loss_percent is {loss!r}; it must be from 0 (lossless) to 100")
        price = QUALITY_LOSS_PERCENT.get(goals.means.compute or "", 0.0)
        if price > loss:
            raise UserError(
                f"compute {goals.means.compute} is pinned and costs about {price:g} % of perplexity, but the quality budget is "
                f"{loss:g} %: raise the budget to {price:g} % or leave compute out"
            )
        if goals.means.degrade == "full" and not loss:
            raise UserError(
                "degrade full refuses requests and shortens answers under overload, but quality_loss_percent is 0 (lossless): "
                "state a quality budget over 0 or use degrade lossless"
            )


QUALITY_LOSS_PERCENT: dict[str, float] = {"int8": 0.5}
"""What ways to compute cost in perplexity, in percent, rounded up: a KL to float32 of 4e-3 a token (docs/notebook.md). Others cost nothing
that could be seen."""


HEADROOM = 1.5
"""Pages are sized for requests so many times as long as a typical one: lengths scatter. Without it 600 requests of 320 tokens, log-normal
with sigma 0.5, on 128 slots were preempted 84 times, at 4 % of the throughput (simulated); with 1.4 none was."""


def expected_tokens(goals: Goals) -> int | None:
    """Tokens that pages are sized for: a typical request's, the mean of the classes by share, with HEADROOM; None without classes."""
    if not goals.classes:
        return None
    left = max(0.0, 1.0 - sum(one.share or 0.0 for one in goals.classes))
    unstated = sum(one.share is None for one in goals.classes)
    shares = [left / unstated if one.share is None else one.share for one in goals.classes]
    lengths = [one.prompt_tokens + one.output_tokens for one in goals.classes]
    mean = sum(share * length for share, length in zip(shares, lengths, strict=True)) / (sum(shares) or 1.0)
    return max(1, round(HEADROOM * mean))


def numerics_scenario(goals: Goals) -> str:
    """The scenario that formats are chosen by: where a quality budget is stated it decides, not what else is wanted."""
    if goals.quality_loss_percent is None:
        return goals.scenario
    return "throughput" if goals.quality_loss_percent >= QUALITY_LOSS_PERCENT["int8"] else "balanced"


def quality_reasons(goals: Goals, *, compute: Compute) -> tuple[Reason, ...]:
    """What the quality budget is and what of it is spent; nothing where none is stated."""
    loss = goals.quality_loss_percent
    if loss is None:
        return ()
    value = "lossless" if loss == 0 else f"{loss:g} % of perplexity"
    spent = QUALITY_LOSS_PERCENT.get(compute, 0.0)
    why = f"{compute} costs about {spent:g} %" if spent else f"{compute} changes no greedy answer that could be told"
    rejected = "" if spent else f"int8: about {QUALITY_LOSS_PERCENT['int8']:g} %"
    return (Reason(choice="quality", value=value, why=why, rejected=rejected, pinned=True),)


WORDS: dict[str, tuple[str, ...]] = {
    "backend": ("cpu", "cuda", "plain"),
    "compute": ("bf16", "f32", "int16", "int8"),
    "degrade": ("full", "lossless", "off"),
    "kv_format": ("bf16", "f16", "f32", "fp8"),
    "load_format": get_args(LoadFormat),
    "policy": ("arrival", "fair", "length", "priority", "slo"),
    "quantization": ("fp8", "int4", "int8", "none"),
}


# ------------------------------------------------------------------------------------------------------------- numerics


def device_wanted(means: Means, *, card: ModelCard) -> Literal["cpu", "cuda"] | None:
    """Which device the machine should be asked for (hardware_probe.measure); None: a GPU where there is one.

    What the GPU's kernels cannot compute goes to the CPU unless somebody insists.
    """
    if means.backend is not None:
        return "cuda" if means.backend == "cuda" else "cpu"
    return None if choices_cuda.why_unable(card) is None else "cpu"


def choose_backend(means: Means, *, card: ModelCard, hardware: Hardware, missing: Mapping[str, str]) -> Choice[Backend]:
    """The op set that computes."""
    pinned = means.backend is not None
    if means.backend == "cuda" or (hardware.kind == "cuda" and not pinned):
        return "cuda", choices_cuda.backend_reason(means, card=card, hardware=hardware, missing=missing)
    if hardware.kind == "cuda":
        raise UserError(f"backend {means.backend} computes on the CPU, but this plan is asked for {hardware.name}")
    if means.backend is not None and means.backend in missing:
        raise UserError(f"backend {means.backend} cannot be used: {missing[means.backend]}")
    if means.backend == "plain" or (not pinned and "cpu" in missing):
        if "plain" in missing:
            raise UserError(f"no backend can be used: cpu: {missing['cpu']}; plain: {missing['plain']}")
        why = "torch reference ops run anywhere, slowly" if pinned else "the only one that works here; slow"
        rejected = "" if pinned else f"cpu: {missing['cpu']}{no_gpu(missing)}"
        return "plain", Reason(choice="backend", value="plain", why=why, rejected=rejected, pinned=pinned)
    sets = ", ".join(hardware.features) or "no vector instruction sets that matter"
    why = f"the C++ library on {hardware.name} ({sets})"
    rejected = f"plain: many times slower{no_gpu(missing)}"
    return "cpu", Reason(choice="backend", value="cpu", why=why, rejected=rejected, pinned=pinned)


def no_gpu(missing: Mapping[str, str]) -> str:
    """The end of a sentence that says why no GPU computes; empty where nobody looked for one."""
    return f"; cuda: {missing['cuda']}" if "cuda" in missing else ""


def choose_quantization(
    means: Means, *, card: ModelCard, hardware: Hardware, scenario: str, backend: Backend
) -> Choice[Quantization]:
    """Whether unquantised weights are quantised at load."""
    if backend == "cuda":
        return choices_cuda.choose_quantization(means, card=card, hardware=hardware, scenario=scenario)
    if means.quantization == "fp8":
        raise UserError(
            f"quantization fp8 needs a GPU's fp8 tensor cores, and the {backend} backend has none; use int8"
        )
    part = ledger.block_quantised(card)
    formats = ", ".join(card.weight_formats) or "unknown"
    wanted = means.quantization
    if part > 0.5:
        if wanted not in (None, "none"):
            raise UserError(
                f"quantization {wanted} is for unquantised weights; the file of '{card.name}' is quantised already ({formats})"
            )
        why = f"the file's own blocks are kept ({formats})"
        return "none", Reason(choice="quantization", value="none", why=why, pinned=wanted is not None)
    sizes = {name: ledger.matmul_bytes(card, compute="int8", quantization=name) for name in ("int8", "int4")}
    sizes["none"] = ledger.matmul_bytes(card, compute="bf16", quantization="none")
    shown = {name: f"{name} {show_bytes(size)}" for name, size in sizes.items()}
    if wanted is not None:
        if wanted == "none" and means.compute in PACKED:
            raise UserError(
                f"compute {means.compute} needs quantised weights; the file of '{card.name}' has {formats}: use quantization int8"
            )
        why = f"weights take {shown[wanted]}"
        if wanted != "none" and means.compute in ("f32", "bf16"):
            why = f"weights are rounded to {wanted} and kept as {means.compute}: shows what {wanted} costs in quality, saves no memory"
        return wanted, Reason(choice="quantization", value=wanted, why=why, pinned=True)
    if means.compute in PACKED:
        why = f"compute {means.compute} is pinned and needs quantised weights; 8 bits lose least"
        return "int8", Reason(choice="quantization", value="int8", why=why, rejected=f"{shown['int4']}: loses more")
    if scenario == "memory" and means.compute is None and backend == "cpu":
        why = f"smallest memory is the goal: weights take {shown['int4']}; answers may lose some quality"
        return "int4", Reason(
            choice="quantization", value="int4", why=why, rejected=f"{shown['int8']}, {shown['none']}: larger"
        )
    why = "weights stay as published: quality is not traded unless asked for"
    rejected = (
        f"{shown['int8']}, {shown['int4']}: smaller than bf16 {show_bytes(sizes['none'])}, but change the answers"
    )
    return "none", Reason(choice="quantization", value="none", why=why, rejected=rejected)


def choose_compute(
    means: Means, *, card: ModelCard, hardware: Hardware, backend: Backend, quantization: Quantization, scenario: str
) -> Choice[Compute]:
    """How matmuls are computed."""
    if backend == "cuda":
        return choices_cuda.choose_compute(means, card=card, quantization=quantization)
    if means.compute is not None:
        why = {
            "f32": "nothing is quantised or rounded; weights take 4 bytes each",
            "bf16": "weights and activations are rounded to 8 significant bits",
            "int16": "activations are two int8 terms per 32 values: weights stay packed and answers stay those of the file's weights",
            "int8": "activations are rounded to int8 per 32 values",
        }[means.compute]
        return means.compute, Reason(choice="compute", value=means.compute, why=why, pinned=True)
    if backend == "plain":
        why = "the reference ops are exact and slow whatever the format"
        return "f32", Reason(
            choice="compute", value="f32", why=why, rejected="bf16, int16, int8: no faster in torch's plain ops"
        )
    reads = {
        name: show_bytes(ledger.matmul_bytes(card, compute=name, quantization=quantization))
        for name in ("int8", "bf16", "f32")
    }
    if quantization != "none" or ledger.block_quantised(card) > 0.5:
        with_what = "AVX512-VNNI" if "avx512_vnni" in hardware.features else "integer dot products"
        unpacked = f"bf16 {reads['bf16']}, f32 {reads['f32']}: unpacked and so slower"
        why = f"quantised weights stay packed and meet int8 activations in {with_what}: {reads['int8']} are read for a token"
        if scenario in ("throughput", "memory"):
            rejected = f"int16: nearly exact, half the speed of long prompts; {unpacked}"
            return "int8", Reason(choice="compute", value="int8", why=why, rejected=rejected)
        why += "; two int8 terms for each value keep 15 bits, so the answers are those of the file's weights"
        rejected = f"int8: up to twice as fast for long prompts, but changes about one greedy token in 25; {unpacked}"
        return "int16", Reason(choice="compute", value="int16", why=why, rejected=rejected)
    if "avx512_bf16" in hardware.features:
        why = f"the CPU multiplies bf16 directly: {reads['bf16']} are read for a token"
        rejected = f"f32: reads {reads['f32']}; int8: needs quantised weights"
        return "bf16", Reason(choice="compute", value="bf16", why=why, rejected=rejected)
    why = f"this CPU has no bf16 instructions, and emulating them costs more than it saves; {reads['f32']} are read for a token"
    rejected = f"bf16: reads {reads['bf16']}, but no avx512_bf16; int8: needs quantised weights"
    return "f32", Reason(choice="compute", value="f32", why=why, rejected=rejected)


def choose_kv_format(
    means: Means, *, card: ModelCard, hardware: Hardware, backend: Backend, compute: Compute
) -> Choice[KVFormat]:
    """Format of keys and values in pages."""
    if backend == "cuda":
        return choices_cuda.choose_kv_format(means, card=card, hardware=hardware)
    if means.kv_format == "fp8":
        raise UserError(f"kv_format fp8 is not supported by the {backend} backend; use f16, bf16 or f32")
    kept = card.latent.width if card.latent is not None else 2 * card.kv_heads * card.head_dim
    price = {bits: show_bytes(card.layers * kept * bits // 8) for bits in (16, 32)}
    if means.kv_format is not None:
        why = f"as asked; {price[32 if means.kv_format == 'f32' else 16]} a token"
        return means.kv_format, Reason(choice="kv_format", value=means.kv_format, why=why, pinned=True)
    if compute == "f32" and (means.compute == "f32" or backend == "plain"):
        why = f"f32 compute asks for exact results, so the cache keeps what was computed: {price[32]} a token"
        return "f32", Reason(choice="kv_format", value="f32", why=why, rejected=f"f16: {price[16]}, rounds to 11 bits")
    why = f"{price[16]} a token with 11 significant bits"
    rejected = f"f32: {price[32]}; bf16: same size, 8 bits; fp8: not on a CPU"
    return "f16", Reason(choice="kv_format", value="f16", why=why, rejected=rejected)


def choose_page_tokens(means: Means, *, backend: Backend) -> Choice[int]:
    """Tokens per page."""
    if backend == "cuda":
        return choices_cuda.choose_page_tokens(means)
    if means.page_tokens is None:
        why = "16 keys fill a vector; a sequence wastes half a page, 8 tokens, on average"
        rejected = "larger: coarser sharing of prefixes; smaller: longer tables"
        return CPU_PAGE_TOKENS, Reason(choice="page_tokens", value=str(CPU_PAGE_TOKENS), why=why, rejected=rejected)
    size = means.page_tokens
    if backend == "cpu" and size % CPU_PAGE_TOKENS:
        nearest = max(CPU_PAGE_TOKENS, round(size / CPU_PAGE_TOKENS) * CPU_PAGE_TOKENS)
        raise UserError(
            f"page_tokens is {size}; the cpu backend needs a multiple of {CPU_PAGE_TOKENS}, for example {nearest}"
        )
    return size, Reason(choice="page_tokens", value=str(size), why="as asked", pinned=True)


def choose_tape(means: Means, *, backend: Backend) -> Choice[bool]:
    """Whether a step's op calls are recorded and replayed."""
    if backend != "cpu":
        if means.tape:
            raise UserError(f"tape replays calls of the C++ library; the {backend} backend has none: leave tape off")
        why = (
            "the cuda backend replays its steps as CUDA graphs (graphs)"
            if backend == "cuda"
            else f"the {backend} backend calls torch, which cannot be replayed from C++"
        )
        return False, Reason(choice="tape", value="off", why=why, pinned=means.tape is not None)
    if means.tape is False:
        return False, Reason(
            choice="tape", value="off", why="every op is called from Python: slower, easier to debug", pinned=True
        )
    why = "a decode step's calls are replayed in one: the interpreter's cost per op is gone"
    return True, Reason(
        choice="tape", value="on", why=why, rejected="off: some hundred Python calls a step", pinned=bool(means.tape)
    )


def choose_graphs(means: Means, *, backend: Backend) -> Choice[bool]:
    """Whether steps are replayed as CUDA graphs."""
    if backend == "cuda":
        return choices_cuda.choose_graphs(means)
    if means.graphs:
        raise UserError(f"graphs are CUDA graphs; the {backend} backend has none: leave graphs off")
    why = f"CUDA graphs need a GPU; {'the tape does this here' if backend == 'cpu' else 'plain ops are called one by one'}"
    return False, Reason(choice="graphs", value="off", why=why, pinned=means.graphs is not None)


LOAD_FORMATS: dict[LoadFormat, str] = {
    "auto": "weights are those of the file",
    "dummy": "as asked: weights are drawn at random, for measuring; answers are noise",
    "dummy-flat": "as asked: weights are drawn at random, all uniform within 0.001 as in other engines' dummy loaders; answers are noise",
    "dummy-one-route": "as asked: weights are drawn at random, routers are zero, so every token visits the same experts; answers are noise",
}
"""What each means, as the plan says it."""


def reads_weights(load_format: LoadFormat | None) -> bool:
    """Whether the file's tensors are read; where they are not, a description of the model is enough."""
    return load_format in (None, "auto")


def choose_load_format(means: Means, *, card: ModelCard) -> Choice[LoadFormat]:
    """Whether weights come from the file or are drawn at random. Raises UserError when a model without experts is to have one route."""
    chosen = means.load_format or "auto"
    if chosen == "dummy-one-route" and card.moe is None:
        raise UserError(
            f"load_format dummy-one-route sends every token to the same experts, but '{card.name}' has no experts; use dummy or dummy-flat"
        )
    pinned = means.load_format is not None
    return chosen, Reason(choice="load_format", value=chosen, why=LOAD_FORMATS[chosen], pinned=pinned)


def choose_threads(means: Means, *, hardware: Hardware, backend: Backend) -> Choice[int]:
    """Threads that compute."""
    if backend == "cuda":
        return choices_cuda.choose_threads(means, hardware=hardware)
    if means.threads is not None:
        why = (
            "as asked"
            if means.threads <= hardware.cores
            else f"as asked, though only {hardware.cores} cores may be used: they will take turns"
        )
        return means.threads, Reason(choice="threads", value=str(means.threads), why=why, pinned=True)
    why = "one for each core that this process may use"
    return hardware.cores, Reason(
        choice="threads", value=str(hardware.cores), why=why, rejected="more: they would take turns"
    )


def choose_deterministic(means: Means, *, backend: Backend) -> Choice[bool]:
    """Whether results must not depend on neighbours."""
    if backend == "cuda":
        return choices_cuda.choose_deterministic(means)
    if means.deterministic is False:
        return False, Reason(
            choice="deterministic",
            value="off",
            why="as asked; the ops of this backend are deterministic all the same",
            pinned=True,
        )
    why = "sums are added in a fixed order whatever else is in the step, and that costs nothing here"
    return True, Reason(choice="deterministic", value="on", why=why, pinned=bool(means.deterministic))


# ------------------------------------------------------------------------------------------------------------- schedule


def choose_overlap(means: Means, *, hardware: Hardware, backend: Backend, threads: int) -> Choice[int]:
    """Steps in flight: 2 decides the next step while one runs."""
    pinned = means.overlap is not None
    if backend == "cuda" and means.overlap is not False:
        why = "the GPU computes step N while the host decides step N + 1"
        rejected = "off: the GPU waits for the scheduler after every step"
        return 2, Reason(choice="overlap", value="on", why=why, rejected=rejected, pinned=pinned)
    spare = hardware.cores > threads
    if means.overlap if means.overlap is not None else spare:
        why = "step N + 1 is decided while step N runs"
        if not pinned:
            why += f", on one of the {hardware.cores - threads} cores that do not compute"
        return 2, Reason(
            choice="overlap", value="on", why=why, rejected="off: compute waits for the scheduler", pinned=pinned
        )
    why = (
        "as asked: each step is decided after the one before is known"
        if pinned
        else f"all {hardware.cores} cores compute: deciding at the same time would take one of them away, for nothing gained"
    )
    return 1, Reason(
        choice="overlap", value="off", why=why, rejected="" if pinned else "on: no core is left for it", pinned=pinned
    )


POLICY_WORDS: dict[PolicyName, str] = {
    "arrival": "first come, first served",
    "fair": "the tenant that was served least comes next, however many requests another one sends",
    "length": "short prompts pass long ones, which wait at most the age limit longer",
    "priority": "waiting raises a request's priority",
    "slo": "who must start soonest to meet its target comes first, and prompts get what running answers can spare of each step",
}
"""What each policy does."""


def choose_policy(
    means: Means,
    *,
    targets: bool = False,
    weights: bool = False,
    priorities: bool = False,
) -> Choice[PolicyName]:
    """Order of the queue, by what is stated: targets of classes before weights of tenants before priorities."""
    if means.policy is not None and means.policy != "arrival":
        return means.policy, Reason(
            choice="policy", value=means.policy, why=f"as asked; {POLICY_WORDS[means.policy]}", pinned=True
        )
    stated: tuple[tuple[PolicyName, bool, str], ...] = (
        ("slo", targets, "no class has a target"),
        ("fair", weights, "it has to be asked for"),
        ("priority", priorities, "no priorities stated"),
    )
    if means.policy is None:
        for name, is_stated, _ in stated:
            if is_stated:
                lost = {
                    "fair": "fair: weights then share what those with targets leave",
                    "priority": "priority: says who matters more, not when it is late",
                }
                others = [lost[other] for other, also, _ in stated if also and other != name and other in lost]
                rejected = "; ".join([*others, "arrival: who came first need not be who must start first"])
                what = {
                    "slo": "classes have targets",
                    "fair": "tenants have weights",
                    "priority": "classes have priorities",
                }
                why = f"{what[name]}: {POLICY_WORDS[name]}"
                return name, Reason(choice="policy", value=name, why=why, rejected=rejected)
    why = "first come, first served; fair as long as nobody states priorities"
    rejected = "; ".join(f"{name}: {why_not}" for name, is_stated, why_not in reversed(stated) if not is_stated)
    return "arrival", Reason(
        choice="policy", value="arrival", why=why, rejected=rejected, pinned=means.policy is not None
    )


def choose_prefix_cache(means: Means, *, card: ModelCard) -> Choice[bool]:
    """Whether finished prefixes stay findable."""
    if not card.causal:
        if means.prefix_cache:
            raise UserError(
                f"prefix_cache cannot be on for '{card.name}': an encoder's keys and values depend on the tokens behind them too"
            )
        why = "an encoder's keys and values depend on the whole text, so no other text can use them"
        return False, Reason(choice="prefix_cache", value="off", why=why, pinned=means.prefix_cache is False)
    if means.prefix_cache is False:
        return False, Reason(
            choice="prefix_cache", value="off", why="as asked: every prompt is computed anew", pinned=True
        )
    why = "pages of earlier prompts are found again; they give way when pages run out, so keeping them costs nothing"
    return True, Reason(choice="prefix_cache", value="on", why=why, pinned=bool(means.prefix_cache))


def step_seconds(card: ModelCard, hardware: Hardware, *, tokens: int) -> float:
    """Rough time of a step by the matmul speed (float32 on a CPU, bf16 on a GPU): two operations for each weight and token."""
    return 2.0 * ledger.matmul_parameters(card) * tokens / hardware.matmul_flops_per_s


def matmul_speed_words(hardware: Hardware) -> str:
    """Which speed an estimate is made with."""
    return f"the GPU's {hardware.matmul_words} speed" if hardware.kind == "cuda" else "the measured float32 speed"


def choose_step(
    means: Means,
    *,
    habits: Habits,
    card: ModelCard,
    hardware: Hardware,
    tpot_ms: float | None,
    paced: bool = False,
) -> Choice[int]:
    """Token budget of a step; `paced`: how much of it prompts get is decided step by step, so that a TPOT target holds."""
    tokens, why, rejected = (
        habits.max_tokens_per_step,
        habits.why_step,
        "more: decoding answers stall longer; fewer: weights are read more often",
    )
    if means.max_tokens_per_step is not None:
        tokens, why, rejected = means.max_tokens_per_step, "as asked", ""
    elif paced:
        why += "; of which prompts get in each step what the running answers' TPOT leaves"
        rejected = "a fixed smaller budget: costs throughput also where no answer waits"
    elif tpot_ms is not None:
        fitting = int(tpot_ms / 1000 / step_seconds(card, hardware, tokens=1)) // 16 * 16
        # A GPU reads all weights in the time that it computes some 200 tokens: fewer make no step shorter.
        least = 256 if hardware.kind == "cuda" else 16
        if fitting < tokens:
            tokens, rejected = (
                max(least, fitting),
                f"{tokens}: a full step would take longer than the wanted {tpot_ms:g} ms between tokens",
            )
            why = (
                "a prompt's chunk should not hold up a running answer"
                if fitting >= least
                else "the fewest that make a worthwhile matmul"
            )
    if means.max_tokens_per_step is None and means.max_running is not None and means.max_running > tokens:
        tokens, why, rejected = (
            means.max_running,
            f"each of the {means.max_running} running sequences takes a token of every step",
            "",
        )
    took = 1000 * step_seconds(card, hardware, tokens=tokens)
    why += f"; about {took:.1f} ms when full, by {matmul_speed_words(hardware)}"
    return tokens, Reason(
        choice="max_tokens_per_step",
        value=str(tokens),
        why=why,
        rejected=rejected,
        pinned=means.max_tokens_per_step is not None,
    )


def choose_running(means: Means, *, habits: Habits, step: int, backend: Backend) -> Choice[int]:
    """Slots."""
    if means.max_running is not None:
        if backend == "cuda" and means.max_running > choices_cuda.MOST_ROWS:
            raise UserError(
                f"max_running is {means.max_running}; the cuda backend lays out at most {choices_cuda.MOST_ROWS} rows in a step"
            )
        if means.max_tokens_per_step is not None and means.max_running > step:
            raise UserError(
                f"max_running is {means.max_running}, over max_tokens_per_step {step}: each running sequence takes a token of every step; "
                f"use at most {step} or raise max_tokens_per_step to {means.max_running}"
            )
        return means.max_running, Reason(
            choice="max_running", value=str(means.max_running), why="as asked", pinned=True
        )
    rows = min(habits.max_running, step)
    why = (
        habits.why_running
        if rows == habits.max_running
        else f"each running sequence takes a token of every step of {step}"
    )
    return rows, Reason(choice="max_running", value=str(rows), why=why)


# --------------------------------------------------------------------------------------------------------------- limits


def choose_limit(goals: Goals, *, hardware: Hardware) -> Choice[int]:
    """Bytes that everything on the device together may take."""
    free, total = hardware.memory_free_bytes, hardware.memory_bytes
    gpu = hardware.kind == "cuda"
    if goals.memory_limit_bytes is not None:
        limit = goals.memory_limit_bytes
        # What others hold of a GPU's memory cannot be moved out of the way.
        most = free if gpu else total
        if limit > most:
            where = hardware.name if gpu else "this machine"
            raise LimitError(
                f"the memory limit is {show_bytes(limit)}, but {where} has {show_bytes(total)} ({show_bytes(free)} free): use at most "
                f"--memory-limit {most // MiB}MiB"
            )
        note = f"; only {show_bytes(free)} are free now, so the system may have to make room" if limit > free else ""
        return limit, Reason(choice="memory_limit", value=show_bytes(limit), why=f"as asked{note}", pinned=True)
    limit = int(free * 0.9)
    why = f"nine tenths of the {show_bytes(free)} that are free now" + (f" on {hardware.name}" if gpu else "")
    return limit, Reason(
        choice="memory_limit", value=show_bytes(limit), why=why, rejected="all of it: other programs need some"
    )


def choose_wanted_context(goals: Goals, *, card: ModelCard) -> int:
    """The context to aim at: the user's, or the model's limit. Raises LimitError when the user's is over the model's.

    An encoder computes a text in one step, so a pinned step bounds it too.
    """
    step = goals.means.max_tokens_per_step
    if not card.causal and step is not None:
        if goals.max_context is not None and goals.max_context > step:
            raise LimitError(
                f"max_context is {goals.max_context} tokens and max_tokens_per_step {step}, but '{card.name}' is an encoder, "
                f"which computes a text in one step: raise max_tokens_per_step to {goals.max_context} or lower max_context to {step}"
            )
        return goals.max_context or min(card.max_positions, step)
    if goals.max_context is None:
        return card.max_positions
    if goals.max_context > card.max_positions:
        raise LimitError(
            f"max_context is {goals.max_context} tokens, but '{card.name}' was made for {card.max_positions}, "
            f"{goals.max_context - card.max_positions} fewer: use --max-context {card.max_positions} or a model with a longer context"
        )
    return goals.max_context
