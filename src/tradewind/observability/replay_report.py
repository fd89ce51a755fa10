"""What a replay brought beside what was recorded: attainment by class, curves of cache hits and of the queue. As a record, JSON and HTML.

Knows: how outcomes and entries become figures. Refuses to know: how requests were sent (replay) and files' places (the command).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from tradewind.observability import figures
from tradewind.observability.attainment import ClassReport, Targets, Timed, attainment
from tradewind.observability.journal import Entry, Header
from tradewind.observability.replay import Outcome, class_of

FORMAT = 1
BINS = 60
"""Points of a curve over time."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Over the time of the replay, at the end of each of equal stretches."""

    at_s: tuple[float, ...]
    hit_rate: tuple[float | None, ...]
    """Part of the prompt tokens so far that were found in the prefix cache; null where the server does not tell."""
    waiting: tuple[float, ...]
    """Requests that waited for their start, in the mean over the stretch."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The recorded run, or the replayed one."""

    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    hit_rate: float | None
    classes: tuple[ClassReport, ...]
    curve: Curve


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one replay."""

    format: int
    date: str
    source: str
    target: str
    model: str
    redacted: bool
    speed: float
    late: int
    """Requests that were sent more than 50 ms after their time: what follows is milder than it was."""
    worst_late_s: float
    recorded: Side
    replayed: Side
    errors: tuple[tuple[str, int], ...]
    """What went wrong, and how often."""
    notes: tuple[str, ...]


class _Point(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides have of one request."""

    timed: Timed
    at_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    queue_s: float


def make_report(
    header: Header,
    entries: Sequence[Entry],
    outcomes: Sequence[Outcome],
    *,
    source: str,
    target: str,
    speed: float,
    targets: Targets,
    notes: Sequence[str] = (),
) -> ReplayReport:
    """The report of outcomes that are in the entries' order. Pure but for the date."""
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    recorded = [_recorded(entry, entries[0].at, speed) for entry in entries if entry.receipt is not None]
    replayed = [_replayed(outcome) for outcome in outcomes]
    end_s = max((point.at_s + point.queue_s for point in (*recorded, *replayed)), default=0.0)
    worst = max((outcome.late_s for outcome in outcomes), default=0.0)
    return ReplayReport(
        format=FORMAT,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        source=source,
        target=target,
        model=header.model,
        redacted=header.redacted,
        speed=speed,
        late=sum(outcome.late_s > 0.05 for outcome in outcomes),
        worst_late_s=worst,
        recorded=_side(recorded, targets, end_s),
        replayed=_side(replayed, targets, end_s),
        errors=tuple(sorted(errors.items(), key=lambda pair: -pair[1])[:20]),
        notes=tuple(notes),
    )


def _recorded(entry: Entry, first: float, speed: float) -> _Point:
    receipt = entry.receipt
    assert receipt is not None
    waits = (
        "inbox",
        "grammar",
        "sample_wait",
        "prefix_wait",
        "queue_slot",
        "queue_pages",
        "queue_tokens",
        "queue_step",
    )
    bad = receipt.finish.split(",")[0] not in ("stop", "length", "tool_calls")
    return _Point(
        timed=Timed(
            traffic_class=class_of(entry),
            ttft_s=receipt.ttft_s,
            tpot_s=receipt.tpot_s,
            e2e_s=receipt.e2e_s,
            failed=bad and receipt.finish != "disconnect",
        ),
        at_s=(entry.at - first) / speed,
        prompt_tokens=receipt.prompt_tokens,
        cached_tokens=receipt.cached_tokens,
        output_tokens=receipt.completion_tokens,
        queue_s=sum(part.seconds for part in receipt.ttft if part.name in waits),
    )


def _replayed(outcome: Outcome) -> _Point:
    return _Point(
        timed=Timed(
            traffic_class=outcome.traffic_class,
            ttft_s=outcome.ttft_s,
            tpot_s=outcome.tpot_s,
            e2e_s=outcome.e2e_s,
            failed=outcome.error is not None,
        ),
        at_s=outcome.at_s,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_tokens,
        queue_s=outcome.queue_s or 0.0,
    )


def _side(points: Sequence[_Point], targets: Targets, end_s: float) -> Side:
    prompt = sum(point.prompt_tokens for point in points)
    told = [point for point in points if point.cached_tokens is not None]
    cached = sum(point.cached_tokens or 0 for point in told) if told else None
    looked = sum(point.prompt_tokens for point in told)
    return Side(
        requests=len(points),
        failed=sum(point.timed.failed for point in points),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=sum(point.output_tokens for point in points),
        hit_rate=None if cached is None or not looked else cached / looked,
        classes=attainment([point.timed for point in points], targets),
        curve=_curve(points, end_s),
    )


def _curve(points: Sequence[_Point], end_s: float) -> Curve:
    width = max(end_s, 1e-9) / BINS
    prompt, cached, waiting = [0] * BINS, [0] * BINS, [0.0] * BINS
    for point in points:
        place = min(BINS - 1, int(point.at_s / width))
        if point.cached_tokens is not None:
            prompt[place] += point.prompt_tokens
            cached[place] += point.cached_tokens
        begin, end = point.at_s, point.at_s + point.queue_s
        for bin_ in range(place, min(BINS - 1, int(end / width)) + 1):
            waiting[bin_] += max(0.0, min(end, (bin_ + 1) * width) - max(begin, bin_ * width)) / width
    rates: list[float | None] = []
    seen = found = 0
    for place in range(BINS):
        seen, found = seen + prompt[place], found + cached[place]
        rates.append(found / seen if seen else None)
    return Curve(
        at_s=tuple(round((place + 1) * width, 6) for place in range(BINS)),
        hit_rate=tuple(rates),
        waiting=tuple(round(value, 6) for value in waiting),
    )


# -- as text and HTML ----------------------------------------------------------------------------------------------------


def to_json(report: ReplayReport) -> bytes:
    """The report as JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def to_text(report: ReplayReport) -> str:
    """A short table for a terminal."""
    lines = [
        f"{report.replayed.requests} requests of {report.source} against {report.target}"
        + (f" at {report.speed:g} times the speed" if report.speed != 1 else ""),
        f"  cache hits   recorded {_percent(report.recorded.hit_rate)}   replayed {_percent(report.replayed.hit_rate)}",
    ]
    if report.late:
        lines.append(
            f"  {report.late} requests were sent late, by up to {report.worst_late_s:.3g} s: the replay is milder than it was"
        )
    for error, count in report.errors:
        lines.append(f"  {count} failed: {error}")
    for name, side in (("recorded", report.recorded), ("replayed", report.replayed)):
        for one in side.classes:
            lines.append(
                f"  {name} {one.traffic_class}: {one.requests} requests"
                + (f", {one.failed} failed" if one.failed else "")
            )
            for metric in one.metrics:
                if metric.p50_s is None:
                    continue
                met = ""
                if metric.attained is not None and metric.target_s is not None:
                    got = metric.attained
                    met = f"   within {_ms(metric.target_s)}: {got.share:.1%} ({got.low:.1%} to {got.high:.1%})"
                times = f"p50 {_ms(metric.p50_s):>9}  p95 {_ms(metric.p95_s):>9}  p99 {_ms(metric.p99_s):>9}"
                lines.append(f"    {metric.metric.upper():<5} {times}{met}")
    lines += [f"  {note}" for note in report.notes]
    return "\n".join(lines)


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:1120px;margin:2rem auto;padding:0 1rem}"
    "h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}"
    "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #e4e7eb}td:first-child,th:first-child,"
    "td:nth-child(2),th:nth-child(2){text-align:left}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1rem}svg{width:100%;height:auto}.soft{color:#7b8794}"
)


def to_html(report: ReplayReport, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> str:
    """The report as one document with its plots inside; nothing is loaded from elsewhere and no script runs."""
    receipts = [entry.receipt for entry in entries if entry.receipt is not None]
    good = [outcome for outcome in outcomes if outcome.error is None]
    plots: list[str] = []
    for title, recorded, replayed, scale, unit in (
        ("time to first token", [r.ttft_s for r in receipts], [o.ttft_s for o in good], 1e3, "ms"),
        ("time per output token", [r.tpot_s for r in receipts], [o.tpot_s for o in good], 1e3, "ms"),
        ("whole answer", [r.e2e_s for r in receipts], [o.e2e_s for o in good], 1.0, "s"),
    ):
        plots.append(
            figures.line_plot(
                [
                    ("replayed", figures.cumulative([value for value in replayed if value is not None], scale=scale)),
                    ("recorded", figures.cumulative([value for value in recorded if value is not None], scale=scale)),
                ],
                title=title,
                x=unit,
                y="% of requests",
                steps=True,
                high=100.0,
            )
        )
    for title, unit, pick in (
        ("prompt tokens found in the cache, so far", "%", _hits),
        ("requests that wait", "requests", _waits),
    ):
        plots.append(
            figures.line_plot(
                [("replayed", pick(report.replayed.curve)), ("recorded", pick(report.recorded.curve))],
                title=title,
                x="s",
                y=unit,
            )
        )
    rows = [
        (f"{one.traffic_class}, {name}", one.attained.share, one.attained.low, one.attained.high)
        for pair in zip(report.replayed.classes, report.recorded.classes, strict=False)
        for name, one in zip(("replayed", "recorded"), pair, strict=True)
        if one.attained is not None
    ]
    if rows:
        plots.append(figures.share_plot(rows, title="requests that met all targets (95 % interval)"))
    speed = f" at {report.speed:g} times the speed" if report.speed != 1 else ""
    head = (
        f"<p>{report.replayed.requests} requests of <code>{html.escape(report.source)}</code> "
        f"({'redacted' if report.redacted else 'raw'}, {html.escape(report.model)}) against "
        f"<code>{html.escape(report.target)}</code>{speed}, {html.escape(report.date)}. "
        f"Cache hits: recorded {_percent(report.recorded.hit_rate)}, replayed {_percent(report.replayed.hit_rate)}.</p>"
    )
    said = [head]
    if report.late:
        said.append(f"<p>{report.late} requests were sent late, by {report.worst_late_s:.3g} s at most.</p>")
    said += [f"<p>{count} failed: {html.escape(error)}</p>" for error, count in report.errors]
    said += [f'<p class="soft">{html.escape(note)}</p>' for note in report.notes]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Replay of {html.escape(report.source)}</title><style>{STYLE}</style><h1>Replay</h1>{''.join(said)}"
        f'<div class="plots">{"".join(plots)}</div><h2>By class</h2>{_table(report)}</html>\n'
    )


def _table(report: ReplayReport) -> str:
    rows = [
        "<tr><th>class<th>run<th>requests<th>failed<th>metric<th>p50<th>p95<th>p99<th>target<th>met<th>95 % interval</tr>"
    ]
    for name, side in (("recorded", report.recorded), ("replayed", report.replayed)):
        for one in side.classes:
            for metric in one.metrics:
                got = metric.attained
                cells = [
                    html.escape(one.traffic_class), name, str(one.requests), str(one.failed), metric.metric.upper(),
                    _ms(metric.p50_s), _ms(metric.p95_s), _ms(metric.p99_s), _ms(metric.target_s),
                    "–" if got is None else f"{got.met} of {got.of}",
                    "–" if got is None else f"{got.low:.1%} – {got.high:.1%}",
                ]  # fmt: skip
                rows.append("<tr>" + "".join(f"<td>{cell}" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _hits(curve: Curve) -> list[tuple[float, float]]:
    return [(at, 100 * rate) for at, rate in zip(curve.at_s, curve.hit_rate, strict=True) if rate is not None]


def _waits(curve: Curve) -> list[tuple[float, float]]:
    return list(zip(curve.at_s, curve.waiting, strict=True))


def _percent(share: float | None) -> str:
    return "not told" if share is None else f"{share:.1%}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
