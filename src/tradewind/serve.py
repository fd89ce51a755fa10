"""`tradewind serve`: the front's process. It starts the engine's process, answers HTTP, and sees to it that both end well.

Knows: processes, signals, when to drain, when something hangs. Refuses to know: requests and answers (serving.http), how an engine works.
Imports no torch; needs the extra `server`.

      front (uvicorn, text)  <-- one socket -->  engine process

      SIGTERM, Ctrl-C     new requests get 503, open ones are finished, exit 0; a second one ends at once
      engine dies         open requests get an error, /health 503; exit 1, or with restart_engine a new engine
      engine stands still stacks and scheduler state to the log, /health 503 until it goes on
      front dies          the engine's socket ends, and so does the engine
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tradewind.config.goals import Goals
from tradewind.contract.errors import EngineDeadError, MissingExtraError, UserError
from tradewind.contract.events import FinishReason
from tradewind.contract.request import Request
from tradewind.engine.client import Handle
from tradewind.engine.columns import Report
from tradewind.engine.remote import RemoteClient
from tradewind.engine.wire import ANSWERS, Answer, Fatal, Link, Located, Ready, Start, socket_pair
from tradewind.phases import Phase, Phases

if TYPE_CHECKING:
    from tradewind.serving.http.front import EngineStats, Front
    from tradewind.serving.tokenizer import TextTokenizer
    from tradewind.simulate.script_file import ScriptFile

STACKS_SIGNAL = signal.SIGUSR1
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before the first, second, ... start of a new engine in a row; after the last one the server gives up."""
STEADY_S = 60.0
"""An engine that has lived so long is not counted as one more failure in a row."""
LAST_WORDS_S = 5.0
"""So long answers that are already ended may take to reach their readers."""
CUT_S = 1.0

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What the operator chose; see `tradewind serve --help`."""

    goals: Goals
    script: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    max_queue: int = 256
    drain_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0
    restart_engine: bool = False
    ignore_unknown_fields: bool = False
    cors_origins: tuple[str, ...] = ()
    tool_format: str | None = None
    reasoning: str | None = None
    faults: bool = False


def serve(options: ServeOptions, *, log: Log, began_s: float | None = None) -> int:
    """Serves until a signal or the engine's end; returns the exit code. `began_s`: when this process began, by `time.perf_counter`.

    Raises UserError for what the operator can put right. Changes the process's handling of SIGINT and SIGTERM.
    """
    began_s = time.perf_counter() if began_s is None else began_s
    script: ScriptFile | None = None
    text: bytes | None = None
    if options.script is not None:
        text = _read_file(options.script)
        from tradewind.simulate.script_file import read_script

        script = read_script(text, name=options.script.name)
    with bind(options.host, options.port) as listener:
        name = "" if options.script is None else options.script.name
        start = Start(goals=options.goals, script=text, script_name=name, faults=options.faults)
        engine = Supervisor(start, log=log)
        try:
            engine.spawn()
            spawned_s = engine.spawned_s
            _need_the_server()  # large imports, while the engine starts
            located = engine.await_located()
            front = make_front(options, located, script=script, client=engine)
            ready = engine.await_ready()
            for notice in ready.notices:
                log(notice)
            engine_s = [Phase(name=name, seconds=seconds) for name, seconds in ready.phases]
            phases = Phases()
            phases.done = [Phase(name="front process", seconds=spawned_s - began_s), *engine_s]

            def tell_ready() -> None:
                phases.done.append(Phase(name="http", seconds=time.perf_counter() - began_s - phases.total_s))
                log(phases.text())
                log(f"ready on {url_of(listener)}")

            server = FrontServer(front(ready), engine, options=options, log=log, on_ready=tell_ready)
            return server.run(listener)
        finally:
            engine.close()


# -- the engine's process ------------------------------------------------------------------------------------------------


class Supervisor:
    """The engine's process of the moment; implements `front.EngineClient`. After `attach` its one user is the asyncio loop's thread."""

    def __init__(self, start: Start, *, log: Log, on_reports: Callable[[list[Report]], None] | None = None) -> None:
        self._start, self._log, self._on_reports = start, log, on_reports
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link[Answer] | None = None
        self._client: RemoteClient | None = None
        self._why_dead: str | None = "the engine is starting"
        self.spawned_s = 0.0
        """When the process was started, by `time.perf_counter`."""
        self.on_death: Callable[[str], None] = lambda why: None
        """Told once for each engine that dies on its own."""
        self._closing = False

    # -- starting

    def spawn(self) -> None:
        """Starts a process and tells it what to build; does not wait."""
        import msgspec

        if self._closing:
            raise EngineDeadError("the server is shutting down")
        mine, theirs = socket_pair()
        with theirs:
            self.spawned_s = time.perf_counter()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tradewind.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._link = Link(mine, ANSWERS)
        with suppress(OSError):  # it died at once: the stream's end says so
            self._link.send(msgspec.structs.replace(self._start, began_s=self.spawned_s))

    def await_located(self) -> Located:
        """Waits until the engine knows its files and plan. Raises UserError or EngineDeadError with its reason."""
        answer = self._await()
        if not isinstance(answer, Located):
            raise EngineDeadError(f"the engine process said {type(answer).__name__} before it knew its model")
        return answer

    def await_ready(self) -> Ready:
        """Waits until the engine takes requests. Raises UserError or EngineDeadError with its reason."""
        answer = self._await()
        if not isinstance(answer, Ready):
            raise EngineDeadError(f"the engine process said {type(answer).__name__} before it was ready")
        assert self._link is not None
        self._client = RemoteClient(
            self._link, answer, on_reports=self._on_reports, on_end=self._ended, on_described=self._described
        )
        self._why_dead = None
        return answer

    def _await(self) -> Answer:
        assert self._link is not None
        answer = self._link.receive()
        if answer is None:
            raise EngineDeadError(self._how_it_ended(None))
        if isinstance(answer, Fatal):
            if answer.by_user:
                error = UserError(answer.why)
                error.exit_code = answer.exit_code
                raise error
            raise EngineDeadError(answer.why)
        return answer

    def attach(self) -> None:
        """Lets the running asyncio loop read what the engine says."""
        assert self._client is not None
        self._client.attach()

    async def restart(self) -> None:
        """A new process in the place of a dead one. Raises what `await_ready` raises."""
        await asyncio.to_thread(self._start_again)
        if self._closing:
            return
        self.attach()

    def _start_again(self) -> None:
        self._clean_up()
        self.spawn()
        self.await_located()
        self.await_ready()

    # -- front.EngineClient

    def submit(self, request: Request) -> Handle:
        """See EngineClient."""
        why = self.why_dead
        if self._client is None or why is not None:
            raise EngineDeadError(why or "the engine is starting")
        return self._client.submit(request)

    def cancel(self, request_id: str) -> None:
        """See EngineClient."""
        if self._client is not None:
            self._client.cancel(request_id)

    def finish(self, request_id: str, *, reason: FinishReason = "stop") -> None:
        """See EngineClient."""
        if self._client is not None:
            self._client.finish(request_id, reason=reason)

    @property
    def why_dead(self) -> str | None:
        return self._why_dead or (self._client.why_dead if self._client is not None else None)

    def stats(self) -> EngineStats:
        """See EngineClient."""
        from tradewind.serving.http.front import EngineStats

        if self._client is None:
            return EngineStats(last_progress_s=time.monotonic())
        known = self._client.stats()
        return EngineStats(**{name: getattr(known, name) for name in EngineStats.__struct_fields__})

    def scheduled_s(self, request_id: str) -> float | None:
        """See EngineClient."""
        return None if self._client is None else self._client.scheduled_s(request_id)

    # -- while it runs

    @property
    def open(self) -> int:
        """Requests that the engine has and has not ended."""
        return 0 if self._client is None else self._client.open

    def cancel_all(self) -> None:
        """Ends every open request with "abort"."""
        if self._client is not None:
            self._client.cancel_all()

    def dump(self) -> None:
        """Asks for Python stacks (to standard error, by the kernel's signal) and the scheduler's state (to the log)."""
        if self._process is not None and self._process.poll() is None and self._client is not None:
            self._process.send_signal(STACKS_SIGNAL)
            self._client.describe()

    def _described(self, text: str) -> None:
        self._log("state of the scheduler:\n" + text)

    def _ended(self, reason: str | None) -> str:
        if self._closing:
            return "the server is shutting down"
        why = self._how_it_ended(reason)
        self._why_dead = why
        self.on_death(why)
        return why

    def _how_it_ended(self, reason: str | None) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:  # it closed its end and lives on: nobody could speak to it any more
            self._process.kill()
            code = self._process.wait()
        if reason:
            return reason
        if code < 0:
            return f"the engine process was killed by {_signal_name(-code)}"
        return f"the engine process ended with exit code {code}"

    # -- ending

    def close(self) -> None:
        """Ends the process: open requests end with "abort". A second call does nothing."""
        self._closing = True
        self._why_dead = self._why_dead or "the server is shutting down"
        self._clean_up()

    def kill(self) -> None:
        """Ends the process at once; `close` is still to be called."""
        self._closing = True
        self._why_dead = self._why_dead or "the server is shutting down"
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _clean_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            try:
                self._process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- the front -----------------------------------------------------------------------------------------------------------


class FrontServer:
    """HTTP, and what happens to it on signals, deaths and stalls. One writer: the asyncio loop's thread."""

    def __init__(
        self, front: Front, engine: Supervisor, *, options: ServeOptions, log: Log, on_ready: Callable[[], None]
    ) -> None:
        from tradewind.serving.http.app import make_app

        self._engine, self._options, self._log, self._on_ready = engine, options, log, on_ready
        self._app = make_app(front)
        self._desk = self._app.state.desk
        self._server: Any = None
        self._signals = 0
        self._exit_code = 0
        self._draining: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._failures = 0
        self._lived_since_s = time.monotonic()

    def run(self, listener: socket.socket) -> int:
        """Serves on a bound socket until the end; returns the exit code."""
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self._main(listener))
        return self._exit_code

    async def _main(self, listener: socket.socket) -> None:
        import uvicorn

        outer = self

        class Server(uvicorn.Server):
            """uvicorn's, but signals are ours, and it says when it listens."""

            def capture_signals(self) -> Any:
                return nullcontext()

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                try:
                    await super().startup(sockets)
                except OSError as error:
                    raise _no_listener(error, outer._options.host, outer._options.port) from None
                outer._on_ready()

        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(LAST_WORDS_S),
            timeout_keep_alive=75,
        )
        loop = asyncio.get_running_loop()
        self._server = Server(config)
        self._engine.on_death = self._died
        self._engine.attach()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard, number)
        watchdog = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            if self._restarting is not None and not self._restarting.done():
                self._engine.kill()  # a start that nobody waits for any more; its thread ends with it
            for task in (watchdog, self._draining, self._restarting):
                if task is not None:
                    task.cancel()
            self._desk.shutdown()

    # -- signals

    def _heard(self, number: int) -> None:
        self._signals += 1
        name = _signal_name(number)
        if self._signals == 1:
            self._desk.closing = True
            count = self._desk.open_requests
            self._log(
                f"{name}: no new requests are taken, {count} open ones are finished within {self._options.drain_timeout_s:g} s;"
                " a second signal ends at once"
            )
            self._draining = asyncio.create_task(self._drain())
            return
        if self._signals == 2:
            self._log(f"{name} again: ending at once, {self._desk.open_requests} open requests are cut")
            self._exit_code = 128 + number
            self._engine.kill()
            self._server.force_exit = True
            self._server.should_exit = True

    async def _drain(self) -> None:
        limit_s = time.monotonic() + self._options.drain_timeout_s
        while self._desk.open_requests and time.monotonic() < limit_s:
            await asyncio.sleep(0.02)
        if self._desk.open_requests:
            self._log(f"the time to drain is over: {self._desk.open_requests} open requests are cut")
            self._exit_code = self._exit_code or 1
            self._engine.cancel_all()
            limit_s = time.monotonic() + CUT_S
            while self._desk.open_requests and time.monotonic() < limit_s:
                await asyncio.sleep(0.02)
        self._server.should_exit = True

    # -- deaths and stalls

    def _died(self, why: str) -> None:
        """The engine is gone; the client ends every open request right after this."""
        self._log(f"the engine died: {why}")
        if self._options.restart_engine and not self._desk.closing:
            self._restarting = asyncio.create_task(self._start_again())
            return
        self._exit_code = 1
        self._server.should_exit = True

    async def _start_again(self) -> None:
        if time.monotonic() - self._lived_since_s > STEADY_S:
            self._failures = 0
        while self._failures < len(RESTART_DELAYS_S):
            delay_s = RESTART_DELAYS_S[self._failures]
            self._failures += 1
            self._log(f"a new engine is started in {delay_s:g} s ({self._failures} of {len(RESTART_DELAYS_S)})")
            await asyncio.sleep(delay_s)
            began_s = time.perf_counter()
            try:
                await self._engine.restart()
            except (EngineDeadError, UserError) as error:
                self._log(f"the new engine did not start: {error}")
                continue
            self._lived_since_s = time.monotonic()
            self._log(f"the new engine serves, after {time.perf_counter() - began_s:.2f} s")
            return
        self._log("the engine was started again too often: the server gives up")
        self._exit_code = 1
        self._server.should_exit = True

    async def _watch(self) -> None:
        """Says when steps stop coming while there is work, once for each time, and when they go on."""
        limit_s = self._options.stall_timeout_s
        stalled_since_s: float | None = None
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            if self._engine.why_dead is not None:
                stalled_since_s = None
                continue
            now, progress_s = time.monotonic(), self._engine.stats().last_progress_s
            if stalled_since_s is not None and progress_s > stalled_since_s:
                self._log(f"the engine goes on, after {now - stalled_since_s:.1f} s")
                stalled_since_s = None
            elif stalled_since_s is None and now - progress_s > limit_s:
                self._log(
                    f"the engine stands still: no step has ended for {now - progress_s:.1f} s with {self._engine.open} requests open;"
                    " the stacks of its threads follow"
                )
                stalled_since_s = progress_s
                self._engine.dump()


def make_front(
    options: ServeOptions, located: Located, *, script: ScriptFile | None, client: Supervisor
) -> Callable[[Ready], Front]:
    """Reads the tokenizer and the template; what is returned makes the Front when the engine is ready."""
    from tradewind.serving.chat_template import ChatTemplate
    from tradewind.serving.http.front import Front, Options
    from tradewind.serving.intake import Intake, Limits
    from tradewind.serving.parsers.table import parser_for

    model = options.goals.model
    if script is not None:
        from tradewind.engine_process import script_tokenizer
        from tradewind.simulate.script_file import BYTES

        _, tokenizer = script_tokenizer(script, model=model)
        model = "scripted" if script.tokenizer == BYTES else script.tokenizer or model
    else:
        tokenizer = _model_tokenizer(Path(located.path))
    template: ChatTemplate | UserError
    try:
        template = ChatTemplate.for_tokenizer(tokenizer, source=script.chat_template if script is not None else None)
    except UserError as error:
        template = error
    plan = located.plan
    eos = tokenizer.eos_ids | (set(plan.card.eos_ids) if plan is not None else set())
    vocab_size = tokenizer.vocab_size if plan is None else plan.card.vocab_size
    speech = parser_for(
        "" if plan is None else plan.card.family,
        template.source if isinstance(template, ChatTemplate) else None,
        token_id=tokenizer.token_id,
        name=options.tool_format or (script.tool_format if script is not None else None),
        reasoning=options.reasoning or (script.reasoning if script is not None else None),
    )
    names = (*options.served_names, model)

    def made(ready: Ready) -> Front:
        limits = Limits(
            vocab_size=vocab_size,
            max_context=ready.schedule.max_context,
            eos_ids=tuple(sorted(token for token in eos if token < vocab_size)),
        )
        return Front(
            client=client,
            tokenizer=tokenizer,
            template=template,
            intake=Intake(limits),
            model=names[0],
            max_running=ready.schedule.max_running,
            served_names=names[1:],
            options=Options(
                api_keys=options.api_keys,
                ignore_unknown_fields=options.ignore_unknown_fields,
                max_queue=options.max_queue,
                cors_origins=options.cors_origins,
                health_timeout_s=options.stall_timeout_s,
            ),
            speech=speech,
            created_s=int(time.time()),
        )

    return made


def _model_tokenizer(path: Path) -> TextTokenizer:
    from tradewind.assemble import read_tokenizer
    from tradewind.weights.checkpoint import open_checkpoint

    return read_tokenizer(open_checkpoint(path))


# -- sockets and packages ------------------------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet, so that nobody waits on a server that loads. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"there is no address for the host {host!r}: {getattr(error, 'strerror', None) or error}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _no_listener(error, host, port) from None
    return listener


def _no_listener(error: OSError, host: str, port: int) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"port {port} of {host} is in use; stop the program that has it, or choose another with --port"
        )
    if error.errno == errno.EACCES:
        return UserError(f"port {port} of {host} is not allowed for this user; choose one above 1023 with --port")
    return UserError(f"nothing can listen on port {port} of {host}: {error.strerror or error}")


def url_of(listener: socket.socket) -> str:
    """The address as people type it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _need_the_server() -> None:
    """Imports the web packages. Raises MissingExtraError naming the first that is not there."""
    for package in ("starlette", "uvicorn"):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtraError(package=package, extra="server", purpose="serving over HTTP") from None
    import tradewind.serving.http.app  # noqa: F401


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"the file {path} cannot be read: {error.strerror}") from None


def read_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file, one a line; empty lines and lines that begin with # are skipped. Raises UserError."""
    lines = [line.strip() for line in _read_file(path).decode("utf-8", "replace").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UserError(f"the file {path} has no API key in it; put one on each line, or leave the option out")
    return keys
