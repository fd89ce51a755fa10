"""One GPU as a runner sees it: a stream, graphs, pinned memory, marks in time. The only file through which the runner reaches torch.

Knows: how work is put on the device and waited for. Refuses to know: what the work is. On "cpu" (Triton's interpreter, for tests) the same
verbs run at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

INT32 = torch.int32


@dataclass(frozen=True)
class Pinned:
    """Host memory that kernels can read and write: `host` and `device` are the same bytes."""

    host: npt.NDArray[Any]
    device: Tensor


class Mark:
    """A place in the stream of work."""

    def __init__(self, event: Any = None) -> None:
        self._event = event
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Returns when everything before the mark is done; lets other threads run meanwhile."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def passed(self) -> bool:
        """Whether everything before the mark is done."""
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: Mark) -> float:
        """Device time between two marks that both have passed."""
        if self._event is None or earlier._event is None:
            return self._at_s - earlier._at_s
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Graph:
    """A sequence of launches, replayed in one call."""

    def __init__(self, graph: Any, run: Callable[[], None]) -> None:
        self._graph, self._run = graph, run

    def replay(self) -> None:
        """Puts the launches on the stream."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


class Gpu:
    """A device and the one stream on which all of its work is done."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.on_gpu else None
        self._beside = torch.cuda.Stream(device) if self.on_gpu else None
        self._pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.quiet = threading.Lock()
        """Held while a graph is captured, and by another thread while it does what would spoil a capture (waiting for the device, giving
        memory back)."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work of the block goes to the stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        """What was done outside the stream (weights, zeroed buffers) is done before what follows in it."""
        if self.on_gpu:
            with self.quiet:
                torch.cuda.synchronize(self.device)

    def zeros(self, *shape: int) -> Tensor:
        """int32 on the device."""
        return torch.zeros(shape, dtype=INT32, device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def reals(self, *shape: int) -> Tensor:
        """float32 on the device."""
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.int32) -> Pinned:
        """Zeroed host memory under both names."""
        values = torch.from_numpy(np.zeros(shape, dtype))
        if self.on_gpu:
            values = values.pin_memory()
        return Pinned(values.numpy(), values)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """In the stream, without waiting. Either side may be pinned host memory."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """A mark behind all work so far."""
        if not self.on_gpu:
            return Mark()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return Mark(event)

    def begin_beside(self) -> None:
        """Makes the calling thread fit to capture beside the one that works: the matmul library wants a handle in each thread."""
        if not self.on_gpu:
            return
        assert self._beside is not None
        torch.cuda.set_device(self._beside.device)
        torch.cuda.set_stream(self._beside)  # of this thread
        with self.quiet:
            small = torch.zeros((16, 16), dtype=torch.bfloat16, device=self.device)
            torch.mm(small, small)
            self._beside.synchronize()

    def capture(self, run: Callable[[], None], *, beside: bool = False) -> Graph:
        """The launches of `run` as a graph; nothing is executed. The library's handles must be there: something of its kind has run, or,
        in a thread that captures `beside` the one that works, `begin_beside`."""
        if not self.on_gpu:
            return Graph(None, run)
        graph = torch.cuda.CUDAGraph()
        with self.quiet, torch.cuda.stream(self._beside if beside else self._stream):
            # Relaxed: a kernel may be loaded now, and other threads may allocate pinned memory.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                run()
            finally:
                graph.capture_end()
        return Graph(graph, run)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes as the device says; (0, 0) on a CPU."""
        return torch.cuda.mem_get_info(self.device) if self.on_gpu else (0, 0)
