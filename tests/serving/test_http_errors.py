"""Whatever is wrong with a request is said in one sentence, in OpenAI's shape, with the field; and the server goes on."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from http_support import MODEL, Live, Rig, chat_body, live, served

from tradewind.contract.errors import UserError
from tradewind.contract.step import StepResult
from tradewind.serving.chat_template import ChatTemplate
from tradewind.serving.http.app import make_app
from tradewind.serving.http.front import Options

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(says={"greet": "hello"}, options=Options(max_body_bytes=20_000)) as one:
        yield one
        assert one.chat("greet")["choices"][0]["message"]["content"] == "hello", "the server was harmed"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 101, "temperature is 101; it must be a number from 0 to 100"),
        ("temperature", -0.1, "temperature is -0.1; it must be a number from 0 to 100"),
        ("temperature", "hot", "temperature is a string; it must be a number from 0 to 100"),
        ("temperature", True, "temperature is a boolean; it must be a number from 0 to 100"),
        ("top_p", 0, "top_p is 0; it must be a number over 0 and up to 1"),
        ("top_p", 1.5, "top_p is 1.5; it must be a number over 0 and up to 1"),
        ("top_k", -2, "top_k is -2; it must be a whole number from -1 to 1048576"),
        ("top_k", 1.5, "top_k is 1.5; it must be a whole number from -1 to 1048576"),
        ("min_p", 2, "min_p is 2; it must be a number from 0 to 1"),
        ("repetition_penalty", 0, "repetition_penalty is 0; it must be a number from 0.01 to 100"),
        ("presence_penalty", 2.1, "presence_penalty is 2.1; it must be a number from -2 to 2"),
        ("frequency_penalty", -3, "frequency_penalty is -3; it must be a number from -2 to 2"),
        ("max_tokens", 0, "max_tokens is 0; it must be a whole number from 1 to 2147483647"),
        ("max_completion_tokens", -1, "max_completion_tokens is -1; it must be a whole number from 1 to 2147483647"),
        ("min_tokens", -1, "min_tokens is -1; it must be a whole number from 0 to 2147483647"),
        ("n", 0, "n is 0; it must be a whole number from 1 to 128"),
        ("n", 129, "n is 129; it must be a whole number from 1 to 128"),
        ("top_logprobs", 21, "top_logprobs is 21; it must be a whole number from 0 to 20"),
        ("seed", 1 << 63, f"seed is {1 << 63}; it must be a whole number from {-(1 << 63)} to {(1 << 63) - 1}"),
        ("stream", "yes", "stream is a string; it must be true or false"),
        ("stop", [1], "stop[0] is a whole number; it must be a string of at least 1 and at most 1024 characters"),
        ("stop", ["a"] * 65,
         "stop is a list of 65; it must be a string or a list of at most 64 (a string of at least 1 and at most 1024 characters each)"),
        ("messages", [], "messages is a list of 0; it must be a list of at least 1 (an object each)"),
        ("messages", [{"role": "king", "content": "x"}],
         'messages[0].role is "king"; it must be one of "assistant", "developer", "system", "tool", "user"'),
        ("messages", [{"role": "user", "content": 5}],
         "messages[0].content is a whole number; it must be a string or a list (an object each)"),
        ("messages", [{"content": "x"}], "messages[0].role is missing"),
        ("messages", [{"role": "user", "content": [{"type": "video_url", "image_url": {"url": "x"}}]}],
         'messages[0].content[0].type is "video_url"; it must be one of "image_url", "text"'),
        ("store", True, "store is true; it must be false"),
        ("metadata", {"a": "b"}, "metadata is an object of 1; it must be an empty object"),
    ],
)  # fmt: skip
def test_values_out_of_range(server: Live, field: str, value: Any, message: str) -> None:
    error = server.error(CHAT, chat_body("greet") | {field: value})
    assert error["message"] == message
    assert error["param"] == message.split(" is ")[0] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        (CHAT, {"logit_bias": {"264": 1}}, "logit_bias", "0 to 263"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        (CHAT, {"logit_bias": {"1": "a"}}, "logit_bias", "from -100 to 100"),
        (CHAT, {"stop_token_ids": [264]}, "stop_token_ids", "0 to 263"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "max_tokens is 3"),
        (CHAT, {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "3"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (CHAT, {"stream": True, "stream_options": {"include_all": True}}, "stream_options.include_all", "not known"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "guided decoding"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "guided decoding"),
        (CHAT, {"guided_json": {"type": "object"}}, "guided_json", "guided decoding"),
        (CHAT, {"structured_outputs": {"json": {}}}, "structured_outputs", "guided_json"),
        (CHAT, {"guided_regex": "a+"}, "guided_regex", "guided decoding"),
        (TEXT, {"prompt": "a", "guided_grammar": "x"}, "guided_grammar", "guided decoding"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tool parser"),
        (CHAT, {"tools": [{"type": "retrieval"}]}, "tools[0].type", "function"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "no tools"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        (CHAT, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "template"),
        (CHAT, {"model": "gpt-9"}, "model", "gpt-9"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "no content"),
        (CHAT, {"best_of": 2}, "best_of", "not known or not supported"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of", "best_of is 2"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": []}, "prompt", "at least 1"),
        (TEXT, {"prompt": ["a", ""]}, "prompt[1]", "empty"),
        (TEXT, {"prompt": ["a", 1]}, "prompt", "mixes"),
        (TEXT, {"prompt": [300]}, "prompt", "300"),
        (TEXT, {"prompt": [-1]}, "prompt[0]", "-1"),
        (TEXT, {"prompt": ["a"] * 300, "n": 2}, "prompt", "600 sequences"),
        (TEXT, {}, "prompt", "missing"),
        (RESPONSES, {"input": "a", "store": True}, "store", "false"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        (RESPONSES, {"input": "a", "background": True}, "background", "false"),
        (RESPONSES, {"input": "a", "truncation": "auto"}, "truncation", "disabled"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_object"}}}, "text.format", "guided decoding"),
        (RESPONSES, {"input": []}, "input", "at least 1"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content", "missing"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output", "missing"),
        (RESPONSES, {"input": [{"type": "reasoning"}]}, "input", "no message"),
        (RESPONSES, {"input": "a", "top_logprobs": 2}, "top_logprobs", "include"),
        (RESPONSES, {"input": "a", "max_output_tokens": 10_000}, "max_output_tokens", "max_output_tokens is 10000"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_honoured(
    server: Live, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    body = (chat_body("greet") if path == CHAT else {}) | fields
    status = 404 if param == "model" else 400
    for stream in (False, True):
        if "stream_options" in fields and stream:
            continue
        error = server.error(path, {**body, "stream": fields.get("stream", stream)}, status=status)
        assert error["param"] == param and words in error["message"], error


def test_unknown_fields_are_all_named(server: Live) -> None:
    body = chat_body("greet", temprature=1, zebra=2, messages=[{"role": "user", "content": "greet", "colour": "red"}])
    error = server.error(CHAT, body)
    assert error["param"] in ("temprature", "zebra", "messages[0].colour") and error["code"] == "unknown_parameter"
    for name in ("temprature (did you mean temperature?)", "zebra", "messages[0].colour"):
        assert name in error["message"]
    many = server.error(CHAT, chat_body("greet") | {f"x{i}": i for i in range(500)})
    assert len(many["message"]) < 5000


def test_unknown_fields_can_be_ignored_with_a_warning() -> None:
    with live(says={"greet": "hello"}, options=Options(ignore_unknown_fields=True)) as server:
        long = [{"role": "user", "content": "greet", "colour": "red"}] * 100
        status, headers, _ = server.send("POST", CHAT, {"messages": long, "model": MODEL, "max_tokens": 1})
        assert status in (200, 400) and (status == 400 or len(headers["warning"]) < 3000)
        body = chat_body("greet", zebra=2, messages=[{"role": "user", "content": "greet", "colour": "red"}])
        status, headers, data = server.send("POST", CHAT, body)
        assert status == 200 and json.loads(data)["choices"][0]["message"]["content"] == "hello"
        assert headers["warning"].startswith('299 tradewind "ignored fields: ')
        assert "zebra" in headers["warning"] and "messages[0].colour" in headers["warning"]
        with server.opened(CHAT, body) as events:
            assert list(events)[-1] == "[DONE]"
        odd = server.send("POST", CHAT, chat_body("greet") | {'"\r\nX-Evil: é': 1})
        assert odd[0] == 200 and "x-evil" not in odd[1]
        # What would change the form of the answer is never ignored.
        assert server.error(CHAT, chat_body("greet", guided_json={}))["param"] == "guided_json"
        assert server.error(CHAT, chat_body("greet", zebra=1, temperature=-1))["param"] == "temperature"
        assert "warning" not in server.send("POST", CHAT, chat_body("greet"))[1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"{", "ends at byte 1"),
        (b'{"model": ', "ends at byte 10"),
        (b'{"a": 1,}', "at byte 8"),
        (b'{"temperature": NaN}', "at byte 16"),
        (b"[1, 2]", "must be a JSON object, not a list"),
        (b'"text"', "must be a JSON object, not a string"),
        (b"null", "must be a JSON object, not null"),
        (b'{"messages": "\xff"}', "not valid UTF-8: byte 14 is 0xff"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"a": 1} {"b": 2}', "trailing characters at byte "),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"a":' * 3000, "nested too deeply"),
        (b'{"seed": 1e400}', "out of range"),
    ],
)
def test_bodies_that_are_no_json_objects(server: Live, body: bytes, words: str) -> None:
    for path in (CHAT, TEXT, RESPONSES, "/tokenize"):
        error = server.error(path, body)
        assert words in error["message"], error


def test_content_types(server: Live) -> None:
    body = json.dumps(chat_body("greet")).encode()
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"):
        assert server.send("POST", CHAT, body, headers={"Content-Type": kind})[0] == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        error = server.error(CHAT, body, status=415, headers={"Content-Type": kind})
        assert "application/json" in error["message"]


def test_bodies_over_the_limit(server: Live) -> None:
    error = server.error(CHAT, chat_body("x" * 20_000), status=413)
    assert "20000" in error["message"]
    # Chunked, so that the size is not told before.
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(6):
            sock.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_wrong_paths_and_methods(server: Live) -> None:
    assert server.error("/v1/nothing", {}, status=404)["code"] == "not_found"
    status, headers, data = server.send("GET", CHAT)
    assert status == 405 and headers["allow"] == "POST" and json.loads(data)["error"]["code"] == "method_not_allowed"
    assert server.send("POST", "/health", {})[0] == 405
    assert server.send("HEAD", "/health")[0] == 200


@pytest.mark.parametrize(
    "template", [ChatTemplate("{{ raise_exception('only one turn') }}"), UserError("this model has no chat template")]
)
def test_a_template_that_refuses_or_is_not_there_is_told(template: ChatTemplate | UserError) -> None:
    rig = Rig()
    app = make_app(dataclasses.replace(rig.front, template=template))
    with rig.client.start(), served(app) as port:
        server = Live(port, rig, app)
        for path, body, param in ((CHAT, chat_body("x"), "messages"), (RESPONSES, {"input": "x"}, "input")):
            error = server.error(path, body)
            assert ("only one turn" in error["message"] or error["code"] == "no_chat_template") and error[
                "param"
            ] == param


def test_a_row_that_fails_ends_its_request_only() -> None:
    with live(says={"greet": "hello"}) as server:
        collect = server.rig.device.collect

        def broken() -> StepResult:
            result = collect()
            if len(result.slot) and len(result.tokens):
                return msgspec.structs.replace(
                    result, failed={0: "logits are not finite"}, tokens=result.tokens[:0], offset=result.offset * 0
                )
            return result

        server.rig.device.collect = broken  # type: ignore[method-assign]
        error = server.error(CHAT, chat_body("greet"), status=500)
        assert "logits are not finite" in error["message"] and error["type"] == "server_error"
        server.rig.device.collect = collect  # type: ignore[method-assign]
        assert server.chat("greet")["choices"][0]["message"]["content"] == "hello"


def test_engine_death_ends_open_requests_and_refuses_new_ones() -> None:
    with live(die_at=12, step_s=0.02) as server:
        with server.opened(CHAT, chat_body("x", max_tokens=100)) as events:
            seen = list(events)
        assert seen[-1] == "[DONE]" and seen[-2]["error"]["code"] == "engine_dead"
        assert "scripted device died" in seen[-2]["error"]["message"]
        for path, body in ((CHAT, chat_body("x")), (TEXT, {"prompt": "x"}), (RESPONSES, {"input": "x"})):
            assert server.error(path, body, status=503)["code"] == "engine_dead"
        status, _, data = server.send("GET", "/health")
        assert status == 503 and json.loads(data)["status"] == "dead" and "died" in json.loads(data)["error"]


def test_engine_death_before_the_first_token_is_a_503_for_streams_too() -> None:
    with live(die_at=1) as server:
        assert server.error(CHAT, chat_body("x", stream=True), status=503)["code"] == "engine_dead"


def test_engine_death_in_a_responses_stream() -> None:
    with live(die_at=12, step_s=0.02) as server:
        with server.opened(RESPONSES, {"input": "x"}) as events:
            seen = list(events)
        assert [event["type"] for event in seen[-2:]] == ["error", "response.failed"]
        assert seen[-1]["response"]["status"] == "failed"
