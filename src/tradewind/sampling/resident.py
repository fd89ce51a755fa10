"""Sampling values that live on the device: a slot's words, and which kernels a step's rows need.

Knows: how a request's SamplingParams become the words of one slot, and what kind of draw a set of rows asks for. Refuses to know: how a
token is drawn (kernels) and when a request ends (engine). Single writer: the runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tradewind.contract.step import Enter, Ints

Words = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Draw:
    """Which kernels a step's sampling takes; a key of captured graphs, so it has few values."""

    greedy: bool = True
    filtered: bool = False
    """Some row has top-k or top-p."""
    steered: bool = False
    """Some row has penalties, biases or a bitmask: logits are changed before the draw."""
    logprobs: int = -1
    """How many top log-probabilities are computed, -1: none."""


LOGPROB_WIDTHS = (-1, 0, 5, 20)
"""Numbers of top log-probabilities that a graph is captured for; what is asked is rounded up."""


class ResidentSampling:
    """What the host keeps of each slot to choose a Draw; the values themselves go to the device once, when a sequence enters."""

    def __init__(self, *, slots: int) -> None:
        self._random = np.zeros(slots, np.bool_)
        self._filtered = np.zeros(slots, np.bool_)
        self._steered = np.zeros(slots, np.bool_)
        self.biased = np.zeros(slots, np.bool_)
        """Has biases or banned tokens: written for each step."""
        self.late = np.zeros(slots, np.bool_)
        """What is banned depends on the token before: its step waits for that."""
        self.logprobs = np.full(slots, -1, np.int32)

    def enter(self, enter: Enter, *, constrained: bool) -> Words:
        """Takes a sequence's values over and returns its words, as kernels/triton/step.py:VALUE_FIELDS orders them."""
        s, slot = enter.sampling, enter.slot
        penalised = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        self._random[slot] = s.temperature != 0
        self._filtered[slot] = s.temperature != 0 and (s.top_k > 0 or s.top_p < 1)
        self.biased[slot] = bool(s.logit_bias or s.bad_words or s.min_tokens)
        self._steered[slot] = penalised or self.biased[slot] or constrained
        self.late[slot] = constrained or any(len(word) > 1 for word in s.bad_words)
        self.logprobs[slot] = -1 if s.logprobs is None else s.logprobs
        reals = np.array(
            [s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty], np.float32
        )
        words = np.zeros(16, np.int32)
        words[:6] = reals.view(np.int32)
        words[6:9] = (s.top_k, enter.prompt_tokens, penalised)
        words[9:11] = np.array([enter.seed & ((1 << 64) - 1)], np.uint64).view(np.int32)
        return words

    def draw(self, slot: Ints) -> Draw:
        """The kind of draw that serves all of these slots."""
        wanted = int(self.logprobs[slot].max(initial=-1))
        return Draw(
            greedy=not (self._random[slot].any() or self._steered[slot].any()),
            filtered=bool(self._filtered[slot].any()),
            steered=bool(self._steered[slot].any()),
            logprobs=next(width for width in LOGPROB_WIDTHS if width >= wanted),
        )
