"""Server-sent events: bytes out, one write per turn, the end always marked.

Knows: the framing and the headers. Refuses to know: what the events say.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic

import msgspec
from starlette.types import Scope, Send

from tradewind.serving.http.edge import caller_of
from tradewind.serving.http.errors import ApiError

COMMENT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"
TURNS = 16
"""So many of a stream's last slow writes are remembered, for its receipt."""
SLOW_WRITE_S = 0.0005
"""A write that takes longer has waited for its reader."""
json_bytes = msgspec.json.Encoder().encode


class EventStream:
    """One stream. Headers go out with the first write, so that what fails before it can still have a status of its own."""

    def __init__(self, scope: Scope, send: Send, *, headers: Mapping[str, str] | None = None) -> None:
        self._scope, self._send = scope, send
        self._headers = headers or {}
        self.started = False
        self._beat: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._beat_s = self._sent_s = 0.0
        self.spell_error: Callable[[ApiError], bytes] = error_event
        """The last bytes of a stream that could not be finished."""
        self.taken_s = 0.0
        """When the first or the last part of the answer was taken from the engine; set by whoever takes it."""
        self.first_turn: tuple[float, float, float] | None = None
        """(taken, spoken, written) of the first write, the comments of `keep_alive` left out."""
        self.turns: deque[tuple[float, float, float]] = deque(maxlen=TURNS)
        """The same of slow writes, and of the last one."""

    def keep_alive(self, seconds: float) -> None:
        """Sends a comment whenever so long nothing was sent, so that proxies keep a stream that waits in the queue. Until `end`."""
        self._beat_s = seconds
        self._beat = asyncio.get_running_loop().call_later(seconds, self._on_beat)

    def _on_beat(self) -> None:
        loop = asyncio.get_running_loop()
        quiet_s = loop.time() - self._sent_s
        if quiet_s >= self._beat_s * 0.99:
            self._beating = loop.create_task(self._put(COMMENT))
            quiet_s = 0.0
        self._beat = loop.call_later(self._beat_s - quiet_s, self._on_beat)

    def close(self) -> None:
        """Ends the keep-alive; safe to call twice."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    async def write(self, data: bytes) -> None:
        """Sends some whole events."""
        spoken_s = monotonic()
        if self._beat is not None:
            self._sent_s = asyncio.get_running_loop().time()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        written_s = monotonic()
        if written_s - spoken_s > SLOW_WRITE_S:
            self.turns.append((self.taken_s, spoken_s, written_s))
        if self.first_turn is None:
            self.first_turn = (self.taken_s, spoken_s, written_s)

    async def _put(self, data: bytes) -> None:
        """The same for what is no part of the answer."""
        if self._beat is not None:
            self._sent_s = asyncio.get_running_loop().time()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = DONE) -> None:
        """Sends the last events and ends the body."""
        self.close()
        spoken_s = monotonic()
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data})
        self.turns.append((self.taken_s, spoken_s, monotonic()))

    async def _start(self) -> None:
        self.started = True
        headers = [
            *caller_of(self._scope).headers,
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.lower().encode(), value.encode("latin-1", "replace")) for name, value in self._headers.items()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})


def data_event(payload: bytes) -> bytes:
    """One event without a name."""
    return b"data: " + payload + b"\n\n"


def named_event(name: str, payload: bytes) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """A refusal inside a stream, which ends with it."""
    return data_event(error.body()) + DONE
