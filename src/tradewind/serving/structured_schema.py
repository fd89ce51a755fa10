"""JSON schemas as structured output can keep them: checked, cleaned, bounded.

Knows: which keywords a grammar enforces, and refuses the others by name and place: a keyword is never weakened in silence.
Refuses to know: tools, requests, how the grammar is written (structured.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tradewind.contract.errors import RequestError


class SchemaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What schemas, regular expressions and grammars are held to."""

    bytes: int = 131_072
    """Of one schema as JSON, or of one grammar or regular expression."""
    depth: int = 64
    nodes: int = 5_000
    """Schemas within a schema."""
    values: int = 10_000
    """Of all enumerations together."""
    repeat: int = 10_000
    """Largest count in a pattern's {m,n}, minItems and the like."""


FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")

_ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "default",
        "deprecated",
        "description",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Assert nothing: left out."""
_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_OFF = {"nullable": False, "uniqueItems": False}
"""Keywords that say nothing with this value."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_COMBINE = ("$ref", "allOf", "anyOf", "oneOf")
_REPEAT = re.compile(r"(?<!\\)(?:\\\\)*\{(\d+)(?:,(\d*))?\}")


class _Walk:
    """One schema's walk: counts what is bounded, remembers what decides whether objects may be closed."""

    def __init__(self, root: Any, name: str, limits: SchemaLimits) -> None:
        self.root, self.name, self.limits = root, name, limits
        self.nodes = self.values = 0
        self.mixes = False
        """Objects are put together of parts, so that closing one part would forbid another's properties."""
        self.one_of: str | None = None

    def refuse(self, what: str, path: str) -> RequestError:
        return RequestError(f"{self.name}: {what} at {path}")

    def clean(self, schema: Any, path: str, depth: int) -> Any:
        """A copy with only the keywords that assert something. Raises RequestError naming keyword and place."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self.refuse(f"a schema must be an object, not {type(schema).__name__},", path)
        self.nodes += 1
        if self.nodes > self.limits.nodes:
            raise RequestError(f"{self.name} has more than {self.limits.nodes} schemas in it; make it smaller")
        if depth > self.limits.depth:
            raise RequestError(f"{self.name} is nested deeper than {self.limits.depth} levels; make it flatter")
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _ANNOTATIONS or (key.startswith("x-") and key != "x-guidance") or _OFF.get(key, ...) is value:
                continue
            if key not in _KEYWORDS:
                raise self.refuse(f"the keyword {key!r} is not supported,", path)
            out[key] = self._keyword(key, value, path, depth)
        if "allOf" in out or ("properties" in out and any(key in out for key in _COMBINE)):
            self.mixes = True
        return out

    def _keyword(self, key: str, value: Any, path: str, depth: int) -> Any:
        here = f"{path}.{key}"
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            if not isinstance(value, Mapping):
                raise self.refuse(f"{key} must be an object,", path)
            if key == "patternProperties":
                for pattern in value:
                    self._pattern(pattern, here)
            return {name: self.clean(part, f"{here}.{name}", depth + 1) for name, part in value.items()}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if not isinstance(value, list) or not value:
                raise self.refuse(f"{key} must be a list of schemas,", path)
            if key == "oneOf" and self.one_of is None:
                self.one_of = path
            return [self.clean(part, f"{here}[{place}]", depth + 1) for place, part in enumerate(value)]
        if key in ("items", "additionalProperties"):
            if isinstance(value, list):
                raise self.refuse("items as a list is not supported (use prefixItems),", path)
            return self.clean(value, here, depth + 1)
        self._value(key, value, path)
        return value

    def _value(self, key: str, value: Any, path: str) -> None:
        """Checks a keyword whose value is no schema."""
        limit = self.limits.repeat
        if key in _COUNTS and (not _whole(value) or value < 0):
            raise self.refuse(f"{key} must be a whole number, not {_show(value)},", path)
        if key in _COUNTS and value > limit and key.startswith("min"):
            raise self.refuse(f"{key} is {value}, over the limit of {limit},", path)
        if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.refuse(f"{key} must be a number, not {_show(value)},", path)
        if key == "type":
            for name in value if isinstance(value, list) else [value]:
                if name not in _TYPES:
                    raise self.refuse(f"the type {_show(name)} is not one of {', '.join(_TYPES)},", path)
        elif key == "enum":
            if not isinstance(value, list) or not value:
                raise self.refuse("enum must be a list with at least one value,", path)
            self.values += len(value)
            if self.values > self.limits.values:
                raise RequestError(f"{self.name} has more than {self.limits.values} enum values; make it smaller")
        elif key == "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self.refuse("required must be a list of property names,", path)
        elif key == "pattern":
            self._pattern(value, path)
        elif key == "format" and value not in FORMATS:
            raise self.refuse(f"the format {_show(value)} is not supported (known are {', '.join(FORMATS)}),", path)
        elif key == "$ref":
            self._reference(value, path)
        elif key == "x-guidance":
            raise self.refuse("the keyword 'x-guidance' is not supported,", path)

    def _pattern(self, value: Any, path: str) -> None:
        if not isinstance(value, str):
            raise self.refuse("pattern must be text,", path)
        if (most := largest_repeat(value)) > self.limits.repeat:
            raise self.refuse(f"pattern repeats {most} times, over the limit of {self.limits.repeat},", path)

    def _reference(self, value: Any, path: str) -> None:
        """A reference must lead somewhere within the schema, and not only to itself."""
        seen: set[str] = set()
        while True:
            if not isinstance(value, str) or not value.startswith("#"):
                raise self.refuse(
                    f"$ref {_show(value)} does not begin with '#': only local references are supported,", path
                )
            if value in seen:
                raise self.refuse(f"$ref {value!r} leads only to itself,", path)
            seen.add(value)
            target: Any = self.root
            for part in value[1:].split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and part.isdigit() and int(part) < len(target):
                    target = target[int(part)]
                elif isinstance(target, Mapping) and part in target:
                    target = target[part]
                else:
                    raise self.refuse(f"$ref {value!r} leads nowhere,", path)
            if not isinstance(target, Mapping) or "$ref" not in target:
                return
            value = target["$ref"]


_KEYWORDS = frozenset(
    {
        *_COMBINE,
        *_COUNTS,
        *_NUMBERS,
        "$defs",
        "additionalProperties",
        "const",
        "definitions",
        "enum",
        "format",
        "items",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    }
)


def checked_schema(schema: Any, *, name: str, limits: SchemaLimits) -> tuple[Any, str | None]:
    """A schema as the grammar takes it, and where it has its first oneOf. Raises RequestError naming keyword and JSON path.

    An object that lists properties and does not say `additionalProperties` is closed, which keeps every answer valid, unless
    objects are put together of parts (allOf, or properties beside anyOf and the like).
    """
    try:
        size = len(json.dumps(schema))
    except (RecursionError, TypeError, ValueError):
        raise RequestError(f"{name} is not a JSON schema, or nested too deeply") from None
    if size > limits.bytes:
        raise RequestError(f"{name} has {size} bytes; at most {limits.bytes} are allowed")
    if not isinstance(schema, bool | Mapping):
        raise RequestError(f"{name} must be a JSON schema (an object), not {type(schema).__name__}")
    walk = _Walk(schema, name, limits)
    cleaned = walk.clean(schema, "$", 0)
    if not walk.mixes:
        _close(cleaned)
    return cleaned, walk.one_of


def largest_repeat(pattern: str) -> int:
    """The largest count that a regular expression's braces ask for."""
    return max((int(n) for match in _REPEAT.finditer(pattern) for n in match.groups() if n), default=0)


def _close(schema: Any) -> None:
    """Gives objects that list their properties `additionalProperties: false` where nothing is said; changes its argument."""
    if isinstance(schema, list):
        for part in schema:
            _close(part)
    if not isinstance(schema, dict):
        return
    if "properties" in schema and not ({"additionalProperties", "patternProperties", "minProperties"} & schema.keys()):
        listed = schema["properties"]
        if all(name in listed for name in schema.get("required", ())):
            schema["additionalProperties"] = False
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        for part in schema.get(key, {}).values():
            _close(part)
    for key in ("items", "additionalProperties", "anyOf", "oneOf", "prefixItems"):
        _close(schema.get(key))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
