"""POST /v1/chat/completions.

Knows: the shapes of chat answers, streamed and whole. Refuses to know: sampling (asking.py), text (pipeline.py), the engine (flight.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial

import msgspec
from starlette.types import Receive, Scope, Send

from tradewind.serving.http.answers import (
    AnswerMessage,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChoiceLogprobs,
    MadeCall,
)
from tradewind.serving.http.asking import (
    characters_of,
    check_effort,
    check_model,
    make_requests,
    render_chat,
    sampling_of,
)
from tradewind.serving.http.edge import caller_of
from tradewind.serving.http.endpoint import Endpoint, timing_of, usage_of
from tradewind.serving.http.errors import ApiError
from tradewind.serving.http.flight import Flight, Parts
from tradewind.serving.http.front import Front
from tradewind.serving.http.logprobs import chat_logprobs
from tradewind.serving.http.picturing import asked_in, fetched, pictures_from, prompt_with
from tradewind.serving.http.pipeline import Said, Voice, Whole
from tradewind.serving.http.speaking import SLOW, demands, form_of, speech_of
from tradewind.serving.http.sse import DONE, EventStream, json_bytes
from tradewind.serving.http.types import ChatRequest
from tradewind.serving.images import Asked
from tradewind.serving.parsers.pieces import Content, Reasoning, ToolArguments, ToolCallBegin, ToolCallEnd


class ChatEndpoint(Endpoint[ChatRequest]):
    """Chat, streamed or not."""

    kind = ChatRequest

    async def answer(self, body: ChatRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream) -> None:
        front, caller = self.front, caller_of(scope)
        model = check_model(front, body.model)
        plain = msgspec.to_builtins
        tools, choice, parallel = plain(body.tools), plain(body.tool_choice), body.parallel_tool_calls
        form = (
            None
            if body.response_format is None
            else {k: v for k, v in plain(body.response_format).items() if v is not None}
        )
        slow = demands(body, form, tools or (), choice, parallel)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options", code="invalid_value")
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        limit_field, limit = output_limit(body.max_tokens, body.max_completion_tokens)
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            check_effort(front, "reasoning_effort")
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        answer_id = "chatcmpl-" + secrets.token_hex(12)
        asked = asked_in(body.messages)

        def prepare(files: Sequence[Asked]) -> tuple[list[Voice], bool]:
            speech = speech_of(front, tools, choice, parallel=parallel, form=form_of(front, body, form))
            pictures = pictures_from(front, files, field="messages")
            rendered = render_chat(
                front,
                body.messages,
                tools=speech.definitions,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=kwargs,
            )
            sampling = sampling_of(
                front,
                body,
                max_tokens=limit,
                n=body.n or 1,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            )
            ids, images = prompt_with(front, rendered, pictures, field="messages")
            requests = make_requests(
                front, caller, body, [ids], sampling,
                id=answer_id, prompt_field="messages", limit_field=limit_field, images=images,
            )  # fmt: skip
            voices = [
                Voice(
                    request,
                    front.tokenizer,
                    index=index,
                    parser=speech.make(rendered) if speech.make is not None else None,
                    skip_special=speech.skip_special(body.skip_special_tokens),
                )
                for index, request in enumerate(speech.constrained(requests, rendered))
            ]
            return voices, bool(body.logprobs)

        with self.desk.place(body.n or 1):
            files = await fetched(front, asked, field="messages") if asked else asked
            voices, with_logprobs = await self.desk.off_loop(
                partial(prepare, files), characters=SLOW if slow or asked else characters_of(body.messages)
            )
            options = body.stream_options
            chunks = ChatChunks(
                front,
                id=answer_id,
                model=model,
                top=body.top_logprobs or 0 if with_logprobs else None,
                usage_asked=bool(options and options.include_usage),
                usage_always=bool(options and options.continuous_usage_stats),
                token_ids=bool(body.return_token_ids),
            )
            async with Flight(
                front, self.desk, voices, receive=receive, caller=caller, out=stream, id=answer_id,
                endpoint="/v1/chat/completions", stream=bool(body.stream),
            ) as flight:  # fmt: skip
                if body.stream:
                    await self.stream_out(flight, chunks, stream, timing=bool(body.timing))
                elif (wholes := await self.gather(flight, voices)) is not None:
                    await self.json(scope, send, chunks.whole(flight, wholes, timing=bool(body.timing)))


def output_limit(max_tokens: int | None, max_completion_tokens: int | None) -> tuple[str, int | None]:
    """(the field that was used, its value). Raises ApiError when both are given and differ."""
    if max_completion_tokens is None:
        return "max_tokens", max_tokens
    if max_tokens is not None and max_tokens != max_completion_tokens:
        raise ApiError(
            400, f"max_tokens is {max_tokens} but max_completion_tokens is {max_completion_tokens}; they mean the same, give one",
            param="max_completion_tokens", code="invalid_value",
        )  # fmt: skip
    return "max_completion_tokens", max_completion_tokens


class ChatChunks:
    """Encodes chat answers. What does not change within a stream is spelled once."""

    def __init__(
        self,
        front: Front,
        *,
        id: str,
        model: str,
        top: int | None,
        usage_asked: bool,
        usage_always: bool,
        token_ids: bool,
    ) -> None:
        """`top`: None without logprobs, otherwise how many of the likeliest."""
        self._front, self._id, self._model = front, id, model
        self._created = int(time.time())
        self._top, self._token_ids = top, token_ids
        self._usage_asked, self._usage_always = usage_asked, usage_always
        head = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": model,
            "system_fingerprint": None,
        }
        self._head = b"data: " + json_bytes(head)[:-1] + b',"choices":['
        self._begin: dict[int, bytes] = {}
        self._content: dict[int, bytes] = {}
        tail = b',"usage":null}\n\n' if usage_asked and not usage_always else b"}\n\n"
        self._close = b'},"logprobs":null,"finish_reason":null}]' + tail
        self._tail = tail
        self._plain = top is None and not token_ids and not usage_always

    def encode(self, flight: Flight, parts: Parts) -> bytes:
        """The chunks of one turn. Raises ApiError when a sequence could not be finished."""
        out: list[bytes] = []
        for voice, said in parts:
            if said.finish is not None and (failed := flight.failure(said)) is not None:
                raise failed
            index = voice.index
            content = self._content.get(index)
            if content is None:
                content = self._open(flight, voice, out)
            if self._plain:
                for piece in said.pieces:
                    if type(piece) is Content:
                        out += (content, json_bytes(piece.text), self._close)
                    elif (delta := _delta(piece)) is not None:
                        out += (self._begin[index], delta, self._close)
            else:
                self._rich(flight, voice, said, out)
            if said.finish is not None:
                out.append(self._finish(flight, voice, said))
        return b"".join(out)

    def _open(self, flight: Flight, voice: Voice, out: list[bytes]) -> bytes:
        """The first chunk of a choice: its role."""
        begin = self._begin[voice.index] = self._head + b'{"index":%d,"delta":{' % voice.index
        content = self._content[voice.index] = begin + b'"content":'
        extra = b""
        if self._token_ids:
            extra = b',"prompt_token_ids":' + json_bytes(voice.request.tokens)
        out += (
            begin,
            b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null',
            extra,
            b"}]",
            self._usage(flight),
        )
        return content

    def _rich(self, flight: Flight, voice: Voice, said: Said, out: list[bytes]) -> None:
        """Chunks that carry more than text."""
        deltas = [b'"content":' + json_bytes(p.text) if type(p) is Content else _delta(p) for p in said.pieces]
        spelled = [delta for delta in deltas if delta is not None]
        if not spelled and (said.logprobs or (self._token_ids and said.tokens)):
            spelled = [b'"content":""']
        for place, delta in enumerate(spelled):
            logprobs, ids = b"null", b""
            if place == 0:
                if self._top is not None and said.logprobs:
                    logprobs = json_bytes(
                        ChoiceLogprobs(content=chat_logprobs(self._front.tokenizer, said.logprobs, top=self._top))
                    )
                if self._token_ids:
                    ids = b',"token_ids":' + json_bytes(said.tokens)
            out += (
                self._begin[voice.index], delta, b'},"logprobs":', logprobs, b',"finish_reason":null', ids, b"}]", self._usage(flight),
            )  # fmt: skip

    def _finish(self, flight: Flight, voice: Voice, said: Said) -> bytes:
        return b"".join(
            (
                self._begin[voice.index], b'},"logprobs":null,"finish_reason":', json_bytes(said.finish), b',"stop_reason":',
                json_bytes(said.stop), b"}]", self._usage(flight),
            )
        )  # fmt: skip

    def _usage(self, flight: Flight) -> bytes:
        if not self._usage_always:
            return self._tail
        return b',"usage":' + json_bytes(usage_of(flight.counts)) + b"}\n\n"

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

    def whole(self, flight: Flight, wholes: list[Whole], *, timing: bool) -> ChatAnswer:
        """The answer that is not streamed: the sum of the same parts."""
        answer = ChatAnswer(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(whole) for whole in wholes],
            usage=usage_of(flight.counts),
        )
        if timing:
            answer = msgspec.structs.replace(answer, timing=timing_of(flight))
        if self._token_ids:
            answer = msgspec.structs.replace(answer, prompt_token_ids=list(flight.voices[0].request.tokens))
        return answer

    def _choice(self, whole: Whole) -> ChatChoice:
        said = whole.message
        nothing_else = not said.calls and said.reasoning is None
        message = AnswerMessage(content=said.content if said.content is not None or not nothing_else else "")
        if said.reasoning is not None:
            message = msgspec.structs.replace(message, reasoning_content=said.reasoning)
        if said.calls:
            made = [
                MadeCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
                for call in said.calls
            ]
            message = msgspec.structs.replace(message, tool_calls=made)
        logprobs = None
        if self._top is not None:
            logprobs = ChoiceLogprobs(content=chat_logprobs(self._front.tokenizer, whole.logprobs, top=self._top))
        finish = whole.voice.finish
        assert finish is not None
        choice = ChatChoice(
            index=whole.voice.index, message=message, logprobs=logprobs, finish_reason=finish, stop_reason=whole.stop
        )
        return msgspec.structs.replace(choice, token_ids=whole.tokens) if self._token_ids else choice


def _delta(piece: object) -> bytes | None:
    """The inside of `delta` for a piece that is not content."""
    match piece:
        case Content():
            return b'"content":' + json_bytes(piece.text)
        case Reasoning():
            return b'"reasoning_content":' + json_bytes(piece.text)
        case ToolCallBegin():
            call = {
                "index": piece.index,
                "id": piece.id,
                "type": "function",
                "function": {"name": piece.name, "arguments": ""},
            }
            return b'"tool_calls":[' + json_bytes(call) + b"]"
        case ToolArguments():
            return b'"tool_calls":[{"index":%d,"function":{"arguments":' % piece.index + json_bytes(piece.text) + b"}}]"
        case ToolCallEnd():
            return None
    raise AssertionError(f"unknown piece {piece!r}")
