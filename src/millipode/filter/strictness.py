"""How accurately a step's linear systems are solved: as roughly as does no harm.

What iterations leave undone moves the state in directions that the ODE damps at once, so the next steps have
to correct it. If that is most of what they correct, steps become short. It can be told from the local error
of a smooth solution, which hardly changes from one step to the next: corrections that are due to earlier
linear systems have nothing in common. So systems are solved more strictly while the corrections of successive
steps point in different directions, and more roughly again later on.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from millipode.linalg.fields import Field, safe_divide, safe_sqrt

# The cosine between successive corrections below which systems are solved more strictly, and above which they
# are solved more roughly; by which factors; and the strictest bound, as a part of the usual one.
DIFFERENT, ALIKE = 0.2, 0.5
STRICTER, ROUGHER = 0.5, 1.5
STRICTEST = 1e-3
# Angles are measured between sums of so many parts of a field, with random signs: this is their precision.
PARTS = 256
# Arrays with more entries are not flattened, if their last axis has enough of them.
FLAT, FEWEST = 2**16, 64


def sketch(x: Field) -> Float[Array, " k"]:
    """A few random projections of a field, which keep angles to about 1/√PARTS."""
    return jnp.concatenate([_projected(leaf) for leaf in jax.tree.leaves(x)])


def _projected(x: Array) -> Float[Array, " k"]:
    """Sums over parts of an array with random signs.

    Large arrays are summed along all axes but the last one, because flattening gathers what is sharded.
    """
    signed = x * _signs(x)
    if x.size > FLAT and x.ndim > 1 and x.shape[-1] >= FEWEST:
        return jnp.sum(signed, axis=tuple(range(x.ndim - 1)))
    rows = math.ceil(x.size / PARTS)
    return jnp.sum(jnp.pad(signed.ravel(), (0, rows * PARTS - x.size)).reshape(rows, PARTS), axis=0)


def _signs(like: Array) -> Array:
    """+1 and −1, by a hash of the place (that of SplitMix, for 32 bits)."""
    place = jnp.zeros(like.shape, jnp.uint32)
    for axis, n in enumerate(like.shape):
        place = place * jnp.uint32(n) + lax.broadcasted_iota(jnp.uint32, like.shape, axis)
    for factor in (0x21F0AAAD, 0x735A2D97):
        place = (place ^ (place >> 16)) * jnp.uint32(factor)
    return jnp.where((place >> 16) & 1 == 1, 1, -1).astype(like.dtype)


def adapted(share: Array, new: Float[Array, " k"], old: Float[Array, " k"]) -> Array:
    """The part of the usual bound to which systems of the next step are solved.

    Args:
        share: that of this step.
        new: the sketch of this step's correction, in units of the tolerance.
        old: that of the step before; zero if there was none.
    """
    lengths = safe_sqrt(jnp.sum(new**2)) * safe_sqrt(jnp.sum(old**2))
    cosine = jnp.where(lengths > 0, safe_divide(jnp.sum(new * old), lengths), 1)
    factor = jnp.where(cosine > ALIKE, ROUGHER, jnp.where(cosine < DIFFERENT, STRICTER, 1))
    return jnp.clip(share * factor.astype(share.dtype), STRICTEST, 1)
