"""A file of goals: model, machine, classes of traffic with targets, tenants, quality and memory, in TOML.

Knows: the words of the file, their units, and the line of what is wrong with it. Refuses to know: how goals are reached (resolve).
Strict: what is not known is refused with its line and the word that was probably meant; nothing is ignored.

    model = "smollm2"

    [[class]]                                  a request belongs to the first class that it matches
    name = "chat"
    match = { header = "x-tier: chat" }        key, header, priority, model; all that is stated must hold, nothing stated matches all
    ttft = "500ms"
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import msgspec

from tradewind.config.choices import check_goals
from tradewind.config.goals import AdapterRoom, Goals, Late, Match, Means, Scenario, TrafficClass
from tradewind.config.sizes import parse_bytes
from tradewind.contract.errors import UserError

TIME_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}
TOP = (
    "adapters",
    "class",
    "hardware",
    "max_context",
    "means",
    "model",
    "quality",
    "requests_per_s",
    "scenario",
    "slowdown",
    "tenants",
)
CLASS = ("e2e", "late", "match", "name", "output_tokens", "prompt_tokens", "share", "tpot", "ttft")
MATCH = ("header", "key", "model", "priority", "tenant")
ADAPTERS = ("rank", "slots")
HARDWARE = ("device", "memory", "threads")
MEANS = tuple(sorted(Means.__struct_fields__))
MOST_BYTES = 1 << 20
MISSING: Any = object()


def read_goals(path: Path) -> Goals:
    """Reads a file of goals. Raises UserError with the file, the line, the field and what would be right."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path} is larger than 1 MiB, so it is no file of goals")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the goals {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8, so it is no file of goals") from None
    return parse_goals(text, name=str(path))


def parse_goals(text: str, *, name: str = "goals") -> Goals:
    """The same of a text; `name` stands before each complaint. Pure."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not TOML: {error}") from None
    return _Reader(text, name).goals(table)


def tenant_of_key(key: str) -> str:
    """The name of the tenant that has this API key, as the server forms it: a hash, so that it may be printed and recorded."""
    digest = hashlib.sha256(key.encode()).digest()
    return "key-" + hashlib.sha256(b"tenant" + digest).hexdigest()[:16]


def parse_ms(text: str) -> float:
    """Milliseconds of "500ms", "1.5 s", "2min". Raises ValueError with the end of a sentence."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", text)
    if found is None or found[2] not in TIME_UNITS_MS:
        raise ValueError('must be a time with its unit, such as "500ms" or "2s"')
    value = float(found[1]) * TIME_UNITS_MS[found[2]]
    if not 0 < value < 1e9:
        raise ValueError("must be over 0 and under 1000000 s")
    return value


class _Reader:
    """Walks one file's tables; `where` is the path of the table that is read, with the index in lists of tables."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines = _line_numbers(text)

    def goals(self, table: Mapping[str, Any]) -> Goals:
        """The goals of the whole file."""
        self._check_words((), table, TOP)
        hardware = self._table((), table, "hardware")
        self._check_words(("hardware",), hardware, HARDWARE)
        classes = self._classes(table)
        goals = Goals(
            model=self._text((), table, "model"),
            scenario=self._word((), table, "scenario", get_args(Scenario), None) or scenario_of(classes),
            memory_limit_bytes=self._with(("hardware",), hardware, "memory", str, parse_bytes),
            max_context=self._whole((), table, "max_context", None),
            quality_loss_percent=self._quality(table),
            classes=classes,
            tenants=self._tenants(table),
            requests_per_s=self._number((), table, "requests_per_s", None),
            adapters=self._adapters(table),
            slowdown=self._number((), table, "slowdown", None),
            means=self._means(table, hardware),
        )
        try:
            check_goals(goals)
        except UserError as error:
            raise UserError(f"{self._name}: {error}") from None
        return goals

    # -- parts -----------------------------------------------------------------------------------------------------------

    def _classes(self, table: Mapping[str, Any]) -> tuple[TrafficClass, ...]:
        listed = table.get("class", [])
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise self._refuse((), "class", "is no list of tables; begin each class with [[class]]")
        out: list[TrafficClass] = []
        for index, own in enumerate(listed):
            where = ("class", index)
            self._check_words(where, own, CLASS)
            made = TrafficClass(
                name=self._text(where, own, "name"),
                match=self._match(where, own),
                ttft_ms=self._with(where, own, "ttft", str, parse_ms),
                tpot_ms=self._with(where, own, "tpot", str, parse_ms),
                e2e_ms=self._with(where, own, "e2e", str, parse_ms),
                late=self._word(where, own, "late", get_args(Late), "demote"),
                share=self._share(where, own),
                prompt_tokens=self._whole(where, own, "prompt_tokens", TrafficClass(name="").prompt_tokens),
                output_tokens=self._whole(where, own, "output_tokens", TrafficClass(name="").output_tokens),
            )
            earlier = next((one.name for one in out if one.name == made.name), None)
            if earlier is not None:
                raise self._refuse(
                    where, "name", f"is {made.name!r}, as that of an earlier class; names tell classes apart"
                )
            hider = next((one.name for one in out if one.match == Match()), None)
            if hider is not None:
                raise self._refuse(
                    where,
                    "name",
                    f"is {made.name!r}, but class {hider!r} before it matches every request; put that one last",
                )
            out.append(made)
        return tuple(out)

    def _match(self, where: tuple[str | int, ...], own: Mapping[str, Any]) -> Match:
        table = self._table(where, own, "match")
        inside = (*where, "match")
        self._check_words(inside, table, MATCH)
        key = self._text(inside, table, "key", None)
        tenant = self._text(inside, table, "tenant", None)
        if key is not None and tenant is not None:
            raise self._refuse(inside, "key", "and tenant are both given; a key is its tenant, leave one out")
        header = self._text(inside, table, "header", None)
        pair: tuple[str, str] | None = None
        if header is not None:
            name, colon, value = header.partition(":")
            if not colon or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name.strip()):
                raise self._refuse(
                    inside, "header", f'is {header!r}; it must be a name and a value, such as "x-tier: chat"'
                )
            pair = (name.strip().lower(), value.strip())
        return Match(
            tenant=tenant_of_key(key) if key is not None else tenant,
            header=pair,
            priority=self._whole(inside, table, "priority", None, low=-(1 << 31)),
            model=self._text(inside, table, "model", None),
        )

    def _tenants(self, table: Mapping[str, Any]) -> dict[str, float]:
        own = self._table((), table, "tenants")
        out = {name: self._number(("tenants",), own, name, MISSING) for name in own}
        return {str(name): float(value) for name, value in out.items() if value is not None}

    def _adapters(self, table: Mapping[str, Any]) -> AdapterRoom | None:
        own = self._table((), table, "adapters")
        self._check_words(("adapters",), own, ADAPTERS)
        usual = AdapterRoom()
        if not own:
            return None
        return AdapterRoom(
            slots=self._whole(("adapters",), own, "slots", usual.slots),
            rank=self._whole(("adapters",), own, "rank", usual.rank),
        )

    def _quality(self, table: Mapping[str, Any]) -> float:
        value = table.get("quality", "lossless")
        if value == "lossless":
            return 0.0
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", value) if isinstance(value, str) else None
        if found is None or float(found[1]) > 100:
            raise self._refuse(
                (),
                "quality",
                f'is {value!r}; it must be "lossless" or by how much the perplexity may rise, such as "1%"',
            )
        return float(found[1])

    def _means(self, table: Mapping[str, Any], hardware: Mapping[str, Any]) -> Means:
        own = self._table((), table, "means")
        self._check_words(("means",), own, MEANS)
        device = self._word(("hardware",), hardware, "device", ("auto", "cpu", "cuda"), "auto")
        threads = self._whole(("hardware",), hardware, "threads", None)
        pins = dict(own)
        for field, value, said in (
            ("backend", None if device == "auto" else device, "device"),
            ("threads", threads, "threads"),
        ):
            if value is not None:
                if field in pins:
                    raise self._refuse(("means",), field, f"and hardware.{said} are both given; leave one out")
                pins[field] = value
        try:
            return msgspec.convert(pins, Means)
        except msgspec.ValidationError as error:
            text, _, at = str(error).partition(" - at `$.")
            field = at.rstrip("`") or next(iter(own), "means")
            raise self._refuse(("means",), field, f"cannot be used: {text[0].lower()}{text[1:]}") from None

    # -- values ----------------------------------------------------------------------------------------------------------

    def _table(self, where: tuple[str | int, ...], table: Mapping[str, Any], field: str) -> Mapping[str, Any]:
        value = table.get(field, {})
        if not isinstance(value, dict):
            raise self._refuse(where, field, "is no table")
        return value

    def _text(self, where: tuple[str | int, ...], table: Mapping[str, Any], field: str, default: Any = MISSING) -> Any:
        value = table.get(field, default)
        if value is MISSING:
            line = self._lines.get(where)
            what = "the file" if not where else f"this {where[0]}"
            raise UserError(f"{self._name}{f', line {line}' if line else ''}: {what} has no {field}; it must have one")
        if value is not default and (not isinstance(value, str) or not value.strip()):
            raise self._refuse(where, field, f"is {_show(value)}; it must be a text that is not empty")
        return value

    def _whole(
        self, where: tuple[str | int, ...], table: Mapping[str, Any], field: str, default: Any, *, low: int = 1
    ) -> Any:
        value = table.get(field, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise self._refuse(where, field, f"is {_show(value)}; it must be a whole number of at least {low}")
        return value

    def _number(self, where: tuple[str | int, ...], table: Mapping[str, Any], field: str, default: Any) -> Any:
        value = table.get(field, default)
        if value is not default and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9
        ):
            raise self._refuse(where, field, f"is {_show(value)}; it must be a number over 0")
        return value

    def _share(self, where: tuple[str | int, ...], table: Mapping[str, Any]) -> float | None:
        value = table.get("share")
        if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", value)):
            value = float(found[1]) / 100
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1):
            raise self._refuse(
                where, "share", f'is {_show(table["share"])}; it must be a part of all requests, such as 0.7 or "70%"'
            )
        return None if value is None else float(value)

    def _word(
        self, where: tuple[str | int, ...], table: Mapping[str, Any], field: str, words: tuple[str, ...], default: Any
    ) -> Any:
        value = table.get(field, default)
        if value is not default and value not in words:
            near = _close_match(str(value), words)
            raise self._refuse(where, field, f"is {_show(value)}; it must be one of {', '.join(words)}{near}")
        return value

    def _with(
        self,
        where: tuple[str | int, ...],
        table: Mapping[str, Any],
        field: str,
        kind: type,
        read: Callable[[Any], Any],
    ) -> Any:
        value = table.get(field)
        if value is None:
            return None
        try:
            return read(value if isinstance(value, kind) else str(value))
        except ValueError as error:
            raise self._refuse(where, field, f"is {_show(value)}; it {error}") from None
        except UserError as error:
            raise self._refuse(where, field, f"cannot be used: {error}") from None

    # -- complaints ------------------------------------------------------------------------------------------------------

    def _check_words(self, where: tuple[str | int, ...], table: Mapping[str, Any], known: Iterable[str]) -> None:
        words = tuple(known)
        for word in table:
            if word not in words:
                near = _close_match(word, words)
                place = (
                    "at the top"
                    if not where
                    else f"in {'.'.join(str(part) for part in where if isinstance(part, str))}"
                )
                raise self._refuse(where, word, f"is not known {place}, only {', '.join(words)}{near}")

    def _refuse(self, where: tuple[str | int, ...], field: str, what: str) -> UserError:
        path = (*where, field)
        line = next((self._lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self._lines), None)
        shown = ".".join(str(part) for part in path if isinstance(part, str))
        return UserError(f"{self._name}{f', line {line}' if line else ''}: {shown} {what}")


def scenario_of(classes: tuple[TrafficClass, ...]) -> Scenario:
    """What matters most, as the classes' targets say: nobody waits for a first or next token -> throughput; otherwise balanced."""
    waited_for = any(one.ttft_ms is not None or one.tpot_ms is not None for one in classes)
    return "balanced" if waited_for or not classes else "throughput"


def _close_match(word: str, words: tuple[str, ...]) -> str:
    close = get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


HEADER_LINE = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
KEY_LINE = re.compile(
    r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)


def _line_numbers(text: str) -> dict[tuple[str | int, ...], int]:
    """Where each table and key stands, for tomllib does not say. What stands within a value over several lines is not looked for."""
    lines: dict[tuple[str | int, ...], int] = {}
    counts: dict[str, int] = {}
    table: tuple[str | int, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if head := HEADER_LINE.match(line):
            parts = _parts(head[2])
            if head[1] == "[[":
                index = counts.get(head[2], -1) + 1
                counts[head[2]] = index
                table = (*parts, index)
            elif parts[0] in counts:  # [class.match] belongs to the class before it
                table = (parts[0], counts[parts[0]], *parts[1:])
            else:
                table = parts
            lines.setdefault(table, number)
        elif key := KEY_LINE.match(line):
            path = (*table, *_parts(key[1]))
            for end in range(len(table) + 1, len(path) + 1):
                lines.setdefault(path[:end], number)
    return lines


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
