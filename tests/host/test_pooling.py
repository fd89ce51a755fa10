"""Requests for embeddings in the host wing: what is refused, how whole prompts share steps; and the runner's sums."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.host.support_engine import Engine, cache_plan, request, schedule_plan
from tests.host.test_properties import embedding_of
from tradewind.contract.errors import LimitError, RequestError
from tradewind.contract.events import Scheduled, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Enter, Step, Wants, frozen_ints
from tradewind.engine.budget import split_whole
from tradewind.engine.loop import Add
from tradewind.engine.stats import EngineStats
from tradewind.engine.wire import ANSWERS, ORDERS, Batch, batch_of, reports_of
from tradewind.runner.pooling import NOT_FINITE, PoolingSlots
from tradewind.serving.embedding import vector_of
from tradewind.serving.intake import Intake, Limits

LIMITS = Limits(vocab_size=100, max_context=20, eos_ids=(), embedding_size=8)


def asked(name: str, size: int, **more: Any) -> Request:
    return request(name, range(3, 3 + size), max_tokens=0, **{"pooling": "mean", **more})


def ends(engine: Engine) -> dict[str, TokensOut]:
    return {event.request_id: event for event in engine.of(TokensOut) if event.finish is not None}


# -- intake and limits


def test_intake_makes_a_request_that_generates_nothing() -> None:
    made = Intake(LIMITS).embedding([1, 2, 3], now_s=5.0, tenant="t", cache_salt="s")
    assert (made.pooling, made.normalise, made.max_tokens, made.tokens) == ("last", True, 0, (1, 2, 3))
    assert (made.arrived_s, made.tenant, made.cache_salt) == (5.0, "t", "s")
    assert Intake(LIMITS).embedding([1], now_s=0.0, pooling="mean", normalise=False).normalise is False
    encoder = msgspec.structs.replace(LIMITS, causal=False, pooling="cls")
    assert Intake(encoder).embedding(range(20), now_s=0.0).pooling == "cls"


@pytest.mark.parametrize(
    ("tokens", "options", "said"),
    [
        ([], {}, "the text is empty"),
        ([100], {}, "prompt token 100 is not a token id"),
        (range(21), {}, r"the text has 21 tokens; the limit is 20 \(1 too many\)"),
        ([1], {"pooling": "sum"}, "pooling is 'sum'"),
        ([1], {"pooling": "cls"}, "reads from left to right"),
    ],
)
def test_intake_refuses(tokens: Any, options: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Intake(LIMITS).embedding(tokens, now_s=0.0, **options)


def test_dimensions() -> None:
    intake = Intake(LIMITS)
    for fine in (None, 1, 8):
        intake.check_dimensions(fine)
    for wrong in (0, -1, 9, True, 2.0):
        with pytest.raises(RequestError, match="dimensions is"):
            intake.check_dimensions(wrong)  # type: ignore[arg-type]
    unknown = Intake(msgspec.structs.replace(LIMITS, embedding_size=None))
    unknown.check_dimensions(9)
    with pytest.raises(RequestError, match="dimensions is 9; it must be a whole number from 1 to 8"):
        unknown.check_dimensions(9, size=8)
    with pytest.raises(RequestError, match=r"from 1$"):
        unknown.check_dimensions(0)


def test_an_encoder_takes_no_request_to_generate() -> None:
    encoder = Intake(msgspec.structs.replace(LIMITS, causal=False))
    with pytest.raises(RequestError, match="is an encoder"):
        encoder.requests([1], SamplingParams(), now_s=0.0)
    engine = Engine(schedule=whole())
    with pytest.raises(RequestError, match="is an encoder"):
        engine.scheduler.add(request("r", [1, 2]), 0.0)


def test_a_prompt_may_fill_the_context() -> None:
    engine = Engine(schedule=schedule_plan(max_context=40))
    engine.scheduler.add(asked("full", 40), 0.0)
    with pytest.raises(
        LimitError, match="the text has 41 tokens but the context limit is 40: shorten the text by at least 1 tokens"
    ):
        engine.scheduler.add(asked("over", 41), 0.0)
    with pytest.raises(
        LimitError, match=r"needs 44 tokens \(11 pages\) of cache, but .* 40 tokens \(10 pages\), 1 pages short"
    ):
        Engine(cache=cache_plan(pages=(11,))).scheduler.add(asked("pages", 41), 0.0)
    with pytest.raises(LimitError, match="in which it must be computed whole, has 16"):
        Engine(schedule=whole(max_tokens_per_step=16)).scheduler.add(asked("step", 17), 0.0)
    engine.client.run([asked("again", 40)])
    assert ends(engine)["again"].embedding == embedding_of(asked("again", 40))


# -- scheduling


def whole(**more: Any) -> Any:
    return msgspec.structs.replace(schedule_plan(**more), whole_prompts=True)


def test_chunks_and_what_they_want() -> None:
    engine = Engine(schedule=schedule_plan(max_tokens_per_step=16))
    (handle,) = engine.client.run([asked("r", 40)])
    wants = [(int(step.count[0]), Wants(step.wants[0])) for step in engine.device.steps if step.rows]
    assert wants == [(16, Wants.HIDDEN_PART), (16, Wants.HIDDEN_PART), (8, Wants.HIDDEN)]
    assert handle.tokens == [] and handle.last is not None
    assert (handle.last.finish, handle.last.generated_tokens, handle.last.prompt_tokens) == ("stop", 0, 40)
    assert handle.last.embedding == embedding_of(asked("r", 40))


def test_mean_and_cls_do_not_read_the_prefix_cache_but_fill_it() -> None:
    engine = Engine()
    for name, pooling in (("a", "mean"), ("b", "cls"), ("c", "last"), ("d", "mean")):
        engine.client.run([asked(name, 40, pooling=pooling)])
    engine.client.run([request("told", range(3, 43))])
    cached = {event.request_id: event.cached_tokens for event in engine.of(Scheduled)}
    assert cached == {"a": 0, "b": 0, "c": 36, "d": 0, "told": 36}


def test_cancel_and_deadline() -> None:
    engine = Engine(schedule=schedule_plan(max_tokens_per_step=8))
    engine.scheduler.add(asked("gone", 40), 0.0)
    engine.scheduler.add(asked("late", 40, deadline_s=0.03), 0.0)
    engine.scheduler.add(asked("stays", 30), 0.0)
    engine.loop.run_once()
    engine.scheduler.cancel("gone", engine.clock.now())
    while engine.loop.busy:
        engine.loop.run_once()
        engine.scheduler.check()
    found = ends(engine)
    assert (found["gone"].finish, found["gone"].embedding) == ("abort", None)
    assert found["late"].finish == "abort" and "deadline" in (found["late"].error or "")
    assert found["stays"].embedding == embedding_of(asked("stays", 30))


def test_split_whole() -> None:
    assert split_whole([(0, 10), (0, 7), (0, 6), (0, 1)], 17) == [10, 7, 0, 0]
    assert split_whole([(0, 10), (0, 8), (0, 6), (0, 1)], 17) == [10, 0, 6, 1]
    assert split_whole([], 5) == []


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 32)), min_size=1, max_size=12),
    st.integers(32, 48),
    st.integers(1, 5),
    st.integers(9, 40),
    st.sampled_from([1, 2, 3]),
)
def test_whole_prompts_share_steps(
    traffic: list[tuple[int, int]], step: int, running: int, pages: int, flying: int
) -> None:
    """Any traffic: each text is one row of one step, no step is over its budget, every text gets its vector."""
    engine = Engine(
        cache=cache_plan(pages=(pages,), prefix_cache=False),
        schedule=whole(max_tokens_per_step=step, max_running=running, max_context=32, steps_in_flight=flying),
    )
    plan = sorted((turn, f"e{number}", size) for number, (turn, size) in enumerate(traffic))
    turn = 0
    while plan or engine.loop.busy:
        while plan and plan[0][0] <= turn:
            _, name, size = plan.pop(0)
            engine.scheduler.add(asked(name, size), engine.clock.now())
        engine.loop.run_once()
        engine.scheduler.check()
        turn += 1
        assert turn < 400, "texts starve"
    for number, (_, size) in enumerate(traffic):
        assert ends(engine)[f"e{number}"].embedding == embedding_of(asked(f"e{number}", size))
    for done in engine.device.steps:
        assert done.tokens <= step
        assert (done.start == 0).all() and (done.wants == Wants.HIDDEN).all()


# -- the runner's sums


def step_of(rows: list[tuple[int, int, int, Wants]]) -> Step:
    """(slot, start, count, wants) each."""
    slot, start, count, wants = (frozen_ints(list(column)) for column in zip(*rows, strict=True))
    none = frozen_ints([])
    return Step(
        number=1, slot=slot, epoch=slot, start=start, count=count, drafts=slot, wants=wants,
        page_slot=none, page_group=none, page_index=none, page_id=none,
    )  # fmt: skip


def enter(slot: int, pooling: Any, *, normalise: bool = False) -> Enter:
    return Enter(
        slot=slot, epoch=0, request_id="", tokens=frozen_ints([1]), prompt_tokens=1, capacity_tokens=9, sampling=SamplingParams(), seed=0,
        eos_ids=(), pooling=pooling, normalise=normalise,
    )  # fmt: skip


def take(
    slots: PoolingSlots, rows: list[tuple[int, int, int, Wants]], hidden: Any
) -> tuple[dict[int, Any], dict[int, str]]:
    step = step_of(rows)
    failed: dict[int, str] = {}
    starts = frozen_ints([0, *np.cumsum(step.count)])
    return slots.take(step, slots.wanted(step), hidden, starts, failed), failed


def test_pooling_over_chunks_and_rows() -> None:
    slots = PoolingSlots()
    for slot, pooling in enumerate(("mean", "cls", "last")):
        slots.enter(enter(slot, pooling))
    slots.enter(enter(3, None))
    hidden = np.random.default_rng(1).standard_normal((12, 5)).astype(np.float32)
    part = Wants.HIDDEN_PART
    assert take(slots, [(0, 0, 3, part), (3, 0, 1, Wants.LAST), (1, 0, 2, part), (2, 0, 4, part)], hidden) == ({}, {})
    later = np.random.default_rng(2).standard_normal((12, 5)).astype(np.float32)
    done, failed = take(slots, [(2, 4, 2, Wants.HIDDEN), (0, 3, 1, Wants.HIDDEN), (1, 2, 3, Wants.HIDDEN)], later)
    assert failed == {}
    np.testing.assert_allclose(done[0], later[1])
    np.testing.assert_allclose(done[1], (hidden[:3].sum(0) + later[2]) / 4, rtol=1e-6)
    np.testing.assert_allclose(done[2], hidden[4])
    slots.leave(0)
    slots.enter(enter(0, "mean", normalise=True))  # nothing of the one before is left
    done, failed = take(slots, [(0, 0, 2, Wants.HIDDEN)], hidden)
    wanted = hidden[:2].astype(np.float64).mean(0)
    np.testing.assert_allclose(done[0], wanted / np.linalg.norm(wanted), rtol=1e-6)


def test_zeros_and_values_that_are_not_finite() -> None:
    slots = PoolingSlots()
    slots.enter(enter(0, "mean", normalise=True))
    slots.enter(enter(1, "last"))
    hidden = np.zeros((3, 4), np.float32)
    hidden[2, 1] = np.inf
    done, failed = take(slots, [(0, 0, 2, Wants.HIDDEN), (1, 0, 1, Wants.HIDDEN)], hidden)
    assert done.keys() == {0} and not done[0].any()
    assert failed == {1: NOT_FINITE}


def test_vector_of() -> None:
    whole_vector = np.array([3.0, 4.0, 12.0], np.float32)
    raw = whole_vector.tobytes()
    assert np.array_equal(vector_of(raw), whole_vector)
    assert np.array_equal(vector_of(raw, dimensions=3), whole_vector)
    np.testing.assert_allclose(vector_of(raw, dimensions=2), [0.6, 0.8])
    assert vector_of(raw, dimensions=2, normalise=False).tolist() == [3, 4]
    assert not vector_of(np.zeros(3, np.float32).tobytes(), dimensions=2).any()


def test_a_vector_crosses_the_process_border() -> None:
    raw = np.arange(5, dtype=np.float32).tobytes()
    out = TokensOut(request_id="r", at_s=1.0, tokens=(), finish="stop", embedding=raw)
    stats = EngineStats()
    back = ANSWERS.decode(msgspec.msgpack.encode(batch_of([out], stats)))
    assert isinstance(back, Batch) and reports_of(back) == [out]
    order = ORDERS.decode(msgspec.msgpack.encode(Add(asked("r", 3, normalise=False))))
    assert isinstance(order, Add) and order.request == asked("r", 3, normalise=False)
