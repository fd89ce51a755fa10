"""W1-W6 and the start on our engine, in this process: the work that the peers' record in gpu_figures.py was measured with.

    PYTHONPATH=src python benchmarks/gpu_suite.py --model llama-3.1-8b --out benchmarks/results/gpu-llama-3.1-8b.json
    ... --model llama-3.1-8b --quantization fp8 --out ...      ... --model qwen3-0.6b --ablate --out ...
    ... --model deepseek-v2-lite --load-format dummy-one-route --out benchmarks/results/gpu-deepseek-v2-lite-one-route.json
    ... --model llama-3.1-8b --load-format dummy-flat --out benchmarks/results/gpu-llama-3.1-8b-flat.json
    python benchmarks/gpu_suite.py --report benchmarks/results --into docs/performance.md

Weights are dummy (random), prompts random token ids from fixed seeds, answers greedy, of the asked length (end of text ignored) and never
made text. One engine with default goals serves all workloads; its prefix cache is emptied before every timed call but
the cached half of W5.
Refuses to know: peers and demands (gpu_figures). JSON is written after every workload, so that a run that is cut loses nothing.

    ceilings (a process) -> start cold, warm (two processes) -> engine -> W1, W3, W2, W4, W6, W5 -> table, JSON, picture
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import faulthandler
import functools
import gc
import importlib.metadata
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for place in (str(HERE), str(HERE.parent / "src")):
    if place not in sys.path:
        sys.path.insert(0, place)

from tradewind.assemble import build_client, make_plan  # noqa: E402
from tradewind.config.choices import WORDS  # noqa: E402
from tradewind.config.goals import Goals, Means  # noqa: E402
from tradewind.config.plan import Plan  # noqa: E402
from tradewind.contract.errors import UserError  # noqa: E402
from tradewind.contract.events import StepDone, TokensOut  # noqa: E402
from tradewind.contract.kv import BYTES_PER_ELEMENT  # noqa: E402
from tradewind.contract.request import Request, SamplingParams  # noqa: E402
from tradewind.engine.client import LocalClient  # noqa: E402
from tradewind.engine.columns import StepTokens  # noqa: E402
from tradewind.engine.loop import Add, Cancel, EngineLoop, Forget  # noqa: E402
from tradewind.phases import Phases, process_began_s  # noqa: E402

MAX_CONTEXT = 16384
ORDER = ("W1", "W3", "W2", "W4", "W6", "W5")
"""Most telling first: what comes last is lost when time runs out."""
SHORT_ROWS = "1,32,256"
"""W6's batches where a switch is turned."""
FORMAT = 1
START_TIMEOUT_S = 90.0


# ------------------------------------------------------------------------------------------------------------- the work


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is asked. `full` is the agreed work; `tiny` has the same shape and lets the script be tried anywhere."""

    divide: int = 1
    """Lengths and numbers of requests are divided by this."""
    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    repeats: int | None = None
    """Of W6's timed calls; None: three up to 32 rows, two above."""

    def length(self, tokens: int) -> int:
        return max(2, tokens // self.divide)

    def count(self, requests: int) -> int:
        return max(1, requests // self.divide)


SCALES = {"full": Scale(), "tiny": Scale(divide=16, batches=(1, 8), repeats=1)}


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A technique that can be turned off (or a price that can be paid), and the workloads that show its effect."""

    means: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)
    """Constants of kernels/triton/tuning.py that are set instead."""
    works: tuple[str, ...] = ("W1", "W3", "W6")


SWITCHES: dict[str, Switch] = {
    "chunks_of_1024": Switch(means={"max_tokens_per_step": 1024}, works=("W3", "W2")),
    "deterministic": Switch(means={"deterministic": True}),
    "fp8_kv": Switch(means={"kv_format": "fp8"}, works=("W3", "W6")),
    "fusion": Switch(means={"fusion": False}),
    "graphs": Switch(means={"graphs": False}),
    "overlap": Switch(means={"overlap": False}),
    "pdl": Switch(means={"pdl": False}),
    "prefix_cache": Switch(means={"prefix_cache": False}, works=("W5",)),
    "shared_beside": Switch(tuning={"side_tokens": 0}),
}
"""By name; those whose fields `Means` does not have are left out."""


def known_switches() -> dict[str, Switch]:
    """The switches that this version has."""
    return {name: switch for name, switch in SWITCHES.items() if set(switch.means) <= set(Means.__struct_fields__)}


def retune(constants: dict[str, Any]) -> None:
    """Sets constants of every GPU's table, in this process."""
    if constants:
        from tradewind.kernels.triton.tuning import TUNINGS

        TUNINGS.update({gpu: replace(tuned, **constants) for gpu, tuned in TUNINGS.items()})


def sizes_of(
    config: dict[str, Any], *, quantization: str, kv_format: str, load_format: str = "dummy"
) -> dict[str, float]:
    """Parameters of a decoder's matmuls that one token meets, and the bytes that a step must read; changes nothing.

    Of a mixture the experts that a token is sent to: linear_params counts those, total_params all. MLA keeps latents.
    Where all tokens have one route, a step of any size reads the experts of one token.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    rank = config.get("kv_lora_rank")
    if rank:
        nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        key, queries = nope + rope, config.get("q_lora_rank")
        attention = queries * (hidden + heads * key) if queries else hidden * heads * key
        attention += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        kept = rank + rope
    else:
        key = value = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * heads * key + 2 * hidden * kv_heads * key
        kept = 2 * kv_heads * key
    experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    sparse = layers - config.get("first_k_dense_replace", 0) if experts else 0
    linear = layers * attention + 3 * (layers - sparse) * hidden * config["intermediate_size"]
    chosen = idle = 0
    if experts:
        each, per_token = 3 * hidden * config["moe_intermediate_size"], config["num_experts_per_tok"]
        chosen, idle = sparse * per_token * each, sparse * (experts - per_token) * each
        linear += chosen + sparse * ((config.get("n_shared_experts") or 0) * each + hidden * experts)
    visited = config["num_experts_per_tok"] if experts and load_format == "dummy-one-route" else experts
    head, size = hidden * config["vocab_size"], 1 if quantization == "fp8" else 2
    return {
        "linear_params": linear,
        "total_params": linear + idle,
        "head_params": head,
        # The head stays bf16 when the rest is quantised.
        "weight_bytes_per_token": linear * size + 2 * head,
        # A step of more tokens reads more experts: see gpu_figures.weight_bytes.
        "expert_bytes_per_token": chosen * size,
        "experts_each": visited / config["num_experts_per_tok"] if experts else 0,
        "kv_bytes_per_token": layers * kept * BYTES_PER_ELEMENT[kv_format],
        # Scores and values of a causal prompt of S tokens: half of 2 * S^2 * heads * (key + value) in each layer.
        "attention_flops_per_square": layers * heads * (key + value),
    }


# ------------------------------------------------------------------------------------------------------------ the engine


class OutOfTimeError(Exception):
    """The time for the whole run is over."""


def opened(goals: Goals, *, phases: Phases) -> tuple[Plan, LocalClient]:
    """An engine for token ids, without a tokenizer; whoever opens it closes the client."""
    with phases("imports"):
        pass
    planned = make_plan(goals, phases=phases)
    return planned.plan, build_client(planned, phases=phases)


@dataclass
class Driven:
    """An engine that the caller runs turn by turn. Reports are kept as the loop brings them: no Python work for each token."""

    loop: EngineLoop
    deadline_s: float = float("inf")
    """By time.perf_counter; a call that is still running then is ended and raises OutOfTimeError."""
    reports: list[Any] = field(default_factory=list)
    """Of the last call."""
    _number: int = 0

    def generate(self, prompts: Sequence[Sequence[int]], out_lens: Sequence[int], temperature: float = 0.0) -> int:
        """Submits all prompts at once and runs until each has its tokens; returns how many were made. Raises RuntimeError on a failure."""
        loop, reports = self.loop, []
        self.reports = reports
        by_length = {
            tokens: SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
            for tokens in set(out_lens)
        }
        names = []
        for prompt, tokens in zip(prompts, out_lens, strict=True):
            self._number += 1
            name = f"b{self._number}"
            request = Request(
                id=name, tokens=tuple(prompt), sampling=by_length[tokens], max_tokens=tokens, seed=self._number
            )
            loop.check(request)
            loop.post(Add(request))
            names.append(name)
        still, made = len(names), 0
        while still:
            if time.perf_counter() > self.deadline_s:
                for name in names:
                    loop.post(Cancel(name))
                self.drain()
                raise OutOfTimeError(f"ended with {still} of {len(names)} requests open")
            turn = loop.run_once()
            reports += turn
            for report in turn:
                kind = type(report)
                if kind is StepTokens:
                    made += len(report.ids)
                elif kind is TokensOut:
                    made += len(report.tokens)
                    if report.finish is not None:
                        still -= 1
                        if report.finish != "length":
                            raise RuntimeError(f"a request ended with {report.finish}: {report.error}")
        return made

    def drain(self) -> None:
        """Runs until nothing is open and no step flies."""
        while self.loop.busy:
            self.reports += self.loop.run_once()

    def forget(self) -> None:
        """Empties the prefix cache; nothing is open."""
        self.drain()
        self.loop.post(Forget())
        self.drain()

    @property
    def captures(self) -> int:
        """Graphs captured since the start; 0 on an engine that has none."""
        runner = getattr(getattr(self.loop, "_executor", None), "_runner", None)
        return int(getattr(runner, "captures", 0))

    @property
    def prepared(self) -> bool:
        """Whether what goes on behind the start is done: kernels compiled and the graphs of usual steps captured."""
        runner = getattr(getattr(self.loop, "_executor", None), "_runner", None)
        return self.loop.prepared and bool(getattr(runner, "captured_ahead", True))

    def steps(self, wall_s: float) -> dict[str, float]:
        """What the last call's steps were like: medians."""
        done = [report for report in self.reports if type(report) is StepDone]
        if not done:
            return {}
        return {
            "count": len(done),
            "turn_ms": 1e3 * wall_s / len(done),
            "host_us": 1e6 * statistics.median(step.decide_s + step.absorb_s for step in done),
            "device_ms": 1e3 * statistics.median(step.device_s for step in done),
            "rows": statistics.median(step.rows for step in done),
            "tokens": statistics.median(step.tokens for step in done),
            "with_prompt": sum(step.prompt_tokens > 0 for step in done),
            "most_running": max(step.running for step in done),
            "most_pages_used": max(step.pages_used[0] for step in done),
        }


class Suite:
    """The workloads, in the formulas of the peers' record. Raises what Driven raises."""

    def __init__(
        self, driven: Driven, *, vocab_size: int, sizes: dict[str, float], scale: Scale, copy: float | None
    ) -> None:
        self.driven, self.vocab_size, self.sizes, self.scale, self.copy = driven, vocab_size, sizes, scale, copy
        self.steps: dict[str, float] = {}
        self.once = False
        """W2 and W3 are not run a second time."""

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random prompts, clear of special ids at both ends of the vocabulary."""
        draw, high = random.Random(seed), self.vocab_size - 2000
        return [[draw.randrange(100, high) for _ in range(length)] for length in lengths]

    def timed(
        self, prompts: Sequence[Sequence[int]], out_lens: Sequence[int], temperature: float = 0.0, *, keep: bool = False
    ) -> float:
        """Seconds from handing all prompts over until every token is there; the cache is emptied before, unless `keep`."""
        if keep:
            self.driven.drain()
        else:
            self.driven.forget()
        began = time.perf_counter()
        made = self.driven.generate(prompts, out_lens, temperature)
        wall_s = time.perf_counter() - began
        if made != sum(out_lens):
            raise RuntimeError(f"{made} tokens were made, {sum(out_lens)} asked for")
        self.steps = self.driven.steps(wall_s)
        return wall_s

    def warm(self) -> float:
        """The agreed warm-up; returns its seconds."""
        long, many = self.scale.length, self.scale.count
        deadline = time.perf_counter() + 60  # on a new machine kernels are still being compiled behind the first steps
        while not self.driven.prepared and time.perf_counter() < deadline:
            time.sleep(0.1)
        wall_s = self.timed(self.prompts([long(128)] * 4, 1), [long(16)] * 4)
        return wall_s + self.timed(self.prompts([long(1024)] * many(32), 2), [long(16)] * many(32))

    def again(self, prompts: Sequence[Sequence[int]], out_lens: Sequence[int], temperature: float) -> dict[str, float]:
        """The same call a second time: the difference is what the first spent on graphs and kernels that it met for the first time."""
        if self.once:
            return {}
        try:
            wall_s = self.timed(prompts, out_lens, temperature)
        except OutOfTimeError:
            return {}
        return {"wall_again_s": wall_s, "out_tok_s_again": sum(out_lens) / wall_s}

    def W1(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802 - the workloads' agreed names
        """One request at a time: 128 in, 1 or 256 out."""
        before, new = self.scale.length(128), self.scale.length(256)
        for seed in range(3):
            self.timed(self.prompts([before], 100 + seed), [self.scale.length(32)], temperature)
        first = [self.timed(self.prompts([before], 200 + seed), [1], temperature) for seed in range(15)]
        whole = [self.timed(self.prompts([before], 300 + seed), [new], temperature) for seed in range(5)]
        first_s, whole_s = statistics.median(first), statistics.median(whole)
        per_token_s = (whole_s - first_s) / (new - 1)
        record = {
            "ttft_ms": first_s * 1e3,
            "ttft_min_ms": min(first) * 1e3,
            "tpot_ms": per_token_s * 1e3,
            "tok_s": new / whole_s,
            "decode_tok_s": 1 / per_token_s,
            "first_s": first,
            "whole_s": whole,
            "weight_bytes_per_s": self.sizes["weight_bytes_per_token"] / per_token_s,
        }
        if self.copy:
            record["of_copy"] = record["weight_bytes_per_s"] / self.copy
        return record

    def W2(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """512 requests of mixed lengths at once."""
        draw, long = random.Random(42), self.scale.length
        many = self.scale.count(512)
        ins = [draw.randint(long(64), long(1024)) for _ in range(many)]
        outs = [draw.randint(long(64), long(512)) for _ in range(many)]
        prompts = self.prompts(ins, 43)
        wall_s = self.timed(prompts, outs, temperature)
        steps = self.steps
        return {
            "wall_s": wall_s,
            "in_tok": sum(ins),
            "out_tok": sum(outs),
            "out_tok_s": sum(outs) / wall_s,
            "total_tok_s": (sum(ins) + sum(outs)) / wall_s,
            "steps": steps,
            **self.again(prompts, outs, temperature),
        }

    def W3(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """256 equal requests at once: 128 in, 512 out."""
        many, before, new = self.scale.count(256), self.scale.length(128), self.scale.length(512)
        prompts = self.prompts([before] * many, 50)
        wall_s = self.timed(prompts, [new] * many, temperature)
        steps = self.steps
        return {
            "wall_s": wall_s,
            "requests": many,
            "in_each": before,
            "out_each": new,
            "out_tok": many * new,
            "out_tok_s": many * new / wall_s,
            "steps": steps,
            **self.again(prompts, [new] * many, temperature),
        }

    def W4(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """64 prompts of 4096, 16 or 1 out."""
        many, before = self.scale.count(64), self.scale.length(4096)
        prompts = self.prompts([before] * many, 60)
        wall_s = self.timed(prompts, [16] * many, temperature)
        one_s = self.timed(prompts, [1] * many, temperature)
        tokens = many * before
        linear = 2 * self.sizes["linear_params"] * tokens
        attention = self.sizes["attention_flops_per_square"] * many * before**2
        return {
            "wall_s": wall_s,
            "wall_out1_s": one_s,
            "in_tok": tokens,
            "in_tok_s": tokens / wall_s,
            "in_tok_s_out1": tokens / one_s,
            "linear_flops": linear,
            "attention_flops": attention,
            "flops_per_s": (linear + attention) / wall_s,
            "flops_per_s_out1": (linear + attention) / one_s,
        }

    def W5(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """128 requests of a shared 2048 and 128 own: the prefix computed within the run, then cached."""
        many, before, own, new = (
            self.scale.count(128),
            self.scale.length(2048),
            self.scale.length(128),
            self.scale.length(128),
        )
        shared = self.prompts([before], 70)[0]
        wall_s = self.timed([shared + tail for tail in self.prompts([own] * many, 71)], [new] * many, temperature)
        steps = self.steps
        # The second turn finds the prefix, but none of its own tails.
        warm_s = self.timed(
            [shared + tail for tail in self.prompts([own] * many, 72)], [new] * many, temperature, keep=True
        )
        return {
            "wall_s": wall_s,
            "out_tok_s": many * new / wall_s,
            "total_tok_s": many * (new + before + own) / wall_s,
            "wall_warm_s": warm_s,
            "out_tok_s_warm": many * new / warm_s,
            "steps": steps,
        }

    def W6(self, temperature: float = 0.0) -> dict[str, Any]:  # noqa: N802
        """Time of a decode step at about 1k context: (t of 192 out - t of 64 out) / 128, 896 in."""
        before, few, more = (self.scale.length(tokens) for tokens in (896, 64, 192))
        rows = []
        for batch in self.scale.batches:
            prompts = self.prompts([before] * batch, 80 + batch)
            repeats = self.scale.repeats or (3 if batch <= 32 else 2)
            try:
                short = [self.timed(prompts, [few] * batch, temperature) for _ in range(repeats)]
                long = [self.timed(prompts, [more] * batch, temperature) for _ in range(repeats)]
            except OutOfTimeError:
                say(f"    no time left for {batch} rows")
                break
            new = more - few
            rows.append(
                {
                    "batch": batch,
                    "step_ms": (min(long) - min(short)) / new * 1e3,
                    "step_ms_median": (statistics.median(long) - statistics.median(short)) / new * 1e3,
                    "short_s": short,
                    "long_s": long,
                    "steps": self.steps,
                }
            )
            say(f"    {batch} rows: {rows[-1]['step_ms']:.3f} ms a step")
        return {"rows": rows}


# ------------------------------------------------------------------------------------------------------- other processes


def start_only(arguments: argparse.Namespace) -> dict[str, Any]:
    """Builds the engine and answers one request; times are from the start of this process."""
    before = others_bytes() if arguments.compare_memory else None
    phases = Phases(began_s=process_began_s())
    plan, client = opened(goals_of(arguments), phases=phases)
    ready_s = time.perf_counter() - process_began_s()
    vocab = plan.card.vocab_size
    try:
        Driven(client.loop).generate([[100 + i % (vocab - 2100) for i in range(128)]], [1])
        answer_s = time.perf_counter() - process_began_s()
        memory = device_memory() if before is None else compared_memory(plan, before=before)
    finally:
        client.close()
    return {
        "ready_s": ready_s,
        "first_answer_s": answer_s,
        "phases": [(phase.name, phase.seconds) for phase in phases.done],
        "besides": [(phase.name, phase.seconds) for phase in phases.besides],
        "memory": memory,
    }


def ceilings_only(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the device reaches in plain copies, sums and matmuls; the memory is free again when this process ends."""
    import torch

    cuda = arguments.backend == "cuda"
    device = "cuda" if cuda else "cpu"
    n, m = (4 << 30, 8192) if cuda else (1 << 24, 256)

    def seconds(call: Callable[[], Any], *, times: int, inner: int = 1) -> float:
        """Median of `times` measurements of `inner` calls, per call."""
        found = []
        for turn in range(times + 2):
            if cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
            began = time.perf_counter()
            for _ in range(inner):
                call()
            if cuda:
                end.record()
                end.synchronize()
            took = begin.elapsed_time(end) / 1e3 if cuda else time.perf_counter() - began
            if turn >= 2:
                found.append(took / inner)
        return statistics.median(found)

    source = torch.randint(0, 255, (n,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    result: dict[str, Any] = {"copy_bytes_per_s": 2 * n / seconds(lambda: target.copy_(source), times=20)}
    floats, total = source.view(torch.float32), torch.zeros(1, device=device)
    result["read_bytes_per_s"] = n / seconds(lambda: torch.sum(floats, 0, keepdim=True, out=total), times=20)
    source = target = floats = None  # a closure holds them: this frees the memory all the same
    a, b = (torch.randn(m, m, device=device, dtype=torch.bfloat16) for _ in range(2))
    inner = 50 if cuda else 1  # sustained for some 70 ms: a single product runs before the clocks give way
    result["bf16_flops_per_s"] = 2 * m**3 / seconds(lambda: a @ b, times=5, inner=inner)
    try:
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        multiply = torch._scaled_mm

        def product() -> Any:
            return multiply(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=cuda)

        result["fp8_flops_per_s"] = 2 * m**3 / seconds(product, times=5, inner=inner)
    except Exception as error:  # a card without fp8 has no such ceiling
        result["fp8_error"] = repr(error)[:200]
    result["card"] = torch.cuda.get_device_name(0) if cuda else platform.processor() or platform.machine()
    return result


def child(
    arguments: argparse.Namespace, *options: str, timeout_s: float, environment: dict[str, str] | None = None
) -> Any:
    """Runs this script in a process of its own and returns the JSON line that it prints last; {"error": ...} when it fails."""
    command = [sys.executable, str(Path(__file__).resolve()), *same_engine(arguments), *options]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-12:]
        say("\n".join(f"    | {line[:300]}" for line in last))
        return {"error": f"exit code {done.returncode}: {last[-1][:300] if last else 'no message'}"}
    return json.loads(lines[-1])


def same_engine(arguments: argparse.Namespace) -> list[str]:
    """The options that name model and engine, for another process."""
    options = ["--model", arguments.model, "--backend", arguments.backend, "--quantization", arguments.quantization]
    for text in arguments.way:
        options += ["--way", text]
    options += ["--scenario", arguments.scenario, "--load-format", arguments.load_format, "--scale", arguments.scale]
    for name in arguments.off:
        options += ["--off", name]
    for text in arguments.means:
        options += ["--means", text]
    return options


def measure_start(arguments: argparse.Namespace, *, cold_only: bool = False) -> dict[str, Any]:
    """Start to ready in two processes: with empty caches on disk, then with what the first has left there."""
    # As an installer does: where Python may write no bytecode, every process would compile our sources again.
    compileall.compile_dir(HERE.parent / "src", quiet=2, workers=0)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tradewind-cold-") as folder:
        fresh = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": f"{folder}/cache"}
        for name in ("cold",) if cold_only else ("cold", "warm"):
            found[name] = child(arguments, "--start-only", timeout_s=START_TIMEOUT_S, environment=fresh)
            record = found[name]
            say(
                f"  {name}: "
                + (
                    record.get("error")
                    or f"ready in {record['ready_s']:.2f} s, answered in {record['first_answer_s']:.2f} s"
                )
            )
    return found


# --------------------------------------------------------------------------------------------------------------- memory


def device_memory() -> dict[str, int] | None:
    """The device's own figures in bytes, where a GPU is in use; changes nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return {
        "used": total - free,
        "total": total,
        "reserved": torch.cuda.memory_reserved(),
        "allocated": torch.cuda.memory_allocated(),
        "most_allocated": torch.cuda.max_memory_allocated(),
    }


def others_bytes() -> int:
    """What is in use on the device before this process touches it; 0 where that cannot be asked."""
    used = asked_of_driver("memory.used")
    return int(used) << 20 if used and used.isdigit() else 0


def asked_of_driver(field: str) -> str | None:
    """One value of the first GPU from nvidia-smi; None where there is none."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, IndexError, subprocess.SubprocessError):
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    return None


HOST_LINES = ("process", "tokenizer", "host")
"""Lines of a ledger whose names begin so lie in host memory."""


def device_lines(plan: Plan) -> list[Any]:
    """The ledger's lines that are device memory."""
    return [line for line in plan.ledger if not line.name.startswith(HOST_LINES)]


def compared_memory(plan: Plan, *, before: int) -> dict[str, Any] | None:
    """The ledger against what the device says is in use by this process (its context included)."""
    found = device_memory()
    if found is None:
        return None
    planned = sum(line.bytes for line in device_lines(plan))
    return {"planned_bytes": planned, "used_bytes": found["used"] - before, "before_bytes": before, **found}


# ----------------------------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; returns the exit code."""
    arguments = parsed(argv)
    if arguments.way:
        go_ways(arguments.way)
    if arguments.start_only or arguments.ceilings_only:
        print(
            json.dumps(start_only(arguments) if arguments.start_only else ceilings_only(arguments), default=float),
            flush=True,
        )
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    import gpu_figures

    if arguments.report is not None:
        return report(arguments.report, into=arguments.into)
    result = new_result(arguments)
    try:
        (ablate if arguments.ablate else measure)(arguments, result)
    except UserError as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        result["skipped"].append("everything after an interruption")
    save(result, arguments.out)
    if arguments.ablate:
        print(gpu_figures.ablation_table(result))
    else:
        print(gpu_figures.section(result))
        if arguments.out is not None:
            try:
                gpu_figures.draw(result, arguments.out.with_suffix(".png"))
            except Exception as error:  # a picture less is no reason to lose the figures
                say(f"no picture: {type(error).__name__}: {error}")
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models, or any folder")
    parser.add_argument("--quantization", default="none", help="of the weights at load: none or fp8")
    parser.add_argument(
        "--workloads", help=f"default {','.join(ORDER)}; a name may carry :t1, temperature 1 instead of greedy"
    )
    parser.add_argument("--out", type=Path, help="JSON; a picture of the same name is put beside it")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu", "plain"))
    parser.add_argument("--load-format", default="dummy", choices=WORDS["load_format"])
    parser.add_argument("--scenario", default="balanced")
    parser.add_argument("--scale", default="full", choices=sorted(SCALES))
    parser.add_argument("--rows", help="batches of W6, comma-separated")
    parser.add_argument("--repeats", type=int, help="of W6's timed calls")
    parser.add_argument(
        "--means", action="append", default=[], metavar="NAME=VALUE", help="pins a choice; may be repeated"
    )
    parser.add_argument(
        "--off", action="append", default=[], metavar="NAME", help=f"one of {', '.join(known_switches())}"
    )
    parser.add_argument(
        "--way", action="append", default=[], metavar="NAME=VALUE", help="of AttentionWays, JSON values: null or [] turns one off"
    )  # fmt: skip
    parser.add_argument("--ablate", action="store_true", help="each switch against none, each in a process of its own")
    parser.add_argument("--switches", help="those that --ablate turns, comma-separated")
    parser.add_argument(
        "--minutes", type=float, default=8.7, help="no workload goes on after this (default %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="run W2 and W3 once, not a second time")
    parser.add_argument("--no-start", action="store_true", help="do not measure the start")
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure the card")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only print tables of the gpu-*.json there")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="with --report: renew the figures in this page")
    parser.add_argument("--start-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compare-memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ceilings-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for name in arguments.off:
        if name not in known_switches():
            parser.error(f"--off {name}: there are {', '.join(known_switches())}")
    if arguments.workloads is None:
        arguments.workloads = ",".join(ORDER)
        if arguments.off:  # the short set that shows the switches' effect
            wanted = {work for name in arguments.off for work in known_switches()[name].works}
            arguments.workloads = ",".join(work for work in ORDER if work in wanted)
            arguments.rows = arguments.rows or (SHORT_ROWS if arguments.scale == "full" else None)
            arguments.repeats, arguments.no_start = arguments.repeats or 1, True
    return arguments


def goals_of(arguments: argparse.Namespace) -> Goals:
    """What the engine is asked for: a balanced engine of 16k context, with what the options pin."""
    folder = model_folder(arguments.model)
    pinned: dict[str, Any] = {"backend": arguments.backend}
    if arguments.load_format != "auto":
        pinned["load_format"] = arguments.load_format
    if arguments.quantization != "none":
        pinned["quantization"] = arguments.quantization
    for name in arguments.off:
        pinned |= known_switches()[name].means
        retune(known_switches()[name].tuning)
    for text in arguments.means:
        name, _, value = text.partition("=")
        pinned[name] = parsed_value(value)
    longest = int(config_of(arguments.model).get("max_position_embeddings", MAX_CONTEXT))
    return Goals(
        model=str(folder), scenario=arguments.scenario, max_context=min(MAX_CONTEXT, longest), means=Means(**pinned)
    )


def go_ways(texts: Sequence[str]) -> None:
    """Every GPU op set that this process makes from now on computes attention these ways."""
    from tradewind.kernels.triton import ops
    from tradewind.kernels.triton.tuning import AttentionWays

    values: dict[str, Any] = {name: parsed_value(value) for name, _, value in (text.partition("=") for text in texts)}
    ways = AttentionWays(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    ops.CudaOps = functools.partial(ops.CudaOps, ways=ways)  # type: ignore[misc, assignment]


def parsed_value(text: str) -> Any:
    """true, false and numbers as what they are, everything else as text."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def model_folder(name: str) -> Path:
    """The folder of one of our configs, or a folder as it was named."""
    own = HERE / "models" / name
    return own if (own / "config.json").is_file() else Path(name)


def config_of(name: str) -> dict[str, Any]:
    """The model's config.json."""
    found: dict[str, Any] = json.loads((model_folder(name) / "config.json").read_text(encoding="utf-8"))
    return found


def new_result(arguments: argparse.Namespace) -> dict[str, Any]:
    """A result with nothing measured yet."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(__file__).name, *(nameless(word) for word in sys.argv[1:])],
        "kind": "ablation" if arguments.ablate else "suite",
        "model": Path(arguments.model).name,
        "quantization": arguments.quantization,
        "load_format": arguments.load_format,
        "backend": arguments.backend,
        "scale": arguments.scale,
        "off": arguments.off,
        "means": arguments.means,
        "ways": arguments.way,
        "card": platform.machine(),
        "versions": versions(),
        "workloads": {},
        "skipped": [],
    }


def versions() -> dict[str, str]:
    """Of Python, the libraries that matter and the driver, as far as they are there."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    driver = asked_of_driver("driver_version")
    return found | ({"driver": driver} if driver else {})


def nameless(word: str) -> str:
    """An argument without the place on this machine: results are read elsewhere."""
    return Path(word).name if word.startswith(("/", "~", "..")) else word


def measure(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Everything of one model, most telling first; fills `result` and saves it after every part."""
    began = time.perf_counter()
    deadline_s = began + 60 * arguments.minutes
    # Where a step never ends nothing else can end it: where it stands is printed, and what was measured is saved already.
    faulthandler.dump_traceback_later(60 * arguments.minutes + 15, exit=True)

    def done(what: str) -> None:
        say(f"[{time.perf_counter() - began:6.1f} s] {what}")
        save(result, arguments.out)

    if not arguments.no_ceilings:
        found = child(arguments, "--ceilings-only", timeout_s=120)
        if "error" in found:
            result["skipped"].append(f"ceilings: {found['error']}")
        else:
            result["card"] = found.pop("card")
            result["ceilings"] = found
        done(f"ceilings: {json.dumps(found)}")
    if not arguments.no_start:
        result["start"] = measure_start(arguments)
        result["skipped"] += [f"start, {k}: {v['error']}" for k, v in result["start"].items() if "error" in v]
        done("start")
    before = others_bytes() if arguments.backend == "cuda" else 0
    phases = Phases()
    plan, client = opened(goals_of(arguments), phases=phases)
    result["phases"] = [(phase.name, phase.seconds) for phase in phases.done]
    try:
        describe(plan, arguments, result)
        done(f"engine: {phases.text()}")
        suite = suite_of(plan, client, arguments, result, deadline_s=deadline_s)
        run_works(suite, arguments, result, done=done)
        result["memory"] = compared_memory(plan, before=before)
    finally:
        with contextlib.suppress(Exception):
            client.close()
    done("all")
    faulthandler.cancel_dump_traceback_later()


def describe(plan: Plan, arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Puts the plan into the result."""
    result["reasons"] = {reason.choice: f"{reason.value}: {reason.why}" for reason in plan.reasons}
    result["ledger"] = [[line.name, line.bytes, line.how] for line in plan.ledger]
    result["sizes"] = sizes_of(
        config_of(arguments.model),
        quantization=arguments.quantization,
        kv_format=plan.numerics.kv_format,
        load_format=plan.load_format,
    )
    for reason in plan.reasons:
        say(f"    {reason.choice} = {reason.value}")


def suite_of(
    plan: Plan, client: LocalClient, arguments: argparse.Namespace, result: dict[str, Any], *, deadline_s: float
) -> Suite:
    """The workloads over an engine."""
    scale = SCALES[arguments.scale]
    scale = Scale(
        divide=scale.divide,
        batches=tuple(map(int, arguments.rows.split(","))) if arguments.rows else scale.batches,
        repeats=arguments.repeats or scale.repeats,
    )
    driven = Driven(client.loop, deadline_s=deadline_s)
    copy = result.get("ceilings", {}).get("copy_bytes_per_s")
    suite = Suite(driven, vocab_size=plan.card.vocab_size, sizes=result["sizes"], scale=scale, copy=copy)
    suite.once = arguments.once
    return suite


def run_works(
    suite: Suite, arguments: argparse.Namespace, result: dict[str, Any], *, done: Callable[[str], None]
) -> None:
    """Warms up, then runs the asked workloads into `result`. One that fails is said there, and the others go on."""
    gc.collect()
    names = [name for name in arguments.workloads.split(",") if name]
    for name in ["warm", *names]:
        base, _, mode = name.partition(":")
        began, captured = time.perf_counter(), suite.driven.captures
        if began > suite.driven.deadline_s:
            result["skipped"].append(f"{name}: no time left")
            continue
        try:
            if name == "warm":
                result["warm_s"] = suite.warm()
                done(f"warm-up {result['warm_s']:.2f} s")
                continue
            record = getattr(suite, base)(1.0 if mode == "t1" else 0.0)
            record.setdefault("steps", suite.steps)
        except Exception as error:
            result["skipped"].append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            done(result["skipped"][-1])
            if suite.driven.loop.dead is not None:
                break
            continue
        record["graphs_captured"] = suite.driven.captures - captured
        record["took_s"] = round(time.perf_counter() - began, 2)
        result["workloads"][name] = record
        shown = {key: value for key, value in record.items() if isinstance(value, float)}
        done(f"{name}: " + ", ".join(f"{key} {value:.5g}" for key, value in shown.items()))


def ablate(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """The short workloads with everything on and with each switch turned, each in its own process: none leaves memory behind."""
    switches = known_switches()
    chosen = arguments.switches.split(",") if arguments.switches else list(switches)
    every = [name for name in ORDER if any(name in switches[switch].works for switch in chosen)]
    result["runs"] = {}
    deadline_s = time.perf_counter() + 60 * arguments.minutes
    rows = arguments.rows or (SHORT_ROWS if arguments.scale == "full" else "1,8")
    for name in ("none", *chosen):
        left_s = deadline_s - time.perf_counter()
        if left_s < 20:
            result["skipped"].append(f"{name}: no time left")
            continue
        with tempfile.TemporaryDirectory(prefix="tradewind-off-") as folder:
            out = Path(folder) / "run.json"
            options = ["--workloads", ",".join(every if name == "none" else switches[name].works), "--out", str(out)]
            options += ["--rows", rows, "--repeats", str(arguments.repeats or 1), "--no-start", "--no-ceilings"]
            options += ["--minutes", f"{left_s / 60 - 0.1:.3f}", *(["--off", name] if name != "none" else [])]
            began = time.perf_counter()
            command = [sys.executable, str(Path(__file__).resolve()), *same_engine(arguments), *options]
            try:
                done = subprocess.run(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=left_s, check=False
                )
                last = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
                failed = f"exit code {done.returncode}: {last}" if done.returncode else None
            except subprocess.TimeoutExpired:
                failed = f"not done after {left_s:.0f} s"
            run: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
            if failed:
                run["error"] = failed
            run["turned"] = {} if name == "none" else switches[name].means | switches[name].tuning
            result["runs"][name] = {
                key: run[key] for key in ("turned", "workloads", "reasons", "skipped", "phases", "error") if key in run
            }
        say(f"{name}: {time.perf_counter() - began:.1f} s, {failed or 'done'} {'; '.join(run.get('skipped', ()))}")
        save(result, arguments.out)


def save(result: dict[str, Any], path: Path | None) -> None:
    """Writes the JSON whole or not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(result, indent=1, default=float) + "\n", encoding="utf-8")
    beside.replace(path)


BEGIN, END = "<!-- figures: begin (written by benchmarks/gpu_suite.py --report) -->", "<!-- figures: end -->"


def report(folder: Path, *, into: Path | None) -> int:
    """Prints the tables of all results of a folder, newest last; `into` takes them between its two marks instead."""
    import gpu_figures

    paths = sorted(folder.glob("gpu-*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    # Runs with choices pinned or with less work are experiments, not results.
    suites = [one for one in found if one.get("kind") == "suite" and one["scale"] == "full"]
    suites = [one for one in suites if not one["off"] and not one["means"]]
    # The newest run of a model (and kind of weights) is the one that counts.
    latest = {gpu_figures.title_of(one): one for one in sorted(suites, key=lambda one: one["date"])}
    results = [latest[title] for title in sorted(latest)]
    parts = [gpu_figures.short_table(results), ""] if results else ["No result yet.", ""]
    parts += [gpu_figures.section(one) + "\n" for one in results]
    for one in found:
        if one.get("kind") == "ablation":
            parts += [
                f"### Techniques, turned one at a time: {gpu_figures.title_of(one)}",
                "",
                gpu_figures.ablation_table(one),
                "",
            ]
    for path, one in zip(paths, found, strict=True):
        if one.get("kind") == "trace":
            drawn = path.with_suffix(".png")
            # Links are from the page that takes the figures.
            picture = os.path.relpath(drawn, (into or folder / "x").parent) if drawn.is_file() else None
            parts += [gpu_figures.trace_section(one, picture=picture), ""]
        elif one.get("kind") == "check":
            parts += [gpu_figures.check_section(one), ""]
    text = "\n".join(parts).rstrip() + "\n"
    if into is None:
        print(text)
        return 0
    page = into.read_text(encoding="utf-8")
    head, mark, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        print(f"gpu_suite: {into} lacks the lines '{BEGIN}' and '{END}'", file=sys.stderr)
        return 2
    into.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{tail}", encoding="utf-8")
    return 0


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
