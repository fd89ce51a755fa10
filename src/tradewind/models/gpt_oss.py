"""gpt-oss: experts everywhere, attention sinks, windows in every second layer, a clamped SwiGLU (gpt-oss model card 2025).

Knows: this family's names and the form of its experts in files. Refuses to know: sinks, biases and routing; the card has them.

    q, k, v, output, router and experts add biases; each head has a sink, one more score in the softmax that nothing answers to
    expert(x) = down((up + 1) * gate * sigmoid(1.702 gate)),   gate cut at 7, up at +-7

Published files hold experts as 4-bit floats (MXFP4), made into BF16 when they are loaded, which is exact.
"""

from __future__ import annotations

from tradewind.models import llama
from tradewind.models.llama import Llama

HF_PLACES: dict[str, str] = {
    **{name: place for name, place in llama.HF_PLACES.items() if ".mlp." not in name},
    "model.layers.{}.mlp.experts.down_proj": "layers.{}.mlp.experts.down.columns",
    "model.layers.{}.mlp.experts.down_proj_bias": "layers.{}.mlp.experts.down.biases",
    "model.layers.{}.mlp.experts.down_proj_blocks": "layers.{}.mlp.experts.down.blocks",
    "model.layers.{}.mlp.experts.down_proj_scales": "layers.{}.mlp.experts.down.scales",
    "model.layers.{}.mlp.experts.gate_up_proj": "layers.{}.mlp.experts.gate_up.columns",
    "model.layers.{}.mlp.experts.gate_up_proj_bias": "layers.{}.mlp.experts.gate_up.biases",
    "model.layers.{}.mlp.experts.gate_up_proj_blocks": "layers.{}.mlp.experts.gate_up.blocks",
    "model.layers.{}.mlp.experts.gate_up_proj_scales": "layers.{}.mlp.experts.gate_up.scales",
    "model.layers.{}.mlp.router.bias": "layers.{}.mlp.router.bias",
    "model.layers.{}.mlp.router.weight": "layers.{}.mlp.router.weight",
    "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks",
}

DOWN = ("layers.{}.mlp.experts.{}.down.weight",)
GATE_UP = ("layers.{}.mlp.experts.{}.gate.weight", "layers.{}.mlp.experts.{}.up.weight")

# Place of a tensor -> its form (weights/regroup.py) and the places of its parts.
REGROUP: dict[str, tuple[str, tuple[str, ...]]] = {
    "layers.{}.mlp.experts.down.biases": ("alternate", ("layers.{}.mlp.experts.{}.down.bias",)),
    "layers.{}.mlp.experts.down.blocks": ("mxfp4", DOWN),
    "layers.{}.mlp.experts.down.columns": ("columns", DOWN),
    "layers.{}.mlp.experts.gate_up.biases": (
        "alternate",
        ("layers.{}.mlp.experts.{}.gate.bias", "layers.{}.mlp.experts.{}.up.bias"),
    ),
    "layers.{}.mlp.experts.gate_up.blocks": ("mxfp4", GATE_UP),
    "layers.{}.mlp.experts.gate_up.columns": ("columns", GATE_UP),
}


class GptOss(Llama):
    """The Llama decoder, whose attention has sinks and whose layers take the mixture that the card has."""
