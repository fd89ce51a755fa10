from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tradewind.cache.pages import NULL_PAGE, PagePool


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert sorted(pool.take() for _ in range(4)) == [1, 2, 3, 4]
    assert pool.free == 0 and NULL_PAGE not in [1, 2, 3, 4]
    with pytest.raises(IndexError):
        pool.take()


def test_a_page_goes_round_all_four_states() -> None:
    pool = PagePool(3)
    page = pool.take()
    assert (pool.free, pool.leased, pool.pinned, pool.idle) == (1, 1, 0, 0)
    pool.adopt(page)
    assert (pool.free, pool.leased, pool.pinned, pool.idle) == (1, 0, 1, 0)
    pool.share(page)
    pool.drop(page)
    pool.drop(page)
    assert (pool.free, pool.leased, pool.pinned, pool.idle) == (1, 0, 0, 1)
    pool.share(page)
    pool.forget(page)
    assert (pool.free, pool.leased, pool.pinned, pool.idle) == (1, 1, 0, 0)
    pool.drop(page)
    assert pool.free == 2
    pool.check()


def test_misuse_is_noticed() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.drop(page)
    for wrong in (pool.drop, pool.share, pool.adopt, pool.forget):
        with pytest.raises(AssertionError):
            wrong(page)


@given(
    st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "adopt", "forget"]), st.integers(1, 7)), max_size=60)
)
def test_counts_equal_a_recount_after_any_legal_operations(operations: list[tuple[str, int]]) -> None:
    pool = PagePool(8)
    for what, page in operations:
        refs, kept = pool.refs(page), pool.is_in_tree(page)
        if what == "take" and pool.free:
            pool.take()
        elif what == "share" and (refs or kept):
            pool.share(page)
        elif what == "drop" and refs:
            pool.drop(page)
        elif what == "adopt" and refs and not kept:
            pool.adopt(page)
        elif what == "forget" and kept:
            pool.forget(page)
        assert pool.conserved()
        pool.check()
