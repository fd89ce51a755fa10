"""When this process began: its age, whatever its threads have computed since."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tradewind import phases


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell a process's age")
def test_the_age_of_a_process_is_not_the_work_of_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen threads have more CPU time than time has passed."""
    began = phases.process_began_s()
    monkeypatch.setattr(time, "process_time", lambda: 1e6)
    assert abs(phases.process_began_s() - began) < 0.02
    assert began < time.perf_counter()


def test_where_the_age_is_not_told_cpu_time_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(path: str) -> Path:
        raise OSError(f"there is no {path}")

    monkeypatch.setattr(phases, "Path", no_file)
    monkeypatch.setattr(time, "process_time", lambda: 3.0)
    assert phases.process_began_s() == pytest.approx(time.perf_counter() - 3.0, abs=0.05)
