"""Llama 3.1 and later: `{"name": ..., "parameters": {...}}` as the whole answer, or behind `<|python_tag|>`; several with `;`.

Without the tag only an object at the very beginning of the answer can be a call, and only if it has no other keys and names a
tool that exists; anything else is content as soon as that is seen. Code behind `<|python_tag|>` is content.
"""

from __future__ import annotations

from tradewind.serving.parsers.json_calls import JsonCalls
from tradewind.serving.parsers.parser import GrammarHint

TAG = "<|python_tag|>"

HINT = GrammarHint(before_name='{"name": "', after_name='", "parameters": ', after_arguments="}", between="; ")


class Llama3JsonParser(JsonCalls):
    """Bare objects, or objects behind the tag."""

    openers = (TAG,)
    bare = "{"
    separators = ";"
    strict = True
