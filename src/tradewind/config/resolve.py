"""From goals, card and hardware to a plan: the one place where means are chosen, each with its reason.

Knows: the order of the choices (choices) and how they fit into memory. Refuses to know: how anything is carried out.
Pure: the same three records (and the same list of missing backends) give the same plan; nothing is read, measured or loaded here.

    goals.means pins a choice ---> checked, marked `pinned`
    otherwise ------------------> choices.choose_*(...) -> (value, Reason)
    memory: fixed parts + pages <= limit                                  what does not fit shrinks step by step, then is refused
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tradewind.config import choices, choices_overload, choices_pace, ledger
from tradewind.config.card import ModelCard
from tradewind.config.choices_images import image_plan, image_reasons
from tradewind.config.conflicts import explained
from tradewind.config.goals import Goals, Means
from tradewind.config.habits import Habits, habits_of
from tradewind.config.hardware import Hardware
from tradewind.config.kv_sizing import Pools, Sizing, fill, fit, groups_of
from tradewind.config.ledger import Shape, fixed_lines, total_bytes
from tradewind.config.plan import CachePlan, NumericsPlan, Plan, Reason, SchedulePlan
from tradewind.config.refusals import SHORTEST_CONTEXT, Attempt, refuse_memory
from tradewind.config.sizes import show_bytes
from tradewind.config.targets import class_plans, step_cost
from tradewind.contract.errors import UserError

AGE_LIMIT_S = {"latency": 2.0, "balanced": 5.0, "memory": 5.0, "throughput": 30.0}
MAX_PREEMPTIONS = 3

COMFORTABLE_CONTEXT = 4096
"""Where memory is short and nobody stated a context, it is cut down to here before steps become very small."""

SHRINK = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.0)
"""Parts of the tokens per step and of the running sequences that are tried in turn when memory is short."""


def resolve(goals: Goals, card: ModelCard, hardware: Hardware, *, missing: Mapping[str, str] | None = None) -> Plan:
    """Decides everything that the assembler needs; changes nothing.

    missing: backend name -> why it cannot be used here (for example "the C++ library was not built"). Raises UserError for goals that are
    out of range or contradict each other, LimitError when memory or the model's context is too small; the sentence names the smallest
    set of what was asked for that cannot be had together (conflicts).
    """

    def decide(asked: Goals) -> Plan:
        return decided(asked, card, hardware, missing=missing or {})

    try:
        return decide(goals)
    except UserError as error:
        raise explained(error, goals, decide) from None


def decided(goals: Goals, card: ModelCard, hardware: Hardware, *, missing: Mapping[str, str]) -> Plan:
    """The choices, one after the other; the first that cannot be made raises."""
    choices.check_goals(goals)
    means = goals.means
    backend, why_backend = choices.choose_backend(means, card=card, hardware=hardware, missing=missing)
    habits = habits_of(goals.scenario, backend=backend)
    expected = choices.expected_tokens(goals)
    if expected is not None:
        habits = replace(habits, tokens_each=expected)
    numerics = choices.numerics_scenario(goals)
    quantization, why_quantization = choices.choose_quantization(
        means, card=card, hardware=hardware, scenario=numerics, backend=backend
    )
    compute, why_compute = choices.choose_compute(
        means, card=card, hardware=hardware, backend=backend, quantization=quantization, scenario=numerics
    )
    kv_format, why_kv = choices.choose_kv_format(means, card=card, hardware=hardware, backend=backend, compute=compute)
    page_tokens, why_page = choices.choose_page_tokens(means, backend=backend)
    tape, why_tape = choices.choose_tape(means, backend=backend)
    graphs, why_graphs = choices.choose_graphs(means, backend=backend)
    threads, why_threads = choices.choose_threads(means, hardware=hardware, backend=backend)
    in_flight, why_overlap = choices.choose_overlap(means, hardware=hardware, backend=backend, threads=threads)
    deterministic, why_deterministic = choices.choose_deterministic(means, backend=backend)
    load_format, why_load = choices.choose_load_format(means, card=card)
    classes = class_plans(goals)
    policy, why_policy = choices.choose_policy(
        means,
        targets=any(one.ttft_s or one.tpot_s or one.e2e_s for one in classes),
        weights=bool(goals.tenants),
        priorities=any(one.match.priority is not None for one in goals.classes),
    )
    degrade, why_degrade = choices_overload.choose_degrade(goals)
    pace, why_pace = choices_pace.choose_pace(goals, backend=backend, paced=policy == "slo")
    bounded = pace is not None and not pace.whole
    fit_steps, why_fit = choices_overload.choose_fit_steps(means, policy=policy, bounded=bounded)
    prefix_cache, why_prefix = choices.choose_prefix_cache(means, card=card)
    limit, why_limit = choices.choose_limit(goals, hardware=hardware)
    wanted_context = choices.choose_wanted_context(goals, card=card)
    step, why_step = choices.choose_step(
        means, habits=habits, card=card, hardware=hardware, tpot_ms=goals.tpot_ms, paced=policy == "slo"
    )
    if not card.causal and step < wanted_context:
        why_step = amended(
            why_step, value=str(wanted_context), note="an encoder computes a text in one step, so the longest must fit"
        )
        step = wanted_context
    running, why_running = choices.choose_running(means, habits=habits, step=step, backend=backend)

    shape = Shape(
        backend=backend,
        compute=compute,
        quantization=quantization,
        max_tokens_per_step=step,
        max_running=running,
        max_context=wanted_context,
        page_tokens=page_tokens,
        kv_groups=len(groups_of(card, page_tokens=page_tokens, format=kv_format)),
        graphs=graphs,
        adapters=goals.adapters,
    )
    attempt = Attempt(
        goals=goals,
        card=card,
        shape=shape,
        kv_format=kv_format,
        limit=limit,
        machine_bytes=hardware.memory_free_bytes if backend == "cuda" else hardware.memory_bytes,
        has_fp8="fp8" in hardware.features,
    )
    found = place(attempt, habits=habits, free=hardware.memory_free_bytes)
    if found is None:
        raise refuse_memory(attempt)
    shape, pools = found
    images = image_plan(card, max_context=shape.max_context, max_tokens_per_step=shape.max_tokens_per_step)
    cut = f"cut from {step}: memory is short" if shape.max_tokens_per_step < step else ""
    cut_running = f"cut from {running}: memory is short" if shape.max_running < running else ""

    reasons = (
        why_backend,
        why_compute,
        why_quantization,
        why_kv,
        why_page,
        why_limit,
        context_reason(goals, card=card, shape=shape, limit=limit),
        pages_reason(pools, habits=habits, shape=shape, page_tokens=page_tokens),
        amended(why_step, value=str(shape.max_tokens_per_step), note=cut),
        amended(why_running, value=str(shape.max_running), note=cut_running),
        why_policy,
        why_degrade,
        why_pace,
        why_fit,
        *choices.quality_reasons(goals, compute=compute),
        why_prefix,
        why_overlap,
        why_tape,
        why_graphs,
        why_threads,
        why_deterministic,
        why_load,
        *image_reasons(card, images),
        *adapter_reasons(goals),
        *target_reasons(goals, card=card, hardware=hardware, shape=shape),
    )
    lines = (
        *fixed_lines(card, shape),
        *(
            ledger.kv_line(g, pages=n, at_start=backend == "cuda")
            for g, n in zip(pools.groups, pools.pages, strict=True)
        ),
    )
    assert total_bytes(lines) <= limit, "a plan was made that does not fit"
    return Plan(
        model=goals.model,
        scenario=goals.scenario,
        card=card,
        hardware=hardware,
        cache=CachePlan(groups=pools.groups, pages=pools.pages, page_tokens=page_tokens, prefix_cache=prefix_cache),
        schedule=SchedulePlan(
            max_running=shape.max_running,
            max_tokens_per_step=shape.max_tokens_per_step,
            max_context=shape.max_context,
            policy=policy,
            steps_in_flight=in_flight,
            age_limit_s=AGE_LIMIT_S[goals.scenario],
            max_preemptions=MAX_PREEMPTIONS,
            whole_prompts=not card.causal,
            classes=classes,
            tenant_weights=goals.tenants,
            step_cost=step_cost(card, hardware, shape=shape, groups=pools.groups)
            if policy == "slo" or pace is not None
            else None,
            pace=pace,
            fit_steps=fit_steps,
            degrade=degrade,
            images=images,
        ),
        numerics=NumericsPlan(
            backend=backend,
            compute=compute,
            quantization=quantization,
            kv_format=kv_format,
            tape=tape,
            threads=threads,
            deterministic=deterministic,
            graphs=graphs,
        ),
        load_format=load_format,
        adapters=goals.adapters,
        ledger=lines,
        reasons=reasons,
    )


# --------------------------------------------------------------------------------------------------------------- memory


def place(attempt: Attempt, *, habits: Habits, free: int) -> tuple[Shape, Pools] | None:
    """Fits fixed parts and pages into the limit: first as wanted, then with a shorter context, smaller steps and fewer slots.

    What the user stated is never shrunk. Returns None when nothing fits. Without a stated limit pages take at most the scenario's share of
    free memory, because pages once touched stay. On a GPU nothing else wants the memory: pages take all that the limit leaves, as far as
    sequences of the longest context in every slot could use it.
    """
    goals = attempt.goals
    groups = groups_of(attempt.card, page_tokens=attempt.shape.page_tokens, format=attempt.kv_format)
    for part, context in candidates(attempt):
        shape = shrunk(attempt.shape, means=goals.means, context=context, part=part, whole=not attempt.card.causal)
        budget = attempt.limit - total_bytes(fixed_lines(attempt.card, shape))
        if goals.memory_limit_bytes is None:
            share = int(free * habits.kv_share)
            budget = min(budget, share if goals.max_context is None else max(share, attempt.one_sequence(shape)))
        each, gpu = min(context, habits.tokens_each), shape.backend == "cuda"
        sizing = Sizing(
            max_context=context,
            max_tokens_per_step=shape.max_tokens_per_step,
            sequences=shape.max_running * (context // each if gpu else 1),
            tokens_each=each,
        )
        pools = fit(groups, sizing=sizing, budget=budget)
        if pools is not None:
            most = replace(sizing, sequences=shape.max_running, tokens_each=context)
            return shape, fill(pools, budget=budget, most=most) if gpu else pools
    return None


def candidates(attempt: Attempt) -> Iterator[tuple[float, int]]:
    """(part of the shape, context) from the wanted to the most modest."""
    for part in SHRINK[:3]:
        for context in attempt.contexts(shortest=COMFORTABLE_CONTEXT):
            yield part, context
    for part in SHRINK:
        for context in attempt.contexts(shortest=SHORTEST_CONTEXT):
            yield part, context


def shrunk(shape: Shape, *, means: Means, context: int, part: float, whole: bool) -> Shape:
    """The shape with a part of its tokens per step and running sequences, pins untouched; a step holds a token of every sequence, or
    (`whole`) the longest text."""
    running = means.max_running or max(1, int(shape.max_running * part))
    step = means.max_tokens_per_step or max(
        running, min(16, shape.max_tokens_per_step), int(shape.max_tokens_per_step * part)
    )
    if whole:
        step = max(step, context)
    return replace(shape, max_context=context, max_running=min(running, step), max_tokens_per_step=step)


def context_reason(goals: Goals, *, card: ModelCard, shape: Shape, limit: int) -> Reason:
    """Why this context."""
    value = str(shape.max_context)
    if goals.max_context is not None:
        return Reason(
            choice="max_context", value=value, why=f"as asked; the model allows {card.max_positions}", pinned=True
        )
    if shape.max_context == card.max_positions:
        return Reason(choice="max_context", value=value, why="all that the model allows fits")
    why = f"what fits beside the rest in {show_bytes(limit)}; the model allows {card.max_positions}"
    return Reason(
        choice="max_context", value=value, why=why, rejected=f"{card.max_positions}: one such sequence would not fit"
    )


def pages_reason(pools: Pools, *, habits: Habits, shape: Shape, page_tokens: int) -> Reason:
    """Why this many pages."""
    value = " + ".join(str(count) for count in pools.pages)
    each = min(shape.max_context, habits.tokens_each)
    price = " + ".join(show_bytes(group.bytes_per_page) for group in pools.groups)
    if pools.sequences == 0:
        why = f"enough for one sequence of {shape.max_context} tokens, which is all that fits ({price} a page)"
    else:
        why = (
            f"hold {pools.sequences} sequences of {each} tokens at once, or one of {shape.max_context} ({price} a page)"
        )
    if shape.backend == "cuda":
        why += "; all that the limit leaves, and what running requests do not use keeps prefixes"
    rejected = (
        f"pages for all {shape.max_running} slots: over the budget" if pools.sequences < shape.max_running else ""
    )
    return Reason(choice="pages", value=f"{value} of {page_tokens} tokens", why=why, rejected=rejected)


# -------------------------------------------------------------------------------------------------------------- targets


def target_reasons(goals: Goals, *, card: ModelCard, hardware: Hardware, shape: Shape) -> tuple[Reason, ...]:
    """What the machine's measured limits say about the stated targets; never a refusal, because they are estimates."""
    found = []
    if goals.tpot_ms is not None:
        read = ledger.read_bytes(card, compute=shape.compute, quantization=shape.quantization, backend=shape.backend)
        floor = 1000 * read / hardware.memory_bytes_per_s
        verdict = "can be met" if floor <= goals.tpot_ms else "cannot be met on this machine with these weights"
        why = f"{verdict}: reading {show_bytes(read)} for a token takes at least {floor:.1f} ms"
        found.append(Reason(choice="target tpot", value=f"{goals.tpot_ms:g} ms", why=why, pinned=True))
    if goals.ttft_ms is not None:
        tokens = int(goals.ttft_ms / 1000 / choices.step_seconds(card, hardware, tokens=1))
        why = f"by {choices.matmul_speed_words(hardware)} a prompt of about {tokens} tokens is computed in that time on an idle engine"
        found.append(Reason(choice="target ttft", value=f"{goals.ttft_ms:g} ms", why=why, pinned=True))
    return tuple(found)


def adapter_reasons(goals: Goals) -> tuple[Reason, ...]:
    """Room for adapters, where it is asked for."""
    if goals.adapters is None:
        return ()
    why = "as asked; more take turns, the longest unused giving way"
    return (Reason(choice="adapters", value=str(goals.adapters), why=why, pinned=True),)


def amended(reason: Reason, *, value: str, note: str) -> Reason:
    """The reason with the value that was kept in the end and a note why."""
    if not note:
        return reason
    return Reason(choice=reason.choice, value=value, why=note, rejected=reason.rejected, pinned=reason.pinned)
