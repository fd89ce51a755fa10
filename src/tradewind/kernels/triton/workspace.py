"""Scratch of the op set "cuda": partial sums, arrival counters, twins of buffers in other types, tables of angles.

Knows: sizes and lifetimes. Refuses to know: kernels, calls and programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tradewind.kernels.triton import blocks
from tradewind.kernels.triton.launch import FP8
from tradewind.kernels.triton.library import rope_angles


def address(tensor: Any) -> int:
    """What tells buffers apart."""
    return int(tensor.data_ptr())


@dataclass
class Workspace:
    """Scratch of kernels, shared by all programs of one op set: they never run at the same time. Grows only; old pieces live on, because
    graphs name them by address, so plan the largest bucket first."""

    device: torch.device
    bytes: int = 0
    """Of everything that was ever allocated here."""
    _all: list[Tensor] = field(default_factory=list)
    """What was ever allocated here, so that it lives."""
    _floats: Tensor | None = None
    _counters: Tensor | None = None
    _both: Tensor | None = None
    _pieces: dict[str, Tensor] = field(default_factory=dict)
    _twins: dict[tuple[Any, ...], tuple[Tensor, ...]] = field(default_factory=dict)
    _tables: dict[tuple[int, float], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def _new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made = torch.zeros(shape, dtype=dtype, device=self.device)
        self.bytes += made.nbytes
        self._all.append(made)
        return made

    def floats(self, count: int) -> Tensor:
        """float32 partial sums, at least `count`."""
        held = self._floats
        if held is None or held.numel() < count:
            held = self._floats = self._new(max(count, 1 << 16), dtype=torch.float32)
        return held

    def counters(self, count: int) -> Tensor:
        """int32 arrival counters: zero, and left zero by every kernel."""
        held = self._counters
        if held is None or held.numel() < count:
            held = self._counters = self._new(max(count, 1 << 14), dtype=torch.int32)
        return held

    def both(self, rows: int, width: int) -> Tensor:
        """bf16 [rows, width]: gate and up before their product; used up by the next launch."""
        held = self._both
        if held is None or held.numel() < rows * width:
            held = self._both = self._new(rows * width, dtype=torch.bfloat16)
        return held[: rows * width].view(rows, width)

    def piece(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """Scratch of that name: its value lives until the next launch that writes the piece."""
        count = math.prod(shape)
        held = self._pieces.get(name)
        if held is None or held.numel() < count:
            held = self._pieces[name] = self._new(count, dtype=dtype)
        assert held.dtype == dtype, (name, held.dtype, dtype)
        return held[:count].view(shape)

    def beside(self, buffer: Tensor, name: str, *shape: int) -> Tensor:
        """int32 zeros that belong to a buffer: facts about a step that are computed beside it. Lives as long as the buffer."""
        key = (address(buffer), *shape, name)
        if key not in self._twins:
            self._twins[key] = (self._new(*shape, dtype=torch.int32),)
        return self._twins[key][0]

    def quantised(self, buffer: Tensor, layout: str = "fp8") -> tuple[Tensor, Tensor]:
        """The FP8 twin of a buffer [T, K] for weights of a layout: e4m3 [T, K], and float32 [T] or, by blocks, [T, K / 128]. It lives as
        long as the buffer's value."""
        key = (address(buffer), *buffer.shape[1:], layout)
        if key not in self._twins or len(self._twins[key][0]) < len(buffer):
            scales = (blocks.parts(buffer.shape[1]),) if layout == "fp8_block" else ()
            self._twins[key] = (
                self._new(*buffer.shape, dtype=FP8),
                self._new(len(buffer), *scales, dtype=torch.float32),
            )
        return self._twins[key]  # type: ignore[return-value]

    def rounded(self, buffer: Tensor) -> Tensor:
        """The bf16 twin of a float32 buffer or vector."""
        key = (address(buffer), *buffer.shape[1:], "bf16")
        if key not in self._twins or len(self._twins[key][0]) < len(buffer):
            self._twins[key] = (self._new(*buffer.shape, dtype=torch.bfloat16),)
        return self._twins[key][0][: len(buffer)]

    def ones(self, rows: int, width: int) -> Tensor:
        """float32 [rows, width] of ones."""
        held = self._pieces.get("ones")
        if held is None or held.numel() < rows * width:
            held = self._pieces["ones"] = self._new(rows * width, dtype=torch.float32).fill_(1.0)
        return held[: rows * width].view(rows, width)

    def angle_table(self, inv_freq: Tensor, *, scale: float, positions: int) -> Tensor:
        """float32 [positions, D]: scale * (cos | sin) of every position, computed once."""
        key = (address(inv_freq), scale)
        held = self._tables.get(key)
        if held is None or len(held[0]) < positions:
            table = self._new(positions, 2 * len(inv_freq), dtype=torch.float32)
            every = torch.arange(positions, dtype=torch.int32, device=self.device)
            rope_angles(every, inv_freq, scale=scale, out=table, angle=torch.empty_like(table)[:, : len(inv_freq)])
            held = self._tables[key] = (table, inv_freq)  # inv_freq is held so that its address stays its own
        return held[0]
