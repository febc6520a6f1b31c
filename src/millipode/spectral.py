"""Linear parts that a fast basis diagonalises, and the linearisation that is made of them."""

import math
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from millipode.basis import Basis, Stacked, Waves
from millipode.covariance import CoupledJacobian
from millipode.fields import Field, dtype, same_structure
from millipode.linearise import Linearisation, VectorField


class Linear(eqx.Module):
    """The stiff linear part of f: a basis in which it is diagonal, and its eigenvalues there.

    ``Grid.diffusion`` and ``Grid.operator`` make them. Only the gain of the filter depends on it, so what it
    misses of f costs accuracy or stability, never consistency.

    Args:
        basis: the orthonormal basis.
        eigenvalues: like y in modes, or what can be broadcast to that; one array for all leaves, or one each.
        reaction: a small matrix that couples the components of y, in their order, or None.
        lengths: the side lengths of the grid that it comes from, if from any.
    """

    basis: Basis
    eigenvalues: PyTree
    reaction: Array | np.ndarray | None = None
    lengths: tuple[float, ...] | None = eqx.field(static=True, default=None)

    def check_span(self, span: float | None, kind: Any) -> None:
        """Warn of anti-diffusion, and of a mode so growing that its uncertainty drowns what residuals say.

        The span is negative for backwards in time, and None if traced; ``kind`` is the type of y.

        The covariance of a growing mode follows e^{2λt}, whatever holds the mode itself in check. Once the
        noise of a step is small next to it, every residual counts as news of the past, and moves y by what
        it would take to explain it there: steps become shorter and shorter.
        """
        smallest, largest = _extremes(jax.tree.leaves(self.eigenvalues))
        if largest > max(0.0, -smallest):
            warnings.warn(
                f"linear has positive eigenvalues up to {largest:.3g} and none as negative: like diffusion "
                "backwards in time, this is unstable at every scale. Check the sign of its coefficients.",
                stacklevel=7,
            )
            return
        growth = 0.0 if span is None else max(span * smallest, span * largest)
        if growth > -0.5 * math.log(jnp.finfo(kind).eps):
            warnings.warn(
                f"linear has modes that grow by e^{growth:.3g} over the time span; the filter becomes "
                "uncertain of them by as much, and its steps short. Growth is not stiff: leave it out of "
                "linear, for example by np.minimum(eigenvalues, 0).",
                stacklevel=7,
            )

    def fitted(self, y: Field, refresh: int | None = None) -> "SpectralFirstOrder":
        """The linearisation of a problem with a state like y."""
        leaves, tree = jax.tree.flatten(y)
        modes = jax.tree.leaves(jax.eval_shape(self._to_modes, y))
        given = self.eigenvalues
        if len(leaves) == 1 and isinstance(given, list | tuple) and not isinstance(y, list | tuple):
            given = np.stack(given)  # one per component of an array
        if same_structure(given, y):
            found = jax.tree.leaves(given)
        elif isinstance(given, np.ndarray | jax.Array):
            found = [given] * len(leaves)
        else:
            raise ValueError(
                f"linear has components {jax.tree.structure(given)}, but y has {tree}; give one eigenvalue "
                "or coefficient per leaf of y, or one for all."
            )
        for values, leaf in zip(found, modes, strict=True):
            if not _can_be_broadcast(np.shape(values), leaf.shape):
                raise ValueError(
                    f"linear has eigenvalues of shape {np.shape(values)}, which does not fit modes of shape "
                    f"{leaf.shape}: give one coefficient, or one per component of y."
                )
        kind = dtype(y)
        spread = [jnp.broadcast_to(jnp.asarray(v, kind), m.shape) for v, m in zip(found, modes, strict=True)]
        eigenvalues = jax.tree.unflatten(tree, spread)
        if self.reaction is None:
            return SpectralFirstOrder(self.basis, eigenvalues, None, refresh)
        return self._coupled(y, spread, refresh)

    def _coupled(self, y: Field, eigenvalues: list[Array], refresh: int | None) -> "SpectralFirstOrder":
        """All components along one axis."""
        if not isinstance(self.basis, Waves):
            raise TypeError("reaction=... needs the basis of a grid; put it into the eigenvalues of yours.")
        stacked, axes = Stacked.of(self.basis, y), len(self.basis.shape)
        values = jnp.concatenate([x.reshape(-1, *x.shape[x.ndim - axes :]) for x in eigenvalues])
        reaction = jnp.asarray(self.reaction, values.dtype)
        if reaction.shape != (values.shape[0],) * 2:
            raise ValueError(
                f"reaction has shape {reaction.shape}, but y has {values.shape[0]} components: give one "
                "row and one column for each."
            )
        return SpectralFirstOrder(stacked, values, reaction, refresh)

    def _to_modes(self, y: Field) -> Field:
        for leaf in jax.tree.leaves(y):
            shape = self.basis.shape if isinstance(self.basis, Waves) else ()
            if leaf.shape[leaf.ndim - len(shape) :] != shape or leaf.ndim < len(shape):
                raise ValueError(
                    f"linear lives on a grid of shape {shape}, but y has an array of shape {leaf.shape}, "
                    "which does not end with these axes."
                )
        return self.basis.to_modes(y)


def _can_be_broadcast(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    padded = (1,) * (len(target) - len(shape)) + shape
    return len(padded) == len(target) and all(n in (1, m) for n, m in zip(padded, target, strict=True))


def _extremes(eigenvalues: list[Any]) -> tuple[float, float]:
    """The smallest and the largest; NaN if traced."""
    if any(isinstance(x, jax.core.Tracer) for x in eigenvalues):
        return math.nan, math.nan
    return min(float(np.min(x)) for x in eigenvalues), max(float(np.max(x)) for x in eigenvalues)


class Reaction(NamedTuple):
    """The mean reaction coefficients of f, as last seen.

    Attributes:
        rates: one per component in the structure of y, or a matrix where components are coupled.
        steps: accepted so far.
    """

    rates: PyTree
    steps: Array


class SpectralFirstOrder(Linearisation):
    """F_y = V diag(λ) Vᵀ, the spectral EK1; all fields are coefficients in the basis V.

    Attributes:
        waves: V.
        eigenvalues: λ, a field over the modes.
        reaction: what couples the components of each mode, or None.
        refresh: after how many steps to look at the reaction in f again; None for never.
    """

    waves: Basis
    eigenvalues: Field
    reaction: Array | None = None
    refresh: int | None = eqx.field(static=True, default=None)

    @property
    def basis(self) -> Basis:
        """V."""
        return self.waves

    @property
    def rates(self) -> Field:
        """λ."""
        return self.eigenvalues

    def memory(self) -> tuple[()] | Reaction:
        """No reaction beside the declared one."""
        if self.refresh is None:
            return ()
        rates = self.reaction
        if rates is None:
            rates = jax.tree.map(
                lambda x: jnp.zeros(x.shape[: self.basis.leading(x)], x.dtype), self.eigenvalues
            )
        return Reaction(rates, jnp.zeros((), jnp.int32))

    def refreshed(self, field: VectorField, t: Array, y: Field, memory: Any) -> Any:
        """Look at f in every so many steps."""
        if self.refresh is None:
            return memory
        rates = lax.cond(
            memory.steps % self.refresh == 0,
            lambda y: self._rates(field, t, y),
            lambda y: memory.rates,
            y,
        )
        return Reaction(rates, memory.steps + 1)

    def __call__(
        self, field: VectorField, t: Array, y: Field, memory: Any = ()
    ) -> tuple[Field, Field | CoupledJacobian]:
        """Evaluate f, the whole of it, in space."""
        value = self.basis.to_modes(field(t, self.basis.from_modes(y)))
        eigenvalues = jax.tree.map(lambda x: field.sign * x, self.eigenvalues)
        if self.reaction is None:
            if self.refresh is not None:
                eigenvalues = jax.tree.map(_plus_rates, eigenvalues, memory.rates)
            return value, eigenvalues
        reaction = field.sign * self.reaction if self.refresh is None else memory.rates
        return value, CoupledJacobian(eigenvalues, reaction)

    def _rates(self, field: VectorField, t: Array, y: Field) -> PyTree:
        """What f has beyond λ along the least damped mode of each component, one JVP for each.

        On a grid without walls or with Neumann ones that mode is constant in space, and what is found is the
        mean over space of ∂f/∂y without its diffusion.
        """
        leaves, tree = jax.tree.flatten(self.eigenvalues)
        _, jvp = jax.linearize(lambda x: self.basis.to_modes(field(t, self.basis.from_modes(x))), y)
        found = []
        for i, leaf in enumerate(leaves):
            leading = leaf.shape[: self.basis.leading(leaf)]
            flat = leaf.reshape(math.prod(leading), -1)
            least = jnp.argmax(jnp.mean(flat, axis=0) if self.reaction is not None else flat, axis=-1)
            least = jnp.broadcast_to(least, flat.shape[:1])
            rates = []
            for c in range(flat.shape[0]):
                seed = jnp.zeros_like(flat).at[c, least[c]].set(1).reshape(leaf.shape)
                seeds = [seed if k == i else jnp.zeros_like(x) for k, x in enumerate(leaves)]
                response = jax.tree.leaves(jvp(jax.tree.unflatten(tree, seeds)))[i].reshape(flat.shape)
                rates.append(
                    response[:, least[c]]
                    - field.sign * jnp.where(jnp.arange(flat.shape[0]) == c, flat[c, least[c]], 0)
                )
            matrix = jnp.stack(rates, axis=1)  # column by column
            if self.reaction is not None:
                return matrix
            # Growth is not stiff, and what looks like it may well be held in check by other components.
            found.append(jnp.minimum(jnp.diagonal(matrix), 0).reshape(leading))
        return jax.tree.unflatten(tree, found)


def _plus_rates(eigenvalues: Array, rates: Array) -> Array:
    return eigenvalues + rates.reshape(*rates.shape, *(1,) * (eigenvalues.ndim - rates.ndim))
