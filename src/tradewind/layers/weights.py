"""What bricks ask of weights when they are built.

Knows: places in a model. Refuses to know: files, formats and names in checkpoints (weights/).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tradewind.kernels.ops import Compute, PackedMatrix, RowTable, Tensor


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
