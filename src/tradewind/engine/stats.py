"""The engine in numbers: counters since the start, what is open now, and a page of text for a stalled one.

Knows: how reports and a scheduler are counted. Refuses to know: who reads the numbers (health, metrics, a watchdog).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from tradewind.contract.events import Preempted, Scheduled, StepDone, TokensOut
from tradewind.engine.columns import Report, StepTokens
from tradewind.engine.degrade import DegradeStats
from tradewind.engine.loop import EngineLoop
from tradewind.engine.sequence import Sequence
from tradewind.engine.step_watch import StepTimeStats

SHOWN = 12
"""So many sequences of each state are described one by one."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A snapshot; reading it never waits for a step."""

    running: int = 0
    """Slots in use, those of leaving sequences among them."""
    waiting: int = 0
    """Sequences queued or blocked."""
    pages_used: tuple[int, ...] = ()
    """By KV group, pages that some sequence holds (cached pages that nobody uses do not count)."""
    pages_total: tuple[int, ...] = ()
    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed since the start."""
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed a second time because of preemptions."""
    last_progress_s: float = 0.0
    """`time.monotonic` when a step was last collected, or now while there is nothing to do."""
    degrade: DegradeStats | None = None
    """What is given up under overload; None where nothing ever is."""
    step_times: StepTimeStats | None = None
    """How well step times are known; None where nobody fits them."""


class Tally:
    """Counts reports. One writer: whoever runs the engine."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._steps = self._prompt = self._generated = self._cached = self._preemptions = 0
        self._progress_s = time.monotonic()

    def take(self, reports: Iterable[Report]) -> None:
        """Counts what one turn brought."""
        for report in reports:
            if isinstance(report, StepTokens):
                self._generated += len(report.ids)
            elif isinstance(report, TokensOut):
                self._generated += len(report.tokens)
            elif isinstance(report, StepDone):
                self._steps += 1
                self._prompt += report.prompt_tokens
                self._progress_s = time.monotonic()
            elif isinstance(report, Scheduled):
                self._cached += report.cached_tokens
            elif isinstance(report, Preempted):
                self._preemptions += 1

    def stats(self) -> EngineStats:
        """The counters and what is open at this moment."""
        scheduler = self._loop.scheduler
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            pages_used=scheduler.cache.used(),
            pages_total=tuple(pool.total - 1 for pool in scheduler.cache.pools),
            steps=self._steps,
            prompt_tokens=self._prompt,
            generated_tokens=self._generated,
            cached_tokens=self._cached,
            preemptions=self._preemptions,
            recomputed_tokens=scheduler.recomputed_tokens,
            last_progress_s=self._progress_s,
            degrade=scheduler.degraded,
            step_times=self._loop.step_times,
        )


def describe(loop: EngineLoop) -> str:
    """Where every sequence is, what the pages hold and what the loop is doing: for people, when steps stop coming.

    May be called from another thread than the loop's: it reads numbers that may be a moment apart, and changes nothing.
    """
    scheduler = loop.scheduler
    now = time.monotonic()
    doing, since_s = loop.doing
    lines = [
        f"the loop is in '{doing}' for {now - since_s:.1f} s; {scheduler.flying} steps are flying, {loop.inbox} orders wait"
    ]
    if loop.dead is not None:
        lines.append(f"the loop is dead: {loop.dead}")
    cache = scheduler.cache
    for group, used in enumerate(cache.used()):
        pool = cache.pools[group]
        lines.append(
            f"pages of group {group}: {pool.total - 1}, of them {used} held, {pool.idle} cached and idle, {pool.free} free, "
            f"{cache.promised[group]} promised"
        )
    if scheduler.images is not None:
        images = scheduler.images
        lines.append(
            f"images: features of {images.tokens} tokens are held, of {images.plan.cache_tokens} at most; "
            f"{images.encoded_tokens} were encoded since the start"
        )
    by_state: dict[str, list[Sequence]] = defaultdict(list)
    for sequence in scheduler.sequences():
        by_state[sequence.state.value].append(sequence)
    slots = scheduler.schedule.max_running
    total = sum(map(len, by_state.values()))
    states = ", ".join(f"{len(found)} {state}" for state, found in sorted(by_state.items()))
    lines.append(
        f"sequences: {total}" + (f" ({states})" if states else "") + f"; {scheduler.running} of {slots} slots in use"
    )
    for state, found in sorted(by_state.items()):
        for sequence in found[:SHOWN]:
            blocked = f" on {sequence.waits_on.id}" if sequence.waits_on is not None else ""
            lines.append(
                f"  {sequence.id} {state}{blocked}: slot {sequence.slot}, {sequence.prompt_tokens} prompt tokens, "
                f"{sequence.generated} generated and filed, at most {sequence.request.max_tokens}, "
                f"{sequence.preemptions} preemptions, {now - sequence.arrived_s:.1f} s old"
            )
        if len(found) > SHOWN:
            lines.append(f"  and {len(found) - SHOWN} more that are {state}")
    return "\n".join(lines)
