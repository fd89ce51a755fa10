"""Random weights of the right shapes, for `--load-format dummy` and its like (FILLS): speed is measured without a checkpoint.

Knows: how large trained weights are, so that activations stay in range. Refuses to know: names in files, and text (answers mean nothing).
Drawn on the device where the op set can (`random_matrix`, `random_rows`), else with numpy. The values at a place depend on the seed and
the place alone, so two runs are equal.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tradewind.config.card import ModelCard
from tradewind.config.plan import NumericsPlan
from tradewind.quantization.fp8 import fits_fp8
from tradewind.quantization.fp8_block import STORED
from tradewind.quantization.scheme import Compute, Numerics, Ops, choose_scheme
from tradewind.weights.load import FamilyRow, packing
from tradewind.weights.tensor import RawTensor

BIAS_SPREAD = 0.02
NORM_SPREAD = 0.1
VALUES_PER_PIECE = 1 << 20
"""Values drawn at once: bounds the float32 temporaries."""

ModelT = TypeVar("ModelT")


@dataclass(frozen=True, kw_only=True)
class Fill:
    """What random weights are like."""

    within: float | None = None
    """Every value, those of norms and biases too, is uniform and no further than this from 0; None: normal, as large as trained weights."""
    one_route: bool = False
    """Routers are zero: all experts tie, and every token goes to the first ones, the least weights that a step of a mixture can read."""


FILLS: dict[str, Fill] = {
    "dummy": Fill(),
    # What vLLM and SGLang are measured with: what numbers are like changes the power that a card draws, and so its speed.
    "dummy-flat": Fill(within=1e-3),
    "dummy-one-route": Fill(one_route=True),
}
"""By load format."""


def load_dummy(
    *,
    family: FamilyRow[ModelT],
    card: ModelCard,
    ops: Ops,
    numerics: NumericsPlan | Numerics,
    attention: Any,
    seed: int = 0,
    adapters: Any = None,
    load_format: str = "dummy",
) -> ModelT:
    """Builds the family's model with random weights, packed for `ops` as `load_model` would pack a checkpoint's; load_format: of FILLS."""
    weights = DummyWeights(card=card, ops=ops, numerics=packing(numerics), seed=seed, fill=FILLS[load_format])
    return family.build(card=card, ops=ops, weights=weights, attention=attention, adapters=adapters)


class DummyWeights:
    """Weights by place, as `layers.build.Weights` asks for them: normal matrices, norms near 1, small biases, unless `fill` says otherwise.

    A matrix [n, k] has the deviation k ** -0.5, which keeps the size of what it multiplies; one whose result is added to the residual
    stream has (2 layers) ** -0.5 of that, so that the stream does not grow with depth (as in GPT-2, Radford et al. 2019).
    """

    def __init__(
        self,
        *,
        card: ModelCard,
        ops: Ops,
        numerics: Numerics,
        seed: int = 0,
        fill: Fill = FILLS["dummy"],
        inside: str = "",
        tables: dict[str, Any] | None = None,
    ) -> None:
        self._card = card
        self._ops = ops
        self._device: Any = ops  # the verbs that only some op sets have
        self._numerics = numerics
        self._seed = seed
        self._fill = fill
        self._inside = inside
        self._tables: dict[str, Any] = {} if tables is None else tables

    def at(self, place: str) -> DummyWeights:
        return DummyWeights(
            card=self._card,
            ops=self._ops,
            numerics=self._numerics,
            seed=self._seed,
            fill=self._fill,
            inside=f"{self._inside}{place}.",
            tables=self._tables,
        )

    @property
    def compute(self) -> Compute:
        return self._numerics.compute

    def unquantised(self) -> DummyWeights:
        return DummyWeights(
            card=self._card,
            ops=self._ops,
            numerics=self._numerics.unquantised(),
            seed=self._seed,
            fill=self._fill,
            inside=self._inside,
            tables=self._tables,
        )

    def place(self, name: str) -> str:
        return self._inside + name

    def matrix(self, sizes: dict[str, int], *, k: int, sensitive: bool = False) -> Any:
        numerics = self._numerics.for_sensitive() if sensitive else self._numerics
        (first, *others) = sizes
        table = None if others else self._tables.get(self._inside + first)
        if table is not None and hasattr(self._ops, "matrix_of_rows"):
            return self._device.matrix_of_rows(table)
        return self._pack(sizes, k=k, numerics=numerics, gated=False, sensitive=sensitive)

    def gated(self, gate: str, up: str, *, n: int, k: int) -> Any:
        return self._pack({gate: n, up: n}, k=k, numerics=self._numerics, gated=True)

    def vector(self, sizes: dict[str, int], *, offset: float = 0.0) -> Any:
        # What the model is to see: the offset mends files that store norm weights as w - 1, and there is no file.
        return self._ops.constant(np.concatenate([self._vector(name, size) for name, size in sizes.items()]))

    def rows(self, name: str, *, rows: int, cols: int) -> Any:
        if hasattr(self._ops, "random_rows"):
            place = self._inside + name
            table = self._device.random_rows(
                rows, cols, seed=self._seed_of(place), scale=self._spread(name, cols), uniform=self._uniform
            )
        else:
            raw = self._drawn(name, (rows, cols))
            table = self._ops.row_table(raw.data, raw.format, rows=rows, cols=cols)
        self._tables[self._inside + name] = table
        return table

    def floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return self._values(self._generator(name), shape, self._spread(name, shape[-1]))

    def _layout(self, numerics: Numerics, sides: tuple[int, ...], *, sensitive: bool) -> str:
        """How a device keeps a matrix: as the plan quantises it, or as the files that the card tells of have it."""
        published = STORED in self._card.weight_formats and numerics.quantization == "none" and not sensitive
        if not fits_fp8(sides) or not (published or numerics.quantization == "fp8"):
            return "bf16"
        return "fp8_block" if published else "fp8"

    def _pack(self, sizes: dict[str, int], *, k: int, numerics: Numerics, gated: bool, sensitive: bool = False) -> Any:
        if hasattr(self._ops, "random_matrix"):
            return self._device.random_matrix(
                sum(sizes.values()),
                k,
                layout=self._layout(numerics, (*sizes.values(), k), sensitive=sensitive),
                gated=gated,
                seed=self._seed_of("+".join(self._inside + name for name in sizes)),
                scale=self._spread(next(iter(sizes)), k),
                uniform=self._uniform,
            )
        parts = [{"weight": self._drawn(name, (n, k))} for name, n in sizes.items()]
        scheme = choose_scheme([part["weight"].format for part in parts], numerics)
        return scheme.pack(parts, ops=self._ops, numerics=numerics, gated=gated)

    def _drawn(self, name: str, shape: tuple[int, int]) -> RawTensor:
        """A matrix as a checkpoint would store it, in BF16."""
        generator, spread = self._generator(name), self._spread(name, shape[1])
        bits = np.empty(shape[0] * shape[1], np.uint16)
        for start in range(0, len(bits), VALUES_PER_PIECE):
            piece = bits[start : start + VALUES_PER_PIECE]
            piece[:] = self._values(generator, (len(piece),), spread).view(np.uint32) >> 16
        return RawTensor(f"{self._inside}{name}.weight", shape, "BF16", bits.view(np.uint8))

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        bias = name.endswith("bias")
        mean, spread = self._law(name, mean=0.0 if bias else 1.0, spread=BIAS_SPREAD if bias else NORM_SPREAD)
        return np.float32(mean) + self._values(self._generator(name), (size,), spread)

    def _spread(self, name: str, k: int) -> float:
        added = name in ("output", "down")
        return self._law(name, mean=0.0, spread=float(k**-0.5 * ((2 * self._card.layers) ** -0.5 if added else 1.0)))[1]

    def _law(self, name: str, *, mean: float, spread: float) -> tuple[float, float]:
        """Mean and spread under the fill of values that have these in trained weights."""
        if self._fill.one_route and name.partition(".")[0] == "router":
            return 0.0, 0.0
        return (mean, spread) if self._fill.within is None else (0.0, self._fill.within)

    @property
    def _uniform(self) -> bool:
        return self._fill.within is not None

    def _values(self, generator: np.random.Generator, shape: tuple[int, ...], spread: float) -> NDArray[np.float32]:
        """Normal values of this deviation or, where the fill is uniform, values no further than this from 0."""
        if self._uniform:
            return (2 * generator.random(shape, np.float32) - 1) * np.float32(spread)
        return generator.standard_normal(shape, np.float32) * np.float32(spread)

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng(self._seed_of(self._inside + name))

    def _seed_of(self, place: str) -> int:
        return zlib.crc32(f"{self._seed} {place}".encode())
