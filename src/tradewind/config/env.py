"""The only reader of environment variables. Everything else receives values as arguments."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where downloads and measured facts are kept: $XDG_CACHE_HOME/tradewind, by default ~/.cache/tradewind."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "tradewind"


def compiler() -> str | None:
    """The C++ compiler named by $CXX, if any."""
    return os.environ.get("CXX") or None
