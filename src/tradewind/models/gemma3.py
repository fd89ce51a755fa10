"""Gemma 3, text: five windowed layers to each full one, two ropes, norms on both sides of a block (Gemma 3 report 2025).

Knows: the order of the bricks and this family's names. Refuses to know: images.

    x = sqrt(E) * embed(ids)
    for each layer:  x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))
    logits = head(norm(x))

Windowed layers turn by `rope_local`, full ones by `rope`. Hugging Face files store norm weights as w - 1; the card's norm_offset mends
that at load. transformers rounds the embedding scale to the type of the embedding (bf16 runs: sqrt(640) -> 25.25); here, as in its
float32 runs, it is exact.
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.attention import Attention
from tradewind.layers.build import Build, Tensor
from tradewind.layers.mlp import GatedMLP
from tradewind.layers.norm import RMSNorm
from tradewind.models import qwen3
from tradewind.models.llama import Llama

HF_PLACES: dict[str, str] = {
    **qwen3.HF_PLACES,
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_out_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.mlp_out_norm.weight",
    "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.mlp_norm.weight",
}

GGUF_NAMES: dict[str, str] = {
    **qwen3.GGUF_NAMES,
    "blk.{}.ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}

# The decoder inside a vision-and-text checkpoint, in both spellings that were published, and what is left aside there.
HF_RENAMES: dict[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
HF_IGNORED: tuple[str, ...] = (
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "model.vision_tower.",
    "vision_tower.",
)


class Gemma3Layer:
    """Attention and MLP, each normed before and after."""

    def __init__(self, build: Build, *, layer: int) -> None:
        weights = build.weights.at(f"layers.{layer}")
        self.attention_norm = RMSNorm(build, weights, "attention_norm")
        self.attention = Attention(build, weights.at("attention"), layer=layer)
        self.attention_out_norm = RMSNorm(build, weights, "attention_out_norm")
        self.mlp_norm = RMSNorm(build, weights, "mlp_norm")
        self.mlp = GatedMLP(build, weights.at("mlp"))
        self.mlp_out_norm = RMSNorm(build, weights, "mlp_out_norm")

    def __call__(self, batch: ForwardBatch, x: Tensor, delta: Tensor | None) -> Tensor:
        """Adds the layer before (delta) to x and returns what this layer's MLP wants added."""
        normed = self.attention_norm(batch, x, delta, out="normed")
        mixed = self.attention(batch, normed, out="block")
        delta = self.attention_out_norm(batch, mixed, out="delta")
        normed = self.mlp_norm(batch, x, delta, out="normed")
        mixed = self.mlp(batch, normed, out="block")
        return self.mlp_out_norm(batch, mixed, out="delta")


class Gemma3(Llama):
    """A decoder of Gemma3Layers; embedding scale, ropes and caps come from the card."""

    layer_type = Gemma3Layer
