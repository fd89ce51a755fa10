"""Sends a load to a server, open or closed loop, and notes what came of each request.

Knows: who is sent when, and the client's own lateness. Refuses to know: text and arrival processes (serve_load), figures (serve_report).

      open loop     requests come when they come, whether the server keeps up or not: what users do; queues show
      closed loop   N clients, each sends its next request when its last one is answered: how much the server can do at that depth
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import msgspec

from tradewind.bench.serve_client import EXTRAS, Client, Heard
from tradewind.bench.serve_load import Ask, Text
from tradewind.contract.errors import UserError

MAX_OPEN = 4096
"""So many requests are open at once; a load that would need more makes the client wait, and the report says so."""
LAG_EVERY_S = 0.01
PROBE_WORDS = (4, 36)
PROBE_TOKENS = 4


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it went; seconds, `due_s` and `sent_s` since the load's beginning."""

    number: int
    traffic_class: str
    due_s: float
    sent_s: float
    wait_s: float
    """From due to sent: the client's own doing (its turn, a connection), never the server's."""
    ttft_s: float | None
    """From sent to the first piece of the answer: the server's, and the network's."""
    tpot_s: float | None
    """Between first and last piece, for each token after the first."""
    e2e_s: float
    """From sent to the end of the answer."""
    gaps_s: tuple[float, ...]
    """Between one piece and the next."""
    prompt_tokens: int | None
    output_tokens: int
    """As the server counts, or else the pieces."""
    counted: bool
    """The server counted them."""
    cached_tokens: int | None
    server_queue_s: float | None
    """What the server says that it waited for its start; only Tradewind does."""
    error: str | None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A whole load and how it went."""

    samples: tuple[Sample, ...]
    offered: int
    """Requests of the load; those of a closed loop whose time was over were never sent."""
    lag_p99_s: float
    """How late the client's own loop was: above a few milliseconds it, and not the server, is what is measured."""
    extras: tuple[str, ...]
    """What was asked beyond the standard, and taken."""
    tokens_per_word: float


class Progress(msgspec.Struct, kw_only=True):
    """What is told while it runs; written by the measurement only."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0


async def prepare(client: Client, text: Text, *, model: str | None) -> None:
    """Finds out the model, what the server takes and how long its tokens are: two short requests. Raises UserError."""
    await client.check(model)
    seen: list[tuple[int, int]] = []
    for place, words in enumerate(PROBE_WORDS):
        try:
            heard = await client.settle(text.words(words, stream=(0, place)), max_tokens=PROBE_TOKENS)
        except UserError:
            if not place:
                raise
            break  # a context so short that it cannot be measured with the longer one
        if not heard.prompt_tokens:
            return
        seen.append((words, heard.prompt_tokens))
    if len(seen) == 2:
        text.fit(seen[0], seen[1])


async def run_open(
    client: Client, asks: Sequence[Ask], text: Text, *, progress: Progress | None = None, max_open: int = MAX_OPEN
) -> Measured:
    """Sends each request at its time and waits for all."""
    return await _Run(client, text, progress).open(asks, max_open=max_open)


async def run_closed(
    client: Client,
    asks: Sequence[Ask],
    text: Text,
    *,
    clients: int,
    think_s: float = 0.0,
    duration_s: float | None = None,
    progress: Progress | None = None,
) -> Measured:
    """`clients` of them take the requests one after the other; nobody begins one after `duration_s`. Waits for all that were begun."""
    return await _Run(client, text, progress).closed(asks, clients=clients, think_s=think_s, duration_s=duration_s)


class _Run:
    """One load."""

    def __init__(self, client: Client, text: Text, progress: Progress | None) -> None:
        self._client, self._text = client, text
        self._progress = progress or Progress()
        self._began_s = 0.0
        self._samples: list[Sample] = []

    async def open(self, asks: Sequence[Ask], *, max_open: int) -> Measured:
        gate = asyncio.Semaphore(max_open)
        tasks: list[asyncio.Task[None]] = []

        async def one(ask: Ask, due_s: float) -> None:
            try:
                await self._one(ask, due_s)
            finally:
                gate.release()

        async def all_of_them() -> None:
            for ask in asks:
                due_s = self._began_s + ask.at_s
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                await gate.acquire()
                tasks.append(asyncio.create_task(one(ask, due_s)))
            await asyncio.gather(*tasks)

        return await self._measured(all_of_them, offered=len(asks))

    async def closed(self, asks: Sequence[Ask], *, clients: int, think_s: float, duration_s: float | None) -> Measured:
        left = iter(asks)

        async def one_client() -> None:
            while (ask := next(left, None)) is not None:
                due_s = time.perf_counter()
                if duration_s is not None and due_s - self._began_s >= duration_s:
                    return
                await self._one(ask, due_s)
                if think_s:
                    await asyncio.sleep(think_s)

        async def all_of_them() -> None:
            await asyncio.gather(*(one_client() for _ in range(clients)))

        return await self._measured(all_of_them, offered=len(asks))

    async def _measured(self, run: Callable[[], Awaitable[None]], *, offered: int) -> Measured:
        lags: list[float] = []
        watch = asyncio.create_task(_watch(lags))
        self._began_s = time.perf_counter()
        try:
            await run()
        finally:
            watch.cancel()
        samples = tuple(sorted(self._samples, key=lambda sample: sample.due_s))
        if samples and all(sample.error is not None for sample in samples):
            raise UserError(f"{self._client.shown} answered none of {len(samples)} requests: {samples[0].error}")
        lags.sort()
        return Measured(
            samples=samples,
            offered=offered,
            lag_p99_s=lags[int(0.99 * (len(lags) - 1))] if lags else 0.0,
            extras=tuple(sorted(EXTRAS[self._client.extras])),
            tokens_per_word=self._text.tokens_per_word,
        )

    async def _one(self, ask: Ask, due_s: float) -> None:
        progress = self._progress
        body = self._client.body(self._text.prompt(ask), max_tokens=ask.output_tokens, seed=ask.number)
        progress.sent += 1
        heard = await self._client.ask(body)
        sample = sample_of(ask, heard, due_s=due_s, began_s=self._began_s)
        progress.ended += 1
        progress.failed += sample.error is not None
        progress.tokens += sample.output_tokens
        self._samples.append(sample)


def sample_of(ask: Ask, heard: Heard, *, due_s: float, began_s: float) -> Sample:
    """What is kept of a request. Pure."""
    sent_s = heard.sent_s if heard.sent_s is not None else heard.end_s
    chunks = heard.chunks
    tokens = heard.tokens if heard.tokens is not None else len(chunks)
    return Sample(
        number=ask.number,
        traffic_class=ask.traffic_class,
        due_s=due_s - began_s,
        sent_s=sent_s - began_s,
        wait_s=max(0.0, sent_s - due_s),
        ttft_s=chunks[0] - sent_s if chunks else None,
        tpot_s=(chunks[-1] - chunks[0]) / (tokens - 1) if len(chunks) > 1 and tokens > 1 else None,
        e2e_s=heard.end_s - sent_s,
        gaps_s=tuple(later - sooner for sooner, later in pairwise(chunks)),
        prompt_tokens=heard.prompt_tokens,
        output_tokens=tokens if isinstance(tokens, int) else len(chunks),
        counted=heard.tokens is not None,
        cached_tokens=heard.cached,
        server_queue_s=heard.server_queue_s,
        error=heard.error,
    )


async def _watch(lags: list[float]) -> None:
    """Notes how much later than asked for the loop comes back."""
    while True:
        asked_s = time.perf_counter()
        await asyncio.sleep(LAG_EVERY_S)
        lags.append(time.perf_counter() - asked_s - LAG_EVERY_S)
