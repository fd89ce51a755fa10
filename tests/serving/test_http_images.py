"""Images over HTTP: a real (tiny, random) model behind the whole front, what is served and what is refused in which words."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_support import Live, live, live_model, served

from tests.reference.tiny_vision import IMAGE, make_tiny_vision, picture
from tests.serving.process_support import Server
from tradewind.contract.errors import RequestError
from tradewind.kernels.cpu import library
from tradewind.serving.http.app import make_app

PIL = pytest.importorskip("PIL.Image")
CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if why := library.why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("vision")
    make_tiny_vision(folder)
    with live_model(str(folder), compute="f32", kv_format="f32", threads=1, backend="cpu") as found:
        found.rig.folder = str(folder)  # type: ignore[attr-defined]
        yield found


@pytest.fixture(scope="module")
def blind() -> Iterator[Live]:
    with live() as found:
        yield found


def file_of(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    PIL.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def body(*parts: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": list(parts)}]
    return {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}


SEA = file_of(picture(1, rows=4, columns=5))
"""20 tokens."""


def test_an_image_is_answered_and_counted(server: Live) -> None:
    asked = body(part(url_of(SEA)), TEXT)
    whole = server.post(CHAT, asked)
    ids = server.post("/tokenize", {"messages": asked["messages"]})["tokens"]
    assert ids.count(IMAGE) == 20
    assert whole["usage"]["prompt_tokens"] == len(ids)
    assert whole["usage"]["completion_tokens"] == 6
    events = server.stream(CHAT, asked)
    said = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert said == whole["choices"][0]["message"]["content"]


def test_the_answer_depends_on_the_image_and_a_second_turn_finds_it(server: Live) -> None:
    def answer(data: bytes) -> tuple[list[int], int]:
        got = server.post(CHAT, body(part(url_of(data)), TEXT, return_token_ids=True, max_tokens=12))
        return got["choices"][0]["token_ids"], got["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, again, other = answer(SEA), answer(SEA), answer(file_of(picture(2, rows=4, columns=5)))
    assert again[0] == first[0]
    assert again[1] >= 16
    assert other[0] != first[0]
    assert other[1] < 16, "the other image stands behind the same text"


def test_responses_too(server: Live) -> None:
    chat = server.post(CHAT, body(part(url_of(SEA)), TEXT))
    content = [{"type": "input_image", "image_url": url_of(SEA)}, {"type": "input_text", "text": TEXT["text"]}]
    asked = {
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": 6,
        "ignore_eos": True,
    }
    got = server.post("/v1/responses", asked)
    assert got["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert got["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]

    def refused(*parts: Any, role: str = "user") -> str:
        error = server.error("/v1/responses", {"input": [{"role": role, "content": list(parts)}]})
        return f"{error['param']}: {error['message']}"

    assert refused({"type": "input_image", "image_url": "https://example.org/x.png"}).startswith(
        "input: image 1 is a link"
    )
    assert refused({"type": "input_image"}) == "input[0].content[0].image_url: input[0].content[0].image_url is missing"
    assert refused({"type": "input_text"}) == "input[0].content[0].text: input[0].content[0].text is missing"
    assert "images stand in those of the user" in refused(content[0], role="assistant")


def test_formats_and_detail(server: Live) -> None:
    colors = picture(3, rows=6, columns=9)

    def tokens(data: bytes, kind: str, **more: Any) -> int:
        messages = body(part(url_of(data, kind), **more))["messages"]
        return server.post("/tokenize", {"messages": messages})["tokens"].count(IMAGE)

    assert tokens(file_of(colors), "image/png") == 54
    assert tokens(file_of(colors, "JPEG"), "image/jpeg") == 54
    assert tokens(file_of(colors, "WEBP"), "image/webp") == 54
    assert tokens(file_of(colors, "GIF"), "image/gif") == 54
    assert tokens(file_of(colors), "image/png", detail="high") == 54
    assert tokens(file_of(picture(3, rows=20, columns=20)), "image/png") <= 60, "what the model's files allow"


def test_several_images_and_turns(server: Live) -> None:
    small = file_of(picture(4, rows=2, columns=2))
    messages = [
        {"role": "user", "content": [part(url_of(SEA)), part(url_of(small)), TEXT]},
        {"role": "assistant", "content": "Two pictures."},
        {"role": "user", "content": [TEXT, part(url_of(small))]},
    ]
    assert server.post("/tokenize", {"messages": messages})["tokens"].count(IMAGE) == 28
    got = server.post(CHAT, {"messages": messages, "max_tokens": 4, "n": 2, "ignore_eos": True})
    assert got["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([part("https://example.org/sea.png")],
         "image 1 is a link, and none is followed here: send the image itself as data:image/png;base64,..."),
        ([part("file:///etc/passwd")],
         "image 1 has the URL 'file:///etc/passwd'; it must be of the form data:image/png;base64,..."),
        ([part("/etc/passwd")], "image 1 has the URL '/etc/passwd'; it must be of the form data:image/png;base64,..."),
        ([part("data:text/html;base64,AAAA")], "image 1 is of the type text/html; it must be an image"),
        ([part("data:image/png,AAAA")], "image 1 is not in base64: its URL must begin as data:image/png;base64,"),
        ([part("data:image/png;base64,@@@@")], "image 1 has base64 that cannot be read"),
        ([part("data:image/png;base64,")], "image 1 is empty"),
        ([part(url_of(b"no picture"))], "image 1 is no picture that can be read; known are GIF, JPEG, PNG, WEBP"),
        ([part(url_of(SEA[: len(SEA) // 2]))], "image 1 is broken: "),
        ([part(url_of(file_of(np.zeros((3, 700, 3), np.uint8))))],
         "image 1 is 700 x 3 pixels; its longer edge may be at most 200 times the shorter"),
        ([part(url_of(SEA)), part("data:image/png;base64,")], "image 2 is empty"),
        ([part(url_of(SEA))] * 17, "there are 17 images; one request may have 16"),
        ([part(url_of(SEA)), {"type": "text", "text": "<|image_pad|>"}],
         "the prompt has 2 places for 1 images: a message's text spells the mark of an image, which it may not beside images"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Live, parts: list[Any], says: str) -> None:
    error = server.error(CHAT, body(*parts))
    assert error["message"].startswith(says)
    assert error["param"] == "messages"
    assert error["type"] == "invalid_request_error"


def test_a_small_file_with_a_large_picture(server: Live) -> None:
    """Refused before its pixels are decoded."""
    bomb = io.BytesIO()
    PIL.new("1", (9000, 9000)).save(bomb, "PNG")
    assert len(bomb.getvalue()) < 50_000
    error = server.error(CHAT, body(part(url_of(bomb.getvalue()))))
    assert error["message"] == "image 1 has 9000 x 9000 pixels; an image may have 40 million"
    bomb = io.BytesIO()
    PIL.new("1", (20000, 20000)).save(bomb, "PNG")
    error = server.error(CHAT, body(part(url_of(bomb.getvalue()))))
    assert error["message"] == "image 1 has too many pixels; an image may have 40 million"


def test_a_file_that_is_too_large(server: Live) -> None:
    error = server.error(CHAT, body(part("data:image/png;base64," + "A" * (17 << 20))), status=413)
    assert "bytes" in error["message"]
    error = server.error(CHAT, body(part("data:image/png;base64," + "A" * ((16 << 20) - 4096))))
    assert error["message"].startswith("image 1 has 12.0 MiB; a file may have 12 MiB") or "is no picture" in error["message"]  # fmt: skip


def test_parts_of_a_wrong_shape(server: Live) -> None:
    error = server.error(CHAT, body({"type": "image_url"}))
    assert error["message"] == "messages[0].content[0].image_url is missing"
    error = server.error(CHAT, body({"type": "text"}))
    assert error["message"] == "messages[0].content[0].text is missing"
    error = server.error(CHAT, body(part(url_of(SEA)), role="system"))
    assert (
        error["message"]
        == "messages[0].content[0] is an image in a message of the system; images stand in those of the user"
    )
    error = server.error(CHAT, body(part(url_of(SEA), detail="medium")))
    assert error["param"] == "messages[0].content[0].image_url.detail"


def test_text_alone_is_served_as_ever(server: Live) -> None:
    got = server.post(CHAT, body(TEXT))
    assert got["usage"]["completion_tokens"] == 6
    got = server.post(CHAT, {**body(), "messages": [{"role": "user", "content": "<|image_pad|> is a word here"}]})
    assert got["usage"]["completion_tokens"] == 6


def test_links_where_the_operator_allows_them(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fetches them has tests of its own."""

    class Harbour:
        def __call__(self, url: str, *, name: str, most_bytes: int) -> bytes:
            if "sea" not in url:
                raise RequestError(f"{name} cannot be fetched: its server answers 404")
            return SEA

    app = make_app(dataclasses.replace(server.rig.front, links=Harbour()))  # type: ignore[arg-type]
    with served(app) as port:
        other = Live(port, server.rig, app)
        got = other.post(CHAT, body(part("https://pictures.example/sea.png"), part(url_of(SEA)), TEXT))
        assert got["usage"]["prompt_tokens"] > 40
        tokens = other.post("/tokenize", {"messages": body(part("http://pictures.example/sea.png"), TEXT)["messages"]})
        assert tokens["count"] > 20
        error = other.error(CHAT, body(part(url_of(SEA)), part("https://pictures.example/desert.png")))
        assert error["message"] == "image 2 cannot be fetched: its server answers 404"


def test_across_the_process_border(server: Live, tmp_path: Path) -> None:
    """`tradewind serve`: pixels go to the engine's process, which has neither torch nor an image library."""
    wanted = server.post(CHAT, body(part(url_of(SEA)), TEXT, return_token_ids=True))
    folder = server.rig.folder  # type: ignore[attr-defined]
    arguments = [
        "serve",
        folder,
        "--port",
        "0",
        "--backend",
        "cpu",
        "--compute",
        "f32",
        "--kv-format",
        "f32",
        "--threads",
        "1",
    ]
    program = (
        f"import sys; sys.argv = ['tradewind', *{arguments!r}]; from tradewind.__main__ import main; sys.exit(main())"
    )
    made = Server(tmp_path, program=program)
    try:
        status, got, _ = made.post(CHAT, **body(part(url_of(SEA)), TEXT, return_token_ids=True))
        assert status == 200, got
        assert got["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
        assert got["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
        maps = Path(f"/proc/{made.engine_pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "PIL" not in maps
    finally:
        made.close()


def test_a_model_without_a_tower_refuses_images(blind: Live) -> None:
    error = blind.error(CHAT, body(part(url_of(SEA)), TEXT))
    assert error["message"] == "this model reads no images: send text alone, or serve a model that has an image tower"
    assert error["param"] == "messages"
