"""Self-attention: qkv, rope and KV write, paged attention, output; causal, or of every token to all (encoders).

Knows: heads, windows, which rope and KV group a layer uses. Refuses to know: how attention is computed (a backend) and who owns pages.
"""

from __future__ import annotations

import numpy as np

from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build, Tensor, Weights
from tradewind.layers.linear import Linear


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) over pages; with biases, and norms of q and k, where the card has them."""

    def __init__(self, build: Build, weights: Weights, *, layer: int) -> None:
        card = build.card
        self.ops = build.ops
        self.backend = build.attention
        self.layer = layer
        self.heads = card.heads
        self.width = card.heads * card.head_dim
        self.eps = card.norm_eps
        self.scale = card.head_dim**-0.5 if card.attention_scale is None else card.attention_scale
        self.softcap = card.attention_softcap
        self.causal = card.causal
        self.window = card.layer_windows[layer] if card.layer_windows else None
        self.chunked = card.windows_restart and self.window is not None
        turned = not card.layer_ropes or card.layer_ropes[layer]
        self.rope = "local" if card.rope_local is not None and self.window is not None else "global"
        self.rope = self.rope if turned else "absent"
        self.temper = None if turned else card.temper

        sizes = {"q": self.width, "k": card.kv_heads * card.head_dim, "v": card.kv_heads * card.head_dim}
        self.qkv = Linear(build, weights, sizes, k=card.hidden, bias=card.qkv_bias)
        self.output = Linear(build, weights, {"output": card.hidden}, k=self.width, bias=card.output_bias)
        self.q_norm = self.k_norm = None
        if card.qk_norm and not card.qk_norm_weights:
            if turned:
                self.q_norm = self.k_norm = self.ops.constant(np.ones(card.head_dim, np.float32))
        elif card.qk_norm:
            self.q_norm = weights.vector({"q_norm.weight": card.head_dim}, offset=card.norm_offset)
            self.k_norm = weights.vector({"k_norm.weight": card.head_dim}, offset=card.norm_offset)
        self.sinks = weights.vector({"sinks": card.heads}) if card.attention_sinks else None
        self.whole_norms = []
        if card.qk_norm_whole:
            for name, start in (("q", 0), ("k", self.width)):
                weight = weights.vector({f"{name}_norm.weight": sizes[name]}, offset=card.norm_offset)
                self.whole_norms.append((start, weight))

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: str) -> Tensor:
        """x [T, E] -> [T, E] in the scratch buffer `out`; writes this step's keys and values into the layer's pages."""
        return self.output(batch, self.mix(batch, x), out=out)

    def mix(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        """The same before the output matrix: all heads' values, [T, H D], in the scratch buffer "mixed"."""
        group, kv = batch.layer_group[self.layer], batch.kv[self.layer]
        qkv = self.qkv(batch, x, out="qkv")
        for start, weight in self.whole_norms:
            self.ops.rms_norm_span(qkv, weight, start=start, eps=self.eps, count=batch.tokens)
        q = batch.scratch.take("q", (batch.capacity, self.width))
        self.ops.rope_store(
            qkv,
            batch.angles[self.rope],
            batch.write_slots[group],
            kv,
            heads=self.heads,
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            eps=self.eps,
            out=q,
            count=batch.tokens,
        )
        if self.temper is not None:
            self.ops.temper(
                q, batch.positions, every=self.temper.every, slope=self.temper.slope, count=batch.tokens
            )  # fmt: skip
        mixed = batch.scratch.take("mixed", (batch.capacity, self.width))
        self.backend.run(
            q,
            kv,
            batch.rows[group],
            heads=self.heads,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            out=mixed,
            causal=self.causal,
            chunked=self.chunked,
        )
        return mixed
