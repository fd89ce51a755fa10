"""POST /v1/embeddings: checked like every other request, and then refused, because the engine does not give hidden states yet.

Knows: the shape of the request. Refuses to know: pooling; what is missing is a column of hidden states in the contract between the wings.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from tradewind.serving.http.asking import check_model
from tradewind.serving.http.completions import prompts_of
from tradewind.serving.http.endpoint import Endpoint
from tradewind.serving.http.errors import ApiError
from tradewind.serving.http.sse import EventStream
from tradewind.serving.http.types import EmbeddingsRequest


class EmbeddingsEndpoint(Endpoint[EmbeddingsRequest]):
    """Always 501 when the request itself is right."""

    kind = EmbeddingsRequest

    async def answer(
        self, body: EmbeddingsRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream
    ) -> None:
        check_model(self.front, body.model)
        prompts_of(body.input, field="input")
        raise ApiError(
            501,
            "embeddings are not available: the engine gives tokens and logprobs, not the hidden states that would have to be pooled",
            code="not_implemented",
        )
