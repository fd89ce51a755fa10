"""What `serve` does when traffic leaves what the plan was made for: the guard of `tune`, with this server's hands.

Knows: where the guard's questions are answered (a process of low priority) and who puts a plan into service (the HTTP server). Refuses to
know: when that is done and what for (tune.guard), how (serving.replan).

      engine's reports -> hub -> DriftListener -> PlanGuard --simulate--> planner's process --> PlanGuard --change--> FrontServer -> engine
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from tradewind.config.goals import Goals
from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.engine.columns import Report
from tradewind.observability.drift import FEWEST, LEARNT, Arrival, Drift
from tradewind.observability.lives import Listener
from tradewind.tune.guard import Kind, Mode, Patience, PlanGuard, Targets

if TYPE_CHECKING:
    from tradewind.serving.replan import Changed
    from tradewind.simulate.steplog import StepLog
    from tradewind.simulate.trace_columns import Trace

OnDrift = Literal["off", "tell", "propose", "apply"]
ON_DRIFT: tuple[OnDrift, ...] = get_args(OnDrift)
LOG = logging.getLogger("tradewind.drift")
TICK_S = 1.0
PLAN_S = 300.0
"""So long a simulation may take, with nothing left over for it by others."""
STEPS = 4096
"""The newest steps, from which step times are fitted."""
TRACE = 2000
"""So many requests of a trace are read to know what is usual."""
WARNED: frozenset[Kind] = frozenset(("applied", "drift", "failed", "proposal", "put off", "undone"))


def read_usual(text: str | None) -> int | Trace:
    """What `--usual-traffic` names: so many of the first requests, or a trace. Raises UserError."""
    if text is None:
        return LEARNT
    if text.isascii() and text.isdigit():
        if not FEWEST <= int(text) <= 1_000_000:
            raise UserError(f"--usual-traffic is {text}; learn from at least {FEWEST} requests and at most 1000000")
        return int(text)
    from tradewind.simulate.traces import read_trace

    trace = read_trace(Path(text), limit=TRACE)
    if len(trace) < FEWEST:
        raise UserError(
            f"the trace {text} has {len(trace)} requests, too few to tell what is usual: at least {FEWEST} are needed"
        )
    return trace


class DriftWatch:
    """One server's. One thread: the asyncio loop's; `run` is to be run in it."""

    def __init__(
        self,
        *,
        mode: Mode,
        goals: Goals,
        plan: Plan | None,
        usual: int | Trace,
        steps_in_flight: int = 1,
        patience: Patience | None = None,
    ) -> None:
        self._plan, self._goals = plan, goals
        self._usual = None if isinstance(usual, int) else usual
        patience = patience or Patience()
        if isinstance(usual, int):
            patience = msgspec.structs.replace(patience, learn=usual)
        self.guard = PlanGuard(mode=mode, goals=goals, hands=self, patience=patience, log=_log)
        self.change_plan: Callable[..., Awaitable[Changed]] | None = None
        """Puts goals into service: `FrontServer.change_plan`. To be set before `run`, as this:"""
        self.keep_plan: Callable[[], None] | None = None
        """`FrontServer.keep_plan`."""
        self._steps_in_flight = steps_in_flight
        self._keeps_steps = mode != "tell"
        self._steps: StepLog | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def listener(self) -> Listener:
        """For the hub."""
        return self.guard.listener

    def take_reports(self, reports: list[Report]) -> None:
        """Keeps the engine's newest steps."""
        if self._steps is not None:
            self._steps.take_reports(reports)

    def planned(self, plan: Plan | None) -> None:
        """Another engine serves, under this plan."""
        self._plan = plan

    async def run(self) -> None:
        """Watches until it is cancelled."""
        try:
            if self._keeps_steps or self._usual is not None:
                # Simulators are large: what is imported in a thread does not hold the loop up.
                await asyncio.to_thread(importlib.import_module, "tradewind.tune.planner")
            if self._keeps_steps:
                from tradewind.simulate.steplog import StepLog

                self._steps = StepLog(steps_in_flight=self._steps_in_flight, most=STEPS)
            if self._usual is not None and self._plan is not None:
                await self._read_usual(self._usual, self._plan)
            while True:
                await asyncio.sleep(TICK_S)
                self.guard.tick()
        except Exception:  # whoever watches must not harm who serves
            LOG.exception("drift is not watched any more")
        finally:
            for task in self._tasks:
                task.cancel()
            if self._child is not None:
                self._child.kill()

    async def _read_usual(self, trace: Trace, plan: Plan) -> None:
        from tradewind.simulate.trace_columns import lines_of
        from tradewind.tune.planner import AskUsual, Usual

        question = AskUsual(goals=self._goals, plan=plan, trace=list(lines_of(trace)), block_tokens=trace.block_tokens)
        found = await self._ask(question)
        if isinstance(found, Usual):
            self.guard.use(found.envelope)
        else:
            LOG.warning(f"the trace does not tell what is usual, the first requests do: {_why(found)}")

    # -- tune.guard.Hands

    def simulate(
        self, drift: Drift, traffic: list[Arrival], *, usual: list[Arrival], targets: Targets, goals: Goals
    ) -> None:
        """See Hands."""
        self._start(self._simulate(drift, traffic, usual=usual, targets=targets, goals=goals))

    async def _simulate(
        self, drift: Drift, traffic: list[Arrival], *, usual: list[Arrival], targets: Targets, goals: Goals
    ) -> None:
        from tradewind.tune.planner import AskPlan, Planned

        assert self._plan is not None
        question = AskPlan(
            goals=goals,
            plan=self._plan,
            drift=drift,
            traffic=traffic,
            usual=usual,
            targets=targets,
            steps=[] if self._steps is None else list(self._steps.steps),
        )
        found = await self._ask(question)
        self.guard.simulated(found.proposed if isinstance(found, Planned) else _why(found))

    def change(self, goals: Goals, *, trial: bool) -> None:
        """See Hands."""
        self._start(self._change(goals, trial=trial))

    def keep(self) -> None:
        """See Hands."""
        assert self.keep_plan is not None
        self.keep_plan()

    async def _change(self, goals: Goals, *, trial: bool) -> None:
        assert self.change_plan is not None
        changed = await self.change_plan(goals, trial=trial)
        self.guard.changed(changed.outcome, changed.why, took_s=changed.took_s, waited=changed.waited)

    def _start(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("a change of plan broke off; drift is only told from now on", exc_info=task.exception())

    # -- the planner's process

    async def _ask(self, question: msgspec.Struct) -> Any:
        """The planner's answer; a text: why there is none."""
        from tradewind.tune.planner import Answer

        began_s = time.monotonic()
        data = msgspec.msgpack.encode(question)
        out = await asyncio.to_thread(self._asked, data)
        if isinstance(out, str):
            return out
        LOG.info(f"simulated for {time.monotonic() - began_s:.1f} s")
        try:
            return msgspec.msgpack.decode(out, type=Answer)
        except msgspec.MsgspecError as error:
            return f"the planner's answer cannot be read: {error}"

    def _asked(self, data: bytes) -> bytes | str:
        """In a thread that does nothing but wait."""
        child = self._child = subprocess.Popen(
            planner_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with child:
            try:
                out, said = child.communicate(data, timeout=PLAN_S)
            except subprocess.TimeoutExpired:
                child.kill()
                return f"the simulation took longer than {PLAN_S:g} s"
        self._child = None
        if child.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            return f"the planner ended with exit code {child.returncode}: {' '.join(last)}"
        return out


def planner_command() -> Sequence[str]:
    """What answers questions."""
    return [sys.executable, "-m", "tradewind.tune.planner"]


def _why(found: Any) -> str:
    return found if isinstance(found, str) else str(getattr(found, "why", found))


def _log(what: Kind, says: str) -> None:
    LOG.log(logging.WARNING if what in WARNED else logging.INFO, says)
