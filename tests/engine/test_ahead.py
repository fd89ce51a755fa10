"""Graphs captured while nothing is asked: in order, only at rest, and without harm when one fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import Any

from tradewind.kernels.triton.graphs import Gpu, Graph
from tradewind.runner.ahead import Ahead, Key, Progress
from tradewind.runner.preparing import Preparation

LIMIT_S = 60.0


def until(said: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def of(*numbers: int, planned: list[int]) -> list[tuple[Key, Callable[[], None], Callable[[], None]]]:
    return [((number,), lambda n=number: planned.append(n), lambda: None) for number in numbers]  # type: ignore[misc]


def test_in_order_what_is_known_is_left_out_and_more_may_be_wanted_later() -> None:
    planned: list[int] = []
    kept: dict[Key, Graph] = {(2,): Graph(None, lambda: None)}
    ahead = Ahead(
        Gpu("cpu"), may_begin=lambda: True, last_work_s=lambda: 0.0, known=kept.__contains__, keep=kept.__setitem__
    )
    ahead.want(of(1, 2, 3, planned=planned))
    until(lambda: ahead.done)
    assert planned == [1, 3] and list(kept) == [(2,), (1,), (3,)]
    progress = ahead.progress
    assert (progress.wanted, progress.captured, progress.passed_over) == (3, 2, 1)
    assert progress.plan_s > 0 and progress.capture_s > 0
    ahead.want(of(4, planned=planned))
    until(lambda: (4,) in kept)
    ahead.close()


def test_nothing_happens_before_it_may_nor_while_work_flies() -> None:
    planned: list[int] = []
    compiled, flying = Event(), Event()
    flying.set()
    ahead = Ahead(
        Gpu("cpu"), may_begin=compiled.is_set, last_work_s=lambda: float("inf") if flying.is_set() else 0.0,
        known=lambda _: False, keep=lambda *_: None,
    )  # fmt: skip
    ahead.want(of(1, 2, planned=planned))
    time.sleep(0.1)
    assert planned == []
    compiled.set()
    time.sleep(0.2)
    assert planned == [] and not ahead.done
    assert ahead.progress == Progress(wanted=2, captured=0, passed_over=0, plan_s=0.0, capture_s=0.0)
    flying.clear()
    until(lambda: ahead.done)
    assert planned == [1, 2]
    ahead.close()


def test_a_failure_ends_it_and_is_kept() -> None:
    def failing() -> None:
        raise RuntimeError("no memory for a graph")

    ahead = Ahead(
        Gpu("cpu"), may_begin=lambda: True, last_work_s=lambda: 0.0, known=lambda _: False, keep=lambda *_: None
    )
    ahead.want([((1,), failing, failing), ((2,), failing, failing)])
    until(lambda: ahead.done)
    assert "no memory" in str(ahead.error) and ahead.progress.error == "RuntimeError: no memory for a graph"
    assert (ahead.progress.wanted, ahead.progress.captured) == (2, 0)
    ahead.close()


def test_closing_does_not_wait_for_rest() -> None:
    ahead = Ahead(
        Gpu("cpu"),
        may_begin=lambda: True,
        last_work_s=lambda: float("inf"),
        known=lambda _: False,
        keep=lambda *_: None,
    )
    ahead.want(of(1, planned=[]))
    ahead.close()
    assert not ahead.done


def test_preparation_tells_what_its_finished_parts_took() -> None:
    nothing: Any = None
    preparation = Preparation(nothing, Gpu("cpu"), staging=nothing, shared=False)
    assert preparation.rest_took_s == {}
    with preparation._timed("plan"):
        assert preparation.rest_took_s == {}, "not over yet"
    with preparation._timed("compile"):
        time.sleep(0.01)
    assert list(preparation.rest_took_s) == ["plan", "compile"] and preparation.rest_took_s["compile"] >= 0.01
