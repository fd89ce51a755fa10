"""Tool definitions and choices: what is taken, and the one sentence with which everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tradewind.contract.errors import RequestError
from tradewind.serving.parsers.tools import Tool, ToolLimits, check_tools


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_tools_and_the_default_choice() -> None:
    found = check_tools([tool(description="d", parameters=SCHEMA, strict=True), tool("g")])
    assert found.tools == (Tool(name="f", description="d", parameters=SCHEMA, strict=True), Tool(name="g"))
    assert (found.choice, found.named, found.forced) == ("auto", None, False)
    assert found.schemas == {"f": SCHEMA, "g": {}}


@pytest.mark.parametrize(
    ("tools", "choice", "expected", "named"),
    [
        (None, None, "none", None),
        ([], "auto", "none", None),
        (None, "none", "none", None),
        ([tool()], "none", "none", None),
        ([tool()], "auto", "auto", None),
        ([tool()], "required", "required", None),
        ([tool()], {"type": "function", "function": {"name": "f"}}, "named", "f"),
        ([tool()], {"type": "function", "name": "f"}, "named", "f"),
    ],
)
def test_choices(tools: Any, choice: Any, expected: str, named: str | None) -> None:
    found = check_tools(tools, choice)
    assert (found.choice, found.named) == (expected, named)
    assert found.forced == (expected in ("required", "named"))
    assert bool(found.schemas) == (expected != "none")


def test_a_named_choice_leaves_one_tool_to_call() -> None:
    found = check_tools([tool(), tool("g")], {"type": "function", "function": {"name": "g"}})
    assert list(found.schemas) == ["g"]
    assert len(found.tools) == 2, "the template still shows them all"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "choice", "sentence"),
    [
        ({}, None, "tools must be a list, not an object"),
        ("f", None, "tools must be a list, not text"),
        (["f"], None, r"tools\[0\] must be an object with type and function, not text"),
        ([{"type": "retrieval"}], None, "has the type 'retrieval'; only 'function' is known"),
        ([{"type": "function"}], None, r"tools\[0\].function must be an object with a name, not null"),
        ([tool(""), tool()], None, r"tools\[0\].function.name is ''; it must be 1 to 64 of"),
        ([tool("a b")], None, "name is 'a b'"),
        ([tool("a\n")], None, r"name is 'a\\n'"),
        ([tool("é")], None, "name is 'é'"),
        ([tool("x" * 65)], None, "it must be 1 to 64"),
        ([tool(), tool()], None, r"tools\[1\] has the name 'f', which an earlier tool has too"),
        ([tool(f"f{i}") for i in range(129)], None, "129 tools were given; at most 128"),
        ([tool(description=5)], None, "description of tool 'f' must be text, not a number"),
        ([tool(strict="yes")], None, "strict of tool 'f' must be true or false"),
        ([tool(parameters=[])], None, "must be a JSON schema of an object, not a list"),
        ([tool(parameters={"type": "string"})], None, "have the type 'string'; arguments are an object"),
        ([tool(parameters={"type": "object", "properties": []})], None, "properties of tool 'f' must be an object"),
        ([tool(parameters={"type": "object", "properties": {"a": 1}})], None, "property 'a' of tool 'f' must be"),
        ([tool(parameters={"type": "object", "required": "a"})], None, "required of tool 'f' must be a list"),
        ([tool(parameters=nested(40))], None, "nested more than 64 levels deep"),
        ([tool(parameters=nested(50_000))], None, "nested more than 64 levels deep"),
        ([tool(parameters={"type": "object", "x": "y" * 70_000})], None, "bytes of JSON; at most 65536"),
        ([tool()], "sometimes", "tool_choice is 'sometimes'; it must be 'none', 'auto', 'required'"),
        ([tool()], 3, "tool_choice must be text or an object naming a function, not a number"),
        ([], "required", "tool_choice is 'required', but no tools were given"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, r"'g', which is not among the tools \(f\)"),
        (None, {"type": "function", "function": {"name": "g"}}, r"not among the tools \(none were given\)"),
        ([tool()], {"type": "function", "function": {}}, "tool_choice must name a function as"),
        ([tool()], {"type": "allowed_tools"}, "tool_choice has the type 'allowed_tools'"),
    ],
)
def test_refusals(tools: Any, choice: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as refusal:
        check_tools(tools, choice)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 700


def test_limits_are_settable() -> None:
    with pytest.raises(RequestError, match="2 tools were given; at most 1"):
        check_tools([tool(), tool("g")], limits=ToolLimits(tools=1))
    with pytest.raises(RequestError, match="has 5 characters; at most 4"):
        check_tools([tool(description="12345")], limits=ToolLimits(description_characters=4))
