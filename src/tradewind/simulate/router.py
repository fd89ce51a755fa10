"""Which replica of a fleet gets a request.

Knows: how many requests each replica has open, and which prefixes were sent where. Refuses to know: engines, clocks, what is really in a
cache; like a router before real servers, it only knows what it sent and what came back.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from tradewind.contract.step import Ints

SLACK = 2
"""Requests that a replica may have over its bound: while few are open, whole requests make every share look uneven."""


class Router(Protocol):
    """Chooses, and is told what was done."""

    def __init__(self, *, replicas: int, cache_tokens: int, load_bound: float) -> None: ...

    def choose(self, blocks: Ints, *, block_tokens: int) -> int:
        """The replica for a prompt with these block ids; changes nothing that matters to others."""

    def sent(self, replica: int, blocks: Ints, *, block_tokens: int, tokens: int) -> None:
        """A request of `tokens` (prompt and answer) went to a replica."""

    def ended(self, replica: int, *, tokens: int) -> None:
        """A request that was sent there is over."""


class _Counting:
    """What every router counts."""

    def __init__(self, *, replicas: int, cache_tokens: int, load_bound: float) -> None:
        self.replicas = replicas
        self.open = [0] * replicas
        """Requests sent and not ended."""
        self.tokens = [0] * replicas
        """Tokens of those."""

    def sent(self, replica: int, blocks: Ints, *, block_tokens: int, tokens: int) -> None:
        """See Router."""
        self.open[replica] += 1
        self.tokens[replica] += tokens

    def ended(self, replica: int, *, tokens: int) -> None:
        """See Router."""
        self.open[replica] -= 1
        self.tokens[replica] -= tokens

    def least_loaded(self) -> int:
        """The replica with the fewest open requests, among equals the one with the fewest tokens, among those the first."""
        fewest = min(self.open)
        if self.open.count(fewest) == 1:
            return self.open.index(fewest)
        return min((self.tokens[at], at) for at, count in enumerate(self.open) if count == fewest)[1]


class RoundRobin(_Counting):
    """One after the other."""

    def __init__(self, *, replicas: int, cache_tokens: int, load_bound: float) -> None:
        super().__init__(replicas=replicas, cache_tokens=cache_tokens, load_bound=load_bound)
        self._next = 0

    def choose(self, blocks: Ints, *, block_tokens: int) -> int:
        """See Router."""
        chosen = self._next
        self._next = (chosen + 1) % self.replicas
        return chosen


class LeastLoad(_Counting):
    """To whoever has the fewest requests open."""

    def choose(self, blocks: Ints, *, block_tokens: int) -> int:
        """See Router."""
        return self.least_loaded()


class PrefixAware(_Counting):
    """To whoever was sent the longest part of the prompt's beginning, unless it is too busy: then to the least loaded.

          too busy:    open >= bound * (all open + 1) / replicas + SLACK      (after Mirrokni et al. 2018, hashing with bounded loads)

    What a replica was sent is forgotten, least recently used first, when it is more than its cache holds.
    """

    def __init__(self, *, replicas: int, cache_tokens: int, load_bound: float) -> None:
        super().__init__(replicas=replicas, cache_tokens=cache_tokens, load_bound=load_bound)
        self._bound = max(1.0, load_bound)
        self._cache_tokens = cache_tokens
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        """By replica, the block ids sent there. An id stands for its block and all before it, so a prefix is known by its last id."""
        self._where: dict[int, set[int]] = {}

    def choose(self, blocks: Ints, *, block_tokens: int) -> int:
        """See Router."""
        total = sum(self.open)
        most = self._bound * (total + 1) / self.replicas + SLACK
        for block in blocks[::-1].tolist():
            holders = self._where.get(block)
            if not holders:
                continue
            open_, tokens = self.open, self.tokens
            best = min(holders, key=lambda at: (open_[at], tokens[at], at))
            if open_[best] < most:
                return best
            break  # all that have the longest prefix are too busy
        return self.least_loaded()

    def sent(self, replica: int, blocks: Ints, *, block_tokens: int, tokens: int) -> None:
        """See Router."""
        super().sent(replica, blocks, block_tokens=block_tokens, tokens=tokens)
        own, where = self._sent[replica], self._where
        # The beginning last, so that it is forgotten last: without it what follows is worth nothing.
        for block in blocks[::-1].tolist():
            if block in own:
                own.move_to_end(block)
            else:
                own[block] = None
                where.setdefault(block, set()).add(replica)
        while len(own) * block_tokens > self._cache_tokens and own:
            gone, _ = own.popitem(last=False)
            holders = where[gone]
            holders.discard(replica)
            if not holders:
                del where[gone]


ROUTERS: dict[str, type[Router]] = {
    "least_load": LeastLoad,
    "prefix_aware": PrefixAware,
    "round_robin": RoundRobin,
}
