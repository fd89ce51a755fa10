"""What steers the draw besides logits: biases and bitmasks of a step's rows, from the host's columns into buffers of fixed address.

Knows: the buffers, and what must be true of them when a graph reads them. Refuses to know: grammars and where biases come from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tradewind.kernels.ops import SampleColumns, Tensor
from tradewind.kernels.triton.graphs import Gpu, Pinned

BIASES_EACH = 512
"""Biases and banned tokens for each row that a step has room for at first, on average over its rows."""


class Steering:
    """Written in the stream, before the graph that reads it. One owner."""

    def __init__(self, gpu: Gpu, *, rows: int, vocab_size: int) -> None:
        self._gpu, self._rows = gpu, rows
        self.start = gpu.zeros(rows + 1)
        """Where each row's biases begin in `token` and `value`."""
        self.token, self.value, self._ring = self._bias_buffers(rows * BIASES_EACH)
        self._biased_before = False
        words = -(-vocab_size // 32)
        self.mask = gpu.zeros(rows, words)
        """One bit a token of the vocabulary: allowed."""
        self._mask_ring = gpu.pinned((rows, words))
        self._masked_rows = -1
        """Rows of the mask that may hold something else than "all allowed"; -1: never written."""

    def wants_biases(self, biased: bool) -> bool:
        """Whether biases must be written for a step: also to take those of the step before away."""
        return biased or self._biased_before

    def fits(self, entries: int) -> bool:
        """Whether so many biases have room."""
        return entries <= len(self.token)

    def grow(self, entries: int) -> None:
        """Room for so many biases and as many again. Nothing may be in flight; graphs that hold the old buffers are void."""
        self.token, self.value, self._ring = self._bias_buffers(2 * entries)

    def bias(self, columns: SampleColumns, *, count: int, turn: int, biased: bool) -> None:
        """Biases of `count` rows; `turn` picks one of two pinned copies, for as many steps may be in flight."""
        entries = int(columns.bias_start[count])
        assert self.fits(entries), (entries, len(self.token))
        copy = self._gpu.copy
        start, token, value = self._ring[turn % 2]
        start.host[: count + 1] = columns.bias_start[: count + 1]
        start.host[count + 1 :] = entries
        token.host[:entries], value.host[:entries] = columns.bias_token[:entries], columns.bias_value[:entries]
        copy(self.start, start.device)
        if entries:
            copy(self.token[:entries], token.device[:entries])
            copy(self.value[:entries], value.device[:entries])
        self._biased_before = biased

    def allow(self, mask: npt.NDArray[np.uint32] | None, *, count: int) -> None:
        """Bitmasks of the first `count` rows; None: every row may take every token.

        Masks come with late rows only: every step before has ended, so nobody reads the pinned copy any more.
        """
        if mask is not None:
            self._mask_ring.host[:count] = mask.view(np.int32)
            self._gpu.copy(self.mask[:count], self._mask_ring.device[:count])
            if self._masked_rows < 0 or self._masked_rows > count:
                self.mask[count:].fill_(-1)
            self._masked_rows = count
        elif self._masked_rows != 0:
            self.mask.fill_(-1)
            self._masked_rows = 0

    def _bias_buffers(self, entries: int) -> tuple[Tensor, Tensor, list[tuple[Pinned, Pinned, Pinned]]]:
        """Tokens and values of a step's biases on the device, and pinned (starts, tokens, values) for two steps in flight."""
        gpu = self._gpu
        ring = [
            (gpu.pinned((self._rows + 1,)), gpu.pinned((entries,)), gpu.pinned((entries,), np.float32))
            for _ in range(2)
        ]
        return gpu.zeros(entries), gpu.reals(entries), ring
