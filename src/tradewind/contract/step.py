"""One unit of work for the device wing and its answer, as columns.

Knows: what crosses between the wings. Refuses to know: why a row was chosen (engine) and how it is computed (runner).

A row says: from position `start`, compute `count` tokens, the last `drafts` of them guesses. Prefill, chunk, decode, verify and resume
are the same row with other numbers:

        prompt of 600, chunk 512        start=0   count=512 drafts=0 wants=NONE
        its rest, samples one token     start=512 count=88  drafts=0 wants=LAST
        a decode step                   start=600 count=1   drafts=0 wants=LAST
        verify three guesses            start=601 count=4   drafts=3 wants=ALL (of the row's last drafts + 1)

Columns (numpy int32, made read-only) because 512 row objects a step cost about a millisecond of host time, columns microseconds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.contract.image import Image, ImageSpan
from tradewind.contract.request import Pooling, SamplingParams

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class Wants(IntEnum):
    """Which logits a row needs."""

    NONE = 0
    LAST = 1
    ALL = 2
    """Every token of the row (prompt logprobs); the last one is sampled when the row reaches the known end of the sequence."""
    ALL_NO_SAMPLE = 3
    """Every token of the row, none sampled: a chunk of a prompt whose logprobs are wanted."""
    HIDDEN = 4
    """No logits: the row ends a prompt whose pooled hidden state is wanted."""
    HIDDEN_PART = 5
    """No logits: a chunk of such a prompt before its last; what pooling needs of it is kept in the slot."""


class Enter(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes a slot. Sent once; afterwards the device knows its tokens and appends what it samples itself."""

    slot: int
    epoch: int
    request_id: str
    tokens: Ints
    """Everything known so far: prompt, and after a preemption also what was generated."""
    prompt_tokens: int
    """How many of `tokens` are prompt (penalties and min_tokens count from here)."""
    capacity_tokens: int
    """Upper bound of tokens this sequence can ever hold."""
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    """Held back until sampling.min_tokens are generated."""
    grammar: str | None = None
    """Request.grammar. Which tokens it allows depends on the token before, so masks are the device wing's own business."""
    adapter: str = ""
    pooling: Pooling | None = None
    normalise: bool = True
    images: tuple[ImageSpan, ...] = ()
    """Images among the prompt's tokens: rows over them read the features that some step's `encode` has made."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """Copy page contents before the step's rows run. `copy` is within the device (copy-on-write); the rest are tiers."""

    kind: Literal["copy", "to_host", "from_host", "from_peer"]
    group: int
    source: Ints
    target: Ints
    ticket: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the device wing shall do next. All row columns have the same length R; R may be 0 when only slots change."""

    number: int
    slot: Ints
    epoch: Ints
    start: Ints
    count: Ints
    drafts: Ints
    wants: Ints
    enter: tuple[Enter, ...] = ()
    leave: tuple[int, ...] = ()
    """Slots given up before `enter` is applied: a slot may leave and be entered anew in one step."""
    page_slot: Ints
    page_group: Ints
    page_index: Ints
    page_id: Ints
    """New page-table entries (four columns): slot's logical page `page_index` of group `page_group` is physical `page_id`; applied
    after `enter` and before the rows run. A dropped window page is sent as page_id 0, the pool's unused null page."""
    moves: tuple[Move, ...] = ()
    drop: tuple[str, ...] = ()
    """Keys of images whose features are forgotten, before anything is encoded."""
    encode: tuple[Image, ...] = ()
    """Images whose features are computed before the rows run, and kept until they are dropped."""

    @property
    def rows(self) -> int:
        return len(self.slot)

    @property
    def tokens(self) -> int:
        return int(self.count.sum())


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position, of the raw logits (before penalties and temperature)."""

    token: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RowLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of one row: of its sampled tokens, and of prompt tokens start+1 .. start+count when they were wanted."""

    sampled: tuple[TokenLogprobs, ...] = ()
    prompt: tuple[TokenLogprobs, ...] = ()


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step brought. Rows are in the order of the Step; row r's tokens are tokens[offset[r]:offset[r + 1]]."""

    number: int
    slot: Ints
    epoch: Ints
    offset: Ints
    tokens: Ints
    logprobs: dict[int, RowLogprobs] = msgspec.field(default_factory=dict)
    """By row index, only rows that asked."""
    hidden: dict[int, Floats] = msgspec.field(default_factory=dict)
    """By row index, for rows that wanted HIDDEN: the prompt's pooled hidden state, float32 [hidden size]."""
    moved: tuple[int, ...] = ()
    """Tickets of the moves that landed."""
    failed: dict[int, str] = msgspec.field(default_factory=dict)
    """By row index: the reason, e.g. "logits are not finite". A failed row has no tokens; its request ends with this reason."""
    complete: tuple[int, ...] = ()
    """Row indexes whose grammar allows nothing more behind their last token: their requests end with "stop"."""
    device_s: float = 0.0
    """Time the device worked on this step."""
    host_s: float = 0.0
    """Time the device wing's host side spent preparing it."""
    grammar_s: float = 0.0
    """Of the step's time, how long it stood still for its grammars: their masks, and their matchers that go on by a token ..."""
    grammar_rows: dict[int, float] = msgspec.field(default_factory=dict)
    """... and by row index, for the rows that have one, that row's part of it."""
    draft_s: float = 0.0
    """Of the step's time, how long it took to make guesses; what verifying them took is not in it."""


def frozen_ints(values: npt.ArrayLike) -> Ints:
    """A read-only int32 column from any sequence of whole numbers."""
    column = np.ascontiguousarray(values, dtype=np.int32)
    if column is values or column.base is not None:
        column = column.copy()
    column.flags.writeable = False
    return column
