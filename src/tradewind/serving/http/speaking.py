"""What the answers of one request may and must hold: tools checked, their parser made, and a grammar where one is demanded.

Knows: the fields that ask for a form, the parser table. Refuses to know: any format, how a grammar is written (structured) or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tradewind.contract.errors import UserError
from tradewind.contract.request import Request
from tradewind.serving.http.errors import ApiError, api_error
from tradewind.serving.http.front import Front
from tradewind.serving.http.types import Sampling
from tradewind.serving.parsers.parser import Circumstances, OutputParser
from tradewind.serving.parsers.table import PARSERS, REASONING, hidden_markers, make_parser
from tradewind.serving.parsers.tools import ToolRequest, check_tools
from tradewind.serving.structured import Shape, StructuredOutput

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
SLOW = 1 << 40
"""Counts as so many characters: a grammar is checked by its compiler, which is not done in the event loop."""


class Speech(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers of one request may hold."""

    tools: ToolRequest
    make: Callable[[str], OutputParser] | None
    """A parser for an answer to this rendered prompt; None: all text is content."""
    shows_markers: bool
    """The parser must see special tokens, so the detokenizer leaves none out."""
    grammar: Callable[[str], str] | None = None
    """The text for `Request.grammar` of an answer to this rendered prompt; raises ApiError."""

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

    def constrained(self, requests: Sequence[Request], rendered: str) -> list[Request]:
        """The requests, with their grammar where there is one. Raises ApiError."""
        if self.grammar is None:
            return list(requests)
        grammar = self.grammar(rendered)
        return [msgspec.structs.replace(request, grammar=grammar) for request in requests]


def demands(
    body: Sampling,
    form: Mapping[str, Any] | None,
    tools: Sequence[Any] = (),
    choice: Any = None,
    parallel: bool | None = None,
) -> bool:
    """Whether a request may need a grammar: then it is prepared in a thread."""
    return (
        any(getattr(body, name) is not None for name in GUIDED)
        or (form is not None and form.get("type") != "text")
        or (bool(tools) and (choice not in (None, "auto", "none") or parallel is False))
        or any(tool.get("function", {}).get("strict") for tool in tools)
    )


def form_of(
    front: Front, body: Sampling, form: Mapping[str, Any] | None, *, field: str = "response_format"
) -> Shape | None:
    """The form a request asks its answer to have; None for free text. Raises ApiError naming the field."""
    given = [name for name in GUIDED if getattr(body, name) is not None]
    if form is not None and form.get("type") != "text":
        given.append(field)
    if not given:
        return None
    name = given[0]
    if len(given) > 1:
        raise ApiError(400, f"{name} and {given[1]} exclude each other; give one", param=given[1], code="invalid_value")
    structured = front.structured
    if structured is None:
        raise _no_grammars(name, param=name)
    value = form if name == field else getattr(body, name)
    make: dict[str, Callable[..., Shape | None]] = {
        "guided_choice": structured.choice,
        "guided_grammar": structured.grammar,
        "guided_json": structured.json_schema,
        "guided_regex": structured.regex,
        "structural_tag": structured.structural_tag,
        field: structured.response_format,
    }
    try:
        return make[name](value, name=name)
    except UserError as error:
        raise api_error(error, param=name) from None


def _no_grammars(what: str, *, param: str) -> ApiError:
    return ApiError(
        400,
        f"{what} is not supported here: it needs guided decoding, which this server was started without",
        param=param,
        code="unsupported_parameter",
    )


def speech_of(
    front: Front, tools: Sequence[Any] | None, choice: Any, *, parallel: bool | None, form: Shape | None = None
) -> Speech:
    """Checks tools and choice. Raises ApiError for what is wrong, and for what needs a grammar where none can be made."""
    try:
        asked = check_tools(tools, choice)
    except UserError as error:
        raise api_error(error, param="tool_choice" if str(error).startswith("tool_choice") else "tools") from None
    demanded = _demanded(asked, parallel)
    structured = front.structured
    if demanded is not None and structured is None:
        raise _no_grammars(demanded[1], param=demanded[0])
    chosen = front.speech
    format_ = "plain" if chosen is None else chosen.name
    calls = asked.choice != "none"
    if calls and format_ == "plain":
        if not asked.forced:
            why = chosen.reasons[0] if chosen is not None and chosen.reasons else "no tool parser is chosen"
            raise ApiError(
                400, f"tools are not supported here: how this model writes calls is not known ({why}); start the server with a tool parser",
                param="tools", code="unsupported_parameter",
            )  # fmt: skip
        format_ = "json"  # forced, any model can write a call
    reasoning = None if chosen is None else REASONING[chosen.reasoning]
    shape = form
    if structured is not None and calls:
        try:
            shape = structured.tools(
                asked,
                PARSERS[format_].grammar_hint,
                parallel=parallel is not False,
                bare=format_ == "json",
                beside=form,
            )
        except UserError as error:
            raise api_error(error, param=demanded[0] if demanded is not None else "tools") from None

    def grammar(rendered: str) -> str:
        assert structured is not None and shape is not None
        return _grammar(
            structured, shape, reasoning=chosen.reasoning if chosen is not None else "none", rendered=rendered
        )

    text = grammar if shape is not None else None
    if not calls and reasoning is None and format_ != "harmony":
        return Speech(tools=asked, make=None, shows_markers=False, grammar=text)
    schemas = asked.schemas
    forced = asked.named if format_ == "json" else None

    def make(rendered: str) -> OutputParser:
        starts_inside = reasoning is not None and reasoning.opened_by(rendered)
        return make_parser(
            format_,
            Circumstances(tools=schemas, reasoning=reasoning, starts_inside=starts_inside, calls=calls, forced=forced),
        )

    tokenizer = front.tokenizer
    hidden = hidden_markers(
        format_ if calls or format_ == "harmony" else "plain",
        reasoning,
        token_id=tokenizer.token_id,
        special_ids=tokenizer.special_ids,
    )
    return Speech(tools=asked, make=make, shows_markers=bool(hidden), grammar=text)


def _grammar(structured: StructuredOutput, shape: Shape, *, reasoning: str, rendered: str) -> str:
    markers = REASONING[reasoning]
    try:
        return structured.text(
            shape, reasoning=markers, starts_inside=markers is not None and markers.opened_by(rendered)
        )
    except UserError as error:
        raise api_error(error, param=shape.name) from None


def _demanded(asked: ToolRequest, parallel: bool | None) -> tuple[str, str] | None:
    """(the field, how it is said) of what tools and choice demand of the answer; None when they demand nothing."""
    if asked.forced:
        shown = "'required'" if asked.named is None else f"naming {asked.named!r}"
        return "tool_choice", f"tool_choice {shown}"
    if asked.choice == "auto" and parallel is False:
        return "parallel_tool_calls", "parallel_tool_calls false"
    strict = next((tool.name for tool in asked.tools if tool.strict), None)
    if asked.choice == "auto" and strict is not None:
        return "tools", f"strict of tool {strict!r}"
    return None
