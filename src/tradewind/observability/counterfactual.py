"""One answer to "what would have helped this request", worked out from its receipt's own numbers.

Knows: for each binding cause one change, and what it would have done to this request and to the others. Refuses to know: whether the change
is possible; the simulator plays whole traces, this is arithmetic on one request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tradewind.observability.step_cost import StepCost

SHOWN_S = 1e-5
"""A smaller difference is none."""


class Counterfactual(msgspec.Struct, frozen=True, kw_only=True):
    """What another setting would have changed. Seconds, negative is faster; computed, not measured."""

    change: str
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    longest_gap_s: float = 0.0
    others_tpot_s: float = 0.0
    """Of those that decode at the same time, while it lasts."""
    says: str = ""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the arithmetic needs of one request."""

    cause: str
    seconds: Mapping[str, float]
    """The parts of its whole time by name."""
    ttft_seconds: Mapping[str, float]
    """The same up to its first token."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    chunks: int
    """Steps that had a part of its prompt."""
    chunk_rows: float
    """Other rows in these steps, in the mean."""
    step_tokens: int
    """The token budget of a step, which is the largest chunk."""
    others_chunk_s: float
    """The most that one step spent on others' prompts while it had tokens coming."""
    others_steps: int
    """Steps with others' prompts while it was there."""
    page_tokens: int
    line_s: float = 0.0
    """What it waited in line behind steps with others' prompts."""
    others: bool = False
    """Whether anybody else's answer was computed beside it."""


def counterfactual(asked: Asked, cost: StepCost) -> Counterfactual | None:
    """The change that fits the cause; None where nothing that can be set would have helped."""
    seconds, first = asked.seconds, asked.ttft_seconds

    def gone(*names: str) -> tuple[float, float]:
        return -sum(first.get(name, 0.0) for name in names), -sum(seconds.get(name, 0.0) for name in names)

    ttft_s = e2e_s = gap_s = others_s = 0.0
    computed = max(0, asked.prompt_tokens - asked.cached_tokens)
    match asked.cause:
        case "kv_pages":
            pages = math.ceil((computed + 1) / max(1, asked.page_tokens))
            change = f"{pages} more KV pages"
            ttft_s, e2e_s = gone("queue_pages", "preempted", "recompute")
            others_s = cost.decode_s
        case "slots":
            change = "one more slot"
            ttft_s, e2e_s = gone("queue_slot")
            others_s = cost.decode_s
        case "neighbour":
            chunk = asked.step_tokens
            waited = first.get("queue_tokens", 0.0) + first.get("others_prefill", 0.0)
            if asked.line_s > seconds.get("queue_tokens", 0.0) + seconds.get("others_prefill", 0.0):
                # It came amid a long step; of one half as long half as much is left.
                change = f"chunk {max(1, chunk // 2)}"
                ttft_s = e2e_s = -0.5 * asked.line_s
                others_s = -0.5 * cost.prefill_s * chunk
            elif waited >= 0.5 * (seconds.get("queue_tokens", 0.0) + seconds.get("others_prefill", 0.0)):
                # It waited for others' prompts to be done: twice the chunk needs half the steps, and saves what a step costs besides.
                change = f"chunk {2 * chunk}"
                saved = asked.others_steps // 2 * (cost.base_s + cost.decode_s * asked.chunk_rows)
                ttft_s = e2e_s = -min(waited, saved)
                others_s = cost.prefill_s * chunk
            elif cost.prefill_s > 0 and asked.others_chunk_s > 0:
                # Its tokens came between others' chunks: with smaller ones it waits as long in all, but never so long at once.
                largest = asked.others_chunk_s / cost.prefill_s
                smaller = 1 << max(0, math.floor(math.log2(max(1.0, largest / 1.5))))
                change = f"chunk {smaller}"
                gap_s = others_s = -cost.prefill_s * (largest - smaller)
            else:
                return None
        case "cold_prefix":
            shared = computed // max(1, asked.page_tokens) * asked.page_tokens
            change = (
                f"its first {shared} uncached tokens in the prefix cache"
                if shared
                else "its prompt in the prefix cache"
            )
            own = first.get("prefill", 0.0)
            ttft_s = e2e_s = -max(0.0, own - cost.step_s(prefill=max(1, computed - shared), decode=0))
        case "long_prompt":
            chunk = asked.step_tokens
            # The step's other tokens and whole pages take their part of both budgets.
            steps = math.ceil(computed / (computed / max(1, asked.chunks) + chunk))
            change = f"chunk {2 * chunk}"
            ttft_s = e2e_s = -max(0, asked.chunks - steps) * (cost.base_s + cost.decode_s * asked.chunk_rows)
            others_s = cost.prefill_s * min(chunk, max(0, computed - chunk))
        case "grammar" if seconds.get("grammar", 0.0) >= seconds.get("grammar_masks", 0.0):
            change = "its grammar compiled before"
            ttft_s, e2e_s = gone("grammar")
        case "grammar":
            change = "a grammar whose masks take no time"
            ttft_s, e2e_s = gone("grammar_masks")
            if asked.others:
                others_s = e2e_s / max(1, asked.generated_tokens)
        case "others_grammar":
            change = "no other request's grammar in its steps"
            ttft_s, e2e_s = gone("others_grammar")
        case "shared_prefix":
            change = "its prefix in the cache when it came"
            ttft_s, e2e_s = gone("prefix_wait", "sample_wait")
        case "client":
            change = "a client that reads as fast as tokens come"
            ttft_s, e2e_s = gone("socket", "read")
        case "drafts":
            change = "no drafts"
            ttft_s, e2e_s = gone("draft")
        case "batch" | "answer":
            change = "nobody else on the device"
            ttft_s, e2e_s = gone("others_decode", "others_prefill")
        case "device_stall":
            change = "steps that take what their work takes"
            ttft_s, e2e_s = gone("stall")
        case "front":
            change = "a front with nothing else to do"
            ttft_s, e2e_s = gone("delivery")
        case _:
            return None
    if max(map(abs, (ttft_s, e2e_s, gap_s, others_s))) < SHOWN_S:
        return None
    made = Counterfactual(change=change, ttft_s=ttft_s, e2e_s=e2e_s, longest_gap_s=gap_s, others_tpot_s=others_s)
    return msgspec.structs.replace(made, says=_sentence(made))


def _sentence(made: Counterfactual) -> str:
    """ "with chunk 512: TTFT -180 ms, others' TPOT +2 ms"."""
    told = [
        f"{name} {_milliseconds(value)}"
        for name, value in (
            ("TTFT", made.ttft_s),
            ("whole answer", made.e2e_s if made.e2e_s != made.ttft_s else 0.0),
            ("longest gap", made.longest_gap_s),
            ("others' TPOT", made.others_tpot_s),
        )
        if abs(value) >= SHOWN_S
    ]
    return f"with {made.change}: {', '.join(told)}"


def _milliseconds(seconds: float) -> str:
    """Three digits and a sign, whole from 100 ms on."""
    value = seconds * 1e3
    return f"{value:+.0f} ms" if abs(value) >= 100 else f"{value:+.3g} ms"
