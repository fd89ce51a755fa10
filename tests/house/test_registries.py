"""The tables are complete: every op has a reference and a test, every technique a switch, a metric and a test."""

from __future__ import annotations

import ast

import pytest

from tests.house.source import PACKAGE, ROOT, functions
from tradewind.config.goals import Means
from tradewind.config.techniques import NOT_TECHNIQUES, TECHNIQUES

NUMERIC_PINS = {"backend", "compute", "kv_format", "quantization"}


def test_every_op_has_a_reference_and_a_test() -> None:
    if not (PACKAGE / "kernels" / "table.py").exists():
        pytest.skip("the op table does not exist yet")
    from tradewind.kernels.table import OPS, reference_of

    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests" / "kernels").glob("test_*.py"))]
    assert list(OPS) == sorted(OPS), "the table is sorted"
    for name, spec in OPS.items():
        assert spec.name == name
        assert callable(reference_of(name)), name
        assert spec.tolerance >= 0
        assert any(name in text for text in texts), f"no test under tests/kernels names the op {name}"


def test_techniques_are_sorted_and_whole() -> None:
    assert list(TECHNIQUES) == sorted(TECHNIQUES)
    for name, row in TECHNIQUES.items():
        assert all((row.switch, row.helps, row.hurts, row.metric)), name
        assert set(row.prerequisites) & set(TECHNIQUES) <= set(TECHNIQUES) - {name}, name
        assert set(row.conflicts) <= set(TECHNIQUES) - {name}, name


def test_every_switch_has_a_row() -> None:
    """A field of `Means` either switches a technique or is named as something else, with the reason."""
    switches = " ".join(row.switch for row in TECHNIQUES.values())
    fields = set(Means.__struct_fields__)
    assert set(NOT_TECHNIQUES) <= fields
    missing = {field for field in fields - set(NOT_TECHNIQUES) if f"means.{field}" not in switches}
    assert not missing, f"no technique is switched by {sorted(missing)}"
    for name, row in TECHNIQUES.items():
        for word in row.switch.replace(";", " ").split():
            if word.startswith("means."):
                assert word.removeprefix("means.") in fields, f"{name} names {word}"


@pytest.mark.parametrize("name", sorted(TECHNIQUES))
def test_every_technique_has_its_test(name: str) -> None:
    path, _, test = TECHNIQUES[name].test.partition("::")
    file = ROOT / path
    assert file.is_file(), f"{path} does not exist"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert test in {function.name for _, function in functions(tree)}, f"{path} has no {test}"
