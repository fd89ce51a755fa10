"""What an engine lacked, and for how long: slots, pages, tokens of a step, the host, or nothing but time.

Knows: events, and how to add up the seconds between them. Refuses to know: whether the engine is real; simulated ones tell the same.

      queue held up by     |--- slot ---|      |-- pages --|                 by cause, as the engine says it
      device               |==step==| |==step==|  |==step==|                 what is between steps while there is work is the host's
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from tradewind.contract.events import Event, Held, StepDone

Resource = Literal["host", "pages", "slots", "step budget", "step time"]
OF_CAUSE: dict[str, Resource] = {"pages": "pages", "slot": "slots", "tokens": "step budget"}
HELD = 0.1
"""From this part of the working time on what holds the queue up counts as short."""
HOST = 0.4
"""From this part of the working time without a step on the device on the host counts as short."""


class StrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one engine, or the sum over several."""

    working_s: float
    """There was something to do."""
    held_s: dict[str, float]
    """The queue was held up, by what was lacking."""
    first_s: dict[str, float]
    """When each of these was first lacking, by the engine's clock."""
    device_s: float
    steps: int

    @property
    def host_share(self) -> float:
        """Part of the working time in which the device had no step."""
        return max(0.0, 1 - self.device_s / self.working_s) if self.working_s > 0 else 0.0

    def share(self, resource: str) -> float:
        """Part of the working time in which it held the queue up."""
        return self.held_s.get(resource, 0.0) / self.working_s if self.working_s > 0 else 0.0

    @property
    def binding(self) -> Resource:
        """What was short: what held the queue up longest, if that was long enough; else the host; else only steps took their time."""
        held = max(OF_CAUSE.values(), key=lambda name: (self.held_s.get(name, 0.0), name))
        if self.share(held) >= HELD:
            return held
        return "host" if self.host_share >= HOST else "step time"


class Strain:
    """A listener that adds up. One writer; `report` may be asked at any time."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._cause: str | None = None
        self._since_s = self._last_s = 0.0
        self._working_s = self._device_s = 0.0
        self._steps = 0
        self._idle = True

    def take(self, event: Event) -> None:
        """See contract.events.Sink."""
        if isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, Held):
            self._hold(OF_CAUSE.get(event.cause or "", event.cause), event.at_s)

    def take_reports(self, reports: Iterable[object]) -> None:
        """A whole turn's reports (engine.columns.ReportSink); what is not about steps or the queue is passed over."""
        for report in reports:
            if isinstance(report, StepDone | Held):
                self.take(report)

    def forget(self) -> None:
        """Begins anew: what was told so far does not count. To be called while the engine rests."""
        self._held.clear()
        self._first.clear()
        self._working_s = self._device_s = 0.0
        self._steps = 0

    def report(self) -> StrainReport:
        """So far; changes nothing."""
        return StrainReport(
            working_s=self._working_s,
            held_s=dict(self._held),
            first_s=dict(self._first),
            device_s=self._device_s,
            steps=self._steps,
        )

    def _hold(self, cause: str | None, now: float) -> None:
        if self._cause is not None:
            self._held[self._cause] = self._held.get(self._cause, 0.0) + max(0.0, now - self._since_s)
        self._cause, self._since_s = cause, now
        if cause is not None:
            self._first.setdefault(cause, now)

    def _step(self, done: StepDone) -> None:
        # After a rest work begins with the decision; otherwise where the step before ended.
        begin_s = done.decided_s or done.at_s - done.device_s
        if not self._idle:
            begin_s = min(begin_s, self._last_s)
        self._working_s += max(0.0, done.at_s - max(begin_s, self._last_s))
        self._device_s += min(done.device_s, max(0.0, done.at_s - self._last_s))
        self._last_s = done.at_s
        self._idle = done.running == 0 and done.waiting == 0
        self._steps += 1
        if self._cause is not None:  # so that a report in the middle has it
            self._hold(self._cause, done.at_s)


def summed(reports: Iterable[StrainReport]) -> StrainReport:
    """Several engines as one: seconds add up, what came first counts."""
    held: dict[str, float] = {}
    first: dict[str, float] = {}
    working = device = 0.0
    steps = 0
    for report in reports:
        working, device, steps = working + report.working_s, device + report.device_s, steps + report.steps
        for name, seconds in report.held_s.items():
            held[name] = held.get(name, 0.0) + seconds
        for name, at_s in report.first_s.items():
            first[name] = min(first.get(name, at_s), at_s)
    return StrainReport(working_s=working, held_s=held, first_s=first, device_s=device, steps=steps)
