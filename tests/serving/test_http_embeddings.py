"""POST /v1/embeddings: over the scripted executor, through the official client, and on tiny models against the Python face."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.engine.test_embeddings import write_bert
from tests.engine.tiny_engine import open_llm, write_checkpoint
from tests.serving.http_support import BOS, MODEL, VOCAB, Live, live, live_model, until
from tradewind.kernels.cpu import library
from tradewind.serving.http.front import Options
from tradewind.simulate import made_up

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(options=Options(max_sequences=32)) as started:
        yield started


def ask(server: Live, given: Any, **fields: Any) -> Any:
    return server.post(PATH, {"model": MODEL, "input": given, **fields})


def values(answer: Any) -> np.ndarray:
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


def test_one_text(server: Live) -> None:
    answer = ask(server, "hello")
    assert answer["object"] == "list" and answer["model"] == MODEL
    (one,) = answer["data"]
    assert (one["object"], one["index"], len(one["embedding"])) == ("embedding", 0, made_up.SIZE)
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}, "five bytes and the beginning of text"
    assert np.linalg.norm(values(answer)) == pytest.approx(1, abs=1e-6)


def test_every_form_of_input(server: Live) -> None:
    """A text, texts, ids (taken as they are), lists of ids; order is kept."""
    ids = {"ab": [BOS, 97, 98], "c": [BOS, 99]}
    single = [values(ask(server, text))[0] for text in ("ab", "c")]
    for given in (["ab", "c"], [ids["ab"], ids["c"]], ["ab", ids["c"]]):
        answer = ask(server, given)
        assert [one["index"] for one in answer["data"]] == [0, 1]
        assert np.array_equal(values(answer), np.array(single))
        assert answer["usage"]["prompt_tokens"] == 5
    assert np.array_equal(values(ask(server, ids["ab"]))[0], single[0])
    many = [f"text {i}" for i in range(32)]
    assert len({tuple(v) for v in values(ask(server, many)).tolist()}) == 32


def test_base64_and_dimensions(server: Live) -> None:
    whole = values(ask(server, "wind"))[0]
    coded = ask(server, "wind", encoding_format="base64")["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), whole)
    assert np.array_equal(values(ask(server, "wind", dimensions=made_up.SIZE))[0], whole)
    short = values(ask(server, "wind", dimensions=4))[0]
    np.testing.assert_allclose(short, whole[:4] / np.linalg.norm(whole[:4]), rtol=1e-6)
    assert np.array_equal(values(ask(server, "wind", encoding_format="float"))[0], whole)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", ""),
        ({"input": ["a", ""]}, "input[1]", "input[1] is empty"),
        ({"input": ["a", 1]}, "input", "mixes token ids"),
        ({"input": [[]]}, "input", "is empty"),
        (
            {"input": [5, VOCAB]},
            "input",
            f"prompt token {VOCAB} is not a token id; the vocabulary has 0 to {VOCAB - 1}",
        ),
        ({"input": [3] * 513}, "input", "513 tokens; the limit is 512 (1 too many)"),
        ({"input": ["a", "b" * 600]}, "input[1]", "601 tokens; the limit is 512 (89 too many)"),
        ({"input": ["a"] * 33}, "input", "input has 33 texts; one request may have 32"),
        ({"input": "a", "dimensions": 17}, "dimensions", "dimensions is 17; it must be a whole number from 1 to 16"),
        ({"input": "a", "dimensions": 0}, "dimensions", ""),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
        ({}, "input", ""),
        ({"input": 7}, "input", ""),
    ],
)
def test_what_is_wrong_is_named(server: Live, body: Any, param: str, said: str) -> None:
    error = server.error(PATH, {"model": MODEL, **body})
    assert error["param"] == param and said in error["message"], error


def test_a_full_context_is_fine(server: Live) -> None:
    assert ask(server, [3] * 512)["usage"]["prompt_tokens"] == 512
    assert server.error(PATH, {"model": "other", "input": "a"}, status=404)["code"] == "model_not_found"


def test_the_official_client(server: Live) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        plain = client.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
        coded = client.embeddings.create(model=MODEL, input=["a", "b"])  # base64 on the wire
        for one, other in zip(plain.data, coded.data, strict=True):
            np.testing.assert_allclose(one.embedding, other.embedding, rtol=1e-7)
        assert coded.usage.total_tokens == 4
        assert len(client.embeddings.create(model=MODEL, input="a", dimensions=3).data[0].embedding) == 3


def test_a_client_that_leaves_frees_its_slots() -> None:
    with live(step_s=0.05, max_tokens_per_step=16, max_running=4) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps({"model": MODEL, "input": [[9] * 400 for _ in range(6)]})
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        until(lambda: server.running() > 0, "nothing runs")
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        until(lambda: server.running() == 0, "the texts of a client that left are still computed", seconds=1.5)


def test_failures_are_told() -> None:
    with live(fail={}, die_at=2, max_tokens_per_step=16) as server:
        assert server.error(PATH, {"model": MODEL, "input": [9] * 100}, status=503)["code"] == "engine_dead"


@pytest.mark.parametrize("kind", ["full", "bert"])
def test_on_a_model(kind: str, tmp_path: Path) -> None:
    """The same vectors as the Python face; an encoder is told apart from a model that talks."""
    if why := library.why_not():
        pytest.skip(why)
    folder = write_bert(tmp_path) if kind == "bert" else write_checkpoint("full", tmp_path)
    texts = ["the sea wind", "a cold night far from port", "ship"]
    means: dict[str, Any] = {"threads": 1, "kv_format": "f32", "compute": "f32"}
    with open_llm(folder) as llm:
        wanted, size = np.array(llm.embed(texts)), sum(len(llm.tokenize(text)) for text in texts)
    with live_model(str(folder), **means) as server:
        answer = ask(server, texts)
        assert np.array_equal(values(answer), wanted)
        assert answer["usage"]["prompt_tokens"] == size
        hidden = wanted.shape[1]
        assert f"from 1 to {hidden}" in server.error(PATH, {"input": "a", "dimensions": hidden + 1})["message"]
        completion = {"model": MODEL, "prompt": "the sea", "max_tokens": 2}
        if kind == "bert":
            assert "is an encoder" in server.error("/v1/completions", completion)["message"]
        else:
            assert server.post("/v1/completions", completion)["usage"]["completion_tokens"] >= 1
