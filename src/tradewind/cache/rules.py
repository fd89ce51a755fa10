"""What each kind of KV group must keep: one rule per kind, asked by the tree and by leases.

Knows: which pages a token still reads. Refuses to know: pools, trees, sequences.

Let n be the next position to compute, P the page size, W the window:

      full      reads 0 .. n                  every page counts
      window    reads n - W + 1 .. n          pages wholly before n - W + 1 are dropped
      chunk     reads n - n % W .. n          pages wholly before n - n % W are dropped, all at once when a chunk ends

          |  page 0  |  page 1  |  page 2  |  page 3  |
                           ^ n - W + 1          ^ n
           droppable    needed     needed     being written
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tradewind.cache.pages import NULL_PAGE
from tradewind.contract.errors import UserError
from tradewind.contract.kv import KVGroup


class GroupRule(Protocol):
    """The rule of one KV group. All methods are pure."""

    page_tokens: int

    def reusable(self, prefix: Sequence[int], pages: int) -> int:
        """The longest prefix, in pages and at most `pages`, after which computing may go on; `prefix` is a page id (or null) per page."""

    def droppable(self, position: int) -> int:
        """How many leading pages no token from `position` on reads any more."""

    def drops_at(self, pages: int) -> int:
        """The first position from which on that many leading pages are droppable."""

    def peak_pages(self, tokens: int, *, burst_tokens: int) -> int:
        """Most pages held at once while `tokens` positions are computed in order, at most `burst_tokens` of them uncollected."""


class FullRule:
    """Every earlier token is read: all pages must be there, none is ever dropped."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens

    def reusable(self, prefix: Sequence[int], pages: int) -> int:
        for index in range(pages):
            if prefix[index] == NULL_PAGE:
                return index
        return pages

    def droppable(self, position: int) -> int:
        return 0

    def drops_at(self, pages: int) -> int:
        return 2**31 - 1

    def peak_pages(self, tokens: int, *, burst_tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class WindowRule:
    """Only the last `window` tokens are read, the one being computed among them."""

    def __init__(self, page_tokens: int, window: int) -> None:
        self.page_tokens = page_tokens
        self.window = window

    def reusable(self, prefix: Sequence[int], pages: int) -> int:
        while pages > 0:
            first = self.droppable(pages * self.page_tokens)
            hole = next((i for i in range(pages - 1, first - 1, -1) if prefix[i] == NULL_PAGE), None)
            if hole is None:
                return pages
            pages = hole
        return 0

    def droppable(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.page_tokens

    def drops_at(self, pages: int) -> int:
        return pages * self.page_tokens + self.window - 1

    def peak_pages(self, tokens: int, *, burst_tokens: int) -> int:
        everything = -(-tokens // self.page_tokens)
        return min(everything, -(-(self.window - 1 + burst_tokens) // self.page_tokens) + 1)


class ChunkRule(WindowRule):
    """Only tokens since the last multiple of `window` are read, the one being computed among them.

    A page that two chunks share stays for the second one; a prefix that ends where a chunk does needs no page at all.
    """

    def droppable(self, position: int) -> int:
        return (position - position % self.window) // self.page_tokens

    def drops_at(self, pages: int) -> int:
        return -(-pages * self.page_tokens // self.window) * self.window


def rule_for(group: KVGroup) -> GroupRule:
    """The rule of a group; raises UserError for a kind that has none yet."""
    if group.kind in ("full", "latent"):
        return FullRule(group.page_tokens)
    if group.kind in ("window", "chunk"):
        assert group.window is not None and group.window >= 1, f"window group {group.index} has window {group.window}"
        return (ChunkRule if group.kind == "chunk" else WindowRule)(group.page_tokens, group.window)
    raise UserError(
        f"layers {group.layers[0]}..{group.layers[-1]} keep '{group.kind}' (recurrent) caches, which this version cannot "
        "schedule: choose a model whose layers keep keys and values"
    )
