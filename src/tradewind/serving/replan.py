"""Another plan put into service under a running server, without losing a request.

Knows: the order of it, and the way back. Refuses to know: which plan, and why (tune); how a process is started (supervisor).

      new requests    | ... wait (as many as may wait anyway) ............................. | served
      queued ones     | come back, wait ................................................... | served
      running ones    | finish, within drain_s |
      engine          |                        | ends | starts under the new goals ........ |
                                  not finished: put off,             it does not start: under the old ones again
                                  nothing was changed
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Literal

import msgspec

from tradewind.config.goals import Goals
from tradewind.contract.errors import EngineDeadError, UserError
from tradewind.serving.supervisor import LOOK_S, Supervisor

LOG = logging.getLogger("tradewind.plan")


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    outcome: Literal["changed", "put off", "failed", "dead"]
    """put off: nothing was done. failed: the old plan is in force again. dead: no engine starts any more."""
    why: str = ""
    took_s: float = 0.0
    """From the last request that was let in to the first that is again."""
    waited: int = 0
    """Requests that waited for it."""


async def change_plan(engine: Supervisor, goals: Goals, *, drain_s: float, trial: bool) -> Changed:
    """Ends the engine's process and starts another for `goals`; in the asyncio loop's thread. Raises nothing that a plan can cause.

    With `trial` the goals of before are the engine's fallback from then on.
    """
    before = engine.goals
    began_s = time.monotonic()
    engine.hold()
    while engine.open and time.monotonic() - began_s < drain_s:
        await asyncio.sleep(LOOK_S)
    outcome: Literal["changed", "put off", "failed", "dead"] = "changed"
    if engine.open:
        outcome, why = "put off", f"{engine.open} requests still ran after {drain_s:g} s"
    else:
        LOG.info(f"the engine is started under another plan; {engine.waiting} requests wait for it")
        why = await _why_not(engine, goals)
        if why:
            LOG.warning(
                f"the engine does not start under the new plan, so it is started under the old one again: {why}"
            )
            outcome, worse = "failed", await _why_not(engine, before)
            if worse:
                outcome, why = "dead", f"the engine starts neither under the new plan nor under the old one: {worse}"
        engine.fallback = before if trial and outcome == "changed" else None
    waited = engine.waiting
    await engine.release()
    if engine.why_dead is not None:
        outcome, why = "dead", engine.why_dead
    return Changed(outcome=outcome, why=why, took_s=time.monotonic() - began_s, waited=waited)


async def _why_not(engine: Supervisor, goals: Goals) -> str:
    """Starts the engine for other goals; why that failed, or nothing."""
    try:
        await engine.switch(goals)
    except (EngineDeadError, UserError) as error:
        return str(error)
    return engine.engine_dead or ""
