"""`Build`: the one argument that every brick is constructed with.

Knows: what construction needs (facts, op set, weights by place, attention backend). Refuses to know: files and formats; weights come from
behind the `Weights` protocol (weights.py). Running has its own one argument, `ForwardBatch`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tradewind.attention.backend import Backend as Backend
from tradewind.config.card import ModelCard
from tradewind.kernels.ops import Compute as Compute
from tradewind.kernels.ops import Count as Count
from tradewind.kernels.ops import Ops as Ops
from tradewind.kernels.ops import Tensor as Tensor
from tradewind.layers.adapters import Adapters
from tradewind.layers.weights import Weights as Weights


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a model is built from; gone when construction ends."""

    card: ModelCard
    ops: Ops
    weights: Weights
    attention: Backend
    adapters: Adapters | None = None
    """None: the model serves no adapters."""
