"""Latent attention under every means that the engine has: prefix hits, copies on write, preemption, pieces of prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_engine import Listener, answers, engine_of, write_checkpoint
from tests.reference.tiny import make_tiny, token_ids
from tradewind.contract.events import Preempted
from tradewind.contract.request import Request, SamplingParams
from tradewind.kernels.cpu.ops import CpuOps
from tradewind.serving.intake import Intake, Limits

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PLAIN_MEANS: dict[str, Any] = {"tape": False, "overlap": False, "prefix_cache": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    make_tiny("deepseek_v3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    other = write_checkpoint("full", tmp_path_factory.mktemp("tokenizer"))
    shutil.copy(other / "tokenizer.json", folder)  # must be there; nothing is turned into text
    return folder


def asked(engine: Any, sampling: SamplingParams = GREEDY, *, prefix: str = "r") -> list[Request]:
    """Eight prompts, the last four with one beginning of 50 tokens."""
    common = token_ids(9, count=50)
    prompts = [token_ids(seed, count=20 + 13 * seed) for seed in range(4)]
    prompts += [common + token_ids(20 + seed, count=3 + 9 * seed) for seed in range(4)]
    intake = Intake(Limits(vocab_size=163, max_context=engine.plan.schedule.max_context, eos_ids=()), prefix=prefix)
    return [request for prompt in prompts for request in intake.requests(prompt, sampling, now_s=0.0)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[int, ...]]:
    """Each request by itself, its prompt in one piece."""
    with engine_of(folder, **PLAIN_MEANS) as engine:
        assert [(group.kind, group.kv_heads, group.head_dim) for group in engine.plan.cache.groups] == [
            ("latent", 1, 48)
        ]
        assert engine.plan.cache.groups[0].bytes_per_page == 3 * engine.plan.cache.groups[0].page_tokens * 48 * 4
        return [answers(engine, [request])[0] for request in asked(engine)]


@pytest.mark.parametrize(
    "means",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"max_tokens_per_step": 16}, id="pieces of 16"),
        pytest.param({"max_tokens_per_step": 37}, id="pieces of 37"),
        pytest.param({"page_tokens": 48, "threads": 1}, id="pages of 48"),
        pytest.param({"max_running": 3}, id="3 slots"),
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
        assert sum(handle.last.cached_tokens for handle in handles if handle.last) > 8 * 16


def test_answers_survive_preemption(folder: Path, alone: list[tuple[int, ...]]) -> None:
    listener = Listener()
    with engine_of(folder, pages=20, sinks=[listener]) as engine:
        assert answers(engine, asked(engine)) == alone
    assert any(isinstance(event, Preempted) for event in listener.events), "the pool was to be too small for all"


def test_samples_of_one_prompt_share_its_latents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples continue in the middle of one page: it is copied for all but one of them."""
    copied: list[int] = []
    copy_pages = CpuOps.copy_pages

    def counted(self: CpuOps, kv: Any, source: Any, target: Any) -> None:
        copied.append(len(source))
        copy_pages(self, kv, source, target)

    monkeypatch.setattr(CpuOps, "copy_pages", counted)
    drawn = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12)
    with engine_of(folder) as engine:
        several = answers(engine, asked(engine, drawn))
    assert len(several) == 32
    assert sum(copied) == 3 * 3 * 7, "in each layer three times for each prompt but the one of 80 tokens, whole pages"
    with engine_of(folder, **PLAIN_MEANS) as engine:
        first = [answers(engine, [request])[0] for request in asked(engine, drawn) if request.parent is None]
    assert several[::4] == first
    assert len(set(several)) > 8


def test_the_plain_ops_agree(folder: Path, alone: list[tuple[int, ...]]) -> None:
    with engine_of(folder, backend="plain", tape=False) as engine:
        assert answers(engine, asked(engine)[:3]) == alone[:3]
