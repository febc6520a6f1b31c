"""What does a stiff PDE cost on finer and finer grids?

The paper's showcase, FitzHugh–Nagumo on n × n cells up to T = 20 with ``SpectralEK1(2)``, rtol = 1e-3, atol =
1e-5: attempted steps, time of a warm solve, memory of its loop. On 64² cells beside SciPy's DOP853 at the
same tolerance, whose steps stability limits. Run: ``python benchmarks/grids.py [--quick]`` (needs the
``bench`` extra).
"""

import time
from typing import Any

import jax
import numpy as np
from growth import copies_of_y
from harness import Claim, Row, at_least, at_most, publish, quick
from matplotlib.figure import Figure
from scipy.integrate import solve_ivp

import millipode as mp
from millipode.problems import Problem

RTOL, ATOL = 1e-3, 1e-5
SPECTRAL, DOP853 = "SpectralEK1(2)", "DOP853 (SciPy)"


def spectral(problem: Problem, t1: float) -> mp.Solution:
    """One solve, finished, its standard deviation included."""
    solver = mp.SpectralEK1(2, linear=problem.linear)
    sol = mp.solve(
        problem.f, problem.y0, (0.0, t1), solver=solver, rtol=RTOL, atol=ATOL, save="end", smooth=False
    )
    jax.block_until_ready((sol.mean, sol.std))
    return sol


def timed(run: Any, repeats: int) -> tuple[float, Any]:
    """Median seconds of runs, and the last result."""
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
    """The spectral filter."""
    problem = mp.problems.fitzhugh_nagumo(n)
    spectral(problem, 1e-6)  # compiles
    seconds, sol = timed(lambda: spectral(problem, t1), 1 if n > 512 else 3)
    rmse = None if truth is None else float(np.sqrt(np.mean((np.asarray(sol.mean[-1]) - truth) ** 2)))
    memory = copies_of_y(problem, mp.SpectralEK1(2, linear=problem.linear))
    attempts = int(sol.stats.steps + sol.stats.rejected)
    return row(SPECTRAL, n, t1, seconds, attempts, rmse=rmse, memory=memory)


def explicit(n: int, rtol: float, atol: float) -> tuple[float, np.ndarray, int]:
    """Seconds, final value and evaluations of DOP853, with f in NumPy."""
    problem = mp.problems.fitzhugh_nagumo(n)
    f = in_numpy(problem, n)
    start = time.perf_counter()
    sol = solve_ivp(f, (0.0, 20.0), np.asarray(problem.y0).ravel(), "DOP853", rtol=rtol, atol=atol)
    return time.perf_counter() - start, sol.y[:, -1].reshape(2, n, n), sol.nfev


def in_numpy(problem: Problem, n: int) -> Any:
    """FitzHugh–Nagumo with as few temporary arrays as NumPy allows."""
    p, padded = problem.f, np.empty((2, n + 2, n + 2))
    scale = np.array([p.a, p.b]).reshape(2, 1, 1) * n**2

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

    assert np.allclose(f(0.0, np.asarray(problem.y0).ravel()), np.asarray(problem.f(0.0, problem.y0)).ravel())
    return f


def measure(sizes: list[int]) -> list[Row]:
    """One row per solver and grid."""
    rows = []

    def add(found: Row) -> None:
        rows.append(found)
        print(found, flush=True)

    add(ours(32, 1.0))
    _, truth, _ = explicit(64, 1e-9, 1e-9)
    seconds, y, evaluations = explicit(64, RTOL, ATOL)
    rmse = float(np.sqrt(np.mean((y - truth) ** 2)))
    add(row(DOP853, 64, 20.0, seconds, evaluations // 12, rmse=rmse))
    add(ours(64, truth=truth))
    for n in sizes:
        add(ours(n))
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """What the library promises of stiff PDEs."""

    def found(solver: str, grid: str, t1: float = 20.0) -> Row | None:
        matches = [r for r in rows if (r["solver"], r["grid"], r["T"]) == (solver, grid, t1)]
        return matches[0] if matches else None

    ours, theirs = found(SPECTRAL, "64²"), found(DOP853, "64²")
    assert ours is not None
    assert theirs is not None
    promises = [
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
    """Measure, print, publish."""
    short = quick()
    rows = measure([128] if short else [128, 256, 512, 708, 1024, 2048])
    publish("grids", "What does a stiff PDE cost?", rows, draw(rows), claims(rows), short)


if __name__ == "__main__":
    main()
