"""Shared experts beside routed ones: which calls run on a second stream, and where the two meet. A part of planning.py.

Knows: what of a mixture depends on the normed input only, where the fork and the join are. Refuses to know: kernels.

    lane 0   .. P   router   route   experts .. experts           J ..       P writes the last of what the shared expert reads
    lane 1        \\ shared gate_up, shared down                 /           J reads what it makes (or overwrites what it reads)
                fork: lane 1 waits for P                       join: lane 0 waits for lane 1

    1 token         lane 1 has gate_up only; experts write stream + answer beside the stream, and the shared down, which is J, adds to that
                    and puts it into the stream: no launch adds, and the next norm is folded into its matmuls
    more            lane 1 has both; J is the next norm, which adds the routed experts' weighted answers and the shared one

It pays where a launch's latency counts: routing a few tokens leaves the memory idle. Larger steps keep one stream. Lanes change no result:
every launch reads and writes what it would in one stream.

One token keeps one stream too (`side_from`), with gate_up behind routing and in front of the experts. There dependent launch does more than
a second stream: attention, output and router are small, so that programs of the gate_up behind them are there early and hold their first
weights when routing is done. On the second stream they start after all of that, and behind the experts' programs, which by then have taken
every place (measured: gate_up began 20 us after what it waits for).

The invariant of dependent launches ("the end of a kernel implies the end of all before it", package docstring) holds for each lane by
itself, and for both after a join, because

  - a kernel with predecessors in two lanes, or in the other lane, is launched AFTER_ALL: without the attribute that lets it start early, so
    that graph and stream have it wait for the *end* of all of them. A start before that would be tied to one lane only, and its wait
    (griddepcontrol.wait) would say nothing of the other. It still lets its own successor start early, which waits for its end in turn.
  - lane 1 begins with such a kernel and lane 0 goes on with one after the join. All others have one predecessor, in their own lane. The one
    behind the fork in lane 0 may start early: its predecessor, P, is the last before the fork.
  - nothing in lane 0 between fork and join reads what lane 1 writes, nor writes what it reads or writes (`conflict`), and what is used as
    scratch there is lane 1's own (`Planner.partial_sums`, `arrivals`).
  - `early` and `late` (what is read before the wait) speak of consecutive kernels of one lane: such pairs are made in lane 0 and no fork or
    join stands between them. A join in front of both changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tradewind.kernels.triton import mixture
from tradewind.kernels.triton.planner import Planner
from tradewind.kernels.triton.tape import Call
from tradewind.kernels.triton.workspace import address


def conflict(call: Call, others: Iterable[Call]) -> bool:
    """Whether a call may not run beside the others."""
    reads, writes = call.reads(), call.writes()
    return any(writes & (other.reads() | other.writes()) or reads & other.writes() for other in others)


def arrange(planner: Planner) -> None:
    """Puts each shared expert right behind what it reads, on the other lane where the step is small; for one token it adds to the
    stream, and in one lane its first half comes right before the routed experts."""
    i = 0
    while i < len(planner.calls):
        if planner.calls[i].op == "experts":
            _arrange_one(planner, i)
        i += 1


def _arrange_one(planner: Planner, i: int) -> None:
    calls = planner.calls
    found = _shared_branch(planner, i)
    if found is None:
        return
    branch, joined = found
    begin = max(planner.last_write(i, buffer) for call in branch for buffer in call.reads() - _made(branch))
    between = calls[begin + 1 : i + 1]
    if begin < 0 or any(conflict(call, branch) for call in between):
        return
    add, one = calls[joined], mixture.way(planner, calls[i]) == "one"
    tuning, small = planner.tuning, all(planner.way(c) != "library" for c in branch)
    side = small and tuning.side_from <= planner.bucket.tokens <= tuning.side_tokens
    if one and add["gate"] is None and planner.way(branch[-1]) == "gemv" and _add_to_stream(planner, i, joined, branch):
        gate_up, down = branch
        *routing, routed = between
        calls[begin + 1 : joined + 1] = [gate_up, *between, down] if side else [*routing, gate_up, routed, down]
        gate_up["side"] = side
        return
    if not side:
        return
    calls[begin + 1 : joined] = [*branch, *between]
    for call in branch:
        call["side"] = True


def _made(branch: list[Call]) -> set[int]:
    return set().union(*(call.writes() for call in branch))


def _shared_branch(planner: Planner, i: int) -> tuple[list[Call], int] | None:
    """The matmuls of the shared expert behind the experts i (of its gate, gate and up, down), and the index of the add that ends them."""
    calls = planner.calls
    out = address(calls[i]["out"])
    readers = planner.readers(i, out)
    if readers is None or len(readers) != 1:
        return None
    (joined,) = readers
    add = calls[joined]
    if add.op != "add" or add["delta"] is None or add["out"] is not None or address(add["x"]) != out:
        return None
    branch = calls[i + 1 : joined]
    wanted = ["gated_linear", "linear"] if add["gate"] is None else ["linear", "gated_linear", "linear"]
    if [call.op for call in branch] != wanted:
        return None
    *_, gate_up, down = branch
    made = {joined - 2: (gate_up["out"], joined - 1), joined - 1: (add["delta"], joined)}
    if add["gate"] is not None:
        made[i + 1] = (add["gate"], joined)
    for writer, (buffer, reader) in made.items():
        if address(calls[writer]["out"]) != address(buffer) or planner.readers(writer, address(buffer)) != [reader]:
            return None
    return (branch, joined) if address(down["x"]) == address(gate_up["out"]) else None


def _add_to_stream(planner: Planner, i: int, joined: int, branch: list[Call]) -> bool:
    """One token: where the next norm alone adds experts and shared expert to the stream, they do it themselves, one after the other."""
    experts, add, down = planner.calls[i], planner.calls[joined], branch[-1]
    readers = planner.readers(joined, address(add["x"]))
    if readers is None or len(readers) != 1:
        return False
    norm = planner.calls[readers[0]]
    if norm.op != "add_rms_norm" or norm["delta"] is None or norm["delta_weight"] is not None:
        return False
    stream = norm["x"]
    if (
        address(norm["delta"]) != address(add["x"])
        or address(stream) == address(add["x"])
        or stream.dtype != torch.float32
        or not planner.untouched(address(stream), i, readers[0], reads=True)
    ):
        return False
    beside = planner.workspace.piece("stream beside", 1, stream.shape[1], dtype=torch.float32)
    experts["residual"], experts["out"] = stream, beside
    down["residual"], down["out"] = beside, stream
    norm["delta"] = None
    return True


def settle(planner: Planner) -> None:
    """What rounds inputs for the shared expert: of its own inner values on its lane, of the normed input before the fork."""
    calls = planner.calls
    made: set[int] = set()
    first: int | None = None  # of the branch that is open
    for i, call in enumerate(calls):
        if call["side"]:
            if first is None:
                first, made = i, set()
            made |= call.writes()
        elif first is None or call.op != "quantise" or not _next_matmul(calls, i)["side"]:
            first = None
        elif address(call["x"]) in made:
            call["side"] = True
        else:
            calls.insert(first, calls.pop(i))
            first += 1


def _next_matmul(calls: list[Call], i: int) -> Call:
    """The call for which the quantise call i was made."""
    return next(call for call in calls[i:] if call.op != "quantise")
