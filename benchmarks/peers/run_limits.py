"""The machine's ceilings, measured as those in the table of recorded peers were: `python run_limits.py THREADS`. Prints one JSON line.

Knows: numpy reads and torch matmuls. A process of its own, so that torch's memory and threads disturb nobody.
"""

import json
import sys

import numpy as np
import torch

from tradewind.bench.limits import best_time, cache_bytes, matmul_speed, read_speed

BUDGET_S = 0.7


def main() -> None:
    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    cache = cache_bytes()
    limits = {
        "memory_read_bytes_per_s": read_speed(max(4 * cache, 256 << 20), threads=threads, budget_s=BUDGET_S),
        "cache_read_bytes_per_s": read_speed(cache // 2, threads=threads, budget_s=BUDGET_S),
        "matmul_f32_flops_per_s": matmul_speed(budget_s=BUDGET_S),
        "matmul_bf16_flops_per_s": torch_speed(torch.bfloat16),
        "matmul_int8_ops_per_s": torch_speed(torch.int8),
        "cache_bytes": cache,
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps(limits))


def torch_speed(dtype: torch.dtype, *, rows: int = 512, size: int = 2048) -> float | None:
    """Operations per second of a large matmul; None where this build of torch lacks it."""
    a, b = torch.ones(rows, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    matmul = torch._int_mm if dtype == torch.int8 else torch.mm
    try:
        return 2.0 * rows * size * size / best_time(lambda: matmul(a, b), budget_s=BUDGET_S)
    except RuntimeError:
        return None


if __name__ == "__main__":
    main()
