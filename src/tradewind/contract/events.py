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


class Scheduled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request got its slot (again after a preemption). `cached_tokens` were found in the prefix cache."""

    request_id: str
    at_s: float
    step: int
    cached_tokens: int
    waited_s: float
    resumed: bool = False


class Delayed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The head of the queue could not start, and why; told once per reason and request, not every step."""

    request_id: str
    at_s: float
    reason: str
    blocked_by: str = ""


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


Event = Arrived | Scheduled | Delayed | TokensOut | Preempted | StepDone


class Sink(Protocol):
    """Takes events; must return at once and never raise."""

    def take(self, event: Event) -> None: ...
