"""Corrections: where f is linearised in a step, and whether that converges.

The paper's filter linearises f once per step, at the predicted mean. Here f is evaluated again at the mean
that was corrected, as in the iterated extended Kalman filter:

    z_i = m⁻₁ − f(ξ_{i−1}) − F (m⁻₀ − ξ_{i−1}),    ξ_i = E₀ (m⁻ − K_i z_i),    ξ₀ = m⁻₀,

with what the filter knows of the Jacobian at ξ_{i−1} as F, and γ from the first residual. Only the first row
of K is needed on the way (``Covariance.gain_of_y``); the covariance is touched once, by the last residual and
its linearisation, which also calibrate it.

That is how an EK0 does it, whose E₀ K is of order h. With a Jacobian, E₀ K depends on the errors of earlier
steps and does not vanish with h, so corrections might diverge at any step size. There, ξ is moved as in a
filter that has taken many equal steps, by δ = l₀ (I − l₀ F)⁻¹ z (``error.moved_by``) with l₀ of order h.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.covariance.innovation import correlated
from millipode.covariance.observation import Observation
from millipode.filter.error import First, Norm, moved_by, size_of
from millipode.filter.state import Calibration, Corrections, Filter, Move, Prediction, State
from millipode.linalg.fields import Field, combine, map_leaves, safe_divide, where
from millipode.linalg.jacobians import ZeroJacobian
from millipode.model.information import Predicted, Residual
from millipode.model.steady import lead, steady_gain, unsettled
from millipode.xla.autodiff import while_loop

# What corrections may leave undone, in units of the tolerance; with the whole Jacobian, they leave much less.
LEFT, LEFT_EXACT = 0.01, 0.1
# The diagonal of a Jacobian damps directions that are slow in truth. What corrections leave of these has the
# same sign in many steps, so it must also be a small share of the correction, unless it is next to nothing.
SHARE, NOTHING = 0.01, 1e-6
# Corrections of y are never known better than to this part of the tolerance.
KNOWN = 0.1
UNCOUPLED = Observation(ZeroJacobian())


def evaluate(model: Filter, state: State, p: Prediction, point: Field) -> Residual:
    """The residual of the ODE, linearised at a point: one evaluation of f."""
    return model.information.residual(
        p.t, point, Predicted(p.y, slope(state, p)), model.prior.drift, p.memory
    )


def slope(state: State, p: Prediction) -> Field:
    """E₁ m⁻, computed where it is needed: it takes less time than a copy of y takes memory."""
    return combine(p.transition.phi[1], state.mean)


def calibrate(model: Filter, state: State, p: Prediction, r: Residual, norm: Norm) -> Calibration:
    """γ, from the residual and from how much of it the step's own noise explains.

    Where a Jacobian couples unknowns that have a γ each, every unknown is given its own part of the residual.
    """
    z, observation = r
    if model.diffusion.vector and not observation.jacobian.is_diagonal:
        z, observation = _unmixed(model, p, r, norm), UNCOUPLED
    form = None if model.space is None else model.space.quadratic(z)
    process = state.covariance.process_innovation(p.transition, observation, z)
    process = correlated(model.space, process, form)
    local = model.diffusion.local_gamma(process, z)
    if model.corrections > 1:
        # Without this, γ would rise from step to step at the start, and the filter would trust its past too
        # much: gains would be too large for twenty steps or more, and steps ten times too short.
        startup = unsettled(model.prior.order, state.steps, p.h.dtype)
        local = jax.tree.map(lambda x: startup * x, local)
    return Calibration(local, model.diffusion.filter_gamma(local), process, form)


def _unmixed(model: Filter, p: Prediction, residual: Residual, norm: Norm) -> Field:
    """(I − l₀ F)⁻¹ z: the residual of every unknown without what is due to the errors of others.

    It is kept away from zero, because γ = 0 would mean that this unknown is known, and others are to blame.
    """
    l0 = lead(model.prior, p.h)
    own = residual.observation.jacobian.solve(l0, residual.z)
    return map_leaves(lambda x, w, c: jnp.sqrt(x**2 + (KNOWN * w / c) ** 2), own, norm.tolerated, l0)


class _Turn(NamedTuple):
    """Between two corrections.

    Attributes:
        z: the latest residual.
        observation: its linearisation; None if that of the prediction is kept.
        done: the number of evaluations.
        change: by which the last one moved ξ, in units of the tolerance.
        contraction: of the first two corrections.
        left: by which all others would move it, likewise.
    """

    z: Field
    observation: Observation | None
    done: Array
    change: Array
    contraction: Array
    left: Array


def refine(
    model: Filter,
    state: State,
    p: Prediction,
    first: First,
    promising: Array,
    reverse: bool,
) -> Corrections:
    """Correct and evaluate again, until nothing changes any more or often enough.

    Args:
        model: the filter.
        state: at the start of the step.
        p: the extrapolated state.
        first: what the first evaluation has shown.
        promising: whether the step will be accepted if its corrections converge; else nothing is done.
        reverse: whether loops must have the form that reverse mode supports.
    """
    predicted, norm = first.residual, first.norm
    keeps = model.information.is_constant or not _is_data(predicted.observation)

    def latest(turn: _Turn) -> Residual:
        return Residual(turn.z, predicted.observation if turn.observation is None else turn.observation)

    most, enough = _tolerated(model, first.size)

    gain = None
    if model.information.is_explicit:
        gamma = calibrate(model, state, p, predicted, norm).gamma
        gain = state.covariance.gain_of_y(p.transition, gamma, predicted.observation, predicted.z)

    def correction(residual: Residual) -> Field:
        """What a residual moves ξ by."""
        return moved_by(model, p, residual) if gain is None else gain.multiply(residual.z)

    def again(turn: _Turn) -> _Turn:
        before = latest(turn)
        moved = correction(before)
        z, observation = evaluate(model, state, p, jax.tree.map(jnp.subtract, p.y, moved))
        new = turn._replace(z=z, observation=None if keeps else observation)
        if keeps:
            difference = before._replace(z=jax.tree.map(jnp.subtract, z, before.z))
            change = size_of(model, p, difference, norm)
        else:
            change = norm(jax.tree.map(jnp.subtract, correction(latest(new)), moved))
        rate = safe_divide(change, turn.change)
        return new._replace(
            done=turn.done + 1,
            change=change,
            contraction=jnp.where(turn.done == 1, rate, turn.contraction),
            left=left_of_series(change, rate, most),
        )

    def unfinished(turn: _Turn) -> Array:
        return promising & (turn.done < model.corrections) & (turn.left > enough) & (turn.left < jnp.inf)

    unknown = jnp.full_like(p.h, jnp.finfo(p.h.dtype).max)
    observation = None if keeps else predicted.observation
    none = jnp.zeros_like(unknown)
    start = _Turn(predicted.z, observation, jnp.ones((), jnp.int32), first.size, none, unknown)
    if model.corrections == 2:
        # A branch needs fewer copies of y than a loop. The residual of a rejected step is not used.
        turn = lax.cond(promising, again, lambda turn: turn._replace(z=where(promising, turn.z, 0)), start)
    else:
        turn = while_loop(unfinished, again, start, reverse=reverse, max_steps=model.corrections - 1)
    diverged = promising & ~(turn.left <= enough)
    residual = latest(turn)
    moves = (Move(None, residual.z),)
    return Corrections(residual, gain, turn.done, turn.contraction, diverged, moves)


def _tolerated(model: Filter, size: Array) -> tuple[float, Array | float]:
    """What corrections may leave undone at most, and in a step whose first correction has this size."""
    most = LEFT_EXACT if model.information.is_exact else LEFT
    damps_too_much = model.information.is_partial and not model.information.is_constant
    return most, jnp.clip(SHARE * size, NOTHING, most) if damps_too_much else most


def left_of_series(change: Array, rate: Array, most: float) -> Array:
    """What is left of a geometric series with this last term and rate; ∞ if it does not converge.

    Changes of less than ``most``, which is tolerated, may be rounding errors, whose rate means nothing.
    """
    bounded = jnp.minimum(rate, 0.9)
    return jnp.where((rate >= 1) & (change > most), jnp.inf, change * bounded / (1 - bounded))


def alone(residual: Residual, p: Prediction) -> Corrections:
    """A first residual that is also the last."""
    none = jnp.zeros_like(p.h)
    one, no = jnp.ones((), jnp.int32), jnp.zeros((), bool)
    return Corrections(residual, None, one, none, no, (Move(None, residual.z),))


def _is_data(observation: Observation) -> bool:
    """Whether a linearisation is made of arrays; one that holds functions cannot leave a loop."""
    return all(eqx.is_array(x) for x in jax.tree.leaves(observation))


# |hλ| at which an EK0 with two corrections becomes unstable, for ν = 1, 2, … and a real λ < 0.
REAL_LIMITS = (2.0, 1.73, 1.16, 0.76, 0.50, 0.32, 0.21, 0.15, 0.10, 0.07, 0.05)


def is_limited(model: Filter, corrections: Corrections) -> Array:
    """Whether stability keeps a step from being longer.

    What an explicit method leaves to corrections, l₀ |J − F|, is then near to its value at the limit. An
    exact linearisation leaves nothing but curvature.
    """
    if model.information.is_exact:
        return jnp.zeros((), bool)
    order = model.prior.order
    near = 0.6 * steady_gain(order) * REAL_LIMITS[order - 1]
    return (corrections.contraction > near) | corrections.diverged
