"""The gated feed-forward block.

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
