"""A prompt of 128k tokens on a card: how long it takes, what a token costs behind it, and what running answers notice meanwhile.

    PYTHONPATH=src python benchmarks/long_context.py --out long-context.json                     Llama-3.1-8B's shape; 150 s on an H200
    PYTHONPATH=src python benchmarks/long_context.py --backend cpu --scale tiny --out try.json   the same script anywhere

    alone      the prompt by itself: time to its first token; then a token at a time behind it: one row, and a few rows of a quarter
    beside     16 answers of 1k tokens run; the prompt comes. Times between their tokens before, meanwhile and after; with a stated bound
               (`--slowdown 2`), and with the balanced goals that say nothing of it

Floors: weights and keys at the read rate, operations at the matmul rate, both measured in the same run. Weights are dummy, answers greedy.
JSON is written after every part; each engine is a process of its own, so that none leaves memory behind.
Refuses to know: how an engine is driven (gpu_engine.py) and ceilings are measured (gpu_card.py).
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_options
import gpu_results
import gpu_start
from gpu_engine import Driven, OutOfTimeError, opened
from gpu_results import save, say
from gpu_works import sizes_of

from tradewind.config.goals import Goals, Means
from tradewind.contract.events import StepDone, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.columns import StepTokens
from tradewind.engine.loop import Add, Cancel
from tradewind.phases import Phases

IDLE_STEPS = 200
SETTLE_S = 40.0
"""So long it is waited at most for kernels that are compiled behind the first steps, and graphs that are captured then."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is asked for."""

    prompt: int
    room: int
    """Positions beyond the prompt."""
    rows: int
    each: int
    behind: int
    """Tokens that are timed behind the prompt."""
    quarters: int
    """Rows of a quarter of the prompt."""


SCALES = {
    "full": Scale(prompt=131072, room=1024, rows=16, each=1024, behind=64, quarters=4),
    "tiny": Scale(prompt=1536, room=256, rows=4, each=48, behind=16, quarters=2),
}
ENGINES: dict[str, tuple[str, ...]] = {"bound": ("alone", "beside", "quarters"), "default": ("beside",)}
"""What is measured on which engine, most telling first."""


# ------------------------------------------------------------------------------------------------------------- one engine


@dataclass
class Watched:
    """An engine, turn by turn, with the times at which tokens came."""

    driven: Driven
    last: dict[str, float] = field(default_factory=dict)
    """Request -> when its newest token came."""
    gaps: list[tuple[float, float, bool]] = field(default_factory=list)
    """(when a token came, seconds since the one before, whether a graph was captured in that turn)."""
    first: dict[str, float] = field(default_factory=dict)
    came: dict[str, int] = field(default_factory=dict)
    """Request -> how often tokens came."""
    ended: set[str] = field(default_factory=set)
    steps: list[StepDone] = field(default_factory=list)
    captured_s: list[float] = field(default_factory=list)
    """When the steps came in whose turns a graph was captured."""
    _number: int = 0

    def ask(self, tokens: Sequence[int], new: int) -> str:
        """Posts a request; it runs with the next turns."""
        self._number += 1
        name = f"r{self._number}"
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        request = Request(id=name, tokens=tuple(tokens), sampling=sampling, max_tokens=new, seed=self._number)
        self.driven.loop.check(request)
        self.driven.loop.post(Add(request))
        return name

    def turn(self) -> None:
        """One turn of the engine's loop. Raises OutOfTimeError after the deadline, RuntimeError for a request that failed."""
        if time.perf_counter() > self.driven.deadline_s:
            raise OutOfTimeError("no time left")
        before = self.driven.captures
        reports = self.driven.loop.run_once()
        captured = self.driven.captures != before
        for report in reports:
            kind = type(report)
            if kind is StepTokens:
                for name in report.ids:
                    self._came(name, report.at_s, captured)
            elif kind is TokensOut:
                if report.tokens:
                    self._came(report.request_id, report.at_s, captured)
                if report.finish is not None:
                    self.ended.add(report.request_id)
                    if report.finish not in ("length", "abort"):
                        raise RuntimeError(f"a request ended with {report.finish}: {report.error}")
            elif kind is StepDone:
                self.steps.append(report)
                if captured:
                    self.captured_s.append(report.at_s)

    def _came(self, name: str, at_s: float, captured: bool) -> None:
        if name in self.last:
            self.gaps.append((at_s, at_s - self.last[name], captured))
        else:
            self.first[name] = at_s
        self.last[name] = at_s
        self.came[name] = self.came.get(name, 0) + 1

    def until_first(self, name: str) -> None:
        while name not in self.first:
            self.turn()

    def until_end(self, name: str) -> None:
        while name not in self.ended:
            self.turn()

    def cancel(self, names: Sequence[str]) -> None:
        """Ends requests, and what flies with them."""
        for name in names:
            self.driven.loop.post(Cancel(name))
        self.driven.drain()
        self.driven.forget()

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Times between tokens that came in a span, of all rows together, in ms."""
        some = [(gap, captured) for at_s, gap, captured in self.gaps if begin_s < at_s <= end_s]
        gaps = sorted(gap for gap, _ in some)
        if not gaps:
            return {}
        calm = [gap for gap, captured in some if not captured]

        def at(part: float) -> float:
            return 1e3 * gaps[min(len(gaps) - 1, math.ceil(part * len(gaps)) - 1)]

        return {
            "tokens": len(gaps),
            "p50_ms": at(0.5),
            "p90_ms": at(0.9),
            "p99_ms": at(0.99),
            "max_ms": 1e3 * gaps[-1],
            "max_ms_without_captures": 1e3 * max(calm, default=0.0),
        }


class Parts:
    """What is measured on an engine. Every part returns its record."""

    def __init__(
        self, watched: Watched, scale: Scale, *, vocab_size: int, sizes: dict[str, float], limits: dict[str, float]
    ) -> None:
        self.watched, self.scale, self.sizes, self.limits = watched, scale, sizes, limits
        self._vocab, self._seed = vocab_size, 0

    def prompt(self, tokens: int) -> list[int]:
        """A random prompt that no other is alike."""
        import numpy as np

        self._seed += 1
        draw = np.random.default_rng(self._seed)
        return list(map(int, draw.integers(100, self._vocab - 50, tokens)))

    def prefill_floor_s(self, tokens: int) -> dict[str, float]:
        """Operations of a prompt by itself at the matmul rate."""
        linear = 2 * self.sizes["linear_params"] * tokens
        attention = self.sizes["attention_flops_per_square"] * tokens**2
        rate = self.limits["bf16_flops_per_s"]
        return {"linear_s": linear / rate, "attention_s": attention / rate, "floor_s": (linear + attention) / rate}

    def decode_floor_s(self, keys: int) -> float:
        """A step whose rows have so many keys together."""
        read = self.sizes["weight_bytes_per_token"] + keys * self.sizes["kv_bytes_per_token"]
        return read / self.limits["read_bytes_per_s"]

    def warm(self) -> dict[str, Any]:
        """The first steps of each kind, and the kernels and graphs that are made behind them."""
        watched, scale, began = self.watched, self.scale, time.perf_counter()
        names = [watched.ask(self.prompt(scale.each), 8) for _ in range(scale.rows)]
        names.append(watched.ask(self.prompt(min(scale.prompt // 8, 8192)), 8))
        for name in names:
            watched.until_end(name)
        while not watched.driven.prepared and time.perf_counter() - began < SETTLE_S:
            time.sleep(0.05)
        watched.driven.forget()
        return {"took_s": time.perf_counter() - began, "prepared": watched.driven.prepared}

    def alone(self) -> dict[str, Any]:
        """The prompt by itself, then tokens behind it."""
        watched, scale = self.watched, self.scale
        watched.steps.clear()
        prompt = self.prompt(scale.prompt)
        began = time.monotonic()
        name = watched.ask(prompt, scale.behind + 8)
        watched.until_first(name)
        first_s = watched.first[name] - began
        chunks = [(step.prompt_tokens, step.device_s) for step in watched.steps if step.prompt_tokens]
        begin = watched.last[name]
        watched.until_end(name)
        gaps = [gap for at_s, gap, _ in watched.gaps if at_s > begin][4:]
        step_s, floor = statistics.median(gaps), self.prefill_floor_s(scale.prompt)
        decode_s = self.decode_floor_s(scale.prompt + scale.behind // 2)
        watched.driven.forget()
        return {
            "prompt_tokens": scale.prompt,
            "ttft_s": first_s,
            **floor,
            "of_floor": floor["floor_s"] / first_s,
            "flops_per_s": floor["floor_s"] * self.limits["bf16_flops_per_s"] / first_s,
            "steps": len(chunks),
            "device_s": sum(seconds for _, seconds in chunks),
            "chunks": [chunks[0], chunks[len(chunks) // 2], chunks[-1]],
            "decode_ms": 1e3 * step_s,
            "decode_floor_ms": 1e3 * decode_s,
            "decode_of_floor": decode_s / step_s,
        }

    def quarters(self) -> dict[str, Any]:
        """A few rows of a quarter of the prompt each, none of whose keys is another's."""
        watched, scale = self.watched, self.scale
        each = scale.prompt // 4
        new = min(
            16384, scale.prompt + scale.room - each
        )  # more than they get to: the first go on while the last is computed
        names = [watched.ask(self.prompt(each), new) for _ in range(scale.quarters)]
        for name in names:
            watched.until_first(name)
        begin, before = time.monotonic(), sum(watched.came[name] for name in names)
        for _ in range(scale.behind + 8):
            watched.turn()
        if watched.ended.intersection(names):
            raise RuntimeError("a row ended before it was timed")
        gaps = [gap for at_s, gap, captured in watched.gaps if at_s > begin and not captured][2 * scale.quarters :]
        keys = scale.quarters * each + (before + sum(watched.came[name] for name in names)) // 2
        watched.cancel(names)
        floor = self.decode_floor_s(keys)
        step_s = statistics.median(gaps)
        return {
            "rows": scale.quarters,
            "keys": keys,
            "decode_ms": 1e3 * step_s,
            "decode_floor_ms": 1e3 * floor,
            "decode_of_floor": floor / step_s,
        }

    def beside(self) -> dict[str, Any]:
        """Running answers, before, while and after the prompt is computed."""
        watched, scale = self.watched, self.scale
        long = self.prompt(scale.prompt)
        new = min(16384, scale.prompt + scale.room - scale.each)  # more than they get to
        names = [watched.ask(self.prompt(scale.each), new) for _ in range(scale.rows)]
        for name in names:
            watched.until_first(name)
        for _ in range(40):
            watched.turn()
        begin = time.monotonic()
        for _ in range(IDLE_STEPS):
            watched.turn()
        arrived, captures = time.monotonic(), watched.driven.captures
        watched.steps.clear()
        name = watched.ask(long, 1)
        watched.until_end(name)
        done = watched.last[name]
        mixed = [step for step in watched.steps if step.prompt_tokens and name in step.chunk_ids]
        for _ in range(4):
            watched.turn()
        after = time.monotonic()
        for _ in range(IDLE_STEPS):
            watched.turn()
        record: dict[str, Any] = {
            "rows": scale.rows,
            "tokens_each": scale.each,
            "prompt_tokens": scale.prompt,
            "idle": watched.between(begin, arrived),
            "meanwhile": watched.between(arrived, done),
            "afterwards": watched.between(after, time.monotonic()),
            "prefill_s": done - arrived,
            "prefill_floor_s": self.prefill_floor_s(scale.prompt)["floor_s"],
            "steps": len(mixed),
            "graphs_captured": watched.driven.captures - captures,
            "idle_floor_ms": 1e3 * self.decode_floor_s(scale.rows * (scale.each + 140)),
        }
        watched.cancel(names)
        # Answers grow while the prompt is computed, so a step without it takes longer at the end than at the beginning.
        idle, later = record["idle"]["p50_ms"], record["afterwards"]["p50_ms"]
        record["times_idle"] = {
            key: record["meanwhile"][key] / idle for key in ("p50_ms", "p99_ms", "max_ms", "max_ms_without_captures")
        }
        record["times_idle_of_then"] = self.of_then(mixed, idle, later)
        places = {0, len(mixed) // 8, len(mixed) // 4, len(mixed) // 2, 3 * len(mixed) // 4, len(mixed) - 1}
        through, at = 0, {}
        for place, step in enumerate(mixed):
            own = step.chunk_tokens[step.chunk_ids.index(name)]
            if place in places:
                at[through] = (own, 1e3 * step.device_s)
            through += own
        record["chunks"] = [(start, *found) for start, found in at.items()]
        return record

    @staticmethod
    def of_then(mixed: Sequence[StepDone], idle_ms: float, later_ms: float) -> dict[str, float]:
        """Each step's time on the device against a step without the prompt, taken to grow evenly from the first to the last."""
        many = max(1, len(mixed) - 1)
        ratios = sorted(
            1e3 * step.device_s / (idle_ms + (later_ms - idle_ms) * place / many) for place, step in enumerate(mixed)
        )
        if not ratios:
            return {}
        return {"p50": ratios[len(ratios) // 2], "p99": ratios[int(0.99 * (len(ratios) - 1))], "max": ratios[-1]}


def run_engine(arguments: argparse.Namespace) -> int:
    """Builds one engine and measures its parts into the file of results."""
    import gc

    result = json.loads(arguments.out.read_text(encoding="utf-8"))
    record = result["engines"][arguments.engine] = {"parts": {}}
    deadline_s = time.perf_counter() + arguments.seconds
    scale = SCALES[arguments.scale]
    if arguments.backend == "cuda" and arguments.way:
        gpu_options.go_ways(arguments.way)
    stated: dict[str, Any] = {"slowdown": arguments.slowdown} if arguments.engine == "bound" else {}
    pinned: dict[str, Any] = {"backend": arguments.backend, "load_format": "dummy"}
    pinned |= {
        name: gpu_options.parsed_value(value) for name, _, value in (text.partition("=") for text in arguments.means)
    }
    with tempfile.TemporaryDirectory(prefix="tradewind-long-") as folder:
        config = gpu_options.config_of(arguments.model)
        context = scale.prompt + scale.room
        config["max_position_embeddings"] = max(context, config["max_position_embeddings"])
        model = Path(folder) / Path(arguments.model).name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        goals = Goals(model=str(model), max_context=context, means=Means(**pinned), **stated)
        phases = Phases()
        plan, client = opened(goals, phases=phases)
        record["phases"] = [(phase.name, phase.seconds) for phase in phases.done]
        record["reasons"] = {reason.choice: f"{reason.value}: {reason.why}" for reason in plan.reasons}
        sizes = sizes_of(config, quantization="none", kv_format=plan.numerics.kv_format)
        result["sizes"] = sizes
        say(f"{arguments.engine}: {phases.text()}")
        watched = Watched(Driven(client.loop, deadline_s=deadline_s))
        parts = Parts(watched, scale, vocab_size=plan.card.vocab_size, sizes=sizes, limits=result["ceilings"])
        gc.collect()
        try:
            for name in ("warm", *ENGINES[arguments.engine]):
                began = time.perf_counter()
                try:
                    found = getattr(parts, name)()
                except OutOfTimeError:
                    result["skipped"].append(f"{arguments.engine}, {name}: no time left")
                    break
                found["part_s"] = round(time.perf_counter() - began, 2)
                record["parts"][name] = found
                say(f"  {name}: {json.dumps(found, default=float)[:1500]}")
                save(result, arguments.out)
            stats = client.loop.step_times
            record["step_times"] = None if stats is None else repr(stats)
        except Exception as error:
            result["skipped"].append(f"{arguments.engine}: {type(error).__name__}: {str(error)[:300]}")
            raise
        finally:
            save(result, arguments.out)
            try:
                client.close()
            except Exception as error:  # measured is measured
                say(f"closing: {type(error).__name__}: {error}")
    return 0


# ------------------------------------------------------------------------------------------------------------------ main


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--model", help="a folder of benchmarks/models, or any folder (default llama-3.1-8b; tiny: tiny)"
    )
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu", "plain"))
    parser.add_argument("--scale", default="full", choices=sorted(SCALES))
    parser.add_argument("--slowdown", type=float, default=2.0, help="the stated bound (default %(default)s)")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which of them, in order (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=145.0, help="for everything (default %(default)s)")
    parser.add_argument(
        "--way", action="append", default=[], metavar="NAME=VALUE", help="an attention way, as split_prompts=null"
    )
    parser.add_argument("--means", action="append", default=[], metavar="NAME=VALUE", help="pins a choice")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model or {"full": "llama-3.1-8b", "tiny": "tiny"}[arguments.scale]
    if arguments.engine is not None:
        return run_engine(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.perf_counter()
    like = gpu_options.parsed(["--model", arguments.model, "--backend", arguments.backend, "--scale", arguments.scale])
    result: dict[str, Any] = gpu_results.new_result(like) | {
        "kind": "long context", "command": ["long_context.py", *(gpu_results.nameless(word) for word in (argv or sys.argv[1:]))],
        "ways": arguments.way, "means": arguments.means, "slowdown": arguments.slowdown, "engines": {},
    }  # fmt: skip
    result.pop("workloads", None)
    limits = gpu_start.child(like, "--ceilings-only", timeout_s=min(60.0, arguments.seconds))
    if "error" in limits:
        say(f"ceilings: {limits['error']}")
        return 1
    result["card"], result["ceilings"] = limits.pop("card"), limits
    save(result, arguments.out)
    say(f"[{time.perf_counter() - began:5.1f} s] ceilings: {json.dumps(limits)}")
    for name in arguments.engines.split(","):
        left = arguments.seconds - (time.perf_counter() - began)
        if left < 10:
            break
        words = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--engine",
            name,
            "--out",
            str(arguments.out),
            "--seconds",
            f"{left - 5:.1f}",
        ]
        words += ["--model", arguments.model, "--backend", arguments.backend, "--scale", arguments.scale]
        words += ["--slowdown", str(arguments.slowdown)]
        words += [word for way in arguments.way for word in ("--way", way)]
        words += [word for pin in arguments.means for word in ("--means", pin)]
        try:
            code = subprocess.run(words, timeout=left, check=False).returncode
            say(f"[{time.perf_counter() - began:5.1f} s] {name}: exit code {code}")
        except subprocess.TimeoutExpired:
            say(f"{name}: cut")
        except KeyboardInterrupt:
            say("interrupted: what was measured is saved")
            break
    print(table(json.loads(arguments.out.read_text(encoding="utf-8"))))
    return 0


def table(result: dict[str, Any]) -> str:
    """What was found, for people."""
    lines = []
    for name, engine in result["engines"].items():
        parts = engine["parts"]
        if "alone" in parts:
            one = parts["alone"]
            lines.append(
                f"{one['prompt_tokens']} tokens: {one['ttft_s']:.2f} s, floor {one['floor_s']:.2f} s ({100 * one['of_floor']:.0f} %); "
                f"a token behind it {one['decode_ms']:.2f} ms, floor {one['decode_floor_ms']:.2f} ms ({100 * one['decode_of_floor']:.0f} %)"
            )
        if "quarters" in parts:
            one = parts["quarters"]
            lines.append(
                f"{one['rows']} rows of {one['keys']} keys together: {one['decode_ms']:.2f} ms, floor {one['decode_floor_ms']:.2f} ms"
            )
        if "beside" in parts:
            one = parts["beside"]
            idle, then, times = one["idle"], one["meanwhile"], one["times_idle"]
            pace = engine["reasons"].get("pace", "off").partition(":")[0]
            of_then = ", ".join(f"{key} {value:.2f} x" for key, value in one["times_idle_of_then"].items())
            lines.append(
                f"beside {one['rows']} answers ({name}, pace {pace}): prompt done in {one['prefill_s']:.2f} s, {one['steps']} steps"
            )
            lines.append(
                f"  between tokens: idle {idle['p50_ms']:.2f} / {idle['p99_ms']:.2f} ms (p50, p99), afterwards "
                f"{one['afterwards']['p50_ms']:.2f}; meanwhile {then['p50_ms']:.2f} / {then['p99_ms']:.2f} / {then['max_ms']:.2f} (max)"
            )
            lines.append(
                f"  times idle: {times['p50_ms']:.2f} / {times['p99_ms']:.2f} / {times['max_ms']:.2f}, and "
                f"{times['max_ms_without_captures']:.2f} without {one['graphs_captured']} captures; "
                f"steps against the same without: {of_then}"
            )
    lines += [f"skipped: {line}" for line in result["skipped"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
