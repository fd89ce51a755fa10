"""Where images enter a decoder: features in the place of embeddings, and heads that turn by time, row and column.

Knows: the two bricks. Refuses to know: which tokens are an image's (runner) and what makes features (vision). Without `batch.images` both
do what their plain counterparts do.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from tradewind.config.card import RopeFacts
from tradewind.device.batch import ForwardBatch
from tradewind.kernels.ops import AxesOps
from tradewind.layers.build import Build, Tensor
from tradewind.layers.embedding import Embedding
from tradewind.layers.rotary import Rotary


class AxesRotary(Rotary):
    """cos and sin of every token's three positions: each frequency turns by one of them (`RopeFacts.sections`)."""

    def __init__(self, build: Build, name: str, rope: RopeFacts) -> None:
        super().__init__(build, name, rope)
        axes = np.repeat(np.arange(len(rope.sections), dtype=np.int32), rope.sections)
        assert len(axes) == self.width // 2, (rope.sections, self.width)
        self.axes = build.ops.constant(axes)

    def __call__(self, batch: ForwardBatch) -> None:
        """Computes the step's angles and hangs them into the batch."""
        if batch.images is None:
            super().__call__(batch)
            return
        angles = batch.scratch.take(f"angles.{self.name}", (batch.capacity, self.width), "f32")
        ops = cast("AxesOps", self.ops)  # resolve() chooses no op set without it for such a card
        ops.rope_angles_axes(
            batch.images.axes, self.axes, self.inv_freq, scale=self.scale, out=angles, count=batch.tokens
        )
        batch.angles[self.name] = angles


class ImageEmbedding(Embedding):
    """x = scale * table[id], or an image's feature where the token is one of an image."""

    def __init__(self, words: Embedding) -> None:
        """Takes the place of an embedding."""
        self.ops, self.scale, self.table = words.ops, words.scale, words.table

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The residual stream x [T, E], a scratch buffer that only the following layers change."""
        if batch.images is None:
            return super().__call__(batch)
        # Words and features lie one behind the other, so that one gather, the same in every step, makes the stream.
        stage = batch.images.stage
        self.ops.embed(batch.ids, self.table, scale=self.scale, out=stage[: batch.capacity], count=batch.tokens)
        x = batch.scratch.take("x", (batch.capacity, self.table.cols), "f32")
        self.ops.gather_rows(stage, batch.images.index, out=x, count=batch.tokens)
        return x
