"""F_y where it is no field: a matrix over all unknowns, or one per mode."""

import abc
from typing import Self

import equinox as eqx
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from millipode.fields import Field, Scale, expand


class Jacobian(eqx.Module):
    """A linear map of fields."""

    @abc.abstractmethod
    def minus(self, rate: Scale) -> Self:
        """F_y − diag(rate)."""

    @abc.abstractmethod
    def solve(self, a: float, b: Scale, z: Field) -> Field:
        """X with (a − b F_y) x = z."""


class FullJacobian(Jacobian):
    """F_y as a matrix over the flattened state."""

    matrix: Float[Array, "d d"]

    def minus(self, rate: Scale) -> "FullJacobian":
        """On the diagonal."""
        flat, d = ravel_pytree(rate)[0], self.matrix.shape[0]
        return FullJacobian(self.matrix - jnp.diag(jnp.broadcast_to(flat, (d,))))

    def solve(self, a: float, b: Scale, z: Field) -> Field:
        """By elimination."""
        flat, unravel = ravel_pytree(z)
        rows = ravel_pytree(expand(b, z))[0][:, None] * self.matrix
        return unravel(jnp.linalg.solve(a * jnp.eye(flat.size, dtype=flat.dtype) - rows, flat))


class CoupledJacobian(Jacobian):
    """F_y in modes: diag(λ), plus one small matrix that couples the components of every mode."""

    eigenvalues: Float[Array, " c *modes"]
    reaction: Float[Array, "c c"]

    def minus(self, rate: Scale) -> "CoupledJacobian":
        """In the eigenvalues."""
        return CoupledJacobian(self.eigenvalues - rate, self.reaction)

    def solve(self, a: float, b: Scale, z: Field) -> Field:
        """By elimination, mode by mode; the matrix is near a times the identity, or near a diagonal one."""
        c = z.shape[0]
        one = jnp.eye(c, dtype=z.dtype).reshape(c, c, *(1,) * (z.ndim - 1))
        matrix = a * one - b * self.matrix()
        rows = [[*(matrix[i, j] for j in range(c)), z[i]] for i in range(c)]
        for i in range(c):
            for k in range(i + 1, c):
                factor = rows[k][i] / rows[i][i]
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
        found: list[Array] = [z[i] for i in range(c)]
        for i in reversed(range(c)):
            known = sum(rows[i][j] * found[j] for j in range(i + 1, c))
            found[i] = (rows[i][c] - known) / rows[i][i]
        return jnp.stack(found)

    def matrix(self) -> Float[Array, "c c *modes"]:
        """Per mode."""
        c, batch = self.reaction.shape[0], (1,) * (self.eigenvalues.ndim - 1)
        one = jnp.eye(c, dtype=self.eigenvalues.dtype).reshape(c, c, *batch)
        return one * self.eigenvalues + self.reaction.reshape(c, c, *batch)
