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

# All experts of a layer in one tensor: GGUF files since 2024, under names of our own in between. Older ones number them.
STACKED = "model.layers.{}.block_sparse_moe.experts."
HF_PLACES |= {
    f"{STACKED}w1.weight": "layers.{}.mlp.experts.gate.weight",
    f"{STACKED}w2.weight": "layers.{}.mlp.experts.down.weight",
    f"{STACKED}w3.weight": "layers.{}.mlp.experts.up.weight",
}

GGUF_NAMES: dict[str, str] = {
    **{gguf: name for gguf, name in llama.GGUF_NAMES.items() if name in HF_PLACES},
    "blk.{}.ffn_down.{}.weight": f"{STACKED}{{}}.w2.weight",
    "blk.{}.ffn_down_exps.weight": f"{STACKED}w2.weight",
    "blk.{}.ffn_gate.{}.weight": f"{STACKED}{{}}.w1.weight",
    "blk.{}.ffn_gate_exps.weight": f"{STACKED}w1.weight",
    "blk.{}.ffn_gate_inp.weight": "model.layers.{}.block_sparse_moe.gate.weight",
    "blk.{}.ffn_up.{}.weight": f"{STACKED}{{}}.w3.weight",
    "blk.{}.ffn_up_exps.weight": f"{STACKED}w3.weight",
}
GGUF_INTERLEAVED = {place: heads for place, heads in llama.GGUF_INTERLEAVED.items() if not place.endswith(".bias")}

# Place of a stack -> place of each expert's matrix, with the card's field that counts its rows.
FUSED: dict[str, dict[str, str]] = {
    "layers.{}.mlp.experts.down.weight": {"layers.{}.mlp.experts.{}.down.weight": "hidden"},
    "layers.{}.mlp.experts.gate.weight": {"layers.{}.mlp.experts.{}.gate.weight": "moe.intermediate"},
    "layers.{}.mlp.experts.up.weight": {"layers.{}.mlp.experts.{}.up.weight": "moe.intermediate"},
}


class Mixtral(Llama):
    """The Llama decoder, whose layers take the mixture that the card has."""
