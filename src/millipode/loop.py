"""The adaptive loop: begin at t₀, advance until t₁ or a limit, finish by calibrating.

The three functions are pure and compile to one program each. ``advance`` can be called again on what it
returned, which is how progress bars and long ``save="steps"`` runs work without a callback in the loop.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode import transport
from millipode.autodiff import both_ways, while_loop
from millipode.basis import Identity
from millipode.control import Controller, weights
from millipode.covariance import STRUCTURES
from millipode.fields import Field, Scale, all_finite, dtype, expand, rms, safe_sqrt
from millipode.initialise import initialise, probe
from millipode.posterior import Posterior
from millipode.saving import Saved, SavePlan
from millipode.solution import RUNNING, Stats, Status
from millipode.step import Filter, State, attempt, take


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
    """What the loop carries along."""

    state: State
    h: Array
    previous_error: Array
    steps: Array
    rejected: Array
    f_evals: Array
    status: Array
    record: Any


class Outcome(NamedTuple):
    """A finished solve; ``gamma`` is γ̂, time first if dynamic."""

    t: Array
    posterior: Posterior
    gamma: Scale
    log_evidence: Array
    status: Array
    valid: Array
    stats: Stats
    reached: tuple[Array, Array]


def begin(setup: Setup, y0: Field) -> Carry:
    """Initialise the state and choose the first step."""
    model, t0, basis = setup.model, setup.t0, setup.model.linearisation.basis
    field, order = model.vector_field, model.prior.order
    span = jnp.abs(setup.t1 - t0)
    p = probe(field, t0, y0, weights(y0, model.rtol, model.atol), span)
    initial = initialise(setup.initialise, field, t0, y0, order, p, span)
    # A copy, because the loop works in place and y0 belongs to the user.
    mean = model.prior.state(tuple(basis.to_modes(jax.tree.map(jnp.copy, x)) for x in initial.mean))
    if model.space is None:
        local = rms(initial.residual)
    else:
        local = model.space.rms(basis.to_modes(initial.residual))
    if model.diffusion.vector and isinstance(basis, Identity):
        local = jax.tree.map(jnp.abs, initial.residual)
    elif model.diffusion.vector:
        local = expand(local, mean[0])
    scale = model.diffusion.filter_scale(local)
    covariance = STRUCTURES[setup.structure].initial(model.prior.root(initial.root), scale, mean[0])
    zero, memory = jnp.zeros((), dtype(y0)), model.linearisation.memory()
    h = setup.controller.first_step(p, order, span) if setup.dt0 is None else setup.dt0
    h = jnp.minimum(h, jnp.where(span > 0, span, h))
    members = None
    if model.uncertainty is not None:
        members = transport.begin(model, covariance, local, mean[0], jnp.where(h > 0, h, 1))
    state = State(
        jnp.copy(t0), mean, covariance, model.diffusion.zero(mean[0]), zero, zero, zero, memory, members
    )
    status = jnp.where(all_finite(initial.mean), RUNNING, Status.NON_FINITE)
    status = jnp.where(span == 0, Status.SUCCESS, status).astype(jnp.int32)
    count = jnp.zeros((), jnp.int32)
    return Carry(
        state=state,
        h=h,
        previous_error=zero + 1,
        steps=count,
        rejected=count,
        f_evals=count + 2 + initial.f_evals,
        status=status,
        record=setup.plan.empty(model, state),
    )


def advance(setup: Setup, carry: Carry, limit: Array) -> Carry:
    """Step until the end, a failure, a full record, or ``limit`` attempts in all."""

    def run(inputs: tuple, reverse: bool) -> Carry:
        arrays, carry, limit = inputs
        setup = eqx.combine(arrays, static)

        def unfinished(c: Carry) -> Array:
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
    model, controller, plan = setup.model, setup.controller, setup.plan
    sign, order = model.vector_field.sign, model.prior.order
    state = c.state
    end = controller.end_of_step(setup.t0, state.t, sign, c.h, c.steps)
    # A step that would leave less than a hundredth of itself goes all the way.
    last = sign * (setup.t1 - end) <= 0.01 * c.h
    t = jnp.where(last, setup.t1, end)
    h = sign * (t - state.t)  # as the clock resolves it

    a = attempt(model, state, t, h)
    accept = controller.accepts(a.error)
    if state.members is not None:
        a = a._replace(drive=transport.drive(model, state.members, a, accept))
    record = plan.before_step(model, state, a, accept, c.record, reverse)
    taken = take(model, state, a, accept, record.filled)
    if state.members is not None:
        members = transport.advance(model, state, a, taken.gain, accept, reverse)
        taken = taken._replace(state=taken.state._replace(members=members))
    record = plan.after_step(model, taken, accept, record)

    proposal = controller.next_step(h, a.error, c.previous_error, order)
    eps = jnp.finfo(h.dtype).eps
    smallest = eps * jnp.maximum(4 * jnp.abs(t), 1e-6 * jnp.abs(setup.t1 - setup.t0))
    failure = jnp.where(jnp.isfinite(a.error), Status.STEP_TOO_SMALL, Status.NON_FINITE)
    stuck = jnp.where(accept, h <= 0, proposal <= smallest)
    status = jnp.where(stuck, failure, jnp.where(accept & last, Status.SUCCESS, RUNNING))
    counted = accept.astype(jnp.int32)
    return Carry(
        state=taken.state,
        h=proposal,
        previous_error=jnp.where(accept, jnp.maximum(a.error, 1e-4), c.previous_error),
        steps=c.steps + counted,
        rejected=c.rejected + 1 - counted,
        f_evals=c.f_evals + 1,
        status=status.astype(jnp.int32),
        record=record,
    )


def finish(setup: Setup, carry: Carry) -> Outcome:
    """Calibrate everything that leaves the solver."""
    model, state = setup.model, carry.state
    arrived = carry.status == Status.SUCCESS
    saved = setup.plan.collect(model, state, carry.record, arrived, output_scale(setup, carry))
    return conclude(setup, carry, saved)


def output_scale(setup: Setup, carry: Carry) -> Scale:
    """What calibrates the filter's covariances after the fact."""
    diffusion = setup.model.diffusion
    return diffusion.output_scale(
        diffusion.calibrated(carry.state.calibration, carry.steps, carry.state.mean[0])
    )


def conclude(setup: Setup, carry: Carry, saved: Saved) -> Outcome:
    """Evidence, status and counts, beside what was saved."""
    model, state = setup.model, carry.state
    y = state.mean[0]
    diffusion = model.diffusion.calibrated(state.calibration, carry.steps, y)
    log_evidence = model.diffusion.log_evidence(
        diffusion, carry.steps, state.quadratic, state.log_det, state.rank, y
    )
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
        log_evidence=log_evidence,
        status=status.astype(jnp.int32),
        valid=saved.valid,
        stats=Stats(carry.steps, carry.rejected, carry.f_evals),
        reached=(state.t, carry.h),
    )
