"""DeepSeek V3, R1 (`function<sep>name`, arguments in a fenced block) and V3.1 (`name<sep>arguments`).

The spellings are told apart by what follows the separator. Also understood: calls without the outer pair of markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tradewind.serving.parsers.json_reader import MAX_NAME, SPACE
from tradewind.serving.parsers.machine import Machine, Markers
from tradewind.serving.parsers.parser import GrammarHint


def _token(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


CALLS_BEGIN, CALLS_END = _token("tool calls begin"), _token("tool calls end")
CALL_BEGIN, CALL_END = _token("tool call begin"), _token("tool call end")
SEPARATOR = _token("tool sep")
FENCE = "```"

_TOKENS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

HINT_V3 = GrammarHint(
    begin=CALLS_BEGIN,
    before_name=CALL_BEGIN + "function" + SEPARATOR,
    after_name="\n" + FENCE + "json\n",
    after_arguments="\n" + FENCE + CALL_END,
    between="\n",
    end=CALLS_END,
    trigger=CALLS_BEGIN,
    tokens=_TOKENS,
)
HINT_V31 = GrammarHint(
    begin=CALLS_BEGIN,
    before_name=CALL_BEGIN,
    after_name=SEPARATOR,
    after_arguments=CALL_END,
    end=CALLS_END,
    trigger=CALLS_BEGIN,
    tokens=_TOKENS,
)

_LANGUAGE = re.compile(r"[a-z]*")


class DeepSeekParser(Machine):
    """All three generations."""

    openers = (CALLS_BEGIN, CALL_BEGIN)

    _name = ""
    _kind = Markers((SEPARATOR,))

    def _opens(self, marker: str) -> Callable[[], bool]:
        return self._next_call if marker == CALLS_BEGIN else self._head

    def _next_call(self) -> bool:
        """State: a call must follow, or the end of the calls."""
        if self._calls:
            come = self._comes(CALLS_END, after_space=True)
            if come:
                self._state = self._text_state
                self._raw.clear()
                self._back = 0
            if come is not False:
                return come is True
        come = self._comes(CALL_BEGIN, after_space=True)
        if come:
            self._state = self._head
        elif come is False:
            if not self._calls or self._raw:
                return self._give_back()
            self._back = 0
            self._state = self._text_state
        return come is not None

    def _head(self) -> bool:
        """State: the kind (V3) or the name (V3.1), up to the separator."""
        place, marker = self._kind.find(self._buffer, self._at)
        if place - self._at > MAX_NAME:
            return self._give_back()
        if marker is None:
            return False
        self._name = self._take(place).strip(SPACE)
        self._take(place + len(marker))
        self._state = self._after_separator
        return True

    def _after_separator(self) -> bool:
        """State: V3.1 has its arguments here, V3 a name in a line of its own."""
        if not self._skip_space():
            return False
        self._state = self._argued if self._buffer[self._at] == "{" or self._name != "function" else self._line
        return True

    def _line(self) -> bool:
        """State: the name, up to the end of its line."""
        end = self._buffer.find("\n", self._at)
        if end < 0 and len(self._buffer) - self._at <= MAX_NAME:
            return False
        if end < 0 or end - self._at > MAX_NAME:
            return self._give_back()
        self._name = self._take(end).strip(SPACE)
        self._state = self._fence
        return True

    def _fence(self) -> bool:
        """State: the fence before the arguments follows, or is missing."""
        come = self._comes(FENCE, after_space=True)
        if come is not None:
            self._state = self._language if come else self._argued
        return come is not None

    def _language(self) -> bool:
        """State: the fence's language."""
        found = _LANGUAGE.match(self._buffer, self._at)
        assert found is not None
        if found.end() == len(self._buffer):
            return False
        self._take(found.end())
        self._state = self._argued
        return True

    def _argued(self) -> bool:
        """State: the arguments must follow; none at all are none."""
        if not self._name or not self._name.isprintable():
            return self._give_back()
        if not self._skip_space():
            return False
        if self._call_arguments(self._name, then=self._tail):
            return True
        rest = self._buffer[self._at :]
        for end in (FENCE, CALL_END):
            if rest.startswith(end):
                self._empty_call(self._name)
                self._state = self._tail
                return True
            if end.startswith(rest):
                return False
        return self._give_back()

    def _tail(self) -> bool:
        """State: behind the arguments, the end of the fence and of the call, each of which may be missing."""
        come = self._comes(FENCE, after_space=True)
        if come is False:
            come = self._comes(CALL_END, after_space=True)
            if come is not None:
                self._suspect(1, consumed=0)
                self._state = self._next_call
        return come is not None
