"""Hermes and Qwen 2.5/3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call.

Also understood: several objects or a list inside one pair of markers, a missing last brace or end marker.
"""

from __future__ import annotations

from tradewind.serving.parsers.json_calls import JsonCalls
from tradewind.serving.parsers.parser import GrammarHint

BEGIN, END = "<tool_call>", "</tool_call>"

HINT = GrammarHint(
    before_name=BEGIN + '\n{"name": "',
    after_name='", "arguments": ',
    after_arguments="}\n" + END,
    between="\n",
    trigger=BEGIN,
    tokens=(BEGIN, END),
)


class HermesParser(JsonCalls):
    """Calls between `<tool_call>` and `</tool_call>`."""

    openers = (BEGIN,)
    closer = END
