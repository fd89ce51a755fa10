"""Reports of an engine as its listeners get them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tradewind.contract.events import Arrived, Scheduled, StepDone, TokensOut
from tradewind.engine.columns import StepTokens


@dataclass(frozen=True)
class Facts:
    running: int = 0
    waiting: int = 0
    pages_used: tuple[int, ...] = (0,)
    pages_total: tuple[int, ...] = (100,)
    degrade: Any = None
    step_times: Any = None


@dataclass(frozen=True)
class Receipt:
    id: str = "chatcmpl-1"
    request_id: str = "req-1"
    endpoint: str = "/v1/chat/completions"
    tenant: str = ""
    stream: bool = True
    samples: int = 1
    prompt_tokens: int = 10
    cached_tokens: int = 0
    completion_tokens: int = 3
    arrived_s: float = 1.0
    scheduled_s: float | None = 1.1
    first_token_s: float | None = 1.2
    finished_s: float = 2.0
    finish: str = "stop"
    error: str | None = None
    traceparent: str = ""
    sequences: tuple[str, ...] = ()
    times: Any = None


def arrived(id: str, at_s: float, *, prompt: int = 10, tenant: str = "") -> Arrived:
    return Arrived(request_id=id, at_s=at_s, prompt_tokens=prompt, tenant=tenant)


def scheduled(id: str, at_s: float, *, cached: int = 0, resumed: bool = False) -> Scheduled:
    return Scheduled(request_id=id, at_s=at_s, step=1, cached_tokens=cached, waited_s=0.0, resumed=resumed)


def columns(ids: Sequence[str], at_s: float) -> StepTokens:
    blank = np.zeros(len(ids), np.int32)
    return StepTokens(at_s=at_s, ids=list(ids), tokens=blank, generated=blank, cached=blank, prompt=blank)


def tokens(
    id: str, at_s: float, count: int = 1, *, finish: Any = None, generated: int = 0, error: str | None = None
) -> TokensOut:
    return TokensOut(
        request_id=id,
        at_s=at_s,
        tokens=(7,) * count,
        finish=finish,
        generated_tokens=generated,
        prompt_tokens=10,
        error=error,
    )


def step(at_s: float, *, number: int = 1, rows: int = 1, prompt: int = 0, used: int = 0, running: int = 1) -> StepDone:
    return StepDone(
        number=number, at_s=at_s, rows=rows, tokens=rows + prompt, prompt_tokens=prompt, decide_s=0.001, absorb_s=0.001,
        device_s=0.02, running=running, waiting=0, pages_used=(used,), pages_total=(100,),
    )  # fmt: skip


def one_request() -> list[Any]:
    """Waits 0.5 s, first token after 0.2 s more, two more tokens 0.1 s apart, the last with the end."""
    return [
        arrived("a", 10.0, prompt=100),
        scheduled("a", 10.5, cached=64),
        columns(["a"], 10.7),
        step(10.7, prompt=36),
        columns(["a"], 10.8),
        step(10.8),
        tokens("a", 10.9, finish="stop", generated=3),
        step(10.9),
    ]
