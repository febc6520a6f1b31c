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
from jaxtyping import Array, Float

from millipode.linalg.fields import Field, safe_divide, safe_sqrt

# The cosine between successive corrections below which systems are solved more strictly, and above which they
# are solved more roughly; by which factors; and the strictest bound, as a part of the usual one.
DIFFERENT, ALIKE = 0.2, 0.5
STRICTER, ROUGHER = 0.5, 1.5
STRICTEST = 1e-3
# Angles are measured between sums of so many parts of a field, with random signs: this is their precision.
PARTS = 256


def sketch(x: Field) -> Float[Array, " k"]:
    """A few random projections of a field, which keep angles to about 1/√PARTS."""
    return jnp.concatenate([_projected(leaf.ravel()) for leaf in jax.tree.leaves(x)])


def _projected(x: Float[Array, " d"]) -> Float[Array, " k"]:
    rows = math.ceil(x.size / PARTS)
    # The bits of a multiple of the index by an odd number are as good as random signs.
    bits = (jnp.arange(x.size, dtype=jnp.uint32) * jnp.uint32(2654435769)) >> 16
    signed = jnp.where(bits & 1 == 1, x, -x)
    return jnp.sum(jnp.pad(signed, (0, rows * PARTS - x.size)).reshape(rows, PARTS), axis=0)


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
