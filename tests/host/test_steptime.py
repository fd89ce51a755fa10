"""Step times: what is read off a step, the fit against laws that are known, and what it says of itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import LLAMA_8B, SMOLLM2, machine
from support_engine import Chunk, group

from tradewind.config.goals import Goals
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError
from tradewind.contract.request import SamplingParams
from tradewind.contract.step import Enter, Step, Wants, frozen_ints
from tradewind.simulate.features import FeatureReader, Features
from tradewind.simulate.steptime import (
    KNOTS,
    HostTime,
    OnlineFit,
    StepTime,
    fit,
    fit_host,
    flat_prior,
    non_negative,
    relative_errors,
    roofline,
)


def step(rows: Sequence[tuple[int, int, int, Wants]], *, enter: Sequence[Enter] = (), number: int = 1) -> Step:
    """Rows of (start, count, drafts, wants), in slots 0, 1, ..."""
    none = frozen_ints([])
    columns = [frozen_ints([row[place] for row in rows]) for place in range(4)]
    return Step(
        number=number,
        slot=frozen_ints(range(len(rows))),
        epoch=frozen_ints([0] * len(rows)),
        start=columns[0],
        count=columns[1],
        drafts=columns[2],
        wants=columns[3],
        enter=tuple(enter),
        page_slot=none,
        page_group=none,
        page_index=none,
        page_id=none,
    )


def entering(slot: int, *, grammar: str | None) -> Enter:
    return Enter(
        slot=slot,
        epoch=0,
        request_id=f"r{slot}",
        tokens=frozen_ints([1]),
        prompt_tokens=1,
        capacity_tokens=9,
        sampling=SamplingParams(),
        seed=0,
        eos_ids=(),
        grammar=grammar,
    )


class Measured(msgspec.Struct):
    features: Features
    took_s: float


def made_up_steps(count: int, *, seed: int, noise: float = 0.0, most: int = 256) -> list[Features]:
    draw = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        rows = int(draw.integers(1, 33))
        chunk = int(draw.integers(2, most - rows)) if draw.random() < 0.4 and most - rows > 2 else 0
        start = int(draw.integers(0, 2000))
        out.append(
            Features(
                tokens=rows + chunk,
                rows=rows + (chunk > 0),
                prefill_tokens=chunk,
                decode_context=int(rows * draw.integers(10, 1500)),
                prefill_context=chunk * start + chunk * (chunk + 1) // 2,
                prefill_rows=int(chunk > 0),
                prefill_keys=(start + chunk) * (chunk > 0),
                logit_rows=rows + int(draw.random() < 0.5) * (chunk > 0),
            )
        )
    return out


def law(f: Features) -> float:
    """A machine: weights take 4 ms whatever the tokens, over 12 tokens compute takes over; attention, logits."""
    return (
        max(4e-3, 3.3e-4 * f.tokens) + 2e-7 * f.decode_context + 4e-9 * f.prefill_context + 5e-5 * f.logit_rows + 1e-3
    )


def measured(features: Sequence[Features], *, noise: float = 0.0, seed: int = 7) -> list[Measured]:
    draw = np.random.default_rng(seed)
    return [Measured(f, law(f) * float(np.exp(noise * draw.standard_normal()))) for f in features]


def plan_of(card: object = SMOLLM2) -> Plan:
    return resolve(Goals(model="x", max_context=2048), card, machine())  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- features


def test_features_of_a_mixed_step() -> None:
    reader = FeatureReader(groups=[group()], slots=8)
    got = reader.read(
        step(
            [(10, 1, 0, Wants.LAST), (99, 1, 0, Wants.LAST), (0, 5, 0, Wants.NONE), (64, 3, 0, Wants.LAST)],
        )
    )
    # Decode rows read 11 and 100 tokens. The chunks' tokens see 1+2+3+4+5 and 65+66+67.
    assert got == Features(
        tokens=10, rows=4, prefill_tokens=8, decode_context=111, prefill_context=15 + 198, prefill_rows=2, prefill_keys=5 + 67,
        logit_rows=3,
    )  # fmt: skip


def test_a_chunk_reads_the_keys_that_its_layers_keep() -> None:
    """64 keys before a chunk of 3: all of them, those of a window of 10 with its own, those since the last multiple of 10."""
    groups = {"full": group(), "window": group(window=10), "chunk": group(window=Chunk(10))}
    kept = {name: FeatureReader(groups=[one], slots=4) for name, one in groups.items()}
    found = {name: reader.read(step([(64, 3, 0, Wants.LAST)])).prefill_keys for name, reader in kept.items()}
    assert found == {"full": 67, "window": 12, "chunk": 7}


def test_features_of_decode_rows_take_the_short_way_to_the_same() -> None:
    rows = [(10 * i, 1, 0, Wants.LAST) for i in range(1, 6)]
    short = FeatureReader(groups=[group()], slots=8).read(step(rows))
    windowed = FeatureReader(groups=[group(window=10_000)], slots=8).read(step(rows))
    assert short == windowed == Features(tokens=5, rows=5, decode_context=155, logit_rows=5)


def test_guesses_and_prompt_logprobs_count_their_logits() -> None:
    reader = FeatureReader(groups=[group()], slots=8)
    got = reader.read(step([(20, 4, 3, Wants.ALL), (0, 6, 0, Wants.ALL_NO_SAMPLE), (5, 1, 0, Wants.NONE)]))
    assert got.logit_rows == 4 + 6
    assert got.prefill_tokens == 6, "guesses are no prompt"
    assert got.decode_context == 24 + 6


def test_masked_rows_are_those_that_are_sampled_in_slots_with_a_grammar() -> None:
    reader = FeatureReader(groups=[group()], slots=4)
    enter = [entering(0, grammar="g"), entering(1, grammar=None), entering(2, grammar="g")]
    rows = [(5, 1, 0, Wants.LAST), (5, 1, 0, Wants.LAST), (0, 4, 0, Wants.NONE)]
    assert reader.read(step(rows, enter=enter)).masked_rows == 1
    assert reader.read(step(rows)).masked_rows == 1, "slots are remembered"
    assert reader.read(step(rows, enter=[entering(0, grammar=None)])).masked_rows == 0


def test_an_empty_step_has_no_features() -> None:
    assert FeatureReader(groups=[group()], slots=4).read(step([])) == Features()


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([None, 1, 7, 24, Chunk(1), Chunk(7), Chunk(24)]),
)
@settings(max_examples=60, deadline=None)
def test_contexts_agree_with_counting(rows: list[tuple[int, int]], window: int | None) -> None:
    groups = [group(0), group(1, window=window)]
    got = FeatureReader(groups=groups, slots=8).read(step([(start, count, 0, Wants.LAST) for start, count in rows]))

    def seen(position: int) -> float:
        if window is None:
            return position + 1
        return (position + 1 + (position % window + 1 if isinstance(window, Chunk) else min(position + 1, window))) / 2

    decode = sum(seen(start) for start, count in rows if count == 1)
    pairs = sum(seen(start + i) for start, count in rows if count > 1 for i in range(count))
    assert abs(got.decode_context - decode) <= 0.5
    assert abs(got.prefill_context - pairs) <= 0.5


# ------------------------------------------------------------------------------------------------------------------ fit


@pytest.mark.parametrize("seed", range(20))
def test_non_negative_solutions_are_optimal(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no coefficient below zero, none that would still help, none that is used and hurts."""
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((30, 8))
    goal = draw.standard_normal(30)
    gram, pull = rows.T @ rows + 1e-6 * np.eye(8), rows.T @ goal
    x = non_negative(gram, pull)
    slope = gram @ x - pull
    assert (x >= 0).all()
    assert (slope >= -1e-6).all()
    assert np.abs(slope[x > 0]).max(initial=0.0) < 1e-6
    best = min(
        (_least(gram, pull, free) for k in range(9) for free in itertools.combinations(range(8), k)),
        key=lambda found: found[0],
    )
    assert 0.5 * x @ gram @ x - pull @ x == pytest.approx(best[0], abs=1e-8)


def _least(gram: np.ndarray, pull: np.ndarray, free: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    """The least value with only these coefficients free, if it is legal."""
    if not free:
        return 0.0, free
    own = np.linalg.solve(gram[np.ix_(free, free)], pull[list(free)])
    if (own < 0).any():
        return np.inf, free
    return float(0.5 * own @ gram[np.ix_(free, free)] @ own - pull[list(free)] @ own), free


@pytest.mark.parametrize("prior", ["roofline", "flat"])
def test_a_known_law_is_found(prior: str) -> None:
    shape = roofline(plan_of()) if prior == "roofline" else flat_prior()
    model = fit(measured(made_up_steps(600, seed=1), noise=0.03), prior=shape)
    median, p90 = relative_errors(model, measured(made_up_steps(300, seed=2)))
    assert median < 0.02, median
    assert p90 < 0.05, p90
    assert model.steps == 600 and model.held_out == 120
    assert model.error_median is not None and 0.01 < model.error_median < 0.03, "the noise itself, and little more"


def test_short_steps_count_as_much_as_long_ones() -> None:
    steps = measured(made_up_steps(500, seed=3))
    model = fit(steps, prior=flat_prior())
    for features in (Features(tokens=1, rows=1, decode_context=100, logit_rows=1), made_up_steps(5, seed=9)[-1]):
        assert model.device_s(features) == pytest.approx(law(features), rel=0.06)


def test_outliers_do_not_move_the_fit() -> None:
    steps = measured(made_up_steps(500, seed=4), noise=0.02)
    hurt = [Measured(s.features, s.took_s * (10 if i % 25 == 0 else 1)) for i, s in enumerate(steps)]
    median, p90 = relative_errors(fit(hurt, prior=flat_prior()), measured(made_up_steps(200, seed=5)))
    assert median < 0.03
    assert p90 < 0.08


def test_beyond_the_log_the_curve_goes_on_as_it_was_going() -> None:
    """The roofline is 3 times too steep; above 128 tokens nothing was measured."""
    shape = flat_prior(0.002)
    steep = msgspec.structs.replace(shape, curve_s=(0.002, *(0.002 + 1e-3 * tokens for tokens in KNOTS)))
    model = fit(measured(made_up_steps(400, seed=6, most=128)), prior=steep)
    far = Features(tokens=512, rows=1, prefill_tokens=512, prefill_context=512 * 513 // 2, logit_rows=1)
    assert model.device_s(far) == pytest.approx(law(far), rel=0.25)
    assert not model.trustworthy(far)


@pytest.mark.parametrize("name", Features.__struct_fields__)
def test_more_of_anything_never_costs_less(name: str) -> None:
    model = fit(measured(made_up_steps(200, seed=8), noise=0.1), prior=flat_prior())
    base = Features(tokens=40, rows=20, prefill_tokens=20, decode_context=900, prefill_context=210, logit_rows=21)
    times = [
        model.device_s(msgspec.structs.replace(base, **{name: getattr(base, name) + more}))
        for more in range(0, 9000, 300)
    ]
    assert times == sorted(times)


def test_where_it_can_be_trusted() -> None:
    model = fit(measured(made_up_steps(300, seed=1)), prior=flat_prior())
    inside = made_up_steps(1, seed=11)[0]
    assert model.why_not(inside) is None and model.trustworthy(inside)
    far = msgspec.structs.replace(inside, tokens=4096)
    assert model.why_not(far) == f"not trustworthy here: 4096 tokens, fitted up to {model.high.tokens}"
    deep = msgspec.structs.replace(inside, decode_context=10**9)
    assert "tokens read by decode rows" in (model.why_not(deep) or "")
    for step_ in (far, deep):
        assert not model.trustworthy(step_)
    assert "nothing was fitted" in (flat_prior().why_not(inside) or "")
    assert not flat_prior().trustworthy(inside)
    assert "fitted on 300 steps" in model.described() and "%" in model.described()


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match="9 steps are too few to fit step times: at least 10 are needed"):
        fit(measured(made_up_steps(9, seed=1)), prior=flat_prior())
    idle = [Measured(Features(), 0.0)] * 50
    with pytest.raises(UserError, match="0 steps are too few"):
        fit(idle, prior=flat_prior())


def test_noise_is_told_and_does_not_lengthen_the_whole() -> None:
    steps = measured(made_up_steps(2000, seed=12), noise=0.2)
    model = fit(steps, prior=flat_prior())
    draws = [model.ratio(u) for u in np.linspace(0, 1, 2001)]
    assert draws == sorted(draws)
    assert np.mean(draws) == pytest.approx(1.0, abs=0.03)
    assert np.quantile(draws, 0.9) == pytest.approx(np.exp(0.2 * 1.2816), rel=0.08)


# ------------------------------------------------------------------------------------------------------------- roofline


def test_roofline_is_flat_where_memory_rules_and_steep_where_compute_does() -> None:
    gpu = msgspec.structs.replace(machine(), kind="cpu", memory_bytes_per_s=4e12, matmul_flops_per_s=8e14)
    plan = msgspec.structs.replace(plan_of(LLAMA_8B), hardware=gpu)
    model = roofline(plan)
    one, eight, many = (model.device_s(Features(tokens=n, rows=1)) for n in (1, 8, 4096))
    assert eight < 1.1 * one
    weights_s = 16e9 / (4e12 * 0.8)
    assert one == pytest.approx(weights_s, rel=0.1)
    assert many == pytest.approx(2 * 7e9 * 4096 / (8e14 * 0.7), rel=0.15)
    assert model.device_s(Features(tokens=4096 * 16, rows=1)) == pytest.approx(16 * many, rel=0.05)
    assert model.device_s(Features(tokens=1, rows=1, decode_context=10**6)) > one


# ---------------------------------------------------------------------------------------------------------------- files


def test_models_are_kept_as_json(tmp_path: Path) -> None:
    model = fit(measured(made_up_steps(100, seed=1)), prior=flat_prior(), host=HostTime(decide_s=1e-3))
    model.save(tmp_path / "m.json")
    assert StepTime.load(tmp_path / "m.json") == model


def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        StepTime.load(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(UserError, match="is not a step-time model"):
        StepTime.load(tmp_path / "a.json")
    old = msgspec.json.encode(msgspec.structs.replace(flat_prior(), format=0))
    (tmp_path / "b.json").write_bytes(old)
    with pytest.raises(UserError, match="has format 0"):
        StepTime.load(tmp_path / "b.json")


# -------------------------------------------------------------------------------------------------------------- on line


def test_on_line_it_follows_the_machine_and_remembers_what_is_rare() -> None:
    online = OnlineFit(flat_prior())
    assert online.refit() == flat_prior(), "nothing was seen"
    for f in made_up_steps(400, seed=1):
        online.take(f, law(f))
    first = online.refit()
    decode = Features(tokens=8, rows=8, decode_context=4000, logit_rows=8)
    long = max(made_up_steps(400, seed=1), key=lambda f: f.tokens)
    assert first.device_s(decode) == pytest.approx(law(decode), rel=0.06)
    for _ in range(3000):  # a day of decoding, twice as slow
        online.take(decode, 2 * law(decode))
    second = online.refit()
    assert second.device_s(decode) == pytest.approx(2 * law(decode), rel=0.15)
    assert second.device_s(long) == pytest.approx(law(long), rel=0.25), "what is rare is not forgotten"
    assert second.error_median == pytest.approx(0.5, abs=0.05), "the error is that of predictions made before"
    for _ in range(600):
        online.take(decode, 2 * law(decode))
    third = online.refit()
    assert third.error_median is not None and third.error_median < 0.15
    assert "on line" in third.source


# ----------------------------------------------------------------------------------------------------------------- host


def test_host_times_are_found() -> None:
    decide = [(rows, entered, 5e-5 + 2e-7 * rows + 4e-5 * entered) for rows in range(1, 60) for entered in (0, 1, 3)]
    absorb = [(rows, 3e-5 + 1e-7 * rows) for rows in range(1, 60)]
    host = fit_host(decide, absorb, loop_s=7e-6)
    assert host.before_s(rows=30, entered=2) == pytest.approx(5e-5 + 6e-6 + 8e-5, rel=0.05)
    assert host.after_s(rows=30) == pytest.approx(3e-5 + 3e-6 + 7e-6, rel=0.05)
    assert fit_host([], [], loop_s=1e-6).loop_s == 1e-6
