"""Engines and servers in processes of their own, for tests of their lives: scripted, with the byte tokenizer, so no model is needed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tradewind.config.goals import Goals
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.remote import RemoteClient
from tradewind.engine.wire import ANSWERS, Answer, Fatal, Link, Ready, Start, socket_pair

END = 258
"""<|im_end|> of the byte tokenizer."""
PATIENCE_S = 30.0


def script(**keys: Any) -> dict[str, Any]:
    return {"tokenizer": "bytes", **keys}


class Refused(Exception):
    """The engine did not start."""


class Engine:
    """An engine process with a client that is not reading yet."""

    def __init__(self, **keys: Any) -> None:
        mine, theirs = socket_pair()
        with theirs:
            command = [sys.executable, "-m", "tradewind.engine_process", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.link: Link[Answer] = Link(mine, ANSWERS)
        self.described: list[str] = []
        self.reports: list[Any] = []
        self.hear = False
        text = json.dumps(script(**keys)).encode()
        began_s = time.perf_counter()
        self.link.send(
            Start(goals=Goals(model="none"), script=text, script_name="test.json", began_s=began_s, faults=True)
        )
        while True:
            answer = self.link.receive(timeout_s=PATIENCE_S)
            if answer is None or isinstance(answer, Fatal):
                self.link.close()
                self.process.wait(PATIENCE_S)
                raise Refused(answer)
            if isinstance(answer, Ready):
                break
        self.ready = answer
        self.client = RemoteClient(self.link, answer, on_reports=self._reports, on_described=self.described.append)

    def _reports(self, reports: list[Any]) -> None:
        if self.hear:
            self.reports.extend(reports)

    def close(self) -> int:
        self.client.close()
        self.link.close()
        return self.process.wait(PATIENCE_S)


@contextmanager
def engine(**keys: Any) -> Iterator[Engine]:
    made = Engine(**keys)
    try:
        yield made
    finally:
        made.close()


def request(name: str, prompt: str | bytes = "hi", *, max_tokens: int = 64, **more: Any) -> Request:
    sampling = more.pop("sampling", None) or SamplingParams(temperature=0.0)
    tokens = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
    return Request(id=name, tokens=tokens, sampling=sampling, max_tokens=max_tokens, eos_ids=(END,), **more)


def wait_until(true: Callable[[], Any], *, limit_s: float, what: str = "it") -> float:
    """Waits until something holds; how long that took. Fails the test after the limit."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < limit_s, f"{what} did not happen within {limit_s} s"
        time.sleep(0.01)
    return time.monotonic() - began_s


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


class Server:
    """`tradewind serve` on a free port."""

    def __init__(self, folder: Path, *options: str, wait: bool = True, program: str | None = None, **keys: Any) -> None:
        path = folder / f"script-{time.monotonic_ns()}.json"
        path.write_text(json.dumps(script(**keys)))
        self.lines: list[str] = []
        self.began_s = time.monotonic()
        command = ["-m", "tradewind", "serve", "--script", str(path), "--port", "0", *options]
        if program is not None:
            command = ["-c", program, str(path)]
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0
        if wait:
            wait_until(
                lambda: self.said("ready on") or not self._reader.is_alive(), limit_s=PATIENCE_S, what="the start"
            )
            assert self.said("ready on"), self.log
            self.ready_s = time.monotonic() - self.began_s
            self.port = int(self.said("ready on")[0].rpartition(":")[2].strip('"}'))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def said(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]

    @property
    def engine_pid(self) -> int:
        (pid,) = self.engines()
        return pid

    def engines(self) -> list[int]:
        """Processes of engines, from the moment on at which they are more than a fork of the front."""
        return [pid for pid in children(self.process.pid) if alive(pid) and b"engine_process" in command_line(pid)]

    # -- HTTP

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def get(self, path: str) -> tuple[int, Any]:
        connection = self.connection()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> tuple[int, Any, dict[str, str]]:
        connection = self.connection()
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def complete(self, prompt: str = "hi", **more: Any) -> tuple[int, Any, dict[str, str]]:
        return self.post("/v1/completions", **{"model": "scripted", "prompt": prompt, "max_tokens": 64, **more})

    def stats(self) -> Any:
        return self.get("/health")[1]

    # -- the end

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float = PATIENCE_S) -> int:
        code = self.process.wait(limit_s)
        self._reader.join(PATIENCE_S)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            for pid in self.engines():
                os.kill(pid, KILL)
            self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()  # closing twice does no harm


@contextmanager
def server(folder: Path, *options: str, **keys: Any) -> Iterator[Server]:
    made = Server(folder, *options, **keys)
    try:
        yield made
    finally:
        made.close()


class Stream:
    """One open answer, read event by event."""

    def __init__(self, server: Server, prompt: str = "hi", *, max_tokens: int = 4000, **more: Any) -> None:
        self.connection = server.connection()
        body = {"model": "scripted", "prompt": prompt, "max_tokens": max_tokens, "stream": True, **more}
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.answer = self.connection.getresponse()
        self.status = self.answer.status
        self.text = ""
        self.finish: str | None = None
        self.error: Any = None
        self.done = False

    def event(self) -> bool:
        """Reads one event; False at the end of the stream."""
        while line := self.answer.readline():
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                self.done = True
                return False
            record = json.loads(data)
            if "error" in record:
                self.error = record["error"]
                continue
            for choice in record["choices"]:
                self.text += choice["text"]
                self.finish = choice["finish_reason"] or self.finish
            return True
        return False

    def events(self, count: int) -> None:
        for _ in range(count):
            assert self.event()

    def rest(self) -> None:
        while self.event():
            pass

    def close(self) -> None:
        self.answer.close()
        self.connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


KILL, TERM, INT, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP
