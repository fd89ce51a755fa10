"""The asynchronous face: many calls at once on one engine, each ended alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import open_llm, prompts, write_checkpoint

from tradewind.contract.errors import EngineDeadError, RequestError
from tradewind.contract.request import SamplingParams
from tradewind.llm import AsyncLLM

DRAWN = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=5)
LONG = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True, seed=5)
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("full", tmp_path_factory.mktemp("full"))


def with_engine(folder: Path, work: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    """Runs `work` on a fresh engine and sees that no thread is left."""

    async def run() -> Any:
        async with open_llm(folder, asynchronous=True) as llm:
            return await asyncio.wait_for(work(llm), PATIENCE_S)

    before = set(threading.enumerate())
    found = asyncio.run(run())
    assert {thread.name for thread in set(threading.enumerate()) - before} == set()
    return found


async def until_idle(llm: AsyncLLM) -> None:
    """Waits until the engine has nothing open."""
    scheduler = llm._llm.engine.client._loop.scheduler
    end = time.monotonic() + 10
    while not scheduler.idle:
        assert time.monotonic() < end, "requests are still open"
        await asyncio.sleep(0.005)


def test_twenty_streams_at_once_equal_each_alone(folder: Path) -> None:
    asked = prompts(20, seed=4)

    async def read(llm: AsyncLLM, prompt: list[int]) -> tuple[tuple[int, ...], str]:
        deltas = [delta async for delta in llm.stream(prompt, DRAWN)]
        assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        return tuple(token for delta in deltas for token in delta.tokens), "".join(delta.text for delta in deltas)

    async def work(llm: AsyncLLM) -> Any:
        return await asyncio.gather(*(read(llm, prompt) for prompt in asked))

    together = with_engine(folder, work)
    with open_llm(folder) as llm:
        alone = [llm.generate(prompt, DRAWN)[0].completions[0] for prompt in asked]
    assert together == [(answer.tokens, answer.text) for answer in alone]


def test_the_whole_answer_and_samples(folder: Path) -> None:
    several = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=1, n=3, logprobs=1)

    async def work(llm: AsyncLLM) -> Any:
        chat = await llm.chat([{"role": "user", "content": "hi"}], DRAWN)
        deltas = [delta async for delta in llm.stream("abc", several)]
        return await llm.generate("abc", several), deltas, chat

    output, deltas, chat = with_engine(folder, work)
    with open_llm(folder) as llm:
        assert output.completions == llm.generate("abc", several)[0].completions
        assert chat.completions == llm.chat([{"role": "user", "content": "hi"}], DRAWN)[0].completions
    for completion in output.completions:
        assert "".join(delta.text for delta in deltas if delta.sample == completion.sample) == completion.text


def test_cancelling_a_task_ends_its_request_only(folder: Path) -> None:
    async def work(llm: AsyncLLM) -> Any:
        begun = asyncio.Event()

        async def read(*, tell: bool) -> int:
            count = 0
            async for delta in llm.stream("abc", LONG):
                count += len(delta.tokens)
                if tell and count > 3:
                    begun.set()
            return count

        doomed, other = asyncio.create_task(read(tell=True)), asyncio.create_task(read(tell=False))
        await begun.wait()
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert await other == 400
        await until_idle(llm)
        whole = asyncio.create_task(llm.generate("abc", LONG))
        await asyncio.sleep(0.02)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        await until_idle(llm)
        return await llm.generate("abc", DRAWN)

    with_engine(folder, work)


def test_leaving_a_loop_ends_the_request(folder: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        async with aclosing(llm.stream("abc", LONG)) as deltas:
            async for delta in deltas:
                if delta.tokens:
                    break
        await until_idle(llm)
        async for delta in llm.stream("abc", LONG):
            if delta.tokens:
                break
        await until_idle(llm)

    with_engine(folder, work)


def test_closing_while_streams_are_open(folder: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        async def read() -> Any:
            return [delta.finish async for delta in llm.stream("abc", LONG)][-1]

        readers = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0.05)
        await llm.close()
        assert set(await asyncio.gather(*readers)) <= {"abort", "length"}
        await llm.close()
        with pytest.raises(EngineDeadError, match="this LLM was closed"):
            await llm.generate("abc")

    with_engine(folder, work)


def test_stop_strings_and_bad_input(folder: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        whole = (await llm.generate("abc", DRAWN)).completions[0].text
        stop = whole[4:7]
        answer = (
            await llm.generate("abc", SamplingParams(temperature=1.0, max_tokens=16, seed=5, stop=(stop,)))
        ).completions[0]
        assert (answer.text, answer.stop) == (whole[: whole.find(stop)], stop)
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.stream("")
        with pytest.raises(RequestError, match="not NoneType"):
            await llm.generate(None)  # type: ignore[arg-type]
        await until_idle(llm)

    with_engine(folder, work)
