"""Llama 4: `{"name": ..., "parameters": {...}}`, one or several, or `[f(a=1), g()]`; as the whole answer, or behind `<|python_start|>`.

Which of the two a model writes is what its prompt asks for; published templates ask for JSON, and show calls of earlier turns as JSON
behind `<|python_start|>text<|python_end|>`. Code between these markers is content. Without a marker only what begins the answer can be
a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tradewind.serving.parsers.json_calls import JsonCalls
from tradewind.serving.parsers.llama3_json import HINT as HINT
from tradewind.serving.parsers.llama3_pythonic import BEGIN, END, Llama3PythonicParser
from tradewind.serving.parsers.machine import skip


class Llama4Parser(Llama3PythonicParser, JsonCalls):
    """Both spellings, told apart by their first characters."""

    openers: ClassVar[tuple[str, ...]] = (BEGIN, END)
    bare = "[{"
    closer = END
    separators = ";"
    strict = True

    def _opens(self, marker: str) -> Callable[[], bool]:
        return self._which if marker == BEGIN else self._object

    def _bare_opens(self) -> bool:
        self._state = self._which
        return True

    def _which(self) -> bool:
        """State: an object, a list of objects, or a list of Python calls must follow."""
        if not self._skip_space():
            return False
        buffer = self._buffer
        inside = self._at
        if buffer[self._at] == "[":
            inside = skip(buffer, self._at + 1)
            if inside == len(buffer):
                return False
        self._state = self._calls_open if buffer[inside] == "{" else self._list_opens
        return True

    def _object(self) -> bool:
        """State: an object must follow, behind text that stood between the markers."""
        if not self._skip_space():
            return False
        if self._buffer[self._at] != "{":
            return self._give_back()
        self._state = self._calls_open
        return True

    def _rest(self, rest: str, reason: str) -> None:
        self._say(rest)  # a bracket that nothing followed
