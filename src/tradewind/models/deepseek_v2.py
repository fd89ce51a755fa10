"""DeepSeek-V2 and V2-Lite: latent attention, and many small experts beside shared ones (DeepSeek-V2 report 2024).

Knows: the bricks of a layer and this family's names. Refuses to know: the form of attention (an op chooses), which layers have experts and
how tokens are sent to them (the card).
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build, Tensor
from tradewind.layers.latent import LatentAttention
from tradewind.layers.moe import feed_forward
from tradewind.layers.norm import RMSNorm
from tradewind.models import llama
from tradewind.models.llama import Llama
from tradewind.models.qwen3_moe import EXPERT_PLACES

HF_PLACES: dict[str, str] = {
    **{
        name: place
        for name, place in llama.HF_PLACES.items()
        if not place.endswith(".bias") and ".self_attn." not in name
    },
    **{
        name: place for name, place in EXPERT_PLACES.items() if name.count("{}") > 1 or name.endswith("mlp.gate.weight")
    },
    "model.layers.{}.mlp.shared_experts.down_proj.weight": "layers.{}.mlp.shared.down.weight",
    "model.layers.{}.mlp.shared_experts.gate_proj.weight": "layers.{}.mlp.shared.gate.weight",
    "model.layers.{}.mlp.shared_experts.up_proj.weight": "layers.{}.mlp.shared.up.weight",
    "model.layers.{}.self_attn.kv_a_layernorm.weight": "layers.{}.attention.latent_norm.weight",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight": "layers.{}.attention.latent.weight",
    "model.layers.{}.self_attn.kv_b_proj.weight": "layers.{}.attention.up.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.output.weight",
    "model.layers.{}.self_attn.q_a_layernorm.weight": "layers.{}.attention.q_down_norm.weight",
    "model.layers.{}.self_attn.q_a_proj.weight": "layers.{}.attention.q_down.weight",
    "model.layers.{}.self_attn.q_b_proj.weight": "layers.{}.attention.q_up.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.q.weight",
}


class DeepseekLayer:
    """Pre-norm latent attention, and experts or a gated MLP."""

    def __init__(self, build: Build, *, layer: int) -> None:
        weights = build.weights.at(f"layers.{layer}")
        self.attention_norm = RMSNorm(build, weights, "attention_norm")
        self.attention = LatentAttention(build, weights.at("attention"), layer=layer)
        self.mlp_norm = RMSNorm(build, weights, "mlp_norm")
        self.mlp = feed_forward(build, weights.at("mlp"), layer=layer)

    def attend(self, batch: ForwardBatch, x: Tensor, delta: Tensor | None) -> Tensor:
        """Adds the layer before (delta) to x; returns what attention makes of it, before its output matrix."""
        return self.attention.mix(batch, self.attention_norm(batch, x, delta, out="normed"))

    def finish(self, batch: ForwardBatch, x: Tensor, mixed: Tensor) -> Tensor:
        """Adds attention's answer to x and returns what this layer's MLP wants added."""
        delta = self.attention.output(batch, mixed, out="delta")
        normed = self.mlp_norm(batch, x, delta, out="normed")
        return self.mlp(batch, normed, out="delta")


class DeepseekV2(Llama):
    """A decoder of DeepseekLayers."""

    layer_type = DeepseekLayer
