"""The degrade ladder in a running server: whom it helps, and that what was given up is taken back."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serving.process_support import server
from tradewind.bench.serve_client import Client, Heard

KEYS: dict[str, Any] = {
    "default": {"answer": "abcdefgh ", "repeat": True},
    "step_ms": 10,
    "prompt_token_ms": 1.0,
    "max_tokens_per_step": 1024,
    "slots": 8,
    "policy": "priority",
}
HIGH, LOW = -1, 5


async def flood(port: int) -> tuple[list[Heard], list[Heard]]:
    """28 prompts of 250 tokens of the low class at once, which are 7 s of work, and a short one of the high class each 0.25 s."""
    client = Client(f"http://127.0.0.1:{port}", api="completions", timeout_s=60)
    client.model = "scripted"

    async def one(priority: int, prompt: str, tokens: int) -> Heard:
        body = {**json.loads(client.body(prompt, max_tokens=tokens, seed=0)), "priority": priority}
        return await client.ask(json.dumps(body).encode())

    low = [asyncio.create_task(one(LOW, f"{number:03} " + "x" * 246, 12)) for number in range(28)]
    high = []
    for number in range(16):
        await asyncio.sleep(0.25)
        high.append(asyncio.create_task(one(HIGH, f"{number:03} high", 4)))
    out = [await task for task in high], [await task for task in low]
    await client.close()
    return out


def waits(heard: list[Heard]) -> list[float]:
    return [one.chunks[0] - (one.sent_s or 0.0) for one in heard]


@pytest.mark.timeout(300)
def test_the_high_class_is_helped_and_everything_is_given_back(tmp_path: Path) -> None:
    """A neighbour that takes the machine for seconds makes both runs alike, so it is tried up to three times."""
    tried = []
    for _ in range(3):
        without, helped = with_and_without(tmp_path)
        tried.append((helped, without))
        if helped < without:
            return
    raise AssertionError(f"late answers of the high class, helped and not: {tried}")


def with_and_without(folder: Path) -> tuple[int, int]:
    """How many answers of the high class are late without the ladder, and with it; that all is given back is asserted here."""
    with server(folder, **KEYS) as made:
        alone, _ = asyncio.run(flood(made.port))
    with server(folder, **KEYS, degrade={"ttft_s": 0.4, "down_s": 1.0}) as made:
        high, low = asyncio.run(flood(made.port))
        assert made.said("the engine gives up drafts") and made.said("the engine gives up chunks"), made.log
        assert all(one.error is None for one in high)
        for one in low:
            assert one.error is None or ("too busy" in one.error and not one.chunks), one.error
        began_s = time.monotonic()
        while not made.said("the engine takes back drafts"):  # an idle engine decides nothing, so a word now and then
            assert time.monotonic() - began_s < 40, made.log
            assert made.complete(max_tokens=2)[0] == 200
            time.sleep(0.2)
        assert made.said("overload, rung 0 of 5")
    without, helped = (sum(wait > 0.4 for wait in waits(heard)[4:]) for heard in (alone, high))
    return without, helped
