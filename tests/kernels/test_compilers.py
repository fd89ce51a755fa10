"""Kernels compiled by other processes: they land where this process finds them, and a helper that is gone is no loss.

Compiled for a GPU that is not there, in a process of its own: the interpreter, which other tests here switch on, compiles nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

BEGIN = """
import json, sys, threading
import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0

driver.set_active(Driver())
from tradewind.kernels.triton import compilers, launch, step

found = []
knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: found.append([src.name, cache_hit])
table, changes = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)

def compile_one(processes):
    with launch.compiling(threads=2, compilers=processes):
        step.write_entries(table, changes)
"""


def told(program: str, *, cache: Path) -> Any:
    """What the program prints last, as JSON."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env={**kept, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_helper_compiles_and_this_process_finds_it(tmp_path: Path) -> None:
    """The second kernel goes to the same helper; after `close` the process that forked them is over."""
    found = told(
        """
processes = compilers.Compilers(1, architecture=90)
compile_one(processes)
with launch.compiling(threads=2, compilers=processes):
    step.write_rows(table, changes, torch.zeros(8, dtype=torch.int32))
processes.close()
processes.close()
over = processes._process.poll() is not None
step._write_rows_kernel.device_caches.clear()
with launch.compiling(threads=2, compilers=processes):  # nobody is asked for what lies on the disk
    step.write_rows(table, changes, torch.zeros(8, dtype=torch.int32))
print(json.dumps({"found": found, "left": processes.count, "over": over}))
""",
        cache=tmp_path,
    )
    assert found == {
        "found": [["_write_entries_kernel", True], ["_write_rows_kernel", True], ["_write_rows_kernel", True]],
        "left": 1,
        "over": True,
    }
    assert list(tmp_path.glob("*/_write_entries_kernel.cubin"))


def test_without_its_helpers_a_process_compiles_for_itself(tmp_path: Path) -> None:
    found = told(
        """
processes = compilers.Compilers(2, architecture=90)
processes._process.kill()
compile_one(processes)
with launch.compiling(threads=2, compilers=processes):
    step.write_rows(table, changes, torch.zeros(8, dtype=torch.int32))
processes.close()
print(json.dumps([found, processes.count]))
""",
        cache=tmp_path,
    )
    # Helpers that were forked before the kill live on, and are as good as any.
    assert [name for name, _ in found[0]] == ["_write_entries_kernel", "_write_rows_kernel"]
    assert 0 <= found[1] <= 2


def test_helpers_are_wanted_until_everything_was_compiled(tmp_path: Path) -> None:
    found = told(
        """
class Started:
    def __init__(self, count, *, architecture, note): self.count, self.note = count, note

real, compilers.Compilers = compilers.Compilers, Started
one = compilers.wanted(b"one engine", cores=16, architecture=90)
few = compilers.wanted(b"one engine", cores=2, architecture=90)
again = compilers.wanted(b"one engine", cores=6, architecture=90)
again.note.touch()
done = compilers.wanted(b"one engine", cores=16, architecture=90)
other = compilers.wanted(b"another engine", cores=16, architecture=90)
print(json.dumps([one.count, few, again.count, done, other.count]))
""",
        cache=tmp_path / "not there yet",
    )
    assert found == [12, None, 4, None, 12]


def test_what_cannot_travel_is_not_sent(tmp_path: Path) -> None:
    found = told(
        """
from triton.compiler import ASTSource
target = GPUTarget("cuda", 90, 32)
def sent(constants):
    src = ASTSource(step._write_entries_kernel, {"a": "i32"}, constants)
    return compilers.described(src, target=target, options={}, env_vars=None) is not None
nameless = lambda: None
print(json.dumps([sent({(0,): 3}), sent({(0,): step._write_rows_kernel}), sent({(0,): nameless}),
                  compilers.described("ir.ttir", target=target, options={}, env_vars=None)]))
""",
        cache=tmp_path,
    )
    assert found == [True, True, False, None]
