"""One step of the filter: extrapolate → evaluate → calibrate → judge → correct.

The phases are those of the paper's Sections 2 and 3. Nothing here knows which covariance structure it
works with, and nothing decides on step sizes. The error needs only the residual and its local γ, so a
step is judged before its covariance is touched.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.covariance.innovation import correlated
from millipode.filter.control import Controller
from millipode.filter.moving import moved
from millipode.filter.state import Attempt, Calibration, Filter, Prediction, State, Taken
from millipode.linalg.fields import combine, map_leaves, rms, where
from millipode.model.information import Residual
from millipode.xla.ordering import Token


def attempt(model: Filter, state: State, controller: Controller, t: Array, h: Array) -> Attempt:
    """Everything but the correction, for a step of length h that ends at time t."""
    prediction = extrapolate(model, state, t, h)
    residual = evaluate(model, state, prediction)
    calibration = calibrate(model, state, prediction, residual)
    error = judge(model, state, prediction, residual, calibration)
    return Attempt(prediction, residual, calibration, error, controller.accepts(error))


def extrapolate(model: Filter, state: State, t: Array, h: Array) -> Prediction:
    """The first two fields of the predicted mean, m⁻ = Φ(h) m; the others wait until the step is accepted."""
    transition = model.prior.transition(h)
    y, slope = (combine(transition.phi[q], state.mean) for q in (0, 1))
    return Prediction(t, h, transition, y, slope)


def evaluate(model: Filter, state: State, p: Prediction) -> Residual:
    """The residual of the ODE at the predicted mean, and its linearisation: one evaluation of f."""
    return model.information.residual(p.t, p.y, p.slope, model.prior.drift, state.memory)


def calibrate(model: Filter, state: State, p: Prediction, r: Residual) -> Calibration:
    """γ, from the residual and from how much of it the step's own noise explains."""
    form = None if model.space is None else model.space.quadratic(r.z)
    process = state.covariance.process_innovation(p.transition, r.observation, r.z)
    process = correlated(model.space, process, form)
    local = model.diffusion.local_gamma(process, r.z)
    return Calibration(local, model.diffusion.filter_gamma(local), process, form)


def judge(model: Filter, state: State, p: Prediction, r: Residual, c: Calibration) -> Array:
    """The local error in units of the tolerance, measured in space.

    It is E = h γ̂ √(H Σ Hᵀ), or h |z| if every unknown has its own γ̂. For stiff modes both overstate the
    error by the factor |hλ|, so in another basis it is the correction of y itself.
    """
    basis, h = model.basis, model.information.in_units_of_y(p.h)
    if not basis.is_trivial:
        correction = state.covariance.process_correction(p.transition, r.observation, r.z)
        tolerated = model.tolerances.weights(basis.from_modes(p.y))
        return rms(jax.tree.map(jnp.divide, basis.from_modes(correction), tolerated))
    tolerated = model.tolerances.weights(p.y, state.mean[0])
    if model.diffusion.vector:
        return h * rms(jax.tree.map(jnp.divide, r.z, tolerated))
    return rms(map_leaves(lambda w, s: h * c.local * s / w, tolerated, c.process.std()))


def correct(model: Filter, state: State, a: Attempt, token: Token) -> Taken:
    """The state, corrected by an attempt that was accepted; the same state after one that was not.

    The covariance branches. The mean does not: its coefficients become those of doing nothing, so a
    rejected step needs no second copy of the state and no selection over it.

    Args:
        model: the filter.
        state: at the start of the step. It is overwritten.
        a: the attempt.
        token: known once nobody else reads the old state any more.
    """
    p, r, c, accept = a.prediction, a.residual, a.calibration, a.accept
    z = where(accept, r.z, 0)  # a rejected residual may be NaN, and 0 · NaN is not 0
    corrected = lax.cond(
        accept,
        lambda covariance: covariance.correct(p.transition, c.gamma, r.observation, z),
        lambda covariance: covariance.rejected(z),
        state.covariance,
    )
    correction = state.covariance.apply_gain(corrected.gain, z)
    start = where(accept, p.y, state.mean[0])  # row 0 of Φ m is known already
    mean = moved((start,), p.transition.gated(accept), state.mean, correction, token)
    innovation = correlated(model.space, corrected.innovation, c.form)
    log_det, rank = innovation.log_determinant(z)
    calibration = model.diffusion.accumulate(state.calibration, c.local, innovation, r.z)
    taken = State(
        t=jnp.where(accept, p.t, state.t),
        mean=mean,
        covariance=corrected.covariance,
        calibration=where(accept, calibration, state.calibration),
        quadratic=state.quadratic + jnp.where(accept, innovation.quadratic(r.z), 0),
        log_det=state.log_det + jnp.where(accept, log_det, 0),
        rank=state.rank + jnp.where(accept, rank, 0).astype(state.rank.dtype),
        memory=jax.tree.map(lambda new, old: jnp.where(accept, new, old), r.memory, state.memory),
        members=state.members,
    )
    return Taken(taken, corrected.gain, z)
