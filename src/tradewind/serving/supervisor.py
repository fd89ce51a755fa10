"""The engine's process as the front sees it: started, awaited, watched, ended, and started again.

Knows: one process at a time and the socket to it. Refuses to know: the command that starts it (`launch`), HTTP, and when to give up.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from tradewind.contract.errors import EngineDeadError, UserError
from tradewind.contract.events import FinishReason, TokensOut
from tradewind.contract.request import Request
from tradewind.engine.client import Handle
from tradewind.engine.columns import Report
from tradewind.engine.remote import RemoteClient
from tradewind.engine.stats import EngineStats
from tradewind.engine.wire import ANSWERS, Answer, Described, Fatal, Link, Located, Ready, Start
from tradewind.serving.diagnosis import Diagnosis, State, disk_sleepers, memory_kills, of_death, of_failure, of_stall

STACKS_SIGNAL = signal.SIGUSR1

LOG = logging.getLogger("tradewind.engine")

BUILD_LOOK_S = 3.0
"""A start is looked at so often, for a disk that holds it up."""
FAILURE_S = 60.0
"""So long what a failed request showed is told."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A process that was started and has been told nothing yet."""

    process: subprocess.Popen[bytes]
    end: socket.socket
    """Our end of the socket to it."""
    at_s: float
    """When it was started, by `time.perf_counter`."""


Launch = Callable[[], Launched]


class Supervisor:
    """The engine's process of the moment; implements `front.EngineClient`. After `attach` its one user is the asyncio loop's thread."""

    def __init__(self, start: Start, *, launch: Launch) -> None:
        """`launch` starts a process and returns at once."""
        self._start, self._launch = start, launch
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link[Answer] | None = None
        self._client: RemoteClient | None = None
        self._why_dead: str | None = "the engine is starting"
        self.on_death: Callable[[str], None] = lambda why: None
        """Told once for each engine that dies on its own, before its open requests end."""
        self.on_reports: Callable[[list[Report]], None] = lambda reports: None
        """Sees everything that engines report, in the asyncio loop's thread; to be set before `attach`."""
        self._closing = False
        self._memory_kills = 0
        """The kernel's count when the process was started."""
        self._diagnosis: Diagnosis | None = None
        self._failure: tuple[float, Diagnosis] | None = None
        self._looked: float | None = None
        """Since when an answer to `look` is owed ..."""
        self._still_s = 0.0
        """... and for how long no step had ended then."""

    # -- starting

    def spawn(self, launched: Launched | None = None) -> None:
        """Tells a process what to build; does not wait. `launched`: one that was started already."""
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        self._memory_kills = memory_kills()
        launched = launched or self._launch()
        self._process = launched.process
        self._link = Link(launched.end, ANSWERS)
        with suppress(OSError):  # it died at once: the stream's end says so
            self._link.send(msgspec.structs.replace(self._start, began_s=launched.at_s))

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
        return answer

    def _await(self) -> Answer:
        assert self._link is not None
        began_s = time.monotonic()
        while True:
            try:
                answer = self._link.receive(timeout_s=BUILD_LOOK_S)
                break
            except TimeoutError:
                self._look_at_start(time.monotonic() - began_s)
        if answer is None:
            raise EngineDeadError(self._how_it_ended(None))
        if isinstance(answer, Fatal):
            if answer.by_user:
                error = UserError(answer.why)
                error.exit_code = answer.exit_code
                raise error
            raise EngineDeadError(answer.why)
        return answer

    def _look_at_start(self, took_s: float) -> None:
        sleepers = disk_sleepers(self.pid)
        if sleepers:
            found = of_stall(State(doing="start", for_s=took_s), still_s=took_s, disk_sleepers=sleepers)
            says = f"the engine is being built for {took_s:.0f} s: {found.says.partition(': ')[2]}"
            self._diagnose(Diagnosis(name="slow_disk", says=says))

    def attach(self, ready: Ready) -> None:
        """Lets the running asyncio loop read what the engine says; from now on requests are taken."""
        assert self._link is not None
        self._client = RemoteClient(
            self._link,
            ready,
            on_reports=self._reported,
            on_end=self._ended,
            on_state=self._told_state,
        )
        self._why_dead = self._diagnosis = self._looked = None
        self._client.attach()

    async def restart(self) -> None:
        """A new process in the place of a dead one. Raises what `await_ready` raises."""
        self._clean_up()  # here, where the dead one's client is used; the waiting is a thread's
        ready = await asyncio.to_thread(self._start_again)
        if not self._closing:
            self.attach(ready)

    def _start_again(self) -> Ready:
        self.spawn()
        self.await_located()
        return self.await_ready()

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

    def sleep(self) -> None:
        """See EngineClient."""
        if self._client is not None:
            self._client.sleep()

    @property
    def why_dead(self) -> str | None:
        return self._why_dead or (self._client.why_dead if self._client is not None else None)

    def stats(self) -> EngineStats:
        """See EngineClient."""
        if self._client is None:
            return EngineStats(last_progress_s=time.monotonic())
        return self._client.stats()

    def scheduled_s(self, request_id: str) -> float | None:
        """See EngineClient."""
        return None if self._client is None else self._client.scheduled_s(request_id)

    # -- while it runs

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return None if self._process is None else self._process.pid

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

    def _told_state(self, state: Described) -> None:
        if self._looked is None:
            LOG.warning("state of the scheduler:\n%s", state.text)
            return
        self._looked = None
        known = None
        if state.doing is not None:
            known = State(doing=state.doing[0], for_s=state.doing[1], waits_on=state.waits_on)
        self._diagnose(of_stall(known, still_s=self._still_s, disk_sleepers=disk_sleepers(self.pid)))

    # -- what is wrong

    @property
    def diagnosis(self) -> Diagnosis | None:
        """What is wrong with the engine now, or what a request that failed within the last minute showed; None: nothing is known."""
        if self._diagnosis is not None:
            return self._diagnosis
        if self._failure is not None and time.monotonic() - self._failure[0] < FAILURE_S:
            return self._failure[1]
        return None

    @property
    def looking(self) -> bool:
        """The engine owes an answer to `look`."""
        return self._looked is not None

    def look(self, still_s: float) -> None:
        """No step has ended for `still_s`: finds out why. The engine is asked; one that does not answer is diagnosed by the next call."""
        if self._client is None:
            return
        if self._looked is not None:
            self._diagnose(of_stall(None, still_s=still_s, disk_sleepers=disk_sleepers(self.pid)))
            return
        self._looked, self._still_s = time.monotonic(), still_s
        self._client.describe()

    def goes_on(self) -> None:
        """Steps end again."""
        self._diagnosis = self._looked = None

    def _diagnose(self, found: Diagnosis) -> None:
        if self._diagnosis is None or self._diagnosis.name != found.name:
            LOG.warning(f"diagnosis: {found}; {found.advice}")
        self._diagnosis = found

    def _reported(self, reports: list[Report]) -> None:
        for report in reports:
            if isinstance(report, TokensOut) and report.finish == "error":
                found = of_failure(report.error or "")
                if found is not None:
                    if self._failure is None or self._failure[1].name != found.name or self.diagnosis is None:
                        LOG.warning(f"diagnosis: {found} (request {report.request_id}); {found.advice}")
                    self._failure = (time.monotonic(), found)
        self.on_reports(reports)

    def _ended(self, reason: str | None) -> str:
        if self._closing:
            return "the server is shutting down"
        why = self._how_it_ended(reason)
        self._why_dead = why
        assert self._process is not None
        kills = memory_kills() - self._memory_kills
        self._diagnosis = None
        self._diagnose(of_death(reason, code=self._process.returncode, memory_kills=kills))
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
            return f"the engine process was killed by {signal_name(-code)}"
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


def signal_name(number: int) -> str:
    """SIGTERM and the like."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
