"""From the bytes of a checkpoint to a packed matrix: the protocol, the one table of schemes, and the choice among them.

Knows: which scheme takes which stored formats under which numerics. Refuses to know: files, names of tensors, models.
`pack` is pure and repeatable: the same parts give the same matrix, so weights can be loaded again in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tradewind.contract.errors import UserError
from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.fp8 import FP8Scheme
from tradewind.quantization.fp8_block import FP8BlockScheme
from tradewind.quantization.gguf import GGUFScheme
from tradewind.quantization.numerics import Compute as Compute
from tradewind.quantization.numerics import Numerics as Numerics
from tradewind.quantization.numerics import Ops as Ops
from tradewind.quantization.numerics import Stored
from tradewind.quantization.online import OnlineScheme
from tradewind.quantization.plain import PlainScheme


class Scheme(Protocol):
    """One way to store a weight matrix [N, K]. The matmul itself is `ops.linear` on what `pack` returns."""

    name: str

    def why_not(self, formats: Sequence[str], numerics: Numerics) -> str | None:
        """Why these stored formats are not for this scheme; None when they are."""

    def expects(self, shape: tuple[int, int]) -> Mapping[str, tuple[int, ...]]:
        """The tensors that make up one matrix: suffix of the name -> shape."""

    def pack(
        self, parts: Sequence[Mapping[str, Stored]], *, ops: Ops, numerics: Numerics, gated: bool = False
    ) -> PackedMatrix:
        """Packs matrices of equal K, stacked along N, or (`gated`) a gate and its up for `ops.gated_linear`.

        Each part maps the suffixes of `expects` to tensors.
        """


SCHEMES: dict[str, Scheme] = {
    "fp8": FP8Scheme(),
    "fp8_block": FP8BlockScheme(),
    "gguf": GGUFScheme(),
    "int4": OnlineScheme(bits=4),
    "int8": OnlineScheme(bits=8),
    "plain": PlainScheme(),
}
"""In the order in which they are asked."""


def choose_scheme(formats: Sequence[str], numerics: Numerics) -> Scheme:
    """The first scheme that takes these formats; raises UserError with every reason when none does."""
    reasons = []
    for scheme in SCHEMES.values():
        reason = scheme.why_not(formats, numerics)
        if reason is None:
            return scheme
        reasons.append(f"{scheme.name}: {reason}")
    raise UserError(f"No way to load weights stored as {', '.join(dict.fromkeys(formats))} ({'; '.join(reasons)}).")
