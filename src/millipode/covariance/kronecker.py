"""C = I ⊗ RᵀR: one (n−1, n) factor for all unknowns (the paper's Propositions 3 and D1)."""

from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from millipode.covariance import blocks
from millipode.covariance.protocol import Corrected, Covariance, DiagonalInnovation, Kernel, Numbers, normal
from millipode.fields import Field, Scale, combine, size
from millipode.priors import Row, Transition


class Kronecker(Covariance):
    """C = I_d ⊗ RᵀR. The gain is K = I_d ⊗ k, n numbers in all; Jacobians are None or one number."""

    root: Float[Array, "k n"]

    @classmethod
    def initial(cls, root: Float[Array, "k n"], scale: Scale, y: Field) -> Self:
        """One factor; the scale is shared."""
        return cls(scale * root)

    def process_innovation(self, transition: Transition, jacobian: PyTree, z: Field) -> DiagonalInnovation:
        """Shared."""
        return DiagonalInnovation(blocks.process_scale(transition.at(None), jacobian))

    def process_correction(self, transition: Transition, jacobian: PyTree, z: Field) -> Field:
        """One number times z."""
        gain = blocks.process_gain(transition.at(None), jacobian)
        return jax.tree.map(lambda leaf: gain * leaf, z)

    def correct(self, transition: Transition, scale: Scale, jacobian: PyTree, z: Field) -> Corrected:
        """All of it in the right Kronecker factor, O(ν³)."""
        innovation, gain, root = blocks.correct(self.root, transition.at(None), scale, jacobian)
        return Corrected(gain, DiagonalInnovation(innovation), Kronecker(root))

    def rejected(self, z: Field) -> Corrected:
        """A zero gain."""
        zero = jnp.zeros_like(self.root[0])
        return Corrected(zero, DiagonalInnovation(zero[0]), self)

    def apply_gain(self, gain: PyTree, z: Field) -> tuple[Field, ...]:
        """k_q z."""
        return tuple(jax.tree.map(lambda leaf, q=q: gain[q] * leaf, z) for q in range(gain.shape[0]))

    def std(self, y: Field, row: Row, noise: Scale, scale: Scale) -> Scale:
        """One number for all unknowns."""
        return blocks.marginal_std(self.root, row, noise, scale)

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """Derivative-major: RᵀR ⊗ I_d."""
        return jnp.kron(self.root.T @ self.root, jnp.eye(size(y), dtype=self.root.dtype))

    def predict(self, transition: Transition, scale: Scale, y: Field) -> Self:
        """One QR for all unknowns."""
        return type(self)(blocks.predict(self.root, transition.at(None), scale))

    def backward(self, transition: Transition, scale: Scale, y: Field) -> "KroneckerKernel":
        """One QR for all unknowns."""
        gain, noise = blocks.backward(self.root, transition.at(None), scale)
        return KroneckerKernel(gain, Kronecker(noise))

    def identity(self) -> "KroneckerKernel":
        """G = I."""
        n = self.root.shape[1]
        one = jnp.eye(n, dtype=self.root.dtype)
        return KroneckerKernel(one, Kronecker(jnp.zeros_like(one)))

    def square(self) -> Self:
        """Zero rows added."""
        return type(self)(blocks.square(self.root))

    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """Rᵀε, with its own ε for every unknown."""
        rows = self.root.shape[0]
        noise = (numbers or normal)(key, y, rows)
        fields = [jax.tree.map(lambda x, i=i: x[i], noise) for i in range(rows)]
        return tuple(combine(column, fields) for column in self.root.T)


class KroneckerKernel(Kernel):
    """G = I_d ⊗ g, P = I_d ⊗ p."""

    gain: Float[Array, "n n"]
    noise: Kronecker

    def push(self, covariance: Kronecker) -> Kronecker:
        """In the right Kronecker factor."""
        return Kronecker(blocks.push(self.gain, self.noise.root, covariance.root))

    def compose(self, other: "KroneckerKernel") -> "KroneckerKernel":
        """In the right Kronecker factor."""
        return KroneckerKernel(blocks.product(self.gain, other.gain), self.push(other.noise))

    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Σ_j g_qj Y_j."""
        return tuple(combine(row, fields) for row in self.gain)

    def through(self, gain: PyTree) -> PyTree:
        """G k."""
        return jnp.sum(self.gain * gain, axis=1)

    def after(self, transition: Transition) -> "KroneckerKernel":
        """G Φ."""
        return KroneckerKernel(blocks.product(self.gain, transition.at(None).matrix), self.noise)
