"""What an answer must look like, as one text for `Request.grammar`: formats, schemas, expressions, grammars, forced calls.

Knows: how each of them is said in llguidance's Lark, and refuses, in one sentence, what could not be kept or would cost too much.
Refuses to know: HTTP (which field it came from is told by name), token masks, when a grammar is compiled (engine).

      response_format, guided_*, tools  ->  Shape  ->  text(shape, reasoning)  ->  Request.grammar

White space between JSON tokens is one space, or one line break and its indentation: a model that loves blanks cannot run away.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import msgspec

from tradewind.contract.errors import MissingExtraError, RequestError
from tradewind.contract.grammar import LIMITS, Grammar, Kind
from tradewind.serving.parsers.parser import GrammarHint, ReasoningMarkers
from tradewind.serving.parsers.tools import ToolRequest
from tradewind.serving.structured_schema import SchemaLimits, checked_schema, largest_repeat
from tradewind.serving.tokenizer import TextTokenizer

BLANKS = r"[ ]|\n[ \t]{0,16}"
"""White space between two tokens of JSON."""
GAP = r"[ \t\n]{1,4}"
"""White space between reasoning and the answer."""
ANYTHING = r"/(.|\n)*/"
REMEMBERED = 256
"""So many checked shapes are kept."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer, not yet told how reasoning goes before it."""

    kind: Kind
    name: str
    """The field it came from, for messages."""
    rules: str = ""
    """Lark rules; the answer is the rule `answer`."""
    own: str = ""
    """A whole grammar of the client's, with its own `start`; then `rules` is empty."""
    spare_blanks: bool = False
    one_of: str | None = None
    """Where a schema has its first oneOf."""


class StructuredOutput:
    """Makes shapes and texts for one model. Safe to share among threads. Every method raises RequestError with one sentence."""

    def __init__(self, tokenizer: TextTokenizer, *, limits: SchemaLimits | None = None) -> None:
        self._tokenizer = tokenizer
        self.limits = limits or SchemaLimits()
        self._checked: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def warm(self) -> None:
        """Imports the grammar library, which takes 0.1 s, where it is installed: the first request should not wait for it."""
        with suppress(MissingExtraError):
            _llguidance()

    # -- from what clients send --------------------------------------------------------------------------------------

    def response_format(self, value: Any, *, name: str = "response_format") -> Shape | None:
        """OpenAI's response_format (also as the responses API has it, with the schema beside the type); None for text."""
        if value is None:
            return None
        if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
            raise RequestError(f"{name} must be an object with a type")
        kind = value["type"]
        if kind == "text":
            return None
        if kind == "json_object":
            return self._json("json_object", {"type": "object"}, name)
        if kind == "json_schema":
            inner = value.get("json_schema", value)
            if not isinstance(inner, Mapping) or "schema" not in inner:
                raise RequestError(f"{name} of type json_schema must have json_schema.schema")
            return self.json_schema(
                inner["schema"], name=f"{name}.json_schema.schema" if inner is not value else f"{name}.schema"
            )
        if kind == "structural_tag":
            return self.structural_tag(value, name=name)
        raise RequestError(f"{name}.type is {kind!r}; known are text, json_object, json_schema and structural_tag")

    def json_schema(self, schema: Any, *, name: str = "guided_json") -> Shape:
        """A JSON schema, as an object or as text."""
        if isinstance(schema, str):
            if len(schema) > self.limits.bytes:
                raise RequestError(f"{name} has {len(schema)} bytes; at most {self.limits.bytes} are allowed")
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{name} is not JSON: {error}") from None
        return self._json("json_schema", schema, name)

    def regex(self, pattern: Any, *, name: str = "guided_regex") -> Shape:
        """A regular expression that the whole answer matches; ^ and $ at its ends change nothing, \\d and \\w are ASCII."""
        llguidance = _llguidance()
        if not isinstance(pattern, str) or not pattern:
            raise RequestError(f"{name} must be text, and not empty")
        self._bounded(pattern, name)
        if (most := largest_repeat(pattern)) > self.limits.repeat:
            raise RequestError(f"{name} repeats {most} times; at most {self.limits.repeat} are allowed")
        bare = pattern.removeprefix("^")
        if bare.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$\Z", bare):
            bare = bare[:-1]
        return Shape(
            kind="regex", name=name, rules=f"answer: ANSWER\nANSWER: /{llguidance.regex_to_lark(bare, 'dw')}/\n"
        )

    def choice(self, texts: Any, *, name: str = "guided_choice") -> Shape:
        """One of several texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise RequestError(f"{name} must be a list of texts with at least one in it")
        if not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"{name} has an entry that is empty or no text")
        if len(texts) > self.limits.values:
            raise RequestError(f"{name} has {len(texts)} entries; at most {self.limits.values} are allowed")
        self._bounded("".join(texts), name)
        return Shape(kind="choice", name=name, rules="answer: " + " | ".join(map(_quoted, texts)) + "\n")

    def grammar(self, text: Any, *, name: str = "guided_grammar") -> Shape:
        """A context-free grammar: Lark in llguidance's dialect, or GBNF (rules written with ::=), which is turned into it."""
        if not isinstance(text, str) or not text.strip():
            raise RequestError(f"{name} must be text, and not empty")
        self._bounded(text, name)
        if "::=" in text:
            text = _lark_of_gbnf(text, name)
        elif not re.search(r"^\s*\??start\b[^:\n]*:", text, re.MULTILINE):
            raise RequestError(f"{name} has no rule 'start' (Lark), and no rule written with '::=' (GBNF)")
        if re.search(r"^\s*%(llguidance|import\s+(?!common\.))", text, re.MULTILINE):
            raise RequestError(f"{name} may not have %llguidance, and import only from common")
        return Shape(kind="grammar", name=name, own=text)

    def structural_tag(self, value: Any, *, name: str = "structural_tag") -> Shape:
        """Free text in which what stands between begin and end of a structure follows its schema, as vLLM and SGLang have it.

        {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}: text that follows a trigger must be a structure.
        """
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{name} is not JSON: {error}") from None
        parts = value.get("structures") if isinstance(value, Mapping) else None
        triggers = value.get("triggers") if isinstance(value, Mapping) else None
        if not isinstance(parts, list) or not parts or not isinstance(triggers, list) or not triggers:
            raise RequestError(f"{name} must have structures and triggers, two lists that are not empty")
        if len(parts) > 128 or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise RequestError(
                f"{name} may have at most 128 structures, and its triggers must be texts that are not empty"
            )
        rules, options = "", []
        for place, part in enumerate(parts):
            if not isinstance(part, Mapping) or not all(isinstance(part.get(key), str) for key in ("begin", "end")):
                raise RequestError(f"{name}.structures[{place}] must have begin and end as texts")
            trigger = next((t for t in triggers if part["begin"].startswith(t)), None)
            if trigger is None:
                raise RequestError(f"{name}.structures[{place}].begin starts with none of the triggers")
            schema, _ = self._schema(part.get("schema", True), f"{name}.structures[{place}].schema")
            rules += f"schema_{place}: %json {schema}\n"
            rest = part["begin"][len(trigger) :]
            options.append((trigger, self._spelled(rest, ()), f"schema_{place}", self._spelled(part["end"], ())))
        for place, trigger in enumerate(dict.fromkeys(option[0] for option in options)):
            bodies = " | ".join(" ".join(filter(None, option[1:])) for option in options if option[0] == trigger)
            rules += self._triggered(f"hit_{place}", trigger) + f"part_{place}: hit_{place} ({bodies})\n"
        hits = " | ".join(f"part_{place}" for place in range(len({option[0] for option in options})))
        return Shape(kind="structural_tag", name=name, rules=f"answer: ({hits})* TEXT\nTEXT: {ANYTHING}\n{rules}")

    def tools(
        self, asked: ToolRequest, hint: GrammarHint | None, *, parallel: bool = True, bare: bool = False, beside: Shape | None = None
    ) -> Shape | None:  # fmt: skip
        """What `tool_choice` and strict tools demand of the answer, in the spelling of `hint`; None when nothing is demanded.

        Required or named: the answer is one or more calls (one, unless `parallel`). Auto with a strict tool, or without `parallel`:
        free text, and from the format's trigger on a call. `bare`: the named tool's arguments are the whole answer (the format "json").
        `beside`: under auto, the form of an answer that is no call.
        """
        lax = not any(tool.strict for tool in asked.tools) and parallel and beside is None
        if asked.choice == "none" or (asked.choice == "auto" and lax):
            return beside
        if hint is None:
            raise RequestError("tool_choice cannot be kept: how this model writes calls is not known")
        strict = {tool.name: tool.strict for tool in asked.tools}
        rules, calls = "", []
        for place, (name, schema) in enumerate(asked.schemas.items()):
            rules += self._arguments(place, name, schema, hint, strict=strict.get(name, False))
            calls.append((f"{hint.before_name}{name}{hint.after_name}", f"arguments_{place}"))
        if bare and asked.choice == "named":
            return Shape(kind="tools", name="tools", rules=rules + "answer: arguments_0\n", spare_blanks=True)
        after = self._spelled(hint.after_arguments, hint.tokens)
        bodies = [" ".join(filter(None, (self._spelled(head, hint.tokens), args, after))) for head, args in calls]
        rules += f"call: {' | '.join(bodies)}\n"
        if asked.choice != "auto":
            rules += f"answer: {self._calls('call', hint, parallel, skip='')}\n"
            return Shape(kind="tools", name="tools", rules=rules, spare_blanks=hint.arguments == "json")
        return self._auto(rules, calls, after, hint, parallel, beside)

    # -- the text ----------------------------------------------------------------------------------------------------

    def text(self, shape: Shape, *, reasoning: ReasoningMarkers | None = None, starts_inside: bool = False) -> str:
        """The text for `Request.grammar`, checked by the grammar compiler (milliseconds, once per text; call it off the event loop).

        With `reasoning` the answer may open with it (or, `starts_inside`, is in it already): it is free, and the shape holds behind it.
        """
        begin = end = None
        head, heads = "", ""
        if reasoning is not None:
            begin, end = self._token(reasoning.begin), self._token(reasoning.end)
            heads = f"GAP: /{GAP}/\n"
            head = "GAP? "
            if end is None or (begin is None and not starts_inside):
                opening = "" if starts_inside else f"{_quoted(reasoning.begin)} "
                heads += f"thought[lazy]: {opening}FREE {_quoted(reasoning.end)}\nFREE: {ANYTHING}\n"
                head = "thought GAP? " if starts_inside else "(thought GAP?)? "
                begin = end = None
        if shape.own and not head:
            text = shape.own
        elif shape.own:
            text = json.dumps(
                {
                    "grammars": [
                        {"name": "whole", "lark_grammar": f"start: {head}@own\n{heads}"},
                        {"name": "own", "lark_grammar": shape.own},
                    ]
                }
            )
        else:
            text = f"start: {head}answer\n{heads}{shape.rules}"
        encoded = Grammar(
            kind=shape.kind,
            text=text,
            thinking=end is not None and starts_inside,
            begin=None if starts_inside or end is None else begin,
            end=end,
            spare_blanks=shape.spare_blanks,
        ).encode()
        self._check(shape, text, encoded)
        return encoded

    def _check(self, shape: Shape, text: str, encoded: str) -> None:
        """Raises RequestError when the grammar compiler refuses a text."""
        with self._lock:
            error = self._checked.get(encoded)
        if error is None:
            llguidance = _llguidance()
            grammar = text if text.startswith("{") else llguidance.LLMatcher.grammar_from_lark(text)
            error = llguidance.LLMatcher.validate_grammar(grammar, limits=llguidance.LLParserLimits(**LIMITS))
            if error.startswith("WARNING"):
                error = ""
            with self._lock:
                self._checked[encoded] = error
                if len(self._checked) > REMEMBERED:
                    self._checked.popitem(last=False)
        if error:
            raise RequestError(_refusal(shape, error))

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _bounded(self, text: str, name: str) -> None:
        if len(text) > self.limits.bytes:
            raise RequestError(f"{name} has {len(text)} characters; at most {self.limits.bytes} are allowed")

    def _json(self, kind: Kind, schema: Any, name: str) -> Shape:
        text, one_of = self._schema(schema, name)
        return Shape(kind=kind, name=name, rules=f"answer: %json {text}\n", spare_blanks=True, one_of=one_of)

    def _schema(self, schema: Any, name: str) -> tuple[str, str | None]:
        """A schema as it stands behind %json."""
        cleaned, one_of = checked_schema(schema, name=name, limits=self.limits)
        if cleaned is False:
            raise RequestError(f"{name} is false, which allows no answer at all")
        whole = {} if cleaned is True else cleaned
        return json.dumps({**whole, "x-guidance": {"whitespace_pattern": BLANKS}}), one_of

    def _token(self, text: str) -> int | None:
        return self._tokenizer.token_id(text)

    def _spelled(self, text: str, tokens: Sequence[str]) -> str:
        """A fixed text as Lark: markers that are single tokens by their id, the rest quoted."""
        ids = {token: found for token in tokens if (found := self._token(token)) is not None}
        if not ids:
            return _quoted(text) if text else ""
        marks = re.compile("(" + "|".join(re.escape(token) for token in sorted(ids, key=len, reverse=True)) + ")")
        return " ".join(f"<[{ids[part]}]>" if part in ids else _quoted(part) for part in marks.split(text) if part)

    def _calls(self, call: str, hint: GrammarHint, parallel: bool, *, skip: str) -> str:
        """One or more calls with what stands around them; `skip` is the part of the beginning that came already."""
        begin, between, end = (
            self._spelled(text, hint.tokens) for text in (hint.begin[len(skip) :], hint.between, hint.end)
        )
        more = f"({between} call)*" if parallel else ""
        return " ".join(filter(None, (begin, call, more, end)))

    def _auto(
        self, rules: str, calls: list[tuple[str, str]], after: str, hint: GrammarHint, parallel: bool, beside: Shape | None
    ) -> Shape:  # fmt: skip
        """Free text (or the shape beside), and calls where the trigger comes."""
        if beside is not None or not hint.trigger:
            # Either calls or the other form, told apart by how they begin.
            rules += f"calls: {self._calls('call', hint, parallel, skip='')}\n"
            if beside is not None:
                if beside.own:
                    raise RequestError(f"{beside.name} cannot be combined with tools that may be called")
                rules += beside.rules.replace("answer:", "other:", 1)
            else:
                first = (hint.begin + hint.before_name)[:1]
                rules += f"other: OTHER?\nOTHER: /[^{re.escape(first)}](.|\\n)*/\n"
            return Shape(
                kind="tools", name="tools", rules=rules + "answer: calls | other\n", spare_blanks=beside is not None
            )
        if hint.begin:
            rules += f"calls: {self._calls('call', hint, parallel, skip=hint.trigger)}\n"
        else:
            heads = [
                " ".join(filter(None, (self._spelled(h[len(hint.trigger) :], hint.tokens), a, after))) for h, a in calls
            ]
            between = self._spelled(hint.between, hint.tokens)
            rules += f"calls: ({' | '.join(heads)})" + (f" ({between} call)*" if parallel else "") + "\n"
        marks = [t for t in hint.tokens if t in hint.trigger and self._token(t) in self._tokenizer.special_ids]
        if marks and marks != [hint.trigger]:
            raise RequestError(
                "tools: strict and parallel_tool_calls=false under tool_choice auto cannot be kept in this model's format; "
                "use 'required', or leave them out"
            )
        rules += self._triggered("hit", hint.trigger)
        return Shape(
            kind="tools", name="tools", rules=rules + f"answer: TEXT | hit calls\nTEXT: {ANYTHING}\n"
        )  # fmt: skip

    def _triggered(self, rule: str, trigger: str) -> str:
        """A rule for free text that ends with the trigger's first occurrence."""
        special = self._token(trigger)
        if special is not None and special in self._tokenizer.special_ids:
            return f"{rule}: TEXT <[{special}]>\n"
        return f"{rule}[lazy]: TEXT {_quoted(trigger)}\n"

    def _arguments(self, place: int, name: str, schema: Mapping[str, Any], hint: GrammarHint, *, strict: bool) -> str:
        """Rules for one tool's arguments, from `arguments_N` on."""
        where = f"tools[{name!r}].parameters"
        whole: dict[str, Any] = {"type": "object", **schema}
        if (
            not schema.get("properties")
            and "additionalProperties" not in schema
            and schema.keys() <= {"type", "properties"}
        ):
            whole = (
                {"type": "object"}
                if not strict
                else {"type": "object", "properties": {}, "additionalProperties": False}
            )
        try:
            text, _ = self._schema(whole, where)
        except RequestError:
            if strict:
                raise
            text, whole = json.dumps({"type": "object", "x-guidance": {"whitespace_pattern": BLANKS}}), {}
        if hint.arguments == "json" or not whole.get("properties"):
            empty = "" if hint.arguments == "json" else '""'
            return f"arguments_{place}: {empty or '%json ' + text}\n"
        return self._listed(place, whole, hint, where)

    def _listed(self, place: int, schema: Mapping[str, Any], hint: GrammarHint, where: str) -> str:
        """Arguments that are no JSON object but one entry for each property, in the schema's order."""
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = set(schema.get("required", ()))
        rules, entries = "", []
        for number, (key, part) in enumerate(schema["properties"].items()):
            rule = f"entry_{place}_{number}"
            value = {**part, **definitions} if isinstance(part, Mapping) else part
            if hint.arguments == "parameters":
                assert hint.parameter is not None
                before, middle, after = hint.parameter
                head = self._spelled(f"{before}{key}{middle}", hint.tokens)
                if isinstance(part, Mapping) and part.get("type") == "string":
                    texts = part.get("enum")
                    if texts:
                        said = "(" + " | ".join(_quoted(str(text)) for text in texts) + ")" + f" {_quoted(after)}"
                    else:
                        rules += f"{rule}_text[lazy]: /(.|\\n)*/ {_quoted(after)}\n"
                        said = f"{rule}_text"
                else:
                    said = f"%json {self._schema(value, f'{where}.properties.{key}')[0]}\n{rule}_end: {_quoted(after)}"
                    rules += f"{rule}: {head} {rule}_value {rule}_end\n{rule}_value: {said}\n"
                    entries.append((rule, key in required))
                    continue
                rules += f"{rule}: {head} {said}\n"
            else:
                rules += f"{rule}: {_quoted(key + '=')} {rule}_value\n"
                rules += f"{rule}_value: {self._literal(value, f'{where}.properties.{key}')}\n"
            entries.append((rule, key in required))
        comma = _quoted(", ") + " " if hint.arguments == "keywords" else ""
        if not comma:
            return rules + f"arguments_{place}: " + (" ".join(r if need else f"{r}?" for r, need in entries)) + "\n"
        # What follows the first entry has a comma before it: `rest_i` is what may follow entry i - 1.
        heads: list[str] = []
        for number, (rule, need) in enumerate(entries):
            rest = f"rest_{place}_{number}"
            following = f"rest_{place}_{number + 1}"
            rules += f"{rest}: {comma}{rule} {following}" + ("" if need else f" | {following}") + "\n"
            if not any(needed for _, needed in entries[:number]):
                heads.append(f"{rule} {following}")
        rules += f'rest_{place}_{len(entries)}: ""\n'
        if not any(need for _, need in entries):
            heads.append('""')
        return rules + f"arguments_{place}: {' | '.join(heads)}\n"

    def _literal(self, schema: Any, where: str) -> str:
        """A Python literal: JSON, but for True, False and None."""
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "boolean":
            return '"True" | "False"'
        if kind == "null":
            return '"None"'
        return f"%json {self._schema(schema, where)[0]}"


def _quoted(text: str) -> str:
    """A Lark string."""
    return json.dumps(text)


def _llguidance() -> Any:
    """The library. Raises MissingExtraError naming the extra that brings it."""
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError(package="llguidance", extra="structured", purpose="structured output") from None
    return llguidance


def _lark_of_gbnf(text: str, name: str) -> str:
    _llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text)).replace("%llguidance {}", "")
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply") from None
    except Exception as error:  # the converter has no one class of its own for what is wrong with a text
        raise RequestError(f"{name} is no GBNF that can be read: {str(error)[:300]}") from None


_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_WRAPPED = "failed to compile JSON schema: "


def _refusal(shape: Shape, error: str) -> str:
    """A compiler's message as one sentence about what the client sent."""
    reasons = [part.strip()[7:] for part in error.splitlines() if part.strip().startswith("error: ")]
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no reason was given")[:300]
    place = _PLACE.match(line)
    what = line[place.end() :] if place else line
    if _WRAPPED in what:
        what = what.split(_WRAPPED, 1)[1]
        if what.startswith("oneOf"):
            return f"{shape.name}: the keyword 'oneOf' at {shape.one_of or '$'} cannot be kept, for its branches may overlap: use anyOf"
        return f"{shape.name} cannot be kept: {f'a pattern in it: {reasons[0]}' if reasons else what}"
    if shape.kind == "regex":
        return f"{shape.name} cannot be kept: {reasons[0] if reasons else what}"
    if place and shape.own:
        return f"{shape.name}, line {place[1]}: {what}"
    return f"{shape.name} cannot be kept: {what}"
