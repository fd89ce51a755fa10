"""How a plan that does not fit is refused: need, have, shortfall, and two settings that would fit.

Knows: the smallest memory that a request for a plan needs. Refuses to know: how the choices before were made (resolve).
A setting is only named after it was tried. Weights that do not fit are called so, and nothing is said about the cache then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from tradewind.config.card import ModelCard
from tradewind.config.goals import Goals
from tradewind.config.kv_sizing import Sizing, groups_of, pool_bytes
from tradewind.config.ledger import Shape, block_quantised, fixed_lines, total_bytes
from tradewind.config.plan import LedgerLine
from tradewind.config.sizes import MiB, option_bytes, show_bytes
from tradewind.contract.errors import LimitError
from tradewind.contract.kv import KVFormat

SHORTEST_CONTEXT = 256
"""A context that nobody asked for is not cut below this: an engine that cannot hold a question and its answer is of no use."""

CONTEXT_STEP = 64
"""Advised contexts are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A plan that is being fitted: everything chosen but the pages."""

    goals: Goals
    card: ModelCard
    shape: Shape
    kv_format: KVFormat
    limit: int
    machine_bytes: int
    """Memory that the machine has (a GPU: that is free): no larger limit can be advised."""
    has_fp8: bool = False
    """The GPU multiplies fp8."""

    def contexts(self, *, shortest: int) -> Iterator[int]:
        """Contexts to try in turn: the wanted one, and where the user did not state it, shorter ones by an eighth each."""
        context = self.shape.max_context
        yield context
        if self.goals.max_context is not None:
            return
        shortest = min(context, shortest)
        while context > shortest:
            context = max(shortest, context * 7 // 8 // CONTEXT_STEP * CONTEXT_STEP)
            yield context

    def one_sequence(self, shape: Shape) -> int:
        """Bytes of pages for one sequence of the shape's context."""
        sizing = Sizing(
            max_context=shape.max_context, max_tokens_per_step=shape.max_tokens_per_step, sequences=0, tokens_each=1
        )
        return pool_bytes(
            groups_of(self.card, page_tokens=shape.page_tokens, format=self.kv_format), sizing=sizing, sequences=0
        )

    def smallest(self, *, context: int) -> Shape:
        """The most modest shape that the pins allow."""
        means = self.goals.means
        step = means.max_tokens_per_step or max(means.max_running or 1, min(16, self.shape.max_tokens_per_step))
        if not self.card.causal:
            step = max(step, context)
        return replace(self.shape, max_context=context, max_tokens_per_step=step, max_running=means.max_running or 1)

    def need(self, *, context: int) -> int:
        """The least memory that works for a context."""
        shape = self.smallest(context=context)
        return total_bytes(fixed_lines(self.card, shape)) + self.one_sequence(shape)


def refuse_memory(attempt: Attempt) -> LimitError:
    """The error for a plan that does not fit, to be raised by the caller."""
    card, limit, wanted = attempt.card, attempt.limit, attempt.shape.max_context
    stated = attempt.goals.max_context is not None
    context = wanted if stated else min(wanted, SHORTEST_CONTEXT)
    need = attempt.need(context=context)
    shape = attempt.smallest(context=min(SHORTEST_CONTEXT, wanted))
    lines = fixed_lines(card, shape)
    fixed = total_bytes(lines)
    if fixed >= limit:
        weights = next(line.bytes for line in lines if line.name == "weights")
        what = (
            f"The weights of '{card.name}' do not fit: {show_bytes(weights)} of weights in {shape.compute} and "
            f"{show_bytes(fixed - weights)} around them{largest(attempt, lines)} need {show_bytes(fixed)}"
        )
        settings = [smaller_weights(attempt, context=context)]
        short, last = fixed - limit, ", or a smaller model"
    else:
        pages = attempt.one_sequence(attempt.smallest(context=context))
        around = largest(attempt, fixed_lines(card, attempt.smallest(context=context)))[1:]
        around = f"{around} " if around else ""
        what = (
            f"A context of {context} tokens does not fit beside the weights of '{card.name}': {show_bytes(need - pages)} "
            f"{around}and {show_bytes(pages)} of KV pages need {show_bytes(need)}"
        )
        settings = [fitting_context(attempt, below=context), smaller_kv(attempt, context=context)]
        short, last = need - limit, ""
    settings.insert(0, fewer_adapters(attempt, context=context))
    settings += [larger_limit(attempt, context=context, room=1.0), larger_limit(attempt, context=wanted, room=1.25)]
    usable = list(dict.fromkeys(setting for setting in settings if setting))[:2]
    advice = (
        f"Use {' or '.join(usable)}{last}."
        if usable
        else f"This {machine(attempt)} {show_bytes(attempt.machine_bytes)}: use a smaller model."
    )
    limit_is = "the memory limit is" if attempt.goals.memory_limit_bytes is not None else "what is free allows"
    return LimitError(f"{what}, {limit_is} {show_bytes(limit)}, {show_bytes(short)} short. {advice}")


def machine(attempt: Attempt) -> str:
    """The owner of the memory and its verb, for the end of a sentence."""
    return "GPU has free" if attempt.shape.backend == "cuda" else "machine has"


def largest(attempt: Attempt, lines: tuple[LedgerLine, ...]) -> str:
    """On a GPU the two largest entries beside the weights, in brackets; there they are taken at start, whatever is asked later. On a CPU
    adapters, which somebody asked for."""
    if attempt.shape.backend == "cuda":
        others = sorted((line for line in lines if line.name != "weights"), key=lambda line: -line.bytes)[:2]
    else:
        others = [line for line in lines if line.name == "adapters"]
    if not others:
        return ""
    return f" ({', '.join(f'{line.name} {show_bytes(line.bytes)}' for line in others)})"


def larger_limit(attempt: Attempt, *, context: int, room: float) -> str | None:
    """A limit with which the context fits, if this machine has it."""
    need = int(attempt.need(context=context) * room)
    return f"--memory-limit {option_bytes(need)} (context {context})" if need + MiB <= attempt.machine_bytes else None


def fewer_adapters(attempt: Attempt, *, context: int) -> str | None:
    """The most adapters at once with which it fits, if there are any and fewer help."""
    room = attempt.shape.adapters
    if room is None:
        return None
    fits, over = 0, room.slots
    while over - fits > 1:
        middle = (fits + over) // 2
        shape = replace(attempt.shape, adapters=msgspec.structs.replace(room, slots=middle))
        if replace(attempt, shape=shape).need(context=context) <= attempt.limit:
            fits = middle
        else:
            over = middle
    return f"--adapter-slots {fits}" if fits else None


def fitting_context(attempt: Attempt, *, below: int) -> str | None:
    """The longest advisable context that fits, if any."""
    # A longer context never needs less, so the border is found by halving: a refusal is asked for often (conflicts).
    fits, over = 0, (below - 1) // CONTEXT_STEP + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        if attempt.need(context=middle * CONTEXT_STEP) <= attempt.limit:
            fits = middle
        else:
            over = middle
    return f"--max-context {fits * CONTEXT_STEP}" if fits else None


def smaller_kv(attempt: Attempt, *, context: int) -> str | None:
    """A KV format with which it fits, if any."""
    smaller: KVFormat
    if attempt.shape.backend == "cuda":
        if attempt.kv_format != "bf16" or not attempt.has_fp8:
            return None
        smaller = "fp8"
    elif attempt.kv_format == "f32":
        smaller = "f16"
    else:
        return None
    need = replace(attempt, kv_format=smaller).need(context=context)
    return f"--kv-format {smaller} ({show_bytes(need)} in all)" if need <= attempt.limit else None


def smaller_weights(attempt: Attempt, *, context: int) -> str | None:
    """Weights in fewer bits with which it fits, if any."""
    shape, quantised = attempt.shape, block_quantised(attempt.card) > 0.5
    if shape.backend == "cuda":
        if shape.quantization == "fp8" or not attempt.has_fp8 or attempt.goals.means.quantization is not None:
            return None
        need = replace(attempt, shape=replace(shape, quantization="fp8")).need(context=context)
        return f"--quantization fp8 ({show_bytes(need)} in all)" if need <= attempt.limit else None
    if shape.backend != "cpu" or (not quantised and attempt.goals.means.quantization is not None):
        return None
    for name in ("none",) if quantised else ("int8", "int4"):
        need = replace(attempt, shape=replace(shape, compute="int8", quantization=name)).need(context=context)
        if need <= attempt.limit:
            settings = [] if quantised else [f"--quantization {name}"]
            settings += (
                ["--compute int8"]
                if shape.compute not in ("int8", "int16") and attempt.goals.means.compute is not None
                else []
            )
            return f"{' '.join(settings)} ({show_bytes(need)} in all)" if settings else None
    return None
