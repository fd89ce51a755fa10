"""Images on one rank: features by key, and which rows of a step read them.

Knows: what the scheduler asked to be encoded and dropped, each slot's images and positions. Refuses to know: budgets and who gives way
(engine/images.py), the tower's inside. Single writer: the runner.

      stage     [ embeddings of the step's T tokens | features of its image tokens ]
      index     0 1 2 T T+1 T+2 6 7                   token 3, 4 and 5 are an image's
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tradewind.config.card_vision import VisionFacts
from tradewind.contract.image import Image, ImageSpan
from tradewind.contract.step import Enter, Ints, Step
from tradewind.device.axes import AXES, image_positions
from tradewind.device.batch import ImageRows
from tradewind.device.layout import StepArrays
from tradewind.kernels.ops import Ops

Pixels = npt.NDArray[np.uint8]
Features = npt.NDArray[np.float32]
Tower = Callable[[Pixels], Features]
"""Colors [height, width, 3] -> one vector for each token, row by row."""


class _Held:
    """A slot's images."""

    def __init__(self, enter: Enter) -> None:
        self.spans: tuple[ImageSpan, ...] = enter.images
        self.prompt = enter.prompt_tokens
        self.positions, self.shift = image_positions(enter.images, tokens=enter.prompt_tokens)


class ImageSlots:
    """Features of images, kept until they are dropped, and the arrays that a forward reads them through."""

    def __init__(self, tower: Tower, ops: Ops, *, facts: VisionFacts, slots: int, capacity: int) -> None:
        """slots: of sequences. capacity: tokens of a step."""
        self._tower, self._facts, self._capacity = tower, facts, capacity
        self._features: dict[str, Features] = {}
        self._held: dict[int, _Held] = {}
        self._shift: Ints = np.zeros(slots, np.int32)
        """By slot: what is added to the place of a token behind the prompt."""
        self.rows = ImageRows(
            axes=ops.constant(np.zeros((AXES, capacity), np.int32)),
            index=ops.constant(np.arange(capacity, dtype=np.int32)),
            stage=ops.empty((2 * capacity, facts.out), "f32"),
        )
        # The op set's memory is host memory (cpu, plain): it is written in place.
        self._axes, self._index, self._stage = (
            ops.host(each) for each in (self.rows.axes, self.rows.index, self.rows.stage)
        )
        self._own: Ints = np.arange(capacity, dtype=np.int32)

    def enter(self, enter: Enter) -> None:
        """A sequence takes its slot."""
        if enter.images:
            held = self._held[enter.slot] = _Held(enter)
            self._shift[enter.slot] = held.shift

    def leave(self, slot: int) -> None:
        """The slot is given up."""
        if self._held.pop(slot, None) is not None:
            self._shift[slot] = 0

    def turn(self, step: Step) -> None:
        """Does what the step says about features: forgets some, computes others."""
        for key in step.drop:
            self._features.pop(key, None)
        for image in step.encode:
            self._features[image.key] = self._encoded(image)

    def _encoded(self, image: Image) -> Features:
        edge = self._facts.edge
        shape = (image.rows * edge, image.columns * edge, 3)
        assert len(image.pixels) == shape[0] * shape[1] * 3, (len(image.pixels), shape)
        features = self._tower(np.frombuffer(image.pixels, np.uint8).reshape(shape))
        assert len(features) == image.count, (features.shape, image.count)
        return features

    def lay_out(self, step: Step, arrays: StepArrays) -> None:
        """Fills positions and index for a step that was laid out, and puts the features it reads behind the embeddings."""
        total = int(arrays.tokens[0])
        positions = arrays.positions[:total]
        self._index[:total] = self._own[:total]
        if not self._held:
            self._axes[:, :total] = positions
            return
        np.add(positions, self._shift[arrays.token_slot[:total]], out=self._axes[0, :total])
        self._axes[1:, :total] = self._axes[0, :total]
        staged = self._capacity
        for row in range(step.rows):
            held = self._held.get(int(step.slot[row]))
            start = int(step.start[row])
            if held is None or start >= held.prompt:
                continue
            end = start + int(step.count[row])
            at = int(arrays.query_start[row]) - start
            """What is added to a position of this row to find its token in the step."""
            last = min(end, held.prompt)
            self._axes[:, at + start : at + last] = held.positions[:, start:last]
            for span in held.spans:
                low, high = max(start, span.first), min(end, span.end)
                if low >= high:
                    continue
                features = self._features[span.key][low - span.first : high - span.first]
                self._stage[staged : staged + len(features)] = features
                self._index[at + low : at + high] = np.arange(staged, staged + len(features), dtype=np.int32)
                staged += len(features)

    def rest(self) -> None:
        """Forgets all features: nothing runs, and the scheduler has forgotten them too."""
        self._features.clear()
        release = getattr(self._tower, "release", None)
        if release is not None:
            release()
