"""POST /v1/completions: text or token ids to be continued, one prompt or many.

Knows: the shapes of completion answers, echo, prompts as ids. Refuses to know: sampling (asking.py), text (pipeline.py), the engine
(flight.py).
"""

from __future__ import annotations

import secrets
import time

import msgspec
from starlette.types import Receive, Scope, Send

from tradewind.contract.errors import UserError
from tradewind.serving.http.answers import TextAnswer, TextChoice, TextLogprobs
from tradewind.serving.http.asking import check_model, make_requests, sampling_of, text_ids
from tradewind.serving.http.edge import caller_of
from tradewind.serving.http.endpoint import Endpoint, timing_of, usage_of
from tradewind.serving.http.errors import ApiError, api_error
from tradewind.serving.http.flight import Flight, Parts
from tradewind.serving.http.front import Front
from tradewind.serving.http.logprobs import TextColumns, join_columns
from tradewind.serving.http.pipeline import Said, Voice, Whole
from tradewind.serving.http.speaking import SLOW, demands, form_of
from tradewind.serving.http.sse import DONE, EventStream, json_bytes
from tradewind.serving.http.types import CompletionRequest
from tradewind.serving.parsers.pieces import Content

DEFAULT_TOKENS = 16
"""What the API generates when max_tokens is not given."""


class CompletionsEndpoint(Endpoint[CompletionRequest]):
    """Completions, streamed or not."""

    kind = CompletionRequest

    async def answer(
        self, body: CompletionRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream
    ) -> None:
        front, caller = self.front, caller_of(scope)
        model = check_model(front, body.model)
        n = body.n or 1
        if body.best_of is not None and body.best_of != n:
            raise ApiError(
                400, f"best_of is {body.best_of}, which is not supported: only n answers are made; leave it out or set it to n",
                param="best_of", code="unsupported_parameter",
            )  # fmt: skip
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options", code="invalid_value")
        form = (
            None
            if body.response_format is None
            else {k: v for k, v in msgspec.to_builtins(body.response_format).items() if v is not None}
        )
        mute = body.max_tokens == 0
        if mute and not body.echo:
            raise ApiError(
                400, "max_tokens is 0; without echo it must be at least 1", param="max_tokens", code="invalid_value"
            )
        prompts = prompts_of(body.prompt, field="prompt")
        answer_id = "cmpl-" + secrets.token_hex(12)
        special = True if body.skip_special_tokens is None else body.skip_special_tokens

        def prepare() -> list[Voice]:
            ids = [prompt_ids(front, prompt, special=body.add_special_tokens, field="prompt") for prompt in prompts]
            sampling = sampling_of(
                front,
                body,
                max_tokens=max(1, DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens),
                n=n,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            )
            if body.max_tokens is None:  # the default gives way to the context limit
                room = front.max_context - max(map(len, ids))
                sampling = msgspec.structs.replace(
                    sampling, max_tokens=max(1, min(DEFAULT_TOKENS, room), sampling.min_tokens)
                )
            requests = make_requests(front, caller, body, ids, sampling, id=answer_id, prompt_field="prompt")
            shape = form_of(front, body, form)
            if shape is not None:
                assert front.structured is not None
                try:
                    grammar = front.structured.text(shape)
                except UserError as error:
                    raise api_error(error, param=shape.name) from None
                requests = [msgspec.structs.replace(request, grammar=grammar) for request in requests]
            return [
                Voice(request, front.tokenizer, index=index, prompt=index // n, skip_special=special, mute=mute)
                for index, request in enumerate(requests)
            ]

        with self.desk.place(len(prompts) * n):
            characters = sum(len(prompt) * (1 if isinstance(prompt, str) else 4) for prompt in prompts)
            voices = await self.desk.off_loop(prepare, characters=SLOW if demands(body, form) else characters)
            options = body.stream_options
            chunks = TextChunks(
                front,
                body,
                id=answer_id,
                model=model,
                usage_asked=bool(options and options.include_usage),
                usage_always=bool(options and options.continuous_usage_stats),
            )
            async with Flight(
                front, self.desk, voices, receive=receive, caller=caller, out=stream, id=answer_id, endpoint="/v1/completions",
                stream=bool(body.stream),
            ) as flight:  # fmt: skip
                if body.stream:
                    await self.stream_out(flight, chunks, stream, timing=bool(body.timing))
                elif (wholes := await self.gather(flight, voices)) is not None:
                    await self.json(scope, send, chunks.whole(flight, wholes, timing=bool(body.timing)))


def prompts_of(prompt: str | list[str | int | list[int]], *, field: str) -> list[str | list[int]]:
    """One prompt or several, as text or ids. Raises ApiError for an empty one or a mixture."""
    if isinstance(prompt, str):
        several: list[str | list[int]] = [prompt]
    elif all(isinstance(part, int) for part in prompt):
        several = [[part for part in prompt if isinstance(part, int)]]
    elif any(isinstance(part, int) for part in prompt):
        raise ApiError(
            400, f"{field} mixes token ids with texts or lists; give one text, one list of ids, a list of texts, or a list of lists of ids",
            param=field, code="invalid_type",
        )  # fmt: skip
    else:
        several = [part for part in prompt if not isinstance(part, int)]
    for place, one in enumerate(several):
        if not one:
            which = field if len(several) == 1 else f"{field}[{place}]"
            raise ApiError(400, f"{which} is empty; at least one token is needed", param=which, code="invalid_value")
    return several


def prompt_ids(front: Front, prompt: str | list[int], *, special: bool | None, field: str) -> list[int]:
    """Token ids of a prompt; ids stay as they are."""
    if not isinstance(prompt, str):
        return prompt
    return text_ids(front, prompt, special=special is not False, field=field)


class TextChunks:
    """Encodes completion answers."""

    def __init__(
        self, front: Front, body: CompletionRequest, *, id: str, model: str, usage_asked: bool, usage_always: bool
    ) -> None:
        self._front, self._id, self._model = front, id, model
        self._created = int(time.time())
        self._echo, self._logprobs, self._token_ids = bool(body.echo), body.logprobs, bool(body.return_token_ids)
        self._skip_special = True if body.skip_special_tokens is None else body.skip_special_tokens
        self._usage_asked, self._usage_always = usage_asked, usage_always
        head = {
            "id": id,
            "object": "text_completion",
            "created": self._created,
            "model": model,
            "system_fingerprint": None,
        }
        self._head = b"data: " + json_bytes(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if usage_asked and not usage_always else b"}\n\n"
        self._close = b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._begin: dict[int, bytes] = {}
        self._columns: dict[int, TextColumns] = {}
        self._plain = self._logprobs is None and not self._token_ids and not usage_always

    def encode(self, flight: Flight, parts: Parts) -> bytes:
        """The chunks of one turn. Raises ApiError when a sequence could not be finished."""
        out: list[bytes] = []
        for voice, said in parts:
            if said.finish is not None and (failed := flight.failure(said)) is not None:
                raise failed
            begin = self._begin.get(voice.index)
            if begin is None:
                begin = self._begin[voice.index] = self._head + b'{"index":%d,"text":' % voice.index
                if self._echo or self._token_ids:
                    out.append(self._first(flight, voice, begin))
            if self._plain:
                for piece in said.pieces:
                    assert type(piece) is Content
                    out += (begin, json_bytes(piece.text), self._close)
            elif said.pieces or said.tokens:
                out += (
                    begin,
                    json_bytes(_text(said)),
                    *self._extras(voice, said),
                    b',"finish_reason":null}]',
                    self._usage(flight),
                )
            if said.finish is not None:
                out += (
                    begin, b'"","logprobs":null,"finish_reason":', json_bytes(said.finish),
                    b',"stop_reason":', json_bytes(said.stop), b"}]", self._usage(flight),
                )  # fmt: skip
        return b"".join(out)

    def _first(self, flight: Flight, voice: Voice, begin: bytes) -> bytes:
        """The chunk of the prompt: its text with echo, its ids when they are asked for."""
        logprobs = b"null"
        if self._echo and self._logprobs is not None:
            logprobs = json_bytes(self._prompt_columns(voice))
        ids = b',"prompt_token_ids":' + json_bytes(voice.request.tokens) if self._token_ids else b""
        text = json_bytes(self._prompt_text(voice) if self._echo else "")
        return b"".join(
            (begin, text, b',"logprobs":', logprobs, b',"finish_reason":null', ids, b"}]", self._usage(flight))
        )

    def _extras(self, voice: Voice, said: Said) -> tuple[bytes, ...]:
        logprobs = b"null"
        if self._logprobs is not None and said.logprobs:
            logprobs = json_bytes(self._columns_of(voice).take(said.logprobs))
        ids = b',"token_ids":' + json_bytes(said.tokens) if self._token_ids else b""
        return b',"logprobs":', logprobs, ids

    def _usage(self, flight: Flight) -> bytes:
        return b',"usage":' + json_bytes(usage_of(flight.counts)) + b"}\n\n" if self._usage_always else self._tail

    def _columns_of(self, voice: Voice) -> TextColumns:
        columns = self._columns.get(voice.index)
        if columns is None:
            columns = self._columns[voice.index] = TextColumns(
                self._front.tokenizer, top=self._logprobs or 0, skip_special=self._skip_special
            )
        return columns

    def _prompt_columns(self, voice: Voice) -> TextLogprobs:
        return self._columns_of(voice).prompt(voice.request.tokens, voice.prompt_logprobs)

    def _prompt_text(self, voice: Voice) -> str:
        return self._front.tokenizer.decode(voice.request.tokens, skip_special=self._skip_special)

    def last(self, flight: Flight, *, timing: bool) -> bytes:
        """What follows the last chunk with a choice, up to the end marker."""
        if not self._usage_asked and not timing:
            return DONE
        out = [self._head, b"]"]
        if self._usage_asked:
            out += (b',"usage":', json_bytes(usage_of(flight.counts)))
        if timing:
            out += (b',"timing":', json_bytes(timing_of(flight)))
        return b"".join((*out, b"}\n\n", DONE))

    def whole(self, flight: Flight, wholes: list[Whole], *, timing: bool) -> TextAnswer:
        """The answer that is not streamed: the sum of the same parts."""
        answer = TextAnswer(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(whole) for whole in wholes],
            usage=usage_of(flight.counts),
        )
        return msgspec.structs.replace(answer, timing=timing_of(flight)) if timing else answer

    def _choice(self, whole: Whole) -> TextChoice:
        voice = whole.voice
        text = whole.message.content or ""
        logprobs = None
        if self._echo:
            text = self._prompt_text(voice) + text
        if self._logprobs is not None:
            parts = [self._prompt_columns(voice)] if self._echo else []
            logprobs = join_columns([*parts, self._columns_of(voice).take(whole.logprobs)])
        choice = TextChoice(
            index=voice.index, text=text, logprobs=logprobs, finish_reason=voice.finish, stop_reason=whole.stop
        )
        if self._token_ids:
            choice = msgspec.structs.replace(
                choice, token_ids=whole.tokens, prompt_token_ids=list(voice.request.tokens)
            )
        return choice


def _text(said: Said) -> str:
    return "".join(piece.text for piece in said.pieces if isinstance(piece, Content))
