"""Triangular systems: one function for single matrices and for batches of small ones."""

import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from millipode.linalg.batches import Block, each, few
from millipode.linalg.fields import safe_divide

# Up to this size, a system is a short program when it is unrolled, too.
TINY = 3


def solve_upper(
    triangle: Block, right: Block, *, transposed: bool = False, known: float = 0.0, library: bool = False
) -> Block:
    """The X with R X = right, or Rᵀ X = right, for every block.

    A pivot of zero marks a direction in which nothing is left to be known: that row of X is zero.

    Args:
        triangle: R, upper triangular, (n, n, *batch); entries below the diagonal are ignored.
        right: (n, k, *batch).
        transposed: whether to solve with Rᵀ.
        known: a pivot below this share of the length of its column counts as zero.
        library: whether to leave a single matrix to LAPACK, which loops that become one kernel cannot call.
    """
    right = right.astype(jnp.result_type(triangle, right))
    if library:
        return _by_library(triangle, right, transposed, known)
    if few(triangle) and triangle.shape[0] > TINY:
        return each(lambda r, b: _in_a_loop(r, b, transposed, known), triangle, right)
    return _unrolled(triangle, right, transposed, known)


def _unrolled(triangle: Block, right: Block, transposed: bool, known: float) -> Block:
    n = triangle.shape[0]
    rows: list[Array] = [right[i] for i in range(n)]
    for i in range(n) if transposed else reversed(range(n)):
        others = range(i) if transposed else range(i + 1, n)
        solved = sum((triangle[j, i] if transposed else triangle[i, j]) * rows[j] for j in others)
        pivot = triangle[i, i]
        if known:
            length = jnp.sum(triangle[: i + 1, i] ** 2, axis=0)
            pivot = jnp.where(pivot**2 > known**2 * length, pivot, 0)
        rows[i] = safe_divide(right[i] - solved, pivot)
    return jnp.stack(rows)


def _in_a_loop(
    triangle: Float[Array, "n n"], right: Float[Array, "n k"], transposed: bool, known: float
) -> Float[Array, "n k"]:
    """One row after the other, for a matrix that is too small to call a library for."""
    n, triangle = triangle.shape[0], jnp.triu(triangle)
    pivots = jnp.diagonal(triangle)
    if known:
        lengths = jnp.sum(triangle**2, axis=0)
        pivots = jnp.where(pivots**2 > known**2 * lengths, pivots, 0)

    def row(x: Array, inputs: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        k, coefficients, pivot, b = inputs
        solved = safe_divide(b - coefficients @ x, pivot)  # rows of x that come later are still zero
        return jnp.where((jnp.arange(n) == k)[:, None], solved, x), None

    rows = (jnp.arange(n), triangle.T if transposed else triangle, pivots, right)
    return lax.scan(row, jnp.zeros_like(right), rows, reverse=not transposed)[0]


def _by_library(
    triangle: Float[Array, "n n"], right: Float[Array, "n k"], transposed: bool, known: float
) -> Float[Array, "n k"]:
    triangle = jnp.triu(triangle)
    lengths = jnp.sum(triangle**2, axis=0)
    is_known = jnp.abs(jnp.diagonal(triangle)) <= known * jnp.sqrt(lengths)
    one = jnp.eye(triangle.shape[0], dtype=triangle.dtype)
    regular = jnp.where(is_known if transposed else is_known[:, None], one, triangle)
    return solve_triangular(regular, jnp.where(is_known[:, None], 0, right), trans="T" if transposed else "N")


def eliminate(
    matrix: Float[Array, "c c *batch"], right: Float[Array, " c *batch"]
) -> Float[Array, " c *batch"]:
    """The x with A x = right for every block, without pivoting: for matrices near a regular diagonal one."""
    c = matrix.shape[0]
    rows = [[*(matrix[i, j] for j in range(c)), right[i]] for i in range(c)]
    for i in range(c):
        for k in range(i + 1, c):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    triangle = jnp.stack([jnp.stack(row[:c]) for row in rows])
    return solve_upper(triangle, jnp.stack([row[c] for row in rows])[:, None])[:, 0]
