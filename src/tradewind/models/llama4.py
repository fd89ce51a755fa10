"""Llama 4, text: attention in chunks, every fourth layer full and without rope, one expert beside a shared one (Llama 4 model card 2025).

Knows: this family's names, the order of its files' rows and columns, and that some layers turn nothing. Refuses to know: images; which
layers are chunked, unturned or mixtures, how queries are tempered and experts chosen (the card, attention, mixtures).

    chunked layer    q, k turned, then divided by their rms where the file says so; sees its own chunk
    full layer       no rope; queries grow with their position, so that attention over many keys stays sharp
    mixture          shared(x) + expert(w x), w the sigmoid of the chosen expert's logit
"""

from __future__ import annotations

from tradewind.config.card import RopeFacts
from tradewind.layers.build import Build
from tradewind.layers.rotary import Rotary
from tradewind.models import llama
from tradewind.models.llama import Llama
from tradewind.models.mixtral import FUSED

__all__ = ["FUSED", "GGUF_NAMES", "HF_PLACES", "HF_RENAMES", "IGNORED", "INTERLEAVED", "REGROUP", "Llama4"]

HF_PLACES: dict[str, str] = {
    **{name: place for name, place in llama.HF_PLACES.items() if ".mlp." not in name},
    "model.layers.{}.feed_forward.down_proj.weight": "layers.{}.mlp.down.weight",
    "model.layers.{}.feed_forward.experts.down_proj": "layers.{}.mlp.experts.down.spans",
    "model.layers.{}.feed_forward.experts.gate_up_proj": "layers.{}.mlp.experts.gate_up.spans",
    "model.layers.{}.feed_forward.gate_proj.weight": "layers.{}.mlp.gate.weight",
    "model.layers.{}.feed_forward.router.weight": "layers.{}.mlp.router.weight",
    "model.layers.{}.feed_forward.shared_expert.down_proj.weight": "layers.{}.mlp.shared.down.weight",
    "model.layers.{}.feed_forward.shared_expert.gate_proj.weight": "layers.{}.mlp.shared.gate.weight",
    "model.layers.{}.feed_forward.shared_expert.up_proj.weight": "layers.{}.mlp.shared.up.weight",
    "model.layers.{}.feed_forward.up_proj.weight": "layers.{}.mlp.up.weight",
}

# All experts of a layer in a tensor for each kind of matrix: GGUF files, under names of our own in between.
HF_PLACES |= {
    "model.layers.{}.feed_forward.experts.down_proj.weight": "layers.{}.mlp.experts.down.weight",
    "model.layers.{}.feed_forward.experts.gate_proj.weight": "layers.{}.mlp.experts.gate.weight",
    "model.layers.{}.feed_forward.experts.up_proj.weight": "layers.{}.mlp.experts.up.weight",
}

GGUF_NAMES: dict[str, str] = {
    **{gguf: name for gguf, name in llama.GGUF_NAMES.items() if name in HF_PLACES},
    "blk.{}.ffn_down.weight": "model.layers.{}.feed_forward.down_proj.weight",
    "blk.{}.ffn_down_exps.weight": "model.layers.{}.feed_forward.experts.down_proj.weight",
    "blk.{}.ffn_down_shexp.weight": "model.layers.{}.feed_forward.shared_expert.down_proj.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.feed_forward.gate_proj.weight",
    "blk.{}.ffn_gate_exps.weight": "model.layers.{}.feed_forward.experts.gate_proj.weight",
    "blk.{}.ffn_gate_inp.weight": "model.layers.{}.feed_forward.router.weight",
    "blk.{}.ffn_gate_shexp.weight": "model.layers.{}.feed_forward.shared_expert.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.feed_forward.up_proj.weight",
    "blk.{}.ffn_up_exps.weight": "model.layers.{}.feed_forward.experts.up_proj.weight",
    "blk.{}.ffn_up_shexp.weight": "model.layers.{}.feed_forward.shared_expert.up_proj.weight",
}

# All experts of a layer in one tensor, transposed; gate's columns, then up's.
REGROUP: dict[str, tuple[str, tuple[str, ...]]] = {
    "layers.{}.mlp.experts.down.spans": ("spans", ("layers.{}.mlp.experts.{}.down.weight",)),
    "layers.{}.mlp.experts.gate_up.spans": (
        "spans",
        ("layers.{}.mlp.experts.{}.gate.weight", "layers.{}.mlp.experts.{}.up.weight"),
    ),
}

# Rope turns neighbours here, in both kinds of files, as in GGUF files of Llama 2 and 3. Rows of layers without rope may be put in the same
# order: a score is a sum.
INTERLEAVED = llama.GGUF_INTERLEAVED

# The decoder inside a vision-and-text checkpoint, in both spellings that were published, and what is left aside there; and GGUF's
# factors of ropes, which the card has as a formula.
HF_RENAMES: dict[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
IGNORED: tuple[str, ...] = (
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "model.vision_model.",
    "rope_freqs.weight",
    "vision_model.",
)


class Llama4(Llama):
    """The Llama decoder, some of whose layers turn neither queries nor keys."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        if not all(build.card.layer_ropes):
            self.ropes.append(Rotary(build, "absent", RopeFacts(kind="absent")))
