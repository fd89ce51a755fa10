"""One streamed request to an OpenAI-compatible server, with the times of everything that came.

Knows: HTTP/1.1 with kept connections, events of a stream, both APIs' shapes. Refuses to know: when requests are sent, and statistics.

      due | ... waits for its turn, a free connection, the connect ... | sent | ......... | first token | .... | last token | end
          <-------------------- the client's wait -------------------->       <-- TTFT -->
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any, Literal
from urllib.parse import SplitResult

import msgspec

from tradewind.contract.errors import UserError
from tradewind.observability.replay import checked_url

Api = Literal["chat", "completions"]
PATHS: dict[str, str] = {"chat": "/chat/completions", "completions": "/completions"}
LINE_BYTES = 1 << 22
CONNECT_S = 10.0
OURS = ("accept", "authorization", "connection", "content-length", "content-type", "host", "transfer-encoding")
"""Headers that no user may set: we do."""

EXTRAS: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "stream_options": {"include_usage": True}, "timing": True},
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
"""What is asked besides the standard, most first; a server that refuses one is asked the next. `min_tokens` goes with ignore_eos."""


class Refused(Exception):
    """An answer that is none: the status and what the server says."""

    def __init__(self, status: int, says: str) -> None:
        super().__init__(f"status {status}: {says}")
        self.status, self.says = status, says


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: Any = None
    delta: _Delta | None = None
    finish_reason: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    timing: Any = None
    error: Any = None


class Heard:
    """What one answer said, and when, by `time.perf_counter`. One writer: the request's task."""

    __slots__ = (
        "cached",
        "chunks",
        "done",
        "end_s",
        "error",
        "finish",
        "prompt_tokens",
        "sent_s",
        "server_queue_s",
        "tokens",
    )

    def __init__(self) -> None:
        self.sent_s: float | None = None
        """The whole request was handed to the socket."""
        self.chunks: array[float] = array("d")
        """When each piece with something of the answer in it was read."""
        self.end_s = 0.0
        self.prompt_tokens: int | None = None
        self.tokens: int | None = None
        self.cached: int | None = None
        self.server_queue_s: float | None = None
        self.finish: str | None = None
        self.error: str | None = None
        self.done = False

    def line(self, line: bytes) -> None:
        """Takes one line of the stream. Raises msgspec.DecodeError for what no server should say."""
        if not line.startswith(b"data:"):
            return
        payload = line[5:].strip()
        if not payload or payload == b"[DONE]":
            self.done = self.done or bool(payload)
            return
        now = time.perf_counter()
        event = _DECODER.decode(payload)
        for choice in event.choices or ():
            delta = choice.delta
            if choice.text or (
                delta is not None and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
            ):
                self.chunks.append(now)
            if choice.finish_reason:
                self.finish = str(choice.finish_reason)
        if event.usage is not None:
            self._usage(event.usage)
        if isinstance(event.timing, dict) and isinstance(event.timing.get("queue_ms"), int | float):
            self.server_queue_s = event.timing["queue_ms"] / 1e3
        if event.error is not None:
            says = event.error.get("message") if isinstance(event.error, dict) else event.error
            self.error = str(says or "an error without a reason")

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.tokens = usage.get("completion_tokens", self.tokens)
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached)


_DECODER = msgspec.json.Decoder(_Event)


class _Kept:
    """A connection that may be used again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.used = False


def parse_headers(texts: Iterable[str]) -> list[tuple[str, str]]:
    """("name", "value") of each "name: value". Raises UserError."""
    out: list[tuple[str, str]] = []
    for text in texts:
        name, colon, value = text.partition(":")
        name, value = name.strip(), value.strip()
        if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            raise UserError(f"--header {text!r} is no header; write it as in --header 'x-traffic-class: chat'")
        if not all(" " <= letter <= "~" for letter in value):
            raise UserError(f"--header {name}: the value has a character that no header can carry; use printable ASCII")
        if name.lower() in OURS:
            raise UserError(f"--header {name}: this one is set by the client itself (a key is given with --api-key)")
        out.append((name, value))
    return out


class Client:
    """Requests to one server. Lives within one asyncio loop; `close` ends its kept connections."""

    def __init__(
        self, url: str, *, api: Api, key: str | None = None, headers: Iterable[str] = (), timeout_s: float = 600.0
    ) -> None:
        """`url` with or without /v1; `headers` as "name: value". Raises UserError for what is no address, or what no header can carry."""
        self.shown = url
        self._url: SplitResult = checked_url(url)
        base = self._url.path.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._api: Api = api
        self._timeout_s = timeout_s
        if key is not None and not all("!" <= letter <= "~" for letter in key):
            raise UserError("--api-key has a character that no header can carry; use printable ASCII without spaces")
        self._key = key
        self._headers = parse_headers(headers)
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        self._idle: list[_Kept] = []
        self.model: str | None = None
        """What the server calls its model; sent with each request."""
        self.extras = 0
        """Which of EXTRAS the server takes."""

    # -- requests

    def body(self, prompt: str, *, max_tokens: int, seed: int) -> bytes:
        """A request as JSON, greedy."""
        record: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        if self._api == "chat":
            record["messages"] = [{"role": "user", "content": prompt}]
        else:
            record["prompt"] = prompt
        extras = EXTRAS[self.extras]
        if "ignore_eos" in extras:
            record["min_tokens"] = max_tokens
        return msgspec.json.encode(record | extras)

    async def ask(self, body: bytes) -> Heard:
        """Sends a request and reads its answer to the end. Never raises for what a server does: `error` says it."""
        heard = Heard()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._post(f"{self._base}{PATHS[self._api]}", body, heard)
            if heard.error is None and not heard.done and heard.finish is None:
                heard.error = "the answer ended in the middle"
            elif heard.error is None and not heard.chunks and not heard.tokens:
                heard.error = "the answer is empty"
        except TimeoutError:
            heard.error = f"no answer within {self._timeout_s:g} s" if heard.sent_s else "no connection in time"
        except Refused as refused:
            heard.error = str(refused)
        except (OSError, EOFError) as error:
            heard.error = _why(error)
        except (msgspec.MsgspecError, ValueError, TypeError, AttributeError) as error:
            heard.error = f"the answer cannot be read: {error}"
        heard.end_s = time.perf_counter()
        return heard

    async def check(self, model: str | None) -> None:
        """Chooses the model. Raises UserError, in one sentence, when there is no server, no permission or no such model."""
        try:
            async with asyncio.timeout(CONNECT_S + 20):
                status, data = await self._get(f"{self._base}/models")
        except TimeoutError:
            raise UserError(f"no server answers at {self.shown}: nothing came within {CONNECT_S + 20:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"no server answers at {self.shown}: {_why(error)}") from None
        if status in (401, 403):
            raise UserError(f"{self.shown} wants another key (status {status}): give it with --api-key")
        names = _names(data) if status == 200 else []
        if model is not None:
            if names and model not in names:
                raise UserError(f"{self.shown} has no model {model!r}; it has {_some(names)}: give one with --model")
            self.model = model
        elif names:
            self.model = names[0]
        else:
            raise UserError(
                f"{self.shown} does not say which models it has (GET {self._base}/models: status {status}): is this an OpenAI-compatible"
                " server? If it is, name the model with --model"
            )

    async def settle(self, prompt: str, *, max_tokens: int) -> Heard:
        """Sends a request to find out what the server takes; its answer. Raises UserError where it takes none."""
        while True:
            heard = await self.ask(self.body(prompt, max_tokens=max_tokens, seed=0))
            if heard.error is None:
                return heard
            if heard.error.startswith(("status 400", "status 422")) and self.extras + 1 < len(EXTRAS):
                self.extras += 1
                continue
            raise UserError(f"{self.shown} does not answer a request for the model {self.model!r}: {heard.error}")

    async def close(self) -> None:
        """Ends the kept connections."""
        for kept in self._idle:
            kept.writer.close()
        self._idle.clear()
        await asyncio.sleep(0)

    # -- the wire

    async def _connection(self, *, fresh: bool) -> _Kept:
        while self._idle and not fresh:
            kept = self._idle.pop()
            if not kept.reader.at_eof() and not kept.writer.is_closing():
                kept.used = True
                return kept
            kept.writer.close()
        url = self._url
        assert url.hostname is not None
        port = url.port or (443 if self._tls else 80)
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(url.hostname, port, ssl=self._tls, limit=LINE_BYTES), CONNECT_S
            )
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_S:g} s") from None
        return _Kept(reader, writer)

    def _head(self, method: str, path: str, length: int | None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._url.netloc.rpartition('@')[2]}", "Accept: */*"]
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        lines += [f"{name}: {value}" for name, value in self._headers]
        if length is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _get(self, path: str) -> tuple[int, bytes]:
        data = bytearray()
        status = await self._exchange(self._head("GET", path, None), data.extend, Heard())
        return status, bytes(data)

    async def _post(self, path: str, body: bytes, heard: Heard) -> None:
        rest = bytearray()

        def take(part: bytes) -> None:
            nonlocal rest
            rest += part
            *lines, rest = rest.split(b"\n")
            for line in lines:
                heard.line(bytes(line))

        refusal = bytearray()
        status = await self._exchange(
            self._head("POST", path, len(body)) + body, take, heard, on_refusal=refusal.extend
        )
        if status != 200:
            raise Refused(status, _says(bytes(refusal)))
        if rest.strip().startswith(b"{"):
            raise ValueError("it is one JSON object and no stream")
        heard.line(bytes(rest))

    async def _exchange(
        self,
        request: bytes,
        take: Callable[[bytes], None],
        heard: Heard,
        *,
        on_refusal: Callable[[bytes], None] | None = None,
    ) -> int:
        """Sends, reads all, keeps the connection if it can be kept; a kept one that turns out to be closed is replaced once."""
        for fresh in (False, True):
            kept = await self._connection(fresh=fresh)
            whole = False
            try:
                kept.writer.write(request)
                await kept.writer.drain()
                heard.sent_s = time.perf_counter()
                try:
                    first = await kept.reader.readline()
                except ConnectionError:
                    first = b""
                if not first and kept.used and not fresh:
                    continue
                status, chunked, length, keep = await _headers(first, kept.reader)
                into = take if status == 200 or on_refusal is None else on_refusal
                await _read_body(kept.reader, into, chunked=chunked, length=length)
                whole = keep and (chunked or length is not None)
                return status
            finally:
                if whole:
                    self._idle.append(kept)
                else:
                    kept.writer.close()
        raise ConnectionError("the server closes every connection")


async def _headers(first: bytes, reader: asyncio.StreamReader) -> tuple[int, bool, int | None, bool]:
    """(status, chunked, length, whether the connection is kept)."""
    words = first.split()
    if not first:
        raise EOFError("the server closed the connection without an answer")
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise EOFError("the answer is no HTTP")
    chunked, length, keep = False, None, words[0] == b"HTTP/1.1"
    while (line := await reader.readline()).strip():
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip().lower()
        if name == b"transfer-encoding":
            chunked = b"chunked" in value
        elif name == b"content-length":
            length = int(value)
        elif name == b"connection":
            keep = value != b"close"
    return int(words[1]), chunked, length, keep


async def _read_body(
    reader: asyncio.StreamReader, take: Callable[[bytes], None], *, chunked: bool, length: int | None
) -> None:
    if not chunked:
        left = length
        while left is None or left > 0:
            part = await reader.read(1 << 16 if left is None else min(left, 1 << 16))
            if not part:
                if left:
                    raise EOFError("the answer ended in the middle")
                return
            take(part)
            left = None if left is None else left - len(part)
        return
    while True:
        line = (await reader.readline()).split(b";")[0].strip()
        if not line:
            raise EOFError("the answer ended in the middle")
        size = int(line, 16)
        if size:
            take(await reader.readexactly(size))
        await reader.readline()
        if not size:
            return


def _says(body: bytes) -> str:
    """The reason in an error's body, of whatever shape, in one line."""
    try:
        record = msgspec.json.decode(body)
        error = record.get("error", record) if isinstance(record, dict) else record
        says = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    except msgspec.DecodeError:
        says = body.decode("utf-8", "replace")
    return " ".join(str(says or "no reason is given").split())[:300]


def _names(data: bytes) -> list[str]:
    try:
        record = msgspec.json.decode(data)
        return [str(model["id"]) for model in record["data"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _why(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, asyncio.IncompleteReadError):
        return "the answer ended in the middle"
    strerror = getattr(error, "strerror", None)
    return " ".join(str(strerror or error or type(error).__name__).split())
