"""OpenTelemetry spans of requests, made after the fact from what the engine reported.

Knows: which spans a request has and when they began and ended. Refuses to know: how spans travel (the exporter's).
Needs the extra `trace`; without an endpoint nothing of OpenTelemetry is imported.

      request ─┬─ queue ─┬─ prefill ─┬─ decode ─┬─ preempted ─┬─ prefill ─┬─ decode ─┐      one chain for each sample,
               └─────────┴───────────┴──────────┴─────────────┴───────────┴──────────┘      each span ends where the next begins
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from tradewind.contract.errors import MissingExtraError, UserError
from tradewind.observability.lives import Life, Listener, ReceiptLike, tenant_hash
from tradewind.observability.receipts import ItemisedReceipt

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

REMEMBERED = 4096
"""So many sequences may wait for their receipt, and receipts for their sequences; the oldest is told alone or dropped."""
SERVICE = "tradewind"


class Traces(Listener):
    """Fed by `lives.Lives`, and by receipts where requests come over HTTP. One thread feeds; the processor exports in its own."""

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        model: str,
        version: str,
        with_receipts: bool = True,
        wall_minus_monotonic_ns: int | None = None,
    ) -> None:
        """`with_receipts`: a request is told when its receipt and all its sequences are there; otherwise a sequence is told when it ends.

        `wall_minus_monotonic_ns` turns the engine's times into Unix times; None measures it now.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        if wall_minus_monotonic_ns is None:
            wall_minus_monotonic_ns = time.time_ns() - time.monotonic_ns()
        self._shift_ns = wall_minus_monotonic_ns
        resource = Resource.create({"service.name": SERVICE, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tradewind", version)
        self._model = model
        self._with_receipts = with_receipts
        self._lives: OrderedDict[str, Life] = OrderedDict()
        self._receipts: OrderedDict[str, tuple[ReceiptLike, str, list[Life]]] = OrderedDict()
        self._itemised: OrderedDict[str, ItemisedReceipt] = OrderedDict()

    # -- what happened -----------------------------------------------------------------------------------------------

    def ended(self, life: Life) -> None:
        """See Listener."""
        if not self._with_receipts:
            self._tell(None, "", [life])
            return
        owner = next((id for id in self._receipts if _belongs(life.id, id)), None)
        if owner is not None:
            self._receipts[owner][2].append(life)
            self._settle(owner)
            return
        self._lives[life.id] = life
        if len(self._lives) > REMEMBERED:
            _, oldest = self._lives.popitem(last=False)
            self._tell(None, "", [oldest])

    def take_itemised(self, made: ItemisedReceipt) -> None:
        """The parts of a request that is told next; where they come, they come before its receipt or its last sequence."""
        self._itemised[made.id] = made
        if len(self._itemised) > REMEMBERED:
            self._itemised.popitem(last=False)

    def take_receipt(self, receipt: ReceiptLike, *, traceparent: str = "") -> None:
        """A finished HTTP request; `traceparent` is its W3C Trace Context header, if it had one."""
        mine = [id for id in self._lives if _belongs(id, receipt.id)]
        self._receipts[receipt.id] = (receipt, traceparent, [self._lives.pop(id) for id in mine])
        self._settle(receipt.id)
        if len(self._receipts) > REMEMBERED:
            self._tell(*self._receipts.popitem(last=False)[1])

    def _settle(self, id: str) -> None:
        receipt, traceparent, lives = self._receipts[id]
        if len(lives) >= receipt.samples:
            del self._receipts[id]
            self._tell(receipt, traceparent, lives)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Tells what is left and sends everything; nothing is told afterwards."""
        for receipt in list(self._receipts.values()):
            self._tell(*receipt)
        for life in list(self._lives.values()):
            self._tell(None, "", [life])
        self._receipts.clear()
        self._lives.clear()
        self._provider.force_flush(int(timeout_s * 1e3))
        self._provider.shutdown()

    # -- as spans ----------------------------------------------------------------------------------------------------

    def _ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._shift_ns

    def _tell(self, receipt: ReceiptLike | None, traceparent: str, lives: list[Life]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        begin_s = receipt.arrived_s if receipt is not None else min(life.arrived_s for life in lives)
        end_s = receipt.finished_s if receipt is not None else max(life.ended_s for life in lives)
        root = self._tracer.start_span(
            "request",
            context=_parent_of(traceparent),
            kind=SpanKind.SERVER,
            start_time=self._ns(begin_s),
            attributes=self._about(receipt, lives),
        )
        error = receipt.error if receipt is not None else next((life.error for life in lives if life.error), None)
        if error:
            root.set_status(Status(StatusCode.ERROR, error))
        inside = set_span_in_context(root)
        for life in sorted(lives, key=lambda life: life.id):
            for place, (phase, phase_begin_s, phase_end_s) in enumerate(life.spans()):
                attributes: dict[str, AttributeValue] = {"tradewind.sequence.id": life.id}
                if phase == "prefill":
                    attributes["tradewind.resumed"] = place > 1
                start_s = (
                    min(begin_s, phase_begin_s) if place == 0 else phase_begin_s
                )  # the way to the engine is part of the queue
                child = self._tracer.start_span(
                    phase, context=inside, start_time=self._ns(start_s), attributes=attributes
                )
                child.end(self._ns(phase_end_s))
        root.end(self._ns(end_s))

    def _about(self, receipt: ReceiptLike | None, lives: list[Life]) -> dict[str, AttributeValue]:
        """Names of the GenAI conventions where they have one."""
        about: dict[str, AttributeValue] = {
            "gen_ai.request.model": self._model,
            "gen_ai.response.finish_reasons": [life.finish or "" for life in lives],
            "gen_ai.usage.output_tokens": sum(life.generated_tokens for life in lives),
            "tradewind.preemptions": sum(life.preemptions for life in lives),
            "tradewind.recomputed_tokens": sum(life.recomputed_tokens for life in lives),
        }
        if receipt is not None:
            about |= {
                "gen_ai.response.id": receipt.id,
                "gen_ai.usage.input_tokens": receipt.prompt_tokens,
                "gen_ai.usage.output_tokens": receipt.completion_tokens,
                "http.route": receipt.endpoint,
                "tradewind.cached_tokens": receipt.cached_tokens,
                "tradewind.request_id": receipt.request_id,
                "tradewind.tenant": tenant_hash(receipt.tenant),
                "tradewind.finish": receipt.finish,
            }
        else:
            about |= {
                "gen_ai.response.id": lives[0].id,
                "gen_ai.usage.input_tokens": sum(life.prompt_tokens for life in lives),
                "tradewind.cached_tokens": sum(life.cached_tokens for life in lives),
            }
        made = self._itemised.pop(str(about["gen_ai.response.id"]), None)
        if made is not None:
            about |= {f"tradewind.part.{part.name}_ms": round(part.seconds * 1e3, 3) for part in made.e2e}
            about |= {f"tradewind.blocked_by.{part.name}": part.blocked_by for part in made.e2e if part.blocked_by}
            about |= {f"tradewind.ttft_part.{part.name}_ms": round(part.seconds * 1e3, 3) for part in made.ttft}
            about |= {
                "tradewind.e2e_ms": round(made.e2e_s * 1e3, 3),
                "tradewind.binding.cause": made.binding.cause,
                "tradewind.binding.says": made.binding.says,
            }
            if made.ttft_s is not None:
                about["tradewind.ttft_ms"] = round(made.ttft_s * 1e3, 3)
            if made.ttft_binding is not None:
                about["tradewind.ttft_binding.cause"] = made.ttft_binding.cause
            if made.binding.blocked_by:
                about["tradewind.binding.blocked_by"] = made.binding.blocked_by
            if made.counterfactual is not None:
                about["tradewind.counterfactual"] = made.counterfactual.says
        return about


def _belongs(sequence: str, request: str) -> bool:
    """Whether a sequence is one of a request's: prompts are `ID-1`, samples `ID.1`."""
    return sequence == request or (sequence.startswith(request) and sequence[len(request)] in "-.")


def _parent_of(traceparent: str) -> Context | None:
    """The caller's span, from the header; None when there is none or it is no header of version 00."""
    if not traceparent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def make_traces(endpoint: str, *, model: str, version: str) -> Traces:
    """Spans sent to an OTLP/HTTP collector, for example "http://localhost:4318". Raises MissingExtraError or UserError.

    The path /v1/traces is added where the endpoint has none.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise MissingExtraError(
            package="opentelemetry-exporter-otlp-proto-http", extra="trace", purpose="--otlp-endpoint"
        ) from None
    from urllib.parse import urlsplit

    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"--otlp-endpoint is {endpoint!r}; it must be a URL such as http://localhost:4318")
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    exporter: SpanExporter = OTLPSpanExporter(endpoint=url)
    return Traces(BatchSpanProcessor(exporter), model=model, version=version)
