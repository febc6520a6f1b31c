"""Spatial covariances without structure: the identity, and any matrix."""

from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from millipode.linalg.arguments import check_fraction
from millipode.linalg.triangular import solve_upper
from millipode.pde.linear import Linear
from millipode.spatial.protocol import Spatial
from millipode.xla.tracing import is_traced


class Identity(Spatial):
    """Γ̆ = I: independent points of equal variance, as without a spatial covariance.

    Args:
        shape: the shape of the points.
    """

    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple)

    def quadratic(self, z: Array) -> Array:
        return jnp.sum(z**2)

    def correlate(self, white: Array) -> Array:
        return white

    def diagonal(self) -> Array:
        return jnp.ones(())

    def logdet(self) -> Array:
        return jnp.zeros(())

    def spectrum(self, linear: Linear) -> Array:
        """Ones, like the modes."""
        modes = jax.eval_shape(
            linear.basis.to_modes, jax.ShapeDtypeStruct(self.shape, jnp.result_type(float))
        )
        return jnp.ones(modes.shape)


class Dense(Spatial):
    """Any symmetric positive definite matrix Γ̆. It is factorised once, in O(d³); a step takes O(d²).

    Args:
        matrix: Γ̆, (d, d) for d points; these are the last axes of y, flattened.
        nugget: a variance that is added to the diagonal of Γ̆.

    >>> model = Dense([[2.0, 1.0], [1.0, 2.0]])
    >>> float(jnp.round(model.quadratic(jnp.array([1.0, 0.0])), 6))
    0.666667
    """

    is_flat = True

    root: Float[Array, "d d"]
    shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, matrix: ArrayLike, nugget: float = 0.0):
        if jnp.iscomplexobj(matrix):
            raise ValueError("Dense: the covariance must be real, got complex numbers.")
        check_fraction(nugget, "Dense: nugget")
        matrix = jnp.asarray(matrix, jnp.result_type(float, jnp.asarray(matrix).dtype))
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ValueError(f"Dense: the covariance must be a square matrix, its shape is {matrix.shape}.")
        concrete = not is_traced(matrix)
        if concrete and not jnp.isfinite(matrix).all():
            raise ValueError("Dense: the covariance has infinite or NaN entries.")
        if concrete and (gap := float(jnp.abs(matrix - matrix.T).max())) > 1e-6 * float(
            jnp.abs(matrix).max()
        ):
            raise ValueError(
                f"Dense: the covariance is not symmetric, A − Aᵀ has entries up to {gap:.3g}. Pass "
                "(A + A.T) / 2 if that is what you mean."
            )
        root = jnp.linalg.cholesky(matrix + nugget * jnp.eye(matrix.shape[0], dtype=matrix.dtype))
        if not is_traced(root) and not jnp.isfinite(root).all():
            smallest, largest = (float(x) for x in jnp.linalg.eigvalsh(matrix)[jnp.array([0, -1])])
            raise ValueError(
                f"Dense: the covariance is not positive definite, its eigenvalues reach from {smallest:.3g} "
                f"to {largest:.3g}. If the cause is rounding, as for smooth kernels on close points, pass "
                f"nugget={max(1e-6 * largest, -2 * smallest):.1g}, or use a rougher kernel, or mp.Matern on "
                "a grid, which does not have this problem."
            )
        self.root, self.shape = root, root.shape[:1]

    @classmethod
    def of_kernel(cls, kernel: Callable[[Array, Array], Any], points: ArrayLike, nugget: float = 0.0) -> Self:
        """The covariance Γ̆ = k(X, X) of a kernel k.

        Args:
            kernel: k, a function of two points that returns a number.
            points: X, an array with the points along its first axis.
            nugget: a variance that is added to the diagonal of Γ̆.

        >>> Dense.of_kernel(lambda x, y: jnp.exp(-jnp.abs(x - y)), jnp.arange(3.0)).shape
        (3,)
        """
        points = jnp.asarray(points)
        matrix = jax.vmap(lambda x: jax.vmap(lambda y: kernel(x, y))(points))(points)
        if jnp.shape(matrix) != (points.shape[0],) * 2:
            raise ValueError(
                f"Dense: a kernel of two points must return a number, got the shape {jnp.shape(matrix)[2:]}."
            )
        return cls(matrix, nugget)

    def quadratic(self, z: Array) -> Array:
        """‖L⁻¹z‖², with the Cholesky factor L."""
        return jnp.sum(solve_upper(self.root.T, z[:, None], transposed=True, library=True) ** 2)

    def correlate(self, white: Array) -> Array:
        """L x, with the Cholesky factor L."""
        return self.root @ white

    def diagonal(self) -> Array:
        """The squared norms of the rows of L, (d,)."""
        return jnp.sum(self.root**2, axis=1)

    def logdet(self) -> Array:
        """The sum 2 Σ log L_ii."""
        return 2 * jnp.sum(jnp.log(jnp.diagonal(self.root)))
