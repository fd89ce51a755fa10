"""What receipts are added up from: running sums over steps, what held up the queue, what is noted of each sequence, and the bill itself.

Knows: sums, spans and proportions. Refuses to know: events (receipt_book) and what is concluded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from tradewind.contract.events import Cause, Held
from tradewind.observability.lives import Life
from tradewind.observability.receipts import PARTS, Part, PartName


class Sums(msgspec.Struct):
    """Seconds since the start, by what the steps spent them on; together they are the time itself."""

    idle: float = 0.0
    base: float = 0.0
    """The fixed cost of steps; of those with prompts in them it is counted in `mixed`, too."""
    prefill: float = 0.0
    decode: float = 0.0
    draft: float = 0.0
    """Making guesses, and computing wrong ones."""
    masks: float = 0.0
    """Standing still for grammars."""
    stall: float = 0.0
    mixed: float = 0.0
    row: float = 0.0
    """What the tokens of one decoding row cost, in the mean, a part of `decode`."""
    prompt_steps: float = 0.0
    """Not seconds: how many steps had prompts."""

    def plus(self, other: Sums, part: float = 1.0) -> Sums:
        return Sums(
            self.idle + part * other.idle,
            self.base + part * other.base,
            self.prefill + part * other.prefill,
            self.decode + part * other.decode,
            self.draft + part * other.draft,
            self.masks + part * other.masks,
            self.stall + part * other.stall,
            self.mixed + part * other.mixed,
            self.row + part * other.row,
            self.prompt_steps + part * other.prompt_steps,
        )

    def since(self, before: Sums) -> Sums:
        return self.plus(before, -1.0)


class Track:
    """What is noted of one sequence while it lives."""

    __slots__ = (
        "blocked", "blocked_by", "causes", "chunk_rows", "chunks", "held_at", "life", "marks", "masks", "own", "seen", "taken_s", "tenant",
        "who",
    )  # fmt: skip

    def __init__(self, life: Life, *, taken_s: float, tenant: str) -> None:
        self.life = life
        self.taken_s, self.tenant = taken_s, tenant
        self.marks: list[Sums | None] = []
        """The sums at the begin of each phase, and at the end of the last one."""
        self.own: dict[int, float] = {}
        """By phase, seconds of steps for its own prompt tokens ..."""
        self.masks: dict[int, float] = {}
        """... and for its own grammar's masks."""
        self.chunks = 0
        self.chunk_rows = 0.0
        self.seen = 0
        self.causes: dict[PartName, float] = {}
        """Of its first wait."""
        self.who: dict[PartName, str] = {}
        self.held_at: dict[Cause, float] = {}
        """What `QueueHolds` had counted when its wait, or the last part of it, began."""
        self.blocked: Cause | None = None
        self.blocked_by = ""


class QueueHolds:
    """How long the queue was held up by what, since the start; and by whom, lately."""

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.blocked_by = ""
        self._since_s = 0.0
        self._total: dict[Cause, float] = {}
        self._lately: deque[tuple[float, float, Cause, str]] = deque(maxlen=256)

    def change(self, event: Held) -> None:
        """Another cause, or none."""
        if self.cause is not None:
            self._total[self.cause] = self._total.get(self.cause, 0.0) + max(0.0, event.at_s - self._since_s)
            self._lately.append((self._since_s, event.at_s, self.cause, self.blocked_by))
        self.cause, self.blocked_by, self._since_s = event.cause, event.blocked_by, event.at_s

    def at(self, at_s: float) -> dict[Cause, float]:
        """Seconds by cause up to a moment that is not before the last change."""
        total = dict(self._total)
        if self.cause is not None:
            total[self.cause] = total.get(self.cause, 0.0) + max(0.0, at_s - self._since_s)
        return total

    def who(self, cause: Cause, begin_s: float, end_s: float, *, but: str) -> str:
        """Who was blamed longest for a cause in a time, as far as it is remembered."""
        times: dict[str, float] = {}
        spans = [*self._lately]
        if self.cause is not None:
            spans.append((self._since_s, end_s, self.cause, self.blocked_by))
        for begin, end, held, name in reversed(spans):
            if end < begin_s:
                break
            if held == cause and name and name != but:
                times[name] = times.get(name, 0.0) + max(0.0, min(end, end_s) - max(begin, begin_s))
        return max(times, key=lambda name: times[name], default="")


class Bill:
    """Parts, one after another from a moment on; what was counted once is not counted again."""

    def __init__(self, begin_s: float) -> None:
        self.seconds: dict[PartName, float] = {}
        self.begin_s = self.at_s = begin_s

    @property
    def total_s(self) -> float:
        return self.at_s - self.begin_s

    def until(self, name: PartName, at_s: float) -> None:
        """Counts the time up to a moment to one part; a moment that has passed counts nothing."""
        if at_s > self.at_s:
            self.seconds[name] = self.seconds.get(name, 0.0) + at_s - self.at_s
            self.at_s = at_s

    def spread(self, parts: dict[PartName, float], seconds: float, *, rest: PartName) -> None:
        """Counts some time to several parts in proportion; what they do not explain is the rest's, and they never explain more."""
        told = sum(part for part in parts.values() if part > 0)
        scale = min(1.0, seconds / told) if told > 0 else 0.0
        for name, part in parts.items():
            if part > 0:
                self.seconds[name] = self.seconds.get(name, 0.0) + scale * part
        left = seconds - scale * told
        if left > 0:
            self.seconds[rest] = self.seconds.get(rest, 0.0) + left
        self.at_s += seconds

    def parts(self, who: dict[PartName, str]) -> tuple[Part, ...]:
        return tuple(
            Part(name=name, seconds=self.seconds[name], blocked_by=who.get(name, ""))
            for name in PARTS
            if self.seconds.get(name, 0.0) > 0
        )


def front_out(
    bill: Bill, turns: Sequence[tuple[float, float, float]], finished_s: float, *, left: bool = False
) -> None:
    """What the front did after the engine was done: only that part of its turns which lies behind it.

    `left`: the client went away; what it had not taken until then was waiting for it.
    """
    before_s = 0.0
    for taken_s, spoken_s, written_s in turns:
        # A part that was taken before the last write ended waited for it; when it was taken up again is not known.
        bill.until("delivery", min(taken_s if taken_s >= before_s else spoken_s, finished_s))
        before_s = written_s
        bill.until("detokenise", min(spoken_s, finished_s))
        bill.until("socket", min(written_s, finished_s))
    bill.until("socket" if left else "delivery", finished_s)
