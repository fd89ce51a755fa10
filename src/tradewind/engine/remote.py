"""Requests in, tokens out, with the engine in a process of its own: `LocalClient`'s twin across the border.

Knows: which handle waits for which request, and how the engine's end shows. Refuses to know: who started that process, and text.

      start()     a thread reads: handles may be read from any thread or by asyncio (as with LocalClient.start)
      attach()    the running asyncio loop reads: no thread, and one wake-up for everything that a step brought
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Thread, current_thread

import msgspec

from tradewind.cache.lease import KVCache
from tradewind.contract.errors import EngineDeadError, UserError
from tradewind.contract.events import Scheduled
from tradewind.contract.request import Request
from tradewind.engine.client import Client, Handle
from tradewind.engine.columns import Report
from tradewind.engine.limits import check_fits
from tradewind.engine.loop import Cancel
from tradewind.engine.stats import EngineStats
from tradewind.engine.wire import (
    AdapterChecked,
    Answer,
    Batch,
    BrokenLink,
    CheckAdapter,
    Describe,
    Described,
    Drain,
    Fatal,
    Fault,
    Link,
    Order,
    Ready,
    Said,
    Stop,
    reports_of,
)

REMEMBERED = 4096
"""So many sequences' start times are kept."""
CLOSE_S = 5.0
"""So long `close` waits for the engine's last words."""


class RemoteClient(Client):
    """Submits requests to the engine at the other end of a link, after that has said `Ready`."""

    def __init__(
        self,
        link: Link[Answer],
        ready: Ready,
        *,
        on_reports: Callable[[list[Report]], None] | None = None,
        on_end: Callable[[str | None], str] | None = None,
        on_described: Callable[[str], None] | None = None,
        on_state: Callable[[Described], None] | None = None,
    ) -> None:
        """The callbacks run in whatever reads the link.

        `on_reports` sees everything the engine reports (`engine.columns.spelled_out` makes events of it). `on_end` is told the engine's own
        reason, if it gave one, when the stream ends, and returns the sentence that open requests end with. `on_described` and
        `on_state`: see `describe`.
        """
        super().__init__()
        self.ready = ready
        self._link = link
        self._on_reports, self._on_end, self._on_described = on_reports, on_end, on_described
        self._on_state = on_state
        # Never asked for a page: it only knows how large the real one is.
        self._cache = KVCache(groups=ready.cache.groups, pages=ready.cache.pages, prefix_cache=ready.cache.prefix_cache)
        self._burst = ready.schedule.max_tokens_per_step * ready.schedule.steps_in_flight
        self._stats = EngineStats(
            pages_used=(0,) * len(ready.cache.pages), pages_total=tuple(n - 1 for n in ready.cache.pages)
        )
        self._heard_s = self._busy_since_s = time.monotonic()
        self._scheduled: OrderedDict[str, float] = OrderedDict()
        self._reason: str | None = None
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._backlog: deque[memoryview] = deque()
        self._gone = False
        self._closing = False
        self._checks: dict[str, list[asyncio.Future[str | None]]] = {}
        """Who waits for which adapter's `AdapterChecked`."""

    # -- what LocalClient and its loop tell too ------------------------------------------------------------------------

    @property
    def why_dead(self) -> str | None:
        """Why nothing can be served any more; None while the engine lives."""
        return self._closed

    def stats(self) -> EngineStats:
        """A snapshot as of the last turn, and requests that the engine has not spoken of counted as waiting; does not wait."""
        open_requests = len(self._handles)
        progress_s = max(self._heard_s, self._busy_since_s) if open_requests else time.monotonic()
        waiting = max(self._stats.waiting, open_requests - self._stats.running)
        return msgspec.structs.replace(self._stats, waiting=waiting, last_progress_s=progress_s)

    def scheduled_s(self, request_id: str) -> float | None:
        """When a sequence first got its slot (`time.monotonic`); None when not known or long ago."""
        return self._scheduled.get(request_id)

    def describe(self) -> None:
        """Asks for the scheduler's state; it comes as text to `on_described` and whole to `on_state`, also while a step hangs."""
        self._post(Describe())

    async def check_adapter(self, key: str) -> None:
        """Asks the engine whether its model can take an adapter. Raises UserError with its reason, EngineDeadError when it has gone. For
        asyncio alone (`attach`)."""
        if self._closed is not None or self._gone:
            raise EngineDeadError(self._closed or "the engine process ended")
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._checks.setdefault(key, []).append(answer)
        self._post(CheckAdapter(key))
        why = await answer
        if why is not None:
            raise UserError(why)

    def _checked(self, key: str, settle: Callable[[asyncio.Future[str | None]], None]) -> None:
        """One answer serves all who asked for the same."""
        for waiting in self._checks.pop(key, ()):
            if not waiting.done():
                settle(waiting)

    def cancel_all(self) -> None:
        """Ends every open request with "abort"."""
        for request_id in list(self._handles):
            self.cancel(request_id)

    def fault(self, do: str, *, seconds: float = 0.0) -> None:
        """Throws a fault switch (see `wire.Fault`), where the engine was started with faults."""
        self._post(Fault(do, seconds))

    # -- reading -----------------------------------------------------------------------------------------------------

    def start(self) -> RemoteClient:
        """Reads in a thread; `close` ends it."""
        assert self._loop is None, "an asyncio loop reads already"
        if self._thread is None:
            self._thread = Thread(target=self._run, name="tradewind-remote", daemon=True)
            self._thread.start()
        return self

    def attach(self) -> RemoteClient:
        """Reads in the running asyncio loop; from then on every call must come from its thread."""
        assert self._thread is None, "a thread reads already"
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._link.fileno(), self._read)
            self._read()  # what came with the last message before
        return self

    def _run(self) -> None:
        while not self._gone:
            try:
                message = self._link.receive()
            except (BrokenLink, OSError) as error:
                self._reason = self._reason or str(error)
                message = None
            if message is None:
                self._end()
            else:
                self._take([message])

    def _read(self) -> None:
        """What is there, in the asyncio loop."""
        if self._gone:
            return
        try:
            messages = self._link.receive_ready()
        except BrokenLink as error:
            self._reason = self._reason or str(error)
            messages = None
        if messages is None:
            self._end()
        elif messages:
            self._take(messages)

    def _take(self, messages: list[Answer]) -> None:
        reports: list[Report] = []
        for message in messages:
            if isinstance(message, Batch):
                if message.stats.steps != self._stats.steps:
                    self._heard_s = time.monotonic()
                self._stats = message.stats
                reports += reports_of(message)
            elif isinstance(message, Described):
                if self._on_described is not None:
                    self._on_described(message.text)
                if self._on_state is not None:
                    self._on_state(message)
            elif isinstance(message, AdapterChecked):
                self._checked(message.key, lambda waiting, why=message.why: waiting.set_result(why))  # type: ignore[misc]
            elif isinstance(message, Said):
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
            elif isinstance(message, Fatal):
                self._reason = message.why
                with self._lock:
                    self._closed = self._closed or message.why
        if not reports:
            return
        for report in reports:
            if isinstance(report, Scheduled) and report.request_id not in self._scheduled:
                self._scheduled[report.request_id] = report.at_s
                if len(self._scheduled) > REMEMBERED:
                    self._scheduled.popitem(last=False)
        self._deliver(reports)
        if self._on_reports is not None:
            self._on_reports(reports)

    def _end(self) -> None:
        """The stream has ended: whoever still waits is told why."""
        self._gone = True
        self._detach()
        self._backlog.clear()
        if self._closing:
            why = "the engine was closed"
        else:
            why = self._on_end(self._reason) if self._on_end is not None else self._reason or "the engine process ended"
        self._fail(why)
        for key in list(self._checks):
            self._checked(key, lambda waiting: waiting.set_exception(EngineDeadError(why)))

    def _detach(self) -> None:
        """The asyncio loop reads and writes no more; a second call does nothing, in whatever thread."""
        loop, self._loop = self._loop, None
        if loop is not None and self._link.fileno() >= 0 and not loop.is_closed():
            loop.remove_reader(self._link.fileno())
            loop.remove_writer(self._link.fileno())

    # -- writing -----------------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        if self._closed is not None:
            raise EngineDeadError(self._closed)
        self.check_fits(request)
        if not self._handles:
            self._busy_since_s = time.monotonic()

    def check_fits(self, request: Request) -> None:
        """Raises RequestError or LimitError for a request that can never run, whether the engine lives or not."""
        check_fits(request, cache=self._cache, schedule=self.ready.schedule, burst_tokens=self._burst)

    # -- to another engine (see engine.waiting)

    def give_up_queued(self) -> list[Handle]:
        """Takes out the requests that have had no slot yet: the engine is told to forget them, their handles hear nothing of that."""
        queued = [handle for name, handle in self._handles.items() if name not in self._scheduled]
        for handle in queued:
            del self._handles[handle.request.id]
            self._post(Cancel(handle.request.id))
        return queued

    def drain(self) -> None:
        """Tells the engine to end when its open requests have; nothing may be submitted after this."""
        self._post(Drain())

    def _post(self, order: Order) -> None:
        # An engine that is gone is noticed by the reader, which ends every handle; an order that comes too late says nothing new.
        if self._gone:
            return
        try:
            if self._loop is None:
                self._link.send(order)
            else:
                self._send_soon(self._link.framed(order))
        except OSError:
            pass

    def _send_soon(self, frame: bytearray) -> None:
        """Sends now what goes now; the loop sends the rest. Orders keep their order."""
        assert self._loop is not None
        if self._backlog:
            self._backlog.append(memoryview(frame))
            return
        sent = self._link.send_now(frame)
        if sent < len(frame):
            self._backlog.append(memoryview(frame)[sent:])
            self._loop.add_writer(self._link.fileno(), self._write)

    def _write(self) -> None:
        assert self._loop is not None
        try:
            while self._backlog:
                part = self._backlog[0]
                sent = self._link.send_now(part)
                if sent < len(part):
                    self._backlog[0] = part[sent:]
                    return
                self._backlog.popleft()
        except OSError:
            self._backlog.clear()
        self._loop.remove_writer(self._link.fileno())

    def close(self) -> None:
        """Ends open requests with "abort", the engine's process, and the reader; waits some seconds at most. A second call does nothing."""
        with self._lock:
            already, self._closing = self._closing, True
            self._closed = self._closed or "the engine was closed"
        if already:
            return
        self._detach()
        limit_s = time.monotonic() + CLOSE_S
        try:
            while self._backlog:  # the rest of an order that was cut
                part = self._backlog.popleft()
                while len(part):
                    part = part[self._link.send_now(part) :]
                    if time.monotonic() > limit_s:
                        raise TimeoutError
            self._post(Stop())
            if self._thread is None:
                while not self._gone:
                    message = self._link.receive(timeout_s=limit_s - time.monotonic())
                    if message is None:
                        self._end()
                    else:
                        self._take([message])
        except (BrokenLink, OSError, TimeoutError):
            pass
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join(max(0.0, limit_s - time.monotonic()))
        if not self._gone:
            self._end()
        self._link.close()
