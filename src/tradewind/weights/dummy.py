"""Random weights of the right shapes, for `--load-format dummy`: speed is measured without a checkpoint.

Knows: how large trained weights are, so that activations stay in range. Refuses to know: names in files, and text (answers mean nothing).
Drawn on the device where the op set can (`random_matrix`, `random_rows`), else with numpy. The values at a place depend on the seed and
the place alone, so two runs are equal.
"""

from __future__ import annotations

import zlib
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


def load_dummy(
    *,
    family: FamilyRow[ModelT],
    card: ModelCard,
    ops: Ops,
    numerics: NumericsPlan | Numerics,
    attention: Any,
    seed: int = 0,
    adapters: Any = None,
) -> ModelT:
    """Builds the family's model with random weights, packed for `ops` as `load_model` would pack a checkpoint's."""
    weights = DummyWeights(card=card, ops=ops, numerics=packing(numerics), seed=seed)
    return family.build(card=card, ops=ops, weights=weights, attention=attention, adapters=adapters)


class DummyWeights:
    """Weights by place, as `layers.build.Weights` asks for them: normal matrices, norms near 1, small biases.

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
        inside: str = "",
        tables: dict[str, Any] | None = None,
    ) -> None:
        self._card = card
        self._ops = ops
        self._device: Any = ops  # the verbs that only some op sets have
        self._numerics = numerics
        self._seed = seed
        self._inside = inside
        self._tables: dict[str, Any] = {} if tables is None else tables

    def at(self, place: str) -> DummyWeights:
        return DummyWeights(
            card=self._card,
            ops=self._ops,
            numerics=self._numerics,
            seed=self._seed,
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
            table = self._device.random_rows(rows, cols, seed=self._seed_of(place), scale=cols**-0.5)
        else:
            raw = self._drawn(name, (rows, cols))
            table = self._ops.row_table(raw.data, raw.format, rows=rows, cols=cols)
        self._tables[self._inside + name] = table
        return table

    def floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = self._generator(self._inside + name).standard_normal(shape, np.float32)
        return values * np.float32(shape[-1] ** -0.5)

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
            )
        parts = [{"weight": self._drawn(name, (n, k))} for name, n in sizes.items()]
        scheme = choose_scheme([part["weight"].format for part in parts], numerics)
        return scheme.pack(parts, ops=self._ops, numerics=numerics, gated=gated)

    def _drawn(self, name: str, shape: tuple[int, int]) -> RawTensor:
        """A matrix as a checkpoint would store it, in BF16."""
        place = self._inside + name
        generator, spread = self._generator(place), np.float32(self._spread(name, shape[1]))
        bits = np.empty(shape[0] * shape[1], np.uint16)
        for start in range(0, len(bits), VALUES_PER_PIECE):
            piece = bits[start : start + VALUES_PER_PIECE]
            piece[:] = (generator.standard_normal(len(piece), np.float32) * spread).view(np.uint32) >> 16
        return RawTensor(f"{place}.weight", shape, "BF16", bits.view(np.uint8))

    def _vector(self, name: str, size: int) -> NDArray[np.float32]:
        values = self._generator(self._inside + name).standard_normal(size, np.float32)
        if name.endswith("bias"):
            return values * np.float32(BIAS_SPREAD)
        return np.float32(1) + values * np.float32(NORM_SPREAD)

    def _spread(self, name: str, k: int) -> float:
        added = name in ("output", "down")
        return float(k**-0.5 * ((2 * self._card.layers) ** -0.5 if added else 1.0))

    def _generator(self, place: str) -> np.random.Generator:
        return np.random.default_rng(self._seed_of(place))

    def _seed_of(self, place: str) -> int:
        return zlib.crc32(f"{self._seed} {place}".encode())
