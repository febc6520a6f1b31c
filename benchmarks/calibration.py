"""Is the uncertainty of the right size? Error against standard deviation, with and without an ensemble.

The reference is SciPy's DOP853 at a tolerance of 1e-12, at ``TIMES`` times of the span. χ²/d is the mean of
(error/std)²: 1 if standard deviations are right, 100 if they are ten times too small. Coverage is the share
of unknowns whose error is within the central 50, 90 and 99 % of their Gaussian. The correlation is that of
log |error| with log std at the end.

Run: ``python benchmarks/calibration.py`` prints the table of docs/uncertainty.md (the solvers that we
recommend), and ``python benchmarks/calibration.py --all`` writes benchmarks/results/calibration.md (every
solver, every kind of standard deviation, several tolerances, and probdiffeq).
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.integrate import solve_ivp
from scipy.stats import norm

import millipode as mp
from millipode.solvers import Solver

TIMES, MEMBERS = 20, 16
BANDS = (0.5, 0.9, 0.99)


class Case(NamedTuple):
    """A problem, the solver that suits it, and the end of the time span if it is not the problem's own."""

    problem: Callable[[], mp.problems.Problem]
    recommended: str
    t1: float | None = None


CASES = {
    "Lotka–Volterra": Case(mp.problems.lotka_volterra, "EK0(3)"),
    "Pleiades": Case(mp.problems.pleiades, "EK0(3)"),
    "Lorenz96": Case(lambda: mp.problems.lorenz96(40), "EK0(3)", 2.0),
    "Van der Pol": Case(mp.problems.van_der_pol, "EK0(3)"),
    "FitzHugh–Nagumo, T = 1": Case(lambda: mp.problems.fitzhugh_nagumo(24), "SpectralEK1(2)", 1.0),
    "FitzHugh–Nagumo, T = 20": Case(lambda: mp.problems.fitzhugh_nagumo(24), "SpectralEK1(2)", 20.0),
    "Burgers": Case(lambda: mp.problems.burgers(128), "SpectralEK1(2)"),
    "Allen–Cahn": Case(lambda: mp.problems.allen_cahn(24), "SpectralEK1(2)"),
    "heat": Case(lambda: mp.problems.heat(32), "SpectralEK1(2)"),
    "Brusselator": Case(lambda: mp.problems.brusselator(24), "SpectralEK1(2)"),
}
SOLVERS: dict[str, Callable[[mp.problems.Problem], Solver]] = {
    "EK0(3)": lambda p: mp.EK0(3),
    "EK0(5)": lambda p: mp.EK0(5),
    "EK0(3), vector": lambda p: mp.EK0(3, diffusion=mp.DynamicDiffusion(vector=True)),
    "DiagonalEK1(3)": lambda p: mp.DiagonalEK1(3, jacobian_diagonal=p.jacobian_diagonal),
    "EK1(3)": lambda p: mp.EK1(3),
    "SpectralEK1(2)": lambda p: mp.SpectralEK1(2, linear=p.linear),
    "SpectralEK1(3)": lambda p: mp.SpectralEK1(3, linear=p.linear),
}


class Calibration(NamedTuple):
    """How errors compare with standard deviations; the docstring of this file explains the numbers."""

    rmse: float
    std: float
    chi2_end: float
    chi2: float
    coverage: tuple[float, ...]
    correlation: float


@functools.cache
def reference(name: str) -> np.ndarray:
    """The reference solution of a problem at all times, by SciPy's DOP853."""
    case, t = CASES[name], times(name)
    problem = case.problem()
    f, shape = jax.jit(problem.f), problem.y0.shape

    def flat(t: float, y: np.ndarray) -> np.ndarray:
        return np.asarray(f(t, y.reshape(shape))).ravel()

    span = (problem.t_span[0], t[-1])
    exact = solve_ivp(flat, span, np.ravel(problem.y0), "DOP853", t, rtol=1e-12, atol=1e-12)
    return exact.y.T.reshape(-1, *shape)


def times(name: str) -> np.ndarray:
    """The times at which errors are measured."""
    case = CASES[name]
    t0, t1 = case.problem().t_span
    return np.linspace(t0, case.t1 or t1, TIMES + 1)[1:]


def compare(error: np.ndarray, std: np.ndarray) -> Calibration:
    """The calibration, from errors and standard deviations with the time in front."""
    known = std > 0
    ratio = np.abs(error[known] / std[known])
    last = known[-1] & (error[-1] != 0)
    logs = np.log(np.abs(error[-1][last])), np.log(std[-1][last])
    spread = [np.std(x) for x in logs]
    return Calibration(
        float(np.sqrt(np.mean(error[-1] ** 2))),
        float(np.sqrt(np.mean(std[-1] ** 2))),
        float(np.mean((error[-1][known[-1]] / std[-1][known[-1]]) ** 2)),
        float(np.mean(ratio**2)),
        tuple(float(np.mean(ratio <= norm.ppf(0.5 + p / 2))) for p in BANDS),
        float(np.corrcoef(*logs)[0, 1]) if min(spread) > 1e-6 else float("nan"),
    )


def measure(name: str, solver: str, noise: Any, rtol: float = 1e-5, members: int = MEMBERS) -> Calibration:
    """The calibration of one solver on one problem; for ``noise=None``, without ensemble members."""
    problem, t = CASES[name].problem(), times(name)
    uncertainty = "filter" if noise is None else mp.Transported(members, noise=noise)
    sol = mp.solve(
        problem.f,
        problem.y0,
        (problem.t_span[0], t[-1]),
        solver=SOLVERS[solver](problem),
        rtol=rtol,
        atol=1e-2 * rtol,
        save=t,
        smooth=False,
        uncertainty=uncertainty,
    )
    return compare(np.asarray(sol.mean) - reference(name), np.asarray(sol.std))


COLUMNS = ("RMSE", "std", "χ²/d at the end", "χ²/d", "50 %", "90 %", "99 %", "correlation")
KINDS = {"the filter": None, "members": "defect", "members, white": "white"}


def cells(c: Calibration) -> list[str]:
    """The cells of one row of a table."""
    related = "–" if np.isnan(c.correlation) else f"{c.correlation:.2f}"
    sizes = [f"{x:.1e}" for x in (c.rmse, c.std)], [f"{x:.2g}" for x in (c.chi2_end, c.chi2)]
    return [*sizes[0], *sizes[1], *(f"{x:.0%}" for x in c.coverage), related]


def table(names: tuple[str, ...], rows: Iterator[tuple[tuple[str, ...], Calibration]]) -> str:
    """A Markdown table with one row per calibration."""
    head = [*names, *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join([*what, *cells(c)])} |" for what, c in rows]
    return "\n".join(lines)


def is_honest(c: Calibration) -> bool:
    """Whether errors at the end are within a factor of three, and 90 % bands cover at least 70 %."""
    return 0.1 <= c.chi2_end <= 10 and c.coverage[1] >= 0.7


def recommended(rtol: float = 1e-5) -> Iterator[tuple[tuple[str, ...], Calibration]]:
    """One row per problem, with its recommended solver."""
    for name, case in CASES.items():
        yield (name, case.recommended), measure(name, case.recommended, "defect", rtol)


def everything() -> Iterator[tuple[tuple[str, ...], Calibration]]:
    """One row per problem, solver and kind of standard deviation."""
    for name, case in CASES.items():
        is_grid = case.recommended.startswith("Spectral")
        for solver in (s for s in SOLVERS if s.startswith("Spectral") == is_grid):
            for kind, noise in KINDS.items():
                yield (name, solver, kind), measure(name, solver, noise)


def tolerances() -> Iterator[tuple[tuple[str, ...], Calibration]]:
    """The recommended solvers at other tolerances, and with fewer ensemble members."""
    for name, case in CASES.items():
        for rtol in (1e-3, 1e-4, 1e-6):
            yield (name, f"{rtol:.0e}", f"{MEMBERS}"), measure(name, case.recommended, "defect", rtol)
        yield (name, "1e-05", "8"), measure(name, case.recommended, "defect", members=8)


def others() -> Iterator[tuple[tuple[str, ...], Calibration]]:
    """The filters of probdiffeq, at the final time."""
    from methods import BLOCK_DIAGONAL, DENSE, ISOTROPIC, from_probdiffeq

    models = {
        "TS0(3), isotropic": (ISOTROPIC, False),
        "TS0(3), block-diagonal": (BLOCK_DIAGONAL, False),
        "TS1(3), dense": (DENSE, True),
    }
    for name in ("Lotka–Volterra", "Pleiades", "Lorenz96", "Van der Pol"):
        for kind, (model, first_order) in models.items():
            run = from_probdiffeq(model, 3, first_order)(CASES[name].problem())
            answer = run(times(name)[-1], 1e-5)
            error = np.asarray(answer.y) - reference(name)[-1:]
            yield (name, kind), compare(error, np.broadcast_to(np.asarray(answer.std), error.shape))


def main() -> None:
    """Print the table of the recommended solvers, or write all tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="every solver; takes some minutes")
    jax.config.update("jax_enable_x64", True)
    if not parser.parse_args().all:
        print(table(("problem", "solver"), recommended()))
        return
    text = f"""# Is the uncertainty of the right size?

By `python benchmarks/calibration.py --all`, which says what the columns mean. rtol = 1e-5 and atol = rtol/100
if nothing else is said; {MEMBERS} members.

## Every solver

{table(("problem", "solver", "std of"), everything())}

## The recommended solvers (those of docs/uncertainty.md) at other tolerances, and with fewer members

{table(("problem", "rtol", "members"), tolerances())}

## probdiffeq, at the final time (rtol = atol = 1e-5)

{table(("problem", "filter"), others())}
"""
    (Path(__file__).parent / "results" / "calibration.md").write_text(text)


if __name__ == "__main__":
    main()
