from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tradewind.engine.budget import aligned_chunk, room_for_more, split, split_in_order

PROMPTS = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 300)), max_size=8)


@given(PROMPTS, st.integers(-3, 300), st.sampled_from([1, 4, 16]))
def test_the_split_keeps_its_promises(prompts: list[tuple[int, int]], budget: int, page_tokens: int) -> None:
    counts = split(prompts, budget, page_tokens=page_tokens)
    assert len(counts) == len(prompts) and sum(counts) <= max(0, budget)
    for (start, remaining), count in zip(prompts, counts, strict=True):
        assert 0 <= count <= remaining
        if 0 < count < remaining and sum(c > 0 for c in counts) > 1:
            assert (start + count) % page_tokens == 0
    if prompts and budget > 0:
        assert any(counts), "a step with budget must bring somebody on"


def test_a_long_prompt_does_not_stop_short_ones_nor_they_it() -> None:
    counts = split([(0, 10_000), (0, 20_000), (0, 64), (0, 64)], 512, page_tokens=16)
    assert counts[0] >= 256 and counts[2:] == [64, 64] and sum(counts) == 512


def test_alone_it_gets_everything_and_ends_on_a_page_border() -> None:
    assert split([(0, 600)], 512, page_tokens=16) == [512]
    assert split([(0, 600)], 500, page_tokens=16) == [496]
    assert split([(496, 104)], 500, page_tokens=16) == [104]
    assert split([(0, 600)], 5, page_tokens=16) == [5]
    assert aligned_chunk(3, 100, 10, page_tokens=8) == 5 and aligned_chunk(0, 100, 7, page_tokens=8) == 0


def test_newcomers_find_room_behind_long_prompts_but_not_behind_many_short_ones() -> None:
    assert room_for_more([(0, 10_000)] * 3, 512) == 64
    assert room_for_more([(0, 256), (0, 128), (0, 64)], 512) == 64
    assert room_for_more([(0, 100_000)] * 12, 512) == 0
    assert room_for_more([], 0) == 0


def test_a_step_begins_no_sliver_of_a_prompt_behind_others() -> None:
    """Two whole prompts of 4096 and 450 tokens of room: the third waits. A medium one behind a huge one gets its part all the same."""
    assert split([(0, 4096)] * 3, 8642, page_tokens=64) == [4096, 4096, 0]
    assert split_in_order([(0, 4096)] * 3, 8642, page_tokens=64) == [4096, 4096, 0]
    assert split([(0, 10000), (0, 3000)], 512, page_tokens=16) == [256, 256]
    assert split([(0, 700), (0, 800)], 1100, page_tokens=64) == [512, 576]  # most of it: worth its price
