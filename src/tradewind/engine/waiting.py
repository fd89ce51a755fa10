"""Requests that wait for an engine which is not there yet: while one process ends and another begins under a new plan.

Knows: handles, and that whoever leaves meanwhile is gone. Refuses to know: which engine comes, and how many may wait (the front's desk).

      submit  ->  WaitingClient  --- all() --->  the new engine's client.adopt(handles)
      queued in the old engine --^ keep()         readers of the handles notice nothing but time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tradewind.contract.events import FinishReason, TokensOut
from tradewind.contract.request import Request
from tradewind.engine.client import Client, Handle
from tradewind.engine.columns import Report
from tradewind.engine.loop import Cancel, Finish, Order


class WaitingClient(Client):
    """Takes requests and starts none. Used by one thread."""

    def __init__(
        self, check: Callable[[Request], None], *, on_reports: Callable[[list[Report]], None] = lambda reports: None
    ) -> None:
        """`check` raises for a request that can never run; `on_reports` is told of those that end while they wait."""
        super().__init__()
        self._check_fits, self._on_reports = check, on_reports

    def keep(self, handles: Iterable[Handle]) -> None:
        """Lets requests of another client wait here too; that one must have given them up."""
        with self._lock:
            for handle in handles:
                handle._client = self
                self._handles[handle.request.id] = handle

    def all(self) -> list[Handle]:
        """Everything that waits, in order of arrival; nothing waits here afterwards."""
        with self._lock:
            handles, self._handles = sorted(self._handles.values(), key=lambda one: one.request.arrived_s), {}
        return handles

    def fail(self, why: str) -> None:
        """Ends everything that waits with an error: no engine will come."""
        waiting = [handle.request for handle in self._handles.values()]
        self._fail(why)
        self._on_reports([_ended(request, "error", why) for request in waiting])

    def close(self) -> None:
        """Ends everything that waits with "abort"."""
        for request_id in list(self._handles):
            self.cancel(request_id)

    def _check(self, request: Request) -> None:
        self._check_fits(request)

    def _post(self, order: Order) -> None:
        if isinstance(order, Cancel):
            self._end(order.request_id, "abort")
        elif isinstance(order, Finish):
            self._end(order.request_id, order.reason)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        handle = self._handles.get(request_id)
        if handle is None:
            return
        ended: list[Report] = [_ended(handle.request, reason, None)]
        self._deliver(ended)
        self._on_reports(ended)


def _ended(request: Request, reason: FinishReason, why: str | None) -> TokensOut:
    return TokensOut(
        request_id=request.id,
        at_s=time.monotonic(),
        tokens=(),
        finish=reason,
        error=why,
        prompt_tokens=len(request.tokens),
    )
