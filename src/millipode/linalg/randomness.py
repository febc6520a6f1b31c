"""Random numbers for fields, and the keys that they come from."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.linalg.fields import Field

Numbers = Callable[[Array, Field, int], Field]  # (key, a field, rows) → random numbers (rows, *shape)


def normal(key: Array, y: Field, rows: int) -> Field:
    """Independent standard normal numbers: a field like y with an axis of ``rows`` in front."""
    leaves, tree = jax.tree.flatten(y)
    keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))
    draws = [jax.random.normal(k, (rows, *x.shape), x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, draws)


def signs(key: Array, y: Field, rows: int) -> Field:
    """Random signs ±1, which share all moments up to the third with normal numbers: one bit for each."""
    leaves, tree = jax.tree.flatten(y)
    keys = [key] if len(leaves) == 1 else jax.random.split(key, len(leaves))

    def draw(key: Array, x: Array) -> Array:
        words = jax.random.bits(key, (-(-rows // 32), *x.shape), jnp.uint32)
        return jnp.stack([1 - 2 * ((words[i // 32] >> i % 32) & 1).astype(x.dtype) for i in range(rows)])

    return jax.tree.unflatten(tree, [draw(k, x) for k, x in zip(keys, leaves, strict=True)])


def as_key(key: Any, name: str = "key") -> Array:
    """One key of ``jax.random``, old style or new; raise ``TypeError`` for anything else."""
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if is_key and key.ndim == 0:
        return key
    if getattr(key, "dtype", None) == jnp.uint32 and getattr(key, "ndim", None) == 1:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise TypeError(f"{name} must be one key such as jax.random.key(0), got {key!r}.")
