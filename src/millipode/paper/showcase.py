"""The paper's first figure: a PDE with 125 000 unknowns, and where its solution is uncertain.

FitzHugh–Nagumo on 250 × 250 cells up to T = 20 is solved by ``DiagonalEK1`` with one γ per unknown, as in the
paper, on cells of the authors' width 0.02; and by ``SpectralEK1``, there and on the unit square.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millipode as mp
from millipode.paper.experiment import Experiment, Point
from millipode.paper.high_dimensional import DIAGONAL, SPECTRAL, problem, solver
from millipode.paper.measuring import Claim, Row, at_least, at_most
from millipode.problems import Problem

TIMES = np.linspace(0.0, 20.0, 5)
TOLERANCES = {DIAGONAL: 1e-5, SPECTRAL: 1e-3}


def points(quick: bool) -> list[Point]:
    """Both solvers in the authors' domain; unless ``quick``, also SpectralEK1 on the unit square."""
    spectral, diagonal = ({"solver": name, "domain": "widened", "n": 250} for name in (SPECTRAL, DIAGONAL))
    return [spectral, diagonal] if quick else [spectral, diagonal, spectral | {"domain": "refined"}]


def measure(point: Point, rows: Sequence[Row], folder: Path) -> Row:
    """Solve, store the fields of u, and correlate its standard deviation with its time derivatives."""
    name, domain, n = (point[key] for key in ("solver", "domain", "n"))
    given, tolerance = problem(domain, n), TOLERANCES[name]
    options = dict(solver=solver(name, given), rtol=tolerance, atol=1e-2 * tolerance, smooth=False)

    def run(t1: float) -> tuple[mp.Solution, float]:
        start = time.perf_counter()
        sol = mp.solve(given.f, given.y0, (0.0, t1), save=TIMES * t1 / 20, max_steps=10**8, **options)
        jax.block_until_ready((sol.mean, sol.std))
        return sol, time.perf_counter() - start

    run(1e-6)  # compiles
    sol, seconds = run(20.0)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / fields(point), t=sol.t, mean=np.asarray(sol.mean[:, 0]), std=np.asarray(sol.std[:, 0])
    )
    moving, bending = correlations(given, sol)
    return {
        **point,
        "d": 2 * n * n,
        "time [s]": seconds,
        "steps": int(sol.stats.steps),
        "rejected": int(sol.stats.rejected),
        "rtol": tolerance,
        "correlation of log std with log |∂²u/∂t²|": bending,
        "with log |∂u/∂t|": moving,
    }


def fields(point: Point) -> str:
    """The name of the file with the fields of a point."""
    return f"{point['solver'].split('(')[0]}-{point['domain']}-{point['n']}.npz"


def correlations(given: Problem, sol: mp.Solution) -> tuple[float, float]:
    """Correlations of log std of u with log |∂u/∂t| and log |∂²u/∂t²|, over all cells at the last time."""
    y = sol.mean[-1]
    speed, bend = jax.jvp(lambda y: given.f(0.0, y), (y,), (given.f(0.0, y),))
    tiny = jnp.finfo(y.dtype).tiny
    std, *others = (np.log(np.abs(np.asarray(x)) + tiny).ravel() for x in (sol.std[-1, 0], speed[0], bend[0]))
    moving, bending = (float(np.corrcoef(std, other)[0, 1]) for other in others)
    return moving, bending


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Whether the patterns in the uncertainty match those of the solution, and the time of SpectralEK1."""
    found = []
    for row in rows:
        where = f"{row['solver']}, {row['domain']}, {row['d']} unknowns:"
        if row["solver"] == DIAGONAL:
            what = f"{where} correlation of log std with log |∂²u/∂t²|, T = 20 (the paper: patterns match)"
            found.append(at_least(what, 0.8, row["correlation of log std with log |∂²u/∂t²|"]))
        else:
            found.append(at_most(f"{where} seconds", 60, row["time [s]"]))
    return found


def draw(rows: Sequence[Row], folder: Path) -> Any:
    """Means in the top row, standard deviations below; one pair of rows per solver in the authors' domain."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    shown = sorted((row for row in rows if row["domain"] == "widened"), key=lambda row: row["solver"])
    figure = Figure(figsize=(2.3 * len(TIMES) + 1, 2.25 * (1 + len(shown)) + 0.3), layout="constrained")
    axes = figure.subplots(1 + len(shown), len(TIMES))
    means = np.load(folder / fields(shown[0]))["mean"]
    reach = np.abs(means[1:]).max()
    for axis, t, mean in zip(axes[0], TIMES, means, strict=True):
        image = axis.imshow(mean, cmap="RdBu_r", vmin=-reach, vmax=reach)
        axis.set_title(f"t = {t:g}")
    figure.colorbar(image, ax=list(axes[0]), shrink=0.9)
    axes[0, 0].set_ylabel(f"mean of u\n{shown[0]['d']} unknowns")
    for line, row in zip(axes[1:], shown, strict=True):
        stds = np.load(folder / fields(row))["std"]
        # At t₀ the standard deviation is zero, which is drawn as the lowest colour.
        norm = LogNorm(1e-3 * stds.max(), stds.max(), clip=True)
        for axis, std in zip(line, stds, strict=True):
            image = axis.imshow(np.maximum(std, 1e-3 * stds.max()), cmap="magma", norm=norm)
        figure.colorbar(image, ax=list(line), shrink=0.9)
        line[0].set_ylabel(f"std, {row['solver']}\n{row['time [s]']:.1f} s")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure


SHOWCASE = Experiment(
    "showcase",
    "Where is the solution of a PDE uncertain?",
    "The paper (Fig. 1): 125 000 unknowns; the patterns in the uncertainties match those in the solution.",
    points,
    measure,
    claims,
    draw,
)
