"""What scripts of candidates share (benchmarks/rounds.py), without a GPU: command line, shards, the record, what it says of a case."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("attention_rounds", "kernel_rounds", "kernels", "long_rounds", "low_rank_rounds", "mla_rounds", "moe_rounds")
LIMITS = {"read": 4e12, "bf16": 1e15}


@pytest.fixture(scope="module")
def rounds() -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("rounds")
    finally:
        sys.path[:] = before


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_find_what_they_import(rounds: ModuleType, name: str) -> None:
    assert callable(importlib.import_module(name).main)


def test_groups_that_are_not_there_are_refused(rounds: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    parser = rounds.parser("A script.", groups=("few", "rows"), default="rows")
    assert parser.parse_args([]).only == ["rows"]
    assert parser.parse_args(["--only", "rows,few"]).only == ["rows", "few"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--only", "rows,fow"])
    assert "no group fow; there are few, rows" in capsys.readouterr().err


def test_shards_compile_every_case_once(rounds: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[int] = []

    def case(number: int):
        def call() -> None:
            ran.append(number)
            if number == 3:
                raise ValueError("too many registers")

        return rounds.Case("g", "op", f"c{number}", [call])

    cases = [case(number) for number in range(5)]
    assert rounds.compile_all(cases, shard=None, shards=0) == 1
    assert ran == [0, 1, 2, 3, 4]
    ran.clear()
    assert [rounds.compile_all(cases, shard=shard, shards=2) for shard in (0, 1)] == [0, 1]
    assert sorted(ran) == [0, 1, 2, 3, 4]
    told = capsys.readouterr().out
    assert "op c3: ValueError: too many registers" in told
    assert "compiled 5 candidates, 1 failed" in told


def test_an_element_that_is_not_written_is_no_agreement(rounds: ModuleType) -> None:
    truth = torch.arange(1.0, 9.0)

    def most(out: torch.Tensor) -> None:
        out[1:] = truth[1:]

    assert rounds.written(lambda out: out.copy_(truth), torch.empty(8), truth) == 0.0
    assert math.isnan(rounds.written(most, torch.empty(8), truth))
    assert math.isnan(rounds.written(most, torch.empty(8), truth[-2:], slice(-2, None)))


def test_the_record_tells_what_was_measured(
    rounds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rounds, "graph_us", lambda calls: calls[0]())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["/somewhere/x_rounds.py", "--best", "1"])

    def fails() -> float:
        raise RuntimeError("out of resource")

    cases = [
        rounds.Case("g", "a", "now(1)", [lambda: 8.0], bytes=16e6, off=True, config="now", key=("a",)),
        rounds.Case("g", "a", "new(1)", [lambda: 5.0], bytes=16e6, error=lambda: 1e-3, config="new", key=("a",)),
        rounds.Case("g", "a", "wrong(1)", [lambda: 1.0], error=lambda: 0.5, key=("a",)),
        rounds.Case("g", "a", "fails(1)", [fails]),
        rounds.Case("g", "a", "slow(1)", [lambda: 9.0]),
        rounds.Case("g", "b", "torch.mm", [lambda: 2.0], flops=1e9),
    ]
    out = tmp_path / "record.json"
    args = rounds.parser("A script.", groups=("g",), best=1).parse_args(["--out", str(out)])
    on = rounds.Round(args, limits=LIMITS, began=rounds.time.perf_counter(), head={"model": "tiny"})
    on.measure(cases)
    record = json.loads(out.read_text())
    assert (record["model"], record["card"], record["cut"]) == ("tiny", "a card", False)
    assert record["command"] == "python benchmarks/x_rounds.py --best 1"
    assert record["ceilings"] == LIMITS
    now, new, wrong, failed, _, library = record["ops"]
    assert (now["gb_per_s"], now["floor_us"], now["fraction"]) == pytest.approx((2000.0, 4.0, 0.5))
    assert (new["times_faster"], new["off"], now["off"]) == (1.6, False, True)
    assert wrong["note"].startswith("WRONG: error 5.00e-01")
    assert (failed["us"], failed["note"]) == (0.0, "RuntimeError: out of resource")
    assert library["times_faster"] is None
    assert on.best() == {("a",): ["new", "now"]}
    told = capsys.readouterr().out
    assert all(name in told for name in ("now(1)", "new(1)", "wrong(1)", "fails(1)", "torch.mm"))
    assert "slow(1)" not in told, "only what is off, the best, what failed and libraries"


def test_what_time_does_not_suffice_for_is_left_out(
    rounds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(rounds, "graph_us", lambda calls: calls[0]())
    out = tmp_path / "record.json"
    args = rounds.parser("A script.", groups=("g",), seconds=60.0).parse_args(["--out", str(out)])
    on = rounds.Round(args, limits=LIMITS, began=rounds.time.perf_counter(), head={})

    def cases():
        yield rounds.Case("g", "a", "first", [lambda: 1.0])
        on.began -= 61.0
        yield rounds.Case("g", "b", "second", [lambda: 1.0])

    on.measure(cases())
    record = json.loads(out.read_text())
    assert record["cut"]
    assert [op["candidate"] for op in record["ops"]] == ["first"]
