"""The application without sockets: an engine that says given tokens, and a client that reads the writes themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from http_support import END, EOS, Rig
from starlette.types import ASGIApp

from tradewind.contract.events import FinishReason, TokensOut
from tradewind.contract.request import Request
from tradewind.contract.step import TokenLogprobs
from tradewind.serving.http.front import EngineStats, Front

RIG = Rig(max_context=1 << 16)


class Told:
    """A handle whose events are known beforehand; some are there at once, others after a turn of the event loop."""

    def __init__(self, events: Sequence[TokensOut], *, together: int) -> None:
        self._events, self._together = list(events), together
        self.cancelled = self.finished = False

    async def __aiter__(self) -> AsyncIterator[TokensOut]:
        while self._events:
            if self._together < 2:
                await asyncio.sleep(0)
            event = self._events.pop(0)
            yield event
            if event.finish is not None:
                return

    def take(self) -> list[TokensOut]:
        taken, self._events = self._events[: self._together], self._events[self._together :]
        return taken

    def cancel(self) -> None:
        self.cancelled = True

    def finish(self, reason: FinishReason = "stop") -> None:
        self.finished = True


class Teller:
    """An engine that says given tokens, cut as given."""

    why_dead: str | None = None

    def __init__(
        self,
        tokens: Sequence[int],
        cuts: Sequence[int],
        finish: FinishReason,
        *,
        together: int = 0,
        error: str | None = None,
    ) -> None:
        self._tokens, self._cuts, self._finish, self._together, self._error = tokens, cuts, finish, together, error
        self.handles: list[Told] = []
        self.requests: list[Request] = []

    def submit(self, request: Request) -> Told:
        self.requests.append(request)
        events: list[TokensOut] = []
        at, turn = 0, 0
        tokens = list(self._tokens)
        while at < len(tokens) or not events:
            size = self._cuts[turn % len(self._cuts)]
            part = tuple(tokens[at : at + size])
            at += size
            turn += 1
            last = at >= len(tokens)
            wanted = request.sampling.logprobs
            logprobs = () if wanted is None else tuple(
                TokenLogprobs(token=t, logprob=-1.0, rank=1, top_ids=(t, 65)[:wanted], top_logprobs=(-1.0, -2.0)[:wanted]) for t in part
            )  # fmt: skip
            stop = part[-1] if last and part and part[-1] in (END, EOS) else None
            events.append(
                TokensOut(
                    request_id=request.id, at_s=float(turn), tokens=part, logprobs=logprobs, finish=self._finish if last else None,
                    stop_token=stop, error=self._error if last else None,
                )
            )  # fmt: skip
        handle = Told(events, together=self._together)
        self.handles.append(handle)
        return handle

    def cancel(self, request_id: str) -> None: ...

    def sleep(self) -> None: ...

    def finish(self, request_id: str, *, reason: FinishReason = "stop") -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    def scheduled_s(self, request_id: str) -> float | None:
        return None


def front_of(teller: Teller, **more: Any) -> Front:
    return dataclasses.replace(RIG.front, client=teller, **more)


async def asked(app: ASGIApp, path: str, body: Any, *, leave_after: int | None = None) -> tuple[int, list[bytes]]:
    """(status, the bodies of all writes). `leave_after`: the client closes after so many writes."""
    writes: list[bytes] = []
    status = 0
    gone = asyncio.Event()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode()}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            assert not status, "two starts"
            status = message["status"]
            return
        assert status, "a body before its start"
        writes.append(message["body"])
        if leave_after is not None and len(writes) >= leave_after:
            gone.set()
            await asyncio.sleep(0)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "headers": [(b"content-type", b"application/json")],
        "server": ("x", 1), "client": ("y", 2), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return status, writes


def ask(app: ASGIApp, path: str, body: Any) -> Any:
    status, writes = asyncio.run(asked(app, path, body))
    assert status == 200, writes
    return json.loads(b"".join(writes))


def events_of(app: ASGIApp, path: str, body: Any) -> list[Any]:
    """The events of a stream, after checking the framing of each write."""
    status, writes = asyncio.run(asked(app, path, {**body, "stream": True}))
    assert status == 200, writes
    for data in writes:
        assert data.endswith(b"\n\n") or not data, "a write holds half an event"
    events = []
    for block in b"".join(writes).decode().split("\n\n")[:-1]:
        lines = block.split("\n")
        name = lines.pop(0)[len("event: ") :] if lines[0].startswith("event: ") else None
        assert len(lines) == 1 and lines[0].startswith("data: "), block
        payload = lines[0][len("data: ") :]
        events.append(payload if payload == "[DONE]" else json.loads(payload))
        assert name is None or events[-1]["type"] == name
    return events
