from __future__ import annotations

import numpy as np
import pytest

from tests.host.support_engine import request
from tests.host.test_radix import SPACE, make
from tradewind.engine.sequence import MAY_BECOME, IllegalTransition, Sequence, State

MOVES = {
    State.WAITING: "requeue or wake",
    State.BLOCKED: "block",
    State.RUNNING: "admit",
    State.PAUSED: "pause",
    State.DRAINING: "drain",
    State.DONE: "end",
}


def in_state(state: State) -> Sequence:
    sequence = Sequence(request("a", [1, 2, 3]), arrived_s=0.0, place=0)
    sequence.state = state
    return sequence


def go(sequence: Sequence, to: State) -> None:
    if to is State.WAITING:
        sequence.wake() if sequence.state is State.BLOCKED else sequence.requeue()
    elif to is State.BLOCKED:
        sequence.block(in_state(State.RUNNING), pages=1)
    elif to is State.RUNNING:
        sequence.admit(make().open(SPACE, [], limit=0), slot=0, epoch=1)
    elif to is State.PAUSED:
        sequence.pause()
    elif to is State.DRAINING:
        sequence.drain()
    else:
        sequence.end()


@pytest.mark.parametrize("start", State)
@pytest.mark.parametrize("to", State)
def test_every_transition_is_legal_or_raises(start: State, to: State) -> None:
    sequence = in_state(start)
    if to in MAY_BECOME[start]:
        go(sequence, to)
        assert sequence.state is to
    else:
        with pytest.raises(IllegalTransition, match=f"{start.value} may not become {to.value}"):
            go(sequence, to)
        assert sequence.state is start


def test_the_table_is_the_design() -> None:
    assert {s.name: sorted(t.name for t in to) for s, to in MAY_BECOME.items()} == {
        "WAITING": ["BLOCKED", "DONE", "RUNNING"],
        "BLOCKED": ["DONE", "DRAINING", "RUNNING", "WAITING"],
        "RUNNING": ["DONE", "DRAINING", "PAUSED"],
        "PAUSED": ["DONE", "WAITING"],
        "DRAINING": ["DONE", "PAUSED"],
        "DONE": [],
    }


def test_nobody_leaves_with_a_lease() -> None:
    sequence = in_state(State.WAITING)
    lease = make().open(SPACE, [], limit=0)
    sequence.admit(lease, slot=2, epoch=1)
    with pytest.raises(AssertionError, match="lease"):
        sequence.end()
    lease.release()


def test_tokens_grow_and_chunks_continue() -> None:
    sequence = Sequence(request("a", range(10), max_tokens=1000), arrived_s=0.0, place=0)
    assert len(sequence.chunks(4)) == 2
    for start in range(10, 400, 13):
        sequence.append(np.arange(start, start + 13, dtype=np.int32))
    assert sequence.tokens[: sequence.known].tolist() == list(range(sequence.known))
    keys = sequence.chunks(4)
    assert len(keys) == sequence.known // 4
    assert np.frombuffer(b"".join(keys), dtype=np.int32).tolist() == list(range(len(keys) * 4))
