"""The endpoints beside generation: models, tokens, health, metrics, abort, the description of all.

Knows: what each tells. Refuses to know: how metrics are counted (a callable gives their text) and how the engine is watched.
"""

from __future__ import annotations

import time
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from tradewind.serving.http.answers import Aborted, Detokenized, Health, ModelList, ModelRecord, Sleeping, Tokenized
from tradewind.serving.http.asking import characters_of, check_model, render_chat, text_ids
from tradewind.serving.http.desk import Desk
from tradewind.serving.http.edge import caller_of, refuse, respond
from tradewind.serving.http.endpoint import Endpoint
from tradewind.serving.http.errors import ApiError
from tradewind.serving.http.front import Front
from tradewind.serving.http.openapi import docs_html, schema
from tradewind.serving.http.picturing import asked_in, fetched, pictures_from, prompt_with
from tradewind.serving.http.speaking import SLOW, speech_of
from tradewind.serving.http.sse import EventStream
from tradewind.serving.http.types import AbortRequest, DetokenizeRequest, TokenizeRequest

MAX_SLOWEST = 100


class TokenizeEndpoint(Endpoint[TokenizeRequest]):
    """Token ids exactly as completions (prompt) or chat (messages) would make them."""

    kind = TokenizeRequest

    async def answer(
        self, body: TokenizeRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream
    ) -> None:
        front = self.front
        check_model(front, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
        chat_only = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        if body.prompt is not None:
            wrong = next((name for name in chat_only if getattr(body, name) is not None), None)
        else:
            wrong = "add_special_tokens" if body.add_special_tokens is not None else None
        if wrong is not None:
            raise ApiError(
                400,
                f"{wrong} does not go with {'prompt' if body.messages is None else 'messages'}",
                param=wrong,
                code="invalid_value",
            )

        asked = asked_in(body.messages or ())
        files = await fetched(front, asked, field="messages") if asked else asked

        def work() -> list[int]:
            if body.prompt is not None:
                return text_ids(front, body.prompt, special=body.add_special_tokens is not False, field="prompt")
            assert body.messages is not None
            pictures = pictures_from(front, files, field="messages")
            rendered = render_chat(
                front,
                body.messages,
                tools=speech_of(front, msgspec.to_builtins(body.tools), None, parallel=None).definitions,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
            )
            return prompt_with(front, rendered, pictures, field="messages")[0]

        size = characters_of(body.messages or ()) + len(body.prompt or "")
        tokens = await self.desk.off_loop(work, characters=SLOW if asked else size)
        texts = [front.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        await self.json(
            scope, send, Tokenized(count=len(tokens), max_model_len=front.max_context, tokens=tokens, token_strs=texts)
        )


class DetokenizeEndpoint(Endpoint[DetokenizeRequest]):
    """Text of token ids; special tokens are shown unless skip_special_tokens is true."""

    kind = DetokenizeRequest

    async def answer(
        self, body: DetokenizeRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream
    ) -> None:
        front = self.front
        check_model(front, body.model)
        size = front.intake.limits.vocab_size
        wrong = next((place for place, token in enumerate(body.tokens) if token >= size), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"tokens[{wrong}] is {body.tokens[wrong]}; token ids are 0 to {size - 1}",
                param=f"tokens[{wrong}]",
                code="invalid_value",
            )

        def work() -> str:
            return front.tokenizer.decode(body.tokens, skip_special=bool(body.skip_special_tokens))

        text = await self.desk.off_loop(work, characters=4 * len(body.tokens))
        await self.json(scope, send, Detokenized(prompt=text))


class AbortEndpoint(Endpoint[AbortRequest]):
    """Ends the caller's open requests by answer id or X-Request-Id."""

    kind = AbortRequest

    async def answer(self, body: AbortRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream) -> None:
        count = self.desk.abort(body.request_id, tenant=caller_of(scope).tenant)
        await self.json(scope, send, Aborted(aborted=count))


class Page:
    """A raw ASGI application without a body."""

    def __init__(self, front: Front, desk: Desk) -> None:
        self.front, self.desk = front, desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.show(scope, send)
        except ApiError as error:
            await refuse(scope, send, error)

    async def show(self, scope: Scope, send: Send) -> None:
        """Answers."""
        raise NotImplementedError


class ModelsPage(Page):
    """GET /v1/models."""

    async def show(self, scope: Scope, send: Send) -> None:
        listed = ModelList(data=[_model(self.front, name) for name in self.front.names])
        await respond(scope, send, 200, msgspec.json.encode(listed))


class ModelPage(Page):
    """GET /v1/models/NAME."""

    async def show(self, scope: Scope, send: Send) -> None:
        name = check_model(self.front, scope["path_params"]["model"])
        await respond(scope, send, 200, msgspec.json.encode(_model(self.front, name)))


def _model(front: Front, name: str) -> ModelRecord:
    parent = None if name == front.model else front.model
    return ModelRecord(
        id=name, created=front.created_s, max_model_len=front.max_context, root=front.model, parent=parent
    )


class HealthPage(Page):
    """GET /health: 200 only while the engine makes progress or has nothing to do."""

    async def show(self, scope: Scope, send: Send) -> None:
        front = self.front
        stats, dead = front.client.stats(), front.client.why_dead
        still_s = max(0.0, time.monotonic() - stats.last_progress_s)
        error = dead
        status = "ok"
        if dead is not None:
            status = "dead"
        elif self.desk.closing:
            status, error = "closing", "the server is shutting down"
        elif self.desk.asleep and not self.desk.open_requests:
            status = "asleep"
        elif (stats.running or stats.waiting) and still_s > front.options.health_timeout_s:
            status = "stalled"
            error = (
                f"no step has ended for {still_s:.1f} s with {stats.running} running and {stats.waiting} waiting;"
                f" the limit is {front.options.health_timeout_s:g} s"
            )
        report = {
            "status": status, "running": stats.running, "waiting": stats.waiting, "since_progress_s": round(still_s, 3),
            "steps": stats.steps, "pages_used": stats.pages_used, "pages_total": stats.pages_total, "error": error,
            "diagnosis": None if front.diagnosis is None else front.diagnosis(),
            "drift": None if front.drift is None else front.drift(),
        }  # fmt: skip
        body = msgspec.json.encode(msgspec.convert(report, Health))
        code = 200 if status in ("ok", "asleep") else 503
        await respond(scope, send, code, body, headers={"Cache-Control": "no-store"})


class SleepPage(Page):
    """POST /sleep?level=1: open requests end, nothing new is taken, the prefix cache is emptied and its memory given back."""

    async def show(self, scope: Scope, send: Send) -> None:
        _may_sleep(self.front)
        given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        level = given.pop("level", ["1"])[-1]
        if given:
            name = next(iter(given))
            raise ApiError(
                400, f"{name[:100]!r} is not known here; /sleep takes level", param=name[:100], code="unknown_parameter"
            )
        if level == "2":
            said = (
                "level 2 would drop the weights, and this server cannot load them again; use level 1, or end the server"
            )
            raise ApiError(400, said, param="level", code="unsupported_parameter")
        if level != "1":
            raise ApiError(400, f"level is {level[:100]!r}; it must be 1", param="level", code="invalid_value")
        await self.desk.sleep()
        await _sleeping(self.desk, scope, send)


class WakePage(Page):
    """POST /wake_up: requests are taken again; memory comes back as they need it."""

    async def show(self, scope: Scope, send: Send) -> None:
        _may_sleep(self.front)
        self.desk.asleep = False
        await _sleeping(self.desk, scope, send)


class IsSleepingPage(Page):
    """GET /is_sleeping."""

    async def show(self, scope: Scope, send: Send) -> None:
        await _sleeping(self.desk, scope, send)


def _may_sleep(front: Front) -> None:
    if not front.options.allow_sleep:
        raise ApiError(
            403, "sleeping is off, because it stops everybody's service; start the server with --allow-sleep",
            code="sleep_not_allowed",
        )  # fmt: skip


async def _sleeping(desk: Desk, scope: Scope, send: Send) -> None:
    await respond(scope, send, 200, msgspec.json.encode(Sleeping(is_sleeping=desk.asleep)))


class ReceiptPage(Page):
    """GET /v1/receipts/ID: where the time of one finished request went. Only who sent a request may read its receipt."""

    async def show(self, scope: Scope, send: Send) -> None:
        front = self.front
        name = scope["path_params"]["id"]
        found = None if front.receipts is None else front.receipts(name, caller_of(scope).tenant)
        if found is None:
            why = "this server keeps no receipts" if front.receipts is None else (
                f"there is no receipt of {name[:100]!r}: it is the id of an answer or an X-Request-Id, the request must have ended,"
                " and only the latest are kept"
            )  # fmt: skip
            raise ApiError(404, why, param="id", code="not_found")
        await respond(scope, send, 200, found, headers={"Cache-Control": "no-store"})


class ReceiptsPage(Page):
    """GET /v1/receipts?slowest=10: the slowest requests of the caller that are remembered, slowest first."""

    async def show(self, scope: Scope, send: Send) -> None:
        front = self.front
        given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        count = given.pop("slowest", ["10"])[-1]
        if given:
            name = next(iter(given))
            raise ApiError(
                400, f"{name[:100]!r} is not known here; /v1/receipts takes slowest", param=name[:100], code="unknown_parameter"
            )  # fmt: skip
        if not (count.isascii() and count.isdigit() and 1 <= int(count[:4]) <= MAX_SLOWEST and len(count) <= 4):
            said = f"slowest is {count[:100]!r}; it must be a whole number from 1 to {MAX_SLOWEST}"
            raise ApiError(400, said, param="slowest", code="invalid_value")
        if front.slowest is None:
            raise ApiError(404, "this server keeps no receipts", code="not_found")
        body = front.slowest(int(count), caller_of(scope).tenant)
        await respond(scope, send, 200, body, headers={"Cache-Control": "no-store"})


class MetricsPage(Page):
    """GET /metrics: the text that the metrics callable gives."""

    async def show(self, scope: Scope, send: Send) -> None:
        if self.front.metrics is None:
            raise ApiError(404, "this server counts no metrics", code="not_found")
        text = self.front.metrics()
        body = text.encode() if isinstance(text, str) else text
        await respond(scope, send, 200, body, content_type=b"text/plain; version=0.0.4; charset=utf-8")


class SchemaPage(Page):
    """GET /openapi.json."""

    def __init__(self, front: Front, desk: Desk) -> None:
        super().__init__(front, desk)
        self._body: bytes | None = None

    async def show(self, scope: Scope, send: Send) -> None:
        if self._body is None:
            self._body = msgspec.json.encode(schema(keys=bool(self.front.options.api_keys)))
        await respond(scope, send, 200, self._body)


class DocsPage(Page):
    """GET /docs: the same for people, without scripts."""

    async def show(self, scope: Scope, send: Send) -> None:
        body = docs_html(schema(keys=bool(self.front.options.api_keys))).encode()
        await respond(scope, send, 200, body, content_type=b"text/html; charset=utf-8")
