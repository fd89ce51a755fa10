"""POST /v1/responses, the part that needs no memory: input in, items out, and the official events while they grow.

Knows: items, events and their order. Refuses to know: stored responses (store, previous_response_id and background are refused), sampling,
text, the engine. The answer that is not streamed is the same composer without anybody reading its events.

      created, in_progress, { item.added, part.added, delta ..., done, part.done, item.done } ..., completed | incomplete | failed
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.types import Receive, Scope, Send

from tradewind.contract.step import TokenLogprobs
from tradewind.serving.http.answers import (
    CompletionDetails,
    IncompleteDetails,
    OutputItem,
    OutputText,
    PromptDetails,
    ResponsesAnswer,
    ResponsesUsage,
    TokenLogprob,
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
from tradewind.serving.http.endpoint import Endpoint, timing_of
from tradewind.serving.http.errors import ApiError
from tradewind.serving.http.flight import Flight
from tradewind.serving.http.front import Front
from tradewind.serving.http.logprobs import chat_logprobs
from tradewind.serving.http.picturing import asked_in, fetched, pictures_from, prompt_with
from tradewind.serving.http.pipeline import Said, Voice
from tradewind.serving.http.speaking import SLOW, demands, form_of, speech_of
from tradewind.serving.http.sse import EventStream, json_bytes, named_event
from tradewind.serving.http.types import (
    ChatMessage,
    ContentPart,
    FunctionCall,
    ImageUrl,
    InputItem,
    InputPart,
    ResponsesRequest,
    TextFormat,
    ToolCall,
)
from tradewind.serving.images import Asked
from tradewind.serving.parsers.pieces import Content, Piece, Reasoning, ToolArguments, ToolCallBegin, ToolCallEnd


class ResponsesEndpoint(Endpoint[ResponsesRequest]):
    """Responses, streamed or not."""

    kind = ResponsesRequest

    async def answer(
        self, body: ResponsesRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream
    ) -> None:
        front, caller = self.front, caller_of(scope)
        model = check_model(front, body.model)
        tools = [
            {
                "type": "function",
                "function": {
                    "name": t.name,
                    "description": t.description,
                    "parameters": t.parameters,
                    "strict": t.strict,
                },
            }
            for t in body.tools or ()
        ]
        choice = msgspec.to_builtins(body.tool_choice)
        form = _form(body.text.format if body.text is not None else None)
        slow = demands(body, form, tools, choice, body.parallel_tool_calls)
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning is not None and body.reasoning.effort is not None:
            check_effort(front, "reasoning.effort")
            kwargs.setdefault("reasoning_effort", body.reasoning.effort)
        messages = messages_of(body.input, body.instructions)
        with_logprobs = bool(body.include)
        if body.top_logprobs and not with_logprobs:
            raise ApiError(
                400,
                "top_logprobs needs 'message.output_text.logprobs' in include",
                param="top_logprobs",
                code="invalid_value",
            )
        answer_id = "resp_" + secrets.token_hex(12)
        asked = asked_in(messages)

        def prepare(files: Sequence[Asked]) -> Voice:
            shape = form_of(front, body, form, field="text.format")
            speech = speech_of(front, tools, choice, parallel=body.parallel_tool_calls, form=shape)
            pictures = pictures_from(front, files, field="input")
            rendered = render_chat(
                front,
                messages,
                tools=speech.definitions,
                add_generation_prompt=True,
                continue_final_message=None,
                template_kwargs=kwargs,
                field="input",
            )
            sampling = sampling_of(
                front,
                body,
                max_tokens=body.max_output_tokens,
                n=1,
                logprobs=(body.top_logprobs or 0) if with_logprobs else None,
            )
            ids, images = prompt_with(front, rendered, pictures, field="input")
            (request,) = make_requests(
                front, caller, body, [ids], sampling,
                id=answer_id, prompt_field="input", limit_field="max_output_tokens", images=images,
            )  # fmt: skip
            (request,) = speech.constrained([request], rendered)
            parser = speech.make(rendered) if speech.make is not None else None
            return Voice(
                request,
                front.tokenizer,
                index=0,
                parser=parser,
                skip_special=speech.skip_special(body.skip_special_tokens),
            )

        with self.desk.place(1):
            files = await fetched(front, asked, field="input") if asked else asked
            voice = await self.desk.off_loop(
                partial(prepare, files), characters=SLOW if slow or asked else characters_of(messages)
            )
            composer = Composer(front, body, voice, id=answer_id, model=model)
            stream.spell_error = composer.failed
            async with Flight(
                front, self.desk, [voice], receive=receive, caller=caller, out=stream, id=answer_id, endpoint="/v1/responses",
                stream=bool(body.stream),
            ) as flight:  # fmt: skip
                if body.stream:
                    stream.keep_alive(front.options.keep_alive_s)
                async with aclosing(flight.parts()) as turns:
                    async for parts in turns:
                        for _, said in parts:
                            if said.finish is not None and (failed := flight.failure(said)) is not None:
                                raise failed
                            composer.take(said)
                        events = composer.events()
                        if body.stream and events:
                            await stream.write(events)
                if flight.open.left:
                    return
                answer = composer.answer(flight, timing=bool(body.timing))
                if body.stream:
                    await stream.end(composer.events())
                else:
                    await self.json(scope, send, answer)


def _form(given: TextFormat | None) -> dict[str, Any] | None:
    """`text.format` as chat's `response_format` spells it."""
    if given is None:
        return None
    if given.type != "json_schema":
        return {"type": given.type}
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema, "strict": given.strict}}


def messages_of(given: str | Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    """The conversation of an input. Raises ApiError naming the item that makes no sense."""
    messages: list[ChatMessage] = []
    if instructions:
        messages.append(ChatMessage(role="system", content=instructions))
    if isinstance(given, str):
        return [*messages, ChatMessage(role="user", content=given)]
    reasoning: str | None = None
    for place, item in enumerate(given):
        where = f"input[{place}]"
        kind = item.type or "message"
        if kind == "message":
            if item.role is None or item.content is None:
                missing = "role" if item.role is None else "content"
                raise ApiError(
                    400, f"{where}.{missing} is missing", param=f"{where}.{missing}", code="missing_required_parameter"
                )
            content = item.content
            parts = (
                content
                if isinstance(content, str)
                else [
                    _content(part, item.role, where=f"{where}.content[{index}]") for index, part in enumerate(content)
                ]
            )
            assistant = item.role == "assistant"
            messages.append(
                ChatMessage(role=item.role, content=parts, reasoning_content=reasoning if assistant else None)
            )
            reasoning = None
        elif kind == "function_call":
            for name in ("call_id", "name", "arguments"):
                if getattr(item, name) is None:
                    raise ApiError(
                        400, f"{where}.{name} is missing", param=f"{where}.{name}", code="missing_required_parameter"
                    )
            assert item.name is not None and item.arguments is not None
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                # Calls that follow each other, or the text before them, are one turn of the model.
                messages[-1] = msgspec.structs.replace(last, tool_calls=[*(last.tool_calls or ()), call])
            else:
                messages.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=reasoning))
            reasoning = None
        elif kind == "function_call_output":
            if item.call_id is None or item.output is None:
                missing = "call_id" if item.call_id is None else "output"
                raise ApiError(
                    400, f"{where}.{missing} is missing", param=f"{where}.{missing}", code="missing_required_parameter"
                )
            messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=item.output))
        else:
            parts_ = item.content if isinstance(item.content, list) else []
            reasoning = "".join(part.text or "" for part in parts_) or None
    if not messages:
        raise ApiError(400, "input has no message to answer", param="input", code="invalid_value")
    return messages


def _content(part: InputPart, role: str, *, where: str) -> ContentPart:
    """A part of a message as chat has it. Raises ApiError."""
    image = part.type == "input_image"
    name = "image_url" if image else "text"
    if getattr(part, name) is None:
        raise ApiError(400, f"{where}.{name} is missing", param=f"{where}.{name}", code="missing_required_parameter")
    if not image:
        return ContentPart(type="text", text=part.text)
    if role != "user":
        raise ApiError(
            400, f"{where} is an image in a message of the {role}; images stand in those of the user", param=where, code="invalid_value"
        )  # fmt: skip
    assert part.image_url is not None
    return ContentPart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail))


Kind = Literal["message", "reasoning", "function_call"]


class Growing:
    """An item that is not finished."""

    def __init__(self, kind: Kind, place: int, *, call: ToolCallBegin | None = None) -> None:
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        self.kind, self.place, self.call = kind, place, call
        self.id = prefix + secrets.token_hex(12)
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []

    def part(self, *, whole: bool) -> dict[str, Any]:
        """The content part."""
        text = "".join(self.text) if whole else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return dict(msgspec.to_builtins(OutputText(text=text, logprobs=self.logprobs if whole else [])))

    def item(self, status: Literal["in_progress", "completed", "incomplete"], *, whole: bool) -> OutputItem:
        """The item so far, or as it begins."""
        content = [self.part(whole=True)] if whole else []
        if self.kind == "message":
            return OutputItem(id=self.id, type="message", status=status, role="assistant", content=content)
        if self.kind == "reasoning":
            return OutputItem(id=self.id, type="reasoning", status=status, summary=[], content=content)
        assert self.call is not None
        arguments = "".join(self.text) if whole else ""
        return OutputItem(
            id=self.id,
            type="function_call",
            status=status,
            call_id=self.call.id,
            name=self.call.name,
            arguments=arguments,
        )


class Composer:
    """Pieces in, items and events out. One writer."""

    def __init__(self, front: Front, body: ResponsesRequest, voice: Voice, *, id: str, model: str) -> None:
        self._front, self._body, self._voice, self._id, self._model = front, body, voice, id, model
        self._created = time.time()
        self._number = 0
        self._out: list[bytes] = []
        self._open: Growing | None = None
        self._items: list[OutputItem] = []
        self._top = body.top_logprobs or 0 if body.include else None
        self._waiting: list[TokenLogprobs] = []
        self._tell("response.created", response=self._record("in_progress"))
        self._tell("response.in_progress", response=self._record("in_progress"))

    def events(self) -> bytes:
        """The events since the last call."""
        out, self._out = self._out, []
        return b"".join(out)

    def take(self, said: Said) -> None:
        """Takes what was said."""
        self._waiting += said.logprobs
        for piece in said.pieces:
            self._take(piece)

    def _take(self, piece: Piece) -> None:
        match piece:
            case Content():
                growing = self._on("message")
                growing.text.append(piece.text)
                logprobs = self._spoken()
                growing.logprobs += logprobs
                self._tell("response.output_text.delta", growing, content_index=0, delta=piece.text, logprobs=logprobs)
            case Reasoning():
                growing = self._on("reasoning")
                growing.text.append(piece.text)
                self._waiting.clear()
                self._tell("response.reasoning_text.delta", growing, content_index=0, delta=piece.text)
            case ToolCallBegin():
                self._close("completed")
                self._start(Growing("function_call", len(self._items), call=piece))
            case ToolArguments():
                assert self._open is not None and self._open.kind == "function_call"
                self._open.text.append(piece.text)
                self._tell("response.function_call_arguments.delta", self._open, delta=piece.text)
            case ToolCallEnd():
                self._close("completed" if piece.complete else "incomplete")

    def _spoken(self) -> list[TokenLogprob]:
        if self._top is None or not self._waiting:
            return []
        entries, self._waiting = self._waiting, []
        return chat_logprobs(self._front.tokenizer, entries, top=self._top)

    def _on(self, kind: Literal["message", "reasoning"]) -> Growing:
        """The open item of a kind; a new one when another was open."""
        if self._open is None or self._open.kind != kind:
            self._close("completed")
            self._start(Growing(kind, len(self._items)))
        assert self._open is not None
        return self._open

    def _start(self, growing: Growing) -> None:
        self._open = growing
        item = growing.item("in_progress", whole=False)
        self._tell("response.output_item.added", output_index=growing.place, item=item)
        if growing.kind != "function_call":
            self._tell("response.content_part.added", growing, content_index=0, part=growing.part(whole=False))

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        growing, self._open = self._open, None
        if growing is None:
            return
        text = "".join(growing.text)
        if growing.kind == "message":
            self._tell("response.output_text.done", growing, content_index=0, text=text, logprobs=growing.logprobs)
        elif growing.kind == "reasoning":
            self._tell("response.reasoning_text.done", growing, content_index=0, text=text)
        else:
            assert growing.call is not None
            self._tell("response.function_call_arguments.done", growing, name=growing.call.name, arguments=text)
        if growing.kind != "function_call":
            self._tell("response.content_part.done", growing, content_index=0, part=growing.part(whole=True))
        item = growing.item(status, whole=True)
        self._items.append(item)
        self._tell("response.output_item.done", output_index=growing.place, item=item)

    def answer(self, flight: Flight, *, timing: bool) -> ResponsesAnswer:
        """Ends it: the whole answer, and its last events."""
        finish = self._voice.finish
        cut = finish == "length"
        if not self._items and self._open is None:
            self._on("message")  # an empty answer is a message without text
        if self._open is not None and self._open.kind == "message":
            self._open.logprobs += self._spoken()
        self._close("incomplete" if cut or finish == "abort" else "completed")
        status: Literal["completed", "incomplete", "cancelled"] = (
            "incomplete" if cut else "cancelled" if finish == "abort" else "completed"
        )
        counts = flight.counts
        answer = msgspec.structs.replace(
            self._record(status),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut else None,
            usage=ResponsesUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=PromptDetails(cached_tokens=counts.cached_tokens),
                output_tokens=counts.completion_tokens,
                output_tokens_details=CompletionDetails(reasoning_tokens=counts.reasoning_tokens),
                total_tokens=counts.prompt_tokens + counts.completion_tokens,
            ),
        )
        if timing:
            answer = msgspec.structs.replace(answer, timing=timing_of(flight))
        self._tell("response.incomplete" if status != "completed" else "response.completed", response=answer)
        return answer

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that could not be finished."""
        self._tell("error", code=error.code, message=error.message, param=error.param)
        record = msgspec.structs.replace(
            self._record("failed"), error={"code": error.code or "server_error", "message": error.message}
        )
        self._tell("response.failed", response=record)
        return self.events()

    def _record(
        self, status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    ) -> ResponsesAnswer:
        body = self._body
        effort = body.reasoning.effort if body.reasoning is not None else None
        return ResponsesAnswer(
            id=self._id,
            created_at=self._created,
            status=status,
            model=self._model,
            output=list(self._items),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            reasoning={"effort": effort, "summary": None},
            temperature=1.0 if body.temperature is None else body.temperature,
            tool_choice="auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            tools=[
                {"description": None, "parameters": None, "strict": None, **msgspec.to_builtins(tool)}
                for tool in body.tools or ()
            ],
            top_p=1.0 if body.top_p is None else body.top_p,
            top_logprobs=body.top_logprobs or 0,
            user=body.user,
        )

    def _tell(self, name: str, growing: Growing | None = None, /, **facts: Any) -> None:
        record: dict[str, Any] = {"type": name, "sequence_number": self._number}
        if growing is not None:
            record |= {"item_id": growing.id, "output_index": growing.place}
        record |= facts
        self._number += 1
        if self._body.stream:
            self._out.append(named_event(name, json_bytes(record)))
