"""Names by which people ask for adapters, which come and go while an engine runs.

Knows: a name's adapter, and that a request keeps the version that was loaded when it came. Refuses to know: weights. The device wing
loads an adapter when the first request for it runs, and keeps it until another needs its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from tradewind.config.adapter_files import AdapterFile, look_at
from tradewind.config.goals import AdapterRoom
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
        found = look_at(folder)
        self.take(name, found)
        return found

    def check(self, name: str, adapter: AdapterFile) -> None:
        """Raises UserError where an adapter cannot have this name, or has too large a rank; changes nothing."""
        if not name or not name.isprintable() or len(name) > 200 or name in self._taken:
            raise UserError(
                f"an adapter cannot be called {name[:200]!r}: the name is empty, unprintable, too long, or the model's own"
            )
        if adapter.rank > self._largest_rank:
            raise UserError(
                f"adapter {name!r} has rank {adapter.rank}; the largest that this engine has room for is "
                f"{self._largest_rank} (--adapter-rank)"
            )

    def take(self, name: str, adapter: AdapterFile) -> None:
        """Gives an adapter a name, or the name to this one. Raises as `check` does."""
        self.check(name, adapter)
        self._adapters[name] = adapter

    def unload(self, name: str) -> None:
        """Takes a name away; requests that run go on. Raises RequestError for a name that is not there."""
        if self._adapters.pop(name, None) is None:
            self.key(name)

    @property
    def keys(self) -> dict[str, str]:
        """Name -> what `Request.adapter` says."""
        return {name: found.key for name, found in self._adapters.items()}

    def key(self, name: str) -> str:
        """What `Request.adapter` says for a name; raises RequestError for one that is not there."""
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(f"there is no adapter {name[:100]!r}; loaded are: {known}")
        return self._adapters[name].key


def room_for(
    given: Iterable[AdapterFile],
    *,
    slots: int | None = None,
    rank: int | None = None,
    more: bool = False,
    stated: AdapterRoom | None = None,
) -> AdapterRoom | None:
    """The room that adapters need: as many slots as adapters, and the largest rank of one, where nothing else is said; None for none.

    more: others may be loaded at run time. stated: by a file of goals; `slots` and `rank` go before it.
    """
    files = list(given)
    if not files and not more and slots is None and rank is None:
        return stated
    usual = stated or AdapterRoom(
        slots=max(len(files), AdapterRoom().slots if more or not files else 1),
        rank=max([one.rank for one in files] + [AdapterRoom().rank] * (more or not files)),
    )
    return AdapterRoom(slots=usual.slots if slots is None else slots, rank=usual.rank if rank is None else rank)
