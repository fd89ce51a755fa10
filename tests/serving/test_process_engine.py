"""The engine in a process of its own, seen through `RemoteClient`: answers, cancels, deaths, orphans. Named after the user cases."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.serving.process_support import END, Refused, alive, engine, request, rss_bytes, wait_until
from tradewind.contract.errors import EngineDeadError, LimitError, RequestError
from tradewind.contract.events import Arrived, Scheduled, StepDone, TokensOut
from tradewind.contract.request import SamplingParams
from tradewind.engine.columns import spelled_out
from tradewind.engine.wire import Drain

LONG = {"answer": "x", "repeat": True}
FULL = {"default": LONG, "slots": 16, "pages": 256}


def tokens_of(text: str) -> list[int]:
    return [*text.encode(), END]


# -- answers -------------------------------------------------------------------------------------------------------------


def test_answers_cross_the_border_in_a_thread() -> None:
    with engine(rules=[{"contains": "hi", "answer": "Hello 🌊"}], default={"answer": "No."}) as made:
        made.hear = True
        client = made.client.start()
        first, second = client.submit(request("a", "hi there")), client.submit(request("b", "what"), stream=False)
        said = [token for event in first for token in event.tokens]
        assert said == first.tokens == tokens_of("Hello 🌊")
        assert first.last is not None and first.last.finish == "stop" and first.last.stop_token == END
        assert [event.finish for event in second] == ["stop"] and second.tokens == tokens_of("No.")
        wait_until(lambda: client.stats().running == 0, limit_s=2)  # a last step may fly on after the answer's end
        assert client.stats().generated_tokens == len(said) + 4
        assert client.stats().prompt_tokens == 12 and client.why_dead is None
        began_s = client.scheduled_s("a")
        assert began_s is not None and 0 <= time.monotonic() - began_s < 20
        kinds = Counter(type(event) for event in spelled_out(made.reports))
        assert kinds[Arrived] == kinds[Scheduled] == 2 and kinds[StepDone] == client.stats().steps
        assert kinds[TokensOut] == len(said) + 4
        assert made.close() == 0
        with pytest.raises(EngineDeadError, match="closed"):
            client.submit(request("c"))
    assert not [t for t in threading.enumerate() if t.name == "tradewind-remote"]


def test_answers_cross_the_border_in_asyncio() -> None:
    async def main() -> None:
        with engine(default={"answer": "Some text, the same for all."}, max_context=10_000, pages=4_096) as made:
            client = made.client.attach()
            handles = [client.submit(request(f"r{i}", f"prompt {i}")) for i in range(40)]

            async def read(handle: Any) -> list[int]:
                return [token async for event in handle for token in event.tokens]

            answers = await asyncio.gather(*map(read, handles))
            assert all(answer == tokens_of("Some text, the same for all.") for answer in answers)
            # Long enough that the engine cannot reach the limit before it hears of the stop.
            stopped = client.submit(request("s", max_tokens=9_000, sampling=SamplingParams(ignore_eos=True)))
            await asyncio.sleep(0)
            stopped.finish()
            events = [event async for event in stopped]
            assert events[-1].finish == "stop"
            client.close()
            assert client.open == 0

    asyncio.run(main())


def test_refusals_are_raised_where_the_request_is_submitted() -> None:
    with engine(max_context=64, pages=8, page_tokens=4, step_ms=20) as made:
        client = made.client.start()
        with pytest.raises(LimitError, match="the context limit is 64"):
            client.submit(request("a", "x" * 70))
        with pytest.raises(LimitError, match="8 pages"):
            client.submit(request("a", "x" * 40, max_tokens=10))
        with pytest.raises(RequestError, match="empty"):
            client.submit(request("a", ""))
        handle = client.submit(request("a", "x", max_tokens=8))
        with pytest.raises(RequestError, match="already there"):
            client.submit(request("a", "x", max_tokens=8))
        assert handle.result().finish == "length"


def test_a_large_order_does_not_hold_the_loop_up_nor_lose_its_place() -> None:
    async def main() -> None:
        with engine(max_context=400_000, pages=30_000, max_tokens_per_step=400_000) as made:
            client = made.client.attach()
            os.kill(made.process.pid, signal.SIGSTOP)
            began_s = time.monotonic()
            handles = [client.submit(request(f"r{i}", bytes(range(256)) * 800, max_tokens=3)) for i in range(4)]
            handles[0].cancel()
            took_s = time.monotonic() - began_s
            os.kill(made.process.pid, signal.SIGCONT)
            assert took_s < 2, "submitting waits for the engine"
            ends = [[event async for event in handle][-1] for handle in handles]
            assert [end.finish for end in ends] == ["abort", "length", "length", "length"]
            assert ends[1].prompt_tokens == 204_800

    asyncio.run(main())


def test_a_slow_reader_holds_the_engine_back_and_loses_nothing() -> None:
    with engine(default={"answer": "abcdefghij", "repeat": True}, max_context=4096, pages=9000) as made:
        handles = [made.client.submit(request(f"r{i}", max_tokens=1000)) for i in range(32)]
        time.sleep(0.5)
        made.client.start()
        for handle in handles:
            assert handle.result().finish == "length"
            assert bytes(handle.tokens) == b"abcdefghij" * 100


# -- cancelling ----------------------------------------------------------------------------------------------------------


def test_a1_a_cancelled_stream_gives_everything_back_within_a_second() -> None:
    async def main() -> None:
        with engine(**FULL, step_ms=2) as made:
            client = made.client.attach()
            before = client.stats().pages_used
            handle = client.submit(request("a", "hi", max_tokens=4000))
            seen = 0
            async for _ in handle:
                seen += 1
                if seen == 5:
                    break
            assert client.stats().running == 1 and client.stats().pages_used > before
            handle.cancel()
            began_s = time.monotonic()
            while client.stats().running or client.stats().pages_used != before:
                assert time.monotonic() - began_s < 1
                await asyncio.sleep(0.005)
            count = client.stats().generated_tokens
            await asyncio.sleep(0.2)
            assert client.stats().generated_tokens == count < 100

    asyncio.run(main())


def test_a2_the_same_conversation_right_after_a_cancelled_turn() -> None:
    conversation = "user: tell me a long story about the sea and the wind\nassistant:"
    with engine(default={"answer": "Once upon a time. " * 8}, step_ms=1, slots=4) as made:
        client = made.client.start()
        for turn in range(10):
            lost = client.submit(request(f"lost{turn}", conversation, max_tokens=4000))
            for event in lost:
                if event.generated_tokens >= turn + 1:
                    lost.cancel()
                    break
            again = client.submit(request(f"again{turn}", conversation, max_tokens=200))
            assert again.result().finish == "stop" and again.tokens == tokens_of("Once upon a time. " * 8)
            assert again.result().prompt_tokens == len(conversation)


def test_a3_500_cycles_of_start_16_cancel_8_leave_all_slots_free() -> None:
    dice = random.Random(3)
    with engine(default={"answer": "y" * 12}, slots=16, pages=128, page_tokens=4) as made:
        client = made.client.start()
        ended: Counter[str] = Counter()
        for cycle in range(500):
            handles = [
                client.submit(request(f"{cycle}.{i}", f"prompt {cycle % 7} {i}", max_tokens=20), stream=False)
                for i in range(16)
            ]
            for handle in dice.sample(handles, 8):
                if dice.random() < 0.3:
                    time.sleep(dice.random() * 0.002)
                handle.cancel()
            for handle in handles:
                end = handle.result()
                ended[str(end.finish)] += 1
                assert end.finish == "abort" or handle.tokens == tokens_of("y" * 12)
        assert ended["stop"] + ended["abort"] == 8000 and ended["stop"] >= 4000 and ended["abort"] > 500
        wait_until(lambda: client.stats().running == 0 and client.stats().pages_used == (0,), limit_s=1)
        assert client.submit(request("next")).result().finish == "stop"


def test_close_ends_open_requests_with_abort() -> None:
    with engine(**FULL, step_ms=1) as made:
        client = made.client.start()
        handles = [client.submit(request(f"r{i}", max_tokens=3000)) for i in range(20)]
        time.sleep(0.1)
        assert made.close() == 0
        assert {handle.result().finish for handle in handles} == {"abort"}


def test_drain_finishes_what_is_open_and_ends_the_process() -> None:
    with engine(default={"answer": "z" * 40}, step_ms=2, slots=4) as made:
        client = made.client.start()
        handles = [client.submit(request(f"r{i}")) for i in range(10)]
        made.link.send(Drain())
        assert {handle.result().finish for handle in handles} == {"stop"}
        assert made.process.wait(5) == 0


def test_close_does_not_wait_for_a_step_that_hangs() -> None:
    with engine(**FULL, faults=[{"at_step": 3, "do": "stall", "seconds": 60}]) as made:
        handle = made.client.start().submit(request("a"))
        time.sleep(0.2)
        began_s = time.monotonic()
        made.close()
        assert time.monotonic() - began_s < 4
        assert handle.result().finish == "error"


# -- the engine's end ----------------------------------------------------------------------------------------------------


def test_a4_kill_9_of_the_engine_ends_every_open_request_within_5_s() -> None:
    with engine(**FULL, step_ms=1) as made:
        client = made.client.start()
        handles = [client.submit(request(f"r{i}", max_tokens=3000)) for i in range(20)]
        wait_until(lambda: client.stats().running == 16, limit_s=5)
        began_s = time.monotonic()
        made.process.kill()
        for handle in handles:
            assert handle.result().finish == "error" and "engine process" in str(handle.result().error)
        assert time.monotonic() - began_s < 5
        assert client.why_dead is not None and client.open == 0
        with pytest.raises(EngineDeadError):
            client.submit(request("late"))


@pytest.mark.parametrize(
    ("do", "why", "code"),
    [
        ("die", "the scripted device died", 1),
        ("bug", "RuntimeError: a scripted bug", 1),
        ("exit", "the engine process ended", 3),
    ],
)
def test_a_dead_engine_says_why(do: str, why: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    with engine(**FULL, step_ms=20, faults=[{"at_step": 10, "do": do}]) as made:
        client = made.client.start()
        handles = [client.submit(request(f"r{i}", max_tokens=300)) for i in range(3)]
        for handle in handles:
            assert handle.result().finish == "error" and why in str(handle.result().error)
        wait_until(lambda: client.why_dead is not None, limit_s=5)
        assert made.process.wait(5) == code and why in str(client.why_dead)
    assert ("Traceback" in capfd.readouterr().err) == (do == "bug")


def test_a_failed_row_is_one_requests_matter() -> None:
    bad = {"contains": "bad", "answer": "abcdef", "faults": [{"do": "nan", "at_token": 3}]}
    with engine(rules=[bad], default={"answer": "fine"}) as made:
        client = made.client.start()
        handles = [client.submit(request(f"r{i}", "bad" if i == 2 else "good")) for i in range(5)]
        ends = [handle.result() for handle in handles]
        assert [end.finish for end in ends] == ["stop", "stop", "error", "stop", "stop"]
        assert ends[2].error == "logits are not finite" and bytes(handles[2].tokens) == b"abc"
        assert client.submit(request("again", "bad")).result().finish == "stop", "the fault happens once"


def test_a_script_that_is_wrong_is_refused_by_the_process_too() -> None:
    with pytest.raises(Refused, match="slotss"):
        engine(slotss=3).__enter__()


def test_the_state_is_told_while_a_step_hangs() -> None:
    with engine(**FULL, step_ms=5, faults=[{"at_step": 40, "do": "stall", "seconds": 1.5}]) as made:
        client = made.client.start()
        handles = [client.submit(request(f"r{i}", max_tokens=90)) for i in range(18)]
        time.sleep(0.7)
        client.submit(request("late"))
        time.sleep(0.05)
        client.describe()
        wait_until(lambda: made.described, limit_s=1, what="the description")
        (text,) = made.described
        assert "the loop is in 'collect'" in text and "16 running, 2 waiting" in text and "16 of 16 slots" in text
        assert "1 orders wait" in text and "r3 running: slot 3, 2 prompt tokens" in text
        assert time.monotonic() - client.stats().last_progress_s > 0.2
        assert all(handle.result().finish == "length" for handle in handles)


def test_fault_switches_work_on_a_running_engine() -> None:
    with engine(**FULL) as made:
        client = made.client.start()
        assert client.submit(request("a", max_tokens=5)).result().finish == "length"
        client.fault("die")
        assert client.submit(request("b", max_tokens=5)).result().finish == "error"


# -- no orphans ----------------------------------------------------------------------------------------------------------

ORPHAN = """
import os, sys, time
from tests.serving.process_support import Engine, request
from tradewind.engine.wire import socket_pair
when = sys.argv[1]
if when == "start":
    import subprocess
    mine, theirs = socket_pair()
    child = subprocess.Popen([sys.executable, "-m", "tradewind.engine_process", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    pid = child.pid
else:
    made = Engine(default={"answer": "x", "repeat": True}, faults=[{"at_step": 3, "do": "stall", "seconds": 60}] if when == "stall" else [])
    made.client.start()
    if when != "idle":
        made.client.submit(request("a", max_tokens=8000))
        time.sleep(0.2)
    pid = made.process.pid
print(pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["start", "idle", "busy", "stall"])
def test_an_engine_never_outlives_its_front(when: str) -> None:
    """Also when the front is killed with -9, in the middle of a start, of work, and of a step that hangs."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    front = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ORPHAN), when],
        stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert front.stdout is not None
    with front.stdout:
        pid = int(front.stdout.readline())
        assert alive(pid)
        front.kill()
        front.wait()
        wait_until(lambda: not alive(pid), limit_s=6, what=f"the end of engine {pid}")


# -- memory --------------------------------------------------------------------------------------------------------------


def test_memory_is_flat_over_20000_requests() -> None:
    with engine(default={"answer": "ok"}, slots=64, pages=512, page_tokens=4) as made:
        client = made.client.start()
        pids = (os.getpid(), made.process.pid)
        number = 0

        def some(count: int) -> None:
            nonlocal number
            for _ in range(count // 200):
                handles = [
                    client.submit(request(f"r{(number := number + 1)}", f"p{number}"), stream=False) for _ in range(200)
                ]
                assert all(handle.result().finish == "stop" for handle in handles)

        some(6000)  # tables and caches of fixed size fill up
        before = [rss_bytes(pid) for pid in pids]
        some(14000)
        grown = [rss_bytes(pid) - was for pid, was in zip(pids, before, strict=True)]
        assert max(grown) < 4 << 20, f"front and engine grew by {grown} bytes"
