"""The sequences of one HTTP request on their way: submitted together, read as they come, ended whatever happens.

Knows: handles, disconnects, receipts. Refuses to know: JSON and what is made of the parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from time import monotonic
from types import TracebackType
from typing import Self

from starlette.types import Receive

from tradewind.contract.events import FrontTimes
from tradewind.contract.request import Request
from tradewind.serving.http.desk import Desk, OpenRequest
from tradewind.serving.http.edge import Caller
from tradewind.serving.http.errors import ApiError, api_error
from tradewind.serving.http.front import EngineHandle, Front, Receipt
from tradewind.serving.http.pipeline import Counts, Said, Voice
from tradewind.serving.http.sse import EventStream

LOG = logging.getLogger("tradewind.http")

Parts = list[tuple[Voice, Said]]


class Flight:
    """An asynchronous context: inside it the sequences are in the engine, after it none is."""

    def __init__(
        self,
        front: Front,
        desk: Desk,
        voices: Sequence[Voice],
        *,
        receive: Receive,
        caller: Caller,
        out: EventStream,
        id: str,
        endpoint: str,
        stream: bool,
    ) -> None:
        """`out` is where a stream is written; it is told when what it writes was taken from the engine."""
        self._front, self._desk, self._receive = front, desk, receive
        self.voices = list(voices)
        self.counts = Counts(self.voices)
        self.open = OpenRequest(id=id, request_id=caller.request_id, tenant=caller.tenant)
        self._endpoint, self._stream, self._caller, self._out = endpoint, stream, caller, out
        self._submitted_s = self._first_taken_s = self._first_spoken_s = self._last_spoken_s = 0.0
        self._asked: list[tuple[Request, EngineHandle]] = []
        """Kept to the end where a journal wants what was asked and answered."""
        self._handles: list[tuple[EngineHandle, Voice]] = []
        self._watcher: asyncio.Task[None] | None = None
        self.arrived_s = self.voices[0].request.arrived_s

    async def __aenter__(self) -> Self:
        """Submits all. Raises ApiError, and nothing stays in the engine, when one of them can not run."""
        front, desk = self._front, self._desk
        try:
            for voice in self.voices:
                self._handles.append((front.client.submit(voice.request), voice))
        except Exception as error:
            self._end()
            raise api_error(error) from error
        self._submitted_s = monotonic()
        if front.on_record is not None:
            self._asked = [(voice.request, handle) for handle, voice in self._handles]
        self.open.handles = [handle for handle, _ in self._handles]
        desk.open(self.open)
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        now = monotonic()
        if kind is None and not self.open.left:
            self._desk.took(now - self.arrived_s)
        front = self._front
        if front.on_receipt is not None:
            try:
                receipt = self._receipt(now)
                front.on_receipt(receipt)
                if front.on_record is not None:
                    front.on_record(receipt, [(request, handle.tokens) for request, handle in self._asked])
            except Exception:  # whoever listens must not harm the answer
                LOG.exception("a listener failed on the receipt of %s", self.open.id)

    def _receipt(self, now: float) -> Receipt:
        voices = self.voices
        firsts = [voice.first_token_s for voice in voices if voice.first_token_s is not None]
        return Receipt(
            id=self.open.id,
            request_id=self.open.request_id,
            endpoint=self._endpoint,
            tenant=self.open.tenant,
            stream=self._stream,
            samples=len(voices),
            prompt_tokens=self.counts.prompt_tokens,
            cached_tokens=self.counts.cached_tokens,
            completion_tokens=self.counts.completion_tokens,
            arrived_s=self.arrived_s,
            scheduled_s=self._front.client.scheduled_s(voices[0].request.id),
            first_token_s=min(firsts) if firsts else None,
            finished_s=now,
            finish="disconnect" if self.open.left else ",".join(voice.finish or "abort" for voice in voices),
            error=next((voice.error for voice in voices if voice.error), None),
            traceparent=self._caller.traceparent,
            sequences=tuple(voice.request.id for voice in voices),
            times=self._times(now),
        )

    def _times(self, now: float) -> FrontTimes:
        caller, out = self._caller, self._out
        first, turns = out.first_turn, tuple(out.turns)
        if not self._stream:  # nothing is sent before all is there
            first = (self._first_taken_s, self._first_spoken_s, self._first_spoken_s) if self._first_taken_s else None
            turns = ((out.taken_s, self._last_spoken_s, now),) if self._last_spoken_s else ()
        return FrontTimes(
            received_s=caller.received_s,
            read_s=caller.read_s,
            parsed_s=caller.parsed_s,
            submitted_s=self._submitted_s,
            first_taken_s=first[0] if first is not None else None,
            first_spoken_s=first[1] if first is not None else None,
            first_written_s=first[2] if first is not None else None,
            turns=turns,
        )

    def _took(self, taken_s: float) -> None:
        """Something was taken from the engine and made into text."""
        self._out.taken_s, self._last_spoken_s = taken_s, monotonic()
        if not self._first_taken_s:
            self._first_taken_s, self._first_spoken_s = taken_s, self._last_spoken_s

    def _end(self) -> None:
        """Whatever still runs is cancelled; safe to call twice."""
        handles, self._handles = self._handles, []
        for handle, voice in handles:
            if not voice.over:
                if voice.finish is None:
                    handle.cancel()
                else:
                    handle.finish()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self._desk.close(self.open)

    async def _watch(self) -> None:
        """Cancels everything when the client leaves."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.open.left = True
                self.open.cancel()
                return

    def parts(self) -> AsyncGenerator[Parts, None]:
        """What was said since the last time, for all voices; ends when all have finished or the client has left."""
        if len(self._handles) == 1:
            return self._single(*self._handles[0])
        return self._several()

    async def _single(self, handle: EngineHandle, voice: Voice) -> AsyncGenerator[Parts, None]:
        out = self._out
        async for event in handle:
            taken_s = 0.0
            if event.finish is not None or not out.taken_s or not self._stream:  # what lies between is not looked at
                taken_s = out.taken_s = monotonic()
            parts: Parts = []
            said = voice.take(event)
            if said is not None:
                parts.append((voice, said))
            if voice.finish is None:
                for later in handle.take():
                    said = voice.take(later)
                    if said is not None:
                        parts.append((voice, said))
            if not self._stream:
                self._took(taken_s)
            if parts:
                yield parts
            if voice.finish is not None or self.open.left:
                return

    async def _several(self) -> AsyncGenerator[Parts, None]:
        waiting: Parts = []
        ready = asyncio.Event()
        broken: list[BaseException] = []

        async def read(handle: EngineHandle, voice: Voice) -> None:
            try:
                async for event in handle:
                    taken_s = monotonic()
                    said = voice.take(event)
                    self._took(taken_s)
                    if said is not None:
                        waiting.append((voice, said))
                        ready.set()
                    if voice.finish is not None:
                        if not voice.over:  # a stop string ended it: the others go on, this one must not
                            handle.finish()
                            voice.over = True
                        break
            except Exception as error:  # whoever waits must not wait for ever
                broken.append(error)
            ready.set()

        readers = [asyncio.create_task(read(handle, voice)) for handle, voice in self._handles]
        try:
            while not self.open.left:
                if not waiting and all(voice.finish is not None for voice in self.voices):
                    return
                await ready.wait()
                ready.clear()
                if broken:
                    raise broken[0]
                if waiting:
                    parts = waiting[:]
                    waiting.clear()
                    yield parts
        finally:
            for reader in readers:
                reader.cancel()

    def timing(self) -> dict[str, float | None]:
        """Where the time of this request went, in milliseconds, by its first sequence to have a token."""
        voices = [voice for voice in self.voices if voice.first_token_s is not None] or self.voices
        voice = min(voices, key=lambda v: v.first_token_s or 0.0)
        scheduled = self._front.client.scheduled_s(voice.request.id)
        first = voice.first_token_s
        ends = [v.finished_s for v in self.voices if v.finished_s is not None]
        last = max(ends) if ends else None

        def span(begin: float | None, end: float | None) -> float | None:
            return None if begin is None or end is None else round(max(0.0, end - begin) * 1e3, 3)

        return {
            "queue_ms": span(self.arrived_s, scheduled),
            "prefill_ms": span(scheduled, first),
            "ttft_ms": span(self.arrived_s, first),
            "decode_ms": span(first, last),
            "total_ms": span(self.arrived_s, last),
        }

    def failure(self, said: Said) -> ApiError | None:
        """The refusal for a sequence that the engine could not finish; None while all is well."""
        if said.finish == "error":
            dead = self._front.client.why_dead
            if dead is not None:
                return ApiError(503, f"the engine does not work any more: {dead}", code="engine_dead")
            why = said.error or "no reason is known"
            if said.overloaded:
                retry = {"Retry-After": str(self._desk.retry_after_s())}
                return ApiError(429, why, code="overloaded", headers=retry)
            return ApiError(500, f"the engine could not finish this request: {why}", code="engine_error")
        if said.finish == "abort" and said.error:
            return ApiError(504, said.error, code="timeout")
        return None
