"""How much of a steady decode the GPU stands still: kernels of some hundred steps, from the profiler, as figures and as a picture.

    PYTHONPATH=src python benchmarks/gpu_trace.py --model qwen3-0.6b --rows 64 --out benchmarks/results/gpu-trace.json
    python benchmarks/gpu_trace.py --trace trace.json.gz --steps 200 --out ...          a Chrome trace that is there already

Knows: intervals on the device and what lies between them. The same number of steps runs first without the profiler, because tracing makes
steps longer: the share of time in which nothing runs is given against both times.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_engine
import gpu_options
import gpu_results
import gpu_works

from tradewind.bench.report import matplotlib_figure, quiet_axis
from tradewind.contract.events import StepDone, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.loop import Add, Cancel
from tradewind.phases import Phases

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN_STEPS = 6
SHORT_GAP_US = 1.0
"""A pause shorter than this is the launch of the next kernel and is not shaded."""

KINDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "layout",
        ("lay_out", "fetch_header", "publish", "scatter_kernel", "write_entries", "write_rows"),
        "#5b8a9a",
    ),
    ("attention", ("attention", "_decode_kernel", "_prefill_kernel", "attend", "merge"), "#d9822b"),
    ("matmul", ("gemm", "gemv", "_tile_kernel", "nvjet", "cutlass", "matmul", "splitk", "_fixed_kernel"), "#2f6fb0"),
    ("norm, rope, activation", ("norm", "rope", "gated", "quant", "_add_kernel"), "#3a8f5c"),
    ("sampling", ("sample", "draw", "steer", "resolve", "narrow", "logprob", "greedy", "argmax"), "#8e5ea2"),
    ("copies", ("memcpy", "memset", "copy"), "#c0392b"),
)
OTHER = ("other", "#7b8794")


def kind_of(name: str) -> str:
    """What a kernel does, by its name; the first kind that fits."""
    low = name.lower()
    return next((kind for kind, words, _ in KINDS if any(word in low for word in words)), OTHER[0])


# ------------------------------------------------------------------------------------------------------------- analysis


def device_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The device's events of a Chrome trace, in order of their beginning: name, begin and end in microseconds."""
    found = [
        {"name": event["name"], "begin": float(event["ts"]), "end": float(event["ts"]) + float(event.get("dur", 0.0))}
        for event in trace.get("traceEvents", ())
        if event.get("cat") in DEVICE_CATEGORIES and "ts" in event
    ]
    return sorted(found, key=lambda event: event["begin"])


def gaps_of(events: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """The times between first and last event in which none runs; events may overlap (dependent launches do)."""
    gaps, last = [], None
    for event in events:
        if last is not None and event["begin"] > last:
            gaps.append((last, event["begin"]))
        last = event["end"] if last is None else max(last, event["end"])
    return gaps


def step_begins(events: Sequence[dict[str, Any]], *, steps: int) -> list[float]:
    """When each step began: the earliest of the kernels that run once a step; empty when no kernel does."""
    counts = Counter(event["name"] for event in events)
    once = {name for name, count in counts.items() if abs(count - steps) <= max(1, steps // 50)}
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event["name"] in once:
            by_name[event["name"]].append(event["begin"])
    return min(by_name.values(), key=lambda begins: begins[0], default=[])


def analysed(events: Sequence[dict[str, Any]], *, steps: int) -> dict[str, Any]:
    """Figures of a trace: share of idle time between first and last kernel, and where the busy time goes."""
    if not events:
        return {"events": 0}
    gaps = gaps_of(events)
    span = max(event["end"] for event in events) - events[0]["begin"]
    idle = sum(end - begin for begin, end in gaps)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event["end"] - event["begin"])
    kinds: Counter[str] = Counter()
    for name, times in by_name.items():
        kinds[kind_of(name)] += sum(times)  # type: ignore[assignment]
    lengths = sorted((end - begin for begin, end in gaps), reverse=True)
    return {
        "events": len(events),
        "span_us": span,
        "busy_us": span - idle,
        "idle_us": idle,
        "idle_share": idle / span,
        "gaps": len(gaps),
        "gaps_over_5_us": sum(length > 5 for length in lengths),
        "longest_gaps_us": [round(length, 2) for length in lengths[:10]],
        "events_per_step": len(events) / steps,
        "busy_us_per_step": (span - idle) / steps,
        "by_kind_us_per_step": {kind: round(total / steps, 2) for kind, total in kinds.most_common()},
        "by_kernel": [
            {
                "name": name[:120],
                "per_step": len(times) / steps,
                "us_each": sum(times) / len(times),
                "us_per_step": sum(times) / steps,
            }
            for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:30]
        ],
    }


# ------------------------------------------------------------------------------------------------------------ the trace


def traced(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs a steady decode, without and with the profiler; returns figures and the device's events."""
    options = ["--model", arguments.model, "--backend", arguments.backend, "--quantization", arguments.quantization]
    options += ["--load-format", arguments.load_format]
    for text in arguments.means:
        options += ["--means", text]
    plan, client = gpu_engine.opened(gpu_options.goals_of(gpu_options.parsed(options)), phases=Phases())
    loop = client.loop
    room = plan.schedule.max_context - arguments.prompt
    new = min(room, 2 * arguments.steps + 200)
    sampling = SamplingParams(temperature=arguments.temperature, max_tokens=new, ignore_eos=True)
    suite = gpu_works.Suite(
        gpu_engine.Driven(loop),
        vocab_size=plan.card.vocab_size,
        sizes={},
        scale=gpu_works.SCALES["full"],
        copy=None,
    )
    suite.driven.generate(
        suite.prompts([arguments.prompt] * arguments.rows, 1), [8] * arguments.rows
    )  # graphs and kernels
    try:
        for number, prompt in enumerate(suite.prompts([arguments.prompt] * arguments.rows, 2)):
            loop.post(
                Add(Request(id=f"t{number}", tokens=tuple(prompt), sampling=sampling, max_tokens=new, seed=number))
            )
        steady, turns = 0, 0
        while steady < 20:  # every row decodes, and has for a while
            done = steps_of(loop.run_once())
            steady += sum(step.rows == arguments.rows and step.prompt_tokens == 0 for step in done)
            turns += 1
            assert turns < 10_000, "the rows never all decode at once"
        plain = timed_steps(loop, arguments.steps)
        events: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="tradewind-trace-") as folder:
            path = Path(folder) / "trace.json"
            profiler = cuda_profiler() if arguments.backend == "cuda" else None
            with profiler or contextlib.nullcontext():
                profiled = timed_steps(loop, arguments.steps)
                if profiler is not None:
                    import torch

                    torch.cuda.synchronize()
            if profiler is not None:
                profiler.export_chrome_trace(str(path))
                events = device_events(json.loads(path.read_text(encoding="utf-8")))
                if arguments.keep is not None:
                    arguments.keep.write_bytes(gzip.compress(path.read_bytes()))
        for number in range(arguments.rows):
            loop.post(Cancel(f"t{number}"))
        suite.driven.drain()
    finally:
        with contextlib.suppress(Exception):
            client.close()
    figures: dict[str, Any] = {"rows": arguments.rows, "steps": arguments.steps, "plain": plain, "profiled": profiled}
    figures["reasons"] = {reason.choice: reason.value for reason in plan.reasons}
    return figures, events


def cuda_profiler() -> Any:
    """The profiler for the device's side only: what the host does is not slowed down by being written down."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA])


def steps_of(reports: Sequence[Any]) -> list[StepDone]:
    """The steps among a turn's reports. Raises RuntimeError when a request has ended, for then the decode is not steady."""
    for report in reports:
        if isinstance(report, TokensOut) and report.finish is not None:
            raise RuntimeError(f"a request ended with {report.finish}: {report.error}; ask for fewer --steps")
    return [report for report in reports if isinstance(report, StepDone)]


def timed_steps(loop: Any, steps: int) -> dict[str, float]:
    """Runs so many steps; wall time and the host's part."""
    began, done = time.perf_counter(), list[StepDone]()
    while len(done) < steps:
        done += steps_of(loop.run_once())
    wall_s = time.perf_counter() - began
    host = sorted(step.decide_s + step.absorb_s for step in done)
    return {
        "steps": len(done),
        "wall_us_per_step": 1e6 * wall_s / len(done),
        "host_us_median": 1e6 * host[len(host) // 2],
    }


# -------------------------------------------------------------------------------------------------------------- picture


def draw(events: Sequence[dict[str, Any]], figures: dict[str, Any], path: Path, *, title: str) -> None:
    """Draws some steps from the middle: kernels as bars by kind, pauses shaded. Raises MissingExtraError."""
    begins = step_begins(events, steps=figures["steps"])
    if len(begins) > SHOWN_STEPS + 2:
        middle = len(begins) // 2
        first, last = begins[middle], begins[middle + SHOWN_STEPS]
    else:
        first = events[0]["begin"]
        last = first + SHOWN_STEPS * figures["profiled"]["wall_us_per_step"]
    shown = [event for event in events if first <= event["begin"] < last]
    kinds = [kind for kind, _, _ in KINDS] + [OTHER[0]]
    colours = {kind: colour for kind, _, colour in KINDS} | dict([OTHER])
    present = [kind for kind in kinds if any(kind_of(event["name"]) == kind for event in shown)]
    drawn = matplotlib_figure(width=13, height=1.4 + 0.42 * len(present))
    axis = drawn.subplots()
    quiet_axis(axis)
    for begin, end in gaps_of(events):
        if end - begin >= SHORT_GAP_US and begin < last and end > first:
            axis.axvspan(max(begin, first) - first, min(end, last) - first, color="#f3d4d0", linewidth=0)
    for place, kind in enumerate(present):
        bars = [(e["begin"] - first, e["end"] - e["begin"]) for e in shown if kind_of(e["name"]) == kind]
        axis.broken_barh(bars, (place - 0.38, 0.76), facecolors=colours[kind], linewidth=0)
    for begin in begins:
        if first <= begin <= last:
            axis.axvline(begin - first, color="#1f2933", linewidth=0.5, alpha=0.5)
    axis.set_yticks(range(len(present)), present, fontsize=8)
    axis.set_ylim(len(present) - 0.4, -0.6)
    axis.set_xlim(0, last - first)
    axis.set_xlabel("microseconds; thin lines: steps begin; shaded: nothing runs", fontsize=8)
    axis.set_title(title, fontsize=10, loc="left")
    drawn.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Traces, analyses, writes JSON and picture; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu", "plain"))
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--load-format", default="dummy", choices=("dummy", "auto"))
    parser.add_argument("--means", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--trace", type=Path, help="only look at this Chrome trace (.json or .json.gz)")
    parser.add_argument("--keep", type=Path, help="keep the trace here (.json.gz)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    if arguments.trace is not None:
        data = arguments.trace.read_bytes()
        events = device_events(json.loads(gzip.decompress(data) if arguments.trace.suffix == ".gz" else data))
        span = (events[-1]["end"] - events[0]["begin"]) / arguments.steps if events else 0.0
        figures: dict[str, Any] = {
            "steps": arguments.steps,
            "rows": arguments.rows,
            "profiled": {"wall_us_per_step": span},
        }
    else:
        figures, events = traced(arguments)
    figures |= {
        "format": 1,
        "kind": "trace",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(__file__).name, *(gpu_results.nameless(word) for word in sys.argv[1:])],
        "model": Path(arguments.model).name,
        "device": analysed(events, steps=arguments.steps),
    }
    device, plain = figures["device"], figures.get("plain")
    if events and plain:
        # Tracing stretches the pauses: the kernels' own time against a step that nobody watched.
        device["idle_share_untraced"] = max(0.0, 1 - device["busy_us_per_step"] / plain["wall_us_per_step"])
    gpu_results.save(figures, arguments.out)
    if not events:
        print(f"no device events; a step took {figures['profiled']['wall_us_per_step']:.0f} us")
        return 0
    untraced = device.get("idle_share_untraced")
    sentence = (
        f"{figures['model']}, {arguments.rows} rows: the device is idle {device['idle_share']:.1%} of a traced decode"
    )
    if untraced is not None and plain:
        sentence += f", {untraced:.1%} of an untraced one ({plain['wall_us_per_step']:.0f} us a step)"
    print(sentence)
    for kernel in device["by_kernel"][:15]:
        print(
            f"  {kernel['us_per_step']:8.1f} us a step  {kernel['per_step']:6.1f} x {kernel['us_each']:7.2f} us  {kernel['name'][:90]}"
        )
    try:
        draw(events, figures, arguments.out.with_suffix(".png"), title=sentence)
    except Exception as error:  # a picture less is no reason to lose the figures
        gpu_results.say(f"no picture: {type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
