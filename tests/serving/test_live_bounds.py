"""What a client can make the server hold before anybody knows who it is: header lines without end, requests that never become whole."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

pytest.importorskip("httptools")

from process_support import rss_bytes, server

pytestmark = pytest.mark.timeout(240)


def test_a_head_without_end_is_cut(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        before = rss_bytes(one.process.pid)
        for head in (
            b"GET /health HTTP/1.1\r\nHost: x\r\nA: ",
            b"GET /",
            b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 9000,
        ):
            with socket.create_connection(("127.0.0.1", one.port), timeout=10) as client:
                sent = 0
                answer = b""
                try:
                    client.sendall(head)
                    while sent < 64 << 20:
                        client.sendall(b"b" * 65536)
                        sent += 65536
                    answer = client.recv(65536)
                except OSError:
                    pass
                assert sent < 16 << 20, "the server took it all"
                assert not answer or b" 400 " in answer
        assert rss_bytes(one.process.pid) - before < 24 << 20
        assert one.get("/health")[0] == 200
        assert all(line.startswith(("{", "Traceback")) for line in one.lines), one.log


def test_heads_of_a_usual_size_and_large_bodies_pass(tmp_path: Path) -> None:
    with server(tmp_path, default={"answer": "yes"}) as one:
        connection = one.connection()
        for _ in range(3):  # on one connection
            connection.request("GET", "/health", headers={"Cookie": "c" * 30_000})
            assert connection.getresponse().read().startswith(b'{"status":"ok"')
        connection.close()
        status, answer, _ = one.post("/tokenize", prompt="sea " * 250_000)
        assert status == 200 and answer["count"] == 1_000_000


def test_a_request_that_never_becomes_whole_is_let_go(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tradewind.config.goals import Goals; from tradewind.serve import ServeOptions, serve;"
        "from tradewind.serving.http.bounded import BoundedProtocol; BoundedProtocol.whole_s = 0.5;"
        "sys.exit(serve(ServeOptions(goals=Goals(model='x'), script=Path(sys.argv[1]), port=0)))"
    )
    with server(tmp_path, program=program, step_ms=20, default={"answer": "a", "repeat": True}) as one:
        for begun in (
            b"",
            b"GET /hea",
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
        ):
            with socket.create_connection(("127.0.0.1", one.port), timeout=10) as client:
                client.sendall(begun)
                began = time.monotonic()
                assert client.recv(100) == b"" and 0.3 < time.monotonic() - began < 5
        # An answer may take as long as it wants.
        assert one.complete(max_tokens=60)[1]["usage"]["completion_tokens"] == 60
