"""Graphs captured before a step needs them, in a thread, while the engine has nothing to do.

Knows: a list of what is wanted, and when it may work: nothing flies and nothing was submitted for a moment. Refuses to know: which steps
are usual (graph_runner), and what a graph holds.

A capture takes 10 to 30 ms of the interpreter. Done when a step first needs it, it holds up every running answer once for each new size:
512 requests at once paid 0.4 s for 28 of them. An engine under load from its first moment captures on the way, as before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tradewind.kernels.triton.graphs import Gpu, Graph

LOG = logging.getLogger("tradewind.runner")
QUIET_S = 0.05
"""For so long nothing was submitted: the engine is at rest."""
LOOK_S = 0.005
Key = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far capturing ahead has come. What is still missing: wanted - captured - passed_over."""

    wanted: int
    captured: int
    """By this thread."""
    passed_over: int
    """Wanted, but known when their turn came: a step had captured them, or there is room for no more."""
    plan_s: float
    """Spent planning, waits for whoever plans something else, captures or spoils captures included."""
    capture_s: float
    """Spent capturing, waits for whoever spoils captures included."""
    error: str = ""
    """Why it ended before its time, if it did."""


class Ahead:
    """Captures what is wanted in its own thread. One writer of the list; `keep` is called from the thread."""

    def __init__(
        self,
        gpu: Gpu,
        *,
        may_begin: Callable[[], bool],
        last_work_s: Callable[[], float],
        known: Callable[[Key], bool],
        keep: Callable[[Key, Graph], None],
    ) -> None:
        """`may_begin`: kernels are compiled. `last_work_s`: when work was last submitted (time.perf_counter); infinite while some flies."""
        self._gpu, self._may_begin, self._last_work_s, self._known, self._keep = (
            gpu,
            may_begin,
            last_work_s,
            known,
            keep,
        )
        self._wanted: deque[tuple[Key, Callable[[], object], Callable[[], None]]] = deque()
        self._news = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = 0
        self._captured = self._passed_over = 0
        self._plan_s = self._capture_s = 0.0
        self.error: BaseException | None = None
        """Why it stopped, if it failed: steps then capture for themselves."""

    def want(self, wanted: Iterable[tuple[Key, Callable[[], object], Callable[[], None]]]) -> None:
        """Adds graphs in the order in which they should come: (key, plan, launches). `plan` may allocate, `launches` must not."""
        more = list(wanted)
        self._asked += len(more)
        self._wanted.extend(more)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tradewind-capture", daemon=True)
            self._thread.start()
        self._news.set()

    @property
    def done(self) -> bool:
        """Whether nothing is left to capture."""
        return not self._wanted or self.error is not None

    @property
    def progress(self) -> Progress:
        """Counts and times since the start; changes nothing. From any thread, whose view may lag by one graph."""
        return Progress(
            captured=self._captured,
            passed_over=self._passed_over,
            wanted=self._asked,
            plan_s=self._plan_s,
            capture_s=self._capture_s,
            error="" if self.error is None else f"{type(self.error).__name__}: {self.error}"[:300],
        )

    def close(self) -> None:
        """Ends the thread after its current capture."""
        self._over.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            while not self._may_begin():
                if self._over.wait(0.05):
                    return
            self._gpu.begin_beside()
            while not self._over.is_set():
                self._news.clear()
                while self._wanted and self._at_rest():
                    key, plan, run = self._wanted[0]
                    if self._known(key):
                        self._passed_over += 1
                    else:
                        began = perf_counter()
                        with self._gpu.quiet, self._gpu.working():  # what a plan fills is there for the steps behind it
                            plan()
                        planned = perf_counter()
                        self._keep(key, self._gpu.capture(run, beside=True))
                        self._captured += 1
                        self._plan_s += planned - began
                        self._capture_s += perf_counter() - planned
                    self._wanted.popleft()
                self._news.wait()
        except Exception as error:  # an engine without these graphs is a whole engine
            self.error = error
            LOG.warning("graphs are captured on the way from now on, for capturing ahead failed: %s", error)

    def _at_rest(self) -> bool:
        """Waits until the engine rests; False when it is closed."""
        while perf_counter() - self._last_work_s() < QUIET_S:
            if self._over.wait(LOOK_S):
                return False
        return not self._over.is_set()
