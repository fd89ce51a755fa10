"""Adapters through the whole engine on the `cuda` op set: greedy tokens are the merged oracle's but at near ties, each sequence's its own.

On a GPU, elsewhere through Triton's interpreter (test_gpu_interpreter.py).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gpu_engine import gpu_engine_of

from tests.engine.tiny_engine import answers, write_checkpoint
from tests.reference.test_adapters import EVERYTHING, write_adapter
from tests.reference.tiny import make_tiny, token_ids
from tradewind.assemble import Engine
from tradewind.config.adapter_files import look_at
from tradewind.config.goals import AdapterRoom
from tradewind.contract.request import Request, SamplingParams
from tradewind.kernels.triton import low_rank_tile
from tradewind.kernels.triton.tuning import TileConfig, Tuning
from tradewind.serving.intake import Intake, Limits

NEW = 2
NEAR = 0.15
"""Logits nearer than this may change places in bf16."""
PROMPTS = [token_ids(seed, count=count) for seed, count in ((1, 13), (2, 4))]


@dataclass(frozen=True)
class Tiny:
    """A model and two adapters of it; the oracles have each merged, the last has none."""

    folder: Path
    adapters: list[Path]
    oracles: list[Any]

    def key(self, index: int) -> str:
        return look_at(self.adapters[index]).key if index < len(self.adapters) else ""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llama3")
    oracle = make_tiny("llama3", folder)
    folders = [folder / "a0", folder / "a1"]
    merged = [
        write_adapter(folders[0], oracle, targets=EVERYTHING, seed=0, rank=5),
        write_adapter(folders[1], oracle, targets=("q_proj", "down_proj"), seed=1, rank=17),
    ]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    other = write_checkpoint("full", tmp_path_factory.mktemp("tokenizer"))
    shutil.copy(other / "tokenizer.json", folder)  # must be there; nothing is turned into text
    return Tiny(folder, folders, [*merged, oracle])


def asked(engine: Engine, adapter: str, *, prefix: str) -> list[Request]:
    intake = Intake(Limits(vocab_size=163, max_context=engine.plan.schedule.max_context, eos_ids=()), prefix=prefix)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW)
    return [r for prompt in PROMPTS for r in intake.requests(prompt, sampling, now_s=0.0, adapter=adapter)]


def agrees(oracle: Any, prompt: list[int], answer: tuple[int, ...]) -> bool:
    """Whether every token is the oracle's best after those before it, or nearly so."""
    ids = list(prompt)
    for token in answer:
        with torch.no_grad():
            logits = oracle(torch.tensor([ids]), use_cache=False).logits[0, -1]
        if float(logits.max() - logits[token]) > NEAR:
            return False
        ids.append(token)
    return True


@dataclass(frozen=True, kw_only=True)
class SmallTiles(Tuning):
    """Tiles for the tiny model's widths, so that few tokens' additions are a part of them (low_rank_tile.py)."""

    def tile(self, rows: int, weight_rows: int, depth: int, *, fp8: bool) -> TileConfig | None:
        return None if rows > self.tile_rows or depth % 16 else TileConfig(16, 32, 16, 1, 4, 2)


@pytest.mark.parametrize(
    "means",
    [{}, {"deterministic": True}, {"tuning": SmallTiles(multiprocessors=132, tile_rows=16)}],
    ids=["", "exact", "tiles"],
)
def test_each_sequence_has_its_own(tiny: Tiny, means: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters and none in the same steps, then one alone, then nobody's: steps with and without adapters are other programs."""
    launched = []
    kernel = low_rank_tile.adapted_linear

    def counted(*given: Any, **options: Any) -> None:
        launched.append(len(given[0]))
        kernel(*given, **options)

    monkeypatch.setattr(low_rank_tile, "adapted_linear", counted)
    with gpu_engine_of(tiny.folder, adapters=AdapterRoom(slots=2, rank=20), **means) as engine:
        together = [asked(engine, tiny.key(index), prefix=f"m{index}") for index in (0, 2, 1)]
        got = answers(engine, [request for row in zip(*together, strict=True) for request in row])
        alone = {index: answers(engine, asked(engine, tiny.key(index), prefix=f"a{index}")) for index in (1, 2)}
    assert bool(launched) == ("tuning" in means), "whether tiles add"
    for place, index in enumerate((0, 2, 1)):
        for prompt, answer in zip(PROMPTS, got[place::3], strict=True):
            assert agrees(tiny.oracles[index], prompt, answer), (index, answer)
        others = [oracle for other, oracle in enumerate(tiny.oracles) if other != index]
        for oracle in others:
            assert not all(agrees(oracle, p, a) for p, a in zip(PROMPTS, got[place::3], strict=True)), index
    for index, said in alone.items():
        assert all(agrees(tiny.oracles[index], p, a) for p, a in zip(PROMPTS, said, strict=True)), index


def test_they_come_and_go_and_too_many_are_told_so(tiny: Tiny, tmp_path: Path) -> None:
    with gpu_engine_of(tiny.folder, adapters=AdapterRoom(slots=1, rank=20)) as engine:
        for turn, index in enumerate((0, 1)):
            said = answers(engine, asked(engine, tiny.key(index), prefix=f"t{turn}"))
            assert all(agrees(tiny.oracles[index], p, a) for p, a in zip(PROMPTS, said, strict=True)), index
        mixed = [asked(engine, tiny.key(index), prefix=f"x{index}")[1] for index in (1, 0, 2)]
        mixed += asked(engine, f"{tmp_path}@0", prefix="gone")[1:]
        handles = engine.client.run(mixed)
        errors = [(handle.last.error or "") if handle.last else "?" for handle in handles]
        assert (
            errors[0] == errors[2] == "" and "1 other adapters are in use" in errors[1] and "is no adapter" in errors[3]
        )
        assert agrees(tiny.oracles[1], PROMPTS[1], tuple(handles[0].tokens))
        assert agrees(tiny.oracles[2], PROMPTS[1], tuple(handles[2].tokens))
