"""The one protocol between the wings: two verbs.

Implementations: one rank, a group of ranks (runner), scripted, simulated, replayed (simulate). Steps are executed in the order in which
they were submitted; a page written by step N may be read by step N + 1.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tradewind.contract.step import Step, StepResult


class Executor(Protocol):
    """Does steps. Not thread-safe: one owner (the engine loop) calls it."""

    def submit(self, step: Step) -> None:
        """Takes a step over and returns without waiting for it."""

    def collect(self) -> StepResult:
        """Waits for the oldest step that was submitted and not collected. Raises EngineDeadError when none can come any more."""

    def close(self) -> None:
        """Gives everything back; afterwards submit and collect must not be called."""


@runtime_checkable
class Resting(Protocol):
    """An executor that can do without its memory of keys and values for a while."""

    def rest(self) -> None:
        """Gives that memory back to the system; what was in it is lost, and it comes back as steps write to it.

        Only while no step flies and no page is in use.
        """
