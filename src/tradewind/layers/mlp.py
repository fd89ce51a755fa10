"""The feed-forward blocks, gated and plain.

Knows: gate, up and down. Refuses to know: experts (moe).
"""

from __future__ import annotations

from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build, Tensor, Weights
from tradewind.layers.linear import GatedLinear, Linear


class GatedMLP:
    """down(activation(gate(x)) * up(x)): SwiGLU or GeGLU (Shazeer 2020)."""

    def __init__(self, build: Build, weights: Weights, *, intermediate: int | None = None) -> None:
        """intermediate: the inner size, where it is not the card's."""
        card = build.card
        assert card.activation != "gelu", "a gated block takes silu or the tanh form of gelu"
        inner = card.intermediate if intermediate is None else intermediate
        # A scratch buffer has one shape: blocks of another inner size have a buffer of their own.
        self.inner = "gated" if inner == card.intermediate else f"gated.{inner}"
        self.gate_up = GatedLinear(
            build,
            weights,
            "gate",
            "up",
            n=inner,
            k=card.hidden,
            activation=card.activation,
            bias=card.mlp_bias,
        )
        self.down = Linear(build, weights, {"down": card.hidden}, k=inner, bias=card.mlp_bias)

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: str) -> Tensor:
        """x [T, E] -> [T, E] in the scratch buffer `out`."""
        return self.down(batch, self.gate_up(batch, x, out=self.inner), out=out)


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
