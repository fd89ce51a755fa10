"""A journal's traffic once more, against a server: the same times, lengths and common prefixes, with made-up text where it was redacted.

Knows: how an entry becomes a request, when it is sent, and what is noted of its answer. Refuses to know: journals' files (journal) and how
the result is shown (replay_report).

Made-up text is a function of the block's number, so that prompts agree exactly where they agreed. An answer is part of what a later prompt
may begin with (a conversation); what the replayed server answers is not what was recorded, so it takes the place of those blocks:

      recorded     turn 1   | h0 | h1 | h2 = end of prompt + answer | h3 = answer |
                   turn 2   | h0 | h1 | h2                          | h3          | h4 | ...
      replayed     turn 1   | made up from h0, h1, ... | the server's own answer: remembered as the text of h2 and h3
                   turn 2   | made up | made up | remembered        | remembered  | made up from h4 ...
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec
import numpy as np

from tradewind.contract.errors import UserError
from tradewind.observability.journal import Entry, Header, SequenceEntry

REMEMBERED = 1 << 16
"""So many blocks of answers are remembered."""
MAX_OPEN = 1024
"""So many requests are open at once; a replay that would need more is late, and says so."""
LATE_S = 0.05
LINE_BYTES = 1 << 22
"""A longer line of an answer is none."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One request to be sent."""

    entry: Entry
    at_s: float
    """Since the first one, at the replay's speed."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; times in seconds, from when it was sent."""

    id: str
    traffic_class: str
    at_s: float
    late_s: float
    """How much later than planned it was sent."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None: the server does not tell."""
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    error: str | None = None


def class_of(entry: Entry) -> str:
    """The traffic class that was recorded, or else what kind of request it was."""
    return entry.traffic_class or entry.kind


def plan(entries: Sequence[Entry], *, speed: float = 1.0) -> list[Planned]:
    """When each request is sent. Pure."""
    if not entries:
        return []
    first = entries[0].at
    return [Planned(entry=entry, at_s=(entry.at - first) / speed) for entry in entries]


# -- text ----------------------------------------------------------------------------------------------------------------


class MadeUpText:
    """Tokens for blocks that are known by number only. One writer."""

    def __init__(self, header: Header) -> None:
        self._size = header.block_tokens
        # What is below and above is, in most vocabularies, special tokens and single bytes.
        low = 32 if header.vocab_size < 2048 else 1024
        self._low, self._high = (
            low,
            max(low + 1, min(header.vocab_size, 127 if low == 32 else header.vocab_size - 1024)),
        )
        self._answers: OrderedDict[int, list[int]] = OrderedDict()

    def prompt(self, entry: Entry, place: int) -> list[int]:
        """The tokens of a sequence's prompt: as recorded where that is raw, else made up."""
        sequence = entry.sequences[place]
        if sequence.prompt is not None:
            return list(sequence.prompt)
        out: list[int] = []
        for block in sequence.blocks[: sequence.prompt_tokens // self._size]:
            out += self._answers.get(block) or self._draw(block, self._size)
        rest = sequence.prompt_tokens - len(out)
        if rest:  # shared with nobody
            seed = int.from_bytes(f"{entry.id}/{place}".encode(), "little")
            out += self._draw(seed, rest)
        return out

    def _draw(self, seed: int, count: int) -> list[int]:
        drawn: list[int] = np.random.default_rng(seed).integers(self._low, self._high, size=count).tolist()
        return drawn

    def learn(self, sequence: SequenceEntry, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Takes the server's answer as the text of the blocks that the recorded one had; of an answer of another length what is whole."""
        if sequence.prompt is not None:
            return
        whole = [*prompt, *answer]
        first = len(prompt) // self._size
        for place, block in enumerate(sequence.blocks[first : len(whole) // self._size], start=first):
            self._answers[block] = whole[place * self._size : (place + 1) * self._size]
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)


# -- the wire ------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """An answer that is none: the status and what the server says."""

    def __init__(self, status: int, says: str, param: str = "") -> None:
        super().__init__(f"status {status}: {says}")
        self.status, self.param = status, param


class _Connection:
    """One request over HTTP/1.1 and its answer, read line by line as it comes."""

    def __init__(self, url: SplitResult, *, key: str | None) -> None:
        self._url, self._key = url, key

    async def lines(self, path: str, body: bytes, take: Callable[[bytes], None]) -> None:
        """Sends a POST; `take` is told each line of the body. Raises Refused, OSError or EOFError."""
        url = self._url
        assert url.hostname is not None
        secure = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure, limit=LINE_BYTES)
        try:
            key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
            head = (
                f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n{key}"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            status, chunked = await self._head(reader)
            data = bytearray()
            async for part in _body(reader, chunked=chunked):
                data += part
                if status == 200:
                    *whole, rest = data.split(b"\n")
                    for line in whole:
                        take(bytes(line))
                    data = bytearray(rest)
            if status != 200:
                raise _refusal(status, bytes(data))
            if data:
                take(bytes(data))
        finally:
            writer.close()

    @staticmethod
    async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
        first = (await reader.readline()).split()
        if len(first) < 2 or not first[0].startswith(b"HTTP/") or not first[1].isdigit():
            raise EOFError("the answer is no HTTP")
        chunked = False
        while (line := await reader.readline()).strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"transfer-encoding":
                chunked = value.strip().lower() == b"chunked"
        return int(first[1]), chunked


async def _body(reader: asyncio.StreamReader, *, chunked: bool) -> Any:
    if not chunked:
        while part := await reader.read(1 << 16):
            yield part
        return
    while True:
        line = (await reader.readline()).split(b";")[0].strip()
        if not line:
            raise EOFError("the answer ended in the middle")
        size = int(line, 16)
        if size == 0:
            return
        yield await reader.readexactly(size)
        await reader.readline()


def _refusal(status: int, body: bytes) -> Refused:
    try:
        error = msgspec.json.decode(body)["error"]
        return Refused(status, str(error["message"]), str(error.get("param") or ""))
    except (msgspec.DecodeError, KeyError, TypeError):
        return Refused(status, "no reason is given")


# -- replaying -----------------------------------------------------------------------------------------------------------


class Replayer:
    """Sends a plan's requests to one server and notes what comes. Lives within one asyncio loop."""

    def __init__(
        self, header: Header, url: str, *, model: str | None = None, key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        """Raises UserError for what is no address. `model` is what the server calls its model; None lets it choose."""
        self._url = checked_url(url)
        self._shown = url
        self._text = MadeUpText(header)
        self._model, self._timeout_s = model, timeout_s
        self._connection = _Connection(self._url, key=key)
        self._ours = True
        """The server takes what only a Tradewind server knows."""
        self._open = asyncio.Semaphore(MAX_OPEN)
        self._began_s = 0.0

    async def run(self, planned: Sequence[Planned], *, told: Callable[[int], None] | None = None) -> list[Outcome]:
        """Sends all, each at its time, and waits for all; outcomes in the same order. Raises UserError when nobody answers at all.

        `told` is called with the number of requests that have ended.
        """
        await self._probe()
        self._began_s = time.monotonic()
        done = 0
        tasks: list[asyncio.Task[Outcome]] = []

        def count(task: asyncio.Task[Outcome]) -> None:
            nonlocal done
            done += 1
            if told is not None:
                told(done)

        for one in planned:
            wait_s = self._began_s + one.at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await self._open.acquire()
            task = asyncio.create_task(self._send(one))
            task.add_done_callback(count)
            tasks.append(task)
        outcomes = list(await asyncio.gather(*tasks))
        if outcomes and all(outcome.error is not None for outcome in outcomes):
            self._nobody(outcomes[0].error or "")
        return outcomes

    async def _probe(self) -> None:
        """Nobody shall wait for hours to be told that there is no server."""
        url = self._url
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=10.0
            )
            writer.close()
        except OSError as error:  # a time-out is one, too
            why = error.strerror or str(error) or "no connection within 10 s"
            raise UserError(f"no server answers at {self._shown}: {why}") from None

    def _nobody(self, error: str) -> None:
        raise UserError(f"{self._shown} answers no request of the journal: {error}")

    async def _send(self, one: Planned) -> Outcome:
        try:
            late_s = max(0.0, time.monotonic() - self._began_s - one.at_s)
            return await self._outcome(one, late_s)
        finally:
            self._open.release()

    async def _outcome(self, one: Planned, late_s: float) -> Outcome:
        entry = one.entry
        firsts = list(range(0, len(entry.sequences), max(1, entry.n)))
        prompts = [self._text.prompt(entry, place) for place in firsts]
        heard = _Heard(len(entry.sequences))
        began_s = time.monotonic()
        error: str | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(entry, prompts, heard)
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except ConnectionRefusedError:
            error = "nobody listens there"
        except (Refused, OSError, EOFError) as raised:
            error = str(raised) or type(raised).__name__
        except (ValueError, AttributeError, KeyError, TypeError) as raised:  # whatever another server may say
            error = f"the answer cannot be read: {raised}"
        end_s = time.monotonic()
        if error is None:
            error = heard.error or (
                None if heard.done or entry.kind == "embedding" else "the answer ended in the middle"
            )
        for place, tokens in enumerate(heard.tokens):
            if tokens and place < len(entry.sequences):
                self._text.learn(entry.sequences[place], prompts[place // max(1, entry.n)], tokens)
        written = heard.written if heard.written is not None else sum(map(len, heard.tokens))
        first_s = None if heard.first_s is None else heard.first_s - began_s
        tpot_s = None
        longest = max(map(len, heard.tokens), default=0) or written // max(1, len(entry.sequences))
        if heard.first_s is not None and heard.last_s is not None and longest > 1:
            tpot_s = (heard.last_s - heard.first_s) / (longest - 1)
        return Outcome(
            id=entry.id,
            traffic_class=class_of(entry),
            at_s=began_s - self._began_s,
            late_s=late_s,
            prompt_tokens=sum(map(len, prompts)),
            output_tokens=written,
            cached_tokens=heard.cached,
            queue_s=heard.queue_s,
            ttft_s=first_s,
            tpot_s=tpot_s,
            e2e_s=end_s - began_s,
            error=error,
        )

    async def _ask(self, entry: Entry, prompts: list[list[int]], heard: _Heard) -> None:
        if entry.kind == "embedding":
            body: dict[str, Any] = {"input": prompts if len(prompts) > 1 else prompts[0]}
            if self._model is not None:
                body["model"] = self._model
            lines: list[bytes] = []
            await self._connection.lines("/v1/embeddings", msgspec.json.encode(body), lines.append)
            heard.whole(b"\n".join(lines))
            return
        ours = self._ours  # others may find out meanwhile
        try:
            await self._connection.lines("/v1/completions", self._body(entry, prompts), heard.line)
        except Refused as refused:
            if refused.status not in (400, 422) or not ours:
                raise
            self._ours = False  # another server, which refuses what it does not know
            await self._connection.lines("/v1/completions", self._body(entry, prompts), heard.line)

    def _body(self, entry: Entry, prompts: list[list[int]]) -> bytes:
        longest = max(1, *(sequence.output_tokens for sequence in entry.sequences), 1)
        body: dict[str, Any] = {
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "max_tokens": longest,
            "n": entry.n,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0 if entry.sampling == "greedy" else 1.0,
        }
        if self._model is not None:
            body["model"] = self._model
        if entry.params is not None:
            body["temperature"] = entry.params.temperature
            body["top_p"] = entry.params.top_p
        if self._ours:  # answers of the recorded length
            body |= {"min_tokens": longest, "ignore_eos": True, "timing": True, "return_token_ids": True}
            if entry.namespace:
                body["cache_salt"] = entry.namespace
        return msgspec.json.encode(body)


class _Heard:
    """What an answer says, line by line."""

    def __init__(self, sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(sequences)]
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.cached: int | None = None
        self.written: int | None = None
        self.queue_s: float | None = None
        self.error: str | None = None
        self.done = False

    def line(self, line: bytes) -> None:
        """One line of a stream of events."""
        if not line.startswith(b"data:"):
            return
        payload = line[5:].strip()
        if payload == b"[DONE]" or not payload:
            self.done = self.done or bool(payload)
            return
        event = msgspec.json.decode(payload)
        if not isinstance(event, dict):
            raise ValueError("an event of the answer is no object")
        if event.get("error"):
            self.error = (
                str(event["error"].get("message", "an error")) if isinstance(event["error"], dict) else "an error"
            )
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids")
            if choice.get("text") or ids:
                self.last_s = time.monotonic()
                if self.first_s is None:
                    self.first_s = self.last_s
            if ids and 0 <= choice.get("index", 0) < len(self.tokens):
                self.tokens[choice.get("index", 0)] += ids
        self._ends(event)

    def whole(self, body: bytes) -> None:
        """An answer that is not streamed."""
        answer = msgspec.json.decode(body)
        if not isinstance(answer, dict):
            raise ValueError("the answer is no object")
        self._ends(answer)

    def _ends(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if usage:
            self.written = usage.get("completion_tokens", 0)
            details = usage.get("prompt_tokens_details") or {}
            if "cached_tokens" in details:
                self.cached = details["cached_tokens"]
        timing = event.get("timing")
        if timing and timing.get("queue_ms") is not None:
            self.queue_s = timing["queue_ms"] / 1e3


def checked_url(url: str) -> SplitResult:
    """The parts of a server's address. Raises UserError."""
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UserError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
    return parts
