"""What every scheme is told: how weights are to be kept and multiplied, and what a stored tensor looks like.

Knows: these two records. Refuses to know: the schemes that read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tradewind.kernels.ops import Compute as Compute
from tradewind.kernels.ops import Ops as Ops

Quantization = Literal["none", "fp8", "int8", "int4"]

SENSITIVE: Mapping[Quantization, Quantization] = {"fp8": "none", "int4": "int8"}
"""What a matrix whose rounding is heard most (head, embedding) is quantised to instead."""


class Stored(Protocol):
    """A tensor as it lies in a file (`weights.tensor.RawTensor`)."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...
    @property
    def data(self) -> NDArray[np.uint8]: ...
    @property
    def file(self) -> Path | None: ...
    @property
    def offset(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How weights are kept and multiplied. "f32" is the exact mode: everything dequantised, activations never rounded."""

    compute: Compute
    quantization: Quantization

    def unquantised(self) -> Numerics:
        """The same for a matrix that is never quantised, nor its activations."""
        return Numerics(compute="bf16" if self.compute == "bf16" else "f32", quantization="none")

    def for_sensitive(self) -> Numerics:
        """The same for a sensitive matrix."""
        return replace(self, quantization=SENSITIVE.get(self.quantization, self.quantization))
