"""What Triton does once in every process, done while torch is still being imported.

Knows: which of Triton's own caches its first compilation fills. Refuses to know: kernels, torch, and who waits: whatever is not there in
time is done again by whoever needs it.
"""

from __future__ import annotations

from contextlib import suppress

import triton  # noqa: F401 - imports no torch: a few hundredths of a second of Python, the rest is a library's
from triton.runtime import cache


def warm(architecture: int) -> None:
    """Fills Triton's caches of this process and, on a new machine, on disk; for a thread. Needs the driver's library but no context.

    The key of every kernel holds a hash of Triton itself (400 MB, a quarter of a second without Python's lock) and the version of its
    assembler; its way to the driver is a C file, which a new machine must compile. `architecture`: 90 for compute capability 9.0.
    Never raises: what fails here fails again where it is needed.
    """
    with suppress(Exception):
        from triton.backends.nvidia import driver

        driver.CudaUtils()
    with suppress(Exception):
        cache.triton_key()
    with suppress(Exception):
        from triton.backends.nvidia import compiler

        compiler.get_ptxas_version(architecture)
