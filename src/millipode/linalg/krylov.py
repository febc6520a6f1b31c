"""GMRES on fields: systems that are known by products only, solved as accurately as a step needs it.

Of the libraries at hand, ``jax.scipy.sparse.linalg.gmres`` does not say whether it converged and how many
products it took, and lineax builds its whole Krylov space before it looks at the residual. A step asks for
one or two digits, which a handful of vectors has.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from millipode.linalg.fields import Field, safe_divide, safe_sqrt, total

# A Krylov space that was used up is followed by another one if it has reduced the residual to this part.
WORTH_A_RESTART = 0.3


class Krylov(NamedTuple):
    """What GMRES has found.

    Attributes:
        x: the solution.
        iterations: how many products it took.
        left: the norm of the residual over that of the right-hand side.
    """

    x: Field
    iterations: Array
    left: Array


class _Cycles(NamedTuple):
    """Between two Krylov spaces.

    Attributes:
        x: the solution so far.
        iterations: how many products it took.
        left: the norm of the residual over that of the right-hand side.
        before: the same before the last space.
    """

    x: Field
    iterations: Array
    left: Array
    before: Array


class _Space(NamedTuple):
    """A Krylov space that grows.

    Attributes:
        size: how many products were made.
        vectors: an orthonormal basis, in front of all other axes; zero where it has not grown yet.
        triangle: R of the QR decomposition of Hessenberg's matrix, column by column.
        rotation: Qᵀ of the same.
        left: the norm of the residual over that of the right-hand side.
    """

    size: Array
    vectors: Field
    triangle: Array
    rotation: Array
    left: Array


def gmres(
    product: Callable[[Field], Field],
    right: Field,
    tolerance: Array | float,
    vectors: int,
    stored: DTypeLike | None = None,
) -> Krylov:
    """Solve A x = b from x = 0, with restarts for as long as they help.

    Args:
        product: A, a linear map of fields.
        right: b.
        tolerance: what the norm of the residual may be, over that of b.
        vectors: the largest dimension of a Krylov space.
        stored: the dtype in which vectors are stored, that of b by default. Products and sums have the
            precision of b, so a solution has as many digits as one that is stored with all of them, up to
            the precision of what is stored (Aliaga et al., *Compressed basis GMRES*, 2022).
    """
    length = _norm(right)
    one = jnp.ones_like(length)
    left = jnp.where(jnp.isfinite(length), jnp.where(length > 0, one, 0), jnp.inf)
    start = _Cycles(jax.tree.map(jnp.zeros_like, right), jnp.zeros((), jnp.int32), left, jnp.inf * one)

    def unfinished(c: _Cycles) -> Array:
        return (c.left > tolerance) & (c.left < WORTH_A_RESTART * c.before)

    def cycle(c: _Cycles) -> _Cycles:
        residual = lax.cond(
            c.iterations == 0,
            lambda x: right,
            lambda x: jax.tree.map(jnp.subtract, right, product(x)),
            c.x,
        )
        found = _one_space(product, residual, tolerance * safe_divide(one, c.left), vectors, stored)
        x = jax.tree.map(jnp.add, c.x, found.x)
        return _Cycles(x, c.iterations + found.iterations, c.left * found.left, c.left)

    c = lax.while_loop(unfinished, cycle, start)
    return Krylov(c.x, c.iterations, c.left)


def _one_space(
    product: Callable[[Field], Field],
    right: Field,
    tolerance: Array,
    vectors: int,
    stored: DTypeLike | None,
) -> Krylov:
    """The same without restarts."""
    length = _norm(right)
    kind = length.dtype
    first = jax.tree.map(lambda x: safe_divide(x, length), right)
    basis = jax.tree.map(lambda x: _put(jnp.zeros((vectors + 1, *x.shape), stored or x.dtype), x, 0), first)
    one = jnp.eye(vectors + 1, dtype=kind)
    left = jnp.where(jnp.isfinite(length), jnp.where(length > 0, 1.0, 0.0), jnp.inf).astype(kind)
    start = _Space(jnp.zeros((), jnp.int32), basis, one[:, :-1], one, left)

    def unfinished(space: _Space) -> Array:
        return (space.size < vectors) & (space.left > tolerance) & (space.left < jnp.inf)

    space = lax.while_loop(unfinished, lambda space: _grown(product, space, right), start)
    # Columns that were never made are those of the identity, and their coefficients are zero.
    target = jnp.where(jnp.arange(vectors) < space.size, space.rotation[:-1, 0], 0)
    coefficients = length * _solved(space.triangle[:-1], target)

    def add(j: Array, x: Field) -> Field:
        return jax.tree.map(lambda a, v: a + coefficients[j].astype(a.dtype) * _at(v, j, a), x, space.vectors)

    x = lax.fori_loop(0, space.size, add, jax.tree.map(jnp.zeros_like, right))
    return Krylov(x, space.size, space.left)


def _grown(product: Callable[[Field], Field], space: _Space, like: Field) -> _Space:
    """The space with one more vector: Arnoldi's step, and one more Givens rotation."""
    k = space.size
    new = product(jax.tree.map(lambda v, x: _at(v, k, x), space.vectors, like))

    def orthogonalise(j: Array, carry: tuple[Field, Array]) -> tuple[Field, Array]:
        new, column = carry
        other = jax.tree.map(lambda v, x: _at(v, j, x), space.vectors, like)
        part = total(jax.tree.map(jnp.multiply, other, new)).astype(column.dtype)
        return jax.tree.map(lambda a, b: a - part.astype(a.dtype) * b, new, other), column.at[j].set(part)

    column = jnp.zeros(space.rotation.shape[0], space.rotation.dtype)
    new, column = lax.fori_loop(0, k + 1, orthogonalise, (new, column))
    length = _norm(new)
    column = space.rotation @ column.at[k + 1].set(length)
    radius = jnp.hypot(column[k], column[k + 1])
    cosine, sine = safe_divide(column[k], radius), safe_divide(column[k + 1], radius)
    a, b = space.rotation[k], space.rotation[k + 1]
    rotation = space.rotation.at[k].set(cosine * a + sine * b).at[k + 1].set(cosine * b - sine * a)
    column = column.at[k].set(radius).at[k + 1].set(0)
    vectors = jax.tree.map(
        lambda v, x: _put(v, safe_divide(x, length.astype(x.dtype)), k + 1),
        space.vectors,
        new,
    )
    left = jnp.abs(rotation[k + 1, 0])
    left = jnp.where(jnp.isfinite(radius), left, jnp.inf)
    # A vector of length zero ends the space: the solution lies in it, or A is singular.
    return _Space(k + 1, vectors, space.triangle.at[:, k].set(column), rotation, left)


def _put(vectors: Array, x: Array, k: Array | int) -> Array:
    return lax.dynamic_update_index_in_dim(vectors, x.astype(vectors.dtype), k, 0)


def _at(vectors: Array, k: Array, like: Array) -> Array:
    return vectors[k].astype(like.dtype)


def _solved(triangle: Array, right: Array) -> Array:
    """Back substitution; a direction with a pivot of zero is left alone."""
    n = right.shape[0]

    def row(i: Array, x: Array) -> Array:
        k = n - 1 - i
        return x.at[k].set(safe_divide(right[k] - triangle[k] @ x, triangle[k, k]))

    return lax.fori_loop(0, n, row, jnp.zeros_like(right))


def _norm(x: Field) -> Array:
    """√Σ x², in units in which no square underflows."""
    most = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(x)]))
    unit = jnp.where((most > 0) & jnp.isfinite(most), most, 1)
    return unit * safe_sqrt(total(jax.tree.map(lambda leaf: (leaf / unit) ** 2, x)))
