"""C = RᵀR with an (n d, n d) factor: the paper's "traditional" implementation, O(d³)."""

from typing import Self

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, PyTree

from millipode.covariance import blocks
from millipode.covariance.protocol import (
    Corrected,
    Covariance,
    DenseInnovation,
    DiagonalInnovation,
    Kernel,
    Numbers,
    RootInnovation,
    normal,
)
from millipode.fields import Field, Scale, dtype, expand, size
from millipode.jacobians import FullJacobian
from millipode.priors import BlockTransition, Row, Transition
from millipode.qr import divide, reduced, root_of, triangularise


class Dense(Covariance):
    """C = RᵀR, derivative-major: index q·d + i is derivative q of unknown i."""

    root: Float[Array, "nd nd"]

    @classmethod
    def initial(cls, root: PyTree, scale: Scale, y: Field) -> Self:
        """Root ⊗ diag(scale), padded with zero rows to a square."""
        leaves = [x.reshape(*x.shape[:2], -1) for x in jax.tree.leaves(root)]
        k, n = leaves[0].shape[:2]
        root = _spread(jnp.concatenate(leaves, axis=-1), size(y))
        padded = jnp.concatenate([root, jnp.zeros((n - k, *root.shape[1:]), root.dtype)])
        return cls(_diagonals(padded * _flat(scale, y)))

    def process_innovation(self, transition: Transition, jacobian: PyTree, z: Field) -> RootInnovation:
        """H Σ Hᵀ: diagonal for diagonal Jacobians, else by QR of its (2d, d) root."""
        matrix = _matrix(jacobian, z)
        if matrix.ndim < 2:
            _, unravel = ravel_pytree(z)
            block, matrix = _block(transition, z), jnp.broadcast_to(matrix, size(z))
            return DiagonalInnovation(unravel(blocks.process_scale(block, matrix)))
        stacked = triangularise(_process_rows(_block(transition, z), matrix))
        return DenseInnovation(transition.scaling[1] * stacked, jnp.zeros(size(z), bool), z)

    def process_correction(self, transition: Transition, jacobian: PyTree, z: Field) -> Field:
        """Unknown by unknown for diagonal Jacobians, else by QR."""
        flat, unravel = ravel_pytree(z)
        matrix, block = _matrix(jacobian, z), _block(transition, z)
        if matrix.ndim < 2:
            return unravel(blocks.process_gain(block, matrix) * flat)
        rows = _process_rows(block, matrix)
        root = triangularise(rows)
        weights = solve_triangular(root, solve_triangular(root, flat, trans="T"))
        return unravel(transition.step_ratio * block.scaled_root[0, 0] * (rows[: flat.size] @ weights))

    def correct(self, transition: Transition, scale: Scale, jacobian: PyTree, z: Field) -> Corrected:
        """QR for C⁻, then the half-Joseph form."""
        d = size(z)
        scales, _, moved, noise = self._stack(transition, scale, z)
        predicted = triangularise(jnp.concatenate([moved, noise]))
        measured = observe(predicted, _matrix(jacobian, z) * transition.step_ratio, d)
        innovation, degenerate, gain, posterior = half_joseph(predicted, measured)
        anchor = transition.scaling[1]
        return Corrected(
            gain * (scales / anchor)[:, None],
            DenseInnovation(jnp.where(degenerate, 1, anchor) * innovation, degenerate, z),
            Dense(posterior * scales),
        )

    def rejected(self, z: Field) -> Corrected:
        """A zero gain."""
        d = size(z)
        innovation = DenseInnovation(jnp.eye(d, dtype=self.root.dtype), jnp.ones(d, bool), z)
        return Corrected(jnp.zeros((self.root.shape[0], d), self.root.dtype), innovation, self)

    def apply_gain(self, gain: PyTree, z: Field) -> tuple[Field, ...]:
        """K z, cut into derivatives."""
        flat, unravel = ravel_pytree(z)
        return tuple(unravel(part) for part in (gain @ flat).reshape(-1, flat.size))

    def std(self, y: Field, row: Row, noise: Scale, scale: Scale) -> Scale:
        """Column norms of the projected root."""
        _, unravel = ravel_pytree(y)
        blocked = self.root.reshape(self.root.shape[0], len(row), size(y))
        flat = tuple(None if p is None else _flat(p, y) for p in row)
        return unravel(blocks.marginal_std(blocked, flat, _flat(noise, y), _flat(scale, y)))

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """RᵀR."""
        return self.root.T @ self.root

    def _stack(self, transition: Transition, scale: Scale, y: Field) -> tuple[Array, Array, Array, Array]:
        """The scaling, and in scaled coordinates R, R Φᵀ and R_Σ ⊗ diag(scale)."""
        d, n = size(y), len(transition.scaling)
        scales = jnp.repeat(transition.scaling, d)
        scaled = self.root / scales
        block = _block(transition, y)
        moved = jnp.einsum("kjd,ijd->kid", scaled.reshape(-1, n, d), _spread(block.scaled_phi, d))
        noise = _diagonals(_spread(block.scaled_root, d) * _flat(scale, y))
        return scales, scaled, moved.reshape(-1, n * d), noise

    def predict(self, transition: Transition, scale: Scale, y: Field) -> Self:
        """By QR."""
        scales, _, moved, noise = self._stack(transition, scale, y)
        return type(self)(root_of(jnp.concatenate([moved, noise])) * scales)

    def backward(self, transition: Transition, scale: Scale, y: Field) -> "DenseKernel":
        """By QR of the joint root [[R Φᵀ, R], [R_Σ, 0]], as in ``blocks.backward``."""
        scales, scaled, moved, noise = self._stack(transition, scale, y)
        m = scales.size
        above = jnp.concatenate([moved, scaled], axis=1)
        below = jnp.concatenate([noise, jnp.zeros_like(noise)], axis=1)
        triangle, left = reduced(above, below)
        gain = divide(triangle[:, :m], triangle[:, m:]).T
        return DenseKernel(gain * scales[:, None] / scales, Dense(left * scales))

    def identity(self) -> "DenseKernel":
        """G = I."""
        one = jnp.eye(self.root.shape[1], dtype=self.root.dtype)
        return DenseKernel(one, Dense(jnp.zeros_like(one)))

    def square(self) -> Self:
        """Itself."""
        return self

    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """Rᵀε."""
        _, unravel = ravel_pytree(y)
        noise = (numbers or normal)(key, self.root[:, 0], 1)[0]
        return tuple(unravel(part) for part in (noise @ self.root).reshape(-1, size(y)))


class DenseKernel(Kernel):
    """G and P as (n d, n d) matrices."""

    gain: Float[Array, "nd nd"]
    noise: Dense

    def push(self, covariance: Dense) -> Dense:
        """By QR."""
        return Dense(root_of(jnp.concatenate([covariance.root @ self.gain.T, self.noise.root])))

    def compose(self, other: "DenseKernel") -> "DenseKernel":
        """By QR."""
        return DenseKernel(self.gain @ other.gain, self.push(other.noise))

    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """G Y."""
        _, unravel = ravel_pytree(fields[0])
        flat = jnp.concatenate([ravel_pytree(x)[0] for x in fields])
        return tuple(unravel(part) for part in (self.gain @ flat).reshape(len(fields), -1))

    def through(self, gain: PyTree) -> PyTree:
        """G K."""
        return self.gain @ gain

    def after(self, transition: Transition) -> "DenseKernel":
        """G Φ."""
        n, m = len(transition.scaling), self.gain.shape[0]
        blocked = self.gain.reshape(m, n, -1)
        matrix = _spread(_block(transition, self.gain).matrix, blocked.shape[-1])
        gain = jnp.einsum("kjd,jid->kid", blocked, matrix)
        return DenseKernel(gain.reshape(m, m), self.noise)


def observe(root: Array, jacobian: Array, d: int) -> Array:
    """R Hᵀ for H = E₁ − J E₀; the Jacobian is a matrix, or a vector or scalar if diagonal."""
    value, derivative = root[:, :d], root[:, d : 2 * d]
    return derivative - (value @ jacobian.T if jacobian.ndim == 2 else value * jacobian)


def half_joseph(root: Array, measured: Array) -> tuple[Array, Array, Array, Array]:
    """(√S, degenerate, K, R(I − KH)ᵀ): the left half of the Joseph update, from R and R Hᵀ.

    √S comes from a QR decomposition, so S is never formed. A residual that is known exactly (a
    zero column) gets a unit pivot and a zero gain.
    """
    degenerate = ~jnp.any(measured != 0, axis=0)
    pivots = jnp.diag(degenerate.astype(root.dtype))
    innovation = triangularise(jnp.concatenate([measured, pivots]))
    cross = measured.T @ root
    gain = solve_triangular(innovation, solve_triangular(innovation, cross, trans="T")).T
    return innovation, degenerate, gain, root - measured @ gain.T


def conventional(root: Array, measured: Array) -> tuple[Array, Array, Array]:
    """(√S, K, posterior root) by QR of [R Hᵀ, R]: the textbook form, for a regular S."""
    d = measured.shape[1]
    triangle = jnp.linalg.qr(jnp.concatenate([measured, root], axis=1), mode="r")
    innovation, cross = triangle[:d, :d], triangle[:d, d:]
    return innovation, solve_triangular(innovation, cross).T, triangle[d:, d:]


def _flat(scale: Scale, y: Field) -> Array:
    return ravel_pytree(expand(scale, y))[0]


def _block(transition: Transition, y: Field) -> BlockTransition:
    """One block for all unknowns, or one for each along a last axis."""
    rates = [r.ravel() for r in transition.rates(y) if r is not None]
    return transition.at(jnp.concatenate(rates) if rates else None)


def _spread(block: Array, d: int) -> Float[Array, "k n d"]:
    return jnp.broadcast_to(block.reshape(*block.shape[:2], -1), (*block.shape[:2], d))


def _diagonals(blocks: Float[Array, "k n d"]) -> Float[Array, "kd nd"]:
    """One matrix, of which each block is diagonal."""
    k, n, d = blocks.shape
    return jnp.einsum("knd,de->kdne", blocks, jnp.eye(d, dtype=blocks.dtype)).reshape(k * d, n * d)


def _process_rows(block: BlockTransition, jacobian: Float[Array, "d d"]) -> Float[Array, "2d d"]:
    """R_Σ Hᵀ in scaled coordinates; all other rows are zero."""
    root = _spread(block.scaled_root, jacobian.shape[0])
    first = jnp.diag(root[0, 1]) - block.step_ratio * root[0, 0, :, None] * jacobian.T
    return jnp.concatenate([first, jnp.diag(root[1, 1])])


def _matrix(jacobian: PyTree, z: Field) -> Array:
    """0 for None, (d,) for a diagonal, (d, d) for a full Jacobian."""
    if jacobian is None:
        return jnp.zeros((), dtype(z))
    if isinstance(jacobian, FullJacobian):
        return jacobian.matrix
    return ravel_pytree(jacobian)[0]
