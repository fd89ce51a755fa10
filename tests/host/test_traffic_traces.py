"""Traffic traces: four formats, bad lines, and made-up prompts that share what the trace says they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.contract.errors import UserError
from tradewind.observability.journal import Entry, Header, SequenceEntry
from tradewind.simulate.trace_columns import FIRST_TOKEN, TraceLine, lines_of, make_trace, poisson_trace
from tradewind.simulate.traces import read_trace, write_trace

OURS = """\
{"format": "tradewind-trace", "version": 1, "block_tokens": 16}
{"arrival_s": 2.5, "prompt_tokens": 40, "output_tokens": 8, "blocks": [900, 901, 902], "tenant": "a", "class": "chat"}
{"arrival_s": 2.0, "prompt_tokens": 33, "output_tokens": 5, "max_tokens": 64, "blocks": [900, 901], "priority": -1}

{"arrival_s": 4.0, "prompt_tokens": 7, "output_tokens": 1}
"""
MOONCAKE = """\
{"timestamp": 27482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 28000, "input_length": 700, "output_length": 0, "hash_ids": [46, 90]}
{"timestamp": 30535, "input_length": 1100, "output_length": 26, "hash_ids": [46, 47, 2366]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:01.2224670,0,3
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURST = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
BURST_SESSIONS = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s1,1.5,ChatGPT,1100,18,1118,Conversation log
45,s2,2.5,ChatGPT,1100,230,1330,Conversation log
118,s1,3.5,ChatGPT,2100,20,2120,Conversation log
"""


def file(folder: Path, text: str, name: str = "t") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


# -------------------------------------------------------------------------------------------------------------- formats


def test_our_format(tmp_path: Path) -> None:
    trace = read_trace(file(tmp_path, OURS))
    assert trace.arrival_s.tolist() == [0.0, 0.5, 2.0], "sorted, from the first on"
    assert trace.prompt_tokens.tolist() == [33, 40, 7]
    assert trace.output_tokens.tolist() == [5, 8, 1]
    assert trace.max_tokens.tolist() == [64, 8, 1]
    assert trace.priority.tolist() == [-1, 0, 0]
    assert [trace.tenants[i] for i in trace.tenant] == ["", "a", ""]
    assert [trace.classes[i] for i in trace.traffic_class] == ["", "chat", ""]
    assert trace.block_tokens == 16
    assert common(trace.prompt(0), trace.prompt(1)) == 32
    assert common(trace.prompt(0), trace.prompt(2)) == 0
    assert trace.duration_s == 2.0


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(file(tmp_path, MOONCAKE))
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 3.053])
    assert trace.prompt_tokens.tolist() == [1200, 1100]
    assert common(trace.prompt(0), trace.prompt(1)) == 1024
    assert trace.prompt_ids(0).tolist() == [0, 1, 2], "Mooncake's last block ends with the prompt"
    assert trace.notes == ("1 line without prompt or answer left out (failed requests)",)


@pytest.mark.parametrize(
    ("text", "arrivals", "prompts", "left_out"),
    [(AZURE, [0.0, 4.314579], [374, 396], 1), (AZURE_2024, [0.0, 0.007405], [2162, 2399], 0)],
)
def test_azure(tmp_path: Path, text: str, arrivals: list[float], prompts: list[int], left_out: int) -> None:
    trace = read_trace(file(tmp_path, text))
    assert trace.arrival_s.tolist() == pytest.approx(arrivals, abs=1e-6)
    assert trace.prompt_tokens.tolist() == prompts
    assert len(trace.notes) == left_out
    assert common(trace.prompt(0), trace.prompt(1)) == 0


def test_burstgpt(tmp_path: Path) -> None:
    trace = read_trace(file(tmp_path, BURST))
    assert trace.arrival_s.tolist() == [0.0, 40.0]
    assert trace.output_tokens.tolist() == [18, 230]
    assert common(trace.prompt(0), trace.prompt(1)) == 0
    assert "1 line" in trace.notes[0]


def test_a_burstgpt_session_grows(tmp_path: Path) -> None:
    trace = read_trace(file(tmp_path, BURST_SESSIONS))
    assert common(trace.prompt(0), trace.prompt(2)) == 1024, "whole blocks of the first prompt"
    assert common(trace.prompt(0), trace.prompt(1)) == 0


def test_a_journal_is_a_trace(tmp_path: Path) -> None:
    header = Header(
        format="tradewind-journal",
        version=1,
        run="r",
        began=1.0,
        redacted=True,
        block_tokens=16,
        vocab_size=9,
        model="m",
    )

    def entry(at: float, *sequences: SequenceEntry, **more: Any) -> Entry:
        return Entry(id=f"e{at}", at=at, kind="chat", stream=False, sequences=sequences, **more)

    one = SequenceEntry(prompt_tokens=33, output_tokens=40, max_tokens=64, blocks=(1 << 50, 2 << 50, 3 << 50, 4 << 50))
    two = SequenceEntry(prompt_tokens=50, output_tokens=4, max_tokens=4, blocks=(1 << 50, 2 << 50, 3 << 50))
    failed = SequenceEntry(prompt_tokens=50, output_tokens=0, max_tokens=4)
    entries = [entry(1000.5, one, traffic_class="chat"), entry(1003.0, two, two, tenant="a"), entry(1004.0, failed)]
    lines = [msgspec.json.encode(line) for line in (header, *entries)]
    (tmp_path / "journal-0000000001000-00000.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    for place in (tmp_path, tmp_path / "journal-0000000001000-00000.jsonl"):
        trace = read_trace(place)
        assert trace.arrival_s.tolist() == [0.0, 2.5, 2.5]
        assert trace.max_tokens.tolist() == [64, 4, 4]
        assert common(trace.prompt(0), trace.prompt(1)) == 33
        assert common(trace.prompt(1), trace.prompt(2)) == 48, "what no whole block covers is shared with nobody"
        assert [trace.prompt_ids(i).tolist() for i in range(3)] == [[0, 1], [0, 1, 2], [0, 1, 2]]
        assert trace.answers_known, "the fourth block of the first request is in its answer"
        assert "chat" in trace.classes and "a" in trace.tenants
        assert trace.notes == ("1 request without an answer left out (embeddings, failures)",)
        assert len(read_trace(place, limit=2)) == 2


def test_only_the_first_requests(tmp_path: Path) -> None:
    assert len(read_trace(file(tmp_path, AZURE), limit=1)) == 1
    assert len(read_trace(file(tmp_path, OURS), limit=2)) == 2


def test_a_byte_order_mark_and_other_line_ends(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode())
    assert len(read_trace(tmp_path / "t")) == 2


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", None, "is empty or begins with an empty line"),
        ("hello\n", 1, "looks like no trace that is known"),
        ('{"a": 1}\n', 1, "looks like no trace that is known"),
        (OURS + '{"arrival_s": 1}\n', 6, "missing required field `prompt_tokens`"),
        (OURS + '{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}\n', 6, "arrival_s"),
        (OURS + '{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}\n', 6, "prompt_tokens"),
        (OURS + '{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 1, "colour": 2}\n', 6, "colour"),
        (OURS + "{\n", 6, "this is no request"),
        ('{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 1, "blocks": [1]}\n', 1, "no header says of how many"),
        ('{"format": "tradewind-trace", "version": 9}\n', 1, "version 9"),
        ('{"format": "tradewind-trace"}\n', None, "has no request in it"),
        ('{"format": "tradewind-trace", "block_tokens": 0}\n', 1, "header cannot be read"),
        (MOONCAKE + '{"timestamp": 1, "input_length": "x", "output_length": 1}\n', 4, "input_length"),
        (MOONCAKE + '{"timestamp": -5, "input_length": 4, "output_length": 1}\n', 4, "the timestamp is -5.0"),
        (AZURE + "yesterday,3,4\n", 5, "TIMESTAMP is 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46.68,3\n", 5, "2 columns where the header has 3"),
        (AZURE + "2023-11-16 18:15:46.68,3.5,4\n", 5, "ContextTokens is '3.5'"),
        (AZURE + "2023-11-16 18:15:46.68,3,many\n", 5, "GeneratedTokens is 'many'"),
        (BURST + "soon,ChatGPT,1,2,3,API log\n", 5, "Timestamp is 'soon'"),
        (BURST + "7,ChatGPT,-1,2,3,API log\n", 5, "Request tokens is '-1'"),
        (BURST + "7,ChatGPT,nan,2,3,API log\n", 5, "Request tokens is 'nan'"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, line: int | None, why: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(UserError) as refused:
        read_trace(path)
    said = str(refused.value)
    assert why in said
    assert "\n" not in said
    assert str(path) in said
    if line is not None:
        assert f"line {line}:" in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        read_trace(tmp_path / "b")
    with pytest.raises(UserError, match="no trace format 'csv', only azure, burstgpt, mooncake, tradewind"):
        read_trace(file(tmp_path, OURS), kind="csv")


# -------------------------------------------------------------------------------------------------------------- columns


def test_written_traces_read_the_same(tmp_path: Path) -> None:
    trace = read_trace(file(tmp_path, OURS))
    write_trace(trace, tmp_path / "again")
    again = read_trace(tmp_path / "again")
    assert list(lines_of(again)) == list(lines_of(trace))
    assert again.block_tokens == 16


@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.lists(st.integers(0, 3), max_size=6)),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=80, deadline=None)
def test_prompts_share_what_their_blocks_say(asked: list[tuple[int, list[int]]]) -> None:
    size = 16
    lines = [
        TraceLine(arrival_s=float(i), prompt_tokens=length, output_tokens=1, blocks=tuple(blocks))
        for i, (length, blocks) in enumerate(asked)
    ]
    trace = make_trace(lines, name="t", block_tokens=size)
    fillers = [trace.filler(i) for i in range(len(trace))]
    assert len(set(fillers)) == len(fillers)
    for i, (length, blocks) in enumerate(asked):
        prompt = trace.prompt(i)
        assert len(prompt) == length and prompt.min() >= FIRST_TOKEN
        assert not set(prompt.tolist()) & set(fillers)
        for j, (other_length, others) in enumerate(asked[:i]):
            same = next((k for k, (a, b) in enumerate(zip(blocks, others, strict=False)) if a != b), None)
            same = min(len(blocks), len(others)) if same is None else same
            assert common(prompt, trace.prompt(j)) == min(length, other_length, same * size)


def test_faster_longer_and_parts() -> None:
    trace = poisson_trace(requests=50, per_s=2.0, prefixes=3, prefix_blocks=2, seed=4)
    assert trace.speed_up(2).duration_s == pytest.approx(trace.duration_s / 2)
    longer = trace.longer(prompt=1.5, output=0.001)
    assert longer.prompt_tokens.sum() == pytest.approx(1.5 * trace.prompt_tokens.sum(), rel=0.01)
    assert longer.output_tokens.max() == longer.max_tokens.max() == 1
    part = trace.part(10, 20)
    assert len(part) == 10 and part.arrival_s[0] == 0
    assert [line.prompt_tokens for line in lines_of(part)] == trace.prompt_tokens[10:20].tolist()
    assert np.array_equal(part.block_ids(3), trace.block_ids(13))
    assert common(part.prompt(0), part.prompt(1)) == common(trace.prompt(10), trace.prompt(11))
    assert len(trace.part(5, 5)) == 0


def test_made_up_traffic_is_as_asked() -> None:
    trace = poisson_trace(requests=4000, per_s=5.0, prompt=(100, 0.5), output=(50, 0.5), seed=1)
    assert len(trace) / trace.duration_s == pytest.approx(5.0, rel=0.05)
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05), "exponential gaps"
    assert np.median(trace.prompt_tokens) == pytest.approx(100, rel=0.05)
    assert np.median(trace.output_tokens) == pytest.approx(50, rel=0.05)
    again = poisson_trace(requests=4000, per_s=5.0, prompt=(100, 0.5), output=(50, 0.5), seed=1)
    assert np.array_equal(again.arrival_s, trace.arrival_s)
