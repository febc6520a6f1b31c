"""C = I ⊗ RᵀR: one (n−1, n) factor for all unknowns (the paper's Propositions 3 and D1)."""

from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from millipode.covariance import blocks
from millipode.covariance.protocol import Corrected, Covariance, DiagonalInnovation
from millipode.fields import Field, Scale, size
from millipode.priors import Transition


class Kronecker(Covariance):
    """C = I_d ⊗ RᵀR. The gain is K = I_d ⊗ k, n numbers in all."""

    root: Float[Array, "k n"]

    @classmethod
    def initial(cls, root: Float[Array, "k n"], scale: Scale, y: Field) -> Self:
        """One factor; the scale is shared."""
        return cls(scale * root)

    def process_innovation(self, transition: Transition, jacobian: PyTree, z: Field) -> DiagonalInnovation:
        """Σ₁₁, shared."""
        return DiagonalInnovation(blocks.process_scale(transition, None))

    def correct(self, transition: Transition, scale: Scale, jacobian: PyTree, z: Field) -> Corrected:
        """All of it in the right Kronecker factor, O(ν³)."""
        innovation, gain, root = blocks.correct(self.root, transition, scale, None)
        return Corrected(gain, DiagonalInnovation(innovation), Kronecker(root))

    def rejected(self, z: Field) -> Corrected:
        """A zero gain."""
        zero = jnp.zeros_like(self.root[0])
        return Corrected(zero, DiagonalInnovation(zero[0]), self)

    def apply_gain(self, gain: PyTree, z: Field) -> tuple[Field, ...]:
        """k_q z."""
        return tuple(jax.tree.map(lambda leaf, q=q: gain[q] * leaf, z) for q in range(gain.shape[0]))

    def std(self, y: Field, row: tuple[Array | None, ...], noise: Array, scale: Scale) -> Scale:
        """One number for all unknowns."""
        return blocks.marginal_std(self.root, row, noise, scale)

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """Derivative-major: RᵀR ⊗ I_d."""
        return jnp.kron(self.root.T @ self.root, jnp.eye(size(y), dtype=self.root.dtype))
