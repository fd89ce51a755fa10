"""What happened to each request, put together from the engine's reports as they come.

Knows: when a sequence arrived, got its slot, spoke, was preempted, ended. Refuses to know: what is made of it (metrics, traces, board).

One book is kept for all listeners. Columns of a step are counted as columns: the time of each sequence's last token is read and written
by two calls for all rows, and equal gaps (rows that ran side by side have the same one) reach the listeners as one number with its count.

      Arrived ── queue ── Scheduled ── prefill ── first token ── decode ── ... ── finish
                                                      │  Preempted ── preempted ── Scheduled(resumed) ── prefill ── token ── decode
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tradewind.contract.events import (
    Arrived,
    Delayed,
    Event,
    FrontTimes,
    Held,
    Preempted,
    Scheduled,
    StepDone,
    TokensOut,
    Woken,
)

Phase = Literal["queue", "prefill", "decode", "preempted"]


class TokenColumns(Protocol):
    """One token each for several sequences (the engine's `StepTokens`)."""

    @property
    def at_s(self) -> float: ...

    @property
    def ids(self) -> list[str]: ...


class ReceiptLike(Protocol):
    """One finished HTTP request (`serving.http.front.Receipt`). Times are of `time.monotonic`."""

    @property
    def id(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def stream(self) -> bool: ...
    @property
    def samples(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def arrived_s(self) -> float: ...
    @property
    def scheduled_s(self) -> float | None: ...
    @property
    def first_token_s(self) -> float | None: ...
    @property
    def finished_s(self) -> float: ...
    @property
    def finish(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def traceparent(self) -> str: ...
    @property
    def sequences(self) -> tuple[str, ...]: ...
    @property
    def times(self) -> FrontTimes | None: ...


@dataclass(slots=True)
class Life:
    """One sequence. Written by `Lives`; complete when `finish` is set."""

    id: str
    arrived_s: float
    tenant: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Found in the prefix cache when it first got its slot."""
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float = 0.0
    finish: str | None = None
    error: str | None = None
    lost_tokens: int = 0
    """Of the last preemption."""
    phases: list[tuple[Phase, float]] = field(default_factory=list)
    """What it was in, and from when on."""

    def spans(self) -> list[tuple[Phase, float, float]]:
        """(phase, begin, end) one after another without a gap; the last one ends with the sequence. Changes nothing."""
        ends = [begin for _, begin in self.phases[1:]] + [self.ended_s]
        return [(phase, begin, max(begin, end)) for (phase, begin), end in zip(self.phases, ends, strict=True)]


class Listener:
    """Told what happened. Every call must return at once and never raise; calls come from one thread."""

    def arrived(self, life: Life, event: Arrived) -> None:
        """A sequence entered the queue."""

    def phase(self, life: Life) -> None:
        """Another entry of `life.phases`, or, when `finish` is set, the end of the last one."""

    def scheduled(self, life: Life, event: Scheduled, recomputed_tokens: int) -> None:
        """A slot was got; `event.resumed` says whether again, and then `recomputed_tokens` are computed a second time."""

    def first_token(self, life: Life, at_s: float) -> None:
        """The first token of a sequence."""

    def tokens(self, count: int, at_s: float) -> None:
        """New tokens, of one or of many sequences."""

    def gap(self, seconds: float, count: int) -> None:
        """So many sequences had tokens again after so long. Several tokens of one step count as one delivery."""

    def preempted(self, life: Life, event: Preempted) -> None:
        """A slot was lost."""

    def delayed(self, event: Delayed) -> None:
        """The head of the queue could not start."""

    def woken(self, event: Woken) -> None:
        """What a request was blocked on is there."""

    def held(self, event: Held) -> None:
        """What holds up the queue changed."""

    def step(self, event: StepDone) -> None:
        """A step was collected."""

    def ended(self, life: Life) -> None:
        """A sequence has its finish."""


class Lives:
    """The book. `take_reports` is fed with everything the engine reports, in order, from one thread; it never raises.

    It is a `contract.events.Sink` too, for an engine that tells single events.
    """

    def __init__(self, listeners: Sequence[Listener], *, on_bug: Callable[[BaseException], None] | None = None) -> None:
        """`on_bug` is told when a listener raised; the report is lost for those behind it, the engine goes on."""
        self._listeners = tuple(listeners)
        self._on_bug = on_bug
        self._open: dict[str, Life] = {}
        self._last_s: dict[str, float] = {}
        """When each open sequence's last token came; only here is it kept up to date."""
        self._resuming: set[str] = set()
        """Scheduled again, and no token since."""
        # A method for each kind of event; `Any` because the key says which kind it takes.
        self._takes: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrived,
            Delayed: self._delayed,
            Held: self._held,
            Preempted: self._preempted,
            Scheduled: self._scheduled,
            StepDone: self._step,
            TokensOut: self._tokens_out,
            Woken: self._woken,
        }

    @property
    def open(self) -> int:
        """Sequences that have not ended."""
        return len(self._open)

    def take(self, event: Event | TokenColumns) -> None:
        """Takes one report."""
        self.take_reports((event,))

    def take_reports(self, reports: Iterable[Event | TokenColumns]) -> None:
        """Takes what one turn of the engine brought."""
        for report in reports:
            try:
                takes = self._takes.get(type(report))
                if takes is not None:
                    takes(report)
                elif not isinstance(report, Event):
                    self._columns(report)
            except Exception as error:  # whoever listens must not harm the engine
                if self._on_bug is not None:
                    self._on_bug(error)

    def engine_ended(self, why: str, at_s: float) -> None:
        """Ends what is open with "error": the engine is gone and will not report it."""
        for life in list(self._open.values()):
            self._end(life, "error", at_s, error=why)

    # -- by kind -----------------------------------------------------------------------------------------------------

    def _arrived(self, event: Arrived) -> None:
        life = Life(id=event.request_id, arrived_s=event.at_s, tenant=event.tenant, prompt_tokens=event.prompt_tokens)
        self._open[event.request_id] = life
        for listener in self._listeners:
            listener.arrived(life, event)
        self._enter(life, "queue", event.at_s)

    def _enter(self, life: Life, phase: Phase, at_s: float) -> None:
        life.phases.append((phase, at_s))
        for listener in self._listeners:
            listener.phase(life)

    def _scheduled(self, event: Scheduled) -> None:
        life = self._open.get(event.request_id)
        if life is None:
            return
        recomputed = 0
        if life.scheduled_s is None:
            life.scheduled_s = event.at_s
            life.cached_tokens = event.cached_tokens
        if event.resumed:
            recomputed = max(0, life.lost_tokens - event.cached_tokens)
            life.recomputed_tokens += recomputed
            self._resuming.add(life.id)
        self._enter(life, "prefill", event.at_s)
        for listener in self._listeners:
            listener.scheduled(life, event, recomputed)

    def _delayed(self, event: Delayed) -> None:
        for listener in self._listeners:
            listener.delayed(event)

    def _woken(self, event: Woken) -> None:
        for listener in self._listeners:
            listener.woken(event)

    def _held(self, event: Held) -> None:
        for listener in self._listeners:
            listener.held(event)

    def _preempted(self, event: Preempted) -> None:
        life = self._open.get(event.request_id)
        if life is None:
            return
        life.preemptions += 1
        life.lost_tokens = event.lost_tokens
        self._enter(life, "preempted", event.at_s)
        self._resuming.discard(life.id)
        for listener in self._listeners:
            listener.preempted(life, event)

    def _step(self, event: StepDone) -> None:
        for listener in self._listeners:
            listener.step(event)

    def _columns(self, columns: TokenColumns) -> None:
        ids, at_s = columns.ids, columns.at_s
        before = Counter(map(self._last_s.get, ids))
        self._last_s.update(dict.fromkeys(ids, at_s))
        if None in before:
            del before[None]
            for request_id in ids:
                life = self._open.get(request_id)
                if life is None:  # its arrival was not heard: it is nobody's
                    self._last_s.pop(request_id, None)
                elif life.first_token_s is None:
                    self._first(life, at_s)
        if self._resuming:
            for request_id in self._resuming.intersection(ids):
                self._going_on(request_id, at_s)
        for listener in self._listeners:
            listener.tokens(len(ids), at_s)
            for last_s, count in before.items():
                assert last_s is not None
                listener.gap(at_s - last_s, count)

    def _tokens_out(self, event: TokensOut) -> None:
        life = self._open.get(event.request_id)
        if life is None:
            if event.finish is None:
                return
            # It was refused before it could arrive.
            life = Life(id=event.request_id, arrived_s=event.at_s, prompt_tokens=event.prompt_tokens)
            self._enter(life, "queue", event.at_s)
        if event.tokens:
            last_s = self._last_s.get(life.id)
            self._last_s[life.id] = event.at_s
            if life.first_token_s is None:
                self._first(life, event.at_s)
            elif life.id in self._resuming:
                self._going_on(life.id, event.at_s)
            for listener in self._listeners:
                listener.tokens(len(event.tokens), event.at_s)
                if last_s is not None:
                    listener.gap(event.at_s - last_s, 1)
        if event.finish is not None:
            life.generated_tokens = event.generated_tokens
            self._end(life, event.finish, event.at_s, error=event.error)

    def _first(self, life: Life, at_s: float) -> None:
        life.first_token_s = at_s
        self._enter(life, "decode", at_s)
        self._resuming.discard(life.id)
        for listener in self._listeners:
            listener.first_token(life, at_s)

    def _going_on(self, request_id: str, at_s: float) -> None:
        self._resuming.discard(request_id)
        self._enter(self._open[request_id], "decode", at_s)

    def _end(self, life: Life, finish: str, at_s: float, *, error: str | None) -> None:
        self._open.pop(life.id, None)
        life.last_token_s = self._last_s.pop(life.id, None)
        self._resuming.discard(life.id)
        life.finish, life.error, life.ended_s = finish, error, at_s
        for listener in self._listeners:
            listener.phase(life)
        for listener in self._listeners:
            listener.ended(life)


def tenant_hash(tenant: str) -> str:
    """A short name that says the same tenant again without saying who it is; empty for nobody."""
    return "t-" + hashlib.sha256(tenant.encode()).hexdigest()[:12] if tenant else ""
