"""Faults that are planted in a running server, each of which must get its own name, with the evidence, within 10 s."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serving.process_support import KILL, STOP, Stream, server, wait_until
from tradewind.serving.diagnosis import ADVICE, State, disk_sleepers, memory_kills, of_death, of_failure, of_stall

ENDLESS = {"answer": "abcdefgh ", "repeat": True}
SLOW = {"default": ENDLESS, "step_ms": 5, "slots": 8}
WITHIN_S = 10.0


def diagnosed(made: Any, name: str, *, says: str, since_s: float) -> None:
    """The log names it, in time, and names nothing else."""
    wait_until(lambda: made.said("diagnosis: "), limit_s=WITHIN_S, what=f"the diagnosis {name}")
    assert time.monotonic() - since_s < WITHIN_S
    (line,) = made.said("diagnosis: ")
    assert f"diagnosis: {name}: " in line and says in line, line
    assert ADVICE[name][:30] in line  # type: ignore[index]


@pytest.mark.parametrize(
    ("fault", "name", "says"),
    [
        ({"do": "stall", "seconds": 3.0}, "device_stall", "the loop waits in 'collect'"),
        ({"do": "disk", "seconds": 3.0}, "slow_disk", "a page of step 30 is being read"),
    ],
)
def test_an_engine_that_stands_still_is_told_why_and_that_it_is_over(
    fault: dict[str, Any], name: str, says: str, tmp_path: Path
) -> None:
    with (
        server(tmp_path, "--stall-timeout", "1", **SLOW, faults=[{"at_step": 30, **fault}]) as made,
        Stream(made, max_tokens=80) as stream,
    ):
        stream.events(5)
        diagnosed(made, name, says=says, since_s=time.monotonic())
        assert made.get("/health")[1]["diagnosis"].startswith(f"{name}: ")
        stream.rest()
        assert stream.finish == "length", "and nothing was lost"
        wait_until(lambda: made.get("/health")[1]["diagnosis"] is None, limit_s=5, what="the all-clear")


def test_a_process_that_does_not_even_answer_is_named(tmp_path: Path) -> None:
    with server(tmp_path, "--stall-timeout", "1", **SLOW) as made, Stream(made, max_tokens=200) as stream:
        stream.events(5)
        os.kill(made.engine_pid, STOP)
        try:
            diagnosed(made, "host_stall", says="the engine process does not answer", since_s=time.monotonic())
        finally:
            os.kill(made.engine_pid, signal.SIGCONT)
        stream.rest()
        assert stream.finish == "length"


def test_a_stall_is_named_within_10_s_however_patient_the_operator_is(tmp_path: Path) -> None:
    stall = [{"at_step": 30, "do": "stall", "seconds": 9.0}]
    with (
        server(tmp_path, "--stall-timeout", "600", **SLOW, faults=stall) as made,
        Stream(made, max_tokens=60) as stream,
    ):
        stream.events(5)
        diagnosed(made, "device_stall", says="no step has ended for", since_s=time.monotonic())
        assert made.get("/health")[0] == 200, "the limit is the operator's"


@pytest.mark.parametrize(
    ("do", "name", "says"),
    [
        ("oom", "out_of_memory", "MemoryError: step 30 needs 3.0 GiB more"),
        ("die", "device_lost", "the scripted device died in step 30"),
        ("exit", "worker_lost", "with exit code 3 and said nothing"),
        ("kill", "worker_lost", "by signal 9 and said nothing"),
        ("bug", "bug", "RuntimeError: a scripted bug in step 30"),
    ],
)
def test_an_engine_that_dies_is_told_of_what(do: str, name: str, says: str, tmp_path: Path) -> None:
    with server(tmp_path, **SLOW, faults=[{"at_step": 30, "do": do}]) as made:
        began_s = time.monotonic()
        with Stream(made, max_tokens=80) as stream:
            stream.rest()
            assert stream.error["code"] == "engine_dead"
        diagnosed(made, name, says=says, since_s=began_s)


def test_a_worker_that_is_killed_from_outside_is_lost(tmp_path: Path) -> None:
    with server(tmp_path, "--restart-engine", **SLOW) as made:
        began_s = time.monotonic()
        os.kill(made.engine_pid, KILL)
        diagnosed(made, "worker_lost", says="by signal 9", since_s=began_s)
        wait_until(lambda: made.get("/health")[0] == 200, limit_s=10, what="the new engine")
        assert made.get("/health")[1]["diagnosis"] is None


def test_a_row_that_is_not_finite_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    bad = {"contains": "bad", "answer": "abcdef", "faults": [{"do": "nan", "at_token": 3, "once": False}]}
    with server(tmp_path, rules=[bad]) as made:
        began_s = time.monotonic()
        assert made.complete("bad")[0] == 500 and made.complete("good")[0] == 200
        diagnosed(made, "nan", says="logits are not finite (request ", since_s=began_s)
        status, health, *_ = made.get("/health")
        assert status == 200 and health["diagnosis"].startswith("nan: ")
        assert made.complete("bad")[0] == 500
        assert len(made.said("diagnosis: ")) == 1, "once, not for each request"


# -- evidence and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "code", "kills", "name"),
    [
        (None, -9, 0, "worker_lost"),
        (None, -9, 1, "out_of_memory"),
        (None, -11, 1, "worker_lost"),
        (None, 0, 0, "worker_lost"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", 1, 0, "out_of_memory"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", 1, 0, "out_of_memory"),
        ("MemoryError: ", 1, 0, "out_of_memory"),
        ("MemoryError: std::bad_alloc", 1, 0, "out_of_memory"),
        ("AcceleratorError: CUDA error: device-side assert triggered", 1, 0, "device_lost"),
        ("AssertionError: stuck: 3 requests open and none can go on", 1, 0, "bug"),
        ("KeyError: 'nancy'", 1, 0, "bug"),
        ("the model's logits are not finite", 1, 0, "nan"),
    ],
)
def test_deaths(reason: str | None, code: int, kills: int, name: str) -> None:
    assert of_death(reason, code=code, memory_kills=kills).name == name


@pytest.mark.parametrize(
    ("state", "sleepers", "name"),
    [
        (State(doing="collect", for_s=5.0), 0, "device_stall"),
        (State(doing="submit step 4", for_s=5.0), 0, "device_stall"),
        (State(doing="collect", for_s=5.0), 2, "slow_disk"),
        (State(doing="collect", for_s=5.0, waits_on="disk: weights"), 0, "slow_disk"),
        (State(doing="decide", for_s=5.0), 0, "host_stall"),
        (State(doing="absorb step 9", for_s=5.0), 0, "host_stall"),
        (None, 0, "host_stall"),
        (None, 1, "slow_disk"),
    ],
)
def test_stalls(state: State | None, sleepers: int, name: str) -> None:
    found = of_stall(state, still_s=5.0, disk_sleepers=sleepers)
    assert found.name == name and "no step has ended for 5.0 s" in found.says and "\n" not in str(found)


def test_failures_that_say_nothing_about_the_engine_have_no_diagnosis() -> None:
    assert of_failure("the deadline passed: not done 3.000 s after arrival") is None
    assert of_failure("the server is too busy: try again later") is None
    for says in ("the model's logits are not finite", "the model's hidden states are not finite"):
        found = of_failure(says)
        assert found is not None and found.name == "nan"


def test_what_the_system_knows_is_read(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert memory_kills(proc=proc, cgroups=groups) == 0, "nobody says"
    (proc / "vmstat").write_text("pgfault 9\noom_kill 4\n")
    assert memory_kills(proc=proc, cgroups=groups) == 4
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (groups / "a" / "b").mkdir(parents=True)
    (groups / "a" / "b" / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert memory_kills(proc=proc, cgroups=groups) == 2
    for thread, state in ((7, "S"), (8, "D"), (9, "D")):
        (proc / "7" / "task" / str(thread)).mkdir(parents=True)
        (proc / "7" / "task" / str(thread) / "stat").write_text(f"{thread} (a) D) b) {state} 1 2 3")
    assert (
        disk_sleepers(7, proc=proc) == 2 and disk_sleepers(99, proc=proc) == 0 and disk_sleepers(None, proc=proc) == 0
    )
