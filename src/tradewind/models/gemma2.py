"""Gemma 2: windowed and full layers in turn, norms on both sides of a block, softly capped scores and logits (Gemma 2 report 2024).

Knows: the order of the bricks and this family's names. Refuses to know: windows, caps and the scale of queries; the card has them.

    x = sqrt(E) * embed(ids)
    for each layer:  x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))
    logits = cap(head(norm(x)))

Hugging Face files store norm weights as w - 1; the card's norm_offset mends that at load. transformers rounds the embedding scale to the
type of the embedding (bf16 runs: sqrt(640) -> 25.25); here, as in its float32 runs, it is exact.
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.attention import Attention
from tradewind.layers.build import Build, Tensor
from tradewind.layers.mlp import GatedMLP
from tradewind.layers.norm import RMSNorm
from tradewind.models import llama
from tradewind.models.llama import Llama

HF_PLACES: dict[str, str] = {
    **llama.HF_PLACES,
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_out_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.mlp_out_norm.weight",
    "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.mlp_norm.weight",
}

GGUF_NAMES: dict[str, str] = {
    **{gguf: name for gguf, name in llama.GGUF_NAMES.items() if gguf != "blk.{}.ffn_norm.weight"},
    "blk.{}.ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}


class SandwichLayer:
    """Attention and MLP, each normed before and after."""

    def __init__(self, build: Build, *, layer: int) -> None:
        weights = build.weights.at(f"layers.{layer}")
        self.attention_norm = RMSNorm(build, weights, "attention_norm")
        self.attention = Attention(build, weights.at("attention"), layer=layer)
        self.attention_out_norm = RMSNorm(build, weights, "attention_out_norm")
        self.mlp_norm = RMSNorm(build, weights, "mlp_norm")
        self.mlp = GatedMLP(build, weights.at("mlp"))
        self.mlp_out_norm = RMSNorm(build, weights, "mlp_out_norm")

    def attend(self, batch: ForwardBatch, x: Tensor, delta: Tensor | None) -> Tensor:
        """Adds the layer before (delta) to x; returns what attention makes of it, before its output matrix."""
        return self.attention.mix(batch, self.attention_norm(batch, x, delta, out="normed"))

    def finish(self, batch: ForwardBatch, x: Tensor, mixed: Tensor) -> Tensor:
        """Adds attention's answer to x and returns what this layer's MLP wants added."""
        block = self.attention.output(batch, mixed, out="block")
        delta = self.attention_out_norm(batch, block, out="delta")
        normed = self.mlp_norm(batch, x, delta, out="normed")
        block = self.mlp(batch, normed, out="block")
        return self.mlp_out_norm(batch, block, out="delta")


class Gemma2(Llama):
    """A decoder of SandwichLayers; embedding scale, windows and caps come from the card."""

    layer_type = SandwichLayer
