"""The application: one table of endpoints, the edge around them.

Knows: paths and methods. Refuses to know: how a server is run (uvicorn, signals, processes are the lifecycle's).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tradewind.serving.http.adapters import LoadAdapterEndpoint, UnloadAdapterEndpoint
from tradewind.serving.http.admin import (
    AbortEndpoint,
    DetokenizeEndpoint,
    DocsPage,
    HealthPage,
    IsSleepingPage,
    MetricsPage,
    ModelPage,
    ModelsPage,
    ReceiptPage,
    ReceiptsPage,
    SchemaPage,
    SleepPage,
    TokenizeEndpoint,
    WakePage,
)
from tradewind.serving.http.chat import ChatEndpoint
from tradewind.serving.http.completions import CompletionsEndpoint
from tradewind.serving.http.desk import Desk
from tradewind.serving.http.edge import Edge, caller_of
from tradewind.serving.http.embeddings import EmbeddingsEndpoint
from tradewind.serving.http.errors import ApiError
from tradewind.serving.http.front import Front
from tradewind.serving.http.responses import ResponsesEndpoint


def make_app(front: Front) -> Starlette:
    """The ASGI application. Its `state.desk` counts what is open and is told when the server drains (`desk.closing = True`)."""
    desk = Desk(front)
    posts: dict[str, Callable[[Front, Desk], ASGIApp]] = {
        "/v1/chat/completions": ChatEndpoint,
        "/v1/completions": CompletionsEndpoint,
        "/v1/responses": ResponsesEndpoint,
        "/v1/embeddings": EmbeddingsEndpoint,
        "/tokenize": TokenizeEndpoint,
        "/detokenize": DetokenizeEndpoint,
        "/v1/load_lora_adapter": LoadAdapterEndpoint,
        "/v1/unload_lora_adapter": UnloadAdapterEndpoint,
        "/abort": AbortEndpoint,
        "/sleep": SleepPage,
        "/wake_up": WakePage,
    }
    gets: dict[str, Callable[[Front, Desk], ASGIApp]] = {
        "/v1/models": ModelsPage,
        "/v1/models/{model:path}": ModelPage,
        "/v1/receipts": ReceiptsPage,
        "/v1/receipts/{id}": ReceiptPage,
        "/health": HealthPage,
        "/is_sleeping": IsSleepingPage,
        "/metrics": MetricsPage,
        "/openapi.json": SchemaPage,
        "/docs": DocsPage,
    }

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            desk.shutdown()

    app = Starlette(
        routes=[
            *(Route(path, kind(front, desk), methods=["POST"]) for path, kind in posts.items()),
            *(Route(path, page(front, desk), methods=["GET"]) for path, page in gets.items()),
            *front.more_routes,
        ],
        middleware=[Middleware(Edge, options=front.options, open_paths=front.open_paths)],
        exception_handlers={HTTPException: _http_error, Exception: _bug},
        lifespan=lifespan,
    )
    app.state.desk = desk
    app.state.front = front
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path[:200], request.method
    if error.status_code == 404:
        refusal = ApiError(404, f"there is nothing at {path}; /docs lists what is here", code="not_found")
    elif error.status_code == 405:
        refusal = ApiError(
            405, f"{path} does not take {method}", code="method_not_allowed", headers=dict(error.headers or {})
        )
    else:
        refusal = ApiError(error.status_code, str(error.detail))
    return _response(request, refusal)


async def _bug(request: Request, error: Exception) -> Response:
    return _response(request, ApiError(500, "the server met a bug; the log has the details", code="internal_error"))


def _response(request: Request, error: ApiError) -> Response:
    headers = {name.decode(): value.decode("latin-1") for name, value in caller_of(request.scope).headers}
    return Response(
        error.body(), status_code=error.status, media_type="application/json", headers={**headers, **error.headers}
    )
