"""The latest steps and who was in each of them: prompts, answers, and why whoever waited did.

Knows: the engine's reports of the last few hundred steps. Refuses to know: HTTP, how it is drawn, what a time was spent on (receipts).

A step costs one reference kept; letters are made only when somebody looks:

      step      101 102 103 104 105
      lane 7     s   s   P   P   D      waited for a slot, its prompt came in two chunks, then its answer
      lane 8     D   D   D   E   E      an answer, evicted in step 104

With API keys a lane is shown to the holder of its key only; of the others there are sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import get_args

import msgspec

from tradewind.contract.events import Cause, Delayed, Held, Scheduled, StepDone, Woken
from tradewind.observability.lives import Life, Listener

STEPS = 512
"""So many of the latest steps are kept."""
STEPS_TOLD = 160
"""So many of them, the latest, one answer tells at most."""
LANES = 256
"""Sequences that have ended and are kept beside the open ones."""
LANES_TOLD = 24
CHUNKS_TOLD = 12
"""Of one step; the rest is summed."""
HOLDS = 256
BLOCKS = 8
"""Of one sequence, the latest."""
ANOTHER = "another key's request"
NEXT_STEP, AFTER = "q", "o"
LETTERS: dict[Cause, str] = {
    "slot": "s",
    "pages": "p",
    "tokens": "t",
    "grammar": "g",
    "prefix": "x",
    "sample": "m",
}
"""What a lane has in a step in which it waits; `q`: for nothing but the next step. Beside these: P its prompt was computed, D its answer,
C the same for the first time, behind tokens that the prefix cache had; - it had a slot and no part in the step, E it was evicted, o its
row was computed in vain, for it had ended when the step was collected, . it was not there."""
assert set(LETTERS) == set(get_args(Cause))


Hold = tuple[float, float, Cause, str]
"""(begin, end, cause, who was blamed)."""


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One step; an array in JSON, in this order."""

    n: int
    """Counted since the server's start, over all engines."""
    at_s: float
    """When it was collected, since the server's start."""
    device_ms: float
    host_ms: float
    """To decide it and to take it in; under overlap hidden behind the device."""
    rows: int
    decode_tokens: int
    prompt_tokens: int
    wrong: int
    """Guesses that were computed for nothing."""
    running: int
    waiting: int
    kv_used: float
    """Of the fullest group, 0 to 1."""
    chunks: list[tuple[int, int]]
    """(lane, tokens) of prompts."""
    other_chunks: int
    """Prompts that are not named."""
    other_tokens: int


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """What a lane waited for before its first slot, so far; an array in JSON."""

    letter: str
    seconds: float
    blocked_by: str


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence."""

    n: int
    id: str
    arrived_s: float
    state: str
    """queue, prefill, decode, preempted, or how it ended."""
    prompt: int
    cached: int
    preemptions: int
    waited_s: float
    """Before its first slot, so far."""
    waits: list[Wait]
    """The longest first."""
    cells: str
    """One letter for each of the steps that are told."""


class TimelineState(msgspec.Struct, frozen=True, kw_only=True):
    """Steps after the one that was asked for, oldest first, and the lanes of whoever asks that were there."""

    steps: list[StepRow]
    lanes: list[Lane]
    more_lanes: int
    """Own lanes that were there too and are not told."""


class _Track:
    """What is noted of one sequence."""

    __slots__ = ("blocks", "first_step", "life", "n")

    def __init__(self, life: Life, n: int) -> None:
        self.life, self.n = life, n
        self.first_step = -1
        """The engine's number of the step that it started in."""
        self.blocks: deque[tuple[float, float | None, Cause, str]] | None = None
        """(begin, end, cause, by whom) of what it alone was blocked on."""


class Timeline(Listener):
    """Kept by `board.Board`. Memory is bounded: by the open sequences and the constants above. One thread."""

    def __init__(self, *, began_s: float) -> None:
        """Times are told since `began_s`."""
        self._began_s = began_s
        self._steps: deque[StepDone] = deque(maxlen=STEPS)
        self._count = 0
        self._open: dict[str, _Track] = {}
        self._ended: deque[_Track] = deque(maxlen=LANES)
        self._lanes = 0
        self._holds: deque[Hold] = deque(maxlen=HOLDS)
        self._held: Held | None = None

    # -- what happened -----------------------------------------------------------------------------------------------

    def add(self, life: Life) -> None:
        """A sequence entered the queue."""
        self._lanes += 1
        self._open[life.id] = _Track(life, self._lanes)

    def started(self, event: Scheduled) -> None:
        """A sequence got its slot."""
        track = self._open.get(event.request_id)
        if track is not None and not event.resumed:
            self._unblock(track, event.at_s)
            track.first_step = event.step

    def delayed(self, event: Delayed) -> None:
        """See Listener."""
        if event.cause in ("grammar", "prefix", "sample"):
            track = self._open.get(event.request_id)
            if track is not None and track.life.scheduled_s is None:
                self._unblock(track, event.at_s)
                if track.blocks is None:
                    track.blocks = deque(maxlen=BLOCKS)
                track.blocks.append((event.at_s, None, event.cause, event.blocked_by))

    def woken(self, event: Woken) -> None:
        """See Listener."""
        track = self._open.get(event.request_id)
        if track is not None:
            self._unblock(track, event.at_s)

    @staticmethod
    def _unblock(track: _Track, at_s: float) -> None:
        if track.blocks and track.blocks[-1][1] is None:
            begin_s, _, cause, who = track.blocks.pop()
            track.blocks.append((begin_s, at_s, cause, who))

    def held(self, event: Held) -> None:
        """See Listener."""
        before = self._held
        if before is not None and before.cause is not None and event.at_s > before.at_s:
            self._holds.append((before.at_s, event.at_s, before.cause, before.blocked_by))
        self._held = event if event.cause is not None else None

    def step(self, event: StepDone) -> None:
        """See Listener."""
        self._count += 1
        self._steps.append(event)

    def ended(self, life: Life) -> None:
        """See Listener."""
        track = self._open.pop(life.id, None)
        if track is not None:
            self._ended.append(track)
        if not self._open:  # an engine that died tells no end of what held up its queue
            self._held = None

    # -- as a document -----------------------------------------------------------------------------------------------

    def state(self, tenant: str, *, since: int = 0, now_s: float) -> TimelineState:
        """The steps after number `since`, at most the last `STEPS_TOLD`, as the holder of a key may see them; "" (a server without keys)
        sees everything. Changes nothing."""
        first = max(self._count - min(len(self._steps), STEPS_TOLD), min(since, self._count))
        steps = list(islice(self._steps, len(self._steps) - (self._count - first), None))
        begin_s = steps[0].at_s if steps else now_s
        tracks = [
            track
            for track in (*self._ended, *self._open.values())
            if (not tenant or track.life.tenant == tenant)
            and (track.life.finish is None or track.life.ended_s >= begin_s)
        ]
        told = _chosen(tracks, begin_s)
        mine = {track.life.id: track.n for track in tracks}
        holds = self._holds_until(now_s)
        return TimelineState(
            steps=[self._row(first + place + 1, step, mine) for place, step in enumerate(steps)],
            lanes=[self._lane(track, steps, holds, tenant, now_s) for track in told],
            more_lanes=len(tracks) - len(told),
        )

    def _holds_until(self, now_s: float) -> list[Hold]:
        spans = list(self._holds)
        if self._held is not None and self._held.cause is not None:
            spans.append((self._held.at_s, max(now_s, self._held.at_s), self._held.cause, self._held.blocked_by))
        return spans

    def _row(self, n: int, step: StepDone, mine: dict[str, int]) -> StepRow:
        chunks = [
            (mine[name], count)
            for name, count in islice(zip(step.chunk_ids, step.chunk_tokens, strict=True), 4 * CHUNKS_TOLD)
            if name in mine
        ][:CHUNKS_TOLD]
        return StepRow(
            n=n,
            at_s=round(step.at_s - self._began_s, 4),
            device_ms=_ms(step.device_s or step.collect_s),
            host_ms=_ms(step.decide_s + step.absorb_s),
            rows=step.rows,
            decode_tokens=step.tokens - step.prompt_tokens,
            prompt_tokens=step.prompt_tokens,
            wrong=step.wrong,
            running=step.running,
            waiting=step.waiting,
            kv_used=round(
                max((u / t for u, t in zip(step.pages_used, step.pages_total, strict=True) if t), default=0.0), 3
            ),
            chunks=chunks,
            other_chunks=len(step.chunk_ids) - len(chunks),
            other_tokens=step.prompt_tokens - sum(count for _, count in chunks),
        )

    def _lane(
        self,
        track: _Track,
        steps: Sequence[StepDone],
        holds: Sequence[Hold],
        tenant: str,
        now_s: float,
    ) -> Lane:
        life = track.life
        waited_until_s = life.scheduled_s if life.scheduled_s is not None else life.ended_s if life.finish else now_s
        waits = self._waits(track, holds, waited_until_s)
        return Lane(
            n=track.n,
            id=life.id,
            arrived_s=round(life.arrived_s - self._began_s, 4),
            state=life.finish or (life.phases[-1][0] if life.phases else "queue"),
            prompt=life.prompt_tokens,
            cached=life.cached_tokens,
            preemptions=life.preemptions,
            waited_s=round(max(0.0, waited_until_s - life.arrived_s), 4),
            waits=[
                Wait(letter, round(seconds, 4), self._shown(who, tenant))
                for letter, (seconds, who) in sorted(waits.items(), key=lambda entry: -entry[1][0])
            ],
            cells=_cells(track, steps, holds),
        )

    @staticmethod
    def _waits(track: _Track, holds: Iterable[Hold], until_s: float) -> dict[str, tuple[float, str]]:
        """By letter: (seconds, who was blamed longest), of its wait before the first slot."""
        out: dict[str, dict[str, float]] = {}
        left_s = max(0.0, until_s - track.life.arrived_s)

        def count(letter: str, seconds: float, who: str) -> None:
            by = out.setdefault(letter, {})
            by[who] = by.get(who, 0.0) + seconds

        # While it is blocked on something of its own the queue does not concern it.
        own = [
            (begin, until_s if end is None else min(end, until_s), cause, who)
            for begin, end, cause, who in track.blocks or ()
        ]
        for begin, end, cause, who in own:
            if end > begin:
                count(LETTERS[cause], end - begin, who)
                left_s -= end - begin
        for begin, end, cause, who in holds:
            begin, end = max(begin, track.life.arrived_s), min(end, until_s)
            gone_s = end - begin - sum(max(0.0, min(end, b[1]) - max(begin, b[0])) for b in own) if end > begin else 0.0
            if gone_s > 0:
                count(LETTERS[cause], gone_s, "" if who == track.life.id else who)
                left_s -= gone_s
        if left_s > 1e-5:
            count(NEXT_STEP, left_s, "")
        return {letter: (sum(by.values()), max(by, key=lambda who: by[who])) for letter, by in out.items()}

    def _shown(self, name: str, tenant: str) -> str:
        """Another key's requests are nobody's business."""
        if not name or not tenant:
            return name
        track = self._open.get(name) or next((track for track in self._ended if track.life.id == name), None)
        return name if track is not None and track.life.tenant == tenant else ANOTHER


def _chosen(tracks: Sequence[_Track], begin_s: float) -> list[_Track]:
    """At most `LANES_TOLD`: those that have waited longest, the newest of those that went on lately, and some of the rest."""
    waiting: list[_Track] = []
    moved: list[_Track] = []
    quiet: list[_Track] = []
    for track in tracks:
        life = track.life
        if life.finish is None and (life.scheduled_s is None or life.phases[-1][0] == "preempted"):
            waiting.append(track)
        elif life.finish is not None or life.phases[-1][1] >= begin_s:
            moved.append(track)
        else:
            quiet.append(track)
    moved.reverse()
    most = LANES_TOLD // 3
    first = [*waiting[:most], *moved[:most], *quiet[:most]]
    rest = [*waiting[most:], *moved[most:], *quiet[most:]]
    return sorted([*first, *rest[: LANES_TOLD - len(first)]], key=lambda track: track.n)


def _cells(track: _Track, steps: Sequence[StepDone], holds: Sequence[Hold]) -> str:
    """One letter a step."""
    life = track.life
    phases = life.phases
    out: list[str] = []
    place = hold = 0
    for step in steps:
        at_s = step.at_s
        if at_s < life.arrived_s:
            out.append(".")
            continue
        if life.finish is not None and life.ended_s < at_s:
            # A step decided before it ended has a row of it, unless its end was known before: by length.
            late = life.finish in ("stop", "abort") and life.phases[-1][0] == "decode" and step.decided_s < life.ended_s
            out.append(AFTER if late and step.decided_s else ".")
            continue
        while place + 1 < len(phases) and phases[place + 1][1] <= at_s:
            place += 1
        phase = phases[place][0] if phases else "queue"
        if step.chunk_ids and life.id in step.chunk_ids:
            letter = "C" if life.cached_tokens and step.number == track.first_step else "P"
        elif phase == "decode":
            letter = "D"
        elif phase == "preempted":
            letter = "E"
        elif phase == "prefill":
            letter = "-"
        else:
            letter = NEXT_STEP
            while hold < len(holds) and holds[hold][1] <= at_s:
                hold += 1
            if hold < len(holds) and holds[hold][0] <= at_s:
                letter = LETTERS[holds[hold][2]]
            for begin_s, end_s, cause, _ in track.blocks or ():
                if begin_s <= at_s and (end_s is None or at_s < end_s):
                    letter = LETTERS[cause]
        out.append(letter)
    return "".join(out)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2 if seconds >= 0.001 else 3)
