"""The command line of the benchmarks, and where their results go.

``millipode.paper.measuring`` has the functions that measure; the paper's figures use them, too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from millipode.paper.measuring import Claim, Row, write

RESULTS = Path(__file__).parent / "results"


def quick() -> bool:
    """Whether the command line asks for the short version. Also switches JAX to double precision."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a smaller selection, in about a minute")
    jax.config.update("jax_enable_x64", True)
    return parser.parse_args().quick


def publish(
    name: str, question: str, rows: Sequence[Row], figure: Any, claims: Sequence[Claim], quick: bool
) -> None:
    """Print the tables, and write them into ``benchmarks/results`` or, if quick, ``results/quick``."""
    print(write(RESULTS / "quick" if quick else RESULTS, name, question, rows, figure, claims), flush=True)
