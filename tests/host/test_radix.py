from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host.support_engine import Chunk, group
from tradewind.cache.lease import KVCache, PageLease, chunk_keys
from tradewind.cache.radix import Node
from tradewind.cache.rules import ChunkRule, FullRule, WindowRule, rule_for
from tradewind.contract.errors import UserError
from tradewind.contract.kv import KVGroup

P = 2
SPACE = ("", "")


def make(*, pages: int = 40, windows: Sequence[int | None] = (None,), prefix_cache: bool = True) -> KVCache:
    return KVCache(
        groups=[group(i, window=w, page_tokens=P) for i, w in enumerate(windows)],
        pages=[pages] * len(windows),
        prefix_cache=prefix_cache,
    )


def keys_of(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def compute(cache: KVCache, text: str, *, space: tuple[str, str] = SPACE, slide: bool = True) -> PageLease:
    """What a sequence of len(text) pages does: reuse, compute, publish, slide."""
    keys = keys_of(text)
    lease = cache.open(space, keys, limit=len(keys))
    assert lease.extend(len(keys) * P)
    for _, page in enumerate(lease.publish(keys)):
        cache.pools[page[0]].drop(page[1])
    if slide:
        lease.slide(len(keys) * P)
    return lease


def dump(cache: KVCache) -> dict[tuple[tuple[str, str], tuple[bytes, ...]], list[int]]:
    """Every chunk of the tree by its whole path, with its page in each group."""
    out: dict[tuple[tuple[str, str], tuple[bytes, ...]], list[int]] = {}

    def walk(space: tuple[str, str], node: Node, path: tuple[bytes, ...]) -> None:
        for index, key in enumerate(node.keys):
            path = (*path, key)
            out[space, path] = [own[index] for own in node.pages]
        for child in node.children.values():
            walk(space, child, path)

    for space, root in cache.tree._roots.items():
        walk(space, root, ())
    return out


def brute_force(cache: KVCache, space: tuple[str, str], keys: list[bytes], limit: int) -> int:
    """The longest reusable prefix by the definition: every token that the next one reads has its page."""
    tree = dump(cache)
    for length in range(min(limit, len(keys)), 0, -1):
        chunks = [tree.get((space, tuple(keys[: i + 1]))) for i in range(length)]
        if any(chunk is None for chunk in chunks):
            continue
        following = length * P
        fits = True
        for index, record in enumerate(cache.groups):
            first = 0 if record.window is None else max(0, following - record.window + 1)
            if record.kind == "chunk" and record.window is not None:
                first = following // record.window * record.window
            needed = {position // P for position in range(first, following)}
            fits &= all(chunks[page] is not None and chunks[page][index] != 0 for page in needed)  # type: ignore[index]
        if fits:
            return length
    return 0


def test_a_published_prefix_is_found_and_split_on_page_borders() -> None:
    cache = make()
    compute(cache, "abcd").release()
    assert cache.match(SPACE, keys_of("abxy"), limit=4) == 2
    other = compute(cache, "abxy")
    assert other.shared == 2
    other.release()
    assert cache.match(SPACE, keys_of("abcdz"), limit=5) == 4
    assert cache.match(SPACE, keys_of("abxy"), limit=3) == 3
    cache.check()


def test_salt_and_adapter_keep_prefixes_apart() -> None:
    cache = make()
    compute(cache, "abc").release()
    for space in (("salt", ""), ("", "adapter")):
        assert cache.match(space, keys_of("abc"), limit=3) == 0
        lease = compute(cache, "abc", space=space)
        assert lease.shared == 0
        lease.release()
    cache.tree.clear()
    assert not cache.tree._roots and cache.pools[0].free == 39


def test_an_image_is_part_of_the_key_of_every_page_it_reaches() -> None:
    tokens = bytes(4 * 8)
    plain = chunk_keys(tokens, page_tokens=P)
    one = chunk_keys(tokens, page_tokens=P, images=((3, 2, "cat"),))
    two = chunk_keys(tokens, page_tokens=P, images=((3, 2, "dog"),))
    moved = chunk_keys(tokens, page_tokens=P, images=((2, 2, "cat"),))
    assert plain[0] == one[0] and plain[3] == one[3]
    assert one[1] != plain[1] and one[2] != plain[2] and one[1] != two[1] and one[1] != moved[1]


def test_the_longest_unused_leaf_goes_first_and_locked_paths_stay() -> None:
    cache = make(pages=9)
    compute(cache, "abc").release()
    held = compute(cache, "abd")
    compute(cache, "xy").release()
    assert cache.match(SPACE, keys_of("abc"), limit=3) == 3  # a look is not a use
    cache.tree.evict(0, 3)
    assert cache.match(SPACE, keys_of("abc"), limit=3) == 2
    assert cache.match(SPACE, keys_of("abd"), limit=3) == 3
    assert cache.tree.evict(0, 8) < 8
    assert cache.match(SPACE, keys_of("xy"), limit=2) == 0
    assert cache.match(SPACE, keys_of("abd"), limit=3) == 3
    held.release()
    cache.check()


def test_eviction_cuts_a_leaf_from_its_end() -> None:
    cache = make(pages=9)
    compute(cache, "abcdefgh").release()
    assert cache.pools[0].free == 0
    assert cache.tree.evict(0, 3) == 3
    assert cache.match(SPACE, keys_of("abcdefgh"), limit=8) == 5


def test_equal_chunks_are_kept_once() -> None:
    cache = make()
    first, second = cache.open(SPACE, [], limit=0), cache.open(SPACE, [], limit=0)
    for lease in (first, second):
        assert lease.extend(6)
    assert first.publish(keys_of("abc")) == []
    doubled = list(second.pages[0])
    assert [page for _, page in second.publish(keys_of("abc"))] == doubled
    assert second.pages == first.pages and second.edits[-3:] == [(0, i, p) for i, p in enumerate(first.pages[0])]
    for page in doubled:
        cache.pools[0].drop(page)
    first.release()
    cache.check()
    second.release()
    assert cache.pools[0].idle == 3
    cache.check()


def test_a_window_prefix_is_reusable_only_where_its_last_pages_are() -> None:
    cache = make(windows=(None, 3))
    compute(cache, "abcdef").release()  # slid: the window group has only the end
    assert cache.match(SPACE, keys_of("abcdef"), limit=6) == 6
    assert cache.match(SPACE, keys_of("abcdeX"), limit=6) == 5
    assert cache.pools[1].idle == 6  # dropped pages stay in the tree until somebody needs the room
    cache.tree.evict(1, 40)
    assert cache.match(SPACE, keys_of("abcdef"), limit=6) == 0


def test_window_pages_of_a_running_sequence_leave_tombstones_when_room_is_needed() -> None:
    cache = make(windows=(None, 3), pages=9)
    lease = compute(cache, "abcdef")
    assert cache.pools[1].pinned == 1 and cache.pools[1].idle == 5
    assert cache.tree.evict(1, 4) == 4
    assert cache.match(SPACE, keys_of("abcdef"), limit=6) == 6
    assert cache.match(SPACE, keys_of("abcX"), limit=4) == 0
    cache.check()
    lease.release()
    again = compute(cache, "abcdXY", slide=False)  # computes anew what is missing, and fills the tombstones
    assert again.shared == 0
    assert cache.match(SPACE, keys_of("abcd"), limit=4) == 4
    again.release()
    cache.check()


def test_rules() -> None:
    full, window = FullRule(4), WindowRule(4, 6)
    assert full.reusable([1, 2, 0, 4], 4) == 2 and full.droppable(1000) == 0
    assert [window.droppable(n) for n in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert window.drops_at(1) == 9 and window.drops_at(2) == 13
    assert window.reusable([0, 2, 3], 3) == 3 and window.reusable([1, 0, 3], 3) == 1 and window.reusable([0, 0], 2) == 0
    assert window.peak_pages(1000, burst_tokens=8) == 5 and window.peak_pages(7, burst_tokens=8) == 2
    chunk = rule_for(group(window=Chunk(6)))
    assert isinstance(chunk, ChunkRule)
    assert [chunk.droppable(n) for n in (0, 5, 6, 8, 11, 12, 17, 18)] == [0, 0, 1, 1, 1, 3, 3, 4]
    assert [chunk.drops_at(n) for n in (0, 1, 2, 3, 4)] == [0, 6, 12, 12, 18]
    assert chunk.reusable([0, 0, 0], 3) == 3, "a prefix that ends with its chunk needs no page"
    assert chunk.reusable([0, 2], 2) == 2 and chunk.reusable([1, 0], 2) == 1 and chunk.reusable([0, 0], 2) == 0
    assert chunk.peak_pages(1000, burst_tokens=8) == 5 and chunk.peak_pages(7, burst_tokens=8) == 2
    state = KVGroup(index=0, kind="state", layers=(0, 1), kv_heads=1, head_dim=8, page_tokens=4, format="f32")
    with pytest.raises(UserError, match="state"):
        rule_for(state)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 200), st.integers(1, 12), st.booleans())
def test_rules_keep_what_is_read_and_no_more(page: int, window: int, position: int, burst: int, restarts: bool) -> None:
    """By the definition, for both kinds of windows; `drops_at` and `droppable` say the same."""
    rule = rule_for(group(window=Chunk(window) if restarts else window, page_tokens=page))
    reads = [position // window * window if restarts else max(0, position - window + 1)]
    reads += [p // window * window if restarts else max(0, p - window + 1) for p in range(position, position + window)]
    assert rule.droppable(position) == min(reads) // page
    for pages in range(1, 20):
        assert (rule.droppable(position) >= pages) == (position >= rule.drops_at(pages))
    held = -(-(position + burst) // page) - rule.droppable(position)
    assert held <= rule.peak_pages(position + burst, burst_tokens=burst)


@st.composite
def traces(draw: st.DrawFn) -> tuple[tuple[int | None, ...], list[tuple[Any, ...]]]:
    windows = draw(st.sampled_from([(None,), (3,), (None, 3), (None, 5, 2), (Chunk(6),), (None, Chunk(5))]))
    texts = st.text(alphabet="ab", min_size=1, max_size=7)
    spaces = st.sampled_from([("", ""), ("", ""), ("s", "")])
    step = st.one_of(
        st.tuples(st.just("compute"), texts, spaces),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("match"), texts, spaces),
    )
    return windows, draw(st.lists(step, max_size=30))


@settings(max_examples=300)
@given(traces())
def test_match_equals_brute_force_after_anything(trace: tuple[tuple[int | None, ...], list[tuple[Any, ...]]]) -> None:
    windows, steps = trace
    cache = make(pages=200, windows=windows)
    leases: list[PageLease] = []
    for step in steps:
        if step[0] == "compute":
            wanted = brute_force(cache, step[2], keys_of(step[1]), len(step[1]))
            lease = compute(cache, step[1], space=step[2])
            assert lease.shared == wanted
            leases.append(lease)
        elif step[0] == "release" and leases:
            leases.pop(step[1] % len(leases)).release()
        elif step[0] == "evict":
            cache.tree.evict(step[1] % len(windows), step[2])
        elif step[0] == "match":
            keys = keys_of(step[1])
            assert cache.match(step[2], keys, limit=len(keys)) == brute_force(cache, step[2], keys, len(keys))
        cache.check()
    for lease in leases:
        lease.release()
    cache.tree.clear()
    assert all(pool.free == pool.total - 1 for pool in cache.pools)
