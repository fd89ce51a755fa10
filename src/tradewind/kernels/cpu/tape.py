"""A tape: op calls recorded once and replayed in one call into the library.

Knows: words, and which arrays must stay alive for them. Refuses to know: what an op computes and when a tape is stale (its owner records
one per bucket). A replay reads sizes and contents through the recorded addresses, so it follows whatever the buffers hold by then.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tradewind.kernels.cpu.library import Library, Team

Word = int | float | None | npt.NDArray[Any]
"""What an argument word is made from: a whole number, a float64, an array's address, or nothing (0)."""


def encode(word: Word) -> int:
    """The 64 bits of one argument as a signed integer."""
    if word is None:
        return 0
    if isinstance(word, float):
        bits: int = struct.unpack("<q", struct.pack("<d", word))[0]
        return bits
    if isinstance(word, np.ndarray):
        address: int = word.__array_interface__["data"][0]
        return address
    return int(word)


@dataclass(eq=False)
class Tape:
    """Calls laid end to end. Filled while its op set records; then only run. Running it changes the buffers it was recorded with."""

    library: Library
    team: Team
    _words: list[int] = field(default_factory=list)
    _labels: list[str] = field(default_factory=list)
    _alive: list[Any] = field(default_factory=list)
    _frozen: npt.NDArray[np.int64] | None = None

    def add(self, name: str, arguments: Sequence[Word], *, label: str = "", alive: Sequence[Any] = ()) -> None:
        """Appends a call. `alive`: what else the addresses among the arguments depend on."""
        assert self._frozen is None, "a tape that has run takes no more calls"
        op, count = self.library.ops[name]
        assert len(arguments) == count, f"op {name} takes {count} arguments, not {len(arguments)}"
        self._words += (op, count, *map(encode, arguments))
        self._labels.append(label or name)
        self._alive += [word for word in arguments if isinstance(word, np.ndarray)]
        self._alive += alive

    def run(self) -> None:
        """Replays all calls: one call into the library, with the interpreter released."""
        words = self._freeze()
        self.team.run(words.ctypes.data, len(self._labels))

    def profile(self) -> npt.NDArray[np.int64]:
        """Replays like `run` and returns nanoseconds per call, as thread 0 saw them; order as in `describe`."""
        words = self._freeze()
        times = np.zeros(len(self._labels), np.int64)
        self.team.profile(words.ctypes.data, len(self._labels), times.ctypes.data)
        return times

    def describe(self) -> list[str]:
        """A line per call: the op and its shapes."""
        return list(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def _freeze(self) -> npt.NDArray[np.int64]:
        if self._frozen is None:
            self._frozen = np.array(self._words, np.int64)
            self._words = []
        return self._frozen
