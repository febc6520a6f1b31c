"""The adaptive loop: begin at t₀, and advance until t₁ or a limit; ``outcome.finish`` ends it.

These functions are pure and compile to one program each. ``advance`` can be called again on what it
returned, which is how progress bars and long ``save="steps"`` runs work without a callback in the loop.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.covariance import STRUCTURES
from millipode.filter import defects, implicit, members, switching
from millipode.filter.control import Controller
from millipode.filter.corrections import is_limited
from millipode.filter.state import Attempt, Filter, Past, State
from millipode.filter.step import attempt, correct
from millipode.filter.switching import Switch
from millipode.linalg.fields import Coefficient, Field, all_finite, dtype, expand, rms
from millipode.linalg.randomness import signs
from millipode.model.initialisation import Initial, Start, initialise
from millipode.save.protocol import Record, SavePlan
from millipode.status import RUNNING, Status
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
        stiff: the filter for stiff phases, if there is to be an automatic choice; else None.
        alone: whether a program stops where such a phase begins, and need not have any code for it.
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
    stiff: Filter | None = None
    alone: bool = False


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
        iterations: of the linear solver so far.
        unsolved: attempts in which it did not converge.
        implicit: the number of accepted steps that solved linear systems.
        switch: which kind of steps to take, if that is chosen automatically.
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
    iterations: Array
    unsolved: Array
    implicit: Array
    switch: Switch | None
    status: Array
    record: Record | None

    @property
    def steps(self) -> Array:
        """The number of accepted steps so far."""
        return self.state.steps


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
    state = state._replace(past=_past(setup, state.mean[0]))
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
        iterations=count,
        unsolved=count,
        implicit=count,
        switch=None if setup.stiff is None else switching.begin(zero),
        status=status,
        record=setup.plan.empty(model, state),
    )


def _past(setup: Setup, y: Field) -> Past | None:
    """What implicit steps know of earlier ones, and where a power iteration starts."""
    if setup.stiff is None:
        return implicit.begin(setup.model, y)
    return implicit.begin(setup.stiff, y, jax.tree.map(lambda x: x[0], signs(jax.random.key(0), y, 1)))


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

        if setup.stiff is None or setup.alone:
            return _steps(setup, setup.model, carry, unfinished, reverse=reverse)
        return _phases(setup, setup.stiff, carry, unfinished, reverse=reverse)

    arrays, static = eqx.partition(setup, eqx.is_array)
    return both_ways(run, (arrays, carry, limit))


def _steps(
    setup: Setup, model: Filter, carry: Carry, unfinished: Callable[[Carry], Array], *, reverse: bool
) -> Carry:
    """As many steps as can be taken with one filter."""

    def usable(c: Carry) -> Array:
        wanted = c.switch is None or c.switch.stiff == model.information.is_implicit
        return unfinished(c) & wanted

    return while_loop(
        usable,
        lambda c: _step(setup, model, c, reverse),
        carry,
        reverse=reverse,
        max_steps=setup.max_steps,
        buffers=lambda c: c.record.buffers,
        small=True,
    )


def _phases(
    setup: Setup, stiff: Filter, carry: Carry, unfinished: Callable[[Carry], Array], *, reverse: bool
) -> Carry:
    """Steps of two filters.

    A loop over phases of many steps works in place. One with a branch in every step is what can be
    differentiated without taking the derivatives of loops in a loop.
    """

    def to_implicit(c: Carry) -> Carry:
        assert c.switch is not None
        switch, state = switching.to_implicit(c.switch, stiff, c.state, c.h)
        return c._replace(switch=switch, state=state)

    def to_explicit(c: Carry) -> Carry:
        assert c.switch is not None
        switch, state = switching.to_explicit(c.switch, stiff, c.state, c.h)
        return c._replace(switch=switch, state=state)

    def phases(c: Carry) -> Carry:
        c = to_implicit(_steps(setup, setup.model, c, unfinished, reverse=reverse))
        return to_explicit(_steps(setup, stiff, c, unfinished, reverse=reverse))

    def one(c: Carry) -> Carry:
        assert c.switch is not None
        return lax.cond(
            c.switch.stiff,
            lambda c: _step(setup, stiff, to_implicit(c), reverse),
            lambda c: _step(setup, setup.model, to_explicit(c), reverse),
            c,
        )

    return while_loop(
        unfinished,
        one if reverse else phases,
        carry,
        reverse=reverse,
        max_steps=setup.max_steps if reverse else switching.MOST + 1,
        buffers=lambda c: c.record.buffers,
    )


def _step(setup: Setup, model: Filter, c: Carry, reverse: bool) -> Carry:
    """One attempt, with all that happens around it: members, saving, and the next step size."""
    controller, plan, state = setup.controller, setup.plan, c.state
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
        ensemble = members.advance(model, state, a, taken.gains, token, reverse)
        taken = taken._replace(state=taken.state._replace(members=ensemble))
    record = plan.after_step(model, taken, a.accept, record)

    limited = is_limited(model, a.corrections)
    known = h, a.error, c.previous
    if setup.stiff is not None:
        # Where stability limits explicit steps, each hangs on the error of the one before, and what an error
        # does to all that follow grows without bound. So derivatives take the lengths of steps for given.
        known = lax.stop_gradient(known)
    proposal = controller.next_step(*known, order=model.order)
    counted = a.accept.astype(jnp.int32)
    is_implicit, switch = model.information.is_implicit, c.switch
    count = c.limited + limited
    if switch is not None:
        if is_implicit:
            switch = switching.after_implicit(switch, model, a, proposal)
        else:
            assert setup.stiff is not None
            switch = switching.after_explicit(switch, model, setup.stiff, a)
            count = jnp.where(switch.stiff, 0, count)  # this has been mended
    return Carry(
        state=taken.state,
        h=proposal,
        previous=jnp.where(a.accept, jnp.maximum(a.error, 1e-4), c.previous),
        rejected=c.rejected + 1 - counted,
        diverged=c.diverged + a.corrections.diverged,
        limited=count,
        f_evals=c.f_evals + a.corrections.evaluations,
        iterations=c.iterations + a.corrections.iterations,
        unsolved=c.unsolved + a.corrections.unsolved,
        implicit=c.implicit + (counted if is_implicit else 0),
        switch=switch,
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
