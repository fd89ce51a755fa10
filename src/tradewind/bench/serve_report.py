"""A load test's figures with their confidence: the steady window, percentiles with intervals, goodput; as a record and JSON.

Knows: statistics. Refuses to know: how requests were sent (serve_measure) and how figures are shown (serve_show).

Requests that follow each other meet the same queue, so they are no independent draws: intervals come from a bootstrap of whole stretches
of requests (moving blocks; Kuensch, Annals of Statistics 17, 1989), which keeps that. Shares have Wilson's interval.

      |-- warm-up --|---------------- window ----------------|-- the last answers --|
      requests due here are cut      counted                  nothing is sent any more: not steady
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.bench.serve_measure import Measured, Sample
from tradewind.contract.errors import UserError
from tradewind.observability.attainment import ClassReport, Targets, Timed, attainment

FORMAT = 1
RESAMPLES = 600
BINS = 20
"""Stretches of the window whose rates are compared for a throughput's interval."""
LAGGING_S = 0.005
BEHIND = 0.95

Floats = npt.NDArray[np.float64]


class WarmUp(msgspec.Struct, frozen=True, kw_only=True):
    """What is cut at the beginning: seconds, or a share of the load's time."""

    seconds: float | None = None
    share: float = 0.1


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number with its 95 % interval. What a baseline compares."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    value: float
    low: float
    high: float


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one load test."""

    format: int
    kind: Literal["serve"]
    date: str
    url: str
    model: str
    api: str
    load: str
    """The load in one sentence."""
    settings: dict[str, Any]
    """The same as data, for doing it again."""
    requests: int
    """In the window."""
    cut: int
    """Left out: warm-up."""
    failed: int
    errors: tuple[tuple[str, int], ...]
    window_s: tuple[float, float]
    prompt_tokens: float | None
    """Of a request, in the mean, as the server counts."""
    output_tokens: float
    cached_share: float | None
    figures: tuple[Figure, ...]
    targets: dict[str, dict[str, float]]
    classes: tuple[ClassReport, ...]
    notes: tuple[str, ...]

    def figure(self, name: str) -> Figure | None:
        """By its name."""
        return next((figure for figure in self.figures if figure.name == name), None)


def parse_warm_up(text: str) -> WarmUp:
    """ "5s", or "10%" of the load's time. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|%)\s*", text)
    if found is None:
        raise UserError(f"--warm-up is {text!r}; give seconds, such as 5s, or a part of the load, such as 10%")
    value = float(found[1])
    if found[2] == "s":
        return WarmUp(seconds=value)
    if value > 90:
        raise UserError(f"--warm-up is {text!r}; at most 90% can be cut")
    return WarmUp(share=value / 100)


def make_report(
    measured: Measured,
    *,
    url: str,
    model: str,
    api: str,
    load: str,
    settings: Mapping[str, Any],
    warm_up: WarmUp,
    targets: Targets,
    opened: bool,
    seed: int = 0,
) -> ServeReport:
    """The report. Pure but for the date; the bootstrap is seeded. `opened`: it was an open loop.

    Raises UserError where the warm-up leaves nothing.
    """
    samples = measured.samples
    last_due_s = max((sample.due_s for sample in samples), default=0.0)
    begin_s = warm_up.seconds if warm_up.seconds is not None else warm_up.share * last_due_s
    kept = [sample for sample in samples if sample.due_s >= begin_s]
    if not kept or all(sample.error for sample in kept):
        raise UserError(
            f"the warm-up of {begin_s:.3g} s leaves none of {len(samples)} requests that was answered: shorten it or send more requests"
        )
    good = [sample for sample in kept if sample.error is None]
    notes: list[str] = []
    end_s, steady = _window(kept, begin_s, last_due_s)
    if not steady:
        notes.append(
            "the load was over before it was steady (it lasted less than 4 answers): rates are over the whole run, its last answers too"
        )
    boot = _Bootstrap(seed)
    figures = [*_rates(samples, targets, begin_s, end_s, boot), *_times(good, boot)]
    notes += _notes(measured, kept, good, begin_s=begin_s, last_due_s=last_due_s, opened=opened)
    errors: dict[str, int] = {}
    for sample in kept:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    prompts = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
    told = [sample for sample in good if sample.cached_tokens is not None and sample.prompt_tokens]
    looked = sum(sample.prompt_tokens or 0 for sample in told)
    return ServeReport(
        format=FORMAT,
        kind="serve",
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        url=url,
        model=model,
        api=api,
        load=load,
        settings=dict(settings),
        requests=len(kept),
        cut=len(samples) - len(kept),
        failed=len(kept) - len(good),
        errors=tuple(sorted(errors.items(), key=lambda pair: -pair[1])[:20]),
        window_s=(begin_s, end_s),
        prompt_tokens=sum(prompts) / len(prompts) if prompts else None,
        output_tokens=sum(sample.output_tokens for sample in good) / len(good),
        cached_share=sum(sample.cached_tokens or 0 for sample in told) / looked if looked else None,
        figures=tuple(figures),
        targets={name: dict(values) for name, values in targets.items()},
        classes=attainment([_timed(sample) for sample in kept], targets),
        notes=tuple(notes),
    )


def _window(kept: Sequence[Sample], begin_s: float, last_due_s: float) -> tuple[float, bool]:
    """Where the steady time ends: with the last request sent, unless that is so soon that hardly anything was answered by then."""
    ends = [sample.sent_s + sample.e2e_s for sample in kept]
    answer_s = float(np.median([sample.e2e_s for sample in kept if sample.error is None]))
    if last_due_s - begin_s >= 4 * answer_s:
        return last_due_s, True
    return max(ends), False


# -- figures -------------------------------------------------------------------------------------------------------------


class _Bootstrap:
    """Intervals of statistics of a sequence whose neighbours resemble each other. Same seed, same intervals."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def interval(self, values: Floats, statistic: Callable[[Floats], Floats]) -> tuple[float, float]:
        """95 %; `statistic` is of the last axis."""
        count = len(values)
        if count < 2:
            only = float(statistic(values[None])[0])
            return only, only
        size = max(1, round(count ** (1 / 3)))
        rng = np.random.default_rng(self._seed)
        starts = rng.integers(0, count, size=(min(RESAMPLES, max(100, 4_000_000 // count)), -(-count // size)))
        places = (starts[:, :, None] + np.arange(size)) % count
        drawn = statistic(values[places.reshape(len(starts), -1)[:, :count]])
        low, high = np.percentile(drawn, (2.5, 97.5))
        return float(low), float(high)


def _percentile(percent: float) -> Callable[[Floats], Floats]:
    return lambda values: np.asarray(np.percentile(values, percent, axis=-1), dtype=np.float64)


def _mean(values: Floats) -> Floats:
    return np.asarray(values.mean(axis=-1), dtype=np.float64)


STATISTICS: dict[str, Callable[[Floats], Floats]] = {
    "mean": _mean,
    "p50": _percentile(50),
    "p90": _percentile(90),
    "p99": _percentile(99),
}
TIMES = ("ttft", "tpot", "itl", "e2e", "user_ttft", "client_wait", "server_queue")
"""Of each there is a figure for every statistic. user_ttft is from due to the first token: the client's wait and the TTFT."""


def _times(good: Sequence[Sample], boot: _Bootstrap) -> list[Figure]:
    columns: dict[str, list[float]] = {
        "ttft": [sample.ttft_s for sample in good if sample.ttft_s is not None],
        "tpot": [sample.tpot_s for sample in good if sample.tpot_s is not None],
        "itl": [gap for sample in good for gap in sample.gaps_s],
        "e2e": [sample.e2e_s for sample in good],
        "user_ttft": [sample.wait_s + sample.ttft_s for sample in good if sample.ttft_s is not None],
        "client_wait": [sample.wait_s for sample in good],
        "server_queue": [sample.server_queue_s for sample in good if sample.server_queue_s is not None],
    }
    out = []
    for name in TIMES:
        values = np.array(columns[name])
        if not len(values):
            continue
        for statistic, of in STATISTICS.items():
            low, high = boot.interval(values, of)
            out.append(
                Figure(
                    name=f"{name}_{statistic}",
                    unit="s",
                    better="lower",
                    value=float(of(values[None])[0]),
                    low=low,
                    high=high,
                )
            )
    return out


def token_times(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """When pieces of answers came, since the load's beginning, and how many tokens each is taken for (its answer's, spread evenly)."""
    at: list[Floats] = []
    weight: list[Floats] = []
    for sample in samples:
        if sample.ttft_s is None:
            continue
        times = sample.sent_s + sample.ttft_s + np.concatenate(([0.0], np.cumsum(sample.gaps_s)))
        at.append(times)
        weight.append(np.full(len(times), sample.output_tokens / len(times)))
    if not at:
        return np.zeros(0), np.zeros(0)
    return np.concatenate(at), np.concatenate(weight)


def _rates(samples: Sequence[Sample], targets: Targets, begin_s: float, end_s: float, boot: _Bootstrap) -> list[Figure]:
    """What was done within the window, whoever had asked for it and when.

    goodput: requests that met all targets of their class (DistServe, Zhong et al., OSDI 2024).
    """
    width = max(end_s - begin_s, 1e-9) / BINS
    edges: Floats = begin_s + width * np.arange(BINS + 1, dtype=np.float64)
    good = [sample for sample in samples if sample.error is None]
    sent = np.array([sample.sent_s for sample in good])
    first = np.array([sample.e2e_s if sample.ttft_s is None else sample.ttft_s for sample in good])
    whole = np.array([sample.e2e_s for sample in good])
    at, weight = token_times(samples)
    read = np.array([float(sample.prompt_tokens or 0) for sample in good])
    columns = {
        "requests_per_s": ("1/s", _spread(sent, whole, np.ones(len(good)), edges)),
        "output_tokens_per_s": ("tok/s", np.histogram(at, edges, weights=weight)[0]),
        "prompt_tokens_per_s": ("tok/s", _spread(sent, first, read, edges)),
    }
    if targets:
        met = np.array([float(meets(sample, targets)) for sample in good])
        columns["goodput_per_s"] = ("1/s", _spread(sent, whole, met, edges))
    out = []
    for name, (unit, counts) in columns.items():
        low, high = boot.interval(counts / width, _mean)
        value = float(counts.sum() / width / BINS)
        out.append(Figure(name=name, unit=unit, better="higher", value=value, low=low, high=high))
    return out


def _spread(begin_s: Floats, took_s: Floats, weight: Floats, edges: Floats) -> Floats:
    """How much came between the edges where each thing is spread evenly over the time that it took.

    Counting ends instead would be off by one round of answers in a closed loop, whose clients go in step.
    """
    done = np.clip((edges[:, None] - begin_s) / np.maximum(took_s, 1e-9), 0.0, 1.0) @ weight
    return np.asarray(np.diff(done), dtype=np.float64)


def meets(sample: Sample, targets: Targets) -> bool:
    """Whether a request met all targets of its class, as its user sees it."""
    (report,) = attainment([_timed(sample)], targets)
    return report.attained is None or report.attained.met == 1


def _timed(sample: Sample) -> Timed:
    """What a user would call its times: from when the request was due."""
    return Timed(
        traffic_class=sample.traffic_class or "all",
        ttft_s=None if sample.ttft_s is None else sample.wait_s + sample.ttft_s,
        tpot_s=sample.tpot_s,
        e2e_s=sample.wait_s + sample.e2e_s,
        failed=sample.error is not None,
    )


def _notes(
    measured: Measured,
    kept: Sequence[Sample],
    good: Sequence[Sample],
    *,
    begin_s: float,
    last_due_s: float,
    opened: bool,
) -> list[str]:
    notes = []
    if measured.lag_p99_s > LAGGING_S:
        notes.append(
            f"the client itself was late by up to {measured.lag_p99_s * 1e3:.0f} ms (99 % of the time less), which is measured too:"
            " send less from one machine"
        )
    late = float(np.percentile([sample.wait_s for sample in kept], 99))
    if opened and late > 0.1:
        notes.append(
            f"requests were sent late, 1 % of them by {late:.3g} s and more: the load was milder than asked for"
        )
    span_s = last_due_s - begin_s
    if opened and len(kept) >= 20 and span_s > 0:
        sent, answered = len(kept) / span_s, sum(sample.sent_s + sample.e2e_s <= last_due_s for sample in kept) / span_s
        sooner, later = (
            _open_between(kept, begin_s + a * span_s, begin_s + b * span_s) for a, b in ((0.25, 0.5), (0.75, 1))
        )
        grows = later > 1.3 * sooner + 2 * (sooner + 1) ** 0.5  # by more than Poisson traffic scatters
        if answered < BEHIND * sent and grows:
            notes.append(
                f"the server does not keep up: {sent:.3g} requests/s were sent, {answered:.3g} answered meanwhile, and its queue grew to"
                " the end: the times would be worse in a longer test"
            )
    if not all(sample.counted for sample in good):
        notes.append("the server does not count tokens (no usage): pieces of the stream are counted as tokens")
    if "ignore_eos" not in measured.extras:
        notes.append("the server does not take ignore_eos: answers may be shorter than asked for")
    return notes


def _open_between(samples: Sequence[Sample], begin_s: float, end_s: float) -> float:
    """Requests that were open, in the mean over a stretch of time."""
    width = max(end_s - begin_s, 1e-9)
    return sum(max(0.0, min(end_s, s.sent_s + s.e2e_s) - max(begin_s, s.sent_s)) for s in samples) / width


def to_json(report: ServeReport) -> bytes:
    """The report as JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
