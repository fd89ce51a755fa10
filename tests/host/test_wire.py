"""The process border's messages: whatever is sent comes out, however the bytes are cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.host.support_engine import cache_plan, schedule_plan
from tradewind.config.goals import Goals, Means
from tradewind.contract.events import Arrived, Delayed, Preempted, Scheduled, StepDone, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import TokenLogprobs
from tradewind.engine.columns import Report, StepTokens
from tradewind.engine.loop import Add, Cancel, Finish, Forget
from tradewind.engine.stats import EngineStats
from tradewind.engine.wire import (
    ANSWERS,
    MAX_MESSAGE_BYTES,
    ORDERS,
    AdapterChecked,
    Answer,
    Batch,
    BrokenLink,
    CheckAdapter,
    Describe,
    Described,
    Drain,
    Fatal,
    Fault,
    Frames,
    Link,
    Located,
    Order,
    Ready,
    Start,
    Stop,
    batch_of,
    reports_of,
    socket_pair,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
NAMES = st.text(max_size=40)
SECONDS = st.floats(allow_nan=False, allow_infinity=False)
TOKENS = st.lists(INT32, max_size=8).map(tuple)
LOGPROBS = st.builds(
    TokenLogprobs,
    token=INT32,
    logprob=SECONDS,
    rank=st.integers(1, 1 << 20),
    top_ids=TOKENS,
    top_logprobs=st.lists(SECONDS, max_size=5).map(tuple),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=SECONDS,
    logit_bias=st.dictionaries(st.integers(0, 1 << 20), SECONDS, max_size=3),
    bad_words=st.lists(TOKENS, max_size=2).map(tuple),
    seed=st.none() | st.integers(-(1 << 63), (1 << 64) - 1),
    stop=st.lists(NAMES, max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
REQUESTS = st.builds(
    Request,
    id=NAMES,
    tokens=TOKENS,
    sampling=SAMPLING,
    max_tokens=INT32,
    eos_ids=TOKENS,
    seed=st.integers(0, (1 << 64) - 1),
    priority=INT32,
    tenant=NAMES,
    cache_salt=NAMES,
    grammar=st.none() | NAMES,
    image_keys=st.lists(st.tuples(INT32, INT32, NAMES), max_size=2).map(tuple),
    deadline_s=st.none() | SECONDS,
    parent=st.none() | NAMES,
)
ORDER: st.SearchStrategy[Any] = st.one_of(
    st.builds(Add, REQUESTS),
    st.builds(Cancel, NAMES),
    st.builds(Finish, NAMES, st.sampled_from(["stop", "abort"])),
    st.builds(Fault, NAMES, SECONDS),
    st.builds(CheckAdapter, NAMES),
    st.sampled_from([Forget(), Describe(), Drain(), Stop()]),
    st.builds(
        Start, goals=st.builds(Goals, model=NAMES, means=st.just(Means(threads=2))), script=st.none() | st.binary()
    ),
)


@st.composite
def columns(draw: Any) -> StepTokens:
    rows = draw(st.integers(0, 40))

    def column() -> np.ndarray[Any, Any]:
        return np.array(draw(st.lists(INT32, min_size=rows, max_size=rows)), dtype=np.int32)

    ids = draw(st.lists(NAMES, min_size=rows, max_size=rows))
    return StepTokens(
        at_s=draw(SECONDS), ids=ids, tokens=column(), generated=column(), cached=column(), prompt=column()
    )


REPORT: st.SearchStrategy[Any] = st.one_of(
    columns(),
    st.builds(
        TokensOut,
        request_id=NAMES,
        at_s=SECONDS,
        tokens=TOKENS,
        logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
        prompt_logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
        finish=st.sampled_from([None, "stop", "length", "abort", "error"]),
        stop_token=st.none() | INT32,
        error=st.none() | NAMES,
        generated_tokens=INT32,
    ),
    st.builds(Arrived, request_id=NAMES, at_s=SECONDS, prompt_tokens=INT32, tenant=NAMES),
    st.builds(Scheduled, request_id=NAMES, at_s=SECONDS, step=INT32, cached_tokens=INT32, waited_s=SECONDS),
    st.builds(Delayed, request_id=NAMES, at_s=SECONDS, reason=NAMES),
    st.builds(Preempted, request_id=NAMES, at_s=SECONDS, lost_tokens=INT32, for_whom=NAMES),
)
STATS = EngineStats(running=3, waiting=1, pages_used=(4, 5), pages_total=(9, 9), steps=7, last_progress_s=1.25)


@contextmanager
def links() -> Iterator[tuple[Link[Answer], Link[Order]]]:
    """The front's end and the engine's."""
    mine, theirs = socket_pair()
    with mine, theirs:
        yield Link(mine, ANSWERS), Link(theirs, ORDERS)


def same(left: Report, right: Report) -> bool:
    if isinstance(left, StepTokens):
        assert isinstance(right, StepTokens)
        pairs = [(getattr(left, name), getattr(right, name)) for name in ("tokens", "generated", "cached", "prompt")]
        return (left.at_s, left.ids) == (right.at_s, right.ids) and all(
            b.dtype == np.int32 and np.array_equal(a, b) for a, b in pairs
        )
    return left == right


@given(st.lists(ORDER, max_size=5))
def test_orders_come_out_as_they_went_in(orders: list[Any]) -> None:
    with links() as (front, engine):
        for order in orders:
            front.send(order)
        front.close()
        got = []
        while (order := engine.receive()) is not None:
            got.append(order)
        assert got == orders


@given(st.lists(REPORT, max_size=6))
def test_reports_come_out_as_they_went_in(reports: list[Any]) -> None:
    with links() as (front, engine):
        engine.send(batch_of(reports, STATS))
        batch = front.receive()
        assert isinstance(batch, Batch) and batch.stats == STATS
        got = reports_of(batch)
        assert len(got) == len(reports) and all(map(same, reports, got))


def test_the_engines_other_words() -> None:
    words = [
        Located(path="somewhere"),
        Ready(schedule=schedule_plan(), cache=cache_plan(), phases=(("a", 0.5),), notices=("b",)),
        Described("text"),
        AdapterChecked("folder@version"),
        AdapterChecked("folder@version", "it was made for another model"),
        Fatal(why="no", exit_code=2, by_user=True),
        StepDone(
            number=1, at_s=1.0, rows=2, tokens=3, prompt_tokens=4, decide_s=0.0, absorb_s=0.0, device_s=0.5,
            running=1, waiting=0, pages_used=(1,), pages_total=(2,), grammar_s=0.25, grammar_ids=("a", "b"), grammar_parts=(0.2, 0.05),
            draft_s=0.125,
        ),
    ]  # fmt: skip
    with links() as (front, engine):
        for word in words[:-1]:
            engine.send(word)
            assert front.receive() == word
        engine.send(batch_of([words[-1]], STATS))  # type: ignore[list-item]
        assert reports_of(front.receive()) == words[-1:]  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(1, 40), max_size=30))
def test_frames_are_found_wherever_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(message).to_bytes(4, "big") + message for message in messages)
    frames = Frames()
    got: list[bytes] = []
    for size in cuts:
        got += map(bytes, frames.feed(stream[:size]))
        stream = stream[size:]
    got += map(bytes, frames.feed(stream))
    assert got == messages


def test_bytes_that_are_no_message_are_said_to_be_none() -> None:
    with pytest.raises(BrokenLink, match="announced"):
        Frames().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big") + b"x")
    mine, theirs = socket_pair()
    with mine, theirs:
        mine.sendall(b"\0\0\0\1\xc1")
        with pytest.raises(BrokenLink, match="cannot be read"):
            Link(theirs, ORDERS).receive()
    with links() as (front, engine):
        front.send(Described("an answer where an order belongs"))
        with pytest.raises(BrokenLink):
            engine.receive()


def test_the_end_of_the_stream() -> None:
    with links() as (front, engine):
        assert front.receive_ready() == []
        with pytest.raises(TimeoutError):
            front.receive(timeout_s=0.01)
        engine.send(Described("last"))
        engine.close()
        time.sleep(0.01)
        assert front.receive_ready() == [Described("last")]
        assert front.receive_ready() is None and front.receive() is None
        with pytest.raises(OSError):
            front.send(Stop())


def test_senders_in_several_threads_do_not_mix_their_bytes() -> None:
    with links() as (front, engine):
        names = ["x" * 50_000, "y" * 70_000, "z"]
        threads = [
            threading.Thread(target=lambda name=name: [front.send(Cancel(name)) for _ in range(50)]) for name in names
        ]
        for thread in threads:
            thread.start()
        got = [engine.receive() for _ in range(150)]
        for thread in threads:
            thread.join()
        assert sorted(order.request_id for order in got if isinstance(order, Cancel)) == sorted(names * 50)


@pytest.mark.parametrize("rows", [64, 512])
def test_a_step_costs_each_side_well_under_a_tenth_of_a_millisecond(rows: int) -> None:
    column = np.arange(rows, dtype=np.int32)
    ids = [f"chatcmpl-{row:024x}" for row in range(rows)]
    step = StepTokens(at_s=1.0, ids=ids, tokens=column, generated=column, cached=column, prompt=column)
    with links() as (front, engine):
        best = [1.0, 1.0]
        for _ in range(200):
            began_s = time.perf_counter()
            engine.send(batch_of([step], STATS))
            between_s = time.perf_counter()
            messages = front.receive_ready()
            assert messages is not None and isinstance(messages[0], Batch)
            assert reports_of(messages[0])[0].ids == ids  # type: ignore[union-attr]
            best = [min(best[0], between_s - began_s), min(best[1], time.perf_counter() - between_s)]
        assert max(best) < 100e-6, f"{best} s to send and to receive"


def test_stats_are_small() -> None:
    assert len(msgspec.msgpack.encode(STATS)) < 40


def test_a_link_asks_for_large_buffers() -> None:
    mine, theirs = socket_pair()
    with mine, theirs:
        before = mine.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        Link(mine, ANSWERS)
        assert mine.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= before
