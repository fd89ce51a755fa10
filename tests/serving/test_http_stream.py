"""The bytes of streams: framing, one write a step, and that no cut of the tokens, no text and no stop string changes the sum."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_support import RIG, Teller, Told, ask, asked, events_of, front_of
from http_support import EOS, HERMES, THINKING, Rig, chat_body, content
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.contract.request import Request
from tradewind.serving.http.app import make_app

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


TOKENS = st.lists(
    st.integers(0, 255) | st.sampled_from([*b"<think></think> END\n", *"🙂é日".encode(), 256, 257]), max_size=60
)
TEXTS = st.text(max_size=40).map(lambda text: list(text.encode())) | TOKENS
CUTS = st.lists(st.integers(1, 7), min_size=1, max_size=5)
STOPS = st.lists(st.text(alphabet="EN D<é", min_size=1, max_size=3), max_size=3, unique=True)


@settings(max_examples=150)
@given(
    tokens=TEXTS, cuts=CUTS, stops=STOPS, ends=st.booleans(), together=st.integers(0, 3), logprobs=st.none() | st.integers(0, 2),
    n=st.integers(1, 2), include=st.booleans(), style=st.sampled_from([None, HERMES, THINKING]), ids=st.booleans(),
)  # fmt: skip
def test_the_sum_of_a_chat_stream_is_the_whole_answer(
    tokens: list[int], cuts: list[int], stops: list[str], ends: bool, together: int, logprobs: int | None, n: int, include: bool,
    style: Any, ids: bool,
) -> None:  # fmt: skip
    tokens = [token for token in tokens if token != EOS] + ([EOS] if ends else [])
    teller = Teller(tokens, cuts, "stop" if ends else "length", together=together)
    app = make_app(front_of(teller, speech=style))
    body = chat_body(
        "x", stop=stops, n=n, include_stop_str_in_output=include, return_token_ids=ids,
        **({} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}),
    )  # fmt: skip
    whole = ask(app, CHAT, body)
    events = events_of(app, CHAT, body)
    assert events.pop() == "[DONE]"
    for choice in whole["choices"]:
        mine = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        said = "".join(c["delta"].get("content") or "" for c in mine)
        thought = "".join(c["delta"].get("reasoning_content") or "" for c in mine)
        assert said == (choice["message"]["content"] or "")
        assert thought == choice["message"].get("reasoning_content", "")
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if logprobs is not None:
            streamed = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert streamed == choice["logprobs"]["content"]
        if ids:
            assert [t for c in mine for t in c.get("token_ids", [])] == choice["token_ids"]
        spoken = tokens[:-1] if ends and not include else tokens
        full = RIG.tokenizer.decode(spoken, skip_special=True)
        hit = isinstance(choice["stop_reason"], str)
        if style is None:
            assert full.startswith(said)
            assert hit == any(stop in full for stop in stops)
            if not hit:
                assert said == full
            elif not include:
                assert not any(stop in said for stop in stops)
        assert "�" not in said or "�" in full
    usage = whole["usage"]
    assert usage["completion_tokens"] <= n * len(tokens)
    if not stops:
        assert usage["completion_tokens"] == n * len(tokens)
    for handle in teller.handles:
        assert not handle.cancelled


@settings(max_examples=60)
@given(
    tokens=TEXTS,
    cuts=CUTS,
    stops=STOPS,
    together=st.integers(0, 3),
    echo=st.booleans(),
    logprobs=st.none() | st.integers(0, 2),
)
def test_the_sum_of_a_completion_stream_is_the_whole_answer(
    tokens: list[int], cuts: list[int], stops: list[str], together: int, echo: bool, logprobs: int | None
) -> None:
    app = make_app(front_of(Teller(tokens, cuts, "length", together=together)))
    body = {"prompt": "né", "max_tokens": 99, "stop": stops, "echo": echo, "logprobs": logprobs}
    (choice,) = ask(app, TEXT, body)["choices"]
    events = events_of(app, TEXT, body)
    assert events.pop() == "[DONE]"
    assert "".join(c["text"] for e in events for c in e["choices"]) == choice["text"]
    if logprobs is not None and not echo:
        joined = [name for e in events for c in e["choices"] if c["logprobs"] for name in c["logprobs"]["tokens"]]
        offsets = [at for e in events for c in e["choices"] if c["logprobs"] for at in c["logprobs"]["text_offset"]]
        assert joined == choice["logprobs"]["tokens"] and offsets == choice["logprobs"]["text_offset"]


@settings(max_examples=60)
@given(tokens=TEXTS, cuts=CUTS, together=st.integers(0, 3), style=st.sampled_from([None, THINKING]), cut=st.booleans())
def test_the_events_of_a_response_add_up(
    tokens: list[int], cuts: list[int], together: int, style: Any, cut: bool
) -> None:
    app = make_app(front_of(Teller(tokens, cuts, "length" if cut else "stop", together=together), speech=style))
    whole = ask(app, RESPONSES, {"input": "x"})
    events = events_of(app, RESPONSES, {"input": "x"})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == ("response.incomplete" if cut else "response.completed")
    open_item, texts = None, {}
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert open_item is None
                open_item = event["output_index"]
                texts[open_item] = ""
            case "response.output_text.delta" | "response.reasoning_text.delta":
                assert event["output_index"] == open_item
                texts[open_item] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event["text"] == texts[open_item]
            case "response.output_item.done":
                assert event["output_index"] == open_item
                open_item = None
    assert open_item is None

    def shape(answer: Any) -> list[Any]:
        return [(item["type"], item["status"], item["content"][0]["text"]) for item in answer["output"]]

    assert shape(last["response"]) == shape(whole)
    assert [text for _, _, text in shape(whole)] == [texts[index] for index in sorted(texts)]


VALID = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.none() | st.floats(0, 100), "top_p": st.none() | st.floats(0.01, 1), "top_k": st.integers(-1, 1 << 20),
        "min_p": st.floats(0, 1), "repetition_penalty": st.floats(0.01, 100), "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.integers(-2, 2), "logit_bias": st.dictionaries(st.integers(0, 263).map(str), st.floats(-100, 100)),
        "bad_words": st.lists(st.text(min_size=1, max_size=9), max_size=4), "seed": st.integers(-(1 << 63), (1 << 63) - 1),
        "stop": st.none() | st.text(min_size=1, max_size=5) | st.lists(st.text(min_size=1, max_size=5), max_size=5),
        "stop_token_ids": st.lists(st.integers(0, 263), max_size=5), "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(), "min_tokens": st.integers(0, 20), "max_tokens": st.integers(20, 1000), "n": st.integers(1, 3),
        "skip_special_tokens": st.booleans(), "priority": st.integers(-(1 << 31), (1 << 31) - 1), "user": st.text(max_size=20),
        "cache_salt": st.text(max_size=20), "timing": st.booleans(), "return_token_ids": st.booleans(),
        "chat_template_kwargs": st.dictionaries(st.sampled_from(["a", "enable_thinking", "documents"]), st.integers() | st.text()),
        "response_format": st.just({"type": "text"}), "service_tier": st.just("auto"), "store": st.just(False), "metadata": st.just({}),
        "modalities": st.just(["text"]), "parallel_tool_calls": st.booleans(), "tool_choice": st.sampled_from(["none", "auto"]),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer", "assistant"]), "content": st.text(max_size=30)}),
            min_size=1, max_size=4,
        ),
    },
)  # fmt: skip


@settings(max_examples=100)
@given(fields=VALID, tokens=TEXTS, cuts=CUTS)
def test_every_combination_of_valid_fields_is_answered(
    fields: dict[str, Any], tokens: list[int], cuts: list[int]
) -> None:
    app = make_app(front_of(Teller(tokens, cuts, "length")))
    body = chat_body("x") | fields
    whole = ask(app, CHAT, body)
    events = events_of(
        app, CHAT, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": len(cuts) > 2}}
    )
    assert events.pop() == "[DONE]"
    assert events[-1]["usage"] == whole["usage"] and ("timing" in whole) == bool(fields.get("timing"))
    for choice in whole["choices"]:
        assert content(events, choice["index"]) == choice["message"]["content"]


def test_one_write_a_step_and_several_tokens_in_it() -> None:
    rig = Rig(says={"greet": "a" * 40}, drafts=3, accept=lambda _id, _at: 3, step_s=0.002)
    app = make_app(rig.front)
    with rig.client.start():
        _, writes = asyncio.run(asked(app, CHAT, chat_body("greet", stream=True)))
    steps = rig.watch.steps
    assert len(writes) <= steps + 1, f"{len(writes)} writes for {steps} steps"
    assert len(writes) < 20, "four tokens a step are not told in one write"
    said = b"".join(writes)
    assert said.count(b'"content":"') - 1 <= steps and said.endswith(b"data: [DONE]\n\n")


def test_n_samples_share_a_write() -> None:
    rig = Rig(says={"greet": "hello there"}, step_s=0.004)
    app = make_app(rig.front)
    with rig.client.start():
        _, writes = asyncio.run(asked(app, CHAT, chat_body("greet", stream=True, n=4)))
    assert len(writes) <= rig.watch.steps + 1
    events = [json.loads(b[6:]) for w in writes for b in w.split(b"\n\n") if b and b != b"data: [DONE]"]
    assert [content(events, index) for index in range(4)] == ["hello there"] * 4


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_cancels_every_sequence(stream: bool, n: int) -> None:
    teller = Teller([97] * 50_000, [1], "length")
    app = make_app(front_of(teller))
    body = chat_body("x", n=n, stream=stream)

    async def run() -> None:
        if stream:
            await asked(app, CHAT, body, leave_after=3)
            return
        task = asyncio.create_task(asked(app, CHAT, body))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert len(teller.handles) == n and all(handle.cancelled for handle in teller.handles)
    assert app.state.desk.sequences == 0 and app.state.desk.open_requests == 0


def test_a_stop_string_tells_the_engine() -> None:
    teller = Teller(list(b"one END two"), [1], "length")
    app = make_app(front_of(teller))
    assert ask(app, CHAT, chat_body("x", stop="END"))["choices"][0]["message"]["content"] == "one "
    assert teller.handles[0].finished and not teller.handles[0].cancelled


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_failure_in_the_middle_is_an_event_and_at_the_start_a_status(path: str) -> None:
    body = chat_body("x") if path == CHAT else {"prompt": "x"}
    app = make_app(front_of(Teller(list(b"abc"), [1], "error", error="logits are not finite")))
    events = events_of(app, path, body)
    assert events[-1] == "[DONE]" and events[-2]["error"]["type"] == "server_error"
    assert "logits are not finite" in events[-2]["error"]["message"]
    app = make_app(front_of(Teller([], [1], "error", error="logits are not finite")))
    status, writes = asyncio.run(asked(app, path, {**body, "stream": True}))
    assert status == 500 and json.loads(writes[0])["error"]["code"] == "engine_error"


def test_an_engine_that_takes_half_the_samples_leaves_none_behind() -> None:
    from tradewind.contract.errors import LimitError

    class Half(Teller):
        def submit(self, request: Request) -> Told:
            if self.handles:
                raise LimitError("no room for the second")
            return super().submit(request)

    teller = Half([97], [1], "length")
    app = make_app(front_of(teller))
    status, writes = asyncio.run(asked(app, CHAT, chat_body("x", n=2)))
    assert status == 400 and "no room" in json.loads(writes[0])["error"]["message"]
    assert teller.handles[0].cancelled and app.state.desk.sequences == 0
