"""Reading the residual stream without a norm, for layers that norm what a block gives instead of what it takes.

Knows: that the stream is float32 and blocks take activations. Refuses to know: who reads.
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build, Tensor


class ReadStream:
    """x += delta, and x as a block's input."""

    def __init__(self, build: Build) -> None:
        self.ops = build.ops
        self.size = build.card.hidden

    def __call__(self, batch: ForwardBatch, x: Tensor, delta: Tensor | None, *, out: str) -> Tensor:
        """Adds delta to x in place when given, then copies x into the scratch buffer `out`; all [T, E]."""
        result = batch.scratch.take(out, (batch.capacity, self.size))
        self.ops.add(x, delta, gate=None, out=result, count=batch.tokens)
        return result
