"""The front before real models: a tiny random one for what the sampler must honour, SmolLM2 for the whole house."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_support import MODEL, Live, content, finishes, live_model, until
from tiny_engine import write_checkpoint

from tradewind.kernels.cpu import library

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if why := library.why_not():
        pytest.skip(why)
    folder = write_checkpoint("full", tmp_path_factory.mktemp("tiny"))
    with live_model(
        str(folder), backend="cpu", threads=1, kv_format="f32", compute="f32", deterministic=True
    ) as server:
        yield server


def ids(server: Live, **fields: Any) -> list[int]:
    """The tokens of a completion of token ids."""
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
        **fields,
    }
    return list(server.post(TEXT, body)["choices"][0]["token_ids"])


def test_a34_values_do_not_depend_on_the_number_asked(tiny: Live) -> None:
    found = []
    for count in (1, 4, 10):
        body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, "temperature": 0, "logprobs": count}
        found.append(tiny.post(TEXT, body)["choices"][0]["logprobs"])
    for columns, count in zip(found, (1, 4, 10), strict=True):
        assert columns["token_logprobs"] == pytest.approx(found[-1]["token_logprobs"], abs=1e-4)
        for table, largest, chosen in zip(
            columns["top_logprobs"], found[-1]["top_logprobs"], columns["token_logprobs"], strict=True
        ):
            values = list(table.values())
            assert values == sorted(values, reverse=True) and chosen == max(values)
            # The names of bytes that are no text of their own may meet; so at most as many as asked for.
            assert len(table) <= count and set(table) <= set(largest)
            assert sum(map(math.exp, largest.values())) <= 1 + 1e-4


def test_a36_seeds_through_the_real_sampler(tiny: Live) -> None:
    def drawn(**fields: Any) -> list[int]:
        return ids(tiny, temperature=0.8, **fields)

    first = drawn(seed=7)
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(drawn(seed=7)))]
    threads += [threading.Thread(target=lambda k=k: drawn(seed=k, prompt=[k, 9])) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [first] == [drawn(seed=7)]
    assert drawn() != drawn()


def test_the_sampler_honours_what_is_asked(tiny: Live) -> None:
    greedy = ids(tiny)
    assert ids(tiny, logit_bias={"65": 100}) == [65] * 12
    banned = ids(tiny, logit_bias={str(greedy[0]): -100})
    assert banned[0] != greedy[0]
    assert ids(tiny, temperature=5, top_k=1, seed=1) == greedy
    assert ids(tiny, temperature=5, top_p=1e-6, seed=1) == greedy
    assert ids(tiny, temperature=5, min_p=1, seed=1) == greedy
    assert len(set(ids(tiny, frequency_penalty=2, presence_penalty=2, repetition_penalty=50))) > len(set(greedy)) - 1
    answer = tiny.post(TEXT, {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "logit_bias": {"259": 100}})
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 1
    held = tiny.post(
        TEXT, {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "logit_bias": {"259": 90}, "min_tokens": 6}
    )
    assert held["usage"]["completion_tokens"] == 7
    word = tiny.rig.tokenizer.token_text(greedy[0])
    if "\ufffd" not in word:
        assert ids(tiny, bad_words=[word])[0] != greedy[0]


def test_streams_equal_whole_answers(tiny: Live) -> None:
    for fields in (
        {"temperature": 0},
        {"temperature": 1.2, "seed": 3, "n": 3},
        {"temperature": 0, "logprobs": 3, "echo": True},
    ):
        body = {"prompt": "the sea", "max_tokens": 24, **fields}
        whole = tiny.post(TEXT, body)
        events = tiny.stream(TEXT, body)
        for choice in whole["choices"]:
            assert (
                "".join(c["text"] for e in events for c in e["choices"] if c["index"] == choice["index"])
                == choice["text"]
            )


def test_prompt_logprobs_do_not_depend_on_the_cache(tiny: Live) -> None:
    body = {"prompt": "the quick brown fox jumps over the lazy dog", "max_tokens": 0, "echo": True, "logprobs": 2}
    first, second = (tiny.post(TEXT, body)["choices"][0]["logprobs"] for _ in range(2))
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-4)
    assert len(first["tokens"]) == len(body["prompt"])


# -- SmolLM2


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[Live]:
    with live_model(str(smollm2_gguf)) as server:
        yield server


@pytest.mark.weights
def test_smollm2_speaks_through_the_official_client(smollm2: Live) -> None:
    openai = pytest.importorskip("openai")
    messages: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    with openai.OpenAI(base_url=smollm2.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
        chunks = list(
            client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24, stream=True)
        )
        text = whole.choices[0].message.content
        assert text and "".join(c.choices[0].delta.content or "" for c in chunks) == text
        again = client.responses.create(model=MODEL, input=messages, temperature=0, max_output_tokens=24, store=False)
        assert again.output_text == text
        assert whole.usage.completion_tokens <= 24 and again.usage.input_tokens == whole.usage.prompt_tokens
        assert again.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.weights
def test_a1_and_a31_on_smollm2(smollm2: Live) -> None:
    messages = [{"role": "user", "content": "Tell me a very long story."}]
    tokens = smollm2.post("/tokenize", {"messages": messages})["tokens"]
    rendered = smollm2.post("/detokenize", {"tokens": tokens})["prompt"]
    assert smollm2.post("/tokenize", {"prompt": rendered})["tokens"] == tokens
    body = {"messages": messages, "temperature": 0, "max_tokens": 1000, "ignore_eos": True}
    until(lambda: smollm2.running() == 0, "what was asked before still runs")
    before = smollm2.rig.engine.stats().pages_used
    with smollm2.opened("/v1/chat/completions", body) as events:
        for _ in range(5):
            next(events)
    until(lambda: smollm2.running() == 0, "it still runs", seconds=1)
    assert smollm2.rig.engine.stats().pages_used == before
    events = smollm2.stream("/v1/chat/completions", {**body, "max_tokens": 8})
    assert content(events) and finishes(events) == ["length"]
