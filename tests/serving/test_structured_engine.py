"""Structured output through the whole engine: masks, overlap, preemption, batches. A tiny random model, and SmolLM2 where it is at hand."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_engine import VOCAB, Listener, engine_of, prompts, requests, write_checkpoint

from tradewind.assemble import Engine, build_engine
from tradewind.config.goals import Goals
from tradewind.contract.events import Preempted
from tradewind.contract.grammar import Grammar
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.client import Handle
from tradewind.serving.intake import Intake, Limits
from tradewind.serving.structured import Shape, StructuredOutput

pytest.importorskip("llguidance")

EOS = 259
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "xyz": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 3, "maxItems": 3},
        "id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"},
        "ok": {"type": "boolean"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
        "in": {"type": "object", "properties": {"n": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}},
               "required": ["n"]},
    },
    "required": ["kind", "xyz", "id", "ok", "note", "in"],
}  # fmt: skip
DRAWN = SamplingParams(temperature=1.0, seed=11, max_tokens=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("full", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_of(folder) as made:
        yield made


def text_of(engine: Engine, shape: Shape | None, **more: Any) -> str:
    assert shape is not None
    return StructuredOutput(engine.tokenizer).text(shape, **more)


def item_text(engine: Engine) -> str:
    return text_of(engine, StructuredOutput(engine.tokenizer).json_schema(ITEM))


def constrained(asked: list[Request], grammar: str | None) -> list[Request]:
    return [msgspec.structs.replace(request, grammar=grammar) for request in asked]


def run(engine: Engine, asked: list[Request]) -> list[Handle]:
    return engine.client.run(asked)


def said(engine: Engine, handle: Handle) -> str:
    tokens = handle.tokens[:-1] if handle.last and handle.last.stop_token is not None else handle.tokens
    return engine.tokenizer.decode(tokens)


def check_valid(engine: Engine, handle: Handle, schema: Any = ITEM) -> None:
    jsonschema = pytest.importorskip("jsonschema_rs")
    assert handle.last is not None and handle.last.finish == "stop", handle.last
    answer = json.loads(said(engine, handle))
    assert jsonschema.validator_for(schema).is_valid(answer), answer


def check_fresh_matcher(engine: Engine, handle: Handle, grammar: str) -> None:
    """Every token that was emitted was allowed by a matcher that saw nothing but them."""
    compiled = engine.client._loop.scheduler._grammars.compiled(grammar)  # type: ignore[attr-defined]
    matcher = compiled.fresh()
    tokens = handle.tokens[:-1] if handle.last and handle.last.stop_token is not None else handle.tokens
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    if handle.last and handle.last.finish == "stop":
        assert matcher.is_accepting()


def test_a22_thirty_at_once_are_all_valid(engine: Engine) -> None:
    grammar = item_text(engine)
    asked = constrained(requests(engine, prompts(30), DRAWN, prefix="a22"), grammar)
    for handle in run(engine, asked):
        check_valid(engine, handle)
        check_fresh_matcher(engine, handle, grammar)


def test_a23_a_shared_prefix_and_mixed_with_free_ones(engine: Engine) -> None:
    grammar = item_text(engine)
    prefix = prompts(1, seed=9, low=64, high=65)[0]
    every = [[*prefix, i] for i in range(32)]
    asked = constrained(requests(engine, every, DRAWN, prefix="a23"), grammar)
    free = requests(engine, prompts(8), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), prefix="free")
    handles = run(engine, asked[:16] + free + asked[16:])
    strict = handles[:16] + handles[24:]
    for handle in strict:
        check_valid(engine, handle)
    assert sum(handle.last.cached_tokens for handle in strict if handle.last) > 0
    alone = [run(engine, [r])[0] for r in requests(engine, prompts(8), free[0].sampling, prefix="alone")]
    assert [h.tokens for h in handles[16:24]] == [h.tokens for h in alone], "neighbours under a grammar change nothing"


def test_a24_a_model_that_loves_blanks_closes(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
              "required": ["a", "b"]}  # fmt: skip
    grammar = text_of(engine, StructuredOutput(engine.tokenizer).json_schema(schema))
    blanks = {
        token: 100.0 for token in range(VOCAB) if engine.tokenizer.token_bytes(token) in (b" ", b"\n", b"\t", b"\r")
    }
    assert len(blanks) == 4
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=300, logit_bias=blanks, presence_penalty=-2.0)
    for handle in run(engine, constrained(requests(engine, prompts(6), sampling, prefix="a24"), grammar)):
        check_valid(engine, handle, schema)
        assert len(handle.tokens) < 200


@pytest.mark.parametrize(
    "means",
    [
        pytest.param({"overlap": False}, id="no overlap"),
        pytest.param({"tape": False}, id="no tape"),
        pytest.param({"max_tokens_per_step": 16}, id="chunks of 16"),
        pytest.param({"max_running": 3}, id="3 slots"),
        pytest.param({"pages": 20}, id="preempted"),
        pytest.param({"prefix_cache": False}, id="no prefix cache"),
    ],
)
def test_the_means_change_no_answer(folder: Path, engine: Engine, means: dict[str, Any]) -> None:
    asked = constrained(requests(engine, prompts(8), DRAWN, prefix="m"), item_text(engine))
    alone = [tuple(run(engine, [request])[0].tokens) for request in asked]
    listener = Listener()
    with engine_of(folder, sinks=[listener], **means) as other:
        found = run(other, asked)
        assert [tuple(handle.tokens) for handle in found] == alone
    preempted = any(isinstance(event, Preempted) for event in listener.events)
    assert preempted or "pages" not in means, "the pool was to be too small for all"


def test_samples_penalties_and_logprobs(engine: Engine) -> None:
    grammar = item_text(engine)
    sampling = SamplingParams(
        temperature=1.3, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.5, frequency_penalty=1.0, seed=4, n=4,
        max_tokens=200, logprobs=3, logit_bias={ord("}"): -100.0},
    )  # fmt: skip
    asked = constrained(requests(engine, prompts(1), sampling, prefix="n"), grammar)
    handles = [engine.client.submit(request) for request in asked]
    answers = set()
    for handle in handles:
        logprobs = [one for event in handle for one in event.logprobs]
        check_valid(engine, handle)
        answers.add(said(engine, handle))
        assert [one.token for one in logprobs] == handle.tokens
        assert max(one.rank for one in logprobs) > 30, "raw: the grammar's token was seldom the model's best"
    assert len(answers) > 1


def test_end_of_text_min_tokens_and_ignore_eos(engine: Engine) -> None:
    make = StructuredOutput(engine.tokenizer)
    some = text_of(engine, make.regex("[ab]{2,40}"))
    love = {EOS: 100.0}
    first = SamplingParams(temperature=1.0, seed=1, max_tokens=60, logit_bias=love)
    for sampling, low, high in (
        (first, 2, 2),
        (msgspec.structs.replace(first, min_tokens=9), 9, 9),
        (msgspec.structs.replace(first, ignore_eos=True), 40, 40),
        (msgspec.structs.replace(first, min_tokens=50), 40, 40),
    ):
        (handle,) = run(
            engine, constrained(requests(engine, prompts(1), sampling, prefix=f"e{low}{sampling.min_tokens}"), some)
        )
        assert handle.last is not None and handle.last.finish == "stop"
        assert low <= len(said(engine, handle)) <= high, said(engine, handle)
        assert set(said(engine, handle)) <= {"a", "b"}
    cut = SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True)
    (handle,) = run(engine, constrained(requests(engine, prompts(1), cut, prefix="cut"), some))
    assert handle.last is not None and handle.last.finish == "length" and len(handle.tokens) == 5


def test_a_random_model_ends_valid_or_by_length(engine: Engine) -> None:
    grammar = text_of(engine, StructuredOutput(engine.tokenizer).response_format({"type": "json_object"}))
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=80)
    for handle in run(engine, constrained(requests(engine, prompts(12), sampling, prefix="o"), grammar)):
        check_fresh_matcher(engine, handle, grammar)
        assert handle.last is not None and handle.last.finish in ("stop", "length")
        if handle.last.finish == "stop":
            assert isinstance(json.loads(said(engine, handle)), dict)


def test_a_row_without_a_token_fails_with_a_reason_and_the_engine_lives(engine: Engine) -> None:
    grammar = text_of(engine, StructuredOutput(engine.tokenizer).choice(["yes", "no"]))
    banned = SamplingParams(temperature=1.0, seed=1, max_tokens=9, bad_words=((ord("y") - 33,), (ord("n") - 33,)))
    spelled = [engine.tokenizer.token_bytes(word[0]) for word in banned.bad_words]
    assert spelled == [b"y", b"n"]
    bad, good = requests(engine, prompts(2), [banned, DRAWN], prefix="f")
    handles = run(engine, constrained([bad], grammar) + constrained([good], item_text(engine)))
    assert handles[0].last is not None and handles[0].last.finish == "error"
    assert "no token is left" in str(handles[0].last.error)
    check_valid(engine, handles[1])
    broken = Grammar(kind="grammar", text='start: "a" b').encode()
    (handle,) = run(engine, constrained(requests(engine, prompts(1), DRAWN, prefix="b"), broken))
    assert handle.last is not None and handle.last.finish == "error" and "unknown name" in str(handle.last.error)


def test_a_slow_compilation_delays_no_other_stream(folder: Path) -> None:
    with engine_of(folder) as engine:
        gate = engine.client._loop.scheduler._grammars
        assert gate is not None
        compile_now, release = gate._compile, threading.Event()  # type: ignore[attr-defined]

        def slow(text: str) -> Any:
            release.wait(20)
            return compile_now(text)

        gate._compile = slow  # type: ignore[attr-defined]
        engine.client.start()
        (first,) = constrained(requests(engine, prompts(1), DRAWN, prefix="slow"), item_text(engine))
        held = engine.client.submit(first)
        sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        (other,) = requests(engine, prompts(1), sampling, prefix="other")
        times = [time.monotonic()] + [time.monotonic() for _ in engine.client.submit(other)]
        assert not held.done and len(times) == 101
        assert max(b - a for a, b in itertools.pairwise(times)) < 1.0
        release.set()
        held.result()
        check_valid(engine, held)


def test_structured_output_leaves_nothing_behind(folder: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with engine_of(folder) as engine:
        asked = constrained(requests(engine, prompts(6), DRAWN, prefix="x"), item_text(engine))
        engine.client.start()
        handles = [engine.client.submit(request) for request in asked]
        handles[0].cancel()
        for handle in handles:
            handle.result()
        gate = engine.client._loop.scheduler._grammars
        assert all(not entry.uses for entry in gate._entries.values())  # type: ignore[union-attr]
    assert {thread.name for thread in threading.enumerate()} <= before


# -- the real model --------------------------------------------------------------------------------------------------

PEOPLE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "color": {"enum": ["red", "green", "blue"]},
        "xyz": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 100}, "minItems": 3, "maxItems": 3},
    },
    "required": ["name", "age", "color", "xyz"],
}  # fmt: skip


@pytest.mark.weights
def test_smollm2_says_what_is_asked_for(smollm2_gguf: Path) -> None:
    engine = build_engine(Goals(model=str(smollm2_gguf)))
    try:
        make = StructuredOutput(engine.tokenizer)
        limits = Limits(
            vocab_size=engine.plan.card.vocab_size,
            max_context=engine.plan.schedule.max_context,
            eos_ids=tuple(sorted(engine.tokenizer.eos_ids)),
        )
        intake = Intake(limits)

        def ask(prompt: str, grammar: str, **sampling: Any) -> list[Request]:
            assert not isinstance(engine.template, Exception)
            ids = engine.tokenizer.encode_chat(engine.template.render([{"role": "user", "content": prompt}]))
            return constrained(list(intake.requests(ids, SamplingParams(**sampling), now_s=0.0)), grammar)

        schema = make.text(make.json_schema(PEOPLE))
        asked = [
            r for i in range(12) for r in ask(f"Person {i} as JSON", schema, temperature=1.0, seed=i, max_tokens=160)
        ]
        for handle in run(engine, asked):
            check_valid(engine, handle, PEOPLE)
            check_fresh_matcher(engine, handle, schema)
        blanks = {
            token: 100.0
            for token in range(engine.tokenizer.vocab_size)
            if (spelled := engine.tokenizer.token_bytes(token)) and not spelled.strip()
        }
        for handle in run(
            engine, ask("A person as JSON", schema, temperature=1.0, seed=1, max_tokens=400, logit_bias=blanks)
        ):
            check_valid(engine, handle, PEOPLE)
        (handle,) = run(
            engine,
            ask("Is the sky blue? yes or no", make.text(make.choice(["yes", "no"])), temperature=0.0, max_tokens=9),
        )
        assert said(engine, handle) in ("yes", "no")
    finally:
        engine.client.close()
