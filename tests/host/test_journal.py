"""The journal: what is written, what is left out, what survives; prompts made of it share what the recorded ones shared."""

from __future__ import annotations

import math
import os
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_engine import request
from support_receipts import PAGE, World, prompt

from tradewind.contract.errors import UserError
from tradewind.contract.events import Scheduled, TokensOut
from tradewind.contract.request import Request
from tradewind.engine.loop import Add
from tradewind.observability import figures
from tradewind.observability.attainment import Timed, attainment, parse_targets, percentile, wilson
from tradewind.observability.journal import (
    Entry,
    Header,
    Journal,
    JournalWriter,
    SequenceEntry,
    block_chain,
    journal_files,
    read_journal,
)
from tradewind.observability.receipts import ItemisedReceipt
from tradewind.observability.replay import MadeUpText, checked_url, plan

KEY = b"k" * 16
tokens = st.lists(st.integers(0, 50), max_size=40)


# -- hashes --------------------------------------------------------------------------------------------------------------


@given(tokens, tokens, st.integers(1, 8))
def test_equal_numbers_are_equal_beginnings(one: list[int], other: list[int], size: int) -> None:
    first, second = (block_chain(text, block_tokens=size, key=KEY) for text in (one, other))
    assert len(first) == len(one) // size
    for place in range(min(len(first), len(second))):
        assert (first[place] == second[place]) == (one[: (place + 1) * size] == other[: (place + 1) * size])


def test_key_and_namespace_change_every_number() -> None:
    text = list(range(64))
    plain = block_chain(text, block_tokens=16, key=KEY)
    assert not set(plain) & set(block_chain(text, block_tokens=16, key=b"l" * 16))
    assert not set(plain) & set(block_chain(text, block_tokens=16, key=KEY, namespace="tenant"))
    assert all(0 <= number < 1 << 60 for number in plain)


# -- writing and reading -------------------------------------------------------------------------------------------------


class Recorded:
    """A virtual server's traffic and its journals, raw and redacted, with the same key."""

    def __init__(self, folder: Path, world: World, **options: Any) -> None:
        self.world = world
        more = {"model": "m", "vocab_size": 1 << 21, "block_tokens": PAGE, "key": KEY, **options}
        self.writers = [JournalWriter(folder / name, raw=name == "raw", **more) for name in ("raw", "redacted")]
        world.book._on_made = self._made
        self.asked: dict[str, Request] = {}

    def _made(self, made: ItemisedReceipt, receipt: Any) -> None:
        for writer in self.writers:
            writer.take_itemised(made, receipt)

    def close(self) -> None:
        """Hands over what was asked and answered, and waits for the files."""
        for name, one in self.asked.items():
            out = [token for event in self.world.said[name] for token in event.tokens]
            for writer in self.writers:
                writer.take(Named(name), [(one, out)])  # type: ignore[arg-type]
        for writer in self.writers:
            writer.close()


class Named:
    """As much of a front's receipt as the writer looks at."""

    def __init__(self, name: str) -> None:
        self.id = name


def talk(
    world: World, recorded: Recorded | None, arrivals: Sequence[tuple[float, Any]]
) -> dict[str, tuple[int, float]]:
    """Plays arrivals, each made into a request when its time comes: by id, cached tokens and when it got its slot."""
    coming = sorted(arrivals, key=lambda pair: pair[0])
    started: dict[str, tuple[int, float]] = {}
    asked: dict[str, Request] = {}
    world.loop._sinks = (*world.loop._sinks, Watch(started))  # type: ignore[arg-type]
    while coming or world.loop.busy:
        while coming and 100.0 + coming[0][0] <= world.clock.now():
            at_s, make = coming.pop(0)
            one: Request = make()
            asked[one.id] = msgspec.structs.replace(one, arrived_s=100.0 + at_s)
            world.loop.post(Add(asked[one.id]))
        if world.loop.busy:
            world.loop.run_once()
        else:
            world.clock.advance(max(0.0, 100.0 + coming[0][0] - world.clock.now()))
    for name, one in asked.items():
        world.book.take_receipt(world._receipt(one, world.said[name]))
    if recorded is not None:
        recorded.asked = asked
    return started


class Watch:
    def __init__(self, started: dict[str, tuple[int, float]]) -> None:
        self._started = started

    def take(self, event: Any) -> None:
        if isinstance(event, Scheduled) and not event.resumed:
            self._started[event.request_id] = (event.cached_tokens, event.at_s)


def said(world: World, name: str) -> list[int]:
    return [token for event in world.said.get(name, []) for token in event.tokens]


def conversations(world: World, seed: int) -> list[tuple[float, Any]]:
    """People who share system prompts and come back with what was answered, so fast that there is a queue and pages are short."""
    random = np.random.default_rng(seed)
    systems = [prompt(random, int(random.integers(80, 300))) for _ in range(3)]
    out: list[tuple[float, Any]] = []
    for person in range(25):
        system = systems[int(random.integers(0, 3))]
        at_s = float(random.uniform(0, 2.0))
        texts = [prompt(random, int(random.integers(5, 80))) for _ in range(int(random.integers(1, 4)))]
        answers = [int(random.integers(1, 50)) for _ in texts]
        salt = "salt" if person % 6 == 0 else ""

        def turn(
            number: int,
            system: list[int] = system,
            texts: Any = texts,
            answers: Any = answers,
            person: int = person,
            salt: str = salt,
        ) -> Request:
            whole = list(system)
            for before in range(number):
                whole += [*texts[before], *said(world, f"p{person}.t{before}")]
            return request(
                f"p{person}.t{number}",
                [*whole, *texts[number]],
                max_tokens=answers[number],
                cache_salt=salt,
                tenant=f"u{person}",
                traffic_class="talk" if person % 2 else "",
            )

        out.extend((at_s + 1.2 * number, lambda number=number, turn=turn: turn(number)) for number in range(len(texts)))
    return out


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, tuple[int, float]]]:
    folder = tmp_path_factory.mktemp("journal")
    world = small()
    recorded = Recorded(folder, world)
    started = talk(world, recorded, conversations(world, 5))
    recorded.close()
    return folder / "raw", folder / "redacted", started


def small() -> World:
    return World(pages=130, slots=6, chunk=128)


def again(place: Path) -> dict[str, tuple[int, float]]:
    """The journal on a fresh engine on the virtual clock: the same made-up text and the same learning as a replay over HTTP."""
    journal = read_journal(place)
    world = small()
    text = MadeUpText(journal.header)
    learnt: set[str] = set()
    prompts: dict[str, list[int]] = {}
    entries = {entry.id: entry for entry in journal.entries}

    def ask(entry: Entry) -> Request:
        for name, sent in prompts.items():
            events = world.said.get(name)
            if name not in learnt and events and events[-1].finish is not None:
                learnt.add(name)
                text.learn(entries[name].sequences[0], sent, said(world, name))
        (sequence,) = entry.sequences
        prompts[entry.id] = text.prompt(entry, 0)
        return request(entry.id, prompts[entry.id], max_tokens=sequence.output_tokens, cache_salt=entry.namespace)

    base = journal.entries[0].at
    first = min(at_s for at_s, _ in conversations(world, 5))
    arrivals = [(one.entry.at - base + first, lambda entry=one.entry: ask(entry)) for one in plan(journal.entries)]
    return talk(world, None, arrivals)


def test_redacted_raw_and_recorded_are_the_same_to_the_scheduler(
    journals: tuple[Path, Path, dict[str, tuple[int, float]]],
) -> None:
    """Cache hits and starts of every request agree, request by request, with evictions and a queue."""
    raw_place, redacted_place, recorded = journals
    raw, redacted = again(raw_place), again(redacted_place)
    assert len(recorded) > 40 and sum(cached for cached, _ in recorded.values()) > 3000
    assert set(raw) == set(redacted) == set(recorded)
    for name, (cached, at_s) in recorded.items():
        for other in (raw, redacted):
            assert other[name][0] == cached, name
            assert other[name][1] == pytest.approx(at_s, abs=1e-3), name
    journal = read_journal(redacted_place)
    receipts = [entry.receipt for entry in journal.entries if entry.receipt is not None]
    waits = [part.seconds for made in receipts for part in made.ttft if part.name.startswith("queue_")]
    assert max(waits) > 0.05, "there was no queue"


def test_what_is_left_out(journals: tuple[Path, Path, dict[str, tuple[int, float]]]) -> None:
    raw_place, redacted_place, _ = journals
    raw, redacted = read_journal(raw_place), read_journal(redacted_place)
    text = b"".join(path.read_bytes() for path in journal_files(redacted_place))
    for entry in raw.entries:
        (sequence,) = entry.sequences
        assert (
            sequence.prompt is not None
            and sequence.output is not None
            and len(sequence.prompt) == sequence.prompt_tokens
        )
        assert b",".join(b"%d" % token for token in sequence.prompt[:4]) not in text
    assert b"salt" not in text and KEY not in text and b"req-" not in text
    for one, other in zip(raw.entries, redacted.entries, strict=True):
        assert (
            one.id == other.id and one.sequences[0].blocks == other.sequences[0].blocks and one.tenant == other.tenant
        )
        assert other.sequences[0].prompt is None and other.sequences[0].output is None and other.params is None
        assert other.receipt is not None and one.receipt is not None and other.receipt.e2e == one.receipt.e2e
    assert len({entry.tenant for entry in redacted.entries}) == 25
    assert {entry.traffic_class for entry in redacted.entries} == {"", "talk"}, "by which attainment is told"
    assert len({entry.namespace for entry in redacted.entries}) == 2


def entry(name: str = "a", at: float = 1.0, **more: Any) -> Entry:
    sequence = SequenceEntry(prompt_tokens=40, output_tokens=8, max_tokens=8, blocks=(1, 2, 3))
    return Entry(id=name, at=at, kind="chat", stream=True, sequences=(sequence,), **more)


def header(**more: Any) -> Header:
    kept = {"format": "tradewind-journal", "version": 1, "run": "r", "began": 1.0, "redacted": True}
    return Header(**{**kept, "block_tokens": 16, "vocab_size": 50000, "model": "m", **more})  # type: ignore[arg-type]


def write(path: Path, *lines: Any, end: bytes = b"\n") -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines) + end)
    return path


def test_images_are_told_apart_by_what_they_show(tmp_path: Path) -> None:
    """All tokens of images are the same mark: prompts agree in the journal up to where their images differ, as they do in the cache."""
    world = World()
    recorded = Recorded(tmp_path, world)
    text, mark = [*range(1, PAGE + 1)], [9] * 2 * PAGE

    def shows(name: str, image: str) -> Request:
        one = request(name, [*text, *mark, 7], max_tokens=2)
        return msgspec.structs.replace(one, image_keys=((PAGE, 2 * PAGE, image),))

    shown = {"a": "sea", "b": "sea", "c": "sun"}
    arrivals = [(0.2 * place, lambda name=name: shows(name, shown[name])) for place, name in enumerate(shown)]
    talk(world, recorded, [*arrivals, (1.0, lambda: request("d", [*text, *mark, 7], max_tokens=2))])
    recorded.close()
    raw, redacted = (read_journal(tmp_path / name).entries for name in ("raw", "redacted"))
    a, b, c, d = (entry.sequences[0].blocks for entry in redacted)
    assert a == b and len(a) == 3
    assert a[0] == c[0] == d[0] and len({a[1], c[1], d[1]}) == 3 and len({a[2], c[2], d[2]}) == 3
    assert [entry.sequences[0].blocks for entry in raw] == [a, b, c, d]
    assert [entry.sequences[0].prompt is None for entry in raw] == [True, True, True, False], (
        "it could not be sent again"
    )


def test_files_are_rotated_and_bounded(tmp_path: Path) -> None:
    world = World()
    recorded = Recorded(tmp_path, world, max_file_bytes=20_000, max_bytes=60_000)
    random = np.random.default_rng(0)
    arrivals = [
        (0.05 * place, lambda place=place: request(f"r{place:03d}", prompt(random, 100), max_tokens=2))
        for place in range(120)
    ]
    talk(world, recorded, arrivals)
    recorded.close()
    for name in ("raw", "redacted"):
        files = journal_files(tmp_path / name)
        sizes = [file.stat().st_size for file in files]
        assert len(files) > 1 and sum(sizes) <= 60_000 and max(sizes) <= 20_000
        kept = read_journal(tmp_path / name).entries
        assert kept[-1].id == "r119" and [e.id for e in kept] == [f"r{n:03d}" for n in range(120 - len(kept), 120)]


def test_a_full_disk_costs_the_journal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    recorded = Recorded(tmp_path, world)
    real = os.write

    def full(fd: int, data: Any) -> int:
        if b'"sequences"' in bytes(data):
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    talk(
        world,
        recorded,
        [(0.0, lambda: request("a", [5, 6, 7], max_tokens=3)), (0.1, lambda: request("b", [5], max_tokens=1))],
    )
    recorded.close()
    assert [writer.dropped for writer in recorded.writers] == [2, 2]
    assert "ends here: No space left on device" in caplog.text and "has lost 2 requests" in caplog.text


def test_halves_that_never_meet_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tradewind.observability.journal.WAITING", 10)
    writer = JournalWriter(tmp_path, model="m", vocab_size=100)
    for place in range(50):
        writer.take(Named(f"r{place}"), [])  # type: ignore[arg-type]
    assert len(writer._asked) == 10 and writer.dropped == 40
    writer.close()


def test_what_waits_for_a_slow_disk_is_bounded_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tradewind.observability.journal.WAITING_TOKENS", 1000)
    world = World()
    world.submit(0.0, "a", [5, 6], max_tokens=1)
    world.run()
    gate = threading.Event()
    real = JournalWriter._write
    monkeypatch.setattr(
        JournalWriter,
        "_write",
        lambda self, line: (gate.wait(10), real(self, line)) if b"sequences" in line else real(self, line),
    )
    writer = JournalWriter(tmp_path, model="m", vocab_size=100)
    for place in range(20):
        name = f"r{place}"
        writer.take_itemised(msgspec.structs.replace(world.made["a"], id=name), None)
        writer.take(Named(name), [(request(name, [7] * 400), [1])])  # type: ignore[arg-type]
    assert 15 <= writer.dropped <= 17
    gate.set()
    writer.close()
    assert len(read_journal(tmp_path).entries) == 20 - writer.dropped


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the journal cannot be written to .*file.* with --record"):
        JournalWriter(tmp_path / "file" / "folder", model="m", vocab_size=100)


def test_only_the_latest_run_is_read(tmp_path: Path) -> None:
    write(tmp_path / "journal-0000000000001-00000.jsonl", header(run="a"), entry("old", 1.0), entry("old2", 2.0))
    write(tmp_path / "journal-0000000000002-00000.jsonl", header(run="b"), entry("late", 5.0), entry("soon", 4.0))
    write(tmp_path / "journal-0000000000002-00001.jsonl", header(run="b"), entry("cut", 6.0), b'{"id": "x', end=b"")
    journal = read_journal(tmp_path)
    assert [one.id for one in journal.entries] == ["soon", "late", "cut"]
    assert (
        len(journal.notes) == 2 and "2 requests of earlier starts" in journal.notes[1] and "was cut" in journal.notes[0]
    )
    assert [one.id for one in read_journal(tmp_path, limit=1).entries] == ["soon"]
    assert [one.id for one in read_journal(tmp_path / "journal-0000000000001-00000.jsonl").entries] == ["old", "old2"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([b"not json"], "line 1: this is no line of a journal"),
        ([header(format="x")], "line 1: the format is 'x'"),
        ([header(version=9)], "line 1: version 9 of the journal's format is not known"),
        ([header(block_tokens=0)], "block_tokens is 0"),
        ([header(), b"{}", entry()], "line 2: this is no line of a journal: Object missing required field `id`"),
        ([header(), entry(), b'{"id": 3}', entry()], "line 3: this is no line of a journal"),
        ([header(), b"\xff\xfe", entry()], "line 2"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, lines: list[Any], said: str) -> None:
    path = write(tmp_path / "journal-0000000000001-00000.jsonl", *lines)
    with pytest.raises(UserError) as raised:
        read_journal(tmp_path)
    assert said in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_no_journal(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no journal in .*--record makes one"):
        read_journal(tmp_path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_journal(tmp_path / "nowhere")
    (tmp_path / "journal-0000000000001-00000.jsonl").touch()
    with pytest.raises(UserError, match="is empty"):
        read_journal(tmp_path)


# -- made-up text --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70), st.integers(0, 20)), min_size=1, max_size=12))
def test_made_up_prompts_agree_where_the_recorded_ones_did(shapes: list[tuple[int, int, int]]) -> None:
    """Prompts built from a few beginnings: whole blocks in common before are whole blocks in common after, and no more."""
    size = 8
    head = header(block_tokens=size)
    real: list[list[int]] = []
    made: list[list[int]] = []
    text = MadeUpText(head)
    for place, (start, length, own) in enumerate(shapes):
        recorded = [start * 100 + n for n in range(length)] + [10_000 * (place + 1) + n for n in range(own + 1)]
        sequence = SequenceEntry(
            prompt_tokens=len(recorded),
            output_tokens=0,
            max_tokens=1,
            blocks=block_chain(recorded, block_tokens=size, key=KEY),
        )
        real.append(recorded)
        made.append(text.prompt(msgspec.structs.replace(entry(f"e{place}"), sequences=(sequence,)), 0))
    for one in range(len(real)):
        assert len(made[one]) == len(real[one]) and all(1024 <= token < 50000 - 1024 for token in made[one])
        for other in range(one):
            assert whole_blocks(made[one], made[other], size) == whole_blocks(real[one], real[other], size)


def whole_blocks(one: Sequence[int], other: Sequence[int], size: int) -> int:
    count = 0
    while (count + 1) * size <= min(len(one), len(other)) and one[: (count + 1) * size] == other[: (count + 1) * size]:
        count += 1
    return count


def test_small_vocabularies_get_printable_bytes() -> None:
    text = MadeUpText(header(vocab_size=264))
    assert all(32 <= token < 127 for token in text.prompt(entry(), 0))


def test_remembered_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tradewind.observability.replay.REMEMBERED", 4)
    text = MadeUpText(header(block_tokens=4))
    sequence = SequenceEntry(prompt_tokens=4, output_tokens=40, max_tokens=40, blocks=tuple(range(11)))
    text.learn(sequence, [1, 2, 3, 4], list(range(40)))
    assert len(text._answers) == 4


@pytest.mark.parametrize("url", ["", "host", "ftp://host", "http://", "http://host:0", "http://host:port"])
def test_addresses(url: str) -> None:
    with pytest.raises(UserError, match="is no address of a server"):
        checked_url(url)


def test_plan_keeps_the_times() -> None:
    entries = [entry("a", 10.0), entry("b", 10.5), entry("c", 12.0)]
    assert [one.at_s for one in plan(entries)] == [0.0, 0.5, 2.0]
    assert [one.at_s for one in plan(entries, speed=4)] == [0.0, 0.125, 0.5]
    assert plan([]) == [] and isinstance(Journal(header=header(), entries=tuple(entries)), Journal)
    assert TokensOut is not None


# -- attainment ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("met", "of", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_values(met: int, of: int, low: float, high: float) -> None:
    got = wilson(met, of)
    assert (
        got.low == pytest.approx(low, abs=5e-5) and got.high == pytest.approx(high, abs=5e-5) and got.share == met / of
    )


def test_wilson_covers() -> None:
    random = np.random.default_rng(0)
    for p in (0.5, 0.9, 0.99):
        hits = sum((w := wilson(int(k), 50)).low <= p <= w.high for k in random.binomial(50, p, size=2000))
        assert 0.90 < hits / 2000 <= 1.0


def test_attainment_by_class() -> None:
    requests = [
        Timed(traffic_class="chat", ttft_s=0.1, tpot_s=0.02, e2e_s=1.0),
        Timed(traffic_class="chat", ttft_s=0.9, tpot_s=0.02, e2e_s=1.0),
        Timed(traffic_class="chat", ttft_s=0.1, tpot_s=None, e2e_s=0.1),
        Timed(traffic_class="chat", failed=True),
        Timed(traffic_class="bulk", ttft_s=9.0, tpot_s=0.02, e2e_s=30.0),
    ]
    bulk, chat = attainment(requests, parse_targets(["ttft=500ms,tpot=50ms", "bulk:e2e=1min"]))
    assert (
        (chat.requests, chat.failed) == (4, 1)
        and chat.attained is not None
        and (chat.attained.met, chat.attained.of) == (2, 4)
    )
    by_name = {metric.metric: metric for metric in chat.metrics}
    ttft, tpot, e2e = by_name["ttft"].attained, by_name["tpot"].attained, by_name["e2e"].attained
    assert (
        ttft is not None
        and (ttft.met, ttft.of) == (2, 4)
        and tpot is not None
        and (tpot.met, tpot.of) == (2, 3)
        and e2e is None
    )
    assert bulk.attained is not None and bulk.attained.share == 1.0
    assert by_name["ttft"].p50_s == pytest.approx(0.1)
    (plain,) = attainment(requests[:1], {})
    assert plain.attained is None
    assert percentile([], 50) is None


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=abc", "ttft=0", "speed=1s", "ttft=5h", "ttft=1.2.3", ""])
def test_targets_that_make_no_sense(text: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_targets([text])
    assert "\n" not in str(raised.value)


# -- figures -------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9)), max_size=30),
    st.text(
        st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="\ufffe\uffff"), max_size=8
    ),
)
def test_plots_are_well_formed(points: list[tuple[float, float]], name: str) -> None:
    for text in (
        figures.line_plot([(name, sorted(points)), ("b", [])], title=name, x=name, y=name, steps=True),
        figures.share_plot([(name, 0.5, 0.4, 0.6)], title=name),
    ):
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "nan" not in text.replace(name, "") and "inf" not in text.replace(name, "")


def test_long_lines_are_thinned() -> None:
    line = [(float(n), float(n)) for n in range(100_000)]
    assert len(figures.line_plot([("a", line)], title="t", x="x", y="y")) < 20_000


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_inside(low: float, width: float) -> None:
    found = figures.ticks(low, low + width)
    assert len(found) <= 12 and all(low - 1e-6 * width <= value <= low + width * (1 + 1e-6) for value in found)
    assert not any(map(math.isnan, found))
