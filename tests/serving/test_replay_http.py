"""Record, replay, compare: `tradewind serve --script` with a journal, and the journal sent to fresh servers."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.serving.process_support import TERM, Server, alive, wait_until
from tradewind import cli_explain, cli_replay
from tradewind.contract.errors import UserError
from tradewind.observability.journal import Journal, JournalWriter, read_entries, read_journal
from tradewind.observability.replay import Outcome, Replayer, plan
from tradewind.observability.replay_report import ReplayReport, make_report, to_html
from tradewind.simulate.traces import read_trace

SCRIPT: dict[str, Any] = {
    "tokenizer": "bytes",
    "step_ms": 4,
    "prompt_token_ms": 0.05,
    "slots": 4,
    "pages": 160,
    "max_tokens_per_step": 256,
    "default": {"answer": "An answer that goes on. ", "repeat": True},
}
SERVE = """
import sys
from pathlib import Path
from tradewind.config.goals import Goals
from tradewind.serve import ServeOptions, serve
record = Path({record!r}) if {record!r} else None
goals = Goals(model='scripted')
raise SystemExit(serve(ServeOptions(goals=goals, script=Path(sys.argv[1]), port=0, record=record, record_raw={raw})))
"""


@contextmanager
def serving(folder: Path, *, record: Path | None = None, raw: bool = False, **keys: Any) -> Iterator[Server]:
    program = SERVE.format(record="" if record is None else str(record), raw=raw)
    made = Server(folder, program=program, **{**SCRIPT, **keys})
    try:
        yield made
        if alive(made.process.pid):  # in order, so that the journal is whole
            made.signal(TERM)
            made.wait()
    finally:
        made.close()


class Traffic:
    """Conversations over shared system prompts, a burst of strangers, and a request that asks for two answers."""

    def __init__(self, made: Server, *, seed: int) -> None:
        self._made = made
        self._random = random.Random(seed)
        self._systems = [self._text(400) for _ in range(2)]

    def _text(self, length: int) -> str:
        return "".join(self._random.choice("abcdefghij ") for _ in range(length))

    def _talk(self, wait_s: float, system: str, turns: list[tuple[str, int]]) -> None:
        time.sleep(wait_s)
        text = system
        for question, answer in turns:
            text += question
            status, said, _ = self._made.complete(text, max_tokens=answer, ignore_eos=True, temperature=0)
            assert status == 200, said
            text += said["choices"][0]["text"]
            time.sleep(0.05)

    def run(self) -> None:
        draw = self._random
        threads = [
            threading.Thread(
                target=self._talk,
                args=(
                    draw.uniform(0, 1.2),
                    draw.choice(self._systems) if draw.random() < 0.7 else self._text(300),
                    [(self._text(draw.randint(10, 60)), draw.randint(5, 40)) for _ in range(draw.randint(1, 3))],
                ),
            )
            for _ in range(22)
        ]
        for thread in threads:
            thread.start()
        status, _, _ = self._made.complete([self._text(100), self._text(90)], n=2, max_tokens=9, ignore_eos=True)
        assert status == 200
        assert self._made.post("/v1/embeddings", model="scripted", input="embed me")[0] == 200
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same traffic as a raw and as a redacted journal: the raw one is recorded, the other made of it by the same writer."""
    folder = tmp_path_factory.mktemp("recorded")
    with serving(folder, record=folder / "raw", raw=True) as made:
        Traffic(made, seed=1).run()
    raw = read_journal(folder / "raw")
    redact(raw, folder / "redacted")
    return folder / "raw", folder / "redacted"


def redact(raw: Journal, folder: Path) -> None:
    """Writes what a redacted journal of the same traffic holds."""
    import msgspec

    from tradewind.observability.journal import Header

    header = msgspec.structs.replace(raw.header, redacted=True)
    assert isinstance(header, Header)
    lines = [msgspec.json.encode(header)]
    for entry in raw.entries:
        sequences = tuple(msgspec.structs.replace(one, prompt=None, output=None) for one in entry.sequences)
        lines.append(
            msgspec.json.encode(msgspec.structs.replace(entry, sequences=sequences, params=None, grammar=None))
        )
    folder.mkdir()
    (folder / "journal-0000000000001-00000.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def replayed(place: Path, folder: Path) -> tuple[Journal, list[Outcome], ReplayReport]:
    journal = read_journal(place)
    with serving(folder) as made:
        url = f"http://127.0.0.1:{made.port}"
        outcomes = asyncio.run(Replayer(journal.header, url).run(plan(journal.entries)))
    report = make_report(
        journal.header, journal.entries, outcomes, source="j", target=url, speed=1.0, targets={"": {"ttft": 0.5, "tpot": 0.05}}
    )  # fmt: skip
    return journal, outcomes, report


def test_a_redacted_replay_is_like_a_raw_one(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    """Timing, lengths, cache hits and the queue: curves of both replays, and of the recorded run, lie on each other.

    On a real clock, so with room for a machine that is busy; tests/host/test_journal.py has the same without any room.
    """
    raw_place, redacted_place = recorded
    complaints: list[str] = []
    for _ in range(
        3
    ):  # on a shared machine one run in some is disturbed; what does not depend on time is asserted in each
        journal, raw, raw_report = replayed(raw_place, tmp_path)
        _, redacted, report = replayed(redacted_place, tmp_path)
        assert not report.errors and not raw_report.errors
        assert journal.header.redacted is False and report.redacted is True
        assert [o.prompt_tokens for o in raw] == [o.prompt_tokens for o in redacted]
        assert [o.output_tokens for o in raw] == [o.output_tokens for o in redacted]
        complaints = [*late_ones(journal, raw), *late_ones(journal, redacted), *unlike(report, raw_report)]
        if not complaints:
            break
    assert not complaints


def late_ones(journal: Journal, outcomes: list[Outcome]) -> list[str]:
    """Requests that were not sent at their recorded time."""
    first = journal.entries[0].at
    off = [abs(one.at_s - (entry.at - first)) for one, entry in zip(outcomes, journal.entries, strict=True)]
    return [f"sent {each:.3f} s beside its time" for each in off if each >= 0.1]


def unlike(redacted: ReplayReport, raw: ReplayReport) -> list[str]:
    """In what two replays and the recorded run differ more than chance explains."""
    found = []
    rates = [redacted.recorded.hit_rate, raw.replayed.hit_rate, redacted.replayed.hit_rate]
    known = [rate for rate in rates if rate is not None]
    if len(known) < 3 or min(known) <= 0.3 or max(known) - min(known) >= 0.06:
        found.append(f"hit rates {rates}")
    ours, theirs = redacted.replayed.curve, raw.replayed.curve
    apart = [
        abs(a - b)
        for place, (a, b) in enumerate(zip(ours.hit_rate, theirs.hit_rate, strict=True))
        if place > 20 and a is not None and b is not None
    ]
    if max(apart) >= 0.1:
        found.append(f"hit rates over time {max(apart)} apart")
    mean = [sum(side.waiting) / len(side.waiting) for side in (ours, theirs, redacted.recorded.curve)]
    if min(mean) <= 0.5 or max(mean) >= 1.6 * min(mean):  # there is a queue, and it is the same one
        found.append(f"waiting in the mean {mean}")
    return found


def test_conversations_find_their_own_answers(recorded: tuple[Path, Path]) -> None:
    """Blocks that hold an answer are the same in the next turn's prompt: the journal knows it without knowing the text."""
    journal = read_journal(recorded[1])
    prompts = [(entry, sequence) for entry in journal.entries for sequence in entry.sequences]
    size = journal.header.block_tokens
    again = 0
    for entry, sequence in prompts:
        answer = set(sequence.blocks[-(-sequence.prompt_tokens // size) :])
        again += any(
            answer & set(other.blocks[: other.prompt_tokens // size])
            for later, other in prompts
            if later.at > entry.at and answer
        )
    assert again >= 5


def test_redacted_by_default(tmp_path: Path) -> None:
    """Nothing of what people wrote, or named themselves, is in the file; receipts are."""
    place = tmp_path / "journal"
    with serving(tmp_path, record=place) as made:
        made.complete("my secret is xyzzy", max_tokens=3, user="alice", cache_salt="pepper", logit_bias={"97": 1})
        made.post("/v1/chat/completions", messages=[{"role": "user", "content": "plugh plover"}], max_tokens=3)
        assert "recording redacted traffic" in made.log
    (path,) = place.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    data = path.read_text()
    for word in ("xyzzy", "plugh", "secret", "alice", "pepper", "An answer", "120,121,122,122,121"):
        assert word not in data
    journal = read_journal(place)
    first, second = journal.entries
    assert first.receipt is not None and first.receipt.e2e_s > 0 and not first.receipt.request_id
    assert (
        (first.kind, second.kind) == ("completion", "chat")
        and first.tenant
        and first.namespace
        and not second.namespace
    )
    assert first.sequences[0].prompt_tokens == len("my secret is xyzzy") and first.sequences[0].prompt is None
    assert len(first.sequences[0].blocks) == (18 + 3) // 16 and first.sampling == "sampled"


def test_explain_reads_a_journal(recorded: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command(cli_explain, "explain", "--journal", str(recorded[1]), "--slowest", "3")
    said = capsys.readouterr().out
    assert said.count("bound by") == 3
    name = said.split()[0]
    command(cli_explain, "explain", name, "--journal", str(recorded[1]))
    assert name in capsys.readouterr().out
    with pytest.raises(UserError, match="has no request 'nobody'"):
        command(cli_explain, "explain", "nobody", "--journal", str(recorded[1]))


def command(module: Any, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code


def test_the_command_writes_reports(
    recorded: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "reports" / "replay.html"
    with serving(tmp_path) as made:
        code = command(
            cli_replay, "replay", str(recorded[1]), "--against", f"http://127.0.0.1:{made.port}", "--speed", "3", "--limit", "20",
            "--target", "ttft=500ms,tpot=50ms", "--target", "completion:e2e=30s", "--out", str(out),
        )  # fmt: skip
    assert code == 0
    said = capsys.readouterr().out
    assert (
        "20 requests" in said
        and re.search(r"replayed completion: \d+ requests", said)
        and "at 3 times the speed" in said
    )
    page = out.read_text()
    assert page.count("<svg") >= 5 and "<script" not in page and "http://www.w3.org/2000/svg" in page
    report = json.loads(out.with_suffix(".json").read_text())
    (metric,) = [m for m in report["replayed"]["classes"][0]["metrics"] if m["metric"] == "e2e"]
    assert metric["attained"]["low"] <= metric["attained"]["share"] <= metric["attained"]["high"]


def test_a_journal_becomes_a_trace_for_the_simulator(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    assert command(cli_replay, "replay", str(recorded[1]), "--trace", str(out)) == 0
    trace = read_trace(out)
    journal = read_journal(recorded[1])
    sequences = [s for entry in journal.entries if entry.kind != "embedding" for s in entry.sequences]
    assert len(trace) == len(sequences) and trace.block_tokens == 16
    assert trace.prompt_tokens.sum() == sum(s.prompt_tokens for s in sequences)
    assert 0 < trace.distinct_blocks < len(trace.blocks), "nothing is shared"


def test_a_journal_is_replayed_under_a_plan(
    recorded: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulated: same hits as when it was recorded with as many pages, all answers there, and fewer slots make it worse."""
    from tests.host.plans import SMOLLM2, machine
    from tradewind.config.goals import Goals, Means
    from tradewind.config.resolve import resolve
    from tradewind.simulate.steptime import KNOTS, StepTime

    journal = read_journal(recorded[1])
    with_answer = [e for e in journal.entries if e.kind != "embedding"]
    times = tmp_path / "times.json"
    StepTime(source="as scripted", curve_s=(0.004,) * (len(KNOTS) + 1), extra_s=(0.0,) * 5, steps=1).save(times)
    reports = {}
    for slots in (1, 8):
        means = Means(max_running=slots, page_tokens=16)
        made = resolve(Goals(model="smollm2", means=means, max_context=2048), SMOLLM2, machine())
        file = tmp_path / f"plan-{slots}.json"
        file.write_bytes(msgspec.json.encode(made))
        out = tmp_path / f"slots-{slots}.html"
        for name in recorded:
            code = command(
                cli_replay,
                "replay",
                str(name),
                "--against",
                str(file),
                "--times",
                str(times),
                "--target",
                "ttft=200ms",
                "--out",
                str(out),
            )
            assert code == 0
        raw, redacted = capsys.readouterr().out.split("report:")[:2]
        assert raw.split("\n")[1:] == redacted.split("\n")[2:], "a redacted journal is the same to a plan as a raw one"
        report = reports[slots] = json.loads(out.with_suffix(".json").read_text())
        assert report["target"] == str(file) and report["replayed"]["requests"] == len(with_answer)
        assert report["replayed"]["failed"] == 0 and any("Simulated" in note for note in report["notes"])
        tokens = sum(s.output_tokens for e in with_answer for s in e.sequences)
        assert report["replayed"]["output_tokens"] == tokens
        assert out.read_text().count("<svg") >= 5
    assert reports[8]["replayed"]["hit_rate"] > reports[8]["recorded"]["hit_rate"], (
        "the plan has more pages than the server had"
    )
    shares = [reports[slots]["replayed"]["classes"][0]["attained"]["share"] for slots in (1, 8)]
    assert shares[0] < shares[1], "one slot is as good as eight"
    waits = [sum(reports[slots]["replayed"]["curve"]["waiting"]) for slots in (1, 8)]
    assert waits[0] > waits[1]


def test_a_file_of_goals_gives_plan_and_targets(
    recorded: tuple[Path, Path], tmp_path: Path, smollm2_gguf: Path
) -> None:
    goals = tmp_path / "goals.toml"
    goals.write_text(f'model = "{smollm2_gguf}"\n[[class]]\nname = "completion"\nttft = "100ms"\n')
    out = tmp_path / "replay.html"
    assert command(cli_replay, "replay", str(recorded[1]), "--against", str(goals), "--out", str(out)) == 0
    (one,) = json.loads(out.with_suffix(".json").read_text())["replayed"]["classes"]
    assert one["traffic_class"] == "completion" and one["attained"]["of"] == one["requests"] > 20
    assert one["metrics"][0]["target_s"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--against", "http://127.0.0.1:9"], "the journal nowhere cannot be read: No such file"),
        (["EMPTY", "--against", "http://127.0.0.1:9"], "there is no journal in"),
        (["JOURNAL", "--against", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: "),
        (["JOURNAL", "--against", "localhost:8000"], "'localhost:8000' is no address of a server"),
        (["JOURNAL", "--against", "plan.json"], "the plan plan.json cannot be read: No such file"),
        (["JOURNAL", "--against", "goals.toml"], "goals.toml"),
        (["JOURNAL", "--against", "http://127.0.0.1:9", "--times", "x"], "--times is for a simulation"),
        (["JOURNAL", "--against", "plan.json", "--model", "x"], "--model and --api-key are for a server"),
        (["JOURNAL"], "say what to do with the journal"),
        (["JOURNAL", "--against", "http://x", "--speed", "0"], "--speed is 0"),
        (["JOURNAL", "--against", "http://x", "--limit", "0"], "--limit is 0"),
        (["JOURNAL", "--against", "http://x", "--target", "ttfd=3"], "'ttfd=3' is no target"),
        (["BROKEN", "--against", "http://127.0.0.1:9"], "line 2: this is no line of a journal"),
    ],
)
def test_mistakes_are_one_sentence(
    recorded: tuple[Path, Path], tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken.jsonl"
    head = next(recorded[1].iterdir()).read_bytes().split(b"\n")[0]
    broken.write_bytes(head + b"\n{}\n")
    places = {"EMPTY": tmp_path / "empty", "JOURNAL": recorded[1], "BROKEN": broken}
    with pytest.raises(UserError) as raised:
        command(cli_replay, "replay", *(str(places.get(word, word)) for word in arguments))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_server_that_refuses_everything_is_said_once(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    journal = read_journal(recorded[1], limit=5)
    with serving(tmp_path) as made:
        replayer = Replayer(journal.header, f"http://127.0.0.1:{made.port}", model="another")
        with pytest.raises(UserError, match="answers no request of the journal: status 404"):
            asyncio.run(replayer.run(plan(journal.entries, speed=100)))


def test_a_replay_against_a_server_that_dies_counts_failures(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    journal = read_journal(recorded[1], limit=20)
    with serving(tmp_path, faults=[{"do": "exit", "at_step": 40}]) as made:
        outcomes = asyncio.run(Replayer(journal.header, f"http://127.0.0.1:{made.port}").run(plan(journal.entries)))
    failed = [outcome for outcome in outcomes if outcome.error]
    assert failed and len(failed) < len(outcomes)
    report = make_report(
        journal.header, journal.entries, outcomes, source="j", target="t", speed=1.0, targets={"": {"ttft": 1.0}}
    )
    assert report.replayed.failed == len(failed) == sum(count for _, count in report.errors)
    attained = report.replayed.classes[0].attained
    assert attained is not None and attained.met <= len(outcomes) - len(failed)
    assert to_html(report, journal.entries, outcomes).startswith("<!doctype html>")


class Foreign:
    """Another OpenAI-compatible server: knows nothing of our fields, answers without chunks, in odd pieces, with comments between."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # somebody looked whether there is a server
            writer.close()
            return
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])  # type: ignore[index]
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        if "input" in body:
            answer = json.dumps({"data": [], "usage": {"prompt_tokens": 9}}, indent=1)
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n{answer}".encode())
        elif "ignore_eos" in body:
            answer = json.dumps(
                {"error": {"message": "Unrecognized request argument: ignore_eos", "param": "ignore_eos"}}
            )
            writer.write(f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(answer)}\r\n\r\n{answer}".encode())
        else:
            events = [json.dumps({"choices": [{"index": 0, "text": word}]}) for word in ("a", "b", "")]
            events.append(json.dumps({"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 9}}))
            lines = ": hello\r\n\r\n" + "".join(f"data: {event}\r\n\r\n" for event in (*events, "[DONE]"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            for place in range(0, len(lines), 7):
                writer.write(lines[place : place + 7].encode())
                await writer.drain()
        writer.close()


def test_another_server_is_asked_for_what_it_knows(recorded: tuple[Path, Path]) -> None:
    journal = read_journal(recorded[1], limit=12)
    foreign = Foreign()

    async def play() -> list[Outcome]:
        server = await asyncio.start_server(foreign.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix"
        async with server:
            return await Replayer(journal.header, url, model="theirs").run(plan(journal.entries, speed=1000))

    outcomes = asyncio.run(play())
    assert not any(outcome.error for outcome in outcomes)
    texts = [o for o, entry in zip(outcomes, journal.entries, strict=True) if entry.kind != "embedding"]
    assert all(o.output_tokens == 2 and o.ttft_s is not None and o.cached_tokens is None for o in texts)
    plain = [body for body in foreign.bodies if "ignore_eos" not in body and "prompt" in body]
    assert len(plain) == len(texts)
    assert all(
        {"model", "prompt", "max_tokens", "n", "stream", "stream_options", "temperature"} == set(body) for body in plain
    )
    report = make_report(journal.header, journal.entries, outcomes, source="j", target="t", speed=1000, targets={})
    assert report.replayed.hit_rate is None and "not told" in to_html(report, journal.entries, outcomes)


def test_a_journal_survives_sigkill(tmp_path: Path) -> None:
    """What had ended is there; only a last line that was cut may be missing."""
    place = tmp_path / "journal"
    with serving(tmp_path, record=place) as made:
        for _ in range(5):
            made.complete("hello", max_tokens=4)
        wait_until(lambda: len(list(read_entries(place))) == 6, limit_s=5, what="the journal")
        made.process.kill()
        made.process.wait()
    assert len(read_journal(place).entries) == 5
    assert JournalWriter.__doc__


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "the answer is no HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: 3\n\n", "an event of the answer is no object"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[3]}\n', "the answer cannot be read"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"index":0,"text":"a"}]}\n', "the answer ended in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda", "2 bytes read on a total of 5"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "the answer cannot be read"),
        (b'HTTP/1.1 503 X\r\n\r\n{"error":{"message":"busy"}}', "status 503: busy"),
        (b'HTTP/1.1 500 X\r\n\r\n{"error":3}', "status 500: no reason is given"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"message":"it broke"}}\ndata: [DONE]\n', "it broke"),
    ],
)
def test_answers_that_make_no_sense_are_failures_with_a_reason(
    recorded: tuple[Path, Path], answer: bytes, said: str
) -> None:
    journal = read_journal(recorded[1])
    entries = [entry for entry in journal.entries if entry.kind == "completion"][:1]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 20)
        writer.write(answer)
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await Replayer(journal.header, url).run(plan(entries))

    with pytest.raises(UserError) as raised:
        asyncio.run(play())
    assert said in str(raised.value) and "\n" not in str(raised.value)
