"""Qwen 2.5 VL: the Qwen 2 decoder that reads images beside text (Bai et al. 2025).

Knows: this family's names, where images' features enter. Refuses to know: the tower's inside (layers/vision.py), whose images (runner).
"""

from __future__ import annotations

from tradewind.layers.build import Build
from tradewind.layers.image_rows import AxesRotary, ImageEmbedding
from tradewind.layers.vision import VisionTower
from tradewind.models.llama import HF_PLACES as DECODER
from tradewind.models.llama import Llama

HF_PLACES: dict[str, str] = {
    **DECODER,
    "visual.blocks.{}.attn.proj.bias": "tower.layers.{}.attention.output.bias",
    "visual.blocks.{}.attn.proj.weight": "tower.layers.{}.attention.output.weight",
    "visual.blocks.{}.attn.qkv.bias": "tower.layers.{}.attention.qkv.bias",
    "visual.blocks.{}.attn.qkv.weight": "tower.layers.{}.attention.qkv.weight",
    "visual.blocks.{}.mlp.down_proj.bias": "tower.layers.{}.mlp.down.bias",
    "visual.blocks.{}.mlp.down_proj.weight": "tower.layers.{}.mlp.down.weight",
    "visual.blocks.{}.mlp.gate_proj.bias": "tower.layers.{}.mlp.gate.bias",
    "visual.blocks.{}.mlp.gate_proj.weight": "tower.layers.{}.mlp.gate.weight",
    "visual.blocks.{}.mlp.up_proj.bias": "tower.layers.{}.mlp.up.bias",
    "visual.blocks.{}.mlp.up_proj.weight": "tower.layers.{}.mlp.up.weight",
    "visual.blocks.{}.norm1.weight": "tower.layers.{}.attention_norm.weight",
    "visual.blocks.{}.norm2.weight": "tower.layers.{}.mlp_norm.weight",
    "visual.merger.ln_q.weight": "tower.merger.norm.weight",
    # Its modules are numbered: 0 is the way in, 2 the way out, and what lies between has no weights.
    "visual.merger.mlp.{}.bias": "tower.merger.{}.bias",
    "visual.merger.mlp.{}.weight": "tower.merger.{}.weight",
    "visual.patch_embed.proj.weight": "tower.patch.weight",
}

# What newer files call the same.
HF_RENAMES: dict[str, str] = {"model.language_model.": "model.", "model.visual.": "visual."}


class Qwen25VL(Llama):
    """The Llama decoder with q, k, v biases, heads that turn by three positions, and a tower whose features stand for images' tokens."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.embedding = ImageEmbedding(self.embedding)
        self.ropes = [AxesRotary(build, "global", build.card.rope)]
        self.tower = VisionTower(build, build.weights.at("tower").unquantised())
