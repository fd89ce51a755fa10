"""The engine of this process behind the front's protocol: for tests, and for serving without a second process.

Knows: LocalClient, its loop, and the events it tells. Refuses to know: HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from tradewind.contract.events import Event, FinishReason, Preempted, Scheduled, StepDone, TokensOut
from tradewind.contract.request import Request
from tradewind.engine.client import Handle, LocalClient
from tradewind.engine.loop import EngineLoop
from tradewind.engine.stats import EngineStats

REMEMBERED = 4096
"""So many sequences' start times are kept."""


class Watch:
    """A sink that counts. Written by the engine's thread; its numbers may be read from any."""

    def __init__(self) -> None:
        self.steps = self.prompt_tokens = self.generated_tokens = self.cached_tokens = self.preemptions = 0
        self.last_step_s = time.monotonic()
        self.scheduled: OrderedDict[str, float] = OrderedDict()

    def take(self, event: Event) -> None:
        """See contract.events.Sink."""
        if isinstance(event, TokensOut):
            self.generated_tokens += len(event.tokens)
        elif isinstance(event, StepDone):
            self.steps += 1
            self.prompt_tokens += event.prompt_tokens
            self.last_step_s = time.monotonic()
        elif isinstance(event, Scheduled):
            self.cached_tokens += event.cached_tokens
            if event.request_id not in self.scheduled:
                self.scheduled[event.request_id] = event.at_s
                if len(self.scheduled) > REMEMBERED:
                    self.scheduled.popitem(last=False)
        elif isinstance(event, Preempted):
            self.preemptions += 1


class LocalEngine:
    """Implements `front.EngineClient`. The client must have been started and its loop must tell `watch`."""

    def __init__(self, client: LocalClient, loop: EngineLoop, watch: Watch) -> None:
        self._client = client
        self._loop = loop
        self._watch = watch
        self._busy_since_s = 0.0

    def submit(self, request: Request) -> Handle:
        """See EngineClient."""
        if not self._loop.busy:
            self._busy_since_s = time.monotonic()
        return self._client.submit(request)

    def cancel(self, request_id: str) -> None:
        """See EngineClient."""
        self._client.cancel(request_id)

    def finish(self, request_id: str, *, reason: FinishReason = "stop") -> None:
        """See EngineClient."""
        self._client.finish(request_id, reason=reason)

    def sleep(self) -> None:
        """See EngineClient."""
        self._client.sleep()

    async def check_adapter(self, key: str) -> None:
        """See EngineClient."""
        await asyncio.to_thread(self._loop.check_adapter, key)

    @property
    def why_dead(self) -> str | None:
        return self._loop.dead

    def stats(self) -> EngineStats:
        """See EngineClient. Numbers of one moment, give or take the step that is being absorbed."""
        scheduler, watch = self._loop.scheduler, self._watch
        running = scheduler.running
        progress_s = max(watch.last_step_s, self._busy_since_s) if self._loop.busy else time.monotonic()
        return EngineStats(
            running=running,
            waiting=max(0, scheduler.unfinished - running),
            pages_used=scheduler.cache.used(),
            pages_total=tuple(pool.total - 1 for pool in scheduler.cache.pools),
            steps=watch.steps,
            prompt_tokens=watch.prompt_tokens,
            generated_tokens=watch.generated_tokens,
            cached_tokens=watch.cached_tokens,
            preemptions=watch.preemptions,
            recomputed_tokens=scheduler.recomputed_tokens,
            last_progress_s=progress_s,
            degrade=scheduler.degraded,
            step_times=self._loop.step_times,
        )

    def scheduled_s(self, request_id: str) -> float | None:
        """See EngineClient."""
        return self._watch.scheduled.get(request_id)
