"""The C++ op library: where it is, whether this machine can use it, and its handles as Python sees them.

Knows: the file, the C interface, instruction sets by name, how to compile the sources in development. Refuses to know: tensors, ops'
arguments, who calls. Nothing here imports torch, and a ctypes call releases the interpreter while the library runs.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILE = Path(__file__).parent / "libtradewind_cpu.so"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno")
"""Compiler flags, the same as in setup.py. No -march: instruction sets are chosen when the library runs."""

ISAS = ("portable", "avx2", "avx512", "avx512_bf16")
"""Instruction sets by their number in csrc/runtime.h; each includes those before it."""


class Library:
    """A loaded op library; never changes. Raises OSError or AttributeError when the file is not one of ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = ctypes.CDLL(str(path))
        h = self.handle
        h.tw_op_name.restype = ctypes.c_char_p
        h.tw_team_new.restype = ctypes.c_void_p
        h.tw_team_new.argtypes = [ctypes.c_int, ctypes.c_int]
        h.tw_team_free.argtypes = [ctypes.c_void_p]
        h.tw_team_set_isa.argtypes = [ctypes.c_void_p, ctypes.c_int]
        h.tw_team_set_linger.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        h.tw_team_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        h.tw_team_profile.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self.isa: int = h.tw_detect_isa()
        """The best instruction set of this machine, an index of ISAS."""
        self.ops: dict[str, tuple[int, int]] = {
            h.tw_op_name(i).decode(): (i, h.tw_op_args(i)) for i in range(h.tw_op_count())
        }
        """By name: id and number of argument words."""

    def team(self, *, threads: int, isa: int | None = None) -> Team:
        """Starts `threads - 1` workers (the caller is the first thread). isa caps the instruction set; None takes the best."""
        return Team(self, threads=threads, isa=self.isa if isa is None else min(isa, self.isa))


class Team:
    """The threads that walk tapes together. One tape runs at a time; a second caller waits. Owner: one op set."""

    def __init__(self, library: Library, *, threads: int, isa: int) -> None:
        assert threads >= 1, threads
        self.threads = threads
        self.isa = isa
        self._library = library
        self._handle: int | None = library.handle.tw_team_new(threads, isa)

    def run(self, words: int, calls: int) -> None:
        """Runs `calls` calls laid end to end at address `words`; returns when all threads are done."""
        assert self._handle is not None, "the team was closed"
        self._library.handle.tw_team_run(self._handle, words, calls)

    def profile(self, words: int, calls: int, times_ns: int) -> None:
        """As `run`, and writes int64 nanoseconds per call (thread 0, its waiting for the others included) to address `times_ns`."""
        assert self._handle is not None, "the team was closed"
        self._library.handle.tw_team_profile(self._handle, words, calls, times_ns)

    def linger(self, seconds: float) -> None:
        """Sets how long idle workers watch for the next tape before they sleep. While they watch they offer their core to others."""
        assert self._handle is not None, "the team was closed"
        self._library.handle.tw_team_set_linger(self._handle, int(seconds * 1e9))

    def close(self) -> None:
        """Ends the workers. Calling it again does nothing."""
        if self._handle is not None:
            self._library.handle.tw_team_free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def load() -> Library | None:
    """The library of this installation, or None: then `why_not` says why."""
    try:
        return Library(FILE)
    except (OSError, AttributeError):
        return None


def why_not() -> str | None:
    """Why `load` gives None, as one sentence; None when it does not."""
    if not FILE.exists():
        return (
            "the CPU op library was not built at installation (no C++ compiler was found, or it failed): "
            "install g++ and run pip install again"
        )
    try:
        Library(FILE)
    except (OSError, AttributeError) as error:
        return f"the CPU op library {FILE.name} cannot be loaded ({error}): run pip install again"
    return None


def sources() -> list[Path]:
    """The C++ files, sorted."""
    return sorted(SOURCES.glob("*.cpp"))


def is_fresh(target: Path = FILE) -> bool:
    """Whether `target` exists and no source or header is newer."""
    if not target.exists():
        return False
    built = target.stat().st_mtime
    return all(path.stat().st_mtime <= built for path in (*sources(), *SOURCES.glob("*.h")))


def build(target: Path, compiler: str, *, extra_flags: Sequence[str] = ()) -> None:
    """Compiles the sources in parallel and puts the library at `target`, at once and under a new inode. For development and tests.

    Raises subprocess.CalledProcessError with the compiler's message in stderr.
    """

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = {source: str(Path(folder) / f"{source.stem}.o") for source in sources()}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(run, compiler, *FLAGS, *extra_flags, "-c", str(source), "-o", made)
                for source, made in objects.items()
            ]
            for job in jobs:
                job.result()
        built = Path(folder) / target.name
        run(compiler, "-shared", "-pthread", *extra_flags, *objects.values(), "-o", str(built))
        built.replace(target)
