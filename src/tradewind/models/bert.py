"""BERT and its small relatives (MiniLM): an encoder that gives hidden states and generates nothing (Devlin et al. 2019).

Knows: the order of the bricks and this family's names. Refuses to know: pooling (runner), and pairs of texts: every token is of type 0.

    x = norm(words[id] + positions[p] + types[0])
    for each layer:  x = norm(x + attention(x));  x = norm(x + down(gelu(up(x))))

Every token sees all of its text, so a text is one row of one step. Its keys and values lie in pages like everybody's, for that step only:
they depend on the tokens behind them too, so no other text may use them.
"""

from __future__ import annotations

import numpy as np

from tradewind.device.batch import ForwardBatch
from tradewind.layers.attention import Attention
from tradewind.layers.build import Build, Count, Tensor
from tradewind.layers.embedding import Embedding
from tradewind.layers.mlp import PlainMLP
from tradewind.layers.norm import LayerNorm
from tradewind.layers.rotary import Rotary

HF_PLACES: dict[str, str] = {
    "embeddings.LayerNorm.bias": "norm.bias",
    "embeddings.LayerNorm.weight": "norm.weight",
    "embeddings.position_embeddings.weight": "positions.weight",
    "embeddings.token_type_embeddings.weight": "types.weight",
    "embeddings.word_embeddings.weight": "embedding.weight",
    "encoder.layer.{}.attention.output.LayerNorm.bias": "layers.{}.attention_norm.bias",
    "encoder.layer.{}.attention.output.LayerNorm.weight": "layers.{}.attention_norm.weight",
    "encoder.layer.{}.attention.output.dense.bias": "layers.{}.attention.output.bias",
    "encoder.layer.{}.attention.output.dense.weight": "layers.{}.attention.output.weight",
    "encoder.layer.{}.attention.self.key.bias": "layers.{}.attention.k.bias",
    "encoder.layer.{}.attention.self.key.weight": "layers.{}.attention.k.weight",
    "encoder.layer.{}.attention.self.query.bias": "layers.{}.attention.q.bias",
    "encoder.layer.{}.attention.self.query.weight": "layers.{}.attention.q.weight",
    "encoder.layer.{}.attention.self.value.bias": "layers.{}.attention.v.bias",
    "encoder.layer.{}.attention.self.value.weight": "layers.{}.attention.v.weight",
    "encoder.layer.{}.intermediate.dense.bias": "layers.{}.mlp.up.bias",
    "encoder.layer.{}.intermediate.dense.weight": "layers.{}.mlp.up.weight",
    "encoder.layer.{}.output.LayerNorm.bias": "layers.{}.mlp_norm.bias",
    "encoder.layer.{}.output.LayerNorm.weight": "layers.{}.mlp_norm.weight",
    "encoder.layer.{}.output.dense.bias": "layers.{}.mlp.down.bias",
    "encoder.layer.{}.output.dense.weight": "layers.{}.mlp.down.weight",
}

HF_RENAMES: dict[str, str] = {"bert.": ""}

# Heads that were trained with the encoder and are no part of its hidden states; position_ids is 0, 1, 2, ...
HF_IGNORED: tuple[str, ...] = (
    "bert.embeddings.position_ids",
    "bert.pooler.",
    "cls.",
    "embeddings.position_ids",
    "pooler.",
)


class BertLayer:
    """Attention and MLP, the stream normed after each addition."""

    def __init__(self, build: Build, *, layer: int) -> None:
        weights = build.weights.at(f"layers.{layer}")
        self.attention = Attention(build, weights.at("attention"), layer=layer)
        self.attention_norm = LayerNorm(build, weights, "attention_norm")
        self.mlp = PlainMLP(build, weights.at("mlp"))
        self.mlp_norm = LayerNorm(build, weights, "mlp_norm")

    def __call__(self, batch: ForwardBatch, x: Tensor) -> None:
        """Changes x in place."""
        self.attention_norm(batch, x, self.attention(batch, x, out="delta"))
        self.mlp_norm(batch, x, self.mlp(batch, x, out="delta"))


class Bert:
    """An encoder of BertLayers. `forward` gives the hidden states of every token; there is no head."""

    ends_by_row = False

    def __init__(self, build: Build) -> None:
        card = build.card
        self.ops = build.ops
        self.backend = build.attention
        self.hidden = card.hidden
        self.embedding = Embedding(build)
        # A single text has type 0 everywhere: its row is added to the positions once and for all.
        positions = build.weights.floats("positions", (card.position_rows, card.hidden))
        types = build.weights.floats("types", (card.token_types, card.hidden))
        table = np.ascontiguousarray(positions + types[0], np.float32)
        self.positions = self.ops.row_table(
            table.view(np.uint8).reshape(-1), "F32", rows=card.position_rows, cols=card.hidden
        )
        self.norm = LayerNorm(build, build.weights, "norm")
        self.rope = Rotary(build, "global", card.rope)
        self.layers = [BertLayer(build, layer=layer) for layer in range(card.layers)]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last layer, [T, E]; every row of the batch must be a whole text."""
        self.rope(batch)
        x = self.embedding(batch)
        delta = batch.scratch.take("delta", (batch.capacity, self.hidden))
        self.ops.embed(batch.positions, self.positions, scale=1.0, out=delta, count=batch.tokens)
        self.norm(batch, x, delta)
        for layer in self.layers:
            layer(batch, x)
        return x

    def body(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Never called: whoever asks an encoder wants all hidden states."""
        raise AssertionError("an encoder has no part that few rows can do without")

    def ending(self, batch: ForwardBatch, x: Tensor, mixed: Tensor) -> Tensor:
        """Never called, like `body`."""
        raise AssertionError("an encoder has no part that few rows can do without")

    def logits(self, hidden_rows: Tensor, *, out: Tensor, count: Count) -> None:
        """Never called: the intake refuses requests to generate."""
        raise AssertionError("an encoder has no logits")
