"""Llama 4 through the whole engine, over several chunks of attention: prefix hits, pages given back, pieces; and its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.engine.tiny_engine import Listener, answers, engine_of, write_checkpoint
from tests.reference.driver import Driver
from tests.reference.op_sets import EXACT, OP_SETS, load, open_ops
from tests.reference.tiny import LLAMA4, difference, make_tiny, oracle_logits, token_ids
from tradewind.attention.backend import BACKENDS
from tradewind.contract.events import Preempted
from tradewind.contract.request import Request, SamplingParams
from tradewind.models.registry import family_of
from tradewind.serving.intake import Intake, Limits
from tradewind.weights.checkpoint import open_checkpoint
from tradewind.weights.load import WeightsError, load_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
CHUNK: int = LLAMA4["attention_chunk_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama4")
    make_tiny("llama4", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    other = write_checkpoint("full", tmp_path_factory.mktemp("tokenizer"))
    shutil.copy(other / "tokenizer.json", folder)  # must be there; nothing is turned into text
    return folder


def asked(engine: Any, *, prefix: str = "r") -> list[Request]:
    """Seven prompts, up to five chunks long; three begin alike, two of them through a whole chunk and more."""
    common = token_ids(9, count=2 * CHUNK + 10)
    prompts = [token_ids(seed, count=count) for seed, count in ((1, 5), (2, CHUNK), (3, CHUNK - 8), (4, 5 * CHUNK - 3))]
    prompts += [common[:30] + token_ids(20, count=9), common + token_ids(21, count=3), common + token_ids(22, count=60)]
    intake = Intake(Limits(vocab_size=163, max_context=engine.plan.schedule.max_context, eos_ids=()), prefix=prefix)
    return [request for prompt in prompts for request in intake.requests(prompt, GREEDY, now_s=0.0)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[int, ...]]:
    """Each request by itself, its prompt in one piece."""
    with engine_of(folder, tape=False, overlap=False, prefix_cache=False) as engine:
        assert [(group.kind, group.window) for group in engine.plan.cache.groups] == [("full", None), ("chunk", CHUNK)]
        return [answers(engine, [request])[0] for request in asked(engine)]


@pytest.mark.parametrize(
    "means",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"max_tokens_per_step": 16}, id="pieces of 16"),
        pytest.param({"max_tokens_per_step": 37}, id="pieces of 37"),
        pytest.param({"page_tokens": 48, "threads": 1}, id="pages that two chunks share"),
        pytest.param({"max_running": 2}, id="2 slots"),
    ],
)
def test_any_means_give_the_same_answers(folder: Path, alone: list[tuple[int, ...]], means: dict[str, Any]) -> None:
    with engine_of(folder, **means) as engine:
        assert answers(engine, asked(engine)) == alone


def test_a_prefix_hit_gives_the_same_answers(folder: Path, alone: list[tuple[int, ...]]) -> None:
    with engine_of(folder) as engine:
        for turn in "ab":
            handles = engine.client.run(asked(engine, prefix=turn))
            assert [tuple(handle.tokens) for handle in handles] == alone
        cached = [handle.last.cached_tokens for handle in handles if handle.last]
    assert cached[3] > 4 * CHUNK, "of the longest prompt nearly all"
    assert cached[5] >= 2 * CHUNK
    assert cached[6] >= 3 * CHUNK


def test_answers_survive_preemption(folder: Path, alone: list[tuple[int, ...]]) -> None:
    listener = Listener()
    with engine_of(folder, pages=22, sinks=[listener]) as engine:
        assert answers(engine, asked(engine)) == alone
    assert any(isinstance(event, Preempted) for event in listener.events), "the pool was to be too small for all"


def test_pages_of_older_chunks_are_given_back(folder: Path) -> None:
    """A sequence of 300 tokens holds a few pages of the chunked layers, and all of the full ones."""
    with engine_of(folder, prefix_cache=False, max_tokens_per_step=16) as engine:
        intake = Intake(Limits(vocab_size=163, max_context=512, eos_ids=()), prefix="r")
        sampling = SamplingParams(temperature=0.0, max_tokens=60)
        (request,) = intake.requests(token_ids(5, count=240), sampling, now_s=0.0)
        handle, most, more = engine.client.submit(request, stream=False), [0, 0], True
        while more:
            more = engine.client.drive()
            for index, pool in enumerate(engine.client._loop.scheduler.cache.pools):
                most[index] = max(most[index], pool.total - 1 - pool.free)
        assert len(handle.tokens) == 60
        size = engine.plan.cache.page_tokens
    assert most[0] == -(-299 // size), "the last token is nobody's key"
    assert most[1] <= -(-(CHUNK - 1 + 2 * 16) // size) + 1


def test_the_plain_ops_agree(folder: Path, alone: list[tuple[int, ...]]) -> None:
    with engine_of(folder, backend="plain", tape=False) as engine:
        assert answers(engine, asked(engine)) == alone


def test_each_fact_matters(folder: Path) -> None:
    """A test of the tests: without any one of what is new here the tiny model says something else, far beyond the tolerance."""
    ops, ids = open_ops("plain"), token_ids(count=100)
    model, card = load(folder, ops)
    told = Driver(model, card=card, ops=ops).step([(0, ids)])[0]
    assert card.moe is not None
    checkpoint = open_checkpoint(folder)
    for change in (
        {"layer_ropes": ()},
        {"layer_windows": (None,) * card.layers, "windows_restart": False},
        {"moe": msgspec.structs.replace(card.moe, weigh_input=False)},
        {"qk_norm": False},
        {"temper": None},
        {"windows_restart": False},
    ):
        other = msgspec.structs.replace(card, **change)
        changed = load_model(
            checkpoint, family=family_of(card), card=other, ops=ops, numerics=EXACT, attention=BACKENDS["plain"](ops)
        )
        assert difference(Driver(changed, card=other, ops=ops).step([(0, ids)])[0], told) > 0.05, change


# ------------------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("spelling", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", OP_SETS)
def test_the_text_part_of_a_vision_checkpoint(name: str, spelling: str, tmp_path: Path) -> None:
    """As published: the decoder under a prefix, its description in `text_config`, a tower and a projector beside it."""
    oracle, ids = make_tiny("llama4_some", tmp_path), token_ids(count=90)
    head = "language_model.lm_head.weight" if spelling.startswith("language") else "lm_head.weight"
    tensors = {
        head if key == "lm_head.weight" else spelling + key.removeprefix("model."): value
        for key, value in load_file(tmp_path / "model.safetensors").items()
    }
    extra = next(iter(tensors.values()))[:1].copy()
    for other in ("vision_model.patch_embedding.linear.weight", "multi_modal_projector.linear_1.weight"):
        tensors[other if spelling.startswith("language") else f"model.{other}"] = extra
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    config = {
        "model_type": "llama4",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ops = open_ops(name)
    try:
        model, card = load(tmp_path, ops)
        assert card.family == "llama4"
        got = Driver(model, card=card, ops=ops).step([(0, ids)])[0]
    finally:
        getattr(ops, "close", lambda: None)()
    assert difference(got, oracle_logits(oracle, ids)) < 1e-4


def test_the_library_writes_names_that_are_read(tmp_path: Path) -> None:
    """Every tensor of a checkpoint with a tower, as `transformers` saves it, has a place or is left aside by name."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    config = Llama4Config(
        text_config={
            **LLAMA4, "vocab_size": 163, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = Llama4ForConditionalGeneration(config).float()
    model.save_pretrained(tmp_path)
    ops = open_ops("plain")
    found, card = load(tmp_path, ops)
    ids = token_ids(count=50)
    with torch.no_grad():
        wanted = model.language_model(torch.tensor([ids])).logits[0].numpy()
    assert difference(Driver(found, card=card, ops=ops).step([(0, ids)])[0], wanted) < 1e-4


def test_a_missing_stack_is_named_as_in_the_file(tmp_path: Path) -> None:
    make_tiny("llama4_some", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.3.feed_forward.experts.gate_up_proj"
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(WeightsError, match=name):
        load(tmp_path, open_ops("plain"))
