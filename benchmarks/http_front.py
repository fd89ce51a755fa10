"""How many tokens a second the HTTP front carries on one core: N streams at once over an engine that costs nothing.

    python benchmarks/http_front.py                     64 streams, front alone
    python benchmarks/http_front.py --engine process    as `tradewind serve --script` has it: scheduler and scripted executor in a process
    python benchmarks/http_front.py --engine scripted   the same in this process
    ... --seconds 60                                    rounds until so much time has passed

The front runs in this process, pinned to one core; clients are a second process that reads sockets and counts events. Every token is
checked: each stream must hold exactly the tokens asked for, in order. Printed: tokens per second of wall time, microseconds of this
process's CPU time per token, and how much memory grew between the first and the last round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tradewind.config.goals import Goals
from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.contract.events import FinishReason, TokensOut
from tradewind.contract.kv import KVGroup
from tradewind.contract.request import Request
from tradewind.engine.client import LocalClient
from tradewind.engine.loop import EngineLoop
from tradewind.engine.remote import RemoteClient
from tradewind.engine.scheduler import Scheduler
from tradewind.engine.wire import ANSWERS, Answer, Link, Located, Ready, Start, socket_pair
from tradewind.serving.chat_template import CHATML, ChatTemplate
from tradewind.serving.http.app import make_app
from tradewind.serving.http.front import EngineClient, EngineStats, Front
from tradewind.serving.http.local import LocalEngine, Watch
from tradewind.serving.intake import Intake, Limits
from tradewind.serving.tokenizer import TextTokenizer
from tradewind.simulate.clock import RealClock
from tradewind.simulate.scripted import ScriptedExecutor

VOCAB = 256


class Queue:
    """A handle whose events are put there by the metronome, in the event loop's thread."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.made = 0
        self.events: deque[TokensOut] = deque()
        self.ready = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[TokensOut]:
        while True:
            while not self.events:
                await self.ready.wait()
                self.ready.clear()
            event = self.events.popleft()
            yield event
            if event.finish is not None:
                return

    def take(self) -> list[TokensOut]:
        taken = list(self.events)
        self.events.clear()
        return taken

    def cancel(self) -> None:
        self.made = 1 << 30

    def finish(self, reason: FinishReason = "stop") -> None:
        self.made = 1 << 30


class Metronome:
    """An engine without work: every turn of the event loop each sequence gets one token, the letters a to z in order."""

    def __init__(self) -> None:
        self.open: list[Queue] = []
        self.why_dead: str | None = None
        self._task: asyncio.Task[None] | None = None

    def submit(self, request: Request) -> Queue:
        handle = Queue(request)
        self.open.append(handle)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._beat())
        return handle

    async def _beat(self) -> None:
        while self.open:
            now = time.monotonic()
            still: list[Queue] = []
            for handle in self.open:
                made, request = handle.made, handle.request
                last = made + 1 >= request.max_tokens
                handle.events.append(
                    TokensOut(
                        request_id=request.id,
                        at_s=now,
                        tokens=(97 + made % 26,),
                        finish="length" if last else None,
                        prompt_tokens=len(request.tokens),
                        generated_tokens=made + 1,
                    )
                )
                handle.ready.set()
                handle.made = made + 1
                if not last:
                    still.append(handle)
            self.open = still
            # One step per round of writes: every stream writes once before the next token.
            while any(handle.events for handle in still):
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    def cancel(self, request_id: str) -> None:
        self.open = [handle for handle in self.open if handle.request.id != request_id]

    def finish(self, request_id: str, *, reason: FinishReason = "stop") -> None:
        self.cancel(request_id)

    def sleep(self) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.open), last_progress_s=time.monotonic())

    def scheduled_s(self, request_id: str) -> float | None:
        return None


class Alphabet(ScriptedExecutor):
    """Says the letters a to z in order, without the contract's checks."""

    def _answer(self, state: Any, position: int, visible: Sequence[bytes]) -> int:
        return 97 + (position - state.enter.prompt_tokens) % 26


def letters() -> TextTokenizer:
    """One id per byte."""
    from tradewind.serving.tokenizer import _BYTE_OF_CHARACTER

    backend = Tokenizer(models.BPE(vocab=dict(_BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(backend, kind="byte_level", bos_id=None, eos_id=None, eos_ids=frozenset())


def front_of(client: EngineClient, *, streams: int) -> Front:
    tokenizer = letters()
    return Front(
        client=client,
        tokenizer=tokenizer,
        template=ChatTemplate(CHATML),
        intake=Intake(Limits(vocab_size=VOCAB, max_context=1 << 20, eos_ids=())),
        model="letters",
        max_running=streams,
    )


def process(streams: int) -> RemoteClient:
    """The engine's process, as the server starts it; it says the letters a to z in order."""
    script = {
        "tokenizer": "bytes",
        "default": {"answer": "abcdefghijklmnopqrstuvwxyz", "repeat": True},
        "slots": streams,
        "max_context": 1 << 17,
        "pages": 8192,
        "page_tokens": 64,
    }
    mine, theirs = socket_pair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tradewind.engine_process", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    link: Link[Answer] = Link(mine, ANSWERS)
    link.send(Start(goals=Goals(model="letters"), script=json.dumps(script).encode(), script_name="letters"))
    while not isinstance(answer := link.receive(), Ready):
        assert isinstance(answer, Located), answer
    return RemoteClient(link, answer)


def scripted(streams: int) -> tuple[LocalClient, EngineClient]:
    group = KVGroup(index=0, kind="full", layers=(0,), kv_heads=1, head_dim=8, page_tokens=64, format="f32")
    cache = CachePlan(groups=(group,), pages=(8192,), page_tokens=64, prefix_cache=True)
    schedule = SchedulePlan(
        max_running=streams, max_tokens_per_step=4096, max_context=1 << 20, policy="arrival", steps_in_flight=2, age_limit_s=5.0,
        max_preemptions=3,
    )  # fmt: skip
    device = Alphabet(groups=cache.groups, pages=cache.pages, max_running=streams, clock=RealClock())
    watch = Watch()
    loop = EngineLoop(
        scheduler=Scheduler(schedule=schedule, cache=cache, clock=time.monotonic),
        executor=device,
        clock=time.monotonic,
        sinks=(watch,),
    )
    client = LocalClient(loop).start()
    return client, LocalEngine(client, loop, watch)


# -- clients


async def one_stream(port: int, tokens: int) -> int:
    """Reads one stream; returns how many tokens came, after checking each."""
    body = json.dumps({"messages": [{"role": "user", "content": "go"}], "max_tokens": tokens, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    data = await reader.read(-1)
    writer.close()
    head_, _, rest = data.partition(b"\r\n\r\n")
    assert b" 200 " in head_.split(b"\r\n")[0], head_
    body_ = bytearray()
    while rest:  # chunked framing
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        body_ += rest[:count]
        rest = rest[count + 2 :]
    events = bytes(body_).split(b"\n\n")
    assert events[-2] == b"data: [DONE]" and events[-1] == b"", events[-3:]
    text = []
    mark = b'"delta":{"content":"'
    for event in events[:-2]:
        at = event.find(mark)
        if at >= 0:
            text.append(event[at + len(mark) : event.index(b'"', at + len(mark))])
    said = b"".join(text).decode()
    assert said == ("abcdefghijklmnopqrstuvwxyz" * (tokens // 26 + 1))[:tokens], "tokens were lost or doubled"
    return len(said)


def clients(port: int, streams: int, tokens: int, rounds: int, seconds: float, out: Any) -> None:
    """The load, in a process of its own."""

    async def run() -> None:
        start = time.perf_counter()
        done = 0
        while done < rounds or time.perf_counter() - start < seconds:
            done += 1
            began = time.perf_counter()
            counts = await asyncio.gather(*(one_stream(port, tokens) for _ in range(streams)))
            out.send((sum(counts), time.perf_counter() - began))
        out.send(None)

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on with rounds until so much time has passed")
    parser.add_argument("--engine", choices=("none", "process", "scripted"), default="none")
    asked = parser.parse_args()
    local: LocalClient | RemoteClient | None = None
    engine: EngineClient
    if asked.engine == "scripted":
        local, engine = scripted(asked.streams)
    elif asked.engine == "process":
        local = engine = process(asked.streams)
    else:
        engine = Metronome()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    app = make_app(front_of(engine, streams=asked.streams))
    config = uvicorn.Config(app, log_level="error", access_log=False, loop="uvloop", http="httptools", ws="none")
    server = uvicorn.Server(config)
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    load = multiprocessing.get_context("spawn").Process(
        target=clients, args=(sock.getsockname()[1], asked.streams, asked.tokens, asked.rounds, asked.seconds, sender)
    )
    rounds: list[tuple[int, float, float, int]] = []

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        if isinstance(local, RemoteClient):
            local.attach()
        load.start()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) > 1:
            os.sched_setaffinity(0, cores[:1])
            os.sched_setaffinity(load.pid or 0, cores[1:])
        loop = asyncio.get_running_loop()
        cpu = time.process_time()
        while (got := await loop.run_in_executor(None, receiver.recv)) is not None:
            now = time.process_time()
            rounds.append((got[0], got[1], now - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
            cpu = now
        server.should_exit = True

    async def both() -> None:
        task = asyncio.create_task(watch())
        await server.serve(sockets=[sock])
        await task

    import uvloop

    uvloop.run(both())
    load.join()
    if local is not None:
        local.close()
    for count, wall, cpu, rss in rounds:
        a_core = f"{cpu / count * 1e6:6.1f} us CPU a token = {count / cpu:8.0f} tokens/s a core"
        print(f"{count} tokens  {count / wall:9.0f} tokens/s of wall  {a_core}  rss {rss >> 10} MB")
    best = max(count / cpu for count, _, cpu, _ in rounds)
    grown = (rounds[-1][3] - rounds[0][3]) / 1024
    print(f"best {best:.0f} tokens/s on one core, {asked.streams} streams; memory grew {grown:.1f} MB after round 1")


if __name__ == "__main__":
    main()
