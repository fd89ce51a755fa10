"""uvicorn's HTTP protocol with limits on what a client may send before anybody has looked at who it is.

Knows: bytes and times of a request on its way in. Refuses to know: what is asked (app), and how large a body may be (edge).

httptools collects a header line of any length, and uvicorn waits for the rest of a request as long as the connection lasts: both would let
somebody without an API key take memory and connections for nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""Of a request line and all its headers; what came in one read with the end of the head is not counted."""
WHOLE_S = 60.0
"""So long a request may take to arrive, its body included."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    whole_s = WHOLE_S

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        self._head_bytes: int | None = 0
        """Bytes of the head that has begun; None while no head is awaited."""
        self._late: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._await_whole()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._whole()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self._head_bytes is not None and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.send_400_response(f"the request's head is over {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """A request's first byte was read."""
        super().on_message_begin()
        self._head_bytes = 0
        self._await_whole()

    def on_headers_complete(self) -> None:
        """A request's head was read."""
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request was read to its end."""
        self._whole()
        super().on_message_complete()

    def _await_whole(self) -> None:
        self._whole()
        self._late = self.loop.call_later(self.whole_s, self._give_up)

    def _whole(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        self.transport.close()
