"""What a simulation (or a run) came to: percentiles, rates and curves, as a record, a table and a picture.

Knows: statistics and how they are shown. Refuses to know: how the times came about. matplotlib comes with the extra `plot` and is
imported only to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tradewind.contract.errors import MissingExtraError
from tradewind.simulate.outcome import BINS_PER_DECADE, SERIES, Outcome

FORMAT = 1
BEYOND = 0.01
"""From this part of untrusted steps on the report warns."""

Reals = npt.NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of one time, in seconds; None where nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Reals) -> Spread:
        """From samples; NaNs are those that have none."""
        own = values[~np.isnan(values)]
        if not len(own):
            return cls()
        p50, p90, p99 = np.quantile(own, [0.5, 0.9, 0.99]).tolist()
        return cls(mean=float(own.mean()), p50=p50, p90=p90, p99=p99)


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """One class of traffic, or one tenant."""

    name: str
    requests: int
    finished: int
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Means over stretches of time, by the end of each in seconds."""

    at_s: tuple[float, ...]
    waiting: tuple[float, ...]
    """Queue length of a replica."""
    running: tuple[float, ...]
    pages: tuple[float, ...]
    """Part of the pages that sequences hold."""
    arrived_per_s: tuple[float, ...]
    decoded_per_s: tuple[float, ...]
    """Tokens of decode rows, of all replicas."""


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in numbers. Times in seconds, shares from 0 to 1."""

    format: int = FORMAT
    trace: str
    notes: tuple[str, ...]
    step_times: str
    replicas: int
    router: str
    requests: int
    finished: int
    refused: int
    refused_why: str
    """Why the first of them was."""
    duration_s: float
    """From the first arrival to the last token."""
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    """Prompt tokens served, cached ones among them."""
    ttft_s: Spread
    tpot_s: Spread
    itl_s: Spread
    """Between a request's tokens, as they came out of steps."""
    e2e_s: Spread
    queue_s: Spread
    """Arrival until the request got a slot."""
    waiting_mean: float
    """Queue length of a replica, in the mean over time; the next two likewise."""
    waiting_p99: float
    waiting_max: int
    cache_hit_rate: float
    """Part of the prompt tokens of finished requests that the cache had."""
    preemptions: int
    recomputed_tokens: int
    steps: int
    tokens_per_step: float
    device_busy: float
    """Part of the time in which a replica's device worked."""
    load_spread: float
    """Requests of the replica that got most, relative to the mean of all."""
    untrusted_steps: float
    """Part of the steps outside what the step-time model was fitted to."""
    untrusted_why: str
    classes: tuple[GroupReport, ...]
    tenants: tuple[GroupReport, ...]
    curves: Curves
    simulated_requests_per_s: float
    """How fast the simulation itself was."""

    def json(self) -> bytes:
        """As indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


MOST_GROUPS = 64


def summarise(outcome: Outcome) -> SimulationReport:
    """The report of an outcome; changes nothing."""
    trace = outcome.trace
    ttft, tpot, e2e = outcome.ttft_s, outcome.tpot_s, outcome.e2e_s
    done = ~np.isnan(outcome.finish_s)
    finished = int(done.sum())
    duration = float(np.nanmax(outcome.finish_s)) if finished else 0.0
    span = duration or 1.0
    prompt = int(trace.prompt_tokens[done].sum())
    lengths = np.array(sorted(outcome.waiting_time), dtype=np.float64)
    weights = np.array([outcome.waiting_time[int(n)] for n in lengths])
    total = float(weights.sum()) or 1.0
    by_replica = np.bincount(outcome.replica, minlength=outcome.replicas)

    def groups(index: npt.NDArray[np.int32], names: Sequence[str]) -> tuple[GroupReport, ...]:
        if len(names) < 2:
            return ()
        out = []
        for place, name in enumerate(names[:MOST_GROUPS]):
            own = index == place
            if own.any():
                out.append(
                    GroupReport(
                        name=name,
                        requests=int(own.sum()),
                        finished=int((own & done).sum()),
                        ttft_s=Spread.of(ttft[own]),
                        tpot_s=Spread.of(tpot[own]),
                        e2e_s=Spread.of(e2e[own]),
                    )
                )
        return tuple(out)

    return SimulationReport(
        trace=trace.name,
        notes=trace.notes,
        step_times=outcome.times,
        replicas=outcome.replicas,
        router=outcome.router,
        requests=len(trace),
        finished=finished,
        refused=len(outcome.refused),
        refused_why=next(iter(outcome.refused.values()), ""),
        duration_s=duration,
        requests_per_s=finished / span,
        output_tokens_per_s=int(outcome.generated_tokens.sum()) / span,
        prompt_tokens_per_s=prompt / span,
        ttft_s=Spread.of(ttft),
        tpot_s=Spread.of(tpot),
        itl_s=_of_histogram(outcome.gaps),
        e2e_s=Spread.of(e2e),
        queue_s=Spread.of(outcome.scheduled_s - trace.arrival_s),
        waiting_mean=float((lengths * weights).sum()) / total,
        waiting_p99=_weighted_quantile(lengths, weights, 0.99),
        waiting_max=int(lengths[-1]) if len(lengths) else 0,
        cache_hit_rate=int(outcome.cached_tokens[done].sum()) / max(1, prompt),
        preemptions=int(outcome.preemptions.sum()),
        recomputed_tokens=outcome.recomputed_tokens,
        steps=outcome.steps,
        tokens_per_step=outcome.computed_tokens / max(1, outcome.steps),
        device_busy=outcome.device_busy_s / max(1e-12, outcome.end_s * outcome.replicas),
        load_spread=float(by_replica.max() / by_replica.mean()) if len(trace) else 1.0,
        untrusted_steps=outcome.untrusted_steps / max(1, outcome.steps),
        untrusted_why=outcome.untrusted,
        classes=groups(trace.traffic_class, trace.classes),
        tenants=groups(trace.tenant, trace.tenants),
        curves=_curves(outcome),
        simulated_requests_per_s=len(trace) / max(1e-9, outcome.wall_s),
    )


def _of_histogram(bins: npt.NDArray[np.int64]) -> Spread:
    """Percentiles from the executor's logarithmic histogram, to within a bin (5 %)."""
    total = int(bins.sum())
    if not total:
        return Spread()
    middle = 10 ** ((np.arange(len(bins)) + 0.5) / BINS_PER_DECADE - 6)
    upto = np.cumsum(bins)
    p50, p90, p99 = (float(middle[int(np.searchsorted(upto, part * total))]) for part in (0.5, 0.9, 0.99))
    return Spread(mean=float((bins * middle).sum() / total), p50=p50, p90=p90, p99=p99)


def _weighted_quantile(values: Reals, weights: Reals, part: float) -> float:
    if not len(values):
        return 0.0
    upto = np.cumsum(weights)
    place = min(int(np.searchsorted(upto, part * upto[-1])), len(values) - 1)
    return float(values[place])


def _curves(outcome: Outcome) -> Curves:
    at, means = outcome.series.columns()
    column = {name: tuple(means[:, place].tolist()) for place, name in enumerate(SERIES)} if len(at) else {}
    edges = np.concatenate(([0.0], at))
    trace = outcome.trace
    lengths = np.diff(edges)
    arrived = np.histogram(trace.arrival_s, edges)[0] / lengths if len(at) else np.zeros(0)
    return Curves(
        at_s=tuple(at.tolist()),
        waiting=column.get("waiting", ()),
        running=column.get("running", ()),
        pages=column.get("pages", ()),
        arrived_per_s=tuple(arrived.tolist()),
        decoded_per_s=tuple(outcome.replicas * rate for rate in column.get("decoded", ())),
    )


# ------------------------------------------------------------------------------------------------------------- terminal


def report_text(report: SimulationReport) -> RenderableType:
    """Tables for a terminal; nothing is printed here."""
    parts: list[RenderableType] = [_facts(report), Text(), _times(report)]
    for title, rows in (("By class", report.classes), ("By tenant", report.tenants)):
        if rows:
            parts += [Text(), _groups(title, rows)]
    notes = [*report.notes]
    if report.refused:
        notes.append(
            f"{report.refused} of {report.requests} requests were refused, the first because {report.refused_why}"
        )
    if report.untrusted_steps > BEYOND:
        notes.append(
            f"{100 * report.untrusted_steps:.0f} % of the steps lie outside what the step times were fitted to; the first: "
            f"{report.untrusted_why}"
        )
    parts += [Text(), *(Text(note[0].upper() + note[1:] + ".") for note in (report.step_times, *notes))]
    return Group(*parts)


def show_s(seconds: float | None) -> str:
    """A time with three digits and its unit."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            value = seconds / size
            digits = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("every time has a unit")


def _facts(report: SimulationReport) -> Table:
    table = Table.grid(padding=(0, 2))
    fleet = "1 replica" if report.replicas == 1 else f"{report.replicas} replicas, {report.router.replace('_', ' ')}"
    unfinished = report.requests - report.finished
    rows = [
        ("trace", f"{report.trace}: {report.requests} requests in {report.duration_s:.1f} s on {fleet}"),
        (
            "throughput",
            f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.0f} output and "
            f"{report.prompt_tokens_per_s:.0f} prompt tokens/s"
            + (f"; {unfinished} did not finish" if unfinished else ""),
        ),
        (
            "queue",
            f"{report.waiting_mean:.1f} in the mean, {report.waiting_p99:.0f} at p99, {report.waiting_max} at most",
        ),
        ("cache", _cache_text(report)),
        (
            "steps",
            f"{report.steps} of {report.tokens_per_step:.1f} tokens; devices busy {100 * report.device_busy:.0f} % of the time"
            + (f"; the busiest replica got {report.load_spread:.2f} times its share" if report.replicas > 1 else ""),
        ),
    ]
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _cache_text(report: SimulationReport) -> str:
    found = f"{100 * report.cache_hit_rate:.1f} % of prompt tokens found"
    return f"{found}; {report.preemptions} preemptions, {report.recomputed_tokens} tokens computed again"


def _times(report: SimulationReport) -> Table:
    table = Table(title="Times", title_justify="left")
    table.add_column("")
    for name in ("p50", "p90", "p99", "mean"):
        table.add_column(name, justify="right")
    for name, spread in (
        ("TTFT", report.ttft_s),
        ("TPOT", report.tpot_s),
        ("between tokens", report.itl_s),
        ("e2e", report.e2e_s),
        ("in the queue", report.queue_s),
    ):
        table.add_row(name, *(show_s(value) for value in (spread.p50, spread.p90, spread.p99, spread.mean)))
    return table


def _groups(title: str, rows: Sequence[GroupReport]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("name")
    for name in ("requests", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "e2e p50", "e2e p99"):
        table.add_column(name, justify="right")
    for row in rows:
        spreads = [show_s(value) for s in (row.ttft_s, row.tpot_s, row.e2e_s) for value in (s.p50, s.p99)]
        table.add_row(Text(row.name or "(none)"), str(row.requests), *spreads)
    return table


# -------------------------------------------------------------------------------------------------------------- picture


def draw(report: SimulationReport, path: Path) -> None:
    """Writes queue, running requests, pages and tokens over time as PNG. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(package="matplotlib", extra="plot", purpose="a picture of the simulation") from None
    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(4, 1, sharex=True)
    curves = report.curves
    for axis, label, values in (
        (axes[0], "requests waiting", curves.waiting),
        (axes[1], "requests running", curves.running),
        (axes[2], "pages held, %", [100 * part for part in curves.pages]),
        (axes[3], "decoded tokens/s", curves.decoded_per_s),
    ):
        axis.plot(curves.at_s, values, linewidth=1.2)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_title(
        f"{report.trace}, {report.replicas} x: TTFT p50 {show_s(report.ttft_s.p50)}, p99 {show_s(report.ttft_s.p99)}; "
        f"TPOT p50 {show_s(report.tpot_s.p50)}, p99 {show_s(report.tpot_s.p99)}",
        fontsize=10,
    )
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=120)
