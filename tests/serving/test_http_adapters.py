"""Adapters over HTTP: asked for by name as a model is, loaded and unloaded while the server runs, and only from the operator's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_support import MODEL, Live, live_model
from safetensors.numpy import save_file
from tiny_engine import write_checkpoint

from tradewind.config.goals import AdapterRoom
from tradewind.kernels.cpu import library
from tradewind.serving.http.front import Options

LOAD, UNLOAD, TEXT = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


def write_adapter(folder: Path, *, seed: int, rank: int = 4, strength: float = 3.0) -> Path:
    """A random adapter of the tiny model's q and o matrices."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(3):
        for name in ("q_proj", "o_proj"):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = draw.standard_normal((rank, 64)).astype(np.float32) / 8
            tensors[f"{at}.lora_B.weight"] = draw.standard_normal((64, rank)).astype(np.float32) * strength / rank
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture
def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if why := library.why_not():
        pytest.skip(why)
    model = write_checkpoint("full", tmp_path_factory.mktemp("model"))
    with live_model(
        str(model), options=Options(adapter_folder=str(folder)), adapters=AdapterRoom(slots=2, rank=8),
        backend="cpu", threads=1, kv_format="f32", compute="f32",
    ) as server:  # fmt: skip
        yield server


def said(server: Live, model: str | None) -> list[int]:
    body: dict[str, Any] = {
        "prompt": [5, 6, 7],
        "max_tokens": 12,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = server.post(TEXT, body if model is None else {**body, "model": model})
    assert answer["model"] == (model or MODEL)
    return list(answer["choices"][0]["token_ids"])


def names(server: Live) -> list[str]:
    return [each["id"] for each in server.get("/v1/models")["data"]]


def test_a_name_selects_an_adapter(live: Live, folder: Path) -> None:
    write_adapter(folder / "one", seed=1)
    write_adapter(folder / "two", seed=2)
    plain = said(live, None)
    assert live.post(LOAD, {"lora_name": "one", "lora_path": "one"}) == {"loaded": ["one"]}
    assert live.post(LOAD, {"lora_name": "sql", "lora_path": str(folder / "two")}) == {"loaded": ["one", "sql"]}
    assert names(live) == [MODEL, "one", "sql"]
    record = live.get("/v1/models/sql")
    assert (record["root"], record["parent"]) == (MODEL, MODEL)
    answers = [said(live, name) for name in ("one", "sql", MODEL)]
    assert answers[2] == plain
    assert len({tuple(each) for each in answers}) == 3
    assert [said(live, name) for name in ("one", "sql", None)] == answers
    # every endpoint that generates, and embeddings, take the name
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    texts = [
        live.post("/v1/chat/completions", {**chat, "model": name})["choices"][0]["message"] for name in ("one", MODEL)
    ]
    assert texts[0] != texts[1]
    response = {"input": "hi", "max_output_tokens": 16, "temperature": 0}
    outputs = [
        live.post("/v1/responses", {**response, "model": name})["output"][0]["content"] for name in ("one", MODEL)
    ]
    assert outputs[0] != outputs[1]
    vectors = [
        live.post("/v1/embeddings", {"input": "hello", "model": n})["data"][0]["embedding"] for n in ("one", MODEL)
    ]
    assert np.abs(np.subtract(*vectors)).max() > 1e-3


def test_new_files_are_another_adapter_and_a_name_may_go(live: Live, folder: Path) -> None:
    write_adapter(folder / "mine", seed=3)
    live.post(LOAD, {"lora_name": "mine", "lora_path": "mine"})
    before = said(live, "mine")
    write_adapter(folder / "mine", seed=4)
    assert said(live, "mine") == before, "until it is loaded again"
    live.post(LOAD, {"lora_name": "mine", "lora_path": "mine"})
    assert said(live, "mine") != before
    assert live.post(UNLOAD, {"lora_name": "mine"}) == {"loaded": []}
    error = live.error(TEXT, {"prompt": "x", "model": "mine"}, status=404)
    assert error["code"] == "model_not_found"
    assert live.error(UNLOAD, {"lora_name": "mine"}, status=404)["code"] == "model_not_found"


def test_what_cannot_be_loaded_is_refused(live: Live, folder: Path) -> None:
    write_adapter(folder / "large", seed=5, rank=16)
    outside = write_adapter(folder.parent / "outside", seed=6)
    (folder / "link").symlink_to(outside)
    for body, status, message in (
        ({"lora_name": "x", "lora_path": "nothing"}, 400, "is no adapter"),
        ({"lora_name": "x", "lora_path": "large"}, 400, "has rank 16; the largest that this engine has room for is 8"),
        ({"lora_name": MODEL, "lora_path": "large"}, 400, "the model's own"),
        ({"lora_name": "x", "lora_path": "../outside"}, 403, "is not within the folder"),
        ({"lora_name": "x", "lora_path": str(outside)}, 403, "is not within the folder"),
        ({"lora_name": "x", "lora_path": "link"}, 403, "is not within the folder"),
        ({"lora_name": "x", "lora_path": "a\x00b"}, 403, "is not within the folder"),
    ):
        assert message in live.error(LOAD, body, status=status)["message"], body
    assert names(live) == [MODEL]


def test_without_a_folder_nobody_loads(tmp_path: Path) -> None:
    if why := library.why_not():
        pytest.skip(why)
    model = write_checkpoint("full", tmp_path / "model")
    means: dict[str, Any] = {"backend": "cpu", "threads": 1, "kv_format": "f32", "compute": "f32"}
    with live_model(str(model), **means) as server:
        for path, body in ((LOAD, {"lora_name": "x", "lora_path": "x"}), (UNLOAD, {"lora_name": "x"})):
            assert "the operator named no folder" in server.error(path, body, status=403)["message"]
