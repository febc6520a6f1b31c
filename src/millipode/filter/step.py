"""One step of the filter: extrapolate → evaluate → judge → refine → calibrate → correct.

The phases are those of the paper's Sections 2 and 3, and the corrections of ``filter.corrections``. Nothing
here knows which covariance structure it works with, and nothing decides on step sizes. The error needs only
the first residual, so a step is judged before f is evaluated again and before its covariance is touched.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.covariance.innovation import correlated
from millipode.filter import implicit
from millipode.filter.control import Controller
from millipode.filter.corrections import alone, calibrate, evaluate, refine
from millipode.filter.error import after_all, judge, norm_of, of_the_paper
from millipode.filter.moving import moved, shift
from millipode.filter.state import Attempt, Filter, Move, Prediction, State, Taken
from millipode.linalg.fields import combine, where
from millipode.xla.ordering import Token


def attempt(
    model: Filter, state: State, controller: Controller, t: Array, h: Array, reverse: bool
) -> Attempt:
    """Everything but the correction of the state, for a step of length h that ends at time t."""
    p = extrapolate(model, state, t, h)
    norm = norm_of(model, state, p)
    if model.information.is_implicit:
        return implicit.attempt(model, state, p, norm, controller, reverse)
    first = evaluate(model, state, p, p.y)
    if model.corrections == 1:
        calibration = calibrate(model, state, p, first, norm)
        error = of_the_paper(model, state, p, first, calibration)
        return Attempt(p, alone(first, p), calibration, error, controller.accepts(error))
    judged = judge(model, state, p, first, norm)
    corrections = refine(model, state, p, judged, controller.accepts(judged.error), reverse)
    error = after_all(model, judged, corrections)
    error = controller.if_diverged(error, corrections.diverged, model.prior.order)
    calibration = calibrate(model, state, p, corrections.residual, norm)
    return Attempt(p, corrections, calibration, error, controller.accepts(error))


def extrapolate(model: Filter, state: State, t: Array, h: Array) -> Prediction:
    """Field 0 of the predicted mean, m⁻ = Φ(h) m; the others wait until the step is accepted."""
    transition = model.prior.transition(h)
    y = combine(transition.phi[0], state.mean)
    return Prediction(t, h, transition, y, model.information.refreshed(t, y, state.memory))


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
    p, r, c, accept = a.prediction, a.corrections.residual, a.calibration, a.accept
    z = where(accept, r.z, 0)  # a rejected residual may be NaN, and 0 · NaN is not 0
    corrected = lax.cond(
        accept,
        lambda covariance: covariance.correct(p.transition, c.gamma, r.observation, z),
        lambda covariance: covariance.rejected(z),
        state.covariance,
    )
    moves = tuple(
        Move(corrected.gain if m.gain is None else m.gain, where(accept, m.field, 0))
        for m in a.corrections.moves
    )
    correction = shift(state.covariance, moves)
    start = where(accept, p.y, state.mean[0])  # row 0 of Φ m is known already
    mean = moved((start,), p.transition.gated(accept), state.mean, correction, token)
    innovation = correlated(model.space, corrected.innovation, c.form)
    log_det, rank = innovation.log_determinant(z)
    calibration = model.diffusion.accumulate(state.calibration, c.local, innovation, r.z)
    taken = State(
        t=jnp.where(accept, p.t, state.t),
        steps=state.steps + accept.astype(state.steps.dtype),
        mean=mean,
        covariance=corrected.covariance,
        calibration=where(accept, calibration, state.calibration),
        quadratic=state.quadratic + jnp.where(accept, innovation.quadratic(r.z), 0),
        log_det=state.log_det + jnp.where(accept, log_det, 0),
        rank=state.rank + jnp.where(accept, rank, 0).astype(state.rank.dtype),
        memory=jax.tree.map(lambda new, old: jnp.where(accept, new, old), p.memory, state.memory),
        members=state.members,
        past=state.past if a.past is None else where(accept, a.past, state.past),
    )
    return Taken(taken, moves)
