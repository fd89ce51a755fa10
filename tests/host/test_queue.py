from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.host.support_engine import request
from tradewind.engine.policies import AGE_S_PER_LEVEL, POLICIES, ArrivalPolicy, PriorityPolicy
from tradewind.engine.queue import WaitingQueue
from tradewind.engine.sequence import Sequence


def sequence(name: str, *, at: float, place: int, priority: int = 0) -> Sequence:
    return Sequence(request(name, [1], priority=priority), arrived_s=at, place=place)


def names(queue: WaitingQueue) -> list[str]:
    return [s.id for s in queue]


def test_first_come_first_served_also_after_coming_back() -> None:
    queue = ArrivalPolicy().queue()
    items = [sequence(n, at=1.0 * (i // 2), place=i, priority=5 - i) for i, n in enumerate("abcd")]
    for item in items:
        queue.push(item)
    queue.remove(items[0])
    queue.remove(items[2])
    assert names(queue) == ["b", "d"] and len(queue) == 2
    queue.push(items[0])
    assert names(queue) == ["a", "b", "d"] and [s.id for s in queue.first(2)] == ["a", "b"]
    with pytest.raises(AssertionError):
        queue.remove(items[2])


def test_priority_ages_so_that_nothing_starves() -> None:
    queue = PriorityPolicy().queue()
    queue.push(sequence("low", at=0.0, place=0, priority=3))
    queue.push(sequence("high soon", at=2.9 * AGE_S_PER_LEVEL, place=1, priority=0))
    queue.push(sequence("high late", at=3.1 * AGE_S_PER_LEVEL, place=2, priority=0))
    assert names(queue) == ["high soon", "low", "high late"]


def test_the_policies_table_is_sorted_and_the_victim_is_the_last_in_order() -> None:
    assert list(POLICIES) == sorted(POLICIES)
    running = [sequence("a", at=0.0, place=0, priority=9), sequence("b", at=5.0, place=1)]
    for policy, victim in ((ArrivalPolicy(), "b"), (PriorityPolicy(), "a")):
        queue = policy.queue()
        for item in running:
            queue.push(item)
        chosen = policy.victim(running)
        assert chosen is not None and chosen.id == victim
        assert policy.victim([]) is None


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3)), max_size=30), st.floats(100, 1000))
def test_order_is_the_order_of_aged_priorities_at_any_time(items: list[tuple[float, int]], now: float) -> None:
    queue = PriorityPolicy().queue()
    for place, (at, priority) in enumerate(items):
        queue.push(sequence(str(place), at=at, place=place, priority=priority))
    aged = [s.request.priority - (now - s.arrived_s) / AGE_S_PER_LEVEL for s in queue]
    assert all(a <= b + 1e-9 for a, b in pairwise(aged))
