"""From token ids into the model and out of it again: `Embedding` and `Head`.

Knows: tying (the head is packed from the embedding's own tensor). Refuses to know: which rows want logits (runner) and sampling.
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build, Count, Tensor


class Embedding:
    """x = scale * table[id]. The scale is exact float32 (sqrt(hidden) for Gemma); bf16 runs elsewhere round it to bf16 first."""

    def __init__(self, build: Build) -> None:
        card = build.card
        self.ops = build.ops
        self.scale = card.embedding_scale
        self.table = build.weights.rows("embedding", rows=card.vocab_size, cols=card.hidden)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The residual stream x [T, E], a scratch buffer that only the following layers change."""
        x = batch.scratch.take("x", (batch.capacity, self.table.cols), "f32")
        self.ops.embed(batch.ids, self.table, scale=self.scale, out=x, count=batch.tokens)
        return x


class Head:
    """Logits of chosen rows: x @ W.T, scaled and softly capped where the card says so."""

    def __init__(self, build: Build) -> None:
        card = build.card
        self.ops = build.ops
        self.scale = card.logit_scale
        self.softcap = card.logit_softcap
        name = "embedding" if card.tied_embeddings else "head"
        self.weight = build.weights.matrix({name: card.vocab_size}, k=card.hidden, sensitive=True)

    def __call__(self, rows: Tensor, *, out: Tensor, count: Count) -> None:
        """rows [L, E] -> out [L, V]; gather the rows that want logits first, the head is the model's largest matrix."""
        self.ops.linear(rows, self.weight, bias=None, out=out, count=count)
        if self.scale != 1.0:
            self.ops.scale(out, factor=self.scale, count=count)
        if self.softcap is not None:
            self.ops.softcap(out, cap=self.softcap, count=count)
