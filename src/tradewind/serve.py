"""`tradewind serve`: the front's process. It starts the engine's process, reads the text tools meanwhile, and serves.

Knows: the order of a start and what each part is given. Refuses to know: requests and answers (serving.http), how an engine works.
Imports no torch; needs the extra `server`. Everything large is imported after the engine's process has been started, beside it.

      front (uvicorn, text)  <-- one socket -->  engine process         (engine.wire says what crosses)

      front      | arguments, launch | imports, tokenizer, template ...... | listen
      engine                         | imports, plan, weights, pages ... |
"""

from __future__ import annotations

import errno
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tradewind import __version__
from tradewind.contract.errors import MissingExtraError, UserError
from tradewind.phases import Phase, Phases

if TYPE_CHECKING:
    from tradewind.config.goals import Goals
    from tradewind.config.plan import Plan
    from tradewind.engine.columns import Report
    from tradewind.engine.wire import Located, Ready, Start
    from tradewind.observability.hub import Hub
    from tradewind.observability.journal import JournalWriter
    from tradewind.serve_drift import DriftWatch, OnDrift
    from tradewind.serving.adapters import AdapterBook
    from tradewind.serving.http.front import Front
    from tradewind.serving.supervisor import Launched, Supervisor
    from tradewind.serving.tokenizer import TextTokenizer
    from tradewind.simulate.script_file import ScriptFile


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+|null")


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
    allow_sleep: bool = False
    """Obey POST /sleep."""
    allow_image_links: bool = False
    """Fetch images that are sent as links."""
    ignore_unknown_fields: bool = False
    cors_origins: tuple[str, ...] = ()
    chat_template: Path | None = None
    """A Jinja file instead of the model's own template."""
    tool_format: str | None = None
    reasoning: str | None = None
    log_level: str = "info"
    log_json: bool | None = None
    """One JSON object a line instead of text; None: unless a person looks, on a terminal."""
    log_requests: bool = False
    """A line for each finished request."""
    otlp_endpoint: str | None = None
    """Where spans are sent; None: nowhere."""
    record: Path | None = None
    """A folder for a journal of the traffic."""
    record_raw: bool = False
    """With the tokens of prompts and answers in it."""
    faults: bool = False
    step_times: Path | None = None
    """A file that fitted step times are read from and kept in."""
    on_drift: OnDrift = "tell"
    """What is done when traffic leaves what the plan was made for."""
    usual_traffic: str | None = None
    """What that is: a trace, or so many of the first requests."""
    adapters: tuple[tuple[str, Path], ...] = ()
    """Name and folder of the low-rank adapters to begin with."""
    adapter_slots: int | None = None
    """How many adapters may run at once; None: all that are given."""
    adapter_rank: int | None = None
    """The largest rank of one; None: that of those given."""
    adapter_folder: Path | None = None
    """Adapters in it may be loaded and unloaded at run time, by whoever may ask anything."""


def serve(options: ServeOptions, *, began_s: float | None = None) -> int:
    """Serves until a signal or the engine's end; returns the exit code. `began_s`: when this process began, by `time.perf_counter`.

    Raises UserError for what the operator can put right. Logs to standard error. Changes the process's handling of SIGINT and SIGTERM.
    """
    began_s = time.perf_counter() if began_s is None else began_s
    _check(options)
    _need_the_server()
    text = None if options.script is None else _read_file(options.script)
    goals, book = with_adapters(options)
    with bind(options.host, options.port) as listener:
        process, end, launched_s = _launch()
        try:
            from tradewind.engine.wire import Start
            from tradewind.serving.supervisor import Launched, Supervisor

            name = "" if options.script is None else options.script.name
            start = Start(
                goals=goals,
                script=text,
                script_name=name,
                faults=options.faults,
                step_times="" if options.step_times is None else str(options.step_times.absolute()),
                adapters={} if book is None else book.keys,
            )
            engine = Supervisor(start, launch=launch)
            launched = Launched(process=process, end=end, at_s=launched_s)
        except BaseException:
            end.close()
            process.kill()
            process.wait()
            raise
        try:
            engine.spawn(launched)
            return _serve_beside(
                engine, listener, options, start=start, phases=_Start(began_s, launched_s), adapters=book
            )
        finally:
            engine.close()


def with_adapters(options: ServeOptions) -> tuple[Goals, AdapterBook | None]:
    """The goals with room for adapters, and those to begin with, whose files are read once; None: there is no room for any. Raises
    UserError."""
    asked = options.adapters or options.adapter_folder or options.adapter_slots or options.adapter_rank
    if not asked and options.goals.adapters is None:
        return options.goals, None
    if options.script is not None:
        raise UserError("a script's answers know no adapters; leave --script out, or what is said of adapters")
    from msgspec import structs

    from tradewind.config.adapter_files import look_at
    from tradewind.serving.adapters import AdapterBook, room_for

    names = [name for name, _ in options.adapters]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two adapters are called {name!r}; each --adapter NAME=DIR needs a name of its own")
    folder = options.adapter_folder
    if folder is not None and not folder.is_dir():
        raise UserError(f"--adapter-folder {folder} is no folder")
    files = {name: look_at(folder) for name, folder in options.adapters}
    room = room_for(
        files.values(),
        slots=options.adapter_slots,
        rank=options.adapter_rank,
        more=folder is not None,
        stated=options.goals.adapters,
    )
    assert room is not None
    book = AdapterBook(largest_rank=room.rank, taken=(*options.served_names, name_of(options.goals.model)))
    for name, found in files.items():
        book.take(name, found)
    return structs.replace(options.goals, adapters=room), book


def _check(options: ServeOptions) -> None:
    """Raises UserError for what could be meant but could not work, or would be less safe than it looks."""
    for key in options.api_keys:
        # An empty one is an unset variable in somebody's start script: it must not leave the server open.
        if not key:
            raise UserError(
                "an API key is empty; give one with --api-key KEY, or leave the option out to let anybody ask"
            )
        if not all("!" <= letter <= "~" for letter in key):
            raise UserError("an API key has a character that no header can carry; use printable ASCII without spaces")
    if options.step_times is not None and (options.script is not None or options.goals.means.fit_steps is False):
        other = "--script" if options.script is not None else "--no-fit-steps"
        raise UserError(f"--step-times keeps what steps of a model take, and {other} fits none; leave one of them out")
    for name in options.served_names:
        if not name.strip():
            raise UserError(
                "--served-name is empty; give the name that clients send as 'model', or leave the option out"
            )
    for origin in options.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise UserError(
                f"--cors-origin is {origin!r}; an origin is a scheme, a host and a port where it has one,"
                " such as https://example.org or http://localhost:3000, or * for every one"
            )
    if options.on_drift == "off" and options.usual_traffic is not None:
        raise UserError("--usual-traffic says what drift is measured by, but --on-drift is off; leave one of them out")
    if options.on_drift in ("apply", "propose") and options.script is not None:
        raise UserError(
            f"--on-drift {options.on_drift} needs a plan to change, and a script has none; use tell, or off"
        )
    if options.usual_traffic is not None:
        from tradewind.serve_drift import read_usual

        read_usual(options.usual_traffic)  # what is wrong with it is to be said before anything is started


class _Start:
    """Where the time of the start went: phases without a gap from the front's beginning to the first connection."""

    def __init__(self, began_s: float, launched_s: float) -> None:
        self._began_s = began_s
        self.phases = Phases()
        self.phases.done = [Phase(name="front process", seconds=launched_s - began_s)]

    def add(self, spans: Iterable[tuple[str, float]]) -> None:
        """The engine's, which begin where the front launched it."""
        self.phases.done += [Phase(name=name, seconds=seconds) for name, seconds in spans]

    def end(self, name: str) -> str:
        """Counts the rest to one phase; the line that tells all of them."""
        self.phases.done.append(Phase(name=name, seconds=time.perf_counter() - self._began_s - self.phases.total_s))
        return self.phases.text()


def _serve_beside(
    engine: Supervisor,
    listener: socket.socket,
    options: ServeOptions,
    *,
    start: Start,
    phases: _Start,
    adapters: AdapterBook | None,
) -> int:
    """Makes the front while the engine builds itself, and serves; returns the exit code."""
    from tradewind.observability.hub import Hub
    from tradewind.observability.logs import set_up_logs
    from tradewind.serving.http.server import FrontServer, Patience

    log = set_up_logs(level=options.log_level, json_lines=options.log_json)
    script = None
    if start.script is not None:
        from tradewind.simulate.script_file import read_script

        script = read_script(start.script, name=start.script_name)
    located = engine.await_located()
    parts = FrontParts(options, located, script=script)
    if options.on_drift != "off":
        import tradewind.serve_drift  # noqa: F401  # while the engine loads
    ready = engine.await_ready()
    for notice in ready.notices:
        log.warning(notice)
    phases.add(ready.phases)
    servers: list[FrontServer] = []
    watch = _drift_watch(options, start=start, located=located, ready=ready)
    hub = Hub.for_server(
        model=parts.names[0],
        version=__version__,
        max_running=ready.schedule.max_running,
        facts=engine.stats,
        why_dead=lambda: engine.why_dead,
        engine_pid=lambda: engine.pid,
        refused=lambda: sum(server.refused for server in servers),
        plan=parts.shown_plan,
        startup_s=[(phase.name, phase.seconds) for phase in phases.phases.done],
        log_requests=options.log_requests,
        otlp_endpoint=options.otlp_endpoint,
        page_tokens=ready.cache.page_tokens,
        max_tokens_per_step=ready.schedule.max_tokens_per_step,
        more=() if watch is None else (watch.listener,),
    )
    engine.on_reports = hub.take_reports if watch is None else _both(hub.take_reports, watch.take_reports)
    if watch is not None:
        hub.metrics.more.append(watch.guard.metrics)
    journal = _journal(options, parts, ready)
    if journal is not None:
        hub.on_itemised = journal.take_itemised
        log.info(f"recording {'raw' if options.record_raw else 'redacted'} traffic to {options.record}")

    def died(why: str) -> None:
        hub.engine_ended(why)
        if watch is not None:
            watch.guard.engine_died(why)

    def planned(located: Located, ready: Ready) -> None:
        parts.replanned(located.plan)
        hub.replanned(
            parts.shown_plan,
            max_running=ready.schedule.max_running,
            page_tokens=ready.cache.page_tokens,
            max_tokens_per_step=ready.schedule.max_tokens_per_step,
        )
        if watch is not None:
            watch.planned(located.plan)

    def tell_ready() -> None:
        log.info(phases.end("http"))
        log.info(f"ready on {url_of(listener)}")

    server = FrontServer(
        parts.front(ready, client=engine, hub=hub, journal=journal, adapters=adapters, watch=watch),
        engine,
        ready=ready,
        patience=Patience(
            drain_timeout_s=options.drain_timeout_s,
            stall_timeout_s=options.stall_timeout_s,
            restart_engine=options.restart_engine,
        ),
        on_ready=tell_ready,
        on_death=died,
        on_planned=planned,
        beside=None if watch is None else watch.run,
    )
    servers.append(server)
    if watch is not None:
        watch.change_plan, watch.keep_plan = server.change_plan, server.keep_plan
    try:
        return server.run(listener)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        raise _no_listener(error, options.host, options.port) from None
    finally:
        hub.close()
        if journal is not None:
            journal.close()


def _drift_watch(options: ServeOptions, *, start: Start, located: Located, ready: Ready) -> DriftWatch | None:
    if options.on_drift == "off":
        return None
    from tradewind.serve_drift import DriftWatch, read_usual

    return DriftWatch(
        mode=options.on_drift,
        goals=start.goals,
        plan=located.plan,
        usual=read_usual(options.usual_traffic),
        steps_in_flight=ready.schedule.steps_in_flight,
    )


def _both(
    first: Callable[[list[Report]], None], second: Callable[[list[Report]], None]
) -> Callable[[list[Report]], None]:
    """One listener of two."""

    def take(reports: list[Report]) -> None:
        first(reports)
        second(reports)

    return take


def _journal(options: ServeOptions, parts: FrontParts, ready: Ready) -> JournalWriter | None:
    """The journal that was asked for. Raises UserError when it cannot be written."""
    if options.record is None:
        return None
    from tradewind.observability.journal import JournalWriter

    return JournalWriter(
        options.record,
        model=parts.names[0],
        vocab_size=parts.vocab_size,
        block_tokens=ready.cache.page_tokens,
        raw=options.record_raw,
    )


def launch() -> Launched:
    """Starts an engine's process; does not wait."""
    from tradewind.serving.supervisor import Launched

    process, end, at_s = _launch()
    return Launched(process=process, end=end, at_s=at_s)


def _launch() -> tuple[subprocess.Popen[bytes], socket.socket, float]:
    # Neither end is inherited but by the one process that it is named to: the last holder's death ends the stream.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        at_s = time.perf_counter()
        command = [sys.executable, "-m", "tradewind.engine_process", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return process, ours, at_s


class FrontParts:
    """What of the front can be made while the engine still loads: tokenizer, template, parser."""

    def __init__(self, options: ServeOptions, located: Located, *, script: ScriptFile | None) -> None:
        """Reads files; raises UserError with advice."""
        from tradewind.serving.chat_template import ChatTemplate
        from tradewind.serving.parsers.table import parser_for
        from tradewind.serving.structured import StructuredOutput

        self._options = options
        model = options.goals.model
        if script is not None:
            from tradewind.engine_process import script_tokenizer
            from tradewind.simulate.script_file import BYTES

            _, self._tokenizer = script_tokenizer(script, model=model)
            model = "scripted" if script.tokenizer == BYTES else name_of(script.tokenizer or model)
        else:
            self._tokenizer = _model_tokenizer(Path(located.path))
            model = name_of(model)
        self._structured = StructuredOutput(self._tokenizer)
        self._structured.warm()
        self.names = (*options.served_names, model)
        """What the model is called; answers carry the first."""
        tokenizer, plan = self._tokenizer, located.plan
        self._plan = plan
        self._template: ChatTemplate | UserError
        template = None if options.chat_template is None else _read_text(options.chat_template)
        try:
            source = template or (script.chat_template if script is not None else None)
            self._template = ChatTemplate.for_tokenizer(tokenizer, source=source)
        except UserError as error:
            if template is not None:  # it was asked for; the model's own may be broken and nobody need care
                raise
            self._template = error
        self._vocab_size = tokenizer.vocab_size if plan is None else plan.card.vocab_size
        eos = tokenizer.eos_ids | (set(plan.card.eos_ids) if plan is not None else set())
        self._eos_ids = tuple(sorted(token for token in eos if token < self._vocab_size))
        self._speech = parser_for(
            "" if plan is None else plan.card.family,
            self._template.source if isinstance(self._template, ChatTemplate) else None,
            token_id=tokenizer.token_id,
            name=options.tool_format or (script.tool_format if script is not None else None),
            reasoning=options.reasoning or (script.reasoning if script is not None else None),
        )

    def replanned(self, plan: Plan | None) -> None:
        """Another plan is in force; what clients were told of the model stays."""
        self._plan = plan

    @property
    def shown_plan(self) -> Plan | None:
        """The plan as the page shows it: under the name that clients know."""
        from msgspec import structs

        return None if self._plan is None else structs.replace(self._plan, model=self.names[0])

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._vocab_size

    def front(
        self,
        ready: Ready,
        *,
        client: Supervisor,
        hub: Hub,
        journal: JournalWriter | None = None,
        adapters: AdapterBook | None = None,
        watch: DriftWatch | None = None,
    ) -> Front:
        """The whole, when the engine is ready."""
        from tradewind.serving.http.front import Front, Options
        from tradewind.serving.images import ImageReader
        from tradewind.serving.intake import Intake, Limits
        from tradewind.serving.links import LinkFetcher
        from tradewind.serving.page import OPEN_PATHS, page_routes

        options = self._options
        if self._plan is not None:
            limits = Limits.of(self._plan, eos_ids=self._eos_ids)
        else:
            limits = Limits(vocab_size=self._vocab_size, max_context=ready.schedule.max_context, eos_ids=self._eos_ids)
        return Front(
            client=client,
            tokenizer=self._tokenizer,
            template=self._template,
            intake=Intake(limits),
            model=self.names[0],
            max_running=ready.schedule.max_running,
            served_names=self.names[1:],
            adapters=adapters,
            options=Options(
                api_keys=options.api_keys,
                ignore_unknown_fields=options.ignore_unknown_fields,
                max_queue=options.max_queue,
                cors_origins=options.cors_origins,
                health_timeout_s=options.stall_timeout_s,
                allow_sleep=options.allow_sleep,
                adapter_folder=None if options.adapter_folder is None else str(options.adapter_folder),
            ),
            classes=options.goals.classes,
            honours_priority=ready.schedule.policy == "priority"
            or any(one.match.priority is not None for one in options.goals.classes),
            speech=self._speech,
            structured=self._structured,
            images=ImageReader.of(self._plan),
            links=LinkFetcher() if options.allow_image_links else None,
            more_routes=page_routes(
                board=hub.board.json,
                plan=lambda: hub.plan,
                drift=(lambda: b"null") if watch is None else watch.guard.json,
            ),
            open_paths=OPEN_PATHS,
            metrics=hub.metrics.text,
            on_receipt=hub.take_receipt,
            on_record=None if journal is None else journal.take,
            receipts=hub.receipts.json,
            slowest=hub.receipts.slowest_json,
            diagnosis=lambda: None if client.diagnosis is None else str(client.diagnosis),
            drift=None if watch is None else lambda: watch.guard.says,
            created_s=int(time.time()),
        )


def name_of(model: str) -> str:
    """What clients call a model that was named so: of a path only the last part, for a server's folders are no client's business."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    return path.stem if path.is_file() else path.name or model


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


def _need_the_server() -> None:
    """Raises MissingExtraError naming the first web package that is not there; imports none, which would hold up the engine's start."""
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtraError(package=package, extra="server", purpose="serving over HTTP")


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"the file {path} cannot be read: {error.strerror}") from None


def _read_text(path: Path) -> str:
    try:
        return _read_file(path).decode()
    except UnicodeDecodeError:
        raise UserError(f"the file {path} is no text in UTF-8") from None


def read_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file, one a line; empty lines and lines that begin with # are skipped. Raises UserError."""
    lines = [line.strip() for line in _read_file(path).decode("utf-8", "replace").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise UserError(f"the file {path} has no API key in it; put one on each line, or leave the option out")
    return keys
