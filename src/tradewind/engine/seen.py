"""Which prefixes earlier prompts had: so that a prefix that was evicted can be told from one that is new.

Knows: hashes of prompts' whole pages, the latest ones. Refuses to know: what the cache still has of them.

Two sets of bounded size: the older one is dropped whole when the younger one is full, so that nothing is ever sorted or counted down.
"""

from __future__ import annotations

from collections.abc import Sequence

PAGES = 1 << 15
"""So many pages' hashes are kept at least, and twice as many at most: with pages of 16 tokens half a million tokens."""


class SeenPrefixes:
    """Written by admission only."""

    def __init__(self, *, pages: int = PAGES) -> None:
        self._pages = pages
        self._young: set[int] = set()
        self._old: set[int] = set()

    def note(self, namespace: tuple[str, str], keys: Sequence[bytes]) -> int:
        """Remembers a prompt's pages; how many leading ones of them an earlier prompt had too."""
        found, going = 0, True
        chain = hash(namespace)
        for key in keys:
            chain = hash((chain, key))
            if going and (chain in self._young or chain in self._old):
                found += 1
            else:
                going = False
            self._young.add(chain)
        if len(self._young) > self._pages:
            self._old, self._young = self._young, set()
        return found
