"""What a covariance structure must be able to do, and the Gaussians of the innovation."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, PyTree

from millipode.fields import (
    Field,
    Scale,
    is_shared,
    map_leaves,
    per_leaf,
    rms,
    safe_divide,
    size,
    total,
)
from millipode.priors import Row, Transition


class Innovation(eqx.Module):
    """A zero-mean Gaussian over residuals z with covariance S."""

    @abc.abstractmethod
    def quadratic(self, z: Field) -> Array:
        """Zᵀ S⁻¹ z."""

    @abc.abstractmethod
    def rms(self, z: Field) -> Array:
        """√(zᵀ S⁻¹ z / d)."""

    @abc.abstractmethod
    def std(self) -> Scale:
        """√S_ii, a field or one shared scalar."""

    @abc.abstractmethod
    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """Log det S over the non-degenerate directions, and their number."""


class RootInnovation(Innovation):
    """One that is given by a square root of S."""

    @abc.abstractmethod
    def whiten(self, z: Field) -> Field:
        """S^(−½) z, with 0 where S vanishes."""

    def quadratic(self, z: Field) -> Array:
        """The squared length of that."""
        return total(jax.tree.map(jnp.square, self.whiten(z)))

    def rms(self, z: Field) -> Array:
        """Its root mean square."""
        return rms(self.whiten(z))


class DiagonalInnovation(RootInnovation):
    """S = diag(s_i²), with s a field or, where all unknowns share it, a scalar."""

    scale: Scale

    def whiten(self, z: Field) -> Field:
        """z_i / s_i."""
        if is_shared(self.scale, z):
            # One division, and no selection over z: XLA can then sum the squares without storing them.
            inverse = jax.tree.map(lambda s: safe_divide(jnp.ones_like(s), s), self.scale)
            return map_leaves(jnp.multiply, z, inverse)
        return map_leaves(safe_divide, z, self.scale)

    def quadratic(self, z: Field) -> Array:
        """Σ_i (z_i / s_i)²; a shared scale leaves the sum alone, which nothing then has to be stored for."""
        if not is_shared(self.scale, z):
            return super().quadratic(z)
        inverse = safe_divide(jnp.ones_like(self.scale), self.scale)
        return total(jax.tree.map(jnp.square, z)) * inverse**2

    def std(self) -> Scale:
        """S."""
        return self.scale

    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """2 Σ_i log s_i; a shared scale counts d times."""
        if is_shared(self.scale, z):
            counted = jnp.where(self.scale > 0, size(z), 0)
            return counted * _log_square(self.scale), counted
        leaves = jax.tree.leaves(self.scale)
        counted = total([jnp.where(s > 0, 1, 0) for s in leaves])
        return total([_log_square(s) for s in leaves]), counted


class DenseInnovation(RootInnovation):
    """S = RᵀR with R upper triangular, (d, d). A unit pivot marks a degenerate unknown."""

    root: Float[Array, "d d"]
    degenerate: Array
    like: Field

    def whiten(self, z: Field) -> Field:
        """X with Rᵀx = z."""
        flat, unravel = ravel_pytree(z)
        x = solve_triangular(self.root, flat, trans="T")
        return unravel(jnp.where(self.degenerate, 0, x))

    def std(self) -> Field:
        """Column norms of R."""
        _, unravel = ravel_pytree(self.like)
        norms = jnp.sqrt(jnp.sum(self.root**2, axis=0))
        return unravel(jnp.where(self.degenerate, 0, norms))

    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """2 Σ_i log |R_ii|."""
        logs = _log_square(jnp.diagonal(self.root))
        return jnp.sum(jnp.where(self.degenerate, 0, logs)), jnp.sum(~self.degenerate)


def _log_square(x: Array) -> Array:
    """Log x², and 0 at x = 0."""
    return 2 * jnp.log(jnp.where(x == 0, 1, jnp.abs(x)))


class Corrected(NamedTuple):
    """What one correction gives: K, S and the posterior covariance."""

    gain: Any
    innovation: RootInnovation
    covariance: Any


class Covariance(eqx.Module):
    """A covariance of the prior's state, known by a square root."""

    @classmethod
    @abc.abstractmethod
    def initial(cls, root: PyTree, scale: Scale, y: Field) -> Self:
        """C₀ = diag(scale²) ⊗ rootᵀroot, with one root (k, n) for all unknowns or a field of them."""

    @abc.abstractmethod
    def process_innovation(self, transition: Transition, jacobian: PyTree, z: Field) -> RootInnovation:
        """N(0, H Σ Hᵀ) with H = E₁ − F_y E₀: what the step's noise alone explains of z."""

    @abc.abstractmethod
    def process_correction(self, transition: Transition, jacobian: PyTree, z: Field) -> Field:
        """What z moves y by if the step's noise is all there is: E₀ Σ Hᵀ (H Σ Hᵀ)⁻¹ z."""

    @abc.abstractmethod
    def correct(self, transition: Transition, scale: Scale, jacobian: PyTree, z: Field) -> Corrected:
        """Extrapolate to C⁻ = Φ C Φᵀ + scale² Σ, then condition on a zero residual."""

    @abc.abstractmethod
    def rejected(self, z: Field) -> Corrected:
        """The result of a step that was not taken: a gain of zero and this covariance."""

    @abc.abstractmethod
    def apply_gain(self, gain: PyTree, z: Field) -> tuple[Field, ...]:
        """K z, one field per derivative."""

    @abc.abstractmethod
    def std(self, y: Field, row: Row, noise: Scale, scale: Scale) -> Scale:
        """√(φ C φᵀ + scale² noise) per unknown, for one row φ of a transition."""

    @abc.abstractmethod
    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """C itself, derivative-major. For tests: nothing else may call it."""

    @abc.abstractmethod
    def predict(self, transition: Transition, scale: Scale, y: Field) -> Self:
        """C⁻ = Φ C Φᵀ + scale² Σ."""

    @abc.abstractmethod
    def backward(self, transition: Transition, scale: Scale, y: Field) -> "Kernel":
        """Y(t) | Y(t+h), where C is the covariance of Y(t)."""

    def extend(self, kernel: "Kernel", transition: Transition, scale: Scale, y: Field) -> "Kernel":
        """X | Y(t+h), from a kernel of X | Y(t)."""
        return kernel.compose(self.backward(transition, scale, y))

    @abc.abstractmethod
    def identity(self) -> "Kernel":
        """X | Y(t) for X = Y(t)."""

    @abc.abstractmethod
    def square(self) -> Self:
        """The same covariance with as many rows in its root as ``predict`` gives it."""

    @abc.abstractmethod
    def draw(self, key: Array, y: Field, numbers: "Numbers | None" = None) -> tuple[Field, ...]:
        """A sample of N(0, C), one field per derivative; or of other ``numbers`` with that covariance."""


class Kernel(eqx.Module):
    """X | Y ~ N(E[X] + G (Y − E[Y]), P): what an earlier state is, given a later one.

    Kernels know nothing of means, which are fields and live elsewhere.
    """

    gain: eqx.AbstractVar[Any]
    noise: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def push(self, covariance: Any) -> Any:
        """Cov(X) = G C Gᵀ + P, if C = Cov(Y)."""

    @abc.abstractmethod
    def compose(self, other: Self) -> Self:
        """X | Z, if ``other`` is Y | Z: the gain G G', and G P' Gᵀ + P."""

    @abc.abstractmethod
    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """G Y, one field per derivative."""

    @abc.abstractmethod
    def through(self, gain: PyTree) -> PyTree:
        """G K, for a gain K of the filter."""

    @abc.abstractmethod
    def after(self, transition: Transition) -> Self:
        """The same kernel with the gain G Φ, for the mean of Y as its past gives it."""


Numbers = Callable[[Array, Field, int], Field]


def normal(key: Array, y: Field, rows: int) -> Field:
    """Independent standard normal numbers: a field like y with an axis of ``rows`` in front."""
    leaves, tree = jax.tree.flatten(y)
    keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))
    draws = [jax.random.normal(k, (rows, *x.shape), x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, draws)


def signs(key: Array, y: Field, rows: int) -> Field:
    """The same with numbers ±1, which have the same moments up to the third; one word of bits per unknown."""
    leaves, tree = jax.tree.flatten(y)
    keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))

    def draw(key: Array, x: Array) -> Array:
        words = jax.random.bits(key, (-(-rows // 32), *x.shape), jnp.uint32)
        return jnp.stack([1 - 2 * ((words[i // 32] >> i % 32) & 1).astype(x.dtype) for i in range(rows)])

    return jax.tree.unflatten(tree, [draw(k, x) for k, x in zip(keys, leaves, strict=True)])


def shared_per_leaf(scale: Scale, y: Field) -> list[Array]:
    """A scale as one array per leaf of y."""
    return jax.tree.leaves(per_leaf(scale, y))
