"""What this machine could do at best, measured in the same minute as the engine, so that results travel as ratios.

Knows: how to time reads and matmuls, and how much of either a model's token needs. Refuses to know: engines and requests.
Neighbours on a shared machine move these ceilings within the hour; that is why they are never remembered.

    decode of one request    bound by reading every weight once a token      -> share of the read bandwidth
    prefill and batches      bound by arithmetic                             -> share of the matmul rate
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from tradewind.config.card import ModelCard
from tradewind.config.plan import Plan

SMALL_CACHE_BYTES = 32 << 20
"""Taken for the last-level cache where the system does not tell."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Measured ceilings of the machine. None: not measured, because nothing here can compute it."""

    threads: int
    cache_bytes: int
    """Last-level cache of one core's group."""
    memory_read_bytes_per_s: float
    """Reading a buffer several times as large as that cache."""
    cache_read_bytes_per_s: float
    """Reading a buffer that fits into it."""
    matmul_f32_flops_per_s: float
    """numpy's matmul."""
    matmul_bf16_flops_per_s: float | None = None
    matmul_int8_ops_per_s: float | None = None
    """Both as the engine's own op library computes a large matmul."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a ceiling a result reached."""

    of: str
    value: float


def measure_limits(plan: Plan, *, budget_s: float = 0.5) -> Limits:
    """Measures for about six times budget_s, on as many threads as the plan computes with; changes nothing.

    A GPU's are those of the plan's hardware, known by its name or roughly by its clocks: measuring there would want its memory.
    """
    if plan.hardware.kind == "cuda":
        gpu = plan.hardware
        return Limits(
            threads=plan.numerics.threads,
            cache_bytes=0,
            memory_read_bytes_per_s=gpu.memory_bytes_per_s,
            cache_read_bytes_per_s=gpu.memory_bytes_per_s,
            matmul_f32_flops_per_s=gpu.matmul_flops_per_s,
            matmul_bf16_flops_per_s=gpu.matmul_flops_per_s,
        )
    threads = plan.numerics.threads
    cache = cache_bytes()
    free = plan.hardware.memory_free_bytes
    large = min(max(4 * cache, 256 << 20), max(32 << 20, free // 8))
    own = op_library_speeds(plan, budget_s=budget_s)
    return Limits(
        threads=threads,
        cache_bytes=cache,
        memory_read_bytes_per_s=read_speed(large, threads=threads, budget_s=budget_s),
        cache_read_bytes_per_s=read_speed(cache // 2, threads=threads, budget_s=budget_s),
        matmul_f32_flops_per_s=matmul_speed(budget_s=budget_s),
        matmul_bf16_flops_per_s=own.get("bf16"),
        matmul_int8_ops_per_s=own.get("int8"),
    )


def read_speed(size_bytes: int, *, threads: int, budget_s: float) -> float:
    """Bytes per second that all threads together read from one buffer; the better of two ways to read, best of many times."""
    block = np.ones(max(size_bytes, 1 << 20) // 4, dtype=np.float32)
    parts = np.array_split(block, threads)
    best_s = math.inf
    with ThreadPoolExecutor(threads) as pool:
        # Neither is the faster one everywhere: the dot product has the wider loads, the maximum the shorter chain.
        for read in (_dot, np.max):
            best_s = min(best_s, best_time(lambda read=read: list(pool.map(read, parts)), budget_s=budget_s / 2))  # type: ignore[misc]
    return block.nbytes / best_s


def _dot(part: np.ndarray) -> float:
    return float(np.dot(part, part))


def matmul_speed(*, size: int = 1024, budget_s: float) -> float:
    """Floating-point operations per second of a float32 matmul with numpy's library and its threads."""
    a = np.ones((size, size), dtype=np.float32)
    out = np.empty_like(a)
    return 2.0 * size**3 / best_time(lambda: np.matmul(a, a, out=out), budget_s=budget_s)


def op_library_speeds(plan: Plan, *, budget_s: float, rows: int = 512, size: int = 2048) -> dict[str, float]:
    """Operations per second of the C++ library's own packed matmuls, by compute; empty where the plan does not use it."""
    if plan.numerics.backend != "cpu":
        return {}
    from tradewind.assemble import make_ops

    ops, _ = make_ops(plan)
    speeds: dict[str, float] = {}
    try:
        if ops.name != "cpu":
            return {}
        weights = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
        x = ops.constant(np.random.default_rng(1).standard_normal((rows, size), dtype=np.float32))
        out, count = ops.empty((rows, size), "f32"), np.array([rows], dtype=np.int32)
        for compute in ("bf16", "int8"):
            # An op set may lack a layout on some machines; a ceiling that cannot be measured is left out, not guessed.
            with contextlib.suppress(NotImplementedError):
                packed = ops.pack_matrix(weights, compute=compute)
                once = best_time(
                    lambda packed=packed: ops.linear(x, packed, bias=None, out=out, count=count),  # type: ignore[misc]
                    budget_s=budget_s,
                )
                speeds[compute] = 2.0 * rows * size * size / once
    finally:
        close = getattr(ops, "close", None)
        if close is not None:
            close()
    return speeds


def best_time(call: Callable[[], object], *, budget_s: float) -> float:
    """Shortest time of one call, in seconds, after a first uncounted one; at least three are counted."""
    call()
    best_s, counted = math.inf, 0
    end = time.perf_counter() + budget_s
    while counted < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - start)
        counted += 1
    return best_s


def cache_bytes(*, sysfs: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache of the first core."""
    sizes = []
    for file in sysfs.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text().strip()
            unit = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
            sizes.append(int(text.rstrip("KMGkmg")) << unit)
    return max(sizes, default=SMALL_CACHE_BYTES)


# ------------------------------------------------------------------------------------------------------------- shares


def decode_share(limits: Limits, card: ModelCard, *, tokens_per_s: float) -> Share:
    """Share of the read bandwidth that one request's decode reached: every weight is read once a token."""
    if weights_read(card) <= limits.cache_bytes * 3 // 4:
        return Share(of="cache read", value=weights_read(card) * tokens_per_s / limits.cache_read_bytes_per_s)
    return Share(of="memory read", value=weights_read(card) * tokens_per_s / limits.memory_read_bytes_per_s)


def matmul_share(limits: Limits, plan: Plan, *, computed: int, sampled: int, wall_s: float) -> Share:
    """Share of the matmul rate reached by `computed` tokens through the layers and `sampled` rows of logits in wall_s.

    Attention's own arithmetic is not counted: it is small at these lengths.
    """
    ways = {
        "int8": ("int8 matmul", limits.matmul_int8_ops_per_s),
        "bf16": ("bf16 matmul", limits.matmul_bf16_flops_per_s),
        # Two int8 products for each weight, so at most half of this ceiling: that half is the price of its accuracy.
        "int16": ("int8 matmul", limits.matmul_int8_ops_per_s),
    }
    name, rate = ways.get(plan.numerics.compute, ("", None))
    if rate is None:
        name, rate = "f32 matmul", limits.matmul_f32_flops_per_s
    head = plan.card.vocab_size * plan.card.hidden
    layers = plan.card.parameters - head * (1 if plan.card.tied_embeddings else 2)
    return Share(of=name, value=2.0 * (layers * computed + head * sampled) / wall_s / rate)


def weights_read(card: ModelCard) -> int:
    """Bytes of weights that one decode step reads: all, but of an untied embedding table only a row."""
    if card.tied_embeddings or not card.parameters:
        return card.weight_bytes
    return round(card.weight_bytes * (1 - card.vocab_size * card.hidden / card.parameters))
