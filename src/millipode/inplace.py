"""Steps that overwrite the state they start from, instead of a second copy of it."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from millipode.fields import Field, combine
from millipode.priors import Row


def _zero(x: Array) -> Array:
    return 0 * x[(0,) * x.ndim]


# Below this size, copies cost less than what prevents them.
IN_PLACE = 2**11


def moved(
    starts: tuple[Field, ...],
    phi: tuple[Row, ...],
    state: tuple[Field, ...],
    correction: tuple[Field, ...],
    signal: Array,
    after: Callable[[Array], Array] = _zero,
) -> tuple[Field, ...]:
    """Φ Y − the correction, field by field, in place; ``starts`` are the first rows of Φ Y.

    The ``signal`` is any number that is known only after the last look at the old state, and ``after`` makes
    a zero that is known only after its argument.

    Φ is upper triangular, so y^(q) may be overwritten once y, …, y^(q−1) are. XLA does so only if the order
    is forced on it, and copies the whole state at every step otherwise: hence a zero that depends on what
    was computed before, and that XLA cannot know to be one. The unit diagonal of Φ is left alone, because
    E₁ m must round here as it does in the residual: high orders amplify what does not cancel.
    """
    n, known = len(state), len(starts)

    def leafwise(*leaves: Array) -> tuple[Array, ...]:
        first, old, shifts = leaves[:known], leaves[known : known + n], leaves[known + n :]
        kind, in_place = old[0].dtype, old[0].size >= IN_PLACE
        wait = 0 * signal.astype(kind) if in_place else 0
        new = [(x - (shift + wait)).astype(kind) for x, shift in zip(first, shifts, strict=False)]
        for row, shift in zip(phi[known:], shifts[known:], strict=True):
            zero = after(new[-1]) if in_place else 0
            *others, last = row
            assert last is not None  # the highest derivative moves all others
            new.append((combine([*others, last + zero], old) - shift).astype(kind))
        return tuple(new)

    leaves = [jax.tree.leaves(x) for x in (*starts, *state, *correction)]
    columns = [leafwise(*parts) for parts in zip(*leaves, strict=True)]
    tree = jax.tree.structure(state[0])
    return tuple(jax.tree.unflatten(tree, parts) for parts in zip(*columns, strict=True))
