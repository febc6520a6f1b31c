"""Steps that overwrite the state they start from, instead of making a second copy of it."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.covariance.protocol import Covariance
from millipode.filter.state import Move
from millipode.linalg.fields import Field, Row, combine
from millipode.xla.ordering import Token, after

# Below this size, copies cost less than what prevents them.
IN_PLACE = 2**11


def shift(covariance: Covariance, moves: tuple[Move, ...]) -> tuple[Field, ...]:
    """Σ k ⊗ x, one field per field of the state."""
    parts = [covariance.apply_gain(move.gain, move.field) for move in moves]
    return jax.tree.map(lambda *x: functools.reduce(jnp.add, x), *parts)


def moved(
    starts: tuple[Field, ...],
    phi: tuple[Row, ...],
    state: tuple[Field, ...],
    correction: tuple[Field, ...],
    token: Token,
    wait_for: Callable[[Array], Token] = after,
) -> tuple[Field, ...]:
    """Φ Y − the correction, field by field, in place.

    Φ is upper triangular, so y^(q) may be overwritten once y, …, y^(q−1) have been. ``xla.ordering`` says why
    that order has to be forced. The unit diagonal of Φ is left alone, because E₁ m must round here as it does
    in the residual: high orders amplify what does not cancel.

    Args:
        starts: the first rows of Φ Y, as far as they are known already.
        phi: Φ, row by row.
        state: the fields of Y.
        correction: one field per field of the state.
        token: known once nobody else reads the old state any more.
        wait_for: makes the tokens of single fields.
    """
    n, known = len(state), len(starts)

    def leafwise(*leaves: Array) -> tuple[Array, ...]:
        first, old, shifts = leaves[:known], leaves[known : known + n], leaves[known + n :]
        kind, in_place = old[0].dtype, old[0].size >= IN_PLACE
        new = [
            (x - (token.hold(shift) if in_place else shift)).astype(kind)
            for x, shift in zip(first, shifts, strict=False)
        ]
        for row, shift in zip(phi[known:], shifts[known:], strict=True):
            *others, last = row
            assert last is not None  # the highest derivative moves all others
            if in_place:
                last = wait_for(new[-1]).hold(last)
            new.append((combine([*others, last], old) - shift).astype(kind))
        return tuple(new)

    leaves = [jax.tree.leaves(x) for x in (*starts, *state, *correction)]
    columns = [leafwise(*parts) for parts in zip(*leaves, strict=True)]
    tree = jax.tree.structure(state[0])
    return tuple(jax.tree.unflatten(tree, parts) for parts in zip(*columns, strict=True))
