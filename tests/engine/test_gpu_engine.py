"""The whole engine on the `cuda` op set with tiny models: on a GPU, elsewhere through Triton's interpreter (test_gpu_interpreter.py)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiny_engine import VOCAB, Listener, answers, nothing_is_held_by, prompts, requests, write_checkpoint
from tiny_gpu_engine import INTERPRETED, gpu_engine_of

from tradewind.contract.events import Preempted, StepDone, TokensOut
from tradewind.contract.request import SamplingParams
from tradewind.kernels.triton.tuning import AttentionWays, Tuning
from tradewind.serving.structured import StructuredOutput

NEW = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1, seed=7, max_tokens=NEW, ignore_eos=True
)
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=3)
SHORT: dict[str, Any] = {"low": 14, "high": 16}


@pytest.fixture(scope="module", params=["full", "windowed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("full", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Each request by itself, without a prefix cache, on the fixed kernels."""
    found: dict[str, list[tuple[int, ...]]] = {}
    with gpu_engine_of(folder, deterministic=True, prefix_cache=False) as engine:
        for name, sampling in (("greedy", GREEDY), ("drawn", DRAWN)):
            found[name] = [
                answers(engine, [r])[0] for r in requests(engine, prompts(2, **SHORT), sampling, prefix=name)
            ]
    return found


@pytest.mark.parametrize(
    "means",
    [
        pytest.param({}, id="batch"),
        pytest.param({"max_tokens_per_step": 16}, id="chunks of 16"),
        pytest.param({"graphs": False, "overlap": False}, id="eager, one step at a time"),
    ],
)
def test_deterministic_answers_depend_on_nobody_else(
    folder: Path, alone: dict[str, list[tuple[int, ...]]], means: dict[str, Any]
) -> None:
    with gpu_engine_of(folder, deterministic=True, **means) as engine:
        both = requests(engine, prompts(2, **SHORT), GREEDY) + requests(engine, prompts(2, **SHORT), DRAWN, prefix="d")
        assert answers(engine, both) == alone["greedy"] + alone["drawn"]
        assert answers(engine, requests(engine, prompts(2, **SHORT), GREEDY, prefix="again")) == alone["greedy"], (
            "prefix hits"
        )


def test_deterministic_answers_survive_preemption(folder: Path, alone: dict[str, list[tuple[int, ...]]]) -> None:
    listener = Listener()
    with gpu_engine_of(folder, deterministic=True, pages=4, sinks=[listener]) as engine:
        assert answers(engine, requests(engine, prompts(2, **SHORT), GREEDY)) == alone["greedy"]
    if not any(isinstance(event, Preempted) for event in listener.events):
        pytest.fail("the pool was to be too small for all")


def test_the_fast_kernels_differ_from_the_fixed_ones_at_near_ties_only(llama: Path) -> None:
    """What bf16 rounding may change is a token whose logit is within a rounding of the best."""
    asked = prompts(3, **SHORT)
    with gpu_engine_of(llama, deterministic=True) as engine:
        exact = run_with_events(engine, requests(engine, asked, LOGPROBS))
    with gpu_engine_of(llama) as engine:
        fast = run_with_events(engine, requests(engine, asked, LOGPROBS))
    for (a, events), (b, _) in zip(exact, fast, strict=True):
        for token, other, entry in zip(a.tokens, b.tokens, logprobs_of(events), strict=False):
            if token != other:
                gap = entry.top_logprobs[0] - dict(zip(entry.top_ids, entry.top_logprobs, strict=True)).get(
                    other, -np.inf
                )
                assert gap < 0.5, f"{token} and {other} are {gap} apart"
                break


def with_flash_attention(monkeypatch: pytest.MonkeyPatch, there: object | None) -> None:
    """The package seems to be there (or not), and serves the small heads of these tests."""
    monkeypatch.setattr("tradewind.attention.fresh.find_spec", lambda name: there)
    monkeypatch.setattr("tradewind.attention.fresh.HEAD_DIMS", (16,))


def test_fresh_prompts_by_another_kernel_give_the_same_logits(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 (in torch, where there is no GPU) beside decoding rows, whose answers it must leave alone."""
    asked = prompts(3, **SHORT)
    found = []
    for there in (None, object()):
        if there is not None and not INTERPRETED:
            pytest.skip("FlashAttention 3 has no heads of 16")
        with_flash_attention(monkeypatch, there)
        with gpu_engine_of(llama, prefix_cache=False) as engine:
            first = engine.client.submit(requests(engine, [asked[0]], LOGPROBS)[0])
            while not first.tokens:
                engine.client.drive()
            others = [engine.client.submit(request) for request in requests(engine, asked[1:], LOGPROBS, prefix="o")]
            found.append([list(handle) for handle in (first, *others)])
            assert engine.client.loop.scheduler.idle
            kinds = {bucket.fresh for bucket in buckets_of(engine) if not bucket.singles}
            assert kinds == ({"none"} if there is None else {"all"})
    for one, two in zip(*found, strict=True):
        a, b = (next(entry for event in events for entry in event.logprobs or ()) for events in (one, two))
        assert abs(a.top_logprobs[0] - b.top_logprobs[0]) < 0.1


@pytest.mark.parametrize(("kind", "deterministic"), [("full", True), ("windowed", False)])
def test_the_last_layer_ends_for_rows_that_want_a_token(tmp_path: Path, kind: str, deterministic: bool) -> None:
    """In steps of which few rows want one, chunks among them that want nothing; prompts of which all logprobs are wanted end for all."""
    folder = write_checkpoint(kind, tmp_path)
    asked, more = prompts(2, **SHORT), msgspec.structs.replace(LOGPROBS, prompt_logprobs=2)
    found = []
    for few in (False, True):
        tuning = Tuning(multiprocessors=132, few_ends=few)
        means: dict[str, Any] = {"deterministic": deterministic, "prefix_cache": False, "max_tokens_per_step": 16}
        with gpu_engine_of(folder, tuning=tuning, **means) as engine:
            handles = [engine.client.submit(request) for request in requests(engine, asked, LOGPROBS)]
            handles += [engine.client.submit(request) for request in requests(engine, asked[:1], more, prefix="m")]
            found.append([list(handle) for handle in handles])
            kinds = {key[0] for key in engine.client.loop._executor._runner._graphs}
        assert {"body", "whole"} < kinds
        assert few == bool(kinds & {"stem", "end"}) == ({"stem", "end"} < kinds)
    if not deterministic:
        close_to(found[1], found[0])
        return
    for mine, theirs in zip(found[1], found[0], strict=True):
        for name in ("tokens", "logprobs", "prompt_logprobs"):
            one, two = (tuple(entry for event in events for entry in getattr(event, name)) for events in (mine, theirs))
            assert one == two


def buckets_of(engine: Any) -> set[Any]:
    """Of the steps that the engine has run with a body."""
    graphs = engine.client.loop._executor._runner._graphs
    return {key[1] for key in graphs if key[0] in ("body", "stem", "whole")}


def close_to(found: list[list[TokensOut]], wanted: list[list[TokensOut]]) -> None:
    """Logprobs of tokens before the first that differs: bf16 sums in another order."""
    for one, two in zip(found, wanted, strict=True):
        compared = 0
        for a, b in zip(logprobs_of(one), logprobs_of(two), strict=True):
            assert abs(a.top_logprobs[0] - b.top_logprobs[0]) < 0.15
            compared += 1
            if a.token != b.token:
                break
        assert compared


def test_a_shared_prefix_is_read_once_and_the_logits_stay(tmp_path: Path) -> None:
    """Decoding rows that share 48 keys, alone and beside a prompt that begins; layers with a window read theirs as ever."""
    folder = write_checkpoint("windowed", tmp_path)
    prefix, own = prompts(1, seed=5, low=50, high=51)[0], prompts(3, seed=6, low=3, high=5)
    found = []
    tuning = Tuning(multiprocessors=132, fuse_rope_rows=0, shared_rows=2)
    for ways in (AttentionWays(shared_prefix=None), AttentionWays(shared_prefix=32)):
        with gpu_engine_of(folder, ways=ways, tuning=tuning, max_tokens_per_step=96) as engine:
            first = run_with_events(engine, requests(engine, [prefix], LOGPROBS))  # publishes three pages
            asked = requests(engine, [prefix + tail for tail in own], LOGPROBS, prefix="s")
            handles = [engine.client.submit(request) for request in asked[:2]]
            while not all(handle.tokens for handle in handles):
                assert engine.client.drive()
            late = engine.client.submit(asked[2])  # its prompt joins rows that decode
            found.append([first[0][1], *(list(handle) for handle in (*handles, late))])
            sharing = {bucket.singles for bucket in buckets_of(engine) if bucket.shared}
            assert sharing == ({True, False} if ways.shared_prefix else set())
            if ways.shared_prefix:
                runner = engine.client.loop._executor._runner
                counted = {
                    group.kind: int(runner._programs.found(rows)[0])
                    for group, rows in zip(runner._groups, runner._programs.batch.rows, strict=True)
                }
                assert counted == {"full": 48} | ({"window": 0} if len(counted) > 1 else {})
                answers(engine, requests(engine, [prefix + tail for tail in own[:2]], GREEDY, prefix="w"))
                assert any(key[0] == "whole" and key[1].shared for key in runner._graphs)
            assert nothing_is_held_by(engine)
    close_to(*found)


def test_nobody_shares_and_no_step_asks(llama: Path) -> None:
    tuning = Tuning(multiprocessors=132, fuse_rope_rows=0, shared_rows=2)
    with gpu_engine_of(llama, ways=AttentionWays(shared_prefix=16), tuning=tuning) as engine:
        answers(engine, requests(engine, prompts(3, low=17, high=20), GREEDY))
        assert not any(bucket.shared for bucket in buckets_of(engine))


def test_prompts_that_begin_beside_one_that_goes_on(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is cut by the budget: in the next step it goes on by the paged kernel, and the one behind it begins by the other."""
    if not INTERPRETED:
        pytest.skip("FlashAttention 3 has no heads of 16")
    with_flash_attention(monkeypatch, object())
    asked = [*prompts(2, seed=8, low=30, high=31), *prompts(2, seed=9, low=14, high=16)]
    found = []
    for ways in (AttentionWays(partly_fresh=None), AttentionWays(partly_fresh=2, mixed_rows=(2, 3))):
        with gpu_engine_of(llama, prefix_cache=False, ways=ways) as engine:
            found.append([events for _, events in run_with_events(engine, requests(engine, asked, LOGPROBS))])
            kinds = {bucket.fresh for bucket in buckets_of(engine) if not bucket.singles}
            assert ("some" in kinds) == bool(ways.partly_fresh) and "all" in kinds
            if ways.partly_fresh:
                assert {bucket.rows for bucket in buckets_of(engine) if not bucket.singles} & {2, 3}
                runner = engine.client.loop._executor._runner
                text = next(
                    p.describe()
                    for key, p in runner._programs._programs.items()
                    if getattr(key[1], "fresh", "") == "some"
                )
                assert "fa3 [48, 64] of rows that begin" in text and "of rows that go on" in text
    close_to(*found)


def logprobs_of(events: list[TokensOut]) -> list[Any]:
    """The logprobs of a request's tokens."""
    return [entry for event in events for entry in event.logprobs or ()]


def run_with_events(engine: Any, asked: list[Any]) -> list[tuple[Any, list[TokensOut]]]:
    """Runs requests; each one's handle and events."""
    handles = [engine.client.submit(request) for request in asked]
    return [(handle, list(handle)) for handle in handles]


def test_logprobs_are_those_of_the_raw_logits_however_many_are_asked(llama: Path) -> None:
    with gpu_engine_of(llama, deterministic=True) as engine:
        asked = [
            SamplingParams(
                temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=n, prompt_logprobs=2, repetition_penalty=p
            )
            for n, p in ((0, 1.0), (4, 1.0), (10, 1.3))
        ]
        handles = run_with_events(engine, requests(engine, [prompts(1, **SHORT)[0]] * 3, asked))
        first = [logprobs_of(events)[0] for _, events in handles]
        assert [len(entry.top_ids) for entry in first] == [0, 4, 10]
        assert first[1].top_ids == first[2].top_ids[:4] and first[1].top_logprobs == first[2].top_logprobs[:4]
        assert first[0].token == first[1].token == first[1].top_ids[0]
        assert all(np.isfinite(entry.logprob) and entry.logprob <= 0 for entry in first)
        prompt = [event.prompt_logprobs for event in handles[0][1] if event.prompt_logprobs]
        assert prompt and all(entry is None or entry.logprob <= 0 for entry in prompt[0])


def test_bans_and_biases_hold_in_a_batch(llama: Path) -> None:
    prompt = prompts(1, **SHORT)[0]
    with gpu_engine_of(llama, deterministic=True) as engine:
        plain = answers(engine, requests(engine, [prompt], GREEDY))[0]
        asked = [
            GREEDY,
            SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, bad_words=((plain[0],),)),
            SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, bad_words=((plain[0], plain[1]),)),
            SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logit_bias={11: 100.0}),
        ]
        found = answers(engine, requests(engine, [prompt] * 4, asked, prefix="b"))
    assert found[0] == plain
    assert plain[0] not in found[1]
    assert found[2][0] == plain[0] and found[2][1] != plain[1]
    assert set(found[3]) == {11}


def test_more_biases_than_there_is_room_for_make_room(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tradewind.runner.steering.BIASES_EACH", 1)
    few = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logit_bias={11: 100.0})
    many = SamplingParams(
        temperature=0.0, max_tokens=2, ignore_eos=True, logit_bias=dict.fromkeys(range(200), -100.0) | {12: 100.0}
    )
    prompt = prompts(1, **SHORT)[0]
    with gpu_engine_of(llama, deterministic=True) as engine:
        found = answers(engine, requests(engine, [prompt], few))
        found += answers(engine, requests(engine, [prompt] * 2, [few, many], prefix="m"))
    assert found == [(11, 11), (11, 11), (12, 12)]


def test_a_grammar_holds_beside_free_rows(llama: Path) -> None:
    pytest.importorskip("llguidance")
    heard = Listener()
    with gpu_engine_of(llama, deterministic=True, sinks=[heard]) as engine:
        free = answers(engine, requests(engine, prompts(2, **SHORT), GREEDY))
        digits = StructuredOutput(engine.tokenizer).text(StructuredOutput(engine.tokenizer).regex("[0-9]{3}"))
        constrained = [
            msgspec.structs.replace(request, grammar=digits)
            for request in requests(engine, [prompts(1, **SHORT)[0]], GREEDY, prefix="g")
        ]
        found = answers(engine, requests(engine, prompts(2, **SHORT), GREEDY, prefix="f") + constrained)
        text = engine.tokenizer.decode(list(found[2]))
    assert found[:2] == free
    assert text.strip()[:3].isdigit(), text
    steps = [event for event in heard.events if isinstance(event, StepDone)]
    masked = [event for event in steps if event.grammar_ids]
    assert masked and {name for event in masked for name in event.grammar_ids} == {constrained[0].id}
    assert all(sum(event.grammar_parts) == pytest.approx(event.grammar_s) for event in steps)
    assert all(0 <= event.grammar_s <= event.device_s for event in masked), (
        "from the end of the body to where the masks were"
    )


def test_cancelled_requests_leave_nothing_behind(llama: Path) -> None:
    with gpu_engine_of(llama) as engine:
        long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        handles = [engine.client.submit(request) for request in requests(engine, prompts(6, **SHORT), long)]
        for _ in range(5):
            engine.client.drive()
        for handle in handles[::2]:
            handle.cancel()
        for handle in handles[1::2]:
            handle.cancel()
        while engine.client.drive():
            pass
        assert all(isinstance(handle.last, TokensOut) and handle.last.finish == "abort" for handle in handles)
        assert nothing_is_held_by(engine)


def test_broken_weights_end_the_request_with_a_reason(llama: Path, tmp_path: Path) -> None:
    import safetensors.numpy as safe

    folder = write_checkpoint("full", tmp_path / "broken")
    tensors = dict(safe.load_file(folder / "model.safetensors"))
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    safe.save_file(tensors, folder / "model.safetensors")
    with gpu_engine_of(folder) as engine:
        handle = engine.client.run(requests(engine, prompts(1, **SHORT), GREEDY))[0]
    assert handle.last is not None and handle.last.finish == "error"
    assert handle.last.error == "the model's logits are not finite"
    assert VOCAB == 260


def test_few_tokens_of_a_long_prompt_are_cut_over_its_keys(llama: Path) -> None:
    """A prompt that goes on, alone and beside rows that decode, and one that begins behind it: the same answers, cut or not."""
    long, *others = *prompts(1, seed=11, low=80, high=81), *prompts(3, seed=12, low=8, high=20)
    found = []
    for ways in (None, AttentionWays(split_prompts=32)):
        tuning = Tuning(multiprocessors=132, split_keys=16)
        with gpu_engine_of(llama, prefix_cache=False, ways=ways, tuning=tuning, max_tokens_per_step=24) as engine:
            alone = run_with_events(engine, requests(engine, [long], LOGPROBS))[0][1]
            handles = [engine.client.submit(request) for request in requests(engine, others[:2], LOGPROBS, prefix="x")]
            while not all(handle.tokens for handle in handles):
                assert engine.client.drive()
            late = [
                engine.client.submit(request) for request in requests(engine, [long, others[2]], LOGPROBS, prefix="y")
            ]
            found.append([alone, *(list(handle) for handle in (*handles, *late))])
            deep = {(bucket.rows == 1, bucket.deep) for bucket in buckets_of(engine) if bucket.deep}
            assert bool(deep) == (ways is not None)
            if ways is not None:
                assert {(True, 1), (False, 1)} <= deep, deep
                runner = engine.client.loop._executor._runner
                texts = [p.describe() for key, p in runner._programs._programs.items() if getattr(key[1], "deep", 0)]
                assert texts and all("splits=32" in text for text in texts)
            assert nothing_is_held_by(engine)
    close_to(*found)


def test_graphs_captured_ahead_give_the_same_answers(llama: Path) -> None:
    if INTERPRETED:
        pytest.skip("captures need a GPU")
    asked = prompts(6, low=10, high=20)
    found = []
    for wait in (False, True):
        with gpu_engine_of(llama, prefix_cache=False) as engine:
            runner = engine.client.loop._executor._runner
            if wait:
                deadline = time.monotonic() + 60
                while not (runner.prepared and runner.captured_ahead):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                assert runner._ahead.error is None and len(runner._graphs) > 8
            captures = runner.captures
            found.append(answers(engine, requests(engine, asked, GREEDY)))
            if wait:
                assert runner.captures - captures <= 4, "prompts and decode steps were captured before"
    assert found[0] == found[1]
