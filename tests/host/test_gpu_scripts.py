"""Judges of scripts that need a GPU: what an answer owes to its request (random_load), what pytest said (tests_told), what adapters cost
(adapters_one_engine), how a report of a load is shortened (serve_check), and what is said of waiting for captures (gpu_engine)."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from tradewind.config.adapter_files import look_at
from tradewind.config.card_reader import card_from_hf
from tradewind.contract.events import TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import TokenLogprobs
from tradewind.serving.intake import Intake, Limits
from tradewind.weights.safetensors import open_safetensors

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("adapters_one_engine", "gpu_engine", "random_load", "serve_check", "tests_told")
VOCAB = 100


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts, which are no part of the package."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path[:] = before


def rows(tokens: list[int], *, top: int = 2, first: float = -0.5) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            token=token,
            logprob=first,
            rank=1,
            top_ids=tuple(range(token, token + top)),
            top_logprobs=tuple(first - i for i in range(top)),
        )
        for token in tokens
    ]


def judged(
    random_load: ModuleType,
    tokens: list[int],
    *,
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    finish: str = "length",
    said: int | None = None,
    told_to_end: bool = False,
    deadline_s: float | None = None,
    **sampling: Any,
) -> str | None:
    asked = SamplingParams(max_tokens=3, **sampling)
    request = Request(id="r", tokens=(1, 2, 3), sampling=asked, max_tokens=3, deadline_s=deadline_s)
    received = random_load.Received(
        request, tokens=tokens, logprobs=logprobs or [], prompt_logprobs=prompt_logprobs or [], told_to_end=told_to_end
    )
    last = TokensOut(
        request_id="r", at_s=0.0, tokens=(), finish=finish, generated_tokens=len(tokens) if said is None else said
    )  # type: ignore[arg-type]
    found: str | None = random_load.wrong_with(received, last, vocab_size=VOCAB)
    return found


def test_what_a_good_answer_looks_like(scripts: dict[str, ModuleType]) -> None:
    load = scripts["random_load"]
    assert judged(load, [5, 6, 7]) is None
    assert judged(load, [5], finish="stop") is None
    assert judged(load, [5], finish="stop", min_tokens=2, told_to_end=True) is None
    assert judged(load, [], finish="abort", deadline_s=1.0) is None


def test_logprobs_must_be_whole_and_in_order(scripts: dict[str, ModuleType]) -> None:
    load = scripts["random_load"]
    asked = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    request = Request(id="r", tokens=(1, 2, 3), sampling=asked, max_tokens=3)
    received = load.Received(request, tokens=[5, 6, 7], logprobs=rows([5, 6, 7]), prompt_logprobs=rows([2, 3], top=1))
    last = TokensOut(request_id="r", at_s=0.0, tokens=(), finish="length", generated_tokens=3)
    assert load.wrong_with(received, last, vocab_size=VOCAB) is None
    received.prompt_logprobs.pop()
    assert "of the prompt" in load.wrong_with(received, last, vocab_size=VOCAB)
    received.prompt_logprobs += rows([3], top=1)
    received.logprobs[1] = msgspec.structs.replace(received.logprobs[1], logprob=-0.9)
    assert "greedy" in load.wrong_with(received, last, vocab_size=VOCAB)
    received.logprobs[1] = msgspec.structs.replace(rows([6])[0], top_logprobs=(-1.5, -0.5))
    assert "best" in load.wrong_with(received, last, vocab_size=VOCAB)
    received.logprobs[1] = rows([6], top=1)[0]
    assert "1 best tokens instead of 2" in load.wrong_with(received, last, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("outside the vocabulary", {"tokens": [5, 6, VOCAB]}),
        ("the last event says 2", {"tokens": [5, 6, 7], "said": 2}),
        ("over max_tokens", {"tokens": [5, 6, 7, 8]}),
        ("after 2 of 3", {"tokens": [5, 6]}),
        ("under min_tokens", {"tokens": [5], "finish": "stop", "min_tokens": 2}),
        ("nobody asked", {"tokens": [5], "finish": "abort"}),
        ("a bad word", {"tokens": [5, 6, 7], "bad_words": ((9, 1), (6,))}),
        ("nobody asked for", {"tokens": [5, 6, 7], "logprobs": rows([5, 6, 7])}),
    ],
)
def test_planted_faults_are_told(scripts: dict[str, ModuleType], words: str, facts: dict[str, Any]) -> None:
    found = judged(scripts["random_load"], facts.pop("tokens"), **facts)
    assert found is not None and words in found


def test_languages_of_the_grammars(scripts: dict[str, ModuleType]) -> None:
    said_by = scripts["random_load"].said_by
    assert said_by("choice", "north") and not said_by("choice", "north ")
    assert said_by("regex", "ab cd") and not said_by("regex", "ab  cd") and not said_by("regex", "a")
    assert said_by("json schema", ' {"name": "x", "age": -3}')
    for text in ('{"name": "x"}', '{"name": "x", "age": 1.5}', '{"name": 3, "age": 1}', "[1]", '{"name": "x", "age"'):
        assert not said_by("json schema", text)
    long = json.dumps({"name": "x" * 13, "age": 1})
    assert not said_by("json schema", long)


def test_requests_of_every_kind_are_drawn_and_named(scripts: dict[str, ModuleType]) -> None:
    load = scripts["random_load"]
    intake = Intake(Limits(vocab_size=49152, max_context=4096, eos_ids=(2,)))
    mix = load.Mix(intake, list(range(100, 6100)), random.Random(5), True)
    kinds = {kind for _ in range(800) for request in mix.requests() for kind in load.kinds_of(request)}
    assert kinds == {
        "bad_words", "choice", "constrained", "deadline", "drawn", "greedy", "json schema", "logit_bias", "logprobs", "long answer",
        "long prompt", "min_p", "min_tokens", "own seed", "penalties", "prompt_logprobs", "regex", "several samples", "stop_token_ids",
        "top_k", "top_p",
    }  # fmt: skip
    assert not load.BEST_IS_TAKEN - kinds


def test_a_record_says_what_is_known_so_far(scripts: dict[str, ModuleType]) -> None:
    load = scripts["random_load"]
    tally = load.Tally()
    for number in range(load.MOST_KEPT + 5):
        tally.fail("wrong", f"number {number}")
    tally.ended["stop"] += 2
    record = json.loads(json.dumps(tally.record(over=False)))
    assert record["over"] is False and record["requests"] == 2
    assert record["failures"] == {"wrong": load.MOST_KEPT + 5} and len(record["first_failures"]) == load.MOST_KEPT


JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="2" tests="4" time="12.5">
<testcase classname="tests.kernels.test_a" name="test_one" time="0.1" />
<testcase classname="tests.kernels.test_a" name="test_two" time="0.1"><failure message="assert 1 == 2">long
text</failure></testcase>
<testcase classname="" name="tests.kernels.test_b"><skipped message="collection skipped">
('/x/test_b.py', 12, 'Skipped: needs a GPU')</skipped></testcase>
<testcase classname="tests.kernels.test_c" name="test_three">
<skipped type="pytest.skip" message="no network">x.py:3: no network</skipped></testcase>
</testsuite></testsuites>
"""


def test_what_pytest_said(scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = scripts["tests_told"]
    (tmp_path / "gpu.xml").write_text(JUNIT)
    (tmp_path / "times").write_text("gpu-tests 1 13\nload 124 40\ncheck 0 9\n")
    out = tmp_path / "summary.json"
    words = ["--out", str(out), "--log", str(tmp_path / "times"), str(tmp_path / "gpu.xml"), str(tmp_path / "*.xml")]
    assert told.main(words) == 1
    result = json.loads(out.read_text())
    tests = result["tests"]["gpu"]
    assert (tests["passed"], tests["failed"], tests["skipped"], tests["seconds"]) == (1, 1, 2, 12.5)
    assert tests["failures"] == [{"test": "tests.kernels.test_a::test_two", "why": "assert 1 == 2"}]
    assert tests["skips"] == {"needs a GPU": 1, "no network": 1}
    assert tests["files"]["tests.kernels.test_a"] == {"passed": 1, "failed": 1}
    assert result["jobs"]["load"] == {"exit_code": 124, "seconds": 40, "cut": True}
    assert "not well: gpu-tests, load" in capsys.readouterr().out


def test_random_adapters_are_ones_that_are_served(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    one_engine = scripts["adapters_one_engine"]
    card = card_from_hf(
        json.loads((BENCHMARKS / "models" / "tiny" / "config.json").read_text()), name="tiny", tensors=None
    )
    for seed in (0, 1):
        one_engine.write_fast(tmp_path / f"a{seed}", card, seed=seed, rank=3, targets=())
    first, second = (look_at(tmp_path / f"a{seed}") for seed in (0, 1))
    assert first.version != second.version and first.rank == 3
    tensors = open_safetensors(tmp_path / "a0" / "adapter_model.safetensors")
    assert len(tensors) == card.layers * 7 * 2
    a = tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    b = tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert (a.shape, b.shape) == ((3, card.intermediate), (card.hidden, 3))
    values = (np.asarray(a.data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert 0.015 < values.std() < 0.025


def test_what_adapters_cost(scripts: dict[str, ModuleType]) -> None:
    """A round in which a neighbour disturbs all arms alike changes no cost."""
    times = {
        "none": {"short": [0.2, 0.4, 0.2], "long": [1.2, 2.4, 1.2]},
        "mixed": {"short": [0.3, 0.6, 0.3], "long": [1.55, 3.1, 1.55]},
    }
    found = scripts["adapters_one_engine"].judged(times, rows=64, short=20, long=120)
    assert found["step_ms"]["none"] == pytest.approx(10.0) and found["decode_tokens_per_s"]["none"] == pytest.approx(
        6400
    )
    assert found["cost_percent"] == {"mixed": 20.0} and not found["kept"]
    assert found["cost_percent_with_prompts"]["mixed"] == pytest.approx(22.6)
    times["mixed"] = times["none"]
    assert scripts["adapters_one_engine"].judged(times, rows=64, short=20, long=120)["kept"]


def test_a_report_in_one_line(scripts: dict[str, ModuleType]) -> None:
    figures = [{"name": "ttft_p50", "value": 0.0123456}, {"name": "tpot_p50", "value": None}]
    report = {"requests": 5, "failed": 0, "cut": 1, "figures": figures}
    assert scripts["serve_check"].summary_of(report) == {"requests": 5, "failed": 0, "cut": 1, "ttft_p50": 0.01235}


def test_what_is_said_of_waiting_for_captures(scripts: dict[str, ModuleType]) -> None:
    """One line, whether captures came to their end, met an error, or there are none of them."""
    say = scripts["gpu_engine"].settled_text
    graphs = {"captured": 3, "passed_over": 1, "wanted": 5, "plan_s": 1.0, "capture_s": 2.0, "error": ""}
    record = {"compiled": True, "compile_s": {"plan": 4.0}, "graphs": graphs, "prepared": True, "waited_s": 7.0}
    ended = "settled after 7.0 s: kernels compiled, plan 4.0 s, 4 of 5 graphs captured, plan 1.0 s, capture 2.0 s"
    assert say(record) == ended
    assert say({**record, "graphs": {**graphs, "error": "OSError: no"}}) == f"{ended}, captures ended with OSError: no"
    cut = say({**record, "compiled": False, "compile_s": {}, "graphs": {}, "prepared": False})
    assert cut == "settled after 7.0 s, which was the limit: kernels not all compiled"
