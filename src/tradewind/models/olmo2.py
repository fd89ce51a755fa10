"""OLMo 2: norms behind the blocks instead of in front, and one norm over all heads of q and of k (OLMo 2 report 2024).

Knows: the order of the bricks and this family's names. Refuses to know: how a norm over all heads is computed (attention).

    x = embed(ids)
    for each layer:  x += norm(attention(x));  x += norm(mlp(x))
    logits = head(norm(x))
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.attention import Attention
from tradewind.layers.build import Build, Tensor
from tradewind.layers.mlp import GatedMLP
from tradewind.layers.norm import RMSNorm
from tradewind.layers.stream import ReadStream
from tradewind.models import llama
from tradewind.models.llama import Llama

HF_PLACES: dict[str, str] = {
    **{name: place for name, place in llama.HF_PLACES.items() if "norm" not in place},
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_out_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.mlp_out_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    "model.norm.weight": "norm.weight",
}

GGUF_NAMES: dict[str, str] = {
    **{gguf: name for gguf, name in llama.GGUF_NAMES.items() if name in HF_PLACES and gguf != "blk.{}.ffn_norm.weight"},
    "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}


class Olmo2Layer:
    """Attention and MLP, each normed after."""

    def __init__(self, build: Build, *, layer: int) -> None:
        weights = build.weights.at(f"layers.{layer}")
        self.read = ReadStream(build)
        self.attention = Attention(build, weights.at("attention"), layer=layer)
        self.attention_out_norm = RMSNorm(build, weights, "attention_out_norm")
        self.mlp = GatedMLP(build, weights.at("mlp"))
        self.mlp_out_norm = RMSNorm(build, weights, "mlp_out_norm")

    def attend(self, batch: ForwardBatch, x: Tensor, delta: Tensor | None) -> Tensor:
        """Adds the layer before (delta) to x; returns what attention makes of it, before its output matrix."""
        return self.attention.mix(batch, self.read(batch, x, delta, out="normed"))

    def finish(self, batch: ForwardBatch, x: Tensor, mixed: Tensor) -> Tensor:
        """Adds attention's answer to x and returns what this layer's MLP wants added."""
        block = self.attention.output(batch, mixed, out="block")
        delta = self.attention_out_norm(batch, block, out="delta")
        block = self.mlp(batch, self.read(batch, x, delta, out="normed"), out="block")
        return self.mlp_out_norm(batch, block, out="delta")


class Olmo2(Llama):
    """A decoder of Olmo2Layers."""

    layer_type = Olmo2Layer
