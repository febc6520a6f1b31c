"""The examples run, small."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_example(name, picture):
    """Its output; the picture is there, and announced."""
    command = [sys.executable, ROOT / "examples" / name, "--n", "8", "--out", picture]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in run.stdout
    return run


@pytest.mark.thorough
def test_the_spatial_prior_is_chosen_and_drawn(tmp_path):
    run = run_example("spatial_prior.py", tmp_path / "spatial.png")
    for line in ("length scales", "variances", "independent:", "Matérn:"):
        assert line in run.stdout


@pytest.mark.thorough
def test_error_and_standard_deviation_side_by_side(tmp_path):
    run = run_example("honest_uncertainty.py", tmp_path / "honest.png")
    for line in ("members  ", "filter  ", "correlation"):
        assert line in run.stdout
