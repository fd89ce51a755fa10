"""Traces: spans of a request begin and end when the engine said so, under the caller's span."""

from __future__ import annotations

import dataclasses
import gzip
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from support_reports import Receipt, arrived, columns, one_request, scheduled, step, tokens

from tradewind.contract.errors import MissingExtraError, UserError
from tradewind.contract.events import FrontTimes, Preempted
from tradewind.observability.lives import Lives
from tradewind.observability.receipt_book import ReceiptBook
from tradewind.observability.traces import REMEMBERED, Traces, make_traces

SHIFT_NS = 1_000_000_000_000


def traced(**more: Any) -> tuple[Traces, Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    made = Traces(SimpleSpanProcessor(exporter), model="tiny", version="0.1", wall_minus_monotonic_ns=SHIFT_NS, **more)
    return made, exporter


def times(span: Any) -> tuple[float, float]:
    return (span.start_time - SHIFT_NS) / 1e9, (span.end_time - SHIFT_NS) / 1e9


def by_name(exporter: Any) -> dict[str, Any]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


RECEIPT = Receipt(
    id="a", arrived_s=9.9, scheduled_s=10.5, first_token_s=10.7, finished_s=11.0, completion_tokens=3, tenant="key-x"
)


def test_a_request_has_its_parts_with_the_engines_times() -> None:
    traces, exporter = traced()
    Lives([traces]).take_reports(one_request())
    assert not exporter.get_finished_spans(), "a request is told whole, when its receipt is there"
    traces.take_receipt(RECEIPT)
    spans = by_name(exporter)
    assert set(spans) == {"request", "queue", "prefill", "decode"}
    assert times(spans["request"]) == pytest.approx((9.9, 11.0))
    assert times(spans["queue"]) == pytest.approx((9.9, 10.5)), "the way from HTTP to the engine is waiting too"
    assert times(spans["prefill"]) == pytest.approx((10.5, 10.7))
    assert times(spans["decode"]) == pytest.approx((10.7, 10.9))
    root = spans["request"]
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == root.context.span_id
        assert spans[name].context.trace_id == root.context.trace_id
    assert root.parent is None
    about = dict(root.attributes)
    assert about["gen_ai.request.model"] == "tiny"
    assert about["gen_ai.usage.input_tokens"] == 10 and about["gen_ai.usage.output_tokens"] == 3
    assert about["gen_ai.response.finish_reasons"] == ("stop",)
    assert about["tradewind.request_id"] == "req-1"
    assert "key-x" not in str(about)
    assert root.resource.attributes["service.name"] == "tradewind"


@pytest.mark.parametrize("reported", [8, 3])
def test_a_request_carries_its_receipt(reported: int) -> None:
    """The parts and what bound it are attributes of the request's span, also when the client was gone before the engine's end."""
    traces, exporter = traced()
    book = ReceiptBook(on_made=lambda made, receipt: traces.take_itemised(made))
    lives = Lives([book, traces])
    front = FrontTimes(received_s=9.8, read_s=9.85, parsed_s=9.86, submitted_s=9.9)
    receipt = dataclasses.replace(RECEIPT, sequences=("a",), times=front)
    lives.take_reports(one_request()[:reported])
    book.take_receipt(receipt)
    traces.take_receipt(receipt)
    lives.take_reports(one_request()[reported:])
    about = dict(by_name(exporter)["request"].attributes)
    parts = {name: value for name, value in about.items() if name.startswith("tradewind.part.")}
    assert about["tradewind.e2e_ms"] == pytest.approx(1200.0)
    assert sum(parts.values()) == pytest.approx(1200.0, abs=0.02)
    first = [value for name, value in about.items() if name.startswith("tradewind.ttft_part.")]
    assert bool(first) == ("tradewind.ttft_ms" in about) == ("tradewind.ttft_binding.cause" in about)
    assert sum(first) == pytest.approx(about.get("tradewind.ttft_ms", 0.0), abs=0.02)
    assert (
        parts["tradewind.part.queue_step_ms"] == pytest.approx(500.0) and about["tradewind.binding.cause"] == "engine"
    )
    assert not traces._itemised


def test_the_callers_trace_goes_on() -> None:
    traces, exporter = traced()
    Lives([traces]).take_reports(one_request())
    traces.take_receipt(RECEIPT, traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    root = by_name(exporter)["request"]
    assert format(root.context.trace_id, "032x") == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert format(root.parent.span_id, "016x") == "00f067aa0ba902b7"


def test_a_caller_that_does_not_sample_is_obeyed() -> None:
    traces, exporter = traced()
    Lives([traces]).take_reports(one_request())
    traces.take_receipt(RECEIPT, traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")
    assert not exporter.get_finished_spans()


@pytest.mark.parametrize("header", ["", "garbage", "00-0-0-01", "ff-" + "a" * 32 + "-" + "b" * 16 + "-01"])
def test_a_bad_header_begins_a_trace_of_its_own(header: str) -> None:
    traces, exporter = traced()
    Lives([traces]).take_reports(one_request())
    traces.take_receipt(RECEIPT, traceparent=header)
    assert by_name(exporter)["request"].parent is None


def test_a_preempted_request_shows_it() -> None:
    traces, exporter = traced(with_receipts=False)
    Lives([traces]).take_reports(
        [
            arrived("a", 1.0),
            scheduled("a", 2.0),
            columns(["a"], 3.0),
            Preempted(request_id="a", at_s=4.0, lost_tokens=11, for_whom="b"),
            step(4.0),
            scheduled("a", 5.0, resumed=True),
            columns(["a"], 6.0),
            tokens("a", 7.0, finish="length", generated=3),
        ]
    )
    spans = sorted((s for s in exporter.get_finished_spans() if s.name != "request"), key=lambda s: s.start_time)
    assert [span.name for span in spans] == ["queue", "prefill", "decode", "preempted", "prefill", "decode"]
    assert [times(span) for span in spans] == [(n, n + 1) for n in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    assert [span.attributes["tradewind.resumed"] for span in spans if span.name == "prefill"] == [False, True]
    root = next(span for span in exporter.get_finished_spans() if span.name == "request")
    assert root.attributes["tradewind.preemptions"] == 1 and root.attributes["tradewind.recomputed_tokens"] == 11


def test_a_request_that_never_ran_is_all_queue_and_an_error_is_one() -> None:
    from importlib.util import find_spec

    if find_spec("opentelemetry") is None:
        pytest.skip("the extra trace is not installed")
    from opentelemetry.trace import StatusCode

    traces, exporter = traced(with_receipts=False)
    Lives([traces]).take_reports([arrived("a", 1.0), tokens("a", 3.0, 0, finish="error", error="no pages")])
    spans = by_name(exporter)
    assert set(spans) == {"request", "queue"}
    assert times(spans["queue"]) == (1.0, 3.0)
    assert spans["request"].status.status_code is StatusCode.ERROR
    assert spans["request"].status.description == "no pages"


def test_samples_and_prompts_of_one_request_are_one_trace() -> None:
    """The receipt may come before the engine has ended the sequences: the client left."""
    traces, exporter = traced()
    lives = Lives([traces])
    ids = ["cmpl-7-0", "cmpl-7-0.1", "cmpl-7-1"]
    lives.take_reports([arrived(id, 1.0) for id in [*ids, "cmpl-77"]])
    lives.take_reports([tokens(ids[0], 2.0, 0, finish="abort"), tokens("cmpl-77", 2.0, 0, finish="abort")])
    traces.take_receipt(Receipt(id="cmpl-7", samples=3, arrived_s=1.0, finished_s=2.0, finish="disconnect"))
    assert not exporter.get_finished_spans()
    lives.take_reports([tokens(id, 2.5, 0, finish="abort") for id in ids[1:]])
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans].count("request") == 1
    assert sorted(s.attributes["tradewind.sequence.id"] for s in spans if s.name == "queue") == ids
    traces.close()
    assert [s.name for s in exporter.get_finished_spans()].count("request") == 2, "what is left is told at the end"


def test_what_waits_is_bounded() -> None:
    traces, _ = traced()
    lives = Lives([traces])
    for number in range(REMEMBERED + 50):
        lives.take_reports([arrived(f"x{number}", 1.0), tokens(f"x{number}", 2.0, 0, finish="abort")])
    assert len(traces._lives) == REMEMBERED


def test_the_missing_extra_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from tradewind.observability.traces import make_traces\n"
        "from tradewind.contract.errors import MissingExtraError\n"
        "try:\n    make_traces('http://localhost:4318', model='m', version='0')\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--otlp-endpoint needs the package" in done.stdout and "tradewind[trace]" in done.stdout


def test_an_endpoint_must_be_a_url() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with pytest.raises(UserError, match="'localhost:4318'; it must be a URL"):
        make_traces("localhost:4318", model="m", version="0")
    assert issubclass(MissingExtraError, UserError)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/other"])
def test_spans_reach_a_collector(path: str) -> None:
    """Over HTTP, as protobuf, to the standard path unless another is given."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    came: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            came.append((self.path, gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        traces = make_traces(f"http://127.0.0.1:{server.server_port}{path}", model="tiny", version="0.1")
        Lives([traces]).take_reports(one_request())
        traces.take_receipt(RECEIPT)
        traces.close()
        server.shutdown()
        thread.join(5)
    assert [where for where, _ in came] == [path if path.strip("/") else "/v1/traces"]
    message = ExportTraceServiceRequest.FromString(came[0][1])
    names = [span.name for whole in message.resource_spans for scope in whole.scope_spans for span in scope.spans]
    assert sorted(names) == ["decode", "prefill", "queue", "request"]


def test_nothing_of_opentelemetry_is_imported_without_an_endpoint() -> None:
    code = "import sys, tradewind.observability.hub\nprint([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
