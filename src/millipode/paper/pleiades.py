"""The paper's third figure: how much time buys how much accuracy?

Root-mean-square error of the final value against the time of a warm solve of the Pleiades problem.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import millipode as mp
from millipode.paper.experiment import Experiment, Point
from millipode.paper.measuring import Claim, Row, at_least, at_most, medians
from millipode.paper.methods import Answer, Method, Run, from_scipy, jax_jacobian, ours
from millipode.problems import Problem

VECTOR = mp.DynamicDiffusion(vector=True)
TRADITIONAL = ("EK0(3), traditional", "EK1(3), traditional")
PATIENCE = 1.0  # seconds; tighter tolerances are not tried where a solve takes longer


class Task(NamedTuple):
    """A problem, with what SciPy needs to solve it.

    Attributes:
        problem: the problem.
        f: its f for NumPy arrays.
        jacobian: its Jacobian for NumPy arrays.
        stiff: whether it is too stiff for explicit methods.
    """

    problem: Problem
    f: Callable
    jacobian: Callable
    stiff: bool = False


def task() -> Task:
    """The Pleiades problem."""
    problem, masses, one = mp.problems.pleiades(), np.arange(1.0, 8.0), np.eye(7)

    def f(t: float, state: np.ndarray) -> np.ndarray:
        x, y, v, w = state.reshape(4, 7)
        dx, dy = x - x[:, None], y - y[:, None]
        square = dx * dx + dy * dy + one
        pull = masses / (square * np.sqrt(square))
        return np.concatenate([v, w, (pull * dx).sum(axis=1), (pull * dy).sum(axis=1)])

    return Task(problem, f, jax_jacobian(problem))


def reference(given: Task) -> np.ndarray:
    """The final value, by SciPy at a tolerance of 1e-13."""
    from scipy.integrate import solve_ivp

    how = {"method": "Radau", "jac": given.jacobian} if given.stiff else {"method": "DOP853"}
    y0 = np.asarray(given.problem.y0)
    return solve_ivp(given.f, given.problem.t_span, y0, rtol=1e-13, atol=1e-13, **how).y[:, -1]


def precision(run: Run, t1: float, tolerance: float, truth: np.ndarray) -> Row:
    """A row with the error, the time of a warm solve, evaluations of f and the calibration χ²/d."""
    answer: Answer = run(t1, tolerance)
    error = np.asarray(answer.y[0]) - truth
    again = partial(run, t1, tolerance)
    (seconds,) = medians([again], 1)
    if seconds < 0.2:
        (seconds,) = medians([again], 9)
    std = None if answer.std is None else np.asarray(answer.std[0])
    return {
        "tolerance": float(tolerance),
        "RMSE": float(np.sqrt(np.mean(error**2))),
        "time [ms]": 1e3 * seconds,
        "evaluations": None if answer.evaluations is None else int(answer.evaluations),
        "χ²/d": None if std is None else float(np.mean((error / std) ** 2)),
    }


def methods(given: Task) -> dict[str, Method]:
    """The filters, traditional ones included, and two methods of SciPy, by name."""
    scipy = partial(from_scipy, f=given.f, jacobian=given.jacobian)
    return {
        "EK0(3), Kronecker": ours(mp.EK0, 3),
        "EK0(5), Kronecker": ours(mp.EK0, 5),
        "EK0(3), diagonal": ours(mp.EK0, 3, diffusion=VECTOR),
        "EK1(3), diagonal": ours(mp.DiagonalEK1, 3, diffusion=VECTOR),
        TRADITIONAL[0]: ours(mp.EK0, 3, structure="dense"),
        TRADITIONAL[1]: ours(mp.EK1, 3),
        "RK45 (SciPy)": scipy("RK45"),
        "Radau (SciPy)": scipy("Radau"),
    }


def points(quick: bool) -> list[Point]:
    """Every method at every tolerance."""
    tolerances = [1e-4, 1e-7] if quick else [10.0**-k for k in range(3, 12)]
    return [{"method": name, "tolerance": tol} for name in methods(_task()) for tol in tolerances]


@cache
def _task() -> Task:
    return task()


@cache
def _truth() -> np.ndarray:
    return reference(_task())


@cache
def _run(name: str) -> Run:
    return methods(_task())[name](_task().problem)


def measure(point: Point, rows: Sequence[Row], folder: Path) -> Row:
    """One method at one tolerance; it is not tried if the tolerance before took too long."""
    name, tolerance = point["method"], point["tolerance"]
    before = [r for r in rows if r["method"] == name]
    if before and (before[-1]["time [ms]"] is None or before[-1]["time [ms]"] > 1e3 * PATIENCE):
        nothing = dict.fromkeys(("RMSE", "time [ms]", "evaluations", "χ²/d"))
        return {"method": name, "tolerance": tolerance, **nothing, "note": "not tried, too slow"}
    t1 = _task().problem.t_span[1]
    return {"method": name, **precision(_run(name), t1, tolerance, _truth())}


def time_for(rows: Sequence[Row], accuracy: float) -> float:
    """Milliseconds to an RMSE of at most ``accuracy``: of the fastest run, or interpolated between two."""
    points = [(row["RMSE"], row["time [ms]"]) for row in rows if row["RMSE"] is not None]
    times = [time for error, time in points if error <= accuracy]
    for (e, s), (f, t) in pairwise(points):
        if min(e, f) < accuracy < max(e, f):
            weight = np.log(accuracy / e) / np.log(f / e)
            times.append(float(s ** (1 - weight) * t**weight))
    return min(times, default=np.inf)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Ratios of the times to an RMSE of 1e-3, beside the paper's."""
    accuracy = 1e-3

    def best(*prefixes: str) -> float:
        names = {r["method"] for r in rows if r["method"].startswith(prefixes)}
        times = [time_for([r for r in rows if r["method"] == name], accuracy) for name in names]
        return min(times, default=np.nan)

    fast, what = best("EK0(3), Kronecker", "EK0(5), Kronecker"), f"Pleiades, RMSE {accuracy:g}:"
    slow = best(TRADITIONAL[0]) / fast
    found = [
        at_least(f"{what} traditional EK0 / Kronecker EK0, time (the paper: 100)", 20, slow),
        at_most(f"{what} Kronecker EK0 / Radau, time (the paper: 1)", 1, fast / best("Radau")),
        at_most(f"{what} Kronecker EK0 / RK45, time (the paper: 10)", 1, fast / best("RK45")),
    ]
    return [claim for claim in found if np.isfinite(claim.measured)]


def draw(rows: Sequence[Row], folder: Path) -> Any:
    """Time against error, and the paths of the stars beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
    for i, name in enumerate(dict.fromkeys(r["method"] for r in rows)):
        mine = [r for r in rows if r["method"] == name and r["RMSE"]]
        style = "s:" if "SciPy" in name else "^--" if "traditional" in name else "o-"
        colour = "k" if "RK45" in name else "0.5" if "Radau" in name else f"C{i}"
        left.loglog(
            [r["RMSE"] for r in mine],
            [r["time [ms]"] for r in mine],
            style,
            color=colour,
            markersize=4,
            label=name,
        )
    left.set(xlabel="RMSE of the final value", ylabel="time of a solve [ms]", title="Pleiades, 28 unknowns")
    left.invert_xaxis()
    left.grid(alpha=0.3)
    left.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    problem = mp.problems.pleiades()
    sol = mp.solve(
        problem.f, problem.y0, problem.t_span, solver=mp.EK0(5, corrections=1), rtol=1e-6, atol=1e-8
    )
    x, y = np.asarray(sol.mean[:, :7]), np.asarray(sol.mean[:, 7:14])
    for star in range(7):
        right.plot(x[:, star], y[:, star], lw=1)
        right.plot(x[-1, star], y[-1, star], "*", color=f"C{star}")
    right.set(title="t ∈ [0, 3]", aspect="equal", xticks=[], yticks=[])
    return figure


PLEIADES = Experiment(
    "pleiades",
    "How much time buys how much accuracy?",
    "The paper (Fig. 3): probabilistic solvers are as fast as Radau, 10 times slower than RK45, 100 times "
    "faster than traditional implementations.",
    points,
    measure,
    claims,
    draw,
)
