"""Load tests without a server: arrivals, text, the window, intervals, goodput, and what the command line refuses."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tradewind.bench.serve_client import Heard
from tradewind.bench.serve_load import ARRIVALS, Ask, Text, arrival_times, from_trace, made_up, parse_lengths
from tradewind.bench.serve_measure import Measured, Sample, sample_of
from tradewind.bench.serve_report import ServeReport, WarmUp, make_report, parse_warm_up, to_json, token_times
from tradewind.bench.serve_show import to_html
from tradewind.cli_bench_serve import add_parser, check, described
from tradewind.contract.errors import UserError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tradewind bench")
    add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["serve", *words])


def sample(number: int = 0, *, due: float = 0.0, wait: float = 0.001, ttft: float = 0.1, tokens: int = 11, tpot: float = 0.01,
           error: str | None = None, name: str = "") -> Sample:  # fmt: skip
    return Sample(
        number=number, traffic_class=name, due_s=due, sent_s=due + wait, wait_s=wait, ttft_s=None if error else ttft,
        tpot_s=None if error or tokens < 2 else tpot, e2e_s=ttft + (tokens - 1) * tpot, gaps_s=() if error else (tpot,) * (tokens - 1),
        prompt_tokens=None if error else 100, output_tokens=0 if error else tokens, counted=True, cached_tokens=None, server_queue_s=None,
        error=error,
    )  # fmt: skip


def report(samples: list[Sample], *, targets: dict[str, dict[str, float]] | None = None, warm_up: str = "0s", opened: bool = True,
           lag_s: float = 0.0, seed: int = 0) -> ServeReport:  # fmt: skip
    measured = Measured(
        samples=tuple(samples),
        offered=len(samples),
        lag_p99_s=lag_s,
        extras=("ignore_eos", "stream_options"),
        tokens_per_word=1.3,
    )
    return make_report(
        measured, url="http://x", model="m", api="chat", load="a load", settings={}, warm_up=parse_warm_up(warm_up),
        targets=targets or {}, opened=opened, seed=seed,
    )  # fmt: skip


def value(made: ServeReport, name: str) -> float:
    figure = made.figure(name)
    assert figure is not None, name
    return figure.value


# -- what is sent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARRIVALS)
def test_arrivals_keep_their_rate_in_order(kind: str) -> None:
    times = arrival_times(kind, rate=50, rng=random.Random(3), count=20_000, burst=5)
    assert len(times) == 20_000 and times[0] == 0.0 and times == sorted(times)
    assert 20_000 / times[-1] == pytest.approx(50, rel=0.05)


def test_poisson_gaps_are_exponential_and_bursts_come_together() -> None:
    times = arrival_times("poisson", rate=10, rng=random.Random(1), count=20_000)
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1.0, abs=0.05)
    bursts = arrival_times("burst", rate=10, rng=random.Random(1), count=800, burst=8)
    assert all(len(set(bursts[at : at + 8])) == 1 for at in range(0, 800, 8)) and len(set(bursts)) == 100


def test_a_duration_ends_the_arrivals_and_the_seed_fixes_them() -> None:
    times = arrival_times("poisson", rate=100, rng=random.Random(7), duration_s=2.0)
    assert 130 < len(times) < 270 and times[-1] < 2.0
    assert times == arrival_times("poisson", rate=100, rng=random.Random(7), duration_s=2.0)
    with pytest.raises(UserError, match="lower one of them"):
        arrival_times("even", rate=1e5, rng=random.Random(7), duration_s=1e4)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_bad_rate_is_one_sentence(rate: float) -> None:
    with pytest.raises(UserError, match=r"--rate is .* requests a second; it must be over 0") as caught:
        check(parsed("http://x", "--rate", str(rate)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "1", "--concurrency", "2"], "two different loads"),
        (["--requests", "5", "--duration", "3"], "give one of them"),
        (["--requests", "0"], "--requests is 0"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--timeout", "-1"], "--timeout is -1"),
        (["--think", "nan"], "--think is nan"),
        (["--duration", "inf"], "--duration is inf"),
        (["--speed", "0", "--trace", "x"], "--speed is 0"),
        (["--shared-prefix", "-3"], "--shared-prefix is -3"),
        (["--header", "x-class chat"], "is no header; write it as in"),
        (["--header", "x class: chat"], "is no header; write it as in"),
        (["--header", "x-class: a\r\nb: c"], "no header can carry"),
        (["--header", "Authorization: Bearer x"], "a key is given with --api-key"),
    ],
)
def test_bad_options_are_one_sentence(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        check(parsed("http://x", *words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "0", "9:3", "a", "-4", "1:2:3", "99999999"])
def test_bad_lengths_name_their_option(text: str) -> None:
    with pytest.raises(UserError, match="--prompt-tokens is"):
        parse_lengths(text, option="--prompt-tokens")


def test_lengths_are_drawn_from_the_whole_range() -> None:
    lengths = parse_lengths("3:6", option="--prompt-tokens")
    assert {lengths.draw(random.Random(seed)) for seed in range(60)} == {3, 4, 5, 6}


@pytest.mark.parametrize("text", ["", "5", "95%", "-1s", "x%"])
def test_bad_warm_ups(text: str) -> None:
    with pytest.raises(UserError, match="--warm-up is"):
        parse_warm_up(text)
    assert parse_warm_up("5s") == WarmUp(seconds=5.0) and parse_warm_up("25%") == WarmUp(share=0.25)


def test_text_has_the_length_that_the_server_counts() -> None:
    text = Text(seed=1)
    assert text.fit((4, 25), (36, 89))  # two tokens a word, 17 of the template
    asks = made_up(
        [0.0] * 50,
        prompt=parse_lengths("40:200", option="x"),
        output=parse_lengths("1", option="x"),
        rng=random.Random(0),
    )
    for ask in asks:
        assert abs(17 + 2 * len(text.prompt(ask).split()) - ask.prompt_tokens) <= 1
    assert len({text.prompt(ask)[:30] for ask in asks}) == 50, "prompts differ from the first words on"
    assert not text.fit((4, 25), (36, 25)), "a server that counts no tokens teaches nothing"


def test_text_depends_on_seed_and_run_and_shares_what_blocks_say() -> None:
    asks = [Ask(number=n, at_s=0, prompt_tokens=100, output_tokens=1, blocks=(7,), block_tokens=60) for n in range(2)]
    first, second = (Text(seed=1, tokens_per_word=1.0).prompt(ask).split() for ask in asks)
    assert first[:60] == second[:60] and first[60:64] != second[60:64] and len(first) == 100
    again = Text(seed=1, run=5, tokens_per_word=1.0).prompt(asks[0]).split()
    assert len(again) == 100 and again[:8] != first[:8], "another run is not in the server's cache"


def test_a_trace_is_a_load(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 4000, "input_length": 30, "output_length": 5, "hash_ids": [1]},
        {"timestamp": 5000, "input_length": 20, "output_length": 4, "hash_ids": [1]},
    ]
    file.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    asks = from_trace(file, speed=2.0)
    assert [(a.at_s, a.prompt_tokens, a.output_tokens) for a in asks] == [(0.0, 30, 5), (0.5, 20, 4)]
    assert asks[0].blocks == asks[1].blocks and asks[0].block_tokens == 512
    with pytest.raises(UserError, match="cannot be read"):
        from_trace(tmp_path / "none.jsonl")


def test_loads_say_what_they_are() -> None:
    assert described(parsed("http://x", "--rate", "2"), 100).startswith(
        "open loop, 100 requests at 2 a second (poisson)"
    )
    assert described(parsed("http://x", "--concurrency", "4", "--duration", "9"), 1).startswith(
        "closed loop, 4 clients, 9 s"
    )
    assert "1 client," in described(parsed("http://x"), 100)


# -- what an answer says -------------------------------------------------------------------------------------------------


def test_events_of_both_apis_are_understood() -> None:
    heard = Heard()
    for line in (
        b": keep-alive",
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'data: {"choices":[{"delta":{"content":"a"}}],"other":[1,{"x":2}]}',
        b'data: {"choices":[{"delta":{"reasoning_content":"b"},"finish_reason":"length"}]}',
        b'data: {"choices":[{"text":"c","index":0}]}',
        b'data: {"usage":{"prompt_tokens":9,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}',
        b'data: {"choices":[],"timing":{"queue_ms":3.5}}',
        b"data: [DONE]",
    ):
        heard.line(line)
    assert len(heard.chunks) == 3 and heard.done and heard.finish == "length" and heard.error is None
    assert (heard.prompt_tokens, heard.tokens, heard.cached, heard.server_queue_s) == (9, 7, 4, 0.0035)
    heard.line(b'data: {"error":{"message":"too busy"}}')
    assert heard.error == "too busy"


def test_the_clients_wait_is_not_the_servers_time() -> None:
    heard = Heard()
    heard.sent_s, heard.end_s, heard.tokens = 10.5, 11.6, 5
    heard.chunks.extend([11.0, 11.2, 11.4])
    got = sample_of(Ask(number=0, at_s=0, prompt_tokens=1, output_tokens=5), heard, due_s=10.0, began_s=9.0)
    assert (got.due_s, got.wait_s) == (1.0, 0.5)
    assert got.ttft_s == pytest.approx(0.5) and got.e2e_s == pytest.approx(1.1)
    assert got.tpot_s == pytest.approx(0.4 / 4), "five tokens in three pieces"


# -- figures -------------------------------------------------------------------------------------------------------------


def steady(count: int = 200, *, every: float = 0.05, jitter: Callable[[int], float] = lambda n: 0.0) -> list[Sample]:
    return [sample(n, due=n * every, ttft=0.1 + jitter(n)) for n in range(count)]


def test_steady_traffic_has_the_rates_that_it_has() -> None:
    made = report(steady(), warm_up="20%")
    assert made.cut == 40 and made.requests == 160 and made.window_s == (pytest.approx(1.99), pytest.approx(9.95))
    assert value(made, "requests_per_s") == pytest.approx(20, rel=0.01)
    assert value(made, "output_tokens_per_s") == pytest.approx(220, rel=0.02)
    assert value(made, "ttft_p50") == pytest.approx(0.1) and value(made, "tpot_mean") == pytest.approx(0.01)
    assert value(made, "user_ttft_p99") == pytest.approx(0.101) and not made.notes


def test_clients_in_step_are_not_counted_a_round_too_often() -> None:
    made = report([sample(n, due=(n // 4) * 0.2) for n in range(24)], opened=False)
    assert value(made, "requests_per_s") == pytest.approx(20, rel=0.03)


def test_a_burst_alone_is_measured_to_its_last_answer() -> None:
    made = report([sample(n) for n in range(10)], warm_up="10%")
    assert made.cut == 0 and value(made, "requests_per_s") == pytest.approx(10 / 0.2, rel=0.05)
    assert "before it was steady" in made.notes[0]


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    covered = 0
    for seed in range(60):
        rng = random.Random(seed)
        made = report(steady(120, jitter=lambda n, rng=rng: rng.expovariate(10)), seed=seed)  # type: ignore[misc]
        figure = made.figure("ttft_mean")
        assert figure is not None and figure.low <= figure.value <= figure.high
        covered += figure.low <= 0.2 <= figure.high
    assert 50 <= covered <= 60


def test_intervals_are_wider_where_neighbours_resemble_each_other() -> None:
    rng = random.Random(0)
    alone = [rng.choice((0.0, 0.2)) for _ in range(200)]
    groups = [state for state in (rng.choice((0.0, 0.2)) for _ in range(20)) for _ in range(10)]
    width = {}
    for name, jitters in (("alone", alone), ("groups", groups)):
        figure = report(steady(jitter=lambda n, jitters=jitters: jitters[n])).figure("ttft_mean")  # type: ignore[misc]
        assert figure is not None
        width[name] = figure.high - figure.low
    assert width["groups"] > 1.5 * width["alone"]


def test_the_same_seed_gives_the_same_report() -> None:
    one, two = (report(steady(jitter=lambda n: (n % 7) * 0.01)) for _ in range(2))
    assert one.figures == two.figures


def test_goodput_counts_what_met_every_target_as_its_user_sees_it() -> None:
    samples = steady(100)
    samples[40] = sample(40, due=2.0, wait=5.0)  # late by the client's fault: no user cares whose it was
    samples[50] = sample(50, due=2.5, error="status 500: no")
    samples[60] = sample(60, due=3.0, tpot=0.5)
    made = report(samples, targets={"": {"ttft": 0.5, "tpot": 0.05}})
    (one,) = made.classes
    assert one.attained is not None and (one.attained.met, one.attained.of) == (97, 100)
    assert value(made, "goodput_per_s") < value(made, "requests_per_s") and made.failed == 1
    assert made.errors == (("status 500: no", 1),)


def test_classes_have_their_own_targets() -> None:
    samples = [sample(n, due=n * 0.1, name="chat" if n % 2 else "bulk", ttft=0.3) for n in range(40)]
    made = report(samples, targets={"chat": {"ttft": 0.2}, "bulk": {"ttft": 1.0}})
    assert {one.traffic_class: one.attained.met for one in made.classes if one.attained} == {"bulk": 20, "chat": 0}


def test_a_server_that_does_not_keep_up_is_said_so() -> None:
    made = report([sample(n, due=n * 0.05, ttft=0.1 + n * 0.05) for n in range(200)])
    assert any("does not keep up" in note for note in made.notes)
    assert not any("does not keep up" in note for note in report(steady()).notes)


def test_a_client_that_is_late_is_said_so() -> None:
    late = report(steady(), lag_s=0.05)
    assert any("the client itself was late" in note for note in late.notes)
    samples = [sample(n, due=n * 0.05, wait=1.0) for n in range(100)]
    assert any("sent late" in note for note in report(samples).notes)


def test_a_warm_up_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="leaves none of 200"):
        report(steady(), warm_up="60s")


def test_token_times_add_up() -> None:
    at, weight = token_times([sample(tokens=5), sample(error="x")])
    assert len(at) == 5 and weight.sum() == 5.0


def test_the_report_goes_through_json_and_html() -> None:
    made = report(steady(), targets={"": {"ttft": 0.5}})
    assert msgspec.json.decode(to_json(made), type=ServeReport) == made
    page = to_html(made, steady())
    assert page.count("<svg") == 7 and "ttft_p99" in page and "<script" not in page and "http://www.w3.org" in page
    hostile = msgspec.structs.replace(made, model="<b>x</b>", notes=("<i>",))
    assert "<b>x</b>" not in to_html(hostile, steady()) and "<i>" not in to_html(hostile, steady())
