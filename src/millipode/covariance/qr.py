"""Triangular square roots: three ways to the R of a QR decomposition, each where it is best.

``merge`` is unrolled and vectorised over blocks: fastest to run, slowest to compile. ``triangularise`` calls LAPACK.
``reduced`` chooses between them.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from millipode.fields import safe_divide, safe_sqrt

Block = Float[Array, "k n *batch"]

# Up to this many blocks, LAPACK's calls one by one are quick enough, and compile ten times faster.
FEW = 64


def reduced(rows: Block, triangle: Block) -> tuple[Block, Block]:
    """What ``merge`` gives, up to the signs of rows."""
    batch = rows.shape[2:]
    if math.prod(batch) > FEW:
        return merge(rows, triangle)
    n, stack = triangle.shape[0], jnp.concatenate([rows, triangle])
    if not batch:
        result = triangularise(stack)
    else:
        flat = jnp.moveaxis(stack.reshape(*stack.shape[:2], -1), -1, 0)
        result = jnp.moveaxis(jax.vmap(triangularise)(flat), 0, -1)
        result = result.reshape(*result.shape[:2], *batch)
    return result[:n], result[n:, n:]


def merge(rows: Block, triangle: Block) -> tuple[Block, Block]:
    """Upper triangular R (n, n, *batch) with RᵀR = rowsᵀrows + triangleᵀtriangle, and what is left of rows.

    The QR decomposition of [rows ; triangle] by Householder reflections that know the second block to
    be upper triangular: reflection k touches its row k and nothing else of it. Vectorised over the batch,
    because XLA:CPU would loop over a batched LAPACK call; unrolled over n, which beats one LAPACK call
    even for a single block. A zero column is left alone, so R = 0 is a valid outcome and derivatives are
    finite there.

    Both blocks may have more than n columns. The reflections then act on them too, and the second result
    holds the rows below R there: the QR decomposition of a joint covariance, stopped half-way.
    """
    n = triangle.shape[0]
    result = []
    for k in range(n):
        column, pivots = rows[:, 0], triangle[k, k:]
        norm = safe_sqrt(pivots[0] ** 2 + jnp.sum(column**2, axis=0))
        # Pivots are roots of variances, never negative, so this sum does not cancel.
        head = pivots[0] + norm
        inverse = safe_divide(jnp.ones_like(norm), norm * head)
        weights = (head * pivots + jnp.sum(column[:, None] * rows, axis=0)) * inverse
        below = jnp.zeros((k, *norm.shape), norm.dtype)
        result.append(jnp.concatenate([below, head * weights - pivots]))  # the sign keeps pivots positive
        rows = rows[:, 1:] - column[:, None] * weights[1:]
    return jnp.stack(result), rows


@jax.custom_jvp
def triangularise(stack: Float[Array, "m n"]) -> Float[Array, "n n"]:
    """Upper triangular R with RᵀR = stackᵀstack, m ≥ n; R may be singular."""
    return jnp.linalg.qr(stack, mode="r")


@triangularise.defjvp
def _triangularise_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    # The library's rule needs a regular R. Ours is singular whenever a residual vanishes, so
    # differentiate the reflections themselves, which follow LAPACK's signs.
    return jax.jvp(_householder, primals, tangents)


def _householder(stack: Float[Array, "m n"]) -> Float[Array, "n n"]:
    m, n = stack.shape
    place = jnp.arange(m)

    def reflect(a: Array, k: Array) -> tuple[Array, None]:
        column = jnp.where(place >= k, a[:, k], 0)
        norm = safe_sqrt(jnp.sum(column**2))
        diagonal = jnp.where(a[k, k] >= 0, -norm, norm)
        normal = jnp.where(place == k, column - diagonal, column)
        half_square = norm * norm - diagonal * a[k, k]  # ½ |normal|²
        return a - jnp.outer(normal, safe_divide(normal @ a, half_square)), None

    reflected, _ = lax.scan(reflect, stack, jnp.arange(min(n, m - 1)))
    return jnp.triu(reflected[:n])
