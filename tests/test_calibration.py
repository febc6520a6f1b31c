"""The table in docs/uncertainty.md is what the code gives: a scale that is wrong by ten would show."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
specification = importlib.util.spec_from_file_location("calibration", ROOT / "benchmarks" / "calibration.py")
calibration = importlib.util.module_from_spec(specification)
specification.loader.exec_module(calibration)

KINDS = {kind.__name__: kind for kind, _ in calibration.SOLVERS}
ROWS = [
    tuple(cell.strip() for cell in line.strip("|\n ").split("|"))
    for line in (ROOT / "docs" / "uncertainty.md").read_text().splitlines()
    if line.startswith("| ") and any(f"| {name} |" in line for name in KINDS)
]


def test_the_table_is_complete():
    want = {(name, k.__name__, d) for name in calibration.PROBLEMS for k, d in calibration.SOLVERS}
    assert {row[:3] for row in ROWS} == want


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[:3]))
def test_chi_square_and_coverage_are_as_documented(row):
    name, kind, diffusion, rmse, chi2, coverage = row
    have = calibration.measure(name, KINDS[kind], diffusion)
    # Ten times the scale is a hundredth of χ²; rounding moves it by far less than a factor of three.
    assert 1 / 3 < have[0] / float(rmse) < 3
    assert 1 / 3 < have[1] / float(chi2) < 3
    assert abs(have[2] - float(coverage.strip("%")) / 100) < 0.1
