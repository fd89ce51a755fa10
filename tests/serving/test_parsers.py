"""Output parsers by example: the public reports they answer, each format's own habits, what is given back, and what it costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tradewind.config.card_parts import FAMILIES
from tradewind.contract.errors import UserError
from tradewind.serving.parsers import deepseek
from tradewind.serving.parsers.json_reader import MAX_DEPTH, JsonReader, as_json
from tradewind.serving.parsers.parser import Circumstances, GrammarHint, ReasoningMarkers
from tradewind.serving.parsers.pieces import Content, Message, Piece, Reasoning, ToolCallBegin, collect, merge
from tradewind.serving.parsers.python_values import python_value
from tradewind.serving.parsers.table import (
    PARSERS,
    REASONING,
    hidden_markers,
    make_parser,
    parser_for,
    reasoning_named,
)
from tradewind.serving.text_stream import StopStrings

THINK = REASONING["think"]


def run(name: str, text: str | Iterable[str], *, reason: str = "stop", **told: Any) -> list[Piece]:
    """The pieces of an answer, seen to be the same in one push and letter by letter."""

    def once(parts: Iterable[str]) -> list[Piece]:
        parser = make_parser(name, Circumstances(new_id=lambda: "id", **told))
        return merge([piece for part in parts for piece in parser.push(part)] + parser.finish(reason))

    whole = once([text] if isinstance(text, str) else text)
    assert once("".join(text)) == whole
    return whole


def message(name: str, text: str, **told: Any) -> Message:
    return collect(run(name, text, **told))


def calls(name: str, text: str, **told: Any) -> list[tuple[str, Any]]:
    """(name, arguments) of every call, all of which must be complete."""
    found = message(name, text, **told).calls
    assert all(call.complete for call in found), found
    return [(call.name, json.loads(call.arguments)) for call in found]


# -- reasoning


@pytest.mark.parametrize("inside", [False, True])
def test_a30_thinking_cut_by_length_stays_in_reasoning(inside: bool) -> None:
    text = ("" if inside else "<think>") + "\nFirst, I look at the"
    assert run("plain", text, reasoning=THINK, starts_inside=inside, reason="length") == [
        Reasoning("First, I look at the")
    ]
    found = message("hermes", text, reasoning=THINK, starts_inside=inside, reason="length")
    assert found == Message(content=None, reasoning="First, I look at the", calls=())


def test_reasoning_is_told_apart_and_trimmed() -> None:
    text = "<think>\nHm.\n\nYes.\n</think>\n\nHello\n world \n"
    assert run("plain", text, reasoning=THINK) == [Reasoning("Hm.\n\nYes."), Content("Hello\n world \n")]


def test_an_empty_thought_is_none() -> None:
    assert message("plain", "<think>\n\n</think>\n\nHi", reasoning=THINK) == Message(
        content="Hi", reasoning=None, calls=()
    )


def test_the_prompt_opened_the_reasoning_and_the_model_says_so_again() -> None:
    assert THINK is not None
    assert THINK.opened_by("<|im_start|>assistant\n<think>\n")
    assert not THINK.opened_by("<think>\n\n</think>\n\n")
    assert not THINK.opened_by("what is <think> for?")
    for text in ("Hm.</think>Hi", "<think>Hm.</think>Hi", "\n<think>\nHm.\n</think>\nHi"):
        assert run("plain", text, reasoning=THINK, starts_inside=True) == [Reasoning("Hm."), Content("Hi")]


def test_nested_markers_do_not_leak_and_do_not_swallow_the_answer() -> None:
    text = "<think>a <think> b</think>c</think> d"
    assert run("plain", text, reasoning=THINK) == [Reasoning("a <think> b"), Content("c d")]


def test_half_markers_are_text() -> None:
    text = "a < b </thin <thinking> </th"
    assert run("plain", text, reasoning=THINK) == [Content(text)]
    assert run("plain", f"<think>{text}", reasoning=THINK) == [Reasoning(text)]


def test_no_part_of_a_marker_is_ever_shown() -> None:
    """A27: nothing that may become a marker leaves before it is certain."""
    parser = make_parser("hermes", Circumstances(reasoning=THINK))
    shown: list[Piece] = []
    for letter in "Hi <think>x</think> <tool_call>":
        shown += parser.push(letter)
        said = collect(shown)
        assert "<" not in (said.content or "") + (said.reasoning or "")
    assert merge(shown) == [Content("Hi"), Reasoning("x")]


def test_a27_stop_strings_before_the_parser() -> None:
    """A stop string that begins inside what the parser holds back never shows, nor does a prefix of it."""
    text = "<think>ok</think>answer STOP rest"
    for size in (1, 2, 3, len(text)):
        stops, parser = StopStrings(["STOP"]), make_parser("plain", Circumstances(reasoning=THINK))
        pieces: list[Piece] = []
        for start in range(0, len(text), size):
            safe, hit = stops.push(text[start : start + size])
            pieces += parser.push(safe)
            assert "S" not in (collect(pieces).content or "")
            if hit:
                break
        assert merge(pieces + parser.finish("stop")) == [Reasoning("ok"), Content("answer ")]


def test_a28_what_is_held_back_comes_at_the_end() -> None:
    for name in PARSERS:
        text = "the end is <"
        assert run(name, text, reasoning=THINK) == [Content(text)], name
        assert run(name, text + "\n", reasoning=THINK) == [Content(text + "\n")], name


def test_a26_emoji_at_every_border() -> None:
    text = "🙂<think>👩‍👩‍👧</think>🙂"
    assert run("plain", text, reasoning=THINK) == [Content("🙂"), Reasoning("👩‍👩‍👧"), Content("🙂")]
    assert run("hermes", '🙂<tool_call>{"name": "f", "arguments": {"é": "🙂"}}</tool_call>🙂') == [
        Content("🙂"),
        ToolCallBegin(0, "id", "f"),
        *run("hermes", '<tool_call>{"name": "f", "arguments": {"é": "🙂"}}</tool_call>')[1:],
        Content("🙂"),
    ]


def test_markers_of_ones_own() -> None:
    own = ReasoningMarkers(begin="[[", end="]]", repeats=False)
    assert run("plain", " [[a]] b [[c]]", reasoning=own) == [Reasoning("a"), Content("b [[c")]
    with pytest.raises(UserError, match="must differ"):
        make_parser("plain", Circumstances(reasoning=ReasoningMarkers(begin="x", end="x")))
    with pytest.raises(UserError, match="white space"):
        make_parser("plain", Circumstances(reasoning=ReasoningMarkers(begin="<a>\n", end="x")))


# -- arguments


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "f"}]</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=f></function>"),
        ("qwen3_coder", "<tool_call><function=f></tool_call>"),
        ("llama3_json", '{"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>{"type": "function", "function": {"name": "f", "parameters": {}}}'),
        ("llama3_json", '{"type": "function", "function": "f", "parameters": {}}'),
        ("llama3_pythonic", "[f()]"),
        ("llama4", "[f()]"),
        ("llama4", '{"name": "f", "parameters": {}}'),
        ("llama4", '[{"name": "f", "parameters": {}}]'),
        ("llama4", '<|python_start|>{"name": "f"}<|python_end|>'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]'),
        ("granite", '<|tool_call|> {"name": "f"}'),
        ("phi4_mini", '<|tool_call|>[{"type": "function", "function": {"name": "f", "arguments": {}}}]<|/tool_call|>'),
        ("phi4_mini", 'functools[{"name": "f"}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'),
        ("mistral", '[TOOL_CALLS]{"name": "f"}'),
        ("mistral_v11", "[TOOL_CALLS]f[ARGS]{}"),
        ("mistral_v11", "[TOOL_CALLS]f{}"),
        ("deepseek_v3", f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}f\n```json\n```{deepseek.CALL_END}"),
        ("deepseek_v31", f"{deepseek.CALLS_BEGIN}{deepseek.CALL_BEGIN}f{deepseek.SEPARATOR}{deepseek.CALL_END}"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>"),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"),
        ("json", '[{"name": "f", "parameters": {}}]'),
        ("json", '{"name": "f", "parameters": {}}'),
    ],
)
def test_a29_a_call_without_arguments_joins_to_an_empty_object(name: str, text: str) -> None:
    tools = {"f": {}}
    assert calls(name, text, tools=tools) == [("f", {})]
    assert message(name, text, tools=tools).calls[0].arguments == "{}"


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "}"}',
        '{"a": "</tool_call>", "b": "<tool_call>"}',
        r'{"a": "say \"}\" \\"}',
        '{"a": {"b": [{"c": {}}, [], [[{}]]]}}',
        r'{"\u0061": "\ud83d\ude42 \u00e9"}',
        '{ "a" : [ 1 , -0.5e+10 , true , false , null ] }',
        '{"a": "<think>no</think>"}',
        '{"a": "🙂"}',
    ],
)
def test_a29_the_last_brace_is_never_lost(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    (call,) = message("hermes", text, reasoning=THINK).calls
    assert call.arguments == arguments
    assert call.complete
    quoted = f'<tool_call>{{"arguments": {json.dumps(arguments)}, "name": "f"}}</tool_call>'
    assert calls("hermes", quoted) == [("f", json.loads(arguments))]


def test_habits_inside_strings_are_put_right() -> None:
    text = (
        '<tool_call>{"name": "f", "arguments": {"a": "two\nlines\x01", "re": "\\d+\\\'", "p": "C:\\users"}}</tool_call>'
    )
    assert calls("hermes", text) == [("f", {"a": "two\nlines\x01", "re": "\\d+'", "p": "C:\\users"})]


def test_half_a_surrogate_pair_is_kept_as_its_escape() -> None:
    for arguments in ('{"a": "\\ud83d"}', '{"a": "\\ude42\\ud83dx"}'):
        for written in (arguments, json.dumps(arguments), '"' + arguments.replace('"', '\\"') + '"'):
            (call,) = message("hermes", f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>').calls
            assert call.complete
            call.arguments.encode()
            assert json.loads(call.arguments) == json.loads(arguments)


def test_arguments_stream_while_they_come() -> None:
    parser = make_parser("hermes")
    assert parser.push('<tool_call>\n{"name": "f", "arguments"') == []
    begun = parser.push(': {"code": "pri')
    assert [type(piece).__name__ for piece in begun] == ["ToolCallBegin", "ToolArguments"]
    assert collect(begun).calls[0].arguments == '{"code": "pri'
    assert not parser.has_tool_calls
    assert collect(begun + parser.push('nt"}')).calls[0].arguments == '{"code": "print"}'
    assert parser.has_tool_calls


@pytest.mark.parametrize("reason", ["length", "stop", "abort"])
def test_a_call_cut_inside_is_incomplete_and_nothing_is_added(reason: str) -> None:
    (call,) = message("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "x\\', reason=reason).calls
    assert (call.arguments, call.complete, call.why) == ('{"a": [1, "x', False, "cut")


def test_a_call_cut_before_it_is_one_is_content() -> None:
    assert run("hermes", 'Well <tool_call>{"name": "f', reason="length") == [Content('Well <tool_call>{"name": "f')]
    text = "[f(a='<think>"
    assert run("llama3_pythonic", text, reason="length", reasoning=THINK, tools={"f": {}}) == [Content(text)]


def test_a_call_whose_arguments_are_whole_is_complete_when_cut() -> None:
    assert calls("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', reason="length") == [("f", {"a": 1})]
    assert calls("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_', reason="length") == [("f", {})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>hello</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>",
        "The marker <tool_call> begins a call, </tool_call> ends it.",
    ],
)
def test_what_only_looks_like_a_call_is_content(text: str) -> None:
    assert run("hermes", text) == [Content(text)]
    assert run("hermes", text + ' <tool_call>{"name": "f"}</tool_call>')[0] == Content(text)


def test_a_call_that_goes_wrong_after_it_began_ends_and_the_rest_is_content() -> None:
    found = message("hermes", 'a <tool_call>{"name": "f", "arguments": {"a": 1,}} b')
    assert found.content == "a }} b"
    (call,) = found.calls
    assert (call.arguments, call.complete, call.why) == ('{"a": 1,', False, "malformed")


# -- formats


def test_hermes_several_calls_in_one_pair_of_markers() -> None:
    text = '<tool_call>\n{"name": "f"}\n{"name": "g"}\n</tool_call> and'
    assert calls("hermes", text) == [("f", {}), ("g", {})]
    assert message("hermes", text).content == "and"


def test_llama3_bare_json_is_a_call_only_when_it_can_be_one() -> None:
    tools: dict[str, Any] = {"f": {}, "g": {}}
    text = '{"name": "f", "parameters": {"a": "b; {c}"}}; {"name": "g", "parameters": {}}'
    assert calls("llama3_json", text, tools=tools) == [("f", {"a": "b; {c}"}), ("g", {})]
    for other in (
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob", "parameters": {}}',
        "{ x } is a set",
        '<|python_tag|>print("hi")',
    ):
        assert run("llama3_json", other, tools=tools) == [Content(other)]
    parser = make_parser("llama3_json", Circumstances(tools=tools))
    assert parser.push('{"answer"') == [Content('{"answer"')], "seen as content at the first wrong key"


def test_pythonic_values() -> None:
    tools: dict[str, Any] = {"f": {}, "a.b": {}}
    text = """[f(a=1, b='x, y)', c=[1, {'d': None}], e=True, g=-1.5), a.b(s="it's \\"(\\"", t=(1, 2), n=null), f()]"""
    assert calls("llama3_pythonic", text, tools=tools) == [
        ("f", {"a": 1, "b": "x, y)", "c": [1, {"d": None}], "e": True, "g": -1.5}),
        ("a.b", {"s": 'it\'s "("', "t": [1, 2], "n": None}),
        ("f", {}),
    ]
    for other in ("[1] As of 2024", "[link](http://x)", "[g(a=1)]", "[f(1)]", "[f(a=open('x'))]", "[f(a={1})]", "[]"):
        assert run("llama3_pythonic", other, tools=tools) == [Content(other)]


def test_llama4_calls_in_all_spellings() -> None:
    tools: dict[str, Any] = {"f": {}, "g": {}}
    one, two = '{"name": "f", "parameters": {"a": "x; [y]"}}', '{"name": "g", "parameters": {}}'
    both = [("f", {"a": "x; [y]"}), ("g", {})]
    for text in (
        f"{one}{two}",
        f"{one}\n{two}",
        f"{one}; {two}",
        f"[{one}, {two}]",
        f" [ {one} , {two} ] ",
        f"<|python_start|>{one}; {two}<|python_end|>",
        f"<|python_start|>[{one}, {two}]<|python_end|>",
        "[f(a='x; [y]'), g()]",
        "<|python_start|>[f(a='x; [y]'), g()]<|python_end|>",
    ):
        assert calls("llama4", text, tools=tools) == both, text
        assert message("llama4", text, tools=tools).content is None, text
    said = message("llama4", f"<|python_start|>Let me look.<|python_end|>{one}{two}", tools=tools)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == both
    assert said.content == "<|python_start|>Let me look."
    for other in (
        "<|python_start|>print([1])<|python_end|>",
        '{"answer": 42}',
        '{"name": "Bob", "parameters": {}}',
        "[1] As of 2024",
        "[",
        "[ ",
        "{",
        "<|python_start|>",
        "<|python_start|> [",
        "<|python_end|> {",
        "[g(a=1",
        f"So: {one}",
    ):
        assert run("llama4", other, tools=tools) == [Content(other)], other


def test_lists_behind_a_token_or_a_word() -> None:
    listed = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    both = [("f", {"a": 1}), ("g", {})]
    assert calls("granite", f"Well.\n<|tool_call|>{listed}") == both
    assert message("granite", f"Well.\n<|tool_call|>{listed}").content == "Well."
    for text in (f"<|tool_call|>{listed}<|/tool_call|>", f"functools{listed}", f"Well. functools {listed}"):
        assert calls("phi4_mini", text) == both
    for other in ("import functools", "functools.cache", "functools[0]", "<|tool_call|> then"):
        assert run("phi4_mini", other) == [Content(other)]


def test_mistral_ids() -> None:
    given = '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "AbCdEfGh1"}]'
    parser = make_parser("mistral")
    (call,) = collect(parser.push(given) + parser.finish("stop")).calls
    assert len(call.id) == 9 and call.id.isalnum(), "the id came after the call had begun"
    first = '[TOOL_CALLS] [{"id": "AbCdEfGh1", "name": "f", "arguments": {}}]'
    assert message("mistral", first).calls[0].id == "AbCdEfGh1"
    assert message("mistral_v11", "[TOOL_CALLS]f[CALL_ID]AbCdEfGh1[ARGS]{}").calls[0].id == "AbCdEfGh1"


def test_deepseek_v31_tool_called_function() -> None:
    text = f'{deepseek.CALLS_BEGIN}{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}{{"a": 1}}{deepseek.CALL_END}'
    assert calls("deepseek_v31", text) == [("function", {"a": 1})]


def test_qwen3_coder_types_come_from_the_schema() -> None:
    properties: dict[str, Any] = {
        "code": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "maybe": {"type": ["string", "null"]},
        "many": {"type": "array"},
        "kind": {"enum": ["a", "b"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
    values = {
        "code": "if a < b:\n    print('</parameter>', '</function>')\n",
        "n": "12",
        "x": "3",
        "maybe": "null",
        "many": "['a', True, None]",
        "kind": "1",
        "either": "007",
        "unknown": '{"a": 1}',
        "words": "hello there",
    }
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    assert calls("qwen3_coder", text, tools={"f": {"properties": properties}}) == [
        (
            "f",
            {
                "code": values["code"],
                "n": 12,
                "x": 3,
                "maybe": None,
                "many": ["a", True, None],
                "kind": "1",
                "either": "007",
                "unknown": {"a": 1},
                "words": "hello there",
            },
        )
    ]


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|end|>"}<|call|>'
    )
    found = message("harmony", text)
    assert (found.reasoning, found.content) == ("Let me see.", "I look it up.")
    assert calls("harmony", text) == [("f", {"a": "<|end|>"})]
    # The recipient may stand in the role's header, which the prompt began.
    assert calls("harmony", " to=functions.f<|channel|>commentary json<|message|>{}") == [("f", {})]
    assert message("harmony", "<|channel|>analysis<|message|>Thinking", reason="length") == Message(
        content=None, reasoning="Thinking", calls=()
    )
    assert message("harmony", "<|channel|>final<|message|>Hi<|return|>").content == "Hi"
    assert message("harmony", "<|channel|>final<|mess", reason="length").content is None
    (cut,) = message("harmony", "<|channel|>commentary to=functions.f<|message|>", reason="length").calls
    assert (cut.arguments, cut.complete) == ("", False)


def test_guided_json_of_a_named_tool_is_its_arguments() -> None:
    assert calls("json", '{"a": 1}', forced="f") == [("f", {"a": 1})]
    assert calls("json", '<think>hm</think>\n{"a": 1}', forced="f", reasoning=THINK) == [("f", {"a": 1})]
    assert run("json", "[1, 2]", forced="f") == [Content("[1, 2]")]


def test_no_calls_under_tool_choice_none() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert run("hermes", text, calls=False) == [Content(text)]
    text = '<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": 1}'
    assert run("harmony", text, calls=False) == [Reasoning("x"), Content('{"a": 1}')]


# -- the parts


def test_json_reader_agrees_with_the_standard_library() -> None:
    good = ["{}", "[]", "0", "-1.5E-3", '"\\u00e9"', "[1,[2,{}]]", '{"a":{"b":null}}', "true", " 1 "]
    bad = [
        "",
        "01",
        "1.",
        "-",
        ".5",
        "+1",
        "NaN",
        "[1,]",
        "{,}",
        '{"a"}',
        '{"a":1,}',
        "tru",
        "[",
        '"',
        "1 2",
        "{1:2}",
        "'a'",
    ]
    assert [as_json(text) for text in good] == [text.strip() for text in good]
    assert [as_json(text) for text in bad] == [None] * len(bad)
    reader = JsonReader()
    end, _ = reader.feed("[" * 1000, 0)
    assert (reader.status, end) == ("bad", MAX_DEPTH)


def test_python_values() -> None:
    good = {
        "'a' \"b\"": "ab",
        "r'\\d'": "\\d",
        "'\\x41\\u00e9\\n\\q'": "A\xe9\n\\q",
        "(1)": 1,
        "(1,)": [1],
        "{'a': [1_000, 0x1f, .5], }": {"a": [1000, 31, 0.5]},
        "[true, None]": [True, None],
    }
    for text, value in good.items():
        assert json.loads(python_value(text) or "") == value, text
    for text in ("", "f()", "x", "{1: 2}", "{1}", "1e999", "[1", "1 2", "[,]", "b'a'", "1j", "[" * 10_000, "9" * 5000):
        assert python_value(text) is None, text[:20]


# -- the table


def test_the_tables_are_sorted_and_whole() -> None:
    assert list(PARSERS) == sorted(PARSERS)
    assert list(REASONING) == sorted(REASONING)
    for name, row in PARSERS.items():
        assert row.summary and set(row.stops_at) <= set(row.markers), name
        assert (row.grammar_hint is None) == (name == "plain")


@pytest.mark.parametrize("name", sorted(set(PARSERS) - {"plain"}))
def test_a_call_spelled_by_the_hint_is_read_by_the_parser(name: str) -> None:
    hint = PARSERS[name].grammar_hint
    assert hint is not None
    arguments = {"city": "Köln", "unit": "c}"}
    if hint.arguments == "json":
        written = json.dumps(arguments)
    elif hint.arguments == "keywords":
        written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    else:
        assert hint.parameter is not None
        before, middle, after = hint.parameter
        written = "".join(f"{before}{key}{middle}{value}{after}" for key, value in arguments.items())
    text = hint.begin + hint.call("f", written) + hint.between + hint.call("g", written) + hint.end
    assert calls(name, text, tools={"f": {}, "g": {}}) == [("f", arguments), ("g", arguments)]
    assert message(name, text, tools={"f": {}, "g": {}}).content is None
    assert text.startswith(hint.trigger)
    assert isinstance(hint, GrammarHint)


def no_tokens(token: str) -> int | None:
    return None


@pytest.mark.parametrize(
    ("template", "name", "reasoning"),
    [
        ("{{tools}} <tool_call> <think>", "hermes", "think"),
        ("{{tools}} <tool_call><function=x><parameter=y>", "qwen3_coder", "none"),
        ("{{tools}} <seed:tool_call><function=x><parameter=y> <seed:think>", "seed_oss", "seed"),
        ("{{tools}} <tool_call>{{name}}<arg_key>", "plain", "none"),
        (f"{{{{tools}}}} {deepseek.CALL_BEGIN}```json </think>", "deepseek_v3", "think"),
        (f"{{{{tools}}}} {deepseek.CALL_BEGIN} </think>", "deepseek_v31", "think"),
        ("[TOOL_CALLS] tools", "mistral", "none"),
        ("[TOOL_CALLS] [ARGS] [THINK] tools", "mistral_v11", "mistral"),
        ("<|start_header_id|> tools <|python_tag|>", "llama3_json", "none"),
        ('<|start_header_id|> tools "parameters": ', "llama3_json", "none"),
        ("<|python_start|> tools", "llama3_pythonic", "none"),
        ('<|python_start|> tools "parameters": ', "llama4", "none"),
        ("<|tool_call|> tools", "granite", "none"),
        ("<|tool|> tools <|/tool|>", "phi4_mini", "none"),
        ("<|channel|> <|message|> tools <think>", "harmony", "none"),
        ("tools", "plain", "none"),
        ("<|im_start|>", "plain", "none"),
    ],
)
def test_the_template_says_which_format(template: str, name: str, reasoning: str) -> None:
    choice = parser_for("llama", template, token_id=no_tokens)
    assert (choice.name, choice.reasoning) == (name, reasoning)
    assert choice.reasons[0].startswith(f"{name}: ") and choice.reasons[1].startswith(f"{reasoning}: ")
    assert choice.format is PARSERS[name]


def test_without_a_template_tokens_and_family_decide() -> None:
    tokens = {"[TOOL_CALLS]": 5, "<think>": 6, "</think>": 7}
    choice = parser_for("llama", None, token_id=tokens.get)
    assert (choice.name, choice.reasoning) == ("mistral", "think")
    for family, name in (
        ("deepseek_v2", "plain"),
        ("deepseek_v3", "deepseek_v3"),
        ("gemma3", "plain"),
        ("granite", "granite"),
        ("gpt_oss", "harmony"),
        ("llama4", "llama4"),
        ("mixtral", "mistral"),
        ("qwen2_moe", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_moe", "hermes"),
    ):
        assert parser_for(family, None, token_id=no_tokens).name == name


# What in a family's published chat templates tells its format; "" where they take no tools.
TEMPLATES: dict[str, tuple[tuple[str, str], ...]] = {
    "bert": (),
    "deepseek_v2": (("", "plain"),),
    "deepseek_v3": (
        (f"tools {deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}f\\n```json\\n", "deepseek_v3"),
        (f"tools {deepseek.CALL_BEGIN}f{deepseek.SEPARATOR}", "deepseek_v31"),
    ),
    "gemma2": (("<start_of_turn>", "plain"),),
    "gemma3": (("<start_of_turn>", "plain"),),
    "gpt_oss": (("tools <|start|>assistant<|channel|>final<|message|>", "harmony"),),
    "granite": (("tools <|start_of_role|>assistant<|end_of_role|><|tool_call|>", "granite"),),
    "llama": (
        ('tools <|start_header_id|> {"name": function name, "parameters": x}. <|python_tag|>', "llama3_json"),
        ("tools <|start_header_id|> [func_name1(params_name1=params_value1)]", "llama3_pythonic"),
    ),
    "llama4": (
        ('tools <|header_start|> <|python_start|> <|python_end|> {"name": "f", "parameters": ', "llama4"),
        ("tools <|header_start|> <|python_start|>[func_name1(params_name1=params_value1)]", "llama3_pythonic"),
    ),
    "mistral": (
        ("tools [AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral"),
        ("tools [AVAILABLE_TOOLS] [TOOL_CALLS]f[ARGS]", "mistral_v11"),
    ),
    "mixtral": (("tools [AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral"),),
    "olmo2": (("<|assistant|>", "plain"),),
    "phi3": (("<|assistant|>", "plain"), ("tools <|tool|> <|/tool|>", "phi4_mini")),
    "qwen2": (("tools <|im_start|> <tool_call>", "hermes"),),
    "qwen2_5_vl": (("<|im_start|> <|vision_start|>", "plain"),),
    "qwen2_moe": (("<|im_start|>", "plain"),),
    "qwen3": (("tools <|im_start|> <tool_call> <think>", "hermes"),),
    "qwen3_moe": (
        ("tools <|im_start|> <tool_call> <think>", "hermes"),
        ("tools <tool_call> <function=f> <parameter=a>", "qwen3_coder"),
    ),
}


def test_every_family_has_the_format_of_its_templates() -> None:
    assert set(TEMPLATES) >= set(FAMILIES), "a family without its chat format"
    for family, templates in TEMPLATES.items():
        for template, name in templates:
            assert parser_for(family, template, token_id=no_tokens).name == name, (family, template)


def test_a_name_overrules_and_an_unknown_one_is_refused_with_the_list() -> None:
    choice = parser_for("qwen3", "<tool_call>", token_id=no_tokens, name="mistral", reasoning="seed")
    assert (choice.name, choice.reasoning) == ("mistral", "seed")
    with pytest.raises(UserError, match=r"no tool format 'x'; known are deepseek_v3, .*qwen3_coder"):
        parser_for("qwen3", None, token_id=no_tokens, name="x")
    with pytest.raises(UserError, match="no reasoning markers 'x'; known are mistral, none, seed, think"):
        reasoning_named("x")
    with pytest.raises(UserError, match="no tool format"):
        make_parser("y")


def test_hidden_markers_are_those_the_vocabulary_has_as_special() -> None:
    ids = {"<tool_call>": 1, "</tool_call>": 2, "<think>": 3, "</think>": 4}
    assert hidden_markers("hermes", THINK, token_id=ids.get, special_ids={1, 3, 9}) == (1, 3)


# -- what it costs


def per_delta_us(name: str, deltas: Sequence[str], **told: Any) -> float:
    best = float("inf")
    for _ in range(7):
        parser = make_parser(name, Circumstances(**told))
        push = parser.push
        start = time.perf_counter()
        for delta in deltas:
            push(delta)
        best = min(best, time.perf_counter() - start)
    return best / len(deltas) * 1e6


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_plain_text_costs_less_than_five_microseconds(name: str) -> None:
    head = ["<|channel|>", "final", "<|message|>"] if name == "harmony" else []
    assert per_delta_us(name, [*head, *[" word", " and", " then", "\n", "{x}", "."] * 200], reasoning=THINK) < 5


def test_runaway_text_costs_the_same_to_its_end() -> None:
    """Held-back text must not be read again and again: 20,000 pushes of white space, strings, half markers, digits."""
    openings = {
        "white space before a call": ("hermes", "<tool_call>", " "),
        "white space behind a call": ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "\n"),
        "white space inside arguments": ("hermes", '<tool_call>{"name": "f", "arguments": {', " "),
        "a long number": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1"),
        "a long string": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x"),
        "a long name": ("hermes", '<tool_call>{"name": "', "x"),
        "a long value": ("qwen3_coder", "<tool_call><function=f><parameter=a>", "x"),
        "a long literal": ("llama3_pythonic", "[f(a='", "x"),
        "markers": ("hermes", "", "<tool_call>"),
        "blanks": ("plain", "", "\n"),
    }
    for what, (name, opening, repeated) in openings.items():
        parser = make_parser(name, Circumstances(reasoning=THINK))
        start = time.perf_counter()
        parser.push(opening)
        for _ in range(20_000):
            parser.push(repeated)
        parser.finish("length")
        assert time.perf_counter() - start < 2, what
