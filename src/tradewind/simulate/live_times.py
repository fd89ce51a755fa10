"""Step times that follow a running engine: each step is measured, now and then the model is fitted again, and the scheduler paces by it.

Knows: when a fit is due, whether it is good enough to be used, where it is kept. Refuses to know: how times are fitted (steptime), how
steps are paced (engine.pacing, which is handed the result), engines and processes.

      engine's thread   submitted, collected: sums of a step's columns, its seconds into a ring         some microseconds
      a thread          fit to what is kept, errors on steps it had not seen, file                      some milliseconds, now and then
      engine's thread   the next step that comes back finds the model: `pace`                           once

Where a step lies outside what was fitted, the model is not trusted: from its edge on the prior's shape goes on (a roofline, or the times of
a former run), scaled as the fitted steps say. So no step is predicted shorter than a smaller one.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.contract.kv import KVGroup
from tradewind.contract.step import Step, StepResult
from tradewind.engine.pacing import StepSeconds, planned_seconds
from tradewind.engine.step_watch import StepTimeStats
from tradewind.simulate.features import FIELDS, FeatureReader, Features
from tradewind.simulate.forecast import planned_times
from tradewind.simulate.steptime import KNOTS, REACH, OnlineFit, Reals, StepTime

LOG = logging.getLogger("tradewind.engine")

FIRST = 64
"""Steps before the first fit; each later one waits for twice as many ..."""
MOST = 1024
"""... but for no more new ones than this."""
APART_S = 2.0
"""And at least so long: fitting takes no noticeable part of the time."""
WORSE = 1.1
"""A fit is paced by unless it is so many times as far off as the scaled prior."""
CLOSE_S = 5.0
"""So long `close` waits for a fit that runs."""
SCALE = (0.01, 100.0)

Pace = Callable[[StepSeconds], None]
Run = Callable[[Callable[[], None]], None]
"""Runs a job elsewhere; returns at once."""


class _Seconds:
    """A StepTime asked with plain numbers: the pacer asks a dozen times for each step."""

    __slots__ = ("_a", "_b", "_c", "_curve", "_d", "_f", "_g")

    def __init__(self, times: StepTime) -> None:
        self._curve = times.curve_s
        self._a, self._b, self._c, self._d, _ = times.extra_s
        self._f, self._g = times.prompt_s

    def __call__(
        self, tokens: float, rows: float, context: float, pairs: float, logits: float, prompts: float, keys: float
    ) -> float:
        curve = self._curve
        place = bisect_left(KNOTS, tokens)
        if place == 0:
            curve_s = curve[1]
        elif place == len(KNOTS):
            curve_s = curve[-1] + (curve[-1] - curve[-2]) / (KNOTS[-1] - KNOTS[-2]) * (tokens - KNOTS[-1])
        else:
            left = KNOTS[place - 1]
            curve_s = curve[place] + (curve[place + 1] - curve[place]) * (tokens - left) / (KNOTS[place] - left)
        return (
            curve_s
            + self._a * context
            + self._b * pairs
            + self._c * rows
            + self._d * logits
            + self._f * prompts
            + self._g * keys
        )


class FittedSeconds:
    """engine.pacing.StepSeconds of a fitted model within what it was fitted to, beyond that by the prior's shape. Pure."""

    def __init__(self, fitted: StepTime, *, prior: StepTime, scale: float) -> None:
        """`scale`: measured / predicted by the prior."""
        self._fitted, self._prior, self._scale = _Seconds(fitted), _Seconds(prior), scale
        high = fitted.high
        self._low = fitted.low.tokens / REACH
        self._tokens, self._rows, self._chunk = high.tokens * REACH, high.rows * REACH, high.prefill_tokens * REACH
        self._context, self._pairs = high.decode_context * REACH, high.prefill_context * REACH
        self._logits, self._keys = high.logit_rows * REACH, high.prefill_keys * REACH

    def __call__(self, *, rows: int, context: int, chunk: int, start: int) -> float:
        """See StepSeconds."""
        tokens = rows + chunk
        lines = rows + (chunk > 0)
        pairs = chunk * start + chunk * (chunk + 1) // 2
        prompts = 1 if chunk else 0
        keys = prompts * (start + chunk)
        if (
            self._low <= tokens <= self._tokens
            and lines <= self._rows
            and chunk <= self._chunk
            and context <= self._context
            and pairs <= self._pairs
            and lines <= self._logits
            and keys <= self._keys
        ):
            return self._fitted(tokens, lines, context, pairs, lines, prompts, keys)
        prior_s = self._prior(tokens, lines, context, pairs, lines, prompts, keys)
        # The nearest that was fitted. Where chunks are longer than any that was, so are the tokens.
        most = min(self._tokens, self._tokens if chunk <= self._chunk else self._chunk + rows)
        edge = (
            min(max(tokens, self._low), most),
            min(lines, self._rows),
            min(context, self._context),
            min(pairs, self._pairs),
            min(lines, self._logits),
            prompts,
            min(keys, self._keys),
        )
        edge_s = self._fitted(*edge)
        if tokens < self._low:
            return min(edge_s, self._scale * prior_s)
        return edge_s + self._scale * max(0.0, prior_s - self._prior(*edge))


class LiveTimes:
    """engine.step_watch.StepWatch that fits. `submitted`, `collected` and `stats` are the engine's thread's; `close` may wait."""

    def __init__(
        self,
        *,
        prior: StepTime,
        groups: Sequence[KVGroup],
        slots: int,
        clock: Callable[[], float],
        known: StepTime | None = None,
        plain: StepSeconds | None = None,
        pace: Pace | None = None,
        prepared: Callable[[], bool] = lambda: True,
        file: Path | None = None,
        made_for: str = "",
        run: Run | None = None,
    ) -> None:
        """`known`: times of a former run, which are paced by at once; without them `plain` stays in use until the first fit is good enough,
        and comes back when a later one is not. `prepared`: until it says yes, steps may wait for kernels and are not learnt from. `file`:
        written after each fit. `run`: where fits are made; a thread.
        """
        self._online = OnlineFit(known or prior)
        self._prior, self._known = known or prior, known
        self._reader = FeatureReader(groups=groups, slots=slots)
        self._clock, self._prepared = clock, prepared
        self._plain, self._pace = plain, pace
        self._file, self._made_for = file, made_for
        self._run = run or self._in_thread
        self._flying: deque[Features] = deque()
        self._due = FIRST
        self._at_s = float("-inf")
        """When the last fit was begun."""
        self._fitting = False
        self._thread: threading.Thread | None = None
        self._fresh: tuple[StepTime, StepSeconds | None] | None = None
        """What a fit has brought and the engine's thread has not seen; None for the seconds: too far off to be paced by."""
        self._stats = StepTimeStats()
        self._ready = self._greeted = False
        self.broken: str | None = None
        """Why the file is not written any more."""
        if known is not None and pace is not None:
            pace(FittedSeconds(known, prior=prior, scale=1.0))
            self._stats = _stats_of(known, refits=0, paces=True)

    # -- the engine's thread

    def submitted(self, step: Step) -> None:
        """See StepWatch."""
        if not self._greeted:  # not at the start, when an engine's process has no log yet
            self._greeted = True
            if self._stats.paces and self._known is not None:
                LOG.info(f"steps are paced by times of a former run: {self._known.described()}")
        self._flying.append(self._reader.read(step))

    def collected(self, result: StepResult) -> None:
        """See StepWatch."""
        if not self._flying:
            return
        features = self._flying.popleft()
        if not self._ready:
            self._ready = self._prepared()
            return
        online = self._online
        online.take(features, result.device_s + result.host_s)
        if self._fresh is not None:
            self._adopt()
        if online.taken >= self._due and not self._fitting and self._clock() - self._at_s >= APART_S:
            self._fitting, self._at_s = True, self._clock()
            self._due = online.taken + min(max(online.taken, FIRST), MOST)
            self._run(self._fit)

    def _adopt(self) -> None:
        assert self._fresh is not None
        model, seconds = self._fresh
        self._fresh = None
        paced, refits = self._stats.paces, self._stats.refits + 1
        paces = self._pace is not None and seconds is not None
        if self._pace is not None:
            if seconds is not None:
                self._pace(seconds)
            elif paced and self._plain is not None:
                self._pace(self._plain)
        self._stats = _stats_of(model, refits=refits, paces=paces)
        use = (
            "steps are paced by them"
            if paces
            else "too far off to be paced by"
            if self._pace is not None
            else "kept only"
        )
        if paces != paced or not refits & (refits - 1):  # not each of thousands
            LOG.info(f"{model.described()}; fit {refits}, {use}")

    def stats(self) -> StepTimeStats:
        """See StepWatch."""
        return self._stats

    def close(self) -> None:
        """See StepWatch. Fits once more, so that the file has the last steps too."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)
        if self._file is not None and not self._fitting and self._online.taken >= FIRST:
            self._fit()

    # -- elsewhere

    def _in_thread(self, job: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=job, name="tradewind-step-times", daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            model = self._widened(self._online.refit())
            self._fresh = (model, self._judged(model))
            self._save(model)
        except Exception:  # whoever learns must not harm the engine
            LOG.exception("step times could not be fitted")
        finally:
            self._fitting = False

    def _widened(self, model: StepTime) -> StepTime:
        """What a former run has measured stays measured; the fit has kept its shape."""
        model = msgspec.structs.replace(model, made_for=self._made_for)
        known = self._known
        if known is None or not known.steps or not model.steps:
            return model
        low = {name: min(getattr(model.low, name), getattr(known.low, name)) for name in FIELDS}
        high = {name: max(getattr(model.high, name), getattr(known.high, name)) for name in FIELDS}
        return msgspec.structs.replace(model, low=Features(**low), high=Features(**high))

    def _judged(self, model: StepTime) -> StepSeconds | None:
        """The model as the pacer asks for it; None where it is worse than what it would replace."""
        kept = self._online.kept()
        if not model.steps or not kept:
            return None
        # Both on the same steps, each times a factor of its own, as the pacer has one: it is the shape that is compared.
        measured = np.array([seconds for _, seconds in kept])
        before = np.array([max(self._prior.device_s(features), 1e-12) for features, _ in kept])
        now = np.array([max(model.device_s(features), 1e-12) for features, _ in kept])
        scale = float(np.clip(np.median(measured / before), *SCALE))
        if _off(now, measured) > WORSE * _off(before, measured):
            return None
        return FittedSeconds(model, prior=self._prior, scale=scale)

    def _save(self, model: StepTime) -> None:
        if self._file is None or self.broken is not None or not model.steps:
            return
        beside = self._file.with_name(f"{self._file.name}.{os.getpid()}")  # another engine may be taking over
        try:
            model.save(beside)
            beside.replace(self._file)
        except OSError as error:
            self.broken = f"the step times {self._file} are not written any more: {error.strerror or error}"
            LOG.warning(self.broken)


def _off(predicted: Reals, measured: Reals) -> float:
    """Median of how far predictions are off in proportion, apart from one factor for all of them."""
    ratio = np.log(measured / predicted)
    return float(np.median(np.abs(ratio - np.median(ratio))))


def _stats_of(model: StepTime, *, refits: int, paces: bool) -> StepTimeStats:
    return StepTimeStats(
        steps=model.steps,
        held_out=model.held_out,
        error_median=model.error_median,
        error_p90=model.error_p90,
        refits=refits,
        paces=paces,
    )


def made_for(plan: Plan) -> str:
    """What step times are of: the same model, computed in the same way on the same kind of machine."""
    card, numerics = plan.card, plan.numerics
    return ", ".join(
        (
            f"{card.family} of {card.parameters:,} parameters in {card.layers} layers",
            f"{numerics.backend} {numerics.compute} {numerics.quantization} {numerics.kv_format}",
            f"{plan.hardware.name} with {numerics.threads} threads",
        )
    )


def read_times(file: Path, plan: Plan) -> StepTime | None:
    """The times that a former run of the same plan has left; None where there is no file.

    Raises UserError for a file that cannot be used or written.
    """
    if not file.parent.is_dir():
        raise UserError(f"the step times cannot be written to {file}: there is no folder {file.parent}")
    if not file.exists():
        return None
    known = StepTime.load(file)
    if known.made_for not in ("", made_for(plan)):
        raise UserError(
            f"the step times in {file} are of {known.made_for}, and this is {made_for(plan)}: name another file, "
            "or remove this one to begin anew"
        )
    return known


def live_times_of(
    plan: Plan,
    *,
    clock: Callable[[], float],
    pace: Pace,
    prepared: Callable[[], bool] = lambda: True,
    file: Path | None = None,
    run: Run | None = None,
) -> LiveTimes | None:
    """What the plan wants; None where it fits nothing and no file is named. Raises UserError for a file that cannot be used."""
    schedule = plan.schedule
    if not schedule.fit_steps and file is None:
        return None
    cost = schedule.step_cost
    return LiveTimes(
        prior=planned_times(plan),
        groups=plan.cache.groups,
        slots=schedule.max_running,
        clock=clock,
        known=None if file is None else read_times(file, plan),
        plain=None if cost is None else planned_seconds(cost),
        pace=pace if schedule.fit_steps and cost is not None else None,
        prepared=prepared,
        file=file,
        made_for=made_for(plan),
        run=run,
    )
