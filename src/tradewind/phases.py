"""Start-up in named phases whose times add up.

Knows: what each phase took, what ran beside them, and when this process began. Refuses to know: what the phases do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One finished phase."""

    name: str
    seconds: float


class Phases:
    """Collects phases; the time between two of them is not lost but counted to the next one."""

    def __init__(self, *, began_s: float | None = None) -> None:
        """`began_s`: when the first phase began, by `time.perf_counter`; None is now."""
        self._last = time.perf_counter() if began_s is None else began_s
        self.done: list[Phase] = []
        self.besides: list[Phase] = []
        """What other threads did meanwhile: part of no phase and of no total."""

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Measures what the block takes in a thread of its own, beside the phases."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.besides.append(Phase(name=name, seconds=time.perf_counter() - began))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures what the block takes, from the end of the phase before; a second block of one name is added to the first.

        A phase inside the block takes its part away from it.
        """
        try:
            yield
        finally:
            now = time.perf_counter()
            self._add(name, now - self._last)
            self._last = now

    def _add(self, name: str, seconds: float) -> None:
        for place, phase in enumerate(self.done):
            if phase.name == name:
                self.done[place] = Phase(name=name, seconds=phase.seconds + seconds)
                return
        self.done.append(Phase(name=name, seconds=seconds))

    @property
    def total_s(self) -> float:
        return sum(phase.seconds for phase in self.done)

    def text(self) -> str:
        """One line: the total, its parts in the order in which they ended, and what ran beside them; what took under 5 ms is left out."""
        parts = _listed(self.done)
        if besides := _listed(self.besides):
            parts += f"; beside them {besides}"
        return f"ready in {self.total_s:.2f} s ({parts})" if parts else f"ready in {self.total_s:.2f} s"


def _listed(phases: list[Phase]) -> str:
    return ", ".join(f"{phase.name} {phase.seconds:.2f}" for phase in phases if phase.seconds >= 0.005)


def process_began_s() -> float:
    """When this process began, by `time.perf_counter`: from Linux to 1/100 s, elsewhere guessed by its CPU time so far."""
    now = time.perf_counter()
    try:
        # Field 22 of stat(5), counted after the command, which may hold anything: clock ticks from boot to the process's start.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _ticks_per_s()
    except (OSError, ValueError, IndexError, AttributeError):
        age = time.process_time()  # which many threads make more than the time that has passed
    return now - max(0.0, age)


def _ticks_per_s() -> int:
    from os import sysconf

    return sysconf("SC_CLK_TCK")
