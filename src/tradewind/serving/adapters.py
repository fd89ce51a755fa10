"""Names by which people ask for adapters, which come and go while an engine runs.

Knows: a name's adapter, and that a request keeps the version that was loaded when it came. Refuses to know: weights. The device wing
loads an adapter when the first request for it runs, and keeps it until another needs its place.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tradewind.config.adapter_files import AdapterFile, look_at
from tradewind.contract.errors import RequestError, UserError


class AdapterBook:
    """Name -> adapter. Safe to use from several threads: every change is one step of a dict."""

    def __init__(self, *, largest_rank: int, taken: Collection[str] = ()) -> None:
        """largest_rank: that the engine has room for. taken: names that an adapter must not have (the model's own)."""
        self._largest_rank = largest_rank
        self._taken = frozenset(taken)
        self._adapters: dict[str, AdapterFile] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were loaded."""
        return tuple(self._adapters)

    def load(self, name: str, folder: Path | str) -> AdapterFile:
        """Gives the adapter in a folder a name, or the name to another one or newer files; reads them once. Raises UserError."""
        if not name or not name.isprintable() or len(name) > 200 or name in self._taken:
            raise UserError(
                f"an adapter cannot be called {name[:200]!r}: the name is empty, unprintable, too long, or the model's own"
            )
        found = look_at(folder)
        if found.rank > self._largest_rank:
            raise UserError(
                f"adapter {name!r} has rank {found.rank}; the largest that this engine has room for is {self._largest_rank}"
            )
        self._adapters[name] = found
        return found

    def unload(self, name: str) -> None:
        """Takes a name away; requests that run go on. Raises RequestError for a name that is not there."""
        if self._adapters.pop(name, None) is None:
            self.key(name)

    def key(self, name: str) -> str:
        """What `Request.adapter` says for a name; raises RequestError for one that is not there."""
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(f"there is no adapter {name[:100]!r}; loaded are: {known}")
        return self._adapters[name].key
