"""POST /v1/embeddings: texts or token ids to vectors.

Knows: the shapes of the request and the answer, float lists and base64. Refuses to know: pooling (the model's own is taken) and the
engine (flight.py).
"""

from __future__ import annotations

import base64
import secrets
import sys
import time
from contextlib import aclosing

import numpy as np
from starlette.types import Receive, Scope, Send

from tradewind.contract.errors import RequestError
from tradewind.contract.events import TokensOut
from tradewind.contract.request import Request
from tradewind.contract.step import Floats
from tradewind.serving.embedding import vector_of
from tradewind.serving.http.answers import EmbeddingRecord, EmbeddingsAnswer, EmbeddingsUsage
from tradewind.serving.http.asking import adapter_of, check_model
from tradewind.serving.http.completions import prompt_ids, prompts_of
from tradewind.serving.http.edge import Caller, caller_of
from tradewind.serving.http.endpoint import Endpoint
from tradewind.serving.http.errors import ApiError, api_error
from tradewind.serving.http.flight import Flight
from tradewind.serving.http.pipeline import Said, Voice
from tradewind.serving.http.sse import EventStream
from tradewind.serving.http.types import EmbeddingsRequest


class Listener(Voice):
    """One text's way through the engine: a voice that says nothing, and in the end has a vector."""

    embedding: bytes | None = None

    def take(self, event: TokensOut) -> Said | None:
        """The end, when it comes."""
        if event.finish is None or self.finish is not None:
            return None
        self.over = True
        self.embedding, self.cached_tokens = event.embedding, event.cached_tokens
        self.finish, self.finished_s, self.error = event.finish, event.at_s, event.error
        return Said([], (), (), self.finish, None, self.error, event.overloaded)


class EmbeddingsEndpoint(Endpoint[EmbeddingsRequest]):
    """Vectors of length 1, in the order of the inputs."""

    kind = EmbeddingsRequest

    async def answer(
        self, body: EmbeddingsRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream
    ) -> None:
        front, caller = self.front, caller_of(scope)
        model = check_model(front, body.model)
        texts = prompts_of(body.input, field="input")
        most = front.options.max_sequences
        if len(texts) > most:
            raise ApiError(
                400, f"input has {len(texts)} texts; one request may have {most}", param="input", code="invalid_value"
            )
        self._check_dimensions(body.dimensions)
        answer_id = "embd-" + secrets.token_hex(12)

        def prepare() -> list[Listener]:
            requests = [
                self._request(text, caller, body, id=answer_id, place=place, of=len(texts))
                for place, text in enumerate(texts)
            ]
            return [
                Listener(request, front.tokenizer, index=place, prompt=place) for place, request in enumerate(requests)
            ]

        with self.desk.place(len(texts)):
            characters = sum(len(text) * (1 if isinstance(text, str) else 4) for text in texts)
            listeners = await self.desk.off_loop(prepare, characters=characters)
            async with Flight(
                front, self.desk, listeners, receive=receive, caller=caller, out=stream, id=answer_id, endpoint="/v1/embeddings",
                stream=False,
            ) as flight:  # fmt: skip
                async with aclosing(flight.parts()) as turns:
                    async for parts in turns:
                        for _, said in parts:
                            if (failed := flight.failure(said)) is not None:
                                raise failed
                if flight.open.left:
                    return
                vectors = [self._vector(listener, body.dimensions) for listener in listeners]
                tokens = flight.counts.prompt_tokens
            spelled = base64_of if body.encoding_format == "base64" else list_of
            answer = EmbeddingsAnswer(
                data=[EmbeddingRecord(index=place, embedding=spelled(vector)) for place, vector in enumerate(vectors)],
                model=model,
                usage=EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens),
            )
            await self.json(scope, send, answer)

    def _request(
        self, text: str | list[int], caller: Caller, body: EmbeddingsRequest, *, id: str, place: int, of: int
    ) -> Request:
        """The engine's request for one text. Raises ApiError naming the input and the numbers."""
        front = self.front
        field = "input" if of == 1 else f"input[{place}]"
        tokens = prompt_ids(front, text, special=True, field=field)
        if len(tokens) > front.max_context:
            raise ApiError(
                400, f"{field} has {len(tokens)} tokens; the limit is {front.max_context} ({len(tokens) - front.max_context} too many)",
                param=field, code="context_length_exceeded",
            )  # fmt: skip
        now, timeout_s = time.monotonic(), front.options.request_timeout_s
        try:
            return front.intake.embedding(
                tokens,
                now_s=now,
                request_id=id if of == 1 else f"{id}-{place}",
                tenant=caller.tenant or (body.user or ""),
                cache_salt=f"{caller.tenant}:" if caller.tenant else "",
                adapter=adapter_of(front, body.model),
                deadline_s=None if timeout_s is None else now + timeout_s,
            )
        except RequestError as error:
            raise api_error(error, param=field, code="invalid_value") from None

    def _check_dimensions(self, dimensions: int | None, *, size: int | None = None) -> None:
        try:
            self.front.intake.check_dimensions(dimensions, size=size)
        except RequestError as error:
            raise api_error(error, param="dimensions", code="invalid_value") from None

    def _vector(self, listener: Listener, dimensions: int | None) -> Floats:
        """The vector of a text that is done, cut to `dimensions`."""
        if listener.embedding is None:
            raise ApiError(500, "the engine could not finish this request: it was aborted", code="aborted")
        whole = vector_of(listener.embedding)
        self._check_dimensions(dimensions, size=len(whole))
        return vector_of(listener.embedding, dimensions=dimensions)


def list_of(vector: Floats) -> list[float]:
    """As a JSON array."""
    values: list[float] = vector.tolist()
    return values


def base64_of(vector: Floats) -> str:
    """As the official clients read it: float32, little endian."""
    values = vector if sys.byteorder == "little" else vector.astype(np.dtype("<f4"))
    return base64.b64encode(values.tobytes()).decode()
