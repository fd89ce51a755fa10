"""Granite 3: Llama with four multipliers, so that one set of learning rates fits all sizes (muP: Yang et al. 2022; Granite 3 report 2024).

Knows: where the residual multiplier acts. Refuses to know: the others; embedding, attention and logits read theirs from the card.

    x = embedding_multiplier * embed(ids)
    for each layer:  x += residual_multiplier * attention(norm(x));  x += residual_multiplier * mlp(norm(x))
    logits = head(norm(x)) / logits_scaling
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build, Tensor
from tradewind.models.llama import GGUF_INTERLEAVED, GGUF_NAMES, HF_PLACES, Llama, LlamaLayer

__all__ = ["GGUF_INTERLEAVED", "GGUF_NAMES", "HF_PLACES", "Granite"]


class GraniteLayer(LlamaLayer):
    """Pre-norm attention and gated MLP, each scaled before it is added."""

    def __init__(self, build: Build, *, layer: int) -> None:
        super().__init__(build, layer=layer)
        self.ops = build.ops
        self.residual_scale = build.card.residual_scale

    def finish(self, batch: ForwardBatch, x: Tensor, mixed: Tensor) -> Tensor:
        """Adds attention's answer to x and returns what this layer's MLP wants added."""
        delta = self.attention.output(batch, mixed, out="delta")
        self.ops.scale(delta, factor=self.residual_scale, count=batch.tokens)
        normed = self.mlp_norm(batch, x, delta, out="normed")
        delta = self.mlp(batch, normed, out="delta")
        self.ops.scale(delta, factor=self.residual_scale, count=batch.tokens)
        return delta


class Granite(Llama):
    """A decoder of GraniteLayers."""

    layer_type = GraniteLayer
