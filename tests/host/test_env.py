"""The one reader of environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tradewind.config import env


def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "tradewind"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert env.cache_dir() == tmp_path / "home" / ".cache" / "tradewind"


def test_cache_dir_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(env.Path, "home", no_home)
    assert env.cache_dir().is_absolute()


def test_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++")
    assert env.compiler() == "clang++"
    monkeypatch.setenv("CXX", "")
    assert env.compiler() is None
