"""Traffic as columns: when requests come, how long they and their answers are, what their prompts have in common.

Knows: file formats (ours, Mooncake's, Azure's, BurstGPT's) and how to make tokens up that share what the prompts shared. Refuses to know:
engines, and any text.

      prompt of request i     | block 17 | block 4 | block 91 (cut) |     equal block ids mean equal text *and* equal text before it
                              |-- block_tokens each ---|

A million requests are five arrays, not a million objects.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.contract.errors import UserError
from tradewind.contract.step import Ints

Reals = npt.NDArray[np.float64]
Offsets = npt.NDArray[np.int64]

FORMAT_NAME, FORMAT_VERSION = "tradewind-trace", 1
MOONCAKE_BLOCK = 512
"""Tokens per hash id (Qin et al., "Mooncake", FAST 2025, traces beside the paper)."""
LONGEST = 1 << 24
FIRST_TOKEN = 16
"""Made-up token ids begin here; what is below has a meaning in the simulator."""


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request in our format."""

    arrival_s: Annotated[float, msgspec.Meta(ge=0)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=LONGEST)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=LONGEST)]
    """Tokens of the answer as it was."""
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=LONGEST)] = 0
    """Most tokens that were asked for; 0: as many as came."""
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `block_tokens`, the first so many; what no id covers is shared with nobody."""
    tenant: str = ""
    priority: int = 0
    traffic_class: str = msgspec.field(default="", name="class")


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


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in order of arrival. All columns but `blocks` have one entry per request."""

    name: str
    arrival_s: Reals
    """Seconds since the first request."""
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    priority: Ints
    tenant: Ints
    """Index into `tenants`."""
    traffic_class: Ints
    tenants: tuple[str, ...]
    classes: tuple[str, ...]
    block_tokens: int
    blocks: Ints
    """All prompts' block ids one after the other, dense from 0 on."""
    block_start: Offsets
    """Where each request's begin; one entry more than requests."""
    notes: tuple[str, ...] = ()
    """What was left out, one sentence each."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @cached_property
    def distinct_blocks(self) -> int:
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def block_ids(self, index: int) -> Ints:
        """Ids of a prompt's blocks, those that it may share."""
        return self.blocks[self.block_start[index] : self.block_start[index + 1]]

    def prompt(self, index: int) -> Ints:
        """Made-up tokens of a prompt: prompts agree in as many of them as their blocks say. Never shares with `filler`."""
        length = int(self.prompt_tokens[index])
        ids = self.block_ids(index)
        out = np.full(length, self.filler(index) - 1, dtype=np.int32)
        if len(ids):
            shared = min(length, len(ids) * self.block_tokens)
            out[:shared] = np.repeat(ids, self.block_tokens)[:shared]
            out[:shared] += FIRST_TOKEN
        return out

    def filler(self, index: int) -> int:
        """The token id that a request's made-up answer consists of: no other request has it."""
        return FIRST_TOKEN + self.distinct_blocks + 2 * index + 1

    def speed_up(self, factor: float) -> Trace:
        """The same requests arriving `factor` times as fast."""
        return replace(self, arrival_s=self.arrival_s / factor)

    def longer(self, *, prompt: float = 1.0, output: float = 1.0) -> Trace:
        """The same requests with prompts and answers that much longer (at least one token each); block ids stay where they were."""

        def scaled(column: Ints, factor: float) -> Ints:
            out: Ints = np.maximum(1, np.rint(column * factor)).astype(np.int32)
            return out

        return replace(
            self,
            prompt_tokens=scaled(self.prompt_tokens, prompt),
            output_tokens=scaled(self.output_tokens, output),
            max_tokens=scaled(self.max_tokens, output),
        )

    def select(self, which: npt.NDArray[np.int64]) -> Trace:
        """These requests, by ascending index, as a trace of their own that begins at 0 s."""
        arrival = self.arrival_s[which]
        begin, end = self.block_start[which], self.block_start[which + 1]
        blocks = [self.blocks[first:last] for first, last in zip(begin.tolist(), end.tolist(), strict=True)]
        return replace(
            self,
            arrival_s=arrival - (arrival[0] if len(arrival) else 0.0),
            prompt_tokens=self.prompt_tokens[which],
            output_tokens=self.output_tokens[which],
            max_tokens=self.max_tokens[which],
            priority=self.priority[which],
            tenant=self.tenant[which],
            traffic_class=self.traffic_class[which],
            blocks=np.concatenate(blocks) if blocks else self.blocks[:0],
            block_start=np.concatenate((np.zeros(1, np.int64), np.cumsum(end - begin))),
        )

    def part(self, first: int, last: int) -> Trace:
        """Requests first .. last - 1 as a trace of their own."""
        return self.select(np.arange(len(self), dtype=np.int64)[first:last])


def make_trace(lines: Iterable[TraceLine], *, name: str, block_tokens: int, notes: Sequence[str] = ()) -> Trace:
    """Columns from lines; sorts them by arrival (a stable sort) and counts time from the first."""
    arrival: list[float] = []
    numbers: list[tuple[int, int, int, int, int, int]] = []
    blocks: list[int] = []
    start = [0]
    tenants: dict[str, int] = {}
    classes: dict[str, int] = {}
    dense: dict[int, int] = {}
    for line in lines:
        arrival.append(line.arrival_s)
        numbers.append(
            (
                line.prompt_tokens,
                line.output_tokens,
                max(line.max_tokens, line.output_tokens),
                line.priority,
                tenants.setdefault(line.tenant, len(tenants)),
                classes.setdefault(line.traffic_class, len(classes)),
            )
        )
        most = -(-line.prompt_tokens // block_tokens)
        blocks.extend(dense.setdefault(block, len(dense)) for block in line.blocks[:most])
        start.append(len(blocks))
    times = np.array(arrival, dtype=np.float64)
    table = np.array(numbers, dtype=np.int32).reshape(-1, 6)
    ids = np.array(blocks, dtype=np.int32)
    offsets = np.array(start, dtype=np.int64)
    if len(times) and (np.diff(times) < 0).any():
        order = np.argsort(times, kind="stable")
        times, table = times[order], table[order]
        sizes = np.diff(offsets)[order]
        ids = np.concatenate([ids[offsets[i] : offsets[i + 1]] for i in order]) if len(ids) else ids
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    if len(times):
        times = times - times[0]
    columns = [np.ascontiguousarray(table[:, place]) for place in range(6)]
    return Trace(
        name=name,
        arrival_s=times,
        prompt_tokens=columns[0],
        output_tokens=columns[1],
        max_tokens=columns[2],
        priority=columns[3],
        tenant=columns[4],
        traffic_class=columns[5],
        tenants=tuple(tenants) or ("",),
        classes=tuple(classes) or ("",),
        block_tokens=block_tokens,
        blocks=ids,
        block_start=offsets,
        notes=tuple(notes),
    )


# ---------------------------------------------------------------------------------------------------------------- files


def read_trace(path: Path, *, kind: str | None = None, limit: int | None = None) -> Trace:
    """Reads a trace file, of the kind that its first line shows unless one is named in READERS; at most `limit` requests.

    Raises UserError with the line's number for a line that cannot be read.
    """
    if kind is not None and kind not in READERS:
        raise UserError(f"there is no trace format {kind!r}, only {', '.join(READERS)}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(file, path=path, kind=kind, limit=limit)
    except OSError as error:
        raise UserError(f"the trace {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8, so it is no trace") from None


def _read(file: io.TextIOWrapper, *, path: Path, kind: str | None, limit: int | None) -> Trace:
    first = file.readline()
    if not first.strip():
        raise UserError(f"{path} is empty or begins with an empty line")
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
    """With session ids a session is one growing text: each of its prompts begins with those before it."""
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
            blocks = tuple(place << 20 | index for index in range(prompt // MOONCAKE_BLOCK))
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


def lines_of(trace: Trace) -> Iterator[TraceLine]:
    """The requests one by one."""
    for index in range(len(trace)):
        output, most = int(trace.output_tokens[index]), int(trace.max_tokens[index])
        yield TraceLine(
            arrival_s=float(trace.arrival_s[index]),
            prompt_tokens=int(trace.prompt_tokens[index]),
            output_tokens=output,
            max_tokens=0 if most == output else most,
            blocks=tuple(trace.block_ids(index).tolist()),
            tenant=trace.tenants[trace.tenant[index]],
            priority=int(trace.priority[index]),
            traffic_class=trace.classes[trace.traffic_class[index]],
        )


# -------------------------------------------------------------------------------------------------------------- made up


def poisson_trace(
    *,
    requests: int,
    per_s: float,
    prompt: tuple[float, float] = (60.0, 1.1),
    output: tuple[float, float] = (120.0, 0.8),
    longest_prompt: int = 4096,
    longest_output: int = 1024,
    prefixes: int = 0,
    prefix_blocks: int = 0,
    block_tokens: int = 64,
    seed: int = 0,
    name: str = "poisson",
) -> Trace:
    """A made-up trace: Poisson arrivals, log-normal lengths given as (median, sigma), fixed by its seed.

    With `prefixes` each prompt begins with one of so many common prefixes of `prefix_blocks` blocks, popular ones more often (1 / rank).
    """
    draw = np.random.default_rng(seed)
    arrival = np.cumsum(draw.exponential(1 / per_s, requests))
    own = np.clip(np.rint(draw.lognormal(math.log(prompt[0]), prompt[1], requests)), 1, longest_prompt)
    said = np.clip(np.rint(draw.lognormal(math.log(output[0]), output[1], requests)), 1, longest_output)
    answer = said.astype(np.int32)
    blocks = np.zeros(0, np.int32)
    start = np.zeros(requests + 1, np.int64)
    if prefixes and prefix_blocks:
        rank = 1.0 / np.arange(1, prefixes + 1)
        which = draw.choice(prefixes, size=requests, p=rank / rank.sum())
        blocks = (which[:, None] * prefix_blocks + np.arange(prefix_blocks)).astype(np.int32).ravel()
        start = np.arange(requests + 1, dtype=np.int64) * prefix_blocks
        own = own + prefix_blocks * block_tokens
    zeros = np.zeros(requests, np.int32)
    return Trace(
        name=name,
        arrival_s=arrival - (arrival[0] if requests else 0.0),
        prompt_tokens=own.astype(np.int32),
        output_tokens=answer,
        max_tokens=answer,
        priority=zeros,
        tenant=zeros,
        traffic_class=zeros,
        tenants=("",),
        classes=("",),
        block_tokens=block_tokens,
        blocks=blocks,
        block_start=start,
    )
