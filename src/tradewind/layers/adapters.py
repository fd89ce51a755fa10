"""Room for the low-rank changes of many adapters at once, a bank for each matrix that may be changed (LoRA, Hu et al. 2021).

Knows: which bank belongs to which place in the model. Refuses to know: files (weights/adapters.py) and who uses which slot (runner).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tradewind.contract.errors import UserError
from tradewind.device.batch import ForwardBatch
from tradewind.kernels.ops import AdapterOps, LowRankBank, Ops, Tensor
from tradewind.layers.weights import Weights

Floats = NDArray[np.float32]
Changes = Mapping[str, tuple[Floats, Floats]]
"""Place of a matrix [N, K] -> A [r, K] and B [N, r] of its change B A, scaled."""


class Adapters:
    """The banks of one model. Owner: one runner, which alone writes into them, between steps."""

    def __init__(self, ops: Ops, *, slots: int, rank: int, exact: bool = True) -> None:
        """slots: adapters held at once. rank: the largest of one. exact: kept in float32 where the op set can, else in bfloat16."""
        self.exact = exact
        self.ops = cast("AdapterOps", ops)
        self.slots = slots
        self.rank = rank
        self._banks: list[LowRankBank] = []
        self._places: dict[str, tuple[LowRankBank, int]] = {}
        """Place of a matrix -> its bank, and which of the bank's parts it is."""

    def bank(self, sizes: Mapping[str, int], *, k: int) -> LowRankBank:
        """A bank for matrices [n, k] (place -> n) that are multiplied together; a brick asks when it is built."""
        bank = self.ops.low_rank_bank(
            slots=self.slots, rank=self.rank, sizes=tuple(sizes.values()), k=k, exact=self.exact
        )
        for part, place in enumerate(sizes):
            assert place not in self._places, place
            self._places[place] = bank, part
        self._banks.append(bank)
        return bank

    @property
    def nbytes(self) -> int:
        """Bytes of all banks."""
        return sum(bank.nbytes for bank in self._banks)

    def check(self, changes: Changes) -> None:
        """Raises UserError where an adapter changes what this model has no bank for, or in other shapes."""
        for place, (a, b) in changes.items():
            if place not in self._places:
                raise UserError(f"the adapter changes {place}, which cannot be changed in this model")
            bank, part = self._places[place]
            if (a.shape[1], b.shape[0]) != (bank.k, bank.sizes[part]) or len(a) != b.shape[1]:
                raise UserError(
                    f"the adapter's change of {place} is {b.shape} by {a.shape}; the matrix is {(bank.sizes[part], bank.k)}: "
                    "it was made for another model"
                )
            if len(a) > self.rank:
                raise UserError(
                    f"the adapter has rank {len(a)}; the largest that this engine has room for is {self.rank} (--adapter-rank)"
                )

    def put(self, slot: int, changes: Changes) -> None:
        """Writes an adapter into a slot, in place of what was there; one that `check` lets pass."""
        for place, (bank, part) in self._places.items():
            a, b = changes.get(place, (np.zeros((0, bank.k), np.float32), np.zeros((bank.sizes[part], 0), np.float32)))
            self.ops.set_low_rank(bank, slot, part, a, b)


class LowRank:
    """What adapters add to a matmul of one or several matrices stacked along their outputs."""

    def __init__(self, adapters: Adapters, weights: Weights, sizes: Mapping[str, int], *, k: int) -> None:
        """sizes: place -> outputs, as the matmul was made of."""
        self.ops = adapters.ops
        self.bank = adapters.bank({weights.place(f"{name}.weight"): n for name, n in sizes.items()}, k=k)

    def __call__(self, batch: ForwardBatch, x: Tensor, *, out: Tensor) -> None:
        """Adds to out [T, N] what each token's adapter makes of x [T, K]."""
        self.ops.add_low_rank(x, self.bank, batch.adapters, out=out, count=batch.tokens)
