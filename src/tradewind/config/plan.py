"""What was decided: every choice with its reason, printed at start and stored with every benchmark.

Knows: the fields. Refuses to know: how they were chosen (resolve) and who carries them out.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tradewind.config.card import ModelCard
from tradewind.config.goals import AdapterRoom, DegradeName, Late, LoadFormat, PolicyName
from tradewind.config.hardware import Hardware
from tradewind.contract.kv import KVFormat, KVGroup


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a choice was made and what was rejected."""

    choice: str
    value: str
    why: str
    rejected: str = ""
    pinned: bool = False


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the memory ledger."""

    name: str
    bytes: int
    how: str
    """The arithmetic, readable."""


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Pages: their groups and how many each pool holds (page 0 of each pool is the null page, counted in)."""

    groups: tuple[KVGroup, ...]
    pages: tuple[int, ...]
    page_tokens: int
    prefix_cache: bool


class ClassPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of one class of traffic, seconds; None: it has none."""

    name: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    late: Late = "demote"
    output_tokens: int = 128
    """A typical answer; most requests allow far longer ones than they get."""


class StepCostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A step's time before anything was measured: the greater of reading the weights and computing the tokens, and the keys read."""

    base_s: float
    token_s: float
    context_s: float = 0.0
    """For each token that a row reads from the cache."""
    pair_s: float | None = None
    """For each pair of a prompt's token and one that it sees, beside a part of the time that reading the prompt's keys once takes; None:
    as context_s."""


class PacePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How long steps may take in which prompts go on beside running answers; the least of what is set."""

    slowdown: float | None = None
    """So many times as long as without prompts."""
    step_s: float | None = None
    whole: bool = False
    """Deep in a long prompt: as long as a step of the whole token budget where a prompt begins."""


class DegradePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What may be given up under overload; the ladder itself is `engine.degrade`."""

    far: DegradeName
    """lossless: no answer changes, some wait; full: the lowest class is refused and answers are shortened, too."""
    ttft_s: float | None = None
    """The target of a request of no class; None: it has none."""
    tpot_s: float | None = None


class ImagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of what the image tower does, in tokens of images."""

    largest: int
    """Of one image; larger ones are made smaller."""
    tokens_per_step: int
    """Encoded in one step, unless one image alone is larger."""
    cache_tokens: int
    """Whose features are kept."""


class SchedulePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step and the queue's order."""

    max_running: int
    """Slots: sequences that can be in the running state at once."""
    max_tokens_per_step: int
    """Token budget of a step, prefill chunks and decode rows together."""
    max_context: int
    policy: PolicyName
    steps_in_flight: int
    """1: decide after collect; 2: decide step N + 1 while step N runs."""
    age_limit_s: float
    """A waiting request older than this is no longer passed by smaller ones."""
    max_preemptions: int
    """A sequence evicted this often is never evicted again."""
    whole_prompts: bool = False
    """A prompt is computed in one step, never in chunks: an encoder's tokens see those behind them too."""
    classes: tuple[ClassPlan, ...] = ()
    tenant_weights: dict[str, float] = {}
    """Under `fair`, and under `slo` among those that have no target or cannot meet it; who is not named has 1."""
    patience_s: float = 10.0
    """Under `slo`, a request behind those with targets that waited longer than this gets each fourth start."""
    step_cost: StepCostPlan | None = None
    """What `slo` and `pace` pace steps with where nobody hands them better times; it is corrected by what steps take."""
    pace: PacePlan | None = None
    """None: prompts get what the token budget leaves, however long that takes."""
    fit_steps: bool = False
    """Better times are fitted to the steps that run."""
    degrade: DegradePlan | None = None
    """None: nothing is given up under overload."""
    images: ImagePlan | None = None
    """None: the model reads no images."""


class NumericsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Formats and backends."""

    backend: Literal["cpu", "plain", "cuda"]
    compute: Literal["f32", "bf16", "int16", "int8"]
    quantization: Literal["none", "int8", "int4", "fp8"]
    kv_format: KVFormat
    tape: bool
    """Steps are recorded as op calls and replayed in one call (cpu)."""
    threads: int
    deterministic: bool
    graphs: bool = False
    """Steps are captured as CUDA graphs and replayed (cuda)."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the assembler needs to build an engine."""

    model: str
    scenario: str
    card: ModelCard
    hardware: Hardware
    cache: CachePlan
    schedule: SchedulePlan
    numerics: NumericsPlan
    load_format: LoadFormat = "auto"
    """All but auto: weights are drawn at random, and the file's tensors are not read (choices.reads_weights)."""
    adapters: AdapterRoom | None = None
    """None: no adapter can be asked for."""
    ledger: tuple[LedgerLine, ...]
    reasons: tuple[Reason, ...]
