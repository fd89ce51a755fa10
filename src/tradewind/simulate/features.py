"""What of a step decides its time, summed up from its columns.

Knows: rows, contexts, logits and masks of a step. Refuses to know: seconds (steptime).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.contract.kv import KVGroup
from tradewind.contract.step import Step, Wants

Reals = npt.NDArray[np.float64]

LAST, ALL, ALL_NO_SAMPLE = int(Wants.LAST), int(Wants.ALL), int(Wants.ALL_NO_SAMPLE)
"""Plain numbers: looking a member up costs a step as much as the sum that it is needed for."""


class Features(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of a step decides its time."""

    tokens: int = 0
    rows: int = 0
    prefill_tokens: int = 0
    """Tokens of rows that compute more than one known token."""
    decode_context: int = 0
    """Tokens that the other rows read from the cache, themselves included. Layers with a window count in proportion."""
    prefill_context: int = 0
    """Sum over the tokens of prefill rows of the tokens that each of them sees."""
    prefill_rows: int = 0
    """Rows that compute more than one known token."""
    prefill_keys: int = 0
    """Tokens that prefill rows see, counted once for each row: what is read however few of its tokens are computed."""
    logit_rows: int = 0
    masked_rows: int = 0
    """Rows that are sampled under a grammar's mask."""


FIELDS: tuple[str, ...] = Features.__struct_fields__
NAMES = {
    "tokens": "tokens",
    "rows": "rows",
    "prefill_tokens": "prompt tokens",
    "decode_context": "tokens read by decode rows",
    "prefill_context": "token pairs in prompts",
    "prefill_rows": "prompts",
    "prefill_keys": "tokens read by prompts",
    "logit_rows": "rows of logits",
    "masked_rows": "masked rows",
}


class FeatureReader:
    """Sums a step's columns up; remembers which slots have a grammar. To be shown every step in order."""

    def __init__(self, *, groups: Sequence[KVGroup], slots: int) -> None:
        self._masked: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._any_masked = False
        layers = sum(len(group.layers) for group in groups)
        self._windows = [(group.window, group.kind == "chunk", len(group.layers) / max(1, layers)) for group in groups]
        self._plain = all(window is None for window, _, _ in self._windows)

    def read(self, step: Step) -> Features:
        """The features of one step; remembers who entered."""
        for enter in step.enter:
            self._masked[enter.slot] = enter.grammar is not None
            self._any_masked |= enter.grammar is not None
        rows = len(step.slot)
        if not rows:
            return Features()
        count, drafts, wants = step.count, step.drafts, step.wants
        tokens = int(count.sum())
        if tokens == rows and self._plain and bool((wants == LAST).all()):
            # Nothing but decode rows: the usual step.
            decode_context, prefill_context, prefill_keys, prefill_tokens = int(step.start.sum()) + rows, 0, 0, 0
            logit_rows, prefill_rows = rows, 0
        else:
            chunk = count - drafts > 1
            prefill_rows = int(chunk.sum())
            if self._plain:  # few rows are chunks
                decode_context, prefill_context, prefill_keys, prefill_tokens = int(step.start.sum()) + tokens, 0, 0, 0
                for row in np.flatnonzero(chunk).tolist():
                    begin, long = int(step.start[row]), int(count[row])
                    decode_context -= begin + long
                    prefill_context += long * begin + long * (long + 1) // 2
                    prefill_keys += begin + long
                    prefill_tokens += long
            else:
                start, size = step.start.astype(np.float64), count.astype(np.float64)
                decode = ~chunk
                decode_context = round(self._seen(start[decode] + size[decode] - 1))
                prefill_context = round(self._pairs(start[chunk], size[chunk]))
                prefill_keys = round(self._seen_once(start[chunk], size[chunk]))
                prefill_tokens = int(count[chunk].sum())
            every = (wants == ALL) | (wants == ALL_NO_SAMPLE)
            logit_rows = int((wants == LAST).sum())
            if every.any():
                logit_rows += int(np.where(drafts > 0, drafts + 1, count)[every].sum())
        masked = 0
        if self._any_masked:
            masked = int((self._masked[step.slot] & ((wants == LAST) | (wants == ALL))).sum())
        return Features(
            tokens=tokens,
            rows=rows,
            prefill_tokens=prefill_tokens,
            decode_context=decode_context,
            prefill_context=prefill_context,
            prefill_rows=prefill_rows,
            prefill_keys=prefill_keys,
            logit_rows=logit_rows,
            masked_rows=masked,
        )

    def _seen(self, position: Reals) -> float:
        """Tokens that tokens at these positions see, in the mean over layers."""
        total = 0.0
        for window, restarts, part in self._windows:
            if window is None:
                seen = position + 1
            else:
                seen = position % window + 1 if restarts else np.minimum(position + 1, window)
            total += part * float(seen.sum())
        return total

    def _seen_once(self, start: Reals, size: Reals) -> float:
        """Tokens that chunks see, each counted once for a chunk, in the mean over layers."""
        total = 0.0
        for window, restarts, part in self._windows:
            if window is None:
                seen = start + size
            else:
                seen = size + (start % window if restarts else np.minimum(start, window - 1))
            total += part * float(seen.sum())
        return total

    def _pairs(self, start: Reals, size: Reals) -> float:
        """The same, summed over all tokens of chunks."""
        total = 0.0
        for window, restarts, part in self._windows:
            if window is None:
                total += part * float((size * start + size * (size + 1) / 2).sum())
            elif restarts:
                total += part * float((_chunked_pairs(start + size, window) - _chunked_pairs(start, window)).sum())
            else:
                growing = np.clip(window - 1 - start, 0, size)  # tokens that do not see a whole window yet
                seen = growing * start + growing * (growing + 1) / 2 + (size - growing) * window
                total += part * float(seen.sum())
        return total


def _chunked_pairs(tokens: Reals, window: int) -> Reals:
    """Pairs of a token and one that it sees among the first `tokens`, where sight starts anew at each multiple of `window`."""
    rest = tokens % window
    return tokens // window * (window * (window + 1) / 2) + rest * (rest + 1) / 2
