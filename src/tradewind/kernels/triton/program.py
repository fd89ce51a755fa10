"""What a step of one size launches: kernels with their arguments in order, and on which of two streams.

Knows: launches and streams. Refuses to know: how launches are chosen (planning.py), graphs, the arithmetic of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Fresh = Literal["none", "some", "all"]
"""Which rows of several tokens have all of their keys in the step, as prompts that begin in it do; "none": nothing is made of those."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The size of step that a program serves."""

    tokens: int
    """Capacity: rows of every [T, ...] buffer (of the head's tape: rows that want logits)."""
    rows: int
    """Capacity: sequences of the step."""
    singles: bool
    """Every row has exactly one token: a decode step."""
    longest: int
    """No row has more keys than this, the step's own included; picks how attention is split."""
    fresh: Fresh = "none"
    adapted: bool = False
    """Some token may have an adapter. Where none has, nothing is added, and gate and up are made one as if there were no adapters."""
    shared: bool = False
    """One-token rows may share leading keys, which are then read once for all of them; how many is known on the device."""
    deep: int = 0
    """Of rows of several tokens there are so many at most, at the step's end, and one of them has many keys: attention is cut over keys."""
    deep_tokens: int = 0
    """Capacity of those rows."""


@dataclass
class Launch:
    """One kernel (or library call) with its arguments."""

    kernel: Callable[..., None]
    text: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    lane: int = 0
    """1: on the second stream (lanes.py)."""
    join: bool = False
    """The first in lane 0 that must wait for lane 1."""

    def run(self) -> None:
        self.kernel(*self.arguments, **self.options)


class SideStreams:
    """For each stream that work is on, a second one and the events that tie the two. Each by itself: while one thread captures on its
    stream, work of another must not end up in that capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: dict[int, tuple[Any, Any, Any]] = {}

    def run(self, launches: Iterable[Launch]) -> None:
        """Launches everything, lane 0 on the current stream; in a capture the events become edges of the graph."""
        main: Any = torch.cuda.current_stream()
        stream, forked, joined = self._of(main)
        away = False
        for launch in launches:
            if launch.lane:
                if not away:
                    forked.record(main)
                    stream.wait_event(forked)
                    away = True
                with torch.cuda.stream(stream):
                    launch.run()
                continue
            if away and launch.join:
                joined.record(stream)
                main.wait_event(joined)
                away = False
            launch.run()
        if away:  # a capture must not end with a stream of its own
            joined.record(stream)
            main.wait_event(joined)

    def _of(self, main: Any) -> tuple[Any, Any, Any]:
        """The second stream of a stream, and the events of fork and join."""
        found = self._beside.get(main.cuda_stream)
        if found is None:
            stream: Any = torch.cuda.Stream(self._device)
            while stream.cuda_stream == main.cuda_stream:  # they come from a ring
                stream = torch.cuda.Stream(self._device)
            found = self._beside[main.cuda_stream] = (stream, torch.cuda.Event(), torch.cuda.Event())
        return found


@dataclass(frozen=True)
class Program:
    """Launches of one bucket, in order. The first run compiles kernels: do it before capturing a graph."""

    bucket: Bucket
    launches: tuple[Launch, ...]
    side: SideStreams | None = None
    """Where lane 1 runs; None: all in one stream, in order."""

    def run(self) -> None:
        """Launches everything on the current stream, or lane 1 beside it."""
        if self.side is not None:
            self.side.run(self.launches)
            return
        for launch in self.launches:
            launch.run()

    def describe(self) -> str:
        """One line per launch."""
        late = {True: ", late", False: ""}
        lane = {0: "", 1: ", beside"}
        return "\n".join(
            launch.text + late[bool(launch.options.get("late"))] + lane[launch.lane] + (", join" if launch.join else "")
            for launch in self.launches
        )
