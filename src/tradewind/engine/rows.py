"""Counters of every running sequence as columns, indexed by slot.

Knows: numbers per slot. Refuses to know: what is done with them. Written by the scheduler only.

One column is advanced for all rows of a step in one numpy call, so that a steady decode step touches no Python object per row:

      position    0 ......... computed ....... next ....... bound
                  |-- KV certain --|-- flying --|-- to submit --|

      filling     next < fill      its prompt (after a preemption: all known tokens) is being submitted
      decoding    next >= fill     each row has one token, the one the device sampled last
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tradewind.contract.step import Ints
from tradewind.engine.sequence import Sequence

RECENT = 128
"""Sampled tokens kept per slot in the column before they are copied to their sequence in one go."""


class Rows:
    """The column table. All integers are int32 so that they go into a Step as they are."""

    def __init__(self, *, slots: int) -> None:
        def column() -> Ints:
            return np.zeros(slots, dtype=np.int32)

        self.epoch = column()
        self.next = column()
        self.computed = column()
        self.fill = column()
        self.bound = column()
        """One past the last position that may be submitted: the token after it is the last that max_tokens allows."""
        self.prompt = column()
        self.generated = column()
        self.max_tokens = column()
        self.min_tokens = column()
        self.cached = column()
        self.flying = column()
        """Steps submitted and not collected that have a row of this slot."""
        self.stored = column()
        """Generated tokens already copied to the sequence."""
        self.page_end = column()
        """Tokens that the pages in the lease can hold."""
        self.slide_at: npt.NDArray[np.int32] = np.full(slots, np.iinfo(np.int32).max, dtype=np.int32)
        """When `computed` reaches this, a window page can be dropped."""
        self.decoding: npt.NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)
        self.talkative: npt.NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)
        """Rows whose answers carry logprobs: handled one by one."""
        self.stop: Ints = np.full((slots, 4), -1, dtype=np.int32)
        self.recent: Ints = np.zeros((slots, RECENT), dtype=np.int32)
        self.ids: npt.NDArray[np.object_] = np.empty(slots, dtype=np.object_)
        self.sequences: list[Sequence | None] = [None] * slots

    def __len__(self) -> int:
        return len(self.epoch)

    def enter(self, sequence: Sequence, *, start: int, page_end: int) -> None:
        """Fills a slot's columns for a sequence that was just admitted; its first row starts at `start`."""
        slot, request = sequence.slot, sequence.request
        self.epoch[slot] = sequence.epoch
        self.next[slot] = self.computed[slot] = self.cached[slot] = start
        self.fill[slot] = sequence.known
        self.prompt[slot] = sequence.prompt_tokens
        self.bound[slot] = sequence.positions
        self.generated[slot] = self.stored[slot] = sequence.generated
        self.max_tokens[slot] = request.max_tokens
        self.min_tokens[slot] = request.sampling.min_tokens
        self.flying[slot] = 0
        self.page_end[slot] = page_end
        self.decoding[slot] = False
        self.talkative[slot] = request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None
        stops = stop_tokens(sequence)
        if len(stops) > self.stop.shape[1]:
            wider = np.full((len(self), len(stops)), -1, dtype=np.int32)
            wider[:, : self.stop.shape[1]] = self.stop
            self.stop = wider
        self.stop[slot] = -1
        self.stop[slot, : len(stops)] = stops
        self.ids[slot] = sequence.id
        self.sequences[slot] = sequence

    def leave(self, slot: int) -> None:
        """Empties a slot; its epoch stays, so that late rows can be told apart."""
        self.decoding[slot] = False
        self.ids[slot] = None
        self.sequences[slot] = None

    def store(self, slot: int) -> None:
        """Copies the sampled tokens that only the column has to their sequence."""
        sequence = self.sequences[slot]
        assert sequence is not None
        first, last = int(self.stored[slot]), int(self.generated[slot])
        if first < last:
            sequence.append(self.recent[slot, np.arange(first, last) % RECENT])
            self.stored[slot] = last
        sequence.generated = last


def stop_tokens(sequence: Sequence) -> tuple[int, ...]:
    """Token ids that end this sequence's answer."""
    sampling = sequence.request.sampling
    eos = () if sampling.ignore_eos else sequence.request.eos_ids
    return (*eos, *(token for token in sampling.stop_token_ids if token not in eos))
