"""What does a stiff PDE cost on finer and finer grids?

The paper's showcase, FitzHugh–Nagumo on n × n cells up to T = 20 with ``SpectralEK1(2)``, rtol = 1e-3, atol =
1e-5: attempted steps, time of a warm solve, memory of its loop. On 64² cells it is compared with SciPy's
DOP853 at the same tolerance, whose steps stability limits. On 32² cells and up to T = 1 it is compared with
probdiffeq's matrix-free TS1, the other filter that is made for stiff problems of this size, of the same order
and with ten ensembles; that solve is stopped after ``PATIENCE`` seconds. Run: ``python benchmarks/grids.py
[--quick]`` (needs the ``bench`` extra).
"""

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
from growth import copies_of_y
from harness import publish, quick
from matplotlib.figure import Figure
from methods import probdiffeq_parts
from probdiffeq import ivpsolve, probdiffeq

import millipode as mp
from millipode.paper.high_dimensional import ATOL, DOP853, RTOL, SPECTRAL, scipy
from millipode.paper.measuring import Claim, Row, at_least, at_most
from millipode.problems import Problem

TS1 = "TS1(2), matrix-free (probdiffeq)"
PATIENCE = 120.0  # seconds, compilation left out


def spectral(problem: Problem, t1: float) -> mp.Solution:
    """One finished solve with SpectralEK1, standard deviations included."""
    solver = mp.SpectralEK1(2, linear=problem.linear)
    sol = mp.solve(
        problem.f, problem.y0, (0.0, t1), solver=solver, rtol=RTOL, atol=ATOL, save="end", smooth=False
    )
    jax.block_until_ready((sol.mean, sol.std))
    return sol


def timed(run: Any, repeats: int) -> tuple[float, Any]:
    """The median seconds of the runs, and the last result."""
    seconds, answer = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        answer = run()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), answer


def row(name: str, n: int, t1: float, seconds: float, attempts: int | None, **more: Any) -> Row:
    """One line of the table."""
    given = {"solver": name, "grid": f"{n}²", "d": 2 * n * n, "T": t1, "time [s]": seconds}
    return given | {
        "attempts": attempts,
        "RMSE": more.get("rmse"),
        "memory [copies of y]": more.get("memory"),
    }


def ours(n: int, t1: float = 20.0, truth: np.ndarray | None = None) -> Row:
    """The row of SpectralEK1 on n × n cells."""
    problem = mp.problems.fitzhugh_nagumo(n)
    spectral(problem, 1e-6)  # compiles
    seconds, sol = timed(lambda: spectral(problem, t1), 1 if n > 512 else 3)
    rmse = None if truth is None else float(np.sqrt(np.mean((np.asarray(sol.mean[-1]) - truth) ** 2)))
    memory = copies_of_y(problem, mp.SpectralEK1(2, linear=problem.linear))
    attempts = int(sol.stats.steps + sol.stats.rejected)
    return row(SPECTRAL, n, t1, seconds, attempts, rmse=rmse, memory=memory)


def matrix_free(n: int, t1: float, patience: float) -> Row:
    """The row of probdiffeq, in a process of its own; if that is stopped, the time is a lower bound."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_matrix_free, args=(n, t1, there), daemon=True)
    process.start()
    there.close()  # so that the other end closes with its process, and a crash there is one here
    here.recv()  # compiled
    finished = here.poll(patience)
    seconds, steps = here.recv() if finished else (patience, None)
    process.kill()
    return row(TS1 if finished else f"{TS1}, given up", n, t1, seconds, steps)


def _matrix_free(n: int, t1: float, there: Connection) -> None:
    jax.config.update("jax_enable_x64", True)
    problem = mp.problems.fitzhugh_nagumo(n)
    model = probdiffeq.state_space_model_matfree(key=jax.random.key(1), num_ensembles=10)
    solver, error, initialise = probdiffeq_parts(problem, model, 2, True)
    adaptive = ivpsolve.solve_adaptive_terminal_values(solver=solver, error=error)

    def solve(y0: jax.Array) -> tuple[jax.Array, jax.Array]:
        solution = adaptive(initialise(y0), t0=0.0, t1=t1, atol=ATOL, rtol=RTOL)
        return solution.u.mean[0], solution.num_steps

    compiled = jax.jit(solve).lower(problem.y0).compile()
    there.send("compiled")
    start = time.perf_counter()
    _, steps = jax.block_until_ready(compiled(problem.y0))
    there.send((time.perf_counter() - start, int(steps)))


def measure(sizes: list[int], patience: float) -> list[Row]:
    """One row per solver and grid."""
    rows = []

    def add(found: Row) -> None:
        rows.append(found)
        print(found, flush=True)

    add(ours(32, 1.0))
    add(matrix_free(32, 1.0, patience))
    problem = mp.problems.fitzhugh_nagumo(64)
    _, truth = scipy(problem, np.inf, 1e-9, 1e-9)
    course, y = scipy(problem, np.inf)
    rmse = float(np.sqrt(np.mean((y - truth) ** 2)))
    add(row(DOP853, 64, 20.0, course.total, course.steps, rmse=rmse))
    add(ours(64, truth=truth))
    for n in sizes:
        add(ours(n))
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The promises about stiff PDEs."""

    def found(solver: str, grid: str, t1: float = 20.0) -> Row | None:
        matches = [r for r in rows if (r["solver"], r["grid"], r["T"]) == (solver, grid, t1)]
        return matches[0] if matches else None

    ours, theirs, small = found(SPECTRAL, "64²"), found(DOP853, "64²"), found(SPECTRAL, "32²", 1.0)
    assert ours is not None
    assert theirs is not None
    assert small is not None
    (other,) = (r for r in rows if r["solver"].startswith(TS1))
    what = "32², T = 1: times faster than probdiffeq's matrix-free TS1"
    if other["solver"] != TS1:
        what += f", given up after {other['time [s]']:.0f} s: at least"
    promises = [
        at_least(what, 100, other["time [s]"] / small["time [s]"]),
        at_most("64²: RMSE", 2e-3, ours["RMSE"]),
        at_least("64²: times faster than DOP853", 40, theirs["time [s]"] / ours["time [s]"]),
    ]
    if fine := found(SPECTRAL, "512²"):
        promises.append(at_most("attempts, 512² / 64²", 1.3, fine["attempts"] / ours["attempts"]))
    if million := found(SPECTRAL, "708²"):
        promises.append(at_most("708² (a million unknowns): seconds", 30, million["time [s]"]))
    if largest := found(SPECTRAL, "2048²"):
        promises.append(
            at_most("2048²: memory of the loop, copies of y", 30, largest["memory [copies of y]"])
        )
    return promises


def draw(rows: list[Row]) -> Figure:
    """Time and attempts against the number of unknowns."""
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    for axis, quantity in zip(figure.subplots(1, 2), ("time [s]", "attempts"), strict=True):
        for solver, style in ((SPECTRAL, "o-"), (DOP853, "s")):
            mine = [r for r in rows if r["solver"] == solver and r["T"] == 20.0]
            axis.loglog([r["d"] for r in mine], [r[quantity] for r in mine], style, label=solver)
        axis.set(xlabel="number of unknowns d", ylabel=quantity, title="FitzHugh–Nagumo, T = 20")
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def main() -> None:
    """Measure, print and publish."""
    short = quick()
    sizes = [128] if short else [128, 256, 512, 708, 1024, 2048]
    rows = measure(sizes, PATIENCE / 10 if short else PATIENCE)
    publish("grids", "What does a stiff PDE cost?", rows, draw(rows), claims(rows), short)


if __name__ == "__main__":
    main()
