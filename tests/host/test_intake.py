"""Requests are refused with exact numbers before anything is queued."""

from __future__ import annotations

import math

import pytest

from tradewind.contract.errors import RequestError
from tradewind.contract.request import SamplingParams
from tradewind.serving.intake import Intake, Limits

LIMITS = Limits(vocab_size=100, max_context=10, eos_ids=(2,))


def ask(tokens: list[object], **sampling: object) -> list[object]:
    return list(Intake(LIMITS).requests(tokens, SamplingParams(**sampling), now_s=1.0))  # type: ignore[arg-type]


def test_a_prompt_at_the_limit_passes_and_one_over_is_refused_with_both_numbers() -> None:
    assert ask([1] * 9)[0].max_tokens == 1  # type: ignore[attr-defined]
    with pytest.raises(
        RequestError, match=r"has 10 tokens; with at least 1 to generate the limit is 10 \(1 too many\)"
    ):
        ask([1] * 10)
    with pytest.raises(RequestError, match=r"has 1000 tokens.*\(991 too many\)"):
        ask([1] * 1000)


def test_prompt_and_max_tokens_together_over_by_one() -> None:
    assert ask([1] * 6, max_tokens=4)[0].max_tokens == 4  # type: ignore[attr-defined]
    with pytest.raises(
        RequestError, match="has 6 tokens and max_tokens is 5, 11 together; the limit is 10: ask for at most 4"
    ):
        ask([1] * 6, max_tokens=5)


def test_an_empty_prompt_and_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        ask([])
    for bad in (100, -1, True, 1.0, "a"):
        with pytest.raises(RequestError, match="is not a token id; the vocabulary has 0 to 99"):
            ask([1, bad])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("n", 0),
        ("seed", 1 << 64),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{field} is "):
        ask([1], **{field: value})


def test_other_refusals_name_what_is_wrong() -> None:
    with pytest.raises(RequestError, match="min_tokens is 5, over max_tokens 4"):
        ask([1], min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match="min_tokens is 20, but only 9 can be generated"):
        ask([1], min_tokens=20)
    with pytest.raises(RequestError, match="stop string is empty"):
        ask([1], stop=("",))
    with pytest.raises(RequestError, match="logit_bias names token 100"):
        ask([1], logit_bias={100: 1.0})
    with pytest.raises(RequestError, match="logit_bias of token 3 is 101"):
        ask([1], logit_bias={3: 101})
    with pytest.raises(RequestError, match="token id 100 is outside"):
        ask([1], stop_token_ids=(100,))
    with pytest.raises(RequestError, match="bad word is empty"):
        ask([1], bad_words=((),))


def test_n_samples_name_the_first_as_parent_and_have_their_own_seeds() -> None:
    intake = Intake(LIMITS)
    first, second, third = intake.requests([1, 2], SamplingParams(n=3, seed=-5), now_s=0.0)
    assert first.parent is None and second.parent == third.parent == first.id
    assert len({first.seed, second.seed, third.seed}) == 3
    again = intake.requests([1, 2], SamplingParams(n=3, seed=-5), now_s=0.0)
    assert [r.seed for r in again] == [first.seed, second.seed, third.seed]
    assert again[0].id != first.id
    unseeded = [intake.requests([1], SamplingParams(), now_s=0.0)[0].seed for _ in range(2)]
    assert unseeded[0] != unseeded[1]
