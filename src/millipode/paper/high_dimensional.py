"""The paper's fourth figure: what does a full solve cost in high dimensions?

FitzHugh–Nagumo up to T = 20, adaptive and calibrated. ``widened``: cells of width 0.02, on ever larger
squares, as the authors ran it. ``refined``: ever smaller cells on the unit square, as their caption says. A
solve that exceeds a budget of time is stopped, and its total time is extrapolated from the pace of its second
half; rows and pictures mark such times as extrapolated.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import millipode as mp
from millipode.paper.experiment import Experiment, Point
from millipode.paper.measuring import Claim, Row, at_least, at_most
from millipode.problems import Problem
from millipode.problems.fitzhugh_nagumo import FitzHughNagumo

RTOL, ATOL, END = 1e-3, 1e-5, 20.0
WIDTH = 0.02  # the width of the authors' cells
# Stability limits the steps of explicit filters, and more so at higher orders.
EK0, DIAGONAL, SPECTRAL, DOP853 = "EK0(1)", "DiagonalEK1(1)", "SpectralEK1(2)", "DOP853 (SciPy)"
VECTOR = mp.DynamicDiffusion(vector=True)
# The first steps are short; after this many, their size is limited by stability.
SETTLED, SETTLED_RUNGE_KUTTA = 200, 40


def solver(name: str, problem: Problem) -> Any:
    """The solver with a certain name."""
    if name == EK0:
        return mp.EK0(1, corrections=1)
    if name == DIAGONAL:
        return mp.DiagonalEK1(1, jacobian_diagonal=problem.jacobian_diagonal, diffusion=VECTOR, corrections=1)
    assert problem.linear is not None
    return mp.SpectralEK1(2, linear=problem.linear, corrections=1)


class Course(NamedTuple):
    """The course of a solve.

    Attributes:
        reached: the times t that were reached.
        seconds: the seconds that it took to reach each of them.
        steps: the number of steps.
        finished: whether the solve reached its end.
    """

    reached: list[float]
    seconds: list[float]
    steps: int
    finished: bool

    @property
    def total(self) -> float:
        """Seconds to the end: measured, or extrapolated from the pace of the second half."""
        if self.finished or len(self.reached) < 2:
            return self.seconds[-1] if self.finished else float("inf")
        middle = int(np.searchsorted(self.seconds, self.seconds[-1] / 2))
        middle = min(middle, len(self.seconds) - 2)
        pace = (self.reached[-1] - self.reached[middle]) / (self.seconds[-1] - self.seconds[middle])
        return self.seconds[-1] + (END - self.reached[-1]) / pace


class OutOfTime(Exception):
    """The budget of time is used up."""


def used_up(seconds: float, budget: float, settled: float) -> bool:
    """Whether to stop: the budget is used up and steps have settled (settled ≥ 1), or ten budgets are."""
    return seconds > budget and (settled >= 1 or seconds > 10 * budget)


def ours(name: str, problem: Problem, budget: float) -> Course:
    """The course of a warm solve with one of our solvers, standard deviations included."""
    options = dict(solver=solver(name, problem), rtol=RTOL, atol=ATOL, save="end", smooth=False)

    def run(t1: float, show: Callable[[mp.Progress], None]) -> mp.Solution:
        sol = mp.solve(problem.f, problem.y0, (0.0, t1), progress=show, max_steps=10**9, **options)
        jax.block_until_ready((sol.mean, sol.std))
        return sol

    run(1e-9, lambda now: None)  # compiles
    reached, seconds, steps = [0.0], [0.0], 0
    start = time.perf_counter()

    def note(now: mp.Progress) -> None:
        nonlocal steps
        reached.append(now.t)
        seconds.append(time.perf_counter() - start)
        steps = now.accepted
        if used_up(seconds[-1], budget, now.accepted / SETTLED):
            raise OutOfTime

    try:
        sol = run(END, note)
    except OutOfTime:
        return Course(reached, seconds, steps, finished=False)
    done = time.perf_counter() - start
    return Course([*reached, END], [*seconds, done], int(sol.stats.steps), finished=True)


def scipy(problem: Problem, budget: float, rtol: float = RTOL, atol: float = ATOL) -> tuple[Course, Any]:
    """The course of DOP853 with f in NumPy, and its final value; None if it was stopped."""
    from scipy.integrate import solve_ivp

    f = in_numpy(problem)
    reached, seconds, calls = [0.0], [0.0], 0
    start = time.perf_counter()

    def timed(t: float, y: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls % 12 == 0:  # a step
            reached.append(t)
            seconds.append(time.perf_counter() - start)
            if used_up(seconds[-1], budget, calls / 12 / SETTLED_RUNGE_KUTTA):
                raise OutOfTime
        return f(t, y)

    try:
        sol = solve_ivp(timed, (0.0, END), np.asarray(problem.y0).ravel(), "DOP853", rtol=rtol, atol=atol)
    except OutOfTime:
        return Course(reached, seconds, calls // 12, finished=False), None
    done = time.perf_counter() - start
    course = Course([*reached, END], [*seconds, done], sol.nfev // 12, finished=True)
    return course, sol.y[:, -1].reshape(problem.y0.shape)


def in_numpy(problem: Problem) -> Callable[[float, np.ndarray], np.ndarray]:
    """The f of FitzHugh–Nagumo in NumPy, with as few temporary arrays as possible."""
    assert isinstance(problem.f, FitzHughNagumo)
    p, (_, n, _) = problem.f, problem.y0.shape
    padded = np.empty((2, n + 2, n + 2))
    scale = np.array([p.a, p.b]).reshape(2, 1, 1) / p.grid.spacing[0] ** 2

    def f(t: float, y: np.ndarray) -> np.ndarray:
        y = y.reshape(2, n, n)
        u, v = y
        padded[:, 1:-1, 1:-1] = y
        padded[:, 0, 1:-1], padded[:, -1, 1:-1] = y[:, 0], y[:, -1]
        padded[:, 1:-1, 0], padded[:, 1:-1, -1] = y[:, :, 0], y[:, :, -1]
        out = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1]
        out += padded[:, 1:-1, :-2]
        out += padded[:, 1:-1, 2:]
        out -= 4 * y
        out *= scale
        out[0] += u - u * u * u - v + p.k
        out[1] += u - v
        out[1] /= p.tau
        return out.ravel()

    return f


def problem(domain: str, n: int) -> Problem:
    """FitzHugh–Nagumo on n × n cells of a domain, ``"widened"`` or ``"refined"``."""
    return mp.problems.fitzhugh_nagumo(n, length=WIDTH * n if domain == "widened" else 1.0)


def points(quick: bool) -> list[Point]:
    """All solvers and sizes, in both domains."""
    sizes = {
        "widened": [16, 50, 125] if quick else [50, 100, 250, 500, 1000, 2500],
        "refined": [16, 32, 64] if quick else [32, 64, 128, 256, 512, 1024, 2048],
    }
    budget = 1.5 if quick else 15.0
    return [
        {"domain": domain, "solver": name, "n": n, "budget": budget}
        for domain in sizes
        for name in (EK0, DIAGONAL, SPECTRAL, DOP853)
        for n in sizes[domain]
    ]


def measure(point: Point, rows: Sequence[Row], folder: Path) -> Row:
    """One solve within the budget; SpectralEK1, which is meant to finish, may take twenty times as long."""
    domain, name, n, budget = (point[key] for key in ("domain", "solver", "n", "budget"))
    given = problem(domain, n)
    if name == DOP853:
        course, _ = scipy(given, budget)
    else:
        course = ours(name, given, 20 * budget if name == SPECTRAL else budget)
    return {
        "domain": domain,
        "solver": name,
        "n": n,
        "d": 2 * n * n,
        "time [s]": course.total,
        "extrapolated": not course.finished,
        "measured [s]": course.seconds[-1],
        "reached": course.reached[-1],
        "steps": course.steps,
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Times of the filters beside that of DOP853, and beside the paper's hours for millions of unknowns."""
    found = []
    for domain in dict.fromkeys(r["domain"] for r in rows):
        mine = {(r["solver"], r["d"]): r for r in rows if r["domain"] == domain}
        largest = max(d for _, d in mine)
        best = min(mine[name, largest]["time [s]"] for name in (EK0, DIAGONAL, SPECTRAL))
        faster = mine[DOP853, largest]["time [s]"] / best
        found.append(at_least(f"{domain}, d = {largest}: times faster than DOP853, best filter", 1, faster))
        for name in (EK0, DIAGONAL, SPECTRAL):
            millions = [d for (solver, d) in mine if solver == name and d >= 10**6]
            if millions:
                row = mine[name, min(millions)]
                how = ", extrapolated" if row["extrapolated"] else ""
                what = f"{domain}, d = {row['d']}, {name}: hours{how} (the paper: about 3)"
                found.append(at_most(what, 3, row["time [s]"] / 3600))
    return found


def draw(rows: Sequence[Row], folder: Path) -> Any:
    """Time against d, one panel per domain; hollow markers are extrapolated."""
    from matplotlib.figure import Figure

    titles = {"widened": "cells of width 0.02, larger squares", "refined": "unit square, smaller cells"}
    domains = list(dict.fromkeys(r["domain"] for r in rows))
    figure = Figure(figsize=(5 * len(domains), 4.2), layout="constrained")
    axes = figure.subplots(1, len(domains), sharey=True, squeeze=False)[0]
    for axis, domain in zip(axes, domains, strict=True):
        for i, name in enumerate((EK0, DIAGONAL, SPECTRAL, DOP853)):
            mine = [r for r in rows if (r["domain"], r["solver"]) == (domain, name)]
            colour = "0.4" if name == DOP853 else f"C{i}"
            axis.loglog([r["d"] for r in mine], [r["time [s]"] for r in mine], "-", color=colour, lw=1)
            for hollow in (False, True):
                some = [r for r in mine if r["extrapolated"] is hollow]
                face = "white" if hollow else colour
                axis.loglog(
                    [r["d"] for r in some],
                    [r["time [s]"] for r in some],
                    "o",
                    color=colour,
                    markerfacecolor=face,
                    label=None if hollow else name,
                )
        axis.axhline(3600, color="k", lw=0.5, ls=":")
        axis.set(title=titles[domain], xlabel="number of unknowns d")
        axis.grid(alpha=0.3)
    axes[0].plot([], [], "o", color="k", markerfacecolor="white", label="extrapolated")
    axes[0].set_ylabel("time of a solve to T = 20 [s]; dotted: an hour")
    axes[0].legend(fontsize=8)
    return figure


HIGH_DIMENSIONAL = Experiment(
    "high-dimensional",
    "What does a full solve cost in high dimensions?",
    "The paper (Fig. 4): millions of dimensions take about three hours, calibration and adaptive "
    "steps included.",
    points,
    measure,
    claims,
    draw,
)
