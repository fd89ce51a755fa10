"""The project around the code: metadata, scripts, and the build of the C++ library with and without a compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tradewind
from tests.house.source import ROOT

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LIBRARY = "src/tradewind/kernels/cpu/libtradewind_cpu.so"


def test_version_and_licence() -> None:
    assert SETTINGS["project"]["version"] == tradewind.__version__
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert SETTINGS["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("script", ["scripts/check", "scripts/test", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert subprocess.run(["bash", "-n", str(path)], timeout=20).returncode == 0


def test_ci_runs_the_command_of_the_readme() -> None:
    command = "pip install -e '.[dev]' && scripts/test"
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README yet")
    assert command in readme.read_text(encoding="utf-8")
    assert command.replace("install", "install -q") in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def small_tree(folder: Path, source: str) -> Path:
    """A tree with the real setup.py and one C++ source."""
    csrc = folder / "src" / "tradewind" / "kernels" / "cpu" / "csrc"
    csrc.mkdir(parents=True)
    (csrc / "answer.cpp").write_text(source)
    (csrc / "other.cpp").write_text("int other() { return 2; }\n")
    for package in (csrc.parent, csrc.parent.parent, csrc.parent.parent.parent):
        (package / "__init__.py").write_text("")
    shutil.copy(ROOT / "setup.py", folder / "setup.py")
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "tradewind"\nversion = "0"\n[tool.setuptools.packages.find]\nwhere = ["src"]\n'
    )
    return folder


def build(folder: Path, **environment: str) -> str:
    """Builds in place; the build must go on whatever happens to the library."""
    pytest.importorskip("setuptools")
    clean = {key: value for key, value in os.environ.items() if key != "CXX"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


GOOD = 'extern "C" int answer() { return 42; }\n'


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler here")
def test_setup_builds_a_library_for_ctypes(tmp_path: Path) -> None:
    out = build(small_tree(tmp_path, GOOD))
    assert "not built" not in out
    assert ctypes.CDLL(str(tmp_path / LIBRARY)).answer() == 42
    (tmp_path / "src/tradewind/kernels/cpu/csrc/answer.cpp").write_text("this is not C++\n")
    out = build(tmp_path)
    assert "the CPU op library was not built" in out
    assert "error" in out
    assert not (tmp_path / LIBRARY).exists(), "an old library must not pass for the new one"


def test_setup_goes_on_without_a_compiler(tmp_path: Path) -> None:
    out = build(small_tree(tmp_path, GOOD), PATH=str(tmp_path))
    assert out.count("tradewind: the CPU op library was not built (no C++ compiler found; set CXX or install g++)") == 1
    assert not (tmp_path / LIBRARY).exists()


def test_setup_goes_on_with_a_broken_compiler(tmp_path: Path) -> None:
    out = build(small_tree(tmp_path, GOOD), CXX="false", PATH=os.defpath)
    assert "not built (" in out
    assert "false failed" in out
