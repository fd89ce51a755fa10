"""RMS norm and layer norm, with the addition to the residual stream that always precedes them.

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


class LayerNorm:
    """(x - mean) / deviation * w + b (Ba et al. 2016), of a stream that is normed after each addition (post-norm, as in BERT)."""

    def __init__(self, build: Build, weights: Weights, name: str) -> None:
        self.ops = build.ops
        self.eps = build.card.norm_eps
        self.weight = weights.vector({f"{name}.weight": build.card.hidden})
        self.bias = weights.vector({f"{name}.bias": build.card.hidden})

    def __call__(self, batch: ForwardBatch, x: Tensor, delta: Tensor) -> None:
        """x = norm(x + delta) in place; both [T, E]."""
        self.ops.add_layer_norm(x, delta, self.weight, self.bias, eps=self.eps, out=x, count=batch.tokens)
