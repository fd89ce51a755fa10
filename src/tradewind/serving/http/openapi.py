"""The description of the server that clients and fuzzers read, made from the same records that decode and encode.

Knows: which endpoint takes and gives which record, and with which statuses. Refuses to know: what they do.
"""

from __future__ import annotations

import html
from typing import Any

import msgspec

from tradewind.serving.http import answers, types

VERSION = "1.0"
EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event; `data` is JSON, or [DONE]."""


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint."""

    path: str
    method: str
    summary: str
    takes: type | None = None
    gives: type | None = None
    streams: bool = False
    text: str = ""
    """The content type of an answer that is not JSON."""
    also: tuple[int, ...] = ()
    """Statuses beyond those that every endpoint of its kind has."""
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Parameters of the URL, none of them needed: name and schema."""
    open: bool = False
    """Needs no API key."""


ENDPOINTS: tuple[Described, ...] = (
    Described(
        path="/v1/chat/completions", method="post", summary="Answer a conversation", takes=types.ChatRequest, gives=answers.ChatAnswer,
        streams=True, also=(429, 500, 503, 504),
    ),
    Described(
        path="/v1/completions", method="post", summary="Continue text or token ids", takes=types.CompletionRequest,
        gives=answers.TextAnswer, streams=True, also=(429, 500, 503, 504),
    ),
    Described(
        path="/v1/responses", method="post", summary="Answer an input, without memory", takes=types.ResponsesRequest,
        gives=answers.ResponsesAnswer, streams=True, also=(429, 500, 503, 504),
    ),
    Described(
        path="/v1/embeddings", method="post", summary="Embeddings of texts", takes=types.EmbeddingsRequest,
        gives=answers.EmbeddingsAnswer, also=(429, 500, 503, 504),
    ),
    Described(path="/v1/models", method="get", summary="The models that are served", gives=answers.ModelList),
    Described(path="/v1/models/{model}", method="get", summary="One model", gives=answers.ModelRecord, also=(404,)),
    Described(
        path="/v1/receipts", method="get", summary="The slowest requests, and where their time went", also=(400, 404),
        query=(("slowest", {"type": "integer", "minimum": 1, "maximum": 100, "default": 10}),),
    ),
    Described(path="/v1/receipts/{id}", method="get", summary="Where the time of one request went", also=(404,)),
    Described(
        path="/tokenize", method="post", summary="Token ids of a prompt or a conversation", takes=types.TokenizeRequest,
        gives=answers.Tokenized,
    ),
    Described(path="/detokenize", method="post", summary="Text of token ids", takes=types.DetokenizeRequest, gives=answers.Detokenized),
    Described(
        path="/v1/load_lora_adapter", method="post", summary="Give an adapter in a folder a name to ask for it by",
        takes=types.LoadAdapterRequest, gives=answers.AdaptersLoaded, also=(403,),
    ),
    Described(
        path="/v1/unload_lora_adapter", method="post", summary="Take an adapter's name away", takes=types.UnloadAdapterRequest,
        gives=answers.AdaptersLoaded, also=(403, 404),
    ),
    Described(path="/abort", method="post", summary="End open requests", takes=types.AbortRequest, gives=answers.Aborted),
    Described(
        path="/sleep", method="post", summary="Finish what is open, take nothing new, give the cache's memory back",
        gives=answers.Sleeping, also=(400, 403, 409, 503),
        query=(("level", {"type": "integer", "minimum": 1, "maximum": 1, "default": 1}),),
    ),
    Described(path="/wake_up", method="post", summary="Take requests again", gives=answers.Sleeping, also=(403,)),
    Described(path="/is_sleeping", method="get", summary="Whether the server sleeps", gives=answers.Sleeping),
    Described(path="/health", method="get", summary="Whether the engine makes progress", gives=answers.Health, also=(503,), open=True),
    Described(path="/metrics", method="get", summary="Metrics for Prometheus", text="text/plain", also=(404,)),
    Described(path="/openapi.json", method="get", summary="This description", open=True),
    Described(path="/docs", method="get", summary="This description for people", text="text/html", open=True),
)  # fmt: skip


def schema(*, keys: bool) -> dict[str, Any]:
    """The OpenAPI document. `keys`: API keys are needed."""
    kinds = [kind for one in ENDPOINTS for kind in (one.takes, one.gives) if kind is not None]
    kinds.append(answers.ErrorBody)
    refs, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, refs, strict=True))
    paths: dict[str, Any] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, by_kind, keys=keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tradewind",
            "version": VERSION,
            "description": "OpenAI-compatible. A field that is not listed is refused.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(one: Described, by_kind: dict[type, Any], *, keys: bool) -> dict[str, Any]:
    success: dict[str, Any] = {}
    if one.gives is not None:
        success["application/json"] = {"schema": by_kind[one.gives]}
    elif one.text:
        success[one.text] = {"schema": {"type": "string"}}
    else:
        success["application/json"] = {"schema": {"type": "object"}}
    if one.streams:
        success["text/event-stream"] = {"schema": EVENT}
    answers_: dict[str, Any] = {"200": {"description": "The answer", "content": success}}
    refusal = {"application/json": {"schema": by_kind[answers.ErrorBody]}}
    statuses = [*((400, 404, 413, 415) if one.takes is not None else ()), *one.also]
    if keys and not one.open:
        statuses.append(401)
    for status in sorted(set(statuses)):
        content = success if one.path == "/health" else refusal
        answers_[str(status)] = {"description": "A refusal", "content": content}
    operation: dict[str, Any] = {
        "summary": one.summary,
        "operationId": one.method + one.path.replace("/", "_"),
        "responses": answers_,
    }
    if one.takes is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": by_kind[one.takes]}}}
    if one.query:
        operation["parameters"] = [{"name": name, "in": "query", "schema": shape} for name, shape in one.query]
    if "{" in one.path:
        name = one.path.partition("{")[2].rstrip("}")
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if keys and not one.open:
        operation["security"] = [{"key": []}]
    return operation


# -- for people


def docs_html(document: dict[str, Any]) -> str:
    """One page without scripts."""
    parts = [
        "<!doctype html><meta charset=utf-8><title>Tradewind API</title><meta name=viewport content='width=device-width'>",
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b2733}",
        "code{background:#eef2f5;padding:0 .25em;border-radius:3px}table{border-collapse:collapse;width:100%;margin:.5rem 0 2rem}",
        "td,th{border-bottom:1px solid #d8e0e6;text-align:left;padding:.25rem .5rem;vertical-align:top}h2{margin-top:2.5rem}</style>",
        "<h1>Tradewind API</h1><p>Made from <a href='/openapi.json'>/openapi.json</a>. A field that is not listed is refused.</p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(operation['summary'])}."
            )
            parts.append(f" Statuses: {', '.join(sorted(operation['responses']))}.</p>")
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                parts.append(_table(document["components"]["schemas"][name]))
    return "".join(parts)


def _table(shape: dict[str, Any]) -> str:
    needed = set(shape.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code>{' (needed)' if name in needed else ''}<td>{html.escape(_words(kind))}"
        for name, kind in shape["properties"].items()
    )
    return f"<table><tr><th>field<th>value</tr>{rows}</table>"


def _words(kind: dict[str, Any]) -> str:
    if "anyOf" in kind:
        return " or ".join(_words(one) for one in kind["anyOf"] if one.get("type") != "null") or "null"
    if "$ref" in kind:
        return str(kind["$ref"]).rsplit("/", 1)[1]
    if "enum" in kind:
        return " | ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in kind["enum"])
    if kind.get("type") == "array":
        return f"list of {_words(kind['items'])}" if kind.get("items") else "list"
    low, high = kind.get("minimum", kind.get("exclusiveMinimum")), kind.get("maximum")
    return str(kind.get("type", "any")) + (f" from {low} to {high}" if low is not None and high is not None else "")
