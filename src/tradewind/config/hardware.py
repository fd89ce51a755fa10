"""Facts about the machine, measured once and cached.

Knows: cores, memory, its speed, instruction sets. Refuses to know: what will run there.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One device that computes, and the host memory beside it."""

    kind: Literal["cpu", "cuda"]
    name: str
    cores: int
    memory_bytes: int
    """Memory of the device in total (on a CPU: of the machine, or the cgroup's limit when smaller)."""
    memory_free_bytes: int
    memory_bytes_per_s: float
    """Measured read bandwidth."""
    matmul_flops_per_s: float
    """Measured: float32 matmul on a CPU, bf16 on a GPU."""
    features: tuple[str, ...] = ()
    """Instruction sets that matter: "avx2", "avx512", "avx512_vnni", "avx512_bf16"."""
