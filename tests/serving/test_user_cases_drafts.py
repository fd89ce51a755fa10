"""Structured answers that come several tokens a step: rows A22 and A23 with drafts, through `tradewind serve --script`.

The scripted device forces its tokens past a grammar, so what is tried here is everything around it: chunks of one to five tokens under
concurrency, cut anywhere in the JSON, through scheduler, border, detokeniser and HTTP. That grammars hold is tested on a real device
(test_user_cases_engine.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from process_support import Server, server

OBJECT = {"text": 'br{ace}s "quoted" and é 🌊', "n": [1, 2.5, None, True], "deep": {"er": {}}}
PLACE = {"colour": "green", "at": [4, 0, 99]}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "at": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
    },
    "required": ["colour", "at"],
    "additionalProperties": False,
}
SHARED = "the same long beginning of every prompt, over several pages: " * 3


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(
        tmp_path_factory.mktemp("drafts"),
        drafts={"per_row": 4, "accepted": [4, 0, 1, 3, 2]},
        rules=[{"regex": "colour", "answer": json.dumps(PLACE)}],
        default={"answer": json.dumps(OBJECT, ensure_ascii=False)},
    ) as served:
        yield served


def ask(server: Server, words: str, shape: dict[str, Any]) -> tuple[int, Any]:
    status, answer, _ = server.post(
        "/v1/chat/completions",
        model="scripted",
        messages=[{"role": "user", "content": SHARED + words}],
        response_format=shape,
        max_tokens=300,
    )
    return status, answer


def at_once(server: Server, count: int, words: str, shape: dict[str, Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda i: ask(server, f"{words} {i}", shape), range(count)))
    assert [status for status, _ in found] == [200] * count, found
    choices = [answer["choices"][0] for _, answer in found]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [json.loads(choice["message"]["content"]) for choice in choices]


def test_a22_thirty_json_objects_with_drafts(drafting: Server) -> None:
    assert at_once(drafting, 30, "say something", {"type": "json_object"}) == [OBJECT] * 30
    assert drafting.get("/health")[0] == 200


def test_a23_a_schema_under_concurrency_with_drafts_and_a_shared_prefix(drafting: Server) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    assert at_once(drafting, 32, "which colour", shape) == [PLACE] * 32
    assert drafting.get("/health")[0] == 200
