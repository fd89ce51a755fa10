"""Stop strings against brute force on the whole text, whatever the pieces; and the stream that joins them to a detokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.contract.errors import RequestError
from tradewind.serving.text_stream import MAX_STOP_CHARACTERS, MAX_STOPS, StopStrings, TextStream, check_stops
from tradewind.serving.tokenizer import TextTokenizer


def brute_force(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(end, stop) of the earliest completion; of several at one place the longest."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end, max(ended, key=len)
    return None


# Two letters make overlaps, borders inside stops and false beginnings frequent.
few_letters = st.text(alphabet="ab", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=600, deadline=None)
@given(text=few_letters, stops=stop_lists, cuts=st.lists(st.integers(0, 40), max_size=12), include=st.booleans())
def test_equals_brute_force_on_any_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    watcher = StopStrings(stops, include=include)
    expected = brute_force(text, stops)

    shown, hit = "", None
    for number, piece in enumerate(pieces):
        emit, hit = watcher.push(piece)
        shown += emit
        seen = "".join(pieces[: number + 1])
        if hit is not None:
            break
        # All that is safe is shown, and nothing that is not: what waits is the longest beginning of a stop at the end.
        waits = max((k for k in range(len(seen) + 1) for s in stops if k < len(s) and seen.endswith(s[:k])), default=0)
        assert shown == seen[: len(seen) - waits]
    shown += watcher.finish()

    if expected is None:
        assert (shown, hit) == (text, None)
    else:
        end, stop = expected
        assert hit == stop == watcher.hit
        assert shown == text[: end if include else end - len(stop)]
        assert watcher.push("more") == ("", stop)
        assert watcher.finish() == ""


def test_no_beginning_of_the_stop_is_ever_shown() -> None:
    watcher = StopStrings(["\n\nUser:", "<|end|>"])
    assert watcher.push("Hi\n") == ("Hi", None)
    assert watcher.push("\nUs") == ("", None)
    assert watcher.push("ually <|e") == ("\n\nUsually ", None), "it was not the stop after all"
    assert watcher.push("nd|> secret") == ("", "<|end|>")


def test_earliest_then_longest() -> None:
    assert StopStrings(["abcd", "bc"]).push("xabcd") == ("xa", "bc"), "bc is complete first"
    assert StopStrings(["bc", "abc"]).push("xabcd") == ("x", "abc"), "both complete at c"
    assert StopStrings(["ab", "abc"]).push("xabcd") == ("x", "ab")


def test_finish_gives_what_was_held() -> None:
    watcher = StopStrings(["stop"])
    assert watcher.push("nonst") == ("non", None)
    assert watcher.finish() == "st"
    assert watcher.finish() == ""


def test_without_stops_all_passes() -> None:
    watcher = StopStrings([])
    assert watcher.push("abc") == ("abc", None)
    assert watcher.finish() == ""


@pytest.mark.parametrize(
    ("stops", "sentence"),
    [
        ([""], "stop string number 1 is empty"),
        (["a", ""], "stop string number 2 is empty"),
        (["a", 5], "number 2 is of type int"),
        (5, "a string or a list of strings, not int"),
        ({"a": 1}, "a string or a list of strings, not dict"),
        (["x" * (MAX_STOP_CHARACTERS + 1)], f"has {MAX_STOP_CHARACTERS + 1} characters; at most {MAX_STOP_CHARACTERS}"),
        ([str(i) for i in range(MAX_STOPS + 1)], f"{MAX_STOPS + 1} stop strings were given; at most {MAX_STOPS}"),
        (b"ab", "number 1 is of type int"),
    ],
)
def test_stops_that_make_no_sense_are_refused(stops: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        StopStrings(stops)


def test_one_string_and_repeats() -> None:
    assert check_stops("ab") == ("ab",)
    assert check_stops(["a", "b", "a"]) == ("a", "b")


# ------------------------------------------------------------------------------------------------- the stream


@cache
def tokenizer() -> TextTokenizer:
    """Bytes as ids (3 + byte), and a few pieces, so that any border can be forced."""
    pieces = ["he", "llo", "a\u2581", "b"]
    return TextTokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces],
            "tokenizer.ggml.scores": [0.0] * (259 + len(pieces)),
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "tokenizer.ggml.add_space_prefix": False,
        }
    )


def as_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def test_a_stop_over_the_border_of_two_pushes() -> None:
    stream = TextStream(tokenizer(), stops=["END"])
    first = stream.push(as_ids("so E"))
    assert (first.text, first.token_count, first.consumed, first.finish, first.stop) == ("so ", 4, 4, None, None)
    second = stream.push(as_ids("ND and more"))
    assert (second.text, second.token_count, second.consumed) == ("", 6, 2), "ids after the stop are not used"
    assert (second.finish, second.stop) == ("stop", "END")
    third = stream.push(as_ids("x"))
    assert (third.text, third.token_count, third.consumed, third.finish, third.stop) == ("", 6, 0, "stop", "END")
    last = stream.finish("length")
    assert (last.text, last.finish, last.stop) == ("", "stop", "END")


def test_finish_gives_held_text_and_half_characters() -> None:
    stream = TextStream(tokenizer(), stops=["END"])
    assert stream.push([*as_ids("so EN"), *as_ids("€")[:2]]).text == "so "
    last = stream.finish("length")
    assert (last.text, last.finish, last.stop) == ("EN\ufffd", "length", None)
    assert stream.finish("stop").text == ""
    assert stream.finished == "length"


def test_a_stop_that_the_end_completes() -> None:
    stream = TextStream(tokenizer(), stops=["\ufffd"])
    assert stream.push(as_ids("a€")[:3]).text == "a"
    last = stream.finish("length")
    assert (last.text, last.finish, last.stop) == ("", "stop", "\ufffd")


def test_include_stop() -> None:
    stream = TextStream(tokenizer(), stops=["END"], include_stop=True)
    assert stream.push(as_ids("so END.")).text == "so END"


def test_stops_are_passed_over_until_min_tokens() -> None:
    stream = TextStream(tokenizer(), stops=["b"], min_tokens=3)
    delta = stream.push(as_ids("bbab"))
    assert (delta.text, delta.consumed, delta.stop) == ("bba", 4, "b")
    assert TextStream(tokenizer(), stops=["b"], min_tokens=2).push(as_ids("bb")).text == "b"


def test_without_stops_several_ids_at_once() -> None:
    stream = TextStream(tokenizer())
    delta = stream.push(as_ids("héllo"))
    assert (delta.text, delta.token_count, delta.consumed) == ("héllo", 6, 6)
    assert stream.push([]).text == ""
    assert stream.finish("stop").finish == "stop"


def test_special_ids_are_no_text_but_count() -> None:
    stream = TextStream(tokenizer(), stops=["x"])
    delta = stream.push([1, *as_ids("a"), 2])
    assert (delta.text, delta.token_count) == ("a", 3)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab€😀 ", max_size=20),
    stops=st.lists(st.text(alphabet="ab€😀 ", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 5), max_size=30),
    include=st.booleans(),
)
def test_non_stream_is_the_sum_of_the_stream(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    ids = as_ids(text)
    whole = TextStream(tokenizer(), stops=stops, include_stop=include)
    at_once = [whole.push(ids), whole.finish("length")]
    pieces = TextStream(tokenizer(), stops=stops, include_stop=include)
    deltas, place = [], 0
    for size in [*sizes, *([1] * len(ids))]:
        if place < len(ids):
            deltas.append(pieces.push(ids[place : place + size]))
            place += size
    deltas.append(pieces.finish("length"))

    found = brute_force(text, stops)
    expected = text if found is None else text[: found[0] if include else found[0] - len(found[1])]
    for result in (at_once, deltas):
        assert "".join(delta.text for delta in result) == expected
        assert result[-1].finish == ("length" if found is None else "stop")
        assert result[-1].stop == (None if found is None else found[1])
        used = len(ids) if found is None else len(text[: found[0]].encode())
        assert result[-1].token_count == used == sum(delta.consumed for delta in result)
