"""Which part of the latest requests of each class met its targets: what the page shows while traffic runs.

Knows: the last two minutes of sequences that ended, the open ones, targets. Refuses to know: HTTP, and where targets come from.

The times are the engine's and count from when the front had the request: to its first token, between tokens, to its end. Who leaves
before a target was missed is not counted; who leaves after that, or fails, has missed it: impatient clients must not make the server look
good.

      | ended at | class | ttft | tpot | e2e | outcome |      a ring of columns, read when somebody looks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tradewind.config.plan import ClassPlan
from tradewind.observability.attainment import METRICS, Share, wilson
from tradewind.observability.lives import Life

WINDOW_S = 120
BINS = 24
KEPT = 4096
"""So many of the latest are kept; with more in two minutes the window is shorter, and `since_s` says so."""
CLASSES = 16
"""Of a plan, so many classes have a row of their own."""
ALL, OTHER = "all", "other"
ENDED, FAILED, LEFT = 0, 1, 2


class MetricState(msgspec.Struct, frozen=True, kw_only=True):
    """One time of one class, milliseconds."""

    metric: str
    target_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    attained: Share | None
    """None without a target, or without requests that have such a time."""


class ClassState(msgspec.Struct, frozen=True, kw_only=True):
    """One class of traffic, now."""

    name: str
    requests: int
    failed: int
    left: int
    """Clients that went before the end."""
    open: int
    late: int
    """Of the open ones, those that have missed a target already."""
    metrics: list[MetricState]
    attained: Share | None
    """Requests that met all targets of their class, with Wilson's interval."""
    series: list[float | None]
    """The same in stretches of `bin_s`, oldest first; null: none ended."""


class AttainmentState(msgspec.Struct, frozen=True, kw_only=True):
    """Attainment by class."""

    since_s: float
    """How far back it reaches."""
    bin_s: float
    planned: bool
    """Whether the targets are the plan's; otherwise they are those of whoever asks."""
    classes: list[ClassState]


class LiveAttainment:
    """Kept by `board.Board`. One thread; memory is `KEPT` rows and one entry for each open sequence."""

    def __init__(self, classes: Sequence[ClassPlan] = ()) -> None:
        """Without classes all requests are of one, "all"."""
        kept = classes[:CLASSES]
        self._names = [one.name for one in kept] + [OTHER if kept else ALL]
        self._targets: list[dict[str, float]] = [_targets(one) for one in kept] + [{}]
        self._class_of = {name: place for place, name in enumerate(self._names[:-1])}
        self._open: dict[str, tuple[Life, int]] = {}
        self._at = np.full(KEPT, -np.inf)
        self._class = np.zeros(KEPT, np.int16)
        self._times = np.full((len(METRICS), KEPT), np.nan)
        self._outcome = np.zeros(KEPT, np.int8)
        self._count = 0

    def add(self, life: Life, traffic_class: str) -> None:
        """A sequence entered the queue."""
        self._open[life.id] = (life, self._class_of.get(traffic_class, len(self._names) - 1))

    def ended(self, life: Life) -> None:
        """A sequence has its finish."""
        _, place = self._open.pop(life.id, (life, len(self._names) - 1))
        row = self._count % KEPT
        self._count += 1
        first, last = life.first_token_s, life.last_token_s
        self._at[row], self._class[row] = life.ended_s, place
        self._outcome[row] = FAILED if life.finish == "error" else LEFT if life.finish == "abort" else ENDED
        times = self._times
        # Who left without a token waited at least so long for it: enough to say that a target was missed, and for nothing else.
        waited_s = life.ended_s - life.arrived_s
        times[0, row] = first - life.arrived_s if first is not None else waited_s if life.finish == "abort" else np.nan
        spoken_s = last - first if first is not None and last is not None else 0.0
        times[1, row] = spoken_s / (life.generated_tokens - 1) if life.generated_tokens > 1 and spoken_s > 0 else np.nan
        times[2, row] = waited_s
        if first is None and life.finish == "abort":
            self._outcome[row] = -LEFT

    # -- as a document -----------------------------------------------------------------------------------------------

    def state(self, now_s: float, *, targets: Mapping[str, float] | None = None) -> AttainmentState:
        """The last two minutes. `targets` (seconds by metric) are for the classes that have none of their own. Changes nothing."""
        recent = self._at > now_s - WINDOW_S
        planned = any(self._targets)
        since_s = float(WINDOW_S)
        if self._count > KEPT and recent.all():
            since_s = now_s - float(self._at.min())
        opened: list[list[Life]] = [[] for _ in self._names]
        for life, place in self._open.values():
            opened[place].append(life)
        states = []
        for place, name in enumerate(self._names):
            chosen = np.flatnonzero(recent & (self._class == place))
            if name == OTHER and not len(chosen) and not opened[place]:
                continue  # everything has a class, as it should
            wanted = self._targets[place] or dict(targets or {})
            states.append(self._state(name, chosen, wanted, opened[place], now_s))
        return AttainmentState(since_s=round(since_s, 1), bin_s=WINDOW_S / BINS, planned=planned, classes=states)

    def _state(
        self, name: str, chosen: NDArray[np.int64], targets: Mapping[str, float], opened: Sequence[Life], now_s: float
    ) -> ClassState:
        outcome = self._outcome[chosen]
        failed, left = outcome == FAILED, np.abs(outcome) == LEFT
        met = np.ones(len(chosen), bool)
        counts = ~left
        metrics = []
        for place, metric in enumerate(METRICS):
            times = self._times[place, chosen]
            target = targets.get(metric)
            timed = ~np.isnan(times)
            # An answer that was left had no end, and without a token no beginning: those times are lower bounds.
            cut = left if metric == "e2e" else outcome == -LEFT if metric == "ttft" else np.zeros(len(chosen), bool)
            known = times[timed & ~cut & ~failed]
            attained = None
            if target is not None:
                missed = failed | (timed & (times > target))
                judged = failed | (timed & (~cut | missed))
                met &= ~missed
                counts |= missed
                if judged.any():
                    attained = _share(int((judged & ~missed).sum()), int(judged.sum()))
            p50, p95 = np.percentile(known, (50, 95)) if len(known) else (None, None)
            metrics.append(
                MetricState(metric=metric, target_ms=_ms(target), p50_ms=_ms(p50), p95_ms=_ms(p95), attained=attained)
            )
        series: list[float | None] = [None] * BINS
        whole = None
        if targets and counts.any():
            whole = _share(int(met[counts].sum()), int(counts.sum()))
            bins = BINS - 1 - ((now_s - self._at[chosen]) * (BINS / WINDOW_S)).astype(int)
            bins = np.clip(bins, 0, BINS - 1)
            of = np.bincount(bins[counts], minlength=BINS)
            good = np.bincount(bins[counts & met], minlength=BINS)
            series = [round(int(g) / int(n), 3) if n else None for g, n in zip(good, of, strict=True)]
        return ClassState(
            name=name,
            requests=len(chosen),
            failed=int(failed.sum()),
            left=int(left.sum()),
            open=len(opened),
            late=sum(_late(life, targets, now_s) for life in opened) if targets else 0,
            metrics=metrics,
            attained=whole,
            series=series,
        )


def _late(life: Life, targets: Mapping[str, float], now_s: float) -> bool:
    ttft_s, e2e_s = targets.get("ttft"), targets.get("e2e")
    if ttft_s is not None and (life.first_token_s or now_s) - life.arrived_s > ttft_s:
        return True
    return e2e_s is not None and now_s - life.arrived_s > e2e_s


def _targets(one: ClassPlan) -> dict[str, float]:
    stated = {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2e": one.e2e_s}
    return {metric: value for metric, value in stated.items() if value is not None}


def _share(met: int, of: int) -> Share:
    exact = wilson(met, of)
    return Share(met=met, of=of, share=round(exact.share, 4), low=round(exact.low, 4), high=round(exact.high, 4))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds * 1e3:.4g}")
