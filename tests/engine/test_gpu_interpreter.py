"""Runs test_gpu_*.py on a CPU, in processes of their own: Triton decides between interpreter and compiler when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("file", ["test_gpu_adapters.py", "test_gpu_engine.py", "test_gpu_mla.py", "test_gpu_moe.py"])
def test_the_engine_through_the_interpreter(file):
    pytest.importorskip("triton")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout=900", str(HERE / file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout, found.stdout[-2000:]
