"""What techniques bring when an engine really runs: the same short trace, each variant in an engine of its own, several rounds.

Knows: how to ask an engine for a plan's variant and to make a workload of a trace. Refuses to know: how it is opened (whoever calls),
how times are taken (bench). Far dearer than a simulation, and the only way to price a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
import numpy as np

from tradewind.bench.offline import Measurable, run_once
from tradewind.bench.report import Run
from tradewind.bench.workloads import Workload
from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.simulate.trace_columns import Trace
from tradewind.tune import variants
from tradewind.tune.ablate import Ablation, At, Figures, Worth, attribute, statistic

Open = Callable[[Goals], AbstractContextManager[Measurable]]
FIRST_ID = 100
"""Made-up prompts use no token below: those have meanings."""


def goals_of(plan: Plan) -> Goals:
    """Goals that lead to this plan's choices again, all of them pinned."""
    values = variants.values_of(plan)
    if plan.hardware.kind == "cuda":
        values["threads"] = None
    if values["policy"] == "slo":
        values["policy"] = None  # needs classes, which a plan's means do not have
    return Goals(
        model=plan.model,
        scenario=plan.scenario,  # type: ignore[arg-type]
        max_context=plan.schedule.max_context,
        means=Means(**values),
    )


def prompt_of(trace: Trace, index: int, *, vocab_size: int) -> tuple[int, ...]:
    """A prompt of made-up tokens that a vocabulary has: two prompts agree where, and as far as, the trace's do."""
    ids = trace.prompt(index).astype(np.uint64)
    place = np.arange(len(ids), dtype=np.uint64)
    mixed = (ids * np.uint64(0x9E3779B97F4A7C15)) ^ (place * np.uint64(0xC2B2AE3D27D4EB4F))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    first = min(FIRST_ID, vocab_size // 2)
    return tuple((first + (mixed % np.uint64(vocab_size - first)).astype(np.int64)).tolist())


def workload_of(trace: Trace, *, vocab_size: int, max_context: int) -> Workload:
    """The trace's requests as token lists: prompts agree where their blocks do. Raises UserError when none fits the context."""
    prompts, lengths = [], []
    for index in range(len(trace)):
        output = int(trace.output_tokens[index])
        if int(trace.prompt_tokens[index]) + output > max_context:
            continue
        prompts.append(prompt_of(trace, index, vocab_size=vocab_size))
        lengths.append(output)
    if not prompts:
        raise UserError(f"no request of {trace.name} fits into a context of {max_context} tokens")
    return Workload(name="trace", title=trace.name, prompts=tuple(prompts), new_tokens=tuple(lengths))


def ablate_measured(
    trace: Trace,
    plan: Plan,
    *,
    open_engine: Open,
    rounds: int = 3,
    at: At = "p90",
    techniques: Sequence[str] | None = None,
    told: Callable[[str], None] = lambda what: None,
) -> Ablation:
    """Leave-one-out by running engines: in each round every variant once after a warm-up, so that a slow minute meets all of them.

    Memory is the plan's ledger, TTFT counts from the moment when all requests are handed over.
    """
    has = variants.techniques_of(plan)
    unknown = sorted(set(techniques or ()) - set(has))
    if unknown:
        raise UserError(f"the plan does not have {', '.join(unknown)}; it has {', '.join(has)}")
    asked = has if techniques is None else tuple(techniques)
    left_out = {name: "it is switched in the plan, not by a pin" for name in asked if name in variants.EDITS}
    longest = int(trace.prompt_tokens.max())
    made: dict[str, Plan] = {}
    for name in asked:
        if name in left_out:
            continue
        try:
            made[name] = variants.without(plan, (name,), longest_prompt=longest)
        except UserError as error:
            left_out[name] = f"there is no plan without it: {error}"
    chosen = tuple(made)
    all_on = frozenset(chosen)
    goals = {all_on: goals_of(plan)} | {all_on - {name}: goals_of(own) for name, own in made.items()}
    measured: list[dict[frozenset[str], Figures]] = []
    for number in range(rounds):
        own: dict[frozenset[str], Figures] = {}
        # Every other round backwards, so that what drifts does not favour the first.
        for on in sorted(goals, key=sorted, reverse=bool(number % 2)):
            told(f"round {number + 1} of {rounds}, without {', '.join(sorted(all_on - on)) or 'nothing'}")
            with open_engine(goals[on]) as engine:
                work = workload_of(
                    trace, vocab_size=engine.engine.tokenizer.vocab_size, max_context=plan.schedule.max_context
                )
                run_once(engine, work)
                own[on] = _figures_of(run_once(engine, work), engine.plan, at=at)
        measured.append(own)

    def mean(on: frozenset[str]) -> Figures:
        columns = [msgspec.structs.astuple(own[on]) for own in measured]
        return Figures(**dict(zip(Figures.__struct_fields__, np.mean(columns, axis=0).tolist(), strict=True)))

    def of(own: dict[frozenset[str], Figures]) -> Worth:
        return lambda on: own[on]

    alone, _, _ = attribute(chosen, mean, [of(own) for own in measured], shared=())
    return Ablation(
        how="measured",
        about=(
            f"{trace.name}: {len(trace)} requests at once, {rounds} rounds on {plan.hardware.name}; TTFT and TPOT: {at} over requests; "
            "memory: the plan's ledger"
        ),
        with_all=mean(all_on),
        stretches=rounds,
        leave_one_out=alone,
        left_out=left_out,
    )


def _figures_of(run: Run, plan: Plan, *, at: At) -> Figures:
    gaps = [gap for request in run.requests if (gap := request.per_token_s) is not None]
    return Figures(
        ttft_s=statistic(np.array([request.first_token_s for request in run.requests]), at),
        tpot_s=statistic(np.array(gaps), at),
        tokens_per_s=sum(request.output_tokens for request in run.requests) / run.wall_s,
        memory_bytes=float(sum(line.bytes for line in plan.ledger)),
    )
