"""Calls that a grammar forces a model without a format of its own to write, as bare JSON.

For a named tool the answer is its arguments; otherwise a call object {"name": ..., "parameters": {...}} or a list of them.
"""

from __future__ import annotations

from tradewind.serving.parsers.json_calls import JsonCalls
from tradewind.serving.parsers.parser import GrammarHint

HINT = GrammarHint(
    begin="[", before_name='{"name": "', after_name='", "parameters": ', after_arguments="}", between=", ", end="]"
)


class GuidedJsonParser(JsonCalls):
    """Bare JSON at the beginning of the answer, behind the reasoning if there is any."""

    bare = "{["
    strict = True

    def _bare_opens(self) -> bool:
        if self._forced is None:
            return super()._bare_opens()
        if self._buffer[self._at] != "{":
            self._take(self._at + 1)
            return self._give_back()
        return self._call_arguments(self._forced, then=self._text_state)
