"""From what clients send to a grammar: what it allows, what is refused, and how it is said. No model, no engine."""

from __future__ import annotations

import builtins
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from http_support import END, EOS, byte_tokenizer

from tradewind.contract.errors import MissingExtraError, RequestError
from tradewind.contract.grammar import Grammar
from tradewind.sampling.grammar import GrammarSlots
from tradewind.serving.parsers.parser import Circumstances, GrammarHint
from tradewind.serving.parsers.pieces import collect
from tradewind.serving.parsers.table import PARSERS, REASONING, make_parser
from tradewind.serving.parsers.tools import check_tools
from tradewind.serving.structured import StructuredOutput
from tradewind.serving.structured_schema import FORMATS, SchemaLimits

pytest.importorskip("llguidance")
from structured_support import allowed, compiler, enter, feed, vocabulary, walk

MAKE = StructuredOutput(byte_tokenizer())
THINK = REASONING["think"]


@pytest.fixture
def slots() -> Iterator[GrammarSlots]:
    compile_here = compiler()
    made = GrammarSlots(compiler=compile_here, slots=8, rows=8)
    yield made
    made.close()
    compile_here.shut()


def schema_text(schema: Any, **more: Any) -> str:
    shape = MAKE.response_format(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    )
    assert shape is not None
    return MAKE.text(shape, **more)


def said(tokens: list[int]) -> str:
    return bytes(tokens).decode()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SCHEMAS: dict[str, Any] = {
    "enum": {"enum": ["red", "green", 3, None, {"a": 1}]},
    "const": {"const": [1, "x"]},
    "person": PERSON,
    "fixed array": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9}, "minItems": 3, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "nested": {"type": "object", "properties": {"who": PERSON, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4}},
               "required": ["who"]},
    "anyOf": {"anyOf": [{"type": "integer", "minimum": -5, "maximum": 5}, {"type": "string", "maxLength": 3}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "ranges": {"type": "object", "properties": {"a": {"type": "integer", "exclusiveMinimum": 10, "maximum": 1000},
               "b": {"multipleOf": 5, "type": "integer", "minimum": 0, "maximum": 100}}, "required": ["a", "b"]},
    "refs": {"$ref": "#/$defs/p", "$defs": {"p": PERSON}},
    "uuid": {"type": "string", "format": "uuid"},
    "date-time": {"type": "string", "format": "date-time"},
    "allOf": {"allOf": [{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
              {"properties": {"b": {"enum": [2]}}, "required": ["b"]}], "maxProperties": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_schema_allows_is_valid(name: str, slots: GrammarSlots) -> None:
    validator = pytest.importorskip("jsonschema_rs").validator_for(SCHEMAS[name])
    text = schema_text(SCHEMAS[name])
    ended = 0
    for seed in range(6):
        tokens, done = walk(slots, text, seed=seed)
        if done:
            ended += 1
            answer = json.loads(said(tokens))
            assert validator.is_valid(answer), answer
    assert ended >= 4 or name == "allOf"


def test_json_object_is_any_object(slots: GrammarSlots) -> None:
    shape = MAKE.response_format({"type": "json_object"})
    assert shape is not None
    text = MAKE.text(shape)
    for answer in ('{"a":1}', '{"a": [1, 2, {"b": null}], "c": "é\\n"}', '{\n  "a": true\n}', "{}"):
        assert feed(slots, text, answer) == "complete"
    for answer in ("[1]", '"a"', " {", "```json"):
        assert feed(slots, text, answer).startswith("refused")


def test_text_and_nothing_ask_for_nothing() -> None:
    assert MAKE.response_format(None) is None
    assert MAKE.response_format({"type": "text"}) is None


def test_blanks_between_tokens_are_bounded(slots: GrammarSlots) -> None:
    text = schema_text(PERSON)
    assert feed(slots, text, '{"name": "a", "age": 3}') == "complete"
    assert feed(slots, text, '{\n    "name": "a",\n    "age": 3\n}') == "complete"
    assert feed(slots, text, '{  "name"').startswith("refused")
    assert feed(slots, text, '{\n\n"name"').startswith("refused")
    assert feed(slots, text, "{\n" + " " * 17).startswith("refused")


def test_a24_a_flood_of_blanks_in_a_string_is_stemmed(slots: GrammarSlots) -> None:
    text = schema_text(PERSON)
    slots.enter(enter(0, text))
    slot = np.zeros(1, np.int32)
    for token in b'{"name":"':
        slots.advance(slot, np.array([token], np.int32))
    taken = 0
    while taken < 200:
        bits, _ = slots.masks(slot)
        assert bits is not None
        if 32 not in allowed(bits[0]):
            break
        slots.advance(slot, np.array([32], np.int32))
        taken += 1
    assert taken < 64 and ord('"') in allowed(bits[0])


def test_objects_that_say_nothing_of_other_properties_are_closed(slots: GrammarSlots) -> None:
    assert feed(slots, schema_text(PERSON), '{"name":"a","age":3,').startswith("refused")
    opened = {**PERSON, "additionalProperties": True}
    assert feed(slots, schema_text(opened), '{"name":"a","age":3,"x":1}') == "complete"


@pytest.mark.parametrize(
    "keyword",
    ["not", "if", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties", "contains", "minContains",
     "unevaluatedItems", "$dynamicRef", "$anchor", "additionalItems", "nullable", "x-guidance", "madeUp"],
)  # fmt: skip
def test_an_unsupported_keyword_is_named_with_its_place(keyword: str) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": {keyword: True}}}}
    with pytest.raises(RequestError) as caught:
        schema_text(schema)
    assert f"'{keyword}'" in str(caught.value) and "$.properties.tags.items" in str(caught.value)
    assert "response_format.json_schema.schema" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "string", "format": "color"}, "the format 'color'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "date"}, "the type 'date'"),
        ({"enum": []}, "enum"),
        ({"$ref": "http://x/y"}, "$ref"),
        ({"$ref": "#/$defs/x"}, "leads nowhere"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "only to itself"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "'oneOf' at $"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "integer", "minimum": True}, "minimum must be a number"),
        ({"type": "string", "pattern": "^(?!a)"}, "look-ahead"),
        ({"type": "string", "pattern": "a{1,100000}"}, "100000"),
        ({"type": "array", "minItems": 10**9}, "minItems"),
        ({"items": [{}]}, "prefixItems"),
        (False, "false"),
        ([1], "JSON schema"),
        ({"type": "object", "properties": {"a": 1}}, "$.properties.a"),
        ({"enum": list(range(20_000))}, "enum values"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_in_one_sentence(schema: Any, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        schema_text(schema)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_annotations_and_switched_off_keywords_are_no_obstacle(slots: GrammarSlots) -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://example/x", "title": "t", "description": "d", "default": 1,
        "examples": [1], "x-order": 3, "type": "array", "uniqueItems": False, "items": {"type": "integer", "nullable": False},
    }  # fmt: skip
    assert feed(slots, schema_text(schema), "[1, 2]") == "complete"
    for name in FORMATS:
        schema_text({"type": "string", "format": name})


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def refusal(make: Any) -> str:
    with pytest.raises(RequestError) as caught:
        make()
    return str(caught.value)


def test_bombs_are_refused_or_bounded_at_once(slots: GrammarSlots) -> None:
    began = time.monotonic()
    assert "deeper" in refusal(lambda: schema_text(nested(100)))
    assert "nested too deeply" in refusal(lambda: schema_text(nested(100_000)))
    assert "bytes" in refusal(lambda: schema_text({"const": "x" * 200_000}))
    assert "100000" in refusal(lambda: MAKE.regex("a{1,100000}"))
    assert "characters" in refusal(lambda: MAKE.regex("a" * 200_000))
    assert "schemas in it" in refusal(
        lambda: schema_text({"type": "object", "properties": {f"p{i}": {} for i in range(6_000)}})
    )
    refusal(lambda: MAKE.text(MAKE.grammar("start: " + "(" * 500 + '"a"' + ")" * 500)))
    refusal(lambda: MAKE.grammar("root ::= " + "(" * 50_000))
    parts = [{"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(10)]
    refusal(lambda: schema_text({"allOf": parts}))
    for bomb in ("(a+)+b", "((a{1,100}){1,100}){1,100}", "(x+x+)+y", "(.*a){25}", "(a|aa)+$", "[ab]*a[ab]{200}c"):
        walk(slots, MAKE.text(MAKE.regex(bomb)), seed=1, most=60)
    assert time.monotonic() - began < 10


def test_regular_expressions_hold_for_the_whole_answer(slots: GrammarSlots) -> None:
    for pattern in (
        r"^[0-9]{3}-\d{2}$",
        r"(yes|no)",
        r"a/b\n[^x]{1,3}",
        r"\$[0-9]+(\.[0-9]{2})?",
        r"[\w ]{1,9}\.",
        "é+x",
    ):
        text = MAKE.text(MAKE.regex(pattern))
        for seed in range(4):
            tokens, done = walk(slots, text, seed=seed)
            if done:
                assert re.fullmatch(pattern, said(tokens)), (pattern, said(tokens))
    assert feed(slots, MAKE.text(MAKE.regex("a+")), "aaa") == "may end"
    for bad, part in (("(a", "unclosed"), ("a(?=b)", "look-ahead"), (r"(a)\1", "backreferences"), ("", "empty")):
        with pytest.raises(RequestError, match=part):
            MAKE.text(MAKE.regex(bad))


def test_choices(slots: GrammarSlots) -> None:
    text = MAKE.text(MAKE.choice(["yes", "no", 'a "quote"\n']))
    assert feed(slots, text, "yes") == feed(slots, text, 'a "quote"\n') == "complete"
    assert feed(slots, text, "maybe").startswith("refused")
    for bad in ([], "yes", [1], [""]):
        with pytest.raises(RequestError):
            MAKE.choice(bad)


def test_grammars_in_lark_and_gbnf(slots: GrammarSlots) -> None:
    lark = 'start: expr\nexpr: term ("+" term)*\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/\n'
    gbnf = 'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"\n'
    for grammar in (lark, gbnf):
        text = MAKE.text(MAKE.grammar(grammar))
        assert feed(slots, text, "1+(23+4)") == "may end"
        assert feed(slots, text, "1+(2").endswith("goes on")
        assert feed(slots, text, "1+)").startswith("refused")
    for bad, part in (
        ('start: "a" b\nb: "x', "line 2"),
        ('start: "a" b', "unknown name"),
        ('root ::= "a" (', "line 1"),
        ('root ::= "a" b', "Rule 'b'"),
        ("hello", "no rule 'start'"),
        ('%llguidance {}\nstart: "a"', "%llguidance"),
        ("", "empty"),
    ):
        with pytest.raises(RequestError, match=re.escape(part)):
            MAKE.text(MAKE.grammar(bad))


# -- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_reasoning_written_as_text_is_free_and_the_answer_is_not(own: bool, slots: GrammarSlots) -> None:
    shape = MAKE.grammar('start: "yes" | "no"') if own else MAKE.choice(["yes", "no"])
    inside = MAKE.text(shape, reasoning=THINK, starts_inside=True)
    assert feed(slots, inside, "Well, { é <b> maybe?\n</think>\n\nyes") == "complete"
    assert feed(slots, inside, "yes") == "goes on", "still reasoning: no end of text"
    assert feed(slots, inside, "hm</think>\n\nwell").startswith("refused")
    before = MAKE.text(shape, reasoning=THINK)
    assert feed(slots, before, "<think>hm</think>no") == "complete"
    assert feed(slots, before, "no") == "complete"
    assert feed(slots, before, "well").startswith("refused")


def test_reasoning_marked_by_tokens_costs_no_mask(slots: GrammarSlots) -> None:
    begin, end = 260, 261  # ids without text, as a marker that is a token of its own has them
    grammar = Grammar(
        kind="choice", text='start: GAP? ("yes" | "no")\nGAP: /[ \\n]{1,4}/', begin=begin, end=end
    ).encode()
    assert feed(slots, grammar, [begin, *b"free { text", end, *b"\n\nyes"]) == "complete"
    assert feed(slots, grammar, b"no") == "complete"
    assert feed(slots, grammar, [begin, EOS]) == "refused at 1"
    assert feed(slots, grammar, [*b"n", begin]) == "refused at 1"
    inside = Grammar(kind="choice", text='start: "yes" | "no"', thinking=True, end=end).encode()
    assert feed(slots, inside, [*b"hm", end, *b"yes"]) == "complete"
    assert feed(slots, inside, [*b"hm", end, *b"x"]) == "refused at 3"


# -- tools -----------------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6, "pattern": "^[a-z ]*$"},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "now": {"type": "boolean"},
    },
    "required": ["city"],
}
CLOCK: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "strict": True, "parameters": CLOCK}},
]
FORCED = [name for name, row in PARSERS.items() if row.grammar_hint is not None]


def calls_of(name: str, text: str, **circumstances: Any) -> list[tuple[str, dict[str, Any]]]:
    parser = make_parser(name, Circumstances(tools={"weather": WEATHER, "clock": CLOCK}, **circumstances))
    message = collect([*parser.push(text), *parser.finish("stop")])
    assert not (message.content or "").strip(), message.content
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", FORCED)
def test_a_required_call_is_a_call_in_every_format(name: str, parallel: bool, slots: GrammarSlots) -> None:
    validator = pytest.importorskip("jsonschema_rs").validator_for(WEATHER)
    shape = MAKE.tools(check_tools(TOOLS, "required"), PARSERS[name].grammar_hint, parallel=parallel)
    assert shape is not None
    text = MAKE.text(shape)
    seen: set[str] = set()
    if name in ("qwen3_coder", "seed_oss"):  # a drawn text never ends there: its end is a marker of many letters
        outer = "tool_call" if name == "qwen3_coder" else "seed:tool_call"
        line = "\n" if name == "qwen3_coder" else ""
        call = (
            f"<{outer}>\n<function=weather>\n<parameter=city>{line}New\nYork{line}</parameter>\n"
            f"<parameter=days>{line}3{line}</parameter>\n</function>\n</{outer}>"
        )
        assert feed(slots, text, call) == ("may end" if parallel else "complete")
        assert calls_of(name, call) == [("weather", {"city": "New\nYork", "days": 3})]
        assert feed(slots, text, call.replace("=3<", "=x<").replace("3\n<", "x\n<").replace(">3<", ">x<")).startswith(
            "refused"
        )
        seen.add("weather")
    for seed in range(8):
        tokens, done = walk(slots, text, seed=seed, most=900)
        if not done:
            continue
        calls = calls_of(name, said(tokens))
        assert calls and (parallel or len(calls) == 1), said(tokens)
        for called, arguments in calls:
            seen.add(called)
            assert called in ("weather", "clock"), called
            if name not in ("qwen3_coder", "seed_oss"):  # whose texts are free: the format has no place for a pattern
                assert called == "clock" or validator.is_valid(arguments), arguments
            assert called == "weather" or arguments == {}
    assert seen == {"weather", "clock"}


def test_a_named_call_is_a_call_of_that_tool(slots: GrammarSlots) -> None:
    asked = check_tools(TOOLS, {"type": "function", "function": {"name": "clock"}})
    shape = MAKE.tools(asked, PARSERS["hermes"].grammar_hint, parallel=False)
    assert shape is not None
    assert feed(slots, MAKE.text(shape), '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>') == "complete"
    bare = MAKE.tools(asked, PARSERS["json"].grammar_hint, bare=True)
    assert bare is not None
    assert feed(slots, MAKE.text(bare), "{}") == "complete"


def test_auto_is_free_until_the_trigger(slots: GrammarSlots) -> None:
    shape = MAKE.tools(check_tools(TOOLS, "auto"), PARSERS["hermes"].grammar_hint)
    assert shape is not None
    text = MAKE.text(shape)
    assert feed(slots, text, "It is warm. <tool is no call") == "may end"
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "rome"}}\n</tool_call>'
    assert feed(slots, text, f"Let me see. {call}") in ("may end", "complete")
    assert feed(slots, text, '<tool_call>\n{"name": "nope').startswith("refused")
    assert feed(slots, text, call.replace('"city"', '"town"')).startswith("refused")
    lax = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert MAKE.tools(check_tools(lax, "auto"), PARSERS["hermes"].grammar_hint) is None
    assert MAKE.tools(check_tools(lax, "none"), PARSERS["hermes"].grammar_hint) is None


def test_auto_beside_a_schema_is_a_call_or_the_schema(slots: GrammarSlots) -> None:
    beside = MAKE.json_schema(PERSON)
    shape = MAKE.tools(check_tools(TOOLS, "auto"), PARSERS["hermes"].grammar_hint, beside=beside)
    assert shape is not None
    text = MAKE.text(shape)
    assert feed(slots, text, '{"name":"a","age":1}') == "complete"
    assert feed(slots, text, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>') in ("may end", "complete")
    assert feed(slots, text, "hello").startswith("refused")


def test_a_lax_tool_with_a_keyword_that_cannot_be_kept_takes_any_object(slots: GrammarSlots) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    hint = PARSERS["hermes"].grammar_hint
    shape = MAKE.tools(check_tools([{"type": "function", "function": tool}], "required"), hint)
    assert shape is not None
    assert feed(slots, MAKE.text(shape), '<tool_call>\n{"name": "f", "arguments": {"z": 1}}\n</tool_call>') == "may end"
    strict = check_tools([{"type": "function", "function": {**tool, "strict": True}}], "required")
    with pytest.raises(RequestError, match="'not'"):
        MAKE.tools(strict, hint)


def test_structural_tags(slots: GrammarSlots) -> None:
    value = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": PERSON, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    shape = MAKE.response_format(value)
    assert shape is not None
    text = MAKE.text(shape)
    assert feed(slots, text, "x <f no <f=a>12</f> and <f=a>3</f> y") == "may end"
    assert feed(slots, text, "x <f=c").startswith("refused")
    assert feed(slots, text, "x <f=a>x").startswith("refused")
    with pytest.raises(RequestError, match="triggers"):
        MAKE.structural_tag({**value, "triggers": ["<g"]})


# -- the rest --------------------------------------------------------------------------------------------------------


def test_replaying_generated_tokens_gives_the_same_mask(slots: GrammarSlots) -> None:
    text = schema_text(SCHEMAS["nested"])
    tokens, _ = walk(slots, text, seed=5)
    for cut in range(0, len(tokens), 7):
        slots.enter(enter(1, text))
        for token in tokens[:cut]:
            slots.advance(np.array([1], np.int32), np.array([token], np.int32))
        slots.enter(enter(2, text, generated=tokens[:cut]))
        bits, failed = slots.masks(np.array([1, 2, 3], np.int32))
        assert bits is not None and not failed
        assert np.array_equal(bits[0], bits[1]) and (bits[2] == 0xFFFFFFFF).all()


def test_end_of_text_is_allowed_only_where_the_grammar_accepts(slots: GrammarSlots) -> None:
    text = MAKE.text(MAKE.regex("a{2,4}"))
    one = np.zeros(1, np.int32)

    def may(*, generated: bytes, stops: tuple[int, ...]) -> set[int]:
        slots.enter(enter(0, text, generated=generated, stops=stops))
        bits, failed = slots.masks(one)
        assert bits is not None and not failed
        return set(allowed(bits[0]))

    assert may(generated=b"a", stops=(EOS, END)) == {97}
    assert may(generated=b"aa", stops=(EOS, END)) == {97, EOS, END}
    assert may(generated=b"aa", stops=()) == {97}, "ignore_eos: as long as it can go on"
    assert may(generated=b"aa", stops=(10,)) == {97, 10}, "a stop token of the client's own"


def test_a_broken_grammar_fails_its_row_only(slots: GrammarSlots) -> None:
    slots.enter(enter(0, Grammar(kind="grammar", text='start: "a" b').encode()))
    slots.enter(enter(1, MAKE.text(MAKE.choice(["x"]))))
    slots.enter(enter(2, "no grammar at all"))
    bits, failed = slots.masks(np.array([0, 1, 2], np.int32))
    assert bits is not None and set(failed) == {0, 2} and "unknown name" in failed[0]
    assert allowed(bits[1]) == [ord("x")]


def test_compiled_grammars_are_kept_and_forgotten() -> None:
    with_two = compiler()
    with_two._limit = 2
    texts = [MAKE.text(MAKE.choice([f"c{i}"])) for i in range(5)]
    for text in texts:
        with_two.open(text)
    for text in texts:
        until = time.monotonic() + 10
        while not with_two.ready(text):
            with_two.wait(0.1)
            assert time.monotonic() < until
    assert len(with_two._entries) == 5, "all are held"
    for text in texts:
        with_two.close(text)
    assert list(with_two._entries) == texts[-2:]
    with_two.shut()


def test_a_compilation_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = compiler()
    slow._timeout_s = 0.02
    monkeypatch.setattr(slow, "_compile", lambda text: time.sleep(0.2))
    slow.open("g")
    time.sleep(0.05)
    with pytest.raises(RequestError, match=r"within 0\.02 s"):
        slow.ready("g")
    slow.shut()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name.split(".")[0] == "llguidance":
            raise ImportError(name)
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"tradewind\[structured\]"):
        StructuredOutput(byte_tokenizer()).regex("a")
    lacking = compiler()
    text = Grammar(kind="regex", text='start: "a"').encode()
    lacking.open(text)
    lacking.shut()  # waits for what is being compiled
    with pytest.raises(RequestError, match=r"tradewind\[structured\]"):
        lacking.ready(text)


def test_the_vocabulary_is_the_tokenizers() -> None:
    tokenizer = byte_tokenizer()
    table = vocabulary(tokenizer)
    assert table.tokens[65] == b"A" and EOS in table.special_ids and set(table.eos_ids) == {EOS, END}


def test_limits_can_be_set() -> None:
    tight = StructuredOutput(byte_tokenizer(), limits=SchemaLimits(depth=2))
    with pytest.raises(RequestError, match="deeper than 2"):
        tight.json_schema(nested(4))


def test_markers_that_are_special_tokens_are_named_by_id(slots: GrammarSlots) -> None:
    """<|im_start|> (257) stands for a call token here."""
    mark = "<|im_start|>"
    hint = GrammarHint(begin=mark, before_name="call:", after_name="=", trigger=mark, tokens=(mark,))
    auto = MAKE.tools(check_tools(TOOLS, "auto"), hint)
    forced = MAKE.tools(check_tools(TOOLS, "required"), hint, parallel=False)
    assert auto is not None and forced is not None
    assert feed(slots, MAKE.text(forced), [257, *b"call:clock={}"]) == "complete"
    assert feed(slots, MAKE.text(auto), [*b"hm ", 257, *b"call:clock={}"]) in ("may end", "complete")
    assert feed(slots, MAKE.text(auto), b"free <|im_start|> as text") == "may end"
    assert feed(slots, MAKE.text(auto), [*b"hm ", 257, *b"x"]) == "refused at 4"
    inside = GrammarHint(before_name=f"{mark}call:", after_name="=", trigger=f"{mark}call:", tokens=(mark,))
    with pytest.raises(RequestError, match="auto"):
        MAKE.tools(check_tools(TOOLS, "auto"), inside)
