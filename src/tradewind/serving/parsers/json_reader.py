"""JSON that arrives in pieces: how far it is JSON, and what of it is a call.

Knows: the grammar of RFC 8259 as a machine that takes any cut. Refuses to know: schemas, markers, who reads the pieces.

What comes out is always JSON, or the beginning of it. Three habits of models inside strings are put right on the way, as their
meaning is plain: raw control characters are escaped, a backslash before a letter that has no escape is doubled, `\\'` becomes `'`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal, Protocol

Status = Literal["more", "done", "bad"]

SPACE = " \t\r\n"
MAX_DEPTH = 200
"""Deeper values are refused: readers of JSON recurse, ours must not be the one to break theirs."""
MAX_NAME = 256

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "true", "f": "false", "n": "null"}

# Number: state -> (digits 1-9, digit 0, '.', 'e', sign); a state not listed for a character ends the number.
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"9": "int", "0": "zero"},
    "zero": {".": "dot", "e": "e"},
    "int": {"9": "int", "0": "int", ".": "dot", "e": "e"},
    "dot": {"9": "fraction", "0": "fraction"},
    "fraction": {"9": "fraction", "0": "fraction", "e": "e"},
    "e": {"9": "exponent", "0": "exponent", "+": "sign"},
    "sign": {"9": "exponent", "0": "exponent"},
    "exponent": {"9": "exponent", "0": "exponent"},
}
_NUMBER_ENDS = frozenset({"zero", "int", "fraction", "exponent"})
_NUMBER_CLASS = {**dict.fromkeys("123456789", "9"), "0": "0", ".": ".", "e": "e", "E": "e", "+": "+", "-": "+"}


class ValueReader(Protocol):
    """Reads one JSON value that arrives in pieces."""

    status: Status

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads `text` from `at`; gives (how far it was read, the JSON text of that). Stops behind the value, or before what is bad."""


class JsonReader:
    """One JSON value, character by character. One writer."""

    __slots__ = ("_escape", "_key", "_literal", "_number", "_stack", "_want", "status")

    def __init__(self) -> None:
        self.status: Status = "more"
        self._stack: list[str] = []
        self._want = "value"  # value, value_or_close, key, key_or_close, colon, next, string, escape, number, literal
        self._key = False  # the string being read is a key
        self._escape = ""  # the beginning of an escape, not given out before it is whole
        self._number = ""
        self._literal = ""

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """See ValueReader."""
        out: list[str] = []
        start = at  # text[start:at] is read and not yet in `out`
        length = len(text)
        while at < length and self.status == "more":
            want = self._want
            if want == "string":
                plain = _PLAIN.match(text, at)
                if plain is not None:
                    at = plain.end()
                    continue
                character = text[at]
                if character == '"':
                    at += 1
                    self._string_ends()
                elif character == "\\":
                    out.append(text[start:at])
                    at += 1
                    start = at
                    self._want, self._escape = "escape", "\\"
                else:
                    out += (
                        text[start:at],
                        f"\\u{ord(character):04x}" if character not in "\n\r\t" else _SHORT[character],
                    )
                    at += 1
                    start = at
                continue
            character = text[at]
            if want == "escape":
                done, used = self._escape_takes(character)
                if used:
                    at += 1
                start = at
                if done is not None:
                    out.append(done)
                    self._want = "string"
                continue
            if want == "number":
                after = _NUMBER[self._number].get(_NUMBER_CLASS.get(character, ""))
                if after is not None:
                    self._number = after
                    at += 1
                elif self._number in _NUMBER_ENDS:
                    self._value_ends()
                else:
                    self.status = "bad"
                continue
            if want == "literal":
                if self._literal[0] != character:
                    self.status = "bad"
                    continue
                at += 1
                self._literal = self._literal[1:]
                if not self._literal:
                    self._value_ends()
                continue
            if character in SPACE or self._punctuation(character, want):
                at += 1
            else:
                self.status = "bad"
        out.append(text[start:at])
        return at, "".join(out)

    def _punctuation(self, character: str, want: str) -> bool:
        """Takes one character between values; False when it cannot stand there."""
        if want == "next":
            if character == ",":
                self._want = "key" if self._stack[-1] == "{" else "value"
                return True
            if character == ("}" if self._stack[-1] == "{" else "]"):
                self._closes()
                return True
            return False
        if want == "colon":
            self._want = "value"
            return character == ":"
        if want in ("key", "key_or_close"):
            if character == '"':
                self._want, self._key = "string", True
                return True
            if character == "}" and want == "key_or_close":
                self._closes()
                return True
            return False
        if character == '"':
            self._want, self._key = "string", False
        elif character in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return False
            self._stack.append(character)
            self._want = "key_or_close" if character == "{" else "value_or_close"
        elif character == "]" and want == "value_or_close":
            self._closes()
        elif character == "-":
            self._want, self._number = "number", "minus"
        elif character in "0123456789":
            self._want, self._number = "number", "zero" if character == "0" else "int"
        elif character in _LITERALS:
            self._want, self._literal = "literal", _LITERALS[character][1:]
        else:
            return False
        return True

    def _closes(self) -> None:
        self._stack.pop()
        self._value_ends()

    def _value_ends(self) -> None:
        if self._stack:
            self._want = "next"
        else:
            self.status = "done"

    def _string_ends(self) -> None:
        if self._key:
            self._want = "colon"
        else:
            self._value_ends()

    def _escape_takes(self, character: str) -> tuple[str | None, bool]:
        """(the whole escape once it is whole, whether the character belongs to it)."""
        if len(self._escape) == 1:
            if character == "u":
                self._escape = "\\u"
                return None, True
            if character in _ESCAPES:
                return "\\" + character, True
            if character == "'":
                return "'", True
            return "\\\\", False  # a backslash that stands for itself
        if character not in _HEX:
            return "\\" + self._escape, False  # C:\users: no escape either
        self._escape += character
        return (self._escape if len(self._escape) == 6 else None), True


_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class QuotedJsonReader:
    """An object that was written as a JSON string, unwrapped: `"{\\"a\\": 1}"` gives `{"a": 1}`, `""` gives `{}`. One writer."""

    __slots__ = ("_escape", "_inner", "_opened", "_pair", "leftover", "status")

    def __init__(self) -> None:
        self.status: Status = "more"
        self.leftover = ""
        """When bad: what was read of an escape but not given out."""
        self._inner = JsonReader()
        self._opened = False
        self._escape = ""
        self._pair = ""  # the first half of a surrogate pair, as written

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """See ValueReader."""
        out: list[str] = []
        length = len(text)
        if not self._opened and at < length:
            assert text[at] == '"'
            self._opened = True
            at += 1
        while at < length and self.status == "more":
            character = text[at]
            if self._escape:
                self._escape += character
                at += 1
                self._escape_ends(out)
            elif character == "\\":
                self._escape = "\\"
                at += 1
            elif self._pair:
                self._half(out)
            elif character == '"':
                at += 1
                self._ends(out)
            else:
                plain = _PLAIN.match(text, at)
                end = plain.end() if plain is not None else at + 1
                at += self._pass(text[at:end], out)
        return at, "".join(out)

    def _pass(self, decoded: str, out: list[str]) -> int:
        """Hands text to the inner reader; gives how much of it was good."""
        used = 0
        while used < len(decoded):
            if self._inner.status == "done" or not self._begun():
                # Around the object only white space may stand.
                if decoded[used] in SPACE:
                    used += 1
                    continue
                if self._inner.status == "done" or decoded[used] != "{":
                    self.status = "bad"
                    return used
            read, given = self._inner.feed(decoded, used)
            out.append(given)
            used = read
            if self._inner.status == "bad":
                self.status = "bad"
                return used
        return used

    def _begun(self) -> bool:
        return bool(self._inner._stack) or self._inner.status != "more"

    def _escape_ends(self, out: list[str]) -> None:
        """Decodes the escape if it is whole."""
        escape = self._escape
        if escape[1] == "u":
            if len(escape) > 2 and escape[-1] not in _HEX:
                self.status, self.leftover = "bad", self._pair + escape
                return
            if len(escape) < 6:
                return
            code = int(escape[2:], 16)
            if self._pair and 0xDC00 <= code < 0xE000:
                whole = chr(0x10000 + ((int(self._pair[2:], 16) - 0xD800) << 10) + code - 0xDC00)
                escape, self._pair = self._pair + escape, ""
                self._give(whole, escape, out)
                return
            self._half(out)
            if self.status == "bad":
                self.leftover += escape
            elif 0xD800 <= code < 0xDC00:
                self._pair, self._escape = escape, ""
            else:
                self._give(escape if 0xDC00 <= code < 0xE000 else chr(code), escape, out)
            return
        decoded = _DECODED.get(escape[1])
        if decoded is None:
            self.status, self.leftover = "bad", self._pair + escape
            return
        self._half(out)
        if self.status == "bad":
            self.leftover += escape
        else:
            self._give(decoded, escape, out)

    def _half(self, out: list[str]) -> None:
        """Half a surrogate pair cannot be sent as text, but its escape can stand in a JSON string."""
        if self._pair:
            pair, self._pair = self._pair, ""
            if self._pass(pair, out) < len(pair):
                self.leftover = pair

    def _give(self, decoded: str, escape: str, out: list[str]) -> None:
        self._escape = ""
        if self._pass(decoded, out) < len(decoded):
            self.leftover = escape

    def _ends(self, out: list[str]) -> None:
        if not self._begun():
            out.append("{}")
            self.status = "done"
        else:
            self.status = self._inner.status if self._inner.status != "more" else "bad"


_DECODED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def json_text(value: object) -> str:
    """JSON of a Python value; text stays readable unless it holds half a surrogate pair. Raises ValueError for NaN and the like."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value, allow_nan=False)
    return text


def as_json(text: str) -> str | None:
    """The text if it is one whole JSON value (white space around it left out), otherwise None."""
    text = text.strip(SPACE)
    reader = JsonReader()
    end, given = reader.feed(text + " ", 0)  # the space ends a number
    return given.rstrip(SPACE) if reader.status == "done" and end >= len(text) else None


ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
CALL_KEYS = frozenset({"arguments", "function", "id", "name", "parameters", "type"})


class CallReader:
    """One call written as an object: {"name": ..., "arguments": {...}}, its keys in any order. One writer.

    Also understood: `parameters` for `arguments`, arguments as a JSON string or null, an `id`, and the wrapping
    {"type": "function", "function": {...}}. Other keys are read over, or are bad when `strict`.
    """

    def __init__(self, accepts: Callable[[str], bool], *, strict: bool = False, needs_arguments: bool = False) -> None:
        self.status: Status = "more"
        self.name: str | None = None
        self.id: str | None = None
        self.started = False
        """The arguments have begun, or are known to be none."""
        self.finished = False
        """The arguments are whole."""
        self.leftover = ""
        self._accepts = accepts
        self._strict = strict
        self._needs_arguments = needs_arguments
        self._arguments: list[str] = []
        self._value: ValueReader | None = None
        self._role = ""
        self._text: list[str] = []
        self._key = ""
        self._want = "open"  # open, key_or_close, key, colon, value, next
        self._depth = 0

    def take(self) -> str:
        """The arguments' text since the last call of this."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str, at: int) -> int:
        """Reads `text` from `at`; gives how far. Stops behind the object, or before what is bad."""
        length = len(text)
        while at < length and self.status == "more":
            if self._value is not None:
                at, given = self._value.feed(text, at)
                if self._role == "arguments":
                    self._arguments.append(given)
                    self.started = self.started or bool(given)
                elif self._role != "skip":
                    self._text.append(given)
                if self._value.status == "bad":
                    self.status = "bad"
                    self.leftover = getattr(self._value, "leftover", "")
                elif self._value.status == "done":
                    self._value_ends()
                continue
            character = text[at]
            if character in SPACE:
                at += 1
            else:
                at += self._punctuation(character)
        return at

    def _punctuation(self, character: str) -> int:
        """Takes one character between values; gives how many were used."""
        want = self._want
        if want == "value":
            return self._begin_value(character)
        if want in ("key", "key_or_close") and character == '"':
            self._read("key", JsonReader())
            return 0
        if want == "open" and character == "{":
            self._depth, self._want = 1, "key_or_close"
        elif want == "colon" and character == ":":
            self._want = "value"
        elif want == "next" and character == ",":
            self._want = "key"
        elif want in ("next", "key_or_close") and character == "}":
            self._depth -= 1
            self._want = "next"
            if self._depth == 0:
                self._object_ends()
        else:
            self.status = "bad"
        if self.status == "bad":
            return 0
        return 1

    def _begin_value(self, character: str) -> int:
        key = self._key
        if key in ARGUMENT_KEYS and not self.finished:
            if character == "{":
                self._read("arguments", JsonReader())
            elif character == '"':
                self._read("arguments", QuotedJsonReader())
            elif character == "n":
                self._read("nothing", JsonReader())
            else:
                self.status = "bad"
        elif key == "function" and character == "{":
            self._depth, self._want = self._depth + 1, "key_or_close"
            return 1
        elif key in ("name", "function") and self.name is None:
            if character == '"':
                self._read("name", JsonReader())
            else:
                self.status = "bad"
        elif key == "id" and character == '"':
            self._read("id", JsonReader())
        elif self._strict and key not in CALL_KEYS:
            self.status = "bad"
        else:
            self._read("skip", JsonReader())
        return 0

    def _read(self, role: str, reader: ValueReader) -> None:
        self._role, self._value = role, reader

    def _value_ends(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        self._value = None
        self._want = "colon" if self._role == "key" else "next"
        if self._role == "key":
            self._key = json.loads(text)
            if self._strict and self._key not in CALL_KEYS:
                self.status = "bad"
        elif self._role == "name":
            name = json.loads(text)
            if 0 < len(name) <= MAX_NAME and name.isprintable() and self._accepts(name):
                self.name = name
            else:
                self.status = "bad"
        elif self._role == "id":
            self.id = json.loads(text)
        elif self._role == "arguments":
            self.finished = True
        elif self._role == "nothing":
            self._no_arguments()

    def _object_ends(self) -> None:
        if self.name is None or (self._needs_arguments and not self.finished):
            self.status = "bad"
            return
        if not self.finished:
            self._no_arguments()
        self.status = "done"

    def _no_arguments(self) -> None:
        self._arguments.append("{}")
        self.started = self.finished = True
