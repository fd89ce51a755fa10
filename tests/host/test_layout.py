"""Slots and step layout: what a Step's columns become, against a naive loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.contract.kv import KVGroup
from tradewind.contract.request import SamplingParams
from tradewind.contract.step import Enter, Step, Wants, frozen_ints
from tradewind.device.layout import StepArrays, lay_out
from tradewind.device.slots import Slots

PAGE = 4
GROUPS = tuple(
    KVGroup(index=index, kind="full", layers=(index,), kv_heads=1, head_dim=16, page_tokens=PAGE, format="f32")
    for index in range(2)
)


def enter(slot: int, tokens: list[int], *, epoch: int = 1) -> Enter:
    return Enter(
        slot=slot,
        epoch=epoch,
        request_id=f"r{slot}",
        tokens=frozen_ints(tokens),
        prompt_tokens=len(tokens),
        capacity_tokens=64,
        sampling=SamplingParams(),
        seed=0,
        eos_ids=(),
    )


def step_of(rows: list[tuple[int, int, int]], *, pages: list[tuple[int, int, int, int]] = ()) -> Step:  # type: ignore[assignment]
    """rows: (slot, start, count); pages: (slot, group, index, id)."""
    column = lambda i: frozen_ints([row[i] for row in rows])  # noqa: E731
    page = lambda i: frozen_ints([entry[i] for entry in pages])  # noqa: E731
    return Step(
        number=1,
        slot=column(0),
        epoch=frozen_ints([1] * len(rows)),
        start=column(1),
        count=column(2),
        drafts=frozen_ints([0] * len(rows)),
        wants=frozen_ints([Wants.LAST] * len(rows)),
        page_slot=page(0),
        page_group=page(1),
        page_index=page(2),
        page_id=page(3),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_layout_equals_a_naive_loop(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    slots = Slots(slots=8, max_context=40, groups=GROUPS)
    chosen = data.draw(st.permutations(range(8)))[:count]
    next_page = iter(data.draw(st.permutations(range(1, 200))))
    rows, pages = [], []
    for slot in chosen:
        length = data.draw(st.integers(1, 40))
        slots.enter(enter(slot, data.draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))))
        start = data.draw(st.integers(0, length - 1))
        rows.append((slot, start, data.draw(st.integers(1, length - start))))
        pages += [(slot, g, i, next(next_page)) for g in range(2) for i in range(-(-length // PAGE))]
    step = step_of(rows, pages=pages)
    arrays = StepArrays.allocate(capacity=256, rows=8, slots=slots)
    slots.turn_pages(step)
    lay_out(step, slots, arrays)
    table = {(slot, group, index): page for slot, group, index, page in pages}
    token = 0
    for row, (slot, start, n) in enumerate(rows):
        assert arrays.query_start[row] == token
        assert arrays.lengths[row] == start + n
        for position in range(start, start + n):
            assert arrays.positions[token] == position
            assert arrays.ids[token] == slots.tokens[slot, position]
            for group in range(2):
                page = table[slot, group, position // PAGE]
                assert arrays.write_slots[group][token] == page * PAGE + position % PAGE
            token += 1
        for group in range(2):
            for index in range(-(-(start + n) // PAGE)):
                assert arrays.page_table[group][row, index] == table[slot, group, index]
    assert arrays.tokens[0] == token and arrays.rows[0] == len(rows)


def test_an_empty_step_has_no_tokens() -> None:
    slots = Slots(slots=2, max_context=8, groups=GROUPS)
    arrays = StepArrays.allocate(capacity=8, rows=2, slots=slots)
    lay_out(step_of([]), slots, arrays)
    assert arrays.tokens[0] == 0 and arrays.rows[0] == 0


def test_a_held_slot_refuses_another_sequence_and_a_new_one_sees_no_old_pages() -> None:
    slots = Slots(slots=2, max_context=8, groups=GROUPS)
    slots.enter(enter(0, [1, 2, 3]))
    with pytest.raises(AssertionError, match="still held"):
        slots.enter(enter(0, [4], epoch=2))
    slots.turn_pages(step_of([], pages=[(0, 0, 0, 7)]))
    slots.leave(0)
    with pytest.raises(AssertionError, match="not held"):
        slots.leave(0)
    slots.enter(enter(0, [4], epoch=2))
    assert slots.page_table[0][0, 0] == 0


def test_sampled_tokens_are_read_by_the_next_row() -> None:
    slots = Slots(slots=2, max_context=8, groups=GROUPS)
    slots.enter(enter(1, [5, 6, 7]))
    slots.append(frozen_ints([1]), frozen_ints([3]), frozen_ints([42]))
    arrays = StepArrays.allocate(capacity=8, rows=2, slots=slots)
    lay_out(step_of([(1, 3, 1)]), slots, arrays)
    assert arrays.ids[0] == 42 and arrays.positions[0] == 3
    assert np.array_equal(slots.known, [0, 4])
