"""What is wanted: goals a user can state without knowing the means.

Knows: the words of goals and limits. Refuses to know: how they are reached (resolve) and what the model or machine is (card, hardware).
`Means` holds the choices that a user may pin; everything not pinned is chosen by `resolve`, with a reason.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Scenario = Literal["latency", "throughput", "memory", "balanced"]


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
    policy: Literal["arrival", "fair", "priority"] | None = None
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
    load_format: Literal["auto", "dummy"] | None = None
    """dummy: random weights instead of the file's, for measuring; answers are noise."""


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
    means: Means = Means()
