"""The means change how fast an answer comes, never the answer: the whole engine on tiny models, every switch against a plain run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiny_engine import Listener, answers, engine_of, prompts, requests, write_checkpoint

from tradewind.contract.events import Preempted
from tradewind.contract.request import SamplingParams
from tradewind.contract.step import Step, Wants
from tradewind.runner.runner import StepRunner

NEW = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=7, max_tokens=NEW, ignore_eos=True
)
PLAIN_MEANS: dict[str, Any] = {"tape": False, "overlap": False, "prefix_cache": False}


@pytest.fixture(scope="module", params=["full", "windowed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Each request by itself, without tape, overlap, prefix cache or chunks: what everything else must equal."""
    found: dict[str, list[tuple[int, ...]]] = {"greedy": [], "drawn": []}
    for name, sampling in (("greedy", GREEDY), ("drawn", DRAWN)):
        with engine_of(folder, **PLAIN_MEANS) as engine:
            for request in requests(engine, prompts(10), sampling):
                found[name] += answers(engine, [request])
    return found


@pytest.mark.parametrize(
    "means",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"tape": True, "overlap": False}, id="tape"),
        pytest.param({"tape": False, "overlap": True}, id="overlap"),
        pytest.param({"max_tokens_per_step": 16}, id="chunks of 16"),
        pytest.param({"max_tokens_per_step": 37}, id="chunks of 37"),
        pytest.param({"max_running": 3}, id="3 slots"),
        pytest.param({"page_tokens": 32}, id="pages of 32"),
        pytest.param({"threads": 1}, id="1 thread"),
        pytest.param({"policy": "fair"}, id="fair"),
        pytest.param({"policy": "priority"}, id="priority"),
    ],
)
def test_a_batch_under_any_means_equals_each_alone(
    folder: Path, alone: dict[str, list[tuple[int, ...]]], means: dict[str, Any]
) -> None:
    with engine_of(folder, **means) as engine:
        assert answers(engine, requests(engine, prompts(10), GREEDY)) == alone["greedy"]
        assert answers(engine, requests(engine, prompts(10), DRAWN, prefix="d")) == alone["drawn"]


def test_a_prefix_hit_gives_the_same_answer(folder: Path, alone: dict[str, list[tuple[int, ...]]]) -> None:
    with engine_of(folder) as engine:
        for turn in "ab":
            asked = requests(engine, prompts(10), GREEDY, prefix=turn)
            handles = engine.client.run(asked)
            assert [tuple(handle.tokens) for handle in handles] == alone["greedy"]
        cached = [handle.last.cached_tokens for handle in handles if handle.last]
        assert sum(cached) > 0 and all(hit < len(r.tokens) for hit, r in zip(cached, asked, strict=True))


def test_answers_survive_preemption(folder: Path, alone: dict[str, list[tuple[int, ...]]]) -> None:
    listener = Listener()
    with engine_of(folder, pages=20, sinks=[listener]) as engine:
        assert answers(engine, requests(engine, prompts(10), GREEDY)) == alone["greedy"]
    lost = [event.lost_tokens for event in listener.events if isinstance(event, Preempted)]
    assert sum(lost) > 0, "the pool was to be too small for all"


def test_samples_of_one_prompt_share_its_pages_and_equal_samples_alone(folder: Path) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=12, ignore_eos=True)
    prompt = prompts(1, seed=5, low=40, high=60)
    with engine_of(folder) as engine:
        together = requests(engine, prompt, sampling)
        assert len(together) == 4
        several = answers(engine, together)
    with engine_of(folder, **PLAIN_MEANS) as engine:
        single = [answers(engine, [r])[0] for r in requests(engine, prompt, sampling) if r.parent is None]
        for request in requests(engine, prompt, sampling, prefix="s"):
            if request.parent is not None:
                orphan = type(request)(**{f: getattr(request, f) for f in request.__struct_fields__ if f != "parent"})
                single += answers(engine, [orphan])
    assert several == single
    assert len(set(several)) > 1


def test_the_plain_ops_agree_with_the_library(folder: Path, alone: dict[str, list[tuple[int, ...]]]) -> None:
    """Not bit for bit: torch sums in another order. With random weights the best token wins clearly."""
    with engine_of(folder, backend="plain", tape=False) as engine:
        found = answers(
            engine, requests(engine, prompts(4), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        )
    assert found == [answer[:6] for answer in alone["greedy"][:4]]


@pytest.mark.parametrize("tape", [True, False])
def test_steps_end_for_the_tokens_that_want_logits(
    folder: Path, alone: dict[str, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch, tape: bool
) -> None:
    """Prompts, and chunks that want nothing, compute the end of the last layer for few rows; steps of answers alone, and those of whom more
    is wanted, for all. Both give the same answers, logprobs included."""
    told: list[tuple[bool, int, int]] = []
    choose = StepRunner._wants_all

    def watched(self: StepRunner, step: Step) -> bool:
        wide = choose(self, step)
        told.append((wide, int((step.wants == Wants.LAST).sum()), step.tokens))
        return wide

    def asked(engine: Any) -> list[tuple[tuple[int, ...], list[float]]]:
        found = []
        for more in ({"logprobs": 3}, {"logprobs": 3, "prompt_logprobs": 2}):
            sampling = msgspec.structs.replace(GREEDY, **more)
            for handle in engine.client.run(requests(engine, prompts(10), sampling, prefix=str(len(more)))):
                last = handle.last
                records = (*last.prompt_logprobs, *last.logprobs)
                assert last.error is None and records
                found.append(
                    (tuple(handle.tokens), [value for one in records for value in (one.logprob, *one.top_logprobs)])
                )
        return found

    monkeypatch.setattr(StepRunner, "_wants_all", watched)
    with engine_of(folder, tape=tape, max_tokens_per_step=37) as engine:
        assert answers(engine, requests(engine, prompts(10), GREEDY)) == alone["greedy"]
        first = asked(engine)
    assert any(not wide and last == 0 for wide, last, _ in told), "a chunk that wants nothing"
    assert any(not wide and last > 0 for wide, last, _ in told)
    assert any(wide and last == tokens for wide, last, tokens in told), "answers alone"
    assert any(wide and last < tokens for wide, last, tokens in told), "prompts of which all logprobs are wanted"
    monkeypatch.setattr(StepRunner, "_wants_all", lambda self, step: True)
    with engine_of(folder, tape=tape, max_tokens_per_step=37) as engine:
        second = asked(engine)
    for (tokens, found), (same, wanted) in zip(first, second, strict=True):
        assert tokens == same
        np.testing.assert_allclose(found, wanted, atol=2e-4)
