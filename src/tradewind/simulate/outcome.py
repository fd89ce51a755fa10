"""What became of a trace's requests, as columns, and the listener that fills them in as an engine tells.

Knows: events and sums. Refuses to know: what is simulated and what is real; whoever has an engine's events can have an outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tradewind.contract.events import Preempted, Scheduled, StepDone, TokensOut
from tradewind.contract.step import Ints
from tradewind.engine.columns import Report, StepTokens
from tradewind.simulate.trace_columns import Trace

GAP_BINS = 400
"""Bins of the histogram of times between tokens, from 1 microsecond on."""
BINS_PER_DECADE = 50
FIRST_WIDTH_S = 1 / 64


class Series:
    """Means over equal stretches of time; where there are too many, neighbours are joined and the stretches become longer."""

    def __init__(self, names: Sequence[str], *, points: int = 600) -> None:
        self.names = tuple(names)
        self.width_s = FIRST_WIDTH_S
        self._points = points
        self._sum = np.zeros((2 * points, len(self.names)))
        self._time = np.zeros(2 * points)

    def add(self, begin_s: float, end_s: float, values: Sequence[float]) -> None:
        """Counts values that held from begin to end; to the stretch in which they ended."""
        while end_s >= self.width_s * 2 * self._points:
            self._fold()
        place = int(end_s / self.width_s)
        length = end_s - begin_s
        self._time[place] += length
        row = self._sum[place]
        for index, value in enumerate(values):
            row[index] += value * length

    def columns(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Ends of the stretches in seconds, and one row of means for each."""
        some = self._time > 0
        ends: npt.NDArray[np.float64] = (np.flatnonzero(some) + 1) * np.float64(self.width_s)
        return ends, self._sum[some] / self._time[some, None]

    def _fold(self) -> None:
        for table in (self._sum, self._time):
            joined = table[0::2] + table[1::2]
            table[:] = 0
            table[: len(joined)] = joined
        self.width_s *= 2


SERIES = ("waiting", "running", "pages", "decoded")
"""Means of a replica: requests that wait and run, part of the pages held, tokens of decode rows per second."""


@dataclass(kw_only=True)
class Outcome:
    """What became of each request of a trace, as columns by its index; and sums. Times are the trace's seconds, NaN where none is."""

    trace: Trace
    scheduled_s: npt.NDArray[np.float64]
    first_s: npt.NDArray[np.float64]
    finish_s: npt.NDArray[np.float64]
    cached_tokens: Ints
    generated_tokens: Ints
    preemptions: Ints
    replica: Ints
    refused: dict[int, str] = field(default_factory=dict)
    """Index -> why it was never taken."""
    steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed, those of preempted requests again."""
    recomputed_tokens: int = 0
    untrusted_steps: int = 0
    untrusted: str = ""
    """Why the first of them was."""
    device_busy_s: float = 0.0
    end_s: float = 0.0
    """When the last replica came to rest."""
    replicas: int = 1
    router: str = ""
    waiting_time: dict[int, float] = field(default_factory=dict)
    """Queue length -> seconds that a replica had it."""
    gaps: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(GAP_BINS, np.int64))
    series: Series = field(default_factory=lambda: Series(SERIES))
    wall_s: float = 0.0
    """How long the simulation itself took."""
    times: str = ""
    """Where the step times come from."""

    @classmethod
    def empty(cls, trace: Trace) -> Outcome:
        """Nothing has happened yet."""
        count = len(trace)

        def moments() -> npt.NDArray[np.float64]:
            return np.full(count, np.nan)

        def numbers() -> Ints:
            return np.zeros(count, np.int32)

        return cls(
            trace=trace,
            scheduled_s=moments(),
            first_s=moments(),
            finish_s=moments(),
            cached_tokens=numbers(),
            generated_tokens=numbers(),
            preemptions=numbers(),
            replica=numbers(),
        )

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """Arrival to first token, by request."""
        return self.first_s - self.trace.arrival_s

    @property
    def tpot_s(self) -> npt.NDArray[np.float64]:
        """Time per output token after the first; NaN where there was only one."""
        later = np.where(self.generated_tokens > 1, self.generated_tokens - 1, 1)
        return np.where(self.generated_tokens > 1, (self.finish_s - self.first_s) / later, np.nan)

    @property
    def e2e_s(self) -> npt.NDArray[np.float64]:
        """Arrival to last token."""
        return self.finish_s - self.trace.arrival_s


class Witness:
    """A ReportSink that files what a replica tells in the outcome's columns. Calls `ended(index, at_s)` for each request that is over."""

    def __init__(self, outcome: Outcome, *, ended: Callable[[int, float], None] | None = None) -> None:
        self._out = outcome
        self._ended = ended
        self._before_s = 0.0

    def take_reports(self, reports: list[Report]) -> None:
        """See engine.columns.ReportSink."""
        out = self._out
        for report in reports:
            if isinstance(report, StepTokens):
                first = report.generated == 1
                if first.any():
                    for place in np.flatnonzero(first).tolist():
                        out.first_s[int(report.ids[place])] = report.at_s
            elif isinstance(report, StepDone):
                self._step(report)
            elif isinstance(report, TokensOut):
                self._tokens(report)
            elif isinstance(report, Scheduled):
                if not report.resumed:
                    index = int(report.request_id)
                    out.scheduled_s[index] = report.at_s
                    out.cached_tokens[index] = report.cached_tokens
            elif isinstance(report, Preempted):
                out.preemptions[int(report.request_id)] += 1

    def _tokens(self, report: TokensOut) -> None:
        out, index = self._out, int(report.request_id)
        if report.generated_tokens == len(report.tokens) > 0:
            out.first_s[index] = report.at_s
        if report.finish is None:
            return
        if report.finish == "error":
            out.refused[index] = report.error or "an error"
        else:
            out.finish_s[index] = report.at_s
            out.generated_tokens[index] = report.generated_tokens
        if self._ended is not None:
            self._ended(index, report.at_s)

    def _step(self, report: StepDone) -> None:
        out = self._out
        out.steps += 1
        out.computed_tokens += report.tokens
        out.prompt_tokens += report.prompt_tokens
        length = report.at_s - self._before_s
        out.waiting_time[report.waiting] = out.waiting_time.get(report.waiting, 0.0) + length
        used = report.pages_used[0] / max(1, report.pages_total[0])
        decoded = (report.tokens - report.prompt_tokens) / length if length > 0 else 0.0
        out.series.add(self._before_s, report.at_s, (report.waiting, report.running, used, decoded))
        self._before_s = report.at_s

    def rested_until(self, now: float) -> None:
        """The replica had nothing to do until now."""
        length = now - self._before_s
        if length > 0:
            self._out.waiting_time[0] = self._out.waiting_time.get(0, 0.0) + length
            self._out.series.add(self._before_s, now, (0, 0, 0, 0))
            self._before_s = now
