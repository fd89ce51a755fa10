"""Python literals as JSON.

Knows: which literals mean JSON values. Refuses to know: names, calls, anything that would have to be run.

The interpreter's own parser is not used: it warns on stderr about escapes, and its limits are not ours to set.
"""

from __future__ import annotations

import re

from tradewind.serving.parsers.json_reader import MAX_DEPTH, json_text

_WORDS: dict[str, object] = {
    "False": False,
    "None": None,
    "True": True,
    "false": False,
    "null": None,
    "true": True,
}
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>[rR]?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))
    | (?P<number>[+-]?\s*(?:0[xX][0-9a-fA-F]+ | (?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)) (?![\w.])
    | (?P<word>[A-Za-z_]\w*)
    | (?P<mark>[\[\](){},:])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SHORT = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_SHORT.update((character, character) for character in "\\'\"")

Token = tuple[str, object]
"""(kind, what it stands for); kinds: `value`, `string` (joins with its neighbour), `mark`, `end`."""


def python_value(text: str) -> str | None:
    """JSON of one Python literal (also with JSON's own words in it), or None when it is none; changes nothing, runs nothing."""
    try:
        tokens = _tokens(text)
        value, at = _value(tokens, 0, depth=MAX_DEPTH)
        return json_text(value) if tokens[at][0] == "end" else None
    except ValueError:
        return None


def _tokens(text: str) -> list[Token]:
    text = text.rstrip()
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError("no token")
        at = found.end()
        kind, said = found.lastgroup, found[found.lastgroup or 0]
        if kind == "string":
            tokens.append(("string", _string(said)))
        elif kind == "number":
            tokens.append(("value", _number(said)))
        elif kind == "word":
            if said not in _WORDS:
                raise ValueError("a name")
            tokens.append(("value", _WORDS[said]))
        else:
            tokens.append(("mark", said))
    tokens.append(("end", ""))
    return tokens


def _string(literal: str) -> str:
    if literal[0] in "rR":
        return literal[2:-1]
    body = literal[1:-1]
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(found: re.Match[str]) -> str:
    octal, x, u, long, short = found.groups()
    if octal is not None:
        return chr(int(octal, 8))
    if (code := x or u or long) is not None:
        return chr(int(code, 16))  # ValueError past the last character
    return _SHORT.get(short, "\\" + short)


def _number(said: str) -> int | float:
    said = said.replace("_", "").replace(" ", "")
    if "x" in said or "X" in said:
        return int(said, 16)
    if len(digits := said.lstrip("+-")) > 1 and digits[0] == "0" and digits.isdigit():
        raise ValueError("a leading zero")
    return float(said) if set(said) & set(".eE") else int(said)


def _value(tokens: list[Token], at: int, *, depth: int) -> tuple[object, int]:
    """(the value that begins at a token, the place behind it). Raises ValueError."""
    if not depth:
        raise ValueError("nested too deeply")
    kind, said = tokens[at]
    if kind == "value":
        return said, at + 1
    if kind == "string":
        parts = []
        while tokens[at][0] == "string":
            parts.append(str(tokens[at][1]))
            at += 1
        return "".join(parts), at
    if said == "{":
        return _dict(tokens, at + 1, depth=depth - 1)
    if said == "[" or said == "(":
        items, after, comma = _items(tokens, at + 1, shut="]" if said == "[" else ")", depth=depth - 1)
        return (items if said == "[" or len(items) != 1 or comma else items[0]), after
    raise ValueError("no value")


def _items(tokens: list[Token], at: int, *, shut: str, depth: int) -> tuple[list[object], int, bool]:
    """(values up to the closing bracket, the place behind it, whether a comma stood last)."""
    items: list[object] = []
    comma = False
    while tokens[at] != ("mark", shut):
        if items and not comma:
            raise ValueError("no comma")
        item, at = _value(tokens, at, depth=depth)
        items.append(item)
        comma = tokens[at] == ("mark", ",")
        at += comma
    return items, at + 1, comma


def _dict(tokens: list[Token], at: int, *, depth: int) -> tuple[dict[str, object], int]:
    found: dict[str, object] = {}
    comma = True
    while tokens[at] != ("mark", "}"):
        if not comma:
            raise ValueError("no comma")
        key, at = _value(tokens, at, depth=depth)
        if not isinstance(key, str) or tokens[at] != ("mark", ":"):
            raise ValueError("no key")
        found[key], at = _value(tokens, at + 1, depth=depth)
        comma = tokens[at] == ("mark", ",")
        at += comma
    return found, at + 1
