"""What users of other servers have met: one test per row of the project's list of user cases, named after it, over real HTTP."""

# Every row of the list that needs neither load nor a GPU, and where its test is (the last test of this file keeps the table true):
#
#   row   file                            test begins with
#   A1    test_user_cases.py              test_a1_closing_the_connection
#         test_lifecycle_server.py        test_a1_a_client_that_leaves (through `tradewind serve --script`)
#   A2    test_user_cases.py              test_a2_a_lost_turn
#   A4    test_lifecycle_server.py        test_a4_kill_9_of_the_engine
#   A6    test_user_cases_engine.py       test_a6_twenty_long_requests
#   A7    test_lifecycle_server.py        test_a7_a_signal_drains
#   A9    test_lifecycle_server.py        test_a9_the_phases
#   A10   test_user_cases_engine.py       test_a10_too_little_memory (a real model's plan: needs the SmolLM2 file)
#   A11   test_user_cases_engine.py       test_a11_a_model_that_is_too_big (the same)
#   A15   test_user_cases_engine.py       test_a15_a_small_request_passes
#   A16   test_user_cases_engine.py       test_a16_of_two_big_prompts
#   A17   test_user_cases_engine.py       test_a17_priority_has_an_effect
#   A18   test_user_cases_engine.py       test_a18_a_tenants_wait
#   A22   test_user_cases_drafts.py       test_a22_thirty_json_objects_with_drafts (scripted drafts)
#         test_user_cases_engine.py       test_a22_thirty_json_objects_at_once (a tiny model under its grammar, no drafts)
#         test_structured_engine.py       test_a22_thirty_at_once
#   A23   test_user_cases_drafts.py       test_a23_a_schema_under_concurrency (scripted drafts)
#         test_user_cases_engine.py       test_a23_a_schema_with_an_enum (a tiny model under its grammar, no drafts)
#         test_structured_engine.py       test_a23_a_shared_prefix
#   A24   test_structured_engine.py       test_a24_a_model_that_loves_blanks (a tiny model)
#   A26   test_user_cases.py              test_a26_characters_of_several_tokens
#   A27   test_user_cases.py              test_a27_no_beginning_of_a_stop_string
#   A28   test_user_cases.py              test_a28_a_partial_stop_string
#   A29   test_user_cases.py              test_a29_arguments_of_calls
#   A30   test_user_cases.py              test_a30_cut_thinking
#   A31   test_user_cases.py              test_a31_one_bos
#   A32   test_user_cases.py              test_a32_logprobs_without
#   A33   test_user_cases.py              test_a33_each_token
#   A34   test_user_cases.py              test_a34_the_number_asked_for
#   A36   test_user_cases.py              test_a36_the_same_seed
#   A37   test_user_cases.py              test_a37_a_prompt_over_the_limit
#   A38   test_user_cases.py              test_a38_the_numbers
#   A39   test_user_cases.py              test_a39_salts, test_a39_api_keys
#   A40   test_sleep.py                   test_a40_the_answer_after_a_sleep, test_a40_a_level_that_drops_the_weights
#   A41   test_user_cases_engine.py       test_a41_a_prompt_is_never_shared (the prefix key; this version serves no adapters)
#   A42   test_user_cases_engine.py       test_a42_rope_scaling (a tiny model)
#
# Rows that need load or time, as far as they fit: A3 (test_process_engine.py), A5 (test_lifecycle_server.py), A14 (the scheduler's,
# tests/host/test_scheduler.py), A21 (here).

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from http_support import (
    BOS,
    HERMES,
    MODEL,
    THINKING,
    Live,
    chat_body,
    content,
    finishes,
    live,
    until,
)

from tradewind.serving.http.front import Options

EMOJI = "Grüße 🙂👩‍👩‍👧 日本語 ok"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "now", "description": "the time", "parameters": {"type": "object", "properties": {}}},
    }
]
SAYS: dict[str, Any] = {
    "say emoji": EMOJI,
    "say stop": "one two END three",
    "say partial": "one two EN",
    "say think stop": "<think>maybe END or</think>yes END no",
    "call now": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "call nested": '<tool_call>\n{"name": "now", "arguments": {"a": {"b": [1, "}"]}}}\n</tool_call>',
    "long thought": "<think>" + "hm " * 100 + "</think>done",
    "short": "all is well",
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Live]:
    with live(says=SAYS) as server:
        yield server


@pytest.fixture(scope="module")
def hermes() -> Iterator[Live]:
    with live(says=SAYS, speech=HERMES) as server:
        yield server


@pytest.fixture(scope="module")
def thinking() -> Iterator[Live]:
    with live(says=SAYS, speech=THINKING) as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[Live]:
    with live(says={"short": "all is well"}, step_s=0.004, max_context=8192, max_tokens_per_step=8192) as server:
        yield server


def after_disconnect(server: Live, path: str, body: dict[str, Any], *, events: int | None) -> None:
    """Leaves (a stream after some events, a plain call once it runs), then the engine must be as before within a second."""
    before = server.rig.engine.stats().pages_used
    if events is None:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        until(lambda: server.running() > 0, "it never ran")
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
    else:
        with server.opened(path, body) as stream:
            for _ in range(events):
                next(stream)
    left = until(lambda: server.running() == 0, "it still runs", seconds=1.0)
    assert left < 1.0
    assert server.rig.engine.stats().pages_used == before
    made = server.rig.engine.stats().generated_tokens
    time.sleep(0.05)
    assert server.rig.engine.stats().generated_tokens == made, "tokens are still made for nobody"
    until(
        lambda: server.app.state.desk.sequences == 0 and server.app.state.desk.open_requests == 0,
        "the front still counts it",
    )


@pytest.mark.parametrize("events", [0, 5, None], ids=["at once", "after 5 chunks", "not streamed"])
@pytest.mark.parametrize("n", [1, 3])
def test_a1_closing_the_connection_stops_generation(slow: Live, events: int | None, n: int) -> None:
    after_disconnect(slow, "/v1/chat/completions", chat_body("go on", max_tokens=4000, n=n), events=events)


def test_a1_completions_and_responses_too(slow: Live) -> None:
    after_disconnect(slow, "/v1/completions", {"prompt": ["go", "on"], "max_tokens": 4000}, events=5)
    after_disconnect(slow, "/v1/responses", {"input": "go on", "max_output_tokens": 4000}, events=5)


def test_a2_a_lost_turn_leaves_nothing_in_the_next(slow: Live) -> None:
    body = chat_body("tell me a story about the sea", max_tokens=60)
    with live(max_context=8192) as fresh:
        alone = fresh.post("/v1/chat/completions", body)
    with slow.opened("/v1/chat/completions", {**body, "max_tokens": 4000}) as stream:
        for _ in range(20):
            next(stream)
    again = slow.post("/v1/chat/completions", body)
    assert again["choices"] == alone["choices"]
    assert again["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert again["usage"]["completion_tokens"] == 60
    assert slow.running() == 0


def test_a26_characters_of_several_tokens_are_never_broken(plain: Live) -> None:
    events = plain.chat_stream("say emoji")
    pieces = [c["delta"].get("content") or "" for e in events for c in e["choices"]]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == EMOJI == plain.chat("say emoji")["choices"][0]["message"]["content"]
    texts = plain.stream("/v1/completions", {"prompt": "say emoji", "max_tokens": 100})
    assert "".join(c["text"] for e in texts for c in e["choices"]) == EMOJI


def test_a27_no_beginning_of_a_stop_string_is_shown(plain: Live, thinking: Live) -> None:
    shown = ""
    for event in plain.chat_stream("say stop", stop=["END"]):
        shown += content([event])
        assert "one two ".startswith(shown) and "E" not in shown
    assert shown == "one two "
    whole = plain.chat("say stop", stop=["END", "never"])["choices"][0]
    assert (
        whole["message"]["content"] == "one two " and whole["finish_reason"] == "stop" and whole["stop_reason"] == "END"
    )
    # A parser that holds text back as well; the stop string counts wherever it is written, thoughts included.
    events = thinking.chat_stream("say think stop", stop=["END"])
    assert content(events, field="reasoning_content") == "maybe "
    assert content(events) == ""
    whole = thinking.chat("say think stop", stop=[" no"])["choices"][0]["message"]
    assert (whole["reasoning_content"], whole["content"]) == ("maybe END or", "yes END")


def test_a28_a_partial_stop_string_at_the_end_is_flushed(plain: Live) -> None:
    events = plain.chat_stream("say partial", stop=["END"])
    assert content(events) == "one two EN"
    assert finishes(events) == ["stop"]
    assert plain.chat("say partial", stop=["END"])["choices"][0]["message"]["content"] == "one two EN"


@pytest.mark.parametrize(("ask", "arguments"), [("call now", {}), ("call nested", {"a": {"b": [1, "}"]}})])
def test_a29_arguments_of_calls_always_parse(hermes: Live, ask: str, arguments: dict[str, Any]) -> None:
    events = hermes.chat_stream(ask, tools=TOOLS)
    deltas = [call for e in events for c in e["choices"] for call in c["delta"].get("tool_calls", [])]
    assert deltas[0]["function"]["name"] == "now" and deltas[0]["id"] and deltas[0]["type"] == "function"
    assert json.loads("".join(d["function"].get("arguments", "") for d in deltas)) == arguments
    assert finishes(events) == ["tool_calls"]
    choice = hermes.chat(ask, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == arguments
    answer = hermes.post("/v1/responses", {"input": ask, "tools": [{"type": "function", **TOOLS[0]["function"]}]})  # type: ignore[dict-item]
    (item,) = answer["output"]
    assert item["type"] == "function_call" and json.loads(item["arguments"]) == arguments


def test_a30_cut_thinking_stays_thinking(thinking: Live) -> None:
    events = thinking.chat_stream("long thought", max_tokens=50)
    choice = thinking.chat("long thought", max_tokens=50)["choices"][0]
    assert content(events) == "" and choice["message"]["content"] is None
    streamed = content(events, field="reasoning_content")
    assert streamed == choice["message"]["reasoning_content"] and streamed.startswith("hm hm")
    assert finishes(events) == ["length"] and choice["finish_reason"] == "length"


def test_a31_one_bos_however_the_prompt_is_made(plain: Live) -> None:
    body = {"messages": [{"role": "user", "content": "short"}]}
    by_chat = plain.post("/v1/chat/completions", {**body, "return_token_ids": True, "temperature": 0})
    ids = by_chat["prompt_token_ids"]
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert plain.post("/tokenize", body)["tokens"] == ids
    rendered = plain.post("/detokenize", {"tokens": ids})["prompt"]
    assert rendered.startswith("<s><|im_start|>user\nshort")
    assert plain.post("/tokenize", {"prompt": rendered})["tokens"] == ids
    by_text = plain.post(
        "/v1/completions", {"prompt": rendered, "return_token_ids": True, "temperature": 0, "max_tokens": 50}
    )
    assert by_text["choices"][0]["prompt_token_ids"] == ids
    assert by_text["choices"][0]["text"] == by_chat["choices"][0]["message"]["content"]
    assert by_text["usage"]["prompt_tokens"] == by_chat["usage"]["prompt_tokens"] == len(ids)


def test_a32_logprobs_without_top_logprobs(plain: Live) -> None:
    entries = plain.chat("short", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert len(entries) == len("all is well")
    assert all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "all is well"


def test_a33_each_token_has_its_own_top_list(plain: Live) -> None:
    whole = plain.chat("say emoji", logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"]
    streamed: list[Any] = []
    for event in plain.chat_stream("say emoji", logprobs=True, top_logprobs=5):
        for choice in event["choices"]:
            streamed += (choice["logprobs"] or {"content": []})["content"]
    assert streamed == whole
    assert b"".join(bytes(entry["bytes"]) for entry in whole).decode() == EMOJI
    for before, entry in pairwise(whole):
        assert entry["bytes"] == before["bytes"] or entry["top_logprobs"] != before["top_logprobs"]


def test_a33_with_several_tokens_a_chunk() -> None:
    with live(says=SAYS, drafts=3, accept=lambda _id, at: at % 4) as server:
        whole = server.chat("say emoji", logprobs=True, top_logprobs=2)["choices"][0]
        events = server.chat_stream("say emoji", logprobs=True, top_logprobs=2)
    streamed = [e for ev in events for c in ev["choices"] for e in (c["logprobs"] or {"content": []})["content"]]
    assert streamed == whole["logprobs"]["content"] and content(events) == EMOJI
    sizes = {len((c["logprobs"] or {"content": []})["content"]) for ev in events for c in ev["choices"]}
    assert max(sizes) > 1, "no chunk had several tokens"


def test_a34_the_number_asked_for_does_not_change_the_values(plain: Live) -> None:
    lists = [
        plain.chat("short", logprobs=True, top_logprobs=k)["choices"][0]["logprobs"]["content"] for k in (1, 4, 10)
    ]
    for entries, k in zip(lists, (1, 4, 10), strict=True):
        for entry, largest in zip(entries, lists[-1], strict=True):
            assert entry["logprob"] == largest["logprob"]
            assert len(entry["top_logprobs"]) == k
            assert entry["top_logprobs"] == largest["top_logprobs"][:k], "the lists are not nested"
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)


def test_a36_the_same_seed_gives_the_same_answer(plain: Live) -> None:
    body = chat_body("a riddle", seed=7, max_tokens=30) | {"temperature": 0.8}

    def ask(**more: Any) -> str:
        answer = plain.post("/v1/chat/completions", body | more)
        return str(answer["choices"][0]["message"]["content"])

    first = ask()
    assert ask() == first
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(ask())) for _ in range(2)]
    threads += [threading.Thread(target=plain.chat, args=(f"noise {i}",), kwargs={"max_tokens": 40}) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [first, first]
    assert ask(seed=8) != first
    assert ask(seed=None) != ask(seed=None)
    several = plain.post("/v1/chat/completions", body | {"n": 3})["choices"]
    assert several[0]["message"]["content"] == first
    assert len({choice["message"]["content"] for choice in several}) == 3


def test_a37_a_prompt_over_the_limit_is_refused_everywhere(plain: Live) -> None:
    text = "x" * 600
    size = len(plain.post("/tokenize", {"messages": [{"role": "user", "content": text}]})["tokens"])
    for path, body, field in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 5},
            "messages",
        ),
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": [97] * 600, "stream": True}, "prompt"),
        ("/v1/responses", {"input": text}, "input"),
    ):
        error = plain.error(path, body)
        assert error["param"] == field and error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert any(str(n) in error["message"] for n in (size, 600, 601)), error


def test_a38_the_numbers_of_the_message_are_exact(plain: Live) -> None:
    prompt = [97] * 500
    over = plain.error("/v1/completions", {"prompt": prompt, "max_tokens": 13})
    assert over["message"] == (
        "the prompt has 500 tokens and max_tokens is 13, 513 together; the limit is 512: ask for at most 12"
    )
    assert over["param"] == "max_tokens"
    exact = plain.post("/v1/completions", {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0})
    assert exact["usage"]["total_tokens"] == 512
    size = plain.post("/tokenize", {"messages": chat_body("short")["messages"]})["count"]
    over = plain.error("/v1/chat/completions", chat_body("short", max_completion_tokens=513 - size))
    assert over["param"] == "max_completion_tokens"
    assert (
        f"the prompt has {size} tokens and max_completion_tokens is {513 - size}, 513 together; the limit is 512"
        in over["message"]
    )
    plain.chat("short", max_completion_tokens=512 - size)


def cached(server: Live, *, key: str | None = None, **fields: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = server.post(
        "/v1/chat/completions", chat_body("the secret of the house " * 6, max_tokens=2, **fields), headers=headers
    )
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a39_salts_keep_prefixes_apart() -> None:
    with live() as server:
        assert cached(server) == 0
        assert cached(server) > 0
        assert cached(server, cache_salt="one") == 0
        assert cached(server, cache_salt="one") > 0
        assert cached(server, cache_salt="two") == 0
        assert cached(server, user="somebody") > 0, "a user's name is no border"


def test_a39_api_keys_keep_prefixes_apart() -> None:
    with live(options=Options(api_keys=("key-a", "key-b"))) as server:
        assert cached(server, key="key-a") == 0
        assert cached(server, key="key-a") > 0
        assert cached(server, key="key-b") == 0, "another tenant's prefix was seen"
        assert cached(server, key="key-a", cache_salt="x") == 0
        assert cached(server, key="key-b", cache_salt="x") == 0
        assert cached(server, key="key-b", cache_salt="x") > 0
        salts = {enter.request_id for enter in server.rig.device.entered}
        assert salts
        assert server.rig.front.model == MODEL


def test_a21_long_prompts_do_not_stretch_a_running_stream() -> None:
    text = "the quick brown fox, " * 20_000
    with live(step_s=0.004, max_context=8192) as server:
        began = time.monotonic()
        server.rig.tokenizer.encode(text, add_special=True)
        alone_s = time.monotonic() - began
        gaps: list[float] = []
        with server.opened("/v1/chat/completions", chat_body("go on", max_tokens=4000)) as stream:
            for _ in range(10):
                next(stream)
            threads = [
                threading.Thread(target=server.send, args=("POST", "/v1/completions", {"prompt": text}))
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            last = time.monotonic()
            while any(thread.is_alive() for thread in threads):
                next(stream)
                now = time.monotonic()
                gaps.append(now - last)
                last = now
        # All of this shares one process here, clients too; what must not be seen is a whole prompt's work between two tokens.
        assert len(gaps) > 20 and max(gaps) < max(alone_s, 0.15), (alone_s, max(gaps), len(gaps))
        assert sorted(gaps)[len(gaps) // 2] < 0.03


def test_a31_long_prompts_are_tokenised_as_short_ones(plain: Live) -> None:
    text = "naïve 🙂 words " * 500
    ids = plain.post("/tokenize", {"messages": [{"role": "user", "content": text}]})["tokens"]
    assert ids.count(BOS) == 1 and ids[0] == BOS
    rendered = plain.post("/detokenize", {"tokens": ids})["prompt"]
    assert plain.post("/tokenize", {"prompt": rendered})["tokens"] == ids == plain.rig.tokenizer.encode_chat(rendered)


def test_every_row_has_a_test_where_the_table_says() -> None:
    here = Path(__file__)
    rows: set[int] = set()
    row = ""
    for line in here.read_text().splitlines():
        found = re.match(r"#   (?:A(\d+)|   ) +(test_\w+\.py) +(test_a.*)", line)
        if found is None:
            continue
        if found[1]:
            rows.add(int(found[1]))
            row = found[1]
        file = (here.parent / found[2]).read_text()
        for name in re.findall(r"test_a\w+", found[3]):
            assert name.startswith(f"test_a{row}_"), name
            assert f"\ndef {name}" in file, f"{found[2]} has no {name}"
    load_or_gpu = {3, 5, 8, 12, 13, 14, 19, 20, 21, 25, 35}
    assert rows == set(range(1, 43)) - load_or_gpu
