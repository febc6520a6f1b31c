"""The order of writes: tokens that make XLA overwrite large arrays instead of copying them.

A step of a large filter must not hold a second copy of its state. XLA can overwrite an array only after the
last read of its old contents. It decides on the order of reads and writes by itself, looks at data
dependencies only, and makes a copy of the whole array wherever the order that it has chosen does not allow an
overwrite. There is no way to ask for an order (``lax.optimization_barrier`` does not survive until XLA
schedules a program), so we make it a data dependency:

- A ``Token`` is a zero that XLA can neither compute nor guess before certain values are known.
  ``after(x)`` makes one from x.
- ``token.hold(y)`` is y plus that zero. Whatever writes ``token.hold(y)`` is therefore written after x was
  computed, and with it after everything that was read for x.

Four rules keep this sound:

1. The zero is ``0 · x`` in floating point, because XLA knows that an integer times zero is zero.
2. A NaN or an infinity in x must not reach y: ``0 · NaN`` is NaN. Every token has that guard.
3. XLA likes to compute a single number twice rather than wait for it, and the second time it may read what
   has been overwritten by then, which again makes a copy. Where that happens, the token comes out of a branch
   (``after_in_branch``): values that enter or leave a branch are stored, and never computed again.
4. Small arrays need no order: a copy of a few kilobytes costs less than the arithmetic that prevents it.

Who uses tokens: the step moves y, y', … one after the other, once the save plan's token says that nobody
reads the old state any more (``filter.moving``); save plans return that token (``save.protocol``); ensemble
members move as the state does (``filter.members``); tiles of blocks are written back where they were read
(``covariance.tiles``); and loops that walk backwards over buffers write each slot after reading it
(``xla.autodiff``). A save plan whose token does not wait for its reads still computes the right numbers, but
copies the state in every step: that is what ``tests/test_ordering.py`` measures, for every plan that there
is.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree


class Token(NamedTuple):
    """Evidence that some values have been computed.

    Attributes:
        zero: the number 0.0, which XLA cannot know before these values.
    """

    zero: Float[Array, ""]

    def hold(self, x: Array) -> Array:
        """Return x itself, but not before the token is known; x may have any dtype."""
        return x & (self.zero == 0) if x.dtype == bool else x + self.zero.astype(x.dtype)


def after(x: PyTree[Array]) -> Token:
    """A token that is known once every array of x is."""
    # Without derivatives: a tangent may be NaN as well.
    first = [lax.stop_gradient(leaf[(0,) * leaf.ndim]) for leaf in jax.tree.leaves(x)]
    kind = jnp.result_type(*first)
    kind = kind if jnp.issubdtype(kind, jnp.floating) else jnp.result_type(float)
    total = jnp.asarray(sum(leaf.astype(kind) for leaf in first))
    return Token(0 * jnp.where(jnp.isfinite(total), total, 0))


def after_in_branch(condition: Array) -> Callable[[Array], Token]:
    """``after`` as a branch, for a condition that XLA cannot know; see rule 3 above."""

    def token(x: Array) -> Token:
        return Token(lax.cond(condition, lambda x: after(x).zero, lambda x: jnp.zeros((), x.dtype), x))

    return token


def stored(function: Callable[..., Array], *arrays: Array) -> Array:
    """Return ``function(*arrays)``, a number, with all arrays stored before it is computed.

    XLA:CPU makes slow loops of sums over the results of a stencil or a transform, because it fuses both. A
    branch keeps them apart. If the first entry of the first array is not finite, the result is NaN.
    """
    first = arrays[0].ravel()[0]
    return lax.cond(jnp.isfinite(first), function, lambda *_: jnp.full_like(first, jnp.nan), *arrays)
