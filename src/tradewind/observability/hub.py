"""Everything that listens to one server, behind three calls.

Knows: who is told what. Refuses to know: HTTP, processes.

      engine's reports  -> take_reports  -> lives -> metrics, board, receipts, traces
      finished requests -> take_receipt  -> metrics, receipts, traces, log
      engine died       -> engine_ended  -> open sequences end with "error"
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from tradewind.config.plan import Plan
from tradewind.contract.events import Event
from tradewind.observability.board import Board, plan_json
from tradewind.observability.lives import Listener, Lives, ReceiptLike, TokenColumns
from tradewind.observability.logs import log_request
from tradewind.observability.metrics import EngineFacts, Metrics
from tradewind.observability.receipt_book import ReceiptBook
from tradewind.observability.receipts import ItemisedReceipt
from tradewind.observability.traces import Traces, make_traces

LOG = logging.getLogger("tradewind.observability")


class Hub:
    """The listeners of one server. All calls come from one thread; none of them raises."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        board: Board,
        plan: bytes,
        traces: Traces | None = None,
        log_requests: bool = False,
        page_tokens: int = 16,
        max_tokens_per_step: int = 2048,
        more: Iterable[Listener] = (),
    ) -> None:
        """`more` listeners are told of every sequence, too."""
        self.metrics, self.board, self.plan, self.traces = metrics, board, plan, traces
        self.on_itemised: Callable[[ItemisedReceipt, ReceiptLike | None], None] = lambda made, receipt: None
        """Told every itemised receipt; a journal listens here."""
        self.receipts = ReceiptBook(
            page_tokens=page_tokens, max_tokens_per_step=max_tokens_per_step, on_made=self._itemised
        )
        self._log_requests = log_requests
        # The receipts come before the traces, which carry their parts.
        listeners: list[Listener] = [metrics, board, self.receipts]
        if traces is not None:
            listeners.append(traces)
        listeners += more
        self._lives = Lives(listeners, on_bug=_bug)

    @classmethod
    def for_server(
        cls,
        *,
        model: str,
        version: str,
        max_running: int,
        facts: Callable[[], EngineFacts],
        why_dead: Callable[[], str | None],
        engine_pid: Callable[[], int | None] | None = None,
        refused: Callable[[], int] | None = None,
        plan: Plan | None = None,
        startup_s: Iterable[tuple[str, float]] = (),
        log_requests: bool = False,
        otlp_endpoint: str | None = None,
        page_tokens: int = 16,
        max_tokens_per_step: int = 2048,
        more: Iterable[Listener] = (),
    ) -> Self:
        """All of them. Raises MissingExtraError or UserError for an endpoint that cannot be used."""
        traces = make_traces(otlp_endpoint, model=model, version=version) if otlp_endpoint else None
        metrics = Metrics(
            model=model,
            version=version,
            facts=facts,
            alive=lambda: why_dead() is None,
            engine_pid=engine_pid,
            refused=refused,
            info=plan_info(plan),
            startup_s=startup_s,
        )
        board = Board(
            model=model,
            version=version,
            max_running=max_running,
            facts=facts,
            why_dead=why_dead,
            engine_pid=engine_pid,
            plan=plan,
        )
        return cls(
            metrics=metrics,
            board=board,
            plan=plan_json(plan),
            traces=traces,
            log_requests=log_requests,
            page_tokens=page_tokens,
            max_tokens_per_step=max_tokens_per_step,
            more=more,
        )

    def replanned(
        self, plan: Plan | None, *, max_running: int, page_tokens: int = 16, max_tokens_per_step: int = 2048
    ) -> None:
        """Another engine serves, under this plan."""
        self.receipts.replanned(page_tokens=page_tokens, max_tokens_per_step=max_tokens_per_step)
        self.plan = plan_json(plan)
        self.metrics.replanned(plan_info(plan))
        self.board.replanned(plan, max_running=max_running)

    def take(self, event: Event | TokenColumns) -> None:
        """See contract.events.Sink."""
        self._lives.take_reports((event,))

    def take_reports(self, reports: Iterable[Event | TokenColumns]) -> None:
        """What one turn of the engine brought."""
        self._lives.take_reports(reports)

    def take_receipt(self, receipt: ReceiptLike) -> None:
        """A finished HTTP request."""
        try:
            self.metrics.take_receipt(receipt)
            self.receipts.take_receipt(receipt)
            if self.traces is not None:
                self.traces.take_receipt(receipt, traceparent=receipt.traceparent)
            if self._log_requests:
                log_request(receipt)
        except Exception as error:  # whoever listens must not harm the answer
            _bug(error)

    def _itemised(self, made: ItemisedReceipt, receipt: ReceiptLike | None) -> None:
        if self.traces is not None:
            self.traces.take_itemised(made)
        self.on_itemised(made, receipt)

    def engine_ended(self, why: str) -> None:
        """The engine is gone and will report nothing more; a new one may follow."""
        now_s = time.monotonic()
        self._lives.engine_ended(why, now_s)
        self.receipts.engine_ended(now_s)

    def close(self) -> None:
        """Sends the spans that are left."""
        if self.traces is not None:
            self.traces.close()


def plan_info(plan: Plan | None) -> dict[str, Mapping[str, str]]:
    """Facts of the plan as labels."""
    if plan is None:
        return {}
    cache, numerics = plan.cache, plan.numerics
    return {
        "cache_config": {
            "block_size": str(cache.page_tokens),
            "num_blocks": ",".join(map(str, cache.pages)),
            "enable_prefix_caching": str(cache.prefix_cache),
            "cache_dtype": numerics.kv_format,
        },
        "plan": {
            "scenario": plan.scenario,
            "backend": numerics.backend,
            "compute": numerics.compute,
            "quantization": numerics.quantization,
            "machine": plan.hardware.name,
        },
    }


def _bug(error: BaseException) -> None:
    LOG.error("a listener failed", exc_info=error)
