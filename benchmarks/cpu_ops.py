"""Times the CPU library's ops other than matmuls at SmolLM2-135M's shapes, beside the machine's ceilings measured in the same run.

    python benchmarks/cpu_ops.py [--threads 2] [--rounds 30] [--json FILE]

Every op is recorded once per layer (30 calls, each layer with its own pages) on a tape, as in a real step; the table gives the best and the
median time of one call. "of peak" is the larger of its share of the float32 multiply-add peak and of the bandwidth of reading 8 MB again
and again (what a step finds in the caches); both are noisy on a busy machine, so compare only figures of one run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tradewind.kernels.cpu import library
from tradewind.kernels.cpu.library import ISAS
from tradewind.kernels.cpu.ops import CpuOps
from tradewind.kernels.ops import PagedRows, SampleColumns

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, VOCAB, PAGE = 576, 30, 9, 3, 64, 49152, 16


@dataclass(frozen=True)
class Result:
    """One line of the table. flops and bytes are what the op must do at least, not what it does."""

    op: str
    best_us: float
    median_us: float
    flops: float
    bytes: float


class Bench:
    """Measures on one op set; keeps the results in order."""

    def __init__(self, ops: CpuOps, rounds: int) -> None:
        self.ops = ops
        self.rounds = rounds
        self.results: list[Result] = []

    def measure(
        self, op: str, body: Callable[[int], None], *, flops: float = 0, bytes: float = 0, calls: int = LAYERS
    ) -> None:
        """Records body(0) .. body(calls - 1) and times the tape's replays."""
        with self.ops.record() as tape:
            for i in range(calls):
                body(i)
        tape.run()
        times = []
        for _ in range(self.rounds):
            begin = time.perf_counter()
            tape.run()
            times.append((time.perf_counter() - begin) / calls * 1e6)
        self.results.append(Result(op, min(times), float(np.median(times)), flops, bytes))


def ceilings(ops: CpuOps) -> dict[str, float]:
    """float32 multiply-add peak (FLOP/s), read bandwidth of 8 MB and of 256 MB (bytes/s), microseconds of an empty op."""
    sink = np.zeros(64, np.int32)

    def best(words: tuple[Any, ...], name: str, repeat: int) -> float:
        with ops.record() as tape:
            for _ in range(repeat):
                tape.add(name, words)
        times = []
        for _ in range(8):
            begin = time.perf_counter()
            tape.run()
            times.append((time.perf_counter() - begin) / repeat)
        return min(times)

    found = {"empty_op_us": best((sink, sink, 1, sink, np.zeros(1, np.int32)), "gather_rows", 1000) * 1e6}
    if "probe_peak" in ops.library.ops and ops.team.isa == 3:
        rounds = 200_000
        found["f32_flops"] = 24 * 32 * rounds * ops.team.threads / best((2, rounds, sink), "probe_peak", 1)
        memory = ops.empty((256 << 20,), "u8")
        memory[:] = 1
        found["read_8mb_bytes_s"] = (8 << 20) / best((memory, 8 << 20, sink), "probe_read", 20)
        found["read_256mb_bytes_s"] = (256 << 20) / best((memory, 256 << 20, sink), "probe_read", 1)
    return found


def token_ops(bench: Bench, tokens: int) -> None:
    """What costs by token: embedding, norm, rope."""
    ops, rng = bench.ops, np.random.default_rng(0)
    n = np.array([tokens], np.int32)
    table = ops.row_table(rng.integers(0, 100, VOCAB * HIDDEN // 32 * 34, np.uint8), "Q8_0", rows=VOCAB, cols=HIDDEN)
    ids = rng.integers(0, VOCAB, tokens).astype(np.int32)
    x, delta, out = (ops.empty((tokens, HIDDEN), "f32") for _ in range(3))
    x[:] = rng.standard_normal(x.shape)
    weight = ops.constant(np.ones(HIDDEN, np.float32))
    bench.measure(
        f"embed Q8_0, {tokens} tokens",
        lambda _: ops.embed(ids, table, scale=1.0, out=out, count=n),
        bytes=tokens * HIDDEN * (4 + 34 / 32),
    )
    bench.measure(
        f"add_rms_norm, {tokens} tokens",
        lambda _: ops.add_rms_norm(x, delta, weight, eps=1e-5, out=out, count=n),
        flops=tokens * HIDDEN * 5,
        bytes=tokens * HIDDEN * 16,
    )
    positions, angles = np.arange(tokens, dtype=np.int32), ops.empty((tokens, DIM), "f32")
    inv_freq = (1e5 ** -(np.arange(0, DIM, 2) / DIM)).astype(np.float32)
    bench.measure(
        f"rope_angles, {tokens} tokens", lambda _: ops.rope_angles(positions, inv_freq, scale=1.0, out=angles, count=n)
    )
    width = (HEADS + 2 * KV_HEADS) * DIM
    qkv, q = ops.empty((tokens, width), "f32"), ops.empty((tokens, HEADS * DIM), "f32")
    kv = [
        ops.kv_layer(pages=-(-tokens // PAGE), page_tokens=PAGE, kv_heads=KV_HEADS, head_dim=DIM, format="f16")
        for _ in range(LAYERS)
    ]
    bench.measure(
        f"rope_store f16, {tokens} tokens",
        lambda i: ops.rope_store(
            qkv, angles, positions, kv[i], heads=HEADS, q_weight=None, k_weight=None, eps=0.0, out=q, count=n
        ),
        flops=tokens * (HEADS + KV_HEADS) * DIM * 3,
        bytes=tokens * (width * 4 + HEADS * DIM * 4 + 2 * KV_HEADS * DIM * 2),
    )


def attention(bench: Bench, title: str, shapes: list[tuple[int, int]], *, shared: int = 0, format: str = "f16") -> None:
    """shapes: (new tokens, length) by row; `shared` leading tokens lie in the same pages for all rows."""
    ops, rng = bench.ops, np.random.default_rng(0)
    needed = [-(-length // PAGE) for _, length in shapes]
    table = np.zeros((len(shapes), max(needed)), np.int32)
    at = 1
    for row, pages in enumerate(needed):
        table[row, :pages] = np.arange(at, at + pages)
        at += pages
        table[row, : shared // PAGE] = table[0, : shared // PAGE]
    kv = [
        ops.kv_layer(pages=at, page_tokens=PAGE, kv_heads=KV_HEADS, head_dim=DIM, format=format) for _ in range(LAYERS)
    ]
    for layer in kv:
        layer.k[:] = rng.standard_normal(layer.k[:1].shape)
        layer.v[:] = rng.standard_normal(layer.v[:1].shape)
    starts = np.concatenate([[0], np.cumsum([n for n, _ in shapes])]).astype(np.int32)
    rows = PagedRows(
        query_start=starts,
        lengths=np.array([n for _, n in shapes], np.int32),
        page_table=table,
        rows=np.array([len(shapes)], np.int32),
    )
    q = ops.empty((int(starts[-1]), HEADS * DIM), "f32")
    q[:] = rng.standard_normal(q.shape)
    out = ops.empty(q.shape, "f32")
    pairs = sum(length * n - n * (n - 1) // 2 for n, length in shapes)
    keys = sum(length for _, length in shapes)
    bench.measure(
        f"attention {format}, {title}",
        lambda i: ops.attention(
            q, kv[i], rows, heads=HEADS, scale=DIM**-0.5, window=None, softcap=None, sinks=None, out=out
        ),
        flops=pairs * HEADS * DIM * 4,
        bytes=keys * KV_HEADS * DIM * 2 * (4 if format == "f32" else 2),
    )


def vocabulary_ops(bench: Bench, rows: int) -> None:
    """Sampling and logprobs over logits [rows, V]."""
    ops, rng = bench.ops, np.random.default_rng(0)
    n = np.array([rows], np.int32)
    logits = ops.empty((rows, VOCAB), "f32")
    logits[:] = rng.standard_normal(logits.shape) * 3
    out = np.zeros(rows, np.int32)

    def full(value: float, kind: Any) -> Any:
        return np.full(rows, value, kind)

    for title, temperature, top_k, top_p, min_p in (
        ("greedy", 0, 0, 1, 0),
        ("temperature", 1, 0, 1, 0),
        ("min-p 0.05", 1, 0, 1, 0.05),
        ("top-k 50", 1, 50, 1, 0),
        ("top-p 0.9", 1, 0, 0.9, 0),
        ("top-k 50, top-p 0.9", 1, 50, 0.9, 0),
        ("top-k 5000", 1, 5000, 1, 0),
    ):
        columns = SampleColumns(
            temperature=full(temperature, np.float32), top_k=full(top_k, np.int32), top_p=full(top_p, np.float32),
            min_p=full(min_p, np.float32), repetition=full(1, np.float32), presence=full(0, np.float32), frequency=full(0, np.float32),
            seed=full(0, np.uint64), position=np.arange(rows), history=full(0, np.int64), history_prompt=full(0, np.int32),
            history_length=full(0, np.int32), bias_start=np.zeros(rows + 1, np.int32), bias_token=np.zeros(0, np.int32),
            bias_value=np.zeros(0, np.float32), mask=None,
        )  # fmt: skip
        bench.measure(
            f"sample {title}, {rows} rows",
            lambda _, c=columns: ops.sample(logits, c, out=out, count=n),  # type: ignore[misc]
            bytes=rows * VOCAB * 4,
            calls=10,
        )
    arrays = (
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int32),
        np.zeros((rows, 20), np.int32),
        np.zeros((rows, 20), np.float32),
    )
    bench.measure(
        f"logprobs top 20, {rows} rows",
        lambda _: ops.logprobs(
            logits,
            out,
            top=20,
            out_logprob=arrays[0],
            out_rank=arrays[1],
            out_ids=arrays[2],
            out_top=arrays[3],
            count=n,
        ),
        bytes=rows * VOCAB * 4,
        calls=10,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="measure only attention, tokens or vocabulary")
    parser.add_argument("--library", type=Path, help="another build of the library")
    parser.add_argument("--isa", type=int, help="stay at or below this instruction set (0 to 3)")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    given = parser.parse_args()
    found = library.Library(given.library) if given.library else library.load()
    if found is None:
        raise SystemExit(str(library.why_not()))
    ops = CpuOps(found, threads=given.threads, isa=given.isa)
    limits = ceilings(ops)
    bench = Bench(ops, given.rounds)
    if given.only in ("", "tokens"):
        for tokens in (1, 16, 512):
            token_ops(bench, tokens)
    if given.only in ("", "attention"):
        attention(bench, "1 row of 192", [(1, 192)])
        attention(bench, "1 row of 4,096", [(1, 4096)])
        attention(bench, "16 rows of 192", [(1, 192)] * 16)
        attention(bench, "16 rows of 560", [(1, 560)] * 16)
        attention(bench, "16 rows of 560, 512 shared", [(1, 560)] * 16, shared=512)
        attention(bench, "16 rows of 560, 512 shared", [(1, 560)] * 16, shared=512, format="f32")
        attention(bench, "prompt of 512", [(512, 512)])
        attention(bench, "prompt of 512", [(512, 512)], format="f32")
        attention(bench, "16 rows of 32 after 512 shared", [(32, 544)] * 16, shared=512)
    if given.only in ("", "vocabulary"):
        for rows in (1, 16):
            vocabulary_ops(bench, rows)

    print(f"{given.threads} threads, {ISAS[ops.team.isa]}")
    for name, value in limits.items():
        print(f"  {name:20} {value if name.endswith('us') else value / 1e9:9.3f}{'' if name.endswith('us') else ' G'}")
    print(f"{'op':46} {'best us':>9} {'median us':>9} {'x30, ms':>8} {'GFLOP/s':>8} {'GB/s':>7} {'of peak':>8}")
    for r in bench.results:
        share = max(
            r.flops / r.best_us * 1e6 / limits.get("f32_flops", np.inf),
            r.bytes / r.best_us * 1e6 / limits.get("read_8mb_bytes_s", np.inf),
        )
        print(
            f"{r.op:46} {r.best_us:9.2f} {r.median_us:9.2f} {r.best_us * LAYERS / 1e3:8.2f} {r.flops / r.best_us / 1e3:8.1f} "
            f"{r.bytes / r.best_us / 1e3:7.1f} {share:8.1%}"
        )
    if given.json:
        given.json.write_text(
            json.dumps(
                {"threads": given.threads, "limits": limits, "results": [asdict(r) for r in bench.results]}, indent=1
            )
        )
    ops.close()


if __name__ == "__main__":
    main()
