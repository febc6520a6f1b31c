"""Is the uncertainty of the right size? Error against standard deviation, for every solver, with members and without.

Prints the tables of docs/uncertainty.md. Errors are against SciPy's DOP853 as tight as it goes, at ``TIMES``
times of the span. χ²/d is the mean of (error/std)²: 1 if standard deviations are right, 100 if they are
ten times too small. Coverage is the share of unknowns whose error is within the central 50, 90 and 99 % of their
Gaussian. The correlation is that of log |error| with log std.

Run: ``python benchmarks/calibration.py`` (all solvers), ``python benchmarks/calibration.py --recommended`` (the
solvers that we recommend, at several tolerances), ``python benchmarks/calibration.py --probdiffeq``.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.integrate import solve_ivp
from scipy.stats import norm

import millipode as mp

TIMES, MEMBERS = 20, 16
BANDS = (0.5, 0.9, 0.99)


class Case(NamedTuple):
    """A problem, and the solver that suits it."""

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
SOLVERS: dict[str, Callable[[mp.problems.Problem], mp.solvers.Solver]] = {
    "EK0(3)": lambda p: mp.EK0(3),
    "EK0(5)": lambda p: mp.EK0(5),
    "EK0(3), vector": lambda p: mp.EK0(3, diffusion=mp.DynamicDiffusion(vector=True)),
    "DiagonalEK1(3)": lambda p: mp.DiagonalEK1(3, jacobian_diagonal=p.jacobian_diagonal),
    "EK1(3)": lambda p: mp.EK1(3),
    "SpectralEK1(2)": lambda p: mp.SpectralEK1(2, linear=p.linear),
    "SpectralEK1(3)": lambda p: mp.SpectralEK1(3, linear=p.linear),
}


class Calibration(NamedTuple):
    """How errors compare with standard deviations: at the end, and at all times."""

    rmse: float
    std: float
    chi2_end: float
    chi2: float
    coverage: tuple[float, ...]
    correlation: float


@functools.cache
def reference(name: str) -> np.ndarray:
    """SciPy's DOP853 as tight as it goes."""
    case, t = CASES[name], times(name)
    problem = case.problem()
    f, shape = jax.jit(problem.f), problem.y0.shape
    flat = lambda t, y: np.asarray(f(t, y.reshape(shape))).ravel()  # noqa: E731
    start = problem.t_span[0]
    exact = solve_ivp(
        flat, (start, t[-1]), np.ravel(problem.y0), "DOP853", t, rtol=1e-12, atol=1e-12, max_step=np.inf
    )
    return exact.y.T.reshape(-1, *shape)


def times(name: str) -> np.ndarray:
    """Where errors are looked at."""
    case = CASES[name]
    t0, t1 = case.problem().t_span
    return np.linspace(t0, case.t1 or t1, TIMES + 1)[1:]


def compare(error: np.ndarray, std: np.ndarray) -> Calibration:
    """Of arrays with the time in front."""
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


def measure(name: str, solver: str, noise: str | None, rtol: float = 1e-5, **options: Any) -> Calibration:
    """One row; ``noise`` is None for the filter's own standard deviation."""
    problem, t = CASES[name].problem(), times(name)
    uncertainty = None if noise is None else mp.Transported(MEMBERS, noise=noise, **options)
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


HEADER = (
    "| problem | solver | std of | RMSE | std | χ²/d at the end | χ²/d | 50 % | 90 % | 99 % | correlation |"
)


def row(name: str, solver: str, kind: str, c: Calibration) -> str:
    """Of the table."""
    covered = " | ".join(f"{x:.0%}" for x in c.coverage)
    related = "–" if np.isnan(c.correlation) else f"{c.correlation:.2f}"
    return (
        f"| {name} | {solver} | {kind} | {c.rmse:.1e} | {c.std:.1e} | {c.chi2_end:.2g} | {c.chi2:.2g} | "
        f"{covered} | {related} |"
    )
