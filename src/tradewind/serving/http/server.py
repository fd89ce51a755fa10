"""The HTTP server's life: it listens, drains on a signal, says when the engine stands still, and ends when nothing can be served.

Knows: uvicorn, signals, time limits. Refuses to know: requests and answers (app), how the engine's process is started (supervisor).

      SIGTERM, Ctrl-C     new requests get 503, open ones are finished, exit 0; a second one ends at once
      engine dies         open requests get an error, /health 503; exit 1, or with restart_engine (or a plan on trial) a new engine
      engine stands still stacks and scheduler state to the log, /health 503 until it goes on
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import uvicorn

from tradewind.config.goals import Goals
from tradewind.contract.errors import EngineDeadError, UserError
from tradewind.engine.wire import Located, Ready
from tradewind.serving.http.app import make_app
from tradewind.serving.http.front import Front
from tradewind.serving.replan import Changed, change_plan
from tradewind.serving.supervisor import Supervisor, signal_name

LOG = logging.getLogger("tradewind.server")

RESTART_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before the first, second, ... start of a new engine in a row; after the last one the server gives up."""
STEADY_S = 60.0
"""An engine that has lived so long is not counted as one more failure in a row."""
LAST_WORDS_S = 5
"""So long answers that are already ended may take to reach their readers."""
CUT_S = 1.0
DIAGNOSE_S = 5.0
"""After so long without a step the engine is asked what it does, however patient the operator is."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What the operator chose about ends."""

    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0
    restart_engine: bool = False
    restart_delays_s: tuple[float, ...] = RESTART_DELAYS_S


class FrontServer:
    """HTTP, and what happens to it on signals, deaths and stalls. One writer: the asyncio loop's thread."""

    def __init__(
        self,
        front: Front,
        engine: Supervisor,
        *,
        ready: Ready,
        patience: Patience,
        on_ready: Callable[[], None],
        on_death: Callable[[str], None],
        on_planned: Callable[[Located, Ready], None] = lambda located, ready: None,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`on_ready` is called when connections are accepted, `on_death` for each engine that dies on its own, `on_planned` for each engine
        after the first. `beside` is run in the same loop until the end."""
        self._engine, self._ready, self._patience = engine, ready, patience
        self._on_ready, self._on_death, self._on_planned = on_ready, on_death, on_planned
        self._beside = beside
        self._app = make_app(front)
        self._desk = self._app.state.desk
        self._server: _Server | None = None
        self._signals = 0
        self._exit_code = 0
        self._draining: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._failures = 0
        self._lived_since_s = time.monotonic()

    @property
    def refused(self) -> int:
        """Requests that were answered 429."""
        return int(self._desk.refused)

    def run(self, listener: socket.socket) -> int:
        """Serves on a bound socket until the end; returns the exit code. Raises OSError when it cannot listen there."""
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._main(listener))
        return self._exit_code

    async def _main(self, listener: socket.socket) -> None:
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS_S,
            timeout_keep_alive=75,
            http=_protocol(),
        )
        loop = asyncio.get_running_loop()
        self._server = _Server(config, on_ready=self._on_ready)
        self._engine.on_death = self._died
        self._engine.on_planned = self._planned
        self._engine.attach(self._ready)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard, number)
        watchdog = asyncio.create_task(self._watch())
        beside = None if self._beside is None else asyncio.create_task(self._beside())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            if self._engine.held or (self._restarting is not None and not self._restarting.done()):
                self._engine.kill()  # a start that nobody waits for any more; its thread ends with it
            for task in (watchdog, beside, self._draining, self._restarting):
                if task is not None:
                    task.cancel()
            self._desk.shutdown()

    # -- signals

    def _heard(self, number: int) -> None:
        self._signals += 1
        name = signal_name(number)
        if self._signals == 1:
            self._desk.closing = True
            count = self._desk.open_requests
            LOG.info(
                f"{name}: no new requests are taken, {count} open ones are finished within {self._patience.drain_timeout_s:g} s;"
                " a second signal ends at once"
            )
            self._draining = asyncio.create_task(self._drain())
            return
        if self._signals == 2:
            LOG.warning(f"{name} again: ending at once, {self._desk.open_requests} open requests are cut")
            self._exit_code = 128 + number
            self._engine.kill()
            self._leave(at_once=True)

    async def _drain(self) -> None:
        limit_s = time.monotonic() + self._patience.drain_timeout_s
        while self._desk.open_requests and time.monotonic() < limit_s:
            await asyncio.sleep(0.02)
        if self._desk.open_requests:
            LOG.warning(f"the time to drain is over: {self._desk.open_requests} open requests are cut")
            self._exit_code = self._exit_code or 1
            self._engine.cancel_all()
            limit_s = time.monotonic() + CUT_S
            while self._desk.open_requests and time.monotonic() < limit_s:
                await asyncio.sleep(0.02)
        self._leave()

    # -- deaths and stalls

    def _died(self, why: str) -> None:
        """The engine is gone; the client ends every open request right after this."""
        if self._engine.held:
            LOG.warning(f"the engine died while its plan was being changed, the next one comes: {why}")
            self._on_death(why)
            return
        on_trial = self._engine.fallback is not None
        restart = (self._patience.restart_engine or on_trial) and not self._desk.closing
        LOG.log(logging.WARNING if restart else logging.ERROR, f"the engine died: {why}")
        self._on_death(why)
        if restart:
            self._restarting = asyncio.create_task(self._start_again())
            return
        self._exit_code = 1
        self._leave()

    async def _start_again(self) -> None:
        if time.monotonic() - self._lived_since_s > STEADY_S:
            self._failures = 0
        while self._failures < len(self._patience.restart_delays_s):
            delay_s = self._patience.restart_delays_s[self._failures]
            self._failures += 1
            LOG.info(
                f"a new engine is started in {delay_s:g} s ({self._failures} of {len(self._patience.restart_delays_s)})"
            )
            await asyncio.sleep(delay_s)
            began_s = time.perf_counter()
            try:
                await self._engine.restart()
            except (EngineDeadError, UserError) as error:
                LOG.warning(f"the new engine did not start: {error}")
                continue
            self._lived_since_s = time.monotonic()
            LOG.info(f"the new engine serves, after {time.perf_counter() - began_s:.2f} s")
            return
        LOG.error("the engine was started again too often: the server gives up")
        self._exit_code = 1
        self._leave()

    # -- another plan

    def _planned(self, located: Located, ready: Ready) -> None:
        self._desk.max_running = ready.schedule.max_running
        self._on_planned(located, ready)

    async def change_plan(self, goals: Goals, *, trial: bool) -> Changed:
        """Puts another plan into service, see `replan.change_plan`; put off while the server drains or an engine is being started."""
        restarting = self._restarting is not None and not self._restarting.done()
        if self._desk.closing or self._desk.asleep or restarting or self._engine.why_dead is not None:
            return Changed(outcome="put off", why="the server has no engine that serves at this moment")
        changed = await change_plan(self._engine, goals, drain_s=self._patience.drain_timeout_s, trial=trial)
        self._lived_since_s = time.monotonic()
        if changed.outcome == "dead":
            self._died(changed.why)
        return changed

    def keep_plan(self) -> None:
        """The plan in force is no longer on trial: when its engine dies, that is nobody's fault but the engine's."""
        self._engine.fallback = None

    async def _watch(self) -> None:
        """Says when steps stop coming while there is work, once for each time, and when they go on."""
        limit_s = self._patience.stall_timeout_s
        stalled_since_s: float | None = None
        looked = False
        look_s = min(DIAGNOSE_S, limit_s)
        interval_s = min(1.0, limit_s / 4)
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            if self._engine.why_dead is not None:
                stalled_since_s = None
                continue
            if now - slept_s > interval_s + limit_s / 2:
                continue  # this process stood still itself: what the engine has said since is not read yet
            progress_s = self._engine.stats().last_progress_s
            if now - progress_s > look_s and (not looked or self._engine.looking):
                looked = True
                self._engine.look(now - progress_s)
            elif looked and now - progress_s <= look_s:
                looked = False
                self._engine.goes_on()
            if stalled_since_s is not None and progress_s > stalled_since_s:
                LOG.info(f"the engine goes on, after {now - stalled_since_s:.1f} s")
                stalled_since_s = None
            elif stalled_since_s is None and now - progress_s > limit_s:
                LOG.warning(
                    f"the engine stands still: no step has ended for {now - progress_s:.1f} s with {self._engine.open} requests open;"
                    " the stacks of its threads follow"
                )
                stalled_since_s = progress_s
                self._engine.dump()

    def _leave(self, *, at_once: bool = False) -> None:
        """Ends uvicorn's loop, which waits for the last bytes of answers unless it is told not to."""
        assert self._server is not None
        self._server.force_exit = self._server.force_exit or at_once
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's, but signals are not its matter, and it says when it listens."""

    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def _protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """uvicorn's way to read HTTP: with httptools, bounded; h11 has bounds of its own."""
    try:
        from tradewind.serving.http.bounded import BoundedProtocol
    except ImportError:
        return "h11"
    return BoundedProtocol


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
