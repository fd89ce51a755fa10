"""Files of traffic: ours, Mooncake's, Azure's, BurstGPT's, and journals that a server has recorded.

Knows: lines, columns and what can be wrong with them: one sentence with the line's number. Refuses to know: what is done with a trace.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tradewind.contract.errors import UserError
from tradewind.observability.journal import FORMAT as JOURNAL_FORMAT
from tradewind.observability.journal import Journal, read_journal
from tradewind.observability.replay import class_of
from tradewind.simulate.trace_columns import LONGEST, Trace, TraceLine, lines_of, make_trace, poisson_trace

__all__ = [
    "FORMAT_VERSION",
    "READERS",
    "Trace",
    "TraceHead",
    "TraceLine",
    "journal_trace",
    "lines_of",
    "make_trace",
    "poisson_trace",
    "read_trace",
    "write_trace",
]
"""The columns' names too, so that who reads traces has one place to import from."""

FORMAT_NAME, FORMAT_VERSION = "tradewind-trace", 1
MOONCAKE_BLOCK = 512
"""Tokens per hash id (Qin et al., "Mooncake", FAST 2025, traces beside the paper)."""


class TraceHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of our format; may be left out where no line has blocks."""

    format: Literal["tradewind-trace"]
    version: int = FORMAT_VERSION
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=LONGEST)] = MOONCAKE_BLOCK


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1, le=LONGEST)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, kind: str | None = None, limit: int | None = None) -> Trace:
    """Reads a trace file, of the kind that its first line shows unless one is named in READERS; at most `limit` requests.

    A folder is a journal that a server has recorded. Raises UserError with the line's number for a line that cannot be read.
    """
    if kind is not None and kind not in READERS:
        raise UserError(f"there is no trace format {kind!r}, only {', '.join(READERS)}")
    if path.is_dir():
        return _at_most(journal_trace(read_journal(path), name=path.name), limit)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(file, path=path, kind=kind, limit=limit)
    except OSError as error:
        raise UserError(f"the trace {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8, so it is no trace") from None


def _at_most(trace: Trace, limit: int | None) -> Trace:
    return trace if limit is None else trace.part(0, limit)


def _read(file: io.TextIOWrapper, *, path: Path, kind: str | None, limit: int | None) -> Trace:
    first = file.readline()
    if not first.strip():
        raise UserError(f"{path} is empty or begins with an empty line")
    if f'"{JOURNAL_FORMAT}"' in first and kind is None:
        return _at_most(journal_trace(read_journal(path), name=path.name), limit)
    kind = kind or _kind_of(first)
    if kind is None:
        raise UserError(
            f"{path}, line 1: this looks like no trace that is known ({', '.join(READERS)}); name its format with --format"
        )
    notes: list[str] = []
    head = TraceHead(format="tradewind-trace")
    lines = READERS[kind](_numbered(first, file), path, notes)
    if kind == "tradewind":
        head = _head(first, path) or head
    if limit is not None:
        lines = (line for line, _ in zip(lines, range(limit), strict=False))
    block_tokens = head.block_tokens if kind == "tradewind" else MOONCAKE_BLOCK
    made = make_trace(lines, name=path.name, block_tokens=block_tokens)
    if not len(made):
        raise UserError(f"{path} has no request in it")
    return replace(made, notes=tuple(notes))


def journal_trace(journal: Journal, *, name: str) -> Trace:
    """What a server recorded, as a trace: each sample of each prompt is a request, sharing what the blocks say."""
    lines = []
    silent = 0
    for entry in journal.entries:
        for sequence in entry.sequences:
            if sequence.output_tokens < 1:
                silent += 1
                continue
            lines.append(
                TraceLine(
                    arrival_s=entry.at,
                    prompt_tokens=sequence.prompt_tokens,
                    output_tokens=sequence.output_tokens,
                    max_tokens=sequence.max_tokens,
                    blocks=sequence.blocks,
                    tenant=entry.tenant,
                    priority=entry.priority,
                    traffic_class=class_of(entry),
                )
            )
    notes = list(journal.notes)
    if silent:
        notes.append(
            f"{silent} {'request' if silent == 1 else 'requests'} without an answer left out (embeddings, failures)"
        )
    if not lines:
        raise UserError(f"the journal {name} has no request with an answer in it")
    return make_trace(lines, name=name, block_tokens=journal.header.block_tokens, notes=notes)


def _kind_of(first: str) -> str | None:
    text = first.strip()
    if text.startswith("{"):
        if '"hash_ids"' in text or '"input_length"' in text:
            return "mooncake"
        return "tradewind" if '"arrival_s"' in text or f'"{FORMAT_NAME}"' in text else None
    names = {name.strip().lower() for name in text.split(",")}
    if {"timestamp", "contexttokens", "generatedtokens"} <= names:
        return "azure"
    if {"timestamp", "request tokens", "response tokens"} <= names:
        return "burstgpt"
    return None


def _numbered(first: str, rest: Iterable[str]) -> Iterator[tuple[int, str]]:
    yield 1, first
    yield from enumerate(rest, start=2)


def _refuse(path: Path, number: int, what: object) -> UserError:
    return UserError(f"{path}, line {number}: {what}")


def _head(first: str, path: Path) -> TraceHead | None:
    if f'"{FORMAT_NAME}"' not in first:
        return None
    try:
        head = msgspec.json.decode(first, type=TraceHead)
    except msgspec.DecodeError as error:
        raise _refuse(path, 1, f"this header cannot be read: {error}") from None
    if head.version != FORMAT_VERSION:
        raise _refuse(path, 1, f"version {head.version} of the format is not known; this is version {FORMAT_VERSION}")
    return head


def _tradewind(lines: Iterator[tuple[int, str]], path: Path, notes: list[str]) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(TraceLine)
    has_head = False
    for number, text in lines:
        if number == 1 and _head(text, path) is not None:
            has_head = True
            continue
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise _refuse(path, number, f"this is no request: {error}") from None
        if line.blocks and not has_head:
            raise _refuse(
                path,
                number,
                'the line has blocks, but no header says of how many tokens; begin the file with {"format": "tradewind-trace", '
                '"block_tokens": N}',
            )
        yield line


def _mooncake(lines: Iterator[tuple[int, str]], path: Path, notes: list[str]) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(_Mooncake)
    silent = 0
    for number, text in lines:
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise _refuse(path, number, f"this is no line of a Mooncake trace: {error}") from None
        if not (math.isfinite(line.timestamp) and line.timestamp >= 0):
            raise _refuse(path, number, f"the timestamp is {line.timestamp}; it must be milliseconds from 0 on")
        if line.output_length < 1:
            silent += 1
            continue
        yield TraceLine(
            arrival_s=line.timestamp / 1e3,
            prompt_tokens=line.input_length,
            output_tokens=line.output_length,
            blocks=line.hash_ids,
        )
    _tell_silent(silent, notes)


def _azure(lines: Iterator[tuple[int, str]], path: Path, notes: list[str]) -> Iterator[TraceLine]:
    zero: float | None = None
    silent = 0
    for number, row in _rows(lines, path):
        at = _date(row["timestamp"], path, number)
        zero = at if zero is None else zero
        prompt = _count(row["contexttokens"], "ContextTokens", path, number)
        output = _count(row["generatedtokens"], "GeneratedTokens", path, number)
        if not prompt or not output:
            silent += 1
            continue
        # Times before the first line's are moved to zero together with it when the trace is sorted.
        yield _line(at - zero, prompt, output)
    _tell_silent(silent, notes)


def _burstgpt(lines: Iterator[tuple[int, str]], path: Path, notes: list[str]) -> Iterator[TraceLine]:
    """With session ids a session is one growing text: each of its prompts begins with those before it, and their answers."""
    silent = 0
    sessions: dict[str, int] = {}
    for number, row in _rows(lines, path):
        at = _number(row["timestamp"], "Timestamp", path, number)
        prompt = _count(row["request tokens"], "Request tokens", path, number)
        output = _count(row["response tokens"], "Response tokens", path, number)
        if not prompt or not output:
            silent += 1
            continue
        session = row.get("session id", "").strip()
        blocks: tuple[int, ...] = ()
        if session:
            place = sessions.setdefault(session, len(sessions))
            blocks = tuple(place << 20 | index for index in range((prompt + output) // MOONCAKE_BLOCK))
        yield _line(at, prompt, output, blocks=blocks)
    _tell_silent(silent, notes)


READERS: dict[str, Callable[[Iterator[tuple[int, str]], Path, list[str]], Iterator[TraceLine]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "tradewind": _tradewind,
}


def _line(at: float, prompt: int, output: int, *, blocks: tuple[int, ...] = ()) -> TraceLine:
    return TraceLine(arrival_s=at, prompt_tokens=prompt, output_tokens=output, blocks=blocks)


def _rows(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV file by lower-case column name; columns may come in any order."""
    _, head = next(lines)
    names = [name.strip().lower() for name in next(csv.reader([head]))]
    for number, text in lines:
        if not text.strip():
            continue
        cells = next(csv.reader([text]))
        if len(cells) != len(names):
            raise _refuse(path, number, f"{len(cells)} columns where the header has {len(names)}")
        yield number, dict(zip(names, cells, strict=True))


def _number(text: str, name: str, path: Path, number: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _refuse(path, number, f"{name} is {text.strip()!r}; it must be a number")
    return value


def _count(text: str, name: str, path: Path, number: int) -> int:
    value = _number(text, name, path, number)
    if value != int(value) or not 0 <= value <= LONGEST:
        raise _refuse(path, number, f"{name} is {text.strip()!r}; it must be a whole number from 0 to {LONGEST}")
    return int(value)


def _date(text: str, path: Path, number: int) -> float:
    """Seconds of a date; Azure's have seven digits behind the point, one more than Python reads."""
    whole, point, rest = text.strip().partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    try:
        when = datetime.fromisoformat(whole + rest[digits:])
        return when.timestamp() + (float(f"0.{rest[:digits]}") if point and digits else 0.0)
    except ValueError:
        raise _refuse(
            path, number, f"TIMESTAMP is {text.strip()!r}; it must be a date such as 2023-11-16 18:15:46.6805900"
        ) from None


def _tell_silent(count: int, notes: list[str]) -> None:
    if count:
        notes.append(f"{count} {'line' if count == 1 else 'lines'} without prompt or answer left out (failed requests)")


def write_trace(trace: Trace, path: Path) -> None:
    """Writes a trace in our format."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        head = TraceHead(format="tradewind-trace", block_tokens=trace.block_tokens)
        file.write(encoder.encode(head) + b"\n")
        for line in lines_of(trace):
            file.write(encoder.encode(line) + b"\n")
