"""The adaptive loop: begin at t₀, advance until t₁ or a limit, finish by calibrating.

The three functions are pure and compile to one program each. ``advance`` can be called again on what it
returned, which is how progress bars and long ``save="steps"`` runs work without a callback in the loop.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.covariance import STRUCTURES
from millipode.filter import defects, members
from millipode.filter.calibration import Evidence
from millipode.filter.control import Controller
from millipode.filter.corrections import is_limited
from millipode.filter.state import Attempt, Filter, State
from millipode.filter.step import attempt, correct
from millipode.linalg.fields import Coefficient, Field, all_finite, dtype, expand, rms, safe_sqrt, size
from millipode.model.initialisation import Initial, Start, initialise
from millipode.posterior.posterior import Posterior
from millipode.save.protocol import Record, Saved, SavePlan
from millipode.status import RUNNING, Stats, Status
from millipode.xla.autodiff import both_ways, while_loop


class Setup(NamedTuple):
    """A problem and how to solve it: all that the compiled functions depend on.

    Attributes:
        model: the filter.
        controller: of step sizes.
        plan: what to save.
        t0: start.
        t1: end.
        dt0: the first step, None for automatic.
        structure: of the covariance, a key of ``STRUCTURES``.
        initialise: "taylor", "runge-kutta" or None for automatic.
        max_steps: the bound on attempts.
    """

    model: Filter
    controller: Controller
    plan: SavePlan
    t0: Array
    t1: Array
    dt0: Array | None
    structure: str
    initialise: str | None
    max_steps: int


class Carry(NamedTuple):
    """What the loop carries along.

    Attributes:
        state: of the filter.
        h: the next step.
        previous: the error of the last accepted step, in units of the tolerance.
        rejected: attempts so far.
        diverged: those attempts of which the corrections diverged.
        limited: attempts so far that stability, not accuracy, kept short.
        f_evals: evaluations of f so far.
        status: a ``Status``, or ``RUNNING``.
        record: of the save plan; None while no loop runs.
    """

    state: State
    h: Array
    previous: Array
    rejected: Array
    diverged: Array
    limited: Array
    f_evals: Array
    status: Array
    record: Record | None

    @property
    def steps(self) -> Array:
        """The number of accepted steps so far."""
        return self.state.steps


class Outcome(NamedTuple):
    """A finished solve.

    Attributes:
        t: the saved times.
        posterior: at these times.
        gamma: γ̂, time first if dynamic.
        log_evidence: of all steps.
        status: a ``Status``.
        valid: how many of the saved times were reached.
        stats: counts.
        reached: the last time, and the last step size.
    """

    t: Array
    posterior: Posterior
    gamma: Coefficient
    log_evidence: Array
    status: Array
    valid: Array
    stats: Stats
    reached: tuple[Array, Array]


def begin(setup: Setup, y0: Field) -> Carry:
    """Initialise the state and choose the first step."""
    model, t0, order = setup.model, setup.t0, setup.model.prior.order
    span = jnp.abs(setup.t1 - t0)
    start = Start.of(model.information.field, t0, y0, model.tolerances.weights(y0), span)
    initial = initialise(setup.initialise, start, order)
    # A copy, because the loop works in place and y0 belongs to the user.
    mean = tuple(model.basis.to_modes(jax.tree.map(jnp.copy, x)) for x in initial.mean)
    mean = model.prior.state(mean)
    local = _initial_gamma(model, initial, mean[0])
    gamma = model.diffusion.filter_gamma(local)
    covariance = STRUCTURES[setup.structure].initial(model.prior.root(initial.root), gamma, mean[0])
    h = setup.controller.first_step(start, order) if setup.dt0 is None else setup.dt0
    h = jnp.minimum(h, jnp.where(span > 0, span, h))
    zero, count = jnp.zeros((), dtype(y0)), jnp.zeros((), jnp.int32)
    calibration, memory = model.diffusion.zero(mean[0]), model.information.memory()
    state = State(jnp.copy(t0), count, mean, covariance, calibration, zero, zero, zero, memory)
    if model.uncertainty is not None:
        state = state._replace(members=members.begin(model, state, local, jnp.where(h > 0, h, 1)))
    status = jnp.where(all_finite(initial.mean), RUNNING, Status.NON_FINITE)
    status = jnp.where(span == 0, Status.SUCCESS, status).astype(jnp.int32)
    return Carry(
        state=state,
        h=h,
        previous=zero + 1,
        rejected=count,
        diverged=count,
        limited=count,
        f_evals=count + 2 + initial.f_evals,
        status=status,
        record=setup.plan.empty(model, state),
    )


def _initial_gamma(model: Filter, initial: Initial, y: Field) -> Coefficient:
    """γ̂ at t₀, from the residual of the initialisation."""
    basis = model.basis
    if model.diffusion.vector and basis.is_trivial:
        return jax.tree.map(jnp.abs, initial.residual)
    if model.space is None:
        local = rms(initial.residual)
    else:
        local = model.space.rms(basis.to_modes(initial.residual))
    return expand(local, y) if model.diffusion.vector else local


def advance(setup: Setup, carry: Carry, limit: Array) -> Carry:
    """Step until the end, a failure, a full record, or ``limit`` attempts in all."""

    def run(inputs: tuple, reverse: bool) -> Carry:
        arrays, carry, limit = inputs
        setup: Setup = eqx.combine(arrays, static)

        def unfinished(c: Carry) -> Array:
            assert c.record is not None
            return (c.status == RUNNING) & (c.steps + c.rejected < limit) & setup.plan.has_room(c.record)

        return while_loop(
            unfinished,
            lambda c: _step(setup, c, reverse),
            carry,
            reverse=reverse,
            max_steps=setup.max_steps,
            buffers=lambda c: c.record.buffers,
            small=True,
        )

    arrays, static = eqx.partition(setup, eqx.is_array)
    return both_ways(run, (arrays, carry, limit))


def _step(setup: Setup, c: Carry, reverse: bool) -> Carry:
    """One attempt, with all that happens around it: members, saving, and the next step size."""
    model, controller, plan, state = setup.model, setup.controller, setup.plan, c.state
    assert c.record is not None
    end = controller.end_of_step(setup.t0, state.t, model.sign, c.h, c.steps)
    # A step that would leave less than a hundredth of itself goes all the way.
    last = model.sign * (setup.t1 - end) <= 0.01 * c.h
    t = jnp.where(last, setup.t1, end)
    h = model.sign * (t - state.t)  # as the clock resolves it

    a = attempt(model, state, controller, t, h, reverse)
    if state.members is not None:
        a = a._replace(drive=defects.drive(model, state, a))
    record, token = plan.before_step(model, state, a, c.record, reverse)
    taken = correct(model, state, a, token)
    if state.members is not None:
        ensemble = members.advance(model, state, a, taken.gain, token, reverse)
        taken = taken._replace(state=taken.state._replace(members=ensemble))
    record = plan.after_step(model, taken, a.accept, record)

    proposal = controller.next_step(h, a.error, c.previous, model.prior.order)
    counted = a.accept.astype(jnp.int32)
    return Carry(
        state=taken.state,
        h=proposal,
        previous=jnp.where(a.accept, jnp.maximum(a.error, 1e-4), c.previous),
        rejected=c.rejected + 1 - counted,
        diverged=c.diverged + a.corrections.diverged,
        limited=c.limited + is_limited(model, a.corrections),
        f_evals=c.f_evals + a.corrections.evaluations,
        status=_status(setup, a, proposal, last),
        record=record,
    )


def _status(setup: Setup, a: Attempt, proposal: Array, last: Array) -> Array:
    """Whether to go on after an attempt, and if not, why."""
    t, h = a.prediction.t, a.prediction.h
    eps = jnp.finfo(h.dtype).eps
    smallest = eps * jnp.maximum(4 * jnp.abs(t), 1e-6 * jnp.abs(setup.t1 - setup.t0))
    failure = jnp.where(jnp.isfinite(a.error), Status.STEP_TOO_SMALL, Status.NON_FINITE)
    stuck = jnp.where(a.accept, h <= 0, proposal <= smallest)
    status = jnp.where(stuck, failure, jnp.where(a.accept & last, Status.SUCCESS, RUNNING))
    return status.astype(jnp.int32)


def finish(setup: Setup, carry: Carry) -> Outcome:
    """Calibrate everything that leaves the solver."""
    assert carry.record is not None
    arrived, gamma = carry.status == Status.SUCCESS, output_gamma(setup, carry)
    saved = setup.plan.collect(setup.model, carry.state, carry.record, arrived, gamma)
    return conclude(setup, carry, saved)


def output_gamma(setup: Setup, carry: Carry) -> Coefficient:
    """The factor that calibrates the filter's standard deviations after the fact."""
    return setup.model.diffusion.output_gamma(_diffusion(setup, carry))


def _diffusion(setup: Setup, carry: Carry) -> Coefficient:
    """γ̂²."""
    state = carry.state
    return setup.model.diffusion.calibrated(state.calibration, carry.steps, state.mean[0])


def conclude(setup: Setup, carry: Carry, saved: Saved) -> Outcome:
    """Evidence, status and counts, beside what was saved."""
    model, state = setup.model, carry.state
    y, diffusion = state.mean[0], _diffusion(setup, carry)
    evidence = Evidence(diffusion, carry.steps, state.quadratic, state.log_det, state.rank, size(y))
    over = (carry.status == RUNNING) & (carry.steps + carry.rejected >= setup.max_steps)
    status = jnp.where(over, Status.MAX_STEPS, carry.status)
    arrived = carry.status == Status.SUCCESS
    finite = all_finite((y, state.covariance))
    status = jnp.where(finite | ~arrived, status, Status.NON_FINITE)
    if state.members is not None:
        lost = (status == Status.SUCCESS) & ~all_finite(state.members.chunks)
        status = jnp.where(lost, Status.MEMBERS_NON_FINITE, status)
    return Outcome(
        t=saved.t,
        posterior=saved.posterior,
        gamma=jax.tree.map(safe_sqrt, diffusion) if saved.gamma is None else saved.gamma,
        log_evidence=model.diffusion.log_evidence(evidence),
        status=status.astype(jnp.int32),
        valid=saved.valid,
        stats=_stats(carry),
        reached=(state.t, carry.h),
    )


def _stats(carry: Carry) -> Stats:
    attempts = carry.steps + carry.rejected
    # Where corrections limit the steps, nearly every accepted step is followed by a rejected one.
    return Stats(carry.steps, carry.rejected, carry.f_evals, carry.diverged, 3 * carry.limited > attempts)
