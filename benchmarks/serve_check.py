"""A whole `tradewind serve` on this machine, seen from outside: starts, answers in every way it offers, bears a load, leaves nothing.

    PYTHONPATH=src python benchmarks/serve_check.py --model SmolLM2-135M-Instruct.Q4_1.gguf --backend cuda --out FOLDER
    ... --backend cpu --seconds 5           the same script where there is no GPU

Knows: the OpenAI API as a client does (the standard library alone), and what a process may leave behind. Refuses to know: how it is served.
In the folder: serve-check.json (PASS and FAIL lines, figures; written after every line), serve.log, bench-serve.json.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_card
import gpu_results
from tests_told import card

QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = """{%- if tools %}<|im_start|>system
You may call these functions: <tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Answer a call as <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""For SmolLM2, whose own template knows no tools."""
PATIENCE_S = 60.0
LEFT_BYTES = 64 << 20
"""So much more than before may be in use on the device after the end: other processes come and go."""


class WrongError(Exception):
    """What was seen is not what is owed."""


class Server:
    """`tradewind serve` in a session of its own, its output in a file."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.began_s = time.perf_counter()
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tradewind", "serve", *words, "--port", "0", "--log-json", "--log-requests"],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self.port = 0

    def wait(self, limit_s: float) -> float:
        """Seconds until it says where it listens. Raises WrongError with the log's end."""
        while time.perf_counter() - self.began_s < limit_s:
            text = self._log.read_text(errors="replace")
            found = re.search(r"ready on \S*?:(\d+)", text)
            if found:
                self.port = int(found.group(1))
                return time.perf_counter() - self.began_s
            if self.process.poll() is not None:
                raise WrongError(f"ended with {self.process.returncode} before it was ready: {text[-600:]}")
            time.sleep(0.05)
        raise WrongError(f"not ready after {limit_s:.0f} s: {self._log.read_text(errors='replace')[-600:]}")

    def ask(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = PATIENCE_S) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET, or of a POST with a body."""
        with self._answer(path, body, timeout_s=timeout_s) as answer:
            text = answer.read().decode()
            kind = answer.headers.get("content-type", "")
            return answer.status, json.loads(text) if kind.startswith("application/json") else text

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Each event of a streamed answer with the seconds since it was asked; raises WrongError when it does not end as it should."""
        began = time.perf_counter()
        with self._answer(path, {**body, "stream": True}, timeout_s=PATIENCE_S) as answer:
            if answer.status != 200:
                raise WrongError(f"{answer.status}: {answer.read().decode()[:300]}")
            for line in answer:
                data = line.decode().strip()
                if data == "data: [DONE]":
                    return
                if data.startswith("data: "):
                    yield time.perf_counter() - began, json.loads(data[6:])
        raise WrongError("the stream ended without [DONE]")

    @contextlib.contextmanager
    def _answer(
        self, path: str, body: dict[str, Any] | None, *, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, content, {"content-type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        rows = re.findall(rf"^tradewind:{name}(?:\{{[^}}]*\}})? (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        if not rows:
            raise WrongError(f"there is no metric {name}")
        return sum(map(float, rows))

    def processes(self) -> list[int]:
        """Processes of its session that still run (Linux)."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                words = stat.read_text().rpartition(")")[2].split()
                if int(words[3]) == self.process.pid and words[0] != "Z":
                    found.append(int(stat.parent.name))
        return found


# ------------------------------------------------------------------------------------------------------------ questions


def chat(server: Server, **more: Any) -> dict[str, Any]:
    """A whole chat answer."""
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 48, **more}
    status, answer = server.ask("/v1/chat/completions", body)
    if status != 200:
        raise WrongError(f"{status}: {str(answer)[:300]}")
    return dict(answer)


def owed(good: bool, what: str) -> None:
    """Raises WrongError unless it is so."""
    if not good:
        raise WrongError(what)


def models(server: Server) -> str:
    status, found = server.ask("/v1/models")
    owed(status == 200 and len(found["data"]) >= 1, f"{status}: {str(found)[:200]}")
    return str(found["data"][0]["id"])


def whole(server: Server) -> str:
    answer = chat(server)
    text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    owed(bool(text.strip()) and 0 < usage["completion_tokens"] <= 48 and usage["prompt_tokens"] > 5, str(answer)[:300])
    return f"{usage['completion_tokens']} tokens: {text[:80]!r}"


def streamed(server: Server) -> str:
    """The stream is the whole answer in pieces."""
    parts, times, finish, usage = [], [], None, None
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 48, "stream_options": {"include_usage": True}}
    for at_s, event in server.stream("/v1/chat/completions", body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if choice["delta"].get("content"):
                parts.append(choice["delta"]["content"])
                times.append(at_s)
            finish = choice.get("finish_reason") or finish
    text, wanted = "".join(parts), chat(server)["choices"][0]["message"]["content"]
    owed(
        len(parts) > 3 and finish in ("stop", "length") and usage is not None, f"{len(parts)} pieces, {finish}, {usage}"
    )
    owed(text == wanted, f"the stream says {text[:200]!r}, the whole answer {wanted[:200]!r}")
    return f"{len(parts)} pieces, the first after {1e3 * times[0]:.0f} ms, the last after {1e3 * times[-1]:.0f} ms"


def schema(server: Server) -> str:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    ask = [{"role": "user", "content": "Invent a person. Answer as JSON."}]
    found = []
    for seed in range(4):
        answer = chat(
            server, messages=ask, response_format=shape, temperature=1.0, seed=seed, max_tokens=120, logprobs=True
        )
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            owed(set(value) == {"name", "age"} and isinstance(value["age"], int), str(value))
            found.append(value)
    owed(bool(found), "none of four answers came to its end")
    return f"{len(found)} of 4 complete, such as {found[0]}"


def logprobs(server: Server) -> str:
    answer = chat(server, logprobs=True, top_logprobs=3, max_tokens=24)
    rows = answer["choices"][0]["logprobs"]["content"]
    owed(len(rows) == answer["usage"]["completion_tokens"], f"{len(rows)} rows for {answer['usage']}")
    for row in rows:
        best = row["top_logprobs"]
        owed(len(best) == 3 and row["logprob"] <= 1e-3 and best[0]["logprob"] >= best[2]["logprob"], str(row))
        owed(row["logprob"] >= best[0]["logprob"] - 1e-4, f"greedy, and not the likeliest: {row}")
    return f"{len(rows)} tokens with 3 each"


def tools(server: Server) -> str:
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    body = {"messages": ask, "tools": [TOOL], "tool_choice": "required", "max_tokens": 96, "temperature": 0}
    status, answer = server.ask("/v1/chat/completions", body)
    if status == 400:
        return f"refused, as this model has no such format: {answer['error']['message'][:200]}"
    owed(status == 200, f"{status}: {str(answer)[:300]}")
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut by max_tokens"
    call = choice["message"]["tool_calls"][0]["function"]
    owed(call["name"] == "get_weather" and set(json.loads(call["arguments"])) == {"city"}, str(call))
    return f"{call['name']}({call['arguments']})"


def completions(server: Server) -> str:
    """Several samples of one prompt: the same seed says the same again."""
    body = {"prompt": "Once upon a time", "max_tokens": 16, "n": 3, "seed": 7, "temperature": 0.9, "top_p": 0.9}
    first, second = (server.ask("/v1/completions", body) for _ in range(2))
    owed(first[0] == 200 and len(first[1]["choices"]) == 3, str(first)[:300])
    texts = [[choice["text"] for choice in found[1]["choices"]] for found in (first, second)]
    # Batches may differ, and with them the last bits of the logits: all three need not be equal.
    owed(sum(a == b for a, b in zip(*texts, strict=True)) >= 1, f"nothing of the same seed is the same: {texts}")
    return f"3 samples, {len(set(texts[0]))} different; the same seed says {sum(a == b for a, b in zip(*texts, strict=True))} again"


def refusals(server: Server) -> str:
    wrong = (
        ({"messages": QUESTION, "temperature": -1}, 400),
        ({"messages": QUESTION, "max_tokens": 10_000_000}, 400),
        ({"messages": []}, 400),
    )
    said = []
    for body, wanted in wrong:
        status, answer = server.ask("/v1/chat/completions", body)
        owed(
            status == wanted and bool(answer["error"]["message"]), f"{body} was answered {status}: {str(answer)[:200]}"
        )
        said.append(answer["error"]["message"])
    return said[0][:120]


def leaving(server: Server) -> str:
    """Who closes the connection in the middle leaves nothing running."""
    for _ in range(8):
        stream = server.stream("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2000, "ignore_eos": True})
        next(stream)
        stream.close()
    return empty(server)


def empty(server: Server) -> str:
    """Soon nothing runs and nothing waits."""
    end = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < end:
        left = server.metric("num_requests_running") + server.metric("num_requests_waiting")
        if not left:
            return "nothing runs, nothing waits"
        time.sleep(0.1)
    raise WrongError(f"{left:.0f} requests still run or wait")


def load(server: Server, *, seconds: float, clients: int, out: Path) -> str:
    """`tradewind bench serve` with so many clients."""
    command = [
        sys.executable, "-m", "tradewind", "bench", "serve", f"http://127.0.0.1:{server.port}", "--concurrency", str(clients),
        "--duration", str(seconds), "--prompt-tokens", "32:512", "--output-tokens", "16:128", "--timeout", "60", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, check=False)
    owed(done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-400:]}")
    (out / "bench-serve.json").write_text(done.stdout)
    report = json.loads(done.stdout)
    figures = ", ".join(f"{name} {value}" for name, value in summary_of(report).items())
    owed(report["requests"] > 0 and not report["failed"], f"{figures}; {report['errors'][:3]}")
    return f"{clients} clients for {seconds:.0f} s: {figures}"


def summary_of(report: dict[str, Any]) -> dict[str, Any]:
    """The few figures of a report of bench serve that a line has room for."""
    found = {name: report[name] for name in ("requests", "failed", "cut")}
    values = {figure["name"]: figure["value"] for figure in report["figures"]}
    names = ("requests_per_s", "output_tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
    return found | {name: float(f"{values[name]:.4g}") for name in names if values.get(name) is not None}


# ------------------------------------------------------------------------------------------------------------------ end


def ended(server: Server) -> str:
    """SIGTERM in the middle of an answer: it is finished, the exit code is 0 and no process is left."""
    stream = server.stream("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 600, "ignore_eos": True})
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    began = time.perf_counter()
    finishes = [choice.get("finish_reason") for _, event in stream for choice in event["choices"]]
    code = server.process.wait(PATIENCE_S)
    took = time.perf_counter() - began
    owed(code == 0, f"exit code {code}")
    owed(
        finishes[-1:] == ["length"],
        f"the open answer got {len(finishes)} pieces after SIGTERM and ended by {finishes[-1:]}",
    )
    left = server.processes()
    owed(not left, f"processes are left: {left}")
    return f"exit code 0 after {took:.1f} s, the open answer got its {len(finishes)} last pieces, no process is left"


def device_empty(before: int | None) -> str:
    """As much is in use on the device as before, and nobody is named."""
    if before is None:
        return "no GPU"
    end, used = time.perf_counter() + 10, before
    while time.perf_counter() < end:
        used = used_bytes() or 0
        if used - before <= LEFT_BYTES:
            apps = subprocess.run(
                ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=20, check=False,
            ).stdout.strip()  # fmt: skip
            return f"{before >> 20} MiB before, {used >> 20} MiB after; processes on the device: {apps or 'none'}"
        time.sleep(0.5)
    raise WrongError(f"{used >> 20} MiB are in use, {before >> 20} MiB were before")


def used_bytes() -> int | None:
    """In use on the first GPU; None where there is none."""
    found = gpu_card.asked_of_driver("memory.used")
    return None if found is None else int(found) << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything; 1 when a line says FAIL."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu", "plain"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of load (default %(default)s)")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--start-limit-s", type=float, default=120.0)
    parser.add_argument("--own-template", action="store_true", help="the model's own, not one for SmolLM2 with tools")
    parser.add_argument("--serve", default="", help="more options for tradewind serve, as one text")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "format": 1,
        "kind": "serve-check",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(__file__).name, *(gpu_results.nameless(word) for word in sys.argv[1:])],
        "card": card(),
        "versions": gpu_results.versions(),
        "lines": [],
    }
    before = used_bytes() if arguments.backend == "cuda" else None
    words = [arguments.model, "--backend", arguments.backend, *arguments.serve.split()]
    if not arguments.own_template:
        template = arguments.out / "tools.jinja"
        template.write_text(TEMPLATE)
        words += ["--chat-template", str(template), "--tool-format", "hermes"]
    server = Server(words, arguments.out / "serve.log")

    def line(name: str, work: Callable[[], str]) -> bool:
        began = time.perf_counter()
        try:
            verdict, detail = "PASS", work()
        except WrongError as error:
            verdict, detail = "FAIL", str(error)
        except Exception as error:  # the others still tell something
            traceback.print_exc()
            verdict, detail = "FAIL", f"{type(error).__name__}: {error}"
        took = round(time.perf_counter() - began, 2)
        print(f"{verdict}  {name} ({took} s): {detail}", flush=True)
        result["lines"].append({"name": name, "verdict": verdict, "detail": detail, "seconds": took})
        gpu_results.save(result, arguments.out / "serve-check.json")
        return verdict == "PASS"

    try:
        if line("ready", lambda: f"listens after {server.wait(arguments.start_limit_s):.2f} s"):
            questions: tuple[Callable[[Server], str], ...] = (
                models, whole, streamed, logprobs, schema, tools, completions, refusals, leaving,
            )  # fmt: skip
            for ask in questions:
                line(ask.__name__, lambda ask=ask: ask(server))  # type: ignore[misc]
            line("load", lambda: load(server, seconds=arguments.seconds, clients=arguments.clients, out=arguments.out))
            line("empty after the load", lambda: empty(server))
            line("answers after the load", lambda: whole(server))
            line("end", lambda: ended(server))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)  # nothing of it, where all went well
        server.process.wait()
    line("device", lambda: device_empty(before))
    counts = Counter(found["verdict"] for found in result["lines"])
    print(f"{counts['PASS']} passed, {counts['FAIL']} failed")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
