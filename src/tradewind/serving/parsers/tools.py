"""Tool definitions and `tool_choice` as clients send them, checked before anything is computed.

Knows: the OpenAI shapes, their limits, what each choice demands. Refuses to know: how a schema is compiled (the grammar room says
which keywords it can keep), how a template shows tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tradewind.contract.errors import RequestError

_NAME = re.compile(r"[a-zA-Z0-9_-]+\Z")


class ToolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What tool definitions are held to."""

    tools: int = 128
    name_characters: int = 64
    description_characters: int = 16_384
    schema_bytes: int = 65_536
    """Of one tool's parameters as JSON."""
    schema_depth: int = 64


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """One function a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """JSON schema of an object; an empty one takes anything."""
    strict: bool = False
    """The arguments must follow the schema exactly, also under `auto`."""


class ToolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may call and must call."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    named: str | None = None
    """The tool that must be called; set exactly when the choice is `named`."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Name -> JSON schema of the parameters, of the tools that may be called."""
        if self.choice == "none":
            return {}
        return {tool.name: tool.parameters for tool in self.tools if self.named in (None, tool.name)}

    @property
    def forced(self) -> bool:
        """The answer must be a call."""
        return self.choice in ("required", "named")


def check_tools(tools: object, tool_choice: object = None, limits: ToolLimits | None = None) -> ToolRequest:
    """The tools and the choice of a request, checked; changes nothing.

    No choice means `auto` with tools and `none` without. Raises RequestError, in one sentence, naming the first thing wrong.
    """
    limits = limits or ToolLimits()
    if tools is None:
        tools = ()
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list, not {_type(tools)}")
    if len(tools) > limits.tools:
        raise RequestError(f"{len(tools)} tools were given; at most {limits.tools} are allowed")
    checked: dict[str, Tool] = {}
    for place, tool in enumerate(tools):
        one = _tool(tool, place, limits)
        if one.name in checked:
            raise RequestError(
                f"tools[{place}] has the name {one.name!r}, which an earlier tool has too; names must differ"
            )
        checked[one.name] = one
    choice, named = _choice(tool_choice, checked)
    return ToolRequest(tools=tuple(checked.values()), choice=choice, named=named)


def _tool(tool: object, place: int, limits: ToolLimits) -> Tool:
    where = f"tools[{place}]"
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object with type and function, not {_type(tool)}")
    if (kind := tool.get("type", "function")) != "function":
        raise RequestError(f"{where} has the type {_show(kind)}; only 'function' is known")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object with a name, not {_type(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > limits.name_characters:
        raise RequestError(
            f"{where}.function.name is {_show(name)}; it must be 1 to {limits.name_characters} of a-z, A-Z, 0-9, _ and -"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"the description of tool {name!r} must be text, not {_type(description)}")
    if description is not None and len(description) > limits.description_characters:
        raise RequestError(
            f"the description of tool {name!r} has {len(description)} characters;"
            f" at most {limits.description_characters} are allowed"
        )
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"strict of tool {name!r} must be true or false, not {_show(strict)}")
    return Tool(
        name=name,
        description=description,
        parameters=_parameters(function.get("parameters"), name, limits),
        strict=bool(strict),
    )


def _parameters(schema: object, name: str, limits: ToolLimits) -> dict[str, Any]:
    if schema is None:
        return {}
    if not isinstance(schema, Mapping):
        raise RequestError(f"the parameters of tool {name!r} must be a JSON schema of an object, not {_type(schema)}")
    depth = _depth(schema, limits.schema_depth)
    if depth > limits.schema_depth:
        raise RequestError(
            f"the parameters of tool {name!r} are nested more than {limits.schema_depth} levels deep; make them flatter"
        )
    try:
        size = len(msgspec.json.encode(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the parameters of tool {name!r} are no JSON: {error}") from None
    if size > limits.schema_bytes:
        raise RequestError(
            f"the parameters of tool {name!r} are {size} bytes of JSON; at most {limits.schema_bytes} are allowed"
        )
    kind = schema.get("type")
    combined = any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf"))
    if schema and kind != "object" and not (kind is None and (combined or "properties" in schema)):
        raise RequestError(
            f"the parameters of tool {name!r} have the type {_show(kind)}; arguments are an object, so it must be 'object'"
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"the properties of tool {name!r} must be an object, not {_type(properties)}")
    for key, value in properties.items():
        if not isinstance(value, Mapping | bool):
            raise RequestError(f"property {key!r} of tool {name!r} must be a JSON schema, not {_type(value)}")
    required = schema.get("required", ())
    if isinstance(required, str) or not isinstance(required, Sequence) or not all(isinstance(k, str) for k in required):
        raise RequestError(f"required of tool {name!r} must be a list of property names, not {_show(required)}")
    return dict(schema)


def _depth(value: object, limit: int) -> int:
    """How deeply containers are nested, counted up to one more than `limit`, without recursion."""
    level, depth = [value], 0
    while level and depth <= limit:
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        depth += 1
        level = [item for item in inner if isinstance(item, Mapping | list | tuple)]
    return depth


def _choice(
    choice: object, tools: Mapping[str, Tool]
) -> tuple[Literal["none", "auto", "required", "named"], str | None]:
    if choice is None:
        return ("auto" if tools else "none"), None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise RequestError(
                f"tool_choice is {_show(choice)}; it must be 'none', 'auto', 'required', or an object naming a function"
            )
        if choice == "required" and not tools:
            raise RequestError("tool_choice is 'required', but no tools were given; give at least one")
        # 'auto' without tools is common among clients and can only mean that nothing is called.
        return ("none" if choice == "none" or not tools else "auto" if choice == "auto" else "required"), None
    if not isinstance(choice, Mapping):
        raise RequestError(f"tool_choice must be text or an object naming a function, not {_type(choice)}")
    if (kind := choice.get("type", "function")) != "function":
        raise RequestError(f"tool_choice has the type {_show(kind)}; only 'function' is known")
    function = choice.get("function", choice)  # the responses API has the name beside the type
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError('tool_choice must name a function as {"type": "function", "function": {"name": ...}}')
    if name not in tools:
        known = ", ".join(tools) if tools else "none were given"
        raise RequestError(
            f"tool_choice names the function {_show(name)}, which is not among the tools ({known[:500]})"
        )
    return "named", name


_TYPES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}


def _type(value: object) -> str:
    return "an object" if isinstance(value, Mapping) else _TYPES.get(type(value), type(value).__name__)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
