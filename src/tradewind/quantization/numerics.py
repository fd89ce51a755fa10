"""What every scheme is told: how weights are to be kept and multiplied, and what a stored tensor looks like.

Knows: these two records. Refuses to know: the schemes that read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tradewind.kernels.ops import Compute as Compute
from tradewind.kernels.ops import Ops as Ops

Quantization = Literal["none", "int8", "int4"]


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


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How weights are kept and multiplied. "f32" is the exact mode: everything dequantised, activations never rounded."""

    compute: Compute
    quantization: Quantization
