"""What a receipt says: parts that sum to the measured TTFT and to the whole, what bound the request, what would have helped.

Knows: the names of parts and causes, and what they mean. Refuses to know: how they are measured (receipt_book).
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from tradewind.contract.events import Cause
from tradewind.observability.counterfactual import Counterfactual

PartName = Literal[
    "read", "parse", "tokenise", "inbox", "grammar", "sample_wait", "prefix_wait", "queue_slot", "queue_pages", "queue_tokens",
    "queue_step", "prefill", "recompute", "others_prefill", "decode", "others_decode", "grammar_masks", "others_grammar", "draft",
    "engine", "stall", "preempted", "delivery", "detokenise", "socket",
]  # fmt: skip
PARTS: tuple[PartName, ...] = get_args(PartName)
SAYS: dict[PartName, str] = {
    "read": "waiting for the request's body",
    "parse": "reading its JSON",
    "tokenise": "template and tokens, waiting for a thread among them",
    "inbox": "from the front to the engine, which was in a step",
    "grammar": "its grammar was being compiled",
    "sample_wait": "waiting for the first sample of its prompt",
    "prefix_wait": "another request was computing the same prefix",
    "queue_slot": "all slots were in use",
    "queue_pages": "no KV pages were free",
    "queue_tokens": "others' prompts filled the step's token budget",
    "queue_step": "waiting for the next step",
    "prefill": "computing its prompt",
    "recompute": "computing again what a preemption took",
    "others_prefill": "others' prompts in the same steps",
    "decode": "computing its answer",
    "others_decode": "others' answers in the same steps",
    "grammar_masks": "its steps stood still for masks of its grammar",
    "others_grammar": "its steps stood still for the masks of others' grammars",
    "draft": "making guesses, and computing wrong ones, in its steps",
    "engine": "the engine between two steps",
    "stall": "steps that took much longer than their work explains",
    "preempted": "evicted, waiting to start again",
    "delivery": "from the engine to the front",
    "detokenise": "tokens into text and JSON",
    "socket": "the client, or the way to it, took nothing",
}
OF_CAUSE: dict[Cause, PartName] = {
    "slot": "queue_slot",
    "pages": "queue_pages",
    "tokens": "queue_tokens",
    "grammar": "grammar",
    "prefix": "prefix_wait",
    "sample": "sample_wait",
}

BindingCause = Literal[
    "kv_pages", "slots", "neighbour", "batch", "cold_prefix", "long_prompt", "answer", "grammar", "others_grammar", "shared_prefix",
    "drafts", "client", "front", "engine", "device_stall",
]  # fmt: skip
BINDINGS: dict[BindingCause, tuple[tuple[PartName, ...], str]] = {
    "kv_pages": (("queue_pages", "preempted", "recompute"), "KV pages were full"),
    "slots": (("queue_slot",), "all slots were in use"),
    "neighbour": (("queue_tokens", "others_prefill"), "others' prompts were computed"),
    "batch": (("others_decode",), "others' answers were computed in the same steps"),
    "shared_prefix": (("prefix_wait", "sample_wait"), "another request was computing the same prefix"),
    "grammar": (("grammar", "grammar_masks"), ""),
    "others_grammar": (("others_grammar",), "its steps stood still for the masks of others' grammars"),
    "drafts": (("draft",), "guesses were made, and were wrong"),
    "client": (("socket", "read"), "the client was slow"),
    "front": (("parse", "tokenise", "detokenise", "delivery"), "the HTTP front had work to do"),
    "engine": (("inbox", "queue_step", "engine"), ""),
    "device_stall": (("stall",), "the device stood still"),
}
"""What it could have been spared, by which parts it is known, and what is said; "": what `SAYS` has for the largest of them. Its own prompt
and answer are none of these."""
NOTABLE = 0.4
"""A cause that took this part of what the request's own prompt and answer took is what bound it; below that its own work did."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stretch, or several of one kind."""

    name: PartName
    seconds: float
    blocked_by: str = ""
    """The request that had most of it, where another one did."""


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """What decided how long it took."""

    cause: BindingCause
    seconds: float
    share: float
    """Of the time that is explained, 0 to 1."""
    blocked_by: str = ""
    says: str = ""


class ItemisedReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. The parts of `ttft` sum to `ttft_s`, those of `e2e` to `e2e_s`, to a microsecond."""

    id: str
    request_id: str
    endpoint: str
    sequence: str
    """The one that was waited for: the last of its samples to end."""
    arrived: float
    """Unix time."""
    stream: bool
    finish: str
    prompt_tokens: int
    cached_tokens: int
    seen_tokens: int
    """Of the prompt, leading tokens that an earlier request had too; what of these was not cached had been evicted."""
    completion_tokens: int
    preemptions: int
    ttft_s: float | None
    """From the request's arrival to the first bytes with text of its answer; of an answer that is not streamed to when its first text was
    made. None: it had none."""
    e2e_s: float
    """From its arrival to when the last byte was handed to the socket."""
    tpot_s: float | None
    """(last token - first token) / (tokens - 1), as the engine made them."""
    ttft: tuple[Part, ...]
    e2e: tuple[Part, ...]
    binding: Binding
    """Of the whole."""
    ttft_binding: Binding | None
    counterfactual: Counterfactual | None
    error: str | None = None
    cost_error: float = 0.0
    """How far a step's time was from its fitted cost, in the mean, 0 to 1. The split of a step between those in it, and the counterfactual,
    rest on that cost; what was waited for does not."""
