"""The same plan without a technique, and the step times that go with it.

Knows: which techniques a plan has, how to make the plan that lacks some of them, all else as it was. Refuses to know: what that is worth
(ablate) and how anything is simulated.

      plan --- its choices as pins ---+
      techniques left out, as pins ---+---> resolve ---> variant        same memory ceiling: what is not needed elsewhere becomes pages
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tradewind.config.conflicts import conflicts
from tradewind.config.goals import DegradeName, Goals, Means
from tradewind.config.plan import DegradePlan, Plan, SchedulePlan
from tradewind.config.resolve import decided
from tradewind.config.techniques import TECHNIQUES
from tradewind.contract.errors import UserError
from tradewind.simulate.steptime import StepTime, roofline

EDITS: dict[str, Callable[[SchedulePlan], SchedulePlan]] = {
    "small_pass_big": lambda schedule: msgspec.structs.replace(schedule, age_limit_s=0.0),
}
"""Techniques that are switched in the plan itself."""
WHOLE_PROMPTS = ("chunked_prefill",)
"""Techniques that are off when a step holds the longest prompt."""

FELT = {
    "chunked_prefill": "steps as they are decided",
    "continuous_batching": "steps as they are decided",
    "degrade_ladder": "who may start, steps as they are decided",
    "degrade_refusal": "who is refused or cut short",
    "fp8_kv": "pages; keys and values read at the roofline's speed",
    "fp8_weights": "weights read at the roofline's speed",
    "kv_f16": "pages; keys and values read at the roofline's speed",
    "overlap": "host and device beside each other on two clocks",
    "packed_weights": "weights read at the roofline's speed",
    "prefix_cache": "prompts found again as the trace's blocks say",
    "priority_ageing": "the queue as it is ordered",
    "slo_pacing": "the queue as it is ordered, steps as they are decided",
    "small_pass_big": "the queue as it is ordered",
    "tenant_fairness": "the queue as it is ordered",
    "length_first": "the queue as it is ordered",
}
"""Techniques that a simulation feels, and how. What others do (kernels, tapes) only a measured run can tell."""


def values_of(plan: Plan) -> dict[str, Any]:
    """What a plan has chosen, by field of Means."""
    schedule, numerics = plan.schedule, plan.numerics
    return {
        "backend": numerics.backend,
        "compute": numerics.compute,
        "degrade": "off" if schedule.degrade is None else schedule.degrade.far,
        "deterministic": numerics.deterministic,
        "fit_steps": schedule.fit_steps,
        "graphs": numerics.graphs,
        "kv_format": numerics.kv_format,
        "load_format": plan.load_format,
        "max_running": schedule.max_running,
        "max_tokens_per_step": schedule.max_tokens_per_step,
        "overlap": schedule.steps_in_flight > 1,
        "page_tokens": plan.cache.page_tokens,
        "policy": schedule.policy,
        "prefix_cache": plan.cache.prefix_cache,
        "quantization": numerics.quantization,
        "tape": numerics.tape,
        "threads": numerics.threads,
    }


def techniques_of(plan: Plan) -> tuple[str, ...]:
    """The switched techniques that a plan has, by name; of several with the same switch the first."""
    values, seen, out = values_of(plan), set[str](), []
    for name, row in TECHNIQUES.items():
        if not (row.off or name in EDITS or name in WHOLE_PROMPTS):
            continue
        if not all(values.get(pin) == value for pin, value in row.on.items()):
            continue
        if row.off and all(values.get(pin) == value for pin, value in row.off.items()):
            continue
        if name == "packed_weights" and values["compute"] not in ("int8", "int16"):
            continue
        if name in WHOLE_PROMPTS and plan.schedule.whole_prompts:
            continue
        key = repr(sorted(row.off.items())) if row.off else name
        if key not in seen:
            seen.add(key)
            out.append(name)
    return tuple(out)


def pins_without(plan: Plan, off: Iterable[str], *, longest_prompt: int) -> dict[str, Any]:
    """The fields of Means that switch techniques off."""
    pins: dict[str, Any] = {}
    for name in sorted(off):
        pins |= TECHNIQUES[name].off
        if name in WHOLE_PROMPTS:
            pins["max_tokens_per_step"] = max(
                plan.schedule.max_tokens_per_step, longest_prompt + plan.schedule.max_running
            )
    return pins


def without(plan: Plan, off: Iterable[str], *, longest_prompt: int) -> Plan:
    """The plan without some of its techniques, under the same memory ceiling. Raises UserError when there is none."""
    off = tuple(off)
    if not off:
        return plan
    wanted = pins_without(plan, off, longest_prompt=longest_prompt)
    made = plan
    if wanted:
        made = _planned(plan, wanted)
    schedule = msgspec.structs.replace(
        plan.schedule,
        max_running=made.schedule.max_running,
        max_tokens_per_step=made.schedule.max_tokens_per_step,
        max_context=made.schedule.max_context,
        steps_in_flight=made.schedule.steps_in_flight,
        policy=wanted.get("policy", plan.schedule.policy),
        fit_steps=wanted.get("fit_steps", plan.schedule.fit_steps),
        degrade=_degraded(plan.schedule, wanted.get("degrade")),
    )
    for name in off:
        if name in EDITS:
            schedule = EDITS[name](schedule)
    return msgspec.structs.replace(made, schedule=schedule)


def _degraded(schedule: SchedulePlan, wanted: DegradeName | None) -> DegradePlan | None:
    """The plan's own ladder, or as far as is wanted."""
    if wanted is None or schedule.degrade is None:
        return schedule.degrade
    return None if wanted == "off" else msgspec.structs.replace(schedule.degrade, far=wanted)


def _planned(plan: Plan, wanted: Mapping[str, Any]) -> Plan:
    """All of the plan's choices pinned but those wanted otherwise; what cannot be kept beside these is chosen anew."""
    values = values_of(plan) | dict(wanted)
    if "policy" not in wanted:
        values["policy"] = None
    if plan.hardware.kind == "cuda":
        values["threads"] = None  # the GPU computes: not to be pinned
    limit = sum(line.bytes for line in plan.ledger)
    goals = Goals(
        model=plan.model,
        scenario=plan.scenario,  # type: ignore[arg-type]
        memory_limit_bytes=min(max(limit, 1), plan.hardware.memory_bytes),
        max_context=plan.schedule.max_context,
        means=Means(**values),
    )

    def decide(asked: Goals) -> Plan:
        return decided(asked, plan.card, plan.hardware, missing={})

    for _ in range(len(values)):
        try:
            return decide(goals)
        except UserError:
            for conflict in conflicts(goals, decide):
                loose = sorted(conflict.fields - set(wanted))
                if not loose:
                    raise
                goals = _loosened(goals, loose, plan)
    return decide(goals)


def _loosened(goals: Goals, fields: Iterable[str], plan: Plan) -> Goals:
    """Lets go of what cannot be kept: a pin, the context, at last the ceiling (up to what the machine has)."""
    fields = list(fields)
    pins = [
        name
        for name in fields
        if name in Means.__struct_fields__ and name not in ("max_running", "max_tokens_per_step")
    ]
    if pins:
        return msgspec.structs.replace(goals, means=msgspec.structs.replace(goals.means, **dict.fromkeys(pins)))
    if "memory_limit_bytes" in fields:
        return msgspec.structs.replace(goals, memory_limit_bytes=None)
    if "max_context" in fields:
        return msgspec.structs.replace(goals, max_context=None)
    return msgspec.structs.replace(goals, means=msgspec.structs.replace(goals.means, **dict.fromkeys(fields)))


def times_for(variant: Plan, *, plan: Plan, times: StepTime) -> StepTime:
    """Step times of a variant: those of the plan, each coefficient changed as much as the roofline of the two plans differs there."""
    if variant.numerics == plan.numerics:
        return times
    here, there = roofline(plan), roofline(variant)
    if not times.steps:
        return there
    return msgspec.structs.replace(
        times,
        source=f"{times.source}, carried over by the roofline",
        curve_s=tuple(t * b / a for t, a, b in zip(times.curve_s, here.curve_s, there.curve_s, strict=True)),
        extra_s=tuple(t * b / a for t, a, b in zip(times.extra_s, here.extra_s, there.extra_s, strict=True)),
        prompt_s=(
            times.prompt_s[0] * there.prompt_s[0] / here.prompt_s[0],
            times.prompt_s[1] * there.prompt_s[1] / here.prompt_s[1],
        ),
    )
