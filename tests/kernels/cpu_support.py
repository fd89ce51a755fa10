"""What the tests of the CPU op library share: the library itself, op sets at every instruction set, the one difference measure."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tradewind.kernels.cpu import library
from tradewind.kernels.cpu.library import ISAS, Library
from tradewind.kernels.cpu.ops import CpuOps

LEVELS = (0, 1, 2)
"""The instruction sets that these ops have code of their own for."""


def open_library() -> Library:
    """The installed library when it is newer than its sources, else a build of the sources as they stand, kept under their hash."""
    if library.is_fresh():
        found = library.load()
        if found is not None:
            return found
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler, and no built library")
    text = hashlib.sha256(repr((compiler, library.FLAGS)).encode())
    for path in sorted(library.SOURCES.iterdir()):
        text.update(path.name.encode() + path.read_bytes())
    target = Path(tempfile.gettempdir()) / "tradewind-cpu-builds" / text.hexdigest()[:20] / library.FILE.name
    if not target.exists():
        library.build(target, compiler)
    return Library(target)


@contextmanager
def cpu_ops(*, threads: int = 2, isa: int | None = None) -> Iterator[CpuOps]:
    """An op set, closed afterwards; skips where the machine lacks the instruction set."""
    found = open_library()
    if isa is not None and isa > found.isa:
        pytest.skip(f"this machine has no {ISAS[isa]}")
    ops = CpuOps(found, threads=threads, isa=isa)
    try:
        yield ops
    finally:
        ops.close()


def error(a: Any, b: Any) -> float:
    """||a - b|| / ||b|| in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300))


def count(n: int) -> Any:
    """How many leading rows are live, as ops take it."""
    return np.array([n], np.int32)


def floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Any:
    """Normal float32 values."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)
