"""C = blockdiag(RᵢᵀRᵢ): one (n−1, n) factor per unknown (the paper's Proposition 2)."""

import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from millipode.autodiff import zero_after
from millipode.covariance import blocks
from millipode.covariance.protocol import (
    Corrected,
    Covariance,
    DiagonalInnovation,
    Kernel,
    Numbers,
    normal,
    shared_per_leaf,
)
from millipode.fields import Field, Scale, is_shared, per_leaf
from millipode.priors import BlockTransition, Row, Transition

# Blocks are corrected in tiles of about this many unknowns: the whole stack of a tile stays in the
# first- and second-level cache, and no temporary is ever as large as the state.
TILE = 512


class BlockDiagonal(Covariance):
    """C = blockdiag(R₁ᵀR₁, …, R_dᵀR_d); every leaf of the factor is (n−1, n, *shape)."""

    root: PyTree[Float[Array, "k n *shape"]]

    @classmethod
    def initial(cls, root: PyTree, scale: Scale, y: Field) -> Self:
        """Each unknown's block, or the same for all, times its scale."""

        def spread(leaf: Array, s: Array, block: Array) -> Array:
            block = block.reshape(*block.shape, *(1,) * (2 + leaf.ndim - block.ndim))
            return jnp.broadcast_to(block * s, (*block.shape[:2], *leaf.shape))

        is_shared = isinstance(root, jax.Array) and root.ndim == 2
        blocks = jax.tree.map(lambda _: root, y) if is_shared else root
        return cls(jax.tree.map(spread, y, per_leaf(scale, y), blocks))

    def process_innovation(self, transition: Transition, jacobian: PyTree, z: Field) -> DiagonalInnovation:
        """Σ₁₁ − 2 J Σ₀₁ + J² Σ₀₀ per unknown; one number where all of them share the Jacobian."""
        if isinstance(transition, BlockTransition) and (jacobian is None or is_shared(jacobian, z)):
            return DiagonalInnovation(blocks.process_scale(transition, jacobian))
        return DiagonalInnovation(_elementwise(blocks.process_scale, transition, jacobian, z))

    def process_correction(self, transition: Transition, jacobian: PyTree, z: Field) -> Field:
        """Unknown by unknown."""
        return jax.tree.map(jnp.multiply, _elementwise(blocks.process_gain, transition, jacobian, z), z)

    def correct(self, transition: Transition, scale: Scale, jacobian: PyTree, z: Field) -> Corrected:
        """Every block on its own, O(d ν³), tile by tile."""

        def one(root: Array, s: Array, j: Array | None, rate: Array | None) -> tuple[Array, Array, Array]:
            return blocks.correct(root, transition.at(rate), s, j)

        innovation, gain, posterior = _per_leaf(
            one,
            z,
            jax.tree.leaves(self.root),
            shared_per_leaf(scale, z),
            _leaves(jacobian, z),
            transition.rates(z),
            reuse={2: 0},
        )
        return Corrected(gain, DiagonalInnovation(innovation), BlockDiagonal(posterior))

    def rejected(self, z: Field) -> Corrected:
        """A zero gain."""
        gain = jax.tree.map(lambda r: jnp.zeros(r.shape[1:], r.dtype), self.root)
        return Corrected(gain, DiagonalInnovation(jax.tree.map(jnp.zeros_like, z)), self)

    def apply_gain(self, gain: PyTree, z: Field) -> tuple[Field, ...]:
        """K_q z, unknown by unknown."""
        n = jax.tree.leaves(gain)[0].shape[0]
        return tuple(jax.tree.map(lambda k, leaf, q=q: k[q] * leaf, gain, z) for q in range(n))

    def std(self, y: Field, row: Row, noise: Scale, scale: Scale) -> Scale:
        """One number per unknown."""
        roots, tree = jax.tree.flatten(self.root)
        rows = zip(*(_leaves(p, y) for p in row), strict=True)
        columns = zip(roots, rows, shared_per_leaf(noise, y), shared_per_leaf(scale, y), strict=True)
        return jax.tree.unflatten(tree, [blocks.marginal_std(*parts) for parts in columns])

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """Derivative-major."""
        flat = [r.reshape(*r.shape[:2], -1) for r in jax.tree.leaves(self.root)]
        root = jnp.concatenate(flat, axis=-1)
        n, d = root.shape[1:]
        covariance = jnp.einsum("kid,kjd,de->idje", root, root, jnp.eye(d, dtype=root.dtype))
        return covariance.reshape(n * d, n * d)

    def predict(self, transition: Transition, scale: Scale, y: Field) -> Self:
        """Every block on its own."""

        def one(root: Array, s: Array, rate: Array | None) -> tuple[Array]:
            return (blocks.predict(root, transition.at(rate), s),)

        (root,) = _per_leaf(
            one, y, jax.tree.leaves(self.root), shared_per_leaf(scale, y), transition.rates(y)
        )
        return type(self)(root)

    def backward(self, transition: Transition, scale: Scale, y: Field) -> "BlockDiagonalKernel":
        """Every block on its own."""

        def one(root: Array, s: Array, rate: Array | None) -> tuple[Array, Array]:
            return blocks.backward(root, transition.at(rate), s)

        gain, noise = _per_leaf(
            one, y, jax.tree.leaves(self.root), shared_per_leaf(scale, y), transition.rates(y)
        )
        return BlockDiagonalKernel(gain, BlockDiagonal(noise))

    def extend(self, kernel: Kernel, transition: Transition, scale: Scale, y: Field) -> Kernel:
        """``backward`` and ``compose`` in one go, so that nothing in between is as large as the state."""
        assert isinstance(kernel, BlockDiagonalKernel)

        def one(root: Array, gain: Array, noise: Array, s: Array, rate: Array | None) -> tuple[Array, Array]:
            step, step_noise = blocks.backward(root, transition.at(rate), s)
            return blocks.product(gain, step), blocks.push(gain, noise, step_noise)

        gain, noise = _per_leaf(
            one,
            y,
            *map(jax.tree.leaves, (self.root, kernel.gain, kernel.noise.root)),
            shared_per_leaf(scale, y),
            transition.rates(y),
            reuse={1: 2, 0: 1},  # the noise first, which takes the gain as well
        )
        return BlockDiagonalKernel(gain, BlockDiagonal(noise))

    def identity(self) -> "BlockDiagonalKernel":
        """G = I."""

        def one(root: Array) -> Array:
            n, shape = root.shape[1], root.shape[2:]
            eye = jnp.eye(n, dtype=root.dtype).reshape(n, n, *(1,) * len(shape))
            return jnp.broadcast_to(eye, (n, n, *shape))

        gain = jax.tree.map(one, self.root)
        return BlockDiagonalKernel(gain, BlockDiagonal(jax.tree.map(jnp.zeros_like, gain)))

    def square(self) -> Self:
        """Zero rows added."""
        return type(self)(jax.tree.map(blocks.square, self.root))

    def draw(self, key: Array, y: Field, numbers: Numbers | None = None) -> tuple[Field, ...]:
        """Rᵀε, unknown by unknown."""
        k, n = jax.tree.leaves(self.root)[0].shape[:2]
        noise = (numbers or normal)(key, y, k)

        def column(q: int) -> Field:
            return jax.tree.map(lambda root, e: jnp.sum(root[:, q] * e, axis=0), self.root, noise)

        return tuple(column(q) for q in range(n))


class BlockDiagonalKernel(Kernel):
    """One gain and one covariance per unknown; every leaf of the gain is (n, n, *shape)."""

    gain: PyTree[Float[Array, "n n *shape"]]
    noise: BlockDiagonal

    def push(self, covariance: BlockDiagonal) -> BlockDiagonal:
        """Every block on its own."""

        def one(gain: Array, noise: Array, root: Array) -> tuple[Array]:
            return (blocks.push(gain, noise, root),)

        y = jax.tree.map(lambda g: g[0, 0], self.gain)
        (root,) = _per_leaf(one, y, *map(jax.tree.leaves, (self.gain, self.noise.root, covariance.root)))
        return BlockDiagonal(root)

    def compose(self, other: "BlockDiagonalKernel") -> "BlockDiagonalKernel":
        """Every block on its own."""
        gain = jax.tree.map(blocks.product, self.gain, other.gain)
        return BlockDiagonalKernel(gain, self.push(other.noise))

    def apply(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Σ_j g_qj Y_j, unknown by unknown."""

        def row(q: int) -> Field:
            return jax.tree.map(lambda g, *x: sum(g[q, j] * x[j] for j in range(len(x))), self.gain, *fields)

        return tuple(row(q) for q in range(len(fields)))

    def through(self, gain: PyTree) -> PyTree:
        """G k, unknown by unknown."""
        return jax.tree.map(lambda g, k: jnp.sum(g * k, axis=1), self.gain, gain)

    def after(self, transition: Transition) -> "BlockDiagonalKernel":
        """G Φ, unknown by unknown."""

        def one(gain: Array, rate: Array | None) -> Array:
            matrix = transition.at(rate).matrix
            return blocks.product(gain, matrix.reshape(*matrix.shape, *(1,) * (gain.ndim - matrix.ndim)))

        gains, tree = jax.tree.flatten(self.gain)
        pairs = zip(gains, transition.rates(self.gain), strict=True)
        return BlockDiagonalKernel(jax.tree.unflatten(tree, [one(*pair) for pair in pairs]), self.noise)


def _leaves(x: Scale | None, y: Field) -> list[Any]:
    """Of a field, of a shared scalar, or of None, as many as y has."""
    return [None] * len(jax.tree.leaves(y)) if x is None else shared_per_leaf(x, y)


def _elementwise(function: Callable[..., Array], transition: Transition, jacobian: PyTree, z: Field) -> Field:
    """``function`` of each unknown's transition and Jacobian.

    Blocks that differ between unknowns take more work than the pass over the result, and room for it: those
    are made in tiles.
    """
    if isinstance(transition, BlockTransition):
        leaves = [function(transition, j) for j in _leaves(jacobian, z)]
        return jax.tree.unflatten(jax.tree.structure(z), leaves)

    def one(j: Array | None, rate: Array) -> tuple[Array]:
        return (function(transition.at(rate), j),)

    (result,) = _per_leaf(one, z, _leaves(jacobian, z), transition.rates(z))
    return result


def _per_leaf(
    function: Callable[..., tuple], y: Field, *arguments: list[Any], reuse: dict[int, int] | None = None
) -> tuple:
    """``function`` of arguments per leaf of y, tile by tile; returns its results as fields."""
    leaves, tree = jax.tree.flatten(y)
    results = [
        in_tiles(function, leaf.shape, leafwise, reuse)
        for leaf, *leafwise in zip(leaves, *arguments, strict=True)
    ]
    return tuple(jax.tree.unflatten(tree, part) for part in zip(*results, strict=True))


def in_tiles(
    function: Callable[..., tuple],
    shape: tuple[int, ...],
    arrays: list[Any],
    reuse: dict[int, int] | None = None,
) -> tuple:
    """Apply a function to tiles of unknowns; result o overwrites argument ``reuse[o]``, in this order.

    Arguments and results end with the axes of ``shape``; arguments may also be scalars or None, which all
    tiles share.
    """
    reuse = reuse or {}
    d = math.prod(shape)
    if d < 2 * TILE:
        return function(*arrays)

    def is_shared(x: Any) -> bool:
        return x is None or x.ndim == 0

    flat = [x if is_shared(x) else x.reshape(*x.shape[: x.ndim - len(shape)], d) for x in arrays]
    overwritten = {i: o for o, i in reuse.items()}

    def process(start: Array | int, width: int, results: tuple) -> tuple:
        def take(x: Any) -> Any:
            return x if is_shared(x) else lax.dynamic_slice_in_dim(x, start, width, axis=x.ndim - 1)

        current = [results[overwritten[i]] if i in overwritten else x for i, x in enumerate(flat)]
        parts = function(*map(take, current))
        new: dict[int, Array] = {}
        for o in sorted(range(len(parts)), key=lambda o: [*reuse].index(o) if o in reuse else -1):
            # In place, which XLA does only if all has been read before it is overwritten.
            place = start + zero_after(new).astype(jnp.int32) if o in reuse and new else start
            new[o] = lax.dynamic_update_slice_in_dim(results[o], parts[o], place, axis=results[o].ndim - 1)
        return tuple(new[o] for o in range(len(parts)))

    shapes = jax.eval_shape(function, *flat)
    tile = _tile_size(d)
    results = tuple(
        flat[reuse[o]] if o in reuse else jnp.zeros(s.shape, s.dtype) for o, s in enumerate(shapes)
    )
    results = lax.fori_loop(0, d // tile, lambda i, r: process(i * tile, tile, r), results)
    if d % tile:
        results = process(d - d % tile, d % tile, results)
    return tuple(x.reshape(*x.shape[:-1], *shape) for x in results)


def _tile_size(d: int) -> int:
    """A divisor of d near TILE, so that no remainder needs a second copy of the program."""
    for width in sorted(range(TILE // 4, 2 * TILE), key=lambda w: abs(w - TILE)):
        if d % width == 0:
            return width
    return TILE
