"""How a kernel begins: programmatic dependent launch in two device functions, and the options that go with it.

Knows: the order "let the successor start, load weights, wait, load the rest". Refuses to know: what is computed.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel's programs may be scheduled from here on; they still wait for our end before they read what we wrote."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Returns when every kernel before this one has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def launch_options(*, pdl: bool, warps: int, stages: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch. `launch_pdl` is passed only when wanted: older interpreters do not know it."""
    options: dict[str, Any] = {"PDL": pdl, "num_warps": warps}
    if stages is not None:
        options["num_stages"] = stages
    if pdl:
        options["launch_pdl"] = True
    return options


def pow2(value: int, least: int = 1) -> int:
    """The smallest power of two >= value, at least `least`."""
    return max(least, triton.next_power_of_2(value))


COMPILES: bool = not triton.knobs.runtime.interpret
"""Whether kernels are compiled at all."""

_compile_only: ContextVar[bool] = ContextVar("tradewind_compile_only", default=False)
_run = JITFunction.run


def _run_or_compile(self, *args, grid, warmup, **kwargs):
    """Triton's own `run`, which knows "compile only" as an argument that `kernel[grid](...)` does not pass on."""
    return _run(self, *args, grid=grid, warmup=warmup or _compile_only.get(), **kwargs)


JITFunction.run = _run_or_compile


@contextmanager
def compiling(*, threads: int) -> Iterator[None]:
    """Launches of the block compile their kernels, several at a time, and launch nothing; at its end all are compiled and loaded.

    What other threads launch meanwhile is launched. Not under the interpreter (see COMPILES), which would run them.
    """
    assert COMPILES, "the interpreter compiles nothing"
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.current_device() if on_gpu else None
    wake = (lambda: torch.cuda.set_device(device)) if on_gpu else None
    token = _compile_only.set(True)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="tradewind-compile", initializer=wake) as pool:
            with triton.AsyncCompileMode(pool) as mode:
                yield
            if (
                on_gpu
            ):  # loading a kernel compiles a C function that launches it, which takes as long as the kernel itself
                list(pool.map(_loaded, mode.future_kernels.values()))
    finally:
        _compile_only.reset(token)


def _loaded(kernel: Any) -> Any:
    """The launching function of a compiled kernel; asking for it loads both."""
    return kernel.result().run


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite e4m3 value; stores clamp to it."""
