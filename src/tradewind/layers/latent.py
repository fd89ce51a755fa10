"""Multi-head latent attention: one short vector a token is kept, and keys and values of all heads are made of it (DeepSeek-V2 2024).

Knows: its matrices and norms. Refuses to know: whether keys and values are ever made (an op chooses), and who owns pages.

    x -> q_down -> norm -> q_up -> q          or at once  x -> q                    per head: N dims | R dims, turned
    x -> latent                                                                     C numbers, normed | R dims, turned: stored
    q, latents of the row -> attention -> output
"""

from __future__ import annotations

from typing import cast

from tradewind.device.batch import ForwardBatch
from tradewind.kernels.ops import LatentOps
from tradewind.layers.build import Build, Tensor, Weights
from tradewind.layers.linear import Linear

NORM_EPS = 1e-6
"""Of the norms in here, whatever the card says of the others (published code and its checkpoints)."""


class LatentAttention:
    """Attention over pages of latents."""

    def __init__(self, build: Build, weights: Weights, *, layer: int) -> None:
        card, latent = build.card, build.card.latent
        assert latent is not None
        assert card.head_dim == latent.nope + latent.rope, (card.head_dim, latent)
        self.ops = cast("LatentOps", build.ops)  # resolve() chooses no op set without latents for such a card
        self.attention = build.attention
        self.layer = layer
        self.heads = card.heads
        self.scale = card.head_dim**-0.5 if card.attention_scale is None else card.attention_scale
        q_width, self.width = card.heads * card.head_dim, card.heads * latent.value
        self.q_down = self.q_down_norm = None
        if latent.query_rank:
            self.q_down = Linear(build, weights, {"q_down": latent.query_rank}, k=card.hidden, bias=False)
            self.q_down_norm = weights.vector({"q_down_norm.weight": latent.query_rank})
            self.q = Linear(build, weights, {"q_up": q_width}, k=latent.query_rank, bias=False)
        else:
            self.q = Linear(build, weights, {"q": q_width}, k=card.hidden, bias=False)
        self.latent = Linear(build, weights, {"latent": latent.width}, k=card.hidden, bias=False)
        self.latent_norm = weights.vector({"latent_norm.weight": latent.rank})
        each = latent.nope + latent.value
        up = weights.floats("up", (card.heads * each, latent.rank)).reshape(card.heads, each, latent.rank)
        self.up = self.ops.pack_latent(up[:, : latent.nope], up[:, latent.nope :])
        self.output = Linear(build, weights, {"output": card.hidden}, k=self.width, bias=False)

    def mix(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        """x [T, E] -> all heads' values [T, H V], in the scratch buffer "mixed"; writes this step's latents into the layer's pages."""
        group, kv = batch.layer_group[self.layer], batch.kv[self.layer]
        source = x
        if self.q_down is not None:
            source = self.q_down(batch, x, out="q_down")
            self.ops.rms_norm_span(source, self.q_down_norm, start=0, eps=NORM_EPS, count=batch.tokens)
        q = self.q(batch, source, out="q")
        self.ops.latent_store(
            q,
            self.latent(batch, x, out="latent"),
            batch.angles["global"],
            batch.write_slots[group],
            kv,
            heads=self.heads,
            weight=self.latent_norm,
            eps=NORM_EPS,
            count=batch.tokens,
        )
        mixed = batch.scratch.take("mixed", (batch.capacity, self.width))
        self.attention.run_latents(q, kv, batch.rows[group], self.up, scale=self.scale, out=mixed)
        return mixed
