"""Measures an engine in this process: `tradewind bench offline`.

Knows: how to run a workload so that figures mean what they say (one run to warm up, nothing cached from the run before, raw times kept).
Refuses to know: what the engine does, and how results look (report).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tradewind
from tradewind.bench import limits as ceilings
from tradewind.bench.limits import Limits
from tradewind.bench.report import FORMAT, Measured, Metric, Report, RequestTimes, Run, percentile, save, show
from tradewind.bench.workloads import NEEDED_IDS, Workload, chat_mix, cpu_workloads
from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.contract.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKLOADS = ("L1", "L2", "L3", "L4", "chat")
MAX_REPEATS = 1000
CHAT_REQUESTS = 32
VERSIONS_OF = ("tradewind", "numpy", "tokenizers", "torch")


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    vocab_size: int

    def encode(self, text: str, *, add_special: bool) -> list[int]: ...


class Parts(Protocol):
    """What is needed of the engine's parts; `tradewind.assemble.Engine` has it."""

    @property
    def tokenizer(self) -> Encodes: ...
    @property
    def checkpoint_path(self) -> Path: ...


class Measurable(Protocol):
    """What is needed of an engine; `tradewind.llm.LLM` has it."""

    @property
    def plan(self) -> Plan: ...
    @property
    def phases(self) -> Any: ...
    @property
    def engine(self) -> Parts: ...

    def generate(self, prompts: Any, sampling: Any, *, progress: bool = False) -> Sequence[Any]:
        """Outputs with completions, cached_tokens, arrived_s, first_token_s and finished_s (one clock, seconds)."""

    def forget(self) -> None:
        """Drops the prefix cache."""


def run_and_report(llm: Measurable, *, workloads: Sequence[str], repeats: int, out: str | None = None) -> Report:
    """Measures, prints the tables and writes JSON and plot when `out` names a file. Raises UserError before measuring."""
    from rich.console import Console

    check_arguments(workloads=workloads, repeats=repeats)
    path = None if out is None else check_target(Path(out))
    report = run_offline(llm, workloads=workloads, repeats=repeats, progress=sys.stderr.isatty())
    console = Console()
    show(report, console)
    if path is not None:
        for sentence in save(report, path):
            print(sentence, file=sys.stderr)
    return report


def run_offline(
    llm: Measurable,
    *,
    workloads: Sequence[str] = WORKLOADS,
    repeats: int = 3,
    progress: bool = False,
    limits: Limits | None = None,
) -> Report:
    """Runs each workload once to warm up and then `repeats` times; the engine's prefix cache is dropped before every run.

    limits: measured here when None. Raises UserError for arguments that cannot be run and for runs that did not finish.
    """
    names = check_arguments(workloads=workloads, repeats=repeats)
    plan = llm.plan
    ids, text = text_ids(llm.engine.tokenizer, checkpoint_path=llm.engine.checkpoint_path)
    works = all_workloads(ids, max_context=plan.schedule.max_context)
    chosen = [work for work in works if work.name in names]
    for work in chosen:
        if work.context > plan.schedule.max_context:
            fitting = ", ".join(work.name for work in works if work.context <= plan.schedule.max_context) or "none"
            raise UserError(
                f"workload {work.name} needs a context of {work.context} tokens and this engine has "
                f"{plan.schedule.max_context}; allow more with --max-context, or choose among {fitting}"
            )
    with _bar(len(chosen) * (repeats + 1) + 1, visible=progress) as advance:
        advance("limits of the machine")
        limits = limits or ceilings.measure_limits(plan)
        measured = tuple(measure(llm, work, repeats=repeats, limits=limits, advance=advance) for work in chosen)
    return Report(
        format=FORMAT,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=(Path(sys.argv[0]).name, *sys.argv[1:]),
        cpu=plan.hardware.name,
        cores=plan.hardware.cores,
        system=f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        versions=versions(),
        text=text,
        plan=plan,
        start=tuple((phase.name, phase.seconds) for phase in llm.phases.done),
        repeats=repeats,
        limits=limits,
        measured=measured,
    )


# ----------------------------------------------------------------------------------------------------------- arguments


def check_arguments(*, workloads: Sequence[str], repeats: int) -> tuple[str, ...]:
    """The names, each once, in the order of WORKLOADS; changes nothing. Raises UserError naming every unknown one."""
    unknown = sorted({name for name in workloads if name not in WORKLOADS})
    if unknown:
        raise UserError(f"unknown workloads: {', '.join(map(repr, unknown))}; there are {', '.join(WORKLOADS)}")
    if not workloads:
        raise UserError(f"no workload is named; there are {', '.join(WORKLOADS)}")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or not 1 <= repeats <= MAX_REPEATS:
        raise UserError(f"repeats is {repeats!r}; it must be a whole number from 1 to {MAX_REPEATS}")
    return tuple(name for name in WORKLOADS if name in workloads)


def check_target(path: Path) -> Path:
    """Where the JSON goes; refuses before minutes of measuring what could not be written after them."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it, for example {path / 'bench.json'}")
    if path.suffix == ".png":
        raise UserError(
            f"{path} would be overwritten by the plot; name the JSON file, the plot gets its name with .png"
        )
    folder = path.parent
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder, so {path} cannot be written")
    return path


# ---------------------------------------------------------------------------------------------------------------- text


def text_ids(tokenizer: Encodes, *, checkpoint_path: Path) -> tuple[tuple[int, ...], str]:
    """Token ids that the prompts are cut from, and where they are from; changes nothing.

    The licence beside the model (real text, and every engine can be given the same), else our own, which is the same licence as the
    embedded model's; a vocabulary that writes it in fewer ids than the workloads need gets it again.
    """
    path = licence_file(checkpoint_path)
    if path is not None:
        text, source = path.read_text(encoding="utf-8", errors="replace"), path.name
        ids = tuple(tokenizer.encode(text, add_special=False))
        if ids:
            return ids * (NEEDED_IDS // len(ids) + 1), source
    ids = tuple((7919 * i + 13) % tokenizer.vocab_size for i in range(NEEDED_IDS + 100))
    return ids, "made-up token ids (no licence text at hand)"


def licence_file(checkpoint_path: Path) -> Path | None:
    """The licence text beside a model, else Tradewind's own."""
    folder = checkpoint_path if checkpoint_path.is_dir() else checkpoint_path.parent
    beside = [folder / f"{checkpoint_path.name}.LICENCE.txt"]
    beside += [folder / name for name in ("LICENCE.txt", "LICENSE.txt", "LICENSE")]
    own = [Path(tradewind.__file__).parents[2] / "LICENSE"]
    try:
        files = importlib.metadata.files("tradewind") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    own += [Path(str(file.locate())) for file in files if file.name == "LICENSE"]
    return next((path for path in (*beside, *own) if path.is_file() and path.stat().st_size > 2000), None)


def all_workloads(ids: Sequence[int], *, max_context: int) -> tuple[Workload, ...]:
    """Every workload in the order of WORKLOADS."""
    fixed = cpu_workloads(ids)
    return (*fixed.values(), chat_mix(ids, requests=CHAT_REQUESTS, max_context=max_context))


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(
    llm: Measurable, work: Workload, *, repeats: int, limits: Limits, advance: Callable[[str], None] = lambda what: None
) -> Measured:
    """One workload: a run to warm up (tapes are recorded, pages touched), then the counted ones."""
    advance(f"{work.name} warm-up")
    run_once(llm, work)
    runs = []
    for repeat in range(repeats):
        advance(f"{work.name} {repeat + 1}/{repeats}")
        runs.append(run_once(llm, work))
    return Measured(
        workload=work.name,
        title=work.title,
        prompts=len(work.prompts),
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        metrics=metrics_of(work, runs, plan=llm.plan, limits=limits),
        runs=tuple(runs),
    )


def run_once(llm: Measurable, work: Workload) -> Run:
    """Runs a workload once on an engine that remembers no prefix. Raises UserError when an answer has not all its tokens."""
    llm.forget()
    sampling = [SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, seed=0) for new in work.new_tokens]
    prompts = [list(prompt) for prompt in work.prompts]
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, progress=False)
    wall_s = time.perf_counter() - start
    seen = hashlib.sha256()
    requests = []
    for place, (output, prompt, new) in enumerate(zip(outputs, work.prompts, work.new_tokens, strict=True)):
        answer = output.completions[0]
        if answer.error is not None or len(answer.tokens) != new:
            why = f": {answer.error}" if answer.error is not None else ""
            raise UserError(f"workload {work.name}: request {place} gave {len(answer.tokens)} of {new} tokens{why}")
        seen.update(repr(tuple(answer.tokens)).encode())
        requests.append(
            RequestTimes(
                prompt_tokens=len(prompt),
                output_tokens=new,
                cached_tokens=output.cached_tokens,
                first_token_s=output.first_token_s - output.arrived_s,
                finished_s=output.finished_s - output.arrived_s,
            )
        )
    return Run(wall_s=wall_s, requests=tuple(requests), answers=seen.hexdigest()[:16])


def metrics_of(work: Workload, runs: Sequence[Run], *, plan: Plan, limits: Limits) -> tuple[Metric, ...]:
    """The figures of a workload, the one it is known by first; changes nothing."""
    builders: Mapping[str, Callable[..., tuple[Metric, ...]]] = {"L1": _decode, "L2": _prefill}
    return builders.get(work.name, _batch)(runs, plan=plan, limits=limits)


def _decode(runs: Sequence[Run], *, plan: Plan, limits: Limits) -> tuple[Metric, ...]:
    rates = []
    for run in runs:
        (request,) = run.requests
        assert request.per_token_s is not None, "a decode rate needs two tokens"
        rates.append(1 / request.per_token_s)
    share = ceilings.decode_share(limits, plan.card, tokens_per_s=statistics.median(rates))
    rate = Metric(name="decode", unit="tok/s", better="higher", values=tuple(rates), share=share)
    return rate, _waits(runs, name="first token", percent=None)


def _prefill(runs: Sequence[Run], *, plan: Plan, limits: Limits) -> tuple[Metric, ...]:
    rates = tuple(run.requests[0].prompt_tokens / run.requests[0].first_token_s for run in runs)
    request = runs[0].requests[0]
    share = ceilings.matmul_share(
        limits,
        plan,
        computed=request.prompt_tokens - request.cached_tokens,
        sampled=1,
        wall_s=request.prompt_tokens / statistics.median(rates),
    )
    rate = Metric(name="prefill", unit="tok/s", better="higher", values=rates, share=share)
    return rate, _waits(runs, name="first token", percent=None)


def _batch(runs: Sequence[Run], *, plan: Plan, limits: Limits) -> tuple[Metric, ...]:
    outputs = sum(request.output_tokens for request in runs[0].requests)
    rates = tuple(outputs / run.wall_s for run in runs)
    # The last token of an answer is never computed further; cached ones are not computed again.
    computed = sum(r.prompt_tokens - r.cached_tokens + r.output_tokens - 1 for r in runs[0].requests)
    share = ceilings.matmul_share(
        limits, plan, computed=computed, sampled=outputs, wall_s=outputs / statistics.median(rates)
    )
    metrics = [Metric(name="output", unit="tok/s", better="higher", values=rates, share=share)]
    metrics += [_waits(runs, name=f"first token p{percent}", percent=percent) for percent in (50, 90, 99)]
    if any(request.per_token_s is not None for request in runs[0].requests):
        metrics += [_gaps(runs, percent=percent) for percent in (50, 90, 99)]
    return tuple(metrics)


def _waits(runs: Sequence[Run], *, name: str, percent: float | None) -> Metric:
    """Time to first token: of the only request, or a percentile over the requests of each run."""
    values = []
    for run in runs:
        waits = [request.first_token_s for request in run.requests]
        values.append(1e3 * (waits[0] if percent is None else percentile(waits, percent)))
    return Metric(name=name, unit="ms", better="lower", values=tuple(values))


def _gaps(runs: Sequence[Run], *, percent: float) -> Metric:
    """A percentile over the requests of each run of the mean time per output token after the first."""
    values = []
    for run in runs:
        gaps = [gap for request in run.requests if (gap := request.per_token_s) is not None]
        values.append(1e3 * percentile(gaps, percent))
    return Metric(name=f"per token p{percent:g}", unit="ms", better="lower", values=tuple(values))


def versions() -> dict[str, str]:
    """Versions of what takes part, without importing it."""
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["tradewind"] = tradewind.__version__
    return found


@contextmanager
def _bar(total: int, *, visible: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; the given function says what begins now."""
    if not visible:
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun: list[str] = []

        def advance(what: str) -> None:
            bar.update(task, description=what, completed=len(begun))
            begun.append(what)

        yield advance
