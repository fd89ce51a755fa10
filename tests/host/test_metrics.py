"""Metrics and the board: names, the split of tokens, quantiles against an oracle, the text format read by Prometheus' own parser, cost."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_reports import Facts, Receipt, arrived, columns, one_request, scheduled, step, tokens

from tradewind.contract.events import Delayed, Preempted, StepDone
from tradewind.engine.columns import spelled_out
from tradewind.observability.board import SECONDS, Board, bucket_of, middle_of, plan_json, quantile
from tradewind.observability.hub import Hub
from tradewind.observability.lives import Life, Listener, Lives
from tradewind.observability.metrics import Histogram, Metrics, labelled, spelled


def metrics(**more: Any) -> Metrics:
    return Metrics(model="tiny", version="0.1", facts=Facts, **more)


def samples_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, as Prometheus' own parser reads it; `model_name` is left out of the labels."""
    parser = pytest.importorskip("prometheus_client.parser")
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
            assert (sample.name, labels) not in found, "a sample is there twice"
            found[sample.name, labels] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples_of(text)["tradewind:" + name, tuple(sorted(labels.items()))]


def test_a_request_is_counted_once_in_every_place() -> None:
    counted = metrics()
    Lives([counted]).take_reports(one_request())
    text = counted.text()
    assert value(text, "prompt_tokens_total") == 100
    assert value(text, "prompt_tokens_cached_total") == 64
    assert value(text, "prompt_tokens_computed_total") == 36
    assert value(text, "prompt_tokens_recomputed_total") == 0
    assert value(text, "generation_tokens_total") == 3
    assert value(text, "prefix_cache_queries_total") == 100
    assert value(text, "prefix_cache_hits_total") == 64
    assert value(text, "request_success_total", finished_reason="stop") == 1
    assert value(text, "request_success_total", finished_reason="abort") == 0
    for name, seconds in {
        "time_to_first_token_seconds": 0.7,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.2,
        "request_decode_time_seconds": 0.2,
        "request_inference_time_seconds": 0.4,
        "e2e_request_latency_seconds": 0.9,
        "request_time_per_output_token_seconds": 0.1,
    }.items():
        assert value(text, name + "_count") == 1, name
        assert value(text, name + "_sum") == pytest.approx(seconds), name
    assert value(text, "inter_token_latency_seconds_count") == 2
    assert value(text, "inter_token_latency_seconds_sum") == pytest.approx(0.2)
    assert value(text, "iteration_tokens_total_sum") == 36 + 3
    assert value(text, "steps_total") == 3


def test_columns_and_single_events_count_the_same() -> None:
    """However the engine reports its tokens, the numbers are the same."""
    reports: list[Any] = []
    for place in range(5):
        reports += [arrived(f"r{place}", 1.0 + place / 100), scheduled(f"r{place}", 2.0)]
    for turn in range(6):
        alive = [f"r{place}" for place in range(5) if turn <= place + 1]
        reports += [columns(alive, 3.0 + turn / 8), step(3.0 + turn / 8, rows=len(alive))]
    reports += [tokens(f"r{place}", 4.0, finish="length", generated=3) for place in range(5)]
    whole, spelled_one_by_one = metrics(), metrics()
    Lives([whole]).take_reports(reports)
    single = Lives([spelled_one_by_one])
    for event in spelled_out(reports):
        single.take(event)
    ours, theirs = samples_of(whole.text()), samples_of(spelled_one_by_one.text())
    for key, number in ours.items():
        if key[0].startswith("tradewind:"):
            assert theirs[key] == pytest.approx(number), key


def test_preempted_tokens_are_counted_as_recomputed_not_as_prompt() -> None:
    counted = metrics()
    Lives([counted]).take_reports(
        [
            arrived("a", 0.0, prompt=50),
            scheduled("a", 0.1),
            columns(["a"], 0.2),
            Preempted(request_id="a", at_s=0.3, lost_tokens=51, for_whom="b"),
            scheduled("a", 0.5, cached=32, resumed=True),
            columns(["a"], 0.6),
            tokens("a", 0.7, finish="length", generated=3),
        ]
    )
    text = counted.text()
    assert value(text, "prompt_tokens_total") == 50
    assert value(text, "prompt_tokens_cached_total") == 0, (
        "what a preempted request finds again is no hit of the prefix cache"
    )
    assert value(text, "prompt_tokens_recomputed_total") == 51 - 32
    assert value(text, "num_preemptions_total") == 1
    assert value(text, "request_queue_time_seconds_count") == 1
    assert value(text, "time_to_first_token_seconds_count") == 1


def test_refused_and_aborted_requests_end_and_leave_nothing_behind() -> None:
    counted = metrics()
    lives = Lives([counted])
    lives.take_reports(
        [
            tokens("never-arrived", 1.0, 0, finish="error", error="too long"),
            arrived("a", 1.0),
            tokens("a", 2.0, 0, finish="abort"),
            arrived("b", 1.0),
            scheduled("b", 1.5),
            columns(["b", "stranger"], 1.6),
        ]
    )
    assert lives.open == 1
    lives.engine_ended("the engine process was killed", 3.0)
    assert lives.open == 0
    assert not lives._last_s and not lives._resuming, "nothing may pile up"
    text = counted.text()
    assert value(text, "request_success_total", finished_reason="error") == 2
    assert value(text, "request_success_total", finished_reason="abort") == 1
    assert value(text, "e2e_request_latency_seconds_count") == 1, "failures would make latency look good"


def test_a_listener_that_raises_harms_nobody() -> None:
    class Bad(Listener):
        def step(self, event: StepDone) -> None:
            raise ValueError("broken")

    counted, bugs = metrics(), list[BaseException]()
    lives = Lives([Bad(), counted], on_bug=bugs.append)
    lives.take_reports(one_request())
    assert [str(bug) for bug in bugs] == ["broken"] * 3
    assert value(counted.text(), "generation_tokens_total") == 3
    assert Delayed(request_id="x", at_s=1.0, reason="no pages") is not None
    lives.take(Delayed(request_id="x", at_s=1.0, reason="no pages"))
    assert value(counted.text(), "num_delays_total") == 1


def test_the_text_is_what_prometheus_reads() -> None:
    counted = metrics(
        alive=lambda: True,
        refused=lambda: 4,
        info={"plan": {"machine": 'a "quoted" \\ name\nwith a line'}},
        startup_s=[("weights", 0.25)],
        engine_pid=lambda: None,
    )
    Lives([counted]).take_reports(one_request())
    counted.take_receipt(Receipt())
    counted.take_receipt(Receipt(finish="disconnect"))
    text = counted.text()
    found = samples_of(text)
    assert found["tradewind:plan_info", (("machine", 'a "quoted" \\ name\nwith a line'),)] == 1
    assert found["tradewind:startup_seconds", (("phase", "weights"),)] == 0.25
    assert found["tradewind:http_requests_refused_total", ()] == 4
    assert (
        found["tradewind:http_requests_total", (("endpoint", "/v1/chat/completions"), ("outcome", "disconnect"))] == 1
    )
    assert found["tradewind:engine_up", ()] == 1
    assert found["process_resident_memory_bytes", ()] > 1e6
    assert all(value >= 0 and math.isfinite(value) for value in found.values())
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family may be there once"
    assert text.endswith("\n") and "\n\n" not in text
    ours = [line for line in text.splitlines() if line.startswith("tradewind:")]
    assert all('model_name="tiny"' in line for line in ours)
    # Buckets rise, and the last one is the count.
    buckets = [v for (name, _), v in found.items() if name == "tradewind:inter_token_latency_seconds_bucket"]
    assert buckets == sorted(buckets) and buckets[-1] == 2


def test_gauges_are_asked_for_when_somebody_reads() -> None:
    now = [Facts(running=3, waiting=2, pages_used=(50, 1), pages_total=(100, 4))]
    counted = Metrics(model="tiny", version="0.1", facts=lambda: now[0])
    text = counted.text()
    assert value(text, "num_requests_running") == 3
    assert value(text, "num_requests_waiting") == 2
    assert value(text, "kv_cache_usage_perc") == 0.5
    assert value(text, "kv_cache_pages_used", group="1") == 1
    now[0] = Facts()
    assert value(counted.text(), "num_requests_running") == 0


@given(st.lists(st.floats(0, 1e4), max_size=50), st.lists(st.floats(0.001, 1e3), min_size=1, max_size=8, unique=True))
def test_histogram_counts_as_defined(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(sorted(bounds))
    for one in values:
        histogram.observe(one)
    for bound, count in histogram.cumulative():
        assert count == sum(one <= float(bound) for one in values)
    assert histogram.sum == pytest.approx(sum(values))


def test_numbers_and_labels_are_spelled_for_prometheus() -> None:
    assert [spelled(v) for v in (3, 3.0, 0.25, math.inf, -math.inf, 1e-7)] == [
        "3",
        "3",
        "0.25",
        "+Inf",
        "-Inf",
        "1e-07",
    ]
    assert labelled({}) == ""
    assert labelled({"a": 'x"\n\\'}) == '{a="x\\"\\n\\\\"}'


# -- the board -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.95]))
def test_quantiles_are_within_their_promise(values: list[float], q: float) -> None:
    counts: dict[int, int] = {}
    for one in values:
        counts[bucket_of(one)] = counts.get(bucket_of(one), 0) + 1
    true = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    got = quantile(counts, q)
    assert got is not None and abs(got - true) <= 0.026 * true


def test_no_quantile_of_nothing() -> None:
    assert quantile({}, 0.5) is None
    assert bucket_of(0.0) == 0 and middle_of(0) > 0


def board(now: list[float], **more: Any) -> Board:
    return Board(model="tiny", version="0.1", max_running=4, facts=Facts, clock=lambda: now[0], **more)


def test_the_board_shows_the_last_two_minutes() -> None:
    now = [9.0]
    shown = board(now)
    Lives([shown]).take_reports(one_request())
    now[0] = 12.0
    state = json.loads(shown.json())
    assert state["ttft"]["count"] == 1 and state["ttft"]["p50_ms"] == pytest.approx(700, rel=0.03)
    assert state["itl"]["count"] == 2 and state["itl"]["p95_ms"] == pytest.approx(100, rel=0.03)
    assert state["cache_hit_rate"] == 0.64
    assert state["finished"] == 1
    assert state["status"] == "ok"
    assert {len(column) for column in state["series"].values()} == {SECONDS}
    assert state["series"]["out_per_s"][-2:] == [3, 0], "second 10 had three tokens, second 11 none"
    assert state["series"]["in_per_s"][-2] == 100
    assert state["series"]["ttft_p50_ms"][-1] is None
    assert state["throughput"]["out_per_s"] == 1.0, "three tokens in the three seconds since it began"
    now[0] = 12.0 + SECONDS
    later = json.loads(shown.json())
    assert later["ttft"] == {"p50_ms": None, "p95_ms": None, "count": 0}
    assert later["cache_hit_rate"] is None
    assert sum(later["series"]["out_per_s"]) == 0
    assert later["finished"] == 1, "what is counted since the start stays"


def test_the_board_stays_small() -> None:
    now = [0.0]
    shown = board(now)
    lives = Lives([shown])
    for second in range(1000):
        lives.take_reports(
            [arrived(f"r{second}", second), scheduled(f"r{second}", second), columns([f"r{second}"], second + 0.3)]
        )
        lives.take_reports([tokens(f"r{second}", second + 0.6, finish="stop", generated=2), step(second + 0.6)])
        now[0] = second + 0.9
    assert len(shown._seconds) <= SECONDS + 1
    assert len(shown.json()) < 20_000


def test_a_dead_engine_is_said() -> None:
    assert json.loads(board([1.0], why_dead=lambda: "it was killed").json())["status"] == "it was killed"
    assert plan_json(None) == b"null"


# -- all together --------------------------------------------------------------------------------------------------------


def hub() -> Hub:
    return Hub.for_server(model="tiny", version="0.1", max_running=64, facts=Facts, why_dead=lambda: None)


def test_a_step_of_64_rows_costs_little() -> None:
    """All listeners together, under 100 microseconds a step; measured 15 to 25."""
    told = hub()
    ids = [f"chatcmpl-{random.randbytes(12).hex()}" for _ in range(64)]
    for id in ids:
        told.take_reports([arrived(id, 0.5), scheduled(id, 0.6)])
    turns = [[columns(ids, 1 + n / 100), step(1 + n / 100, rows=64)] for n in range(1500)]
    spent: list[float] = []
    for turn in turns:
        began = time.perf_counter()
        told.take_reports(turn)
        spent.append(time.perf_counter() - began)
    assert statistics.median(spent) < 100e-6
    assert value(told.metrics.text(), "generation_tokens_total") == 64 * 1500
    assert value(told.metrics.text(), "inter_token_latency_seconds_count") == 64 * 1499


def test_the_hub_survives_a_broken_receipt(caplog: pytest.LogCaptureFixture) -> None:
    told = hub()
    told.take_receipt(None)  # type: ignore[arg-type]
    told.take_receipt(Receipt())
    assert value(told.metrics.text(), "http_requests_total", endpoint="/v1/chat/completions", outcome="ok") == 1
    told.close()


def test_a_life_tells_its_spans_without_a_gap() -> None:
    seen: list[Life] = []

    class Keep(Listener):
        def ended(self, life: Life) -> None:
            seen.append(life)

    Lives([Keep()]).take_reports(one_request())
    spans = seen[0].spans()
    assert [name for name, _, _ in spans] == ["queue", "prefill", "decode"]
    assert spans[0][1] == 10.0 and spans[-1][2] == 10.9
    assert all(end == begin for (_, _, end), (_, begin, _) in pairwise(spans))
