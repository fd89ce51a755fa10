"""From classes of traffic to what the engine must know of them, and from a request to its class.

Knows: what matches what, and a step's time by the machine's speeds. Refuses to know: files (goals_file), HTTP, queues. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tradewind.config import choices, ledger
from tradewind.config.card import ModelCard
from tradewind.config.goals import Goals, Match, TrafficClass
from tradewind.config.hardware import Hardware
from tradewind.config.ledger import Shape
from tradewind.config.plan import ClassPlan, StepCostPlan
from tradewind.contract.kv import KVGroup


def class_plans(goals: Goals) -> tuple[ClassPlan, ...]:
    """The classes with their targets in seconds. A TTFT or TPOT that is stated for everybody holds where a class has none of its own."""

    def seconds(own: float | None, of_all: float | None) -> float | None:
        value = of_all if own is None else own
        return None if value is None else value / 1000

    return tuple(
        ClassPlan(
            name=one.name,
            ttft_s=seconds(one.ttft_ms, goals.ttft_ms),
            tpot_s=seconds(one.tpot_ms, goals.tpot_ms),
            e2e_s=seconds(one.e2e_ms, None),
            late=one.late,
            output_tokens=one.output_tokens,
        )
        for one in goals.classes
    )


def class_of_request(
    classes: Iterable[TrafficClass],
    *,
    tenant: str = "",
    headers: Mapping[str, str] | None = None,
    priority: int = 0,
    model: str = "",
) -> str:
    """The name of the first class that a request matches; empty when it matches none. Header names are in lower case."""
    for one in classes:
        if matches(one.match, tenant=tenant, headers=headers or {}, priority=priority, model=model):
            return one.name
    return ""


def matches(match: Match, *, tenant: str, headers: Mapping[str, str], priority: int, model: str) -> bool:
    """Whether a request has all that is stated."""
    return (
        match.tenant in (None, tenant)
        and match.priority in (None, priority)
        and match.model in (None, model)
        and (match.header is None or headers.get(match.header[0]) == match.header[1])
    )


INTEGER_SPEED: dict[str, tuple[str, float]] = {
    "bf16": ("avx512_bf16", 3.0),
    "int16": ("avx512_vnni", 2.5),
    "int8": ("avx512_vnni", 4.0),
}
"""How compute: the instructions it needs, and how many times as fast as measured float32 it then is (prefill of SmolLM2, the notebook)."""


def computing(hardware: Hardware, *, compute: str) -> Hardware:
    """The machine with the matmul speed of a way to compute, where that is known to differ from float32; for estimates."""
    needs, factor = INTEGER_SPEED.get(compute, ("", 1.0))
    if hardware.kind != "cpu" or needs not in hardware.features:
        return hardware
    return msgspec.structs.replace(hardware, matmul_flops_per_s=factor * hardware.matmul_flops_per_s)


ATTENTION_SHARE = 0.75
"""Part of the matmul speed that attention of prompts reaches, beside reading the keys (benchmarks/results/long-rounds-h200.json)."""


def step_cost(card: ModelCard, hardware: Hardware, *, shape: Shape, groups: Iterable[KVGroup]) -> StepCostPlan:
    """A step's time by the machine's measured speeds (a roofline); the engine corrects it by what its steps take."""
    hardware = computing(hardware, compute=shape.compute)
    read = ledger.read_bytes(card, compute=shape.compute, quantization=shape.quantization, backend=shape.backend)
    per_token = sum(group.bytes_per_page / group.page_tokens for group in groups)
    full = max(1, sum(window is None for window in card.layer_windows))
    pair_flops = 4.0 * full * card.heads * card.head_dim
    return StepCostPlan(
        base_s=read / hardware.memory_bytes_per_s,
        token_s=choices.step_seconds(card, hardware, tokens=1),
        context_s=per_token / hardware.memory_bytes_per_s,
        pair_s=pair_flops / (ATTENTION_SHARE * hardware.matmul_flops_per_s),
    )
