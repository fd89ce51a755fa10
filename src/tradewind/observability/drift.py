"""Notices that traffic has left what the plan was made for: its rate, the lengths of prompts and answers, what prompts share.

Knows: four figures of traffic, how much they scatter, and when a change is no chance. Refuses to know: what to do about it (tune.guard).

      requests   | 32 of them | 32 of them | ...         their mean, in its own standard deviations from the plan's
      CUSUM      S = max(0, S + |off by| - slack)        grows only while traffic stays off to the same side by more than the slack
      noticed    S > limit                               the limit is so high that traffic as planned reaches it in 100 hours at most once

(Page, "Continuous inspection schemes", 1954; the limit by Siegmund's formula, "Sequential Analysis", 1985.) The slack is the tolerance
of the plan and what the envelope itself may be off: a change within it is no drift, however sure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.contract.errors import UserError
from tradewind.contract.events import Arrived
from tradewind.observability.attainment import Timed
from tradewind.observability.lives import Life, Listener

Reals = npt.NDArray[np.float64]
What = Literal["answer length", "prefix share", "prompt length", "rate"]
WHATS: tuple[What, ...] = ("answer length", "prefix share", "prompt length", "rate")

BATCH = 32
"""Requests of a mean: enough that lengths, which are anything but normal, have means that are."""
FEWEST = 4 * BATCH
"""An envelope needs so many requests."""
LEARNT = 1000
"""So many make a good one."""
TOLERANCE = 1.25
"""A rate or a length that changed by less than this factor is within the plan ..."""
SHARE_TOLERANCE = 0.1
"""... and a part of the prompt tokens that is found in the cache within so much."""
QUIET_H = 100.0
"""Hours between two false alarms, at the least."""
SLACK = 0.5
"""Least slack, in standard deviations of a batch's mean."""
SIEGMUND = 1.166
HEAVY = 1.5
"""How much higher the limit is than for normal means: the tails of real ones are heavier."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request, when it is over or as a trace has it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the prompt, how many were found."""
    traffic_class: str = ""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One of the four as planned. Rate and lengths as natural logarithms, so that twice and half are equally far."""

    mean: float
    batch_sd: float
    """How much the mean of a batch scatters, what requests have to do with each other among it."""
    sure: float
    """Standard error of `mean` itself."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan was made for."""

    figures: dict[What, Figure]
    requests_per_s: float
    requests: int
    """It was made from so many."""

    @classmethod
    def of(cls, arrivals: Iterable[Arrival], *, others: int = 0) -> Envelope:
        """From traffic in order of arrival. `others` came among it and ended otherwise, so that they count for the rate alone.

        Raises UserError when it is too little to tell how much it scatters.
        """
        own = list(arrivals)
        if len(own) < FEWEST:
            raise UserError(f"{len(own)} requests are too few to tell what is usual: at least {FEWEST} are needed")
        batches = [own[place : place + BATCH] for place in range(0, len(own) - BATCH + 1, BATCH)]
        last: float | None = None
        columns: list[Reals] = []
        for batch in batches:
            columns.append(_means(batch, before_s=last if last is not None else batch[0].at_s))
            last = batch[-1].at_s
        table = np.array(columns)
        # The first batch has one gap less and a cold cache.
        settled = table[1:] if len(table) > 4 else table
        figures: dict[What, Figure] = {}
        for place, what in enumerate(WHATS):
            values = settled[:, place]
            # Few batches tell their own scatter badly: the upper end of what it may be.
            freedom = max(1, len(values) - 1)
            sd = float(values.std(ddof=1)) * math.sqrt(freedom / _low_chi2(freedom)) if len(values) > 1 else 1.0
            figures[what] = Figure(
                mean=float(values.mean()), batch_sd=max(sd, 1e-3), sure=max(sd, 1e-3) / math.sqrt(len(values))
            )
        span = max(own[-1].at_s - own[0].at_s, 1e-9)
        more = 1 + others / len(own)
        rate = figures["rate"]
        figures["rate"] = msgspec.structs.replace(rate, mean=rate.mean + math.log(more))
        return cls(figures=figures, requests_per_s=more * (len(own) - 1) / span, requests=len(own))

    def near(self, other: Envelope) -> bool:
        """Whether the other one is within the tolerance of a plan that was made for this one."""
        return all(
            abs(other.figures[what].mean - figure.mean)
            <= (SHARE_TOLERANCE if what == "prefix share" else math.log(TOLERANCE))
            for what, figure in self.figures.items()
        )

    def described(self) -> str:
        """A few words."""
        figures = self.figures
        return (
            f"{math.exp(figures['rate'].mean):.3g} requests/s, prompts of {math.exp(figures['prompt length'].mean):.0f} tokens "
            f"({100 * figures['prefix share'].mean:.0f} % found in the cache), answers of "
            f"{math.exp(figures['answer length'].mean):.0f}"
        )


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic has left the envelope."""

    what: What
    at_s: float
    since_s: float
    """About when it began."""
    planned: float
    """Requests per second, tokens, or a share from 0 to 1 (rate and lengths: geometric means)."""
    now: float

    def described(self) -> str:
        """One sentence."""
        if self.what == "prefix share":
            change = f"{100 * self.planned:.0f} % as planned to {100 * self.now:.0f} %"
        else:
            unit = "requests/s" if self.what == "rate" else "tokens"
            change = f"{self.planned:.3g} {unit} as planned to {self.now:.3g}, {self.now / self.planned:.2f} times"
        return f"{self.what} went from {change}, noticed {self.at_s - self.since_s:.0f} s after it began"


class DriftGuard:
    """Is told of requests as they come and as they end, and tells of a drift once; `settle` begins anew. One writer.

    Lengths of answers and what was found in the cache are known at the end only; the rate must not wait for it, for an engine that has
    too much to do ends no more requests than before.
    """

    def __init__(self, envelope: Envelope, *, quiet_h: float = QUIET_H) -> None:
        self._quiet_h = quiet_h
        self.settle(envelope)

    def settle(self, envelope: Envelope) -> None:
        """From now on this is what is usual."""
        self.envelope = envelope
        sides = 2 * len(WHATS)
        batches = max(1.0, envelope.requests_per_s * 3600 / BATCH * self._quiet_h)
        self._limit = HEAVY * limit_for(runs=batches * sides, slack=SLACK)
        self._sums = dict.fromkeys(((what, side) for what in WHATS for side in (1, -1)), 0.0)
        self._began: dict[tuple[What, int], tuple[float, int, float]] = {}
        """Since when each sum is over 0, of how many batches, and the sum of their means."""
        self._came: list[tuple[float, int]] = []
        self._over: list[Arrival] = []
        self._before_s: float | None = None
        self._over_s = 0.0
        self.found: Drift | None = None

    @property
    def limit(self) -> float:
        """What a sum must exceed, in standard deviations of a batch's mean."""
        return self._limit

    def take(self, arrival: Arrival) -> Drift | None:
        """A request that came and ended at once, as in a trace; the drift, when it is noticed with this one."""
        return self.came(arrival.at_s, prompt_tokens=arrival.prompt_tokens) or self.ended(arrival)

    def came(self, at_s: float, *, prompt_tokens: int) -> Drift | None:
        """One more request arrived; the drift, when it is noticed with this one."""
        if self.found is not None:
            return None
        if self._before_s is None:
            self._before_s = self._over_s = at_s  # the first gap is not known
            return None
        self._came.append((at_s, prompt_tokens))
        if len(self._came) < BATCH:
            return None
        batch, self._came = self._came, []
        begin_s, self._before_s = self._before_s, batch[-1][0]
        rate = _log_rate(len(batch), batch[-1][0] - begin_s)
        length = _log_mean([tokens for _, tokens in batch])
        for what, mean in (("rate", rate), ("prompt length", length)):
            found = self._judge(what, mean, begin_s=begin_s, now=batch[-1][0])  # type: ignore[arg-type]
            if found is not None:
                return found
        return None

    def ended(self, arrival: Arrival, *, now: float | None = None) -> Drift | None:
        """One more request is over; `now`: when, if that is not when it came."""
        if self.found is not None:
            return None
        self._over.append(arrival)
        if len(self._over) < BATCH:
            return None
        batch, self._over = self._over, []
        now = arrival.at_s if now is None else now
        begin_s, self._over_s = self._over_s, now
        return self._judge(
            "answer length", _log_mean([one.output_tokens for one in batch]), begin_s=begin_s, now=now
        ) or self._judge("prefix share", _found_share(batch), begin_s=begin_s, now=now)

    def quiet(self, now: float) -> Drift | None:
        """Nobody came until now: the drift, when that alone says that the rate fell. To be called now and then."""
        if self.found is not None or self._before_s is None:
            return None
        figure = self.envelope.figures["rate"]
        # As long as a batch would take at a rate that is off by the whole limit.
        long_s = BATCH / math.exp(figure.mean - (self._limit + self._slack("rate")) * figure.batch_sd)
        if now - self._before_s < long_s:
            return None
        rate = _log_rate(len(self._came) + 1, now - self._before_s)
        return self._tell("rate", rate, since_s=self._before_s, now=now)

    def _slack(self, what: What) -> float:
        figure = self.envelope.figures[what]
        tolerance = SHARE_TOLERANCE if what == "prefix share" else math.log(TOLERANCE)
        return max(SLACK, (tolerance + 2 * figure.sure) / figure.batch_sd)

    def _judge(self, what: What, mean: float, *, begin_s: float, now: float) -> Drift | None:
        figure = self.envelope.figures[what]
        off, slack = (mean - figure.mean) / figure.batch_sd, self._slack(what)
        for side in (1, -1):
            key = (what, side)
            # One batch may not decide alone, however far off: a burst is no drift.
            rise = min(side * off - slack, self._limit / 2)
            self._sums[key] = max(0.0, self._sums[key] + rise)
            if not self._sums[key]:
                self._began.pop(key, None)
                continue
            since, batches, total = self._began.get(key, (begin_s, 0, 0.0))
            self._began[key] = since, batches + 1, total + mean
            if self._sums[key] > self._limit:
                return self._tell(what, (total + mean) / (batches + 1), since_s=since, now=now)
        return None

    def _tell(self, what: What, mean: float, *, since_s: float, now: float) -> Drift:
        planned = self.envelope.figures[what].mean
        if what != "prefix share":
            planned, mean = math.exp(planned), math.exp(mean)
        self.found = Drift(what=what, at_s=now, since_s=since_s, planned=planned, now=mean)
        return self.found


class DriftListener(Listener):
    """Shows a guard what happens in a server, and keeps the newest requests for whoever plans anew. Costs some additions a request.

    Without an envelope it learns what is usual first: from the requests that come from then on.
    """

    KEPT = 2048

    def __init__(
        self,
        usual: Envelope | None = None,
        *,
        learn: int = LEARNT,
        on_drift: Callable[[Drift], None] = lambda drift: None,
        on_learnt: Callable[[Envelope], None] = lambda usual: None,
        on_ended: Callable[[float, Timed, bool], None] = lambda arrived_s, timed, left: None,
    ) -> None:
        """`learn`: requests to learn from. `on_ended` is told of each request that is over when it came, how it went (times that it did not
        live to see: how long it waited for them), and whether its client left it."""
        self.on_drift, self.on_learnt, self.on_ended = on_drift, on_learnt, on_ended
        self.guard: DriftGuard | None = None if usual is None else DriftGuard(usual)
        self.recent: deque[Arrival] = deque(maxlen=self.KEPT)
        """Requests that were answered, in the order of their ends."""
        self._learn = max(learn, FEWEST)
        self._open: dict[str, tuple[Life, str]] = {}
        self._learnt: list[Arrival] = []
        self._others = 0
        self._since_s = -math.inf
        """What came before is not learnt from."""

    @property
    def found(self) -> Drift | None:
        return None if self.guard is None else self.guard.found

    @property
    def learnt(self) -> tuple[int, int]:
        """From how many requests of how many it has learnt; equal when it knows what is usual."""
        return (self._learn, self._learn) if self.guard is not None else (len(self._learnt), self._learn)

    def use(self, usual: Envelope) -> None:
        """This is what is usual."""
        self.guard = DriftGuard(usual)
        self._learnt = []

    def relearn(self, now: float) -> None:
        """Forgets what was usual; what comes from now on is."""
        self.guard = None
        self._learnt, self._others, self._since_s = [], 0, now

    def arrived(self, life: Life, event: Arrived) -> None:
        """See Listener."""
        self._open[life.id] = (life, event.traffic_class)
        if self.guard is not None:
            self._tell(self.guard.came(event.at_s, prompt_tokens=life.prompt_tokens))

    def ended(self, life: Life) -> None:
        """See Listener."""
        known = self._open.pop(life.id, None)
        if known is None:
            return
        answered = life.finish in ("stop", "length")
        self.on_ended(life.arrived_s, _timed(life, known[1]), life.finish == "abort")
        if answered:
            done = _arrival(life, known[1], output_tokens=life.generated_tokens)
            self.recent.append(done)
            if self.guard is not None:
                self._tell(self.guard.ended(done, now=life.ended_s))
        if self.guard is None and life.arrived_s >= self._since_s:
            if answered:
                self._learnt.append(done)
            else:
                self._others += 1
            self._try_to_learn()

    def quiet(self, now: float) -> None:
        """To be called now and then: silence is a drift, too."""
        if self.guard is not None:
            self._tell(self.guard.quiet(now))

    def traffic(self, since_s: float) -> list[Arrival]:
        """What came since, in order of arrival; of requests that are not over the answer is taken to be as long as others'."""
        done = [one for one in self.recent if one.at_s >= since_s]
        lengths = [one.output_tokens for one in done or self.recent]
        usual = max(1, round(sum(lengths) / len(lengths))) if lengths else 1
        opened = [
            _arrival(life, name, output_tokens=usual) for life, name in self._open.values() if life.arrived_s >= since_s
        ]
        return sorted((*done, *opened), key=lambda one: one.at_s)

    @property
    def open(self) -> list[Life]:
        """What is not over."""
        return [life for life, _ in self._open.values()]

    def _tell(self, found: Drift | None) -> None:
        if found is not None:
            self.on_drift(found)

    def _try_to_learn(self) -> None:
        # The newest requests are short ones: the long ones that came with them are still open.
        cut = min(len(self._open), self._learn // 2)
        if len(self._learnt) < self._learn + cut:
            return
        own = sorted(self._learnt, key=lambda one: one.at_s)[: len(self._learnt) - cut]
        others = round(self._others * len(own) / len(self._learnt))
        usual = Envelope.of(own, others=others)
        self.use(usual)
        self.on_learnt(usual)


def _arrival(life: Life, traffic_class: str, *, output_tokens: int) -> Arrival:
    return Arrival(
        at_s=life.arrived_s,
        prompt_tokens=life.prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=life.cached_tokens,
        traffic_class=traffic_class,
    )


def _timed(life: Life, traffic_class: str) -> Timed:
    first_s, last_s = life.first_token_s, life.last_token_s
    gaps = life.generated_tokens - 1
    return Timed(
        traffic_class=traffic_class,
        ttft_s=(life.ended_s if first_s is None else first_s) - life.arrived_s,
        tpot_s=None if first_s is None or last_s is None or gaps < 1 else (last_s - first_s) / gaps,
        e2e_s=life.ended_s - life.arrived_s,
        failed=life.finish == "error",
    )


def limit_for(*, runs: float, slack: float) -> float:
    """The limit h of a CUSUM of standard normals with this slack k that is passed once in so many runs in the mean:
    (exp(2 k b) - 2 k b - 1) / (2 k k) = runs with b = h + 1.166."""
    low, high = 0.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        x = 2 * slack * (middle + SIEGMUND)
        if math.exp(x) - x - 1 < runs * 2 * slack * slack:
            low = middle
        else:
            high = middle
    return high


def _means(batch: Sequence[Arrival], *, before_s: float) -> Reals:
    """A batch's figures, in the order of WHATS."""
    return np.array(
        [
            _log_mean([one.output_tokens for one in batch]),
            _found_share(batch),
            _log_mean([one.prompt_tokens for one in batch]),
            _log_rate(len(batch), batch[-1].at_s - before_s),
        ]
    )


def _log_mean(tokens: Sequence[int]) -> float:
    return sum(math.log(max(1, count)) for count in tokens) / len(tokens)


def _log_rate(count: int, seconds: float) -> float:
    return math.log(count / max(seconds, 1e-9))


def _found_share(batch: Sequence[Arrival]) -> float:
    return sum(one.cached_tokens for one in batch) / max(1, sum(one.prompt_tokens for one in batch))


def _low_chi2(freedom: int) -> float:
    """About the 10th percentile of chi square (Wilson and Hilferty 1931)."""
    part = 2 / (9 * freedom)
    return max(0.05 * freedom, float(freedom * (1 - part - 1.2816 * math.sqrt(part)) ** 3))
