"""The paper's second figure: what does one step cost?

Lorenz96 with adaptive steps, error estimate and control, from a state on its attractor. The cost of a step is
the marginal cost inside one compiled program: the time between a long and a short solve, divided by the
difference of their accepted steps.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import millipode as mp
from millipode.paper.experiment import Experiment, Point
from millipode.paper.measuring import Claim, Row, at_least, at_most, timings
from millipode.paper.methods import Method, ours
from millipode.problems import Problem

TOLERANCE = 1e-4  # within reach of single precision
STEPS = 8  # the smallest number of steps in a measurement
VECTOR = mp.DynamicDiffusion(vector=True)
KRONECKER, DIAGONAL_EK0, DIAGONAL_EK1 = "EK0, Kronecker", "EK0, diagonal", "EK1, diagonal"
DENSE_EK0, DENSE_EK1 = "EK0, traditional", "EK1, traditional"
MILLIONS = 2**24


class Pair(NamedTuple):
    """A short and a long solve.

    Attributes:
        short: runs the short solve.
        long: runs the long solve.
        seconds: the seconds of both when they were tried.
        steps: the difference of their numbers of accepted steps.
    """

    short: Callable[[], Any]
    long: Callable[[], Any]
    seconds: tuple[float, float]
    steps: int


def pair(method: Method, problem: Problem, enough: float) -> Pair:
    """Two solves whose times differ by at least ``enough`` seconds, which is enough to be measured."""
    run = method(problem)

    def timed(t1: float) -> tuple[float, int]:
        start = time.perf_counter()
        answer = jax.block_until_ready(run(t1, TOLERANCE))
        return time.perf_counter() - start, int(answer.steps)

    timed(1e-3)  # compiles
    t1, (seconds, steps) = 0.05, timed(0.05)
    while True:
        longer, more = timed(2 * t1)
        if more - steps >= STEPS and (longer - seconds > enough or more > 3 * 10**5):
            short, long = (partial(run, t, TOLERANCE) for t in (t1, 2 * t1))
            return Pair(short, long, (seconds, longer), more - steps)
        t1, seconds, steps = 2 * t1, longer, more


def marginals(pairs: list[Pair], repeats: int, patience: float) -> list[float]:
    """Marginal seconds per step of each pair.

    Args:
        pairs: the pairs of solves.
        repeats: how often to run them, in turns; the result is the median.
        patience: solves that took longer than this many seconds are not run again.
    """
    fast = [p for p in pairs if p.seconds[1] < patience]
    times = iter(timings([run for p in fast for run in (p.short, p.long)], repeats))
    found = []
    for p in pairs:
        short, long = (next(times), next(times)) if p.seconds[1] < patience else p.seconds
        found.append(float(np.median(np.asarray(long) - np.asarray(short))) / p.steps)
    return found


def settled(d: int) -> Problem:
    """Lorenz96 from a state on its attractor; for large d, copies of a state of a few thousand unknowns."""
    tile = next(n for n in (4096, 1000, d) if d % n == 0)
    small = mp.problems.lorenz96(tile)
    noise = jax.random.normal(jax.random.key(0), (tile,), small.y0.dtype)
    y = mp.solve(small.f, small.y0 + noise, (0.0, 5.0), save="end", uncertainty="filter").mean[-1]
    return small._replace(y0=jnp.tile(y, d // tile))


def methods(order: int) -> dict[str, Method]:
    """The paper's five solvers, by name."""
    return {
        DENSE_EK0: ours(mp.EK0, order, structure="dense"),
        DENSE_EK1: ours(mp.EK1, order),
        DIAGONAL_EK0: ours(mp.EK0, order, diffusion=VECTOR),
        DIAGONAL_EK1: ours(mp.DiagonalEK1, order, diffusion=VECTOR),
        KRONECKER: ours(mp.EK0, order),
    }


def points(quick: bool) -> list[Point]:
    """Every order, solver and size; dense filters up to where they become infeasible."""
    sizes = {
        KRONECKER: [16, 1024, 2**16, 2**20]
        if quick
        else [4, 16, 64, 256, 1024, 2**13, 2**16, 2**18, 2**20, 2**22, MILLIONS],
        DIAGONAL_EK0: [16, 1024, 2**16] if quick else [4, 16, 64, 256, 1024, 2**13, 2**16, 2**18, 2**20],
        DENSE_EK0: [4, 16, 64] if quick else [4, 16, 64, 128, 256],
    }
    sizes |= {DIAGONAL_EK1: sizes[DIAGONAL_EK0], DENSE_EK1: sizes[DENSE_EK0]}
    return [
        {"ν": order, "solver": name, "d": d, "patience": 0.5 if quick else 20.0, "repeats": 3 if quick else 5}
        for order in ((4,) if quick else (2, 4, 6))
        for name in methods(order)
        for d in sizes[name]
    ]


def measure(point: Point, rows: Sequence[Row], folder: Path) -> Row:
    """One solver, order and size; it is not tried if it would take too long."""
    order, name, d = point["ν"], point["solver"], point["d"]
    row: Row = {"ν": order, "solver": name, "d": d}
    before = [r for r in rows if (r["ν"], r["solver"]) == (order, name)]
    if before and "traditional" in name:
        last = before[-1]
        # Cubic growth from the last size; sixteen steps, and a compilation that takes as long as a few more.
        expected = (last["time per step [ms]"] or np.inf) * (d / last["d"]) ** 3 / 1e3
        if 20 * expected > 4 * point["patience"]:
            return row | {"time per step [ms]": None, "note": "infeasible"}
    problem = settled(d)
    enough = min(0.3, point["patience"] / 3) if d < 10**6 else 1.0
    (seconds,) = marginals(
        [pair(methods(order)[name], problem, enough)], point["repeats"], point["patience"] / 2
    )
    return row | {"time per step [ms]": 1e3 * seconds}


def slope(rows: Sequence[Row], order: int, name: str, smallest: int) -> float:
    """The slope of log time against log d, from d = ``smallest`` on."""
    found = [
        (r["d"], r["time per step [ms]"])
        for r in rows
        if (r["ν"], r["solver"]) == (order, name) and r["d"] >= smallest and r["time per step [ms]"]
    ]
    return _slope(np.log(np.array(found))) if len(found) > 1 else float("nan")


def _slope(points: np.ndarray) -> float:
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The exponents of d, the ratio of two solvers and the time for millions, beside the paper's."""
    times = {(r["ν"], r["solver"], r["d"]): r["time per step [ms]"] for r in rows}
    found = []
    for order in sorted({r["ν"] for r in rows}):
        for name, least, promise, paper in (
            (KRONECKER, 2**13, partial(at_most, bound=1.2), 1),
            (DIAGONAL_EK0, 2**10, partial(at_most, bound=1.2), 1),
            (DIAGONAL_EK1, 2**10, partial(at_most, bound=1.2), 1),
            (DENSE_EK1, 64, partial(at_least, bound=2), 3),
        ):
            exponent = slope(rows, order, name, least)
            if np.isfinite(exponent):
                what = f"{name}, ν = {order}: exponent of d, from d = {least} (the paper: {paper})"
                found.append(promise(what, measured=exponent))
        common = [d for (nu, name, d) in times if (nu, name) == (order, DIAGONAL_EK1) and d >= 2**10]
        common = [d for d in common if times.get((order, KRONECKER, d))]
        if common:
            d = max(common)
            ratio = times[order, DIAGONAL_EK1, d] / times[order, KRONECKER, d]
            what = f"ν = {order}, d = {d}: time of diagonal EK1 / Kronecker EK0 (the paper: > 1)"
            found.append(at_least(what, 1, ratio))
    if times.get((4, KRONECKER, MILLIONS)):
        seconds = times[4, KRONECKER, MILLIONS] / 1e3
        found.append(at_most("EK0, Kronecker, ν = 4, 16.8 million: seconds (the paper: about 1)", 1, seconds))
    return found


def draw(rows: Sequence[Row], folder: Path) -> Any:
    """Time per step against d, one panel per order."""
    from matplotlib.figure import Figure

    orders = sorted({r["ν"] for r in rows})
    figure = Figure(figsize=(3.6 * len(orders) + 2.2, 3.8), layout="constrained")
    axes = figure.subplots(1, len(orders), sharey=True, squeeze=False)[0]
    styles = {
        DENSE_EK0: ("C0", "s:"),
        DENSE_EK1: ("C1", "s:"),
        DIAGONAL_EK0: ("C0", "^--"),
        DIAGONAL_EK1: ("C1", "^--"),
        KRONECKER: ("C2", "o-"),
    }
    for axis, order in zip(axes, orders, strict=True):
        for name, (colour, style) in styles.items():
            mine = [r for r in rows if (r["ν"], r["solver"]) == (order, name) and r["time per step [ms]"]]
            axis.loglog(
                [r["d"] for r in mine],
                [r["time per step [ms]"] for r in mine],
                style,
                color=colour,
                markersize=4,
                label=name,
            )
        axis.set(title=f"ν = {order}", xlabel="number of unknowns d")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time per step [ms]")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    return figure


STEP_COST = Experiment(
    "step-cost",
    "What does one step cost?",
    "The paper (Fig. 2): O(d³) for traditional filters, O(d) for the diagonal and Kronecker ones; one second "
    "for 16 million unknowns.",
    points,
    measure,
    claims,
    draw,
)
