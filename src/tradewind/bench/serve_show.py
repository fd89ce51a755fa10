"""A load test's report for people: a table on the terminal, one HTML page with plots.

Knows: rich, and the SVG of observability.figures. Refuses to know: where the figures come from.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tradewind.bench.serve_measure import Sample
from tradewind.bench.serve_report import Figure, ServeReport, token_times
from tradewind.observability import figures

if TYPE_CHECKING:
    from rich.console import Console

ROWS = (
    ("ttft", "server TTFT", "sent to the first token"),
    ("tpot", "TPOT", "per token after the first"),
    ("itl", "between pieces", "gaps of the stream"),
    ("e2e", "whole answer", "sent to the end"),
    ("client_wait", "client wait", "due to sent: not the server's"),
    ("user_ttft", "TTFT for the user", "due to the first token"),
    ("server_queue", "queue", "as the server says"),
)
COLUMNS = ("mean", "p50", "p90", "p99")


def show(report: ServeReport, console: Console) -> None:
    """Prints the figures as tables, then the notes."""
    from rich.markup import escape
    from rich.table import Table

    console.print(
        f"[bold]{escape(report.load)}[/bold] against {escape(report.url)} ({escape(report.model)}, {report.api})"
    )
    console.print(escape(_counted(report)))
    rates = Table(box=None, pad_edge=False)
    for name in ("rate", "", "95 % interval"):
        rates.add_column(name, justify="left" if name == "rate" else "right")
    for figure in report.figures:
        if figure.better == "higher":
            name = figure.name.replace("_per_s", " per second").replace("_", " ")
            rates.add_row(name, f"{figure.value:,.4g}", _between(figure, 1.0))
    console.print(rates)
    times = Table(box=None, pad_edge=False)
    times.add_column("milliseconds", no_wrap=True)
    for name in (*COLUMNS, "p50, 95 %", "p99, 95 %"):
        times.add_column(name, justify="right", no_wrap=True)
    for key, title, _ in ROWS:
        found = [report.figure(f"{key}_{column}") for column in COLUMNS]
        whole = [figure for figure in found if figure is not None]
        if len(whole) == len(COLUMNS):
            times.add_row(title, *(_ms(one.value) for one in whole), _between(whole[1], 1e3), _between(whole[3], 1e3))
    console.print(times)
    console.print(
        "; ".join(f"{title}: {what}" for key, title, what in ROWS if report.figure(f"{key}_p50")), style="dim"
    )
    for one in report.classes:
        if one.attained is not None:
            got = one.attained
            console.print(
                f"{escape(one.traffic_class)}: {got.met} of {got.of} met {escape(_targets(report, one.traffic_class))}:"
                f" {got.share:.1%} ({got.low:.1%} to {got.high:.1%})"
            )
    for error, count in report.errors:
        console.print(f"[red]{count} failed:[/red] {escape(error)}")
    for note in report.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}")


def _counted(report: ServeReport) -> str:
    prompt = "" if report.prompt_tokens is None else f", {report.prompt_tokens:.4g} prompt tokens"
    cached = "" if not report.cached_share else f" ({report.cached_share:.0%} cached)"
    begin, end = report.window_s
    return (
        f"{report.requests} requests counted, {report.cut} cut as warm-up, {report.failed} failed; window {begin:.3g} s to {end:.3g} s"
        f"{prompt}{cached}, {report.output_tokens:.4g} output tokens each"
    )


def _targets(report: ServeReport, name: str) -> str:
    values = report.targets.get(name) or report.targets.get("") or {}
    return ", ".join(f"{metric} ≤ {_seconds(value)}" for metric, value in values.items())


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _between(figure: Figure, scale: float) -> str:
    return f"{figure.low * scale:,.4g}–{figure.high * scale:,.4g}"


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:1120px;margin:2rem auto;padding:0 1rem}"
    "h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}"
    "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #e4e7eb}td:first-child,th:first-child{text-align:left}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1rem}svg{width:100%;height:auto}"
    ".soft{color:#7b8794}.warn{background:#fff6e0;padding:.4rem .7rem;border-radius:4px}"
)


def to_html(report: ServeReport, samples: Sequence[Sample]) -> str:
    """The report as one document with its plots inside; nothing is loaded from elsewhere and no script runs."""
    begin, end = report.window_s
    kept = [sample for sample in samples if sample.due_s >= begin and sample.error is None]
    plots = [
        figures.line_plot(
            [
                ("server", figures.cumulative([s.ttft_s for s in kept if s.ttft_s is not None], scale=1e3)),
                ("with client wait", figures.cumulative([s.ttft_s + s.wait_s for s in kept if s.ttft_s is not None], scale=1e3)),
            ],
            title="time to first token", x="ms", y="% of requests", steps=True, high=100.0,
        ),
        figures.line_plot(
            [("TPOT", figures.cumulative([s.tpot_s for s in kept if s.tpot_s is not None], scale=1e3))],
            title="time per output token", x="ms", y="% of requests", steps=True, high=100.0,
        ),
        figures.line_plot(
            [("answers", figures.cumulative([s.e2e_s for s in kept]))],
            title="whole answer", x="s", y="% of requests", steps=True, high=100.0,
        ),
        figures.line_plot(
            [("TTFT", sorted((s.due_s, 1e3 * s.ttft_s) for s in samples if s.ttft_s is not None))],
            title="time to first token over the load's time (warm-up too)", x="s", y="ms",
        ),
        figures.line_plot([("tokens/s", _over_time(samples))], title="output tokens per second", x="s", y="tok/s", steps=True),
        figures.line_plot([("open", _open_over_time(samples))], title="requests open", x="s", y="requests", steps=True),
    ]  # fmt: skip
    rows = [(c.traffic_class, c.attained.share, c.attained.low, c.attained.high) for c in report.classes if c.attained]
    if rows:
        plots.append(figures.share_plot(rows, title="requests that met all targets (95 % interval)"))
    said = "".join(f'<p class="warn">{html.escape(note)}</p>' for note in report.notes)
    said += "".join(f'<p class="warn">{count} failed: {html.escape(error)}</p>' for error, count in report.errors)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Load test of {html.escape(report.model)}</title><style>{STYLE}</style><h1>Load test</h1>"
        f"<p><b>{html.escape(report.load)}</b> against <code>{html.escape(report.url)}</code> ({html.escape(report.model)}, "
        f"{html.escape(report.api)}), {html.escape(report.date)}.</p><p>{html.escape(_counted(report))}.</p>{said}"
        f'<div class="plots">{"".join(plots)}</div><h2>Figures</h2>{_table(report)}'
        '<p class="soft">95 % intervals: bootstrap of stretches of requests; of shares, Wilson. '
        f"Window {begin:.3g} s to {end:.3g} s.</p></html>\n"
    )


def _table(report: ServeReport) -> str:
    rows = ["<tr><th>figure<th>value<th>95 % interval<th>unit</tr>"]
    for figure in report.figures:
        scale, unit = (1e3, "ms") if figure.unit == "s" else (1.0, figure.unit)
        rows.append(
            f"<tr><td>{html.escape(figure.name)}<td>{figure.value * scale:,.4g}<td>{_between(figure, scale)}<td>{html.escape(unit)}</tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _over_time(samples: Sequence[Sample], *, bins: int = 60) -> list[tuple[float, float]]:
    at, weight = token_times(samples)
    if not len(at):
        return []
    high = float(at.max()) or 1.0
    counts, edges = np.histogram(at, bins=bins, range=(0.0, high), weights=weight)
    return [(float(edge), float(count) / (high / bins)) for edge, count in zip(edges, counts, strict=False)]


def _open_over_time(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    changes = sorted([(s.sent_s, 1) for s in samples] + [(s.sent_s + s.e2e_s, -1) for s in samples])
    out, count = [(0.0, 0.0)], 0
    for at, change in changes:
        count += change
        out.append((at, float(count)))
    return out
