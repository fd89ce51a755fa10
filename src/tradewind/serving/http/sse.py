"""Server-sent events: bytes out, one write per turn, the end always marked.

Knows: the framing and the headers. Refuses to know: what the events say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from starlette.types import Scope, Send

from tradewind.serving.http.edge import caller_of
from tradewind.serving.http.errors import ApiError

DONE = b"data: [DONE]\n\n"
json_bytes = msgspec.json.Encoder().encode


class EventStream:
    """One stream. Headers go out with the first write, so that what fails before it can still have a status of its own."""

    def __init__(self, scope: Scope, send: Send, *, headers: Mapping[str, str] | None = None) -> None:
        self._scope, self._send = scope, send
        self._headers = headers or {}
        self.started = False
        self.spell_error: Callable[[ApiError], bytes] = error_event
        """The last bytes of a stream that could not be finished."""

    async def write(self, data: bytes) -> None:
        """Sends some whole events."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = DONE) -> None:
        """Sends the last events and ends the body."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": data})

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
