"""Who looks at each step as it goes to the device and comes back, to learn what steps take.

Knows: the two moments, and what is told of how well times are known. Refuses to know: how times are fitted (simulate, which is handed in).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from tradewind.contract.step import Step, StepResult


class StepTimeStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How well step times are known."""

    steps: int = 0
    """Steps that the newest fit is made from; 0: none was made yet."""
    held_out: int = 0
    """Steps that its errors were measured on, which it had not seen."""
    error_median: float | None = None
    """Of |predicted - measured| / measured on these."""
    error_p90: float | None = None
    refits: int = 0
    paces: bool = False
    """Whether the scheduler paces by it now."""


class StepWatch(Protocol):
    """Called by the engine's loop, in its thread; must return within microseconds and never raise."""

    def submitted(self, step: Step) -> None:
        """A step was put on the device."""

    def collected(self, result: StepResult) -> None:
        """The oldest of them came back."""

    def stats(self) -> StepTimeStats:
        """A snapshot; changes nothing."""

    def close(self) -> None:
        """The engine ends: may wait a moment, writes what is to be kept."""
