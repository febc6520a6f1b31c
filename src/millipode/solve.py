"""The front door: checks input, picks defaults, drives the compiled loop, builds the Solution."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PyTree

from millipode import checks
from millipode.compiling import outside_transformations
from millipode.control import Controller, FixedStep, PIController
from millipode.diffusion import DynamicDiffusion
from millipode.driver import (
    FIRST_STRIDE,
    at_once,
    by_recomputation,
    in_segments,
    in_two,
    is_small,
    split,
    trimmed,
)
from millipode.fields import Field, dtype
from millipode.fixedpoint import SmoothTimes
from millipode.linearise import DiagonalFirstOrder, VectorField
from millipode.loop import Outcome, Setup
from millipode.progress import Show
from millipode.saving import CountSteps, SaveEnd, SavePlan, SaveSteps, SaveTimes
from millipode.solution import Solution, SolveError, SolveInterrupted, Status
from millipode.solvers import EK0, Solver
from millipode.step import Filter
from millipode.transport import Transported

MAX_STEPS = 100_000
DEFAULT_SOLVER, DEFAULT_CONTROLLER, SAVE_END = EK0(), PIController(), SaveEnd()

# save="steps" collects steps in compiled segments with buffers of about this size.
SEGMENT_BYTES = 2**26
SEGMENT_STEPS = 512


def solve(
    f: Callable,
    y0: PyTree[ArrayLike],
    t_span: tuple[ArrayLike, ArrayLike],
    *,
    solver: Solver | None = None,
    args: PyTree = None,
    rtol: PyTree[ArrayLike] = 1e-3,
    atol: PyTree[ArrayLike] = 1e-6,
    save: Literal["steps", "end"] | ArrayLike = "steps",
    smooth: bool | Literal["recompute"] | None = None,
    uncertainty: Transported | None = None,
    dt0: ArrayLike | None = None,
    controller: Controller | None = None,
    max_steps: int = MAX_STEPS,
    throw: bool = True,
    progress: bool | Show = False,
) -> Solution:
    """Solve y' = f(t, y), y(t0) = y0, and return a Gaussian posterior over y.

    It works under ``jax.jit``, ``jax.vmap`` and both modes of differentiation; a status in the solution then
    takes the place of exceptions. A second call with the same f and shapes compiles nothing; f is
    recognised by identity, so define it once rather than as a new lambda per call.

    Args:
        f: ``f(t, y)``, or ``f(t, y, args)`` if ``args`` is given; returns something like y.
        y0: an array or a pytree of arrays, float32 or float64. Integers become floats.
        t_span: ``(t0, t1)``; t1 < t0 integrates backwards.
        solver: ``mp.EK0(...)`` (the default), ``mp.DiagonalEK1(...)``, ``mp.SpectralEK1(...)`` or
            ``mp.EK1(...)``.
        args: passed on to f; an array or a pytree. Arrays and floats are traced, all else is constant.
        rtol: relative tolerance, a scalar or like y.
        atol: absolute tolerance, a scalar or like y.
        save: ``"steps"``, ``"end"``, or times, monotone in the direction of integration. Times do not
            change the steps taken. Under ``jit``, ``"steps"`` fills arrays of length max_steps + 1
            in which everything after the last step repeats it.
        smooth: whether means and standard deviations are given all data (``True``, the default), or
            (``False``) only what came before. Dense output works with either, joint samples need ``True``.
            ``"recompute"`` is for ``save="steps"`` in little memory: it keeps only y at every step and √N
            states on the way, for the price of a second pass.
        uncertainty: ``mp.Transported(members=...)`` for standard deviations that know how the ODE amplifies
            errors, at the price of one JVP of f per member and step; the filter's own by default. It goes
            with ``smooth=False``, which is then the default.
        dt0: the first step; automatic by default.
        controller: ``mp.PIController(...)`` (the default) or ``mp.FixedStep(h)``.
        max_steps: the bound on attempted steps.
        throw: raise ``mp.SolveError`` if t1 is not reached. Without it, look at ``Solution.success``;
            the solution then holds what was reached.
        progress: show a bar; or call a function with every ``Progress`` made. Ctrl-C then raises
            ``mp.SolveInterrupted``, with the solution up to there.

    >>> import jax.numpy as jnp, millipode as mp
    >>> sol = mp.solve(lambda t, y: -y, jnp.ones(2), (0.0, 1.0), save="end")
    >>> sol.success, sol.mean.shape, bool(abs(sol.mean[-1, 0] - jnp.exp(-1)) < 1e-2)
    (True, (1, 2), True)
    """
    setup, y0, budget = prepare(
        f, y0, t_span, solver, args, rtol, atol, save, smooth, dt0, controller, max_steps, uncertainty
    )
    concrete = outside_transformations()
    dynamic = isinstance(setup.model.diffusion, DynamicDiffusion)
    if progress and not concrete:
        raise ValueError("progress=True needs concrete values; drop it under jit, vmap or grad.")
    if not concrete and isinstance(setup.plan, CountSteps):
        raise ValueError("smooth='recompute' needs concrete values; use smooth=True under jit, vmap or grad.")
    if not concrete:
        setup = _without_closures(setup, y0)
    arrays, static = split(setup)
    if isinstance(setup.plan, CountSteps):
        outcome = by_recomputation(static, arrays, y0, budget, progress)
    elif concrete and (progress or isinstance(setup.plan, SaveSteps)):
        outcome = in_segments(static, arrays, y0, budget, progress)
    elif concrete and is_small(y0, setup.structure):
        outcome = in_two(static, arrays, y0)
    else:
        outcome = at_once(static, arrays, y0)
    solution = _solution(outcome, setup.model)
    if concrete and solution.status is Status.MEMBERS_NON_FINITE:
        warnings.warn(solution.message, stacklevel=2)
        return solution
    if concrete and not solution.success:
        if isinstance(setup.plan, SaveTimes):
            solution = _solution(trimmed([outcome], dynamic), setup.model)
        if solution.status is Status.INTERRUPTED:
            raise SolveInterrupted(solution)
        if throw:
            raise SolveError(solution)
    return solution


def prepare(
    f: Callable,
    y0: PyTree,
    t_span: Any,
    solver: Solver | None = None,
    args: PyTree = None,
    rtol: Any = 1e-3,
    atol: Any = 1e-6,
    save: Any = "steps",
    smooth: Any = None,
    dt0: Any = None,
    controller: Controller | None = None,
    max_steps: int = MAX_STEPS,
    uncertainty: Transported | None = None,
) -> tuple[Setup, Field, int]:
    """Check all input; returns what the loop needs, y0, and the bytes that saving may use."""
    y0 = checks.initial_value(y0)
    kind = dtype(y0)
    t0, t1 = checks.time_span(t_span, kind)
    solver = DEFAULT_SOLVER if solver is None else solver
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be a solver such as mp.EK0(order=4), got {solver!r}.")
    controller = DEFAULT_CONTROLLER if controller is None else controller
    if not isinstance(controller, Controller):
        raise TypeError(f"controller must be mp.PIController or mp.FixedStep, got {controller!r}.")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int | np.integer) or max_steps < 1:
        raise ValueError(f"max_steps must be a positive integer, got {max_steps!r}.")
    # Floats are values, to be traced; integers, flags and the like may steer f, and stay what they are.
    args = jax.tree.map(lambda x: np.asarray(x, kind) if type(x) is float else x, args)
    rtol, atol = checks.tolerances(rtol, atol, y0)
    dt0 = checks.first_step(dt0, controller, kind)
    if isinstance(controller, FixedStep):
        controller = FixedStep(checks.positive_scalar(controller.h, "FixedStep: h", kind))
    linearisation = solver.linearisation(y0)
    solver.check_span(float(t1) - float(t0) if checks.is_concrete((t0, t1)) else None, kind)
    checks.memory_for_dense(y0, solver)
    smooth = checks.uncertainty(uncertainty, smooth, save, y0, solver)
    members = 0 if uncertainty is None else uncertainty.members
    plan, budget = _save_plan(save, smooth, y0, t0, t1, solver, controller, max_steps, members)
    field = VectorField(f, args, _sign(t0, t1, kind))
    prior = solver.prior.fitted(linearisation.rates, field.sign, y0)
    model = Filter(field, prior, linearisation, solver.diffusion, rtol, atol, solver.space(y0), uncertainty)
    setup = Setup(model, controller, plan, t0, t1, dt0, solver.structure, solver.initialise, int(max_steps))
    return setup, y0, budget


def _save_plan(
    save: Any,
    smooth: bool | str,
    y0: Field,
    t0: Any,
    t1: Any,
    solver: Solver,
    controller: Controller,
    max_steps: int,
    members: int,
) -> tuple[SavePlan, int]:
    checks.smoothing(smooth, save)
    if isinstance(save, str) and save == "end":
        return SAVE_END, 0
    if not (isinstance(save, str) and save == "steps"):
        times = checks.save_times(save, t0, t1)
        return (SmoothTimes(times) if smooth else SaveTimes(times)), 0
    span = abs(float(t1) - float(t0)) if checks.is_concrete((t0, t1)) else np.inf
    bounded = outside_transformations()
    budget = checks.memory_for_steps(y0, solver, smooth, controller, span, max_steps, bounded, members)
    if smooth == "recompute":
        return CountSteps(np.asarray(FIRST_STRIDE, np.int32)), budget
    fitting = SEGMENT_BYTES // checks.bytes_per_step(y0, solver, smooth, members)
    segment = int(np.clip(fitting, 8, SEGMENT_STEPS)) if bounded else max_steps
    return SaveSteps(min(max_steps, segment) + 1, bool(smooth)), budget


def _sign(t0: Any, t1: Any, kind: Any) -> Any:
    """+1 forwards in time, −1 backwards."""
    if checks.is_concrete((t0, t1)):
        return np.asarray(1 if t1 >= t0 else -1, kind)
    return jnp.where(t1 >= t0, 1, -1).astype(kind)


def _without_closures(setup: Setup, y0: Field) -> Setup:
    """Turn tracers that the user's functions close over into explicit inputs.

    The loop has its own derivative rules, which see inputs but not closures.
    """
    model, field = setup.model, setup.model.vector_field
    checks.vector_field(field.f, setup.t0, y0, field.args)
    inputs = (setup.t0, y0) if field.args is None else (setup.t0, y0, field.args)

    def explicit(function: Any) -> Any:
        # A function is a leaf; a module has its arrays in the open, and a stencil has none.
        if not callable(function) or jax.tree.leaves(function) != [function]:
            return function
        converted = eqx.filter_closure_convert(function, *inputs)
        return function if checks.is_concrete(converted) else converted

    linearisation = model.linearisation
    if isinstance(linearisation, DiagonalFirstOrder):
        linearisation = DiagonalFirstOrder(explicit(linearisation.diagonal))
    field = field._replace(f=explicit(field.f))
    return setup._replace(model=model._replace(vector_field=field, linearisation=linearisation))


def _solution(outcome: Outcome, model: Filter) -> Solution:
    return Solution(
        t=outcome.t,
        posterior=outcome.posterior,
        gamma=outcome.gamma,
        log_evidence=outcome.log_evidence,
        stats=outcome.stats,
        status_code=outcome.status,
        reached=outcome.reached,
        basis=model.linearisation.basis,
        space=model.space,
    )
