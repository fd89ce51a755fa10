"""What is open in this front: who may enter, which request is whose, how long answers took lately.

Knows: counts and names. One writer: the event loop's thread. Refuses to know: JSON, text, the engine's inside.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tradewind.serving.http.errors import ApiError
from tradewind.serving.http.front import EngineHandle, Front

T = TypeVar("T")

SMOOTHING = 0.1


class OpenRequest:
    """One HTTP request whose sequences are in the engine."""

    def __init__(self, *, id: str, request_id: str, tenant: str) -> None:
        self.id, self.request_id, self.tenant = id, request_id, tenant
        self.handles: list[EngineHandle] = []
        self.left = False
        """The client closed its connection."""

    def cancel(self) -> None:
        """Asks the engine to end every sequence."""
        for handle in self.handles:
            handle.cancel()


class Desk:
    """Counts, names and the thread pool of one application."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._open: dict[str, OpenRequest] = {}
        self._pool: ThreadPoolExecutor | None = None
        self.sequences = 0
        """Sequences of this front that have not ended."""
        self.open_requests = 0
        """HTTP requests whose answers are not written yet."""
        self.max_running = front.max_running
        """Sequences that run at once; another plan may have others."""
        self.refused = 0
        """Requests that were answered 429."""
        self.closing = False
        """The server drains: nothing new is taken."""
        self.asleep = False
        """Nothing new is taken until somebody wakes the server."""
        self._answer_s = 1.0

    # -- admission

    @contextmanager
    def place(self, sequences: int) -> Iterator[None]:
        """Counts a request in, from before its prompts are tokenised until its answer is written. Raises what `check` raises."""
        self.check(sequences)
        self.open_requests += 1
        self.sequences += sequences
        try:
            yield
        finally:
            self.open_requests -= 1
            self.sequences -= sequences

    def check(self, sequences: int) -> None:
        """Raises ApiError 429, with Retry-After, when more would wait than may, and 503 when nothing can be served."""
        self._check_serving()
        if self.asleep:
            raise ApiError(503, "the server is asleep and takes no requests; wake it with POST /wake_up", code="asleep")
        # Our own count is exact at once, which what the engine tells is not; a request with more samples than fit may come alone.
        front = self._front
        limit = front.options.max_queue
        if self.sequences and self.sequences + sequences > self.max_running + limit:
            self.refused += 1
            raise ApiError(
                429,
                f"the server is full: {self.max_running} sequences run at once and at most {limit} may wait; try again later",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after_s())},
            )

    def _check_serving(self) -> None:
        dead = self._front.client.why_dead
        if dead is not None:
            raise ApiError(503, f"the engine does not work any more: {dead}", code="engine_dead")
        if self.closing:
            raise ApiError(
                503,
                "the server is shutting down and takes no new requests",
                code="shutting_down",
                headers={"Retry-After": "5"},
            )

    def retry_after_s(self) -> int:
        """About when a place in the queue is free, in whole seconds from 1 to 60."""
        turns = max(1.0, self.sequences / max(1, self.max_running))
        return max(1, min(60, math.ceil(self._answer_s * turns / 2)))

    def took(self, seconds: float) -> None:
        """Remembers how long an answer took."""
        self._answer_s += SMOOTHING * (seconds - self._answer_s)

    async def sleep(self) -> None:
        """Takes nothing new, waits until what is open has ended, and lets the engine sleep. A second call finds it done.

        Raises ApiError when the engine is dead, the server drains, or somebody woke it meanwhile.
        """
        self._check_serving()
        self.asleep = True
        while self.open_requests:
            await asyncio.sleep(0.01)
            if not self.asleep:
                raise ApiError(409, "the server was woken before the open requests had ended", code="woken")
        self._front.client.sleep()

    # -- who is open

    def open(self, request: OpenRequest) -> None:
        """Registers a request under its answer's id."""
        self._open[request.id] = request

    def close(self, request: OpenRequest) -> None:
        """Forgets it."""
        self._open.pop(request.id, None)

    def abort(self, name: str, *, tenant: str) -> int:
        """Cancels the tenant's requests with this answer id or X-Request-Id; how many there were."""
        found = [r for r in self._open.values() if r.tenant == tenant and name in (r.id, r.request_id)]
        for request in found:
            request.cancel()
        return len(found)

    # -- threads

    async def off_loop(self, work: Callable[[], T], *, characters: int) -> T:
        """Does the work here when it is small, otherwise in a thread, so that running streams are not held up."""
        if characters <= self._front.options.inline_characters:
            return work()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._front.options.tokenizer_threads, thread_name_prefix="tradewind-text")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def shutdown(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
