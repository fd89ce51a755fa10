from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.host.support_engine import Engine, request, schedule_plan
from tradewind.contract.errors import EngineDeadError, LimitError, RequestError
from tradewind.contract.events import TokensOut
from tradewind.engine.columns import StepTokens, spelled_out
from tradewind.engine.loop import EngineLoop
from tradewind.simulate.clock import RealClock
from tradewind.simulate.scripted import expected_tokens


def prompt(length: int, *, seed: int = 1) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tradewind-engine"]


def test_streams_of_several_handles_driven_by_the_reader() -> None:
    engine = Engine()
    first = engine.client.submit(request("a", prompt(5), max_tokens=6))
    second = engine.client.submit(request("b", prompt(7, seed=2), max_tokens=3))
    tokens = [t for event in first for t in event.tokens]
    assert tokens == first.tokens == expected_tokens(prompt(5), 6, groups=engine.cache.groups)
    assert second.done, "reading one drives all"
    assert [t for event in second for t in event.tokens] == second.tokens and len(second.tokens) == 3
    assert second.result().finish == "length" and second.result().generated_tokens == 3
    assert list(second) == [] and second.take() == [], "nothing comes after the end"


def test_without_streaming_only_the_last_event_is_kept() -> None:
    engine = Engine()
    handle = engine.client.submit(request("a", prompt(5), max_tokens=6), stream=False)
    (event,) = list(handle)
    assert event.finish == "length" and len(event.tokens) == 1 and len(handle.tokens) == 6


def test_refusals_are_raised_where_the_request_is_submitted() -> None:
    engine = Engine(schedule=schedule_plan(max_context=50))
    with pytest.raises(RequestError, match="empty"):
        engine.client.submit(request("a", []))
    with pytest.raises(LimitError, match="context limit is 50"):
        engine.client.submit(request("a", prompt(60)))
    handle = engine.client.submit(request("a", prompt(5)))
    with pytest.raises(RequestError, match="already there"):
        engine.client.submit(request("a", prompt(5)))
    assert handle.result().finish == "length"
    assert engine.client.submit(request("a", prompt(5))).result().finish == "length"


def test_cancel_and_finish() -> None:
    engine = Engine()
    handle = engine.client.submit(request("a", prompt(5), max_tokens=100))
    stopped = engine.client.submit(request("b", prompt(5), max_tokens=100))
    for event in handle:
        if event.generated_tokens == 4:
            handle.cancel()
            stopped.finish()
    assert handle.result().finish == "abort" and 4 <= len(handle.tokens) <= 6
    assert stopped.result().finish == "stop" and stopped.result().stop_token is None
    handle.cancel()  # over: nothing happens
    while engine.client.drive():
        pass
    engine.scheduler.check()


def test_forget_empties_the_prefix_cache() -> None:
    engine = Engine()
    engine.client.run([request("a", prompt(40))])
    assert engine.scheduler.cache.pools[0].idle > 0
    engine.client.forget()
    assert engine.scheduler.cache.pools[0].free == 64


def test_a_dead_device_ends_every_request_with_error_and_refuses_new_ones() -> None:
    engine = Engine(die_at=4)
    handles = [engine.client.submit(request(f"r{i}", prompt(5, seed=i + 1), max_tokens=50)) for i in range(12)]
    for handle in handles:
        assert handle.result().finish == "error" and "died in step 4" in str(handle.result().error)
    with pytest.raises(EngineDeadError, match="died in step 4"):
        engine.client.submit(request("late", prompt(3)))
    assert engine.scheduler.idle
    engine.scheduler.check()
    engine.client.close()
    assert engine.device.closed


def test_a_bug_is_raised_and_still_ends_every_request() -> None:
    engine = Engine()
    handle = engine.client.submit(request("a", prompt(5), max_tokens=50))
    engine.client.drive()
    engine.device._slots = [None] * 8
    with pytest.raises(AssertionError, match="slot 0 is empty"):
        handle.result()
    assert handle.done and "slot 0 is empty" in str(handle.result().error)


def test_close_aborts_what_is_open_and_may_be_called_twice() -> None:
    engine = Engine()
    handle = engine.client.submit(request("a", prompt(5), max_tokens=50))
    engine.client.drive()
    engine.client.close()
    engine.client.close()
    assert handle.result().finish == "abort" and engine.device.closed
    with pytest.raises(EngineDeadError, match="closed"):
        engine.client.submit(request("b", prompt(3)))


def test_many_threads_share_one_engine() -> None:
    engine = Engine(schedule=schedule_plan(max_running=8, max_tokens_per_step=64))
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(5):
            tokens = prompt(3 + turn, seed=number + 1)
            handle = engine.client.submit(request(f"{number}.{turn}", tokens, max_tokens=8), stream=bool(turn % 2))
            for _ in handle:
                pass
            if handle.tokens != expected_tokens(tokens, 8, groups=engine.cache.groups):
                wrong.append(handle.request.id)

    with engine.client.start():
        workers = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=30)
        assert not any(worker.is_alive() for worker in workers) and not wrong
    assert not engine_threads() and engine.device.closed
    engine.scheduler.check()


def test_asyncio_readers_and_a_cancelled_task() -> None:
    engine = Engine()

    async def read(name: str, seed: int) -> list[int]:
        handle = engine.client.submit(request(name, prompt(6, seed=seed), max_tokens=9))
        return [t async for event in handle for t in event.tokens]

    async def main() -> list[list[int]]:
        slow = engine.client.submit(request("slow", prompt(4), max_tokens=200))

        async def forever() -> None:
            async for _ in slow:
                pass

        task = asyncio.create_task(forever())
        answers = await asyncio.gather(*(read(f"r{i}", i + 2) for i in range(20)))
        task.cancel()
        slow.cancel()
        return list(answers)

    with engine.client.start():
        answers = asyncio.run(main())
    for i, answer in enumerate(answers):
        assert answer == expected_tokens(prompt(6, seed=i + 2), 9, groups=engine.cache.groups)
    assert not engine_threads()


def test_asyncio_without_a_thread_says_what_to_do() -> None:
    engine = Engine()
    handle = engine.client.submit(request("a", prompt(4)))

    async def main() -> None:
        async for _ in handle:
            pass

    with pytest.raises(RuntimeError, match=r"start\(\)"):
        asyncio.run(main())


def test_a_dead_device_wakes_threads_that_wait() -> None:
    engine = Engine(die_at=3, clock=RealClock())
    with engine.client.start():
        handle = engine.client.submit(request("a", prompt(5), max_tokens=50))
        assert handle.result().finish == "error"


def test_an_idle_engine_thread_does_not_spin() -> None:
    engine = Engine()
    turns = 0
    run_once = engine.loop.run_once

    def counted() -> list[object]:
        nonlocal turns
        turns += 1
        return run_once()  # type: ignore[return-value]

    engine.loop.run_once = counted  # type: ignore[method-assign, assignment]
    with engine.client.start():
        engine.client.submit(request("a", prompt(5), max_tokens=3)).result()
        time.sleep(0.05)
        after, before = turns, time.process_time()
        time.sleep(0.2)
        assert turns == after and time.process_time() - before < 0.1


def test_overlap_hides_the_host_behind_the_device() -> None:
    """The next step is submitted before the last one is collected."""
    engine = Engine()
    log: list[str] = []
    submit, collect = engine.device.submit, engine.device.collect
    engine.device.submit = lambda step: (log.append(f"submit {step.number}"), submit(step))[1]  # type: ignore
    engine.device.collect = lambda: (log.append("collect"), collect())[1]  # type: ignore
    engine.client.submit(request("a", prompt(5), max_tokens=4)).result()
    assert log[:5] == ["submit 1", "submit 2", "collect", "submit 3", "collect"]


def test_columns_say_the_same_as_single_events() -> None:
    engine = Engine()
    engine.client.submit(request("a", prompt(9), max_tokens=4))
    loop: EngineLoop = engine.loop
    reports = []
    while loop.busy:
        reports += loop.run_once()
    columns = [r for r in reports if isinstance(r, StepTokens)]
    assert len(columns) == 3 and [next(c.each()) for c in columns] == [c.one(0) for c in columns]
    events = [e for e in spelled_out(reports) if isinstance(e, TokensOut)]
    assert [e.generated_tokens for e in events] == [1, 2, 3, 4] and {e.prompt_tokens for e in events} == {9}
    assert events == engine.of(TokensOut)


def test_ctrl_c_while_driving_is_raised_between_turns_and_the_engine_goes_on() -> None:
    engine = Engine()
    collect = engine.device.collect

    def interrupted() -> object:
        signal.raise_signal(signal.SIGINT)
        return collect()

    handle = engine.client.submit(request("a", prompt(5), max_tokens=60))
    engine.device.collect = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    engine.device.collect = collect  # type: ignore[method-assign]
    handle.cancel()
    assert handle.result().finish == "abort"
    again = engine.client.submit(request("b", prompt(5), max_tokens=6))
    assert again.result().finish == "length" and again.tokens == expected_tokens(
        prompt(5), 6, groups=engine.cache.groups
    )
    engine.scheduler.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_middle_leaves_no_thread_and_no_hang() -> None:
    script = """
        import sys, threading
        from tests.host.support_engine import Engine, request
        from tradewind.simulate.clock import RealClock
        engine = Engine(clock=RealClock(), delay_s=0.01)
        try:
            with engine.client.start():
                handle = engine.client.submit(request("a", [1, 2, 3], max_tokens=200))
                for event in handle:
                    if event.generated_tokens == 2:
                        print("going", flush=True)
        except KeyboardInterrupt:
            alive = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
            print(handle.result().finish, alive, engine.device.closed, flush=True)
            sys.exit(130)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join([os.getcwd(), environment["PYTHONPATH"]])},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "going\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (out, err, child.returncode) == ("abort [] True\n", "", 130)
