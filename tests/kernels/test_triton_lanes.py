"""Shared experts on a second stream: where programs fork and join, and that no order which that allows changes a bit.

Runs as test_triton_ops.py does (TRITON_INTERPRET=1, or a GPU).
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_interpreter  # noqa: F401
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 set before Python starts", allow_module_level=True)

from tests.kernels.test_triton_moe import CARDS as MIXTURES  # noqa: E402
from tests.kernels.test_triton_ops import (  # noqa: E402
    DEVICE,
    FEW,
    MIXED,
    ONE,
    TILES,
    Runner,
    difference,
    lines,
    make_ops,
)
from tradewind.config.card import ModelCard  # noqa: E402
from tradewind.kernels.plain import PlainOps  # noqa: E402
from tradewind.kernels.triton.graphs import Gpu  # noqa: E402
from tradewind.kernels.triton.launch import AFTER_ALL, launch_options  # noqa: E402
from tradewind.kernels.triton.program import Program, SideStreams  # noqa: E402


def card_of(**moe: Any) -> ModelCard:
    base = MIXTURES["qwen2_moe"]
    assert base.moe is not None
    return msgspec.structs.replace(base, moe=msgspec.structs.replace(base.moe, **{"layers": (True, True), **moe}))


GATED, OPEN = card_of(), card_of(shared_gate=False)
CARDS = {"gated": GATED, "open": OPEN}
TWO_LANES = replace(TILES, side_from=1)
ONE_LANE = replace(TILES, side_tokens=0)
STEPS = (
    ([(0, [3, 4, 5, 6, 7]), (1, [8])], MIXED),
    ([(0, [9]), (1, [10])], FEW),
    ([(1, [11])], ONE),
)


def said(runner: Runner, *, planned: bool = True) -> list[np.ndarray]:
    return [runner.step(rows, bucket if planned else None) for rows, bucket in STEPS]


def by_lane(program: Program) -> tuple[list[Any], list[Any]]:
    return tuple([launch for launch in program.launches if launch.lane == lane] for lane in (0, 1))  # type: ignore[return-value]


def test_where_they_fork_and_join() -> None:
    runner = Runner(OPEN, make_ops(tuning=TWO_LANES))
    one, few = (runner.program(bucket)[0] for bucket in (ONE, FEW))
    main, side = by_lane(one)
    # embed; per layer: qkv, attention, output, router, route, gate_up, down, shared down; the last norm. Beside: the shared gate_up.
    assert len(side) == OPEN.layers and all("80 bf16 + norm + silu" in launch.text for launch in side)
    assert len(main) == 1 + 8 * OPEN.layers + 1, one.describe()
    assert [launch.text.startswith("gemv [1, 80] -> 64 bf16 + residual") for launch in main if launch.join] == [
        True
    ] * 2
    main, side = by_lane(few)
    assert len(side) == 2 * OPEN.layers and sum(launch.join for launch in main) == OPEN.layers
    assert all(launch.text.endswith("experts and a shared one") for launch in main if launch.join)
    wide = Runner(OPEN, make_ops(tuning=TWO_LANES)).program(MIXED)[0]
    assert not by_lane(wide)[1], "the library has one workspace for a stream"
    for bucket in (ONE, FEW):
        launches = Runner(OPEN, make_ops(tuning=ONE_LANE)).program(bucket)[0].launches
        assert not any(launch.lane or launch.join for launch in launches)
        both = runner.program(bucket)[0].launches
        assert sorted(launch.text for launch in launches) == sorted(launch.text for launch in both)
    text = lines(Runner(GATED, make_ops(tuning=TWO_LANES)), ONE)
    assert (
        sum(line.endswith("beside") for line in text) == 3 * GATED.layers and sum("join" in line for line in text) == 2
    )


def test_one_token_keeps_one_stream() -> None:
    """The shared expert's first half behind routing, in front of the experts; its second adds last. More tokens have two."""
    runner = Runner(OPEN, make_ops(tuning=TILES, pdl=True))
    launches = runner.program(ONE)[0].launches
    assert not any(launch.lane or launch.join for launch in launches)
    assert all(launch.options["pdl"] is True for launch in launches)
    texts = [launch.text for launch in launches]
    for i in [i for i, text in enumerate(texts) if text.startswith("route")]:
        shared, first, second, last = texts[i + 1 : i + 5]
        assert shared.startswith("gemv") and "80 bf16 + norm + silu" in shared, texts
        assert "experts" in first and "experts" in second and last.startswith("gemv [1, 80] -> 64 bf16 + residual")
    assert sum(text.startswith("route") for text in texts) == OPEN.layers
    assert by_lane(runner.program(FEW)[0])[1]


@pytest.mark.parametrize("card", CARDS)
def test_who_starts_early(card: str) -> None:
    """Never a launch with predecessors in the other lane; and what is read before the wait has a late predecessor in its lane."""
    runner = Runner(CARDS[card], make_ops(tuning=TWO_LANES, pdl=True))
    for bucket in (ONE, FEW):
        program = runner.program(bucket)[0]
        before: dict[int, Any] = {0: None, 1: None}
        away = False
        for launch in program.launches:
            first = launch.lane == 1 and not away
            assert (launch.options["pdl"] == AFTER_ALL) == (first or launch.join)
            assert launch.options["pdl"] in (True, AFTER_ALL)
            if launch.options.get("early"):
                assert before[launch.lane].options.get("late") and not launch.join
            away = launch.lane == 1 or (away and not launch.join)
            before[launch.lane] = launch
        assert not away
    assert launch_options(pdl=AFTER_ALL, warps=4) == {"PDL": True, "num_warps": 4}
    assert launch_options(pdl=True, warps=4)["launch_pdl"]


def delayed(launches: tuple[Any, ...]) -> list[Any]:
    """The same launches, those of lane 1 as late as they may run."""
    order: list[Any] = []
    waiting: list[Any] = []
    for launch in launches:
        if launch.lane:
            waiting.append(launch)
            continue
        if launch.join:
            order, waiting = order + waiting, []
        order.append(launch)
    return order + waiting


def alternating(launches: tuple[Any, ...]) -> list[Any]:
    """The same, one of each lane in turn."""
    order: list[Any] = []
    waiting: list[Any] = []
    for launch in launches:
        if launch.lane:
            waiting.append(launch)
            continue
        if launch.join:
            order, waiting = order + waiting, []
        order += [launch, *waiting[:1]]
        waiting = waiting[1:]
    return order + waiting


@pytest.mark.parametrize(("card", "fp8"), [("open", False), ("gated", True)])
def test_no_order_changes_a_bit(card: str, fp8: bool) -> None:
    whole: dict[str, list[np.ndarray]] = {}
    for name, tuning, order in (
        ("one lane", ONE_LANE, None),
        ("early", TWO_LANES, None),
        ("late", TWO_LANES, delayed),
        ("in turn", TWO_LANES, alternating),
    ):
        runner = Runner(CARDS[card], make_ops(tuning=tuning), fp8=fp8)
        if order is not None:
            for bucket in (ONE, FEW, MIXED):
                body, *head = runner.program(bucket)
                assert sorted(map(id, order(body.launches))) == sorted(map(id, body.launches))
                runner.programs[bucket, True] = [replace(body, launches=tuple(order(body.launches)), side=None), *head]
        whole[name] = said(runner)
    for name, found in whole.items():
        for one, other in zip(found, whole["one lane"], strict=True):
            assert np.array_equal(one, other), name
    truth = said(Runner(CARDS[card], PlainOps(), fp8=fp8), planned=False)
    for one, other in zip(whole["early"], truth, strict=True):
        assert difference(one, other) < (0.4 if fp8 else 0.06)  # at a near tie of the router a token goes elsewhere


def test_deterministic_programs_have_lanes_too() -> None:
    found = []
    for tuning in (TWO_LANES, ONE_LANE):
        runner = Runner(OPEN, make_ops(tuning=tuning, deterministic=True))
        found.append(said(runner))
        assert bool(by_lane(runner.program(FEW)[0])[1]) == (tuning is TWO_LANES)
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


def test_a_graph_of_two_lanes() -> None:
    """On a GPU: captured and replayed often, the same as launched one by one."""
    gpu = Gpu(DEVICE)
    runner, plain = (Runner(OPEN, make_ops(tuning=tuning)) for tuning in (TWO_LANES, ONE_LANE))
    wanted = plain.step([(0, [3, 4, 5]), (1, [6])], MIXED), plain.step([(0, [7]), (1, [8])], FEW)
    first = runner.step([(0, [3, 4, 5]), (1, [6])], MIXED)
    assert np.array_equal(first, wanted[0])
    with gpu.working():
        second = runner.step([(0, [7]), (1, [8])], FEW)  # compiles
    gpu.settle()
    assert np.array_equal(second, wanted[1])
    body, head = runner.program(FEW)
    graph = gpu.capture(lambda: (body.run(), head.run()))  # type: ignore[arg-type,func-returns-value]
    for _ in range(1 if INTERPRETED else 200):
        runner.logits.zero_()
        with gpu.working():
            graph.replay()
        gpu.settle()
        assert np.array_equal(runner.ops.host(runner.logits)[:2], wanted[1])


def test_events_tie_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Stream:
        made = 0

        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "side"
            self.cuda_stream = Stream.made // 2  # the first of the ring is the main one again
            Stream.made += 1

        def wait_event(self, event: Any) -> None:
            order.append(f"{self.name} waits for {event.at}")

    class Event:
        def record(self, stream: Stream) -> None:
            self.at = stream.name

    main = Stream("main")

    @contextmanager
    def on(stream: Stream) -> Any:
        order.append("(")
        yield
        order.append(")")

    class Launch:
        def __init__(self, name: str) -> None:
            self.name, self.lane, self.join = name, int(name.startswith("s")), name.startswith("J")

        def run(self) -> None:
            order.append(self.name)

    for name, value in (("Stream", Stream), ("Event", Event), ("stream", on), ("current_stream", lambda: main)):
        monkeypatch.setattr(torch.cuda, name, value)
    side = SideStreams(torch.device("cpu"))
    side.run([Launch(name) for name in ("p", "s1", "s2", "a", "J", "b", "s3", "c")])
    assert order == [
        "p", "side waits for main", "(", "s1", ")", "(", "s2", ")", "a", "main waits for side", "J", "b",
        "side waits for main", "(", "s3", ")", "c", "main waits for side",
    ]  # fmt: skip
