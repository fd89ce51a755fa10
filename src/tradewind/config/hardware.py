"""Facts about the machine, measured once and cached.

Knows: cores, memory, its speed, instruction sets. Refuses to know: what will run there.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One device that computes, and the host beside it."""

    kind: Literal["cpu", "cuda"]
    name: str
    cores: int
    """Cores of the host that this process may use, whatever computes."""
    memory_bytes: int
    """Memory of the device in total (on a CPU: of the machine, or the cgroup's limit when smaller)."""
    memory_free_bytes: int
    memory_bytes_per_s: float
    """Read bandwidth: measured, or (a GPU of no known name) nine tenths of what memory clock and bus width give."""
    matmul_flops_per_s: float
    """float32 matmul on a CPU (measured), bf16 on a GPU (measured, or roughly by its multiprocessors and clock)."""
    features: tuple[str, ...] = ()
    """CPU: instruction sets that matter, "avx2", "avx512", "avx512_vnni", "avx512_bf16". GPU: "sm_90" and the like, and "fp8" where its
    tensor cores multiply e4m3."""
    fp8_flops_per_s: float = 0.0
    """fp8 matmul on a GPU; 0 where there is none."""
    multiprocessors: int = 0
    """Of a GPU."""
    host_memory_bytes: int = 0
    """Memory beside a GPU, in total and free; 0 on a CPU, where it is the device's own."""
    host_memory_free_bytes: int = 0

    @property
    def matmul_words(self) -> str:
        """What kind of matmul `matmul_flops_per_s` tells about."""
        return "bf16" if self.kind == "cuda" else "float32"
