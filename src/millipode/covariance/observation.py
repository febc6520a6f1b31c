"""H = E₁ − F E₀, the linearised information operator, in the forms that the covariances need.

A residual depends on fields 0 and 1 of the prior's state only. H is one row [−j, 1, 0, …] per unknown, or c
rows per mode, or a matrix, depending on the structure of the covariance. In the scaled coordinates T⁻¹Y of a
step it is T₁ times the same with j T₀/T₁ in place of j. Everything that depends on this form of H is in this
module.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.covariance.transition import Transition
from millipode.linalg.batches import Block
from millipode.linalg.fields import Coefficient, Field, flat
from millipode.linalg.jacobians import Jacobian
from millipode.xla.module import Module


class Observation(Module):
    """H = E₁ − F E₀, which maps a state to its residual.

    Attributes:
        jacobian: F, in the coordinates of the prior's state.
    """

    jacobian: Jacobian

    def of(self, value: Field, slope: Field) -> Field:
        """H Y for a state with these fields 0 and 1."""
        return jax.tree.map(jnp.subtract, slope, self.jacobian.multiply(value))

    def explain(self, z: Field, direction: tuple[Coefficient, Coefficient]) -> Field:
        """The field w with H (v₀/v₁ w, w) = z, for the first two entries (v₀, v₁) of a direction v.

        Growth is not stiff, so F is used without its growing modes if these are known.
        """
        ratio = jax.tree.map(lambda x: x / direction[1], direction[0])
        return self.jacobian.damping().solve(ratio, z)

    def rows(self, z: Field) -> list[Array | None]:
        """The entries j of H = [−j, 1, 0, …], per leaf of z: one number or one per unknown; None for 0."""
        return self.jacobian.entries(z)

    def per_mode(self) -> "CoupledObservation":
        """The rows of H for every mode, where F couples the components of modes."""
        return CoupledObservation(self.jacobian.per_mode())

    def matrix(self, z: Field) -> "DenseObservation":
        """H over the flattened unknowns, for a dense covariance."""
        if self.jacobian.is_diagonal:
            return DenseObservation(flat(self.jacobian.diagonal(z), z))
        return DenseObservation(self.jacobian.to_dense(z))


class BlockObservation(NamedTuple):
    """The row [−j, 1, 0, …] of H for a block per unknown, or for one that they share.

    Attributes:
        j: the entries of F, of the batch's shape or one number; None for zero.
    """

    j: Array | None

    def scaled(self, transition: Transition) -> "BlockObservation":
        """The row in scaled coordinates, up to the factor ``units``."""
        return BlockObservation(None if self.j is None else self.j * _ratio(transition))

    def of(self, value: Array, slope: Array) -> Array:
        """H x, from entries 0 and 1 of x."""
        return slope if self.j is None else slope - self.j * value

    def unseen(self, value: Array) -> Array:
        """Entry 1 of an x with H x = 0, from its entry 0, without a rounding error in H x."""
        return jnp.zeros_like(value) if self.j is None else self.j * value


class CoupledObservation(NamedTuple):
    """The c rows of H for all components of a mode; fields have their derivatives first, then components.

    Attributes:
        j: F of every mode, (c, c, *modes).
    """

    j: Float[Array, "c c *modes"]

    def scaled(self, transition: Transition) -> "CoupledObservation":
        """The rows in scaled coordinates, up to the factor ``units``."""
        return CoupledObservation(self.j * _ratio(transition))

    def of(self, a: int, x: Sequence[Array]) -> Array:
        """Row a of H times x, from the entries of x."""
        c = self.j.shape[0]
        return x[c + a] - sum(self.j[a, b] * x[b] for b in range(c))

    def of_noise(self, root: Float[Array, "n n"]) -> Block:
        """R_Σ Hᵀ, (2c, c, *modes), for R_Σ = root ⊗ I, upper triangular; all other rows are zero."""
        c = self.j.shape[0]
        one = jnp.eye(c, dtype=self.j.dtype).reshape(c, c, *(1,) * (self.j.ndim - 2))
        first = root[0, 1] * one - root[0, 0] * jnp.swapaxes(self.j, 0, 1)
        return jnp.concatenate([first, jnp.broadcast_to(root[1, 1] * one, first.shape)])


class DenseObservation(NamedTuple):
    """H for a state that is flattened derivative by derivative.

    Attributes:
        j: F as a matrix (d, d), or its diagonal (d,).
    """

    j: Array

    @property
    def is_diagonal(self) -> bool:
        """Whether every residual depends on one unknown only."""
        return self.j.ndim == 1

    def scaled(self, transition: Transition) -> "DenseObservation":
        """H in scaled coordinates, up to the factor ``units``."""
        return DenseObservation(self.j * _ratio(transition))

    def of(self, root: Float[Array, "k nd"]) -> Float[Array, "k d"]:
        """R Hᵀ."""
        d = self.j.shape[0]
        value, slope = root[:, :d], root[:, d : 2 * d]
        return slope - (value * self.j if self.is_diagonal else value @ self.j.T)

    def of_noise(self, root: Float[Array, "n n d"]) -> Float[Array, "2d d"]:
        """R_Σ Hᵀ for one upper triangular root per unknown, and a matrix F; all other rows are zero."""
        first = jnp.diag(root[0, 1]) - root[0, 0, :, None] * self.j.T
        return jnp.concatenate([first, jnp.diag(root[1, 1])])


def _ratio(transition: Transition) -> Array:
    """T₀/T₁, the factor from F to F in scaled coordinates."""
    return transition.scaling[0] / transition.scaling[1]


def units(transition: Transition) -> Array:
    """T₁, the factor from a residual in scaled coordinates to the residual."""
    return transition.scaling[1]


def y_per_residual(transition: Transition) -> Array:
    """T₀/T₁, the factor from a gain of y in scaled coordinates to the gain of y."""
    return _ratio(transition)
