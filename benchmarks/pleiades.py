"""How long does a probabilistic solution of Pleiades take, next to a classical one?

EK0(order=5) at rtol = atol = 1e-7 against diffrax's Tsit5 at the same root-mean-square error of the final
state, both compiled and warm, alternating in one process. Tsit5 is run over a range of tolerances; its time
at our error is read off by interpolation. Run: ``python benchmarks/pleiades.py`` (needs the ``bench`` extra).
"""

import diffrax
import jax
import numpy as np
from harness import medians
from scipy.integrate import solve_ivp

import millipode as mp

REPEATS = 41


def main() -> None:
    """Measure and print."""
    jax.config.update("jax_enable_x64", True)
    problem = mp.problems.pleiades()
    f, y0 = jax.jit(problem.f), problem.y0
    reference = solve_ivp(
        lambda t, y: np.asarray(f(t, y)), problem.t_span, y0, method="DOP853", rtol=1e-13, atol=1e-13
    ).y[:, -1]

    def error(y: jax.Array) -> float:
        return float(np.sqrt(np.mean((np.asarray(y) - reference) ** 2)))

    solver = mp.EK0(order=5)
    options = dict(solver=solver, rtol=1e-7, atol=1e-7, save="end")

    def call() -> jax.Array:
        return mp.solve(problem.f, y0, problem.t_span, **options).mean

    compiled = jax.jit(lambda y: mp.solve(problem.f, y, problem.t_span, **options).mean[-1])
    term = diffrax.ODETerm(lambda t, y, args: problem.f(t, y))

    @jax.jit
    def tsit5(y: jax.Array, tolerance: float) -> jax.Array:
        solution = diffrax.diffeqsolve(
            term,
            diffrax.Tsit5(),
            *problem.t_span,
            None,
            y,
            stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
            saveat=diffrax.SaveAt(t1=True),
            max_steps=100_000,
        )
        return solution.ys[-1]

    tolerances = np.logspace(-9, -6, 7)
    peers = [lambda tolerance=tolerance: tsit5(y0, tolerance) for tolerance in tolerances]
    runs = [call, lambda: compiled(y0), *peers]
    errors = [error(run()) for run in runs]
    seconds = medians(runs, REPEATS)

    # Errors scatter around a power law of the time: fit it, rather than join the dots.
    slope, offset = np.polyfit(np.log(errors[2:]), np.log(seconds[2:]), 1)
    equal = float(np.exp(offset + slope * np.log(errors[0])))
    ours = f"mp.solve {1e3 * seconds[0]:.2f} ms, jitted {1e3 * seconds[1]:.2f} ms"
    print(f"EK0(5)            RMSE {errors[0]:.1e}   {ours}")
    for tolerance, e, s in zip(tolerances, errors[2:], seconds[2:], strict=True):
        print(f"Tsit5 {tolerance:.0e}       RMSE {e:.1e}   {1e3 * s:.2f} ms")
    print(f"Tsit5 at our RMSE                 {1e3 * equal:.2f} ms")
    print(f"ratio             {seconds[0] / equal:.2f} as called, {seconds[1] / equal:.2f} jitted")


if __name__ == "__main__":
    main()
