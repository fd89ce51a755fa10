"""Fields that ask for a form become one grammar of the request; what cannot be kept, or is asked twice, is refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_support import RIG, Teller, ask, asked, front_of
from http_support import HERMES, THINKING, chat_body

from tradewind.contract.grammar import decode_grammar
from tradewind.serving.http.app import make_app
from tradewind.serving.structured import StructuredOutput

pytest.importorskip("llguidance")

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def grammar_of(path: str, body: Any, *, says: str = "{}", speech: Any = None) -> tuple[Any, Any]:
    """(the grammar that reached the engine, the answer)."""
    teller = Teller(list(says.encode()), [3], "stop")
    app = make_app(front_of(teller, speech=speech, structured=StructuredOutput(RIG.tokenizer)))
    answer = ask(app, path, body)
    (request,) = teller.requests
    return None if request.grammar is None else decode_grammar(request.grammar), answer


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, chat_body("x", response_format={"type": "json_object"}), "json_object"),
        (CHAT, chat_body("x", response_format=FORMAT), "json_schema"),
        (CHAT, chat_body("x", guided_json=SCHEMA), "json_schema"),
        (CHAT, chat_body("x", guided_regex="[ab]+"), "regex"),
        (CHAT, chat_body("x", guided_choice=["yes", "no"]), "choice"),
        (CHAT, chat_body("x", guided_grammar='start: "a"+'), "grammar"),
        (TEXT, {"prompt": "x", "guided_json": SCHEMA}, "json_schema"),
        (TEXT, {"prompt": "x", "response_format": FORMAT}, "json_schema"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "json_schema"),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_object"}}}, "json_object"),
    ],
)  # fmt: skip
def test_every_field_becomes_a_grammar(path: str, body: Any, kind: str) -> None:
    grammar, _ = grammar_of(path, body)
    assert grammar.kind == kind


def test_free_text_has_none() -> None:
    for body in (chat_body("x"), chat_body("x", response_format={"type": "text"})):
        assert grammar_of(CHAT, body)[0] is None


def test_forced_calls_are_written_in_the_models_format() -> None:
    says = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        grammar, answer = grammar_of(CHAT, chat_body("x", tools=[TOOL], tool_choice=choice), says=says, speech=HERMES)
        assert grammar.kind == "tools"
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert (
            json.loads(call["function"]["arguments"]) == {"a": 1}
            and answer["choices"][0]["finish_reason"] == "tool_calls"
        )


def test_any_model_can_be_forced_to_call() -> None:
    body = chat_body("x", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})
    grammar, answer = grammar_of(CHAT, body, says='{"a": 1}')
    assert grammar.kind == "tools"
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})


def test_reasoning_stays_free_before_the_form() -> None:
    grammar, answer = grammar_of(
        CHAT, chat_body("x", response_format=FORMAT), says='<think>hm</think>{"a": 1}', speech=THINKING
    )
    assert "thought" in grammar.text or grammar.end is not None
    assert answer["choices"][0]["message"]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "response_format": FORMAT}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_grammar": "nothing"}, "guided_grammar"),
        ({"guided_json": {"type": "strange"}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structural_tag": {"structures": []}}, "structural_tag"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    app = make_app(front_of(Teller([97], [1], "stop"), structured=StructuredOutput(RIG.tokenizer)))
    status, writes = asyncio.run(asked(app, CHAT, chat_body("x", **fields)))
    error = json.loads(b"".join(writes))["error"]
    assert status == 400 and error["param"] == param and "Traceback" not in error["message"], error
