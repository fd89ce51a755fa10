"""Asks the NVIDIA driver about the first GPU, without torch and without a CUDA context.

Knows: the few calls of libcuda and NVML that tell name, memory and clocks; speeds of GPUs by name. Refuses to know: what will run there.
Nothing is timed here: a GPU in the table was measured before, of any other the speeds follow from clock, bus width and multiprocessors.
Only `hold_context` makes a context, for whoever has decided to compute there.

    libcuda.so.1        which GPU (CUDA_VISIBLE_DEVICES is the driver's own business), name, capability, total memory, clocks
    libnvidia-ml.so.1   free memory (asking libcuda for it would make a context of half a GiB first)
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from tradewind.config import env

Load = Callable[[str], Any]
"""Opens a shared library by name; raises OSError when it is not there."""

NO_DRIVER = "no NVIDIA driver (libcuda.so.1 was not found)"
OLDEST_CAPABILITY = (8, 0)
"""bf16 tensor cores came with Ampere."""
FP8_CAPABILITY = (8, 9)
"""fp8 tensor cores came with Ada and Hopper."""

# CUdevice_attribute numbers of the CUDA driver API.
CLOCK_KHZ = 13
MULTIPROCESSORS = 16
MEMORY_CLOCK_KHZ = 36
MEMORY_BUS_BITS = 37
CAPABILITY_MAJOR = 75
CAPABILITY_MINOR = 76


@dataclass(frozen=True, kw_only=True)
class GpuSpeeds:
    """What a GPU reaches: bytes read a second, bf16 and fp8 operations a second."""

    memory_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float


SPEEDS: dict[str, GpuSpeeds] = {
    "NVIDIA H200": GpuSpeeds(memory_bytes_per_s=4.4e12, bf16_flops_per_s=690e12, fp8_flops_per_s=1300e12),
}
"""By the driver's name of the GPU, measured (benchmarks/results/kernels-h200.md): a read of 4.3 GB, matmuls of 8192^3 kept up for 0.2 s."""

BF16_PER_CLOCK: dict[tuple[int, int], int] = {
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 7): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 1024,
}
"""Dense bf16 operations of a multiprocessor in a clock, by compute capability (the vendor's published peaks divided out)."""

REACHED_READ = 0.9
REACHED_MATMUL = 0.7
"""Parts of the theoretical peaks that are reached; the H200's measured ones are 0.92 and 0.70."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The first GPU that this process may use."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    memory_free_bytes: int
    speeds: GpuSpeeds

    @property
    def features(self) -> tuple[str, ...]:
        """As in `Hardware.features`."""
        architecture = f"sm_{self.capability[0]}{self.capability[1]}"
        return ("fp8", architecture) if self.capability >= FP8_CAPABILITY else (architecture,)


def find_gpu(*, load: Load = ctypes.CDLL, ask_free: bool = True) -> Gpu | str:
    """The GPU, or why none can be used; never raises. Takes what the driver takes to wake (some ten ms); makes no context.

    ask_free False leaves NVML alone and takes all memory for free: for whoever only wants to know whether there is one.
    """
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    try:
        return _ask(cuda, load, ask_free=ask_free)
    except _RefusedError as refused:
        return str(refused)
    except (OSError, AttributeError, ValueError, ctypes.ArgumentError) as error:
        return f"the NVIDIA driver cannot be asked ({error})"


C_COMPILERS = ("cc", "gcc", "clang")
"""What Triton looks for to build the function that launches a kernel."""


def why_no_cuda(*, load: Load = ctypes.CDLL) -> str | None:
    """Why the cuda backend cannot be used on this machine; None when it can. Imports nothing and never raises."""
    found = find_gpu(load=load, ask_free=False)
    if isinstance(found, str):
        return found
    if found.capability < OLDEST_CAPABILITY:
        has, needs = (f"{major}.{minor}" for major, minor in (found.capability, OLDEST_CAPABILITY))
        return f"{found.name} has compute capability {has}, and {needs} is needed"
    return why_no_library()


def why_no_library() -> str | None:
    """Why torch and Triton cannot compute on a GPU; None when both are installed and torch was built for CUDA."""
    folders: list[Path] = []
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec("torch")
        folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if not folders:
        return "torch is not installed"
    if not any((folder / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return "the installed torch was built without CUDA"
    there = False
    with contextlib.suppress(ImportError, ValueError):
        there = find_spec("triton") is not None
    if not there:
        return "triton is not installed"
    if env.c_compiler() is None and not any(map(which, C_COMPILERS)):
        return f"Triton needs a C compiler, and there is none of {', '.join(C_COMPILERS)}"
    return None


def hold_context(*, load: Load = ctypes.CDLL) -> str | None:
    """Wakes the first GPU: makes the context that every library of this process then shares, and keeps it until the process ends. Takes
    some tenths of a second without Python's lock, half a GiB of the device, and never raises; returns why it could not.
    """
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    try:
        _check(cuda, "cuInit", cuda.cuInit(ctypes.c_uint(0)))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _check(cuda, "cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(0)))
        _check(cuda, "cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    except _RefusedError as refused:
        return str(refused)
    except (OSError, AttributeError, ValueError, ctypes.ArgumentError) as error:
        return f"the NVIDIA driver cannot be asked ({error})"
    return None


# ---------------------------------------------------------------------------------------------------------------- driver


class _RefusedError(Exception):
    """The driver answered a call with an error."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _ask(cuda: Any, load: Load, *, ask_free: bool) -> Gpu:
    """All facts of device 0. Raises _RefusedError with a sentence where the driver refuses."""
    _check(cuda, "cuInit", cuda.cuInit(ctypes.c_uint(0)))
    count, device = ctypes.c_int(), ctypes.c_int()
    _check(cuda, "cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    if count.value < 1:
        raise _RefusedError("the NVIDIA driver shows no GPU")
    _check(cuda, "cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), ctypes.c_int(0)))
    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    _check(cuda, "cuDeviceGetName", cuda.cuDeviceGetName(name, ctypes.c_int(len(name)), device))
    _check(cuda, "cuDeviceTotalMem", cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device))

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        code = cuda.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(number), device)
        return value.value if code == 0 else 0

    capability = (attribute(CAPABILITY_MAJOR), attribute(CAPABILITY_MINOR))
    called = name.value.decode("utf-8", errors="replace")
    multiprocessors = attribute(MULTIPROCESSORS)
    bus = ctypes.create_string_buffer(64)
    place = bus.value if cuda.cuDeviceGetPCIBusId(bus, ctypes.c_int(len(bus)), device) == 0 else b""
    free = free_bytes(place, load=load) if ask_free else None
    return Gpu(
        name=called,
        capability=capability,
        multiprocessors=multiprocessors,
        memory_bytes=total.value,
        # Without NVML nobody says what is free; another program's share would show only when memory is taken.
        memory_free_bytes=total.value if free is None else min(free, total.value),
        speeds=SPEEDS.get(called)
        or rough_speeds(
            capability,
            multiprocessors=multiprocessors,
            clock_hz=1000.0 * attribute(CLOCK_KHZ),
            memory_clock_hz=1000.0 * attribute(MEMORY_CLOCK_KHZ),
            bus_bits=attribute(MEMORY_BUS_BITS),
        ),
    )


def rough_speeds(
    capability: tuple[int, int], *, multiprocessors: int, clock_hz: float, memory_clock_hz: float, bus_bits: int
) -> GpuSpeeds:
    """Speeds of a GPU that was never measured: peaks by clocks and widths (two transfers a memory clock), times what is usually reached."""
    nearest = max((known for known in BF16_PER_CLOCK if known <= capability), default=min(BF16_PER_CLOCK))
    flops = REACHED_MATMUL * BF16_PER_CLOCK[nearest] * multiprocessors * clock_hz
    return GpuSpeeds(
        memory_bytes_per_s=max(1e9, REACHED_READ * 2 * memory_clock_hz * bus_bits / 8),
        bf16_flops_per_s=max(1e9, flops),
        fp8_flops_per_s=max(1e9, 2 * flops) if capability >= FP8_CAPABILITY else 0.0,
    )


def free_bytes(place: bytes, *, load: Load = ctypes.CDLL) -> int | None:
    """Free memory of the GPU at a PCI address, from NVML; None where NVML is not there or does not know it. Never raises."""
    try:
        nvml = load("libnvidia-ml.so.1")
        if not place or nvml.nvmlInit_v2() != 0:
            return None
        try:
            handle, memory = ctypes.c_void_p(), _Memory()
            if nvml.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(handle)) != 0:
                return None
            return int(memory.free) if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else None
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError, ValueError, ctypes.ArgumentError):
        return None


def _check(cuda: Any, call: str, code: int) -> None:
    """Raises _RefusedError when a call of the driver failed, with the driver's own name for the error."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    with contextlib.suppress(AttributeError, ctypes.ArgumentError):
        cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
    name = text.value.decode("ascii", errors="replace") if text.value else f"error {code}"
    raise _RefusedError(f"the NVIDIA driver cannot be used: {call} answers {name}")
