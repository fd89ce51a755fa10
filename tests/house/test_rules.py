"""The habits of the house, read from the syntax trees: one test per rule, each failure names file and line."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.source import ROOT, Module, functions, modules, tracked_files

SYNC_ROOMS = ("runner", "sampling", "speculative")
SYNC_CALLS = ("item", "tolist", "cpu", "synchronize")
COLLECT_POINT = "# collect point"
"""Stands in the `def` line, or in the line before it, of a function that may wait for the device."""

VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}


def found(problems: list[str]) -> str:
    return "\n".join(["", *problems])


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that read or change environment variables."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in (
            "environ",
            "environb",
            "getenv",
            "getenvb",
            "putenv",
            "unsetenv",
        ):
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for name in node.names if name.name in ("environ", "environb", "getenv", "putenv")]
    return lines


def sync_points(module: Module) -> list[str]:
    """Calls that wait for the device, outside functions marked as collect points."""
    lines = module.text.splitlines()
    marked: set[ast.AST] = set()
    for _, function in functions(module.tree):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        head = lines[max(0, first - 2) : function.body[0].lineno - 1] or [lines[function.lineno - 1]]
        if any(COLLECT_POINT in line for line in [*head, lines[function.lineno - 1]]):
            marked.update(ast.walk(function))
    return [
        f"{module.place}:{node.lineno}: .{node.func.attr}() waits for the device"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SYNC_CALLS
        and node not in marked
    ]


def parsed(text: str) -> Module:
    return Module(name="tradewind.runner.made_up", path=ROOT / "made_up.py", text=text, tree=ast.parse(text))


def test_environment_is_read_in_one_place() -> None:
    problems = [
        f"{m.place}:{line}" for m in modules() if m.name != "tradewind.config.env" for line in environment_reads(m.tree)
    ]
    assert not problems, found(problems)


def test_no_global_statement() -> None:
    problems = [
        f"{m.place}:{node.lineno}" for m in modules() for node in ast.walk(m.tree) if isinstance(node, ast.Global)
    ]
    assert not problems, found(problems)


def test_the_device_wing_waits_only_where_results_are_collected() -> None:
    problems = [problem for module in modules() if module.room in SYNC_ROOMS for problem in sync_points(module)]
    assert not problems, found(problems)


def test_every_module_opens_with_what_it_knows() -> None:
    problems = []
    for module in modules():
        if not module.tree.body and module.path.name == "__init__.py":
            continue
        if not (ast.get_docstring(module.tree) or "").strip():
            problems.append(f"{module.place}: no docstring")
    assert not problems, found(problems)


def test_no_vague_module_names() -> None:
    problems = [m.place for m in modules() if VAGUE_NAMES & set(m.name.split("."))]
    assert not problems, found(problems)


MACHINE_PATHS = re.compile("|".join(("/" + "work/", "/" + "root/", "/" + r"home/[a-z]\w*/", r"[A-Z]:\\" + "Users")))
HOSTS = ("pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "download.py" + "torch.org", "hugging" + "face.co")
REGISTRY_HOSTS = re.compile("|".join(re.escape(host) for host in HOSTS))
BINARY = {".gguf", ".ico", ".jpg", ".npy", ".npz", ".png", ".safetensors", ".whl", ".zip"}


def test_no_machine_paths_or_registry_hosts_in_tracked_files() -> None:
    """Files work on every machine and with every mirror."""
    files = tracked_files()
    if files is None:
        pytest.skip("not a git checkout: which files are the project's is not known")
    problems = []
    for path in files:
        if path.suffix in BINARY or path.stat().st_size > 4 << 20:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            match = MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line)
            if match:
                problems.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not problems, found(problems)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import os\nos.environ['A']", [2]),
        ("import os\nos.getenv('A')", [2]),
        ("from os import environ", [1]),
        ("import os\nos.cpu_count()", []),
    ],
)
def test_environment_rule_notices(text: str, lines: list[int]) -> None:
    assert environment_reads(ast.parse(text)) == lines


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(x):\n    return x.item()", 1),
        ("def f(x):  # collect point\n    return x.item()", 0),
        ("# collect point\ndef f(x):\n    return x.tolist()", 0),
        ("class A:\n    def f(self, x):\n        # collect point: the one wait\n        return x.cpu()", 0),
        ("def f(x):  # collect point\n    return x.item()\n\ndef g(x):\n    return x.cpu()", 1),
        ("torch.cuda.synchronize()", 1),
        ("x.items()", 0),
    ],
)
def test_sync_rule_notices(text: str, count: int) -> None:
    assert len(sync_points(parsed(text))) == count
