"""How do time and memory grow with the number of unknowns?

Lorenz96 with fixed steps, from 10⁴ to 2²⁴ unknowns. The time is the marginal cost of a step. The memory is
that of the compiled loop with its state and everything else that it needs (``memory_analysis``), in copies of
y. The slope is that of a straight line through the logarithms of d and time, from d = 10⁶ on. Run: ``python
benchmarks/growth.py [--quick]``.
"""

from typing import Any

import jax
import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure

import millipode as mp
from millipode.paper.measuring import Claim, Row, at_most, timings
from millipode.prepare import prepare
from millipode.problems import Problem
from millipode.run.packing import Packed
from millipode.run.programs import advance_in_place, begin

STEP = 1e-4


def copies_of_y(problem: Problem, solver: Any) -> float:
    """The peak memory of the adaptive loop in copies of y, with its donated state."""
    setup, y0, *_ = prepare(problem.f, problem.y0, problem.t_span, solver=solver, save="end")
    packed = Packed(setup)
    carry = jax.eval_shape(begin, packed, y0)
    used = advance_in_place.lower(packed, carry, np.int32(1)).compile().memory_analysis()
    arguments = used.argument_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    return (arguments + used.temp_size_in_bytes) / y0.nbytes


def per_step(problem: Problem, solver: Any, steps: int, repeats: int) -> float:
    """The marginal seconds of a step."""

    def run(n: int) -> Any:
        options = dict(solver=solver, controller=mp.FixedStep(STEP), save="end")
        return lambda: mp.solve(problem.f, problem.y0, (0.0, n * STEP), **options).mean

    short, long = timings([run(steps), run(3 * steps)], repeats)
    return float(np.median(long - short)) / (2 * steps)


def measure(sizes: list[int], repeats: int) -> list[Row]:
    """One row per size and solver."""
    rows = []
    for d in sizes:
        problem = mp.problems.lorenz96(d)
        vector = dict(jacobian_diagonal=problem.jacobian_diagonal, diffusion=mp.DynamicDiffusion(vector=True))
        for solver, largest in ((mp.EK0(3), 2**24), (mp.DiagonalEK1(3, **vector), 2**22)):
            if d > largest:
                continue
            steps = int(max(4, min(200, 2e6 / d)))
            memory = copies_of_y(problem, solver)
            rows.append(
                {
                    "solver": f"{type(solver).__name__}(3)",
                    "d": d,
                    "time per step [ms]": 1e3 * per_step(problem, solver, steps, repeats),
                    "memory [copies of y]": memory,
                    "memory [MB]": memory * problem.y0.nbytes / 1e6,
                }
            )
            print(rows[-1], flush=True)
    return rows


def slope(rows: list[Row], solver: str) -> float:
    """The slope of log time against log d, from a million unknowns on."""
    points = [(r["d"], r["time per step [ms]"]) for r in rows if r["solver"] == solver and r["d"] >= 10**6]
    return float(np.polyfit(*np.log(np.array(points).T), 1)[0])


def claims(rows: list[Row]) -> list[Claim]:
    """The promises about time and memory."""

    def memory(solver: str) -> float:
        return max(
            row["memory [copies of y]"] for row in rows if row["solver"] == solver and row["d"] >= 10**6
        )

    found = [
        at_most("EK0(3): memory of the adaptive loop, in copies of y", 8, memory("EK0(3)")),
        at_most("DiagonalEK1(3): memory of the adaptive loop, in copies of y", 32, memory("DiagonalEK1(3)")),
    ]
    if max(row["d"] for row in rows) == 2**24:
        s = slope(rows, "EK0(3)")
        found.append(
            Claim("EK0(3): slope of log time against log d, 10⁶ … 2²⁴", "0.9 … 1.1", s, 0.9 <= s <= 1.1)
        )
    return found


def draw(rows: list[Row]) -> Figure:
    """Time and memory against d."""
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for solver in dict.fromkeys(row["solver"] for row in rows):
        mine = [row for row in rows if row["solver"] == solver]
        for axis, quantity in zip(axes, ("time per step [ms]", "memory [MB]"), strict=True):
            axis.loglog([row["d"] for row in mine], [row[quantity] for row in mine], "o-", label=solver)
            axis.set(xlabel="number of unknowns d", ylabel=quantity)
            axis.grid(alpha=0.3)
    for axis in axes:
        line = axis.get_lines()[0]
        d, first = np.array(line.get_xdata()), line.get_ydata()[-1] / line.get_xdata()[-1]
        axis.loglog(d, first * d, "k:", label="∝ d")
        axis.legend()
    return figure


def main() -> None:
    """Measure, print and publish."""
    short = quick()
    sizes = [10**4, 10**6] if short else [10**4, 10**5, 10**6, 2**21, 2**22, 2**23, 2**24]
    rows = measure(sizes, 3 if short else 5)
    publish("growth", "How do time and memory grow?", rows, draw(rows), claims(rows), short)


if __name__ == "__main__":
    main()
