"""Helpers of the host tests: small plans, requests, engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.contract.kv import KVGroup
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.client import LocalClient
from tradewind.engine.loop import EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.simulate.clock import Clock, VirtualClock
from tradewind.simulate.scripted import ScriptedExecutor


class Chunk(int):
    """As a window: one that restarts at multiples of its size."""


def group(index: int = 0, *, window: int | None = None, page_tokens: int = 4) -> KVGroup:
    return KVGroup(
        index=index,
        kind="full" if window is None else "chunk" if isinstance(window, Chunk) else "window",
        layers=(index,),
        kv_heads=1,
        head_dim=8,
        page_tokens=page_tokens,
        format="f32",
        window=window,
    )


def cache_plan(
    *,
    pages: Sequence[int] = (65,),
    windows: Sequence[int | None] = (None,),
    page_tokens: int = 4,
    prefix_cache: bool = True,
) -> CachePlan:
    groups = tuple(group(i, window=w, page_tokens=page_tokens) for i, w in enumerate(windows))
    return CachePlan(groups=groups, pages=tuple(pages), page_tokens=page_tokens, prefix_cache=prefix_cache)


def schedule_plan(
    *,
    max_running: int = 8,
    max_tokens_per_step: int = 64,
    max_context: int = 1024,
    policy: Literal["arrival", "fair", "priority"] = "arrival",
    steps_in_flight: int = 2,
    age_limit_s: float = 5.0,
    max_preemptions: int = 3,
) -> SchedulePlan:
    return SchedulePlan(
        max_running=max_running,
        max_tokens_per_step=max_tokens_per_step,
        max_context=max_context,
        policy=policy,
        steps_in_flight=steps_in_flight,
        age_limit_s=age_limit_s,
        max_preemptions=max_preemptions,
    )


def request(name: str, tokens: Sequence[int], *, max_tokens: int = 8, **more: Any) -> Request:
    sampling = more.pop("sampling", None) or SamplingParams(temperature=0.0)
    return Request(id=name, tokens=tuple(tokens), sampling=sampling, max_tokens=max_tokens, **more)


class Engine:
    """A scheduler, a scripted device and a virtual clock, put together."""

    def __init__(
        self,
        *,
        cache: CachePlan | None = None,
        schedule: SchedulePlan | None = None,
        drafts: int = 0,
        clock: Clock | None = None,
        **device: Any,
    ) -> None:
        self.cache = cache or cache_plan()
        self.schedule = schedule or schedule_plan()
        self.clock: Any = clock or VirtualClock()
        self.scheduler = Scheduler(
            schedule=self.schedule, cache=self.cache, clock=self.clock.now, drafts_per_row=drafts
        )
        self.device = ScriptedExecutor(
            groups=self.cache.groups,
            pages=self.cache.pages,
            max_running=self.schedule.max_running,
            clock=self.clock,
            **{"delay_s": 0.01, **device},
        )
        self.events: list[Any] = []
        self.loop = EngineLoop(scheduler=self.scheduler, executor=self.device, clock=self.clock.now, sinks=(self,))
        self.client = LocalClient(self.loop)

    def take(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type, request_id: str | None = None) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and (request_id is None or e.request_id == request_id)]
