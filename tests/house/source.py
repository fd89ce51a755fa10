"""The project's files as the house rules see them: parsed modules, and everything that git tracks.

Knows: how to find and parse. Refuses to know: the rules.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tradewind"
HOST_WING = ("cache", "config", "contract", "engine", "observability", "serving", "simulate")
TORCH_MODULES = (
    "tradewind.kernels.plain",
    "tradewind.kernels.reference",
    "tradewind.kernels.reference_axes",
    "tradewind.kernels.reference_fp8",
    "tradewind.kernels.reference_lora",
    "tradewind.kernels.reference_mla",
    "tradewind.kernels.reference_moe",
    "tradewind.kernels.triton",
    "tradewind.runner.ahead",
    "tradewind.runner.flight",
    "tradewind.runner.graph_runner",
    "tradewind.runner.preparing",
    "tradewind.runner.programs",
    "tradewind.runner.steering",
)
"""Modules and packages that import torch when they are imported; nothing on the CPU path may import one of them."""


def imports_torch(name: str) -> bool:
    """Whether a module is one of TORCH_MODULES or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in TORCH_MODULES)


@dataclass(frozen=True)
class Module:
    """One Python file of the package."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """Path from the root, for messages."""
        return str(self.path.relative_to(ROOT))

    @property
    def room(self) -> str:
        """First name under the package; empty for the package itself."""
        return self.name.split(".")[1] if "." in self.name else ""


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, sorted by name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Module(name=name, path=path, text=text, tree=ast.parse(text, filename=str(path))))
    return tuple(found)


def tracked_files() -> list[Path] | None:
    """Files that git tracks or would track; None where this is no git checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout.decode()
    except (OSError, subprocess.SubprocessError):
        return None
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def functions(tree: ast.AST, *, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its dotted name inside the module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}.{node.name}" if within else node.name
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, within=name)
        else:
            yield from functions(node, within=within)
