"""Square-root algebra on blocks: one per unknown, or one that all unknowns share.

A block is an array ``(k, n, *batch)`` with the matrix axes first, so that everything below is
vectorised over the batch. Blocks are right factors, C = RᵀR, in the scaled coordinates of the prior.
The residual's row H = e₁ − J e₀ reads ``[−j, 1, 0, …]`` there, with j = J T₀/T₁.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.fields import safe_divide, safe_sqrt
from millipode.priors import Transition

Block = Float[Array, "k n *batch"]


def triangularise(stack: Block) -> Block:
    """Upper triangular R (n, n, *batch) with RᵀR = stackᵀstack; R = 0 is a valid outcome.

    A single small matrix goes to LAPACK; a batch of them to Householder reflections that are
    vectorised over the batch, because XLA:CPU would loop over a batched LAPACK call.
    """
    return _single_qr(stack) if stack.ndim == 2 else _householder(stack)


@jax.custom_jvp
def _single_qr(stack: Float[Array, "m n"]) -> Float[Array, "n n"]:
    return jnp.linalg.qr(stack, mode="r")


@_single_qr.defjvp
def _single_qr_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    # The library's rule needs a regular R. Ours is singular whenever a residual vanishes, so
    # differentiate the reflections, which follow LAPACK's signs and have no singular points.
    return jax.jvp(_householder, primals, tangents)


def _householder(stack: Block) -> Block:
    m, n = stack.shape[:2]
    for k in range(min(n, m - 1)):
        rest = stack[k:, k:]
        pivot, column = rest[0, 0], rest[:, 0]
        norm = safe_sqrt(jnp.sum(column**2, axis=0))
        diagonal = jnp.where(pivot >= 0, -norm, norm)
        normal = jnp.concatenate([(pivot - diagonal)[None], column[1:]])
        half_square = norm * norm - diagonal * pivot  # ½ |normal|²
        weights = safe_divide(jnp.sum(normal[:, None] * rest, axis=0), half_square)
        stack = stack.at[k:, k:].set(rest - normal[:, None] * weights[None])
    keep = jnp.triu(jnp.ones((n, n), bool)).reshape(n, n, *(1,) * (stack.ndim - 2))
    return jnp.where(keep, stack[:n], 0)


def extrapolate(root: Block, transition: Transition, scale: Array) -> Block:
    """The scaled root of C⁻ = Φ C Φᵀ + scale² Σ, by QR of the stack [R Φᵀ ; scale R_Σ].

    Args:
        root: R in unscaled coordinates, ``(k, n, *batch)``.
        transition: the prior's step.
        scale: the diffusion's root γ, ``()`` or of the batch's shape.
    """
    batch = (1,) * (root.ndim - 2)
    scaled = root / transition.scales.reshape(-1, *batch)
    n = scaled.shape[1]
    moved = jnp.stack(
        [
            sum(
                transition.scaled_phi[i, j] * scaled[:, j]
                for j in range(n)
                if transition.phi[i][j] is not None
            )
            for i in range(n)
        ],
        axis=1,
    )
    noise = transition.scaled_root.reshape(n, n, *batch) * scale
    noise = jnp.broadcast_to(noise, (n, n, *root.shape[2:]))
    return triangularise(jnp.concatenate([moved, noise]))


def rotate(root: Block, j: Array | float) -> tuple[Array, Array, Block]:
    """Condition on a zero residual by one Givens rotation: (√S, K, posterior root).

    R is upper triangular, so R Hᵀ has two non-zero entries, (R₀₁ − j R₀₀, R₁₁). The rotation of
    rows 0 and 1 that gathers them in row 0 makes that row √S Kᵀ; the rows left are the posterior.
    """
    first, second = root[0, 1] - j * root[0, 0], root[1, 1]
    innovation = safe_sqrt(first**2 + second**2)
    cosine, sine = safe_divide(first, innovation), safe_divide(second, innovation)
    gain = safe_divide(cosine * root[0] + sine * root[1], innovation)
    posterior = cosine * root[1] - sine * root[0]
    return innovation, gain, jnp.concatenate([posterior[None], root[2:]])


def correct(
    root: Block, transition: Transition, scale: Array, jacobian: Array | float
) -> tuple[Array, Array, Block]:
    """Extrapolate and condition: (√S, K, posterior root), all in unscaled coordinates."""
    j = jacobian * transition.step_ratio
    innovation, gain, posterior = rotate(extrapolate(root, transition, scale), j)
    scales = transition.scales.reshape(-1, *(1,) * (root.ndim - 2))
    anchor = transition.scaling[1]
    return anchor * innovation, gain * (scales / anchor), posterior * scales


def process_scale(transition: Transition, jacobian: Array | float) -> Array:
    """√(H Σ Hᵀ) for H = e₁ − J e₀."""
    root, j = transition.scaled_root, jacobian * transition.step_ratio
    return transition.scaling[1] * jnp.sqrt((root[0, 1] - j * root[0, 0]) ** 2 + root[1, 1] ** 2)


def marginal_std(
    root: Block, row: tuple[Array | None, ...], noise: Array, scale: Array
) -> Array:
    """√(φ RᵀR φᵀ + scale² noise) for one row φ of a transition."""
    projected = sum(p * root[:, j] for j, p in enumerate(row) if p is not None)
    return safe_sqrt(jnp.sum(projected**2, axis=0) + scale**2 * noise)
