"""Models of space without structure: none at all, variances, or any matrix."""

from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, ArrayLike, Float

from millipode.pde.linear import Linear
from millipode.spatial.protocol import Spatial


class Identity(Spatial):
    """Γ̆ = I, which is what no model means.

    Args:
        shape: of the points.
    """

    shape: tuple[int, ...] = eqx.field(static=True, converter=tuple)

    def quadratic(self, z: Array) -> Array:
        """zᵀz."""
        return jnp.sum(z**2)

    def correlate(self, white: Array) -> Array:
        """X."""
        return white

    def diagonal(self) -> Array:
        """1."""
        return jnp.ones(())

    def logdet(self) -> Array:
        """0."""
        return jnp.zeros(())

    def spectrum(self, linear: Linear) -> Array:
        """1 for every mode."""
        modes = jax.eval_shape(
            linear.basis.to_modes, jax.ShapeDtypeStruct(self.shape, jnp.result_type(float))
        )
        return jnp.ones(modes.shape)


class Dense(Spatial):
    """Γ̆ = any symmetric positive definite matrix, factorised once: O(d³), then O(d²) per step.

    Args:
        matrix: Γ̆, over the last axes of y, flattened.
        nugget: added to its diagonal.

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
        if not isinstance(nugget, jax.core.Tracer) and not 0 <= float(nugget) < np.inf:
            raise ValueError(f"Dense: nugget is a variance, at least 0; got {nugget}.")
        matrix = jnp.asarray(matrix, jnp.result_type(float, jnp.asarray(matrix).dtype))
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ValueError(f"Dense: the covariance must be a square matrix, its shape is {matrix.shape}.")
        concrete = not isinstance(matrix, jax.core.Tracer)
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
        if not isinstance(root, jax.core.Tracer) and not jnp.isfinite(root).all():
            smallest, largest = (float(x) for x in jnp.linalg.eigvalsh(matrix)[jnp.array([0, -1])])
            raise ValueError(
                f"Dense: the covariance is not positive definite, its eigenvalues reach from {smallest:.3g} "
                f"to {largest:.3g}. If that is rounding, as of smooth kernels on close points, pass "
                f"nugget={max(1e-6 * largest, -2 * smallest):.1g}, or use a rougher kernel or mp.Matern on a "
                "grid, which has no such trouble."
            )
        self.root, self.shape = root, root.shape[:1]

    @classmethod
    def of_kernel(cls, kernel: Callable[[Array, Array], Any], points: ArrayLike, nugget: float = 0.0) -> Self:
        """Γ̆ = k(X, X).

        Args:
            kernel: of two points.
            points: X, the point index first.
            nugget: added to the diagonal.

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
        """‖L⁻¹z‖²."""
        return jnp.sum(solve_triangular(self.root, z, lower=True) ** 2)

    def correlate(self, white: Array) -> Array:
        """L x, L the Cholesky factor."""
        return self.root @ white

    def diagonal(self) -> Array:
        """Squared norms of the rows of L."""
        return jnp.sum(self.root**2, axis=1)

    def logdet(self) -> Array:
        """2 Σ log L_ii."""
        return 2 * jnp.sum(jnp.log(jnp.diagonal(self.root)))
