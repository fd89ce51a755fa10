"""Start-up in named phases whose times add up.

Knows: what each phase took. Refuses to know: what the phases do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One finished phase."""

    name: str
    seconds: float


class Phases:
    """Collects phases; the time between two of them is not lost but counted to the next one."""

    def __init__(self, *, began_s: float | None = None) -> None:
        self._last = time.perf_counter() if began_s is None else began_s
        self.done: list[Phase] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures what the block takes, from the end of the phase before."""
        try:
            yield
        finally:
            now = time.perf_counter()
            self.done.append(Phase(name=name, seconds=now - self._last))
            self._last = now

    @property
    def total_s(self) -> float:
        return sum(phase.seconds for phase in self.done)

    def text(self) -> str:
        """One line: the total and its parts in the order in which they ran."""
        parts = ", ".join(f"{phase.name} {phase.seconds:.2f}" for phase in self.done)
        return f"ready in {self.total_s:.2f} s ({parts})"
