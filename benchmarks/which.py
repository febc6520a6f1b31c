"""Which solver for which problem?

Attempted steps and seconds of a warm solve (ν = 3, rtol = 1e-4, atol = 1e-6, final value only) of every
solver, on small and large problems, stiff and non-stiff ones. A solve that takes more than twenty thousand
attempts is stopped. The table of docs/pdes.md is from here. Run: ``python benchmarks/which.py [--quick]``.
"""

import time
from typing import Any

import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure

import millipode as mp
from millipode.paper.measuring import Row
from millipode.problems import Problem

LIMIT = 20_000
VECTOR = mp.DynamicDiffusion(vector=True)


def problems(short: bool) -> dict[str, Problem]:
    """The problems, by name."""
    n, d = (16, 10**3) if short else (32, 10**5)
    return {
        "Pleiades": mp.problems.pleiades(),
        "Van der Pol, μ = 1000": mp.problems.van_der_pol(1e3),
        f"Lorenz96, d = {d}": mp.problems.lorenz96(d)._replace(t_span=(0.0, 5.0)),
        f"FitzHugh–Nagumo, {n}²": mp.problems.fitzhugh_nagumo(n),
        f"Brusselator, {n}²": mp.problems.brusselator(n),
        "Kuramoto–Sivashinsky, d = 256": mp.problems.kuramoto_sivashinsky(256),
    }


def solvers(problem: Problem) -> dict[str, Any]:
    """The solvers that fit a problem, by name."""
    found: dict[str, Any] = {"EK0": mp.EK0(3)}
    if problem.jacobian_diagonal is not None:
        found["DiagonalEK1"] = mp.DiagonalEK1(
            3, diffusion=VECTOR, jacobian_diagonal=problem.jacobian_diagonal
        )
    if np.size(problem.y0) <= 100:
        found["EK1"] = mp.EK1(3)
    if problem.linear is not None:
        found["SpectralEK1"] = mp.SpectralEK1(3, linear=problem.linear)
    return found


def measure(name: str, problem: Problem) -> list[Row]:
    """One row per solver."""
    rows = []
    for label, solver in solvers(problem).items():
        options = dict(solver=solver, rtol=1e-4, atol=1e-6, save="end", max_steps=LIMIT, throw=False)

        def run(t1: float, options: dict = options) -> mp.Solution:
            sol = mp.solve(problem.f, problem.y0, (problem.t_span[0], t1), **options)
            np.asarray(sol.std)
            return sol

        run(1e-6 * problem.t_span[1])  # compiles
        start = time.perf_counter()
        sol = run(problem.t_span[1])
        seconds, attempts = time.perf_counter() - start, int(sol.stats.steps + sol.stats.rejected)
        row = {"problem": name, "solver": label, "attempts": attempts if sol.success else f"> {LIMIT}"}
        rows.append(row | {"seconds": seconds if sol.success else None})
        print(rows[-1], flush=True)
    return rows


def draw(rows: list[Row]) -> Figure:
    """The attempted steps as bars, one group per problem."""
    names, labels = (list(dict.fromkeys(row[key] for row in rows)) for key in ("problem", "solver"))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axis = figure.subplots()
    for i, label in enumerate(labels):
        mine = [row for row in rows if row["solver"] == label]
        heights = [row["attempts"] if isinstance(row["attempts"], int) else LIMIT for row in mine]
        places = [names.index(row["problem"]) + 0.2 * (i - 1.5) for row in mine]
        bars = axis.bar(places, heights, 0.18, label=label)
        for bar, row in zip(bars, mine, strict=True):
            bar.set_hatch(None if row["seconds"] is not None else "//")
    axis.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
    axis.set(yscale="log", ylabel="attempted steps", title="hatched: given up")
    axis.legend()
    return figure


def main() -> None:
    """Measure, print and publish."""
    short = quick()
    rows = [row for name, problem in problems(short).items() for row in measure(name, problem)]
    publish("which", "Which solver for which problem?", rows, draw(rows), [], short)


if __name__ == "__main__":
    main()
