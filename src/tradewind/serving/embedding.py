"""What is made of an embedding on its way to people: bytes -> float32 values, cut to fewer dimensions.

Knows: the spelling in `TokensOut.embedding`, Matryoshka truncation. Refuses to know: pooling (the device wing's) and JSON.
"""

from __future__ import annotations

import numpy as np

from tradewind.contract.step import Floats


def vector_of(raw: bytes, *, dimensions: int | None = None, normalise: bool = True) -> Floats:
    """The values of an embedding, the first `dimensions` of them where that is given; a cut vector is normalised again.

    Cutting is meaningful for models trained so that leading parts of a vector are vectors too (Kusupati et al. 2022).
    """
    vector: Floats = np.frombuffer(raw, np.float32)
    if dimensions is None or dimensions == len(vector):
        return vector
    assert 0 < dimensions < len(vector), (dimensions, len(vector))
    vector = vector[:dimensions].astype(np.float32)
    if normalise:
        vector = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
    return vector
