"""C = RᵀR with an (n d, n d) factor: the paper's "traditional" implementation, O(d³)."""

import functools
from typing import Self

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from millipode.covariance import blocks
from millipode.covariance.innovation import DenseInnovation, DiagonalInnovation, Innovation
from millipode.covariance.observation import BlockObservation, Observation, units, y_per_residual
from millipode.covariance.protocol import Corrected, Covariance, Kernel, Storage
from millipode.covariance.transition import BlockTransition, Transition
from millipode.linalg.batches import known
from millipode.linalg.fields import Coefficient, Field, Row, flat, size
from millipode.linalg.qr import reduced, root_of, triangularise
from millipode.linalg.randomness import Numbers, normal
from millipode.linalg.triangular import solve_upper

_solve = functools.partial(solve_upper, library=True)


class Dense(Covariance):
    """C = RᵀR, ordered by derivative: index q·d + i is derivative q of unknown i.

    Attributes:
        root: R, (n d, n d).
    """

    root: Float[Array, "nd nd"]

    @classmethod
    def storage(cls, d: int, n: int, components: int) -> Storage:
        """The numbers of the whole matrix; a step holds R, the stack, its QR decomposition and the gain."""
        entries = (n * d) ** 2
        return Storage(entries, entries, d, working=8 * entries)

    @classmethod
    def initial(cls, root: PyTree[Array], gamma: Coefficient, y: Field) -> Self:
        """root ⊗ diag(γ), padded with zero rows to a square matrix."""
        leaves = [x.reshape(*x.shape[:2], -1) for x in jax.tree.leaves(root)]
        k, n = leaves[0].shape[:2]
        root = _spread(jnp.concatenate(leaves, axis=-1), size(y))
        padded = jnp.concatenate([root, jnp.zeros((n - k, *root.shape[1:]), root.dtype)])
        return cls(_diagonals(padded * flat(gamma, y)))

    def process_innovation(self, transition: Transition, observation: Observation, z: Field) -> Innovation:
        """N(0, H Σ Hᵀ): diagonal for diagonal Jacobians, else by QR of its (2d, d) root."""
        seen, block = observation.matrix(z), _block(transition, z)
        if seen.is_diagonal:
            _, unravel = ravel_pytree(z)
            return DiagonalInnovation(unravel(blocks.process_std(block, BlockObservation(seen.j))))
        root = triangularise(_process_rows(block, observation, z))
        return DenseInnovation(units(transition) * root, jnp.zeros(size(z), bool), z)

    def process_correction(self, transition: Transition, observation: Observation, z: Field) -> Field:
        """E₀ Σ Hᵀ (H Σ Hᵀ)⁻¹ z: unknown by unknown for diagonal Jacobians, else by QR."""
        vector, unravel = ravel_pytree(z)
        seen, block = observation.matrix(z), _block(transition, z)
        if seen.is_diagonal:
            return unravel(blocks.process_gain(block, BlockObservation(seen.j)) * vector)
        rows = _process_rows(block, observation, z)
        root = triangularise(rows)
        weights = _solve(root, _solve(root, vector[:, None], transposed=True))[:, 0]
        return unravel(y_per_residual(block) * block.scaled_root[0, 0] * (rows[: vector.size] @ weights))

    def correct(
        self, transition: Transition, gamma: Coefficient, observation: Observation, z: Field
    ) -> Corrected:
        """Extrapolate by QR, then condition by the half-Joseph form."""
        scales, _, moved, noise = self._stack(transition, gamma, z)
        predicted = triangularise(jnp.concatenate([moved, noise]))
        measured = observation.matrix(z).scaled(transition).of(predicted)
        innovation, degenerate, gain, posterior = half_joseph(predicted, measured)
        unit = units(transition)
        return Corrected(
            gain * (scales / unit)[:, None],
            DenseInnovation(jnp.where(degenerate, 1, unit) * innovation, degenerate, z),
            Dense(posterior * scales),
        )

    def rejected(self, z: Field) -> Corrected:
        d = size(z)
        innovation = DenseInnovation(jnp.eye(d, dtype=self.root.dtype), jnp.ones(d, bool), z)
        return Corrected(jnp.zeros((self.root.shape[0], d), self.root.dtype), innovation, self)

    def apply_gain(self, gain: PyTree[Array], z: Field) -> tuple[Field, ...]:
        """K z by one matrix product, split into one field per derivative."""
        vector, unravel = ravel_pytree(z)
        return tuple(unravel(part) for part in (gain @ vector).reshape(-1, vector.size))

    def std(self, y: Field, row: Row, noise: Coefficient, gamma: Coefficient) -> Coefficient:
        """One standard deviation per unknown: the lengths of the columns of the projected root."""
        _, unravel = ravel_pytree(y)
        blocked = self.root.reshape(self.root.shape[0], len(row), size(y))
        rows = tuple(None if p is None else flat(p, y) for p in row)
        return unravel(blocks.marginal_std(blocked, rows, flat(noise, y), flat(gamma, y)))

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """The product RᵀR, ordered by derivative, then by unknown."""
        return self.root.T @ self.root

    def _stack(
        self, transition: Transition, gamma: Coefficient, y: Field
    ) -> tuple[Array, Array, Array, Array]:
        """The scaling, and in scaled coordinates R, R Φᵀ and R_Σ ⊗ diag(γ)."""
        d, n = size(y), len(transition.scaling)
        scales = jnp.repeat(transition.scaling, d)
        scaled = self.root / scales
        block = _block(transition, y)
        moved = jnp.einsum("kjd,ijd->kid", scaled.reshape(-1, n, d), _spread(block.scaled_phi, d))
        noise = _diagonals(_spread(block.scaled_root, d) * flat(gamma, y))
        return scales, scaled, moved.reshape(-1, n * d), noise

    def predict(self, transition: Transition, gamma: Coefficient, y: Field) -> Self:
        """C⁻, by one QR decomposition."""
        scales, _, moved, noise = self._stack(transition, gamma, y)
        return type(self)(root_of(jnp.concatenate([moved, noise])) * scales)

    def backward(self, transition: Transition, gamma: Coefficient, y: Field) -> "DenseKernel":
        """The kernel, by QR of the joint root [[R Φᵀ, R], [R_Σ, 0]] as in ``blocks.backward``."""
        scales, scaled, moved, noise = self._stack(transition, gamma, y)
        m = scales.size
        above = jnp.concatenate([moved, scaled], axis=1)
        below = jnp.concatenate([noise, jnp.zeros_like(noise)], axis=1)
        triangle, left = reduced(above, below)
        gain = _solve(triangle[:, :m], triangle[:, m:], known=known(scaled.dtype)).T
        return DenseKernel(gain * scales[:, None] / scales, Dense(left * scales))

    def identity(self) -> "DenseKernel":
        """The gain I, without noise."""
        one = jnp.eye(self.root.shape[1], dtype=self.root.dtype)
        return DenseKernel(one, Dense(jnp.zeros_like(one)))

    def square(self) -> Self:
        """The same covariance: its root is square already."""
        return self

    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """Rᵀε, with ε of length n d."""
        _, unravel = ravel_pytree(y)
        noise = (numbers or normal)(key, self.root[:, 0], 1)[0]
        return tuple(unravel(part) for part in (noise @ self.root).reshape(-1, size(y)))


class DenseKernel(Kernel):
    """G and P as matrices over all unknowns and derivatives.

    Attributes:
        gain: G, (n d, n d).
        noise: P.
    """

    gain: Float[Array, "nd nd"]
    noise: Dense

    def push(self, covariance: Dense) -> Dense:
        """G C Gᵀ + P, by one QR decomposition."""
        return Dense(root_of(jnp.concatenate([covariance.root @ self.gain.T, self.noise.root])))

    def compose(self, other: "DenseKernel") -> "DenseKernel":
        """The composed kernel, by one QR decomposition."""
        return DenseKernel(self.gain @ other.gain, self.push(other.noise))

    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """G Y by one matrix product, split into one field per derivative."""
        _, unravel = ravel_pytree(fields[0])
        whole = jnp.concatenate([ravel_pytree(x)[0] for x in fields])
        return tuple(unravel(part) for part in (self.gain @ whole).reshape(len(fields), -1))

    def through(self, gain: PyTree[Array]) -> PyTree[Array]:
        """The matrix product G K."""
        return self.gain @ gain

    def after(self, transition: Transition) -> "DenseKernel":
        """The product G Φ, for a Φ that does not couple unknowns."""
        n, m = len(transition.scaling), self.gain.shape[0]
        blocked = self.gain.reshape(m, n, -1)
        matrix = _spread(_block(transition, self.gain).matrix, blocked.shape[-1])
        gain = jnp.einsum("kjd,jid->kid", blocked, matrix)
        return DenseKernel(gain.reshape(m, m), self.noise)


def half_joseph(root: Array, measured: Array) -> tuple[Array, Array, Array, Array]:
    """(√S, degenerate, K, R(I − KH)ᵀ): the left half of the Joseph update, from R and R Hᵀ.

    √S comes from a QR decomposition, so S is never formed. A residual that is known exactly (a
    zero column) gets a unit pivot and a zero gain.
    """
    degenerate = ~jnp.any(measured != 0, axis=0)
    pivots = jnp.diag(degenerate.astype(root.dtype))
    innovation = triangularise(jnp.concatenate([measured, pivots]))
    cross = measured.T @ root
    gain = _solve(innovation, _solve(innovation, cross, transposed=True)).T
    return innovation, degenerate, gain, root - measured @ gain.T


def conventional(root: Array, measured: Array) -> tuple[Array, Array, Array]:
    """(√S, K, posterior root) by QR of [R Hᵀ, R]: the textbook form, for a regular S."""
    d = measured.shape[1]
    triangle = jnp.linalg.qr(jnp.concatenate([measured, root], axis=1), mode="r")
    innovation, cross = triangle[:d, :d], triangle[:d, d:]
    return innovation, _solve(innovation, cross).T, triangle[d:, d:]


def _block(transition: Transition, y: Field) -> BlockTransition:
    """One block for all unknowns, or one for each along a last axis."""
    rates = [r.ravel() for r in transition.rates(y) if r is not None]
    return transition.at(jnp.concatenate(rates) if rates else None)


def _spread(block: Array, d: int) -> Float[Array, "k n d"]:
    return jnp.broadcast_to(block.reshape(*block.shape[:2], -1), (*block.shape[:2], d))


def _diagonals(blocks: Float[Array, "k n d"]) -> Float[Array, "kd nd"]:
    """One matrix of diagonal blocks (d, d), from their diagonals."""
    k, n, d = blocks.shape
    return jnp.einsum("knd,de->kdne", blocks, jnp.eye(d, dtype=blocks.dtype)).reshape(k * d, n * d)


def _process_rows(block: BlockTransition, observation: Observation, z: Field) -> Float[Array, "2d d"]:
    """R_Σ Hᵀ in scaled coordinates; all other rows are zero."""
    seen = observation.matrix(z).scaled(block)
    return seen.of_noise(_spread(block.scaled_root, size(z)))
