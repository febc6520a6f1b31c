"""The transition of a prior's state over a step h: Y(t+h) | Y(t) ~ N(Φ Y(t), γ² Σ)."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.linalg.fields import Coefficient, Field, Row, leaves_of
from millipode.xla.module import Module


class Transition(Module):
    """Y(t+h) | Y(t) ~ N(Φ Y(t), γ² Σ), unknown by unknown.

    Attributes:
        phi: the entries Φ[i][j], each a number for all unknowns or a field; ``None`` is a structural zero,
            which costs nothing. Φ is upper triangular, and its last column has no structural zero. All rows
            but the first are the same for all unknowns.
        scaling: the diagonal of T, which defines the scaled coordinates T⁻¹ Y.
    """

    phi: eqx.AbstractVar[tuple[Row, ...]]
    scaling: eqx.AbstractVar[Float[Array, " n"]]

    @abc.abstractmethod
    def rates(self, y: Field) -> list[Array | None]:
        """The rates that determine the unknowns' blocks, per leaf of y; None if all blocks are the same."""

    @abc.abstractmethod
    def at(self, rate: Array | None) -> "BlockTransition":
        """The blocks of some unknowns, given their part of ``rates``."""

    @property
    def is_uniform(self) -> bool:
        """Whether one block serves all unknowns."""
        return False

    def gated(self, accept: Array) -> tuple[Row, ...]:
        """Φ if ``accept``, else the identity.

        A rejected step then leaves the mean as it is, without a selection over the state.
        """

        def gate(p: Coefficient | None, one: float) -> Coefficient | None:
            return jax.tree.map(lambda x: jnp.where(accept, x, one), p)

        return tuple(
            tuple(gate(p, float(i == j)) for j, p in enumerate(row)) for i, row in enumerate(self.phi)
        )


class BlockTransition(Transition):
    """Φ = T Ă T⁻¹ and Σ = T R̆ᵀR̆ T as small matrices: one for all unknowns, or one for each of a batch.

    Attributes:
        scaled_phi: Ă, (n, n, *batch).
        scaled_root: R̆, upper triangular, (n, n, *batch).
    """

    phi: tuple[Row, ...]
    scaling: Float[Array, " n"]
    scaled_phi: Float[Array, "n n *batch"]
    scaled_root: Float[Array, "n n *batch"]

    def rates(self, y: Field) -> list[Array | None]:
        return leaves_of(None, y)

    def at(self, rate: Array | None) -> "BlockTransition":
        return self

    @property
    def is_uniform(self) -> bool:
        return True

    @property
    def matrix(self) -> Float[Array, "n n *batch"]:
        """Φ as a small matrix, (n, n, *batch)."""
        batch, n = self.scaled_phi.shape[2:], len(self.scaling)
        entries = [[jnp.broadcast_to(0.0 if p is None else p, batch) for p in row] for row in self.phi]
        return jnp.stack([jnp.stack(row) for row in entries]).astype(self.scaling.dtype).reshape(n, n, *batch)
