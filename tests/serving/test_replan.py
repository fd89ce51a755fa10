"""Another plan put into service under load: the same answers, none lost, and the way back. With scripted engines in their own processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tiny_engine import write_checkpoint

from tests.serving.process_support import END, KILL, Server, Stream, alive, request, script, server, wait_until
from tradewind.config.goals import Goals, Means
from tradewind.contract.errors import EngineDeadError, LimitError
from tradewind.contract.events import Arrived, Scheduled, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.columns import spelled_out
from tradewind.engine.wire import Located, Ready, Start
from tradewind.kernels.cpu import library
from tradewind.serve import launch
from tradewind.serving.replan import Changed, change_plan
from tradewind.serving.supervisor import Launched, Supervisor

SAYS = "Some text, the same for all."
EXPECTED = [*SAYS.encode(), END]
WIDE = Goals(model="none", means=Means(max_running=8))
NARROW = Goals(model="none", means=Means(max_running=3))


def stillborn() -> Launched:
    """A process that ends before it says a word."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        command = [sys.executable, "-c", "raise SystemExit(7)"]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return Launched(process=process, end=ours, at_s=time.perf_counter())


class Rig:
    """A supervisor with an engine that serves, in the running asyncio loop."""

    def __init__(self, *launches: Callable[[], Launched], goals: Goals = NARROW, **keys: Any) -> None:
        """`launches`: how the second, third, ... engine is started; after these as always."""
        text = json.dumps(script(**{"default": {"answer": SAYS}, "step_ms": 4, **keys})).encode()
        start = Start(goals=goals, script=text, script_name="t.json", faults=True)
        self._coming = [launch, *launches]
        self.engine = Supervisor(start, launch=self._launch)
        self.reports: list[Any] = []
        self.planned: list[int] = []
        self.deaths: list[str] = []
        self.engine.on_reports = self.reports.extend
        self.engine.on_planned = self._planned
        self.engine.on_death = self.deaths.append

    def _launch(self) -> Launched:
        return (self._coming.pop(0) if self._coming else launch)()

    def _planned(self, located: Located, ready: Ready) -> None:
        self.planned.append(ready.schedule.max_running)

    def lives(self) -> dict[str, Counter[str]]:
        """What listeners saw of each request."""
        seen: dict[str, Counter[str]] = {}
        for event in spelled_out(self.reports):
            if isinstance(event, Arrived | Scheduled):
                seen.setdefault(event.request_id, Counter())[type(event).__name__] += 1
            elif isinstance(event, TokensOut):
                own = seen.setdefault(event.request_id, Counter())
                own["tokens"] += len(event.tokens)
                if event.finish is not None:
                    own[event.finish] += 1
        return seen


def with_rig(work: Callable[[Rig], Awaitable[None]], *launches: Callable[[], Launched], **keys: Any) -> None:
    async def main() -> None:
        rig = Rig(*launches, **keys)
        rig.engine.spawn()
        try:
            await asyncio.to_thread(rig.engine.await_located)
            rig.engine.attach(await asyncio.to_thread(rig.engine.await_ready))
            async with asyncio.timeout(90):
                await work(rig)
        finally:
            rig.engine.close()

    asyncio.run(main())


async def read(handle: Any) -> list[int]:
    return [token async for event in handle for token in event.tokens]


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


def submitted(rig: Rig, names: range | list[str]) -> list[Any]:
    return [rig.engine.submit(request(str(name), f"prompt {name}", arrived_s=time.monotonic())) for name in names]


# ---------------------------------------------------------------------------------------------------------- the procedure


def test_a_plan_changes_under_load_and_every_answer_comes_whole() -> None:
    async def work(rig: Rig) -> None:
        engine = rig.engine
        handles = submitted(rig, range(30))  # 3 run, 27 wait in the engine
        await until(lambda: len(handles[0].tokens) > 3)
        readers = [asyncio.create_task(read(handle)) for handle in handles]
        change = asyncio.create_task(change_plan(engine, WIDE, drain_s=60, trial=True))
        late = 0
        while not change.done():  # and more come all the time
            if late < 300:
                readers.append(asyncio.create_task(read(*submitted(rig, [f"late {late}"]))))
                late += 1
            assert engine.why_dead is None
            assert engine.stats().last_progress_s > time.monotonic() - 60
            await asyncio.sleep(0.01)
        changed = change.result()
        assert changed.outcome == "changed" and changed.waited > 0 and changed.took_s > 0
        assert rig.planned == [8] and engine.goals == WIDE and engine.fallback == NARROW and not engine.held
        readers.append(asyncio.create_task(read(*submitted(rig, ["after"]))))
        answers = await asyncio.gather(*readers)
        assert len(answers) == 31 + late and all(answer == EXPECTED for answer in answers)
        # Whoever listens has seen one life of each.
        lives = rig.lives()
        assert len(lives) == 31 + late
        for name, seen in lives.items():
            assert seen == {"Arrived": 1, "Scheduled": 1, "tokens": len(EXPECTED), "stop": 1}, (name, seen)
        assert rig.deaths == []

    with_rig(work)


def test_a_plan_that_does_not_start_leaves_the_old_one_and_loses_nothing() -> None:
    async def work(rig: Rig) -> None:
        readers = [asyncio.create_task(read(handle)) for handle in submitted(rig, range(12))]
        await asyncio.sleep(0)
        changed = await change_plan(rig.engine, WIDE, drain_s=60, trial=True)
        assert changed.outcome == "failed" and "exit code 7" in changed.why
        assert rig.planned == [3] and rig.engine.goals == NARROW and rig.engine.fallback is None
        assert all(answer == EXPECTED for answer in await asyncio.gather(*readers))
        assert rig.deaths == []

    with_rig(work, stillborn)


def test_goals_that_cannot_be_planned_are_told_in_their_own_words() -> None:
    async def work(rig: Rig) -> None:
        wrong = Goals(model="none", means=Means(max_running=-1))
        changed = await change_plan(rig.engine, wrong, drain_s=60, trial=False)
        assert changed.outcome == "failed" and changed.why
        assert await read(*submitted(rig, ["a"])) == EXPECTED

    with_rig(work)


def test_where_neither_plan_starts_every_request_is_told() -> None:
    async def work(rig: Rig) -> None:
        await until(lambda: rig.engine.stats().running == 0)
        change = asyncio.create_task(change_plan(rig.engine, WIDE, drain_s=60, trial=True))
        await asyncio.sleep(0)
        (handle,) = submitted(rig, ["a"])
        changed = await change
        assert changed.outcome == "dead" and "exit code 7" in changed.why
        events = [event async for event in handle]
        assert [event.finish for event in events] == ["error"] and "exit code 7" in (events[0].error or "")
        assert rig.engine.why_dead is not None
        with pytest.raises(EngineDeadError):
            submitted(rig, ["b"])

    with_rig(work, stillborn, stillborn)


def test_requests_that_run_too_long_put_it_off_and_nothing_changes() -> None:
    async def work(rig: Rig) -> None:
        long = rig.engine.submit(request("long", "x", max_tokens=4000))
        reader = asyncio.create_task(read(long))
        await until(lambda: len(long.tokens) > 3)
        others = [asyncio.create_task(read(handle)) for handle in submitted(rig, range(10))]
        await asyncio.sleep(0)
        pid = rig.engine.pid
        changed = await change_plan(rig.engine, WIDE, drain_s=0.05, trial=True)
        assert changed.outcome == "put off" and "still ran after 0.05 s" in changed.why
        assert rig.engine.pid == pid and rig.engine.goals == NARROW and rig.planned == []
        assert all(answer == EXPECTED for answer in await asyncio.gather(*others))
        long.cancel()
        assert (await reader)[:10] == [*b"abcdefghij"]
        lives = rig.lives()
        assert all(lives[str(name)]["Arrived"] == lives[str(name)]["stop"] == 1 for name in range(10))
        assert all("abort" not in lives[str(name)] for name in range(10)), "that they were taken back is no end"

    with_rig(
        work,
        rules=[{"contains": "prompt", "answer": SAYS}],
        default={"answer": "abcdefghij", "repeat": True},
    )


def test_who_leaves_while_it_waits_is_gone() -> None:
    async def work(rig: Rig) -> None:
        engine = rig.engine
        long = [engine.submit(request(f"long {name}", "x", max_tokens=4000)) for name in range(3)]
        await until(lambda: all(handle.tokens for handle in long))
        queued = submitted(rig, range(3))  # all slots are taken: these will come back from the engine's queue
        await until(lambda: engine.stats().waiting == 3 and "2" in rig.lives())
        change = asyncio.create_task(change_plan(engine, WIDE, drain_s=60, trial=False))
        await until(lambda: engine.held)
        (fresh,) = submitted(rig, ["fresh"])
        with pytest.raises(LimitError):
            engine.submit(request("too long", "x", max_tokens=100_000))
        queued[1].cancel()
        fresh.cancel()
        for handle in (queued[1], fresh):
            assert handle.last is not None and handle.last.finish == "abort"
        for handle in long:
            handle.cancel()
        assert (await change).outcome == "changed" and engine.fallback is None
        assert await asyncio.gather(read(queued[0]), read(queued[2])) == [EXPECTED, EXPECTED]
        assert rig.lives()["1"] == {"Arrived": 1, "tokens": 0, "abort": 1}

    with_rig(work, rules=[{"contains": "prompt", "answer": SAYS}], default={"answer": "abcdefghij", "repeat": True})


def test_an_engine_that_dies_meanwhile_is_replaced_at_once() -> None:
    async def work(rig: Rig) -> None:
        engine = rig.engine
        long = engine.submit(request("long", "x", max_tokens=4000))
        await until(lambda: len(long.tokens) > 3)
        change = asyncio.create_task(change_plan(engine, WIDE, drain_s=60, trial=True))
        await until(lambda: engine.held)
        (waits,) = submitted(rig, ["a"])
        assert engine.pid is not None
        os.kill(engine.pid, KILL)
        assert (await change).outcome == "changed" and rig.planned == [8]
        assert len(rig.deaths) == 1 and "SIGKILL" in rig.deaths[0]
        events = [event async for event in long]
        assert events[-1].finish == "error"
        assert await read(waits) == EXPECTED

    with_rig(work, rules=[{"contains": "prompt", "answer": SAYS}], default={"answer": "abcdefghij", "repeat": True})


def test_close_while_requests_wait_ends_them() -> None:
    async def work(rig: Rig) -> None:
        rig.engine.hold()
        (handle,) = submitted(rig, ["a"])
        rig.engine.close()
        assert handle.last is not None and handle.last.finish == "abort"
        with pytest.raises(EngineDeadError, match="shutting down"):
            submitted(rig, ["b"])

    with_rig(work)


def test_a_model_answers_the_same_under_the_next_plan(tmp_path: Path) -> None:
    if why := library.why_not():
        pytest.skip(why)
    folder = write_checkpoint("full", tmp_path)
    means = Means(backend="cpu", threads=1, kv_format="f32", compute="f32", max_running=2, max_tokens_per_step=32)
    goals = Goals(model=str(folder), max_context=128, memory_limit_bytes=512 << 20, means=means)
    wider = replace(goals, means=replace(means, max_running=6))
    asked = {f"{a}-{b}": (5 + a, 6 + b, 7) for a in range(4) for b in range(3)}

    def ask(engine: Supervisor, stage: str) -> list[Any]:
        return [
            engine.submit(
                Request(
                    id=f"{stage} {name}",
                    tokens=tokens,
                    sampling=SamplingParams(temperature=0.0, ignore_eos=True),
                    max_tokens=20,
                    arrived_s=time.monotonic(),
                )
            )
            for name, tokens in asked.items()
        ]

    async def main() -> None:
        planned: list[int] = []
        engine = Supervisor(Start(goals=goals), launch=launch)
        engine.on_planned = lambda located, ready: planned.append(ready.schedule.max_running)
        engine.spawn()
        try:
            located = await asyncio.to_thread(engine.await_located)
            engine.attach(await asyncio.to_thread(engine.await_ready))
            async with asyncio.timeout(90):
                before = await asyncio.gather(*map(read, ask(engine, "before")))
                meanwhile = [asyncio.create_task(read(handle)) for handle in ask(engine, "meanwhile")]
                await asyncio.sleep(0)
                changed = await change_plan(engine, wider, drain_s=60, trial=False)
                assert changed.outcome == "changed" and planned == [6]
                assert located.plan is not None and located.plan.schedule.max_running == 2
                assert await asyncio.gather(*meanwhile) == before
                assert await asyncio.gather(*map(read, ask(engine, "after"))) == before
                impossible = replace(goals, max_context=1 << 20)
                changed = await change_plan(engine, impossible, drain_s=60, trial=False)
                assert changed.outcome == "failed" and "context" in changed.why and engine.goals == wider
                assert await asyncio.gather(*map(read, ask(engine, "back"))) == before
        finally:
            engine.close()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------------- the whole server

PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import tradewind.serve, tradewind.serve_drift as drift
from tradewind.config.goals import Goals, Means
from tradewind.serve import ServeOptions, serve
from tradewind.tune.guard import Patience, Proposed
from tradewind.tune.trial import Try

class Watch(drift.DriftWatch):
    # A script has no plan to simulate: the answer is made up.
    def __init__(self, **more):
        patience = Patience(learn=128, gather=32, trial=TRIAL, pause_s=0.1, put_off_s=0.1)
        super().__init__(**{**more, "mode": "apply", "patience": patience, "usual": 128})

    def simulate(self, drift, traffic, *, usual, targets, goals):
        assert len(traffic) >= 32 and targets
        made = Goals(model=goals.model, means=Means(max_running=8))
        tries = (Try(name="as it is", attained=0.0, ttft_p90_s=1.0, tpot_p90_s=1.0),)
        self.guard.simulated(Proposed(
            goals=made, changed=True, differs=("max_running 2 -> 8",), why="made up", tries=tries,
            targets={"": {"ttft": 1e-9}}, step_times="none",
        ))

drift.DriftWatch = Watch
drift.TICK_S = 0.05
goals = Goals(model="none", ttft_ms=1e-6, means=Means(max_running=2))
sys.exit(serve(ServeOptions(goals=goals, script=Path(sys.argv[1]), port=0, max_queue=64)))
"""
"""No request meets such a target, under whatever plan: the trial's verdict does not hang on this machine's speed."""


class Clients:
    """Threads that ask one thing after the other and note what came of it."""

    def __init__(self, made: Server, count: int = 6) -> None:
        self._made, self._stop = made, threading.Event()
        self.long = False
        """Their prompts are long from now on."""
        self.answers: list[tuple[int, str]] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            prompt = "a much longer prompt, " * 20 if self.long else "hi"
            try:
                status, body, _ = self._made.complete(prompt, max_tokens=40)
            except (OSError, HTTPException):
                self.answers.append((0, "the server has gone"))
                return
            text = body["choices"][0]["text"] if status == 200 else json.dumps(body)
            self.answers.append((status, text))

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def learnt(made: Server) -> None:
    wait_until(lambda: made.get("/drift")[1]["state"] != "learning", limit_s=90, what="learning")


def drifted(made: Server, clients: Clients, what: str) -> Any:
    learnt(made)
    clients.long = True
    wait_until(lambda: any(one["what"] == what for one in made.get("/drift")[1]["history"]), limit_s=90, what=what)
    return made.get("/drift")[1]


def serving(folder: Path, *, trial: int) -> Server:
    return Server(
        folder,
        program=PROGRAM.replace("TRIAL", str(trial)),
        default={"answer": "Yes."},
        step_ms=1,
        page_tokens=8,
        pages=900,
    )


def test_a_server_changes_its_plan_by_itself_and_no_client_notices_more_than_time(tmp_path: Path) -> None:
    made = serving(tmp_path, trial=60)
    try:
        before = made.engine_pid
        clients = Clients(made)
        told = drifted(made, clients, "kept")
        clients.end()
        assert len(clients.answers) > 250
        assert {status for status, _ in clients.answers} == {200}
        assert {text for _, text in clients.answers} == {"Yes."}
        assert [one["what"] for one in told["history"]][:5] == ["learnt", "drift", "proposal", "applied", "kept"]
        assert told["mode"] == "apply" and told["changes"]["applied"] >= 1 and told["changes"]["kept"] >= 1
        assert made.engine_pid != before and not alive(before)
        assert made.get("/board")[1]["max_running"] == 8
        connection = made.connection()
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        assert 'tradewind:plan_changes_total{model_name="scripted",outcome="kept"}' in text
        ended = next(line for line in text.splitlines() if 'finished_reason="abort"' in line)
        assert ended.endswith(" 0"), "nobody was cut"
        assert made.said("traffic has left what the plan was made for") and made.said("the new plan is kept")
        health = made.get("/health")[1]
        assert health["status"] == "ok" and "drift" in health
        # Kept is kept: nothing is gone back to when this engine dies.
        os.kill(made.engine_pid, KILL)
        assert made.wait(30) == 1 and not made.said("a new engine is started")
    finally:
        made.close()


def test_an_engine_that_dies_on_trial_is_followed_by_one_with_the_old_plan(tmp_path: Path) -> None:
    """Also where the operator has not asked for restarts: it was not his plan that died."""
    made = serving(tmp_path, trial=100_000)
    try:
        clients = Clients(made)
        told = drifted(made, clients, "applied")
        assert told["state"] == "trial" and made.get("/board")[1]["max_running"] == 8
        os.kill(made.engine_pid, KILL)
        wait_until(lambda: made.said("the new engine serves"), limit_s=60, what="the restart")
        assert made.get("/board")[1]["max_running"] == 2
        (undone,) = [one for one in made.get("/drift")[1]["history"] if one["what"] == "undone"]
        assert "the engine died under the new one" in undone["says"]
        assert made.complete()[0] == 200
        clients.end()
        assert {status for status, _ in clients.answers} <= {200, 503}
    finally:
        made.close()


def test_told_and_nothing_else_is_what_serve_does_by_itself(tmp_path: Path) -> None:
    with server(tmp_path, "--usual-traffic", "128", default={"answer": SAYS}) as made:
        told = made.get("/drift")[1]
        assert told["mode"] == "tell" and told["state"] == "learning" and told["learnt_of"] == 128
        for _ in range(3):
            assert made.complete()[0] == 200
        assert made.get("/drift")[1]["learnt"] == 3
        assert made.get("/health")[1]["drift"] is None
    with server(tmp_path, "--on-drift", "off") as made:
        assert made.get("/drift")[1] is None and made.get("/health")[1]["drift"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on-drift", "shout"], "argument --on-drift: 'shout' is none of off, tell, propose, apply"),
        (["--on-drift", "apply"], "--on-drift apply needs a plan to change, and a script has none; use tell, or off"),
        (["--on-drift", "off", "--usual-traffic", "500"], "but --on-drift is off; leave one of them out"),
        (["--usual-traffic", "5"], "--usual-traffic is 5; learn from at least 128 requests and at most 1000000"),
        (["--usual-traffic", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"tokenizer": "bytes"}')
    command = [sys.executable, "-m", "tradewind", "serve", "--port", "0", "--script", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_sigterm_while_the_plan_changes_loses_nothing(tmp_path: Path) -> None:
    """The changed engine serves what waited, then the server ends."""
    made = serving(tmp_path, trial=100_000)
    try:
        clients = Clients(made)
        learnt(made)
        clients.long = True
        wait_until(lambda: made.said("the engine is started under another plan"), limit_s=60, what="the change")
        made.signal(15)
        clients.end()
        assert {status for status, _ in clients.answers} <= {0, 200, 503}
        assert made.wait(60) == 0, made.log  # 1, where a request was cut
    finally:
        made.close()


def test_streams_that_run_are_finished_under_the_old_plan(tmp_path: Path) -> None:
    made = serving(tmp_path, trial=100_000)
    try:
        wait_until(lambda: made.get("/health")[1]["status"] == "ok", limit_s=30)
        with Stream(made, max_tokens=40) as stream:
            stream.rest()
            assert stream.done and stream.text == "Yes." and stream.finish == "stop"
    finally:
        made.close()


def test_changed_says_what_became_of_it() -> None:
    assert Changed(outcome="put off", why="x").took_s == 0.0
