"""The Python face on a tiny model: what is asked is what comes, what is wrong is said, and whatever happens the engine goes on."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engine import VOCAB, nothing_is_held, open_llm, prompts, write_checkpoint

from tests.reference.driver import Driver
from tests.reference.op_sets import EXACT, load, open_ops
from tradewind.contract.errors import EngineDeadError, RequestError, UserError
from tradewind.contract.request import SamplingParams
from tradewind.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("full", tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as made:
        yield made


@pytest.fixture(scope="module")
def letters(llm: LLM) -> dict[int, float]:
    """A bias that leaves only small letters: every token is then one character that can be read."""
    wanted = set(llm.tokenize("abcdefghijklmnopqrstuvwxyz"))
    return {token: -100.0 for token in range(VOCAB) if token not in wanted}


def one(llm: LLM, prompt: Any, sampling: SamplingParams) -> Any:
    return llm.generate(prompt, sampling)[0].completions[0]


def changed(sampling: SamplingParams, **values: Any) -> SamplingParams:
    return SamplingParams(**{**{name: getattr(sampling, name) for name in sampling.__struct_fields__}, **values})


# ------------------------------------------------------------------------------------------------- streams and answers


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, changed(DRAWN, n=3, logprobs=2)], ids=["greedy", "drawn", "n=3"])
def test_the_whole_answer_is_the_sum_of_its_stream(llm: LLM, sampling: SamplingParams) -> None:
    whole = llm.generate("abc", sampling)[0]
    deltas = list(llm.stream("abc", sampling))
    assert len(deltas) > sampling.n, "it came in pieces"
    for completion in whole.completions:
        mine = [delta for delta in deltas if delta.sample == completion.sample]
        assert "".join(delta.text for delta in mine) == completion.text
        assert tuple(token for delta in mine for token in delta.tokens) == completion.tokens
        assert tuple(entry for delta in mine for entry in delta.logprobs) == completion.logprobs
        assert [delta.finish for delta in mine][-1] == completion.finish == "length"
        assert all(delta.finish is None for delta in mine[:-1])


def test_a_stream_comes_while_the_engine_works(llm: LLM) -> None:
    """The first piece is there long before the last token is computed."""
    with closing(llm.stream("abc", changed(GREEDY, max_tokens=200))) as deltas:
        next(deltas)
        handles = llm.engine.client._handles
        assert [len(handle.tokens) < 5 for handle in handles.values()] == [True]


def test_samples_differ_and_a_seed_brings_them_back(llm: LLM) -> None:
    sampling = changed(DRAWN, n=4)
    first, again = (llm.generate("abc", sampling)[0].completions for _ in range(2))
    assert [c.tokens for c in first] == [c.tokens for c in again]
    assert len({c.tokens for c in first}) == 4
    assert one(llm, "abc", DRAWN).tokens == first[0].tokens, "sample 0 is the request alone"
    free = changed(DRAWN, seed=None)
    assert one(llm, "abc", free).tokens != one(llm, "abc", free).tokens


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    asked = ["abc", [1, 2, 3], [{"role": "user", "content": "hi"}], np.array([4, 5, 6]), (7, 8)]
    each = [GREEDY, DRAWN, changed(GREEDY, max_tokens=3), changed(DRAWN, n=2), changed(GREEDY, logprobs=0)]
    together = llm.generate(asked, each)
    assert [output.index for output in together] == [0, 1, 2, 3, 4]
    assert [len(output.completions) for output in together] == [1, 1, 1, 2, 1]
    for output, prompt, sampling in zip(together, asked, each, strict=True):
        alone = llm.generate([prompt], sampling)[0]
        assert [c.tokens for c in output.completions] == [c.tokens for c in alone.completions]
        assert output.prompt_tokens == alone.prompt_tokens
        assert output.arrived_s <= output.first_token_s <= output.finished_s


def test_two_hundred_prompts_at_once(llm: LLM) -> None:
    asked = prompts(200, seed=3, low=1, high=12)
    outputs = llm.generate(asked, changed(GREEDY, max_tokens=4))
    assert [list(output.prompt_tokens) for output in outputs] == asked
    assert all(len(output.completions[0].tokens) == 4 for output in outputs)
    for place in (0, 77, 199):
        assert one(llm, asked[place], changed(GREEDY, max_tokens=4)).tokens == outputs[place].completions[0].tokens
    assert nothing_is_held(llm)


def test_chat_is_generate_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    by_hand = llm.tokenize("user: hi\nassistant:")
    assert llm.tokenize(messages) == by_hand
    assert llm.chat(messages, GREEDY)[0].completions == llm.generate(by_hand, GREEDY)[0].completions
    assert len(llm.chat([messages, messages], GREEDY)) == 2


# ------------------------------------------------------------------------------------------------------------ stopping


def test_stop_strings_end_the_text_and_never_show(llm: LLM, letters: dict[int, float]) -> None:
    free = changed(DRAWN, logit_bias=letters, max_tokens=40)
    whole = one(llm, "abc", free).text
    assert len(whole) == 40
    assert whole.isalpha()
    for start, size in ((7, 1), (9, 3), (20, 6)):
        stop = whole[start : start + size]
        place = whole.find(stop)
        sampling = changed(free, stop=("never this", stop))
        shown = ""
        for delta in llm.stream("abc", sampling):
            shown += delta.text
            assert whole[:place].startswith(shown), "not even the beginning of the stop string was shown"
        assert shown == whole[:place]
        answer = one(llm, "abc", sampling)
        assert (answer.text, answer.finish, answer.stop) == (whole[:place], "stop", stop)
        assert len(answer.tokens) == place + size
        kept = one(llm, "abc", changed(sampling, include_stop=True))
        assert kept.text == whole[: place + size]
    assert nothing_is_held(llm)


def test_a_beginning_of_a_stop_string_at_the_end_is_shown(llm: LLM, letters: dict[int, float]) -> None:
    free = changed(DRAWN, logit_bias=letters, max_tokens=10)
    whole = one(llm, "abc", free).text
    answer = one(llm, "abc", changed(free, stop=(whole[-2:] + "!",)))
    assert (answer.text, answer.finish, answer.stop) == (whole, "length", None)


def test_stop_tokens_and_min_tokens(llm: LLM) -> None:
    free = changed(DRAWN, max_tokens=40)
    whole = one(llm, "abc", free)
    token = whole.tokens[6]
    first = whole.tokens.index(token)
    answer = one(llm, "abc", changed(free, stop_token_ids=(token,)))
    assert (answer.tokens, answer.finish, answer.stop) == (whole.tokens[: first + 1], "stop", token)
    assert answer.text == llm.tokenizer.decode(whole.tokens[:first])
    later = one(llm, "abc", changed(free, stop_token_ids=(token,), min_tokens=12))
    assert len(later.tokens) >= 12
    assert token not in later.tokens[:12], "a stop token cannot be drawn before min_tokens"


def test_end_of_text_ends_unless_ignored(llm: LLM) -> None:
    eos = llm.plan.card.eos_ids[0]
    pushed = changed(GREEDY, logit_bias={eos: 100.0}, ignore_eos=False)
    answer = one(llm, "abc", pushed)
    assert (answer.tokens, answer.text, answer.finish, answer.stop) == ((eos,), "", "stop", eos)
    assert one(llm, "abc", changed(pushed, ignore_eos=True)).tokens == (eos,) * 12
    held = one(llm, "abc", changed(pushed, min_tokens=5))
    assert len(held.tokens) == 6
    assert held.tokens[5] == eos
    assert eos not in held.tokens[:5]


# ------------------------------------------------------------------------------------------------------------- choosing


def test_bias_bans_and_penalties(llm: LLM) -> None:
    plain = one(llm, "abc", GREEDY).tokens
    other = next(token for token in range(VOCAB) if token not in plain)
    assert one(llm, "abc", changed(GREEDY, logit_bias={other: 100.0})).tokens == (other,) * 12
    banned = one(llm, "abc", changed(GREEDY, bad_words=((plain[0],), plain[1:3]))).tokens
    assert plain[0] not in banned
    assert all(pair != plain[1:3] for pair in pairwise(banned))
    # A pair is banned only as a pair: its second token may come after something else.
    pair = one(llm, "abc", changed(GREEDY, bad_words=(plain[:2],))).tokens
    assert pair[0] == plain[0]
    assert pair[1] != plain[1]
    # A strong bias to one token loses against a penalty for having been said.
    pushed = changed(GREEDY, logit_bias={other: 8.0}, max_tokens=30)
    assert one(llm, "abc", pushed).tokens.count(other) > one(
        llm, "abc", changed(pushed, frequency_penalty=2.0)
    ).tokens.count(other)
    without = one(llm, "abc", changed(GREEDY, max_tokens=60)).tokens
    with_penalty = one(llm, "abc", changed(GREEDY, max_tokens=60, repetition_penalty=3.0)).tokens
    assert len(set(with_penalty)) > len(set(without))


def test_draws_follow_the_softmax_of_the_logits(llm: LLM, folder: Path) -> None:
    """2,000 seeds of one token against exact probabilities from the plain op set; Pearson's chi-square, merged to 20 or more expected."""
    prompt = llm.tokenize("the sea")
    logits = reference_logits(folder, prompt)[-1].astype(np.float64) / 2.0
    probability = np.exp(logits - logits.max())
    probability /= probability.sum()
    draws = 2000
    outputs = llm.generate(
        [prompt] * draws, [SamplingParams(temperature=2.0, max_tokens=1, seed=seed) for seed in range(draws)]
    )
    counts = np.bincount([output.completions[0].tokens[0] for output in outputs], minlength=VOCAB)
    order = np.argsort(-probability)
    bins = np.minimum(np.cumsum(probability[order]) * draws // 20, draws // 20 - 1).astype(int)
    expected, seen = (np.bincount(bins, weights=w) for w in (probability[order] * draws, counts[order]))
    live = expected > 5
    expected, seen = np.append(expected[live], expected[~live].sum()), np.append(seen[live], seen[~live].sum())
    expected, seen = expected[expected > 0], seen[expected > 0]
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert freedom > 10
    # Normal approximation of Wilson and Hilferty. The seeds are fixed, so this is one draw; a temperature that is 15 % off fails.
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 3, (chi_square, freedom)


# ------------------------------------------------------------------------------------------------------------- logprobs


def reference_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] from the plain op set through a runner of the tests' own."""
    ops = open_ops("plain")
    model, card = load(folder, ops, numerics=EXACT)
    (logits,) = Driver(model, card=card, ops=ops, rows=1).step([(0, tokens)])
    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_logprobs_are_nested_sorted_and_those_of_the_model(llm: LLM, folder: Path) -> None:
    prompt = llm.tokenize("the sea")
    answers = {k: one(llm, prompt, changed(DRAWN, logprobs=k)) for k in (0, 1, 4, 10)}
    tokens = answers[10].tokens
    truth = log_softmax(reference_logits(folder, [*prompt, *tokens]))[len(prompt) - 1 : -1]
    for k, answer in answers.items():
        assert answer.tokens == tokens
        for place, entry in enumerate(answer.logprobs):
            row, widest = truth[place], answers[10].logprobs[place]
            assert entry.token == tokens[place]
            assert (entry.logprob, entry.rank) == (widest.logprob, widest.rank)
            assert entry.top_ids == widest.top_ids[:k]
            assert entry.top_logprobs == widest.top_logprobs[:k]
            assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
            assert entry.logprob == pytest.approx(row[entry.token], abs=2e-4)
            assert entry.rank == 1 + int((row > row[entry.token]).sum())
            np.testing.assert_allclose(entry.top_logprobs, np.sort(row)[::-1][:k], atol=2e-4)
    assert one(llm, prompt, DRAWN).logprobs == ()


@pytest.mark.parametrize(
    "means", [{}, {"max_tokens_per_step": 16}, {"prefix_cache": False, "tape": False, "overlap": False}]
)
def test_prompt_logprobs_are_those_of_the_model_whatever_the_chunks_and_the_cache(
    folder: Path, means: dict[str, Any]
) -> None:
    (prompt,) = prompts(1, seed=11, low=80, high=81)
    truth = log_softmax(reference_logits(folder, prompt))
    expected = truth[np.arange(len(prompt) - 1), prompt[1:]]
    sampling = changed(GREEDY, prompt_logprobs=3, max_tokens=2)
    with open_llm(folder, **means) as llm:
        one(llm, prompt, GREEDY)  # the prefix cache now holds the prompt
        for _ in range(2):
            output = llm.generate(prompt, sampling)[0]
            entries = output.prompt_logprobs
            assert [entry.token for entry in entries] == prompt[1:]
            np.testing.assert_allclose([entry.logprob for entry in entries], expected, atol=5e-4)
            assert sum(entry.logprob for entry in entries) == pytest.approx(expected.sum(), abs=5e-3)
            for entry, row in zip(entries, truth, strict=False):
                np.testing.assert_allclose(entry.top_logprobs, np.sort(row)[::-1][:3], atol=5e-4)
        assert llm.generate(prompt, GREEDY)[0].prompt_logprobs == ()


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "prompts must be text, token ids, messages, or a list of these, not NoneType"),
        ({"role": "user"}, "not dict"),
        (5, "not int"),
        (b"abc", "not bytes"),
        ([b"abc"], "a prompt must be text, token ids or messages, not bytes"),
        ([], "there is no prompt"),
        ([[]], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([1.0, 2.0], "prompt token 1.0 is not a token id"),
        ([1, 2.5], "prompt token 2.5 is not a token id; the vocabulary has 0 to 259"),
        ([1, "a"], "prompt token 'a' is not a token id"),
        ([1, None], "prompt token None"),
        ([True], "prompt token True"),
        ([VOCAB], "prompt token 260 is not"),
        ([-1], "prompt token -1 is not"),
        (np.array([0.5]), "prompt token 0.5 is not"),
        (["ok", 5], "prompt 2 of 2: a prompt must be text, token ids or messages, not int"),
        (["ok", ""], "prompt 2 of 2: the prompt is empty"),
        (["ok", [1, "a"]], "prompt 2 of 2: prompt token 'a'"),
        ("\ud800", "half a character"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": "hi"}, "x"], "message"),
    ],
    ids=repr,
)
def test_prompts_that_are_none_are_refused_in_one_sentence(llm: LLM, prompt: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompt, GREEDY)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert nothing_is_held(llm)


def test_prompts_at_the_limit_one_over_and_far_over(llm: LLM) -> None:
    limit = llm.plan.schedule.max_context
    assert limit == 512
    assert len(one(llm, [1] * (limit - 1), SamplingParams(temperature=0.0, ignore_eos=True)).tokens) == 1
    with pytest.raises(
        RequestError, match=r"the prompt has 512 tokens; with at least 1 to generate the limit is 512 \(1 too many\)"
    ):
        llm.generate([1] * limit)
    with pytest.raises(RequestError, match=r"the prompt has 100000 tokens.*\(99489 too many\)"):
        llm.generate([1] * 100_000)
    with pytest.raises(
        RequestError, match="has 3 tokens and max_tokens is 510, 513 together; the limit is 512: ask for at most 509"
    ):
        llm.generate("abc", SamplingParams(max_tokens=510))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5, "hot", None])
def test_a_temperature_that_is_none_is_refused_before_anything_runs(llm: LLM, value: Any) -> None:
    with pytest.raises(RequestError, match=r"^temperature is "):
        llm.generate("abc", SamplingParams(temperature=value))


def test_sampling_of_another_kind_is_refused(llm: LLM) -> None:
    for wrong in ({"temperature": 1}, 5, "greedy", [GREEDY, None]):
        with pytest.raises(RequestError, match=r"^sampling must be SamplingParams"):
            llm.generate(["a", "b"], wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="2 prompts but 3 sampling values"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(RequestError, match="chat needs a list of messages"):
        llm.chat("hi")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.stream("", GREEDY)  # said at once, not when the first piece is asked for


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"thread": 1}, "there is no choice named 'thread'; did you mean threads?"),
        ({"threads": "two"}, "a goal or pinned choice is wrong"),
        ({"threads": 0}, "threads"),
        ({"scenario": "fast"}, "a goal or pinned choice is wrong"),
        ({"memory_limit": "lots"}, "'lots' is no size"),
        ({"memory_limit": -5}, "memory"),
        ({"memory_limit": 1.5}, "a goal or pinned choice is wrong"),
        ({"max_context": 513}, "max_context is 513 tokens.*512"),
        ({"max_context": 0}, "max_context"),
        ({"memory_limit": "1MiB"}, "The weights of .* do not fit: .* short"),
    ],
    ids=str,
)
def test_goals_that_cannot_be_are_refused(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_llm(folder, **options)


def test_a_model_that_is_none_says_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tried a local path .*the packaged names .* and a Hub id"):
        LLM("no such model")
    with pytest.raises(UserError, match=r"is a folder without config\.json"):
        LLM(tmp_path)
    with pytest.raises(UserError):
        LLM(5)  # type: ignore[arg-type]


def test_folders_with_something_missing_or_broken(tmp_path: Path) -> None:
    for name, broken in (
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", None),
        ("model.safetensors", None),
        ("model.safetensors", b"\x08\x00\x00"),
        ("tokenizer.json", None),
        ("tokenizer.json", b"{}"),
    ):
        copy = write_checkpoint("full", tmp_path / "copy")
        (copy / name).unlink()
        if broken is not None:
            (copy / name).write_bytes(broken)
        before = threading.active_count()
        with pytest.raises(UserError) as refused:
            open_llm(copy)
        assert name.split(".")[0] in str(refused.value) or str(copy) in str(refused.value)
        assert "\n" not in str(refused.value)
        assert threading.active_count() == before, "no thread is left"


# ------------------------------------------------------------------------------------------------------- ends and middles


def test_leaving_a_stream_ends_the_request_and_gives_its_pages_back(llm: LLM) -> None:
    llm.forget()
    deltas = llm.stream("abc" * 30, changed(DRAWN, n=3, max_tokens=300))
    for _ in range(5):
        next(deltas)
    assert not llm.engine.client._loop.scheduler.idle
    deltas.close()
    assert nothing_is_held(llm)
    for delta in llm.stream("abc", changed(DRAWN, max_tokens=300)):
        if delta.tokens:
            break
    del delta
    gc.collect()
    assert nothing_is_held(llm)


def test_a_stream_that_is_never_read_asks_for_nothing(llm: LLM) -> None:
    deltas = llm.stream("abc", GREEDY)
    assert llm.engine.client._loop.scheduler.unfinished == 0
    del deltas
    assert nothing_is_held(llm)


def test_an_error_in_the_readers_loop_leaves_a_working_engine(llm: LLM) -> None:
    expected = one(llm, "abc", GREEDY)

    def read() -> None:
        for _ in llm.stream("xyz", changed(DRAWN, max_tokens=200)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    gc.collect()
    assert nothing_is_held(llm)
    assert one(llm, "abc", GREEDY) == expected


def test_asking_from_inside_a_stream(llm: LLM) -> None:
    alone, inner_alone = one(llm, "abc", GREEDY), one(llm, "xyz", DRAWN)
    pieces = []
    for delta in llm.stream("abc", GREEDY):
        pieces.append(delta)
        assert one(llm, "xyz", DRAWN) == inner_alone
        pieces_inside = [inner.tokens for inner in llm.stream("xyz", DRAWN)]
        assert tuple(token for piece in pieces_inside for token in piece) == inner_alone.tokens
    assert tuple(token for delta in pieces for token in delta.tokens) == alone.tokens
    assert pieces[-1].finish == "length"
    assert nothing_is_held(llm)


def test_two_streams_read_in_turn(llm: LLM) -> None:
    sampling = [GREEDY, changed(DRAWN, max_tokens=20)]
    alone = [one(llm, prompt, s).tokens for prompt, s in zip(("abc", "xyz"), sampling, strict=True)]
    streams = {
        place: llm.stream(prompt, s) for place, (prompt, s) in enumerate(zip(("abc", "xyz"), sampling, strict=True))
    }
    heard: list[list[int]] = [[], []]
    while streams:
        for place, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[place]
            else:
                heard[place].extend(delta.tokens)
    assert [tuple(tokens) for tokens in heard] == alone


def test_several_threads_may_ask(llm: LLM) -> None:
    asked = prompts(8, seed=2)
    alone = [one(llm, prompt, DRAWN).tokens for prompt in asked]
    found: list[Any] = [None] * len(asked)

    def ask(place: int) -> None:
        found[place] = one(llm, asked[place], DRAWN).tokens

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone
    assert nothing_is_held(llm)


def test_two_engines_in_one_process(llm: LLM, tmp_path: Path) -> None:
    with open_llm(write_checkpoint("windowed", tmp_path)) as other:
        mixed = [
            (a.tokens, b.tokens) for a, b in zip(llm.stream("abc", GREEDY), other.stream("abc", GREEDY), strict=True)
        ]
        assert [a for a, _ in mixed] != [b for _, b in mixed]
        assert sum((a for a, _ in mixed), ()) == one(llm, "abc", GREEDY).tokens
        assert sum((b for _, b in mixed), ()) == one(other, "abc", GREEDY).tokens


def test_closing_twice_and_using_it_after(folder: Path) -> None:
    before = threading.active_count()
    llm = open_llm(folder)
    deltas = llm.stream("abc", changed(GREEDY, max_tokens=100))
    next(deltas)
    llm.close()
    llm.close()
    assert [delta.finish for delta in deltas][-1] == "abort"
    with pytest.raises(EngineDeadError, match="this LLM was closed; make a new one"):
        llm.generate("abc")
    with pytest.raises(EngineDeadError, match="this LLM was closed"):
        llm.stream("abc")
    assert threading.active_count() == before


def test_the_prefix_cache_is_used_and_forgotten(llm: LLM) -> None:
    (prompt,) = prompts(1, seed=8, low=70, high=71)
    llm.forget()
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].cached_tokens > 0
    llm.forget()
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 0


def test_an_answer_after_a_sleep_is_the_one_before_it(llm: LLM) -> None:
    (prompt,) = prompts(1, seed=8, low=70, high=71)
    before = llm.generate(prompt, GREEDY)[0]
    llm.sleep()
    after = llm.generate(prompt, GREEDY)[0]
    assert after.completions[0].tokens == before.completions[0].tokens and after.cached_tokens == 0
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    llm.sleep()  # as soon as nothing runs
    assert not llm.engine.client.loop.scheduler.idle
    text = "".join(delta.text for delta in stream)
    assert before.completions[0].text.endswith(text)
    assert nothing_is_held(llm)


def test_the_default_length_is_what_the_context_leaves(llm: LLM) -> None:
    assert llm.with_default_length(SamplingParams(), ["abc"], 64).max_tokens == 64
    assert llm.with_default_length(SamplingParams(), ["abc", "d" * 500], 64).max_tokens == 12
    assert llm.with_default_length(SamplingParams(max_tokens=5), ["abc"], 64).max_tokens == 5


@pytest.mark.parametrize("streaming", [False, True], ids=["generate", "stream"])
def test_ctrl_c_ends_the_call_and_leaves_a_working_engine(llm: LLM, streaming: bool) -> None:
    """At twenty moments that the engine does not choose; each time it is idle afterwards and answers as before."""
    expected = one(llm, "abc", GREEDY)
    sampling = changed(DRAWN, max_tokens=400, n=2)

    def work(press: threading.Timer) -> None:
        press.start()
        while True:
            if streaming:
                for _ in llm.stream("xyz", sampling):
                    pass
            else:
                llm.generate(["xyz", "uvw" * 20], sampling)

    for moment in range(20):
        press = threading.Timer(0.01 + 0.0013 * moment, os.kill, (os.getpid(), signal.SIGINT))
        try:
            with pytest.raises(KeyboardInterrupt):
                work(press)
        finally:
            press.cancel()
            press.join()
        assert nothing_is_held(llm)
        assert one(llm, "abc", GREEDY) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_somebody_elses_handler_of_ctrl_c_is_left_alone(llm: LLM) -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        for delta in llm.stream("abc", GREEDY):
            if not pressed and delta.tokens:
                signal.raise_signal(signal.SIGINT)
        assert len(pressed) == 1
        assert delta.finish == "length"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_model_without_a_chat_template_says_how_to_go_on(tmp_path: Path) -> None:
    folder = write_checkpoint("full", tmp_path / "plain")
    (folder / "tokenizer_config.json").unlink()
    with open_llm(folder) as llm:
        with pytest.raises(UserError, match="chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
        assert len(one(llm, "abc", GREEDY).tokens) == 12
