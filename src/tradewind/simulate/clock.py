"""Where time comes from: the machine's, or a virtual one that only moves when told.

Knows: seconds. Refuses to know: who waits.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of seconds that never run backwards."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """`time.monotonic`."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """Stands still until somebody sleeps or advances it; a simulated hour costs nothing."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Moves the time forward."""
        assert seconds >= 0, "time does not run backwards"
        self._now += seconds
