from __future__ import annotations

import pytest

from tests.host.test_radix import SPACE, P, compute, keys_of, make


def test_a_lease_is_released_exactly_once() -> None:
    cache = make()
    lease = compute(cache, "abc")
    lease.release()
    with pytest.raises(AssertionError, match="twice"):
        lease.release()
    cache.check()


def test_extend_takes_whole_pages_or_nothing() -> None:
    cache = make(pages=5)
    lease = cache.open(SPACE, [], limit=0)
    assert lease.extend(1) and lease.length == 1
    assert lease.extend(P) and lease.length == 1
    assert not lease.extend(5 * P)
    assert lease.length == 1 and lease.shortage(5 * P) == [1] and lease.shortage(4 * P) == [0]
    assert lease.extend(4 * P) and [page for _, _, page in lease.edits] == lease.pages[0]
    lease.release()
    cache.check()


def test_extend_evicts_what_nobody_uses() -> None:
    cache = make(pages=5)
    compute(cache, "abcd").release()
    lease = compute(cache, "xyz")
    assert lease.length == 3 and cache.match(SPACE, keys_of("abcd"), limit=4) == 1
    lease.release()


def test_a_promise_keeps_neighbours_out() -> None:
    cache = make(pages=9)
    first, second = cache.open(SPACE, [], limit=0), cache.open(SPACE, [], limit=0)
    assert first.promise([6], spare=[1]) == [0]
    assert cache.available(0) == 2
    assert second.promise([3], spare=[0]) == [1] and cache.available(0) == 2
    assert not second.extend(3 * P) and second.extend(2 * P)
    assert first.extend(6 * P) and cache.available(0) == 0
    first.release()
    assert cache.available(0) == 6 and cache.promised == [0]
    second.release()


def test_a_promise_counts_pages_that_are_shared_already() -> None:
    cache = make(pages=7)
    compute(cache, "abcd").release()
    lease = cache.open(SPACE, keys_of("abcdef"), limit=5)
    assert lease.shared == 4
    assert lease.promise([6], spare=[0]) == [0] and cache.available(0) == 0
    lease.unpromise()
    assert cache.available(0) == 2
    lease.release()


def test_window_pages_return_while_the_sequence_runs() -> None:
    cache = make(windows=(None, 3), pages=20)
    lease = cache.open(SPACE, [], limit=0)
    held = []
    for tokens in range(1, 21):
        assert lease.extend(tokens)
        lease.slide(tokens)
        held.append(lease.held[1])
        assert cache.pools[1].leased == lease.held[1]
        first_read = max(0, tokens - 3 + 1)
        assert all(lease.pages[1][i] for i in range(first_read // P, lease.length))
    assert max(held) == 2 and lease.held[0] == 10
    assert (1, 0, 0) in lease.edits
    lease.release()
    cache.check()


def test_next_slide_is_when_slide_does_something() -> None:
    cache = make(windows=(None, 5), pages=20)
    lease = cache.open(SPACE, [], limit=0)
    assert lease.extend(30)
    for tokens in range(30):
        due = tokens >= lease.next_slide()
        before = lease.held[1]
        lease.slide(tokens)
        assert (lease.held[1] < before) == due
    lease.release()


def test_siblings_without_a_prefix_cache_share_by_reference() -> None:
    cache = make(prefix_cache=False, windows=(None, 3), pages=20)
    parent = cache.open(SPACE, [], limit=0)
    assert parent.extend(8)
    child = cache.open(SPACE, [], limit=0)
    assert child.fork(parent, chunks=3)
    assert child.pages[0] == parent.pages[0][:3] and child.pages[1] == [0, 0, parent.pages[1][2]]
    parent.release()
    cache.check()
    assert cache.pools[0].leased == 3
    late = cache.open(SPACE, [], limit=0)
    child.slide(20)
    assert not late.fork(child, chunks=3)
    child.release()
    late.release()
    cache.check()
