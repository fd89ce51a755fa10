"""`Build`: the one argument that every brick is constructed with.

Knows: what construction needs (facts, op set, weights by place, attention backend). Refuses to know: files and formats; weights come from
behind the `Weights` protocol. Running has its own one argument, `ForwardBatch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tradewind.attention.backend import Backend as Backend
from tradewind.config.card import ModelCard
from tradewind.kernels.ops import Compute as Compute
from tradewind.kernels.ops import Count as Count
from tradewind.kernels.ops import Ops as Ops
from tradewind.kernels.ops import PackedMatrix, RowTable
from tradewind.kernels.ops import Tensor as Tensor
from tradewind.layers.adapters import Adapters


class Weights(Protocol):
    """Weights by place ("layers.3.attention"), packed when asked for. Every wrong or missing tensor is refused by its name in the file."""

    def at(self, place: str) -> Weights:
        """The same weights seen from a place further inside."""

    @property
    def compute(self) -> Compute:
        """How the matrices here are multiplied."""

    def unquantised(self) -> Weights:
        """The same weights, packed as numbers of their own: bf16 where the rest is computed so, otherwise float32."""

    def place(self, name: str) -> str:
        """The whole place of a name here."""

    def matrix(self, sizes: dict[str, int], *, k: int, sensitive: bool = False) -> PackedMatrix:
        """Matrices [n, k] at these places, stacked along n in order: place -> n. `sensitive`: never quantised under 8 bits at load."""

    def gated(self, gate: str, up: str, *, n: int, k: int) -> PackedMatrix:
        """Two matrices [n, k] interleaved for `ops.gated_linear`."""

    def vector(self, sizes: dict[str, int], *, offset: float = 0.0) -> Tensor:
        """float32 vectors at these places, one after the other, plus an offset: place -> size."""

    def rows(self, name: str, *, rows: int, cols: int) -> RowTable:
        """A matrix whose rows are gathered."""

    def floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The values of a small tensor as they are, for a model that combines tensors when it is built."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a model is built from; gone when construction ends."""

    card: ModelCard
    ops: Ops
    weights: Weights
    attention: Backend
    adapters: Adapters | None = None
    """None: the model serves no adapters."""
