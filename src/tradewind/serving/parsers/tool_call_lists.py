"""Granite 3 and Phi 4 mini: a list of JSON calls behind `<|tool_call|>`, `[{"name": ..., "arguments": {...}}, ...]`.

Phi closes it with `<|/tool_call|>`, and where its prompt asks so it writes `functools[...]` instead.
"""

from __future__ import annotations

from tradewind.serving.parsers.json_calls import JsonCalls
from tradewind.serving.parsers.parser import GrammarHint

BEGIN, END = "<|tool_call|>", "<|/tool_call|>"
FUNCTOOLS = "functools"
TOOLS = "<|tool|>"
"""Before the tools in Phi's prompts, whose template shows no calls."""

GRANITE_HINT = GrammarHint(
    begin=BEGIN + "[",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_arguments="}",
    between=", ",
    end="]",
    trigger=BEGIN,
    tokens=(BEGIN,),
)
PHI_HINT = GrammarHint(
    begin=BEGIN + "[",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_arguments="}",
    between=", ",
    end="]" + END,
    trigger=BEGIN,
    tokens=(BEGIN, END),
)


class GraniteParser(JsonCalls):
    """A list of calls behind the token."""

    openers = (BEGIN,)


class PhiParser(JsonCalls):
    """The same, closed by a token, or behind a word."""

    openers = (BEGIN, FUNCTOOLS)
    closer = END
