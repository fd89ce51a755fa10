"""How the model of this server writes calls and reasoning, for one request: tools checked, a parser made.

Knows: the parser table and what of it is honoured without guided decoding. Refuses to know: any format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tradewind.contract.errors import RequestError
from tradewind.serving.http.errors import ApiError, api_error
from tradewind.serving.http.front import Front
from tradewind.serving.parsers.parser import Circumstances, OutputParser
from tradewind.serving.parsers.table import PARSERS, REASONING, hidden_markers, make_parser
from tradewind.serving.parsers.tools import ToolRequest, check_tools


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers of one request may hold."""

    tools: ToolRequest
    make: Callable[[str], OutputParser] | None
    """A parser for an answer to this rendered prompt; None: all text is content."""
    shows_markers: bool
    """The parser must see special tokens, so the detokenizer leaves none out."""

    @property
    def definitions(self) -> list[dict[str, Any]] | None:
        """The tools as templates read them; None when none may be called."""
        if self.tools.choice == "none":
            return None
        return [
            {"type": "function", "function": {
                "name": tool.name,
                **({} if tool.description is None else {"description": tool.description}),
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            }}
            for tool in self.tools.tools
        ]  # fmt: skip

    def skip_special(self, asked: bool | None) -> bool:
        """Whether special tokens are left out of the text."""
        return not self.shows_markers and (True if asked is None else asked)


def speech_of(front: Front, tools: Sequence[Any] | None, choice: Any, *, parallel: bool | None) -> Speech:
    """Checks tools and choice. Raises ApiError for what is wrong, and for what needs guided decoding."""
    try:
        asked = check_tools(tools, choice)
    except RequestError as error:
        raise api_error(error, param="tool_choice" if str(error).startswith("tool_choice") else "tools") from None
    if asked.forced:
        shown = "'required'" if asked.named is None else f"naming {asked.named!r}"
        raise ApiError(
            400, f"tool_choice {shown} is not supported yet: forcing a call needs guided decoding; use 'auto' or 'none'",
            param="tool_choice", code="unsupported_parameter",
        )  # fmt: skip
    if parallel is False and asked.choice == "auto":
        raise ApiError(
            400, "parallel_tool_calls false is not supported yet: keeping the model to one call needs guided decoding",
            param="parallel_tool_calls", code="unsupported_parameter",
        )  # fmt: skip
    for tool in asked.tools:
        if tool.strict and asked.choice == "auto":
            raise ApiError(
                400, f"strict of tool {tool.name!r} is not supported yet: it needs guided decoding",
                param="tools", code="unsupported_parameter",
            )  # fmt: skip
    calls = asked.choice == "auto"
    chosen = front.speech
    if calls and (chosen is None or chosen.name == "plain"):
        why = chosen.reasons[0] if chosen is not None and chosen.reasons else "no tool parser is chosen"
        raise ApiError(
            400, f"tools are not supported here: how this model writes calls is not known ({why}); start the server with a tool parser",
            param="tools", code="unsupported_parameter",
        )  # fmt: skip
    if chosen is None:
        return Speech(tools=asked, make=None, shows_markers=False)
    reasoning = REASONING[chosen.reasoning]
    if not calls and reasoning is None and chosen.name != "harmony":
        return Speech(tools=asked, make=None, shows_markers=False)
    name = chosen.name
    schemas = asked.schemas

    def make(rendered: str) -> OutputParser:
        starts_inside = reasoning is not None and reasoning.opened_by(rendered)
        return make_parser(
            name, Circumstances(tools=schemas, reasoning=reasoning, starts_inside=starts_inside, calls=calls)
        )

    tokenizer = front.tokenizer
    hidden = hidden_markers(
        name if calls or name == "harmony" else "plain",
        reasoning,
        token_id=tokenizer.token_id,
        special_ids=tokenizer.special_ids,
    )
    assert name in PARSERS
    return Speech(tools=asked, make=make, shows_markers=bool(hidden))
