"""From the hidden states of a prompt to the one vector that a request for an embedding gets.

Knows: the poolings, and what must be kept of a chunk until the prompt is whole. Refuses to know: models, and who asked.

      chunk 1 (HIDDEN_PART)      chunk 2 (HIDDEN)
      [ h0 h1 h2 h3 ]            [ h4 h5 ]
      cls   h0 is kept ........................ h0
      mean  h0 + h1 + h2 + h3 is kept ......... (kept + h4 + h5) / 6
      last  nothing is kept ................... h5

Sums are float64: the same vector, to the last bits of float32, however the prompt was cut. Written by the runner only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tradewind.contract.request import Pooling
from tradewind.contract.step import Enter, Floats, Ints, Step, Wants

NOT_FINITE = "the model's hidden states are not finite"
SHORTEST = 1e-12
"""A vector is divided by at least this, so that zeros stay zeros."""


class _Kept:
    """What one slot keeps between chunks."""

    def __init__(self, pooling: Pooling, normalise: bool) -> None:
        self.pooling, self.normalise = pooling, normalise
        self.tokens = 0
        self.sum: npt.NDArray[np.float64] | None = None


class PoolingSlots:
    """Running sums by slot, of the sequences that asked for pooling."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def enter(self, enter: Enter) -> None:
        """A sequence takes its slot; what the one before kept there is forgotten."""
        self._kept.pop(enter.slot, None)
        if enter.pooling is not None:
            self._kept[enter.slot] = _Kept(enter.pooling, enter.normalise)

    def leave(self, slot: int) -> None:
        """The slot is given up."""
        self._kept.pop(slot, None)

    def wanted(self, step: Step) -> Ints:
        """Rows of the step whose hidden states are wanted; changes nothing."""
        rows: Ints = np.flatnonzero(step.wants >= Wants.HIDDEN).astype(np.int32)
        return rows

    def take(
        self, step: Step, rows: Ints, hidden: Floats, query_start: Ints, failed: dict[int, str]
    ) -> dict[int, Floats]:
        """Adds the rows' hidden states [T, E] to what their slots keep; the vectors of those whose prompts are whole, by row.

        `failed` gets the rows with values that are not finite.
        """
        done: dict[int, Floats] = {}
        for row in map(int, rows):
            slot, start = int(step.slot[row]), int(step.start[row])
            states = hidden[int(query_start[row]) : int(query_start[row + 1])]
            kept = self._kept[slot]
            if kept.pooling == "mean":
                assert kept.tokens == start, (
                    f"slot {slot}: hidden states of {kept.tokens} tokens were kept, the row starts at {start}"
                )
                part = states.sum(axis=0, dtype=np.float64)
                kept.sum = part if kept.sum is None else kept.sum + part
                kept.tokens += len(states)
            elif kept.pooling == "cls" and start == 0:
                kept.sum, kept.tokens = states[0].astype(np.float64), 1
            if step.wants[row] != Wants.HIDDEN:
                continue
            if kept.pooling == "last":
                kept.sum, kept.tokens = states[-1].astype(np.float64), 1
            assert kept.sum is not None, f"slot {slot}: the first token was not computed"
            vector = kept.sum / kept.tokens
            if not np.isfinite(vector).all():
                failed[row] = NOT_FINITE
                continue
            if kept.normalise:
                vector /= max(float(np.linalg.norm(vector)), SHORTEST)
            done[row] = vector.astype(np.float32)
        return done
