"""The GPU benchmarks, as far as they can be tried without a GPU: the work is the agreed one, formulas and judgements are right."""

from __future__ import annotations

import functools
import importlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_engine import Engine, cache_plan, schedule_plan

from tradewind.config.goals import Means
from tradewind.contract.step import TokenLogprobs
from tradewind.serving.intake import Intake, Limits

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPES = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The scripts, which are no part of the package."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(
            suite=importlib.import_module("gpu_suite"),
            engine=importlib.import_module("gpu_engine"),
            options=importlib.import_module("gpu_options"),
            results=importlib.import_module("gpu_results"),
            works=importlib.import_module("gpu_works"),
            figures=importlib.import_module("gpu_figures"),
            check=importlib.import_module("gpu_check"),
            trace=importlib.import_module("gpu_trace"),
        )
    finally:
        sys.path[:] = before


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / "models" / name / "config.json").read_text())
    return found


# ------------------------------------------------------------------------------------------------------------- the work


class Recorder:
    """Stands in for a driven engine: notes what is asked, takes no time."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], list[int]]] = []
        self.forgotten = 0
        self.reports: list[Any] = []

    def generate(self, prompts: Sequence[Sequence[int]], outs: Sequence[int], temperature: float = 0.0) -> int:
        self.calls.append(([list(prompt) for prompt in prompts], list(outs)))
        return sum(outs)

    def forget(self) -> None:
        self.forgotten += 1

    def drain(self) -> None:
        pass

    def steps(self, wall_s: float) -> dict[str, float]:
        return {}


def recorded(scripts: SimpleNamespace, *works: str, scale: str = "full") -> tuple[Recorder, list[dict[str, Any]]]:
    """A model with a vocabulary of 128256 runs the works; nothing is computed."""
    driven = Recorder()
    sizes = scripts.works.sizes_of(config("llama-3.1-8b"), quantization="none", kv_format="bf16")
    suite = scripts.works.Suite(driven, vocab_size=128256, sizes=sizes, scale=scripts.works.SCALES[scale], copy=4.25e12)
    return driven, [getattr(suite, work)() for work in works]


def drawn(lengths: Sequence[int], seed: int, *, vocab: int = 128256) -> list[list[int]]:
    """Prompts as the peers' suite makes them."""
    r = random.Random(seed)
    return [[r.randrange(100, vocab - 2000) for _ in range(n)] for n in lengths]


def test_w1_asks_what_the_peers_were_asked(scripts: SimpleNamespace) -> None:
    driven, _ = recorded(scripts, "W1")
    asked = [(drawn([128], 100 + s), [32]) for s in range(3)]
    asked += [(drawn([128], 200 + s), [1]) for s in range(15)]
    asked += [(drawn([128], 300 + s), [256]) for s in range(5)]
    assert driven.calls == asked
    assert driven.forgotten == len(asked)


def test_w2_and_w3_ask_what_the_peers_were_asked(scripts: SimpleNamespace) -> None:
    driven, (second, third) = recorded(scripts, "W2", "W3")
    prompts, outs = driven.calls[0]
    assert len(prompts) == 512 and sum(outs) == second["out_tok"] == 150_411, "as the peers' record says"
    assert all(64 <= len(prompt) <= 1024 for prompt in prompts) and all(64 <= out <= 512 for out in outs)
    assert prompts[0] == drawn([len(prompts[0])], 43)[0]
    assert driven.calls[1] == driven.calls[0], "a second time, for comparison"
    assert driven.calls[2] == (drawn([128] * 256, 50), [512] * 256)
    assert third["out_tok"] == 256 * 512


def test_w4_and_w5_ask_what_the_peers_were_asked(scripts: SimpleNamespace) -> None:
    driven, (fourth, _) = recorded(scripts, "W4", "W5")
    assert [(len(p), {len(x) for x in p}, set(o)) for p, o in driven.calls[:2]] == [
        (64, {4096}, {16}),
        (64, {4096}, {1}),
    ]
    assert driven.calls[0][0] == driven.calls[1][0]
    # 2 * 6.98e9 parameters * 262,144 tokens, and scores and values of a causal square in 32 layers of 32 heads of 128.
    assert fourth["linear_flops"] == pytest.approx(2 * 6.979e9 * 64 * 4096, rel=1e-3)
    assert fourth["attention_flops"] == 2 * 32 * 32 * 128 * 64 * 4096**2
    shared = drawn([2048], 70)[0]
    for (prompts, outs), seed in zip(driven.calls[2:], (71, 72), strict=True):
        assert prompts == [shared + tail for tail in drawn([128] * 128, seed)] and outs == [128] * 128
    assert driven.forgotten == 3, "not before the half of W5 that finds the prefix cached"


def test_w6_asks_what_the_peers_were_asked(scripts: SimpleNamespace) -> None:
    driven, (sixth,) = recorded(scripts, "W6")
    assert [(len(p), o[0]) for p, o in driven.calls] == [
        (batch, out)
        for batch, repeats in ((1, 3), (8, 3), (32, 3), (128, 2), (256, 2))
        for out in (64, 192)
        for _ in range(repeats)
    ]
    assert driven.calls[0][0] == drawn([896], 81)
    assert [row["batch"] for row in sixth["rows"]] == [1, 8, 32, 128, 256]


def test_formulas(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 7 ms and 3 ms for each token: all figures must say 3 ms a token."""
    _, _ = recorded(scripts)
    sizes = scripts.works.sizes_of(config("llama-3.1-8b"), quantization="none", kv_format="bf16")
    suite = scripts.works.Suite(
        Recorder(), vocab_size=5000, sizes=sizes, scale=scripts.works.Scale(batches=(1, 8)), copy=1e13
    )
    monkeypatch.setattr(suite, "timed", lambda prompts, outs, temperature=0.0, keep=False: 0.007 + 0.003 * outs[0])
    first = suite.W1()
    assert first["ttft_ms"] == pytest.approx(10) and first["tpot_ms"] == pytest.approx(3)
    assert first["of_copy"] == pytest.approx(15.0e9 / 0.003 / 1e13, rel=0.01)
    assert [row["step_ms"] for row in suite.W6()["rows"]] == pytest.approx([3, 3])
    assert suite.W3()["out_tok_s"] == pytest.approx(256 * 512 / (0.007 + 0.003 * 512))


# ----------------------------------------------------------------------------------------------------------- the driver


def an_engine(**more: Any) -> Engine:
    return Engine(cache=cache_plan(pages=(400,), page_tokens=4), schedule=schedule_plan(max_running=6), **more)


def test_the_driver_counts_tokens_and_leaves_nothing_open(scripts: SimpleNamespace) -> None:
    engine = an_engine(vocab_size=1000)
    driven = scripts.engine.Driven(engine.loop)
    prompts = [[100 + i + j for j in range(5 + i)] for i in range(9)]
    outs = [3 + i for i in range(9)]
    assert driven.generate(prompts, outs) == sum(outs)
    driven.drain()
    steps = driven.steps(1.0)
    assert steps["count"] > 0 and steps["most_running"] <= 6 and steps["turn_ms"] == pytest.approx(1e3 / steps["count"])
    pool = engine.scheduler.cache.pools[0]
    assert pool.idle > 0, "prompts are kept for later"
    driven.forget()
    assert pool.free == pool.total - 1 and engine.scheduler.idle
    assert driven.generate(prompts, outs) == sum(outs), "names are not used twice"


def test_the_driver_ends_what_takes_too_long(scripts: SimpleNamespace) -> None:
    engine = an_engine(vocab_size=1000)
    driven = scripts.engine.Driven(engine.loop, deadline_s=time.perf_counter() - 1)
    with pytest.raises(scripts.engine.OutOfTimeError, match="2 of 2"):
        driven.generate([[5, 6, 7]] * 2, [50, 50])
    assert engine.scheduler.idle and engine.scheduler.unfinished == 0


def test_the_driver_says_why_a_request_failed(scripts: SimpleNamespace) -> None:
    engine = an_engine(vocab_size=1000, fail={("b1", 5): "logits are not finite"})
    with pytest.raises(RuntimeError, match="logits are not finite"):
        scripts.engine.Driven(engine.loop).generate([[5, 6, 7]], [50])


def test_settling_ends_with_all_that_goes_on_behind_the_start(scripts: SimpleNamespace) -> None:
    class Loop:
        looks = 0

        @property
        def prepared(self) -> bool:
            self.looks += 1
            return self.looks > 2

    record = scripts.engine.Driven(Loop()).settle(600.0)
    assert record["prepared"] and record["compiled"] and 0.15 < record["waited_s"] < 60
    assert record["compile_s"] == record["graphs"] == {}, "an engine of another kind has none"
    assert scripts.engine.settled_text(record).endswith(" s: kernels compiled")


@pytest.mark.parametrize(("limit_s", "deadline_s"), [(0.0, math.inf), (600.0, 0.0)])
def test_settling_goes_on_anyway_and_says_what_is_missing(
    scripts: SimpleNamespace, limit_s: float, deadline_s: float
) -> None:
    pytest.importorskip("torch")
    from tradewind.runner.ahead import Progress

    error = "RuntimeError: no memory"
    progress = Progress(wanted=90, captured=30, passed_over=2, plan_s=1.25, capture_s=2.5, error=error)
    runner = SimpleNamespace(captured_ahead=False, behind_start=({"plan": 3.0}, progress))
    loop = SimpleNamespace(prepared=False, _executor=SimpleNamespace(_runner=runner))
    record = scripts.engine.Driven(loop, deadline_s=deadline_s).settle(limit_s)
    assert record["waited_s"] < 30 and record["limit_s"] == limit_s
    assert not record["prepared"] and not record["compiled"] and record["compile_s"] == {"plan": 3.0}
    assert (record["graphs"]["wanted"], record["graphs"]["captured"], record["graphs"]["passed_over"]) == (90, 30, 2)
    text = scripts.engine.settled_text(json.loads(json.dumps(record)))
    assert ", which was the limit: kernels not all compiled, plan 3.0 s, 32 of 90 graphs captured" in text
    assert "plan 1.2 s, capture 2.5 s, captures ended with RuntimeError: no memory" in text


# ------------------------------------------------------------------------------------------------------ the works' order


def asked_in_turn(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, *options: str, time_for: int = 99
) -> tuple[list[tuple[str, float]], dict[str, Any]]:
    """Which works are run with which temperature, and the result, where the time is over after `time_for` of them."""
    driven = SimpleNamespace(
        captures=0, deadline_s=math.inf, settle=lambda limit_s: {**SETTLED, "limit_s": limit_s},
        loop=SimpleNamespace(dead=None),
    )  # fmt: skip
    suite = scripts.works.Suite(driven, vocab_size=5000, sizes={}, scale=scripts.works.SCALES["tiny"], copy=None)
    ran: list[tuple[str, float]] = []

    def work(name: str, temperature: float) -> dict[str, Any]:
        ran.append((name, temperature))
        if len(ran) == time_for:
            driven.deadline_s = -math.inf
        return {}

    monkeypatch.setattr(suite, "warm", lambda: 0.5)
    for name in scripts.works.ORDER:
        monkeypatch.setattr(suite, name, functools.partial(work, name))
    result: dict[str, Any] = {"skipped": [], "workloads": {}}
    said: list[str] = []
    scripts.suite.run_works(suite, scripts.options.parsed(list(options)), result, done=said.append)
    assert said[0].startswith("settled after 1.5 s") and said[1].startswith("warm-up") and result["warm_s"] == 0.5
    assert list(result["workloads"]) == [name + ":t1" * (temperature == 1.0) for name, temperature in ran]
    return ran, result


SETTLED: dict[str, Any] = {"waited_s": 1.5, "prepared": True, "compiled": True, "compile_s": {}, "graphs": {}}


def test_works_run_in_the_order_in_which_they_are_named(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, result = asked_in_turn(scripts, monkeypatch)
    assert tuple(name for name, _ in ran) == scripts.works.ORDER and result["skipped"] == []
    ran, result = asked_in_turn(scripts, monkeypatch, "--workloads", "W5,W1:t1,W4,W1", "--settle", "7", time_for=2)
    assert ran == [("W5", 0.0), ("W1", 1.0)], "what is named last is lost when time runs out"
    assert result["skipped"] == ["W4: no time left", "W1: no time left"]
    assert result["settle"] == {**SETTLED, "limit_s": 7.0}
    for wrong in ("W9", "warm", "W1:t2", "w1"):
        with pytest.raises(SystemExit):
            scripts.options.parsed(["--workloads", f"W1,{wrong}"])


# ---------------------------------------------------------------------------------------------------- floors and tables


@pytest.mark.parametrize(
    ("model", "quantization", "floors_ms"),
    [
        ("llama-3.1-8b", "none", (3.55, 3.77, 4.52, 7.54, 11.57)),
        ("llama-3.1-8b", "fp8", (1.91, 2.13, 2.89, 5.91, 9.93)),
        ("qwen3-0.6b", "none", (0.31, 0.50, 1.16, 3.80, 7.32)),
    ],
)
def test_floors_are_those_of_the_record(
    scripts: SimpleNamespace, model: str, quantization: str, floors_ms: tuple[float, ...]
) -> None:
    result = {
        "sizes": scripts.works.sizes_of(config(model), quantization=quantization, kv_format="bf16"),
        "ceilings": {"copy_bytes_per_s": 4.25e12},
    }
    found = [scripts.figures.floor_ms(result, batch=batch) for batch in scripts.figures.BATCHES]
    assert found == pytest.approx(floors_ms, rel=0.03)


def a_result(scripts: SimpleNamespace, *, model: str = "llama-3.1-8b", **more: Any) -> dict[str, Any]:
    result = scripts.results.new_result(scripts.options.parsed(["--model", model]))
    result["command"] = ["gpu_suite.py", "--model", model]
    result["sizes"] = scripts.works.sizes_of(config(model), quantization="none", kv_format="bf16")
    result["ceilings"] = {"copy_bytes_per_s": 4.25e12, "bf16_flops_per_s": 780e12, "fp8_flops_per_s": 1300e12}
    result["workloads"] = {
        "W1": {"tpot_ms": 3.95, "ttft_ms": 8.5},
        "W4": {
            "wall_s": 6.5, "wall_out1_s": 6.2, "in_tok_s": 40330.0, "in_tok_s_out1": 42281.0, "linear_flops": 3.659e15,
            "attention_flops": 2.8e14,
        },
        "W6": {"rows": [{"batch": 1, "step_ms": 4.0}, {"batch": 256, "step_ms": 15.6}]},
    }  # fmt: skip
    result["start"] = {"cold": {"ready_s": 5.0, "first_answer_s": 5.5, "phases": [["imports", 2.0], ["x", 0.001]]}}
    return {**result, **more}


def test_rows_judge_and_compare(scripts: SimpleNamespace) -> None:
    rows = {row.key: row for row in scripts.figures.rows_of(a_result(scripts))}
    per_token = rows["W1.tpot_ms"]
    assert per_token.verdict == "must" and per_token.ratio == pytest.approx(4.78 / 3.95), "the better peer"
    assert per_token.fraction == pytest.approx(15.0e9 / 4.25e12 / 3.95e-3, rel=0.01)
    assert rows["W1.ttft_ms"].verdict == "missed" and rows["start.cold_s"].verdict == "aim"
    assert rows["W4.in_tok_s_out1"].verdict == "must"
    assert rows["W4.in_tok_s_out1"].fraction == pytest.approx(3.939e15 / 780e12 / 6.2, rel=1e-3)
    assert rows["W6.1"].verdict == "aim" and rows["W6.1"].aim == pytest.approx(1.15 * 3.56, rel=0.01)
    assert rows["W6.256"].verdict == "missed"
    assert rows["W2.out_tok_s"].verdict == "–" and rows["W2.out_tok_s"].ours is None, "demanded, not measured"


@pytest.mark.parametrize(
    ("value", "better", "verdict"),
    [(9.0, "lower", "aim"), (10.0, "lower", "aim"), (11.0, "lower", "must"), (12.1, "lower", "missed"),
     (13.0, "higher", "aim"), (11.0, "higher", "missed"), (None, "lower", "–")],
)  # fmt: skip
def test_verdicts(scripts: SimpleNamespace, value: float | None, better: Any, verdict: str) -> None:
    aim = 10.0 if better == "lower" else 13.0
    assert scripts.figures.judged(value, must=12.0, aim=aim, better=better) == verdict


def test_every_demand_names_a_figure(scripts: SimpleNamespace) -> None:
    keys = {figure.key for figure in scripts.figures.FIGURES}
    for demands in (*scripts.figures.MUST.values(), *scripts.figures.AIM.values()):
        assert set(demands) <= keys
    for peers in scripts.figures.PEERS.values():
        assert all(set(table) <= keys for table in peers.values())
    for case, demands in scripts.figures.MUST.items():
        for key, must in demands.items():
            aim = scripts.figures.AIM.get(case, {}).get(key)
            better = next(figure.better for figure in scripts.figures.FIGURES if figure.key == key)
            assert aim is None or (aim < must if better == "lower" else aim > must), (case, key)


def test_sections_of_whole_and_of_empty_results(scripts: SimpleNamespace, tmp_path: Path) -> None:
    whole = a_result(
        scripts, memory={"planned_bytes": 100 << 30, "used_bytes": 101 << 30}, skipped=["W5: no time left"]
    )
    text = scripts.figures.section(whole)
    assert "(+1.0%)" in text and "Not measured: W5: no time left." in text and "imports 2.00); first answer" in text
    empty = scripts.results.new_result(scripts.options.parsed(["--model", "qwen3-0.6b"]))
    assert "| – | 2.15 | 1.68 |" in scripts.figures.section(empty)
    pytest.importorskip("matplotlib")
    for number, result in enumerate((whole, empty, a_result(scripts, model="llama-3.2-1b"))):
        scripts.figures.draw(result, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 5000


def test_a_report_renews_the_figures_of_a_page(scripts: SimpleNamespace, tmp_path: Path) -> None:
    old, new = a_result(scripts, date="2026-11-29T00:00:00"), a_result(scripts, date="2026-11-30T00:00:00")
    new["workloads"]["W1"]["tpot_ms"] = 3.21
    runs = {
        "none": {"workloads": {"W1": {"tpot_ms": 1.0}}},
        "graphs": {"turned": {"graphs": False}, "workloads": {"W1": {"tpot_ms": 2.5}}},
        "other": {"turned": {"x": 1}, "workloads": {}, "error": "refused"},
    }
    ablation = {"kind": "ablation", "model": "qwen3-0.6b", "quantization": "none", "runs": runs}
    line = {"part": "load", "name": "nothing is kept", "verdict": "PASS", "detail": "held: 0 | 0"}
    check = {"kind": "check", "card": "a card", "date": "2026-11-30", "lines": [line]}
    trace = {"kind": "trace", "model": "qwen3-0.6b", "rows": 64, "steps": 20, "plain": {"wall_us_per_step": 81.0}}
    events = scripts.trace.device_events(a_trace())
    trace["device"] = {**scripts.trace.analysed(events, steps=20), "idle_share_untraced": 0.012}
    named = (("gpu-b", old), ("gpu-a", new), ("gpu-c", ablation), ("gpu-d", check), ("gpu-e", trace))
    for name, result in named:
        scripts.results.save(result, tmp_path / f"{name}.json")
    page = tmp_path / "page.md"
    page.write_text(f"# Speed\n\n{scripts.results.BEGIN}\nstale\n{scripts.results.END}\n\nend\n")
    for _ in range(2):  # a second time changes nothing
        assert scripts.results.report(tmp_path, into=page) == 0
        text = page.read_text()
        assert text.startswith("# Speed\n") and text.endswith("\n\nend\n") and "stale" not in text
        assert "**3.21** ms" in text and "**3.95** ms" not in text, "the newer run of a model"
        assert "| graphs = False | W1 time per token, batch 1, ms | 2.50 | 1.00 | 2.50x |" in text
        assert "| x = 1 | not run: refused |" in text
        assert "1 passed, 0 failed" in text and "| PASS | load | nothing is kept | held: 0 / 0 |" in text
        assert "19.4% of a traced decode and 1.2% of an untraced one (81 us a step)" in text
    page.write_text("no marks")
    assert scripts.results.report(tmp_path, into=page) == 2


def test_other_weights_have_a_title_of_their_own(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """Beside the usual dummy weights, with the same peers and demands."""
    title = scripts.figures.title_of
    for number, (model, load_format, wanted) in enumerate(
        (
            ("llama-3.1-8b", "dummy", "llama-3.1-8b"),
            ("llama-3.1-8b", "dummy-flat", "llama-3.1-8b, flat weights"),
            ("deepseek-v2-lite", "dummy-one-route", "deepseek-v2-lite, one route"),
        )
    ):
        asked = scripts.options.parsed(["--model", model, "--load-format", load_format])
        assert scripts.options.goals_of(asked).means.load_format == load_format
        assert scripts.options.parsed(scripts.options.same_engine(asked)).load_format == load_format
        made = scripts.results.new_result(asked)
        assert made["load_format"] == load_format and title(made) == wanted
        result = a_result(scripts, model=model, load_format=load_format)
        result["workloads"] = {"W1": {"tpot_ms": 1.111 * (1 + number)}}
        scripts.results.save(result, tmp_path / f"gpu-{number}.json")
        usual = scripts.figures.table({**result, "load_format": "dummy"}).splitlines()
        lines = scripts.figures.table(result).splitlines()
        assert set(lines) <= set(usual), "the same peers and demands"
        assert lines == usual or len(lines) == 4, "beside the usual result only what was measured: W1 and a start"
    quantised = {**made, "quantization": "fp8", "load_format": "dummy-flat"}
    assert title(quantised) == "deepseek-v2-lite fp8, flat weights"
    del made["load_format"]
    assert title(made) == "deepseek-v2-lite", "as older results are"
    page = tmp_path / "page.md"
    page.write_text(f"{scripts.results.BEGIN}\n{scripts.results.END}\n")
    assert scripts.results.report(tmp_path, into=page) == 0
    text = page.read_text()
    assert "| one H200 | deepseek-v2-lite, one route | llama-3.1-8b |\n" in text, (
        "flat weights are not for the short table"
    )
    for head, ours, peer in (
        ("llama-3.1-8b", "**1.11** ms", "4.97"),
        ("llama-3.1-8b, flat weights", "**2.22** ms", "4.97"),
        ("deepseek-v2-lite, one route", "**3.33** ms", "3.36"),
    ):
        part = text.split(f"### {head}\n")[1].split("###")[0]
        assert ours in part and f" {peer} |" in part


def test_of_one_route_a_step_reads_one_tokens_experts(scripts: SimpleNamespace) -> None:
    shape, read = config("deepseek-v2-lite"), scripts.figures.weight_bytes
    usual, one = (
        scripts.works.sizes_of(shape, quantization="none", kv_format="bf16", load_format=load_format)
        for load_format in ("dummy-flat", "dummy-one-route")
    )
    assert read(one, 1) == read(one, 256) == one["weight_bytes_per_token"] == usual["weight_bytes_per_token"]
    assert read(usual, 256) > 5 * read(one, 256)


def test_the_page_of_the_repository_has_its_marks(scripts: SimpleNamespace) -> None:
    text = (BENCHMARKS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    assert text.count(scripts.results.BEGIN) == text.count(scripts.results.END) == 1


# --------------------------------------------------------------------------------------------------- models and options


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.03), ("llama-3.2-1b", 1.236), ("qwen3-0.6b", 0.596)])
def test_configs_have_the_size_of_their_models(scripts: SimpleNamespace, name: str, billions: float) -> None:
    shape = config(name)
    sizes = scripts.works.sizes_of(shape, quantization="none", kv_format="bf16")
    tables = sizes["head_params"] * (1 if shape["tie_word_embeddings"] else 2)
    assert (sizes["linear_params"] + tables) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions", "active", "kept"),
    [("qwen3-30b-a3b", 30.53, 3.34, 2 * 48 * 2 * 4 * 128), ("deepseek-v2-lite", 15.71, 2.66, 2 * 27 * 576)],
)
def test_mixtures_count_what_a_token_meets(
    scripts: SimpleNamespace, name: str, billions: float, active: float, kept: int
) -> None:
    sizes = scripts.works.sizes_of(config(name), quantization="none", kv_format="bf16")
    assert (sizes["total_params"] + 2 * sizes["head_params"]) / 1e9 == pytest.approx(billions, rel=0.005)
    assert (sizes["linear_params"] + 2 * sizes["head_params"]) / 1e9 == pytest.approx(active, rel=0.02)
    assert sizes["kv_bytes_per_token"] == kept
    read = scripts.figures.weight_bytes
    assert read(sizes, 1) == pytest.approx(sizes["weight_bytes_per_token"])
    assert read(sizes, 10_000) == pytest.approx(2 * (sizes["total_params"] + sizes["head_params"]))
    assert read(sizes, 4) < read(sizes, 8)


def test_goals_pin_only_what_was_asked(scripts: SimpleNamespace) -> None:
    goals = scripts.options.goals_of(scripts.options.parsed(["--model", "llama-3.1-8b"]))
    assert goals.means == Means(backend="cuda", load_format="dummy")
    assert goals.max_context == 16384 and goals.scenario == "balanced"
    bent = [
        "--model",
        "tiny",
        "--quantization",
        "fp8",
        "--off",
        "overlap",
        "--means",
        "max_running=7",
        "--means",
        "tape=false",
    ]
    goals = scripts.options.goals_of(scripts.options.parsed([*bent, "--means", "policy=fair"]))
    assert goals.means == Means(
        backend="cuda", load_format="dummy", quantization="fp8", overlap=False, max_running=7, tape=False, policy="fair"
    )
    assert goals.max_context == 2048, "no longer than the model allows"


def test_switches_are_fields_of_means(scripts: SimpleNamespace) -> None:
    assert {"deterministic", "graphs", "overlap", "prefix_cache"} <= set(scripts.options.known_switches())
    assert list(scripts.options.SWITCHES) == sorted(scripts.options.SWITCHES)
    for switch in scripts.options.known_switches().values():
        Means(**switch.means)
        assert set(switch.works) <= set(scripts.works.ORDER)
    with pytest.raises(SystemExit):
        scripts.options.parsed(["--off", "gravity"])
    short = scripts.options.parsed(["--off", "graphs"])
    assert short.workloads == "W1,W3,W6" and short.rows == "1,32,256" and short.no_start
    assert scripts.options.parsed([]).workloads == ",".join(scripts.works.ORDER)


def test_another_process_gets_the_same_engine(scripts: SimpleNamespace) -> None:
    options = [
        "--model",
        "tiny",
        "--quantization",
        "fp8",
        "--off",
        "graphs",
        "--means",
        "max_running=7",
        "--way",
        "mixed_rows=[64]",
        "--scale",
        "tiny",
    ]
    first = scripts.options.parsed(options)
    again = scripts.options.parsed(scripts.options.same_engine(first))
    assert scripts.options.goals_of(again) == scripts.options.goals_of(first) and again.scale == "tiny"
    assert again.way == first.way == ["mixed_rows=[64]"]


def test_results_name_no_place_on_this_machine(scripts: SimpleNamespace, tmp_path: Path) -> None:
    assert scripts.results.nameless(str(tmp_path / "x.json")) == "x.json"
    assert scripts.results.nameless("W1,W2") == "W1,W2"


# ---------------------------------------------------------------------------------------------- the judges of gpu_check


def answer(scripts: SimpleNamespace, tokens: Sequence[int], *, gap: float = 1.0, shift: float = 0.0) -> Any:
    rows = [
        TokenLogprobs(
            token=token, logprob=-0.5 + shift, rank=1, top_ids=(token, token + 1), top_logprobs=(-0.5, -0.5 - gap)
        )
        for token in tokens
    ]
    return scripts.check.Answer(tokens=list(tokens), logprobs=rows, finish="length")


def test_near_ties_are_told_from_wrong_answers(scripts: SimpleNamespace) -> None:
    truth = answer(scripts, [1, 2, 3, 4], gap=0.07)
    assert scripts.check.difference(truth, truth) is None
    assert scripts.check.difference(truth, answer(scripts, [1, 2, 9, 4])) == (2, pytest.approx(0.07))
    assert scripts.check.difference(truth, answer(scripts, [1, 2]))[1] == math.inf, "a missing token is no tie"
    found = scripts.check.nearness(
        [truth, truth], [answer(scripts, [1, 2, 3, 4], shift=0.01), answer(scripts, [5, 2, 3, 4])]
    )
    assert found["equal"] == 1 and found["answers"] == 2
    assert found["widest_gap"] == pytest.approx(0.07) and found["logprobs_moved"] == pytest.approx(0.01)


def test_bit_equality_sees_the_last_bit(scripts: SimpleNamespace) -> None:
    truth = answer(scripts, [1, 2])
    assert scripts.check.exactly_equal([truth], [answer(scripts, [1, 2])]) == (1, 0.0)
    equal, moved = scripts.check.exactly_equal([truth], [answer(scripts, [1, 2], shift=2**-50)])
    assert equal == 0 and 0 < moved < 1e-14


def test_random_requests_are_all_acceptable(scripts: SimpleNamespace) -> None:
    intake = Intake(Limits(vocab_size=49152, max_context=4096, eos_ids=(2,)))
    mix = scripts.check.Mix(intake, list(range(100, 6100)), random.Random(3), True)
    made = [request for _ in range(600) for request in mix.requests()]
    assert len({request.id for request in made}) == len(made) > 650
    assert all(len(request.tokens) + request.max_tokens <= 1900 for request in made)
    fields = (
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "bad_words",
        "min_tokens",
    )
    for field in fields:
        assert len({str(getattr(request.sampling, field)) for request in made}) > 1, field
    assert 40 < sum(request.grammar is not None for request in made) < 300
    assert any(request.deadline_s is not None for request in made)


# -------------------------------------------------------------------------------------------------------------- a trace


def a_trace(*, steps: int = 20, period_us: float = 100.0) -> dict[str, Any]:
    """Steps of four kernels that fill 80 of 100 us; the second begins before the first ends."""
    kernels = (
        ("_embed", 0.0, 30.0),
        ("_gemv_kernel", 20.0, 30.0),
        ("_decode_kernel", 50.0, 15.0),
        ("_greedy", 70.0, 15.0),
    )
    events: list[dict[str, Any]] = [{"cat": "cpu_op", "name": "host", "ts": -50.0, "dur": 9999.0}]
    for step in reversed(range(steps)):
        for name, at, length in kernels:
            events.append({"cat": "kernel", "name": name, "ts": 1000 + step * period_us + at, "dur": length})
    return {"traceEvents": events}


def test_idle_time_is_what_no_kernel_covers(scripts: SimpleNamespace) -> None:
    events = scripts.trace.device_events(a_trace())
    found = scripts.trace.analysed(events, steps=20)
    assert found["span_us"] == pytest.approx(20 * 100 - 15)
    assert found["idle_us"] == pytest.approx(20 * 5 + 19 * 15), "overlapping kernels are counted once"
    assert found["idle_share"] == pytest.approx(385 / 1985)
    assert found["by_kind_us_per_step"] == {"other": 30.0, "matmul": 30.0, "attention": 15.0, "sampling": 15.0}
    assert found["events_per_step"] == 4 and found["by_kernel"][0]["us_each"] == pytest.approx(30)
    assert scripts.trace.step_begins(events, steps=20) == [1000 + 100 * step for step in range(20)]
    assert scripts.trace.analysed([], steps=20) == {"events": 0}


def test_a_trace_is_drawn(scripts: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "in.json").write_text(json.dumps(a_trace()))
    out = tmp_path / "out.json"
    assert scripts.trace.main(["--trace", str(tmp_path / "in.json"), "--steps", "20", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["device"]["idle_share"] == pytest.approx(385 / 1985)
    assert out.with_suffix(".png").stat().st_size > 5000
