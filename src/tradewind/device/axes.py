"""Positions along three axes: of text they are all the token's own, of an image time, row and column (Qwen2-VL, Wang et al. 2024).

Knows: the arithmetic. Refuses to know: slots, steps, frequencies.

      tokens      a  b | 2 rows of 3 image tokens        | c  d
      time        0  1 | 2 2 2 2 2 2                     | 5  6        an image takes as many positions as its longer edge has tokens,
      row         0  1 | 2 2 2 3 3 3                     | 5  6        so that what follows lies behind its place in the sequence:
      column      0  1 | 2 3 4 2 3 4                     | 5  6        here by 3, `shift` is -3
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tradewind.contract.image import ImageSpan
from tradewind.contract.step import Ints

AXES = 3


def image_positions(spans: Sequence[ImageSpan], *, tokens: int) -> tuple[Ints, int]:
    """(positions [3, tokens], shift): those of a prompt's tokens, and what is added to the place of every token behind the prompt."""
    out = np.empty((AXES, tokens), np.int32)
    done = following = 0
    for span in spans:
        out[:, done : span.first] = following + np.arange(span.first - done)
        following += span.first - done
        place = np.arange(span.count)
        out[0, span.first : span.end] = following
        out[1, span.first : span.end] = following + place // span.columns
        out[2, span.first : span.end] = following + place % span.columns
        following += max(span.rows, span.columns)
        done = span.end
    out[:, done:] = following + np.arange(tokens - done)
    return out, following - done
