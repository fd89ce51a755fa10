"""From token events to an answer: the sum of the deltas is the answer, whatever arrives together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_stop_strings import as_ids, tokenizer

from tradewind.contract.events import TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import TokenLogprobs
from tradewind.serving.answer import Answer, Delta

EOS = 2


def answer(**sampling: Any) -> Answer:
    request = Request(
        id="r", tokens=tuple(as_ids("ask")), sampling=SamplingParams(**sampling), max_tokens=100, eos_ids=(EOS,)
    )
    return Answer(request, tokenizer(), prompt=3, sample=1)


def event(text: str = "", *, at_s: float = 1.0, tokens: tuple[int, ...] | None = None, **facts: Any) -> TokensOut:
    return TokensOut(request_id="r", at_s=at_s, tokens=tuple(as_ids(text)) if tokens is None else tokens, **facts)


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(token=token, logprob=-1.0, rank=1, top_ids=(), top_logprobs=())


def heard(one: Answer, *events: TokensOut) -> list[Delta]:
    return [delta for delta in map(one.take, events) if delta is not None]


def test_deltas_say_whose_they_are_and_the_last_one_how_it_ended() -> None:
    one = answer()
    deltas = heard(one, event("he"), event("y", finish="length"))
    assert [(d.prompt, d.sample, d.text, d.finish) for d in deltas] == [(3, 1, "he", None), (3, 1, "y", "length")]
    assert one.done
    assert not one.stopped_by_text
    whole = one.completion()
    assert (whole.sample, whole.text, whole.tokens, whole.finish) == (1, "hey", tuple(as_ids("hey")), "length")


def test_end_of_text_counts_but_is_no_text() -> None:
    one = answer()
    heard(one, event("hi"), event(tokens=(*as_ids("!"), EOS), finish="stop", stop_token=EOS))
    whole = one.completion()
    assert (whole.text, whole.finish, whole.stop) == ("hi!", "stop", EOS)
    assert whole.tokens == (*as_ids("hi!"), EOS)


def test_a_stop_token_that_is_text_shows_only_when_asked_for() -> None:
    for include, text in ((False, "hi"), (True, "hi.")):
        one = answer(stop_token_ids=tuple(as_ids(".")), include_stop=include)
        heard(one, event("hi"), event(".", finish="stop", stop_token=as_ids(".")[0]))
        assert one.completion().text == text


def test_a_stop_string_ends_the_answer_before_the_engine_does() -> None:
    one = answer(stop=("END",), logprobs=0)
    first = one.take(event("so E", logprobs=tuple(entry(t) for t in as_ids("so E"))))
    assert first is not None
    assert (first.text, first.tokens) == ("so ", tuple(as_ids("so E"))), "what may become a stop string is held back"
    second = one.take(event("ND and", logprobs=tuple(entry(t) for t in as_ids("ND and"))))
    assert second is not None
    assert (second.text, second.finish, second.stop) == ("", "stop", "END")
    assert one.stopped_by_text
    assert one.take(event("more")) is None
    assert one.take(event(finish="stop")) is None, "the engine's own end adds nothing"
    whole = one.completion()
    assert (whole.text, whole.stop, whole.tokens) == ("so ", "END", tuple(as_ids("so END")))
    assert [e.token for e in whole.logprobs] == as_ids("so END"), "a logprob for each token, none after the stop"


def test_a_stop_string_wins_over_an_end_in_the_same_event() -> None:
    one = answer(stop=("END",))
    heard(one, event("an END!", finish="length"))
    assert (one.completion().finish, one.completion().stop, one.completion().text) == ("stop", "END", "an ")


def test_held_text_comes_at_the_end() -> None:
    one = answer(stop=("END",))
    deltas = heard(one, event("EN"), event(finish="length"))
    assert [delta.text for delta in deltas] == ["", "EN"]
    half = answer()
    heard(half, event(tokens=tuple(as_ids("€")[:2])), event(finish="length"))
    assert half.completion().text == "\ufffd"


def test_an_error_keeps_what_was_said() -> None:
    one = answer()
    heard(one, event("so far"), event(finish="error", error="it broke"))
    whole = one.completion()
    assert (whole.text, whole.finish, whole.error) == ("so far", "error", "it broke")


def test_times_cached_tokens_and_prompt_logprobs_are_kept() -> None:
    one = answer(prompt_logprobs=0)
    records = tuple(entry(token) for token in as_ids("sk"))
    heard(
        one,
        event(at_s=1.0, prompt_logprobs=records[:1]),
        event("a", at_s=2.0, cached_tokens=16, prompt_logprobs=records[1:]),
        event("b", at_s=3.0, finish="length"),
    )
    assert (one.first_token_s, one.finished_s, one.cached_tokens) == (2.0, 3.0, 16)
    assert one.prompt_logprobs == records


def test_an_abort_before_the_first_token() -> None:
    one = answer()
    (delta,) = heard(one, event(finish="abort"))
    assert (delta.text, delta.tokens, delta.finish) == ("", (), "abort")
    assert one.first_token_s is None
    assert one.completion().text == ""
    with pytest.raises(AssertionError, match="not finished"):
        answer().completion()


@given(
    text=st.text(alphabet="ab€😀", max_size=12),
    sizes=st.lists(st.integers(1, 6), max_size=20),
    stop=st.text(alphabet="ab€", min_size=1, max_size=3),
    ended=st.sampled_from(["length", "eos"]),
)
def test_the_answer_does_not_depend_on_what_arrives_together(
    text: str, sizes: list[int], stop: str, ended: str
) -> None:
    ids = (*as_ids(text), *([EOS] if ended == "eos" else []))
    finish: dict[str, Any] = {"finish": "stop", "stop_token": EOS} if ended == "eos" else {"finish": "length"}
    at_once = answer(stop=(stop,))
    heard(at_once, event(tokens=ids, **finish))
    one, place, deltas = answer(stop=(stop,)), 0, []
    for size in [*sizes, len(ids) + 1]:
        end = min(place + size, len(ids))
        deltas += heard(one, event(tokens=ids[place:end], **(finish if end == len(ids) else {})))
        place = end
        if end == len(ids):
            break
    whole = one.completion()
    assert whole == at_once.completion()
    assert whole.text == text.partition(stop)[0]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.tokens) == whole.tokens
