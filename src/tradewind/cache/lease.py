"""The pages of one sequence, from its first token to its last, and the cache that hands them out.

Knows: pages by group, the shared prefix, what was promised to whom. Refuses to know: slots, steps, queues, bytes.

A lease, with page size P and one list per group (0 is the null page):

      page index      0    1    2    3    4    5
      full            7    8    9   12   13   14
      window          0    0    5    6   15   16        0: not needed any more (slid out of the window)
                   |----shared---|
                   |----published-----|                 in the tree, locked by `node`
                                      |--- own, not in the tree

A lease that is filling its prompt has been promised the pages it still lacks, so that no neighbour can take them away:

      available(group) = free + idle - promised
"""

from __future__ import annotations

from collections.abc import Sequence

from tradewind.cache.pages import NULL_PAGE, PagePool
from tradewind.cache.radix import Namespace, Node, RadixTree
from tradewind.cache.rules import GroupRule, rule_for
from tradewind.contract.kv import KVGroup

PageEdit = tuple[int, int, int]
"""(group, page index, page id): an entry of the page table that the device must be told."""


NEVER = 2**31 - 1
"""A position that no sequence reaches."""


class KVCache:
    """Pools, tree and rules of all groups; written by leases, asked by the scheduler."""

    def __init__(self, *, groups: Sequence[KVGroup], pages: Sequence[int], prefix_cache: bool = True) -> None:
        assert groups and len(groups) == len(pages), "one page count per group"
        assert len({group.page_tokens for group in groups}) == 1, "all groups share one page size"
        self.groups = tuple(groups)
        self.page_tokens = groups[0].page_tokens
        self.prefix_cache = prefix_cache
        self.rules: tuple[GroupRule, ...] = tuple(rule_for(group) for group in groups)
        self.pools = tuple(PagePool(count) for count in pages)
        self.tree = RadixTree(pools=self.pools, rules=self.rules, full=[group.window is None for group in groups])
        self.promised = [0] * len(groups)
        self.sliding = tuple(index for index, group in enumerate(groups) if group.window is not None)
        """Groups whose pages are dropped while a sequence runs."""

    def available(self, group: int) -> int:
        """Pages that nobody holds and nobody was promised; O(1), changes nothing."""
        pool = self.pools[group]
        return pool.free + pool.idle - self.promised[group]

    def peak_pages(self, tokens: int, *, burst_tokens: int) -> list[int]:
        """By group, the most pages a sequence of `tokens` positions holds at once; changes nothing."""
        return [rule.peak_pages(tokens, burst_tokens=burst_tokens) for rule in self.rules]

    def match(self, namespace: Namespace, keys: Sequence[bytes], *, limit: int) -> int:
        """How many leading chunks could be reused; changes nothing."""
        return self.tree.match(namespace, keys, limit=limit) if self.prefix_cache else 0

    def open(self, namespace: Namespace, keys: Sequence[bytes], *, limit: int) -> PageLease:
        """A new lease on the longest reusable prefix, at most `limit` chunks of it; to be released exactly once."""
        node, pages = self.tree.acquire(namespace, keys, limit=limit if self.prefix_cache else 0)
        return PageLease(cache=self, node=node, pages=pages)

    def used(self) -> tuple[int, ...]:
        """By group, pages that some lease holds; idle pages of the tree do not count."""
        return tuple(pool.leased + pool.pinned for pool in self.pools)

    def check(self, *, retiring: frozenset[tuple[int, int]] = frozenset()) -> None:
        """Recounts everything and raises AssertionError where it does not add up; for tests. `retiring`: see `RadixTree.check`."""
        for pool, promised in zip(self.pools, self.promised, strict=True):
            pool.check()
            assert promised >= 0, "a negative promise"
        self.tree.check(retiring=retiring)


class PageLease:
    """Pages of one sequence; written by the scheduler only, released exactly once."""

    __slots__ = ("_cache", "_dropped", "_peak", "edits", "held", "node", "pages", "published", "released", "shared")

    def __init__(self, *, cache: KVCache, node: Node, pages: list[list[int]]) -> None:
        self._cache = cache
        self.node = node
        self.pages = pages
        self.shared = len(pages[0])
        """Pages found in the tree (or taken from a sibling): computing starts after them."""
        self.published = self.shared
        self.released = False
        self.held = [sum(page != NULL_PAGE for page in own) for own in pages]
        self._peak = [0] * len(pages)
        self._dropped = [next((i for i, page in enumerate(own) if page != NULL_PAGE), len(own)) for own in pages]
        self.edits: list[PageEdit] = [
            (group, index, page)
            for group, own in enumerate(pages)
            for index, page in enumerate(own)
            if page != NULL_PAGE
        ]
        """Entries the device does not know yet; emptied by whoever sends them."""

    @property
    def length(self) -> int:
        """Pages in the table, dropped ones counted."""
        return len(self.pages[0])

    def promise(self, peak: Sequence[int], *, spare: Sequence[int]) -> list[int]:
        """Books the pages up to `peak` by group for this lease alone, if they and `spare` more are there.

        Returns, by group, the pages that lack: all zeros when it was booked, otherwise nothing changed.
        """
        cache = self._cache
        lack = [
            max(
                0,
                self._booked(group, most)
                - self._booked(group, self._peak[group])
                + spare[group]
                - cache.available(group),
            )
            for group, most in enumerate(peak)
        ]
        if not any(lack):
            self._book(peak)
        return lack

    def _booked(self, group: int, peak: int) -> int:
        return max(0, peak - self.held[group])

    def unpromise(self) -> None:
        """Gives back what was booked and not taken."""
        self._book([0] * len(self._peak))

    def _book(self, peak: Sequence[int]) -> None:
        for group, most in enumerate(peak):
            self._cache.promised[group] += self._booked(group, most) - self._booked(group, self._peak[group])
            self._peak[group] = most

    def _hold(self, group: int, change: int) -> None:
        before = self._booked(group, self._peak[group])
        self.held[group] += change
        self._cache.promised[group] += self._booked(group, self._peak[group]) - before

    def shortage(self, tokens: int) -> list[int]:
        """By group, how many pages are missing to reach `tokens` positions; zeros when `extend` would succeed. Changes nothing."""
        cache = self._cache
        need = -(-tokens // cache.page_tokens) - self.length
        return [
            max(0, need - cache.available(group) - self._booked(group, self._peak[group]))
            for group in range(len(self.pages))
        ]

    def extend(self, tokens: int) -> bool:
        """Takes the pages for positions up to `tokens`, evicting idle ones; False, and nothing changed, if they are not there."""
        cache = self._cache
        need = -(-tokens // cache.page_tokens) - len(self.pages[0])
        if need <= 0:
            return True
        if any(self.shortage(tokens)):
            return False
        for group, pool in enumerate(cache.pools):
            if pool.free < need:
                cache.tree.evict(group, need - pool.free)
            own = self.pages[group]
            for _ in range(need):
                page = pool.take()
                self.edits.append((group, len(own), page))
                own.append(page)
            self._hold(group, need)
        return True

    def fork(self, parent: PageLease, *, chunks: int) -> bool:
        """Refers to a sibling's unpublished pages up to `chunks`; only without a prefix cache, where nothing is ever published.

        False, and nothing changed, when the sibling no longer has a page that the next token reads.
        """
        cache = self._cache
        assert not cache.prefix_cache and self.length == 0, "with a prefix cache siblings meet in the tree"
        keep_from = [rule.droppable(chunks * cache.page_tokens) for rule in cache.rules]
        for group, start in enumerate(keep_from):
            if NULL_PAGE in parent.pages[group][start:chunks]:
                return False
        for group, pool in enumerate(cache.pools):
            own = self.pages[group]
            own.extend([NULL_PAGE] * keep_from[group])
            for page in parent.pages[group][keep_from[group] : chunks]:
                pool.share(page)
                self.edits.append((group, len(own), page))
                own.append(page)
            self.held[group] = chunks - keep_from[group]
            self._dropped[group] = keep_from[group]
        self.shared = self.published = chunks
        return True

    def publish(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Puts the chunks up to len(keys), whose tokens are certain, into the tree.

        Returns (group, page) of own pages that were replaced by equal ones of the tree; the caller drops each with `KVCache.pools` once no
        flying step reads it.
        """
        if not self._cache.prefix_cache or len(keys) <= self.published:
            return []
        self.node, swapped = self._cache.tree.publish(self.node, keys, self.pages, first=self.published)
        self.published = len(keys)
        for group, index, _ in swapped:
            self.edits.append((group, index, self.pages[group][index]))
        return [(group, page) for group, _, page in swapped]

    def slide(self, position: int) -> None:
        """Drops window pages that no token from `position` on reads; the device is told with page id 0."""
        cache = self._cache
        for group in cache.sliding:
            upto = min(cache.rules[group].droppable(position), self.length)
            own = self.pages[group]
            for index in range(self._dropped[group], upto):
                if own[index] != NULL_PAGE:
                    cache.pools[group].drop(own[index])
                    own[index] = NULL_PAGE
                    self.edits.append((group, index, NULL_PAGE))
                    self._hold(group, -1)
            self._dropped[group] = max(self._dropped[group], upto)

    def next_slide(self) -> int:
        """The position from which on `slide` would drop a page; far away when no group slides. Changes nothing."""
        cache = self._cache
        return min((cache.rules[group].drops_at(self._dropped[group] + 1) for group in cache.sliding), default=NEVER)

    def reclaimable(self) -> list[int]:
        """By group, pages that become free or idle when this lease is released; changes nothing."""
        return [
            sum(page != NULL_PAGE and pool.refs(page) == 1 for page in own)
            for pool, own in zip(self._cache.pools, self.pages, strict=True)
        ]

    def release(self) -> None:
        """Gives every page back; a second call raises."""
        assert not self.released, "a lease was released twice"
        self.released = True
        self.unpromise()
        for pool, own in zip(self._cache.pools, self.pages, strict=True):
            for page in own:
                if page != NULL_PAGE:
                    pool.drop(page)
        self._cache.tree.release(self.node)


def chunk_keys(tokens: bytes, *, page_tokens: int, images: Sequence[tuple[int, int, str]] = ()) -> list[bytes]:
    """One key per whole page of `tokens` (int32, little endian, as bytes): its tokens, and the images that reach into it.

    Equal keys on the whole way from the root mean equal KV. `images` are (first token, token count, content hash).
    """
    size = 4 * page_tokens
    keys = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
    for first, count, content in images:
        for index in range(first // page_tokens, min(len(keys), (first + count - 1) // page_tokens + 1)):
            keys[index] += f"|{first - index * page_tokens}:{count}:{content}".encode()
    return keys


def common_chunks(keys: Sequence[bytes], others: Sequence[bytes], *, limit: int) -> int:
    """How many leading keys agree, at most `limit`; pure."""
    for index, (key, other) in enumerate(zip(keys[:limit], others, strict=False)):
        if key != other:
            return index
    return min(limit, len(keys), len(others))
