"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while the server runs.

Knows: who may name a folder, and which. Refuses to know: what an adapter is (serving/adapters.py) and how one is asked for (asking.py).
"""

from __future__ import annotations

from pathlib import Path

from starlette.types import Receive, Scope, Send

from tradewind.config.adapter_files import look_at
from tradewind.contract.errors import RequestError, UserError
from tradewind.serving.adapters import AdapterBook
from tradewind.serving.http.answers import AdaptersLoaded
from tradewind.serving.http.endpoint import Endpoint
from tradewind.serving.http.errors import ApiError
from tradewind.serving.http.front import Front
from tradewind.serving.http.sse import EventStream
from tradewind.serving.http.types import LoadAdapterRequest, UnloadAdapterRequest

IN_A_THREAD = 1 << 30
"""Characters of a text that is as much work as reading an adapter's files: never done in the event loop."""


class LoadAdapterEndpoint(Endpoint[LoadAdapterRequest]):
    """Gives the adapter in a folder a name, or the name to newer files."""

    kind = LoadAdapterRequest

    async def answer(
        self, body: LoadAdapterRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream
    ) -> None:
        book, folder = _allowed(self.front), _inside(self.front, body.lora_path)
        try:
            found = await self.desk.off_loop(lambda: look_at(folder), characters=IN_A_THREAD)
            book.check(body.lora_name, found)
            await self.front.client.check_adapter(found.key)
            book.take(body.lora_name, found)
        except UserError as error:
            raise ApiError(400, str(error), param="lora_path", code="invalid_value") from None
        await self.json(scope, send, AdaptersLoaded(loaded=list(book.names)))


class UnloadAdapterEndpoint(Endpoint[UnloadAdapterRequest]):
    """Takes a name away; requests that run go on."""

    kind = UnloadAdapterRequest

    async def answer(
        self, body: UnloadAdapterRequest, scope: Scope, receive: Receive, send: Send, stream: EventStream
    ) -> None:
        book = _allowed(self.front)
        try:
            book.unload(body.lora_name)
        except RequestError as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from None
        await self.json(scope, send, AdaptersLoaded(loaded=list(book.names)))


def _allowed(front: Front) -> AdapterBook:
    """The book, where the operator lets it be changed."""
    if front.adapters is None or front.options.adapter_folder is None:
        raise ApiError(
            403, "adapters cannot be loaded at run time here: the operator named no folder for them", code="not_allowed"
        )
    return front.adapters


def _inside(front: Front, path: str) -> Path:
    """A folder within the one that the operator named."""
    assert front.options.adapter_folder is not None
    within = Path(front.options.adapter_folder).resolve()
    try:
        folder = (within / path).resolve()
    except (OSError, ValueError):
        folder = within.parent
    if not folder.is_relative_to(within):
        raise ApiError(
            403, f"{path[:100]!r} is not within the folder that the operator named for adapters", param="lora_path",
            code="not_allowed",
        )  # fmt: skip
    return folder
