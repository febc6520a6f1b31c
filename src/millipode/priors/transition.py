"""What every prior offers: the transition of one block over a step, in scaled coordinates."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float


class Transition(eqx.Module):
    """Y(t+h) | Y(t) ~ N(Φ Y(t), σ² Σ) for one block, with Φ = T Ă T⁻¹ and Σ = T R̆ᵀR̆ T.

    Attributes:
        phi: the entries Φ[i][j]; ``None`` is a zero of the structure, which costs nothing.
        scaling: the diagonal of T.
        scaled_phi: Ă.
        scaled_root: R̆, upper triangular.
    """

    phi: tuple[tuple[Array | None, ...], ...]
    scaling: Float[Array, " n"]
    scaled_phi: Float[Array, "n n"]
    scaled_root: Float[Array, "n n"]

    def gated(self, accept: Array) -> "Transition":
        """The same transition if ``accept``, else one whose Φ is the identity.

        A rejected step then leaves the mean alone without a selection over the state.
        """
        phi = tuple(
            tuple(None if p is None else jnp.where(accept, p, float(i == j)) for j, p in enumerate(row))
            for i, row in enumerate(self.phi)
        )
        return Transition(phi, self.scaling, self.scaled_phi, self.scaled_root)

    @property
    def matrix(self) -> Float[Array, "n n"]:
        """Φ as one small matrix."""
        zero = jnp.zeros_like(self.scaling[0])
        return jnp.stack([jnp.stack([zero if p is None else p for p in row]) for row in self.phi])

    @property
    def step_ratio(self) -> Array:
        """T₀/T₁, which turns a Jacobian into its scaled coordinates."""
        return self.scaling[0] / self.scaling[1]


class Prior(eqx.Module):
    """A Gauss–Markov prior for y and its first ν derivatives."""

    order: eqx.AbstractVar[int]

    @abc.abstractmethod
    def transition(self, h: Array) -> Transition:
        """The transition over a step h > 0."""

    @abc.abstractmethod
    def marginal(self, h: Array) -> tuple[tuple[Array | None, ...], Array]:
        """Row 0 of Φ(h) and Σ(h)₀₀, valid and differentiable for h ≥ 0."""
