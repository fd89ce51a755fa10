"""The outermost layer of the front: who asks, under which id, from which page; and the one way in which bodies come in and answers go out.

Knows: API keys, tenants, request ids, CORS, body sizes. Refuses to know: what is asked.

A tenant is the hash of an API key. It is part of every prefix-cache key, so the holder of one key can never see, by hits or by time,
what the holder of another has sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from tradewind.serving.http.errors import ApiError
from tradewind.serving.http.front import Options

OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
"""What anybody may read."""
MAX_ID = 128
Headers = list[tuple[bytes, bytes]]


class Caller:
    """Who sent a request; carried in the ASGI scope as "tradewind"."""

    __slots__ = ("headers", "parsed_s", "read_s", "received_s", "request_id", "sent", "tenant", "traceparent")

    def __init__(
        self,
        request_id: str,
        tenant: str,
        headers: Headers,
        *,
        traceparent: str = "",
        sent: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self.sent = sent
        """The request's own headers, names in lower case, as ASGI has them."""
        self.request_id, self.tenant, self.headers = request_id, tenant, headers
        """`headers` belong on every answer to this request."""
        self.traceparent = traceparent
        """W3C Trace Context of the caller's span; empty: none."""
        self.received_s = self.read_s = self.parsed_s = time.monotonic()
        """When the request was there, its whole body, and what the body says."""


def caller_of(scope: Scope) -> Caller:
    """The caller that the edge found."""
    caller = scope["tradewind"]
    assert isinstance(caller, Caller)
    return caller


class KeyRing:
    """API keys, as hashes. `tenant_of` takes the same time whichever key is right, or none."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant_of(self, key: bytes) -> str | None:
        """The tenant's name, or None when the key is unknown."""
        digest = hashlib.sha256(key).digest()
        known = False
        for one in self._digests:
            known |= hmac.compare_digest(one, digest)
        return "key-" + hashlib.sha256(b"tenant" + digest).hexdigest()[:16] if known else None


class Edge:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, options: Options, open_paths: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS | open_paths
        self._keys = KeyRing(options.api_keys)
        self._origins = frozenset(origin.encode() for origin in options.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given_id = authorization = origin = api_key = traceparent = b""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given_id = value
            elif name == b"authorization":
                authorization = value
            elif name == b"x-api-key":
                api_key = value
            elif name == b"origin":
                origin = value
            elif name == b"traceparent":
                traceparent = value
        request_id = _clean_id(given_id) or "req-" + secrets.token_hex(12)
        headers: Headers = [(b"x-request-id", request_id.encode())]
        if origin and self._origins:
            if b"*" in self._origins:
                headers.append((b"access-control-allow-origin", b"*"))
            elif origin in self._origins:
                headers += [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
            headers.append((b"access-control-expose-headers", b"x-request-id, retry-after, warning"))
        caller = scope["tradewind"] = Caller(
            request_id, "", headers, traceparent=_clean_id(traceparent), sent=scope["headers"]
        )
        if scope["method"] == "OPTIONS" and origin and self._origins:
            headers += [
                (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
                (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id"),
                (b"access-control-max-age", b"600"),
            ]
            await respond(scope, send, 204, b"")
            return
        if self._keys and scope["path"] not in self._open_paths:
            scheme, _, token = authorization.partition(b" ")
            key = token.strip() if scheme.lower() == b"bearer" else api_key
            tenant = self._keys.tenant_of(key)
            if tenant is None:
                what = "this API key is not known" if key else "an API key is needed: send 'Authorization: Bearer KEY'"
                error = ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await refuse(scope, send, error)
                return
            caller.tenant = tenant
        await self._app(scope, receive, send)


def _clean_id(given: bytes) -> str:
    """A client's request id when it is short printable ASCII, otherwise nothing."""
    if not given or len(given) > MAX_ID or not all(0x21 <= byte < 0x7F for byte in given):
        return ""
    return given.decode("ascii")


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 over `limit` bytes and 415 for what does not call itself JSON."""
    length = kind = b""
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = value
        elif name == b"content-type":
            kind = value.split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        shown = kind.decode("latin-1")[:60]
        said = f"the content type is {shown}" if shown else "the request has no content type"
        raise ApiError(415, f"{said}; send application/json", code="unsupported_media_type")
    if length.isdigit() and int(length) > limit:
        raise ApiError(413, f"the body has {int(length)} bytes; at most {limit} are allowed", code="body_too_large")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise ApiError(
                413, f"the body has more than {limit} bytes, which is the most that is allowed", code="body_too_large"
            )
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class ClientGone(Exception):
    """The client left before it had sent everything; nobody is there to be answered."""


async def respond(
    scope: Scope,
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    """A whole answer."""
    out: Headers = [*caller_of(scope).headers]
    if status != 204:
        out += [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    if headers:
        out += [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": out})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """A refusal."""
    await respond(scope, send, error.status, error.body(), headers=error.headers)
