"""What grammars cost a step, measured where masks are made: how much, whose, and that it comes to the receipts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from structured_support import compiler, enter
from tiny_engine import Listener, engine_of, prompts, requests, write_checkpoint

from tradewind.contract.events import StepDone
from tradewind.contract.grammar import Grammar
from tradewind.contract.request import SamplingParams
from tradewind.observability.lives import Lives
from tradewind.observability.receipt_book import ReceiptBook
from tradewind.observability.receipts import ItemisedReceipt, PartName
from tradewind.sampling.grammar import GrammarSlots
from tradewind.sampling.grammar_compile import Compiled

pytest.importorskip("llguidance")

FREE = Grammar(kind="regex", text="start: /(.|\\n){200,300}/").encode()
SLOW = Grammar(kind="choice", text="start: /[a-z]{200,300}/").encode()


class Slow:
    """A matcher that takes its time: a mask comes so long after `asked` was set, or, where that is None, after it was begun."""

    def __init__(self, matcher: Any, seconds: float, asked: threading.Event | None = None) -> None:
        self._matcher, self._seconds, self._asked = matcher, seconds, asked

    def unsafe_compute_mask_ptr(self, *arguments: Any) -> None:
        if self._asked is not None:
            self._asked.wait(30)
        time.sleep(self._seconds)
        self._matcher.unsafe_compute_mask_ptr(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


class Team:
    """Masks one after another, as llguidance's threads would compute them side by side."""

    def unsafe_compute_mask_ptr(
        self, pairs: Sequence[tuple[Any, int]], address: int, row_bytes: int, rows: int
    ) -> None:
        for matcher, row in pairs:
            matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)


@pytest.fixture
def slots() -> Iterator[GrammarSlots]:
    compile_here = compiler()
    made = GrammarSlots(compiler=compile_here, slots=16, rows=16)
    yield made
    made.close()
    compile_here.shut()


def turn(slots: GrammarSlots, slot: npt.NDArray[np.int32], token: int = ord("a")) -> tuple[float, dict[int, float]]:
    """One step: every row of it draws the same token."""
    slots.masks(slot)
    slots.advance(slot, np.full(len(slot), token, np.int32))
    return slots.spent(slot)


def test_rows_without_a_grammar_cost_nothing(slots: GrammarSlots) -> None:
    slot = np.array([3, 5], np.int32)
    slots.enter(enter(3, None))
    assert turn(slots, slot) == (0.0, {})
    slots.enter(enter(7, FREE))
    assert turn(slots, slot) == (0.0, {}), "nobody in this step has a grammar"
    slots.leave(7)


@pytest.mark.parametrize("count", [2, 9])
def test_the_slow_row_has_the_time(slots: GrammarSlots, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are timed one by one; of many, one a step is."""
    slots._team = Team()
    place = count // 2
    for slot in range(count):
        slots.enter(enter(slot, FREE))
    slots._settle()
    held = slots._held[place]
    held.matcher = Slow(held.matcher, 0.02)
    every = np.arange(count, dtype=np.int32)
    for _ in range(count + 2):
        turn(slots, every)
    # From now on it is known; the runner waits for nothing else.
    seconds, parts = turn(slots, every)
    assert set(parts) == set(range(count)) and sum(parts.values()) == pytest.approx(seconds)
    assert seconds > 0.015 and parts[place] == max(parts.values()) and parts[place] > 0.5 * seconds
    slots.leave(place)
    held = slots._held[0]
    for slot in range(1, count):
        slots.leave(slot)
    assert turn(slots, every)[1].keys() == {0}


def test_reasoning_costs_no_mask_but_is_told(slots: GrammarSlots) -> None:
    """A row whose answer is free so far has no mask to compute; what is left is shared evenly."""
    thinking = msgspec.structs.replace(msgspec.json.decode(FREE, type=Grammar), thinking=True, end=7).encode()
    for slot in (0, 1):
        slots.enter(enter(slot, thinking))
    turn(slots, np.arange(2, dtype=np.int32))
    seconds, parts = turn(slots, np.arange(2, dtype=np.int32))
    assert seconds > 0 and parts[0] == parts[1] == pytest.approx(seconds / 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_from_the_matcher_to_the_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """A tiny model: each mask of one request is 20 ms late for its step, however fast or slow the machine is at the rest."""
    late_s, waiting = 0.02, threading.Event()
    settle, fresh = GrammarSlots._settle, Compiled.fresh

    def settling(self: GrammarSlots) -> None:
        waiting.set()
        settle(self)
        waiting.clear()

    def slowly(self: Compiled) -> Any:
        return Slow(fresh(self), late_s, waiting) if self.grammar.kind == "choice" else fresh(self)

    monkeypatch.setattr(GrammarSlots, "_settle", settling)
    monkeypatch.setattr(Compiled, "fresh", slowly)
    listener = Listener()
    made: dict[str, ItemisedReceipt] = {}
    book = ReceiptBook(with_front=False, on_made=lambda one, _: made.update({one.id: one}))
    lives = Lives([book], on_bug=_raise)
    answer = 12
    greedy = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    with engine_of(write_checkpoint("full", tmp_path), sinks=[listener, lives], overlap=overlap) as engine:
        slow, quick, free = requests(engine, prompts(3, high=20), greedy)
        asks = [
            msgspec.structs.replace(slow, grammar=SLOW, id="slow"),
            msgspec.structs.replace(quick, grammar=FREE, id="quick", max_tokens=40),
            msgspec.structs.replace(free, id="free", max_tokens=40),
        ]
        for handle in engine.client.run(asks):
            assert handle.last is not None and handle.last.finish == "length", handle.last
    done = [event for event in listener.events if isinstance(event, StepDone)]
    held = [event for event in done if "slow" in event.grammar_ids]
    assert len(held) == answer
    for event in held[1:]:  # its first mask may have been computed in a step of the others
        parts = dict(zip(event.grammar_ids, event.grammar_parts, strict=True))
        assert event.grammar_s >= 0.9 * late_s and parts["slow"] > 0.5 * event.grammar_s
        assert sum(parts.values()) == pytest.approx(event.grammar_s) and "free" not in parts
        assert event.grammar_s <= event.device_s, "what is told is a part of the step"
    assert all(set(event.grammar_ids) <= {"slow", "quick"} for event in done)
    assert part(made["slow"], "grammar_masks") > 0.2 * answer * late_s
    for name in ("quick", "free"):
        assert part(made[name], "others_grammar") > 0.2 * answer * late_s
        assert next(one.blocked_by for one in made[name].e2e if one.name == "others_grammar") == "slow"
    assert part(made["free"], "grammar_masks") == 0.0


def part(made: ItemisedReceipt, name: PartName) -> float:
    return sum(one.seconds for one in made.e2e if one.name == name)


def _raise(error: BaseException) -> None:
    raise error
