"""Results and how they are shown: the records, a table for the terminal, JSON and a plot.

Knows: medians, ranges, percentiles and drawing. Refuses to know: how anything was measured.
matplotlib comes with the extra `plot` and is imported only to draw.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tradewind.bench.limits import Limits, Share
from tradewind.config.plan import Plan
from tradewind.contract.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
"""Goes up when a field changes its meaning."""


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One request of one run; times in seconds since it arrived."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    first_token_s: float
    finished_s: float

    @property
    def per_token_s(self) -> float | None:
        """Time per output token after the first; None where there is only one."""
        later = self.output_tokens - 1
        return (self.finished_s - self.first_token_s) / later if later else None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One counted run of a workload."""

    wall_s: float
    """From the call until every answer was there."""
    requests: tuple[RequestTimes, ...]
    answers: str
    """Hash of all output tokens: equal runs gave equal tokens."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, once for each counted run."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    values: tuple[float, ...]
    share: Share | None = None
    """How much of the machine's ceiling the median is."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A workload and what came of it; the first metric is the one it is known by."""

    workload: str
    title: str
    prompts: int
    prompt_tokens: int
    output_tokens: int
    metrics: tuple[Metric, ...]
    runs: tuple[Run, ...]

    @property
    def same_answers(self) -> bool:
        """Whether all counted runs gave the same tokens."""
        return len({run.answers for run in self.runs}) == 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything somebody needs to judge the figures, or to get them again."""

    format: int
    date: str
    command: tuple[str, ...]
    cpu: str
    cores: int
    system: str
    versions: dict[str, str]
    text: str
    """Where the prompts' text is from."""
    plan: Plan
    start: tuple[tuple[str, float], ...]
    """The phases of the start and their seconds."""
    repeats: int
    limits: Limits
    measured: tuple[Measured, ...]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between neighbours; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


# --------------------------------------------------------------------------------------------------------------- files


def save(report: Report, path: Path) -> tuple[str, ...]:
    """Writes the report as JSON to `path` and the plot beside it as PNG; returns a sentence for each file or why it is not there.

    Raises UserError when the JSON cannot be written. A missing matplotlib costs only the plot.
    """
    said = [f"report: {write_json(report, path)}"]
    picture = path.with_suffix(".png")
    try:
        draw(report, picture)
    except MissingExtraError as error:
        said.append(f"no plot: {error}")
    except OSError as error:
        said.append(f"no plot: {picture} cannot be written: {error.strerror or error}")
    else:
        said.append(f"plot: {picture}")
    return tuple(said)


def write_json(report: Report, path: Path) -> Path:
    """Writes the report, making the folder where it lacks. Raises UserError when that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def read_json(path: Path) -> Report:
    """The report in a file; changes nothing. Raises UserError when it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a benchmark report: {error}") from None


# ------------------------------------------------------------------------------------------------------------ terminal


def show(report: Report, console: Console) -> None:
    """Prints the results, the machine's ceilings and the plan's reasons."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    plan = report.plan
    title = f"{model_name(report)} on {report.cpu}, {report.limits.threads} threads"
    results = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading, justify in (("work", "left"), ("median", "right"), ("range", "right"), ("of the limit", "left")):
        results.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for measured in report.measured:
        results.add_row(f"[bold]{measured.workload}[/bold] {measured.title}")
        for metrics in grouped(measured.metrics):
            first = metrics[0]
            name, values = first.name, figure(first.median)
            spread = f"{figure(first.low)} – {figure(first.high)}" if len(first.values) > 1 else ""
            if len(metrics) > 1:
                # Both ends; the rest is in the JSON.
                name += f", {metrics[-1].name.rpartition(' ')[2]}"
                values, spread = f"{values} / {figure(metrics[-1].median)}", ""
            share = f"{first.share.value:.0%} {first.share.of}" if first.share is not None else ""
            results.add_row(f"   {name}", f"{values} {first.unit}", spread, share)
        if not measured.same_answers:
            results.add_row("   [yellow]answers differ between runs[/yellow]")
    console.print(results)
    console.print(_limits_line(report.limits), highlight=False)
    console.print(
        f"{report.repeats} counted runs after one to warm up; text: {report.text}", highlight=False, markup=False
    )
    start_s = sum(seconds for _, seconds in report.start)
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.start)
    console.print(f"start: {start_s:.2f} s ({parts})", highlight=False, markup=False)
    reasons = Table(title=f"the plan ({plan.scenario})", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("choice", "value", "why"):
        reasons.add_column(heading, overflow="fold")
    for reason in plan.reasons:
        reasons.add_row(reason.choice, reason.value + (" (pinned)" if reason.pinned else ""), reason.why)
    console.print(reasons)


def grouped(metrics: Sequence[Metric]) -> list[list[Metric]]:
    """Metrics in order, neighbours that are percentiles ("... p50", "... p90") of one thing together."""
    groups: list[list[Metric]] = []
    for metric in metrics:
        stem, mark, _ = metric.name.rpartition(" p")
        if groups and mark and groups[-1][0].name.rpartition(" p")[0] == stem:
            groups[-1].append(metric)
        else:
            groups.append([metric])
    return groups


def model_name(report: Report) -> str:
    """The model's name without the place on this machine."""
    return Path(report.plan.model).name


def figure(value: float) -> str:
    """A number with three digits that count."""
    if not math.isfinite(value):
        return "–"
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def _limits_line(limits: Limits) -> str:
    parts = [
        f"memory read {limits.memory_read_bytes_per_s / 1e9:.1f} GB/s",
        f"cache read {limits.cache_read_bytes_per_s / 1e9:.1f} GB/s",
        f"matmul f32 {limits.matmul_f32_flops_per_s / 1e9:.0f} GFLOP/s",
    ]
    if limits.matmul_bf16_flops_per_s is not None:
        parts.append(f"bf16 {limits.matmul_bf16_flops_per_s / 1e9:.0f} GFLOP/s")
    if limits.matmul_int8_ops_per_s is not None:
        parts.append(f"int8 {limits.matmul_int8_ops_per_s / 1e9:.0f} GOP/s")
    return "limits, measured just now: " + ", ".join(parts)


# ---------------------------------------------------------------------------------------------------------------- plot

INK, SOFT, BLUE, ORANGE, GREEN, GRID = "#1f2933", "#7b8794", "#2f6fb0", "#d9822b", "#3a8f5c", "#e4e7eb"
_LINES = (BLUE, ORANGE, GREEN)


def matplotlib_figure(*, width: float, height: float) -> Any:
    """An empty figure that draws without a screen. Raises MissingExtraError when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(package="matplotlib", extra="plot", purpose="the plot") from None
    # No pyplot: it keeps a list of figures for the whole process and asks for a screen.
    drawn = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn


def draw(report: Report, path: Path) -> None:
    """Draws the report as PNG: one bar a workload with its runs as dots, below it how long requests waited.

    Raises MissingExtraError when matplotlib is not installed.
    """
    many = [measured for measured in report.measured if measured.prompts > 1]
    drawn = matplotlib_figure(width=max(5.5, 2.0 * len(report.measured)), height=6.8 if many else 3.6)
    drawn.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    top, *rest = drawn.subfigures(2, 1, height_ratios=(1.0, 0.95)) if many else [drawn]
    drawn.suptitle(
        f"{model_name(report)}\n{report.cpu}, {report.limits.threads} threads, {report.date[:10]}",
        x=0.01,
        ha="left",
        fontsize=11,
        color=INK,
        fontweight="bold",
    )
    axes = top.subplots(1, len(report.measured), squeeze=False)[0]
    for axis, measured in zip(axes, report.measured, strict=True):
        _draw_bar(axis, measured)
    if many:
        left, right = rest[0].subplots(1, 2)
        _draw_waits(left, many, title="time to first token, s", pick=lambda request: request.first_token_s)
        _draw_waits(
            right,
            many,
            title="time per output token, ms",
            pick=lambda request: None if request.per_token_s is None else 1e3 * request.per_token_s,
        )
    drawn.savefig(path)


def quiet_axis(axis: Any) -> None:
    """Takes away what draws the eye from the data."""
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(SOFT)
    axis.tick_params(colors=SOFT, labelsize=8, length=0)
    axis.set_axisbelow(True)


def _draw_bar(axis: Any, measured: Measured) -> None:
    metric = measured.metrics[0]
    axis.bar([0], [metric.median], width=0.5, color=BLUE)
    offsets = [
        0.1 * (i - (len(metric.values) - 1) / 2) / max(1, len(metric.values) - 1) for i in range(len(metric.values))
    ]
    axis.scatter(offsets, metric.values, s=14, color="white", edgecolor=INK, linewidth=0.8, zorder=3)
    share = f"\n{metric.share.value:.0%} of {metric.share.of}" if metric.share is not None else ""
    axis.set_title(f"{measured.workload}\n{textwrap.fill(measured.title, 19)}", fontsize=8.5, color=INK)
    axis.set_xlabel(f"{metric.name}\n{figure(metric.median)} {metric.unit}{share}", fontsize=8.5, color=INK)
    axis.set_xlim(-0.6, 0.6)
    axis.set_ylim(0, metric.high * 1.12)
    axis.set_xticks([])
    axis.yaxis.grid(True, color=GRID)
    quiet_axis(axis)


def _draw_waits(axis: Any, many: Sequence[Measured], *, title: str, pick: Any) -> None:
    """Share of requests (of all counted runs) that waited at most so long."""
    for measured, colour in zip(many, _LINES, strict=False):
        waits = sorted(wait for run in measured.runs for request in run.requests if (wait := pick(request)) is not None)
        if not waits:
            continue
        heights = [100 * (i + 1) / len(waits) for i in range(len(waits))]
        axis.step([waits[0], *waits], [0, *heights], where="post", color=colour, linewidth=1.6, label=measured.workload)
    axis.set_title(title, fontsize=9.5, color=INK, loc="left")
    axis.set_ylabel("% of requests", fontsize=8, color=SOFT)
    axis.set_ylim(0, 103)
    axis.set_xlim(left=0)
    axis.grid(True, color=GRID)
    axis.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right")
    quiet_axis(axis)
