"""The front door: checks input, picks defaults, drives the compiled loop, builds the Solution."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from millipode import checks, loop
from millipode.control import Controller, FixedStep, PIController
from millipode.diffusion import DynamicDiffusion
from millipode.fields import Field, dtype
from millipode.linearise import DiagonalFirstOrder, VectorField
from millipode.loop import Carry, Outcome, Setup
from millipode.progress import ProgressBar
from millipode.saving import SaveEnd, SavePlan, SaveSteps, SaveTimes
from millipode.solution import RUNNING, Solution, SolveError, Status
from millipode.solvers import EK0, Solver
from millipode.step import Filter

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
    dt0: ArrayLike | None = None,
    controller: Controller | None = None,
    max_steps: int = MAX_STEPS,
    throw: bool = True,
    progress: bool = False,
) -> Solution:
    """Solve y' = f(t, y), y(t0) = y0, and return a Gaussian posterior over y.

    It works under ``jax.jit``, ``jax.vmap`` and both modes of differentiation; a status in the solution then
    takes the place of exceptions. A second call with the same f and shapes compiles nothing; f is
    recognised by identity, so define it once rather than as a new lambda per call.

    Args:
        f: ``f(t, y)``, or ``f(t, y, args)`` if ``args`` is given; returns something like y.
        y0: an array or a pytree of arrays, float32 or float64. Integers become floats.
        t_span: ``(t0, t1)``; t1 < t0 integrates backwards.
        solver: ``mp.EK0(...)`` (the default), ``mp.DiagonalEK1(...)`` or ``mp.EK1(...)``.
        args: passed on to f; an array or a pytree. Arrays and floats are traced, all else is constant.
        rtol: relative tolerance, a scalar or like y.
        atol: absolute tolerance, a scalar or like y.
        save: ``"steps"``, ``"end"``, or times, monotone in the direction of integration. Times do not
            change the steps taken. Under ``jit``, ``"steps"`` fills arrays of length max_steps + 1
            in which everything after the last step repeats it.
        dt0: the first step; automatic by default.
        controller: ``mp.PIController(...)`` (the default) or ``mp.FixedStep(h)``.
        max_steps: the bound on attempted steps.
        throw: raise ``mp.SolveError`` if t1 is not reached. Without it, look at ``Solution.success``;
            the solution then holds what was reached.
        progress: show a bar.

    >>> import jax.numpy as jnp, millipode as mp
    >>> sol = mp.solve(lambda t, y: -y, jnp.ones(2), (0.0, 1.0), save="end")
    >>> sol.success, sol.mean.shape, bool(abs(sol.mean[-1, 0] - jnp.exp(-1)) < 1e-2)
    (True, (1, 2), True)
    """
    setup, y0, budget = prepare(f, y0, t_span, solver, args, rtol, atol, save, dt0, controller, max_steps)
    concrete = _outside_transformations()
    if progress and not concrete:
        raise ValueError("progress=True needs concrete values; drop it under jit, vmap or grad.")
    if not concrete:
        setup = _without_closures(setup, y0)
    arrays, static = split(setup)
    if concrete and (progress or isinstance(setup.plan, SaveSteps)):
        outcome = _in_segments(static, arrays, y0, budget, progress)
    else:
        outcome = _at_once(static, arrays, y0)
    solution = _solution(outcome)
    if concrete and not solution.success:
        if isinstance(setup.plan, SaveTimes):
            dynamic = isinstance(setup.model.diffusion, DynamicDiffusion)
            solution = _solution(_trimmed([outcome], dynamic))
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
    dt0: Any = None,
    controller: Controller | None = None,
    max_steps: int = MAX_STEPS,
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
    checks.memory_for_dense(y0, solver)
    plan, budget = _save_plan(save, y0, t0, t1, solver, controller, max_steps)
    field = VectorField(f, args, _sign(t0, t1, kind))
    model = Filter(field, solver.prior, linearisation, solver.diffusion, rtol, atol)
    setup = Setup(model, controller, plan, t0, t1, dt0, solver.structure, solver.initialise, int(max_steps))
    return setup, y0, budget


def _save_plan(
    save: Any, y0: Field, t0: Any, t1: Any, solver: Solver, controller: Controller, max_steps: int
) -> tuple[SavePlan, int]:
    if isinstance(save, str) and save == "end":
        return SAVE_END, 0
    if not (isinstance(save, str) and save == "steps"):
        return SaveTimes(checks.save_times(save, t0, t1)), 0
    span = abs(float(t1) - float(t0)) if checks.is_concrete((t0, t1)) else np.inf
    bounded = _outside_transformations()
    budget = checks.memory_for_steps(y0, solver, controller, span, max_steps, bounded)
    fitting = SEGMENT_BYTES // checks.bytes_per_entry(y0, solver)
    segment = int(np.clip(fitting, 8, SEGMENT_STEPS)) if bounded else max_steps
    return SaveSteps(min(max_steps, segment) + 1), budget


def _sign(t0: Any, t1: Any, kind: Any) -> Any:
    """+1 forwards in time, −1 backwards."""
    if checks.is_concrete((t0, t1)):
        return np.asarray(1 if t1 >= t0 else -1, kind)
    return jnp.where(t1 >= t0, 1, -1).astype(kind)


def _outside_transformations() -> bool:
    """Whether no JAX transformation is under way, so that all values are concrete."""
    try:
        from jax._src.core import trace_state_clean
    except ImportError:  # private, and only there to save work
        return False
    return trace_state_clean()


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


def split(setup: Setup) -> tuple[list[Array], tuple]:
    """Arrays, which are traced, and everything else, which is hashed to find compiled code."""
    leaves, tree = jax.tree.flatten(setup)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]
    constants = tuple(None if a else leaf for leaf, a in zip(leaves, is_array, strict=True))
    static = (tree, constants, tuple(is_array))
    try:
        hash(static)
    except TypeError as error:
        raise TypeError(
            "f, jacobian_diagonal and all of args but its arrays must be hashable, so that compiled code "
            f"can be found again ({error}). Use a function, a frozen dataclass or an equinox.Module."
        ) from error
    return arrays, static


def _join(static: tuple, arrays: list[Array]) -> Setup:
    tree, constants, is_array = static
    moving = iter(arrays)
    merged = [next(moving) if a else c for c, a in zip(constants, is_array, strict=True)]
    return jax.tree.unflatten(tree, merged)


def _start(static: tuple, arrays: list[Array], y0: Field) -> Carry:
    setup = _join(static, arrays)
    field = setup.model.vector_field
    checks.vector_field(field.f, setup.t0, y0, field.args)
    checks.jacobian_diagonal(setup.model.linearisation, setup.t0, y0, field.args)
    return loop.begin(setup, y0)


def _run(static: tuple, arrays: list[Array], carry: Carry, limit: Array) -> Carry:
    return loop.advance(_join(static, arrays), carry, limit)


@partial(jax.jit, static_argnums=0)
def _at_once(static: tuple, arrays: list[Array], y0: Field) -> Outcome:
    """The whole solve as one program."""
    setup = _join(static, arrays)
    carry = _run(static, arrays, _start(static, arrays, y0), jnp.int32(setup.max_steps))
    return loop.finish(setup, carry)


_begin = jax.jit(_start, static_argnums=0)
_advance_in_place = jax.jit(_run, static_argnums=0, donate_argnums=2)


@partial(jax.jit, static_argnums=0)
def _empty_record(static: tuple, arrays: list[Array], carry: Carry) -> Any:
    setup = _join(static, arrays)
    return setup.plan.empty(setup.model, carry.state)


@partial(jax.jit, static_argnums=0)
def _finish(static: tuple, arrays: list[Array], carry: Carry) -> Outcome:
    return loop.finish(_join(static, arrays), carry)


def _in_segments(static: tuple, arrays: list[Array], y0: Field, budget: int, progress: bool) -> Outcome:
    """Advance in as many compiled segments as saving and the progress bar ask for."""
    setup = _join(static, arrays)
    keeps_steps = isinstance(setup.plan, SaveSteps)
    pace = Pace(setup) if progress else None
    full_records = []
    carry = _begin(static, arrays, y0)
    try:
        while True:
            limit = pace.limit(carry) if pace else setup.max_steps
            carry = _advance_in_place(static, arrays, carry, np.int32(limit))
            status, attempts = int(carry.status), int(carry.steps) + int(carry.rejected)
            if status != RUNNING or attempts >= setup.max_steps:
                break
            if keeps_steps and not setup.plan.has_room(carry.record):
                full_records.append(carry.record)
                if sum(x.nbytes for x in jax.tree.leaves(full_records)) > budget:
                    carry = carry._replace(status=jnp.asarray(Status.OUT_OF_MEMORY, jnp.int32))
                    break
                carry = carry._replace(record=_empty_record(static, arrays, carry))
        if pace:
            pace.limit(carry)
    finally:
        if pace:
            pace.close()
    outcome = _finish(static, arrays, carry)
    if not keeps_steps:
        return outcome
    past = [_finish(static, arrays, carry._replace(record=r)) for r in full_records]
    return _trimmed([*past, outcome], isinstance(setup.model.diffusion, DynamicDiffusion))


class Pace:
    """How many steps to take between two updates of the progress bar: about a fifth of a second."""

    def __init__(self, setup: Setup):
        self.bar = ProgressBar(float(setup.t0), float(setup.t1))
        self.max_steps, self.chunk, self.done = setup.max_steps, 8, 0
        self.clock = time.perf_counter()

    def limit(self, carry: Carry) -> int:
        """Draw the bar, and say up to how many attempts to go on."""
        accepted, rejected = int(carry.steps), int(carry.rejected)
        now = time.perf_counter()
        elapsed, attempts = now - self.clock, accepted + rejected
        rate = (attempts - self.done) / elapsed if elapsed > 0 else 0.0
        if attempts:
            self.bar.update(float(carry.state.t), float(carry.h), accepted, rejected, rate)
            self.chunk = max(1, min(4 * self.chunk, int(0.2 * rate)))
        self.clock, self.done = now, attempts
        return min(self.max_steps, attempts + self.chunk)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.bar.close()


def _trimmed(outcomes: list[Outcome], dynamic: bool) -> Outcome:
    """Valid entries only; each record but the first starts with the last entry of the one before.

    On the host, because the number of steps differs from solve to solve and nothing should compile.
    """
    final = outcomes[-1]
    spans = [slice(0 if i == 0 else 1, int(o.valid)) for i, o in enumerate(outcomes)]

    def join(*parts: Array) -> Array:
        return jnp.asarray(np.concatenate([np.asarray(p)[s] for p, s in zip(parts, spans, strict=True)]))

    return final._replace(
        t=join(*(o.t for o in outcomes)),
        mean=jax.tree.map(join, *(o.mean for o in outcomes)),
        std=jax.tree.map(join, *(o.std for o in outcomes)),
        diffusion=jax.tree.map(join, *(o.diffusion for o in outcomes)) if dynamic else final.diffusion,
    )


def _solution(outcome: Outcome) -> Solution:
    return Solution(
        t=outcome.t,
        mean=outcome.mean,
        std=outcome.std,
        diffusion=outcome.diffusion,
        log_evidence=outcome.log_evidence,
        stats=outcome.stats,
        status_code=outcome.status,
        reached=outcome.reached,
    )
