"""Gaussians N(0, S) over residuals, given by a square root of S, with or without a spatial covariance."""

import abc

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from millipode.linalg.fields import (
    Coefficient,
    Field,
    is_shared,
    map_leaves,
    rms,
    safe_divide,
    safe_sqrt,
    size,
    total,
)
from millipode.linalg.triangular import solve_upper
from millipode.spatial.space import Space
from millipode.xla.module import Module


class Innovation(Module):
    """A zero-mean Gaussian over residuals z, with covariance S."""

    @abc.abstractmethod
    def quadratic(self, z: Field) -> Array:
        """The number zᵀ S⁻¹ z."""

    @abc.abstractmethod
    def rms(self, z: Field) -> Array:
        """The number √(zᵀ S⁻¹ z / d)."""

    @abc.abstractmethod
    def whiten(self, z: Field) -> Field:
        """S^(−½) z, with 0 where S vanishes."""

    @abc.abstractmethod
    def std(self) -> Coefficient:
        """√S_ii, a field or one shared number."""

    @abc.abstractmethod
    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """log det S over the non-degenerate directions, and their number."""

    def shared_quadratic(self, z: Field, form: Array) -> Array | None:
        """The number zᵀ S⁻¹ z if S = s² I, from the number zᵀz; None for any other S.

        Args:
            z: the residual.
            form: the number zᵀz, or zᵀ Γ̆⁻¹ z for S = s² Γ̆.
        """
        return None


class RootInnovation(Innovation):
    """An innovation that is given by a square root of S."""

    def quadratic(self, z: Field) -> Array:
        """The squared length of the whitened residual."""
        return total(jax.tree.map(jnp.square, self.whiten(z)))

    def rms(self, z: Field) -> Array:
        """The root mean square of the whitened residual."""
        return rms(self.whiten(z))


class DiagonalInnovation(RootInnovation):
    """S = diag(s_i²).

    Attributes:
        deviation: s, a field or, where all unknowns share it, one number.
    """

    deviation: Coefficient

    def whiten(self, z: Field) -> Field:
        """z_i / s_i."""
        if is_shared(self.deviation, z):
            return map_leaves(jnp.multiply, z, self._inverse())
        return map_leaves(safe_divide, z, self.deviation)

    def rms(self, z: Field) -> Array:
        """√(Σ_i (z_i / s_i)² / d), with one division and no intermediate field if all unknowns share s."""
        return self._inverse() * rms(z) if is_shared(self.deviation, z) else super().rms(z)

    def _inverse(self) -> Array:
        return safe_divide(jnp.ones_like(self.deviation), self.deviation)

    def quadratic(self, z: Field) -> Array:
        """Σ_i (z_i / s_i)². With one shared s the sum of squares is scaled once, so no field is stored."""
        if is_shared(self.deviation, z):
            return self._times_form(total(jax.tree.map(jnp.square, z)))
        return super().quadratic(z)

    def shared_quadratic(self, z: Field, form: Array) -> Array | None:
        """The form divided by s² if all unknowns share s, else None."""
        return self._times_form(form) if is_shared(self.deviation, z) else None

    def _times_form(self, form: Array) -> Array:
        return form * self._inverse() ** 2

    def std(self) -> Coefficient:
        """The deviations s."""
        return self.deviation

    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """2 Σ_i log s_i over the non-zero s_i, and their number; a shared s counts d times."""
        if is_shared(self.deviation, z):
            counted = jnp.where(self.deviation > 0, size(z), 0)
            return counted * _log_square(self.deviation), counted
        leaves = jax.tree.leaves(self.deviation)
        counted = total([jnp.where(s > 0, 1, 0) for s in leaves])
        return total([_log_square(s) for s in leaves]), counted


class CoupledInnovation(RootInnovation):
    """S = RᵀR for every mode, with R upper triangular; z is (c, *modes).

    Attributes:
        root: R, (c, c, *modes).
    """

    root: Float[Array, "c c *modes"]

    def whiten(self, z: Field) -> Field:
        """The field x with Rᵀx = z, and 0 where S vanishes."""
        return solve_upper(self.root, z[:, None], transposed=True)[:, 0]

    def weights(self, z: Field) -> Field:
        """S⁻¹ z, (c, *modes)."""
        return solve_upper(self.root, self.whiten(z)[:, None])[:, 0]

    def std(self) -> Coefficient:
        """The lengths of the columns of R."""
        return safe_sqrt(jnp.sum(self.root**2, axis=0))

    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """2 Σ log R_aa over all modes and the non-zero R_aa, and their number."""
        pivots = jnp.stack([self.root[a, a] for a in range(self.root.shape[0])])
        return 2 * jnp.sum(jnp.log(jnp.where(pivots > 0, pivots, 1))), jnp.sum(jnp.where(pivots > 0, 1, 0))


class DenseInnovation(RootInnovation):
    """S = RᵀR with R upper triangular, (d, d).

    Attributes:
        root: R, (d, d); a unit pivot stands for a degenerate unknown.
        degenerate: which unknowns are degenerate, (d,).
        like: any field like z.
    """

    root: Float[Array, "d d"]
    degenerate: Array
    like: Field

    def whiten(self, z: Field) -> Field:
        """The field x with Rᵀx = z, and 0 for degenerate unknowns."""
        flat, unravel = ravel_pytree(z)
        x = solve_upper(self.root, flat[:, None], transposed=True, library=True)[:, 0]
        return unravel(jnp.where(self.degenerate, 0, x))

    def std(self) -> Field:
        """The lengths of the columns of R."""
        _, unravel = ravel_pytree(self.like)
        norms = jnp.sqrt(jnp.sum(self.root**2, axis=0))
        return unravel(jnp.where(self.degenerate, 0, norms))

    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """2 Σ_i log |R_ii| over the non-degenerate unknowns, and their number."""
        logs = _log_square(jnp.diagonal(self.root))
        return jnp.sum(jnp.where(self.degenerate, 0, logs)), jnp.sum(~self.degenerate)


def _log_square(x: Array) -> Array:
    """log x², and 0 at x = 0."""
    return 2 * jnp.log(jnp.where(x == 0, 1, jnp.abs(x)))


class Correlated(Innovation):
    """S = Γ̆^½ S̃ Γ̆^½, for an S̃ that commutes with Γ̆: s² I, or diagonal in the basis where Γ̆ is.

    Attributes:
        white: S̃.
        space: Γ̆.
        form: the number zᵀ Γ̆⁻¹ z for the residual z of the step.
    """

    white: Innovation
    space: Space
    form: Array

    def quadratic(self, z: Field) -> Array:
        """zᵀ S⁻¹ z, from the form if S̃ = s² I, else by whitening with S̃ first."""
        shared = self.white.shared_quadratic(z, self.form)
        return self.space.quadratic(self.white.whiten(z)) if shared is None else shared

    def rms(self, z: Field) -> Array:
        """The number √(zᵀ S⁻¹ z / d)."""
        return safe_sqrt(self.quadratic(z) / size(z))

    def whiten(self, z: Field) -> Field:
        """Raise ``NotImplementedError``: a spatial covariance has a quadratic form, but no whitening."""
        raise NotImplementedError(
            "A spatial covariance comes with a scalar diffusion, which needs zᵀ S⁻¹ z only."
        )

    def std(self) -> Coefficient:
        """The product of the standard deviations of S̃ and Γ̆."""
        return map_leaves(jnp.multiply, self.space.std, self.white.std())

    def log_determinant(self, z: Field) -> tuple[Array, Array]:
        """log det S̃ + log det Γ̆ (0 if S vanishes), and the number of non-degenerate directions."""
        log, rank = self.white.log_determinant(z)
        return log + jnp.where(rank > 0, self.space.log_determinant, 0), rank


def correlated(space: Space | None, innovation: Innovation, form: Array | None) -> Innovation:
    """The innovation for a spatial covariance Γ̆, from the one for the identity in place of Γ̆.

    Args:
        space: Γ̆; None for the identity.
        innovation: the innovation for Γ̆ = I.
        form: the number zᵀ Γ̆⁻¹ z for the residual z of the step; None without Γ̆.
    """
    return innovation if space is None or form is None else Correlated(innovation, space, form)
