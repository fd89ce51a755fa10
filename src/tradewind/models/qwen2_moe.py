"""Qwen 1.5 and 2 with experts: the Qwen 2 decoder, and beside the chosen experts a shared one behind a gate (Qwen2 report 2024).

Knows: the names of the shared expert. Refuses to know: which layers have experts and how tokens are sent to them (the card).
"""

from __future__ import annotations

from tradewind.models import qwen2
from tradewind.models.llama import Llama
from tradewind.models.mixtral import FUSED
from tradewind.models.qwen3_moe import EXPERT_GGUF_NAMES, EXPERT_PLACES

__all__ = ["FUSED", "GGUF_NAMES", "HF_PLACES", "REGROUP", "Qwen2Moe"]

HF_PLACES: dict[str, str] = {
    **qwen2.HF_PLACES,
    **EXPERT_PLACES,
    "model.layers.{}.mlp.shared_expert.down_proj.weight": "layers.{}.mlp.shared.down.weight",
    "model.layers.{}.mlp.shared_expert.gate_proj.weight": "layers.{}.mlp.shared.gate.weight",
    "model.layers.{}.mlp.shared_expert.up_proj.weight": "layers.{}.mlp.shared.up.weight",
    "model.layers.{}.mlp.shared_expert_gate.weight": "layers.{}.mlp.shared_gate.row",
}

GGUF_NAMES: dict[str, str] = {
    **qwen2.GGUF_NAMES,
    **EXPERT_GGUF_NAMES,
    "blk.{}.ffn_down_shexp.weight": "model.layers.{}.mlp.shared_expert.down_proj.weight",
    "blk.{}.ffn_gate_inp_shexp.weight": "model.layers.{}.mlp.shared_expert_gate.weight",
    "blk.{}.ffn_gate_shexp.weight": "model.layers.{}.mlp.shared_expert.gate_proj.weight",
    "blk.{}.ffn_up_shexp.weight": "model.layers.{}.mlp.shared_expert.up_proj.weight",
}

# Hugging Face files have it as [1, E], GGUF files as [E].
REGROUP: dict[str, tuple[str, tuple[str, ...]]] = {
    "layers.{}.mlp.shared_gate.row": ("row", ("layers.{}.mlp.shared_gate.weight",)),
}


class Qwen2Moe(Llama):
    """The Llama decoder with q, k, v biases, whose layers take the mixture that the card has."""
