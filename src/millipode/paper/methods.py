"""One interface for our solvers and for SciPy's.

A method takes a problem and returns ``run(t1, tolerance)``, which solves it up to t1 at rtol = atol =
tolerance and compiles nothing after the first call.

- millipode: a plain ``mp.solve(..., save="end")``.
- SciPy: ``solve_ivp`` with a right-hand side in NumPy, and a Jacobian for implicit methods.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import millipode as mp
from millipode.problems import Problem

MAX_STEPS = 10**6


class Answer(NamedTuple):
    """The result of a run; None stands for what a method does not say.

    Attributes:
        y: the final value, with an axis of length one for the time in front.
        std: its standard deviation, likewise.
        steps: the number of accepted steps.
        evaluations: the number of evaluations of f.
    """

    y: Any
    std: Any = None
    steps: Any = None
    evaluations: Any = None


Run = Callable[[float, float], Answer]
Method = Callable[[Problem], Run]


def ours(kind: type, order: int, *, uncertainty: Any = None, **options: Any) -> Method:
    """A method that uses one of our solvers, as in the paper unless options say otherwise: one correction.

    The diagonal of a Jacobian comes from the problem.
    """

    def method(problem: Problem) -> Run:
        diagonal = {"jacobian_diagonal": problem.jacobian_diagonal} if kind is mp.DiagonalEK1 else {}
        solver = kind(order, **{"corrections": 1, **options}, **diagonal)

        def run(t1: float, tolerance: float) -> Answer:
            sol = mp.solve(
                problem.f,
                problem.y0,
                (problem.t_span[0], t1),
                solver=solver,
                rtol=tolerance,
                atol=tolerance,
                save="end",
                uncertainty=uncertainty,
                max_steps=MAX_STEPS,
            )
            return Answer(sol.mean, sol.std, sol.stats.steps, sol.stats.f_evals)

        return run

    return method


def from_scipy(name: str, f: Callable, jacobian: Callable) -> Method:
    """A method of ``solve_ivp``, with f and its Jacobian for NumPy arrays."""
    from scipy.integrate import solve_ivp

    def method(problem: Problem) -> Run:
        t0, y0 = problem.t_span[0], np.asarray(problem.y0)
        implicit = {"jac": jacobian} if name in ("Radau", "BDF", "LSODA") else {}

        def run(t1: float, tolerance: float) -> Answer:
            sol = solve_ivp(f, (t0, t1), y0, name, rtol=max(tolerance, 1e-13), atol=tolerance, **implicit)
            return Answer(sol.y[:, -1:].T, None, None, sol.nfev)

        return run

    return method


def jax_jacobian(problem: Problem) -> Callable:
    """∂f/∂y as a compiled function that returns NumPy arrays, for SciPy."""
    derivative = jax.jit(jax.jacfwd(problem.f, argnums=1))
    return lambda t, y: np.asarray(derivative(t, y))
