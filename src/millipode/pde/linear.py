"""Linear parts of equations, given by their eigenvalues in a basis with fast transforms."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from millipode.linalg.fields import Coefficient, Field, dtype
from millipode.linalg.jacobians import CoupledJacobian, DiagonalJacobian, Jacobian
from millipode.pde.bases import Basis, Stacked
from millipode.xla.tracing import is_traced


class Spectrum(NamedTuple):
    """The linear part of a certain problem, with one eigenvalue per mode.

    Attributes:
        basis: V; its modes are those of y, or one array (c, *modes) where a reaction couples the components.
        eigenvalues: λ, like the modes.
        reaction: R, a matrix (c, c) that couples the components of every mode; None for no coupling.
    """

    basis: Basis
    eigenvalues: Field
    reaction: Array | None

    def jacobian(self) -> Jacobian:
        """diag(λ) + R, as a linear map of the modes."""
        if self.reaction is None:
            return DiagonalJacobian(self.eigenvalues)
        return CoupledJacobian(self.eigenvalues, self.reaction)


class Linear(eqx.Module):
    """The stiff linear part of f: a basis in which it is diagonal, and its eigenvalues there.

    ``Grid.diffusion`` and ``Grid.operator`` make linear parts. Only the gain of a filter depends on it, so
    leaving a part of f out of it costs accuracy or stability, never consistency.

    Args:
        basis: the orthonormal basis.
        eigenvalues: one array for all leaves of y, or a pytree with one per leaf; each must broadcast to the
            shape of the leaf's modes. For a single array y, also a list with one per component.
        reaction: a matrix (c, c) that couples the c components of y, in their order; None for no coupling.
        lengths: the side lengths of the grid from which it was made; None if it was not made from a grid.
    """

    basis: Basis
    eigenvalues: PyTree
    reaction: Array | np.ndarray | None = None
    lengths: tuple[float, ...] | None = eqx.field(static=True, default=None)

    def check_span(self, span: float | None, kind: Any) -> None:
        """Warn of anti-diffusion, and of modes that grow by more than the precision of y allows for.

        The covariance of a growing mode grows like e^{2λt}, even if the mode itself stays small. Once the
        noise of a step is small beside it, the gain blames every residual on earlier errors and corrects y
        accordingly, so that the steps become shorter and shorter.

        Args:
            span: t1 − t0, negative if the user integrates backwards in time, and None if traced.
            kind: the dtype of y.
        """
        smallest, largest = _extremes(jax.tree.leaves(self.eigenvalues))
        if largest > max(0.0, -smallest):
            warnings.warn(
                f"linear has positive eigenvalues up to {largest:.3g} and none as negative: like diffusion "
                "backwards in time, this is unstable at every scale. Check the sign of its coefficients.",
                stacklevel=6,
            )
            return
        growth = 0.0 if span is None else max(span * smallest, span * largest)
        if growth > -0.5 * math.log(jnp.finfo(kind).eps):
            warnings.warn(
                f"linear has modes that grow by e^{growth:.3g} over the time span. Their standard deviation "
                "grows by as much, and the steps become short. Growth is not stiff: leave it out of linear, "
                "for example with np.minimum(eigenvalues, 0).",
                stacklevel=6,
            )

    def fitted(self, y: Field) -> Spectrum:
        """The spectrum for a state like y; raise ``ValueError`` if the eigenvalues do not fit its modes."""
        self.basis.check(y)
        modes, tree = jax.tree.flatten(jax.eval_shape(self.basis.to_modes, y))
        given, kind = self._per_leaf(y, modes, tree), dtype(y)
        for values, leaf in zip(given, modes, strict=True):
            if not _can_be_broadcast(np.shape(values), leaf.shape):
                raise ValueError(
                    f"linear has eigenvalues of shape {np.shape(values)}, which does not fit modes of shape "
                    f"{leaf.shape}: give one coefficient, or one per component of y."
                )
        spread = [jnp.broadcast_to(jnp.asarray(v, kind), m.shape) for v, m in zip(given, modes, strict=True)]
        eigenvalues = jax.tree.unflatten(tree, spread)
        if self.reaction is None:
            return Spectrum(self.basis, eigenvalues, None)
        return self._coupled(y, eigenvalues)

    def jacobian(self, y: Field) -> Jacobian:
        """V (diag(λ) + R) Vᵀ, as a linear map of fields like y."""
        spectrum = self.fitted(y)
        return InBasis(spectrum.basis, spectrum.jacobian())

    def _per_leaf(self, y: Field, modes: list[Any], tree: Any) -> list[Any]:
        """The eigenvalues of every leaf, as the user gave them."""
        given = self.eigenvalues
        if len(modes) == 1 and isinstance(given, list | tuple) and not isinstance(y, list | tuple):
            given = (jnp if is_traced(given) else np).stack(given)  # one per component of an array
        if jax.tree.structure(given) == tree:
            return jax.tree.leaves(given)
        if isinstance(given, np.ndarray | jax.Array):
            return [given] * len(modes)
        raise ValueError(
            f"linear has components {jax.tree.structure(given)}, but y has {tree}; give one eigenvalue "
            "or coefficient per leaf of y, or one for all."
        )

    def _coupled(self, y: Field, eigenvalues: Field) -> Spectrum:
        """The spectrum with the components stacked along one axis, so that the reaction can couple them."""
        stacked = Stacked.of(self.basis, y)
        values = stacked.stack(eigenvalues)
        reaction = jnp.asarray(self.reaction, values.dtype)
        if reaction.shape != (values.shape[0],) * 2:
            raise ValueError(
                f"reaction has shape {reaction.shape}, but y has {values.shape[0]} components: give one "
                "row and one column for each."
            )
        return Spectrum(stacked, values, reaction)


class InBasis(Jacobian):
    """F = V F̂ Vᵀ: a Jacobian that is given in modes, as a linear map of fields.

    Attributes:
        basis: V.
        modes: F̂, a Jacobian of the modes.
    """

    basis: Basis
    modes: Jacobian

    def multiply(self, x: Field) -> Field:
        """F x, by a product in modes between two transforms."""
        return self._in_modes(self.modes.multiply, x)

    def solve(self, c: Coefficient, r: Field) -> Field:
        """The field x with (I − c F) x = r, by a solve in modes between two transforms; c is one number."""
        return self._in_modes(lambda modes: self.modes.solve(c, modes), r)

    def minus(self, rate: Coefficient) -> "InBasis":
        """F − rate · I; one rate for all unknowns is the same in modes."""
        return InBasis(self.basis, self.modes.minus(rate))

    def _in_modes(self, function: Callable[[Field], Field], x: Field) -> Field:
        return self.basis.from_modes(function(self.basis.to_modes(x)))


def _can_be_broadcast(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    padded = (1,) * (len(target) - len(shape)) + shape
    return len(padded) == len(target) and all(n in (1, m) for n, m in zip(padded, target, strict=True))


def _extremes(eigenvalues: list[Any]) -> tuple[float, float]:
    """The smallest and the largest eigenvalue; NaN if they are traced."""
    if is_traced(eigenvalues):
        return math.nan, math.nan
    return min(float(np.min(x)) for x in eigenvalues), max(float(np.max(x)) for x in eigenvalues)
