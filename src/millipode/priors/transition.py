"""What every prior offers: the coordinates of its state, and their transition over a step."""

import abc
import dataclasses
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from millipode.fields import Field, Scale

Row = tuple[Scale | None, ...]  # coefficients of the state's fields; None is a structural zero


class Transition(eqx.Module):
    """Y(t+h) | Y(t) ~ N(Φ Y(t), σ² Σ), unknown by unknown.

    Attributes:
        phi: the entries Φ[i][j], each for all unknowns or a field; ``None`` is a zero of the structure, which
            costs nothing. All rows but the first are the same for all unknowns.
        scaling: the diagonal of T, the scaled coordinates.
    """

    phi: eqx.AbstractVar[tuple[Row, ...]]
    scaling: eqx.AbstractVar[Float[Array, " n"]]

    @abc.abstractmethod
    def rates(self, y: Field) -> list[Array | None]:
        """What tells unknowns apart, one array per leaf of y; None if nothing does."""

    @abc.abstractmethod
    def at(self, rate: Array | None) -> "BlockTransition":
        """The blocks of some unknowns, by what tells them apart."""

    def gated(self, accept: Array) -> tuple[Row, ...]:
        """Φ if ``accept``, else the identity.

        A rejected step then leaves the mean alone without a selection over the state.
        """

        def gate(p: Scale | None, one: float) -> Scale | None:
            return jax.tree.map(lambda x: jnp.where(accept, x, one), p)

        return tuple(
            tuple(gate(p, float(i == j)) for j, p in enumerate(row)) for i, row in enumerate(self.phi)
        )

    @property
    def step_ratio(self) -> Array:
        """T₀/T₁, which turns a Jacobian into its scaled coordinates."""
        return self.scaling[0] / self.scaling[1]


class BlockTransition(Transition):
    """Φ = T Ă T⁻¹ and Σ = T R̆ᵀR̆ T as small matrices: one for all unknowns, or one for each of a batch.

    Attributes:
        scaled_phi: Ă.
        scaled_root: R̆, upper triangular.
    """

    phi: tuple[Row, ...]
    scaling: Float[Array, " n"]
    scaled_phi: Float[Array, "n n *batch"]
    scaled_root: Float[Array, "n n *batch"]

    def rates(self, y: Field) -> list[Array | None]:
        """None."""
        return [None] * len(jax.tree.leaves(y))

    def at(self, rate: Array | None) -> "BlockTransition":
        """Itself."""
        return self

    @property
    def matrix(self) -> Float[Array, "n n *batch"]:
        """Φ as one small matrix."""
        batch, n = self.scaled_phi.shape[2:], len(self.scaling)
        entries = [[jnp.broadcast_to(0.0 if p is None else p, batch) for p in row] for row in self.phi]
        return jnp.stack([jnp.stack(row) for row in entries]).astype(self.scaling.dtype).reshape(n, n, *batch)


class Prior(eqx.Module):
    """A Gauss–Markov prior for y and its first ν derivatives.

    Its state has ν+1 fields, y first; the others may be any combination of y and its derivatives such that
    field q involves none beyond the q-th.
    """

    order: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def is_shared(self) -> bool:
        """Whether the transition is the same for all unknowns."""

    def with_order(self, order: int) -> Self:
        """The same process with ν derivatives, if it has none of its own."""
        return self if self.order else dataclasses.replace(self, order=order)

    @abc.abstractmethod
    def fitted(self, rates: Field | None, sign: Array, y: Field) -> Self:
        """The prior of a problem with a state like y, whose linearisation has such ``rates`` in user time."""

    @abc.abstractmethod
    def transition(self, h: Array) -> Transition:
        """The transition over a step h > 0."""

    @abc.abstractmethod
    def marginal(self, h: Array) -> tuple[Row, Scale]:
        """Row 0 of Φ(h) and Σ(h)₀₀, valid and differentiable for h ≥ 0."""

    @abc.abstractmethod
    def remainder(self, h: Array) -> tuple[Scale, ...]:
        """What a constant 1 in place of the white noise (y^(ν+1) = 1) adds to the state over a step h."""

    @abc.abstractmethod
    def state(self, derivatives: tuple[Field, ...]) -> tuple[Field, ...]:
        """The state, from y and its derivatives."""

    @abc.abstractmethod
    def root(self, root: Float[Array, "k n"]) -> PyTree:
        """The same for a root of their covariance: (k, n), or a field of (k, n, *shape)."""

    @abc.abstractmethod
    def row(self, q: Array | int, y: Field) -> Row:
        """y^(q) as a combination of the state's fields."""

    @abc.abstractmethod
    def derivative(self, state: tuple[Field, ...], q: Array) -> Field:
        """y^(q). Traced, so that all derivatives share one program."""

    @abc.abstractmethod
    def residual(self, y: Field, slope: Field, value: Field, jacobian: Any) -> tuple[Field, Any]:
        """Z = y' − f(y) and its derivative by y, from field 1 of the state, f(y) and F_y."""
