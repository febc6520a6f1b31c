"""The front door: ``mp.solve``."""

import inspect
import warnings
from collections.abc import Callable
from typing import Literal

from jaxtyping import ArrayLike, PyTree

from millipode.filter.control import Controller
from millipode.filter.ensemble import Transported
from millipode.posterior.solution import Solution, SolveError, SolveInterrupted
from millipode.prepare import MAX_STEPS, Prepared, prepare
from millipode.run import programs
from millipode.run.outcome import Outcome
from millipode.run.packing import Packed
from millipode.run.progress import Show
from millipode.run.recompute import by_recomputation
from millipode.run.segments import in_segments, trimmed
from millipode.solvers import Solver
from millipode.status import Status
from millipode.xla.compiling import outside_transformations
from millipode.xla.constants import with_constants

# Steps of a solve that was successful, but so long that a hint at a better solver is worth a warning.
MANY = 2000
DOUBTFUL = (
    "sol.std is only a rough guess here, because the errors behind it have outgrown their linear model by a "
    "factor of more than 100. Chaotic solutions that have lost all their digits do that: shorten the span, "
    "or tighten rtol and atol, until this warning is gone. So do steps that stability limits: use a solver "
    "that knows more of the Jacobian. If neither matters to you, pass uncertainty='filter'."
)


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
    uncertainty: Transported | Literal["filter"] | None = None,
    dt0: ArrayLike | None = None,
    controller: Controller | None = None,
    max_steps: int = MAX_STEPS,
    throw: bool = True,
    progress: bool | Show = False,
) -> Solution:
    """Solve y' = f(t, y), y(t0) = y0, and return a Gaussian posterior over y.

    >>> import jax.numpy as jnp, millipode as mp
    >>> sol = mp.solve(lambda t, y: -y, jnp.ones(2), (0.0, 1.0))      # every step, and all times between
    >>> sol.success, sol(0.5).mean.shape, bool(abs(sol.mean[-1, 0] - jnp.exp(-1)) < 1e-2)
    (True, (2,), True)

    >>> def pendulum(t, y, length):                                   # parameters, and chosen times
    ...     return jnp.stack([y[1], -9.81 / length * jnp.sin(y[0])])
    >>> start, times = jnp.array([0.1, 0.0]), jnp.linspace(0.0, 2.0, 5)
    >>> sol = mp.solve(pendulum, start, (0.0, 2.0), args=1.5, save=times, rtol=1e-5)
    >>> sol.mean.shape, sol.std.shape
    ((5, 2), (5, 2))

    >>> problem = mp.problems.fitzhugh_nagumo(16)                     # a stiff PDE with 512 unknowns
    >>> solver = mp.SpectralEK1(order=2, linear=problem.linear)
    >>> mp.solve(problem.f, problem.y0, (0.0, 1.0), solver=solver, save="end").mean.shape
    (1, 2, 16, 16)

    It works under ``jax.jit``, ``jax.vmap`` and both modes of differentiation; a status in the solution then
    takes the place of exceptions. A second call with the same f and shapes compiles nothing; f is
    recognised by identity, so define it once rather than as a new lambda per call.

    Args:
        f: ``f(t, y)``, or ``f(t, y, args)`` if ``args`` is given; returns something like y.
        y0: an array or a pytree of arrays, float32 or float64. Integers become floats.
        t_span: ``(t0, t1)``; t1 < t0 integrates backwards.
        solver: ``mp.EK0(...)`` (the default), ``mp.DiagonalEK1(...)``, ``mp.SpectralEK1(...)`` or
            ``mp.EK1(...)``.
        args: passed on to f; an array or a pytree. Arrays and floats are traced, everything else is constant.
        rtol: relative tolerance, a scalar or like y.
        atol: absolute tolerance, a scalar or like y.
        save: ``"steps"``, ``"end"``, or times, monotone in the direction of integration. Times do not
            change the steps taken. Under ``jit``, ``"steps"`` fills arrays of length max_steps + 1
            in which everything after the last step repeats it.
        smooth: whether means and standard deviations are given all data (``True``, the default), or
            (``False``) only the data of earlier times. Dense output works with either, joint samples need
            ``True``. ``"recompute"`` is for ``save="steps"`` in little memory: it keeps only y at every step
            and √N states on the way, for the price of a second pass.
        uncertainty: what ``sol.std`` is. By default, the shape of the filter's (or smoother's) standard
            deviation, with the size of an error estimate that is carried along by the true Jacobian, for one
            JVP of f per correction. ``"filter"`` leaves it as the filter computes it, as do
            ``corrections=1`` and ``mp.EK1``. ``mp.Transported(members=...)`` carries an ensemble of errors,
            each for that price.
        dt0: the first step; automatic by default.
        controller: ``mp.PIController(...)`` (the default) or ``mp.FixedStep(h)``.
        max_steps: the bound on attempted steps.
        throw: raise ``mp.SolveError`` if t1 is not reached. Without it, look at ``Solution.success``;
            the solution then holds what was reached.
        progress: show a bar; or call a function with every ``Progress`` made. Ctrl-C then raises
            ``mp.SolveInterrupted``, with the solution up to there.
    """
    prepared = prepare(
        f,
        y0,
        t_span,
        solver=solver,
        args=args,
        rtol=rtol,
        atol=atol,
        save=save,
        smooth=smooth,
        uncertainty=uncertainty,
        dt0=dt0,
        controller=controller,
        max_steps=max_steps,
    )
    if not outside_transformations():
        return _traced(prepared, smooth, progress)
    outcome = _run(prepared, smooth, progress)
    solution = _solution(outcome, prepared)
    if solution.success:
        if bool(solution.stats.doubtful):
            warnings.warn(DOUBTFUL, stacklevel=2)
        slow = int(solution.stats.steps) > MANY or int(solution.stats.iterations) > 0
        if slow and solution.advice:
            warnings.warn(solution.advice, stacklevel=2)
        return solution
    if solution.status is Status.MEMBERS_NON_FINITE:
        warnings.warn(solution.message, stacklevel=2)
        return solution
    if prepared.setup.plan.trims:
        solution = _solution(trimmed([outcome], prepared.setup), prepared)
    if solution.status is Status.INTERRUPTED:
        raise SolveInterrupted(solution)
    if throw:
        raise SolveError(solution)
    return solution


# Types are in the documentation of the arguments; ``help(mp.solve)`` starts with names and defaults alone.
solve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [p.replace(annotation=p.empty) for p in inspect.signature(solve).parameters.values()]
)


def _run(prepared: Prepared, smooth: object, progress: bool | Show) -> Outcome:
    """The solve on the host: as one program, or in segments."""
    setup, y0, budget, _ = prepared
    packed = Packed(setup)
    if smooth == "recompute":
        return by_recomputation(packed, y0, budget, progress)
    if progress or setup.plan.in_segments:
        return in_segments(packed, y0, budget, progress)
    return programs.whole(packed, y0)


def _traced(prepared: Prepared, smooth: object, progress: bool | Show) -> Solution:
    """The solve under a transformation of JAX, always as one program."""
    if progress:
        raise ValueError("progress=True needs concrete values; drop it under jit, vmap or grad.")
    if smooth == "recompute":
        raise ValueError("smooth='recompute' needs concrete values; use smooth=True under jit, vmap or grad.")
    setup, y0, *_ = prepared
    setup.model.information.check(setup.t0, y0)
    information = setup.model.information.closed(setup.t0, y0)
    setup = setup._replace(model=setup.model._replace(information=information))
    return _solution(programs.at_once(Packed(setup), y0), prepared)


def _solution(outcome: Outcome, prepared: Prepared) -> Solution:
    model = prepared.setup.model
    return Solution(
        t=outcome.t,
        posterior=outcome.posterior,
        gamma=outcome.gamma,
        log_evidence=outcome.log_evidence,
        stats=outcome.stats,
        status_code=outcome.status,
        reached=outcome.reached,
        basis=with_constants(model.basis),
        space=model.space,
        remedy=prepared.remedy,
    )
