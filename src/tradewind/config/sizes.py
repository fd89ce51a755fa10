"""Sizes in bytes as people write and read them.

Knows: units. Refuses to know: what is measured.
"""

from __future__ import annotations

import math
import re

from tradewind.contract.errors import UserError

MiB = 1 << 20
GiB = 1 << 30

UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kb": 1000,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mb": 1000**2,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gb": 1000**3,
    "gib": 1 << 30,
    "t": 1 << 40,
    "tb": 1000**4,
    "tib": 1 << 40,
}


def parse_bytes(text: str) -> int:
    """The number of bytes in "2GiB", "512 MB", "1.5g" or "1048576"; one-letter units are powers of 1024. Raises UserError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", text, flags=re.ASCII)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or len(match[1]) > 20:
        raise UserError(f"{text[:40]!r} is no size; write a number with a unit, for example 2GiB or 512MB")
    size = float(match[1]) * unit
    if not math.isfinite(size) or size < 1 or size >= 1 << 60:
        raise UserError(f"{text[:40]!r} is no usable size; it must be at least 1 byte and under 1024 PiB")
    return int(match[1]) * unit if match[1].isdigit() else int(size)


def show_bytes(size: int) -> str:
    """A size with three or four digits in binary units: "93.8 MiB"."""
    if abs(size) < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if abs(value) < 1023.95 or unit == "PiB":
            break
    return f"{value:.1f} {unit}" if abs(value) < 100 else f"{value:.0f} {unit}"


def option_bytes(size: int) -> str:
    """A size as a limit to type on a command line: whole MiB, rounded up, so that what needs `size` fits."""
    return f"{-(-size // MiB)}MiB"
