"""One pool of pages per KV group: who holds a page, counted.

Knows: page numbers and how many leases refer to each. Refuses to know: what a page holds, why it is kept, where its bytes lie.

Every page but the null page is in exactly one of four states:

                take()                    adopt()
      FREE ----------------> LEASED ------------------> PINNED        leases > 0, in the tree
        ^                      |  ^                      |  ^
        |      drop() to 0     |  '----- forget() -------'  |
        |<---------------------'              drop() to 0   |  share()
        |                                                v  |
        '------------------- forget() ---------------- IDLE           no lease, in the tree: may be evicted

      free + leased + (pinned + idle) == total - 1
"""

from __future__ import annotations

NULL_PAGE = 0


class PagePool:
    """Free list, reference counts and the tree's marks of one group; written by leases and the radix tree only.

    Page 0 is the null page: it is never handed out and stands for "no page" in every table.
    """

    __slots__ = ("_free", "_in_tree", "_refs", "idle", "leased", "pinned", "total")

    def __init__(self, total: int) -> None:
        assert total >= 2, f"a pool of {total} pages has no page beside the null page"
        self.total = total
        self._free = list(range(total - 1, NULL_PAGE, -1))
        self._refs = [0] * total
        self._in_tree = bytearray(total)
        self.leased = 0
        self.pinned = 0
        self.idle = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_tree(self) -> int:
        return self.pinned + self.idle

    def refs(self, page: int) -> int:
        """How many leases refer to the page; changes nothing."""
        return self._refs[page]

    def is_in_tree(self, page: int) -> bool:
        """Whether the radix tree holds the page; changes nothing."""
        return bool(self._in_tree[page])

    def take(self) -> int:
        """Hands a free page to one lease. The caller has made sure that one is free."""
        page = self._free.pop()
        self._refs[page] = 1
        self.leased += 1
        return page

    def share(self, page: int) -> None:
        """One more lease refers to a page that is leased or in the tree."""
        if self._refs[page] == 0:
            assert self._in_tree[page], f"page {page} is free and cannot be shared"
            self.idle -= 1
            self.pinned += 1
        self._refs[page] += 1

    def drop(self, page: int) -> None:
        """One lease less; the last one frees the page unless the tree keeps it."""
        refs = self._refs[page] - 1
        assert refs >= 0 and page != NULL_PAGE, f"page {page} was given back more often than it was taken"
        self._refs[page] = refs
        if refs == 0:
            if self._in_tree[page]:
                self.pinned -= 1
                self.idle += 1
            else:
                self.leased -= 1
                self._free.append(page)

    def adopt(self, page: int) -> None:
        """The tree keeps a leased page from now on."""
        assert self._refs[page] > 0 and not self._in_tree[page], f"page {page} cannot enter the tree"
        self._in_tree[page] = 1
        self.leased -= 1
        self.pinned += 1

    def forget(self, page: int) -> None:
        """The tree lets go of a page: freed when no lease refers to it."""
        assert self._in_tree[page], f"page {page} is not in the tree"
        self._in_tree[page] = 0
        if self._refs[page] == 0:
            self.idle -= 1
            self._free.append(page)
        else:
            self.pinned -= 1
            self.leased += 1

    def conserved(self) -> bool:
        """Whether the four counts add up; O(1), changes nothing."""
        return len(self._free) + self.leased + self.pinned + self.idle == self.total - 1

    def check(self) -> None:
        """Recounts every page and raises AssertionError where the counts lie; for tests, O(total)."""
        assert self.conserved(), f"{self.free} free + {self.leased} leased + {self.in_tree} in tree != {self.total - 1}"
        free = set(self._free)
        assert len(free) == len(self._free) and NULL_PAGE not in free, (
            "the free list holds a page twice, or the null page"
        )
        leased = pinned = idle = 0
        for page in range(1, self.total):
            if page in free:
                assert self._refs[page] == 0 and not self._in_tree[page], f"page {page} is free and held"
            elif self._in_tree[page]:
                pinned += self._refs[page] > 0
                idle += self._refs[page] == 0
            else:
                assert self._refs[page] > 0, f"page {page} is lost: not free, not leased, not in the tree"
                leased += 1
        assert (leased, pinned, idle) == (self.leased, self.pinned, self.idle), "the page counts differ from a recount"
