"""Jacobians as one algebra: zero, diagonal, coupled mode by mode, dense, or known by products only.

A ``Jacobian`` F is a linear map of fields like y: what a filter knows of ∂f/∂y. Each class can multiply,
solve (I − cF) x = r, subtract a diagonal, say its own diagonal, and become a dense matrix for tests.
``pde.linear.InBasis`` is one more, V F̂ Vᵀ for an orthonormal basis V.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import lu_factor, lu_solve
from jax.scipy.sparse.linalg import gmres
from jaxtyping import Array, Float

from millipode.linalg.fields import (
    Coefficient,
    Field,
    dtype,
    expand,
    flat,
    is_shared,
    leaves_of,
    map_leaves,
    size,
)
from millipode.linalg.triangular import eliminate
from millipode.xla.module import Module


class Solved(NamedTuple):
    """The solution of a linear system (I − cF) x = r.

    Attributes:
        x: the solution.
        iterations: how many products with F it took; 0 for a direct solver.
        converged: whether x is as accurate as it should be.
    """

    x: Field
    iterations: Array
    converged: Array


# r ↦ the solution of (I − cF) x = r, for one c.
System = Callable[[Field], Solved]


def exactly(x: Field) -> Solved:
    """The result of a direct solver."""
    return Solved(x, jnp.zeros((), jnp.int32), jnp.ones((), bool))


class Jacobian(Module):
    """F, a linear map of fields.

    Attributes:
        is_diagonal: whether F is diagonal by construction; then ``entries`` exists.
    """

    is_diagonal: ClassVar[bool] = False

    @abc.abstractmethod
    def multiply(self, x: Field) -> Field:
        """F x, for a field x."""

    @abc.abstractmethod
    def solve(self, c: Coefficient, r: Field) -> Field:
        """The field x with (I − F diag(c)) x = r, for one number c or a field."""

    def system(self, c: Array, unit: Field, share: Array | float = 1.0) -> System:
        """A solver of (I − cF) x = r that may be called several times.

        Args:
            c: one number.
            unit: the size of what may be neglected of cr and x, per unknown; only iterations need it.
            share: of this, which is what may be neglected in fact.
        """
        return lambda r: exactly(self.solve(c, r))

    @abc.abstractmethod
    def minus(self, rate: Coefficient) -> "Jacobian":
        """F − diag(rate), for one number or a field."""

    def length(self, x: Field, norm: Callable[[Field], Array]) -> Array:
        """The norm of F x."""
        return norm(self.multiply(x))

    def diagonal(self, y: Field) -> Field:
        """The diagonal of F, as a field like y. By d products, unless a class knows better."""
        _, unravel = ravel_pytree(y)
        return unravel(jnp.diagonal(self.to_dense(y)))

    def entries(self, y: Field) -> list[Array | None]:
        """The diagonal of a diagonal F, one array per leaf of y: a number if shared, None if zero."""
        raise TypeError(
            f"{type(self).__name__} is not diagonal, and only a dense covariance can follow it: use "
            "structure='dense'."
        )

    def per_mode(self) -> Float[Array, "c c *modes"]:
        """One small matrix per mode, of an F that couples the components of each mode."""
        raise TypeError(
            f"{type(self).__name__} does not couple components mode by mode, which is what the structure "
            "'coupled' follows."
        )

    def damping(self) -> "Jacobian":
        """F without those entries that are known to make unknowns grow."""
        return self

    def to_dense(self, y: Field) -> Float[Array, "d d"]:
        """F as a matrix over the flattened unknowns. For tests and small problems: d products."""
        vector, unravel = ravel_pytree(y)
        columns = jax.vmap(lambda x: ravel_pytree(self.multiply(unravel(x)))[0])
        return columns(jnp.eye(vector.size, dtype=vector.dtype)).T


class ZeroJacobian(Jacobian):
    """F = 0, all that an EK0 knows."""

    is_diagonal: ClassVar[bool] = True

    def multiply(self, x: Field) -> Field:
        """Zeros."""
        return jax.tree.map(jnp.zeros_like, x)

    def solve(self, c: Coefficient, r: Field) -> Field:
        """The right-hand side itself."""
        return r

    def minus(self, rate: Coefficient) -> "DiagonalJacobian":
        """Minus the rates."""
        return DiagonalJacobian(jax.tree.map(jnp.negative, rate))

    def diagonal(self, y: Field) -> Field:
        """Zeros."""
        return jax.tree.map(jnp.zeros_like, y)

    def entries(self, y: Field) -> list[Array | None]:
        """None for every leaf."""
        return leaves_of(None, y)


class DiagonalJacobian(Jacobian):
    """F = diag(j).

    Attributes:
        values: j, a field or one number for all unknowns.
    """

    is_diagonal: ClassVar[bool] = True

    values: Coefficient

    def multiply(self, x: Field) -> Field:
        """j x, unknown by unknown."""
        return map_leaves(jnp.multiply, x, self.values)

    def length(self, x: Field, norm: Callable[[Field], Array]) -> Array:
        """The norm of j x; a factor that all unknowns share is not multiplied with a field."""
        if is_shared(self.values, x):
            return jnp.abs(self.values) * norm(x)
        return super().length(x, norm)

    def solve(self, c: Coefficient, r: Field) -> Field:
        """r / (1 − c j), unknown by unknown."""
        return map_leaves(lambda r, j, c: r / (1 - c * j), r, self.values, c)

    def minus(self, rate: Coefficient) -> "DiagonalJacobian":
        """The differences."""
        return DiagonalJacobian(map_leaves(jnp.subtract, self.values, rate))

    def diagonal(self, y: Field) -> Field:
        """The values."""
        return expand(self.values, y)

    def entries(self, y: Field) -> list[Array | None]:
        """The values, leaf by leaf."""
        return leaves_of(self.values, y)

    def damping(self) -> "DiagonalJacobian":
        """The negative values; a positive one becomes zero."""
        return DiagonalJacobian(jax.tree.map(lambda j: jnp.minimum(j, 0), self.values))


class CoupledJacobian(Jacobian):
    """F = diag(λ) + R in modes, where R couples the c components of every mode in the same way.

    Fields are arrays (c, *modes).
    """

    eigenvalues: Float[Array, " c *modes"]
    reaction: Float[Array, "c c"]

    def multiply(self, x: Field) -> Field:
        """λ x + R x, mode by mode."""
        return self.eigenvalues * x + jnp.tensordot(self.reaction, x, 1)

    def solve(self, c: Coefficient, r: Field) -> Field:
        """By elimination in every mode; the matrix is near the identity, or near a diagonal one."""
        matrix = self.per_mode()
        return eliminate(_one(matrix) - c * matrix, r)

    def minus(self, rate: Coefficient) -> "CoupledJacobian":
        """The rates enter the eigenvalues."""
        return CoupledJacobian(self.eigenvalues - rate, self.reaction)

    def diagonal(self, y: Field) -> Field:
        """λ plus the diagonal of R."""
        own = jnp.diagonal(self.reaction)
        return self.eigenvalues + own.reshape(-1, *(1,) * (self.eigenvalues.ndim - 1))

    def per_mode(self) -> Float[Array, "c c *modes"]:
        """One small matrix for every mode."""
        matrix = self.reaction.reshape(*self.reaction.shape, *(1,) * (self.eigenvalues.ndim - 1))
        return _one(matrix) * self.eigenvalues + matrix


class DenseJacobian(Jacobian):
    """F as a matrix over the flattened unknowns."""

    matrix: Float[Array, "d d"]

    def multiply(self, x: Field) -> Field:
        """One product."""
        vector, unravel = ravel_pytree(x)
        return unravel(self.matrix @ vector)

    def solve(self, c: Coefficient, r: Field) -> Field:
        """By elimination with pivots."""
        vector, unravel = ravel_pytree(r)
        one = jnp.eye(vector.size, dtype=vector.dtype)
        return unravel(jnp.linalg.solve(one - self.matrix * flat(c, r), vector))

    def system(self, c: Array, unit: Field, share: Array | float = 1.0) -> System:
        """By one LU decomposition for all right-hand sides."""
        matrix = jnp.eye(self.matrix.shape[0], dtype=self.matrix.dtype) - c * self.matrix
        factors = lu_factor(lax.stop_gradient(matrix))

        def solve(r: Field) -> Solved:
            vector, unravel = ravel_pytree(r)
            return exactly(
                unravel(
                    lax.custom_linear_solve(
                        lambda x: matrix @ x,
                        vector,
                        lambda _, b: lu_solve(factors, b),
                        lambda _, b: lu_solve(factors, b, trans=1),
                    )
                )
            )

        return solve

    def minus(self, rate: Coefficient) -> "DenseJacobian":
        """The rates enter the diagonal."""
        rates, d = ravel_pytree(rate)[0], self.matrix.shape[0]
        return DenseJacobian(self.matrix - jnp.diag(jnp.broadcast_to(rates, (d,))))

    def diagonal(self, y: Field) -> Field:
        """That of the matrix."""
        _, unravel = ravel_pytree(y)
        return unravel(jnp.diagonal(self.matrix))

    def to_dense(self, y: Field) -> Float[Array, "d d"]:
        """The matrix."""
        return self.matrix


class ProductJacobian(Jacobian):
    """F, known by its products with fields only, such as the JVPs of f.

    Attributes:
        product: maps a field x to F x.
    """

    product: Callable[[Field], Field]

    def multiply(self, x: Field) -> Field:
        """One product."""
        return self.product(x)

    def solve(self, c: Coefficient, r: Field) -> Field:
        """By GMRES, to the square root of the precision of r."""

        def system(x: Field) -> Field:
            return jax.tree.map(jnp.subtract, x, self.product(map_leaves(jnp.multiply, x, c)))

        tolerance = float(jnp.finfo(dtype(r)).eps) ** 0.5
        return gmres(system, r, tol=tolerance, restart=min(size(r), 20))[0]

    def minus(self, rate: Coefficient) -> "ProductJacobian":
        """The rates are subtracted from every product."""
        product = self.product
        return ProductJacobian(lambda x: map_leaves(lambda y, x, r: y - r * x, product(x), x, rate))


def _one(like: Array) -> Any:
    """The identity (c, c), with as many axes as a stack of matrices has."""
    c = like.shape[0]
    return jnp.eye(c, dtype=like.dtype).reshape(c, c, *(1,) * (like.ndim - 2))
