"""What every spatial covariance Γ̆ offers, and a diagonal one."""

import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from millipode.linalg.arguments import as_positive
from millipode.pde.linear import Linear
from millipode.xla.module import Module


class Spatial(Module):
    """Γ̆: a positive definite covariance between points in space, of one component of y.

    To write your own, derive from this class (an ``equinox.Module``), declare ``shape`` and write the four
    abstract methods; everything else follows from them. They are called inside ``jit``, so write them in JAX
    operations.

    Attributes:
        shape: the shape of the points, which are the last axes of y. The axes before them number components,
            which are independent of each other.
        is_flat: whether only the number of points matters, so that they may lie along any number of axes.
    """

    shape: eqx.AbstractVar[tuple[int, ...]]
    is_flat: ClassVar[bool] = False

    @abc.abstractmethod
    def quadratic(self, z: Float[Array, "*shape"]) -> Array:
        """The number zᵀ Γ̆⁻¹ z."""

    @abc.abstractmethod
    def correlate(self, white: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """L x for any L with L Lᵀ = Γ̆, which turns white noise into a sample."""

    @abc.abstractmethod
    def diagonal(self) -> Array:
        """The variance of each point, of the given shape, or one number for all of them."""

    @abc.abstractmethod
    def logdet(self) -> Array:
        """The number log det Γ̆."""

    def sample(self, key: Array) -> Float[Array, "*shape"]:
        """A sample of N(0, Γ̆)."""
        return self.correlate(jax.random.normal(key, self.shape, self._kind))

    def to_dense(self) -> Float[Array, "d d"]:
        """Γ̆ as a matrix, for tests and small problems: O(d²)."""
        d = math.prod(self.shape)
        columns = jax.vmap(self.correlate)(jnp.eye(d, dtype=self._kind).reshape(d, *self.shape))
        root = columns.reshape(d, d)
        return root.T @ root

    def spectrum(self, linear: Linear) -> Array:
        """The variance of each mode, like the modes, if the basis of a linear part diagonalises Γ̆."""
        raise ValueError(
            f"SpectralEK1 needs a stationary covariance on its grid, mp.Matern(grid, ...) or "
            f"mp.GMRF(grid, ...): {type(self).__name__} couples the modes of that grid. Use one of these, or "
            "mp.EK0."
        )

    @property
    def _kind(self) -> Any:
        kinds = [x.dtype for x in jax.tree.leaves(self) if eqx.is_inexact_array(x)]
        return jnp.result_type(*kinds) if kinds else jnp.result_type(float)


class Diagonal(Spatial):
    """Γ̆ = diag(v): independent points with known relative variances.

    Args:
        variances: v > 0, of the shape of y or of its last axes.

    >>> float(Diagonal([1.0, 4.0]).quadratic(jnp.array([1.0, 2.0])))
    2.0
    """

    variances: Float[Array, "*shape"]
    shape: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, variances: ArrayLike):
        self.variances = jnp.asarray(as_positive(variances, "Diagonal: variances"))
        self.shape = self.variances.shape

    def quadratic(self, z: Array) -> Array:
        """The sum Σ z²/v."""
        return jnp.sum(z**2 / self.variances)

    def correlate(self, white: Array) -> Array:
        """The product √v x."""
        return jnp.sqrt(self.variances) * white

    def diagonal(self) -> Array:
        """The variances v."""
        return self.variances

    def logdet(self) -> Array:
        """The sum Σ log v."""
        return jnp.sum(jnp.log(self.variances))
