"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, and Seed-OSS, whose outer
markers are `<seed:tool_call>` and whose values stand without line breaks around them.

Values are text without any escaping; the tool's schema says which of them are strings. Those are streamed; others are read as
JSON, or as the Python literals models fall into, when they are whole. What fits neither stays a string.
Also understood: a missing `<tool_call>` or `</parameter>`. An end tag inside a value is text unless a tag follows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tradewind.serving.parsers.json_reader import MAX_NAME, SPACE, as_json, json_text
from tradewind.serving.parsers.machine import Machine, skip
from tradewind.serving.parsers.parser import GrammarHint
from tradewind.serving.parsers.python_values import python_value

BEGIN, END = "<tool_call>", "</tool_call>"
SEED_BEGIN, SEED_END = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

HINT = GrammarHint(
    before_name=BEGIN + "\n" + FUNCTION,
    after_name=">\n",
    after_arguments=FUNCTION_END + "\n" + END,
    between="\n",
    arguments="parameters",
    parameter=(PARAMETER, ">\n", "\n" + PARAMETER_END + "\n"),
    trigger=BEGIN,
    tokens=(BEGIN, END),
)

HINT_SEED = GrammarHint(
    before_name=SEED_BEGIN + "\n" + FUNCTION,
    after_name=">\n",
    after_arguments=FUNCTION_END + "\n" + SEED_END,
    between="\n",
    arguments="parameters",
    parameter=(PARAMETER, ">", PARAMETER_END + "\n"),
    trigger=SEED_BEGIN,
    tokens=(SEED_BEGIN, SEED_END),
)

_VALUE_ENDS = (PARAMETER_END, FUNCTION_END)
_MAY_END = re.compile("|".join(_VALUE_ENDS))
_LONGEST = max(map(len, (*_VALUE_ENDS, PARAMETER, SEED_END)))


class Qwen3CoderParser(Machine):
    """Tags and plain values in, JSON out."""

    openers = (BEGIN, FUNCTION)
    begin, end = BEGIN, END

    _schema: Mapping[str, Any] = {}
    _wrapped = False
    _parameters = 0
    _key = ""
    _streams = False  # the value is a string and given out as it comes
    _value: list[str]

    def _opens(self, marker: str) -> Callable[[], bool]:
        self._wrapped = marker == self.begin
        return self._function if self._wrapped else self._named

    def _function(self) -> bool:
        """State: a function must follow."""
        come = self._comes(FUNCTION, after_space=True)
        if come is False:
            return self._give_back()
        if come:
            self._state = self._named
        return come is not None

    def _named(self) -> bool:
        """State: the function's name."""
        name = self._tag_name()
        if name is None:
            return False
        if not name:
            return self._give_back()
        self._begin(name)
        found = self._tools.get(name, {}).get("properties")
        self._schema = found if isinstance(found, Mapping) else {}
        self._parameters = 0
        self._state = self._inside
        return True

    def _tag_name(self) -> str | None:
        """Reads a name and the `>` behind it; None while it may go on, empty when it is none."""
        buffer = self._buffer
        end = buffer.find(">", self._at)
        name = buffer[self._at : end if end >= 0 else len(buffer)]
        bare = name.strip(SPACE)
        if len(name) > MAX_NAME or "<" in name or (bare and not bare.isprintable()) or (end >= 0 and not bare):
            return ""
        if end < 0:
            return None
        self._take(end + 1)
        return bare

    def _inside(self) -> bool:
        """State: a parameter or the function's end must follow."""
        come = self._comes(PARAMETER, after_space=True)
        if come:
            self._state = self._keyed
            return True
        ends = self._comes(FUNCTION_END, after_space=True)
        if ends:
            self._finish_call()
            return True
        if come is None or ends is None:
            return False
        if self._wrapped and (ends := self._comes(self.end, after_space=True)) is not False:
            if ends:
                self._finish_call()
                self._state = self._text_state
            return bool(ends)
        return self._break_off()

    def _finish_call(self) -> None:
        self._argue("}" if self._parameters else "{}")
        self._end(complete=True)
        self._state = self._closes if self._wrapped else self._text_state

    def _closes(self) -> bool:
        """State: the closing marker follows, or is missing."""
        if self._comes(self.end, after_space=True) is None:
            return False
        self._state = self._text_state
        return True

    def _keyed(self) -> bool:
        """State: the parameter's name."""
        key = self._tag_name()
        if key is None:
            return False
        if not key:
            return self._break_off(PARAMETER)
        self._key = key
        self._value = []
        self._streams = _types(self._schema.get(key)) == {"string"}
        self._state = self._value_opens
        return True

    def _value_opens(self) -> bool:
        """State: the line break before the value."""
        come = self._comes("\n")
        if come is None:
            return False
        if self._streams:
            self._argue_key('"')
        self._state = self._reads_value
        return True

    def _argue_key(self, then: str) -> None:
        self._argue(("{" if not self._parameters else ", ") + json_text(self._key) + ": " + then)
        self._parameters += 1

    def _reads_value(self) -> bool:
        """State: inside a value."""
        buffer = self._buffer
        end, ended = self._value_end()
        safe = end - 1 if end > self._at and buffer[end - 1] == "\n" else end
        text = self._take(safe)
        if self._streams:
            self._argue(json_text(text)[1:-1])
        else:
            self._value.append(text)
        if ended is None:
            return False
        if self._streams:
            self._argue('"')
        else:
            self._argue_key(convert("".join(self._value), self._schema.get(self._key)))
        self._take(end + (len(ended) if ended == PARAMETER_END else 0))
        self._state = self._inside
        return True

    def _value_end(self) -> tuple[int, str | None]:
        """(where the value ends, its end tag), or (where it may be ending, None)."""
        buffer = self._buffer
        for found in _MAY_END.finditer(buffer, self._at):
            place = skip(buffer, found.end())
            # What must follow an end tag, white space aside, for it to be one.
            follows = (PARAMETER, FUNCTION_END, self.end) if found[0] == PARAMETER_END else (self.end,)
            if any(buffer.startswith(tag, place) for tag in follows):
                return found.start(), found[0]
            rest = buffer[place : place + _LONGEST]
            if any(tag.startswith(rest) for tag in follows):
                return found.start(), None
        for place in range(max(self._at, len(buffer) - _LONGEST + 1), len(buffer)):
            if buffer[place] == "<" and any(tag.startswith(buffer[place:]) for tag in _VALUE_ENDS):
                return place, None
        return len(buffer), None


class SeedParser(Qwen3CoderParser):
    """The same between other markers."""

    openers = (SEED_BEGIN, FUNCTION)
    begin, end = SEED_BEGIN, SEED_END


def _types(schema: object) -> set[str]:
    """The JSON types a schema allows, as far as it says so plainly; empty when it does not."""
    if not isinstance(schema, Mapping):
        return set()
    said = schema.get("type")
    if isinstance(said, str):
        return {said}
    if isinstance(said, list | tuple):
        return {kind for kind in said if isinstance(kind, str)}
    for union in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(union), list | tuple):
            kinds = [_types(branch) for branch in branches]
            return set().union(*kinds) if all(kinds) else set()
    if isinstance(values := schema.get("enum"), list | tuple) and values:
        return {"string"} if all(isinstance(value, str) for value in values) else set()
    return set()


def convert(text: str, schema: object) -> str:
    """The JSON of a value that was written as plain text; changes nothing and never fails: what is nothing else is a string."""
    types = _types(schema)
    found = as_json(text) or python_value(text)
    if found is None:
        return json_text(text)
    kind = _kind(found)
    if types:
        fits = kind in types or (kind == "integer" and "number" in types)
        return found if fits or "string" not in types else json_text(text)
    return json_text(text) if kind == "string" else found


def _kind(text: str) -> str:
    """The JSON type of a JSON text."""
    match text[0]:
        case "{":
            return "object"
        case "[":
            return "array"
        case '"':
            return "string"
        case "n":
            return "null"
        case "t" | "f":
            return "boolean"
        case _:
            return "number" if set(text) & set(".eE") else "integer"


def spell(value: object) -> str:
    """A value as the format writes it: strings as they are, everything else as JSON; changes nothing."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
