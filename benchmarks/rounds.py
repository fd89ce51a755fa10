"""What the scripts of candidates on one GPU share: kernels.py, and *_rounds.py with the questions that are open.

Knows: their command line, tensors of a run, how a candidate is compiled ahead, checked and timed, the ceilings of the same card in the
same run, the record and the table. Refuses to know: which candidates there are, what is true of them, and kernels, except the one whose
reads are a ceiling. Times are those of a CUDA graph that runs the op on enough different buffers to defeat the L2 cache.

    --only a,b     some groups          --dry          no GPU: compiles every candidate for sm_90, runs none
    --shards n     compiles candidates in n processes before it measures
    --seconds s    no candidate begins later than this
    --out FILE     the record as JSON, written after every op: a run that is cut leaves what it has
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from tradewind.kernels.triton import skinny
from tradewind.kernels.triton.tuning import GemvConfig

BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
COLD_BYTES = 400e6
"""Buffers in rotation hold at least this much: several times the L2."""
LIBRARIES = ("cublas", "torch", "FlashAttention")
"""A candidate whose name has one of these is another's kernel: it is told beside ours."""


@dataclass(frozen=True)
class Case:
    """One candidate of one op at one shape."""

    group: str
    op: str
    candidate: str
    calls: list[Callable[[], object]]
    """The op on different buffers, all of one shape; timed together in one graph."""
    bytes: float = 0.0
    """What one call must read and write."""
    flops: float = 0.0
    error: Callable[[], float] | None = None
    tolerance: float = 1e-2
    off: bool = False
    """What is done today, or stands for it: the others are told against it."""
    config: object = None
    key: tuple = ()
    """Whole steps ask for the constants that were the best of a key."""


@dataclass(frozen=True)
class Result:
    """What is recorded of a case."""

    group: str
    op: str
    candidate: str
    us: float
    gb_per_s: float
    tflop_per_s: float
    fraction: float
    """Of the read bandwidth, or of the matmul rate, whichever is nearer its ceiling."""
    error: float | None
    note: str
    """Why there is no time, or that the error is too large; empty when all is well."""
    off: bool
    floor_us: float
    """The greater of the bytes at the read bandwidth and the operations at the matmul rate."""
    times_faster: float | None = None
    """Than what is off; None until that was measured."""


class Bench:
    """Holds the device and how to make tensors on it; in a dry run they are uninitialised host tensors."""

    def __init__(self, *, device: str, dry: bool) -> None:
        self.device, self.dry = device, dry

    def empty(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def full(self, count: int, value: int) -> torch.Tensor:
        """[count] int32, all of one value: lengths, or how many rows are live."""
        return torch.full((count,), value, dtype=torch.int32, device=self.device)

    def normal(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        if self.dry:
            return self.empty(*shape, dtype=dtype)
        if dtype == FP8:
            return (torch.randn(shape, device=self.device, dtype=BF16) * scale).clamp_(-448, 448).to(FP8)
        return torch.randn(shape, device=self.device, dtype=dtype) * scale

    def table(self, rows: int, pages_per_row: int) -> tuple[torch.Tensor, int]:
        """A page table [rows, pages_per_row] of scattered pages, and how many pages there are (page 0 is unused)."""
        count = rows * pages_per_row + 1
        if self.dry:
            return self.zeros(rows, pages_per_row), count
        return (torch.randperm(count - 1, device=self.device) + 1).int().view(rows, pages_per_row), count

    def angles(self, dim: int, positions: int = 8192) -> torch.Tensor:
        inverse = 500000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
        return torch.cat([angle.cos(), angle.sin()], 1).float().to(self.device)


def copies(bytes_each: float, *, most: int = 64) -> int:
    return max(2, min(most, int(COLD_BYTES / bytes_each) + 1))


def tag(config) -> str:
    kind = type(config).__name__.removesuffix("Config").lower()
    return f"{kind}({','.join(str(value) for value in asdict(config).values())})"


def difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    found, truth = found.double(), truth.double()
    return ((found - truth).norm() / truth.norm()).item()


def written(call: Callable[..., object], like: torch.Tensor, truth: torch.Tensor, part: Any = slice(None)) -> float:
    """The error of a part of what `call(out=...)` writes into a tensor of this form; NaN if any element is not written."""
    out = torch.full_like(like, float("nan"))
    call(out=out)
    return difference(out[part], truth) if out.isfinite().all() else math.nan


# ------------------------------------------------------------------------------------------------------------- timing


def graph_us(calls: list[Callable[[], object]], *, budget_ms: float = 40.0) -> float:
    """Microseconds per call in a replayed CUDA graph of all calls; the median of five batches of replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()

    def timed(replays: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / replays

    once = max(timed(1), 1e-3)
    replays = max(1, min(50, int(budget_ms / 5 / once)))
    return statistics.median(timed(replays) for _ in range(5)) * 1e3 / len(calls)


def launched_us(call: Callable[[], object], repeats: int = 10) -> float:
    """Microseconds of one long call launched without a graph; the median."""
    call()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found)


def ceilings() -> dict[str, float]:
    """Copy and read bandwidth in bytes/s, bf16 and fp8 matmul in FLOP/s, measured now."""
    x, y = torch.randn(2**31, device="cuda"), torch.empty(2**31, device="cuda")  # 8.6 GB each
    # Not in a graph: as a graph node the same copy moved 2.7 TB/s only (seen on an H200; probably the copy engines).
    found = {"copy": 2 * x.numel() * 4 / (launched_us(lambda: y.copy_(x)) * 1e-6)}
    out = torch.zeros(1, device="cuda")
    found["read_torch_sum"] = x.numel() * 4 / (graph_us([lambda: torch.sum(x, 0, keepdim=True, out=out)]) * 1e-6)
    x = y = None
    rows = 2**18 - 8
    w = torch.randn(rows, 8192, device="cuda", dtype=BF16)  # 4.3 GB through the GEMV itself
    v, o = torch.randn(1, 8192, device="cuda", dtype=BF16), torch.empty(1, rows, device="cuda", dtype=BF16)
    best = min(
        graph_us([lambda c=c: skinny.skinny_linear(v, w, out=o, config=c)])
        for c in (GemvConfig(4, 1024, 4), GemvConfig(4, 2048, 4))
    )
    found["read_gemv"] = w.numel() * 2 / (best * 1e-6)
    found["read"] = max(found["read_torch_sum"], found["read_gemv"])
    w = None
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    found["bf16"] = 2 * 8192**3 / (graph_us([lambda: torch.mm(a, b.T)], budget_ms=200) * 1e-6)
    a8, b8, one = a.to(FP8), b.to(FP8), torch.ones(1, device="cuda")
    scaled = partial(torch._scaled_mm, a8, b8.T, one, one, out_dtype=BF16, use_fast_accum=True)
    found["fp8"] = 2 * 8192**3 / (graph_us([scaled], budget_ms=200) * 1e-6)
    return found


def told(problem: Exception, most: int = 200) -> str:
    return f"{type(problem).__name__}: {str(problem)[:most]}"


def measured(case: Case, limits: Mapping[str, float]) -> Result:
    """Checks a candidate, then times it. A failure is a row of the result, not the end of the run."""
    error, us, note = None, 0.0, ""
    try:
        if case.error is not None:
            error = case.error()
            torch.cuda.synchronize()
        us = graph_us(case.calls)
        if error is not None and not error < case.tolerance:
            note = f"WRONG: error {error:.2e} > {case.tolerance:.0e}"
    except Exception as problem:
        note = told(problem)
    rate, speed = (case.bytes / us / 1e-6, case.flops / us / 1e-6) if us else (0.0, 0.0)
    return Result(
        group=case.group, op=case.op, candidate=case.candidate, us=us, gb_per_s=rate / 1e9, tflop_per_s=speed / 1e12,
        fraction=max(rate / limits["read"], speed / limits["bf16"]), error=error, note=note, off=case.off,
        floor_us=1e6 * max(case.bytes / limits["read"], case.flops / limits["bf16"]),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- compiling


def dry_driver() -> None:
    """Lets Triton compile for sm_90 on a machine without a GPU; a launch compiles and does nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Compiler:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def get_active_torch_device(self):
            return torch.device("cpu")

    driver.set_active(Compiler())
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only


def compile_all(cases: Iterable[Case], *, shard: int | None, shards: int) -> int:
    """Compiles every case, or of every `shards` the one at `shard`, and says what failed; returns how many did."""
    began, seen, failed = time.perf_counter(), 0, 0
    for index, case in enumerate(cases):
        if shard is not None and index % shards != shard:
            continue
        seen += 1
        try:
            case.calls[0]()
        except Exception as problem:
            failed += 1
            print(f"{case.op} {case.candidate}: {told(problem, 300)}", flush=True)
    print(f"compiled {seen} candidates, {failed} failed, in {time.perf_counter() - began:.0f} s", flush=True)
    return failed


def compile_in_shards(shards: int) -> None:
    """Runs this same command in so many processes that compile a part each; Triton's cache on disk keeps what they made."""
    words = [sys.executable, *sys.argv, "--shard"]
    running = [subprocess.Popen([*words, str(shard)], stdout=subprocess.DEVNULL) for shard in range(shards)]
    for process in running:
        process.wait()


# ------------------------------------------------------------------------------------------------------------ one run


def parser(
    about: str | None, *, groups: Iterable[str], default: str | None = None, seconds: float = math.inf, best: int = 2
) -> argparse.ArgumentParser:
    """The command line; a script may add to it. `default`: groups of a plain run, all when None."""
    known = tuple(groups)

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(f"no group {', '.join(unknown)}; there are {', '.join(known)}")
        return found

    made = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    made.add_argument("--only", type=names, default=default or ",".join(known), help="groups (default %(default)s)")
    made.add_argument("--dry", action="store_true", help="no GPU: compile every candidate for sm_90, run none")
    made.add_argument("--seconds", type=float, default=seconds, help="no candidate begins later (default %(default)s)")
    made.add_argument("--shards", type=int, default=0, help="processes that compile before this one measures")
    made.add_argument("--shard", type=int, default=None, help="(internal) compile every n-th candidate and leave")
    made.add_argument("--best", type=int, default=best, help="candidates to print of an op (default %(default)s)")
    made.add_argument("--trace", action="store_true", help="name every candidate before it runs")
    made.add_argument("--out", type=Path, help="write the record as JSON here")
    return made


def bench_for(args: argparse.Namespace) -> Bench:
    """Where this run's tensors lie. With --dry this process compiles and launches nothing from now on."""
    if args.dry:
        dry_driver()
    return Bench(device="cpu" if args.dry else "cuda", dry=args.dry or args.shard is not None)


def of_groups(table: Mapping[str, Callable[[Bench], Iterator[Case]]], names: list[str], bench: Bench) -> Iterator[Case]:
    """Cases group by group; what one group held is given back before the next."""
    for name in names:
        if name in table:
            yield from table[name](bench)
            settle(bench)


def settle(bench: Bench) -> None:
    """Gives memory that nothing holds back to the device."""
    if not bench.dry and bench.device == "cuda":
        torch.cuda.empty_cache()


class Round:
    """A run on the card: measures cases, prints the table, and is the one writer of the record."""

    def __init__(
        self, args: argparse.Namespace, *, limits: dict[str, float], began: float, head: dict[str, Any]
    ) -> None:
        self.args, self.limits, self.began, self.head = args, limits, began, head
        self.results: list[Result] = []
        self.cut = False
        self._off_us: dict[str, float] = {}
        self._timed: dict[tuple, list[tuple[float, object]]] = {}

    @classmethod
    def begin(cls, args: argparse.Namespace, head: dict[str, Any] | None = None) -> Round:
        """Compiles in shards if that is asked for, then measures the ceilings. head: what else the record says first."""
        began = time.perf_counter()
        if args.shards:
            compile_in_shards(args.shards)
            print(f"# compiled in {time.perf_counter() - began:.0f} s", flush=True)
        limits = ceilings()
        print(
            "# ceilings: " + ", ".join(f"{name} {value / 1e12:.3f} T/s" for name, value in limits.items()), flush=True
        )
        return cls(args, limits=limits, began=began, head=head or {})

    def spent(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.began

    def measure(self, cases: Iterable[Case]) -> None:
        """All cases until the time is over; after each op its table is printed and the record written."""
        for case in cases:
            if self.spent() > self.args.seconds:
                self.cut = True
                print(f"# time is over: {case.op} and what follows is left out", flush=True)
                break
            if self.args.trace:
                print(f"{self.spent():.1f} {case.op} {case.candidate}", flush=True)
            result = measured(case, self.limits)
            if case.off and result.us:
                self._off_us[case.op] = result.us
            if result.us and case.op in self._off_us:
                result = replace(result, times_faster=self._off_us[case.op] / result.us)
            if self.results and self.results[-1].op != case.op:
                self._end_op()
            self.results.append(result)
            if case.key and not result.note:
                self._timed.setdefault(case.key, []).append((result.us, case.config))
        if self.results:
            self._end_op()
        print(f"# {len(self.results)} candidates by {self.spent():.0f} s", flush=True)

    def best(self) -> dict[tuple, list]:
        """Constants that were right, by key, the fastest first."""
        return {key: [c for _, c in sorted(found, key=lambda pair: pair[0])] for key, found in self._timed.items()}

    def save(self, **more: Any) -> None:
        """Writes the record if --out was given; `more` are parts of it beside the ops."""
        if self.args.out is None:
            return
        command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
        record = self.head | {
            "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "command": command,
            "date": time.strftime("%Y-%m-%d"), "ceilings": self.limits, "ops": [asdict(result) for result in self.results],
            **more, "cut": self.cut, "seconds": self.spent(),
        }  # fmt: skip
        self.args.out.write_text(json.dumps(record, indent=1) + "\n")

    def _end_op(self) -> None:
        """Prints what is off, libraries and our best of the last op, and what failed; writes the record."""
        of_op = [result for result in self.results if result.op == self.results[-1].op]
        ranked = sorted((result for result in of_op if not result.note), key=lambda result: result.us)
        for place, r in enumerate(ranked):
            if place < self.args.best or r.off or any(name in r.candidate for name in LIBRARIES):
                error = "" if r.error is None else f"error {r.error:.1e}"
                faster = "" if r.off or r.times_faster is None else f"{r.times_faster:.2f}x"
                print(
                    f"{'off' if r.off else 'on ':3} {r.op:44} {r.candidate:52} {r.us:9.2f} us, floor {r.floor_us:8.2f} {faster:>7} "
                    f"{r.gb_per_s:6.0f} GB/s {r.tflop_per_s:6.1f} TF/s {r.fraction:5.2f} {error}",
                    flush=True,
                )
        for r in of_op:
            if r.note:
                print(f"!   {r.op} {r.candidate}: {r.note}", flush=True)
        self.save()


def run(
    args: argparse.Namespace, cases: Callable[[Bench], Iterator[Case]], *, head: dict[str, Any] | None = None
) -> int:
    """What a script does whose groups are all it has: compiles them, or measures them. Returns the exit status."""
    bench = bench_for(args)
    if bench.dry:
        return min(1, compile_all(cases(bench), shard=args.shard, shards=args.shards))
    Round.begin(args, head).measure(cases(bench))
    return 0
