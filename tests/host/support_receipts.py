"""A small world with known reasons for waiting: the real scheduler, the scripted device on a virtual clock, a front made of arithmetic."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support_engine import cache_plan, request, schedule_plan
from support_reports import Receipt

from tradewind.contract.events import FrontTimes, TokensOut
from tradewind.contract.request import Request
from tradewind.contract.step import Step
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.observability.lives import Lives
from tradewind.observability.receipt_book import ReceiptBook
from tradewind.observability.receipts import ItemisedReceipt
from tradewind.simulate.clock import VirtualClock
from tradewind.simulate.scripted import ScriptedExecutor

PAGE = 16


@dataclass(frozen=True)
class Cost:
    """What the device takes for a step."""

    base_s: float = 0.004
    prefill_s: float = 0.0001
    decode_s: float = 0.0005
    jitter: float = 0.0
    """A step takes up to this part more or less, by its number."""
    seed: int = 0

    def __call__(self, step: Step) -> float:
        prompt = int(step.count[(step.count - step.drafts) > 1].sum())
        other = int(step.count.sum()) - prompt
        off = self.jitter * (zlib.crc32(b"%d %d" % (self.seed, step.number)) / 2**31 - 1)
        return (self.base_s + self.prefill_s * prompt + self.decode_s * other) * (1 + off)


class SlowGrammars:
    """A gate whose compilations take a while of the virtual clock."""

    def __init__(self, clock: VirtualClock, seconds: float | Callable[[str], float]) -> None:
        self._clock, self._seconds = clock, seconds
        self._ready_s: dict[str, float] = {}

    def open(self, text: str) -> None:
        seconds = self._seconds if isinstance(self._seconds, float) else self._seconds(text)
        self._ready_s.setdefault(text, self._clock.now() + seconds)

    def ready(self, text: str) -> bool:
        return self._clock.now() >= self._ready_s[text]

    def close(self, text: str) -> None: ...

    def wait(self, timeout_s: float) -> None:
        self._clock.sleep(timeout_s)


@dataclass
class World:
    """One run. `submit` requests with the time at which the front has them, then `run`."""

    pages: int = 1025
    slots: int = 32
    chunk: int = 256
    cost: Callable[[Step], float] = field(default_factory=Cost)
    grammar_s: float | Callable[[str], float] = 0.0
    """What compiling a grammar takes, beside the engine; of each the same, or by its text."""
    mask_s: Callable[[str], float] | None = None
    """What a step takes more for the mask of a request that has a grammar and draws a token."""
    write_s: Callable[[str], float] = lambda name: 0.00002
    """What one write to the client of a request takes."""
    finish: Callable[[str], str] = lambda name: ""
    """How a request ended, where that is not what the engine says."""
    body_s: Callable[[str], float] = lambda name: 0.0005
    """What a client takes to send its request."""
    policy: Any = "arrival"
    max_preemptions: int = 3
    stall: dict[int, float] = field(default_factory=dict)
    drafts: int = 0
    accept: Callable[[str, int], int] | None = None
    draft_s: float = 0.0
    steps_in_flight: int = 2

    def __post_init__(self) -> None:
        cache = cache_plan(pages=(self.pages,), page_tokens=PAGE)
        schedule = schedule_plan(
            max_running=self.slots,
            max_tokens_per_step=self.chunk,
            max_context=1 << 14,
            policy=self.policy,
            max_preemptions=self.max_preemptions,
            steps_in_flight=self.steps_in_flight,
        )
        self.clock = VirtualClock(100.0)
        self.scheduler = Scheduler(
            schedule=schedule,
            cache=cache,
            clock=self.clock.now,
            grammars=SlowGrammars(self.clock, self.grammar_s),
            drafts_per_row=self.drafts,
        )
        device = ScriptedExecutor(
            groups=cache.groups,
            pages=cache.pages,
            max_running=self.slots,
            clock=self.clock,
            delay_s=self.cost,
            stall=self.stall,
            accept=self.accept,
            mask_s=self.mask_s,
            draft_s=self.draft_s,
        )
        self.made: dict[str, ItemisedReceipt] = {}
        self.book = ReceiptBook(
            page_tokens=PAGE,
            max_tokens_per_step=self.chunk,
            on_made=lambda made, receipt: self.made.update({made.id: made}),
        )
        self.lives = Lives([self.book], on_bug=_raise)
        self.said: dict[str, list[TokensOut]] = {}
        self.loop = EngineLoop(
            scheduler=self.scheduler, executor=device, clock=self.clock.now, sinks=(_Both(self.lives), self)
        )
        self.coming: list[tuple[float, Request]] = []

    def take(self, event: Any) -> None:
        if isinstance(event, TokensOut):
            self.said.setdefault(event.request_id, []).append(event)

    def submit(self, at_s: float, name: str, tokens: Sequence[int], **more: Any) -> None:
        """`at_s` counts from the start of the run."""
        at_s += 100.0
        self.coming.append((at_s, request(name, tokens, arrived_s=at_s, **more)))

    def run(self) -> None:
        """Until everything has ended and has its receipt."""
        coming = sorted(self.coming, key=lambda pair: pair[0])
        self.coming = []
        asked = {one.id: one for _, one in coming}
        while coming or self.loop.busy:
            while coming and coming[0][0] <= self.clock.now():
                self.loop.post(Add(coming.pop(0)[1]))
            if self.loop.busy:
                self.loop.run_once()
            else:
                self.clock.advance(max(0.0, coming[0][0] - self.clock.now()))
        for name, one in asked.items():
            self.book.take_receipt(self._receipt(one, self.said[name]))

    def _receipt(self, one: Request, events: list[TokensOut]) -> Receipt:
        """A front that takes what is there, makes text of it and writes it, one after another."""
        arrived_s = one.arrived_s
        turns: list[tuple[float, float, float]] = []
        free_s, at = 0.0, 0
        while at < len(events):
            taken_s = max(free_s, events[at].at_s + 0.00005)
            while at < len(events) and events[at].at_s <= taken_s:
                at += 1
            spoken_s = taken_s + 0.00003
            free_s = spoken_s + self.write_s(one.id)
            turns.append((taken_s, spoken_s, free_s))
        first = turns[0] if any(event.tokens for event in events) else (None, None, None)
        return Receipt(
            id=one.id,
            request_id=f"req-{one.id}",
            tenant=one.tenant,
            prompt_tokens=len(one.tokens),
            cached_tokens=events[-1].cached_tokens,
            completion_tokens=events[-1].generated_tokens,
            arrived_s=arrived_s,
            finished_s=free_s,
            finish=self.finish(one.id) or events[-1].finish or "",
            sequences=(one.id,),
            times=FrontTimes(
                received_s=arrived_s - 0.0015 - self.body_s(one.id),
                read_s=arrived_s - 0.0015,
                parsed_s=arrived_s - 0.0012,
                submitted_s=arrived_s,
                first_taken_s=first[0],
                first_spoken_s=first[1],
                first_written_s=first[2],
                turns=tuple(turns[-16:]),
            ),
        )


class _Both:
    """The lives, as a sink that takes whole turns."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives

    def take_reports(self, reports: list[Any]) -> None:
        self._lives.take_reports(reports)


def _raise(error: BaseException) -> None:
    raise error


def prompt(random: np.random.Generator, length: int) -> list[int]:
    return random.integers(3, 1 << 20, size=length).tolist()


def check_sums(made: ItemisedReceipt) -> None:
    """The parts sum to what was measured, and none is negative."""
    assert abs(sum(part.seconds for part in made.e2e) - made.e2e_s) < 1e-6, made
    assert all(part.seconds >= 0 for part in (*made.e2e, *made.ttft))
    if made.ttft_s is not None:
        assert abs(sum(part.seconds for part in made.ttft) - made.ttft_s) < 1e-6, made
