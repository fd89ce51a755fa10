"""How a kernel begins: programmatic dependent launch in two device functions, and the options that go with it.

Knows: the order "let the successor start, load weights, wait, load the rest". Refuses to know: what is computed.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from tradewind.kernels.triton.compilers import Compilers


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


AFTER_ALL = 2
"""As `pdl` of a launch: it lets its successor start early as others do, but itself starts when all before it have ended (lanes.py)."""


def launch_options(*, pdl: bool | int, warps: int, stages: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch. `launch_pdl` is passed only when wanted: older interpreters do not know it."""
    options: dict[str, Any] = {"PDL": bool(pdl), "num_warps": warps}
    if stages is not None:
        options["num_stages"] = stages
    if pdl and pdl != AFTER_ALL:
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

_compilers: ContextVar[Compilers | None] = ContextVar("tradewind_compilers", default=None)
_compile = triton.compiler.compile


def _compile_with_help(src, target=None, options=None, **others):
    """Triton's own `compile`, which finds on disk what another process has compiled a moment before."""
    compilers = _compilers.get()
    if compilers is not None:
        compilers.compile(src, target=target, options=options, env_vars=others.get("_env_vars"))
    return _compile(src, target=target, options=options, **others)


triton.compiler.compile = _compile_with_help


@contextmanager
def compiling(
    *,
    threads: int,
    measure: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    compilers: Compilers | None = None,
) -> Iterator[None]:
    """Launches of the block compile their kernels, several at a time, and launch nothing; at its end all are compiled and loaded.

    What other threads launch meanwhile is launched. Not under the interpreter (see COMPILES), which would run them. `measure` takes the
    times of both parts. With `compilers` threads only wait for them.
    """
    assert COMPILES, "the interpreter compiles nothing"
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.current_device() if on_gpu else None

    def begin() -> None:
        _compilers.set(compilers)  # of this thread
        if on_gpu:
            torch.cuda.set_device(device)

    token = _compile_only.set(True)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="tradewind-compile", initializer=begin) as pool:
            with measure("compile"), triton.AsyncCompileMode(pool) as mode:
                yield
            if on_gpu:
                # Loading a kernel compiles a C function that launches it, which takes as long as the kernel itself.
                with measure("load"):
                    list(pool.map(_loaded, mode.future_kernels.values()))
    finally:
        _compile_only.reset(token)


def _loaded(kernel: Any) -> Any:
    """The launching function of a compiled kernel; asking for it loads both."""
    return kernel.result().run


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite e4m3 value; stores clamp to it."""
