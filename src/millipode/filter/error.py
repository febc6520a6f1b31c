"""The estimate of the local error, in units of the tolerance."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.filter.state import Calibration, Corrections, Filter, Prediction, State
from millipode.linalg.fields import Coefficient, Field, map_leaves, rms
from millipode.linalg.jacobians import DiagonalJacobian
from millipode.model.information import Residual
from millipode.model.steady import lead, steady_gain, unsettled

# The local error of an EK0 over h |z|, for ν = 1, 2, …, so that all orders have about the same final error.
EXPLICIT = (4.0, 4.0, 4.0, 4.0, 2.0, 2.0, *5 * (1.0,))
# The same of an EK1, over |δ|; and how much more it makes of directions that are not stiff.
IMPLICIT = (1 / 6, 1 / 12, 1 / 24, 1 / 37, 1 / 94, 1 / 94, 1 / 94, 1 / 57, 1 / 19, 1 / 6, 1 / 2)
SLOW = 15.0


@dataclass(frozen=True)
class Norm:
    """The norm of the tolerances: changes of y in units of what is tolerated.

    Attributes:
        model: the filter.
        y: the predicted value, in space.
        other: the value before the step, if it is known in space.
    """

    model: Filter
    y: Field
    other: Field | None

    @property
    def tolerated(self) -> Field:
        """The tolerance of every unknown, in space: computed where it is needed, rather than stored."""
        return self.model.tolerances.weights(self.y, self.other)

    def __call__(self, x: Field) -> Array:
        """The norm of a field like the modes."""
        return rms(jax.tree.map(jnp.divide, self.model.basis.from_modes(x), self.tolerated))


def norm_of(model: Filter, state: State, p: Prediction) -> Norm:
    """The norm at the end of a step."""
    if model.basis.is_trivial:
        return Norm(model, p.y, state.mean[0])
    return Norm(model, model.basis.from_modes(p.y), None)


class First(NamedTuple):
    """What the evaluation of f at the predicted mean has shown.

    Attributes:
        residual: z₁, and its linearisation.
        norm: of the tolerances.
        size: the norm of δ, what the residual moves y by.
        error: the estimate of the local error, in units of the tolerance.
    """

    residual: Residual
    norm: Norm
    size: Array
    error: Array


def moved_by(model: Filter, p: Prediction, residual: Residual) -> Field:
    """δ = l₀ (I − l₀ F)⁻¹ z: what a residual moves y by, in a filter that has taken many such steps.

    The gain l₀ depends on the order only, so that no flickering γ makes an error look small.
    """
    l0: Coefficient = lead(model.prior, p.h)
    return map_leaves(jnp.multiply, residual.observation.jacobian.solve(l0, residual.z), l0)


def size_of(model: Filter, p: Prediction, residual: Residual, norm: Norm) -> Array:
    """The norm of δ."""
    if model.information.is_explicit:
        return DiagonalJacobian(lead(model.prior, p.h)).length(residual.z, norm)
    return norm(moved_by(model, p, residual))


def judge(model: Filter, state: State, p: Prediction, residual: Residual, norm: Norm) -> First:
    """The local error in units of the tolerance, from δ, what the first residual moves y by.

    It is about h |z| for an EK0, unknown by unknown and whatever the model of γ, and |δ| if something is
    known of the Jacobian. Corrections with the whole Jacobian leave little of δ, and less in stiff directions
    than in others, which a second factor (I − l₀ F)⁻¹ tells apart. The first steps are judged by what their
    residuals would be later on. ``docs/design.md`` has the measurements behind these choices.
    """
    information, order = model.information, model.prior.order
    size, gain = size_of(model, p, residual, norm), steady_gain(order)
    if information.is_explicit:
        error = EXPLICIT[order - 1] / gain * size
    elif information.is_constant:
        error = size
    elif information.is_partial:
        # A diagonal may be large where the Jacobian is not: what it damps is judged as without it.
        error = EXPLICIT[order - 1] * size
    else:
        moved = moved_by(model, p, residual)
        slow = residual.observation.jacobian.solve(lead(model.prior, p.h), moved)
        error = IMPLICIT[order - 1] * norm(jax.tree.map(lambda x, y: x + SLOW / gain * y, moved, slow))
    return First(residual, norm, size, unsettled(order, state.steps, size.dtype) * error)


def after_all(model: Filter, first: First, corrections: Corrections) -> Array:
    """The estimate, once corrections have shown how much of δ a partial Jacobian has hidden.

    They add up to δ (1 + ρ + ρ² + …) with the contraction ρ. It is near 1 where F damps a direction that is
    slow in truth, as the diagonal of a Laplacian does with smooth fields.
    """
    if not model.information.is_partial:
        return first.error
    return first.error / (1 - jnp.minimum(corrections.contraction, 0.9))


def of_the_paper(model: Filter, state: State, p: Prediction, r: Residual, c: Calibration) -> Array:
    """The paper's estimate, E = h γ̂ √(H Σ Hᵀ), or h |z| if every unknown has its own γ̂.

    For stiff modes both overstate the error by the factor |hλ|, so in another basis it is the correction of y
    itself.
    """
    basis = model.basis
    if not basis.is_trivial:
        correction = state.covariance.process_correction(p.transition, r.observation, r.z)
        tolerated = model.tolerances.weights(basis.from_modes(p.y))
        return rms(jax.tree.map(jnp.divide, basis.from_modes(correction), tolerated))
    tolerated = model.tolerances.weights(p.y, state.mean[0])
    if model.diffusion.vector:
        return p.h * rms(jax.tree.map(jnp.divide, r.z, tolerated))
    std, local = c.process.std(), c.local
    return rms(map_leaves(lambda w, s: p.h * local * s / w, tolerated, std))
