"""Square-root algebra on blocks: one per unknown, or one that all unknowns share.

A block is an array ``(k, n, *batch)`` with the matrix axes first, so that everything below is
vectorised over the batch. Blocks are right factors, C = RᵀR, in the scaled coordinates of the prior.
The residual's row H = e₁ − J e₀ reads ``[−j, 1, 0, …]`` there, with j = J T₀/T₁.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from millipode.fields import safe_divide, safe_sqrt
from millipode.priors import BlockTransition, Row
from millipode.qr import Block, each, few, known, merge, reduced, root_of, substitute


def extrapolate(root: Block, transition: BlockTransition, scale: Array) -> Block:
    """The scaled root of C⁻ = Φ C Φᵀ + scale² Σ, by QR of the stack [R Φᵀ ; scale R_Σ].

    Args:
        root: R in unscaled coordinates, ``(k, n, *batch)``.
        transition: the prior's step.
        scale: the diffusion's root γ ≥ 0, ``()`` or of the batch's shape.
    """
    _, moved, noise = _stack(root, transition, scale, compact=False)
    return merge(moved, noise)[0]


def predict(root: Block, transition: BlockTransition, scale: Array) -> Block:
    """The same in unscaled coordinates."""
    _, moved, noise = _stack(root, transition, scale)
    stack = jnp.concatenate([moved, noise])
    return root_of(stack) * transition.scaling.reshape(-1, *(1,) * (root.ndim - 2))


def _stack(
    root: Block, transition: BlockTransition, scale: Array, compact: bool = True
) -> tuple[Block, Block, Block]:
    """R, R Φᵀ and scale·R_Σ in scaled coordinates; few instructions, or ones that fuse with others."""
    batch = (1,) * (root.ndim - 2)
    scaled = root / transition.scaling.reshape(-1, *batch)
    n = scaled.shape[1]
    if compact and few(root):
        moved = jnp.einsum("kj...,ij...->ki...", scaled, transition.scaled_phi, precision="highest")
    else:
        moved = jnp.stack([_row(transition, scaled, i) for i in range(n)], axis=1)
    noise = transition.scaled_root
    noise = (noise.reshape(n, n, *batch) if noise.ndim == 2 else noise) * scale
    return scaled, moved, jnp.broadcast_to(noise, (n, n, *root.shape[2:]))


def _row(transition: BlockTransition, scaled: Block, i: int) -> Array:
    """Column i of R Φᵀ, with the zeros of Φ left out."""
    known = [j for j, p in enumerate(transition.phi[i]) if p is not None]
    return functools.reduce(jnp.add, (transition.scaled_phi[i, j] * scaled[:, j] for j in known))


def backward(root: Block, transition: BlockTransition, scale: Array) -> tuple[Block, Block]:
    """The step seen from its end: Y(t) | Y(t+h) has gain G = C Φᵀ (C⁻)⁻¹ and this root of its covariance.

    One QR of the joint root [[R Φᵀ, R], [scale R_Σ, 0]] = Q [[R⁻, X], [0, P]]: then R⁻ Gᵀ = X, and P is
    the root of C − G C⁻ Gᵀ, which is never formed.
    """
    n, scales = root.shape[1], transition.scaling.reshape(-1, *(1,) * (root.ndim - 2))
    scaled, moved, noise = _stack(root, transition, scale)
    joint = jnp.concatenate([noise, jnp.zeros_like(noise)], axis=1)
    triangle, left = reduced(jnp.concatenate([moved, scaled], axis=1), joint)
    gain = _back_substitute(triangle[:, :n], triangle[:, n:])
    return jnp.swapaxes(gain, 0, 1) * scales[:, None] / scales, left * scales


def _back_substitute(triangle: Block, right: Block) -> Block:
    """X with R X = right; a pivot that is zero up to rounding marks a direction that is known already."""
    if few(triangle):
        return each(substitute, triangle, right)
    n = triangle.shape[0]
    tiny = known(triangle.dtype) ** 2
    rows: list[Array] = [right[i] for i in range(n)]
    for i in reversed(range(n)):
        solved = sum(triangle[i, j] * rows[j] for j in range(i + 1, n))
        length = jnp.sum(triangle[: i + 1, i] ** 2, axis=0)
        pivot = jnp.where(triangle[i, i] ** 2 > tiny * length, triangle[i, i], 0)
        rows[i] = safe_divide(right[i] - solved, pivot)
    return jnp.stack(rows)


def product(a: Block, b: Block) -> Block:
    """A B, unknown by unknown."""
    if few(a):
        return jnp.einsum("ik...,kj...->ij...", a, b, precision="highest")
    return functools.reduce(jnp.add, (a[:, k, None] * b[k] for k in range(b.shape[0])))


def square(root: Block) -> Block:
    """The same root with zero rows added until it is (n, n)."""
    k, n = root.shape[:2]
    return jnp.concatenate([root, jnp.zeros((n - k, *root.shape[1:]), root.dtype)])


def push(gain: Block, noise: Block, root: Block) -> Block:
    """A root of G RᵀR Gᵀ + NᵀN: the covariance of G x + noise."""
    moved = product(root, jnp.swapaxes(gain, 0, 1))
    return root_of(jnp.concatenate([moved, noise]))


def rotate(root: Block, j: Array | None) -> tuple[Array, Array, Block]:
    """Condition on a zero residual by one Givens rotation: (√S, K, posterior root).

    R is upper triangular, so R Hᵀ has two non-zero entries, (R₀₁ − j R₀₀, R₁₁). The rotation of
    rows 0 and 1 that gathers them in row 0 makes that row √S Kᵀ; the rows left are the posterior.
    """
    first = root[0, 1] if j is None else root[0, 1] - j * root[0, 0]
    second = root[1, 1]
    innovation = safe_sqrt(first**2 + second**2)
    inverse = safe_divide(jnp.ones_like(innovation), innovation)
    cosine, sine = first * inverse, second * inverse
    gain = (cosine * root[0] + sine * root[1]) * inverse
    value = -sine * root[0, 0]
    # Exactly, where the rotation would leave rounding errors: with EK0, y' is known from now on.
    derivative = jnp.zeros_like(value) if j is None else j * value
    higher = cosine * root[1, 2:] - sine * root[0, 2:]
    posterior = jnp.concatenate([jnp.stack([value, derivative]), higher])
    return innovation, gain, jnp.concatenate([posterior[None], root[2:]])


def condition_pairs(stack: Block, j: Array | None) -> tuple[Array, Array, Block]:
    """What ``rotate`` gives for n = 2, from any root of C⁻, with a third of the divisions and roots.

    Given a zero residual, only the direction (1, j) is left, with variance det C⁻/S; and det C⁻ is the sum of
    the squared minors of its root (Cauchy and Binet): nothing cancels.
    """
    value, slope = stack[:, 0], stack[:, 1]
    residual = slope if j is None else slope - j * value
    innovation = safe_sqrt(jnp.sum(residual**2, axis=0))
    inverse = safe_divide(jnp.ones_like(innovation), innovation)
    gain = jnp.sum(stack * residual[:, None], axis=0) * inverse**2
    pairs = [(a, b) for a in range(stack.shape[0]) for b in range(a)]
    minors = [(value[a] * slope[b] - value[b] * slope[a]) ** 2 for a, b in pairs]
    left = -safe_sqrt(functools.reduce(jnp.add, minors)) * inverse  # the sign that a rotation gives
    return innovation, gain, jnp.stack([left, jnp.zeros_like(left) if j is None else j * left])[None]


def correct(
    root: Block, transition: BlockTransition, scale: Array, jacobian: Array | None
) -> tuple[Array, Array, Block]:
    """Extrapolate and condition: (√S, K, posterior root), all in unscaled coordinates.

    The Jacobian has the batch's shape, or is None for zero.
    """
    j = None if jacobian is None else jacobian * transition.step_ratio
    if root.shape[1] == 2 and not few(root):
        _, moved, noise = _stack(root, transition, scale, compact=False)
        innovation, gain, posterior = condition_pairs(jnp.concatenate([moved, noise]), j)
    else:
        innovation, gain, posterior = rotate(extrapolate(root, transition, scale), j)
    scales = transition.scaling.reshape(-1, *(1,) * (root.ndim - 2))
    anchor = transition.scaling[1]
    return anchor * innovation, gain * (scales / anchor), posterior * scales


def process_scale(transition: BlockTransition, jacobian: Array | None) -> Array:
    """√(H Σ Hᵀ) for H = e₁ − J e₀; None is J = 0."""
    root = transition.scaled_root
    if jacobian is None:
        return transition.scaling[1] * jnp.sqrt(root[0, 1] ** 2 + root[1, 1] ** 2)
    first = root[0, 1] - jacobian * transition.step_ratio * root[0, 0]
    return transition.scaling[1] * jnp.sqrt(first**2 + root[1, 1] ** 2)


def process_gain(transition: BlockTransition, jacobian: Array | None) -> Array:
    """The first row of the gain if the step's noise were all there is: by how much z/γ moves y."""
    root = transition.scaled_root
    first = root[0, 1] if jacobian is None else root[0, 1] - jacobian * transition.step_ratio * root[0, 0]
    return transition.step_ratio * root[0, 0] * first / (first**2 + root[1, 1] ** 2)


def marginal_std(root: Block, row: Row, noise: Array, scale: Array) -> Array:
    """√(φ RᵀR φᵀ + scale² noise) for one row φ of a transition."""
    projected = sum(p * root[:, j] for j, p in enumerate(row) if p is not None)
    return safe_sqrt(jnp.sum(projected**2, axis=0) + scale**2 * noise)
