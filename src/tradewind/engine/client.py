"""Requests in, tokens out, in this process: in the caller's thread, or with the engine in a thread of its own.

Knows: which handle waits for which request. Refuses to know: text, scheduling. Between client and loop pass only frozen orders
(`engine.loop.Order`) one way and reports (`engine.columns.Report`) the other; `engine.remote` puts a process border there.

      synchronous     for event in handle  ->  the caller's thread runs the engine until the event is there
      threaded        start() ... close()  ->  a thread runs it; handles may be read from any thread or by asyncio
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from tradewind.contract.errors import EngineDeadError, RequestError, UserError
from tradewind.contract.events import FinishReason, TokensOut
from tradewind.contract.request import Request
from tradewind.engine.columns import Report, StepTokens
from tradewind.engine.loop import Add, Cancel, EngineLoop, Finish, Forget, Order, Sleep


class Handle:
    """One request's answer as it comes. Read by one reader; written by the client."""

    def __init__(self, client: Client, request: Request, *, stream: bool) -> None:
        self.request = request
        self.stream = stream
        self.tokens: list[int] = []
        """Every token so far."""
        self.last: TokensOut | None = None
        """The event that ended it."""
        self._client = client
        self._events: deque[TokensOut] = deque()
        self._wake: Callable[[], object] | None = None
        self._async: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def done(self) -> bool:
        return self.last is not None

    def cancel(self) -> None:
        """Asks for the end; the last event follows with finish "abort" unless it ended otherwise before."""
        self._client.cancel(self.request.id)

    def finish(self, reason: FinishReason = "stop") -> None:
        """Says that the text is complete (a stop string was found)."""
        self._client.finish(self.request.id, reason=reason)

    def __iter__(self) -> Iterator[TokensOut]:
        """The events, the one with `finish` last; with stream=False only that one."""
        while self._events or not self.done:
            event = self._next()
            yield event
            if event.finish is not None:
                return

    def take(self) -> list[TokensOut]:
        """The events that are there and were not read yet; does not wait, and the last one carries `finish`."""
        taken: list[TokensOut] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def result(self) -> TokensOut:
        """Waits for the end and returns its event; all tokens are in `tokens`."""
        while self.last is None:
            event = self._next()
            if event.finish is not None:
                return event
        return self.last

    def _next(self) -> TokensOut:
        if not self._client.threaded:
            while not self._events:
                self._client.drive()
            return self._events.popleft()
        ready = threading.Event()
        self._wake = ready.set
        try:
            while not self._events:
                ready.wait()
                ready.clear()
        finally:
            self._wake = None
        return self._events.popleft()

    async def __aiter__(self) -> AsyncIterator[TokensOut]:
        """The same for asyncio; the client must have been started."""
        if not self._client.threaded:
            raise RuntimeError("asyncio needs the engine in its own thread: call start() on the client first")
        ready = asyncio.Event()
        self._async = (asyncio.get_running_loop(), ready)
        try:
            while self._events or not self.done:
                while not self._events:
                    await ready.wait()
                    ready.clear()
                event = self._events.popleft()
                yield event
                if event.finish is not None:
                    return
        finally:
            self._async = None


class Client:
    """What every client is: handles by request id, and the delivery of reports to them. The engine is behind the subclass."""

    def __init__(self) -> None:
        self._handles: dict[str, Handle] = {}
        self._lock = threading.Lock()
        self._closed: str | None = None
        """Why no request is taken any more."""

    @property
    def threaded(self) -> bool:
        """Whether somebody else runs the engine; otherwise whoever reads a handle does."""
        return True

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._handles)

    def submit(self, request: Request, *, stream: bool = True) -> Handle:
        """Queues a request. Raises RequestError or LimitError when it can never run, EngineDeadError when nothing can.

        With stream=False only the last event is kept; `Handle.tokens` has the whole answer either way.
        """
        handle = Handle(self, request, stream=stream)
        self._check(request)
        with self._lock:
            if self._closed is not None:
                raise EngineDeadError(self._closed)
            if request.id in self._handles:
                raise RequestError(f"a request with the id '{request.id}' is already there: ids must differ")
            self._handles[request.id] = handle
            self._post(Add(request))
        return handle

    def adopt(self, handles: Iterable[Handle]) -> None:
        """Goes on with requests of another client that has given them up, under their handles: readers notice nothing.

        One that can not run here ends with an error.
        """
        for handle in handles:
            request = handle.request
            try:
                self._check(request)
            except (EngineDeadError, UserError) as error:
                why: str | None = str(error)
            else:
                why = self._closed
            with self._lock:
                handle._client = self
                self._handles[request.id] = handle
                if why is None:
                    self._post(Add(request))
                    continue
            self._deliver([_failed(handle, why)])

    def cancel(self, request_id: str) -> None:
        """Ends a request with "abort"; does nothing when it is over."""
        self._post(Cancel(request_id))

    def finish(self, request_id: str, *, reason: FinishReason = "stop") -> None:
        """Ends a request because its text is complete; does nothing when it is over."""
        self._post(Finish(request_id, reason))

    def forget(self) -> None:
        """Empties the prefix cache of what no running request uses."""
        self._post(Forget())

    def sleep(self) -> None:
        """As soon as nothing runs, empties the prefix cache and gives its memory back; the next request wakes the engine."""
        self._post(Sleep())

    def run(self, requests: Iterable[Request]) -> list[Handle]:
        """Submits all and waits until all have ended; the handles in the same order."""
        handles = [self.submit(request, stream=False) for request in requests]
        for handle in handles:
            handle.result()
        return handles

    def drive(self) -> bool:
        """Runs one turn of the engine in the caller's thread; whether there is more to do."""
        raise RuntimeError("the engine is run elsewhere")

    def close(self) -> None:
        """Ends open requests with "abort", and the engine. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for the subclass --------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """Raises what a request that can never run deserves."""
        raise NotImplementedError

    def _post(self, order: Order) -> None:
        """Gives an order to the engine; does not wait for it."""
        raise NotImplementedError

    def _fail(self, why: str) -> None:
        """Ends handles whose last event will never come; nothing is taken from here on."""
        with self._lock:
            self._closed = self._closed or why
            ended: list[Report] = [_failed(handle, why) for handle in self._handles.values()]
        self._deliver(ended)

    def _deliver(self, reports: list[Report]) -> None:
        waking: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        handles = self._handles
        for report in reports:
            if isinstance(report, StepTokens):
                for event in report.each():
                    handle = handles.get(event.request_id)
                    if handle is not None:
                        handle.tokens += event.tokens
                        if handle.stream:
                            self._push(handle, event, waking)
            elif isinstance(report, TokensOut):
                handle = handles.get(report.request_id)
                if handle is None:
                    continue
                handle.tokens.extend(report.tokens)
                if report.finish is not None:  # first, so that whoever reads the end may use the id again
                    del handles[report.request_id]
                if handle.stream or report.finish is not None:
                    self._push(handle, report, waking)
                if report.finish is not None:  # last, so that whoever sees `done` finds the event
                    handle.last = report
        here = asyncio._get_running_loop() if waking else None
        for loop, events in waking.items():
            try:
                if loop is here:
                    _set_all(events)
                else:
                    loop.call_soon_threadsafe(_set_all, events)
            except RuntimeError:  # that asyncio loop was closed: its readers are gone
                continue

    @staticmethod
    def _push(handle: Handle, event: TokensOut, waking: dict[asyncio.AbstractEventLoop, list[asyncio.Event]]) -> None:
        handle._events.append(event)
        wake, waiter = handle._wake, handle._async
        if wake is not None:
            wake()
        if waiter is not None:
            waking.setdefault(waiter[0], []).append(waiter[1])


class LocalClient(Client):
    """Submits requests to an engine in this process; a context manager that leaves no thread behind."""

    def __init__(self, loop: EngineLoop) -> None:
        super().__init__()
        self._loop = loop
        self._work = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None

    @property
    def threaded(self) -> bool:
        return self._thread is not None

    @property
    def loop(self) -> EngineLoop:
        """The engine itself, for what only watches it."""
        return self._loop

    def forget(self) -> None:
        """Empties the prefix cache of what no running request uses."""
        super().forget()
        if not self.threaded:
            self.drive()

    def sleep(self) -> None:
        """As soon as nothing runs, empties the prefix cache and gives its memory back; the next request wakes the engine."""
        super().sleep()
        if not self.threaded:
            self.drive()

    def _check(self, request: Request) -> None:
        self._loop.check(request)

    def _post(self, order: Order) -> None:
        self._loop.post(order)
        self._work.set()

    # -- driving -----------------------------------------------------------------------------------------------------

    def drive(self) -> bool:
        """Runs one turn in the caller's thread; whether there is more to do. Not while the engine has its own thread.

        Ctrl-C is raised after the turn, so that the engine can be used again; a second Ctrl-C is raised at once.
        """
        assert self._thread is None, "the engine runs in its own thread"
        if not self._loop.busy:
            if self._handles:
                raise EngineDeadError(self._loop.dead or "the engine has nothing to do, but requests are open")
            return False
        with _uninterrupted():
            self._turn()
        return self._loop.busy

    def _turn(self) -> None:
        try:
            self._deliver(self._loop.run_once())
        except Exception:
            self._fail(self._loop.dead or "the engine stopped")
            raise

    def start(self) -> LocalClient:
        """Gives the engine a thread of its own; `close` ends it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tradewind-engine", daemon=True)
            self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop:
            self._work.clear()
            if self._loop.busy:
                try:
                    self._deliver(self._loop.run_once())
                except Exception:  # run_once recorded why in loop.dead; every reader is told with that text
                    self._fail(self._loop.dead or "the engine stopped")
                    return
            else:
                self._work.wait()
        self._deliver(self._loop.close())

    def close(self) -> None:
        """Ends open requests with "abort", the thread, and the executor. A second call does nothing."""
        with self._lock:
            already, self._stop = self._stop, True
            self._closed = self._closed or "the engine was closed"
        if already:
            return
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._deliver(self._loop.close())
        if self._handles:
            self._fail(self._loop.dead or "the engine stopped")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds back the first Ctrl-C until the block is done: half a turn would leave the scheduler's books wrong."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def _failed(handle: Handle, why: str) -> TokensOut:
    """The last event of a request that the engine will never end."""
    return TokensOut(
        request_id=handle.request.id,
        at_s=time.monotonic(),
        tokens=(),
        finish="error",
        error=why,
        prompt_tokens=len(handle.request.tokens),
        generated_tokens=len(handle.tokens),
    )


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
