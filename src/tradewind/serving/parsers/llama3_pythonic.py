"""Llama 3.2 and 4: the answer is a Python list of calls, `[f(a=1), g()]`, in Llama 4 between `<|python_start|>` and `<|python_end|>`.

A list at the very beginning of the answer is one of calls only if it names tools that exist. Arguments are keyword arguments with
literal values; each is given out when it is whole, converted to JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from tradewind.serving.parsers.json_reader import MAX_NAME, json_text
from tradewind.serving.parsers.machine import Machine, skip
from tradewind.serving.parsers.parser import GrammarHint
from tradewind.serving.parsers.python_values import python_value

BEGIN, END = "<|python_start|>", "<|python_end|>"

HINT = GrammarHint(begin="[", after_name="(", after_arguments=")", between=", ", end="]", arguments="keywords")

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_KEY = re.compile(r"[A-Za-z_]\w*")
_OPENS, _SHUTS = "([{", ")]}"


class Llama3PythonicParser(Machine):
    """A list of Python calls in, JSON out."""

    openers: ClassVar[tuple[str, ...]] = (BEGIN,)
    bare = "["

    _name = ""
    _key = ""
    _arguments_said = 0
    _depth = 0
    _quote = ""
    _escaped = False
    _scanned = 0  # how much of the value behind `_at` has been looked at

    def _opens(self, marker: str) -> Callable[[], bool]:
        return self._list_opens

    def _bare_opens(self) -> bool:
        self._state = self._list_opens
        return True

    def _list_opens(self) -> bool:
        """State: a list must follow."""
        come = self._comes("[", after_space=True)
        if come is False:
            return self._give_back()
        if come:
            self._state = self._named
        return come is not None

    def _word(self, pattern: re.Pattern[str], then: str) -> str | None:
        """Reads a word and the character behind it; None while it may go on, empty when something else stands there."""
        if not self._skip_space():
            return None
        found = pattern.match(self._buffer, self._at)
        if found is None or len(found[0]) > MAX_NAME:
            return ""
        place = skip(self._buffer, found.end())
        if place == len(self._buffer):
            return None
        if self._buffer[place] != then:
            return ""
        self._take(place + 1)
        return found[0]

    def _named(self) -> bool:
        """State: a call's name must follow."""
        if self._skip_space() and self._calls and self._buffer[self._at] == "]":  # a comma too many
            self._state = self._between_calls
            return True
        name = self._word(_NAME, "(")
        if name is None:
            return False
        if not name or not self._accepts(name):
            return self._give_back()
        self._name, self._arguments_said = name, 0
        self._state = self._keyed
        return True

    def _keyed(self) -> bool:
        """State: a keyword or the end of the call must follow."""
        if not self._skip_space():
            return False
        if self._buffer[self._at] == ")":
            self._take(self._at + 1)
            if not self._open:
                self._begin(self._name)
            self._argue("}" if self._arguments_said else "{}")
            self._end(complete=True)
            self._suspect(1, consumed=0)
            self._state = self._between_calls
            return True
        key = self._word(_KEY, "=")
        if key is None:
            return False
        if not key:
            return self._break_off() if self._open else self._give_back()
        self._key = key
        self._depth, self._quote, self._escaped, self._scanned = 0, "", False, 0
        self._state = self._reads_value
        return True

    def _reads_value(self) -> bool:
        """State: inside a value, which ends before a comma or the end of the call."""
        buffer, place = self._buffer, self._at + self._scanned
        while place < len(buffer):
            character = buffer[place]
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character in _OPENS:
                self._depth += 1
            elif self._depth and character in _SHUTS:
                self._depth -= 1
            elif not self._depth and character in ",)]}":
                break
            place += 1
        if place == len(buffer):
            self._scanned = place - self._at
            return False
        value = python_value(buffer[self._at : place])
        if value is None or buffer[place] in "]}":
            return self._break_off(self._key + "=") if self._open else self._give_back()
        if not self._open:
            self._begin(self._name)
        self._argue(("{" if not self._arguments_said else ", ") + json_text(self._key) + ": " + value)
        self._arguments_said += 1
        self._take(place + (buffer[place] == ","))
        self._state = self._keyed
        return True

    def _between_calls(self) -> bool:
        """State: behind a call."""
        if not self._skip_space():
            return False
        character = self._buffer[self._at]
        if character not in ",]":
            return self._give_back()
        self._take(self._at + 1)
        if character == ",":
            self._state = self._named
        else:
            self._raw.clear()
            self._back = 0
            self._state = self._list_closes
        return True

    def _list_closes(self) -> bool:
        """State: the closing marker may follow."""
        if self._comes(END, after_space=True) is None:
            return False
        self._state = self._text_state
        return True
