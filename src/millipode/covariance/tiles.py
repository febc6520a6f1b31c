"""Blocks of many unknowns, processed in tiles that stay in the cache."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.linalg.fields import Field
from millipode.xla.ordering import after

# A tile has about this many unknowns: its whole stack stays in the first- and second-level cache, and no
# temporary is ever as large as the state.
TILE = 512


def per_leaf(
    function: Callable[..., tuple], y: Field, *arguments: list[Any], reuse: dict[int, int] | None = None
) -> tuple:
    """Apply a function to the arguments of each leaf of y, tile by tile; return its results as fields.

    Args:
        function: as for ``in_tiles``.
        y: a field, for its structure and shapes.
        arguments: for each argument of the function, a list with one array per leaf of y.
        reuse: as for ``in_tiles``.
    """
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
    """Apply a function to tiles of unknowns.

    Args:
        function: takes arrays whose last axes are unknowns, and returns a tuple of such arrays.
        shape: the shape of the unknowns, which are the last axes of all arguments and results.
        arrays: the arguments; numbers and None are shared by all tiles.
        reuse: result o overwrites argument ``reuse[o]``, in this order.
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
            # XLA writes in place only if everything has been read before it is overwritten.
            place = after(new).hold(jnp.asarray(start, jnp.int32)) if o in reuse and new else start
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
