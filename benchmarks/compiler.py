"""What do the ways of compiling in ``millipode.xla.compiling`` change?

Lorenz96, fixed steps: seconds to compile the loop, and the marginal microseconds of a step in it. Run:
``python benchmarks/compiler.py [--quick]``
"""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure

import millipode as mp
from millipode.paper.measuring import Row, medians
from millipode.prepare import prepare
from millipode.problems import Problem
from millipode.run.packing import Packed
from millipode.run.programs import advance_in_place, begin, is_small
from millipode.xla.compiling import FOR_MEMORY, ONE_KERNEL, ONE_SMALL_KERNEL, QUICKLY, Way

WAYS = {
    "XLA's defaults": FOR_MEMORY,
    "older emitters": QUICKLY,
    "one kernel": ONE_KERNEL,
    "one kernel, less optimised": ONE_SMALL_KERNEL,
}


def loop(problem: Problem, solver: Any, way: Way) -> tuple[float, Any]:
    """The seconds to compile the loop, and a function that runs it for a number of steps."""
    options = dict(solver=solver, controller=mp.FixedStep(1e-5), save="end", max_steps=10**5)
    setup, y0, *_ = prepare(problem.f, problem.y0, (0.0, 1.0), **options)
    packed = Packed(setup)
    carry = begin(packed, y0)
    lowered = advance_in_place.outermost(way).lower(packed, carry, np.int32(1))
    start = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - start
    return seconds, lambda steps: program(packed, jax.tree.map(jnp.copy, carry), np.int32(steps))


def measure(sizes: list[int], repeats: int) -> list[Row]:
    """One row per solver, size and way."""
    rows = []
    for d in sizes:
        problem, steps = mp.problems.lorenz96(d), int(np.clip(2e6 / d, 20, 30_000))
        vector = dict(jacobian_diagonal=problem.jacobian_diagonal, diffusion=mp.DynamicDiffusion(vector=True))
        for solver in (mp.EK0(4), mp.DiagonalEK1(4, **vector)):
            small = is_small(problem.y0, solver.structure)
            ways = {name: way for name, way in WAYS.items() if small or not way.kernels}
            compiling, runs = zip(*(loop(problem, solver, way) for way in ways.values()), strict=True)
            short, long = (medians([partial(run, n * steps) for run in runs], repeats) for n in (1, 3))
            marginal = [(b - a) / (2 * steps) for a, b in zip(short, long, strict=True)]
            for name, compile_time, seconds in zip(ways, compiling, marginal, strict=True):
                rows.append(
                    {
                        "solver": type(solver).__name__,
                        "d": d,
                        "way": name,
                        "compile [s]": compile_time,
                        "step [µs]": 1e6 * seconds,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def draw(rows: list[Row]) -> Figure:
    """Time per step against d."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, solver in zip(axes, dict.fromkeys(row["solver"] for row in rows), strict=True):
        for way in WAYS:
            mine = [row for row in rows if row["solver"] == solver and row["way"] == way]
            axis.loglog([row["d"] for row in mine], [row["step [µs]"] for row in mine], "o-", label=way)
        axis.set(title=f"{solver}(4)", xlabel="number of unknowns d")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time per step [µs]")
    axes[0].legend(fontsize=7)
    return figure


def main() -> None:
    """Measure, print and publish."""
    short = quick()
    rows = measure([10] if short else [10, 100, 10**3, 10**4, 10**5], 5 if short else 7)
    publish("compiler", "What do the ways of compiling change?", rows, draw(rows), [], short)


if __name__ == "__main__":
    main()
