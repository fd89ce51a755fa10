"""Runs the Triton tests on a CPU, each file in a process of its own: Triton decides between interpreter and compiler when imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "file",
    [
        "test_triton_blocks.py",
        "test_triton_kernels.py",
        "test_triton_lanes.py",
        "test_triton_latent.py",
        "test_triton_long.py",
        "test_triton_low_rank.py",
        "test_triton_moe.py",
        "test_triton_ops.py",
        "test_triton_shared.py",
        "test_triton_step.py",
    ],
)
def test_kernels_through_the_interpreter(file):
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
    assert " passed" in found.stdout and "skipped" not in found.stdout.splitlines()[-1], found.stdout[-2000:]
