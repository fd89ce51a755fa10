"""The team of threads: sleeping and waking, many tapes in a row, callers in turn, and the library's own word about itself."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cpu_support import count, cpu_ops, floats, open_library
from tradewind.kernels.cpu import library
from tradewind.kernels.cpu.ops import CpuOps
from tradewind.kernels.cpu.tape import encode
from tradewind.kernels.table import OPS


def norms(ops: CpuOps, rows: int = 64) -> tuple[np.ndarray, np.ndarray, object]:
    x = floats(np.random.default_rng(0), rows, 64)
    out = np.zeros_like(x)
    with ops.record() as tape:
        for _ in range(20):
            ops.add_rms_norm(x, None, np.ones(64, np.float32), eps=0.0, out=out, count=count(rows))
    return x, out, tape


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_many_tapes_with_and_without_pauses(threads: int) -> None:
    with cpu_ops(threads=threads) as ops:
        x, out, tape = norms(ops)
        ops.team.linger(50e-6)
        expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True))
        for turn in range(200):
            out[:] = 0
            tape.run()  # type: ignore[attr-defined]
            assert np.allclose(out, expected, atol=1e-5)
            if turn % 40 == 0:
                time.sleep(0.002)  # the workers fall asleep


def test_two_python_threads_take_turns() -> None:
    with cpu_ops(threads=2) as ops:
        x, out, tape = norms(ops)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(100):
                    tape.run()  # type: ignore[attr-defined]
            except BaseException as error:
                failures.append(error)

        callers = [threading.Thread(target=work) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
        assert not failures
        assert np.isfinite(out).all()
        assert x.shape == out.shape


def test_python_runs_while_the_library_does() -> None:
    """ctypes lets go of the interpreter: another thread gets on during a long tape."""
    with cpu_ops(threads=1) as ops:
        big = np.ones((2000, 4096), np.float32)
        with ops.record() as tape:
            for _ in range(10):
                ops.softcap(big, cap=5.0, count=count(2000))
        ticks = []
        done = threading.Event()

        def tick() -> None:
            while not done.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0.0005)

        ticker = threading.Thread(target=tick)
        ticker.start()
        begin = time.perf_counter()
        tape.run()
        end = time.perf_counter()
        done.set()
        ticker.join()
        assert sum(begin < t < end for t in ticks) >= 3


def test_closing_twice_and_running_after() -> None:
    with cpu_ops(threads=3) as ops:
        tape = norms(ops)[2]
        ops.close()
        ops.close()
        with pytest.raises(AssertionError, match="closed"):
            tape.run()  # type: ignore[attr-defined]


def test_the_library_knows_every_op_of_the_table() -> None:
    found = open_library()
    for spec in OPS.values():
        assert spec.cpu is None or spec.cpu in found.ops
    assert 0 <= found.isa < len(library.ISAS)


def test_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = open_library().path
    monkeypatch.setattr(library, "FILE", tmp_path / "libtradewind_cpu.so")
    assert library.load() is None
    assert "was not built" in str(library.why_not())
    (tmp_path / "libtradewind_cpu.so").write_bytes(b"not a library")
    assert library.load() is None
    assert "cannot be loaded" in str(library.why_not())
    monkeypatch.setattr(library, "FILE", good)
    assert library.load() is not None
    assert library.why_not() is None


def test_words() -> None:
    assert encode(None) == 0
    assert encode(-5) == -5
    assert np.array([encode(0.1)], np.int64).view(np.float64)[0] == 0.1
    values = np.zeros(3)
    assert encode(values) == values.ctypes.data
