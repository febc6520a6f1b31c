"""docs/paper.md names nothing that is not there."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "paper.md").read_text()


def found(name):
    """Import as much of a dotted name as is a module; the rest are attributes."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"{name} is nowhere")


def test_every_name_of_the_code_exists():
    names = set(re.findall(r"`(millipode\.[\w.]+)`", TEXT))
    assert len(names) > 30
    for name in names:
        assert found(name) is not None


def test_every_test_exists():
    names = set(re.findall(r"`tests/(\w+)\.py::(\w+)`", TEXT))
    assert len(names) > 25
    for module, test in names:
        assert f"def {test}(" in (ROOT / "tests" / f"{module}.py").read_text(), f"{module}::{test}"


@pytest.mark.parametrize("kind", ["Proposition", "Assumption", "Example"])
def test_every_statement_of_the_paper_is_there(kind):
    numbers = {"Proposition": ["2", "3", "6", "B1", "D1"], "Assumption": ["1", "5"], "Example": ["4"]}[kind]
    for number in numbers:
        assert re.search(rf"\| {kind} {number}\b", TEXT), f"{kind} {number}"


def test_pictures_and_data_are_there():
    for figure in ("showcase", "step-cost", "pleiades", "high-dimensional", "stability"):
        assert f"paper/{figure}.png" in TEXT
        for suffix in ("png", "json", "md"):
            assert (ROOT / "docs" / "paper" / f"{figure}.{suffix}").exists()
