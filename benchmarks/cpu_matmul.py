"""Speed of the packed CPU matmuls, beside the ceilings of the machine measured in the same run.

One row: bytes of weights per second, against the read bandwidth over as much memory. Many rows: multiply-accumulates (2 operations each)
per second, against a loop of nothing but the format's dot instruction. Each figure is the best of several repeats, since neighbours on a
shared machine only ever slow things down; the ceilings are taken again beside each figure for the same reason.

    python benchmarks/cpu_matmul.py [--formats Q4_1,Q8_0,bf16] [--rows 1,8,16,64,512] [--threads 2] [--library PATH]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tradewind.kernels.cpu import matrix
from tradewind.kernels.ops import PackedMatrix
from tradewind.quantization.blocks import BLOCKS

SHAPES = {
    "qkv 960x576": (960, 576, False),
    "out 576x576": (576, 576, False),
    "gate+up 3072x576": (1536, 576, True),
    "down 576x1536": (576, 1536, False),
}
HEAD = ("head 49152x576", (49152, 576, False))
PROBED = 3
"""The instruction set (csrc/runtime.h) that csrc/gemm_probe.cpp has loops for."""
MEMORY_BYTES = 96 << 20
"""Weights that one-row runs walk through, so that no cache holds them: about the size of the model."""


class Machine:
    """A team of threads on the library, and its clock."""

    def __init__(self, path: Path, *, threads: int, isa: int | None) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.tw_team_new.restype = ctypes.c_void_p
        self.lib.tw_op_name.restype = ctypes.c_char_p
        self.ids = {self.lib.tw_op_name(i).decode(): i for i in range(self.lib.tw_op_count())}
        self.best_isa = self.lib.tw_detect_isa()
        self.isa = self.best_isa if isa is None else min(isa, self.best_isa)
        self.threads = threads
        others = set(os.listdir("/proc/self/task"))
        self.team = ctypes.c_void_p(self.lib.tw_team_new(threads, self.isa))
        # A thread to a core: two threads that spin on one core measure the scheduler.
        workers = sorted(int(task) for task in set(os.listdir("/proc/self/task")) - others)
        cores = sorted(os.sched_getaffinity(0))
        for task, core in zip([0, *workers], cores, strict=False):
            os.sched_setaffinity(task, {core})
        self.sink = np.zeros(threads, np.int32)

    def tape(self, calls: Sequence[tuple[str, Sequence[int]]]) -> Callable[[], None]:
        words = np.array(
            [word for name, arguments in calls for word in (self.ids[name], len(arguments), *arguments)], np.int64
        )

        def run() -> None:
            self.lib.tw_team_run(self.team, ctypes.c_void_p(words.ctypes.data), ctypes.c_int64(len(calls)))

        return run

    def probe(self, name: str, *arguments: int, repeats: int) -> float:
        """Seconds of a probe at the machine's best instruction set, infinite where it has no probes."""
        if self.best_isa < PROBED:
            return float("inf")
        self.lib.tw_team_set_isa(self.team, self.best_isa)
        seconds = best(self.tape([(name, (*arguments, self.sink.ctypes.data))]), repeats=repeats)
        self.lib.tw_team_set_isa(self.team, self.isa)
        return seconds

    def peak(self, kind: int) -> float:
        """Operations per second: 0 int8, 1 bf16, 2 f32."""
        rounds = 10_000  # tens of microseconds, so that some runs are undisturbed
        return rounds * 24 * (128, 64, 32)[kind] * self.threads / self.probe("probe_peak", kind, rounds, repeats=200)

    def read(self, memory: Any) -> float:
        """Bytes per second of reading all of `memory`."""
        return memory.nbytes / self.probe("probe_read", memory.ctypes.data, memory.nbytes, repeats=15)


def best(run: Callable[[], None], *, repeats: int, seconds: float = 0.0) -> float:
    """Seconds of the fastest of `repeats` runs, and of as many more as fit into `seconds`."""
    run()
    fastest, began, done = float("inf"), time.perf_counter(), 0
    while done < repeats or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - start)
        done += 1
    return fastest


def random_matrix(lib: ctypes.CDLL, kind: str, n: int, k: int) -> PackedMatrix:
    rng = np.random.default_rng(n)
    if kind in ("bf16", "f32"):
        raw = rng.normal(size=(n, k)).astype(np.float32)
        return matrix.pack_blocks(lib, raw.view(np.uint8), "F32", n, k, float_layout=kind)  # type: ignore[arg-type]
    block = BLOCKS[kind]
    blocks = rng.integers(0, 256, (n * k // block.values_per_block, block.bytes_per_block), np.uint8)
    blocks[:, 0:2] = blocks[:, 2:4] = np.float16(0.01).reshape(1).view(np.uint8)
    blocks[:, -2:] = np.float16(0.01).reshape(1).view(np.uint8)
    return matrix.pack_blocks(lib, blocks, kind, n, k)


def calls_of(machine: Machine, packed: PackedMatrix, rows: int, keep: list[Any]) -> tuple[str, tuple[int, ...]]:
    """One call on fresh activations; `keep` holds its memory."""
    outputs = packed.n // 2 if packed.gated else packed.n
    x = np.random.default_rng(0).normal(size=(rows, packed.k)).astype(np.float32)
    out, count = np.zeros((rows, outputs), np.float32), np.array([rows], np.int32)
    scratch = matrix.aligned_bytes(matrix.scratch_bytes(machine.lib, packed, rows))
    keep += [x, out, count, scratch, packed]
    words = (x.ctypes.data, packed.k, packed, 0, out.ctypes.data, outputs, count.ctypes.data, scratch.ctypes.data)
    if packed.gated:
        return "gated_linear", matrix.gated_linear_words(*words, "silu")
    return "linear", matrix.linear_words(*words)


def measure(
    machine: Machine, kind: str, label: str, shape: tuple[int, int, bool], rows: Sequence[int], memory: Any
) -> None:
    n, k, gated = shape
    part = random_matrix(machine.lib, kind, n, k)
    packed = matrix.pack_gated(machine.lib, part, part) if gated else part
    peak_kind = 1 if kind == "bf16" else 2 if kind == "f32" else 0
    cells = []
    for count in rows:
        keep: list[Any] = []
        if count <= 4:
            copies = max(1, MEMORY_BYTES // packed.nbytes)
            calls = []
            for _ in range(copies):
                data = matrix.aligned_bytes(packed.nbytes)
                data[:] = packed.data[0]
                copy = PackedMatrix(
                    layout=packed.layout, n=packed.n, k=packed.k, bits=packed.bits, group=packed.group, gated=packed.gated, data=(data,),
                    nbytes=packed.nbytes,
                )  # fmt: skip
                calls.append(calls_of(machine, copy, count, keep))
            ceiling = machine.read(memory)
            speed = packed.nbytes * copies / best(machine.tape(calls), repeats=15, seconds=0.5)
            ceiling = max(ceiling, machine.read(memory))
            cells.append(f"{speed / 1e9:6.1f} GB/s {share(speed, ceiling)}")
        else:
            run = machine.tape([calls_of(machine, packed, count, keep)])
            operations = 2 * packed.n * k * count
            ceiling = machine.peak(peak_kind)
            speed = operations / best(run, repeats=50, seconds=0.3)
            ceiling = max(ceiling, machine.peak(peak_kind))
            cells.append(f"{speed / 1e9:6.0f} GOP/s {share(speed, ceiling)}")
    print(f"{kind:5} {label:18} {packed.nbytes * 8 / (packed.n * k):5.2f} bits  " + "  ".join(cells), flush=True)


def share(speed: float, ceiling: float) -> str:
    return f"{speed / ceiling:4.0%}" if ceiling else "   -"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="Q4_1,Q8_0,bf16")
    parser.add_argument("--rows", default="1,8,16,64,512")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", type=int, help="0 portable, 1 avx2, 2 avx512 vnni, 3 with bf16; the best by default")
    parser.add_argument("--library", type=Path, default=Path(matrix.__file__).parent / "libtradewind_cpu.so")
    parser.add_argument("--head", action="store_true", help="also the vocabulary matrix")
    options = parser.parse_args()
    machine = Machine(options.library, threads=options.threads, isa=options.isa)
    memory = np.ones(MEMORY_BYTES, np.uint8)
    peaks = ", ".join(
        f"{name} {machine.peak(kind) / 1e9:.0f} GOP/s" for kind, name in enumerate(("int8", "bf16", "f32"))
    )
    far, near = machine.read(memory) / 1e9, machine.read(memory[: 8 << 20]) / 1e9
    print(f"{machine.threads} threads, isa {machine.isa}; peaks: {peaks}")
    print(f"read: {far:.1f} GB/s of 96 MB, {near:.1f} GB/s of 8 MB")
    rows = [int(count) for count in options.rows.split(",")]
    print("columns: " + ", ".join(f"M={count}" for count in rows))
    for kind in options.formats.split(","):
        for label, shape in SHAPES.items():
            if shape[1] % (BLOCKS[kind].values_per_block if kind in BLOCKS else 1) == 0:
                measure(machine, kind, label, shape, rows, memory)
        if options.head:
            measure(machine, kind, *HEAD, rows[:2], memory)


if __name__ == "__main__":
    main()
