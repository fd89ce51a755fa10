"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and since tokenizer v11 `[TOOL_CALLS]name[ARGS]{...}` for each.

Also understood: `[CALL_ID]id` between name and arguments, a missing `[ARGS]`, one object without its list.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tradewind.serving.parsers.json_calls import JsonCalls
from tradewind.serving.parsers.json_reader import MAX_NAME
from tradewind.serving.parsers.parser import GrammarHint, short_call_id

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

HINT = GrammarHint(
    begin=BEGIN + " [",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_arguments="}",
    between=", ",
    end="]",
    trigger=BEGIN,
    tokens=(BEGIN,),
)
HINT_V11 = GrammarHint(before_name=BEGIN, after_name=ARGUMENTS, trigger=BEGIN, tokens=(BEGIN, CALL_ID, ARGUMENTS))

_WORD = re.compile(r"[\w.\-]*")


class MistralParser(JsonCalls):
    """Both spellings, told apart by what follows the marker."""

    openers = (BEGIN,)

    _name = ""
    _given_id: str | None = None

    def fresh_id(self) -> str:
        """See Machine."""
        return short_call_id()

    def _opens(self, marker: str) -> Callable[[], bool]:
        return self._which

    def _which(self) -> bool:
        """State: JSON or a name follows the marker."""
        if not self._skip_space():
            return False
        self._state = self._calls_open if self._buffer[self._at] in "[{" else self._named
        return True

    def _named(self) -> bool:
        """State: a name must follow."""
        name = self._word()
        if name is None:
            return False
        if not name:
            return self._give_back()
        self._name, self._given_id = name, None
        self._state = self._identified
        return True

    def _identified(self) -> bool:
        """State: an id may follow."""
        come = self._comes(CALL_ID)
        if come is not None:
            self._state = self._reads_id if come else self._marked
        return come is not None

    def _reads_id(self) -> bool:
        """State: inside the id."""
        self._given_id = self._word()
        if self._given_id is not None:
            self._state = self._marked
        return self._given_id is not None

    def _marked(self) -> bool:
        """State: the marker of the arguments follows, or is missing."""
        come = self._comes(ARGUMENTS)
        if come is not None:
            self._state = self._argued
        return come is not None

    def _argued(self) -> bool:
        """State: the arguments must follow."""
        if not self._skip_space():
            return False
        return self._call_arguments(self._name, given_id=self._given_id, then=self._text_state) or self._give_back()

    def _word(self) -> str | None:
        """Reads a name or id; None while it may go on, empty when there is none or it is too long."""
        found = _WORD.match(self._buffer, self._at)
        assert found is not None
        if len(found[0]) > MAX_NAME:
            return ""
        return None if found.end() == len(self._buffer) else self._take(found.end())
