"""What do the compiler options of ``millipode.compiling`` change?

Lorenz96, order 4, 50 fixed steps: seconds to compile, and microseconds per step, with XLA's defaults and with
our options. Run: ``python benchmarks/compiler.py``
"""

import time
from collections.abc import Callable
from functools import partial

import jax
from harness import medians, table

import millipode as mp
from millipode.compiling import OPTIONS

STEPS = 50


def final_mean(f: Callable, t_span: tuple, options: dict, y0: jax.Array) -> jax.Array:
    """The program to compile."""
    return mp.solve(f, y0, t_span, **options).mean


def main() -> None:
    """Measure and print."""
    jax.config.update("jax_enable_x64", True)
    rows = []
    for d in (100, 10**3, 10**4, 10**5, 10**6):
        problem = mp.problems.lorenz96(d)
        diagonal = dict(
            jacobian_diagonal=problem.jacobian_diagonal, diffusion=mp.DynamicDiffusion(vector=True)
        )
        for solver in (mp.EK0(4), mp.DiagonalEK1(4, **diagonal)):
            options = dict(solver=solver, controller=mp.FixedStep(1e-4), save="end")
            t_span = (0.0, 1e-4 * STEPS)
            program = jax.jit(partial(final_mean, problem.f, t_span, options))
            programs, compiling = [], []
            for chosen in ({}, OPTIONS):
                lowered = program.lower(problem.y0)
                start = time.perf_counter()
                programs.append(lowered.compile(compiler_options=chosen))
                compiling.append(time.perf_counter() - start)
            default, ours = medians([partial(p, problem.y0) for p in programs], 7)
            rows.append(
                {
                    "solver": type(solver).__name__,
                    "d": d,
                    "compile, default [s]": compiling[0],
                    "compile, ours [s]": compiling[1],
                    "step, default [µs]": 1e6 * default / STEPS,
                    "step, ours [µs]": 1e6 * ours / STEPS,
                }
            )
    print(table(rows))


if __name__ == "__main__":
    main()
