"""Solvers of other libraries with the interface of our own, each used as its documentation recommends.

The interface, our solvers and SciPy's are in ``millipode.paper.methods``.

- millipode inside ``jit``: ``mp.solve`` as a part of somebody's program.
- diffrax: ``diffeqsolve`` inside ``jit``, with its default step-size control (faster here than PI) and the
  forward-mode adjoint, which stores nothing for derivatives; only the final value is saved.
- probdiffeq: ``solve_adaptive_terminal_values`` inside ``jit``, with a filter, dynamic calibration,
  Taylor-mode initialisation, and its default error estimate and control.
"""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
from jax import Array
from probdiffeq import ivpsolve, probdiffeq

import millipode as mp
from millipode.paper.methods import MAX_STEPS, Answer, Method, Run
from millipode.parts import Solver
from millipode.problems import Problem

ISOTROPIC = probdiffeq.state_space_model_isotropic()
BLOCK_DIAGONAL = probdiffeq.state_space_model_blockdiag()
DENSE = probdiffeq.state_space_model_dense()


def inside_jit(solver: Solver, **options: Any) -> Method:
    """One of our solvers inside of a user's own ``jit``, where XLA has the options of that one."""

    def method(problem: Problem) -> Run:
        @jax.jit
        def solve(y0: Array, t1: Array, tolerance: Array) -> Answer:
            how = {"rtol": tolerance, "atol": tolerance, "save": "end", "max_steps": MAX_STEPS, **options}
            sol = mp.solve(problem.f, y0, (problem.t_span[0], t1), solver=solver, **how)
            return Answer(sol.mean, sol.std, sol.stats.steps, sol.stats.f_evals)

        return lambda t1, tolerance: solve(problem.y0, t1, tolerance)

    return method


def from_diffrax(kind: type) -> Method:
    """A Runge–Kutta method of diffrax."""

    def method(problem: Problem) -> Run:
        term = diffrax.ODETerm(lambda t, y, args: problem.f(t, y))

        @jax.jit
        def solve(y0: Array, t1: Array, tolerance: Array) -> Answer:
            solution = diffrax.diffeqsolve(
                term,
                kind(),
                problem.t_span[0],
                t1,
                None,
                y0,
                stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
                saveat=diffrax.SaveAt(t1=True),
                adjoint=diffrax.ForwardMode(),
                max_steps=MAX_STEPS,
            )
            return Answer(solution.ys, None, solution.stats["num_accepted_steps"])

        return lambda t1, tolerance: solve(problem.y0, t1, tolerance)

    return method


def from_probdiffeq(model: Any, order: int, first_order: bool = False) -> Method:
    """A filter of probdiffeq: TS0 is our EK0, TS1 our EK1, in the structure of the model."""

    def method(problem: Problem) -> Run:
        t0 = problem.t_span[0]
        solver, error, initialise = probdiffeq_parts(problem, model, order, first_order)
        solve_ode = ivpsolve.solve_adaptive_terminal_values(solver=solver, error=error)

        @jax.jit
        def solve(y0: Array, t1: Array, tolerance: Array) -> Answer:
            solution = solve_ode(initialise(y0), t0=t0, t1=t1, atol=tolerance, rtol=tolerance)
            return Answer(solution.u.mean[0][None], solution.u.std[0][None], solution.num_steps)

        return lambda t1, tolerance: solve(problem.y0, t1, tolerance)

    return method


def probdiffeq_parts(
    problem: Problem, model: Any, order: int, first_order: bool
) -> tuple[Any, Any, Callable[[Array], Any]]:
    """The solver, its error estimate, and the prior as a function of y0."""
    ode = probdiffeq.ode(lambda y, /, *, t: problem.f(t, y))
    constraint = (model.constraint_ode_ts1 if first_order else model.constraint_ode_ts0)(ode)
    solver = probdiffeq.solver_dynamic(strategy=probdiffeq.strategy_filter(), constraint=constraint)

    def initialise(y0: Array) -> Any:
        expand = probdiffeq.jetexpand_ode_padded_scan(num=order)
        series, _ = expand(ode, [y0], t=problem.t_span[0])
        return model.prior_wiener_integrated(series)

    return solver, probdiffeq.error_residual_std(constraint=constraint), initialise


def evaluations(method: Method, problem: Problem) -> Callable[[float, float], int]:
    """A function that returns how often a compiled method evaluates f, counted by a callback in f."""
    count = 0

    def bump() -> None:
        nonlocal count
        count += 1

    def counted(t: Array, y: Array) -> Array:
        jax.debug.callback(bump)
        return problem.f(t, y)

    run = method(problem._replace(f=counted))

    def evaluate(t1: float, tolerance: float) -> int:
        nonlocal count
        jax.effects_barrier()
        count = 0
        jax.block_until_ready(run(t1, tolerance).y)
        jax.effects_barrier()
        return count

    return evaluate
