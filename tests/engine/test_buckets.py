"""Sizes of steps: which there are, and that none is much larger than what it holds."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tradewind.runner.buckets import ladder, smallest
from tradewind.runner.programs import token_sizes


def test_sizes_ascend_to_the_most() -> None:
    for most in (1, 7, 64, 300, 2048, 8704):
        sizes = ladder(most)
        assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most


def test_prompts_that_fill_their_budget_are_computed_in_little_more() -> None:
    sizes = token_sizes(8704, 512)
    assert set(ladder(8704)) < set(sizes) and sizes[-1] == 8704
    for rows in range(513):
        assert smallest(sizes, 8192 + rows) <= 1.032 * (8192 + rows)
    assert smallest(sizes, 8192) == 8192 and smallest(sizes, 8192 + 62) == 8256


def test_a_budget_that_is_mostly_for_rows_has_the_ladder_alone() -> None:
    assert token_sizes(600, 512) == ladder(600)
    assert token_sizes(512, 32) == tuple(sorted({*ladder(512), 480}))
