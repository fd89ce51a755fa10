"""`tradewind serve`: the front's process. It starts the engine's process, reads the text tools meanwhile, and serves.

Knows: the order of a start and what each part is given. Refuses to know: requests and answers (serving.http), how an engine works.
Imports no torch; needs the extra `server`. Everything large is imported after the engine's process has been started, beside it.

      front (uvicorn, text)  <-- one socket -->  engine process         (engine.wire says what crosses)

      front      | arguments, launch | imports, tokenizer, template ...... | listen
      engine                         | imports, plan, weights, pages ... |
"""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tradewind.contract.errors import MissingExtraError, UserError
from tradewind.phases import Phase, Phases

if TYPE_CHECKING:
    from tradewind.config.goals import Goals
    from tradewind.engine.wire import Located, Ready
    from tradewind.serving.http.front import Front
    from tradewind.serving.supervisor import Launched, Supervisor
    from tradewind.serving.tokenizer import TextTokenizer
    from tradewind.simulate.script_file import ScriptFile

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
    text = None if options.script is None else _read_file(options.script)
    name = "" if options.script is None else options.script.name
    with bind(options.host, options.port) as listener:
        process, end, launched_s = _launch()
        try:
            _need_the_server()
            from tradewind.engine.wire import Start
            from tradewind.serving.supervisor import Launched, Supervisor

            launched = Launched(process=process, end=end, at_s=launched_s)
        except BaseException:
            end.close()
            process.kill()
            process.wait()
            raise
        start = Start(goals=options.goals, script=text, script_name=name, faults=options.faults)
        engine = Supervisor(start, launch=launch, log=log)
        try:
            engine.spawn(launched)
            from tradewind.serving.http.server import FrontServer, Patience

            script = None
            if text is not None:
                from tradewind.simulate.script_file import read_script

                script = read_script(text, name=name)
            made = make_front(options, engine.await_located(), script=script, client=engine)
            ready = engine.await_ready()
            for notice in ready.notices:
                log(notice)
            phases = Phases()
            phases.done = [
                Phase(name="front process", seconds=launched_s - began_s),
                *(Phase(name=name, seconds=seconds) for name, seconds in ready.phases),
            ]

            def tell_ready() -> None:
                phases.done.append(Phase(name="http", seconds=time.perf_counter() - began_s - phases.total_s))
                log(phases.text())
                log(f"ready on {url_of(listener)}")

            patience = Patience(
                drain_timeout_s=options.drain_timeout_s,
                stall_timeout_s=options.stall_timeout_s,
                restart_engine=options.restart_engine,
            )
            server = FrontServer(made(ready), engine, patience=patience, log=log, on_ready=tell_ready)
            try:
                return server.run(listener)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                    raise
                raise _no_listener(error, options.host, options.port) from None
        finally:
            engine.close()


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


def _need_the_server() -> None:
    """Imports the web packages. Raises MissingExtraError naming the first that is not there."""
    for package in ("starlette", "uvicorn"):
        try:
            __import__(package)
        except ImportError:
            raise MissingExtraError(package=package, extra="server", purpose="serving over HTTP") from None


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
