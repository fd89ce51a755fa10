"""The page at /: a playground and the live board, one document without a build step.

Knows: how the sources beside this file become one document whose policy allows its own script and style and nothing else, and the
JSON answers it reads. Refuses to know: where the numbers come from (callables).

      index.html + page.css + chart.js, ..., chat.js  ->  one answer, inline;  Content-Security-Policy names them by hash
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Protocol, Self
from urllib.parse import parse_qs

from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from tradewind.serving.http.edge import caller_of, refuse, respond
from tradewind.serving.http.errors import ApiError

STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')
OPEN_PATHS = frozenset({"/"})
"""For `Front.open_paths`: the document holds nothing that a key protects."""
TARGETS = ("ttft", "tpot", "e2e")
MAX_TARGET_MS = 1e7
PLAIN_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
SAME_FOR_ALL = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, kw_only=True)
class HomePage:
    """The document and what is sent with it."""

    body: bytes
    policy: str
    etag: str

    @classmethod
    def read(cls) -> Self:
        """Puts the document together from the files of this package."""
        here = resources.files(__name__)
        hashes: dict[str, list[str]] = {"style": [], "script": []}

        def inlined(kind: str, name: str) -> str:
            text = (here / name).read_text(encoding="utf-8")
            assert f"</{kind}" not in text, f"{name} would end its own element"
            digest = hashlib.sha256(text.encode()).digest()
            hashes[kind].append(f"'sha256-{base64.b64encode(digest).decode()}'")
            return f"<{kind}>{text}</{kind}>"

        document = (here / "index.html").read_text(encoding="utf-8")
        document = STYLE.sub(lambda found: inlined("style", found[1]), document)
        document = SCRIPT.sub(lambda found: inlined("script", found[1]), document)
        body = document.encode()
        policy = "; ".join(
            (
                "default-src 'none'",
                f"script-src {' '.join(hashes['script'])}",
                f"style-src {' '.join(hashes['style'])}",
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            )
        )
        return cls(body=body, policy=policy, etag=f'"{hashlib.sha256(body).hexdigest()[:24]}"')

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers GET /."""
        headers = {
            **SAME_FOR_ALL,
            "Content-Security-Policy": self.policy,
            "ETag": self.etag,
            "Cache-Control": "no-cache",
        }
        known = next((value for name, value in scope["headers"] if name == b"if-none-match"), b"")
        if self.etag.encode() in known:
            spelled = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 304, "headers": [*caller_of(scope).headers, *spelled]})
            await send({"type": "http.response.body", "body": b""})
            return
        await respond(scope, send, 200, self.body, content_type=b"text/html; charset=utf-8", headers=headers)


class BoardJson(Protocol):
    """`observability.board.Board.json`."""

    def __call__(self, tenant: str, *, steps_since: int | None, targets: Mapping[str, float]) -> bytes: ...


class BoardPage:
    """GET /board. `?steps=N` adds the steps after N and the caller's own requests in them; `?ttft_ms=500&tpot_ms=50&e2e_ms=9000` are
    targets for classes that have none of their own."""

    def __init__(self, give: BoardJson) -> None:
        self._give = give

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers GET."""
        try:
            steps_since, targets = _asked(scope["query_string"])
        except ApiError as error:
            await refuse(scope, send, error)
            return
        body = self._give(caller_of(scope).tenant, steps_since=steps_since, targets=targets)
        await respond(scope, send, 200, body, headers={**SAME_FOR_ALL, "Cache-Control": "no-store"})


def _asked(query: bytes) -> tuple[int | None, dict[str, float]]:
    """(steps after which, targets in seconds by metric). Raises ApiError."""
    given = {name: values[-1] for name, values in parse_qs(query.decode("latin-1"), keep_blank_values=True).items()}
    steps = given.pop("steps", None)
    if steps is not None and not (steps.isascii() and steps.isdigit() and len(steps) <= 15):
        said = f"steps is {steps[:100]!r}; it must be a whole number, the last step that is known"
        raise ApiError(400, said, param="steps", code="invalid_value")
    targets: dict[str, float] = {}
    for metric in TARGETS:
        text = given.pop(f"{metric}_ms", None)
        if text is None:
            continue
        if not PLAIN_NUMBER.fullmatch(text) or not 0 < float(text) <= MAX_TARGET_MS:
            said = (
                f"{metric}_ms is {text[:100]!r}; it must be a number of milliseconds over 0 and up to {MAX_TARGET_MS:g}"
            )
            raise ApiError(400, said, param=f"{metric}_ms", code="invalid_value")
        targets[metric] = float(text) / 1000
    if given:
        name = next(iter(given))[:100]
        said = f"{name!r} is not known here; /board takes steps, {', '.join(f'{metric}_ms' for metric in TARGETS)}"
        raise ApiError(400, said, param=name, code="unknown_parameter")
    return None if steps is None else int(steps), targets


class JsonPage:
    """A document that a callable gives."""

    def __init__(self, give: Callable[[], bytes]) -> None:
        self._give = give

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers GET."""
        headers = {**SAME_FOR_ALL, "Cache-Control": "no-store"}
        await respond(scope, send, 200, self._give(), headers=headers)


def page_routes(
    *, board: BoardJson, plan: Callable[[], bytes], drift: Callable[[], bytes] = lambda: b"null"
) -> tuple[BaseRoute, ...]:
    """The routes /, /board, /plan and /drift for `Front.more_routes`; all but the first answer with the JSON that the callables give."""
    return (
        Route("/", HomePage.read(), methods=["GET"]),
        Route("/board", BoardPage(board), methods=["GET"]),
        Route("/plan", JsonPage(plan), methods=["GET"]),
        Route("/drift", JsonPage(drift), methods=["GET"]),
    )
