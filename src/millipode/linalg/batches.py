"""Small matrices in batches: a ``Block`` is an array (k, n, *batch) with the axes of the matrix in front.

Arithmetic on blocks is vectorised over the batch. Unrolled, it is fastest to run and slowest to compile;
where there are only a few blocks, a loop over each of them is quick enough, and compiles ten times faster.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Block = Float[Array, "k n *batch"]

# Up to this many blocks, short programs are preferred to fast ones.
FEW = 64


def few(block: Block) -> bool:
    """Whether a batch is so small that a short program is preferred."""
    return math.prod(block.shape[2:]) <= FEW


def each(function: Callable[..., Array], *blocks: Block) -> Block:
    """Apply a function of matrices to every block on its own."""
    batch = blocks[0].shape[2:]
    if not batch:
        return function(*blocks)
    flat = [jnp.moveaxis(b.reshape(*b.shape[:2], -1), -1, 0) for b in blocks]
    result = jnp.moveaxis(jax.vmap(function)(*flat), 0, -1)
    return result.reshape(*result.shape[:2], *batch)


def product(a: Block, b: Block) -> Block:
    """A B, block by block."""
    if few(a):
        return jnp.einsum("ik...,kj...->ij...", a, b, precision="highest")
    return sum((a[:, k, None] * b[k] for k in range(1, b.shape[0])), a[:, 0, None] * b[0])


def known(dtype: Any) -> float:
    """The share of its length below which a column counts as zero: a direction that is known exactly."""
    return float(jnp.finfo(dtype).eps) ** 0.75
