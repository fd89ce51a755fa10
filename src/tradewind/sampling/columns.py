"""Sampling values of every slot as columns, and their gathering for one step.

Knows: how a request's SamplingParams become numbers per row, tokens held back by min_tokens and bad words. Refuses to know: how a token is
drawn (kernels) and when a request ends (engine). Single writer: the runner.
"""

from __future__ import annotations

import numpy as np

from tradewind.contract.step import Enter, Ints
from tradewind.device.slots import Slots
from tradewind.kernels.ops import SampleColumns

U64 = (1 << 64) - 1


class SlotSampling:
    """Per-slot sampling values; `gather` fills one SampleColumns of fixed arrays for the rows that sample."""

    def __init__(self, *, slots: Slots, rows: int) -> None:
        count = len(slots.epoch)
        self._slots = slots
        self._temperature = np.zeros(count, np.float32)
        self._top_k = np.zeros(count, np.int32)
        self._top_p = np.ones(count, np.float32)
        self._min_p = np.zeros(count, np.float32)
        self._repetition = np.ones(count, np.float32)
        self._presence = np.zeros(count, np.float32)
        self._frequency = np.zeros(count, np.float32)
        self._seed = np.zeros(count, np.uint64)
        self._penalised = np.zeros(count, np.bool_)
        self._has_bias = np.zeros(count, np.bool_)
        self._enter: list[Enter | None] = [None] * count
        row_bytes = slots.tokens.strides[0]
        self._history = slots.tokens.ctypes.data + np.arange(count, dtype=np.int64) * row_bytes
        self.logprobs = np.full(count, -1, np.int32)
        """Per slot: how many top logprobs are wanted, -1 for none."""
        self.prompt_logprobs = np.full(count, -1, np.int32)
        self._columns = SampleColumns(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            repetition=np.ones(rows, np.float32),
            presence=np.zeros(rows, np.float32),
            frequency=np.zeros(rows, np.float32),
            seed=np.zeros(rows, np.uint64),
            position=np.zeros(rows, np.int64),
            history=np.zeros(rows, np.int64),
            history_prompt=np.zeros(rows, np.int32),
            history_length=np.zeros(rows, np.int32),
            bias_start=np.zeros(rows + 1, np.int32),
            bias_token=np.zeros(1, np.int32),
            bias_value=np.zeros(1, np.float32),
            mask=None,
        )

    def enter(self, enter: Enter) -> None:
        """Takes over the values of a sequence that enters a slot."""
        slot, s = enter.slot, enter.sampling
        self._enter[slot] = enter
        self._temperature[slot] = s.temperature
        self._top_k[slot] = s.top_k
        self._top_p[slot] = s.top_p
        self._min_p[slot] = s.min_p
        self._repetition[slot] = s.repetition_penalty
        self._presence[slot] = s.presence_penalty
        self._frequency[slot] = s.frequency_penalty
        self._seed[slot] = enter.seed & U64
        self._penalised[slot] = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        self._has_bias[slot] = bool(s.logit_bias or s.bad_words or s.min_tokens)
        self.logprobs[slot] = -1 if s.logprobs is None else s.logprobs
        self.prompt_logprobs[slot] = -1 if s.prompt_logprobs is None else s.prompt_logprobs

    def gather(self, slot: Ints, position: Ints) -> SampleColumns:
        """The columns of the rows that sample: `slot` [L] and the position of the token each will draw. Reuses the same arrays."""
        c, n = self._columns, len(slot)
        c.temperature[:n] = self._temperature[slot]
        c.top_k[:n] = self._top_k[slot]
        c.top_p[:n] = self._top_p[slot]
        c.min_p[:n] = self._min_p[slot]
        c.seed[:n] = self._seed[slot]
        c.position[:n] = position
        c.history_length[:n] = 0
        penalised = self._penalised[slot]
        if penalised.any():
            c.repetition[:n] = self._repetition[slot]
            c.presence[:n] = self._presence[slot]
            c.frequency[:n] = self._frequency[slot]
            c.history[:n] = self._history[slot]
            c.history_prompt[:n] = self._slots.prompt[slot]
            c.history_length[:n] = np.where(penalised, position, 0)
        c.bias_start[: n + 1] = 0
        if self._has_bias[slot].any():
            return self._with_bias(slot, position)
        return c

    def _with_bias(self, slot: Ints, position: Ints) -> SampleColumns:
        """Adds the rows' biases and banned tokens; rare, so it is written per row."""
        c = self._columns
        tokens: list[int] = []
        values: list[float] = []
        for row in range(len(slot)):
            if self._has_bias[slot[row]]:
                for token, value in self._biases(int(slot[row]), int(position[row])).items():
                    tokens.append(token)
                    values.append(value)
            c.bias_start[row + 1] = len(tokens)
        return SampleColumns(
            **{
                name: getattr(c, name)
                for name in SampleColumns.__dataclass_fields__
                if name not in ("bias_token", "bias_value")
            },
            bias_token=np.array(tokens or [0], np.int32),
            bias_value=np.array(values or [0], np.float32),
        )

    def _biases(self, slot: int, position: int) -> dict[int, float]:
        enter = self._enter[slot]
        assert enter is not None
        sampling = enter.sampling
        biases = dict(sampling.logit_bias)
        generated = position - int(self._slots.prompt[slot])
        if generated < sampling.min_tokens:
            for token in (*enter.eos_ids, *sampling.stop_token_ids):
                biases[token] = -np.inf
        for word in sampling.bad_words:
            head, last = word[:-1], word[-1]
            known = self._slots.tokens[slot, max(0, position - len(head)) : position]
            if np.array_equal(known, head):
                biases[last] = -np.inf
        return biases
