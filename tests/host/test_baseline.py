"""A stored baseline: a planted slow-down of 10 % is caught, noise of 2 % is not, and what cannot be told is said to be so."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from tradewind.bench.baseline import Series, compare, gated, make_baseline, merged, read_baseline, series_of
from tradewind.bench.serve_report import Figure, ServeReport
from tradewind.cli_baseline import UNSURE, WORSE, add_parser, machine
from tradewind.contract.errors import UserError

SEEDS = 400


def series(
    values: list[float], *, better: Literal["lower", "higher"] = "lower", spread: tuple[float, ...] = ()
) -> Series:
    return Series(name="tpot_p50", unit="s", better=better, values=tuple(values), spread=spread)


def drawn(rng: random.Random, runs: int, *, middle: float = 0.02, noise: float = 0.02) -> list[float]:
    return [middle * (1 + noise * rng.gauss(0, 1)) for _ in range(runs)]


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_ten_percent_slower_is_caught_and_two_percent_noise_is_not(better: Literal["lower", "higher"]) -> None:
    caught = alarms = unsure = 0
    slower = 1.1 if better == "lower" else 1 / 1.1
    for seed in range(SEEDS):
        rng = random.Random(seed)
        old = series(drawn(rng, 5), better=better)
        same = compare(old, series(drawn(rng, 5), better=better))
        slow = compare(old, series(drawn(rng, 5, middle=0.02 * slower), better=better))
        alarms += same.verdict == "worse"
        unsure += same.verdict == "unsure"
        caught += slow.verdict == "worse"
    assert caught >= 0.98 * SEEDS, f"{caught} of {SEEDS} caught"
    assert alarms <= 0.01 * SEEDS, f"{alarms} of {SEEDS} false alarms"
    assert unsure <= 0.05 * SEEDS


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.05, 0.1])
@pytest.mark.parametrize("runs", [2, 3, 10])
def test_however_noisy_ten_percent_is_hardly_ever_called_the_same(runs: int, noise: float) -> None:
    silent = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        old, slow = drawn(rng, runs, noise=noise), drawn(rng, runs, middle=0.022, noise=noise)
        silent += compare(series(old), series(slow)).verdict in ("same", "better")
    assert silent <= (0.04 if runs > 2 else 0.08) * SEEDS, f"{silent} of {SEEDS}"


def test_a_drift_of_two_percent_is_no_alarm() -> None:
    alarms = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        alarms += compare(series(drawn(rng, 5)), series(drawn(rng, 5, middle=0.0204, noise=0.01))).verdict == "worse"
    assert alarms <= 0.01 * SEEDS


def test_ten_percent_faster_is_better_and_no_alarm() -> None:
    got = compare(series([1.0, 1.01, 0.99]), series([0.9, 0.91, 0.89]))
    assert got.verdict == "better" and got.worse_by == pytest.approx(-0.1, abs=0.01)
    rate = compare(series([10.0, 10.1, 9.9], better="higher"), series([9.0, 9.05, 8.95], better="higher"))
    assert rate.verdict == "worse" and rate.worse_by == pytest.approx(0.1, abs=0.01)


def test_noise_that_could_hide_it_is_unsure_and_never_fine() -> None:
    rng = random.Random(1)
    assert compare(series(drawn(rng, 3, noise=0.2)), series(drawn(rng, 3, noise=0.2))).verdict == "unsure"
    rough = compare(series(drawn(rng, 5, noise=0.1)), series(drawn(rng, 5, middle=0.08, noise=0.1)))
    assert rough.verdict == "worse", "four times as slow is seen through any noise"


def test_single_runs_take_the_noise_from_their_own_intervals() -> None:
    sharp, blurred = (0.005,), (0.2,)
    assert compare(series([1.0], spread=sharp), series([1.1], spread=sharp)).verdict == "worse"
    assert compare(series([1.0], spread=sharp), series([1.02], spread=sharp)).verdict == "same"
    assert compare(series([1.0], spread=blurred), series([1.1], spread=blurred)).verdict == "unsure"
    assert compare(series([1.0]), series([1.1])).verdict == "unsure", "nothing is known about the noise"


def test_one_outlier_among_the_runs_decides_nothing() -> None:
    got = compare(series([1.0, 1.01, 0.99, 1.0, 1.0]), series([1.0, 1.01, 0.99, 1.0, 1.6]))
    assert got.verdict in ("same", "unsure") and abs(got.worse_by) < 0.02


# -- reports and files ---------------------------------------------------------------------------------------------------


def serve_report(tpot: float, *, rate: float = 100.0) -> bytes:
    figures = (
        Figure(name="tpot_p50", unit="s", better="lower", value=tpot, low=tpot * 0.99, high=tpot * 1.01),
        Figure(name="tpot_p99", unit="s", better="lower", value=tpot * 2, low=tpot, high=tpot * 3),
        Figure(name="requests_per_s", unit="1/s", better="higher", value=rate, low=rate * 0.98, high=rate * 1.02),
    )
    return msgspec.json.encode(
        ServeReport(
            format=1, kind="serve", date="d", url="http://x", model="m", api="chat", load="a load", settings={"rate": 2.0}, requests=9,
            cut=1, failed=0, errors=(), window_s=(0.0, 1.0), prompt_tokens=1.0, output_tokens=1.0, cached_share=None, figures=figures,
            targets={}, classes=(), notes=(),
        )
    )  # fmt: skip


def offline_report(values: list[float]) -> bytes:
    metric = {"name": "decode", "unit": "tok/s", "better": "higher", "values": values, "share": None}
    return msgspec.json.encode(
        {"format": 1, "command": ["bench"], "measured": [{"workload": "L1", "metrics": [metric]}]}
    )


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="tradewind")
    add_parser(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["baseline", *words])
    code: int = arguments.run(arguments)
    return code


def write(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(data)
    return str(folder / name)


def test_reports_are_recorded_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(4)
    old = [write(tmp_path, f"old{n}.json", serve_report(v, rate=1 / v)) for n, v in enumerate(drawn(rng, 5))]
    same = [write(tmp_path, f"same{n}.json", serve_report(v, rate=1 / v)) for n, v in enumerate(drawn(rng, 5))]
    slow = [
        write(tmp_path, f"slow{n}.json", serve_report(v, rate=1 / v)) for n, v in enumerate(drawn(rng, 5, middle=0.022))
    ]
    file = str(tmp_path / "deep" / "base.json")
    assert run("record", file, "--from", *old) == 0
    assert "3 figures of 5 runs" in capsys.readouterr().out
    assert run("check", file, "--from", *same) == 0
    assert run("check", file, "--from", *slow) == WORSE
    out = capsys.readouterr().out
    assert "worse" in out and "tpot_p50" in out and "tpot_p99" not in out, (
        "tails decide nothing unless they are asked for"
    )
    assert run("check", file, "--from", *slow, "--json") == WORSE
    found = {one["name"]: one["verdict"] for one in msgspec.json.decode(capsys.readouterr().out)}
    assert found == {"tpot_p50": "worse", "requests_per_s": "worse"}
    assert run("check", file, "--from", slow[0], "--metrics", "tpot_p99") == WORSE


def test_offline_reports_too(tmp_path: Path) -> None:
    file, old = str(tmp_path / "b.json"), write(tmp_path, "o.json", offline_report([100.0, 101.0, 99.0]))
    assert run("record", file, "--from", old) == 0
    assert run("check", file, "--from", write(tmp_path, "s.json", offline_report([89.0, 90.0, 91.0]))) == WORSE
    assert run("check", file, "--from", write(tmp_path, "n.json", offline_report([98.0, 102.0, 100.0]))) == 0
    assert run("check", file, "--from", write(tmp_path, "r.json", offline_report([60.0, 120.0, 100.0]))) == UNSURE


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "{base}"], "say what is compared"),
        (["check", "{base}", "http://127.0.0.1:1", "--from", "{base}"], "say what is compared"),
        (["check", "{folder}/none.json", "--from", "{report}"], "cannot be read"),
        (["check", "{report}", "--from", "{report}"], "is no baseline"),
        (["check", "{base}", "--from", "{base}"], "is no report"),
        (
            ["check", "{base}", "--from", "{report}", "--metrics", "speed"],
            "has no figure 'speed'; it has requests_per_s",
        ),
        (["check", "{base}", "--from", "{report}", "--band", "12"], "what must be seen has to be over the band"),
        (["check", "{base}", "--from", "{report}", "--repeats", "0"], "--repeats is 0"),
        (["check", "{base}", "http://127.0.0.1:1"], "recorded from reports without a load"),
        (["record", "{folder}", "--from", "{report}"], "cannot be written"),
        (["record", "{base}", "http://127.0.0.1:1"], "no server answers"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, words: list[str], says: str) -> None:
    report, base = write(tmp_path, "r.json", serve_report(0.02)), str(tmp_path / "b.json")
    assert run("record", base, "--from", report) == 0
    places = {"base": base, "report": report, "folder": str(tmp_path)}
    with pytest.raises(UserError, match=says) as caught:
        run(*(word.format(**places) for word in words))
    assert "\n" not in str(caught.value)


def test_merged_keeps_what_every_report_has() -> None:
    a, b = series([1.0]), msgspec.structs.replace(series([2.0]), name="other")
    (one,) = merged([[a, b], [msgspec.structs.replace(a, values=(3.0,))]])
    assert one.name == "tpot_p50" and one.values == (1.0, 3.0)


def test_a_baseline_of_another_format_is_refused() -> None:
    kept: Any = make_baseline((series([1.0]),), settings={}, what="w", version="0", machine=machine())
    data = msgspec.json.encode(msgspec.structs.replace(kept, format=99))
    with pytest.raises(UserError, match="record it again"):
        read_baseline(data, name="b")
    assert read_baseline(msgspec.json.encode(kept), name="b") == kept and gated(kept.series, None)
    assert series_of(serve_report(0.02), name="r")[2] == "a load"
