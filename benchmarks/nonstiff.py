"""Evaluations of f at equal error on classical nonstiff problems, and ``sol.std`` beside the error.

The default solver (``mp.solve`` without one) at three tolerances beside SciPy's RK45 and DOP853. Errors and
standard deviations are root mean squares at the end; the error is in units of 1 + |y| where evaluations are
compared. ``classics.TUNED`` are the problems that choices were made with, ``classics.UNSEEN`` the others.

Run: ``python benchmarks/nonstiff.py`` writes ``results/nonstiff.md``; ``--members`` adds ensembles of 16.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import classics
import jax
import numpy as np
from scipy.integrate import solve_ivp

import millipode as mp

TOLERANCES = (1e-4, 1e-7, 1e-10)
RESULT = Path(__file__).parent / "results" / "nonstiff.md"


class Row(NamedTuple):
    """One solve: error over tolerance, evaluations over those of SciPy, and error over standard deviation."""

    error: float
    evaluations: float
    honesty: float


def scaled(x: np.ndarray, reference: np.ndarray) -> float:
    """The root mean square of an error in units of 1 + |y|."""
    return float(np.sqrt(np.mean((x / (1 + np.abs(reference))) ** 2)))


def curves(name: str) -> list[list[tuple[float, int]]]:
    """Error and evaluations of SciPy's methods, for tolerances from 1e-2 on."""
    p = classics.problem(name)
    f, reference = jax.jit(p.f), classics.reference(name)
    found = []
    for method, most in (("RK45", 10.5), ("DOP853", 13.5)):
        found.append([])
        for digits in np.arange(2, most + 0.1, 0.5):
            tolerance = max(10.0**-digits, 3e-14)
            sol = solve_ivp(
                lambda t, y: np.asarray(f(t, y)), p.t_span, p.y0, method, None, rtol=tolerance, atol=tolerance
            )
            found[-1].append((scaled(sol.y[:, -1] - reference, reference), sol.nfev))
    return found


def evaluations_for(curve: list[tuple[float, int]], error: float) -> float:
    """How many evaluations a method needs for an error, by interpolation along its best results."""
    best: list[tuple[float, int]] = []
    for e, n in sorted(curve, key=lambda point: point[1]):
        if e > 0 and (not best or e < best[-1][0]):
            best.append((e, n))
    errors, counts = np.log(np.array(best[::-1], float)).T
    return float(np.exp(np.interp(np.log(error), errors, counts))) if np.log(error) >= errors[0] else np.inf


def measure(name: str, tolerance: float, peers: list[list[tuple[float, int]]], **options: object) -> Row:
    """One problem at one tolerance."""
    p, reference = classics.problem(name), classics.reference(name)
    sol = mp.solve(p.f, p.y0, p.t_span, rtol=tolerance, atol=tolerance, save="end", **options)
    difference = np.asarray(sol.mean[-1]) - reference
    error = scaled(difference, reference)
    fewest = min(evaluations_for(curve, error) for curve in peers)
    spread = np.sqrt(np.mean(np.asarray(sol.std[-1]) ** 2))
    honesty = np.sqrt(np.mean(difference**2)) / spread if spread > 0 else np.inf
    return Row(error / tolerance, int(sol.stats.f_evals) / fewest, float(honesty))


def within(rows: list[Row], factor: float) -> str:
    """The share of standard deviations that are right within a factor."""
    return f"{np.mean([1 / factor < row.honesty < factor for row in rows]):.0%}"


def summary(rows: list[Row]) -> str:
    """The cells of a line of the table."""
    ratios = [row.evaluations for row in rows if 0 < row.evaluations < np.inf]
    ratio = np.exp(np.mean(np.log(ratios)))
    worst = max(row.error for row in rows)
    return (
        f"{ratio:.2f} | {max(ratios):.1f} | {worst:.1f} | {np.median([r.honesty for r in rows]):.2g} | "
        f"{within(rows, 3)} | {within(rows, 10)}"
    )


def main() -> None:
    """Measure both halves, print and store the table."""
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--members", action="store_true", help="with ensembles of 16 members, orders 3 and 5 too"
    )
    members = parser.parse_args().members
    lines = [
        "| problems | solver | tolerance | evaluations, geometric mean | worst | largest error / tolerance | "
        "error / std, median | within 3 | within 10 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    detail = [
        "| problem | tolerance | error / tolerance | evaluations | error / std |",
        "|---|---|---|---|---|",
    ]
    settings: dict[str, dict] = {"default": {}}
    if members:
        ensemble = {"uncertainty": mp.Transported(16)}
        settings |= {
            f"16 members, EK0({o or 'default'})": {"solver": mp.EK0(o), **ensemble} for o in (3, 5, None)
        }
    for half, names in (("tuned", classics.TUNED), ("unseen", classics.UNSEEN)):
        peers = {name: curves(name) for name in names}
        for setting, options in settings.items():
            rows: dict[float, list[Row]] = {}
            for name in names:
                jax.clear_caches()  # programs take memory maps, of which a process may have so many
                for tolerance in TOLERANCES:
                    row = measure(name, tolerance, peers[name], **options)
                    rows.setdefault(tolerance, []).append(row)
                    if setting == "default":
                        numbers = f"{row.error:.2g} | {row.evaluations:.2f} | {row.honesty:.2g}"
                        detail.append(f"| {name} | {tolerance:g} | {numbers} |")
            for tolerance, some in rows.items():
                lines.append(f"| {half} | {setting} | {tolerance:g} | {summary(some)} |")
            lines.append(
                f"| {half} | {setting} | all | {summary([r for some in rows.values() for r in some])} |"
            )
            print("\n".join(lines[-4:]), flush=True)
    text = [
        "# Nonstiff classics, beside SciPy's RK45 and DOP853",
        "",
        f"By `python benchmarks/nonstiff.py{' --members' if members else ''}`.",
        "",
    ]
    RESULT.write_text("\n".join([*text, *lines, "", *detail, ""]))


if __name__ == "__main__":
    main()
