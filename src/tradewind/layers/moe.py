"""A mixture of experts in place of an MLP: router, chosen experts, and the shared expert that every token visits.

Knows: which matrices belong to it, and that routing is two ops. Refuses to know: how tokens are sorted by expert and multiplied (ops), and
which layers have one (the card).

    x -> router -> route -> ids, weights
    x, ids, weights -> experts                    + sigmoid(x @ shared_gate) * shared(x), or shared(x), where the card has one
"""

from __future__ import annotations

from typing import cast

from tradewind.device.batch import ForwardBatch
from tradewind.kernels.ops import Compute, ExpertOps, PackedMatrix, Routing
from tradewind.layers.build import Build, Tensor, Weights
from tradewind.layers.mlp import GatedMLP


class MoE:
    """Sparsely-gated mixture of gated MLPs (Shazeer et al. 2017, 2020; shared expert: DeepSeekMoE, Dai et al. 2024)."""

    def __init__(self, build: Build, weights: Weights) -> None:
        card, moe = build.card, build.card.moe
        assert moe is not None
        assert card.activation != "gelu", card.activation
        self.ops = cast("ExpertOps", build.ops)  # resolve() chooses no op set without experts for such a card
        self.size = card.hidden
        self.activation = card.activation
        self.weigh_input = moe.weigh_input
        self.routing = Routing(
            top_k=moe.per_token,
            score=moe.score,
            normalise=moe.normalised,
            scale=moe.scale,
            groups=moe.groups,
            groups_kept=moe.groups_kept,
            group_top=moe.group_top,
        )
        self.router = self._small(weights, "router", moe.experts)
        self.router_bias = weights.vector({"router.bias": moe.experts}) if moe.biases else None
        self.correction = weights.vector({"router.correction": moe.experts}) if moe.correction else None
        experts = [weights.at(f"experts.{expert}") for expert in range(moe.experts)]
        # Generators: where the op set moves each expert to its place, only one at a time is held twice.
        self.gate_up = self.ops.pack_experts(
            (each.gated("gate", "up", n=moe.intermediate, k=card.hidden) for each in experts), experts=moe.experts
        )
        self.down = self.ops.pack_experts(
            (each.matrix({"down": card.hidden}, k=moe.intermediate) for each in experts), experts=moe.experts
        )
        self.gate_up_bias = self.down_bias = None
        if moe.biases:
            inner, names = moe.intermediate, [f"experts.{expert}" for expert in range(moe.experts)]
            gate_up = {f"{name}.{part}.bias": inner for name in names for part in ("gate", "up")}
            self.gate_up_bias = weights.vector(gate_up).reshape(moe.experts, 2 * inner)
            down = {f"{name}.down.bias": card.hidden for name in names}
            self.down_bias = weights.vector(down).reshape(moe.experts, card.hidden)
        self.shared = self.shared_gate = None
        if moe.shared_intermediate:
            self.shared = GatedMLP(build, weights.at("shared"), intermediate=moe.shared_intermediate)
            if moe.shared_gate:
                self.shared_gate = self._small(weights, "shared_gate", 1)

    def _small(self, weights: Weights, name: str, n: int) -> PackedMatrix:
        """A small matrix [n, E] in the type of activations, whatever the plan quantises: a token that goes to another expert is a larger
        error than any rounding of that expert's weights."""
        compute: Compute = "bf16" if self.ops.activation == "bf16" else "f32"
        return self.ops.pack_matrix(weights.floats(name, (n, self.size)), compute=compute)

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: str) -> Tensor:
        """x [T, E] -> [T, E] in the scratch buffer `out`."""
        take, rows, count = batch.scratch.take, batch.capacity, batch.tokens
        logits = take("router", (rows, self.router.n), "f32")
        self.ops.linear(x, self.router, bias=self.router_bias, out=logits, count=count)
        ids = take("expert_ids", (rows, self.routing.top_k), "i32")
        weights = take("expert_weights", (rows, self.routing.top_k), "f32")
        self.ops.route(logits, self.routing, bias=self.correction, ids=ids, weights=weights, count=count)
        result = take(out, (rows, self.size))
        self.ops.experts(
            x, ids, weights, self.gate_up, self.down, activation=self.activation, gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias, out=result, count=count, weigh_input=self.weigh_input,
        )  # fmt: skip
        if self.shared is not None:
            gate = None
            if self.shared_gate is not None:
                gate = take("shared_gate", (rows, 1), "f32")
                self.ops.linear(x, self.shared_gate, bias=None, out=gate, count=count)
            self.ops.add(result, self.shared(batch, x, out="shared"), gate=gate, out=None, count=count)
        return result


def feed_forward(build: Build, weights: Weights, *, layer: int) -> GatedMLP | MoE:
    """What stands behind attention in this layer: a mixture where the card has one, else a gated MLP."""
    moe = build.card.moe
    return MoE(build, weights) if moe is not None and moe.layers[layer] else GatedMLP(build, weights)
