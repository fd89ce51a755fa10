"""Every field of chat and completions does what docs/serving.md says, streamed and not, and reaches the engine as it was asked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from http_support import BOS, EOS, HERMES, MODEL, THINKING, Live, chat_body, content, finishes, live, until

from tradewind.contract.request import SamplingParams
from tradewind.serving.http.front import Options

SAYS: dict[str, Any] = {
    "greet": "hello there",
    "think": "<think>so</think>hi",
    "two calls": '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call><tool_call>{"name": "b", "arguments": {}}</tool_call>',
    "mixed": 'Wait.<tool_call>{"name": "a", "arguments": {"x": "é"}}</tool_call>',
    "special": [104, 105, BOS, 33, EOS],
    "cut": b"caf\xc3",
    "bad bytes": b"a\xff\xfeb",
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(says=SAYS) as one:
        yield one


def entered(server: Live) -> SamplingParams:
    """What the engine was last asked."""
    return server.rig.device.entered[-1].sampling


def test_sampling_values_reach_the_engine(server: Live) -> None:
    server.chat(
        "anything",
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.4,
        logit_bias={"100": -100, "101": 5}, bad_words=["no"], seed=-3, stop="x", stop_token_ids=[98], ignore_eos=True,
        min_tokens=2, max_tokens=9, include_stop_str_in_output=True,
    )  # fmt: skip
    got = entered(server)
    assert got == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.4,
        logit_bias={100: -100.0, 101: 5.0}, bad_words=((110, 111), (32, 110, 111)), seed=-3, stop=("x",), stop_token_ids=(98,),
        ignore_eos=True, min_tokens=2, max_tokens=9, include_stop=True,
    )  # fmt: skip


def test_null_is_the_default_everywhere(server: Live) -> None:
    nothing = dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
         "bad_words", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "max_tokens", "n", "stream", "user", "logprobs",
         "top_logprobs", "tools", "tool_choice", "response_format", "cache_salt", "priority", "stream_options", "timing")
    )  # fmt: skip
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "greet"}], **nothing})
    assert entered(server) == SamplingParams()
    assert answer["choices"][0]["message"]["content"] == "hello there" and answer["model"] == MODEL
    assert set(answer) >= {"id", "object", "created", "model", "choices", "usage"} and "timing" not in answer
    assert answer["object"] == "chat.completion"


def test_top_k_of_minus_one_means_all(server: Live) -> None:
    server.chat("greet", top_k=-1)
    assert entered(server).top_k == 0


def test_stop_token_ids_and_end_of_text_are_no_part_of_the_text(server: Live) -> None:
    choice = server.chat("greet", stop_token_ids=[ord("t")], return_token_ids=True)["choices"][0]
    assert (
        choice["message"]["content"] == "hello "
        and choice["stop_reason"] == ord("t")
        and choice["finish_reason"] == "stop"
    )
    assert bytes(choice["token_ids"]) == b"hello t"
    choice = server.chat("greet", stop_token_ids=[ord("t")], include_stop_str_in_output=True)["choices"][0]
    assert choice["message"]["content"] == "hello t"
    choice = server.chat("greet", stop=["the"], include_stop_str_in_output=True)["choices"][0]
    assert choice["message"]["content"] == "hello the"
    choice = server.chat("greet", ignore_eos=True, max_tokens=20)["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["message"]["content"]) > len("hello there")


def test_min_tokens_passes_over_early_stop_strings(server: Live) -> None:
    assert server.chat("greet", stop=["l"])["choices"][0]["message"]["content"] == "he"
    assert server.chat("greet", stop=["e"], min_tokens=4)["choices"][0]["message"]["content"] == "hello th"


@pytest.mark.parametrize("skip", [None, True, False])
def test_special_tokens_are_skipped_unless_asked_for(server: Live, skip: bool | None) -> None:
    text = server.chat("special", skip_special_tokens=skip, ignore_eos=True, max_tokens=4)["choices"][0]["message"][
        "content"
    ]
    assert text == ("hi<s>!" if skip is False else "hi!")


@pytest.mark.parametrize(("ask", "text"), [("cut", "caf\ufffd"), ("bad bytes", "a\ufffd\ufffdb")])
def test_bytes_that_are_no_text(server: Live, ask: str, text: str) -> None:
    """The one place where U+FFFD is right: the model itself said no UTF-8."""
    assert server.chat(ask)["choices"][0]["message"]["content"] == text
    assert content(server.chat_stream(ask)) == text


def test_n_samples_of_a_chat(server: Live) -> None:
    body = chat_body("riddle", n=4, max_tokens=12, seed=5) | {"temperature": 1}
    whole = server.post("/v1/chat/completions", body)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3] and len(set(texts)) == 4
    assert whole["usage"]["completion_tokens"] == 48
    events = server.stream("/v1/chat/completions", body)
    assert [content(events, index) for index in range(4)] == texts
    assert sorted(c["index"] for e in events for c in e["choices"] if c["finish_reason"]) == [0, 1, 2, 3]


def test_n_samples_stop_each_for_themselves(server: Live) -> None:
    body = chat_body("riddle", n=3, max_tokens=200, seed=5, stop=["e"]) | {"temperature": 1}
    whole = server.post("/v1/chat/completions", body)
    events = server.stream("/v1/chat/completions", body)
    for index, choice in enumerate(whole["choices"]):
        assert choice["stop_reason"] == "e" and "e" not in choice["message"]["content"]
        assert content(events, index) == choice["message"]["content"]
    until(lambda: server.running() == 0, "a sample that stopped still runs", seconds=1)


def test_usage_in_streams(server: Live) -> None:
    plain = server.chat_stream("greet")
    assert all("usage" not in event for event in plain)
    asked = server.chat_stream("greet", stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in asked[:-1]) and asked[-1]["choices"] == []
    usage = asked[-1]["usage"]
    whole = server.chat("greet")["usage"]
    for one in (usage, whole):
        one.pop("prompt_tokens_details")
    assert usage == whole and usage["completion_tokens"] == len("hello there") + 1
    always = server.chat_stream("greet", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in always]
    assert counts == sorted(counts) and counts[-1] == len("hello there") + 1
    assert all(
        e["usage"]["total_tokens"] == e["usage"]["prompt_tokens"] + e["usage"]["completion_tokens"] for e in always
    )
    texts = server.stream(
        "/v1/completions", {"prompt": "greet", "max_tokens": 30, "stream_options": {"include_usage": True}}
    )
    assert texts[-1]["choices"] == [] and texts[-1]["usage"]["completion_tokens"] == len("hello there") + 1


def test_timing_on_demand(server: Live) -> None:
    whole = server.chat("greet", timing=True)["timing"]
    assert set(whole) == {"queue_ms", "prefill_ms", "ttft_ms", "decode_ms", "total_ms"}
    assert all(value >= 0 for value in whole.values())
    assert whole["ttft_ms"] == pytest.approx(whole["queue_ms"] + whole["prefill_ms"], abs=0.01)
    assert whole["total_ms"] == pytest.approx(whole["ttft_ms"] + whole["decode_ms"], abs=0.01)
    last = server.chat_stream("greet", timing=True)[-1]
    assert last["choices"] == [] and last["timing"]["total_ms"] > 0
    both = server.chat_stream("greet", timing=True, stream_options={"include_usage": True})[-1]
    assert both["timing"] and both["usage"]
    assert server.stream("/v1/completions", {"prompt": "greet", "timing": True})[-1]["timing"]["total_ms"] > 0


def test_the_first_chunk_has_the_role_and_the_last_the_reason(server: Live) -> None:
    events = server.chat_stream("greet")
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": EOS,
    }  # fmt: skip
    assert finishes(events) == ["stop"]
    assert len({event["id"] for event in events}) == 1 and all(e["object"] == "chat.completion.chunk" for e in events)


def test_token_ids_on_demand(server: Live) -> None:
    whole = server.chat("greet", return_token_ids=True)
    events = server.chat_stream("greet", return_token_ids=True)
    streamed = [t for e in events for c in e["choices"] for t in c.get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"] == [*b"hello there", EOS]
    assert events[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_messages_of_every_shape(server: Live) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "ann"},
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "user", "content": "greet"},
    ]  # fmt: skip
    tokens = server.post("/tokenize", {"messages": messages})["tokens"]
    text = server.post("/detokenize", {"tokens": tokens})["prompt"]
    assert text == (
        "<s><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\ngreet<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        server.post("/v1/chat/completions", {"messages": messages})["choices"][0]["message"]["content"] == "hello there"
    )


def test_the_last_message_can_be_continued(server: Live) -> None:
    messages = [{"role": "user", "content": "greet"}, {"role": "assistant", "content": "hel"}]
    tokens = server.post("/tokenize", {"messages": messages, "continue_final_message": True})["tokens"]
    assert server.post("/detokenize", {"tokens": tokens})["prompt"].endswith("<|im_start|>assistant\nhel")
    error = server.error("/v1/chat/completions", {"messages": messages[:1], "continue_final_message": True})
    assert error["param"] == "continue_final_message"
    no_prompt = server.post("/tokenize", {"messages": messages[:1], "add_generation_prompt": False})["tokens"]
    assert server.post("/detokenize", {"tokens": no_prompt})["prompt"].endswith("greet<|im_end|>\n")


def test_tools_reach_the_template_and_calls_come_back() -> None:
    with live(says=SAYS, speech=HERMES) as server:
        choice = server.chat("two calls", tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)["choices"][0]
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["a", "b"]
        assert len({c["id"] for c in choice["message"]["tool_calls"]}) == 2
        mixed = server.chat("mixed", tools=TOOLS)["choices"][0]["message"]
        assert mixed["content"] == "Wait." and json.loads(mixed["tool_calls"][0]["function"]["arguments"]) == {"x": "é"}
        events = server.chat_stream("two calls", tools=TOOLS)
        indexes = [call["index"] for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", [])]
        assert indexes == sorted(indexes) and set(indexes) == {0, 1}
        prompt = server.rig.device.entered[-1].tokens.tolist()
        assert '"name": "a"' in server.rig.tokenizer.decode(prompt)
        # Without tools, or with tool_choice none, nothing is a call and the template is told of none.
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message = server.chat("two calls", **fields)["choices"][0]["message"]
            assert message["content"] == SAYS["two calls"] and "tool_calls" not in message
        # The answer goes back with its result.
        messages = [
            {"role": "user", "content": "two"}, choice["message"], {"role": "tool", "tool_call_id": "x", "content": "4"},
            {"role": "user", "content": "greet"},
        ]  # fmt: skip
        again = server.post(
            "/v1/chat/completions", {"messages": [*messages[:1], {**choice["message"], "content": ""}, *messages[2:]]}
        )
        assert again["choices"][0]["message"]["content"] == "hello there"
        for refused, param in (
            ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "zz"}}}, "tool_choice"),
            ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
            ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools"),
        ):
            error = server.chat("greet", status=400, **refused)["error"]
            assert error["param"] == param, error


def test_reasoning_is_told_apart_and_counted() -> None:
    with live(says=SAYS, speech=THINKING) as server:
        whole = server.chat("think")
        assert whole["choices"][0]["message"] == {
            "role": "assistant", "content": "hi", "refusal": None, "reasoning_content": "so",
        }  # fmt: skip
        assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]
        events = server.chat_stream("think")
        assert (content(events), content(events, field="reasoning_content")) == ("hi", "so")


# -- completions


def test_completions_take_text_ids_and_lists(server: Live) -> None:
    for prompt, texts in (
        ("greet", ["hello there"]),
        ([*b"greet"], ["hello there"]),
        (["greet", "greet again"], ["hello there"] * 2),
        ([[*b"greet"], [*b"greet!"]], ["hello there"] * 2),
    ):
        whole = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 40})
        assert [choice["text"] for choice in whole["choices"]] == texts and whole["object"] == "text_completion"
        events = server.stream("/v1/completions", {"prompt": prompt, "max_tokens": 40})
        for index, text in enumerate(texts):
            assert "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) == text
    several = server.post(
        "/v1/completions", {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3, "temperature": 1, "seed": 1}
    )
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 6 and several["usage"]["completion_tokens"] == 12


def test_completions_default_to_sixteen_tokens_or_what_fits(server: Live) -> None:
    assert server.post("/v1/completions", {"prompt": "zz"})["usage"]["completion_tokens"] == 16
    assert server.post("/v1/completions", {"prompt": [97] * 505})["usage"]["completion_tokens"] == 7


def test_bos_is_added_to_text_but_not_to_ids(server: Live) -> None:
    def ids(**body: Any) -> list[int]:
        choice = server.post("/v1/completions", {"max_tokens": 1, "return_token_ids": True, **body})["choices"][0]
        return list(choice["prompt_token_ids"])

    assert ids(prompt="a") == [BOS, 97]
    assert ids(prompt="a", add_special_tokens=False) == [97]
    assert ids(prompt="<s>a") == [BOS, 97]
    assert ids(prompt=[97]) == [97]


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_echo_gives_the_prompt_and_its_logprobs(server: Live, logprobs: int | None) -> None:
    body = {"prompt": "gré", "max_tokens": 4, "echo": True, "logprobs": logprobs, "temperature": 0}
    choice = server.post("/v1/completions", body)["choices"][0]
    assert choice["text"].startswith("gré") and len(choice["text"]) == 7
    events = server.stream("/v1/completions", body)
    assert "".join(c["text"] for e in events for c in e["choices"]) == choice["text"]
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    columns = choice["logprobs"]
    assert columns["tokens"][:5] == ["<s>", "g", "r", "bytes:\\xc3", "bytes:\\xa9"] and len(columns["tokens"]) == 9
    assert columns["token_logprobs"][0] is None and all(value <= 0 for value in columns["token_logprobs"][1:])
    assert columns["text_offset"][:6] == [0, 0, 1, 2, 2, 3]
    if logprobs:
        assert columns["top_logprobs"][0] is None and all(len(table) == 3 for table in columns["top_logprobs"][1:])
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for event in events:
        for part in (c["logprobs"] for c in event["choices"] if c["logprobs"]):
            for name, column in joined.items():
                column += part[name]
    assert joined == {name: columns[name] for name in joined}


def test_echo_with_no_new_tokens_scores_the_prompt(server: Live) -> None:
    body = {"prompt": "score me", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = server.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["text"] == "score me" and len(choice["logprobs"]["tokens"]) == 9
    assert answer["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    assert "".join(c["text"] for e in server.stream("/v1/completions", body) for c in e["choices"]) == "score me"
    assert server.error("/v1/completions", {"prompt": "a", "max_tokens": 0})["param"] == "max_tokens"


# -- who asks


def test_priority_user_and_salt_reach_the_engine(server: Live) -> None:
    seen: list[Any] = []
    submit = server.rig.client.submit
    server.rig.client.submit = lambda request, **more: (seen.append(request), submit(request, **more))[1]  # type: ignore[method-assign]
    try:
        server.chat("greet", priority=-2, user="ann", cache_salt="s")
    finally:
        server.rig.client.submit = submit  # type: ignore[method-assign]
    (request,) = seen
    assert (request.priority, request.tenant, request.cache_salt) == (-2, "ann", ":s")


def test_priority_is_refused_where_nobody_looks_at_it() -> None:
    with live(honours_priority=False) as server:
        assert server.chat("x", status=400, priority=1)["error"]["param"] == "priority"
        server.chat("x", priority=0, max_tokens=1)


def test_a_request_that_takes_too_long_is_ended() -> None:
    with live(step_s=0.01, options=Options(request_timeout_s=0.2), max_context=4096) as server:
        began = time.monotonic()
        error = server.error("/v1/chat/completions", chat_body("x", max_tokens=2000), status=504)
        assert "deadline" in error["message"] and time.monotonic() - began < 2
        assert server.running() == 0
