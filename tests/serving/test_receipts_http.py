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
from tradewind.observability.receipts import ItemisedReceipt, PartName

SCRIPT: dict[str, Any] = {
    "step_ms": 10,
    "prompt_token_ms": 0.1,
    "slots": 2,
    "max_tokens_per_step": 256,
    "rules": [
        {"contains": "endless", "answer": "abcdefgh ", "repeat": True},
        {"contains": "number", "answer": "1234567890", "repeat": True, "mask_ms": 60},
    ],
}
GENEROUS_S = 60.0
"""Nothing takes so long, on the busiest machine."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("receipts"), **SCRIPT) as one:
        yield one


def receipt(made: Server, name: str) -> ItemisedReceipt:
    """As soon as it is there: an answer's last byte is a moment older than its receipt."""
    wait_until(lambda: made.get(f"/v1/receipts/{name}")[0] == 200, limit_s=GENEROUS_S, what="the receipt")
    found = msgspec.convert(made.get(f"/v1/receipts/{name}")[1], ItemisedReceipt)
    assert sum(part.seconds for part in found.e2e) == pytest.approx(found.e2e_s, abs=1e-6)
    if found.ttft_s is not None:
        assert sum(part.seconds for part in found.ttft) == pytest.approx(found.ttft_s, abs=1e-6)
    return found


def seconds(one: ItemisedReceipt, name: PartName) -> float:
    return sum(part.seconds for part in one.e2e if part.name == name)


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
        assert status == 200
        found = receipt(made, answer["id"])
        took_s = time.monotonic() - began
        assert found.endpoint == path and not found.stream and found.finish.split(",")[0] in ("stop", "length")
        # Each step takes 10 ms; and the server's times lie within what passed here until the receipt was there.
        assert 0.01 * found.completion_tokens / 4 < found.e2e_s <= took_s
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
    assert found.ttft_s is not None and found.ttft_s < found.e2e_s
    assert seconds(found, "decode") > 0


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
            took_s = wait_until(
                lambda: made.stats()["running"] == 0 and made.stats()["steps"] > 1000, limit_s=4 * GENEROUS_S
            )
            time.sleep(max(2.0, took_s))
            data = read_all(sock)
        assert b"[DONE]" in data
        found = receipt(made, "slow")
        assert found.binding.cause == "client", found.binding
        assert found.counterfactual is not None and found.counterfactual.e2e_s < -0.8


def test_a_queue_for_a_slot_is_told_with_whom(made: Server) -> None:
    holders = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(2)]
    for place, sock in enumerate(holders):
        ask(sock, prompt="endless", max_tokens=7000, id=f"holder{place}")
    wait_until(lambda: made.stats()["running"] == 2, limit_s=GENEROUS_S)
    answers: list[Any] = []
    short = threading.Thread(target=lambda: answers.append(made.complete("short", max_tokens=2)))
    short.start()
    wait_until(lambda: made.stats()["waiting"] == 1, limit_s=GENEROUS_S)
    time.sleep(1.0)
    for sock in holders:
        sock.close()
    short.join()
    _, answer, _ = answers[0]
    found = receipt(made, answer["id"])
    assert found.binding.cause == "slots" and found.binding.blocked_by.startswith("cmpl-")
    assert found.counterfactual is not None and found.counterfactual.says.startswith("with one more slot: TTFT -")
    slowest = made.get("/v1/receipts?slowest=5")[1]["receipts"]
    assert 1 <= len(slowest) <= 5
    assert [one["e2e_s"] for one in slowest] == sorted((one["e2e_s"] for one in slowest), reverse=True)


def test_a_grammar_is_told_to_itself_and_to_its_neighbour(made: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Masks that take 60 ms a token: what the device says of them comes through the process border into both receipts."""
    pytest.importorskip("llguidance")
    with socket.create_connection(("127.0.0.1", made.port)) as sock:
        ask(sock, prompt="endless", max_tokens=7000, id="neighbour")
        wait_until(lambda: made.stats()["running"] == 1, limit_s=GENEROUS_S)
        asked = {"max_tokens": 20, "ignore_eos": True}
        status, answer, _ = made.complete("a number", guided_regex="[0-9]{20,30}", **asked)
        assert status == 200, answer
        free = made.complete("a number", **asked)[1]
    slow, beside = receipt(made, answer["id"]), receipt(made, "neighbour")
    assert seconds(slow, "grammar_masks") > 0.5 * 20 * 0.06 and seconds(slow, "others_grammar") == 0
    if seconds(slow, "grammar_masks") > 0.5 * slow.e2e_s:  # on a machine that does not do something else meanwhile
        assert slow.binding.cause == "grammar" and "stood still for masks of its grammar" in slow.binding.says
        assert slow.counterfactual is not None and slow.counterfactual.change == "a grammar whose masks take no time"
    assert seconds(beside, "others_grammar") > 0.5 * 20 * 0.06 and seconds(beside, "grammar_masks") == 0
    assert next(part.blocked_by for part in beside.e2e if part.name == "others_grammar") == slow.sequence
    assert seconds(receipt(made, free["id"]), "grammar_masks") == 0, "the same answer without a grammar"
    explain(slow.id, "--url", f"http://127.0.0.1:{made.port}")
    said = capsys.readouterr().out
    assert "grammar_masks" in said and "stood still for masks of its grammar" in said
    explain("--slowest", "10", "--url", f"http://127.0.0.1:{made.port}")
    assert f"masks of others' grammars ({slow.sequence})" in capsys.readouterr().out


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
    receipt(made, made.complete("short", max_tokens=2)[1]["id"])
    _, answer, _ = made.complete("endless", max_tokens=20, ignore_eos=True)
    receipt(made, answer["id"])
    url = f"http://127.0.0.1:{made.port}"
    explain(answer["id"], "--url", url)
    said = capsys.readouterr().out
    assert answer["id"] in said and "  bound by " in said and "█" in said and "computing its answer" in said
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
        wait_until(lambda: send("GET", path, "one")[0] == 200, limit_s=GENEROUS_S)
        assert send("GET", path, "two")[0] == 404
        assert send("GET", "/v1/receipts", "two")[1] == {"receipts": []}
        assert len(send("GET", "/v1/receipts", "one")[1]["receipts"]) == 1
        with pytest.raises(UserError, match="key"):
            cli_explain.from_server(f"http://127.0.0.1:{made.port}", answer["id"], 1)
        (found,) = cli_explain.from_server(f"http://127.0.0.1:{made.port}", answer["id"], 1, key="one")
        assert found.id == answer["id"]
