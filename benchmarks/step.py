"""What does one step cost, from ten unknowns to sixteen million?

The paper's second figure. Lorenz96, adaptive steps with error estimate and control, marginal cost inside one
compiled loop: the difference between runs of 2n and of n attempts. Beside our solvers: probdiffeq's isotropic
TS0 and block-diagonal TS1 (their ``step`` in a loop, without error estimate or control), diffrax's Tsit5, and
what the memory traffic of a filter takes at the bandwidth of this machine, 3n + 6 passes over y, n = ν + 1.
Run: ``python benchmarks/step.py [--quick]`` (needs the ``bench`` extra).
"""

import argparse
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from harness import Row, bandwidth, per_step, publish
from matplotlib.figure import Figure
from probdiffeq import probdiffeq

import millipode as mp

DYNAMIC_VECTOR = mp.DynamicDiffusion(vector=True)
CONSTANT_VECTOR = mp.ConstantDiffusion(vector=True)
TOLERANCE = dict(rtol=1e-6, atol=1e-6)


def ours(problem: mp.problems.Problem, solver: Any) -> Callable[[int], Callable[[], Any]]:
    """A run of so many attempts."""

    def run(steps: int) -> Callable[[], Any]:
        options = dict(solver=solver, save="end", max_steps=steps, throw=False, **TOLERANCE)
        return lambda: mp.solve(problem.f, problem.y0, problem.t_span, **options).mean

    return run


def tsit5(problem: mp.problems.Problem) -> Callable[[int], Callable[[], Any]]:
    """Diffrax, in the mode that keeps nothing for derivatives."""
    term = diffrax.ODETerm(lambda t, y, args: problem.f(t, y))

    def run(steps: int) -> Callable[[], Any]:
        @jax.jit
        def solve(y: jax.Array) -> jax.Array:
            solution = diffrax.diffeqsolve(
                term,
                diffrax.Tsit5(),
                *problem.t_span,
                None,
                y,
                stepsize_controller=diffrax.PIDController(**TOLERANCE),
                adjoint=diffrax.ForwardMode(),
                max_steps=steps,
                throw=False,
            )
            return solution.ys

        return lambda: solve(problem.y0)

    return run


def peer(problem: mp.problems.Problem, order: int, model: Any, first_order: bool) -> Callable:
    """Probdiffeq, with dynamic calibration."""
    ode = probdiffeq.ode(lambda y, /, *, t: problem.f(t, y))

    def run(steps: int) -> Callable[[], Any]:
        @jax.jit
        def solve(y: jax.Array) -> Any:
            series, _ = probdiffeq.jetexpand_ode_padded_scan(num=order)(ode, [y], t=0.0)
            prior = model.prior_wiener_integrated(series)
            constraint = (model.constraint_ode_ts1 if first_order else model.constraint_ode_ts0)(ode)
            solver = probdiffeq.solver_dynamic(strategy=probdiffeq.strategy_filter(), constraint=constraint)
            state = solver.init(t=jnp.zeros(()), u=prior, damp=0.0)

            def body(_: int, state: Any) -> Any:
                return solver.step(state=state, dt=1e-3, damp=0.0)

            return jax.lax.fori_loop(0, steps, body, state).u.mean_flat

        return lambda: solve(problem.y0)

    return run


def cases(problem: mp.problems.Problem, order: int) -> dict[str, tuple[Callable, int, float]]:
    """Name → (run, the largest d, seconds per step and unknown to expect)."""
    diagonal = problem.jacobian_diagonal
    small, any_size = 2**8, 2**24
    isotropic = probdiffeq.state_space_model_isotropic()
    blocks = probdiffeq.state_space_model_blockdiag()
    return {
        "EK0": (ours(problem, mp.EK0(order)), any_size, 1e-8),
        "EK0, constant vector": (ours(problem, mp.EK0(order, diffusion=CONSTANT_VECTOR)), any_size, 1e-8),
        "DiagonalEK1, vector": (
            ours(problem, mp.DiagonalEK1(order, jacobian_diagonal=diagonal, diffusion=DYNAMIC_VECTOR)),
            2**21,
            3e-7,
        ),
        "EK0, dense": (ours(problem, mp.EK0(order, structure="dense")), small, 1e-4),
        "EK1": (ours(problem, mp.EK1(order)), small, 1e-4),
        "Tsit5 (diffrax)": (tsit5(problem), any_size, 3e-8),
        "TS0 isotropic (probdiffeq)": (peer(problem, order, isotropic, False), any_size, 1e-7),
        "TS1 block-diagonal (probdiffeq)": (peer(problem, order, blocks, True), 10**6, 4e-6),
    }


def measure(sizes: list[int], orders: list[int], repeats: int) -> tuple[list[Row], float]:
    """One row per order, size and solver, and the bandwidth."""
    rows, speed = [], bandwidth()
    for order in orders:
        for d in sizes:
            problem = mp.problems.lorenz96(d)
            bound = (3 * (order + 1) + 6) * 8 * d / speed
            for name, (run, largest, expected) in cases(problem, order).items():
                if d > largest or (name.startswith("Tsit5") and order != orders[0]):
                    continue
                steps = int(min(1000, max(4, 0.1 / (expected * d))))
                seconds = per_step(run, steps, repeats)
                rows.append(
                    {
                        "ν": order,
                        "d": d,
                        "solver": name,
                        "time per step [ms]": 1e3 * seconds,
                        "/ traffic bound": seconds / bound,
                    }
                )
                print(rows[-1], flush=True)
    return rows, speed


def draw(rows: list[Row], speed: float) -> Figure:
    """Time per step against d, one panel per order."""
    orders = sorted({row["ν"] for row in rows})
    figure = Figure(figsize=(4.2 * len(orders), 4), layout="constrained")
    axes = figure.subplots(1, len(orders), sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(row["solver"] for row in rows))
    for axis, order in zip(axes, orders, strict=True):
        for i, name in enumerate(names):
            points = [
                (row["d"], row["time per step [ms]"])
                for row in rows
                if row["solver"] == name and (row["ν"] == order or name.startswith("Tsit5"))
            ]
            style = "o-" if "(" not in name else "s--"
            axis.loglog(*zip(*points, strict=True), style, color=f"C{i}", markersize=4, label=name)
        d = sorted({row["d"] for row in rows})
        axis.loglog(d, [1e3 * (3 * order + 9) * 8 * x / speed for x in d], "k:", label="traffic bound")
        axis.set(title=f"ν = {order}", xlabel="d")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time per step [ms]")
    axes[-1].legend(fontsize=7)
    return figure


def main() -> None:
    """Measure, print, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one order, few sizes")
    quick = parser.parse_args().quick
    jax.config.update("jax_enable_x64", True)
    sizes = [10, 1000, 10**6] if quick else [10, 100, 10**3, 10**4, 10**5, 10**6, 2**22, 2**24]
    rows, speed = measure(sizes, [4] if quick else [2, 4, 6], 3 if quick else 5)
    publish("step", "One step", rows, draw(rows, speed), bandwidth=speed)


if __name__ == "__main__":
    main()
