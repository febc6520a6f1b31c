"""C = I ⊗ RᵀR: one (n−1, n) factor for all unknowns (the paper's Propositions 3 and D1)."""

from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from millipode.covariance import blocks
from millipode.covariance.innovation import DiagonalInnovation
from millipode.covariance.observation import BlockObservation, Observation
from millipode.covariance.protocol import Corrected, Covariance, Kernel, Storage
from millipode.covariance.transition import Transition
from millipode.linalg.batches import product
from millipode.linalg.fields import Coefficient, Field, Row, combine, size
from millipode.linalg.jacobians import DiagonalJacobian
from millipode.linalg.randomness import Numbers, normal


class Kronecker(Covariance):
    """C = I_d ⊗ RᵀR, for an F that is zero or one number times the identity.

    The gain is K = I_d ⊗ k, with n numbers k.

    Attributes:
        root: R, (n−1, n).
    """

    is_shared: ClassVar[bool] = True

    root: Float[Array, "k n"]

    @classmethod
    def storage(cls, d: int, n: int, components: int) -> Storage:
        """The numbers of one block, whatever d is."""
        return Storage(n * (n - 1), n * n, 1)

    @classmethod
    def initial(cls, root: Float[Array, "k n"], gamma: Coefficient, y: Field) -> Self:
        """One factor for all unknowns; γ is one number."""
        return cls(gamma * root)

    def process_innovation(
        self, transition: Transition, observation: Observation, z: Field
    ) -> DiagonalInnovation:
        """One deviation for all unknowns."""
        return DiagonalInnovation(blocks.process_std(transition.at(None), _shared(observation, z)))

    def process_correction(self, transition: Transition, observation: Observation, z: Field) -> Field:
        """The residual times one number, the gain of all unknowns."""
        gain = blocks.process_gain(transition.at(None), _shared(observation, z))
        return jax.tree.map(lambda leaf: gain * leaf, z)

    def gain_of_y(
        self, transition: Transition, gamma: Coefficient, observation: Observation, z: Field
    ) -> DiagonalJacobian:
        """One number for all unknowns."""
        seen = _shared(observation, z)
        return DiagonalJacobian(blocks.gain_of_y(self.root, transition.at(None), gamma, seen))

    def correct(
        self, transition: Transition, gamma: Coefficient, observation: Observation, z: Field
    ) -> Corrected:
        """Extrapolate and condition the right Kronecker factor only: O(ν³)."""
        block = transition.at(None)
        deviation, gain, root = blocks.correct(self.root, block, gamma, _shared(observation, z))
        return Corrected(gain, DiagonalInnovation(deviation), Kronecker(root))

    def rejected(self, z: Field) -> Corrected:
        zero = jnp.zeros_like(self.root[0])
        return Corrected(zero, DiagonalInnovation(zero[0]), self)

    def apply_gain(self, gain: PyTree[Array], z: Field) -> tuple[Field, ...]:
        """k_q z, for every derivative q."""
        return tuple(jax.tree.map(lambda leaf, q=q: gain[q] * leaf, z) for q in range(gain.shape[0]))

    def std(self, y: Field, row: Row, noise: Coefficient, gamma: Coefficient) -> Coefficient:
        """One standard deviation for all unknowns."""
        return blocks.marginal_std(self.root, row, noise, gamma)

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """RᵀR ⊗ I_d, ordered by derivative, then by unknown."""
        return jnp.kron(self.root.T @ self.root, jnp.eye(size(y), dtype=self.root.dtype))

    def predict(self, transition: Transition, gamma: Coefficient, y: Field) -> Self:
        """C⁻, by one QR decomposition for all unknowns."""
        return type(self)(blocks.predict(self.root, transition.at(None), gamma))

    def backward(self, transition: Transition, gamma: Coefficient, y: Field) -> "KroneckerKernel":
        """The kernel, by one QR decomposition for all unknowns."""
        gain, noise = blocks.backward(self.root, transition.at(None), gamma)
        return KroneckerKernel(gain, Kronecker(noise))

    def identity(self) -> "KroneckerKernel":
        """The gain I, without noise."""
        n = self.root.shape[1]
        one = jnp.eye(n, dtype=self.root.dtype)
        return KroneckerKernel(one, Kronecker(jnp.zeros_like(one)))

    def square(self) -> Self:
        """The same covariance, with zero rows added to its root until it is (n, n)."""
        return type(self)(blocks.square(self.root))

    def forgetful(self, kept: int, h: Array) -> Self:
        """The same of the first ``kept`` fields; of the others nothing is known but a size, in steps of h."""
        return type(self)(blocks.forget(self.root, kept, h))

    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """Rᵀε, with its own ε for every unknown."""
        rows = self.root.shape[0]
        noise = (numbers or normal)(key, y, rows)
        fields = [jax.tree.map(lambda x, i=i: x[i], noise) for i in range(rows)]
        return tuple(combine(column, fields) for column in self.root.T)


class KroneckerKernel(Kernel):
    """G = I_d ⊗ g, P = I_d ⊗ p.

    Attributes:
        gain: g, (n, n).
        noise: P.
    """

    gain: Float[Array, "n n"]
    noise: Kronecker

    def push(self, covariance: Kronecker) -> Kronecker:
        """G C Gᵀ + P, computed in the right Kronecker factor."""
        return Kronecker(blocks.push(self.gain, self.noise.root, covariance.root))

    def compose(self, other: "KroneckerKernel") -> "KroneckerKernel":
        """The composed kernel, computed in the right Kronecker factor."""
        return KroneckerKernel(product(self.gain, other.gain), self.push(other.noise))

    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Σ_j g_qj Y_j."""
        return tuple(combine(row, fields) for row in self.gain)

    def through(self, gain: PyTree[Array]) -> PyTree[Array]:
        """The product g k."""
        return jnp.sum(self.gain * gain, axis=1)

    def after(self, transition: Transition) -> "KroneckerKernel":
        """The product g Φ."""
        return KroneckerKernel(product(self.gain, transition.at(None).matrix), self.noise)


def _shared(observation: Observation, z: Field) -> BlockObservation:
    """The row of H that all unknowns share."""
    rows = observation.rows(z)
    if any(j is not rows[0] for j in rows) or not (rows[0] is None or rows[0].ndim == 0):
        raise TypeError(
            "A Kronecker covariance follows Jacobians that are zero, or one number for all unknowns: use "
            "structure='blockdiagonal'."
        )
    return BlockObservation(rows[0])
