"""The engine's process as the front sees it: started, awaited, watched, ended, and started again, also under another plan.

Knows: one process at a time and the socket to it. Refuses to know: the command that starts it (`launch`), HTTP, when to give up, and why
a plan changes.

      hold()      what is new, and what has no slot yet, waits here; what runs goes on
      switch()    the process ends and another begins under other goals; nothing may run
      release()   what waited goes to the engine of that moment
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

from tradewind.config.goals import Goals
from tradewind.contract.errors import EngineDeadError, UserError
from tradewind.contract.events import FinishReason, TokensOut
from tradewind.contract.request import Request
from tradewind.engine.client import Handle
from tradewind.engine.columns import Report
from tradewind.engine.remote import RemoteClient
from tradewind.engine.stats import EngineStats
from tradewind.engine.waiting import WaitingClient
from tradewind.engine.wire import ANSWERS, Answer, Described, Fatal, Link, Located, Ready, Start
from tradewind.serving.carried import Carried
from tradewind.serving.diagnosis import Diagnosis, State, disk_sleepers, memory_kills, of_death, of_failure, of_stall

STACKS_SIGNAL = signal.SIGUSR1

LOG = logging.getLogger("tradewind.engine")

BUILD_LOOK_S = 3.0
"""A start is looked at so often, for a disk that holds it up."""
FAILURE_S = 60.0
"""So long what a failed request showed is told."""
END_S = 5.0
"""So long a process that was told to end may take before it is killed, and so long it may take to forget requests."""
LOOK_S = 0.01


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
        self.on_planned: Callable[[Located, Ready], None] = lambda located, ready: None
        """Told of each engine after the first, before it takes requests: its plan may be another one."""
        self.fallback: Goals | None = None
        """What the next engine is started with when this one dies: goals that are known to work, while others are on trial."""
        self._waiting: WaitingClient | None = None
        """Where requests wait between `hold` and `release`."""
        self._carried = Carried()
        self._ending = False
        """The process was told to end, and its end is no death."""
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
        """A new process in the place of a dead one. Raises what `await_ready` raises. Adapters are not named to it: it loads each with the
        first request that does, and one whose files have gone since must not keep it from starting."""
        if self.fallback is not None:
            self._start, self.fallback = msgspec.structs.replace(self._start, goals=self.fallback), None
        self._clean_up()  # here, where the dead one's client is used; the waiting is a thread's
        located, ready = await asyncio.to_thread(self._start_again)
        if not self._closing:
            self.on_planned(located, ready)
            self.attach(ready)

    def _start_again(self) -> tuple[Located, Ready]:
        self._start = msgspec.structs.replace(self._start, adapters={})
        self.spawn()
        located = self.await_located()
        return located, self.await_ready()

    # -- another plan

    @property
    def goals(self) -> Goals:
        """What the engine of the moment was built for."""
        return self._start.goals

    @property
    def held(self) -> bool:
        """Requests wait here instead of in the engine."""
        return self._waiting is not None

    @property
    def waiting(self) -> int:
        """How many do."""
        return 0 if self._waiting is None else self._waiting.open

    def hold(self) -> None:
        """From now on nothing new reaches the engine, and what has no slot there yet comes back; what runs goes on."""
        assert self._waiting is None and self._client is not None
        self._waiting = WaitingClient(self._client.check_fits, on_reports=self._tell)
        queued = self._client.give_up_queued()
        self._carried.left(handle.request.id for handle in queued)
        self._waiting.keep(queued)

    async def switch(self, goals: Goals) -> None:
        """The engine's process ends, whatever it does, and another begins that is built for other goals. Only between `hold` and `release`.

        Raises what `await_ready` raises; then there is no engine, and it may be tried again with other goals.
        """
        assert self._waiting is not None
        await self._end_process()
        self._start = msgspec.structs.replace(self._start, goals=goals)
        try:
            located, ready = await asyncio.to_thread(self._start_again)
        except (EngineDeadError, UserError) as error:
            self._why_dead = str(error)
            raise
        if self._closing:
            raise EngineDeadError("the server is shutting down")
        self.on_planned(located, ready)
        self.attach(ready)

    async def _end_process(self) -> None:
        self._ending = True
        try:
            if self._client is not None:
                self._client.cancel_all()
                self._client.drain()
                limit_s = time.monotonic() + END_S
                while self._client.why_dead is None and time.monotonic() < limit_s:
                    await asyncio.sleep(LOOK_S)
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._process.wait, END_S)
                self._process.kill()  # does nothing when it has ended
            self._clean_up()
        finally:
            self._ending = False
        self._carried.engine_gone()

    async def release(self) -> None:
        """What waited goes to the engine, in order of arrival. Without an engine it ends with an error."""
        assert self._waiting is not None
        limit_s = time.monotonic() + END_S
        while self._carried.coming_back and self.engine_dead is None and time.monotonic() < limit_s:
            await asyncio.sleep(LOOK_S)  # the same engine's last word on them must not be taken for the new one's
        waiting, self._waiting = self._waiting, None
        if self._client is None or self.engine_dead is not None:
            waiting.fail(self.engine_dead or "the engine does not work any more")
            return
        self._client.adopt(waiting.all())

    # -- front.EngineClient

    def submit(self, request: Request) -> Handle:
        """See EngineClient."""
        if self._waiting is not None and not self._closing:
            return self._waiting.submit(request)
        why = self.why_dead
        if self._client is None or why is not None:
            raise EngineDeadError(why or "the engine is starting")
        return self._client.submit(request)

    def cancel(self, request_id: str) -> None:
        """See EngineClient."""
        if self._waiting is not None:
            self._waiting.cancel(request_id)
        if self._client is not None:
            self._client.cancel(request_id)

    def finish(self, request_id: str, *, reason: FinishReason = "stop") -> None:
        """See EngineClient."""
        if self._client is not None:
            self._client.finish(request_id, reason=reason)

    async def check_adapter(self, key: str) -> None:
        """See EngineClient."""
        if self._client is None or self.why_dead is not None:
            raise EngineDeadError(self.why_dead or "the engine is starting")
        await self._client.check_adapter(key)

    def sleep(self) -> None:
        """See EngineClient."""
        if self._client is not None:
            self._client.sleep()

    @property
    def why_dead(self) -> str | None:
        if self._waiting is not None and not self._closing:
            return None  # another engine comes
        return self.engine_dead

    @property
    def engine_dead(self) -> str | None:
        """The same of the engine of the moment, whether another comes or not."""
        return self._why_dead or (self._client.why_dead if self._client is not None else None)

    def stats(self) -> EngineStats:
        """See EngineClient. What waits for another engine is counted as waiting."""
        if self._client is None:
            stats = EngineStats(last_progress_s=time.monotonic())
        else:
            stats = self._client.stats()
        return msgspec.structs.replace(stats, waiting=stats.waiting + self.waiting) if self.waiting else stats

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
        if self._waiting is not None:
            self._waiting.close()
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
        self._tell(reports)

    def _tell(self, reports: list[Report]) -> None:
        """The listeners see one life of a request that went from one engine to another."""
        self.on_reports(self._carried.filtered(reports) if self._carried else reports)

    def _ended(self, reason: str | None) -> str:
        if self._closing:
            return "the server is shutting down"
        if self._ending:
            return "the engine was ended for another plan"
        self._carried.forget()  # whoever hears of the death ends all lives
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
        if self._waiting is not None:
            self._waiting.close()
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
