"""Llama 2 and 3, SmolLM2: the decoder that the other families vary (Touvron et al. 2023; Llama 3 report 2024).

Knows: the order of the bricks and this family's names in checkpoints. Refuses to know: how anything is computed.

    x = embed(ids)
    for each layer:  x += attention(norm(x));  x += mlp(norm(x))
    logits = head(norm(x))

Every addition is done by the norm that follows it, so the stream x is read and written once per half layer, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

from tradewind.device.batch import ForwardBatch
from tradewind.layers.attention import Attention
from tradewind.layers.build import Build, Count, Tensor
from tradewind.layers.embedding import Embedding, Head
from tradewind.layers.moe import feed_forward
from tradewind.layers.norm import RMSNorm
from tradewind.layers.rotary import Rotary

# Name in a Hugging Face checkpoint -> place in the model. {} is the layer.
HF_PLACES: dict[str, str] = {
    "lm_head.weight": "head.weight",
    "model.embed_tokens.weight": "embedding.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.mlp.down_proj.bias": "layers.{}.mlp.down.bias",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.mlp.down.weight",
    "model.layers.{}.mlp.gate_proj.bias": "layers.{}.mlp.gate.bias",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.mlp.gate.weight",
    "model.layers.{}.mlp.up_proj.bias": "layers.{}.mlp.up.bias",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.mlp.up.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.mlp_norm.weight",
    "model.layers.{}.self_attn.k_proj.bias": "layers.{}.attention.k.bias",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.k.weight",
    "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attention.output.bias",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.output.weight",
    "model.layers.{}.self_attn.q_proj.bias": "layers.{}.attention.q.bias",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.q.weight",
    "model.layers.{}.self_attn.v_proj.bias": "layers.{}.attention.v.bias",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.v.weight",
    "model.norm.weight": "norm.weight",
}

# Name in a GGUF file -> Hugging Face name.
GGUF_NAMES: dict[str, str] = {
    "blk.{}.attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_output.bias": "model.layers.{}.self_attn.o_proj.bias",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.ffn_down.bias": "model.layers.{}.mlp.down_proj.bias",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blk.{}.ffn_gate.bias": "model.layers.{}.mlp.gate_proj.bias",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_up.bias": "model.layers.{}.mlp.up_proj.bias",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd.weight": "model.embed_tokens.weight",
}

# Embedding models are the decoder saved without its head, and so without the prefix that the whole has.
HF_RENAMES_BARE: dict[str, str] = {
    "embed_tokens.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
}

# GGUF files of this family store the rows of a q or k head with the two halves of each rotated pair side by side.
# The loader puts them back in order, so that rope is half-split for every model. Place -> the card's field that counts its heads.
GGUF_INTERLEAVED: dict[str, str] = {
    "layers.{}.attention.k.bias": "kv_heads",
    "layers.{}.attention.k.weight": "kv_heads",
    "layers.{}.attention.q.bias": "heads",
    "layers.{}.attention.q.weight": "heads",
}


class Layer(Protocol):
    """One layer of a decoder, in two halves: only the first lets tokens see each other."""

    def attend(self, batch: ForwardBatch, x: Tensor, delta: Tensor | None) -> Tensor:
        """Adds the layer before (delta) to x [T, E], writes keys and values, and returns all heads' values [T, W]."""

    def finish(self, batch: ForwardBatch, x: Tensor, mixed: Tensor) -> Tensor:
        """Adds attention's answer to x and returns what this layer wants added last; every row by itself."""


class LlamaLayer:
    """Pre-norm attention and gated MLP, or the mixture of experts that the card has in its place."""

    def __init__(self, build: Build, *, layer: int) -> None:
        weights = build.weights.at(f"layers.{layer}")
        self.attention_norm = RMSNorm(build, weights, "attention_norm")
        self.attention = Attention(build, weights.at("attention"), layer=layer)
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


class Llama:
    """A decoder of LlamaLayers. `forward` gives the final hidden states, `logits` the head's answer for chosen rows.

    `forward` is `body` and `ending`: where few tokens' hidden states are wanted, the ending is computed for their rows alone.
    """

    layer_type: Callable[..., Layer] = LlamaLayer
    ends_by_row = True

    def __init__(self, build: Build) -> None:
        card = build.card
        self.backend = build.attention
        self.embedding = Embedding(build)
        self.ropes = [Rotary(build, "global", card.rope)]
        if card.rope_local is not None:
            self.ropes.append(Rotary(build, "local", card.rope_local))
        self.layers = [self.layer_type(build, layer=layer) for layer in range(card.layers)]
        self.norm = RMSNorm(build, build.weights, "norm")
        self.head = Head(build)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm, [T, E], in the scratch buffer "hidden"; writes the step's keys and values."""
        return self.ending(batch, *self.body(batch))

    def body(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """All but the last layer's second half: the stream x [T, E] and what the last attention makes of it [T, W]; writes the step's keys
        and values."""
        for rope in self.ropes:
            rope(batch)
        x = self.embedding(batch)
        mixed = self.layers[0].attend(batch, x, None)
        for before, layer in pairwise(self.layers):
            mixed = layer.attend(batch, x, before.finish(batch, x, mixed))
        return x, mixed

    def ending(self, batch: ForwardBatch, x: Tensor, mixed: Tensor) -> Tensor:
        """Hidden states of rows of what `body` gave, [L, E]; batch: so many rows, their adapters and scratch memory of their own."""
        return self.norm(batch, x, self.layers[-1].finish(batch, x, mixed), out="hidden")

    def logits(self, hidden_rows: Tensor, *, out: Tensor, count: Count) -> None:
        """hidden_rows [L, E], gathered from `forward`'s result -> out [L, V]."""
        self.head(hidden_rows, out=out, count=count)
