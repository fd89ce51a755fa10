"""The feed-forward blocks, gated and plain.

Knows: gate, up and down. Refuses to know: experts (moe).
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build, Tensor, Weights
from tradewind.layers.linear import GatedLinear, Linear


class GatedMLP:
    """down(activation(gate(x)) * up(x)): SwiGLU or GeGLU (Shazeer 2020)."""

    def __init__(self, build: Build, weights: Weights) -> None:
        card = build.card
        assert card.activation != "gelu", "a gated block takes silu or the tanh form of gelu"
        self.gate_up = GatedLinear(
            build,
            weights,
            "gate",
            "up",
            n=card.intermediate,
            k=card.hidden,
            activation=card.activation,
            bias=card.mlp_bias,
        )
        self.down = Linear(build, weights, {"down": card.hidden}, k=card.intermediate, bias=card.mlp_bias)

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: str) -> Tensor:
        """x [T, E] -> [T, E] in the scratch buffer `out`."""
        return self.down(batch, self.gate_up(batch, x, out="gated"), out=out)


class PlainMLP:
    """down(gelu(up(x))), as in the first transformers (Vaswani et al. 2017; GELU: Hendrycks & Gimpel 2016)."""

    def __init__(self, build: Build, weights: Weights) -> None:
        card = build.card
        assert card.activation == "gelu", card.activation
        self.ops = build.ops
        self.up = Linear(build, weights, {"up": card.intermediate}, k=card.hidden, bias=card.mlp_bias)
        self.down = Linear(build, weights, {"down": card.hidden}, k=card.intermediate, bias=card.mlp_bias)

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: str) -> Tensor:
        """x [T, E] -> [T, E] in the scratch buffer `out`."""
        inner = self.up(batch, x, out="inner")
        self.ops.gelu(inner, count=batch.tokens)
        return self.down(batch, inner, out=out)
