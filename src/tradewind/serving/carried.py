"""Requests that go from one engine to the next before they had a slot: what listeners are told of that.

Knows: whose reports are of an engine that has given the request up. Refuses to know: handles and processes.

      first engine    Arrived  Delayed | Cancel sent     Scheduled  TokensOut(abort)           dropped from the line on, but Arrived
      next engine                                                       Arrived | Scheduled ... dropped up to the line

So a listener sees Arrived, Delayed, Scheduled, ...: one life, whose wait for its slot is as long as it was.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tradewind.contract.events import Arrived, Delayed, Preempted, Scheduled, TokensOut, Woken
from tradewind.engine.columns import Report, StepTokens


class Carried:
    """The requests on their way. One writer: the asyncio loop's thread."""

    def __init__(self) -> None:
        self._old: set[str] = set()
        """The first engine has not said its last word on these ..."""
        self._new: set[str] = set()
        """... and the next one not its first on these."""

    def __bool__(self) -> bool:
        return bool(self._old or self._new)

    @property
    def coming_back(self) -> int:
        """How many the first engine has not said its last word on."""
        return len(self._old)

    def left(self, request_ids: Iterable[str]) -> None:
        """These were given up by an engine, which may still report of them."""
        self._old.update(request_ids)

    def engine_gone(self) -> None:
        """The first engine reports nothing more."""
        self._new |= self._old
        self._old.clear()

    def forget(self) -> None:
        """All lives were ended for the listeners: what comes is new to them."""
        self._old.clear()
        self._new.clear()

    def filtered(self, reports: Iterable[Report]) -> list[Report]:
        """The reports without what no listener is to see."""
        return [kept for report in reports if (kept := self._kept(report)) is not None]

    def _kept(self, report: Report) -> Report | None:
        if isinstance(report, StepTokens):
            return self._columns(report)
        if not isinstance(report, Arrived | Delayed | Preempted | Scheduled | TokensOut | Woken):
            return report
        name = report.request_id
        if name in self._old:
            if isinstance(report, TokensOut) and report.finish is not None:
                self._old.discard(name)
                self._new.add(name)
            return report if isinstance(report, Arrived) else None  # given up before the engine had seen it
        if name in self._new:
            self._new.discard(name)
            return None if isinstance(report, Arrived) else report
        return report

    def _columns(self, step: StepTokens) -> StepTokens | None:
        if self._old.isdisjoint(step.ids):
            return step
        kept = np.array([name not in self._old for name in step.ids], np.bool_)
        if not kept.any():
            return None
        return StepTokens(
            at_s=step.at_s,
            ids=[name for name, keep in zip(step.ids, kept.tolist(), strict=True) if keep],
            tokens=step.tokens[kept],
            generated=step.generated[kept],
            cached=step.cached[kept],
            prompt=step.prompt[kept],
        )
