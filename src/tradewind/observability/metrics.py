"""Prometheus metrics: counted from the engine's reports, spelled in the text format when somebody asks.

Knows: names, buckets, the exposition format 0.0.4. Refuses to know: HTTP, and how a request's life is put together (lives).
Names and suffixes are those of the ecosystem (vLLM's, where it has the same thing) under `tradewind:`; docs/observability.md lists all.

A step costs some additions to plain Python numbers: no registry, no labels looked up, no locks. One thread writes and reads.
"""

from __future__ import annotations

import math
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from tradewind.contract.events import Delayed, Preempted, Scheduled, StepDone
from tradewind.observability.lives import Life, Listener, ReceiptLike
from tradewind.observability.proc import max_open_files, process_facts

PREFIX = "tradewind:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FINISHES = ("abort", "error", "length", "stop")

TTFT_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
ITL_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
LATENCY_S = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
)
STEP_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    5.0,
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class DegradeFacts(Protocol):
    """What is given up under overload (the engine's ladder)."""

    @property
    def level(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def pressure(self) -> float: ...
    @property
    def ups(self) -> int: ...
    @property
    def downs(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def shortened(self) -> int: ...


class StepTimeFacts(Protocol):
    """How well step times are known."""

    @property
    def steps(self) -> int: ...
    @property
    def held_out(self) -> int: ...
    @property
    def error_median(self) -> float | None: ...
    @property
    def error_p90(self) -> float | None: ...
    @property
    def refits(self) -> int: ...
    @property
    def paces(self) -> bool: ...


class EngineFacts(Protocol):
    """What is open now (the engine's stats)."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def pages_used(self) -> tuple[int, ...]: ...
    @property
    def pages_total(self) -> tuple[int, ...]: ...
    @property
    def degrade(self) -> DegradeFacts | None: ...
    @property
    def step_times(self) -> StepTimeFacts | None: ...


class Histogram:
    """Counts by upper bound, the sum beside them."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as written, how many are not above it), the last one "+Inf"."""
        rows, total = [], 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            rows.append((spelled(bound), total))
        return rows


def spelled(value: float) -> str:
    """A number as the text format writes it."""
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def labelled(labels: Mapping[str, str]) -> str:
    """`{a="1",b="x"}` with its values escaped; nothing for no labels."""
    if not labels:
        return ""
    escaped = (
        f'{name}="' + str(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') + '"'
        for name, value in labels.items()
    )
    return "{" + ",".join(escaped) + "}"


class Page:
    """The text as it is written, family by family."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._lines: list[str] = []

    def family(self, name: str, kind: str, help: str) -> None:
        """Opens a family; its samples must follow at once."""
        self._lines += (f"# HELP {name} {help}", f"# TYPE {name} {kind}")

    def sample(self, name: str, value: float, **labels: str) -> None:
        """One number of the open family."""
        self._lines.append(f"{name}{labelled({**self._labels, **labels})} {spelled(value)}")

    def one(self, name: str, kind: str, help: str, value: float | None, **labels: str) -> None:
        """A family with one sample; none when there is no value."""
        if value is not None:
            self.family(name, kind, help)
            self.sample(name, value, **labels)

    def histogram(self, name: str, help: str, histogram: Histogram) -> None:
        """A family of buckets, sum and count."""
        self.family(name, "histogram", help)
        rows = histogram.cumulative()
        for bound, count in rows:
            self.sample(f"{name}_bucket", count, le=bound)
        self.sample(f"{name}_sum", histogram.sum)
        self.sample(f"{name}_count", rows[-1][1])

    def append(self, other: Page) -> None:
        """Adds the families of another page."""
        self._lines += other._lines

    def text(self) -> str:
        """Everything so far."""
        return "\n".join(self._lines) + "\n"


class Metrics(Listener):
    """Counters and histograms of one server. Fed by `lives.Lives` and by receipts; `text` is what /metrics answers."""

    def __init__(
        self,
        *,
        model: str,
        version: str,
        facts: Callable[[], EngineFacts],
        alive: Callable[[], bool] | None = None,
        engine_pid: Callable[[], int | None] | None = None,
        refused: Callable[[], int] | None = None,
        info: Mapping[str, Mapping[str, str]] | None = None,
        startup_s: Iterable[tuple[str, float]] = (),
    ) -> None:
        """`facts`: what is open, asked for when somebody reads. `refused`: requests that were answered 429 so far.

        `info`: name -> labels, each told as `tradewind:NAME_info` with the value 1. `startup_s`: phases of the start.
        """
        self._labels = {"model_name": model}
        self._version, self._facts, self._alive = version, facts, alive
        self._engine_pid, self._refused = engine_pid, refused
        self._info = {name: dict(labels) for name, labels in (info or {}).items()}
        self._startup_s = tuple(startup_s)
        self.more: list[Callable[[Page], None]] = []
        """Who adds families of its own to the page."""
        self._began_unix_s = time.time()
        self._prompt = self._cached = self._computed = self._recomputed = self._generated = 0
        self._preemptions = self._delays = self._steps = self._rows = 0
        self._device_s = self._decide_s = self._absorb_s = 0.0
        self._finished = dict.fromkeys(FINISHES, 0)
        self._http: dict[tuple[str, str], int] = {}
        self._ttft = Histogram(TTFT_S)
        self._itl = Histogram(ITL_S)
        self._tpot = Histogram(ITL_S)
        self._e2e = Histogram(LATENCY_S)
        self._queue = Histogram(LATENCY_S)
        self._prefill = Histogram(LATENCY_S)
        self._decode = Histogram(LATENCY_S)
        self._inference = Histogram(LATENCY_S)
        self._iteration = Histogram(TOKENS)
        self._request_prompt = Histogram(TOKENS)
        self._request_generated = Histogram(TOKENS)
        self._step_device = Histogram(STEP_S)
        self._step_host = Histogram(STEP_S)

    def replanned(self, info: Mapping[str, Mapping[str, str]]) -> None:
        """Another plan is in force: its facts, as `info`."""
        self._info |= {name: dict(labels) for name, labels in info.items()}

    # -- what happened -----------------------------------------------------------------------------------------------

    def scheduled(self, life: Life, event: Scheduled, recomputed_tokens: int) -> None:
        """See Listener."""
        self._recomputed += recomputed_tokens
        if not event.resumed:
            self._prompt += life.prompt_tokens
            self._cached += event.cached_tokens
            self._queue.observe(event.at_s - life.arrived_s)

    def first_token(self, life: Life, at_s: float) -> None:
        """See Listener."""
        self._ttft.observe(at_s - life.arrived_s)
        if life.scheduled_s is not None:
            self._prefill.observe(at_s - life.scheduled_s)

    def tokens(self, count: int, at_s: float) -> None:
        """See Listener."""
        self._generated += count

    def gap(self, seconds: float, count: int) -> None:
        """See Listener."""
        self._itl.observe(seconds, count)

    def preempted(self, life: Life, event: Preempted) -> None:
        """See Listener."""
        self._preemptions += 1

    def delayed(self, event: Delayed) -> None:
        """See Listener."""
        self._delays += 1

    def step(self, event: StepDone) -> None:
        """See Listener."""
        self._steps += 1
        self._rows += event.rows
        self._computed += event.prompt_tokens
        self._device_s += event.device_s
        self._decide_s += event.decide_s
        self._absorb_s += event.absorb_s
        self._iteration.observe(event.tokens)
        self._step_device.observe(event.device_s)
        self._step_host.observe(event.decide_s + event.absorb_s)

    def ended(self, life: Life) -> None:
        """See Listener."""
        assert life.finish is not None
        self._finished[life.finish] = self._finished.get(life.finish, 0) + 1
        if life.finish == "error":
            return
        self._e2e.observe(life.ended_s - life.arrived_s)
        self._request_prompt.observe(life.prompt_tokens)
        self._request_generated.observe(life.generated_tokens)
        if life.scheduled_s is not None:
            self._inference.observe(life.ended_s - life.scheduled_s)
        first_s, last_s = life.first_token_s, life.last_token_s
        if first_s is not None and last_s is not None:
            self._decode.observe(last_s - first_s)
            if life.generated_tokens > 1:
                self._tpot.observe((last_s - first_s) / (life.generated_tokens - 1))

    def take_receipt(self, receipt: ReceiptLike) -> None:
        """Counts a finished HTTP request."""
        outcome = "error" if receipt.error else "disconnect" if receipt.finish == "disconnect" else "ok"
        key = (receipt.endpoint, outcome)
        self._http[key] = self._http.get(key, 0) + 1

    # -- as text -----------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Everything, in Prometheus' text format; changes nothing."""
        page = Page(self._labels)
        self._open_now(page)
        self._counters(page)
        self._histograms(page)
        for add in self.more:
            add(page)
        self._about(page)
        return page.text()

    def _open_now(self, page: Page) -> None:
        facts = self._facts()
        used, total = facts.pages_used, facts.pages_total
        page.one(f"{PREFIX}num_requests_running", "gauge", "Sequences in a slot.", facts.running)
        page.one(f"{PREFIX}num_requests_waiting", "gauge", "Sequences queued or blocked.", facts.waiting)
        shares = [u / t for u, t in zip(used, total, strict=True) if t]
        page.one(
            f"{PREFIX}kv_cache_usage_perc",
            "gauge",
            "Part of the KV pages that sequences hold, of the fullest group; 1 is all.",
            max(shares, default=0.0),
        )
        for name, values, help in (
            ("kv_cache_pages_used", used, "KV pages that sequences hold; cached pages that nobody uses do not count."),
            ("kv_cache_pages", total, "KV pages there are."),
        ):
            page.family(f"{PREFIX}{name}", "gauge", help)
            for group, value in enumerate(values):
                page.sample(f"{PREFIX}{name}", value, group=str(group))
        _degrade(page, facts.degrade)
        _step_times(page, facts.step_times)
        if self._alive is not None:
            page.one(f"{PREFIX}engine_up", "gauge", "1 while the engine can serve.", int(self._alive()))

    def _counters(self, page: Page) -> None:
        for name, value, help in (
            (
                "prompt_tokens",
                self._prompt,
                "Prompt tokens of requests that got a slot: the cached and the computed ones.",
            ),
            ("prompt_tokens_cached", self._cached, "Of these, tokens that were found in the prefix cache."),
            (
                "prompt_tokens_computed",
                self._computed,
                "Tokens computed before the first token of an answer, in all steps.",
            ),
            ("prompt_tokens_recomputed", self._recomputed, "Tokens computed a second time because of preemptions."),
            ("generation_tokens", self._generated, "Tokens generated."),
            ("prefix_cache_queries", self._prompt, "Prompt tokens that were looked up in the prefix cache."),
            ("prefix_cache_hits", self._cached, "Prompt tokens that were found in the prefix cache."),
            ("num_preemptions", self._preemptions, "Running sequences that gave their pages back and began again."),
            ("num_delays", self._delays, "Times that the head of the queue could not start, once for each reason."),
            ("steps", self._steps, "Steps of the engine."),
            ("step_rows", self._rows, "Rows of all steps; divided by steps: the mean batch."),
            ("step_device_busy_seconds", self._device_s, "Time that the device worked on steps."),
            ("step_decide_seconds", self._decide_s, "Host time to decide steps."),
            ("step_absorb_seconds", self._absorb_s, "Host time to take in what steps brought."),
        ):
            page.one(f"{PREFIX}{name}_total", "counter", help, value)
        name = f"{PREFIX}request_success_total"
        page.family(name, "counter", "Sequences that ended, by the reason.")
        for reason, count in sorted(self._finished.items()):
            page.sample(name, count, finished_reason=reason)
        name = f"{PREFIX}http_requests_total"
        page.family(name, "counter", "HTTP requests that reached the engine and ended.")
        for (endpoint, outcome), count in sorted(self._http.items()):
            page.sample(name, count, endpoint=endpoint, outcome=outcome)
        if self._refused is not None:
            name = f"{PREFIX}http_requests_refused_total"
            page.one(name, "counter", "HTTP requests answered 429 because the queue was full.", self._refused())

    def _histograms(self, page: Page) -> None:
        for name, histogram, help in (
            ("time_to_first_token_seconds", self._ttft, "From a sequence's arrival to its first token."),
            ("inter_token_latency_seconds", self._itl, "Between two deliveries of tokens of one sequence."),
            ("request_time_per_output_token_seconds", self._tpot, "Mean time of a token after the first, by sequence."),
            ("e2e_request_latency_seconds", self._e2e, "From a sequence's arrival to its end."),
            ("request_queue_time_seconds", self._queue, "From arrival to the slot."),
            ("request_prefill_time_seconds", self._prefill, "From the slot to the first token."),
            ("request_decode_time_seconds", self._decode, "From the first token to the last."),
            ("request_inference_time_seconds", self._inference, "From the slot to the end."),
            ("request_prompt_tokens", self._request_prompt, "Prompt tokens of a sequence."),
            ("request_generation_tokens", self._request_generated, "Tokens generated for a sequence."),
            ("iteration_tokens_total", self._iteration, "Tokens of a step, prompt and decode rows together."),
            ("step_device_seconds", self._step_device, "Time that the device worked on a step."),
            ("step_host_seconds", self._step_host, "Host time to decide and take in a step."),
        ):
            page.histogram(f"{PREFIX}{name}", help, histogram)

    def _about(self, page: Page) -> None:
        info = {"build": {"version": self._version, "python": platform.python_version()}, **self._info}
        for name, labels in sorted(info.items()):
            page.one(f"{PREFIX}{name}_info", "gauge", f"Facts of the {name}, as labels.", 1, **labels)
        if self._startup_s:
            page.family(f"{PREFIX}startup_seconds", "gauge", "What the start took, by phase.")
            for phase, seconds in self._startup_s:
                page.sample(f"{PREFIX}startup_seconds", seconds, phase=phase)
        pid = self._engine_pid() if self._engine_pid is not None else None
        engine = process_facts(pid) if pid is not None else None
        if engine is not None:
            name = f"{PREFIX}engine_resident_memory_bytes"
            page.one(name, "gauge", "Memory of the engine's process that is in RAM.", engine.resident_bytes)
            page.one(f"{PREFIX}engine_cpu_seconds_total", "counter", "CPU time of the engine's process.", engine.cpu_s)
        plain = Page({})  # process metrics carry no labels of ours anywhere in the ecosystem
        own = process_facts()
        if own is not None:
            for name, kind, help, value in (
                (
                    "process_resident_memory_bytes",
                    "gauge",
                    "Memory of this process that is in RAM.",
                    own.resident_bytes,
                ),
                ("process_virtual_memory_bytes", "gauge", "Address space of this process.", own.virtual_bytes),
                ("process_cpu_seconds_total", "counter", "CPU time of this process.", own.cpu_s),
                ("process_start_time_seconds", "gauge", "When this process began, Unix time.", own.start_unix_s),
                ("process_open_fds", "gauge", "Open files of this process.", own.open_files),
                ("process_max_fds", "gauge", "Open files it may have.", max_open_files()),
                ("process_threads", "gauge", "Threads of this process.", own.threads),
            ):
                plain.one(name, kind, help, value)
        else:
            name = "process_start_time_seconds"
            plain.one(name, "gauge", "When this process began, Unix time.", self._began_unix_s)
        page.append(plain)


def _degrade(page: Page, ladder: DegradeFacts | None) -> None:
    """Where the engine stands on its ladder; nothing where it has none."""
    if ladder is None:
        return
    for name, kind, help, value in (
        ("level", "gauge", "Rung of the degrade ladder; 0: nothing is given up.", ladder.level),
        (
            "pressure",
            "gauge",
            "How near the highest class is to missing its targets; from 1 on rungs are taken.",
            ladder.pressure,
        ),
        ("refused_total", "counter", "Requests of the lowest class that were refused under overload.", ladder.refused),
        ("shortened_total", "counter", "Requests whose answers may be shorter than asked.", ladder.shortened),
    ):
        page.one(f"{PREFIX}degrade_{name}", kind, help, value)
    name = f"{PREFIX}degrade_changes_total"
    page.family(name, "counter", "Rungs taken and taken back.")
    page.sample(name, ladder.ups, direction="up")
    page.sample(name, ladder.downs, direction="down")


def _step_times(page: Page, times: StepTimeFacts | None) -> None:
    """How well step times are known; nothing where nobody fits them."""
    if times is None:
        return
    name = f"{PREFIX}step_time_error_ratio"
    if times.error_median is not None and times.error_p90 is not None:
        page.family(
            name, "gauge", "|predicted - measured| / measured of steps that the fitted step times had not seen."
        )
        page.sample(name, times.error_median, quantile="0.5")
        page.sample(name, times.error_p90, quantile="0.9")
    for name, kind, help, value in (
        ("fitted_steps", "gauge", "Steps that the newest step times are fitted to; 0: not fitted yet.", times.steps),
        ("refits_total", "counter", "Times that step times were fitted.", times.refits),
        ("paces", "gauge", "1 while steps are paced by the fitted times.", int(times.paces)),
    ):
        page.one(f"{PREFIX}step_time_{name}", kind, help, value)
