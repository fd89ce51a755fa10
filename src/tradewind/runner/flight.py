"""A step on its way through a GPU: what must be kept until its result is read, and pinned memory for the changes that came with it.

Knows: which arrays a step's result is made of. Refuses to know: what is launched (programs) and in which order (graph_runner).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tradewind.contract.step import Ints, Step, StepResult
from tradewind.kernels.ops import Tensor
from tradewind.kernels.triton import step as kernels
from tradewind.kernels.triton.graphs import Gpu, Mark, Pinned


@dataclass(eq=False)
class Flight:
    """A step on its way. `finish` turns it into a result, once."""

    step: Step
    turn: int = -1
    """Its place in the rings; -1: nothing was put on the device."""
    sampling: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Rows that want a token."""
    began: Mark | None = None
    done: Mark | None = None
    host_s: float = 0.0
    logprobs: int = -1
    logprob_parts: tuple[Pinned, ...] = ()
    prompts: list[tuple[int, int, Ints, int, tuple[Pinned, ...]]] = field(default_factory=list)
    """(row, first token of the chunk, tokens that follow, top, arrays) of prompt logprobs."""
    stuck: dict[int, str] = field(default_factory=dict)
    """Samples whose grammar allows no token, and why."""
    rested: tuple[Mark, Mark] | None = None
    """From the end of the body to where masks were there: in between the device may have stood still."""
    grammar: tuple[float, dict[int, float]] = (0.0, {})
    """What masks and matchers took on the host, and by row."""
    refused: dict[int, str] = field(default_factory=dict)
    """Rows whose adapter is not there, and why."""
    hidden: Pinned | None = None
    query_start: Ints | None = None
    result: StepResult | None = None


class Staging:
    """Pinned memory for a step's changes: a ring of buffers, grown when needed; one is used again when its step has long ended."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buffers = [gpu.pinned((4096,)) for _ in range(kernels.RING)]
        self._used = 0
        self._at = 0

    def begin(self, words: int) -> None:
        """The next buffer takes `words` words. Its own order, not the header's: a step may change slots and have no row."""
        self._at, self._used = (self._at + 1) % len(self._buffers), 0
        if len(self._buffers[self._at].host) < words:
            self._buffers[self._at] = self._gpu.pinned((2 * words,))

    def put(self, values: npt.NDArray[np.int32]) -> Tensor:
        """The values where a kernel can read them."""
        buffer, first = self._buffers[self._at], self._used
        end = first + values.size
        buffer.host[first:end] = values.reshape(-1)
        self._used = -(-end // 4) * 4  # the next one is aligned as this one
        return buffer.device[first:end].view(values.shape)
