"""Step times in running engines, with a tiny model: fitted while it serves, told, kept, and taken up again. No time is asserted."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from process_support import Server, wait_until
from test_degrade_live import metric
from tiny_engine import open_llm, write_checkpoint

from tradewind.config.goals import Goals, Means, TrafficClass
from tradewind.contract.errors import UserError
from tradewind.contract.request import SamplingParams
from tradewind.kernels.cpu import library
from tradewind.llm import LLM
from tradewind.serve import ServeOptions, serve
from tradewind.simulate.live_times import FittedSeconds
from tradewind.simulate.steptime import StepTime

pytestmark = pytest.mark.timeout(300)

LIMIT_S = 90.0
GOALS = """
model = {model}
[[class]]
name = "chat"
ttft = "500ms"
tpot = "200ms"
[hardware]
device = "cpu"
threads = 1
[means]
max_running = 4
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := library.why_not():
        pytest.skip(why)
    return write_checkpoint("full", tmp_path_factory.mktemp("step-times") / "tiny")


@contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    goals = folder / "goals.toml"
    goals.write_text(GOALS.format(model=json.dumps(str(model))))
    command = ["serve", str(goals), "--port", "0", *options]
    made = Server(folder, program=f"import sys; from tradewind.cli import main; sys.exit(main({command!r}))")
    try:
        yield made
    finally:
        made.close()


def ask(made: Server, number: int) -> None:
    status, answer, _ = made.complete(
        f"number {number} " * (1 + number % 7), model="tiny", max_tokens=40, ignore_eos=True
    )
    assert status == 200, answer


def test_a_server_fits_tells_and_keeps_its_step_times(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    with serving(model, tmp_path, "--step-times", str(file)) as made:
        wait_until(lambda: made.get("/board")[1]["step_times"] is not None, limit_s=LIMIT_S, what="the first word")
        assert metric(made, "step_time_fitted_steps") == 0 and made.get("/board")[1]["step_times"]["error_p50"] is None
        numbers = iter(range(1 << 30))

        def fitted() -> bool:
            ask(made, next(numbers))
            return metric(made, "step_time_refits_total") >= 2

        wait_until(fitted, limit_s=LIMIT_S, what="a second fit")
        assert metric(made, "step_time_fitted_steps") >= 64 and metric(made, "step_time_error_ratio") > 0
        assert made.get("/board")[1]["step_times"]["error_p50"] > 0
        wait_until(lambda: made.said("; fit 1, "), limit_s=LIMIT_S, what="the log")
        said = made.said("; fit 1, ")[0]
        assert "off by" in said and "% in the median" in said and said.startswith("{")
        made.signal(signal.SIGTERM)
        assert made.wait() == 0, made.log
    kept = StepTime.load(file)
    # The same format as what a simulation goes by.
    assert kept.steps >= 64 and kept.made_for.startswith("llama of ") and str(model) not in file.read_text()
    with serving(model, tmp_path, "--step-times", str(file)) as made:
        wait_until(lambda: made.get("/board")[1]["step_times"] is not None, limit_s=LIMIT_S, what="the first word")
        assert metric(made, "step_time_paces") == 1 and metric(made, "step_time_fitted_steps") == kept.steps
        ask(made, 0)
        wait_until(lambda: made.said("steps are paced by times of a former run"), limit_s=LIMIT_S, what="the log")


def test_a_file_of_another_model_ends_the_start_with_a_sentence(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    StepTime(source="t", curve_s=(1.0,) * 17, extra_s=(0.0,) * 5, made_for="llama of 8 parameters").save(file)
    goals = tmp_path / "goals.toml"
    goals.write_text(GOALS.format(model=json.dumps(str(model))))
    command = ["serve", str(goals), "--port", "0", "--step-times", str(file)]
    program = f"import sys; from tradewind.cli import main; sys.exit(main({command!r}))"
    made = Server(tmp_path, program=program, wait=False)
    try:
        assert made.wait(LIMIT_S) == 2 and made.said("name another file"), made.log
    finally:
        made.close()


def test_a_script_has_no_step_times(tmp_path: Path) -> None:
    for goals, script in (
        (Goals(model="m"), tmp_path / "script.json"),
        (Goals(model="m", means=Means(fit_steps=False)), None),
    ):
        with pytest.raises(UserError, match="--step-times keeps what steps of a model take"):
            serve(ServeOptions(goals=goals, script=script, port=0, step_times=tmp_path / "times.json"))


def test_the_python_api_paces_by_its_own_steps_too(model: Path) -> None:
    goals = Goals(
        model=str(model),
        classes=(TrafficClass(name="chat", ttft_ms=500, tpot_ms=50),),
        means=Means(backend="cpu", threads=1, compute="f32", kv_format="f32"),
    )
    with LLM(goals=goals) as llm:
        loop = llm.engine.client.loop
        assert llm.plan.schedule.fit_steps and loop.step_times is not None and loop.step_times.steps == 0
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        pacer = loop.scheduler._pacer
        assert pacer is not None and not isinstance(pacer._seconds, FittedSeconds)

        def fitted() -> bool:
            llm.generate([[number, 3, 4] for number in range(5)], sampling)
            assert loop.step_times is not None
            return loop.step_times.refits >= 1

        wait_until(fitted, limit_s=LIMIT_S, what="a fit")
        assert loop.step_times.steps >= 64
        assert isinstance(pacer._seconds, FittedSeconds) == loop.step_times.paces
    with open_llm(model) as plain:
        assert plain.engine.client.loop.step_times is None, "nobody paces, so nobody measures"
