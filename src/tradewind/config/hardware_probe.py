"""Measures the machine once and remembers it.

Knows: how Linux and macOS tell cores, memory and instruction sets; how to time a read and a matmul. Refuses to know: what will run here.
Counts that can change between two starts (free memory, cores allowed) are read each time; a CPU's speeds are measured once and kept in a
file. A GPU is asked about, never timed (gpu_probe).
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

import tradewind
from tradewind.config import gpu_probe
from tradewind.config.hardware import Hardware

FEATURES = {
    "avx2": "avx2",
    "avx512bw": "avx512",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
}
"""The kernel's name for an instruction set -> ours."""


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept in the file: speeds, and the machine they belong to."""

    machine: str
    memory_bytes_per_s: float
    matmul_flops_per_s: float


def measure(
    cache_dir: Path, *, prefer: Literal["cpu", "cuda"] | None = None, missing: Mapping[str, str] | None = None
) -> Hardware:
    """The device that should compute, as it is now; never raises.

    prefer "cpu": the CPU whatever else is there. Otherwise the first GPU that the driver shows, if "cuda" is not in `missing` (backend ->
    why it cannot be used; None: asked here), else the CPU. For a CPU this writes `hardware.json` in cache_dir when speeds had to be
    measured (at most 0.3 s), else it takes a few ms.
    """
    if prefer != "cpu" and (gpu_probe.why_no_cuda() is None if missing is None else "cuda" not in missing):
        gpu = gpu_probe.find_gpu()
        if not isinstance(gpu, str):
            return of_gpu(gpu)
    return measure_cpu(cache_dir)


def of_gpu(gpu: gpu_probe.Gpu) -> Hardware:
    """The GPU, and the host beside it as it is now."""
    total, free = memory_bytes()
    return Hardware(
        kind="cuda",
        name=gpu.name,
        cores=usable_cores(),
        memory_bytes=gpu.memory_bytes,
        memory_free_bytes=gpu.memory_free_bytes,
        memory_bytes_per_s=gpu.speeds.memory_bytes_per_s,
        matmul_flops_per_s=gpu.speeds.bf16_flops_per_s,
        fp8_flops_per_s=gpu.speeds.fp8_flops_per_s,
        features=gpu.features,
        multiprocessors=gpu.multiprocessors,
        host_memory_bytes=total,
        host_memory_free_bytes=free,
    )


def measure_cpu(cache_dir: Path) -> Hardware:
    """The CPU as it is now; writes `hardware.json` in cache_dir when speeds had to be measured (at most 0.3 s), else a few ms."""
    name, features = cpu_facts()
    cores = usable_cores()
    total, free = memory_bytes()
    machine = f"{name} | {cores} cores | {platform.machine()} | tradewind {tradewind.__version__}"
    file = cache_dir / "hardware.json"
    speeds = remembered(file, machine=machine)
    if speeds is None:
        speeds = Speeds(
            machine=machine,
            memory_bytes_per_s=read_speed(cores, free_bytes=free),
            matmul_flops_per_s=matmul_speed(cores),
        )
        remember(file, speeds)
    return Hardware(
        kind="cpu",
        name=name,
        cores=cores,
        memory_bytes=total,
        memory_free_bytes=free,
        memory_bytes_per_s=speeds.memory_bytes_per_s,
        matmul_flops_per_s=speeds.matmul_flops_per_s,
        features=features,
    )


# ----------------------------------------------------------------------------------------------------------- remembering


def remembered(file: Path, *, machine: str) -> Speeds | None:
    """The speeds in the file if they are whole and of this machine, else None; never raises."""
    try:
        speeds = msgspec.json.decode(file.read_bytes(), type=Speeds)
    except (OSError, ValueError):
        return None
    numbers = (speeds.memory_bytes_per_s, speeds.matmul_flops_per_s)
    return speeds if speeds.machine == machine and all(math.isfinite(x) and x > 0 for x in numbers) else None


def remember(file: Path, speeds: Speeds) -> None:
    """Writes the file whole or not at all; a folder that cannot be written is no error, the next start measures again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".hardware-")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(msgspec.json.encode(speeds))
            os.replace(temporary, file)
        except OSError:
            os.unlink(temporary)
            raise


# ------------------------------------------------------------------------------------------------------------ measuring


def read_speed(cores: int, *, free_bytes: int, budget_s: float = 0.1) -> float:
    """Bytes read per second by all cores together, over a buffer that no cache holds."""
    megabytes = 128 if free_bytes >= 2 << 30 else 32
    block = np.zeros(megabytes << 17, dtype=np.int64)
    block.fill(1)  # touches every page: untouched ones would all be the same page of zeros
    parts = np.array_split(block, cores)
    best_s = math.inf
    end = time.perf_counter() + budget_s
    with ThreadPoolExecutor(cores) as pool:
        while True:
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best_s = min(best_s, time.perf_counter() - start)
            if time.perf_counter() > end:
                return block.nbytes / best_s


def matmul_speed(cores: int, *, size: int = 64, budget_s: float = 0.05) -> float:
    """Floating-point operations per second of float32 matmuls on all cores.

    One core is timed on matrices too small to be split and multiplied up: a matmul on all cores would time its busiest neighbour instead.
    """
    a = np.ones((size, size), dtype=np.float32)
    out = np.empty_like(a)
    best_s = math.inf
    end = time.perf_counter() + budget_s
    while True:
        start = time.perf_counter()
        np.matmul(a, a, out=out)
        best_s = min(best_s, time.perf_counter() - start)
        if start > end:
            return cores * 2.0 * size**3 / best_s


# --------------------------------------------------------------------------------------------------------------- asking


def usable_cores(*, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its affinity, cut to the container's quota; at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = cpu_quota(cgroup)
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time that a cgroup grants (version 2, then 1); None where there is no limit."""
    with contextlib.suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        quota, period = (cgroup / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        granted = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        return granted / int((cgroup / "cpu" / "cpu.cfs_period_us").read_text()) if granted > 0 else None
    return None


def memory_bytes(*, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Memory in total and free, of the machine or of its cgroup where that grants less."""
    total, free = machine_memory(meminfo)
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit = int((cgroup / limit_name).read_text())
            used = int((cgroup / used_name).read_text())
            if 0 < limit < total:
                return limit, max(
                    0, min(free, limit - used + reclaimable(cgroup / Path(limit_name).parent / "memory.stat"))
                )
            break
    return total, free


def reclaimable(stat: Path) -> int:
    """Bytes of a cgroup that are only file cache, which the kernel drops when memory is needed."""
    with contextlib.suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "inactive_file":
                return int(value)
    return 0


def machine_memory(meminfo: Path) -> tuple[int, int]:
    """Total and free memory of the machine; where the system does not tell what is free, half of the total is taken."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        lines = (line.split() for line in meminfo.read_text().splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) >= 2}
        return kib["MemTotal"] << 10, kib.get("MemAvailable", kib["MemFree"]) << 10
    with contextlib.suppress(OSError, ValueError, AttributeError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if total > 0:
            return total, total // 2
    total = int(sysctl("hw.memsize") or 4 << 30)
    return total, total // 2


def cpu_facts(*, cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, tuple[str, ...]]:
    """Name of the CPU and the instruction sets that matter here."""
    name, flags = "", set[str]()
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = name or value.strip()
            elif key.strip() in ("flags", "Features"):
                flags.update(value.split())
                break
    name = name or sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine() or "unknown CPU"
    return name, tuple(sorted(ours for theirs, ours in FEATURES.items() if theirs in flags))


def sysctl(name: str) -> str:
    """One value of macOS's system table; empty where there is none."""
    if platform.system() != "Darwin":
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=2, check=True
        ).stdout.strip()
    return ""
