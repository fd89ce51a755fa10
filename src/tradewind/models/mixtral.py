"""Mixtral: Mistral with eight experts in place of each MLP, two for each token (Jiang et al. 2024).

Knows: this family's names. Refuses to know: routing (the card says softmax, weights normalised) and how experts are computed.
"""

from __future__ import annotations

from tradewind.models import llama
from tradewind.models.llama import Llama

HF_PLACES: dict[str, str] = {
    **{name: place for name, place in llama.HF_PLACES.items() if ".mlp." not in place and not place.endswith(".bias")},
    "model.layers.{}.block_sparse_moe.experts.{}.w1.weight": "layers.{}.mlp.experts.{}.gate.weight",
    "model.layers.{}.block_sparse_moe.experts.{}.w2.weight": "layers.{}.mlp.experts.{}.down.weight",
    "model.layers.{}.block_sparse_moe.experts.{}.w3.weight": "layers.{}.mlp.experts.{}.up.weight",
    "model.layers.{}.block_sparse_moe.gate.weight": "layers.{}.mlp.router.weight",
}


class Mixtral(Llama):
    """The Llama decoder, whose layers take the mixture that the card has."""
