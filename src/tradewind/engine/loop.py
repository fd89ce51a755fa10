"""The engine's heartbeat: takes orders, lets the scheduler decide, submits, collects, tells what happened.

Knows: the order of the verbs, so that the host decides while the device works. Refuses to know: who sends orders and reads reports.

      run_once, one step in flight beside the one being decided:

          orders -> decide N+1 -> submit N+1 -> collect N -> absorb N -> reports
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from tradewind.contract.errors import EngineDeadError, UserError
from tradewind.contract.events import FinishReason, Sink, TokensOut
from tradewind.contract.executor import Executor, Resting
from tradewind.contract.request import Request
from tradewind.contract.step import StepResult
from tradewind.engine.columns import Report, ReportSink, spelled_out
from tradewind.engine.limits import check_fits
from tradewind.engine.pacing import OverloadedError
from tradewind.engine.scheduler import Scheduler
from tradewind.engine.step_watch import StepTimeStats, StepWatch

FRUITLESS = 4
"""So many decisions in a row without a step, with requests open and nothing flying, mean that the scheduler is stuck."""

OUTSIDE_S = 0.005
"""So long the loop waits at most before it looks at its orders, while all that is open waits for grammars."""


class Add(msgspec.Struct, frozen=True, tag=True):
    """Order: queue a request."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Order: end a request with "abort"."""

    request_id: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Order: end a request whose text reached a stop string."""

    request_id: str
    reason: FinishReason = "stop"


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Order: empty the prefix cache of what nobody uses."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Order: as soon as nothing runs, empty the prefix cache and give its memory back. The next request wakes the engine."""


Order = Add | Cancel | Finish | Forget | Sleep


class EngineLoop:
    """Owns scheduler and executor. `post` may be called from any thread, everything else from one."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        sinks: Sequence[Sink | ReportSink] = (),
        watch: StepWatch | None = None,
    ) -> None:
        """`watch` is shown each step and closed with the engine."""
        self.scheduler = scheduler
        self._watch = watch
        self._executor = executor
        self._clock = clock
        # Who takes a turn's reports whole is spared one event for each token.
        self._sinks = tuple(sink for sink in sinks if not isinstance(sink, ReportSink))
        self._report_sinks = tuple(sink for sink in sinks if isinstance(sink, ReportSink))
        self._orders: deque[Order] = deque()
        self._fruitless = 0
        self._sleepy = False
        self._closed = False
        self.dead: str | None = None
        """Why no step can be done any more."""
        self.doing: tuple[str, float] = ("nothing", clock())
        """Which verb it is at, and since when: for a watchdog in another thread."""

    @property
    def busy(self) -> bool:
        """Whether `run_once` has something to do; may be read from any thread."""
        return bool(self._orders) or not self.scheduler.idle

    @property
    def inbox(self) -> int:
        """Orders that were posted and not taken; may be read from any thread."""
        return len(self._orders)

    @property
    def step_times(self) -> StepTimeStats | None:
        """How well step times are known; None where nobody fits them."""
        return None if self._watch is None else self._watch.stats()

    @property
    def prepared(self) -> bool:
        """Whether the executor has all that it needs; until then a first step of some size may take longer. For whoever measures."""
        return bool(getattr(self._executor, "prepared", True))

    def check_adapter(self, key: str) -> None:
        """Reads an adapter; changes nothing. Raises UserError where the model cannot take it, or takes none. From any thread."""
        check = getattr(self._executor, "check_adapter", None)
        if check is None:
            raise UserError("this engine serves no adapters")
        check(key)

    @property
    def waits_on(self) -> str:
        """What the executor waits for besides computing ("disk: ..."), where it says so; may be read from any thread."""
        return str(getattr(self._executor, "waits_on", ""))

    def rest(self) -> float | None:
        """While there is nothing to do: after so many seconds it is to be called again, None: not before there is something to do."""
        return None if self.busy else self.scheduler.rest(self._clock())

    def check(self, request: Request) -> None:
        """Raises what `add` would raise for a request that can never run; changes nothing, may be called from any thread."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        scheduler = self.scheduler
        check_fits(
            request,
            cache=scheduler.cache,
            schedule=scheduler.schedule,
            burst_tokens=scheduler.burst_tokens,
        )

    def post(self, order: Order) -> None:
        """Leaves an order for the next `run_once`; thread-safe, does not wait."""
        self._orders.append(order)

    def run_once(self) -> list[Report]:
        """One turn: at most one step decided and at most one collected. Returns the reports, in order.

        When the executor dies every open request ends with "error" and `dead` says why; a bug ends them the same way and is raised.
        """
        try:
            reports = self._turn()
            if self._sleepy and self.scheduler.idle:
                self._sleep()
        except EngineDeadError as error:
            reports = self._die(str(error))
        except Exception as error:
            self._tell(self._die(f"{type(error).__name__}: {error}"))
            raise
        self._tell(reports)
        self.doing = ("nothing", self._clock())
        return reports

    def _turn(self) -> list[Report]:
        scheduler = self.scheduler
        self.doing = ("decide", self._clock())
        refused = self._take_orders()
        if self.dead is not None:
            return [*refused, *self._die(self.dead)]
        if scheduler.flying < scheduler.schedule.steps_in_flight:
            step = scheduler.decide(self._clock())
            if step is not None:
                self._fruitless = 0
                self.doing = (f"submit step {step.number}", self._clock())
                self._executor.submit(step)
                if self._watch is not None:
                    self._watch.submitted(step)
            elif not scheduler.flying and scheduler.wait_outside(OUTSIDE_S):
                return [*refused, *scheduler.take_reports()]
            elif not scheduler.flying and scheduler.unfinished:
                self._fruitless += 1
                assert self._fruitless < FRUITLESS, f"stuck: {scheduler.unfinished} requests open and none can go on"
                return [*refused, *scheduler.take_reports()]
            if step is not None and scheduler.flying < scheduler.schedule.steps_in_flight:
                return [*refused, *scheduler.take_reports()]
        if scheduler.flying:
            waited_s = self._clock()
            self.doing = ("collect", waited_s)
            result = self._collect()
            now = self._clock()
            self.doing = (f"absorb step {result.number}", now)
            return [*refused, *scheduler.absorb(result, now, collect_s=now - waited_s)]
        return [*refused, *scheduler.take_reports()]

    def _collect(self) -> StepResult:
        result = self._executor.collect()
        if self._watch is not None:
            self._watch.collected(result)
        return result

    def _take_orders(self) -> list[Report]:
        refused: list[Report] = []
        while self._orders:
            order = self._orders.popleft()
            now = self._clock()
            if isinstance(order, Add):
                try:
                    self.scheduler.add(order.request, now)
                except UserError as error:
                    refused.append(
                        TokensOut(
                            request_id=order.request.id,
                            at_s=now,
                            tokens=(),
                            finish="error",
                            error=str(error),
                            overloaded=isinstance(error, OverloadedError),
                            prompt_tokens=len(order.request.tokens),
                        )
                    )
            elif isinstance(order, Cancel):
                self.scheduler.cancel(order.request_id, now)
            elif isinstance(order, Finish):
                self.scheduler.finish(order.request_id, now, reason=order.reason)
            elif isinstance(order, Sleep):
                self._sleepy = True
                # Of requests that have ended a step may still fly; whatever is ordered after this finds an empty cache.
                while self.scheduler.flying and not self.scheduler.unfinished:
                    refused += self.scheduler.absorb(self._collect(), self._clock())
                if self.scheduler.idle:
                    self._sleep()
            else:
                self.scheduler.forget()
        return refused

    def _sleep(self) -> None:
        """Nothing runs: no page holds anything that is needed."""
        self._sleepy = False
        self.scheduler.forget()
        if isinstance(self._executor, Resting):
            self._executor.rest()

    def _die(self, why: str) -> list[Report]:
        self.dead = why
        self.scheduler.fail_all(self._clock(), error=why)
        return self.scheduler.take_reports()

    def _tell(self, reports: list[Report]) -> None:
        if not reports:
            return
        for whole in self._report_sinks:
            whole.take_reports(reports)
        if self._sinks:
            for event in spelled_out(reports):
                for sink in self._sinks:
                    sink.take(event)

    def close(self) -> list[Report]:
        """Ends open requests with "abort", waits for what flies, closes the executor. A second call does nothing."""
        if self._closed:
            return []
        self._closed = True
        reports: list[Report] = []
        scheduler = self.scheduler
        if self.dead is None:
            reports += self._take_orders()
            scheduler.cancel_all(self._clock())
            try:
                while scheduler.flying:
                    reports += scheduler.absorb(self._collect(), self._clock())
            except Exception as error:  # closing: the executor may be gone already, and the requests have ended
                reports += self._die(f"{type(error).__name__}: {error}")
            self.dead = self.dead or "the engine was closed"
        reports += scheduler.take_reports()
        self._tell(reports)
        self._executor.close()
        if self._watch is not None:
            self._watch.close()
        return reports
