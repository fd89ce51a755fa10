"""What every endpoint with a JSON body does: read, decode, answer, or refuse in one sentence.

Knows: the order of these and what happens to errors. Refuses to know: any endpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from tradewind.contract.errors import EngineDeadError, UserError
from tradewind.serving.http.answers import CompletionDetails, PromptDetails, Timing, Usage
from tradewind.serving.http.desk import Desk
from tradewind.serving.http.edge import ClientGone, caller_of, read_body, refuse, respond
from tradewind.serving.http.errors import ApiError, api_error, decode
from tradewind.serving.http.flight import Flight, Parts
from tradewind.serving.http.front import Front
from tradewind.serving.http.pipeline import Counts, Voice, Whole
from tradewind.serving.http.sse import EventStream

LOG = logging.getLogger("tradewind.http")
B = TypeVar("B")


class Chunks(Protocol):
    """How one endpoint spells the parts of a stream."""

    def encode(self, flight: Flight, parts: Parts) -> bytes:
        """The events of one turn."""

    def last(self, flight: Flight, *, timing: bool) -> bytes:
        """The events after the last turn."""


class Endpoint(Generic[B]):
    """A raw ASGI application for one path. Subclasses answer."""

    kind: type[B]

    def __init__(self, front: Front, desk: Desk) -> None:
        self.front, self.desk = front, desk
        self._decoder = msgspec.json.Decoder(self.kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self.front.options
        stream = EventStream(scope, send)
        try:
            caller = caller_of(scope)
            data = await read_body(scope, receive, limit=options.max_body_bytes)
            caller.read_s = time.monotonic()
            body, ignored = decode(data, self.kind, decoder=self._decoder, ignore_unknown=options.ignore_unknown_fields)
            caller.parsed_s = time.monotonic()
            if ignored:
                caller.headers.append((b"warning", _warning(ignored)))
            await self.answer(body, scope, receive, send, stream)
        except ClientGone:
            return
        except (ApiError, UserError, EngineDeadError) as error:
            await self._refuse(api_error(error), scope, send, stream)
        except OSError:  # the socket broke while we wrote
            return
        except Exception as error:
            LOG.exception("request %s failed", caller_of(scope).request_id)
            await self._refuse(api_error(error), scope, send, stream)
        finally:
            stream.close()

    async def _refuse(self, error: ApiError, scope: Scope, send: Send, stream: EventStream) -> None:
        if stream.started:
            await stream.end(stream.spell_error(error))
        else:
            await refuse(scope, send, error)

    async def answer(self, body: B, scope: Scope, receive: Receive, send: Send, stream: EventStream) -> None:
        """Answers. Raises ApiError, or another error of ours, to refuse."""
        raise NotImplementedError

    async def stream_out(self, flight: Flight, chunks: Chunks, stream: EventStream, *, timing: bool) -> None:
        """Writes a flight's parts as they come, and the last chunk unless the client has left."""
        stream.keep_alive(self.front.options.keep_alive_s)
        async with aclosing(flight.parts()) as turns:
            async for parts in turns:
                await stream.write(chunks.encode(flight, parts))
        if not flight.open.left:
            await stream.end(chunks.last(flight, timing=timing))

    async def gather(self, flight: Flight, voices: Sequence[Voice]) -> list[Whole] | None:
        """The sum of the same parts, by voice; None when the client has left. Raises the first voice's failure."""
        wholes = [Whole(voice) for voice in voices]
        async with aclosing(flight.parts()) as turns:
            async for parts in turns:
                for voice, said in parts:
                    if said.finish is not None and (failed := flight.failure(said)) is not None:
                        raise failed
                    wholes[voice.index].add(said)
        return None if flight.open.left else wholes

    async def json(self, scope: Scope, send: Send, value: Any) -> None:
        """Answers with a record."""
        await respond(scope, send, 200, msgspec.json.encode(value))


def _warning(ignored: list[str]) -> bytes:
    """RFC 7234's Warning header: these fields had no effect."""
    names = ", ".join(ignored).encode("ascii", "backslashreplace").decode().replace("\\", "\\\\").replace('"', '\\"')
    clean = "".join(character for character in names if 0x20 <= ord(character) < 0x7F)
    return f'299 tradewind "ignored fields: {clean[:2000]}"'.encode()


def usage_of(counts: Counts) -> Usage:
    """`usage` at this moment."""
    written = counts.completion_tokens
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=written,
        total_tokens=counts.prompt_tokens + written,
        prompt_tokens_details=PromptDetails(cached_tokens=counts.cached_tokens),
        completion_tokens_details=CompletionDetails(reasoning_tokens=counts.reasoning_tokens),
    )


def timing_of(flight: Flight) -> Timing:
    """`timing` at this moment."""
    return Timing(**flight.timing())
