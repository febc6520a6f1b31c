"""The table in docs/uncertainty.md is what the code gives: a scale that is wrong by ten would show."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
specification = importlib.util.spec_from_file_location("calibration", ROOT / "benchmarks" / "calibration.py")
calibration = importlib.util.module_from_spec(specification)
specification.loader.exec_module(calibration)

ROWS = [
    tuple(cell.strip() for cell in line.strip("|\n ").split("|"))
    for line in (ROOT / "docs" / "uncertainty.md").read_text().splitlines()
    if line.startswith("| ") and any(line.startswith(f"| {name} |") for name in calibration.CASES)
]


def test_the_table_is_complete():
    assert [row[:2] for row in ROWS] == [(n, c.recommended) for n, c in calibration.CASES.items()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
@pytest.mark.wide(quick=2)
def test_calibration_is_as_documented(row):
    name, solver, rmse, std, chi2_end, chi2, *coverage, correlation = row
    have = calibration.measure(name, solver, "defect")
    # Ten times the scale is a hundredth of χ²; rounding moves it by far less than a factor of two.
    for number, text in zip(have[:4], (rmse, std, chi2_end, chi2), strict=True):
        assert 1 / 2 < number / float(text) < 2
    for number, text in zip(have.coverage, coverage, strict=True):
        assert abs(number - float(text.strip("%")) / 100) < 0.1
    if name == "FitzHugh–Nagumo, T = 20":
        assert have.correlation >= 0.6 and abs(have.correlation - float(correlation)) < 0.1


def test_at_least_eight_of_ten_are_honest():
    """χ²/d within [0.1, 10] at the end, and 90 % bands that cover at least 70 %."""
    honest = [0.1 <= float(row[4]) <= 10 and float(row[7].strip("%")) >= 70 for row in ROWS]
    assert len(honest) == 10 and sum(honest) >= 8


@pytest.mark.thorough
def test_the_filter_alone_is_far_from_it():
    """What members are for: an order of magnitude in χ², and more."""
    name = "FitzHugh–Nagumo, T = 20"
    assert calibration.measure(name, calibration.CASES[name].recommended, None).chi2_end > 20
