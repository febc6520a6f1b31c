"""Triangular square roots: three ways to compute the R of a QR decomposition.

Unrolled reflections are vectorised over many blocks: they are the fastest to run and the slowest to compile.
The same reflections in a loop serve single matrices and few blocks. LAPACK serves matrices that are regular.

A covariance has many square roots. Each function returns one of them, and its derivative must be that of the
same root. Values and derivatives may be computed by different programs, so rounding must not decide which
root it is: pivots are never negative, and a column that is zero up to rounding is not reflected at all
(``batches.known``).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from millipode.linalg.batches import Block, each, few, known
from millipode.linalg.fields import safe_divide, safe_sqrt


def reduced(rows: Block, triangle: Block) -> tuple[Block, Block]:
    """The results of ``merge``, with columns that are zero up to rounding taken as zero."""
    if not few(rows):
        root, left, _ = _reflect(rows, triangle, None, known(rows.dtype))
        return root, left
    n = triangle.shape[0]
    result = each(_scan, rows, triangle)
    return result[:n], result[n:, n:]


@jax.custom_jvp
def root_of(stack: Block) -> Block:
    """Some R (n, n, *batch) with RᵀR = stackᵀstack, for uses in which only RᵀR matters.

    Its derivative is Qᵀ d(stack), that of another R with the same RᵀR. It is free of divisions, so columns
    that are zero up to rounding do no harm.
    """
    n = stack.shape[1]
    if few(stack):
        return each(lambda s: _scan(s, _zeros(s))[:n], stack)
    return _reflect(stack, _zeros(stack), None, known(stack.dtype))[0]


@root_of.defjvp
def _root_of_jvp(primals: tuple, tangents: tuple) -> tuple[Block, Block]:
    (stack,), (change,) = primals, tangents
    stack, n, zeros = lax.stop_gradient(stack), stack.shape[1], _zeros(stack)
    if few(stack):
        # All of Qᵀ is needed, because a loop must not mix values that are linear in the change with others.
        rotated = each(_scan_with_rotation, stack)
        return rotated[:, :n], each(jnp.matmul, rotated[:, n:], change)
    root, _, extra = _reflect(stack, zeros, (change, zeros), known(stack.dtype))
    return root, extra


def _lengths(rows: Block, triangle: Block) -> Array:
    """The squared lengths of the columns that become triangular."""
    n = triangle.shape[0]
    return jnp.sum(rows[:, :n] ** 2, axis=0) + jnp.sum(triangle[:, :n] ** 2, axis=0)


def _zeros(stack: Block) -> Block:
    n = stack.shape[1]
    return jnp.zeros((n, n, *stack.shape[2:]), stack.dtype)


def _scan(rows: Float[Array, "m k"], triangle: Float[Array, "n k"]) -> Float[Array, "n+m k"]:
    """``_reflect`` as a loop, for one block: R, triangular up to rounding, above the rows that are left."""
    n = triangle.shape[0]
    lengths = known(rows.dtype) ** 2 * _lengths(rows, triangle)

    def reflect(rows: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        k, pivots = inputs
        column = rows[:, k]
        square = pivots[k] ** 2 + jnp.sum(column**2)
        norm = safe_sqrt(jnp.where(square > lengths[k], square, 0))
        head = pivots[k] + norm
        weights = (head * pivots + column @ rows) * safe_divide(jnp.ones_like(norm), norm * head)
        return rows - jnp.outer(column, weights), head * weights - pivots

    left, root = lax.scan(reflect, rows, (jnp.arange(n), triangle))
    return jnp.concatenate([root, left])


def _scan_with_rotation(stack: Float[Array, "m n"]) -> Float[Array, "n n+m"]:
    """R and Qᵀ of a stack, side by side."""
    m, n = stack.shape
    rows = jnp.concatenate([stack, jnp.eye(m, dtype=stack.dtype)], axis=1)
    return _scan(rows, jnp.zeros((n, n + m), stack.dtype))[:n]


def merge(rows: Block, triangle: Block) -> tuple[Block, Block]:
    """Upper triangular R (n, n, *batch) with RᵀR = rowsᵀrows + triangleᵀtriangle, and the rows that are left.

    This is the QR decomposition of [rows ; triangle] by Householder reflections. The second block must be
    upper triangular, so reflection k changes only its row k. The code is vectorised over the batch, because
    XLA:CPU would loop over a batched LAPACK call, and unrolled over n, which is faster than one LAPACK call
    even for a single block. A zero column is not reflected, so R = 0 is a valid result and derivatives are
    finite there.

    Both blocks may have more than n columns. The reflections then act on those, too, and the second result
    holds their rows below R: the QR decomposition of a joint covariance, stopped half-way.
    """
    root, left, _ = _reflect(rows, triangle, None, 0.0)
    return root, left


def _reflect(
    rows: Block, triangle: Block, extra: tuple[Block, Block] | None, known: float
) -> tuple[Block, Block, Any]:
    """``merge``, and the same reflections applied to an extra pair of blocks: (R, rows, extra rows of R)."""
    n = triangle.shape[0]
    lengths = known**2 * _lengths(rows, triangle)
    result, also = [], []
    for k in range(n):
        column, pivots = rows[:, 0], triangle[k, k:]
        square = pivots[0] ** 2 + jnp.sum(column**2, axis=0)
        norm = safe_sqrt(jnp.where(square > lengths[k], square, 0) if known else square)
        # Pivots are roots of variances, never negative, so this sum does not cancel.
        head = pivots[0] + norm
        inverse = safe_divide(jnp.ones_like(norm), norm * head)
        weights = (head * pivots + jnp.sum(column[:, None] * rows, axis=0)) * inverse
        below = jnp.zeros((k, *norm.shape), norm.dtype)
        result.append(jnp.concatenate([below, head * weights - pivots]))  # the sign keeps pivots positive
        rows = rows[:, 1:] - column[:, None] * weights[1:]
        if extra is not None:
            other, below = extra
            pull = (head * below[k] + jnp.sum(column[:, None] * other, axis=0)) * inverse
            also.append(head * pull - below[k])
            extra = other - column[:, None] * pull, below
    return jnp.stack(result), rows, jnp.stack(also) if also else None


@jax.custom_jvp
def triangularise(stack: Float[Array, "m n"]) -> Float[Array, "n n"]:
    """Upper triangular R with RᵀR = stackᵀstack, m ≥ n; R may be singular."""
    root = jnp.linalg.qr(stack, mode="r")
    return jnp.where(jnp.diagonal(root)[:, None] < 0, -root, root)


@triangularise.defjvp
def _triangularise_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    # JAX's rule needs a regular R. Here R is singular whenever a residual vanishes, so the reflections
    # themselves are differentiated.
    n = primals[0].shape[1]
    return jax.jvp(lambda stack: jnp.triu(_scan(stack, _zeros(stack))[:n]), primals, tangents)
