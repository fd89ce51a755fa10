"""Qwen 3 with experts: the Qwen 3 decoder, many small experts in place of the MLP of most layers (Qwen3 report 2025).

Knows: the names of experts and router. Refuses to know: which layers have experts and how tokens are sent to them (the card).
"""

from __future__ import annotations

from tradewind.models import qwen3
from tradewind.models.llama import Llama

EXPERT_PLACES: dict[str, str] = {
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.mlp.experts.{}.down.weight",
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.mlp.experts.{}.gate.weight",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.mlp.experts.{}.up.weight",
    "model.layers.{}.mlp.gate.weight": "layers.{}.mlp.router.weight",
}

HF_PLACES: dict[str, str] = {**qwen3.HF_PLACES, **EXPERT_PLACES}


class Qwen3Moe(Llama):
    """The Llama decoder with q and k norms, whose layers take the mixture that the card has."""
