"""From what the user passes to what the loop needs: checks, defaults, and the save plan."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from millipode import checks, memory
from millipode.filter.control import Controller, PIController
from millipode.filter.ensemble import Transported
from millipode.filter.state import Filter, Tolerances
from millipode.linalg.fields import Field, dtype
from millipode.model.information import FirstOrderODE
from millipode.model.vector_field import VectorField
from millipode.run.loop import Setup
from millipode.run.recompute import FIRST_STRIDE
from millipode.save.fixed_point import SmoothTimes
from millipode.save.plans import CountSteps, SaveEnd, SaveSteps, SaveTimes
from millipode.save.protocol import SavePlan
from millipode.solvers import EK0, Auto, Solver
from millipode.xla.compiling import outside_transformations
from millipode.xla.constants import with_constants
from millipode.xla.tracing import is_traced

MAX_STEPS = 100_000
DEFAULT_SOLVER, DEFAULT_CONTROLLER, SAVE_END = Auto(), PIController(), SaveEnd()
WITHOUT_CHOICE = EK0()
# At most so often f is evaluated in a step of a stiff phase.
IMPLICIT_CORRECTIONS = 4

# save="steps" collects steps in compiled segments with buffers of about this size.
SEGMENT_BYTES = 2**26
SEGMENT_STEPS = 512


class Prepared(NamedTuple):
    """A problem that has been checked.

    Attributes:
        setup: what the loop needs.
        y0: the initial value.
        budget: the bytes that saving may use.
        remedy: what to do if the problem turns out to be stiff, as a sentence.
    """

    setup: Setup
    y0: Field
    budget: int
    remedy: str


def prepare(
    f: Callable,
    y0: PyTree,
    t_span: Any,
    *,
    solver: Solver | None = None,
    args: PyTree = None,
    rtol: Any = 1e-3,
    atol: Any = 1e-6,
    save: Any = "steps",
    smooth: Any = None,
    uncertainty: Any = None,
    dt0: Any = None,
    controller: Controller | None = None,
    max_steps: int = MAX_STEPS,
) -> Prepared:
    """Check everything that can be checked without evaluating f; the arguments are those of ``mp.solve``."""
    y0 = checks.initial_value(y0)
    kind = dtype(y0)
    t0, t1 = checks.time_span(t_span, kind)
    controller = checks.controller(controller, DEFAULT_CONTROLLER, kind)
    # Steps of a given length are not chosen, and those of a second pass have to be the same.
    fixed = controller.knows_first_step or checks.asks_for(smooth, "recompute")
    solver = checks.solver(solver, WITHOUT_CHOICE if fixed else DEFAULT_SOLVER)
    max_steps = checks.max_steps(max_steps)
    tolerances = Tolerances(*checks.tolerances(rtol, atol, y0))
    dt0 = checks.first_step(dt0, controller, kind)
    order = checks.order(solver, tolerances, kind)
    linearisation = solver.linearisation(y0)
    solver.check_span(float(t1) - float(t0) if not is_traced(t0, t1) else None, kind)
    uncertainty = checks.uncertainty(uncertainty, solver, linearisation, smooth)
    smooth = True if smooth is None else smooth
    checks.smoothing(smooth, save, chooses=solver.when_stiff(y0) is not None)
    needs = memory.Needs.of(y0, solver, order, uncertainty)
    memory.check_working(needs, y0, solver, order)
    if isinstance(uncertainty, Transported):
        times = len(save) if np.ndim(save) == 1 else 0
        memory.check_members(needs, uncertainty, y0, order, times)
    # Floats are values, to be traced; integers, flags and the like may steer f, and stay what they are.
    args = jax.tree.map(lambda x: np.asarray(x, kind) if isinstance(x, float | np.floating) else x, args)
    field = VectorField(f, args, _sign(t0, t1, kind))
    information = FirstOrderODE(field, linearisation)
    # Prior and spatial covariance leave the solve with the solution, and with them functions inside of them.
    prior = with_constants(solver.prior.with_order(order).fitted(linearisation.rates, field.sign, y0))
    space = with_constants(solver.space(y0))
    model = Filter(information, prior, solver.diffusion, tolerances, solver.corrections, space, uncertainty)
    stiff = _when_stiff(solver, model, y0)
    setup = Setup(
        model, controller, SAVE_END, t0, t1, dt0, solver.structure, solver.initialise, max_steps, stiff
    )
    setup = setup._replace(alone=stiff is not None and outside_transformations())
    plan, budget = _save_plan(save, smooth, setup, y0, needs)
    # Fixed steps are as long as the user says, and neither accuracy nor stability limits them.
    remedy = "" if controller.knows_first_step else solver.remedy(y0)
    return Prepared(setup._replace(plan=plan), y0, budget, remedy)


def _when_stiff(solver: Solver, model: Filter, y0: Field) -> Filter | None:
    """The filter for stiff phases, if the solver has one."""
    linearisation = solver.when_stiff(y0)
    if linearisation is None:
        return None
    information = FirstOrderODE(model.information.field, linearisation)
    return model._replace(information=information, corrections=IMPLICIT_CORRECTIONS)


def _save_plan(
    save: Any, smooth: bool | str, setup: Setup, y0: Field, needs: memory.Needs
) -> tuple[SavePlan, int]:
    """The plan, and the bytes that it may use."""
    if checks.asks_for(save, "end"):
        return SAVE_END, 0
    if not checks.asks_for(save, "steps"):
        times = checks.save_times(save, setup.t0, setup.t1)
        return (SmoothTimes(times) if smooth else SaveTimes(times)), 0
    ends = setup.t0, setup.t1
    span = abs(float(ends[1]) - float(ends[0])) if not is_traced(ends) else np.inf
    bounded = outside_transformations()
    steps = memory.expected_steps(setup.controller, span, setup.max_steps, bounded)
    budget = memory.budget_for_steps(needs, y0, smooth, steps, bounded)
    if smooth == "recompute":
        return CountSteps(np.asarray(FIRST_STRIDE, np.int32)), budget
    fitting = SEGMENT_BYTES // needs.per_step(smooth)
    segment = int(np.clip(fitting, 8, SEGMENT_STEPS)) if bounded else setup.max_steps
    return SaveSteps(min(setup.max_steps, segment) + 1, bool(smooth)), budget


def _sign(t0: Any, t1: Any, kind: Any) -> Any:
    """+1 forwards in time, −1 backwards."""
    if not is_traced(t0, t1):
        return np.asarray(1 if t1 >= t0 else -1, kind)
    return jnp.where(t1 >= t0, 1, -1).astype(kind)
