"""The card by itself: what plain copies, sums and matmuls reach on it, and who holds its memory.

Knows: torch as a measuring tool, and what the driver says. Refuses to know: engines and workloads; of a plan it reads the ledger.
Asking the driver imports no torch.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tradewind.config.plan import Plan


# ------------------------------------------------------------------------------------------------------------- ceilings


def ceilings_only(*, backend: str) -> dict[str, Any]:
    """What the device reaches in plain copies, sums and matmuls; the memory is free again when this process ends."""
    import torch

    cuda = backend == "cuda"
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
