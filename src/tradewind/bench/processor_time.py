"""A real engine on a clock that counts the processor time of its thread: for figures on a machine that others use at the same time.

Knows: when that clock moves. Refuses to know: what is measured.

      wall      |decide|-- step --|  somebody else's turn  |-- step --|absorb|   nothing to do, until the next request   |decide| ...
      clock     |decide|-- step --|-- step --|absorb| (jumps to the next request) |decide| ...

One thread does everything, and its computing team is one thread, too: scheduler, cache, policies, kernels and weights are the engine's own,
two cores and overlap are not there. Neighbours still take caches and memory bandwidth.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tradewind.assemble import Planned, make_executor, make_ops
from tradewind.contract.errors import UserError
from tradewind.contract.events import Sink
from tradewind.contract.executor import Executor
from tradewind.contract.request import Request
from tradewind.contract.step import Step, StepResult
from tradewind.engine.columns import ReportSink
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.phases import Phases
from tradewind.simulate.live_times import live_times_of


class ProcessorClock:
    """Seconds of processor time of the thread that made it, from 1 on; `skip` lets idle time pass. May be read from any thread."""

    def __init__(self) -> None:
        self._thread = time.pthread_getcpuclockid(threading.get_ident())
        self._skipped_s = 1.0 - time.clock_gettime(self._thread)

    def now(self) -> float:
        return time.clock_gettime(self._thread) + self._skipped_s

    def skip(self, seconds: float) -> None:
        """Nothing happens for so long; nothing at all where it is not over 0."""
        self._skipped_s += max(0.0, seconds)


class _Timed:
    """An executor that works in its caller's thread; its device time is what the clock says."""

    def __init__(self, executor: Executor, clock: ProcessorClock) -> None:
        self._executor, self._clock = executor, clock

    def submit(self, step: Step) -> None:
        self._executor.submit(step)

    def collect(self) -> StepResult:
        began = self._clock.now()
        result = self._executor.collect()
        return msgspec.structs.replace(result, device_s=self._clock.now() - began, host_s=0.0)

    def close(self) -> None:
        self._executor.close()


class ProcessorTimeEngine:
    """The engine of a plan in the caller's thread. Raises UserError for a plan of several threads or steps in flight."""

    def __init__(
        self,
        planned: Planned,
        *,
        sinks: Sequence[Sink | ReportSink] = (),
        watching: Callable[[Executor], Executor] = lambda executor: executor,
    ) -> None:
        """`watching` puts somebody between engine and executor."""
        plan = planned.plan
        if plan.numerics.threads != 1 or plan.schedule.steps_in_flight != 1:
            raise UserError(
                f"processor time is that of one thread, but the plan has {plan.numerics.threads} threads and "
                f"{plan.schedule.steps_in_flight} steps in flight: plan with threads 1 and overlap off"
            )
        self.clock = ProcessorClock()
        self._ops, _ = make_ops(plan)
        executor = watching(_Timed(make_executor(planned, self._ops, phases=Phases()), self.clock))
        scheduler = Scheduler(schedule=plan.schedule, cache=plan.cache, clock=self.clock.now)
        self._loop = EngineLoop(
            scheduler=scheduler,
            executor=executor,
            clock=self.clock.now,
            sinks=sinks,
            watch=live_times_of(plan, clock=self.clock.now, pace=scheduler.pace_by),
        )

    def run(self, requests: Iterable[Request], *, told: Callable[[int], None] = lambda sent: None) -> list[Request]:
        """Serves requests, whose `arrived_s` count from now on and ascend, until all are over; returns them with the clock's arrivals."""
        begin_s, loop = self.clock.now(), self._loop
        due = deque(msgspec.structs.replace(one, arrived_s=begin_s + one.arrived_s) for one in requests)
        sent: list[Request] = []
        while due or loop.busy:
            if not loop.busy:
                self.clock.skip(due[0].arrived_s - self.clock.now())
            while due and due[0].arrived_s <= self.clock.now():
                sent.append(due.popleft())
                loop.post(Add(sent[-1]))
                told(len(sent))
            loop.run_once()
        return sent

    def close(self) -> None:
        """Ends the engine."""
        self._loop.close()
        close = getattr(self._ops, "close", None)
        if close is not None:
            close()
