"""Load on a whole `tradewind serve --script`: is every token there once, is memory flat, does every slot come back?

    python benchmarks/serve_load.py --json result.json
    python benchmarks/serve_load.py --seconds 10 --cycles 50        a quick look

Two parts, each with a server of its own:

    streams   N streams at once for S seconds; one that ends is followed by the next. Each chunk is compared with the text that the script
              forces. Counted: tokens, CPU seconds of the front's and of the engine's process, resident memory of both over time.
    cycles    C times: start 16 requests, let 8 go (streams closed, waiting answers closed, /abort), read the other 8 to their end.
              Afterwards no request may run or wait, no page may be held, and as many requests as there are slots must run at once.

Exit code 1 when something is lost. Linux only: times and memory are read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz "
DELTA = re.compile(rb'"delta":\{"content":"([a-z ]*)"')
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
HEAD = (
    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Id: %s\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n"
)


class Server:
    """`tradewind serve --script` on a free port."""

    def __init__(self, folder: Path, **script: Any) -> None:
        path = folder / "script.json"
        path.write_text(json.dumps({"tokenizer": "bytes", **script}))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tradewind", "serve", "--script", str(path), "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.port = 0
        for line in self.process.stderr:
            if "ready on" in line:
                self.port = int(line.rpartition(":")[2].strip('"}\n'))
                break
        assert self.port, "the server did not start"
        tasks = Path(f"/proc/{self.process.pid}/task")
        (self.engine,) = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]

    def pin(self) -> None:
        """The front on one core, engine and clients on the others."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            for pid, where in ((self.process.pid, cores[:1]), (self.engine, cores[1:]), (os.getpid(), cores[1:])):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), where)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        rows = re.findall(rf"^tradewind:{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert rows, f"there is no metric {name}"
        return sum(map(float, rows))

    def close(self) -> int:
        """SIGTERM and the exit code."""
        self.process.terminate()
        assert self.process.stderr is not None
        self.process.stderr.read()
        return self.process.wait(60)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 2**20


class Request:
    """One HTTP request on a connection of its own."""

    def __init__(self, port: int, *, name: str, tokens: int, stream: bool = True) -> None:
        self._port, self._name, self._tokens, self._stream = port, name, tokens, stream
        self.tokens = 0
        """Tokens that came, each of them checked."""
        self.finish = ""

    async def start(self) -> None:
        """Sends it; reads the head of the answer when it is a stream."""
        # A prompt of its own: otherwise the prefix cache would be all that is measured.
        body = {
            "messages": [{"role": "user", "content": f"{self._name} go"}],
            "max_tokens": self._tokens,
            "stream": self._stream,
        }
        data = json.dumps(body).encode()
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        self._writer.write(HEAD % (b"/v1/chat/completions", self._name.encode(), len(data)) + data)
        if self._stream:
            head = await self._reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head.split(b"\r\n", 1)[0], head

    async def chunk(self) -> bool:
        """Reads one chunk and compares it with what must come here; False after the last."""
        size = int(await self._reader.readline(), 16)
        data = await self._reader.readexactly(size + 2)
        if not size:
            return False
        assert data.endswith(b"\n\n\r\n"), f"a chunk ends within an event: {data[-80:]!r}"
        text = b"".join(DELTA.findall(data)).decode()
        at = self.tokens % len(LETTERS)
        must = (LETTERS * ((at + len(text)) // len(LETTERS) + 1))[at : at + len(text)]
        assert text == must, f"{self._name}: after {self.tokens} tokens came {text!r}, not {must!r}"
        self.tokens += len(text)
        assert b'"error"' not in data, data
        found = re.search(rb'"finish_reason":"(\w+)"', data)
        if found:
            self.finish = found[1].decode()
        return True

    async def rest(self) -> None:
        """Reads to the end, which must be the limit of tokens."""
        while await self.chunk():
            pass
        self.close()
        assert (self.tokens, self.finish) == (self._tokens, "length"), f"{self._name}: {self.tokens}, {self.finish!r}"

    def close(self) -> None:
        self._writer.close()


async def streams(server: Server, *, count: int, seconds: float, tokens: int) -> dict[str, Any]:
    """The first part; see the module's docstring."""
    done: list[int] = []
    open_now: list[Request] = []
    began = time.monotonic()

    async def line(place: int) -> None:
        number = 0
        while time.monotonic() - began < seconds:
            request = Request(server.port, name=f"s{place}-{number}", tokens=tokens)
            open_now.append(request)
            await request.start()
            await request.rest()
            open_now.remove(request)
            done.append(request.tokens)
            number += 1

    samples: list[dict[str, float]] = []

    async def watch() -> None:
        while True:
            samples.append(
                {
                    "at_s": round(time.monotonic() - began, 1),
                    "front_mb": round(rss_mb(server.process.pid), 1),
                    "engine_mb": round(rss_mb(server.engine), 1),
                    "tokens": sum(done) + sum(request.tokens for request in open_now),
                }
            )
            await asyncio.sleep(seconds / 12)

    before = cpu_s(server.process.pid), cpu_s(server.engine), time.process_time()
    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(line(place) for place in range(count)))
    wall = time.monotonic() - began
    front, engine = cpu_s(server.process.pid) - before[0], cpu_s(server.engine) - before[1]
    watcher.cancel()
    total = sum(done)
    counted = server.metric("generation_tokens_total")
    assert counted == total, f"clients read {total} tokens, /metrics has {counted:.0f}"
    at = next(sample for sample in samples if sample["at_s"] >= seconds / 6 - 0.1)
    return {
        "streams_at_once": count,
        "streams": len(done),
        "tokens": total,
        "wall_s": round(wall, 2),
        "front_cpu_s": round(front, 2),
        "engine_cpu_s": round(engine, 2),
        "clients_cpu_s": round(time.process_time() - before[2], 2),
        "tokens_per_s": round(total / wall),
        "tokens_per_front_cpu_s": round(total / front),
        "front_mb_early": at["front_mb"],
        "front_mb_late": samples[-1]["front_mb"],
        "engine_mb_early": at["engine_mb"],
        "engine_mb_late": samples[-1]["engine_mb"],
        "early_s": at["at_s"],
        "late_s": samples[-1]["at_s"],
        "samples": samples,
    }


async def cycles(server: Server, *, count: int, slots: int) -> dict[str, Any]:
    """The second part; see the module's docstring."""
    began = time.monotonic()
    before = cpu_s(server.process.pid)
    read = 0
    for number in range(count):
        kept = [Request(server.port, name=f"c{number}-{i}", tokens=16) for i in range(8)]
        closed = [Request(server.port, name=f"c{number}-x{i}", tokens=4000) for i in range(4)]
        waiting = [Request(server.port, name=f"c{number}-w{i}", tokens=4000, stream=False) for i in range(2)]
        aborted = [Request(server.port, name=f"c{number}-a{i}", tokens=4000) for i in range(2)]
        await asyncio.gather(*(request.start() for request in (*kept, *closed, *waiting, *aborted)))
        for request in closed:
            await request.chunk()
        for request in (*closed, *waiting):
            request.close()
        await asyncio.gather(*(_abort(server.port, f"c{number}-a{i}") for i in range(2)))
        await asyncio.gather(*(request.rest() for request in kept))
        for request in aborted:
            while await request.chunk():
                pass
            request.close()
            assert request.finish == "abort", request.finish
        read += sum(request.tokens for request in kept)
    wall = time.monotonic() - began
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_pages_used")
    freed_s, left = time.monotonic(), dict.fromkeys(names, 1.0)
    while any(left.values()) and time.monotonic() - freed_s < 1.0:
        left = {name: server.metric(name) for name in names}
    assert not any(left.values()), f"not everything came back within a second: {left}"
    every = [Request(server.port, name=f"all-{i}", tokens=4000) for i in range(slots)]
    await asyncio.gather(*(request.start() for request in every))
    running = await asyncio.to_thread(server.metric, "num_requests_running")
    for request in every:
        request.close()
    assert running == slots, f"{running:.0f} of {slots} slots are at hand"
    return {
        "cycles": count,
        "requests": 16 * count,
        "cancelled": 8 * count,
        "wall_s": round(wall, 2),
        "front_cpu_s": round(cpu_s(server.process.pid) - before, 2),
        "tokens_read": read,
        "left": left,
        "slots_at_hand": int(running),
    }


async def _abort(port: int, name: str) -> None:
    data = json.dumps({"request_id": name}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % (b"/abort", b"abort", len(data)) + data)
    answer = await reader.read(-1)
    writer.close()
    assert answer.endswith(b'{"aborted":1}'), answer


def markdown(result: dict[str, Any]) -> str:
    """The figures as two tables."""
    lines = [f"# Load on `tradewind serve --script`\n\n`python benchmarks/serve_load.py`, {result['machine']}.\n"]
    for name, text in (("streams", "Streams"), ("cycles", "Cycles of start 16, let 8 go")):
        lines += [f"## {text}\n", "| figure | value |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in result[name].items() if not isinstance(value, list | dict)]
        lines += [f"| {key} afterwards | {value:g} |" for key, value in result[name].get("left", {}).items()]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of a stream")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what a step takes at least")
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    model = next((row for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("model name")), ":")
    result: dict[str, Any] = {
        "machine": f"{model.partition(':')[2].strip()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    }
    keys: dict[str, Any] = {"default": {"answer": LETTERS, "repeat": True}, "slots": asked.streams, "pages": 32768}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("streams", "cycles"):
            step_ms = asked.step_ms if name == "streams" else 1.0
            server = Server(Path(folder), **keys, step_ms=step_ms)
            try:
                server.pin()
                if name == "streams":
                    work = streams(server, count=asked.streams, seconds=asked.seconds, tokens=asked.tokens)
                else:
                    work = cycles(server, count=asked.cycles, slots=asked.streams)
                result[name] = asyncio.run(work)
                result[name]["exit_code"] = code = server.close()
                assert code == 0, f"the server ended with {code}"
            finally:
                server.process.kill()
            print(json.dumps({key: value for key, value in result[name].items() if key != "samples"}, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=2) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(result))


if __name__ == "__main__":
    main()
