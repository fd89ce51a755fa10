"""The server against its own /openapi.json: it answers as the schema says, refuses what that forbids, and nothing breaks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_support import HERMES, Live, live, until
from hypothesis import HealthCheck, settings

from tradewind.serving.http import types
from tradewind.serving.http.front import Options
from tradewind.serving.http.openapi import ENDPOINTS, schema

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    options = Options(allow_sleep=True)
    kept = {"receipts": lambda name, tenant: None, "slowest": lambda count, tenant: b'{"receipts":[]}'}
    with live(says={"": "ok"}, speech=HERMES, metrics=lambda: "up 1\n", options=options, **kept) as one:
        yield one
        one.post("/wake_up", None)
        assert one.chat("x")["choices"][0]["message"]["content"] == "ok"
        until(lambda: one.running() == 0 and one.app.state.desk.sequences == 0, "something is left behind")
        for path, met in STATUSES.items():
            # Adapters are folders with files, which nobody draws at random (test_http_adapters.py has them).
            assert met[200] or "{" in path or "lora_adapter" in path, (
                f"no generated request to {path} was a good one: {met}"
            )


STATUSES: dict[str, Counter[int]] = {}
API = schemathesis.openapi.from_dict(schema(keys=False))


@API.parametrize()
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
def test_the_server_is_as_it_describes_itself(case: Any, server: Live) -> None:
    response = case.call(base_url=server.url, timeout=20)
    STATUSES.setdefault(case.operation.path, Counter())[response.status_code] += 1
    checks = [
        content_type_conformance,
        not_a_server_error,
        response_schema_conformance,
        status_code_conformance,
        negative_data_rejection,
    ]
    case.validate_response(response, checks=checks)


def test_every_route_is_described(server: Live) -> None:
    described = {(one.path.split("{")[0], one.method) for one in ENDPOINTS}
    routes = {
        (route.path.split("{")[0], method.lower())
        for route in server.app.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    assert routes == described


def test_the_schema_has_no_loose_ends() -> None:
    document = schema(keys=True)
    text = msgspec.json.encode(document).decode()
    names = set(document["components"]["schemas"])
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= names
    assert document["components"]["securitySchemes"] and document["paths"]["/v1/models"]["get"]["security"]
    assert "401" not in document["paths"]["/health"]["get"]["responses"]
    for kind in (types.ChatRequest, types.CompletionRequest, types.ResponsesRequest):
        shape = document["components"]["schemas"][kind.__name__]
        assert shape["additionalProperties"] is False and set(shape["properties"]) == set(kind.__struct_fields__)
