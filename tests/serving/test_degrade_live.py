"""The degrade ladder in running servers, scripted and with a model: it is climbed and taken back, and nobody is cut.

What is asserted are decisions (rungs, who is refused, who is not), never times: whether the highest class is in time is asked of a virtual
clock (tests/host/test_overload.py, test_degrade.py).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from process_support import Server, server, wait_until
from tiny_engine import write_checkpoint

from tradewind.engine.degrade import RUNGS
from tradewind.kernels.cpu import library

pytestmark = pytest.mark.timeout(300)

HIGH, LOW = -1, 5
LIMIT_S = 90.0
"""For anything to happen, however busy the machine is."""
ASKING = 6


def metric(made: Server, name: str) -> float:
    connection = made.connection()
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    values = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"tradewind:{name}{{")]
    assert values, f"there is no {name} in {text}"
    return sum(values)


class Flood:
    """Several clients of the high class, each of which asks anew when it has its answer."""

    def __init__(self, made: Server, *, model: str, max_tokens: int) -> None:
        self.statuses: list[int] = []
        self.errors: list[BaseException] = []
        self._made, self._model, self._max_tokens = made, model, max_tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(place,)) for place in range(ASKING)]

    def _ask(self, place: int) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                number += 1
                status, answer, _ = self._made.complete(
                    f"{place}.{number}", model=self._model, max_tokens=self._max_tokens, priority=HIGH, ignore_eos=True
                )
                self.statuses.append(status)
                if status == 200:
                    assert answer["usage"]["completion_tokens"] == self._max_tokens, "it was cut"
        except BaseException as error:
            self.errors.append(error)

    @contextmanager
    def running(self) -> Iterator[Flood]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(LIMIT_S)


def low(made: Server, model: str) -> tuple[int, Any]:
    status, answer, _ = made.complete("low", model=model, max_tokens=4, priority=LOW)
    return status, answer


def climb_and_come_back(made: Server, *, model: str, max_tokens: int) -> Flood:
    """Floods the server until the lowest class is refused and every rung is taken, then leaves it alone until all is taken back."""
    assert low(made, model)[0] == 200 and metric(made, "degrade_level") == 0
    with Flood(made, model=model, max_tokens=max_tokens).running() as flood:
        began_s = time.monotonic()
        while metric(made, "degrade_level") < len(RUNGS) - 1:
            assert time.monotonic() - began_s < LIMIT_S and not flood.errors, (made.log, flood.errors)
            low(made, model)  # whom there is to give way
            time.sleep(0.02)
        refused: list[Any] = []

        def told() -> bool:
            status, answer = low(made, model)
            refused.append(answer)
            return status == 429

        wait_until(told, limit_s=LIMIT_S, what="a refusal")
        assert "too busy" in refused[-1]["error"]["message"] and metric(made, "degrade_refused_total") > 0
        wait_until(
            lambda: made.get("/board")[1]["overload"]["gives_up"] == "answers", limit_s=LIMIT_S, what="the highest rung"
        )
    assert not flood.errors and set(flood.statuses) == {200}, "nobody of the high class is refused"
    # Nobody asks any more; it comes back by itself.
    wait_until(lambda: metric(made, "degrade_level") == 0, limit_s=LIMIT_S, what="the way back")
    assert low(made, model)[0] == 200
    changes = metric(made, "degrade_changes_total")
    wait_until(lambda: len(made.said("overload, rung")) == changes, limit_s=LIMIT_S, what="a line for each change")
    assert not made.said("gives up drafts"), "there are none"
    for rung in RUNGS[2:]:
        assert made.said(f"the engine gives up {rung}") and made.said(f"the engine takes back {rung}"), made.log
    assert all(line.startswith("{") for line in made.said("overload, rung")), "the engine's log is in the front's form"
    return flood


def test_a_scripted_engine_climbs_and_comes_back(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "default": {"answer": "abcdefgh ", "repeat": True},
        "step_ms": 10,
        "slots": 2,
        "policy": "priority",
        "degrade": {"ttft_s": 0.04, "up_s": 0.1, "down_s": 0.5},
    }
    with server(tmp_path, **keys) as made:
        climb_and_come_back(made, model="scripted", max_tokens=40)


GOALS = """
model = {model}
quality = {quality}

[[class]]
name = "chat"
match = {{ priority = -1 }}
ttft = "2ms"
tpot = "10s"

[[class]]
name = "bulk"

[hardware]
device = "cpu"
threads = 1

[means]
max_running = 2
"""


@contextmanager
def model_server(folder: Path, *, quality: str) -> Iterator[Server]:
    """A tiny model, served to goals."""
    if why := library.why_not():
        pytest.skip(why)
    model = write_checkpoint("full", folder / "tiny")
    goals = folder / "goals.toml"
    goals.write_text(GOALS.format(model=json.dumps(str(model)), quality=json.dumps(quality)))
    command = ["serve", str(goals), "--port", "0"]
    made = Server(folder, program=f"import sys; from tradewind.cli import main; sys.exit(main({command!r}))")
    try:
        yield made
    finally:
        made.close()


def test_a_model_climbs_as_far_as_the_quality_budget_and_comes_back(tmp_path: Path) -> None:
    with model_server(tmp_path, quality="1%") as made:
        (why,) = [one for one in made.get("/plan")[1]["reasons"] if one["choice"] == "degrade"]
        assert why["value"] == "full" and "for chat: " in why["why"]
        climb_and_come_back(made, model="tiny", max_tokens=300)


def test_a_lossless_model_refuses_nobody(tmp_path: Path) -> None:
    with model_server(tmp_path, quality="lossless") as made:
        lows: list[int] = []
        with Flood(made, model="tiny", max_tokens=300).running() as flood:
            began_s = time.monotonic()
            while metric(made, "degrade_level") < 3:
                assert time.monotonic() - began_s < LIMIT_S and not flood.errors, (made.log, flood.errors)
                time.sleep(0.02)
            asked = threading.Thread(target=lambda: lows.append(low(made, "tiny")[0]))
            asked.start()
            time.sleep(1.0)  # a rung for each 0.2 s, were there more
            assert made.get("/board")[1]["overload"]["most"] == 3 >= metric(made, "degrade_level")
        asked.join(LIMIT_S)
        assert lows == [200] and set(flood.statuses) == {200} and not flood.errors
        assert metric(made, "degrade_refused_total") == 0 and not made.said("gives up refusal")
