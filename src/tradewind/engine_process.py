"""The engine's own process: `python -m tradewind.engine_process FD`, started by `serve`, spoken to over one socket.

Knows: when this process begins, serves and ends. Refuses to know: HTTP and text; how an engine is built (assemble).

It lives exactly as long as somebody holds the other end: when the front is gone, whatever killed it, the stream ends and so does this.

      main thread     Start -> build -> Ready -> run_once, Batch, run_once, Batch, ...
      reader          orders -> loop;  Describe is answered from here, also while a step hangs;  end of stream -> end of process
      SIGUSR1         Python stacks of all threads to standard error, by faulthandler, also while no Python can run
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tradewind.contract.errors import UserError
from tradewind.engine.loop import Add, Cancel, EngineLoop, Finish, Forget, Sleep
from tradewind.engine.stats import Tally, describe
from tradewind.engine.wire import (
    ORDERS,
    AdapterChecked,
    BrokenLink,
    CheckAdapter,
    Describe,
    Described,
    Drain,
    Fatal,
    Fault,
    Link,
    Located,
    Order,
    Ready,
    Said,
    Start,
    Stop,
    batch_of,
)
from tradewind.phases import Phases

if TYPE_CHECKING:
    from tradewind.engine.columns import Report
    from tradewind.serving.tokenizer import TextTokenizer
    from tradewind.simulate.script_file import ScriptFile

GRACE_S = 2.0
"""So long a step may go on after the end was ordered, or the front is gone, before the process is ended under it."""
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, kw_only=True)
class Built:
    """What the process runs."""

    loop: EngineLoop
    ready: Ready
    fault: Callable[[str, float], None] | None = None
    """Throws a fault switch; None where the device has none."""


class EngineProcess:
    """One engine, from `Start` to the end. `serve` is called once, in the main thread."""

    def __init__(self, link: Link[Order]) -> None:
        self._link = link
        self._work = threading.Event()
        self._stop = self._drain = False
        self._built: Built | None = None
        self._faults = False

    def serve(self) -> int:
        """Builds and runs the engine; returns the exit code."""
        start = self._link.receive()
        if not isinstance(start, Start):
            return 0
        self._faults = start.faults
        threading.Thread(target=self._read, name="tradewind-orders", daemon=True).start()
        try:
            built = build_scripted(start, self._link) if start.script is not None else build_model(start, self._link)
            self._built = built
            self._link.send(built.ready)
            tell_front(self._link)
            return self._run(built.loop)
        except UserError as error:
            return self._fatal(str(error), exit_code=error.exit_code, by_user=True)
        except BrokenPipeError:
            return 0
        except Exception as error:
            traceback.print_exc()
            return self._fatal(f"{type(error).__name__}: {error}")

    def _run(self, loop: EngineLoop) -> int:
        tally = Tally(loop)

        def tell(reports: list[Report]) -> None:
            if reports:
                tally.take(reports)
                self._link.send(batch_of(reports, tally.stats()))

        stats = tally.stats()
        if stats.degrade is not None or stats.step_times is not None:
            self._link.send(batch_of([], stats))  # there is something to tell before the first step
        while not self._stop:
            self._work.clear()
            if loop.busy:
                reports = loop.run_once()
                if loop.dead is None:
                    tell(reports)
                    continue
                # First that nothing can be served any more, then the requests' ends: whoever reads an end knows what it means.
                code = self._fatal(loop.dead)
                tell(reports)
                return code
            elif self._drain:
                break
            else:
                given_up = loop.scheduler.degraded
                wait_s = loop.rest()
                if loop.scheduler.degraded != given_up:  # nobody asks for anything, but somebody may look
                    self._link.send(batch_of([], tally.stats()))
                self._work.wait(wait_s)
        tell(loop.close())
        return 0

    def _fatal(self, why: str, *, exit_code: int = 1, by_user: bool = False) -> int:
        with suppress(OSError):
            self._link.send(Fatal(why=why, exit_code=exit_code, by_user=by_user))
        return exit_code

    def _read(self) -> None:
        """Takes orders until the stream ends; then nobody is there to work for."""
        try:
            while (order := self._link.receive()) is not None:
                self._take(order)
        except (BrokenLink, OSError) as error:
            print(f"tradewind engine: {error}", file=sys.stderr, flush=True)
        self._end_soon()

    def _take(self, order: Order) -> None:
        built = self._built
        if isinstance(order, Add | Cancel | Finish | Forget | Sleep):
            if built is not None:
                built.loop.post(order)
        elif isinstance(order, Describe):
            self._link.send(described(built.loop) if built is not None else Described("the engine is being built"))
        elif isinstance(order, CheckAdapter):
            # Files are read: in a thread of its own, so that no order waits for a disk.
            threading.Thread(
                target=self._check_adapter, args=(order.key,), name="tradewind-adapter", daemon=True
            ).start()
        elif isinstance(order, Drain):
            self._drain = True
        elif isinstance(order, Stop):
            threading.Thread(target=self._end_soon, name="tradewind-end", daemon=True).start()
        elif isinstance(order, Fault):
            if self._faults and built is not None and built.fault is not None:
                built.fault(order.do, order.seconds)
        self._work.set()

    def _check_adapter(self, key: str) -> None:
        built = self._built
        why = "the engine is being built" if built is None else why_not_adapter(built.loop, key)
        with suppress(OSError):
            self._link.send(AdapterChecked(key, why))

    def _end_soon(self) -> None:
        """Lets the main thread end in order, and ends the process under it when it does not: a step may hang, a start may take long."""
        self._stop = True
        self._work.set()
        if self._built is not None:
            time.sleep(GRACE_S)
        os._exit(0)


class _ToFront(logging.Handler):
    """Sends what is logged to the front."""

    def __init__(self, link: Link[Order]) -> None:
        super().__init__(logging.INFO)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler. Where there is no front any more, there is no log."""
        with suppress(OSError):
            self._link.send(Said(record.name, record.levelno, record.getMessage()))


def tell_front(link: Link[Order]) -> None:
    """From now on the front writes what this process logs: one log, in one form."""
    logger = logging.getLogger("tradewind")
    logger.setLevel(logging.INFO)
    logger.addHandler(_ToFront(link))


def described(loop: EngineLoop) -> Described:
    """The loop's state at this moment; from any thread."""
    doing, since_s = loop.doing
    return Described(describe(loop), doing=(doing, time.monotonic() - since_s), waits_on=loop.waits_on)


def why_not_adapter(loop: EngineLoop, key: str) -> str | None:
    """Why the model cannot take an adapter; from any thread."""
    try:
        loop.check_adapter(key)
    except UserError as error:
        return str(error)
    except Exception as error:  # of whatever a file holds: the engine does not die of it
        traceback.print_exc()
        return f"the adapter cannot be read ({type(error).__name__}: {error})"
    return None


def build_model(start: Start, link: Link[Order]) -> Built:
    """An engine with a model: the parts that `assemble` makes, without the text tools, which the front has."""
    gc.disable()  # a million objects are made now, and stay: looking for garbage among them is a tenth of a start
    phases = Phases(began_s=start.began_s)
    with phases("engine process"):
        from tradewind.assemble import make_executor, make_loop, make_ops, make_plan, read_tokenizer, vocabulary_of
        from tradewind.sampling.grammar_compile import GrammarCompiler
        from tradewind.weights.checkpoint import open_checkpoint
        from tradewind.weights.fetch import RichProgress
    progress = RichProgress()
    planned = make_plan(start.goals, progress=progress, phases=phases)
    plan = planned.plan
    link.send(Located(path=str(planned.path), plan=plan))
    with phases("ops"):
        ops, notices = make_ops(plan, phases=phases)
    # This process needs the tokenizer for grammars only. It is read in a thread, beside the weights: with the first grammar it
    # would hold up everybody's steps.
    grammars = GrammarCompiler(
        lambda: vocabulary_of(read_tokenizer(open_checkpoint(planned.path)), plan), vocab_size=plan.card.vocab_size
    )
    warm = grammars.warm()
    executor = make_executor(planned, ops, phases=phases, progress=progress, grammars=grammars, adapters=start.adapters)
    with phases("engine"):
        times = Path(start.step_times) if start.step_times else None
        loop = make_loop(plan, executor, grammars=grammars, step_times=times)
    with phases("grammars"):
        warm.exception()  # without the extra there is one; it is told to the requests that need a grammar
    ready = Ready(schedule=plan.schedule, cache=plan.cache, phases=_spans(phases), notices=notices)
    gc.freeze()  # nor is it looked for among them while steps run
    gc.enable()
    return Built(loop=loop, ready=ready)


def build_scripted(start: Start, link: Link[Order]) -> Built:
    """An engine whose device says what a script file says."""
    phases = Phases(began_s=start.began_s)
    with phases("engine process"):
        from tradewind.engine.degrade import Degrader, pinned
        from tradewind.engine.scheduler import Scheduler
        from tradewind.simulate.forced import AnyGrammar, ForcedExecutor
        from tradewind.simulate.script_file import Answers, plans_of, read_script
    with phases("script"):
        assert start.script is not None
        script = read_script(start.script, name=start.script_name)
        path, tokenizer = script_tokenizer(script, model=start.goals.model)
        link.send(Located(path=path))
        answers = Answers(
            script,
            encode=lambda text: tokenizer.encode(text, add_special=False),
            decode=lambda ids: tokenizer.decode(ids, skip_special=False),
            name=start.script_name,
        )
        ends = sorted(tokenizer.eos_ids)
        if not ends:
            raise UserError(f"{start.script_name}: the tokenizer has no end-of-text token, so that no answer could end")
    with phases("engine"):
        schedule, cache = plans_of(script, start.goals.means, max_context=start.goals.max_context)
        executor = ForcedExecutor(
            script,
            answers,
            slots=schedule.max_running,
            vocab_size=tokenizer.vocab_size,
            end_token=tokenizer.eos_id if tokenizer.eos_id is not None else ends[0],
        )
        drafts = script.drafts.per_row if script.drafts is not None else 0
        ladder = pinned(script.degrade, start.goals.means.degrade)
        scheduler = Scheduler(
            schedule=schedule,
            cache=cache,
            clock=time.monotonic,
            drafts_per_row=drafts,
            grammars=AnyGrammar(),
            degrade=None if ladder is None else Degrader(schedule, ladder, drafts=drafts > 0),
        )
        loop = EngineLoop(scheduler=scheduler, executor=executor, clock=time.monotonic)
    ready = Ready(schedule=schedule, cache=cache, drafts_per_row=drafts, phases=_spans(phases))
    return Built(loop=loop, ready=ready, fault=executor.throw)


def script_tokenizer(script: ScriptFile, *, model: str) -> tuple[str, TextTokenizer]:
    """The path of the checkpoint (empty: none) and the tokenizer that a script is spoken through. Raises UserError."""
    from tradewind.serving.tokenizer import TextTokenizer
    from tradewind.simulate.script_file import BYTE_TEMPLATE, BYTE_TOKENIZER_CONFIG, BYTES, byte_tokenizer_json

    if script.tokenizer == BYTES:
        return "", TextTokenizer.from_tokenizer_json(
            byte_tokenizer_json(), tokenizer_config=BYTE_TOKENIZER_CONFIG, chat_template=BYTE_TEMPLATE
        )
    from tradewind.assemble import read_tokenizer
    from tradewind.config.env import cache_dir
    from tradewind.weights.checkpoint import open_checkpoint
    from tradewind.weights.lookup import find_model

    path = find_model(script.tokenizer or model, cache_dir=cache_dir())
    return str(path), read_tokenizer(open_checkpoint(path))


def _spans(phases: Phases) -> tuple[tuple[str, float], ...]:
    return tuple((phase.name, phase.seconds) for phase in phases.done)


def main(arguments: list[str]) -> int:
    """Serves the engine on the socket whose number is the one argument."""
    # Whoever holds the other end decides: Ctrl-C and SIGTERM reach the whole group of processes, but open answers are to be finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    # The socket is not closed before the process ends: the reader waits on it to the last.
    return EngineProcess(Link(socket.socket(fileno=int(arguments[0])), ORDERS)).serve()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to clean up, and a device's thread must not keep a dead engine alive
