"""Every format against its own writer: what was written is what comes out, however the text is cut, and nothing else does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tradewind.serving.parsers import deepseek
from tradewind.serving.parsers.parser import Circumstances
from tradewind.serving.parsers.pieces import (
    Content,
    Message,
    Piece,
    Reasoning,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
    collect,
    merge,
)
from tradewind.serving.parsers.qwen3_coder import spell
from tradewind.serving.parsers.table import PARSERS, REASONING, make_parser

Call = tuple[str, dict[str, Any], str]
"""Name, arguments, arguments as they are written."""
Segment = tuple[str, Any]
"""("text", str), ("think", str) or ("calls", list of Call)."""
Written = list[tuple[str, str]]
"""(kind, text): `said` is content with its white space, everything else is not."""

MARKERS = sorted({marker for row in PARSERS.values() for marker in row.markers} | {"<think>", "</think>"})
MORE_MARKERS = [*MARKERS, "<function=f>", "<parameter=a>", "</parameter>", "</function>", "```", "```json\n", "; "]
NAMES = ["f", "get_weather", "a-b", "x1"]
PIECES_OF_MARKERS = [
    "<",
    "</",
    "<th",
    "<tool_ca",
    "<|",
    "<\uff5c",
    "[TOOL",
    "[",
    "{",
    '{"name": ',
    "}",
    "<function",
    "`",
]


# -- writers, written from the formats' descriptions and not from the parsers


def think(text: str) -> Written:
    return [("mark", f"<think>\n{text}\n</think>"), ("said", "\n\n")]


def hermes(calls: list[Call]) -> Written:
    written: Written = [("said", "\n")]
    for name, _, text in calls:
        written += [("mark", f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'), ("said", "\n")]
    return written


def llama3_json(calls: list[Call]) -> Written:
    objects = [f'{{"name": "{name}", "parameters": {text}}}' for name, _, text in calls]
    return [("mark", "<|python_tag|>" + "; ".join(objects))]


def guided(calls: list[Call]) -> Written:
    return [("mark", "[" + ", ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, _, text in calls) + "]")]


def pythonic(calls: list[Call]) -> Written:
    texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args, _ in calls]
    return [("mark", f"<|python_start|>[{', '.join(texts)}]<|python_end|>")]


def llama4(calls: list[Call]) -> Written:
    objects = [f'{{"name": "{name}", "parameters": {text}}}' for name, _, text in calls]
    return [("mark", "<|python_start|>" + "\n".join(objects) + "<|python_end|>")]


def granite(calls: list[Call]) -> Written:
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, _, text in calls]
    return [("mark", f"<|tool_call|>[{', '.join(objects)}]")]


def phi4_mini(calls: list[Call]) -> Written:
    objects = [
        f'{{"type": "function", "function": {{"name": "{name}", "arguments": {text}}}}}' for name, _, text in calls
    ]
    return [("mark", f"<|tool_call|>[{', '.join(objects)}]<|/tool_call|>")]


def mistral(calls: list[Call]) -> Written:
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, _, text in calls]
    return [("mark", "[TOOL_CALLS] [" + ", ".join(objects) + "]")]


def mistral_v11(calls: list[Call]) -> Written:
    return [("mark", "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, _, text in calls))]


def deepseek_v3(calls: list[Call]) -> Written:
    texts = [
        f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}{name}\n```json\n{text}\n```{deepseek.CALL_END}"
        for name, _, text in calls
    ]
    return [("mark", deepseek.CALLS_BEGIN + "\n".join(texts) + deepseek.CALLS_END)]


def deepseek_v31(calls: list[Call]) -> Written:
    texts = [f"{deepseek.CALL_BEGIN}{name}{deepseek.SEPARATOR}{text}{deepseek.CALL_END}" for name, _, text in calls]
    return [("mark", deepseek.CALLS_BEGIN + "".join(texts) + deepseek.CALLS_END)]


def qwen3_coder(calls: list[Call]) -> Written:
    written: Written = [("said", "\n")]
    for name, args, _ in calls:
        body = "".join(f"<parameter={key}>\n{spell(value)}\n</parameter>\n" for key, value in args.items())
        written.append(("mark", f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"))
        written.append(("said", "\n"))
    return written


def seed_oss(calls: list[Call]) -> Written:
    written: Written = [("said", "\n")]
    for name, args, _ in calls:
        body = "".join(f"<parameter={key}>{spell(value)}</parameter>\n" for key, value in args.items())
        written.append(("mark", f"<seed:tool_call>\n<function={name}>\n{body}</function>\n</seed:tool_call>"))
        written.append(("said", "\n"))
    return written


WRITERS: dict[str, Callable[[list[Call]], Written]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "granite": granite,
    "hermes": hermes,
    "json": guided,
    "llama3_json": llama3_json,
    "llama3_pythonic": pythonic,
    "llama4": llama4,
    "mistral": mistral,
    "mistral_v11": mistral_v11,
    "phi4_mini": phi4_mini,
    "qwen3_coder": qwen3_coder,
    "seed_oss": seed_oss,
}


def write(name: str, segments: Sequence[Segment]) -> tuple[str, str | None, str | None]:
    """(the answer's text, its content, its reasoning)."""
    if name == "harmony":
        return write_harmony(segments)
    written: Written = []
    for kind, value in segments:
        if kind == "text":
            written.append(("said", value))
        else:
            written += think(value) if kind == "think" else WRITERS[name](value)
    thoughts = [value for kind, value in segments if kind == "think"]
    content = "".join(text for kind, text in written if kind == "said").strip(" \t\r\n")
    # White space inside the markers, between two thoughts, is inside the reasoning.
    return "".join(text for _, text in written), content or None, "\n\n".join(thoughts) or None


def write_harmony(segments: Sequence[Segment]) -> tuple[str, str | None, str | None]:
    messages = []
    for kind, value in segments:
        if kind == "text":
            messages.append(f"<|channel|>final<|message|>{value}<|end|>")
        elif kind == "think":
            messages.append(f"<|channel|>analysis<|message|>{value}<|end|>")
        else:
            messages += [
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
                for name, _, text in value
            ]
    said = ["\n".join(value for kind, value in segments if kind == wanted) or None for wanted in ("text", "think")]
    return "<|start|>assistant".join(messages), said[0], said[1]


# -- what is written

letters = st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=6)
adversarial = st.lists(
    st.one_of(
        letters, st.sampled_from([*MORE_MARKERS, *PIECES_OF_MARKERS, '"', "\\", "\n", "\u2028", "🙂", "é", "\\u00e9"])
    ),
    max_size=6,
).map("".join)
numbers = st.one_of(st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, adversarial),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(adversarial, inner, max_size=3)),
    max_leaves=6,
)
keys = st.sampled_from(["a", "b", "city", "name", "arguments"])


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        drawn = draw(st.dictionaries(keys, values, max_size=3))
        # A property is of one type in all calls, as a schema would have it.
        arguments = {k if isinstance(v, str) else f"{k}_{type(v).__name__}": v for k, v in drawn.items()}
        text = json.dumps(
            arguments,
            ensure_ascii=draw(st.booleans()),
            indent=draw(st.sampled_from([None, 1])),
            separators=draw(st.sampled_from([(",", ":"), (", ", ": ")])),
        )
        made.append((draw(st.sampled_from(NAMES)), arguments, text))
    return made


said = adversarial.map(lambda text: text.strip()).filter(lambda text: text and not any(m in text for m in MORE_MARKERS))
segments = st.lists(
    st.one_of(
        st.tuples(st.just("text"), said), st.tuples(st.just("think"), said), st.tuples(st.just("calls"), calls())
    ),
    min_size=1,
    max_size=5,
)


def no_neighbours(parts: list[Segment]) -> list[Segment]:
    """Without a segment that follows one of its own kind: two texts would be one."""
    return [part for place, part in enumerate(parts) if not place or parts[place - 1][0] != part[0]]


def without_end_tags(value: Any) -> Any:
    """For the two formats that cannot escape: values that hold no end tag, and for Seed-OSS no line break at their ends."""
    if isinstance(value, str):
        return value.replace("</", "< /").strip("\n")
    if isinstance(value, list | tuple):
        return type(value)(without_end_tags(item) for item in value)
    if isinstance(value, dict):
        return {without_end_tags(key): without_end_tags(item) for key, item in value.items()}
    return value


def schema_of(parts: Sequence[Segment]) -> dict[str, Any]:
    """Tools whose schemas say of every argument that was written what it is."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    tools: dict[str, Any] = {name: {"type": "object", "properties": {}} for name in NAMES}
    for kind, made in parts:
        for name, arguments, _ in made if kind == "calls" else ():
            for key, value in arguments.items():
                tools[name]["properties"][key] = {"type": kinds.get(type(value), "null")}
    return tools


def ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def parse(name: str, pieces: Sequence[str], *, reason: str = "stop", **told: Any) -> list[Piece]:
    told.setdefault("reasoning", REASONING["think"])
    parser = make_parser(name, Circumstances(new_id=ids(), **told))
    out: list[Piece] = []
    for text in pieces:
        out += parser.push(text)
    out += parser.finish(reason)
    assert parser.finish(reason) == []
    assert parser.push("more") == []
    well_formed(out)
    assert parser.has_tool_calls == any(call.complete for call in collect(out).calls)
    return out


def well_formed(pieces: Sequence[Piece]) -> None:
    """Calls are numbered, begin before they end, and do not overlap; no piece is empty; complete calls parse."""
    begun, open_call = 0, None
    for piece in pieces:
        match piece:
            case ToolCallBegin():
                assert piece.index == begun and open_call is None
                open_call, begun = piece.index, begun + 1
            case ToolArguments():
                assert piece.index == open_call and piece.text
            case ToolCallEnd():
                assert piece.index == open_call
                open_call = None
            case Content() | Reasoning():
                assert piece.text and open_call is None
    assert open_call is None
    for call in collect(pieces).calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


def cut(text: str, places: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(borders)]


cuts = st.lists(st.integers(0, 100_000), max_size=12)
FORMATS = sorted(set(PARSERS) - {"plain"})


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), places=cuts)
def test_what_was_written_is_what_comes_out(name: str, data: st.DataObject, places: list[int]) -> None:
    parts = no_neighbours(data.draw(segments))
    if name == "json":  # bare JSON is a call only as the first of the content
        parts = [part for part in parts if part[0] != "text"]
        parts = sorted(parts, key=lambda part: part[0] == "calls")[:2]
        parts = no_neighbours(parts)
        assume(parts)
    if name == "harmony":
        assume(not any("<|" in str(part[1]) for part in parts if part[0] == "text"))
    if name in ("qwen3_coder", "seed_oss"):
        parts = [(kind, without_end_tags(value) if kind == "calls" else value) for kind, value in parts]
    tools = schema_of(parts)
    text, content, reasoning = write(name, parts)
    whole = merge(parse(name, [text], tools=tools))
    assert merge(parse(name, cut(text, places), tools=tools)) == whole
    assert merge(parse(name, list(text), tools=tools)) == whole

    message = collect(whole)
    written = [call for kind, made in parts if kind == "calls" for call in made]
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [(n, a) for n, a, _ in written]
    assert all(call.complete for call in message.calls)
    if name not in ("qwen3_coder", "seed_oss", "llama3_pythonic"):
        assert [call.arguments for call in message.calls] == [text for _, _, text in written]
    assert message.content == content
    assert message.reasoning == reasoning


@settings(max_examples=60, deadline=None)
@given(data=st.data(), places=cuts, marked=st.booleans())
def test_llama4_reads_python_calls_as_its_elder_does(data: st.DataObject, places: list[int], marked: bool) -> None:
    made = data.draw(calls())
    tools = schema_of([("calls", made)])
    ((_, text),) = pythonic(made)
    if not marked:
        text = text.removeprefix("<|python_start|>").removesuffix("<|python_end|>")
    whole = merge(parse("llama4", cut(text, places), tools=tools))
    assert whole == merge(parse("llama3_pythonic", [text], tools=tools))
    assert [(call.name, json.loads(call.arguments)) for call in collect(whole).calls] == [(n, a) for n, a, _ in made]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), places=cuts, end=st.integers(0, 100_000))
def test_a_cut_answer_is_a_beginning_of_the_whole_one(
    name: str, data: st.DataObject, places: list[int], end: int
) -> None:
    parts = no_neighbours(data.draw(segments))
    tools = schema_of(parts)
    text, _, _ = write(name, parts)
    whole = collect(parse(name, [text], tools=tools))
    shorter = text[: end % (len(text) + 1)]
    pieces = merge(parse(name, list(shorter), reason="length", tools=tools))
    assert pieces == merge(parse(name, [shorter], reason="length", tools=tools))
    assert pieces == merge(parse(name, cut(shorter, places), reason="length", tools=tools))
    found = collect(pieces)
    assert len(found.calls) <= len(whole.calls)
    for ours, theirs in zip(found.calls, whole.calls, strict=False):
        assert ours.name == theirs.name
        assert theirs.arguments.startswith(ours.arguments)
        assert ours.complete or ours.why == "cut"
    for call in found.calls[:-1]:
        assert call.complete
    thought = found.reasoning or ""
    for marker in ("</think>", "<|end|>", "<|start|>"):
        # The beginning of a marker at the very end is text: nobody knows what it would have become.
        for length in range(1, len(marker)):
            if shorter.endswith(marker[:length]) and thought.endswith(marker[:length]):
                thought = thought[:-length]
                break
    assert (whole.reasoning or "").startswith(thought.rstrip(" \n"))


soup = st.lists(
    st.one_of(
        st.sampled_from(
            [*MORE_MARKERS, *PIECES_OF_MARKERS, " ", "\n", "f", "f(", "a=", "1", ")", "]", ",", ":", '"', "\\"]
        ),
        st.sampled_from(
            ['"name"', '"f"', '"arguments"', '"parameters"', "{}", '{"a": 1}', '{"name": "f", "arguments": {']
        ),
        st.sampled_from(
            ["functions.f", "to=functions.f", "analysis", "final", "[f(", "\\ud83d", "\\u00", "null", "🙂"]
        ),
        letters,
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("name", sorted(PARSERS))
@settings(max_examples=120, deadline=None)
@given(text=soup, places=cuts, known=st.booleans())
def test_soup_is_never_lost_and_never_raises(name: str, text: str, places: list[int], known: bool) -> None:
    tools: dict[str, Any] = {"f": {}} if known else {}
    for reasoning in (None, REASONING["think"]):
        whole = merge(parse(name, [text], tools=tools, reasoning=reasoning))
        assert whole == merge(parse(name, list(text), tools=tools, reasoning=reasoning))
        assert whole == merge(parse(name, cut(text, places), tools=tools, reasoning=reasoning))
        message = collect(whole)
        for piece in whole:
            if isinstance(piece, Content | Reasoning | ToolArguments):
                piece.text.encode()  # nothing comes out that cannot be sent
        if reasoning is None and name != "harmony" and not message.calls:
            assert (message.content or "") == text
    if name == "plain":
        assert Message(content=text or None, reasoning=None, calls=()) == collect(parse(name, [text], reasoning=None))
