"""Qwen 3 with experts: the Qwen 3 decoder, many small experts in place of the MLP of most layers (Qwen3 report 2025).

Knows: the names of experts and router. Refuses to know: which layers have experts and how tokens are sent to them (the card).
"""

from __future__ import annotations

from tradewind.models import qwen3
from tradewind.models.llama import Llama
from tradewind.models.mixtral import FUSED

__all__ = ["EXPERT_GGUF_NAMES", "EXPERT_PLACES", "FUSED", "GGUF_NAMES", "HF_PLACES", "Qwen3Moe"]

EXPERT_PLACES: dict[str, str] = {
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.mlp.experts.{}.down.weight",
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.mlp.experts.{}.gate.weight",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.mlp.experts.{}.up.weight",
    "model.layers.{}.mlp.gate.weight": "layers.{}.mlp.router.weight",
    # all experts of a layer in one tensor: GGUF files, under names of our own in between
    "model.layers.{}.mlp.experts.down_proj.weight": "layers.{}.mlp.experts.down.weight",
    "model.layers.{}.mlp.experts.gate_proj.weight": "layers.{}.mlp.experts.gate.weight",
    "model.layers.{}.mlp.experts.up_proj.weight": "layers.{}.mlp.experts.up.weight",
}

EXPERT_GGUF_NAMES: dict[str, str] = {
    "blk.{}.ffn_down.{}.weight": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.mlp.experts.down_proj.weight",
    "blk.{}.ffn_gate.{}.weight": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "blk.{}.ffn_gate_exps.weight": "model.layers.{}.mlp.experts.gate_proj.weight",
    "blk.{}.ffn_gate_inp.weight": "model.layers.{}.mlp.gate.weight",
    "blk.{}.ffn_up.{}.weight": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "blk.{}.ffn_up_exps.weight": "model.layers.{}.mlp.experts.up_proj.weight",
}

GGUF_NAMES: dict[str, str] = {**qwen3.GGUF_NAMES, **EXPERT_GGUF_NAMES}

HF_PLACES: dict[str, str] = {**qwen3.HF_PLACES, **EXPERT_PLACES}


class Qwen3Moe(Llama):
    """The Llama decoder with q and k norms, whose layers take the mixture that the card has."""
