"""C = blockdiag(RᵢᵀRᵢ): one (n−1, n) factor per unknown (the paper's Proposition 2)."""

from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from millipode.covariance import blocks
from millipode.covariance.protocol import (
    Corrected,
    Covariance,
    DiagonalInnovation,
    shared_per_leaf,
)
from millipode.fields import Field, Scale, map_leaves
from millipode.priors import Transition

# Blocks are corrected in tiles of about this many unknowns: the whole stack of a tile stays in the
# first- and second-level cache, and no temporary is ever as large as the state.
TILE = 256


class BlockDiagonal(Covariance):
    """C = blockdiag(R₁ᵀR₁, …, R_dᵀR_d); every leaf of the factor is (n−1, n, *shape)."""

    root: PyTree[Float[Array, "k n *shape"]]

    @classmethod
    def initial(cls, root: Float[Array, "k n"], scale: Scale, y: Field) -> Self:
        """The same block everywhere, times the unknown's scale."""

        def spread(leaf: Array, s: Array) -> Array:
            block = root.reshape(*root.shape, *(1,) * leaf.ndim)
            return jnp.broadcast_to(block * s, (*root.shape, *leaf.shape))

        return cls(map_leaves(spread, y, scale))

    def process_innovation(self, transition: Transition, jacobian: PyTree, z: Field) -> DiagonalInnovation:
        """Σ₁₁ − 2 J Σ₀₁ + J² Σ₀₀ per unknown; one number where the Jacobian is zero."""
        if jacobian is None:
            return DiagonalInnovation(blocks.process_scale(transition, None))
        return DiagonalInnovation(jax.tree.map(lambda j: blocks.process_scale(transition, j), jacobian))

    def correct(self, transition: Transition, scale: Scale, jacobian: PyTree, z: Field) -> Corrected:
        """Every block on its own, O(d ν³), tile by tile."""
        roots, tree = jax.tree.flatten(self.root)
        scales = shared_per_leaf(scale, z)
        jacobians = [None] * len(roots) if jacobian is None else jax.tree.leaves(jacobian)

        def one(root: Array, s: Array, j: Array | None) -> tuple[Array, Array, Array]:
            return blocks.correct(root, transition, s, j)

        results = [_in_tiles(one, root, s, j) for root, s, j in zip(roots, scales, jacobians, strict=True)]
        innovation, gain, posterior = (jax.tree.unflatten(tree, [r[i] for r in results]) for i in range(3))
        return Corrected(gain, DiagonalInnovation(innovation), BlockDiagonal(posterior))

    def rejected(self, z: Field) -> Corrected:
        """A zero gain."""
        gain = jax.tree.map(lambda r: jnp.zeros(r.shape[1:], r.dtype), self.root)
        return Corrected(gain, DiagonalInnovation(jax.tree.map(jnp.zeros_like, z)), self)

    def apply_gain(self, gain: PyTree, z: Field) -> tuple[Field, ...]:
        """K_q z, unknown by unknown."""
        n = jax.tree.leaves(gain)[0].shape[0]
        return tuple(jax.tree.map(lambda k, leaf, q=q: k[q] * leaf, gain, z) for q in range(n))

    def std(self, y: Field, row: tuple[Array | None, ...], noise: Array, scale: Scale) -> Scale:
        """One number per unknown."""
        scales = shared_per_leaf(scale, y)
        roots, tree = jax.tree.flatten(self.root)
        stds = [blocks.marginal_std(r, row, noise, s) for r, s in zip(roots, scales, strict=True)]
        return jax.tree.unflatten(tree, stds)

    def to_dense(self, y: Field) -> Float[Array, "nd nd"]:
        """Derivative-major."""
        flat = [r.reshape(*r.shape[:2], -1) for r in jax.tree.leaves(self.root)]
        root = jnp.concatenate(flat, axis=-1)
        n, d = root.shape[1:]
        covariance = jnp.einsum("kid,kjd,de->idje", root, root, jnp.eye(d, dtype=root.dtype))
        return covariance.reshape(n * d, n * d)


def _in_tiles(
    function: Callable[..., tuple[Array, Array, Array]], root: Array, *fields: Array | None
) -> tuple[Array, Array, Array]:
    """Apply ``function(root, *fields)`` to tiles of unknowns, to the root in place.

    Fields may be scalars or None, which all tiles share.
    """
    (k, n), shape, d = root.shape[:2], root.shape[2:], root[0, 0].size
    if d < 2 * TILE:
        return function(root, *fields)
    flat = [f if f is None or f.ndim == 0 else f.reshape(d) for f in fields]

    def process(start: Array | int, width: int, carry: tuple) -> tuple:
        def take(x: Array | None) -> Array | None:
            if x is None or x.ndim == 0:
                return x
            return lax.dynamic_slice_in_dim(x, start, width, axis=x.ndim - 1)

        parts = function(take(carry[2]), *(take(f) for f in flat))
        return tuple(
            lax.dynamic_update_slice_in_dim(x, part, start, axis=x.ndim - 1)
            for x, part in zip(carry, parts, strict=True)
        )

    tile = _tile_size(d)
    carry = (jnp.zeros(d, root.dtype), jnp.zeros((n, d), root.dtype), root.reshape(k, n, d))
    carry = lax.fori_loop(0, d // tile, lambda i, c: process(i * tile, tile, c), carry)
    if d % tile:
        carry = process(d - d % tile, d % tile, carry)
    innovation, gain, posterior = carry
    return innovation.reshape(shape), gain.reshape(n, *shape), posterior.reshape(k, n, *shape)


def _tile_size(d: int) -> int:
    """A divisor of d near TILE, so that no remainder needs a second copy of the program."""
    for width in sorted(range(TILE // 2, 4 * TILE), key=lambda w: abs(w - TILE)):
        if d % width == 0:
            return width
    return TILE
