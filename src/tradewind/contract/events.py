"""What happened, told to whoever listens (metrics, traces, receipts, journal): facts with times, never commands.

All times are seconds of the engine's clock (`time.monotonic`, or the simulator's virtual clock).
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from tradewind.contract.step import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request entered the queue."""

    request_id: str
    at_s: float
    prompt_tokens: int
    tenant: str = ""
    priority: int = 0
    traffic_class: str = ""
    taken_s: float = 0.0
    """When the engine took it from its inbox; 0 where nobody said."""


class Scheduled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request got its slot (again after a preemption). `cached_tokens` were found in the prefix cache."""

    request_id: str
    at_s: float
    step: int
    cached_tokens: int
    waited_s: float
    resumed: bool = False
    seen_tokens: int = 0
    """Of the prompt, how many leading tokens (whole pages) an earlier request had too, as far as the engine remembers: what of these is
    not in `cached_tokens` was evicted, or is being computed by somebody else."""


Cause = Literal["slot", "pages", "tokens", "grammar", "prefix", "sample"]
"""Why a request cannot start: no slot is free; its pages are not free; the step's token budget is full; its grammar is being compiled;
somebody computes the same prefix right now; the first sample of its prompt is not computed."""


class Delayed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The head of the queue could not start, and why; told once per reason and request, not every step."""

    request_id: str
    at_s: float
    reason: str
    blocked_by: str = ""
    cause: Cause | None = None


class Woken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a request was blocked on (a grammar, a prefix, a sample) is there: from now on it waits in the queue like the others."""

    request_id: str
    at_s: float


class Held(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What holds up the queue from now on; told when it changes. Cause None: whoever is in the queue starts with the next step."""

    at_s: float
    cause: Cause | None
    request_id: str = ""
    """The first that cannot start; those behind it wait for the same."""
    blocked_by: str = ""
    """Who has most of what lacks: of the slots the one that came first, of the pages the one that holds most, of the step's tokens the
    longest prompt."""


class TokensOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New tokens of one request; `finish` is set on its last event, which is the only one that sets it."""

    request_id: str
    at_s: float
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The end-of-text or stop token that ended the answer; it is the last of `tokens`."""
    error: str | None = None
    overloaded: bool = False
    """With an error: the request was refused because too much is going on, and may be sent again later."""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    """Running total including these tokens."""
    embedding: bytes | None = None
    """Of a request that asked for pooling, on its last event: float32 values in the machine's own order."""


class Preempted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A running request gave its pages back to let `for_whom` go on; `lost_tokens` must be computed again."""

    request_id: str
    at_s: float
    lost_tokens: int
    for_whom: str
    cause: Cause = "pages"
    """What was lacking: pages, or a slot."""


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One step of the engine, with what was in it and what it cost."""

    number: int
    at_s: float
    rows: int
    tokens: int
    prompt_tokens: int
    decide_s: float
    absorb_s: float
    device_s: float
    running: int
    waiting: int
    pages_used: tuple[int, ...]
    pages_total: tuple[int, ...]
    decided_s: float = 0.0
    """When it was decided; it may have waited for the step before it. 0 where nobody said."""
    collect_s: float = 0.0
    """How long the engine waited for its result, with nothing else to do."""
    chunk_ids: tuple[str, ...] = ()
    """Whose prompts (after a preemption: whose known tokens) were computed in this step ..."""
    chunk_tokens: tuple[int, ...] = ()
    """... and how many tokens of each."""
    guessed: int = 0
    """Guessed tokens that were computed, of all rows ..."""
    wrong: int = 0
    """... and how many of them were not what the model says."""
    grammar_s: float = 0.0
    """How long the step stood still for the grammars of those in it (StepResult.grammar_s) ..."""
    grammar_ids: tuple[str, ...] = ()
    """... of whom ..."""
    grammar_parts: tuple[float, ...] = ()
    """... and for how much of it each, in seconds. Of very many rows only those with most of it are told."""
    draft_s: float = 0.0
    """How long it took to make the guesses."""


class FrontTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP front did for one request, and when: the ends that the engine cannot see. The engine's clock; None: it did not happen.

    received | body | read | decode | parsed | template, tokenise | submitted | ... engine ... |
    ... tokens arrive | taken | detokenise, encode | spoken | socket | written |
    """

    received_s: float
    read_s: float
    """The whole body is there."""
    parsed_s: float
    submitted_s: float
    first_taken_s: float | None = None
    """The front took the first tokens from the engine ..."""
    first_spoken_s: float | None = None
    """... their text was made, and, where nothing is streamed, that is all ..."""
    first_written_s: float | None = None
    """... and it was handed to the socket."""
    turns: tuple[tuple[float, float, float], ...] = ()
    """The answer's last slow writes and its last one, as (taken, spoken, written); `taken` may be that of an earlier part."""


Event = Arrived | Scheduled | Delayed | Woken | Held | TokensOut | Preempted | StepDone


class Sink(Protocol):
    """Takes events; must return at once and never raise."""

    def take(self, event: Event) -> None: ...
