"""Which part of the requests of each class met its targets, and how sure that is.

Knows: targets, Wilson's interval, percentiles. Refuses to know: where the times come from (a journal, a replay, a load test).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tradewind.contract.errors import UserError

Z95 = 1.959963984540054
"""The normal distribution's 97.5th percentile."""
METRICS = ("ttft", "tpot", "e2e")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
EVERY = ""
"""The class of a target that is meant for all classes without one of their own."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it went, seconds. None: it has no such time (one token has no time between tokens)."""

    traffic_class: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    failed: bool = False
    """A request that failed has met no target."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """How many of how many, with Wilson's interval at 95 %."""

    met: int
    of: int
    share: float
    low: float
    high: float


class MetricReport(msgspec.Struct, frozen=True, kw_only=True):
    """One time of one class."""

    metric: str
    target_s: float | None
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    attained: Share | None
    """None without a target, or without requests."""


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """One class of traffic."""

    traffic_class: str
    requests: int
    failed: int
    metrics: tuple[MetricReport, ...]
    attained: Share | None
    """Requests that met all targets of their class."""


Targets = Mapping[str, Mapping[str, float]]
"""By class, by metric, seconds."""


def wilson(met: int, of: int, *, z: float = Z95) -> Share:
    """The share and its interval (Wilson, "Probable inference", JASA 1927): right for small counts and for shares near 0 and 1."""
    assert 0 <= met <= of and of > 0
    p = met / of
    scale = 1 + z * z / of
    middle = (p + z * z / (2 * of)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return Share(met=met, of=of, share=p, low=max(0.0, middle - half), high=min(1.0, middle + half))


def parse_targets(texts: Iterable[str]) -> dict[str, dict[str, float]]:
    """Targets as they are written: "ttft=500ms,tpot=50ms" for every class, "chat:ttft=0.2s" for one. Raises UserError."""
    out: dict[str, dict[str, float]] = {}
    for text in texts:
        name, colon, rest = text.rpartition(":")
        mine = out.setdefault(name if colon else EVERY, {})
        for part in rest.split(","):
            found = re.fullmatch(r"\s*(\w+)\s*=\s*([\d.]+)\s*([a-z]*)\s*", part)
            if found is None or found[1] not in METRICS or found[3] not in (*UNITS, ""):
                raise UserError(
                    f"{part.strip()!r} is no target; write one of {', '.join(METRICS)} with a time, such as ttft=500ms or tpot=0.05s"
                )
            try:
                value = float(found[2]) * UNITS[found[3] or "s"]
            except ValueError:
                raise UserError(f"{found[2]!r} in {part.strip()!r} is no number") from None
            if not value > 0:
                raise UserError(f"the target {part.strip()!r} must be over 0")
            mine[found[1]] = value
    return out


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between neighbours; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def attainment(requests: Iterable[Timed], targets: Targets) -> tuple[ClassReport, ...]:
    """A report for each class that is there, in the order of their names."""
    by_class: dict[str, list[Timed]] = {}
    for one in requests:
        by_class.setdefault(one.traffic_class, []).append(one)
    return tuple(
        _class(name, by_class[name], targets.get(name) or targets.get(EVERY) or {}) for name in sorted(by_class)
    )


def _class(name: str, requests: Sequence[Timed], targets: Mapping[str, float]) -> ClassReport:
    metrics = []
    for metric in METRICS:
        times = [value for one in requests if not one.failed and (value := _time(one, metric)) is not None]
        target = targets.get(metric)
        judged = [one for one in requests if one.failed or _time(one, metric) is not None]
        attained = None
        if target is not None and judged:
            attained = wilson(sum(_met(one, metric, target) for one in judged), len(judged))
        p50, p95, p99 = (percentile(times, percent) for percent in (50, 95, 99))
        metrics.append(MetricReport(metric=metric, target_s=target, p50_s=p50, p95_s=p95, p99_s=p99, attained=attained))
    whole = None
    if targets:
        whole = wilson(
            sum(all(_met(one, metric, target) for metric, target in targets.items()) for one in requests), len(requests)
        )
    return ClassReport(
        traffic_class=name,
        requests=len(requests),
        failed=sum(one.failed for one in requests),
        metrics=tuple(metrics),
        attained=whole,
    )


def _time(one: Timed, metric: str) -> float | None:
    value: float | None = getattr(one, f"{metric}_s")
    return value


def _met(one: Timed, metric: str, target: float) -> bool:
    """Whether a target was met; one about a time that the request does not have is."""
    value = _time(one, metric)
    return not one.failed and (value is None or value <= target)
