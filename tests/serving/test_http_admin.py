"""Who may ask, how many, and what the endpoints beside generation tell."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from http_support import BOS, MODEL, Live, chat_body, live, until

from tradewind.serving.http.edge import KeyRing
from tradewind.serving.http.front import Options, Receipt

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(says={"greet": "hello"}, served_names=("alias",), metrics=lambda: "tradewind_up 1\n", created_s=5) as one:
        yield one


# -- API keys


def test_api_keys() -> None:
    with live(says={"greet": "hello"}, options=Options(api_keys=("one", "two"))) as server:
        body = chat_body("greet")
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "one"},
            {"Authorization": "Basic one"},
        ):
            error = server.error(CHAT, body, status=401, headers=headers)
            assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
            assert "three" not in error["message"] and "one" not in error["message"].split()
        for headers in ({"Authorization": "Bearer one"}, {"authorization": "bearer two"}, {"X-API-Key": "two"}):
            server.post(CHAT, body, headers=headers)
        assert server.send("POST", CHAT, body)[1]["www-authenticate"] == "Bearer"
        for path in ("/health", "/docs", "/openapi.json"):
            assert server.send("GET", path)[0] == 200
        for path in ("/v1/models", "/metrics"):
            assert server.send("GET", path)[0] == 401
        assert server.send("POST", "/abort", {"request_id": "x"})[0] == 401


def test_tenants_are_hashes_of_keys() -> None:
    ring = KeyRing(["one", "two", ""])
    assert bool(ring) and not KeyRing([""])
    names = {ring.tenant_of(b"one"), ring.tenant_of(b"two")}
    assert len(names) == 2 and None not in names and not any("one" in str(name) for name in names)
    assert ring.tenant_of(b"") is None and ring.tenant_of(b"three") is None


# -- ids and origins


def test_request_ids_come_back(server: Live) -> None:
    for path, body in ((CHAT, chat_body("greet")), (CHAT, {"bad": 1}), ("/nothing", {})):
        assert server.send("POST", path, body, headers={"X-Request-Id": "my-id.7"})[1]["x-request-id"] == "my-id.7"
    made = {server.send("GET", "/health")[1]["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    for odd in ("x" * 129, "a b"):
        assert server.send("GET", "/health", headers={"X-Request-Id": odd})[1]["x-request-id"].startswith("req-")
    with server.opened(CHAT, chat_body("greet"), headers={"X-Request-Id": "streamed"}) as events:
        list(events)


def test_two_requests_with_one_id_do_not_meet(server: Live) -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(server.post(CHAT, chat_body("greet"), headers={"X-Request-Id": "same"}))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer["id"] for answer in found}) == 4


def test_cors_is_off_unless_asked_for(server: Live) -> None:
    headers = {"Origin": "https://page.example"}
    assert not any(name.startswith("access-control") for name in server.send("GET", "/health", headers=headers)[1])
    assert server.send("OPTIONS", CHAT, headers=headers)[0] == 405
    with live(options=Options(cors_origins=("https://page.example",), api_keys=("k",))) as one:
        status, got, _ = one.send("OPTIONS", CHAT, headers={**headers, "Access-Control-Request-Method": "POST"})
        assert status == 204 and got["access-control-allow-origin"] == "https://page.example"
        assert "authorization" in got["access-control-allow-headers"]
        assert one.send("POST", CHAT, {}, headers=headers)[1]["access-control-allow-origin"] == "https://page.example"
        other = one.send("GET", "/health", headers={"Origin": "https://evil.example"})[1]
        assert "access-control-allow-origin" not in other
    with live(options=Options(cors_origins=("*",))) as one:
        assert one.send("GET", "/health", headers=headers)[1]["access-control-allow-origin"] == "*"


# -- admission


def test_over_the_queue_limit_there_is_a_429_with_retry_after() -> None:
    with live(max_running=2, step_s=0.01, options=Options(max_queue=3), max_context=4096) as server:
        bodies = [chat_body(f"x{i}", max_tokens=60) for i in range(12)]
        found: list[tuple[int, dict[str, str], bytes]] = []
        threads = [
            threading.Thread(target=lambda b=body: found.append(server.send("POST", CHAT, b))) for body in bodies
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = [status for status, _, _ in found]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 5
        for status, headers, data in found:
            if status == 429:
                assert 1 <= int(headers["retry-after"]) <= 60
                error = json.loads(data)["error"]
                assert error["type"] == "rate_limit_error" and error["code"] == "queue_full"
        assert server.app.state.desk.sequences == 0
        server.chat("x", max_tokens=1)


def test_a_stream_that_waits_is_kept_alive_by_comments() -> None:
    with (
        live(max_running=1, step_s=0.01, max_context=4096, options=Options(keep_alive_s=0.1)) as server,
        server.opened(CHAT, chat_body("first", max_tokens=60)) as first,
    ):
        next(first)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        body = json.dumps(chat_body("second", max_tokens=3, stream=True))
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        data = connection.getresponse().read()
        connection.close()
        list(first)
    comments = data.count(b": waiting\n\n")
    assert 2 <= comments <= 10 and data.startswith(b": waiting\n\n")
    assert data.endswith(b"data: [DONE]\n\n") and b": waiting" not in data[data.index(b"data: ") :]


def test_start_sixteen_cancel_eight_leaves_all_slots_free() -> None:
    with live(step_s=0.001, max_context=4096, prefix_cache=False) as server:
        for cycle in range(6):
            done: list[int] = []

            def one(number: int, cycle: int = cycle, done: list[int] = done) -> None:
                body = chat_body(f"{cycle} {number}", max_tokens=30 if number % 2 else 2000)
                with server.opened(CHAT, body) as events:
                    if number % 2:
                        assert list(events)[-1] == "[DONE]"
                    else:
                        for _ in range(number):
                            next(events)
                done.append(number)

            threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(done) == 16
        until(lambda: server.running() == 0, "slots are still taken", seconds=1)
        stats = server.rig.engine.stats()
        assert stats.waiting == 0 and stats.pages_used == (0,)
        assert server.app.state.desk.sequences == 0


def test_a_draining_server_takes_nothing_new(server: Live) -> None:
    server.app.state.desk.closing = True
    try:
        assert server.error(CHAT, chat_body("greet"), status=503)["code"] == "shutting_down"
        assert server.get("/health", status=503)["status"] == "closing"
    finally:
        server.app.state.desk.closing = False


# -- models, tokens


def test_models(server: Live) -> None:
    listed = server.get("/v1/models")
    assert [model["id"] for model in listed["data"]] == [MODEL, "alias"] and listed["object"] == "list"
    assert listed["data"][0] == {
        "id": MODEL, "created": 5, "max_model_len": 512, "root": MODEL, "object": "model", "owned_by": "tradewind", "parent": None,
    }  # fmt: skip
    assert server.get("/v1/models/alias")["parent"] == MODEL
    assert server.get("/v1/models/gpt%2F9", status=404)["error"]["code"] == "model_not_found"
    assert server.chat("greet", model="alias")["model"] == "alias"


def test_tokenize_and_detokenize(server: Live) -> None:
    got = server.post("/tokenize", {"prompt": "né", "return_token_strs": True})
    assert got == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [BOS, 110, 195, 169],
        "token_strs": ["<s>", "n", "\ufffd", "\ufffd"],
    }
    assert server.post("/tokenize", {"prompt": "n", "add_special_tokens": False})["tokens"] == [110]
    assert server.post("/detokenize", {"tokens": [BOS, 110, 195, 169]}) == {"prompt": "<s>né"}
    assert server.post("/detokenize", {"tokens": [BOS, 110], "skip_special_tokens": True}) == {"prompt": "n"}
    assert server.error("/detokenize", {"tokens": [1, 264]})["param"] == "tokens[1]"
    assert server.error("/tokenize", {})["param"] == "prompt"
    assert (
        server.error("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]})["param"] == "prompt"
    )
    assert server.error("/tokenize", {"prompt": "a", "tools": []})["param"] == "tools"
    long = "word " * 5000
    assert server.post("/tokenize", {"prompt": long})["count"] == len(long) + 1


# -- health, metrics, abort


def test_health_tells_progress(server: Live) -> None:
    health = server.get("/health")
    assert health["status"] == "ok" and health["running"] == health["waiting"] == 0 and health["error"] is None
    assert health["since_progress_s"] < 1


def test_health_is_503_while_the_step_loop_stands_still() -> None:
    with live(stall={6: 1.5}, options=Options(health_timeout_s=0.3)) as server:
        thread = threading.Thread(target=server.chat, args=("x",), kwargs={"max_tokens": 20})
        thread.start()
        until(lambda: server.send("GET", "/health")[0] == 503, "the stall was not seen", seconds=1.4)
        health = server.get("/health", status=503)
        assert health["status"] == "stalled" and "0.3 s" in health["error"] and health["running"] == 1
        thread.join()
        assert server.get("/health")["status"] == "ok"


def test_an_idle_server_is_healthy_and_work_after_a_pause_too() -> None:
    with live(options=Options(health_timeout_s=0.2)) as server:
        server.chat("x", max_tokens=2)
        time.sleep(0.3)
        assert server.get("/health")["status"] == "ok"
        with server.opened(CHAT, chat_body("x", max_tokens=50)) as events:
            next(events)
            assert server.get("/health")["status"] == "ok"


def test_metrics_are_what_the_callable_gives(server: Live) -> None:
    status, headers, data = server.send("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain") and data == b"tradewind_up 1\n"
    with live() as one:
        assert one.send("GET", "/metrics")[0] == 404


@pytest.mark.parametrize("by", ["answer id", "X-Request-Id"])
def test_abort_ends_a_request(by: str) -> None:
    with live(step_s=0.005, max_context=4096) as server:
        with server.opened(CHAT, chat_body("x", max_tokens=2000), headers={"X-Request-Id": "mine"}) as events:
            first = next(events)
            name = first["id"] if by == "answer id" else "mine"
            assert server.post("/abort", {"request_id": name}) == {"aborted": 1}
            rest = list(events)
        assert rest[-1] == "[DONE]" and rest[-2]["choices"][0]["finish_reason"] == "abort"
        until(lambda: server.running() == 0, "it still runs", seconds=1)
        assert server.post("/abort", {"request_id": name}) == {"aborted": 0}


def test_abort_reaches_only_the_own_tenant() -> None:
    with live(step_s=0.005, max_context=4096, options=Options(api_keys=("a", "b"))) as server:
        mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        with server.opened(CHAT, chat_body("x", max_tokens=2000), headers=mine) as events:
            name = next(events)["id"]
            assert server.post("/abort", {"request_id": name}, headers=other) == {"aborted": 0}
            next(events)
            assert server.post("/abort", {"request_id": name}, headers=mine) == {"aborted": 1}
            list(events)


def test_receipts_tell_what_happened() -> None:
    receipts: list[Receipt] = []

    def listen(receipt: Receipt) -> None:
        receipts.append(receipt)
        if len(receipts) == 1:
            raise RuntimeError("a listener's own trouble")

    with live(says={"greet": "hello"}, on_receipt=listen, step_s=0.002, max_context=4096) as server:
        server.chat("greet")
        server.stream("/v1/completions", {"prompt": ["greet", "greet"], "max_tokens": 20})
        with server.opened(CHAT, chat_body("x", max_tokens=2000)) as events:
            next(events)
        until(lambda: len(receipts) == 3, "a receipt is missing")
    chat, text, left = receipts
    assert (chat.endpoint, chat.stream, chat.finish, chat.completion_tokens) == (CHAT, False, "stop", 6)
    assert (text.endpoint, text.stream, text.samples, text.finish) == ("/v1/completions", True, 2, "stop,stop")
    assert left.finish == "disconnect"
    for one in (chat, text):
        assert one.scheduled_s is not None and one.first_token_s is not None
        assert one.arrived_s <= one.scheduled_s <= one.first_token_s <= one.finished_s


def test_docs_are_for_people(server: Live) -> None:
    status, headers, data = server.send("GET", "/docs")
    assert status == 200 and headers["content-type"].startswith("text/html")
    for words in (b"/v1/chat/completions", b"temperature", b"from 0 to 100", b"/tokenize"):
        assert words in data
