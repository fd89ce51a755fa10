"""What is wanted: goals a user can state without knowing the means.

Knows: the words of goals and limits. Refuses to know: how they are reached (resolve) and what the model or machine is (card, hardware).
`Means` holds the choices that a user may pin; everything not pinned is chosen by `resolve`, with a reason.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Scenario = Literal["latency", "throughput", "memory", "balanced"]
PolicyName = Literal["arrival", "fair", "length", "priority", "slo"]
DegradeName = Literal["full", "lossless", "off"]
"""What is given up under overload: nothing; what changes no answer (guesses, room for prompts, starts of other classes); also the lowest
class, which is refused, and the length of the others' answers."""
LoadFormat = Literal["auto", "dummy", "dummy-flat", "dummy-one-route"]
"""Where weights come from: the file's own, or drawn at random for measuring: as large as trained ones; all uniform within 0.001, as other
engines' dummy loaders have them; as dummy, with routers of zero, so that every token visits the same experts."""
Late = Literal["demote", "refuse", "serve"]
"""What becomes of a request that can no longer meet its TTFT target: it goes behind those that can, is refused when it comes, or stays."""


class Means(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choices pinned by the user. None means: the engine chooses and says why."""

    kv_format: Literal["f32", "f16", "bf16", "fp8"] | None = None
    compute: Literal["f32", "bf16", "int16", "int8"] | None = None
    """How matmuls are computed: f32 (weights dequantised, nothing quantised), bf16, int16 and int8 (weights stay packed; activations
    are two int8 terms, or one, per 32 values)."""
    quantization: Literal["none", "int8", "int4", "fp8"] | None = None
    """Quantise unquantised weights at load: int8 and int4 in groups on the CPU, fp8 (e4m3, one scale per output channel) on a GPU."""
    backend: Literal["cpu", "plain", "cuda"] | None = None
    """cpu: the C++ library; plain: torch reference ops (slow, any machine); cuda: Triton."""
    page_tokens: int | None = None
    max_tokens_per_step: int | None = None
    max_running: int | None = None
    policy: PolicyName | None = None
    degrade: DegradeName | None = None
    """How far the ladder goes that keeps the targets of the highest class under overload."""
    fit_steps: bool | None = None
    """Fit step times to the steps that run, and pace by them where the policy paces."""
    prefix_cache: bool | None = None
    overlap: bool | None = None
    """Decide step N + 1 while step N runs."""
    tape: bool | None = None
    """Record a step's op calls once and replay them in one call (the CPU's counterpart of a CUDA graph)."""
    graphs: bool | None = None
    """Capture a step of each size as a CUDA graph and replay it; off launches every kernel by itself (for debugging, the same tokens)."""
    threads: int | None = None
    deterministic: bool | None = None
    """One fixed order of every sum, so that an answer does not depend on its neighbours; on a GPU this costs speed, so it is asked for."""
    load_format: LoadFormat | None = None
    """All but auto: random weights instead of the file's, for measuring; answers are noise."""


class Match(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which requests belong to a class: those that have all that is stated here."""

    tenant: str | None = None
    """As the server names it: of an API key its hash (goals_file.tenant_of_key), so that no key stands in a plan."""
    header: tuple[str, str] | None = None
    """(name in lower case, value) of an HTTP header."""
    priority: int | None = None
    model: str | None = None


class TrafficClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests that are alike in what is wanted of them."""

    name: str
    match: Match = Match()
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    late: Late = "demote"
    share: float | None = None
    """Part of all requests that is expected to be of this class."""
    prompt_tokens: int = 256
    """Typical; where no trace says better."""
    output_tokens: int = 128


class AdapterRoom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Room for low-rank adapters (LoRA) beside the model: how many may run at once, and the largest rank of one."""

    slots: int = 8
    rank: int = 16

    def __str__(self) -> str:
        return f"{self.slots} of rank {self.rank}"


class Goals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is wanted of one engine."""

    model: str
    scenario: Scenario = "balanced"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    memory_limit_bytes: int | None = None
    """Ceiling for weights, KV pages, workspace and the process itself; None: most of the memory that is free."""
    max_context: int | None = None
    """Tokens of prompt and answer together; None: what model and memory allow."""
    quality_loss_percent: float | None = None
    """By how much the perplexity may rise against the model's own weights; 0 is lossless, as far as a greedy answer could show; None: what
    the scenario takes."""
    classes: tuple[TrafficClass, ...] = ()
    """A request belongs to the first that it matches."""
    tenants: dict[str, float] = {}
    """Weight of each tenant; who is not named has 1."""
    requests_per_s: float | None = None
    """Expected rate of all classes together."""
    adapters: AdapterRoom | None = None
    """None: the model alone is served."""
    slowdown: float | None = None
    """How many times as long as without prompts a step of running answers may take while prompts are computed beside them; None: the
    scenario's."""
    means: Means = Means()
