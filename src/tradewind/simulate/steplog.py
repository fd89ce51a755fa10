"""What every step of an engine held and cost, written down as the engine runs: the food of the step-time model and of exact replay.

Knows: how to put a step's record together from what the engine tells. Refuses to know: what is fitted to it (steptime), and any token.

It is a sink of the engine (`sinks=[log]`), also behind a process border. Beside an executor it knows more:

      sink alone                 counts, times, contexts as far as events tell (no masked rows, rows of sequences that just ended estimated)
      log.watching(executor)     the columns themselves: exact features, the device wing's host time, a digest of every decision

Bounded: the newest `most` steps and requests are kept in memory; a file begins anew at `most_bytes`, the former one kept beside it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.contract.errors import UserError
from tradewind.contract.events import Arrived, FinishReason, Preempted, Scheduled, StepDone, TokensOut
from tradewind.contract.executor import Executor
from tradewind.contract.kv import KVGroup
from tradewind.contract.request import Request
from tradewind.contract.step import Step, StepResult
from tradewind.engine.columns import Report, StepTokens
from tradewind.engine.degrade import degrader_of
from tradewind.engine.loop import Add, Cancel, EngineLoop, Finish, Order
from tradewind.engine.scheduler import Scheduler
from tradewind.simulate.clock import VirtualClock
from tradewind.simulate.features import FeatureReader, Features
from tradewind.simulate.simulator import NEVER, SimulatedExecutor
from tradewind.simulate.steptime import HostTime, OnlineFit, fit_host

FORMAT_VERSION = 1


class LogHead(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="kind"):
    """The first line of a step log."""

    version: int = FORMAT_VERSION
    steps_in_flight: int = 1
    model: str = ""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step", tag_field="kind"):
    """One step. Times are seconds of the engine's clock."""

    number: int
    decided_s: float
    decide_s: float
    collected_s: float
    absorb_s: float
    device_s: float
    host_s: float = 0.0
    """What the executor needed beside: the device wing's host side, and the way there and back."""
    features: Features
    entered: int = 0
    running: int = 0
    waiting: int = 0
    pages_used: tuple[int, ...] = ()
    digest: int = 0
    """Of the columns of the decision, see `digest_of`; 0 where they were not seen."""

    @property
    def took_s(self) -> float:
        """Time the step kept the device."""
        return self.device_s + self.host_s


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="request", tag_field="kind"):
    """One request that is over."""

    id: str
    arrived_s: float
    taken_s: float
    """When the engine took it from its inbox."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    scheduled_s: float = -1.0
    first_token_s: float = -1.0
    finished_s: float = -1.0
    finish: FinishReason = "stop"
    by_order: bool = False
    """Ended from outside (cancelled, or its text was complete), not by what a step brought."""
    preemptions: int = 0
    tenant: str = ""
    priority: int = 0


LogLine = LogHead | StepRecord | RequestRecord


def digest_of(step: Step) -> int:
    """A checksum of what was decided: rows with all their columns, who entered and who left. Equal decisions have equal digests."""
    digest = 1
    for column in (step.slot, step.epoch, step.start, step.count, step.drafts, step.wants):
        digest = zlib.crc32(column.tobytes(), digest)
    for enter in step.enter:
        known = f"{enter.slot},{enter.epoch},{enter.request_id},{len(enter.tokens)},{enter.capacity_tokens};"
        digest = zlib.crc32(known.encode(), digest)
    return zlib.crc32(repr(step.leave).encode(), digest) or 1


class _Open:
    """A request that is not over."""

    __slots__ = ("arrived", "cached", "first_s", "known", "preemptions", "scheduled_s")

    def __init__(self, arrived: Arrived) -> None:
        self.arrived = arrived
        self.cached = 0
        self.known = 0
        """Tokens whose KV is computed."""
        self.scheduled_s = self.first_s = -1.0
        self.preemptions = 0


class StepLog:
    """A ReportSink (and a plain Sink) that keeps the newest steps and requests. Called in the engine's thread, never raises."""

    def __init__(
        self,
        *,
        groups: Sequence[KVGroup] = (),
        slots: int = 0,
        steps_in_flight: int = 1,
        model: str = "",
        most: int = 20_000,
        online: OnlineFit | None = None,
        file: Path | None = None,
        most_bytes: int = 256 << 20,
    ) -> None:
        """`groups` and `slots` of the plan are needed for `watching`. `online` is shown each step, too; whoever has it calls its `refit`.

        With a `file` records are appended to it as they come.
        """
        self._online = online
        self.head = LogHead(steps_in_flight=steps_in_flight, model=model)
        self.steps: deque[StepRecord] = deque(maxlen=most)
        self.requests: deque[RequestRecord] = deque(maxlen=most)
        self.broken: str | None = None
        """Why nothing is written to the file any more."""
        self._reader = FeatureReader(groups=groups, slots=slots) if slots else None
        self._open: dict[str, _Open] = {}
        self._decided: dict[int, tuple[Features, int]] = {}
        self._host: dict[int, float] = {}
        self._entered: dict[int, int] = {}
        self._came: list[StepTokens | TokensOut] = []
        """Tokens told since the last step was."""
        self._last_s = 0.0
        self._file = _Writer(file, most_bytes=most_bytes, head=self.head) if file is not None else None

    # -- beside an executor

    def watching(self, executor: Executor) -> Executor:
        """The executor, seen by this log: give it to the engine in its place."""
        assert self._reader is not None, "a log that watches needs the plan's groups and slots"
        return _Watched(self, executor)

    def submitted(self, step: Step) -> None:
        """A step is about to be submitted."""
        assert self._reader is not None
        self._decided[step.number] = (self._reader.read(step), digest_of(step))

    def collected(self, result: StepResult) -> None:
        """A result came."""
        self._host[result.number] = result.host_s

    # -- sink

    def take(self, event: Report) -> None:
        """See contract.events.Sink."""
        self.take_reports([event])

    def take_reports(self, reports: list[Report]) -> None:
        """See engine.columns.ReportSink."""
        for report in reports:
            if isinstance(report, StepTokens):
                self._came.append(report)
                for place in np.flatnonzero(report.generated == 1).tolist():
                    known = self._open.get(report.ids[place])
                    if known is not None:
                        known.first_s = report.at_s
            elif isinstance(report, StepDone):
                self._step(report)
            elif isinstance(report, TokensOut):
                self._tokens(report)
            elif isinstance(report, Arrived):
                self._open[report.request_id] = _Open(report)
            elif isinstance(report, Scheduled):
                self._entered[report.step] = self._entered.get(report.step, 0) + 1
                known = self._open.get(report.request_id)
                if known is not None:
                    known.known = report.cached_tokens
                    if not report.resumed:
                        known.scheduled_s, known.cached = report.at_s, report.cached_tokens
            elif isinstance(report, Preempted):
                known = self._open.get(report.request_id)
                if known is not None:
                    known.preemptions += 1

    def _tokens(self, report: TokensOut) -> None:
        if report.tokens:
            self._came.append(report)
        known = self._open.get(report.request_id)
        if known is None:
            return
        if report.tokens and known.first_s < 0:
            known.first_s = report.at_s
        if report.finish is None:
            return
        del self._open[report.request_id]
        arrived = known.arrived
        record = RequestRecord(
            id=report.request_id,
            arrived_s=arrived.at_s,
            taken_s=arrived.taken_s or arrived.at_s,
            prompt_tokens=arrived.prompt_tokens,
            output_tokens=report.generated_tokens,
            cached_tokens=known.cached,
            scheduled_s=known.scheduled_s,
            first_token_s=known.first_s,
            finished_s=report.at_s,
            finish=report.finish,
            by_order=not report.tokens and report.embedding is None and report.error is None,
            preemptions=known.preemptions,
            tenant=arrived.tenant,
            priority=arrived.priority,
        )
        self.requests.append(record)
        self._write(record)

    def _step(self, report: StepDone) -> None:
        decided = self._decided.pop(report.number, None)
        features, digest = decided if decided is not None else (self._estimate(report), 0)
        self._came.clear()
        host_s = self._host.pop(report.number, None)
        submitted_s = report.decided_s + report.decide_s
        if host_s is None:
            # Between submission and result there was nothing else where one step flies at a time.
            alone = self.head.steps_in_flight == 1 and report.decided_s > 0
            host_s = max(0.0, report.at_s - submitted_s - report.device_s) if alone else 0.0
        record = StepRecord(
            number=report.number,
            decided_s=report.decided_s,
            decide_s=report.decide_s,
            collected_s=report.at_s,
            absorb_s=report.absorb_s,
            device_s=report.device_s,
            host_s=host_s,
            features=features,
            entered=self._entered.pop(report.number, 0),
            running=report.running,
            waiting=report.waiting,
            pages_used=report.pages_used,
            digest=digest,
        )
        self.steps.append(record)
        if self._online is not None:
            self._online.take(features, record.took_s)
        self._write(record)

    def _estimate(self, report: StepDone) -> Features:
        """Features from events alone: chunks begin where their requests were, tokens tell how long the decode rows' contexts are."""
        pairs = 0.0
        chunk_tokens = chunks = chunk_keys = single_context = 0
        for name, size in zip(report.chunk_ids, report.chunk_tokens, strict=True):
            known = self._open.get(name)
            start = known.known if known is not None else 0
            if known is not None:
                known.known = start + size
            if size > 1:
                chunks += 1
                chunk_tokens += size
                chunk_keys += start + size
                pairs += size * start + size * (size + 1) / 2
            else:
                single_context += start + 1
        ours = set(report.chunk_ids)
        context = counted = logit_rows = 0
        for came in self._came:
            if isinstance(came, StepTokens):
                own = came.prompt + came.generated - 1
                logit_rows += len(own)
                context += int(own.sum())
                counted += len(own)
                if ours:
                    for place, name in enumerate(came.ids):
                        if name in ours:
                            context -= int(own[place])
                            counted -= 1
            else:
                logit_rows += 1
                if came.request_id not in ours:
                    context += came.prompt_tokens + came.generated_tokens - 1
                    counted += 1
        decoding = report.rows - len(report.chunk_ids)
        if counted and decoding > counted:  # rows of sequences that had just ended
            context = round(context * decoding / counted)
            logit_rows += decoding - counted
        return Features(
            tokens=report.tokens,
            rows=report.rows,
            prefill_tokens=chunk_tokens,
            decode_context=context + single_context,
            prefill_context=round(pairs),
            prefill_rows=chunks,
            prefill_keys=chunk_keys,
            logit_rows=min(logit_rows, report.rows),
        )

    # -- files

    def _write(self, record: StepRecord | RequestRecord) -> None:
        if self._file is None or self.broken is not None:
            return
        try:
            self._file.write(record)
        except OSError as error:  # whoever listens must not harm the engine
            self.broken = f"the step log is not written any more: {error}"

    def save(self, path: Path) -> None:
        """Writes what is kept as JSON lines."""
        encoder = msgspec.json.Encoder()
        with path.open("wb") as file:
            for record in (self.head, *self.steps, *self.requests):
                file.write(encoder.encode(record) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


class _Watched:
    """An executor that shows a log what passes through it."""

    def __init__(self, log: StepLog, executor: Executor) -> None:
        self._log, self._executor = log, executor
        rest = getattr(executor, "rest", None)
        if rest is not None:
            self.rest = rest  # see contract.Resting: only where the executor can

    def __getattr__(self, name: str) -> Any:
        """What some executors can besides (and whether they are prepared)."""
        return getattr(self._executor, name)

    def submit(self, step: Step) -> None:
        self._log.submitted(step)
        self._executor.submit(step)

    def collect(self) -> StepResult:
        result = self._executor.collect()
        self._log.collected(result)
        return result

    def close(self) -> None:
        self._executor.close()


class _Writer:
    """Appends lines to a file that begins anew when it is full; what it held is then in a second one beside it."""

    def __init__(self, path: Path, *, most_bytes: int, head: LogHead) -> None:
        self._path, self._most_bytes, self._head = path, most_bytes, head
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] = self._begin()
        self._bytes = 0

    def _begin(self) -> IO[bytes]:
        file = self._path.open("wb")
        file.write(self._encoder.encode(self._head) + b"\n")
        return file

    def write(self, record: StepRecord | RequestRecord) -> None:
        line = self._encoder.encode(record) + b"\n"
        if self._bytes + len(line) > self._most_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file, self._bytes = self._begin(), 0
        self._file.write(line)
        self._bytes += len(line)

    def close(self) -> None:
        self._file.close()


class LoadedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A step log as it was read from a file."""

    head: LogHead
    steps: tuple[StepRecord, ...]
    requests: tuple[RequestRecord, ...]


def read_step_log(path: Path) -> LoadedLog:
    """Reads a step log. Raises UserError with the line's number for a line that cannot be read."""
    decoder = msgspec.json.Decoder(LogLine)
    head: LogHead | None = None
    steps: list[StepRecord] = []
    requests: list[RequestRecord] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    line = decoder.decode(text)
                except msgspec.DecodeError as error:
                    if not text.endswith(b"\n") and head is not None:
                        break  # the engine was stopped in the middle of a line
                    raise UserError(f"{path}, line {number}: this is no line of a step log: {error}") from None
                if isinstance(line, LogHead):
                    head = line
                elif isinstance(line, StepRecord):
                    steps.append(line)
                else:
                    requests.append(line)
    except OSError as error:
        raise UserError(f"the step log {path} cannot be read: {error.strerror or error}") from None
    if head is None or head.version != FORMAT_VERSION:
        version = "no header" if head is None else f"version {head.version}"
        raise UserError(f"{path} has {version}; a step log of version {FORMAT_VERSION} is needed")
    return LoadedLog(head=head, steps=tuple(steps), requests=tuple(requests))


def host_time_of(steps: Iterable[StepRecord]) -> HostTime:
    """Host times fitted to steps: decisions, absorptions, and the median of what lies between them while the engine is busy."""
    own = list(steps)
    gaps: list[float] = []
    decided = sorted(record.decided_s for record in own)
    for record in own:
        ready_s = record.collected_s + record.absorb_s
        place = bisect_left(decided, ready_s)
        if record.running and record.decided_s > 0 and place < len(decided):
            gaps.append(decided[place] - ready_s)
    gaps.sort()
    return fit_host(
        [(record.features.rows, record.entered, record.decide_s) for record in own],
        [(record.features.rows, record.absorb_s) for record in own],
        loop_s=gaps[len(gaps) // 2] if gaps else HostTime().loop_s,
    )


# --------------------------------------------------------------------------------------------------------- exact replay


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions that a replay made."""

    digests: dict[int, int]
    """By step number."""
    differs_at: int | None
    """The first step that was decided otherwise than in the log; None where all are the same."""


def replay(
    steps: Sequence[StepRecord],
    records: Sequence[RequestRecord],
    requests: Mapping[str, Request],
    *,
    schedule: SchedulePlan,
    cache: CachePlan,
    answers: Mapping[str, Sequence[int]] | None = None,
    drafts_per_row: int = 0,
    watch: list[Step] | None = None,
) -> Replayed:
    """Lets the scheduler decide again with the logged times: each order comes where it came, each step ends when it ended.

    `steps` from the engine's first on, by a clock that moves between its verbs (a virtual one that stands still cannot tell whether a
    request came before a decision or after it). `requests` by id as they were asked. `answers` are the tokens that came, where another
    prompt continues them; without them made-up ones are used. `watch` takes the steps. Raises UserError when the log has not all steps.
    """
    if [record.number for record in steps] != list(range(1, len(steps) + 1)):
        first = steps[0].number if steps else 0
        raise UserError(f"the step log begins at step {first} or has gaps: exact replay needs every step from 1 on")
    lengths = {record.id: record for record in records}
    by_number = {record.number: record for record in steps}
    names = {name: index for index, name in enumerate(requests)}
    decided = [record.decided_s for record in steps]
    collected = [record.collected_s for record in steps]
    digests: dict[int, int] = {}

    def answer_of(request_id: str) -> tuple[int, int]:
        record = lengths[request_id]
        stopped = record.finish == "stop" and not record.by_order
        return (1 << 29) + names[request_id], record.output_tokens if stopped else NEVER

    def see(step: Step, features: Features) -> None:
        digests[step.number] = digest_of(step)
        if watch is not None:
            watch.append(step)

    orders: list[tuple[float, int, Order]] = []
    for record in records:
        orders.append((record.taken_s, 0, Add(requests[record.id])))
        if record.by_order:
            kind: Order = Cancel(record.id) if record.finish == "abort" else Finish(record.id, record.finish)
            orders.append((record.finished_s, 1, kind))
    orders.sort(key=lambda order: order[:2])
    due = deque((bisect_left(decided, at_s), bisect_right(collected, at_s), order) for at_s, _, order in orders)

    clock = VirtualClock()
    executor = SimulatedExecutor(
        clock=clock,
        slots=schedule.max_running,
        reader=FeatureReader(groups=cache.groups, slots=schedule.max_running),
        answer_of=answer_of,
        answers=answers,
        finish=lambda step, features, begin_s: by_number[step.number].collected_s,
        watch=see,
    )
    scheduler = Scheduler(
        schedule=schedule,
        cache=cache,
        clock=clock.now,
        drafts_per_row=drafts_per_row,
        degrade=degrader_of(schedule, drafts=drafts_per_row > 0, log=None),
    )
    loop = EngineLoop(scheduler=scheduler, executor=executor, clock=clock.now)
    while due or loop.busy:
        done_s, next_ = executor.collected, executor.submitted + 1
        idle = not loop.busy
        while due and (idle or (due[0][0] < next_ and due[0][1] <= done_s)):
            loop.post(due.popleft()[2])
            idle = False
        if next_ not in by_number and scheduler.flying == 0:
            break  # the log ends here
        if next_ in by_number and bisect_right(collected, decided[next_ - 1]) <= done_s:
            clock.advance(max(0.0, decided[next_ - 1] - clock.now()))
        if next_ not in by_number:
            break
        loop.run_once()
    differs = next((n for n, record in by_number.items() if record.digest and digests.get(n) != record.digest), None)
    return Replayed(digests=digests, differs_at=differs)
