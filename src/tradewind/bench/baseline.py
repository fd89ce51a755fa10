"""A stored baseline, and whether new measurements are worse than it by more than noise.

Knows: reports of both benchmarks, noise bands, verdicts. Refuses to know: how anything was measured, and files' places (the command).

Everything is compared as a ratio, so on logarithms. Medians of n old and m new runs differ by chance with

      standard error = 1.2533 * sigma * sqrt(1/n + 1/m)          (the median's, for normal noise; 1.2533 = sqrt(pi / 2))

where sigma is one run's noise, estimated from how much runs of one side differ, or, of single runs, from their own 95 % intervals.
The band is so many standard errors wide, but never narrower than the floor: machines drift from day to day by more than runs differ.

      better        |------------- band -------------|        worse
      <-------------|----------------0---------------|------------->    log(new / old), turned so that right is worse
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from tradewind.contract.errors import UserError

FORMAT = 1
FLOOR = 0.05
SEE = 0.10
"""A worsening by so much should be seen; where noise would hide it in more than one of ten cases, the verdict is "unsure"."""
ERRORS = 2.5
POWER = 1.28
"""So many standard errors beyond the band lies what is seen in nine of ten cases."""
MEDIAN = math.sqrt(math.pi / 2)
GATED = ("requests_per_s", "output_tokens_per_s", "goodput_per_s", "ttft_p50", "tpot_p50", "e2e_p50")
"""Of a load test; tails are too noisy for a few runs unless somebody asks for them."""

Verdict = Literal["worse", "same", "better", "unsure"]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, once for each run."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    values: tuple[float, ...]
    spread: tuple[float, ...] = ()
    """Of each run, the standard error of its value as a part of it, where the run knows it."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that later ones are compared with."""

    format: int
    kind: Literal["baseline"]
    date: str
    version: str
    machine: dict[str, str]
    what: str
    """What was measured, in one sentence."""
    settings: dict[str, Any]
    """The load's, for measuring the same again; empty where reports of `bench offline` were recorded."""
    series: tuple[Series, ...]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, then and now."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    was: float
    now: float
    worse_by: float
    """As a part: 0.1 is 10 % more of what should be little, or of what should be much 10 % less."""
    band: float
    """What noise alone may look like."""
    runs: tuple[int, int]
    verdict: Verdict


class _Kind(msgspec.Struct, frozen=True):
    kind: str = ""
    measured: Any = None
    figures: Any = None


def series_of(data: bytes, *, name: str) -> tuple[list[Series], dict[str, Any], str]:
    """The figures in a report's JSON, its settings and what it measured. `name` is for messages. Raises UserError."""
    try:
        kind = msgspec.json.decode(data, type=_Kind)
        if kind.kind == "serve":
            return _of_serve(data)
        if kind.measured is not None:
            return _of_offline(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{name} is no report of tradewind bench: {error}") from None
    raise UserError(f"{name} is no report of tradewind bench: it has neither a load test's figures nor workloads")


def _of_serve(data: bytes) -> tuple[list[Series], dict[str, Any], str]:
    from tradewind.bench.serve_report import ServeReport

    report = msgspec.json.decode(data, type=ServeReport)
    return series_of_load(report), {"url": report.url, "model": report.model, **report.settings}, report.load


def series_of_load(report: Any) -> list[Series]:
    """The figures of a ServeReport."""
    out = []
    for figure in report.figures:
        if figure.value > 0:
            spread = (figure.high - figure.low) / 3.92 / figure.value
            out.append(
                Series(
                    name=figure.name, unit=figure.unit, better=figure.better, values=(figure.value,), spread=(spread,)
                )
            )
    return out


class _OfflineMetric(msgspec.Struct, frozen=True):
    name: str
    unit: str
    better: Literal["higher", "lower"]
    values: tuple[float, ...]


class _OfflineWorkload(msgspec.Struct, frozen=True):
    workload: str
    metrics: tuple[_OfflineMetric, ...]


class _Offline(msgspec.Struct, frozen=True):
    measured: tuple[_OfflineWorkload, ...]
    command: tuple[str, ...] = ()


def _of_offline(data: bytes) -> tuple[list[Series], dict[str, Any], str]:
    report = msgspec.json.decode(data, type=_Offline)
    series = [
        Series(name=f"{one.workload}/{metric.name}", unit=metric.unit, better=metric.better, values=metric.values)
        for one in report.measured
        for metric in one.metrics
        if metric.values and min(metric.values) > 0
    ]
    return series, {}, " ".join(report.command)


def merged(many: Iterable[Sequence[Series]]) -> tuple[Series, ...]:
    """The runs of several reports as one series for each figure; only figures that all reports have."""
    reports = list(many)
    kept: dict[str, Series] = {}
    for place, report in enumerate(reports):
        for one in report:
            before = kept.get(one.name)
            if before is not None:
                kept[one.name] = msgspec.structs.replace(
                    before, values=before.values + one.values, spread=before.spread + one.spread
                )
            elif place == 0:
                kept[one.name] = one
    names = set.intersection(*({one.name for one in report} for report in reports)) if reports else set()
    return tuple(one for name, one in kept.items() if name in names)


def make_baseline(
    series: tuple[Series, ...], *, settings: dict[str, Any], what: str, version: str, machine: dict[str, str]
) -> Baseline:
    """A record of these runs. Pure but for the date."""
    return Baseline(
        format=FORMAT,
        kind="baseline",
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        version=version,
        machine=machine,
        what=what,
        settings=settings,
        series=series,
    )


def read_baseline(data: bytes, *, name: str) -> Baseline:
    """A stored baseline. Raises UserError."""
    try:
        made = msgspec.json.decode(data, type=Baseline)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{name} is no baseline of tradewind baseline record: {error}") from None
    if made.format != FORMAT:
        raise UserError(f"{name} has format {made.format}; this version reads {FORMAT}: record it again")
    return made


def gated(series: Sequence[Series], names: Sequence[str] | None) -> list[Series]:
    """Those that decide: the named ones, or else the gated ones of a load test and all of an offline benchmark.

    Raises UserError for a name that is not there.
    """
    have = {one.name: one for one in series}
    if names is not None:
        for name in names:
            if name not in have:
                raise UserError(f"the baseline has no figure {name!r}; it has {', '.join(sorted(have))}")
        return [have[name] for name in names]
    return [one for one in series if one.name in GATED or "/" in one.name]


def compare(was: Series, now: Series, *, floor: float = FLOOR, see: float = SEE) -> Compared:
    """Whether `now` is worse by more than noise. Pure."""
    old, new = [math.log(value) for value in was.values], [math.log(value) for value in now.values]
    sign = 1.0 if was.better == "lower" else -1.0
    drift = sign * (statistics.median(new) - statistics.median(old))
    sigma, freedom = _noise(was, now, old, new)
    error = MEDIAN * sigma * math.sqrt(1 / len(old) + 1 / len(new))
    # Few runs know their own noise badly: the fewer, the wider.
    band = max(math.log1p(floor), ERRORS * (1 + 1 / freedom) * error)
    verdict: Verdict = "same"
    if drift > band:
        verdict = "worse"
    elif band + POWER * error > math.log1p(see):
        verdict = "unsure"
    elif drift < -band:
        verdict = "better"
    return Compared(
        name=was.name,
        unit=was.unit,
        better=was.better,
        was=statistics.median(was.values),
        now=statistics.median(now.values),
        worse_by=math.expm1(drift) if was.better == "lower" else -math.expm1(-drift),
        band=math.expm1(band),
        runs=(len(old), len(new)),
        verdict=verdict,
    )


def _noise(was: Series, now: Series, old: Sequence[float], new: Sequence[float]) -> tuple[float, int]:
    """One run's noise as a part, and how many differences it is estimated from."""
    freedom = len(old) + len(new) - 2
    own = [*was.spread, *now.spread]
    if freedom < 2:
        return (statistics.median(own), 8) if own else (SEE, 1)
    squares = sum((value - statistics.fmean(side)) ** 2 for side in (old, new) for value in side)
    return math.sqrt(squares / freedom), freedom
