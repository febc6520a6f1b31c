"""F_y where it is no field: a matrix over all unknowns, or one per mode."""

import abc
from typing import Self

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from millipode.fields import Scale


class Jacobian(eqx.Module):
    """A linear map of fields."""

    @abc.abstractmethod
    def minus(self, rate: Scale) -> Self:
        """F_y − diag(rate)."""


class FullJacobian(Jacobian):
    """F_y as a matrix over the flattened state."""

    matrix: Float[Array, "d d"]

    def minus(self, rate: Scale) -> "FullJacobian":
        """On the diagonal."""
        flat, d = ravel_pytree(rate)[0], self.matrix.shape[0]
        return FullJacobian(self.matrix - jnp.diag(jnp.broadcast_to(flat, (d,))))


class CoupledJacobian(Jacobian):
    """F_y in modes: diag(λ), plus one small matrix that couples the components of every mode."""

    eigenvalues: Float[Array, " c *modes"]
    reaction: Float[Array, "c c"]

    def minus(self, rate: Scale) -> "CoupledJacobian":
        """In the eigenvalues."""
        return CoupledJacobian(self.eigenvalues - rate, self.reaction)

    def matrix(self) -> Float[Array, "c c *modes"]:
        """Per mode."""
        c, batch = self.reaction.shape[0], (1,) * (self.eigenvalues.ndim - 1)
        one = jnp.eye(c, dtype=self.eigenvalues.dtype).reshape(c, c, *batch)
        return one * self.eigenvalues + self.reaction.reshape(c, c, *batch)
