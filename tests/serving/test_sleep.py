"""Sleep and wake: user case A40, what is refused, and where the memory goes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from http_support import Live, live, live_model, until
from process_support import rss_bytes, server
from support_engine import Engine, request
from tiny_engine import write_checkpoint

from tradewind.contract.events import Scheduled, TokensOut
from tradewind.engine.loop import Add, Sleep
from tradewind.kernels.cpu import library
from tradewind.serving.http.front import Options
from tradewind.simulate.scripted import ScriptedExecutor

SLEEPY = Options(allow_sleep=True)
BODY = {"prompt": "the same long prompt, every time " * 4, "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def ask(to: Live) -> tuple[str, int]:
    """(answer, cached tokens)."""
    answer = to.post("/v1/completions", BODY)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def a40(one: Live) -> None:
    before, _ = ask(one)
    again, cached = ask(one)
    assert again == before and cached > 0
    assert one.post("/sleep", None) == {"is_sleeping": True} == one.get("/is_sleeping")
    error = one.error("/v1/completions", BODY, status=503)
    assert error["code"] == "asleep"
    assert error["message"] == "the server is asleep and takes no requests; wake it with POST /wake_up"
    assert one.get("/health")["status"] == "asleep"
    assert one.post("/tokenize", {"prompt": "hi"})["count"] > 0, "what needs no engine is answered"
    assert one.post("/wake_up", None) == {"is_sleeping": False} == one.get("/is_sleeping")
    assert one.get("/health")["status"] == "ok"
    assert ask(one) == (before, 0), "the same answer, and nothing stale was used"
    again, cached = ask(one)
    assert again == before and cached > 0


def test_a40_the_answer_after_a_sleep_is_the_one_before_it() -> None:
    with live(options=SLEEPY) as one:
        a40(one)


def test_a40_with_a_model(tmp_path: Path) -> None:
    if why := library.why_not():
        pytest.skip(why)
    folder = write_checkpoint("full", tmp_path / "model")
    with live_model(str(folder), options=SLEEPY, threads=1) as one:
        a40(one)


def test_a40_a_level_that_drops_the_weights_is_refused() -> None:
    with live(options=SLEEPY) as one:
        for query, code, said in (
            ("level=2", "unsupported_parameter", "level 2 would drop the weights"),
            ("level=0", "invalid_value", "level is '0'; it must be 1"),
            ("level=", "invalid_value", "level is ''; it must be 1"),
            ("tags=weights", "unknown_parameter", "'tags' is not known here"),
        ):
            error = one.error(f"/sleep?{query}", None)
            assert error["code"] == code and said in error["message"]
        assert one.get("/is_sleeping") == {"is_sleeping": False}
        assert one.post("/sleep?level=1", None) == {"is_sleeping": True}
        assert one.post("/sleep", None) == {"is_sleeping": True}, "a second time finds it done"


def test_sleeping_must_be_allowed() -> None:
    with live() as one:
        for path in ("/sleep", "/wake_up"):
            error = one.error(path, None, status=403)
            assert error["code"] == "sleep_not_allowed" and "--allow-sleep" in error["message"]
        assert one.get("/is_sleeping") == {"is_sleeping": False}


def test_open_requests_end_before_the_sleep_and_a_wake_up_calls_it_off() -> None:
    with live(options=SLEEPY, step_s=0.005, max_context=8192) as one:
        said: list[tuple[int, Any]] = []

        def sleep() -> None:
            status, _, data = one.send("POST", "/sleep")
            said.append((status, data))

        with one.opened("/v1/completions", {**BODY, "max_tokens": 100}) as events:
            next(events)
            sleeper = threading.Thread(target=sleep)
            sleeper.start()
            until(lambda: one.get("/is_sleeping")["is_sleeping"], "nothing is slowed down")
            assert one.error("/v1/completions", BODY, status=503)["code"] == "asleep"
            assert sleeper.is_alive() and one.get("/health")["status"] == "ok"
            rest = list(events)
        sleeper.join()
        assert rest[-1] == "[DONE]" and said[0][0] == 200
        one.post("/wake_up", None)
        with one.opened("/v1/completions", {**BODY, "max_tokens": 4000}) as events:
            next(events)
            sleeper = threading.Thread(target=sleep)
            sleeper.start()
            until(lambda: one.get("/is_sleeping")["is_sleeping"], "nothing is slowed down")
            one.post("/wake_up", None)
            sleeper.join()
        assert said[1][0] == 409 and b"woken" in said[1][1]
        ask(one)


def test_the_engine_sleeps_when_nothing_runs_and_not_before() -> None:
    class Rests(ScriptedExecutor):
        rested = 0

        def rest(self) -> None:
            assert engine.scheduler.idle
            self.rested += 1

    engine = Engine()
    engine.loop._executor = device = Rests(
        groups=engine.cache.groups, pages=engine.cache.pages, max_running=engine.schedule.max_running
    )
    for name in ("a", "b"):
        engine.scheduler.add(request(name, range(30), max_tokens=8), engine.clock.now())
        engine.loop.run_once()
        engine.loop.post(Sleep())
        while engine.loop.busy:
            assert device.rested == (name == "b")
            engine.loop.run_once()
            engine.scheduler.check()
    assert device.rested == 2
    assert [e.cached_tokens for e in engine.of(Scheduled)] == [0, 0]
    assert all(pool.free == pool.total - 1 for pool in engine.scheduler.cache.pools)


def test_what_comes_right_after_the_sleep_finds_nothing_cached() -> None:
    """The answer is whole, but its last step, which brought a token too many, still flies: its pages are published when it lands."""
    engine = Engine()
    engine.scheduler.add(request("a", range(30), max_tokens=50, eos_ids=()), engine.clock.now())
    while not engine.of(TokensOut, "a"):
        engine.loop.run_once()
    engine.scheduler.finish("a", engine.clock.now())
    assert engine.scheduler.flying and not engine.scheduler.unfinished
    engine.loop.post(Sleep())
    engine.loop.post(Add(request("b", range(30), max_tokens=8)))
    while engine.loop.busy:
        engine.loop.run_once()
        engine.scheduler.check()
    assert [e.cached_tokens for e in engine.of(Scheduled, "b")] == [0]


def test_sleep_crosses_the_process_border(tmp_path: Path) -> None:
    text = "one prompt for all of them, and a long one " * 4
    with server(tmp_path, "--allow-sleep") as made:
        cached = [made.complete(text)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        assert cached[0] == 0 < cached[1]
        assert made.post("/sleep")[:2] == (200, {"is_sleeping": True})
        assert made.complete(text)[0] == 503
        assert made.post("/wake_up")[0] == 200
        status, answer, _ = made.complete(text)
        assert status == 200 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_sleeping_engines_pages_are_the_systems(tmp_path: Path) -> None:
    if why := library.why_not():
        pytest.skip(why)
    folder = write_checkpoint("full", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40_000}))
    facts: dict[str, Any] = {"threads": 1, "kv_format": "f32", "max_tokens_per_step": 2048, "compute": "f32"}
    with live_model(str(folder), options=SLEEPY, **facts) as one:
        body = {"prompt": [1 + i % 200 for i in range(12_000)], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        first = one.post("/v1/completions", body)["choices"][0]["text"]
        full = rss_bytes(os.getpid())
        one.post("/sleep", None)
        need = 12_000 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dims, bytes: 9 MB
        until(lambda: rss_bytes(os.getpid()) < full - 0.9 * need, "the pages are still held")
        one.post("/wake_up", None)
        assert one.post("/v1/completions", body)["choices"][0]["text"] == first
