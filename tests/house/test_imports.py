"""Who imports whom: the table in pyproject.toml holds, and would notice if it did not."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.source import HOST_WING, ROOT, imports_torch, modules

LINT_PROGRAM = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
LINT = [sys.executable, "-c", LINT_PROGRAM, "--no-cache"]
FACES = {"__main__", "assemble", "cli", "engine_process", "llm", "serve", "serve_drift"} | {
    path.stem for path in (ROOT / "src" / "tradewind").glob("cli_*.py")
}
"""Top-level modules that know everybody; a cli_ module is one command, or what several share."""


def lint(folder: Path, *, source: Path) -> subprocess.CompletedProcess[str]:
    path = f"{source}{os.pathsep}{ROOT}"
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "NO_COLOR": "1", "COLUMNS": "300"}
    return subprocess.run(LINT, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def contracts() -> list[dict[str, object]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, object]] = settings["tool"]["importlinter"]["contracts"]
    return found


def test_the_table_holds() -> None:
    done = lint(ROOT, source=ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_has_a_row() -> None:
    """A new folder or top-level module starts forbidden: it needs a row, or must be one of the faces that know everybody."""
    rows = {str(contract["room"]) for contract in contracts() if contract["type"] == "room"}
    rooms = {module.room for module in modules() if module.room} - FACES
    assert rooms - rows == set(), "rooms without a row in pyproject.toml"
    folders = {path.name for path in (ROOT / "src" / "tradewind").iterdir() if (path / "__init__.py").exists()}
    assert folders <= rows


def test_rows_name_rooms_that_exist() -> None:
    known = {module.room for module in modules()} | FACES
    for contract in contracts():
        for name in contract.get("may_import", []):  # type: ignore[attr-defined]
            assert name in known, f"{contract['name']}: there is no room {name}"


def test_nobody_imports_the_faces() -> None:
    """assemble, cli and llm know everybody, so nobody below may know them; bench and tune measure from outside."""
    for contract in contracts():
        if contract.get("room") not in ("bench", "tune", None):
            assert not FACES & set(contract["may_import"]), contract["name"]  # type: ignore[call-overload]


def test_observability_is_known_to_few() -> None:
    users = {contract["room"] for contract in contracts() if "observability" in contract.get("may_import", [])}  # type: ignore[operator]
    assert users <= {"simulate", "bench", "tune"}


@pytest.mark.parametrize(
    ("statement", "kept"),
    [
        ("from small.config import facts", True),
        ("import small.device", False),
        ("def later():\n    from small import device", False),
        ("def later():\n    from small.device import memory", False),
        ("import small", True),
        ("import json", True),
    ],
)
def test_the_contract_notices(statement: str, kept: bool, tmp_path: Path) -> None:
    """A made-up package with one statement in one room: imports inside functions count."""
    package = tmp_path / "small"
    for room in ("cache", "config", "device"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "config" / "facts.py").write_text("")
    (package / "device" / "memory.py").write_text("")
    (package / "cache" / "pages.py").write_text(statement + "\n")
    (tmp_path / ".importlinter").write_text(
        "[importlinter]\nroot_package = small\ncontract_types =\n    room: tests.house.rooms.RoomContract\n\n"
        "[importlinter:contract:1]\nname = cache\ntype = room\nroom = cache\nmay_import =\n    config\n"
    )
    done = lint(tmp_path, source=tmp_path)
    assert done.returncode == (0 if kept else 1), done.stdout + done.stderr
    assert kept or "small.cache.pages imports small.device" in done.stdout


def imported_in_a_fresh_interpreter(names: list[str]) -> str:
    """Imports the modules and returns those of torch, triton and transformers that came along."""
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        "print(' '.join(sorted(m for m in ('torch', 'triton', 'transformers') if m in sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT / "src"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_line_starts_without_torch() -> None:
    """Importing torch takes a second and 200 MB; the CPU path needs neither."""
    if "tradewind.cli" not in {module.name for module in modules()}:
        pytest.skip("there is no command line yet")
    assert imported_in_a_fresh_interpreter(["tradewind.cli", "tradewind.assemble"]) == ""


def test_only_the_torch_modules_import_torch() -> None:
    """Every other module, host wing and device wing, can be imported without torch."""
    names = [
        module.name for module in modules() if not imports_torch(module.name) and not module.name.endswith("__main__")
    ]
    assert imported_in_a_fresh_interpreter(names) == ""


def test_the_host_wing_never_names_torch() -> None:
    """Not even lazily; the import contract says the same of whole chains."""
    for module in modules():
        if module.room in HOST_WING:
            assert "import torch" not in module.text, module.place
            assert "from torch" not in module.text, module.place
