"""Buffers with room for a fixed number of entries: pytrees whose leading axis counts them."""

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def allocate(entry: Any, length: int) -> Any:
    """Room for entries like this one."""
    return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), entry)


def unknown(entry: Any, length: int) -> Any:
    """Room for entries like this one, filled with NaN."""
    return jax.tree.map(lambda x: jnp.full((length, *x.shape), jnp.nan, x.dtype), entry)


def put(buffers: Any, entry: Any, slot: Array | int, accept: Any = True) -> Any:
    """Write an entry inside of a loop that has declared these arrays as its buffers."""
    # The loop wraps its buffers, so the entry leads the traversal.
    return jax.tree.map(lambda x, buffer: eqxi.buffer_at_set(buffer, slot, x, pred=accept), entry, buffers)


def overwrite(buffers: Any, entry: Any, slot: Array) -> Any:
    """Write an entry. Not ``x.at[slot].set``, which would read what it is about to overwrite."""
    return jax.tree.map(lambda b, x: lax.dynamic_update_index_in_dim(b, x, slot, 0), buffers, entry)


def fill(buffers: Any, entry: Any, count: Array) -> Any:
    """Put an entry into every slot from ``count`` on."""

    def leafwise(buffer: Array, x: Array) -> Array:
        used = jnp.arange(buffer.shape[0]) < count
        return jnp.where(used.reshape(-1, *(1,) * x.ndim), buffer, x)

    return jax.tree.map(leafwise, buffers, entry)
