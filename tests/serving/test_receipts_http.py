"""Receipts over HTTP: what `tradewind serve` tells about a finished request, and `tradewind explain` makes of it."""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.serving.process_support import Server, server, wait_until
from tradewind import cli_explain
from tradewind.contract.errors import UserError
from tradewind.observability.receipts import ItemisedReceipt

SCRIPT: dict[str, Any] = {
    "step_ms": 2,
    "prompt_token_ms": 0.1,
    "slots": 2,
    "max_tokens_per_step": 256,
    "rules": [{"contains": "endless", "answer": "abcdefgh ", "repeat": True}],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("receipts"), **SCRIPT) as one:
        yield one


def receipt(made: Server, name: str) -> ItemisedReceipt:
    """As soon as it is there: an answer's last byte is a moment older than its receipt."""
    wait_until(lambda: made.get(f"/v1/receipts/{name}")[0] == 200, limit_s=5, what="the receipt")
    found = msgspec.convert(made.get(f"/v1/receipts/{name}")[1], ItemisedReceipt)
    assert sum(part.seconds for part in found.e2e) == pytest.approx(found.e2e_s, abs=1e-6)
    if found.ttft_s is not None:
        assert sum(part.seconds for part in found.ttft) == pytest.approx(found.ttft_s, abs=1e-6)
    return found


def explain(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    cli_explain.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["explain", *arguments])
    assert parsed.run(parsed) == 0
    return ""


def test_every_endpoint_has_receipts_whose_parts_are_what_the_client_saw(made: Server) -> None:
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "x" * 300}]}
    for path, body in (
        ("/v1/completions", {"model": "scripted", "prompt": "y" * 400, "max_tokens": 20}),
        ("/v1/completions", {"model": "scripted", "prompt": ["a" * 100, "b" * 200], "n": 2, "max_tokens": 20}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"model": "scripted", "input": "z" * 100}),
    ):
        began = time.monotonic()
        status, answer, _ = made.post(path, **body)
        took_s = time.monotonic() - began
        assert status == 200
        found = receipt(made, answer["id"])
        assert found.endpoint == path and not found.stream and found.finish.split(",")[0] in ("stop", "length")
        # The server notes the end when its write returns, which may be after the client has read it.
        assert 0.5 * took_s - 0.01 < found.e2e_s <= took_s + 0.01
        names = {part.name for part in found.e2e}
        assert {"parse", "tokenise", "prefill", "decode"} <= names
    status, answer, headers = made.post("/v1/embeddings", model="scripted", input="hello")
    assert status == 200
    found = receipt(made, headers["x-request-id"])
    assert found.endpoint == "/v1/embeddings" and found.ttft_s is None and not found.ttft


def test_a_stream_counts_to_its_last_byte(made: Server) -> None:
    with socket.create_connection(("127.0.0.1", made.port)) as sock:
        ask(sock, prompt="endless", max_tokens=50, id="my-own-id")
        data = read_all(sock)
    assert data.rstrip().endswith(b"[DONE]\n\n\r\n0") or b"[DONE]" in data
    found = receipt(made, "my-own-id")
    assert found.stream and found.request_id == "my-own-id" and found.completion_tokens == 50
    assert found.ttft_s is not None and found.ttft_s < found.e2e_s and found.binding.cause == "answer"


def ask(sock: socket.socket, *, id: str, **body: Any) -> None:
    data = json.dumps({"model": "scripted", "stream": True, "ignore_eos": True, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Id: {id}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    sock.sendall(head.encode() + data)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def test_a_client_that_does_not_read_is_named(tmp_path: Path) -> None:
    with server(tmp_path, default={"answer": "abcdefgh ", "repeat": True}, max_context=1 << 16) as made:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            sock.connect(("127.0.0.1", made.port))
            ask(sock, prompt="hi", max_tokens=4000, n=4, logprobs=20, id="slow")  # more than buffers take
            wait_until(lambda: made.stats()["running"] == 0 and made.stats()["steps"] > 1000, limit_s=30)
            time.sleep(2.0)
            data = read_all(sock)
        assert b"[DONE]" in data
        found = receipt(made, "slow")
        assert found.binding.cause == "client", found.binding
        assert found.counterfactual is not None and found.counterfactual.e2e_s < -0.8


def test_a_queue_for_a_slot_is_told_with_whom(made: Server) -> None:
    threads = [
        threading.Thread(target=made.complete, args=("endless",), kwargs={"max_tokens": 200, "ignore_eos": True})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: made.stats()["running"] == 2, limit_s=5)
    _, answer, _ = made.complete("short", max_tokens=2)
    for thread in threads:
        thread.join()
    found = receipt(made, answer["id"])
    assert found.binding.cause == "slots" and found.binding.blocked_by.startswith("cmpl-")
    assert found.counterfactual is not None and found.counterfactual.says.startswith("with one more slot: TTFT -")
    slowest = made.get("/v1/receipts?slowest=5")[1]["receipts"]
    assert len(slowest) == 5 and [one["e2e_s"] for one in slowest] == sorted(
        (o["e2e_s"] for o in slowest), reverse=True
    )


def test_a_client_that_leaves_has_a_receipt(made: Server) -> None:
    with socket.create_connection(("127.0.0.1", made.port)) as sock:
        ask(sock, prompt="endless", max_tokens=5000, id="gone")
        sock.recv(100)
    found = receipt(made, "gone")
    assert found.finish == "disconnect"


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/v1/receipts/nobody", 404, "there is no receipt of 'nobody'"),
        ("/v1/receipts?slowest=0", 400, "slowest is '0'; it must be a whole number from 1 to 100"),
        ("/v1/receipts?slowest=many", 400, "slowest is 'many'"),
        ("/v1/receipts?fastest=1", 400, "'fastest' is not known here"),
    ],
)
def test_refusals(made: Server, path: str, status: int, said: str) -> None:
    got, body = made.get(path)
    assert got == status and said in body["error"]["message"]


def test_explain(made: Server, capsys: pytest.CaptureFixture[str]) -> None:
    _, answer, _ = made.complete("endless", max_tokens=20, ignore_eos=True)
    receipt(made, answer["id"])
    url = f"http://127.0.0.1:{made.port}"
    explain(answer["id"], "--url", url)
    said = capsys.readouterr().out
    assert answer["id"] in said and "bound by answer" in said and "█" in said and "computing its answer" in said
    explain("--slowest", "2", "--url", url)
    assert capsys.readouterr().out.count("bound by") == 2
    explain(answer["id"], "--url", url, "--json")
    assert json.loads(capsys.readouterr().out)["id"] == answer["id"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody", "--url", "URL"], "there is no receipt of 'nobody'"),
        (["x", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["x", "--url", "127.0.0.1"], "is no address of a server"),
        (["x", "--url", "http://host:port"], "is no address of a server"),
        (["x", "--slowest", "3"], "not both"),
        (["--slowest", "0"], "must be at least 1"),
        (["--journal", "nowhere"], "nowhere"),
        (["--journal", "a", "--url", "b"], "not both"),
    ],
)
def test_mistakes_are_one_sentence(made: Server, arguments: list[str], said: str) -> None:
    url = f"http://127.0.0.1:{made.port}"
    with pytest.raises(UserError) as raised:
        explain(*(url if word == "URL" else word for word in arguments))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_keys_see_their_own_receipts_only(tmp_path: Path) -> None:
    with server(tmp_path, "--api-key", "one", "--api-key", "two") as made:

        def send(method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
            connection = made.connection()
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            found = answer.status, json.loads(answer.read())
            connection.close()
            return found

        _, answer = send("POST", "/v1/completions", "one", {"model": "scripted", "prompt": "hi"})
        path = f"/v1/receipts/{answer['id']}"
        wait_until(lambda: send("GET", path, "one")[0] == 200, limit_s=5)
        assert send("GET", path, "two")[0] == 404
        assert send("GET", "/v1/receipts", "two")[1] == {"receipts": []}
        assert len(send("GET", "/v1/receipts", "one")[1]["receipts"]) == 1
        with pytest.raises(UserError, match="key"):
            cli_explain.from_server(f"http://127.0.0.1:{made.port}", answer["id"], 1)
        (found,) = cli_explain.from_server(f"http://127.0.0.1:{made.port}", answer["id"], 1, key="one")
        assert found.id == answer["id"]
