"""Where the GPU benchmarks lie. Importing this makes the package of this checkout importable, with or without PYTHONPATH.

Knows: folders. Refuses to know: what is in them. It is the only one of the gpu_*.py that touches sys.path.
"""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
SOURCES = BENCHMARKS.parent / "src"
SUITE = BENCHMARKS / "gpu_suite.py"
"""The command; it is what other processes are started with."""

for place in (str(BENCHMARKS), str(SOURCES)):
    if place not in sys.path:
        sys.path.insert(0, place)
