"""The only reader of environment variables. Everything else receives values as arguments."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """Where downloads and measured facts are kept: $XDG_CACHE_HOME/tradewind, by default ~/.cache/tradewind.

    A relative $XDG_CACHE_HOME is ignored, as the XDG base directory specification asks. Without a home folder it is the temporary folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "tradewind"
    try:
        return Path.home() / ".cache" / "tradewind"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "tradewind-cache"


def compiler() -> str | None:
    """The C++ compiler named by $CXX, if any."""
    return os.environ.get("CXX") or None


def c_compiler() -> str | None:
    """The user's choice of a C compiler (CC); Triton takes it, or the first of cc, gcc and clang that is there."""
    return os.environ.get("CC") or None
