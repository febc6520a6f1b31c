"""The linearisation of the spectral EK1: a linear part that a fast basis diagonalises."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from millipode.linalg.fields import Field
from millipode.linalg.jacobians import Jacobian
from millipode.model.linearisation import Linearisation
from millipode.model.vector_field import VectorField
from millipode.pde.bases import Basis
from millipode.pde.linear import Linear, Spectrum


class Reaction(NamedTuple):
    """The mean reaction coefficients of f, as they were last measured.

    Attributes:
        rates: one per component in the structure of the modes, or a matrix where components are coupled.
        steps: the number of accepted steps.
    """

    rates: PyTree[Array]
    steps: Array


class SpectralFirstOrder(Linearisation):
    """F = V (diag(λ) + R) Vᵀ, the spectral EK1; all fields are coefficients in the basis V.

    Attributes:
        spectrum: V, λ and R.
        refresh: after how many steps to measure the reaction in f again; None for never.
    """

    spectrum: Spectrum
    refresh: int | None = eqx.field(static=True, default=None)

    @classmethod
    def of(cls, linear: Linear, y: Field, refresh: int | None) -> Self:
        """The linearisation of a problem with a state like y."""
        return cls(linear.fitted(y), refresh)

    @property
    def basis(self) -> Basis:
        """V."""
        return self.spectrum.basis

    @property
    def rates(self) -> Field:
        """λ."""
        return self.spectrum.eigenvalues

    @property
    def is_constant(self) -> bool:
        """Within a step, even if rates are measured anew."""
        return True

    def memory(self) -> tuple[()] | Reaction:
        """The declared reaction, and no other rates."""
        if self.refresh is None:
            return ()
        rates = self.spectrum.reaction
        if rates is None:
            rates = jax.tree.map(lambda x: jnp.zeros(x.shape[: self.basis.leading(x)], x.dtype), self.rates)
        return Reaction(rates, jnp.zeros((), jnp.int32))

    def refreshed(self, field: VectorField, t: Array, y: Field, memory: Any) -> Any:
        """Measure the rates after every so many steps."""
        if self.refresh is None:
            return memory
        rates = lax.cond(
            memory.steps % self.refresh == 0,
            lambda y: self._measured(field, t, y),
            lambda y: memory.rates,
            y,
        )
        return Reaction(rates, memory.steps + 1)

    def __call__(self, field: VectorField, t: Array, y: Field, memory: Any = ()) -> tuple[Field, Jacobian]:
        """Evaluate f, the whole of it, in space; F is a map of modes."""
        basis, eigenvalues, reaction = self.spectrum
        value = basis.to_modes(field(t, basis.from_modes(y)))
        eigenvalues = jax.tree.map(lambda x: field.sign * x, eigenvalues)
        if reaction is not None:
            reaction = field.sign * reaction if self.refresh is None else memory.rates
        elif self.refresh is not None:
            eigenvalues = jax.tree.map(_plus_rates, eigenvalues, memory.rates)
        return value, Spectrum(basis, eigenvalues, reaction).jacobian()

    def _measured(self, field: VectorField, t: Array, y: Field) -> PyTree[Array]:
        """What f has beyond λ along the least damped mode of each component, by one JVP for each.

        On a periodic grid, or one with Neumann walls, that mode is constant in space, and the result is the
        mean over space of ∂f/∂y without its diffusion.
        """
        basis, is_coupled = self.basis, self.spectrum.reaction is not None
        leaves, tree = jax.tree.flatten(self.rates)
        _, jvp = jax.linearize(lambda x: basis.to_modes(field(t, basis.from_modes(x))), y)
        found = []
        for i, leaf in enumerate(leaves):

            def response(seed: Array, i: int = i) -> Array:
                seeds = [seed if k == i else jnp.zeros_like(x) for k, x in enumerate(leaves)]
                return jax.tree.leaves(jvp(jax.tree.unflatten(tree, seeds)))[i]

            leading = leaf.shape[: basis.leading(leaf)]
            matrix = _reaction(response, leaf, math.prod(leading), field.sign, is_coupled)
            if is_coupled:
                return matrix
            # Growth is not stiff, and other components may well keep a growing one small.
            found.append(jnp.minimum(jnp.diagonal(matrix), 0).reshape(leading))
        return jax.tree.unflatten(tree, found)


def _reaction(
    response: Callable[[Array], Array], eigenvalues: Array, count: int, sign: Array, same_mode: bool
) -> Float[Array, "c c"]:
    """How ``count`` components react to each other, beyond their eigenvalues; column by column.

    Args:
        response: the derivative of f along modes like the eigenvalues.
        eigenvalues: λ in user time.
        count: the number of components.
        sign: the direction of time.
        same_mode: whether all components are measured in one mode, the least damped one in the mean.
    """
    flat = eigenvalues.reshape(count, -1)
    least = jnp.argmax(jnp.mean(flat, axis=0) if same_mode else flat, axis=-1)
    least = jnp.broadcast_to(least, flat.shape[:1])
    columns = []
    for c in range(count):
        seed = jnp.zeros_like(flat).at[c, least[c]].set(1).reshape(eigenvalues.shape)
        known = jnp.where(jnp.arange(count) == c, flat[c, least[c]], 0)
        columns.append(response(seed).reshape(flat.shape)[:, least[c]] - sign * known)
    return jnp.stack(columns, axis=1)


def _plus_rates(eigenvalues: Array, rates: Array) -> Array:
    return eigenvalues + rates.reshape(*rates.shape, *(1,) * (eigenvalues.ndim - rates.ndim))
