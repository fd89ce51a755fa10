"""Adapters through the whole engine: answers are those of merged weights, adapters come and go while it runs, prefixes stay apart."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tests.engine.tiny_engine import answers, engine_of, write_checkpoint
from tests.reference.test_adapters import EVERYTHING, write_adapter
from tests.reference.tiny import make_tiny, token_ids
from tradewind.assemble import Engine
from tradewind.config.adapter_files import look_at
from tradewind.config.goals import AdapterRoom
from tradewind.contract.errors import RequestError, UserError
from tradewind.contract.request import Request, SamplingParams
from tradewind.llm import LLM
from tradewind.serving.intake import Intake, Limits

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ROOM = AdapterRoom(slots=2, rank=16)


@dataclass(frozen=True)
class Tiny:
    """A model, three adapters of it, and what the model says with each merged into it; the last is the model alone."""

    folder: Path
    adapters: list[Path]
    wanted: list[list[tuple[int, ...]]]

    def key(self, index: int) -> str:
        return look_at(self.adapters[index]).key if index < len(self.adapters) else ""


def asked(engine: Engine, adapter: str = "", *, prefix: str = "r") -> list[Request]:
    intake = Intake(Limits(vocab_size=163, max_context=engine.plan.schedule.max_context, eos_ids=()), prefix=prefix)
    prompts = [token_ids(seed, count=count) for seed, count in ((1, 60), (2, 5), (3, 33))]
    return [r for prompt in prompts for r in intake.requests(prompt, GREEDY, now_s=0.0, adapter=adapter)]


def ready(folder: Path, tokenizer: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(tokenizer / "tokenizer.json", folder)  # must be there; nothing is turned into text
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    tokenizer = write_checkpoint("full", tmp_path_factory.mktemp("tokenizer"))
    folder = tmp_path_factory.mktemp("model")
    oracle = make_tiny("llama3", folder)
    folders, wanted = [], []
    for index in range(3):
        folders.append(folder / f"adapter{index}")
        merged = write_adapter(folders[-1], oracle, targets=EVERYTHING, seed=index, rank=3 + 5 * index)
        merged.save_pretrained(folder / f"merged{index}")
        with engine_of(ready(folder / f"merged{index}", tokenizer)) as engine:
            wanted.append(answers(engine, asked(engine)))
    with engine_of(ready(folder, tokenizer)) as engine:
        wanted.append(answers(engine, asked(engine)))
    assert len({tuple(each) for each in wanted}) == 4
    return Tiny(folder, folders, wanted)


@pytest.mark.parametrize(
    "means", [{}, {"tape": False}, {"max_tokens_per_step": 16}, {"backend": "plain", "tape": False}]
)
def test_adapters_beside_each_other(tiny: Tiny, means: dict[str, Any]) -> None:
    with engine_of(tiny.folder, adapters=ROOM, **means) as engine:
        together = [asked(engine, tiny.key(index), prefix=f"a{index}") for index in (0, 3, 1)]
        mixed = [request for row in zip(*together, strict=True) for request in row]
        got = answers(engine, mixed)
    for place, index in enumerate((0, 3, 1)):
        assert got[place::3] == tiny.wanted[index]


def test_adapters_come_and_go(tiny: Tiny) -> None:
    """More adapters than slots, one after the other: each takes the place of the one that nobody has used for longest."""
    with engine_of(tiny.folder, adapters=ROOM) as engine:
        for turn, index in enumerate((0, 1, 2, 0, 3, 1)):
            assert answers(engine, asked(engine, tiny.key(index), prefix=f"t{turn}")) == tiny.wanted[index]


def test_too_many_at_once_are_told_so(tiny: Tiny) -> None:
    with engine_of(tiny.folder, adapters=ROOM) as engine:
        requests = [asked(engine, tiny.key(index), prefix=f"m{index}")[0] for index in range(3)]
        handles = engine.client.run(requests)
        errors = [handle.last.error for handle in handles if handle.last]
        assert errors[:2] == [None, None]
        assert "2 other adapters are in use" in (errors[2] or "")
        assert [tuple(handles[index].tokens) for index in range(2)] == [tiny.wanted[index][0] for index in range(2)]
        assert answers(engine, asked(engine, tiny.key(2), prefix="later")) == tiny.wanted[2]


def test_prefixes_belong_to_an_adapter_and_its_version(tiny: Tiny, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(tiny.adapters[0], mine)
    with engine_of(tiny.folder, adapters=ROOM) as engine:

        def cached(key: str, prefix: str) -> tuple[list[tuple[int, ...]], int]:
            handles = engine.client.run(asked(engine, key, prefix=prefix))
            assert all(handle.last and handle.last.error is None for handle in handles)
            return [tuple(h.tokens) for h in handles], sum(h.last.cached_tokens for h in handles if h.last)

        old = look_at(mine).key
        assert cached("", "a") == (tiny.wanted[3], 0)
        assert cached(old, "b") == (tiny.wanted[0], 0)
        found, hits = cached(old, "c")
        assert found == tiny.wanted[0] and hits > 0
        # The files change while the engine runs: loaded again, they are another adapter, with prefixes of its own.
        shutil.copy(tiny.adapters[1] / "adapter_model.safetensors", mine)
        shutil.copy(tiny.adapters[1] / "adapter_config.json", mine)
        assert cached(look_at(mine).key, "d") == (tiny.wanted[1], 0)
        assert cached(old, "e")[0] == tiny.wanted[0], "who holds the old version is served it while it is in memory"


def test_an_adapter_that_cannot_be_loaded_ends_its_requests_only(tiny: Tiny, tmp_path: Path) -> None:
    with engine_of(tiny.folder, adapters=AdapterRoom(slots=2, rank=4)) as engine:
        bad = [
            *asked(engine, f"{tmp_path}@0123", prefix="gone")[:1],
            *asked(engine, tiny.key(1), prefix="large")[:1],
        ]
        handles = engine.client.run([*bad, *asked(engine, tiny.key(0), prefix="good")])
        errors = [handle.last.error or "" for handle in handles if handle.last]
        assert "is no adapter" in errors[0]
        assert "has rank 8; the largest that this engine has room for is 4" in errors[1]
        assert [tuple(handle.tokens) for handle in handles[2:]] == tiny.wanted[0]


def test_the_python_face(tiny: Tiny, tmp_path: Path) -> None:
    """Names select adapters, which come and go at run time; a name's new files are another adapter."""
    mine = tmp_path / "mine"
    shutil.copytree(tiny.adapters[0], mine)
    options: dict[str, Any] = {"compute": "f32", "kv_format": "f32", "threads": 2}
    prompts = [token_ids(seed, count=count) for seed, count in ((1, 60), (2, 5), (3, 33))]

    with LLM(tiny.folder, adapters={"first": mine}, max_adapters=2, **options) as llm:

        def said(adapter: str | None) -> list[tuple[int, ...]]:
            return [output.completions[0].tokens for output in llm.generate(prompts, GREEDY, adapter=adapter)]

        assert said("first") == tiny.wanted[0]
        assert said(None) == tiny.wanted[3]
        llm.load_adapter("second", tiny.adapters[2])
        assert llm.adapters == ("first", "second")
        assert said("second") == tiny.wanted[2]
        for file in tiny.adapters[1].iterdir():
            shutil.copy(file, mine)
        assert said("first") == tiny.wanted[0], "until it is loaded again"
        llm.load_adapter("first", mine)
        assert said("first") == tiny.wanted[1]
        llm.unload_adapter("first")
        for call in (lambda: said("first"), lambda: llm.unload_adapter("first")):
            with pytest.raises(RequestError, match="there is no adapter 'first'; loaded are: second"):
                call()
        with pytest.raises(UserError, match="is no adapter"):
            llm.load_adapter("third", tmp_path)
        tensors = load_file(mine / "adapter_model.safetensors")
        other = {name.replace("q_proj", "x_proj"): each for name, each in tensors.items()}
        save_file(other, mine / "adapter_model.safetensors")
        with pytest.raises(UserError, match="which a llama model does not have"):
            llm.load_adapter("third", mine)
        assert llm.adapters == ("second",)
    with pytest.raises(UserError, match="has rank 13; the largest that this engine has room for is 8"):
        LLM(tiny.folder, adapters={"large": tiny.adapters[2]}, max_adapter_rank=8, **options)
    with LLM(tiny.folder, **options) as llm:
        for refused in (lambda: llm.load_adapter("x", mine), lambda: llm.generate("x", adapter="x")):
            with pytest.raises(UserError, match="make it with max_adapters"):
                refused()
