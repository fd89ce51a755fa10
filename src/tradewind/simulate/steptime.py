"""How long a step takes: a roofline before anything was measured, and what the engine's own step log makes of it.

Knows: sums over a step's columns, seconds per unit of each, and where those seconds were measured. Refuses to know: schedulers and clocks.

    seconds = curve(tokens) + a * decode context + b * prefill context + c * rows + d * logit rows + e * masked rows
              + f * prefill rows + g * prefill keys

The last two are for few tokens of a prompt behind many others: all keys before them are read, however few they are.

The curve is a line through knots at powers of two, monotone but neither convex nor concave: weights are read once whatever the tokens
(flat), compute takes over (steep), and kernels change in between (anything). All coefficients are at least zero. Where the log has no
steps, the shape of the roofline stands, scaled as the rest of the log says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.config.ledger import matmul_bytes, matmul_parameters
from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.simulate.features import FIELDS, NAMES, Features

Reals = npt.NDArray[np.float64]

FORMAT = 1
KNOTS = tuple(1 << power for power in range(16))
"""Tokens at which the curve may bend: 1 .. 32768."""
REACH = 1.05
"""So far beyond what was fitted a prediction is still trusted."""
HOLD_OUT = 5
"""Each fifth step is kept out of the fit to state its error."""
PULL, SMOOTH = 1e-3, 0.02
"""What coefficients pay, in squared relative errors: for being off the scaled roofline by all of it, and for being off their neighbour on
the curve (both relative to the roofline). So beyond what was measured the curve goes on as its last measured part did."""
BALANCE = 8.0
QUANTILES = 41
"""Points of the distribution of measured to predicted time."""
APART = 20
"""From so many held-out steps with prompts, and without, each kind has a distribution of its own."""
BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.7
"""Parts of the measured peaks that whole steps reach where nothing was fitted."""
FLOOR = 0.1
"""Part of the compute time per token that the curve has as slope where the roofline is flat, so that a fit has a scale there."""
LAYER_S = {"cpu": 5e-6, "cuda": 20e-6}
"""Time per layer that nothing else explains: starting its ops."""
ROW_S, MASKED_ROW_S = 1e-6, 2e-5
PROMPT_LAYER_S = 20e-6
"""Time per layer that attention of a prompt's row takes however few its tokens and keys are."""
KEYS_SHARE = 0.5
"""Part of the time to read a prompt's keys once that its multiplying does not hide: 16 and 64 tokens behind 131,072 took 0.163 and 0.324 ms
a layer where reading them takes 0.122 (benchmarks/results/long-rounds-h200.json)."""


EXTRAS = ("decode_context", "prefill_context", "rows", "logit_rows", "masked_rows")
"""Features with one coefficient each, in the order of `StepTime.extra_s` ..."""
PROMPTS = ("prefill_rows", "prefill_keys")
"""... and in that of `StepTime.prompt_s`."""
FITTED = (*EXTRAS, *PROMPTS)


class HostTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the host needs for a step, in seconds: before it is submitted, and after it was collected."""

    decide_s: float = 60e-6
    decide_row_s: float = 0.2e-6
    decide_enter_s: float = 30e-6
    absorb_s: float = 60e-6
    absorb_row_s: float = 0.1e-6
    loop_s: float = 20e-6
    """Taking orders and telling what happened, beside the two."""

    def before_s(self, *, rows: int, entered: int) -> float:
        """From the start of a turn to the submission of its step."""
        return self.decide_s + self.decide_row_s * rows + self.decide_enter_s * entered

    def after_s(self, *, rows: int) -> float:
        """From the arrival of a result to the next turn."""
        return self.absorb_s + self.absorb_row_s * rows + self.loop_s


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The model: seconds of a step from its features, how far they can be believed, and where."""

    format: int = FORMAT
    source: str
    """Where the coefficients come from."""
    made_for: str = ""
    """Model, formats and machine, where an engine has fitted them to its own steps; such times are of no use to another."""
    curve_s: tuple[float, ...]
    """Seconds at 0 tokens and at each of KNOTS."""
    extra_s: tuple[float, ...]
    """Seconds per unit of each of EXTRAS."""
    prompt_s: tuple[float, float] = (0.0, 0.0)
    """Seconds for each row of a prompt and for each token that it sees, whatever the number of its own."""
    host: HostTime = HostTime()
    steps: int = 0
    """Steps fitted; 0 is a roofline."""
    held_out: int = 0
    """Steps that the stated errors were measured on, which the fit had not seen."""
    error_median: float | None = None
    """Median of |predicted - measured| / measured on them."""
    error_p90: float | None = None
    low: Features = Features()
    high: Features = Features()
    """Least and greatest of each feature among the fitted steps."""
    ratios: tuple[float, ...] = (1.0,)
    """Quantiles, evenly spaced from 0 to 1, of measured / predicted on the held-out steps: what a model of means cannot say."""
    prompt_ratios: tuple[float, ...] = ()
    """The same of the steps with prompts alone, which are longer and scatter less; `ratios` are then of those without. Empty where either
    were too few: then `ratios` are of all."""

    def device_s(self, step: Features) -> float:
        """Time the device needs for a step."""
        tokens = step.tokens
        if tokens <= 0:
            return 0.0
        curve = self.curve_s
        place = bisect_left(KNOTS, tokens)  # KNOTS[place - 1] < tokens <= KNOTS[place]
        if place == 0:
            curve_s = curve[1]
        elif place == len(KNOTS):
            curve_s = curve[-1] + (curve[-1] - curve[-2]) / (KNOTS[-1] - KNOTS[-2]) * (tokens - KNOTS[-1])
        else:
            left = KNOTS[place - 1]
            curve_s = curve[place] + (curve[place + 1] - curve[place]) * (tokens - left) / (KNOTS[place] - left)
        a, b, c, d, e = self.extra_s
        f, g = self.prompt_s
        return (
            curve_s
            + a * step.decode_context
            + b * step.prefill_context
            + c * step.rows
            + d * step.logit_rows
            + e * step.masked_rows
            + f * step.prefill_rows
            + g * step.prefill_keys
        )

    def ratio(self, draw: float, *, prompts: bool = False) -> float:
        """Measured / predicted at the quantile `draw` in [0, 1], of steps with prompts or of all: for simulations with noise."""
        ratios = self.prompt_ratios if prompts and self.prompt_ratios else self.ratios
        at = draw * (len(ratios) - 1)
        left = min(int(at), len(ratios) - 2)
        if left < 0:
            return ratios[0]
        return ratios[left] + (ratios[left + 1] - ratios[left]) * (at - left)

    def why_not(self, step: Features) -> str | None:
        """Why the prediction for a step should not be trusted; None where it was measured."""
        if not self.steps:
            return f"not trustworthy here: nothing was fitted, this is the {self.source}"
        if step.tokens * REACH < self.low.tokens:
            return f"not trustworthy here: {step.tokens} tokens, fitted from {self.low.tokens} up"
        for name in FIELDS:
            asked, most = getattr(step, name), getattr(self.high, name)
            if asked > most * REACH:
                return f"not trustworthy here: {asked} {NAMES[name]}, fitted up to {most}"
        return None

    def trustworthy(self, step: Features) -> bool:
        """Whether a step lies within what was fitted."""
        low, high = self.low, self.high
        return (
            self.steps > 0
            and low.tokens <= step.tokens * REACH
            and step.tokens <= high.tokens * REACH
            and step.rows <= high.rows * REACH
            and step.prefill_tokens <= high.prefill_tokens * REACH
            and step.decode_context <= high.decode_context * REACH
            and step.prefill_context <= high.prefill_context * REACH
            and step.prefill_rows <= high.prefill_rows * REACH
            and step.prefill_keys <= high.prefill_keys * REACH
            and step.logit_rows <= high.logit_rows * REACH
            and step.masked_rows <= high.masked_rows * REACH
        )

    def described(self) -> str:
        """One sentence for people."""
        if not self.steps:
            return f"step times: {self.source}, not fitted to this machine"
        error = ""
        if self.error_median is not None and self.error_p90 is not None:
            error = (
                f", off by {100 * self.error_median:.1f} % in the median and {100 * self.error_p90:.1f} % at p90 "
                f"on {self.held_out} others"
            )
        return f"step times: {self.source}{error}; fitted up to {self.high.tokens} tokens a step"

    def save(self, path: Path) -> None:
        """Writes the model as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> StepTime:
        """Reads a model. Raises UserError when the file is none."""
        try:
            model = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise UserError(f"the step-time model {path} cannot be read: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise UserError(f"{path} is not a step-time model: {error}") from None
        if model.format != FORMAT or len(model.curve_s) != len(KNOTS) + 1 or len(model.extra_s) != len(EXTRAS):
            raise UserError(
                f"{path} has format {model.format} of step-time models, this version reads {FORMAT}: fit again"
            )
        return model


class Timed(Protocol):
    """A step with its features and what it took."""

    @property
    def features(self) -> Features: ...

    @property
    def took_s(self) -> float: ...


# ------------------------------------------------------------------------------------------------------------- roofline


def roofline(plan: Plan) -> StepTime:
    """What the plan's card and hardware say of step times before anything was measured (Williams et al. 2009, the roofline model).

    weights      read once a step: bytes / bandwidth
    tokens       2 flops per matmul weight, under the former until compute takes longer
    KV           decode rows read it at memory speed; prompts pay 4 flops per pair of tokens, layer, head and dimension
    """
    card, machine, numerics = plan.card, plan.hardware, plan.numerics
    bandwidth = machine.memory_bytes_per_s * BANDWIDTH_SHARE
    flops = machine.matmul_flops_per_s * FLOPS_SHARE
    weights = matmul_bytes(card, compute=numerics.compute, quantization=numerics.quantization, backend=numerics.backend)
    weights_s = weights / bandwidth
    token_s = 2 * matmul_parameters(card) / flops
    steady_s = LAYER_S[machine.kind] * card.layers
    curve = [steady_s + max(weights_s, token_s * tokens) for tokens in KNOTS]
    for place in range(1, len(curve)):  # a floor under the slope
        least = FLOOR * token_s * (KNOTS[place] - KNOTS[place - 1])
        curve[place] = max(curve[place], curve[place - 1] + least)
    kv_bytes = sum(group.bytes_per_page / group.page_tokens for group in plan.cache.groups)
    pair_flops = 4 * card.heads * card.head_dim * card.layers
    logits_s = 2 * card.hidden * card.vocab_size / flops
    return StepTime(
        source=f"roofline of {card.name} on {machine.name}",
        curve_s=(curve[0] * 0.99, *curve),
        extra_s=(kv_bytes / bandwidth, pair_flops / flops, ROW_S, logits_s, MASKED_ROW_S),
        prompt_s=(PROMPT_LAYER_S * card.layers, KEYS_SHARE * kv_bytes / bandwidth),
    )


# ------------------------------------------------------------------------------------------------------------------ fit


def fit(steps: Sequence[Timed], *, prior: StepTime, host: HostTime | None = None) -> StepTime:
    """A model from measured steps; `prior` gives the shape where they say nothing. Pure.

    Errors count relative to the step's own time. Each fifth step is first kept out to state the error, then all are used. Raises
    UserError when there are too few steps.
    """
    taken = [step for step in steps if step.features.tokens > 0 and step.took_s > 0]
    if len(taken) < 2 * HOLD_OUT:
        raise UserError(f"{len(taken)} steps are too few to fit step times: at least {2 * HOLD_OUT} are needed")
    columns = np.array([[getattr(step.features, name) for name in FIELDS] for step in taken], dtype=np.float64)
    seconds = np.array([step.took_s for step in taken])
    model, predicted = _fit_checked(columns, seconds, prior)
    out = np.arange(len(seconds)) % HOLD_OUT == HOLD_OUT - 1
    return msgspec.structs.replace(
        model,
        source=f"fitted on {len(seconds)} steps",
        host=host or prior.host,
        **_stated(predicted[out], seconds[out], prompts=_with_prompts(columns)[out]),
    )


def _fit_checked(columns: Reals, seconds: Reals, prior: StepTime) -> tuple[StepTime, Reals]:
    """The model fitted to all steps; and, for all steps, what one that did not see each fifth of them says."""
    design = _design(columns)
    scale = _coefficients(prior)
    seen = np.arange(len(seconds)) % HOLD_OUT != HOLD_OUT - 1
    prompts = _with_prompts(columns)
    checked = _solve(design[seen], seconds[seen], scale, kind=prompts[seen])
    whole = _solve(design, seconds, scale, kind=prompts)
    steps = len(whole) - len(FITTED)
    model = msgspec.structs.replace(
        prior,
        curve_s=tuple(np.cumsum(whole[:steps]).tolist()),
        extra_s=tuple(whole[steps : steps + len(EXTRAS)].tolist()),
        prompt_s=(float(whole[-2]), float(whole[-1])),
        steps=len(seconds),
        low=_corner(columns.min(axis=0)),
        high=_corner(columns.max(axis=0)),
    )
    return model, np.einsum("ni,i->n", design, checked)


def _stated(predicted: Reals, measured: Reals, *, prompts: npt.NDArray[np.bool_] | None = None) -> dict[str, object]:
    """The fields of StepTime that say how far predictions were off on steps that the fit had not seen. `prompts`: which of them had any."""
    off = np.abs(predicted - measured) / measured
    # Each kind by itself, where there are enough: the fit cares less for outliers than clocks do, and what it leaves out of short steps
    # the sum of the long ones would hide.
    some = np.zeros(len(off), np.bool_) if prompts is None else prompts
    apart = min(some.sum(), (~some).sum()) >= APART
    return {
        "held_out": len(off),
        "error_median": float(np.median(off)),
        "error_p90": float(np.quantile(off, 0.9)),
        "ratios": _ratios(predicted[~some], measured[~some]) if apart else _ratios(predicted, measured),
        "prompt_ratios": _ratios(predicted[some], measured[some]) if apart else (),
    }


def _ratios(predicted: Reals, measured: Reals) -> tuple[float, ...]:
    ratios = np.quantile(measured / predicted, np.linspace(0, 1, QUANTILES))
    # Most steps are short and scatter most; what is drawn must not make the sum of all longer than it was.
    ratios *= measured.sum() / predicted.sum() / ratios.mean()
    return tuple(ratios.tolist())


def _with_prompts(columns: Reals) -> npt.NDArray[np.bool_]:
    """Which steps compute prompts."""
    some: npt.NDArray[np.bool_] = columns[:, FIELDS.index("prefill_tokens")] > 0
    return some


def _corner(values: Reals) -> Features:
    return Features(**dict(zip(FIELDS, (int(value) for value in values), strict=True)))


def _coefficients(model: StepTime) -> Reals:
    """Start of the curve, its rises from knot to knot, then the extras; with a floor, for a fit is relative to them."""
    curve = model.curve_s
    rises = [curve[0], *(right - left for left, right in pairwise(curve))]
    floor = 1e-9 * max(curve[-1], 1e-9)
    out: Reals = np.maximum(np.array([*rises, *model.extra_s, *model.prompt_s]), floor)
    return out


def _design(columns: Reals) -> Reals:
    """One row per step, one column per coefficient: how much of each rise of the curve its tokens have climbed, then the extras."""
    tokens = columns[:, :1]
    left = np.array([0, *KNOTS[:-1]], dtype=np.float64)
    right = np.array(KNOTS, dtype=np.float64)
    climbed = np.clip((tokens - left) / (right - left), 0, 1)
    over = np.maximum(tokens[:, 0] - KNOTS[-1], 0) / (KNOTS[-1] - KNOTS[-2])
    climbed[:, -1] += over
    extras = columns[:, [FIELDS.index(name) for name in FITTED]]
    return np.concatenate((np.ones_like(tokens), climbed, extras), axis=1)


def _solve(design: Reals, seconds: Reals, scale: Reals, *, kind: npt.NDArray[np.bool_] | None = None) -> Reals:
    """Coefficients >= 0 of least relative error, pulled towards `scale` times one common factor; outliers among their kind count less
    (Huber), and the kind that has fewer steps up to BALANCE times as much for each: a step with a prompt is judged by one without."""
    scaled = design * scale
    factor = float(np.median(seconds / np.maximum(scaled.sum(axis=1), 1e-12)))
    predicted = seconds
    some = np.zeros(len(seconds), np.bool_) if kind is None else kind
    parts = [part for part in (some, ~some) if part.any()]
    fair = np.ones_like(seconds)
    for part in parts:
        fair[part] = min(BALANCE, max(1.0, len(seconds) / (len(parts) * part.sum())))
    weight = np.sqrt(fair)
    solution = np.full(len(scale), factor)
    penalty = PULL * np.eye(len(scale)) + SMOOTH * _neighbours(len(scale))
    for _ in range(4):
        # Divided by the prediction, not by the measurement: otherwise slow steps count less than quick ones and all comes out too low.
        rows = scaled * (weight / predicted)[:, None] * factor
        goal = seconds * weight / predicted
        # No matmul: the library's threads would take the cores of a running engine, for ten times as long as one needs.
        gram = np.einsum("ni,nj->ij", rows, rows) + penalty
        solution = non_negative(gram, np.einsum("ni,n->i", rows, goal) + PULL) * factor
        predicted = np.maximum(np.einsum("ni,i->n", scaled, solution), 1e-3 * seconds)
        off = np.abs(seconds / predicted - 1)
        for part in parts:
            limit = max(0.05, 3 * float(np.median(off[part])))
            weight[part] = np.sqrt(fair[part] * np.minimum(1.0, limit / np.maximum(off[part], 1e-12)))
    return solution * scale


def _neighbours(size: int) -> Reals:
    """The quadratic form that sums squared differences between adjacent rises of the curve; zero where there is no curve (host times)."""
    form = np.zeros((size, size))
    if size == 1 + len(KNOTS) + len(FITTED):
        for left in range(1, len(KNOTS)):
            right = left + 1
            form[left, left] += 1
            form[right, right] += 1
            form[left, right] -= 1
            form[right, left] -= 1
    return form


def non_negative(gram: Reals, goal: Reals) -> Reals:
    """The x >= 0 of least  x' gram x / 2 - goal' x  for a positive definite `gram` (Lawson and Hanson, 1974)."""
    size = len(goal)
    x = np.zeros(size)
    free = np.zeros(size, np.bool_)
    tolerance = 1e-10 * max(1.0, float(np.abs(goal).max()))
    for _ in range(10 * size):
        pull = np.where(free, -np.inf, goal - gram @ x)
        most = int(pull.argmax())
        if not pull[most] > tolerance:
            break
        free[most] = True
        while True:
            trial = np.zeros(size)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], goal[free])
            below = free & (trial <= 0)
            if not below.any():
                x = trial
                break
            # Back to where the first of them becomes zero, which is then held there.
            gap = x[below] - trial[below]
            part = float(np.min(x[below] / np.where(gap > 0, gap, 1.0)))
            x = x + part * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
            if not free.any():
                break
    return x


def fit_host(
    decide: Sequence[tuple[int, int, float]], absorb: Sequence[tuple[int, float]], *, loop_s: float
) -> HostTime:
    """Host times from (rows, entered, seconds) of decisions and (rows, seconds) of what came back; outliers count little."""
    d = np.array(decide, dtype=np.float64).reshape(-1, 3)
    a = np.array(absorb, dtype=np.float64).reshape(-1, 2)
    default = HostTime()
    if len(d) < HOLD_OUT or len(a) < HOLD_OUT:
        return msgspec.structs.replace(default, loop_s=loop_s)
    decided = _solve(
        np.stack((np.ones(len(d)), d[:, 0], d[:, 1]), axis=1),
        np.maximum(d[:, 2], 1e-7),
        np.array([default.decide_s, default.decide_row_s, default.decide_enter_s]),
    )
    absorbed = _solve(
        np.stack((np.ones(len(a)), a[:, 0]), axis=1),
        np.maximum(a[:, 1], 1e-7),
        np.array([default.absorb_s, default.absorb_row_s]),
    )
    return HostTime(
        decide_s=float(decided[0]),
        decide_row_s=float(decided[1]),
        decide_enter_s=float(decided[2]),
        absorb_s=float(absorbed[0]),
        absorb_row_s=float(absorbed[1]),
        loop_s=loop_s,
    )


# -------------------------------------------------------------------------------------------------------------- on line


Pair = TypeVar("Pair")


class OnlineFit:
    """A model that follows the engine: `take` each step (microseconds), `refit` now and then (milliseconds).

    It keeps the newest steps of each size, so that a day of decoding does not make it forget what a long prompt costs, and chunks of 16
    tokens not what those of 32 took. Each step is predicted before it is learnt from, and the stated errors are those of the newest
    predictions.
    """

    KEPT = 256
    """Steps of each size and of each length of prompts' chunks."""
    JUDGED = 512

    def __init__(self, prior: StepTime) -> None:
        self._prior = prior
        self._model = prior
        self._kept: dict[tuple[int, int], deque[tuple[Features, float]]] = {}
        self._judged: deque[tuple[float, float]] = deque(maxlen=self.JUDGED)
        self.taken = 0

    @property
    def model(self) -> StepTime:
        """The newest model."""
        return self._model

    def kept(self) -> list[tuple[Features, float]]:
        """The steps that a fit is made from. May be called from another thread than `take`."""
        return [pair for own in _copied(self._kept.values()) for pair in _copied(own)]

    def take(self, features: Features, seconds: float) -> None:
        """One more step and what it took."""
        if features.tokens <= 0 or seconds <= 0:
            return
        self.taken += 1
        if self._model.steps and self._model.trustworthy(features):
            self._judged.append((self._model.device_s(features), seconds))
        key = (features.tokens.bit_length(), features.prefill_tokens.bit_length())
        self._kept.setdefault(key, deque(maxlen=self.KEPT)).append((features, seconds))

    def refit(self) -> StepTime:
        """Fits what is kept and returns the model; the former one when there are too few steps. May be called from another thread."""
        kept = self.kept()
        if len(kept) < 2 * HOLD_OUT:
            return self._model
        columns = np.array([[getattr(f, name) for name in FIELDS] for f, _ in kept], dtype=np.float64)
        seconds = np.array([taken for _, taken in kept])
        model, predicted = _fit_checked(columns, seconds, self._prior)
        out = np.arange(len(seconds)) % HOLD_OUT == HOLD_OUT - 1
        stated = _stated(predicted[out], seconds[out], prompts=_with_prompts(columns)[out])
        if len(self._judged) >= 64:  # steps that came after the fit tell more than steps that were held out of it
            judged = np.array(_copied(self._judged))
            stated = _stated(judged[:, 0], judged[:, 1])
        self._model = msgspec.structs.replace(
            model, source=f"fitted on {len(seconds)} of {self.taken} steps, on line", **stated
        )
        return self._model


def _copied(kept: Iterable[Pair]) -> list[Pair]:
    """What another thread adds to."""
    while True:
        try:
            return list(kept)
        except RuntimeError:  # a step came just then
            continue


def flat_prior(device_s: float = 0.01) -> StepTime:
    """A shape for a fit where neither card nor hardware are known: a constant, and 1 % more for each token."""
    curve = [device_s * (1 + 0.01 * tokens) for tokens in KNOTS]
    return StepTime(
        source="guess without card and hardware",
        curve_s=(device_s, *curve),
        extra_s=(device_s * 1e-6, device_s * 1e-6, device_s * 1e-4, device_s * 1e-3, device_s * 1e-3),
    )


def relative_errors(model: StepTime, steps: Sequence[Timed]) -> tuple[float, float]:
    """Median and p90 of |predicted - measured| / measured over other steps."""
    off = [
        abs(model.device_s(step.features) / step.took_s - 1)
        for step in steps
        if step.features.tokens > 0 and step.took_s > 0
    ]
    if not off:
        return math.nan, math.nan
    return float(np.median(off)), float(np.quantile(off, 0.9))
