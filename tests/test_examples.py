"""The examples run, small."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_demo_draws_its_picture_and_says_where(tmp_path):
    picture = tmp_path / "deep" / "picture.png"
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "fitzhugh_nagumo.py", "--n", "8", "--out", picture],
        check=True,
        capture_output=True,
        text=True,
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in run.stdout
    for line in ("dimension  128", "accepted", "rejected", " s, compilation included"):
        assert line in run.stdout
    assert "100%" in run.stderr
