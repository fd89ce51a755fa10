"""Traffic as columns: when requests come, how long they and their answers are, what their prompts have in common.

Knows: columns, and how to make tokens up that share what the prompts shared. Refuses to know: files (traces), engines, and any text.

      request i     | block 17 | block 4 | block 91 |  of its own     equal block ids mean equal text *and* equal text before it
                    |-- prompt ------|-- answer --------------|

A million requests are five arrays, not a million objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.contract.step import Ints

Reals = npt.NDArray[np.float64]
Offsets = npt.NDArray[np.int64]

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
    """Ids of the blocks of `block_tokens` of prompt and answer, the first so many; what no id covers is shared with nobody."""
    tenant: str = ""
    priority: int = 0
    traffic_class: str = msgspec.field(default="", name="class")


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
    """All requests' block ids one after the other, dense from 0 on."""
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
        """Ids of the blocks that a request may share, its answer's among them."""
        return self.blocks[self.block_start[index] : self.block_start[index + 1]]

    def prompt_ids(self, index: int) -> Ints:
        """Those of them that a router can know when the request comes: of the prompt alone."""
        length = int(self.prompt_tokens[index])
        # Where blocks go on into answers, the one on the border is part of the answer's text, too.
        most = length // self.block_tokens if self.answers_known else -(-length // self.block_tokens)
        return self.block_ids(index)[:most]

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

    @cached_property
    def answers_known(self) -> bool:
        """Whether some request has blocks behind the one with the end of its prompt: then that one is prompt and answer in all of them."""
        return bool((np.diff(self.block_start) > -(-self.prompt_tokens // self.block_tokens)).any())

    def filler(self, index: int) -> int:
        """The token id that a request's made-up answer consists of where no block covers it: no other request has it."""
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
        most = -(-(line.prompt_tokens + line.output_tokens) // block_tokens)
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
