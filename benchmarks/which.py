"""Which solver for which problem, and does the automatic choice keep up with the better of its two parts?

Attempted steps, seconds of a warm solve and the error of the final value (rtol = 1e-4, atol = 1e-6, default
orders, final value only) of every solver that fits, on small and large problems, stiff and non-stiff ones. A
solve that takes more than ``LIMIT`` attempts is given up. The table of docs/pdes.md is from here.

Run: ``python benchmarks/which.py [--quick]``; five minutes.
"""

import time
from typing import Any

import classics
import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure

import millipode as mp
from millipode.paper.measuring import Claim, Row, at_most
from millipode.problems import Problem

LIMIT = 20_000
ALLOWED = 1.3  # time of the automatic choice over that of the better of its parts
# Explicit and implicit: the parts of the automatic choice.
PARTS, CHOICE = ("EK0", "EK1"), "Auto"


def problems(short: bool) -> dict[str, Problem]:
    """The problems, by name."""
    n, d = (16, 10**3) if short else (64, 10**5)
    known = {
        "Pleiades": mp.problems.pleiades(),
        "rigid body": _classic("B5 rigid body"),
        f"Lorenz96, d = {d}": mp.problems.lorenz96(d)._replace(t_span=(0.0, 5.0)),
        "Van der Pol, μ = 1000": mp.problems.van_der_pol(1e3),
        "HIRES": _classic("HIRES"),
        "Robertson to 1e5": _classic("Robertson to 1e5"),
        "POLLU": _classic("POLLU"),
        "Kuramoto–Sivashinsky, d = 256": mp.problems.kuramoto_sivashinsky(256),
        "reaction network, d = 200": mp.problems.reaction_network(200),
        "Brusselator line, d = 400": mp.problems.brusselator_line(200),
        f"Burgers, d = {8 * n}": mp.problems.burgers(8 * n),
        f"FitzHugh–Nagumo, {n}²": mp.problems.fitzhugh_nagumo(n),
        f"Brusselator, {n}²": mp.problems.brusselator(n),
        f"Schnakenberg, {n}²": mp.problems.schnakenberg(n),
        f"variable diffusion, {n}²": mp.problems.variable_diffusion(n),
        f"Robertson's cells, {n // 4}²": mp.problems.robertson_cells(n // 4),
    }
    return dict(list(known.items())[::3]) if short else known


def _classic(name: str) -> Problem:
    p = classics.problem(name)
    return Problem(p.f, p.y0, p.t_span)


def solvers(problem: Problem) -> dict[str, Any]:
    """The solvers that fit a problem, by name."""
    found: dict[str, Any] = {"EK0": mp.EK0(), "EK1": mp.EK1(), CHOICE: mp.Auto()}
    if problem.jacobian_diagonal is not None:
        found["DiagonalEK1"] = mp.DiagonalEK1(
            diffusion=mp.DynamicDiffusion(vector=True), jacobian_diagonal=problem.jacobian_diagonal
        )
    if problem.linear is not None:
        found["SpectralEK1"] = mp.SpectralEK1(linear=problem.linear)
        both = [problem.linear, mp.LocalBlocks()] if np.ndim(problem.y0) == 3 else problem.linear
        found["EK1, preconditioned"] = mp.EK1(linear_solver=mp.GMRES(both))
    return found


def measure(name: str, problem: Problem) -> list[Row]:
    """One row per solver."""
    exact, rows = _reference(problem), []
    for label, solver in solvers(problem).items():
        options = dict(solver=solver, rtol=1e-4, atol=1e-6, save="end", max_steps=LIMIT, throw=False)

        def run(t1: float, options: dict = options) -> mp.Solution:
            sol = mp.solve(problem.f, problem.y0, (problem.t_span[0], t1), **options)
            np.asarray(sol.std)
            return sol

        sol = run(problem.t_span[1])  # compiles, and finds out whether an automatic choice needs both parts
        seconds = []
        while sol.success and len(seconds) < 5 and sum(seconds) < 2:
            start = time.perf_counter()
            sol = run(problem.t_span[1])
            seconds.append(time.perf_counter() - start)
        attempts = int(sol.stats.steps + sol.stats.rejected)
        row: Row = {"problem": name, "solver": label}
        row |= {
            "attempts": attempts if sol.success else mp.Status(sol.status).name,
            "implicit": int(sol.stats.implicit),
            "seconds": float(np.median(seconds)) if seconds else None,
            "error": float(_distance(sol.mean[-1], exact)) if seconds else None,
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def _reference(problem: Problem) -> np.ndarray:
    """The final value to six digits or more."""
    if not problem.linear and np.size(problem.y0) > 1000:
        solver: Any = mp.EK0(8)
    elif np.size(problem.y0) <= 300:
        solver = mp.EK1(5)
    else:
        solver = mp.EK1(5, linear_solver=mp.GMRES(problem.linear, rtol=1e-4, vectors=60), mixture=True)
    options = dict(rtol=1e-9, atol=1e-11, save="end", uncertainty="filter", max_steps=10**6)
    return np.asarray(mp.solve(problem.f, problem.y0, problem.t_span, solver=solver, **options).mean[-1])


def _distance(y: Any, exact: np.ndarray) -> float:
    """The root-mean-square error in units of the tolerance."""
    return np.sqrt(np.mean(((np.asarray(y) - exact) / (1e-6 + 1e-4 * np.abs(exact))) ** 2))


def claims(rows: list[Row]) -> list[Claim]:
    """The automatic choice beside the better of its parts, on every problem."""
    found = []
    for name in dict.fromkeys(row["problem"] for row in rows):
        times = {row["solver"]: row["seconds"] for row in rows if row["problem"] == name}
        parts = [times[part] for part in PARTS if times[part] is not None]
        if parts and times[CHOICE] is not None:
            ratio = times[CHOICE] / min(parts)
            found.append(at_most(f"{name}: time of mp.Auto over the better of EK0 and EK1", ALLOWED, ratio))
    return found


def draw(rows: list[Row]) -> Figure:
    """The seconds as bars, one group per problem."""
    names, labels = (list(dict.fromkeys(row[key] for row in rows)) for key in ("problem", "solver"))
    figure = Figure(figsize=(13, 4), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        mine = [row for row in rows if row["solver"] == label and row["seconds"] is not None]
        places = [names.index(row["problem"]) + width * (i - (len(labels) - 1) / 2) for row in mine]
        axis.bar(places, [row["seconds"] for row in mine], 0.9 * width, label=label)
    axis.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=7, rotation=40)
    axis.set(yscale="log", ylabel="seconds", title=f"no bar: given up after {LIMIT} attempts")
    axis.legend(ncols=3, fontsize=8)
    return figure


def main() -> None:
    """Measure, print and publish."""
    short = quick()
    rows = [row for name, problem in problems(short).items() for row in measure(name, problem)]
    publish("which", "Which solver for which problem?", rows, draw(rows), claims(rows), short)


if __name__ == "__main__":
    main()
