"""Matmul bricks: `Linear` (stacked or single) and `GatedLinear`.

Knows: which weights make one matmul. Refuses to know: how they are stored (quantization) and multiplied (ops).
"""

from __future__ import annotations

from typing import cast

from tradewind.device.batch import ForwardBatch
from tradewind.kernels.ops import Activation, AdapterOps
from tradewind.layers.adapters import LowRank
from tradewind.layers.build import Build, Tensor, Weights


class Linear:
    """out = x @ W.T + b, W one or several matrices of the checkpoint stacked along their outputs (q, k, v read x once)."""

    def __init__(self, build: Build, weights: Weights, sizes: dict[str, int], *, k: int, bias: bool) -> None:
        """sizes: place -> outputs, e.g. {"q": 576, "k": 192, "v": 192}."""
        self.ops = build.ops
        self.weight = weights.matrix(sizes, k=k)
        self.bias = weights.vector({f"{name}.bias": n for name, n in sizes.items()}) if bias else None
        self.low_rank = LowRank(build.adapters, weights, sizes, k=k) if build.adapters is not None else None

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: str) -> Tensor:
        """x [T, K] -> [T, N] in the scratch buffer named `out`."""
        result = batch.scratch.take(out, (batch.capacity, self.weight.n))
        self.ops.linear(x, self.weight, bias=self.bias, out=result, count=batch.tokens)
        if self.low_rank is not None:
            self.low_rank(batch, x, out=result)
        return result


class GatedLinear:
    """out = activation(x @ gate.T) * (x @ up.T): both matrices in one pass over x (Shazeer 2020)."""

    def __init__(
        self, build: Build, weights: Weights, gate: str, up: str, *, n: int, k: int, activation: Activation, bias: bool
    ) -> None:
        self.ops = build.ops
        self.features = n
        self.activation = activation
        self.both: Linear | None = None
        if build.adapters is not None:  # who add to gate and up before they become one
            self.both = Linear(build, weights, {gate: n, up: n}, k=k, bias=bias)
            return
        self.weight = weights.gated(gate, up, n=n, k=k)
        self.bias = weights.vector({f"{gate}.bias": n, f"{up}.bias": n}) if bias else None

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: str) -> Tensor:
        """x [T, K] -> [T, F] in the scratch buffer named `out`."""
        result = batch.scratch.take(out, (batch.capacity, self.features))
        if self.both is not None:
            both = self.both(batch, x, out=f"{out}.both")
            cast("AdapterOps", self.ops).glue(both, activation=self.activation, out=result, count=batch.tokens)
            return result
        self.ops.gated_linear(
            x, self.weight, activation=self.activation, bias=self.bias, out=result, count=batch.tokens
        )
        return result
