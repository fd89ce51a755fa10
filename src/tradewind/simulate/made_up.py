"""Embeddings that no model made: fixed by the tokens, so that whoever sees one can tell which prompt it belongs to.

Knows: tokens. Refuses to know: steps and slots.
"""

from __future__ import annotations

import numpy as np

from tradewind.contract.step import Enter, Floats

SIZE = 16


def embedding(enter: Enter, *, size: int = SIZE) -> Floats:
    """A vector drawn from the prompt's tokens, divided by its length where that was asked for."""
    seed = enter.tokens[: enter.prompt_tokens].astype(np.uint32)
    vector = np.random.default_rng(seed).standard_normal(size)
    if enter.normalise:
        vector /= np.linalg.norm(vector)
    return vector.astype(np.float32)
