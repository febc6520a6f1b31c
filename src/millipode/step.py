"""One step of the filter: extrapolate → evaluate → calibrate → judge → correct.

The phases are those of the paper's Sections 2 and 3. Nothing here knows which covariance structure it
works with, and nothing decides on step sizes. The error needs only the residual and its local scale, so a
step is judged before its covariance is touched.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from millipode.basis import Identity
from millipode.control import error_norm, weights
from millipode.covariance import Covariance, Innovation
from millipode.diffusion import Diffusion
from millipode.fields import Field, Scale, combine, rms, where
from millipode.inplace import moved
from millipode.linearise import Linearisation, VectorField
from millipode.priors import Prior, Transition
from millipode.spatial.protocol import Space, correlated
from millipode.transport import Drive, Members, Transported


class Filter(NamedTuple):
    """The parts of an ODE filter, put together for one problem."""

    vector_field: VectorField
    prior: Prior
    linearisation: Linearisation
    diffusion: Diffusion
    rtol: Scale
    atol: Scale
    space: Space | None = None
    uncertainty: Transported | None = None


class State(NamedTuple):
    """N(mean, covariance) at time t, and what the steps so far say of the scale.

    Attributes:
        t: the time.
        mean: of the prior's state, y first; one field per derivative.
        covariance: of the same, under the filter's own diffusion.
        calibration: the diffusion's accumulator.
        quadratic: Σ_n z_nᵀ S_n⁻¹ z_n.
        log_det: Σ_n log det S_n.
        rank: the number of directions in that determinant.
        memory: of the linearisation.
        members: of the error, if they are transported.
    """

    t: Array
    mean: tuple[Field, ...]
    covariance: Covariance
    calibration: Scale
    quadratic: Array
    log_det: Array
    rank: Array
    memory: PyTree
    members: Members | None = None


class Attempt(NamedTuple):
    """A step that has been evaluated and can be judged, but is not yet taken.

    The linearised model of the step is all here: Φ, E₀ m⁻, the Jacobian, the residual z and γ. With a model
    of space, ``form`` is zᵀ Γ̆⁻¹ z. ``drive`` is what moves members of the error.
    """

    t: Array
    h: Array
    transition: Transition
    predicted: Field
    z: Field
    jacobian: Field
    local_scale: Scale
    filter_scale: Scale
    error: Array
    form: Array | None
    memory: PyTree
    drive: Drive | None = None


def attempt(model: Filter, state: State, t: Array, h: Array) -> Attempt:
    """Extrapolate the mean by h to time t, evaluate f there, calibrate, and estimate the error."""
    transition = model.prior.transition(h)
    predicted = combine(transition.phi[0], state.mean)  # E₀ m⁻
    slope = combine(transition.phi[1], state.mean)
    memory = model.linearisation.refreshed(model.vector_field, t, predicted, state.memory)
    value, jacobian = model.linearisation(model.vector_field, t, predicted, memory)
    z, jacobian = model.prior.residual(predicted, slope, value, jacobian)
    form = None if model.space is None else model.space.quadratic(z)
    process = correlated(model.space, state.covariance.process_innovation(transition, jacobian, z), form)
    local = model.diffusion.local_scale(process, z)
    error = _error(model, state, h, transition, predicted, z, jacobian, process, local)
    scale = model.diffusion.filter_scale(local)
    return Attempt(t, h, transition, predicted, z, jacobian, local, scale, error, form, memory)


def _error(
    model: Filter,
    state: State,
    h: Array,
    transition: Transition,
    predicted: Field,
    z: Field,
    jacobian: Any,
    process: Innovation,
    local: Scale,
) -> Array:
    """The local error in units of the tolerance, measured in space.

    For stiff modes h|z| overstates it by |hλ|, so in modes it is the correction of y itself.
    """
    basis = model.linearisation.basis
    if isinstance(basis, Identity):
        scale = weights(predicted, model.rtol, model.atol, state.mean[0])
        return error_norm(h, local, process.std(), z, scale, model.diffusion.vector)
    scale = weights(basis.from_modes(predicted), model.rtol, model.atol)
    correction = state.covariance.process_correction(transition, jacobian, z)
    return rms(jax.tree.map(jnp.divide, basis.from_modes(correction), scale))


class Taken(NamedTuple):
    """The state after a step, and the correction K z that led to it; zero if the step was rejected."""

    state: State
    gain: Any
    z: Field


def take(model: Filter, state: State, a: Attempt, accept: Array, signal: Array) -> Taken:
    """Correct the state with an attempted step if ``accept``, else return it as it was.

    The ``signal`` is any number that is known only after the last look at the old state.

    The covariance branches. The mean does not: its coefficients become those of doing nothing, so a
    rejected step needs no second copy of the state and no selection over it.
    """
    z = where(accept, a.z, 0)  # a rejected residual may be NaN, and 0 · NaN is not 0
    corrected = lax.cond(
        accept,
        lambda covariance: covariance.correct(a.transition, a.filter_scale, a.jacobian, z),
        lambda covariance: covariance.rejected(z),
        state.covariance,
    )
    correction = state.covariance.apply_gain(corrected.gain, z)
    start = where(accept, a.predicted, state.mean[0])  # what Φ makes of y is there already
    mean = moved((start,), a.transition.gated(accept), state.mean, correction, signal)
    innovation = correlated(model.space, corrected.innovation, a.form)
    log_det, rank = innovation.log_determinant(z)
    calibration = model.diffusion.accumulate(state.calibration, a.local_scale, innovation, a.z)
    taken = State(
        t=jnp.where(accept, a.t, state.t),
        mean=mean,
        covariance=corrected.covariance,
        calibration=where(accept, calibration, state.calibration),
        quadratic=state.quadratic + jnp.where(accept, innovation.quadratic(a.z), 0),
        log_det=state.log_det + jnp.where(accept, log_det, 0),
        rank=state.rank + jnp.where(accept, rank, 0).astype(state.rank.dtype),
        memory=jax.tree.map(lambda new, old: jnp.where(accept, new, old), a.memory, state.memory),
        members=state.members,
    )
    return Taken(taken, corrected.gain, z)
