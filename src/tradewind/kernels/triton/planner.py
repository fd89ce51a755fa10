"""A program in the making: copies of a tape's calls, who reads and writes what, and the launches so far.

Knows: the data flow between calls, the bucket's part of each buffer, and by which way a matmul of that size is computed. Refuses to know:
what is folded into what (passes.py and the *_program files), and kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tradewind.kernels.ops import PackedMatrix
from tradewind.kernels.triton.launch import AFTER_ALL
from tradewind.kernels.triton.program import Bucket, Launch
from tradewind.kernels.triton.tape import Call, Tape
from tradewind.kernels.triton.tuning import TileConfig, Tuning
from tradewind.kernels.triton.workspace import Workspace

COUNTED_FROM = 65
"""From so many tokens on kernels read how many are live; below, they compute the padding too: it costs less than waiting for the number."""


class Planner:
    """Passes change its calls; then their launches are appended, one call after the other."""

    def __init__(self, tape: Tape, bucket: Bucket, *, fuse: bool) -> None:
        ops = tape.ops
        self.tuning: Tuning = ops.tuning
        self.workspace: Workspace = ops.workspace
        self.deterministic, self.pdl = ops.deterministic, ops.pdl
        self.bucket, self.fuse = bucket, fuse
        self.calls = [call.copy() for call in tape.calls]
        self.results = tape.results()
        self.launches: list[Launch] = []
        self.sorted_tokens: dict[tuple[int, int], dict[str, Any]] = {}
        """By adapters' buffer and slots: where the step's tokens lie, sorted by adapter."""
        self.beside: list[Call] = []
        """Calls of lane 1 that lane 0 has not waited for."""
        self.weighed: frozenset[int] = frozenset()
        """Calls of experts whose weighted sum another call computes; known when launches are emitted."""
        self.lane = 0
        self.after_all = self.join = False
        """The next launch is the first of lane 1, or waits for it."""

    # -------------------------------------------------------------------------------------------------- the data flow

    def last_write(self, before: int, buffer: int) -> int:
        """Index of the call whose value of the buffer the call `before` sees; -1 when it comes from outside."""
        return next((i for i in range(before - 1, -1, -1) if buffer in self.calls[i].writes()), -1)

    def readers(self, writer: int, buffer: int) -> list[int] | None:
        """Calls that read the value which `writer` left in the buffer; None when somebody outside may."""
        found = []
        for i in range(writer + 1, len(self.calls)):
            if buffer in self.calls[i].reads():
                found.append(i)
            if buffer in self.calls[i].writes():
                return found
        return None if buffer in self.results else found

    def untouched(self, buffer: int, first: int, last: int, *, reads: bool) -> bool:
        """Whether no call strictly between writes the buffer (or, with reads, reads it)."""
        return all(
            buffer not in call.writes() and not (reads and buffer in call.reads())
            for call in self.calls[first + 1 : last]
        )

    def way(self, call: Call) -> str:
        """How a matmul of this bucket is computed: "fixed", "gemv", "tile", "wide" or "library"."""
        weight: PackedMatrix = call["weight"]
        if self.deterministic:
            return "fixed"
        if call["low_rank"] is not None:
            return "tile"
        if weight.layout != "fp8_block" and weight.n * weight.k >= 1 << 31:
            return "library"
        if self.bucket.tokens == 1:
            return "gemv"
        if self.tile(weight) is None:
            return "library"
        return "tile" if self.bucket.tokens <= self.tuning.tile_rows else "wide"

    def tile(self, weight: PackedMatrix) -> TileConfig | None:
        """Constants of our tiles for the bucket's tokens; None where the library is better."""
        if weight.layout == "fp8_block":
            return self.tuning.block_tile(self.bucket.tokens, weight.n, weight.k)
        choose = self.tuning.tile if self.bucket.tokens <= self.tuning.tile_rows else self.tuning.wide
        return choose(self.bucket.tokens, weight.n, weight.k, fp8=weight.layout == "fp8")

    # -------------------------------------------------------------------------------------------------------- emission

    def cut(self, buffer: Tensor | None) -> Any:
        """The bucket's part of a buffer [T, ...]."""
        return None if buffer is None else buffer[: self.bucket.tokens]

    def count(self, call: Call, *, always: bool = False) -> Tensor | None:
        """The live count, where a kernel should read it."""
        tokens = self.bucket.tokens
        return call["count"] if tokens >= COUNTED_FROM or (always and tokens > 1) else None

    def launch(self, kernel: Callable[..., None], text: str, *arguments: Any, **options: Any) -> None:
        """Appends a launch. What it names must live on without it (tape, weights, workspace): a graph keeps addresses, not programs."""
        self.launches.append(Launch(kernel, text, arguments, options, self.lane, self.join))
        self.after_all = self.join = False

    def own(self, kernel: Callable[..., None], text: str, *arguments: Any, **options: Any) -> None:
        """A kernel of ours: it joins the chain of dependent launches."""
        pdl: bool | int = AFTER_ALL if self.pdl and (self.after_all or self.join) else self.pdl
        self.launch(kernel, text, *arguments, **options, pdl=pdl)

    def partial_sums(self, count: int) -> Tensor:
        """float32 scratch of a split matmul; each lane has its own."""
        if not self.lane:
            return self.workspace.floats(count)
        return self.workspace.piece("side sums", count, dtype=torch.float32)

    def arrivals(self, count: int) -> Tensor:
        """int32 arrival counters of a split matmul."""
        if not self.lane:
            return self.workspace.counters(count)
        return self.workspace.piece("side arrivals", count, dtype=torch.int32)


def is_matmul(call: Call) -> bool:
    return call.op in ("linear", "gated_linear")


def shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
