"""Links: where they may lead, how much comes, for how long; with a server of our own behind them."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from tradewind.contract.errors import RequestError
from tradewind.serving.links import LinkFetcher, addresses_of, is_public_address

FILE = b"\x89PNG" + bytes(range(256)) * 40


class Sea(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    seen: list[str]

    def do_GET(self) -> None:
        self.server.seen.append(f"{self.headers['Host']} {self.path}")  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        if path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/sea.png")
            self.end_headers()
        elif path == "/gone":
            self.send_error(404)
        elif path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", str(len(FILE) + 5))
            self.end_headers()
            self.wfile.write(FILE)
        elif path == "/slow":
            self.send_response(200)
            self.end_headers()  # without a length: the end of the connection is the end of the file
            try:
                for _ in range(600):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            except OSError:
                pass
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(FILE)))
            self.end_headers()
            self.wfile.write(FILE)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sea)
    made.daemon_threads = True
    made.block_on_close = False
    made.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(10)


def trusting(**facts: object) -> LinkFetcher:
    """One that takes every name for this machine, and this machine for the public internet."""
    return LinkFetcher(resolve=lambda host, port: ["127.0.0.1"], is_public=lambda text: True, **facts)  # type: ignore[arg-type]


def test_a_file_comes_under_the_name_of_its_host(server: http.server.ThreadingHTTPServer) -> None:
    port = server.server_address[1]
    assert trusting()(f"http://pictures.example:{port}/sea.png?size=2", name="image 1") == FILE
    assert server.seen[-1] == f"pictures.example:{port} /sea.png?size=2"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/moved", "image 1 cannot be fetched: its link leads to another, and such are not followed"),
        ("/gone", "image 1 cannot be fetched: its server answers 404"),
        ("/short", "image 1 cannot be fetched: its server could not be spoken to"),
        ("/a b", "image 1 cannot be fetched: its server could not be spoken to"),
    ],
)
def test_answers_that_are_none(server: http.server.ThreadingHTTPServer, path: str, says: str) -> None:
    with pytest.raises(RequestError) as told:
        trusting()(f"http://pictures.example:{server.server_address[1]}{path}", name="image 1")
    assert str(told.value) == says


def test_too_much(server: http.server.ThreadingHTTPServer) -> None:
    url = f"http://pictures.example:{server.server_address[1]}/sea.png"
    with pytest.raises(RequestError, match="image 1 is larger than the 1000 bytes that are left for links"):
        trusting(most_bytes=1000)(url, name="image 1")
    with pytest.raises(RequestError, match="image 2 is larger than the 5 bytes"):
        trusting()(url, name="image 2", most_bytes=5)
    assert trusting(most_bytes=len(FILE))(url, name="image 1") == FILE


def test_a_server_that_never_ends_is_left(server: http.server.ThreadingHTTPServer) -> None:
    with pytest.raises(RequestError, match=r"image 1 cannot be fetched: it did not come within 0\.4 s"):
        trusting(timeout_s=0.4)(f"http://pictures.example:{server.server_address[1]}/slow", name="image 1")


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/x", "http://localhost/x", "http://[::1]/x", "http://10.0.0.1/x", "http://169.254.169.254/latest",
     "https://192.168.1.1/", "http://0.0.0.0/", "http://[::ffff:127.0.0.1]/", "http://[64:ff9b::a00:1]/", "http://[fd00::1]/",
     "http://2130706433/", "http://0x7f.1/"],
)  # fmt: skip
def test_no_address_of_ours(url: str) -> None:
    """Nothing is connected to."""
    with pytest.raises(RequestError, match="its host has no address that anybody can reach"):
        LinkFetcher(timeout_s=0.5)(url, name="image 1")


def test_one_private_address_among_others_is_enough_to_refuse() -> None:
    fetch = LinkFetcher(resolve=lambda host, port: ["93.184.215.14", "10.0.0.7"], timeout_s=0.5)
    with pytest.raises(RequestError, match="no address that anybody can reach"):
        fetch("http://pictures.example/x", name="image 1")


@pytest.mark.parametrize("url", ["ftp://a/b", "http:///x", "http://user@host/x", "http://[x/", "http://host:99999/"])
def test_no_link_at_all(url: str) -> None:
    with pytest.raises(RequestError, match="image 1 has a link that cannot be"):
        trusting()(url, name="image 1")


def test_public_addresses() -> None:
    assert is_public_address("93.184.215.14")
    assert is_public_address("2606:2800:220:1:248:1893:25c8:1946")
    for text in (
        "224.0.0.1",
        "255.255.255.255",
        "100.64.0.1",
        "fe80::1%eth0",
        "2002:7f00:1::",
        "::",
        "nonsense",
        "240.0.0.1",
    ):
        assert not is_public_address(text), text
    assert "127.0.0.1" in addresses_of("127.0.0.1", 80)
