"""A plan on trial: kept or undone by the requests that it serves.

Knows: how many requests are enough to be sure. Refuses to know: what a plan is, who serves, and who carries out the verdict.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from tradewind.observability.attainment import wilson

Kept = TypeVar("Kept")
EARLY_Z = 3.0


class Try(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated candidate and how it did."""

    name: str
    attained: float
    ttft_p90_s: float
    tpot_p90_s: float


class Trial(Generic[Kept]):
    """A new plan in service on trial: kept when it does at least as well as the old one did on the same kind of traffic, else undone.

    Whoever serves calls `done` for each request and does what `verdict` says; nothing is changed here. `old` and `new` are whatever
    stands for the plans.
    """

    def __init__(self, old: Kept, new: Kept, *, before: float, requests: int = 200, loss: float = 0.05) -> None:
        """before: part of the requests that met their targets under the old plan since the drift."""
        self.old, self.new, self.before = old, new, before
        self._requests, self._loss = requests, loss
        self.met = self.of = 0
        """Requests that met their targets, of so many that are over."""

    def done(self, met: bool) -> None:
        """One more request is over under the new plan."""
        self.met, self.of = self.met + met, self.of + 1

    @property
    def verdict(self) -> Kept | None:
        """The plan to serve with from now on; None while it is not sure.

        Undone early when even the best that the interval allows is worse than before by the loss (Wilson's, at three standard deviations,
        for it is looked at after every request).
        """
        if not self.of:
            return None
        share = wilson(self.met, self.of, z=EARLY_Z)
        if share.high < self.before - self._loss:
            return self.old
        if self.of < self._requests:
            return None
        return self.new if share.share >= self.before - self._loss else self.old
