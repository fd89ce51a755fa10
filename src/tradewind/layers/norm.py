"""RMS norm, with the addition to the residual stream that always precedes it.

Knows: the norm's weight. Refuses to know: where the stream comes from.
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build, Tensor, Weights


class RMSNorm:
    """x / rms(x) * w (Zhang & Sennrich 2019). Checkpoints that store w - 1 are mended when loaded (card.norm_offset)."""

    def __init__(self, build: Build, weights: Weights, name: str) -> None:
        self.ops = build.ops
        self.size = build.card.hidden
        self.eps = build.card.norm_eps
        self.weight = weights.vector({f"{name}.weight": self.size}, offset=build.card.norm_offset)

    def __call__(self, batch: ForwardBatch, x: Tensor, delta: Tensor | None = None, *, out: str) -> Tensor:
        """Adds delta to x in place when given, then norms x into the scratch buffer `out`; all [T, E]."""
        result = batch.scratch.take(out, (batch.capacity, self.size))
        self.ops.add_rms_norm(x, delta, self.weight, eps=self.eps, out=result, count=batch.tokens)
        return result
