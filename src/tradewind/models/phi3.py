"""Phi 3 and 4: the Llama decoder; q, k, v lie in one tensor of the file, gate and up in another (Phi-3 report 2024).

Knows: this family's names and how its tensors are cut. Refuses to know: LongRoPE and the part of a head that is rotated (the card, rotary).
"""

from __future__ import annotations

from tradewind.models import llama
from tradewind.models.llama import Llama

CUT = (
    "layers.{}.attention.k",
    "layers.{}.attention.q",
    "layers.{}.attention.v",
    "layers.{}.mlp.gate",
    "layers.{}.mlp.up",
)

HF_PLACES: dict[str, str] = {
    **{n: place for n, place in llama.HF_PLACES.items() if not n.endswith(".bias") and not place.startswith(CUT)},
    "model.layers.{}.mlp.gate_up_proj.weight": "layers.{}.mlp.gate_up.weight",
    "model.layers.{}.self_attn.qkv_proj.weight": "layers.{}.attention.qkv.weight",
}

GGUF_NAMES: dict[str, str] = {
    **{gguf: name for gguf, name in llama.GGUF_NAMES.items() if name in HF_PLACES},
    "blk.{}.attn_qkv.weight": "model.layers.{}.self_attn.qkv_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.gate_up_proj.weight",
}
IGNORED = ("rope_factors_long.weight", "rope_factors_short.weight")  # the card has read them

# Place of the whole -> places of its parts, in order, each with the card's field that its share of rows is counted in.
FUSED: dict[str, dict[str, str]] = {
    "layers.{}.attention.qkv.weight": {
        "layers.{}.attention.q.weight": "heads",
        "layers.{}.attention.k.weight": "kv_heads",
        "layers.{}.attention.v.weight": "kv_heads",
    },
    "layers.{}.mlp.gate_up.weight": {
        "layers.{}.mlp.gate.weight": "intermediate",
        "layers.{}.mlp.up.weight": "intermediate",
    },
}


class Phi3(Llama):
    """The Llama decoder."""
