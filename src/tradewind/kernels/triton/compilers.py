"""Kernels compiled by other processes: on a new machine that takes minutes of one processor, and most of it holds Python's lock.

Knows: how a kernel's description gets to a process and its binary back (through Triton's cache on disk). Refuses to know: which kernels are
wanted and when. No helper ever touches the GPU: they are forked from a process that has imported Triton and our kernels and made no
context.

    Compilers(n) --starts--> one process: imports, hashes Triton --forks--> n helpers, one socket each; then it ends
    compile(src) --description--> an idle helper: triton.compile, C launcher --"done"--> the caller finds both on disk

A helper that fails or is gone costs time and nothing else: whoever asked compiles for itself, and meets the error there. Helpers end with
their sockets, whatever ended the other side.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as triton_compile
from triton.runtime import cache, driver
from triton.runtime.jit import JITFunction

from tradewind.kernels.triton import early

HEAD = struct.Struct("<I")
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tradewind.kernels.triton import compilers; compilers.main(sys.argv[2:])"
)
KERNEL_MODULES = ("tradewind.kernels.triton.ops", "tradewind.kernels.triton.step")
"""Imported before the fork; these bring all others that have kernels."""
LEAST_CORES = 4
MOST_PROCESSES = 12
NICE = 5
"""Helpers stand back behind the engine's own threads."""


def wanted(description: bytes, *, cores: int, architecture: int) -> Compilers | None:
    """Helpers where an engine of that description has not yet had all its kernels compiled on this machine, and there are cores for them;
    None where kernels will be found on disk. `architecture`: 90 for compute capability 9.0."""
    if cores < LEAST_CORES:
        return None
    try:
        sources = sorted((path.name, path.stat().st_mtime_ns) for path in Path(__file__).parent.glob("*.py"))
        key = hashlib.sha256(repr((description, triton.__version__, sources)).encode()).hexdigest()[:24]
        # In Triton's own cache, so that both go together.
        note = Path(knobs.cache.dir) / f"tradewind-{key}"
        if note.exists():
            return None
        note.parent.mkdir(parents=True, exist_ok=True)
        return Compilers(min(MOST_PROCESSES, cores - 2), architecture=architecture, note=note)
    except OSError:  # no such folder, no processes to be had: the engine compiles for itself
        return None


class Compilers:
    """Processes that compile. `compile` is called by any number of threads; whoever made this calls `close`."""

    def __init__(self, count: int, *, architecture: int, note: Path | None = None) -> None:
        """Returns at once; the helpers are ready when they have imported what the kernels import. `note`: a file that is written when
        everything was compiled."""
        self.count, self._note = count, note
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [pair[1] for pair in pairs]
        self._idle: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._ours = [pair[0] for pair in pairs]
        command = [sys.executable, "-c", PROGRAM, json.dumps(sys.path), str(architecture)]
        try:
            self._process = subprocess.Popen(
                [*command, *(str(end.fileno()) for end in theirs)],
                pass_fds=[end.fileno() for end in theirs],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            for end in theirs:
                end.close()
        for end in self._ours:
            self._idle.put(end)

    def compile(self, src: Any, *, target: Any, options: dict[str, Any], env_vars: dict[str, Any] | None) -> bool:
        """Has the kernel compiled into Triton's cache; waits for it without Python's lock. False: it was not, for whatever reason."""
        if on_disk(src, target=target, options=options, env_vars=env_vars):  # a start that was cut left some
            return True
        text = described(src, target=target, options=options, env_vars=env_vars)
        if text is None:
            return False
        end = self._idle.get()
        if end is None:  # none is left: the next one that asks shall hear it, too
            self._idle.put(None)
            return False
        try:
            end.sendall(HEAD.pack(len(text)) + text)
            answer = end.recv(1)
        except OSError:
            answer = b""
        if answer:
            self._idle.put(end)
        else:
            self.count -= 1
            if self.count <= 0:
                self._idle.put(None)
        return answer == b"1"

    def close(self, *, complete: bool = False) -> None:
        """Ends the helpers; may be called twice. complete: nothing is left to compile, which is noted for the next start."""
        if complete and self._note is not None:
            with contextlib.suppress(OSError):
                self._note.touch()
        for end in self._ours:
            end.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.1)
            return
        self._process.kill()
        self._process.wait()


def on_disk(src: Any, *, target: Any, options: dict[str, Any], env_vars: dict[str, Any] | None) -> bool:
    """Whether Triton's cache has the kernel; False also where this version's cache is not understood."""
    with contextlib.suppress(Exception):
        backend = make_backend(target)
        key = cache.get_cache_key(src, backend, backend.parse_options(dict(options)), env_vars=env_vars)
        manager = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(manager.get_group(f"{src.name[:150]}.json"))
    return False


class _Pickler(pickle.Pickler):
    """Kernels that are arguments of kernels go by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, JITFunction):
            return _named, _name_of(value)
        return NotImplemented


def _name_of(kernel: Any) -> tuple[str, str]:
    """Module and name. Raises PicklingError where they lead somewhere else."""
    module, name = kernel.fn.__module__, kernel.fn.__name__
    if getattr(sys.modules.get(module), name, None) is not kernel:
        raise pickle.PicklingError(f"{module}.{name} is not what it is called")
    return module, name


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def described(src: Any, *, target: Any, options: dict[str, Any], env_vars: dict[str, Any] | None) -> bytes | None:
    """All that the compiler is told of a kernel; None where that cannot travel."""
    if not isinstance(src, ASTSource):
        return None
    out = io.BytesIO()
    parts = (src.fn, src.signature, src.constants, src.attrs, tuple(vars(target).values()), options, env_vars)
    try:
        _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(parts)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return out.getvalue()


# -------------------------------------------------------------------------------------------------- in the other processes


class _NoDriver:
    """Stands in for the GPU: answers what the compiler asks."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> Any:
        from triton.backends.nvidia.driver import ty_to_cpp

        return ty_to_cpp(kind)


def main(arguments: Sequence[str]) -> None:
    """The process that forks: [architecture, number of a socket, ...]. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    architecture, *ends = map(int, arguments)
    driver.set_active(_NoDriver(GPUTarget("cuda", architecture, 32)))
    with contextlib.suppress(OSError):
        os.nice(NICE)
    gc.disable()
    hashing = threading.Thread(target=early.warm, args=(architecture,))
    hashing.start()
    for name in KERNEL_MODULES:
        importlib.import_module(name)
    hashing.join()  # a fork takes no thread along
    gc.freeze()
    for number in ends:
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                _serve(socket.socket(fileno=number))
            os._exit(0)
    os._exit(0)


def _serve(end: socket.socket) -> None:
    """Compiles what comes until nobody is there any more."""
    with end.makefile("rb") as stream:
        while len(head := stream.read(HEAD.size)) == HEAD.size:
            done = False
            with contextlib.suppress(Exception):
                _compile(stream.read(*HEAD.unpack(head)))
                done = True
            end.sendall(b"1" if done else b"0")


def _compile(text: bytes) -> None:
    fn, signature, constants, attrs, target, options, env_vars = pickle.loads(text)
    src = ASTSource(fn, signature, constants, attrs)
    kernel = triton_compile(src, target=GPUTarget(*target), options=options, _env_vars=env_vars)
    from triton.backends.nvidia import driver as nvidia

    if hasattr(nvidia, "make_launcher"):  # versions that compile a C function for each kernel
        with contextlib.suppress(Exception):
            nvidia.CudaLauncher(src, kernel.metadata)
