"""C = blockdiag(RᵢᵀRᵢ): one (n−1, n) factor per unknown (the paper's Proposition 2)."""

from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from millipode.covariance import blocks
from millipode.covariance.innovation import DiagonalInnovation
from millipode.covariance.observation import BlockObservation, Observation
from millipode.covariance.protocol import Corrected, Covariance, Kernel, Storage
from millipode.covariance.tiles import per_leaf
from millipode.covariance.transition import BlockTransition, Transition
from millipode.linalg.batches import product
from millipode.linalg.fields import Coefficient, Field, Row, leaves_of
from millipode.linalg.fields import per_leaf as spread_over_leaves
from millipode.linalg.jacobians import DiagonalJacobian
from millipode.linalg.randomness import Numbers, normal


class BlockDiagonal(Covariance):
    """C = blockdiag(R₁ᵀR₁, …, R_dᵀR_d).

    Attributes:
        root: the factors R_i of all unknowns, as a field; every leaf is (n−1, n, *shape).
    """

    root: PyTree[Float[Array, "k n *shape"]]

    @classmethod
    def storage(cls, d: int, n: int, components: int) -> Storage:
        """The numbers of d blocks."""
        return Storage(n * (n - 1) * d, n * n * d, d)

    @classmethod
    def initial(cls, root: PyTree[Array], gamma: Coefficient, y: Field) -> Self:
        """The block of each unknown, or the same for all, times its γ."""

        def spread(leaf: Array, s: Array, block: Array) -> Array:
            block = block.reshape(*block.shape, *(1,) * (2 + leaf.ndim - block.ndim))
            return jnp.broadcast_to(block * s, (*block.shape[:2], *leaf.shape))

        is_shared = isinstance(root, jax.Array) and root.ndim == 2
        blocks = jax.tree.map(lambda _: root, y) if is_shared else root
        return cls(jax.tree.map(spread, y, spread_over_leaves(gamma, y), blocks))

    def process_innovation(
        self, transition: Transition, observation: Observation, z: Field
    ) -> DiagonalInnovation:
        """One deviation per unknown, or one for all if they share the transition and the Jacobian."""
        rows = observation.rows(z)
        if transition.is_uniform and _are_shared(rows, z):
            return DiagonalInnovation(blocks.process_std(transition.at(None), BlockObservation(rows[0])))
        return DiagonalInnovation(_elementwise(blocks.process_std, transition, rows, z))

    def process_correction(self, transition: Transition, observation: Observation, z: Field) -> Field:
        """The residual of each unknown times the gain of that unknown."""
        gains = _elementwise(blocks.process_gain, transition, observation.rows(z), z)
        return jax.tree.map(jnp.multiply, gains, z)

    def gain_of_y(
        self, transition: Transition, gamma: Coefficient, observation: Observation, z: Field
    ) -> DiagonalJacobian:
        """One number per unknown."""

        def one(root: Array, s: Array, j: Array | None, rate: Array | None) -> tuple[Array]:
            return (blocks.gain_of_y(root, transition.at(rate), s, BlockObservation(j)),)

        roots, gammas = jax.tree.leaves(self.root), leaves_of(gamma, z)
        (gain,) = per_leaf(one, z, roots, gammas, observation.rows(z), transition.rates(z))
        return DiagonalJacobian(gain)

    def correct(
        self, transition: Transition, gamma: Coefficient, observation: Observation, z: Field
    ) -> Corrected:
        """Extrapolate and condition every block by itself, tile by tile: O(d ν³)."""

        def one(root: Array, s: Array, j: Array | None, rate: Array | None) -> tuple[Array, Array, Array]:
            return blocks.correct(root, transition.at(rate), s, BlockObservation(j))

        deviation, gain, posterior = per_leaf(
            one,
            z,
            jax.tree.leaves(self.root),
            leaves_of(gamma, z),
            observation.rows(z),
            transition.rates(z),
            reuse={2: 0},
        )
        return Corrected(gain, DiagonalInnovation(deviation), BlockDiagonal(posterior))

    def rejected(self, z: Field) -> Corrected:
        gain = jax.tree.map(lambda r: jnp.zeros(r.shape[1:], r.dtype), self.root)
        return Corrected(gain, DiagonalInnovation(jax.tree.map(jnp.zeros_like, z)), self)

    def apply_gain(self, gain: PyTree[Array], z: Field) -> tuple[Field, ...]:
        """K_q z, unknown by unknown, for every derivative q."""
        n = jax.tree.leaves(gain)[0].shape[0]
        return tuple(jax.tree.map(lambda k, leaf, q=q: k[q] * leaf, gain, z) for q in range(n))

    def std(self, y: Field, row: Row, noise: Coefficient, gamma: Coefficient) -> Coefficient:
        """One standard deviation per unknown."""
        roots, tree = jax.tree.flatten(self.root)
        rows = zip(*(leaves_of(p, y) for p in row), strict=True)
        columns = zip(roots, rows, leaves_of(noise, y), leaves_of(gamma, y), strict=True)
        return jax.tree.unflatten(tree, [blocks.marginal_std(*parts) for parts in columns])

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """C as a matrix, ordered by derivative, then by unknown."""
        flat = [r.reshape(*r.shape[:2], -1) for r in jax.tree.leaves(self.root)]
        root = jnp.concatenate(flat, axis=-1)
        n, d = root.shape[1:]
        covariance = jnp.einsum("kid,kjd,de->idje", root, root, jnp.eye(d, dtype=root.dtype))
        return covariance.reshape(n * d, n * d)

    def predict(self, transition: Transition, gamma: Coefficient, y: Field) -> Self:
        """C⁻, by one QR decomposition per unknown."""

        def one(root: Array, s: Array, rate: Array | None) -> tuple[Array]:
            return (blocks.predict(root, transition.at(rate), s),)

        (root,) = per_leaf(one, y, jax.tree.leaves(self.root), leaves_of(gamma, y), transition.rates(y))
        return type(self)(root)

    def backward(self, transition: Transition, gamma: Coefficient, y: Field) -> "BlockDiagonalKernel":
        """The kernel, by one QR decomposition per unknown."""

        def one(root: Array, s: Array, rate: Array | None) -> tuple[Array, Array]:
            return blocks.backward(root, transition.at(rate), s)

        gain, noise = per_leaf(one, y, jax.tree.leaves(self.root), leaves_of(gamma, y), transition.rates(y))
        return BlockDiagonalKernel(gain, BlockDiagonal(noise))

    def extend(self, kernel: Kernel, transition: Transition, gamma: Coefficient, y: Field) -> Kernel:
        """``backward`` and ``compose`` in one pass, so that no intermediate is as large as the state."""

        def one(root: Array, gain: Array, noise: Array, s: Array, rate: Array | None) -> tuple[Array, Array]:
            step, step_noise = blocks.backward(root, transition.at(rate), s)
            return product(gain, step), blocks.push(gain, noise, step_noise)

        gain, noise = per_leaf(
            one,
            y,
            *map(jax.tree.leaves, (self.root, kernel.gain, kernel.noise.root)),
            leaves_of(gamma, y),
            transition.rates(y),
            reuse={1: 2, 0: 1},  # the noise first, because it needs the old gain
        )
        return BlockDiagonalKernel(gain, BlockDiagonal(noise))

    def identity(self) -> "BlockDiagonalKernel":
        """The gain I for every unknown, without noise."""

        def one(root: Array) -> Array:
            n, shape = root.shape[1], root.shape[2:]
            eye = jnp.eye(n, dtype=root.dtype).reshape(n, n, *(1,) * len(shape))
            return jnp.broadcast_to(eye, (n, n, *shape))

        gain = jax.tree.map(one, self.root)
        return BlockDiagonalKernel(gain, BlockDiagonal(jax.tree.map(jnp.zeros_like, gain)))

    def square(self) -> Self:
        """The same covariance, with zero rows added to every root until it is (n, n)."""
        return type(self)(jax.tree.map(blocks.square, self.root))

    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """Rᵀε, with its own ε for every unknown."""
        k, n = jax.tree.leaves(self.root)[0].shape[:2]
        noise = (numbers or normal)(key, y, k)

        def column(q: int) -> Field:
            return jax.tree.map(lambda root, e: jnp.sum(root[:, q] * e, axis=0), self.root, noise)

        return tuple(column(q) for q in range(n))


class BlockDiagonalKernel(Kernel):
    """One gain and one covariance per unknown.

    Attributes:
        gain: G, as a field; every leaf is (n, n, *shape).
        noise: P.
    """

    gain: PyTree[Float[Array, "n n *shape"]]
    noise: BlockDiagonal

    def push(self, covariance: BlockDiagonal) -> BlockDiagonal:
        """G C Gᵀ + P, by one QR decomposition per unknown."""

        def one(gain: Array, noise: Array, root: Array) -> tuple[Array]:
            return (blocks.push(gain, noise, root),)

        y = jax.tree.map(lambda g: g[0, 0], self.gain)
        (root,) = per_leaf(one, y, *map(jax.tree.leaves, (self.gain, self.noise.root, covariance.root)))
        return BlockDiagonal(root)

    def compose(self, other: "BlockDiagonalKernel") -> "BlockDiagonalKernel":
        """The composed kernel, by one QR decomposition per unknown."""
        gain = jax.tree.map(product, self.gain, other.gain)
        return BlockDiagonalKernel(gain, self.push(other.noise))

    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Σ_j g_qj Y_j, unknown by unknown."""

        def row(q: int) -> Field:
            return jax.tree.map(lambda g, *x: sum(g[q, j] * x[j] for j in range(len(x))), self.gain, *fields)

        return tuple(row(q) for q in range(len(fields)))

    def through(self, gain: PyTree[Array]) -> PyTree[Array]:
        """The product g k, unknown by unknown."""
        return jax.tree.map(lambda g, k: jnp.sum(g * k, axis=1), self.gain, gain)

    def after(self, transition: Transition) -> "BlockDiagonalKernel":
        """The product g Φ, unknown by unknown."""

        def one(gain: Array, rate: Array | None) -> Array:
            matrix = transition.at(rate).matrix
            return product(gain, matrix.reshape(*matrix.shape, *(1,) * (gain.ndim - matrix.ndim)))

        gains, tree = jax.tree.flatten(self.gain)
        pairs = zip(gains, transition.rates(self.gain), strict=True)
        return BlockDiagonalKernel(jax.tree.unflatten(tree, [one(*pair) for pair in pairs]), self.noise)


def _are_shared(rows: list[Array | None], z: Field) -> bool:
    """Whether all unknowns have the same row of H."""
    leaves = jax.tree.leaves(z)
    return all(j is None or (j.ndim == 0 and leaf.ndim > 0) for j, leaf in zip(rows, leaves, strict=True))


def _elementwise(
    function: Callable[[BlockTransition, BlockObservation], Array],
    transition: Transition,
    rows: list[Array | None],
    z: Field,
) -> Field:
    """The results of a function of the transition and the row of H of each unknown.

    If the transition differs between unknowns, its blocks take more time and memory than the result, so they
    are made tile by tile.
    """
    if transition.is_uniform:
        leaves = [function(transition.at(None), BlockObservation(j)) for j in rows]
        return jax.tree.unflatten(jax.tree.structure(z), leaves)

    def one(j: Array | None, rate: Array) -> tuple[Array]:
        return (function(transition.at(rate), BlockObservation(j)),)

    (result,) = per_leaf(one, z, rows, transition.rates(z))
    return result
