"""Square-root algebra on blocks: one per unknown, or one that all unknowns share.

Blocks are right factors, C = RᵀR, as arrays ``(k, n, *batch)`` with the axes of the matrix first, so that
everything below is vectorised over the batch. QR decompositions work in the scaled coordinates of a step
(``Transition.scaling``).
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array

from millipode.covariance.observation import BlockObservation, units, y_per_residual
from millipode.covariance.transition import BlockTransition
from millipode.linalg.batches import Block, few, known, product
from millipode.linalg.fields import Row, safe_divide, safe_sqrt
from millipode.linalg.qr import merge, reduced, root_of
from millipode.linalg.triangular import solve_upper


def extrapolate(root: Block, transition: BlockTransition, gamma: Array) -> Block:
    """The root of C⁻ = Φ C Φᵀ + γ² Σ in scaled coordinates, by QR of the stack [R Φᵀ ; γ R_Σ].

    Args:
        root: R in unscaled coordinates, ``(k, n, *batch)``.
        transition: the prior's step.
        gamma: γ ≥ 0, a number or an array of the batch's shape.
    """
    _, moved, noise = _stack(root, transition, gamma, compact=False)
    return merge(moved, noise)[0]


def predict(root: Block, transition: BlockTransition, gamma: Array) -> Block:
    """A root of C⁻ = Φ C Φᵀ + γ² Σ in unscaled coordinates."""
    _, moved, noise = _stack(root, transition, gamma)
    stack = jnp.concatenate([moved, noise])
    return root_of(stack) * transition.scaling.reshape(-1, *(1,) * (root.ndim - 2))


def _stack(
    root: Block, transition: BlockTransition, gamma: Array, compact: bool = True
) -> tuple[Block, Block, Block]:
    """R, R Φᵀ and γ R_Σ in scaled coordinates; by few instructions if ``compact``, else by ones that fuse."""
    batch = (1,) * (root.ndim - 2)
    scaled = root / transition.scaling.reshape(-1, *batch)
    n = scaled.shape[1]
    if compact and few(root):
        moved = jnp.einsum("kj...,ij...->ki...", scaled, transition.scaled_phi, precision="highest")
    else:
        moved = jnp.stack([_row(transition, scaled, i) for i in range(n)], axis=1)
    noise = transition.scaled_root
    noise = (noise.reshape(n, n, *batch) if noise.ndim == 2 else noise) * gamma
    return scaled, moved, jnp.broadcast_to(noise, (n, n, *root.shape[2:]))


def _row(transition: BlockTransition, scaled: Block, i: int) -> Array:
    """Column i of R Φᵀ, with the zeros of Φ left out."""
    known = [j for j, p in enumerate(transition.phi[i]) if p is not None]
    return functools.reduce(jnp.add, (transition.scaled_phi[i, j] * scaled[:, j] for j in known))


def backward(root: Block, transition: BlockTransition, gamma: Array) -> tuple[Block, Block]:
    """The gain G = C Φᵀ (C⁻)⁻¹ of Y(t) | Y(t+h), and a root of its covariance.

    One QR of the joint root [[R Φᵀ, R], [γ R_Σ, 0]] = Q [[R⁻, X], [0, P]]: then R⁻ Gᵀ = X, and P is
    the root of C − G C⁻ Gᵀ, which is never formed.
    """
    n, scales = root.shape[1], transition.scaling.reshape(-1, *(1,) * (root.ndim - 2))
    scaled, moved, noise = _stack(root, transition, gamma)
    joint = jnp.concatenate([noise, jnp.zeros_like(noise)], axis=1)
    triangle, left = reduced(jnp.concatenate([moved, scaled], axis=1), joint)
    gain = solve_upper(triangle[:, :n], triangle[:, n:], known=known(root.dtype))
    return jnp.swapaxes(gain, 0, 1) * scales[:, None] / scales, left * scales


def square(root: Block) -> Block:
    """The same root with zero rows added until it is (n, n)."""
    k, n = root.shape[:2]
    return jnp.concatenate([root, jnp.zeros((n - k, *root.shape[1:]), root.dtype)])


def forget(root: Block, kept: int, h: Array) -> Block:
    """A root (n−1, n) in which nothing is known of the fields from ``kept`` on, but y' is known exactly.

    In units of h, they are taken to be ten times as uncertain as the last field that is kept.
    """
    n = root.shape[1]
    known = root_of(jnp.concatenate([root[:, :1], root[:, 2:kept]], axis=1))
    size = 10 * safe_sqrt(jnp.sum(root[:, kept - 1] ** 2, axis=0))
    result = jnp.zeros((n - 1, n, *root.shape[2:]), root.dtype)
    result = result.at[: kept - 1, 0].set(known[:, 0]).at[: kept - 1, 2:kept].set(known[:, 1:])
    for q in range(kept, n):
        result = result.at[q - 1, q].set(size / h ** (q - kept + 1))
    return result


def push(gain: Block, noise: Block, root: Block) -> Block:
    """A root of G RᵀR Gᵀ + NᵀN: the covariance of G x + noise."""
    moved = product(root, jnp.swapaxes(gain, 0, 1))
    return root_of(jnp.concatenate([moved, noise]))


def rotate(root: Block, observation: BlockObservation) -> tuple[Array, Array, Block]:
    """Condition on a zero residual by one Givens rotation: (√S, K, posterior root).

    R is upper triangular, so R Hᵀ has two non-zero entries, in rows 0 and 1. The rotation of these rows that
    gathers both entries in row 0 makes that row √S Kᵀ; the other rows are a root of the posterior.
    """
    first, second = observation.of(root[0, 0], root[0, 1]), root[1, 1]
    innovation = safe_sqrt(first**2 + second**2)
    inverse = safe_divide(jnp.ones_like(innovation), innovation)
    cosine, sine = first * inverse, second * inverse
    gain = (cosine * root[0] + sine * root[1]) * inverse
    value = -sine * root[0, 0]
    # Computed exactly, because the rotation would leave rounding errors: with EK0, y' is now known.
    left = jnp.stack([value, observation.unseen(value)])
    higher = cosine * root[1, 2:] - sine * root[0, 2:]
    return innovation, gain, jnp.concatenate([jnp.concatenate([left, higher])[None], root[2:]])


def condition_pairs(stack: Block, observation: BlockObservation) -> tuple[Array, Array, Block]:
    """The results of ``rotate`` for n = 2, from any root of C⁻, with a third of the divisions and roots.

    Given a zero residual, only the direction that H does not see is uncertain, with variance det C⁻/S. Here
    det C⁻ is the sum of the squared minors of its root (the Cauchy–Binet formula), so nothing cancels.
    """
    value, slope = stack[:, 0], stack[:, 1]
    residual = observation.of(value, slope)
    innovation = safe_sqrt(jnp.sum(residual**2, axis=0))
    inverse = safe_divide(jnp.ones_like(innovation), innovation)
    gain = jnp.sum(stack * residual[:, None], axis=0) * inverse**2
    pairs = [(a, b) for a in range(stack.shape[0]) for b in range(a)]
    minors = [(value[a] * slope[b] - value[b] * slope[a]) ** 2 for a, b in pairs]
    left = -safe_sqrt(functools.reduce(jnp.add, minors)) * inverse  # the sign that a rotation gives
    return innovation, gain, jnp.stack([left, observation.unseen(left)])[None]


def correct(
    root: Block, transition: BlockTransition, gamma: Array, observation: BlockObservation
) -> tuple[Array, Array, Block]:
    """Extrapolate and condition: (√S, K, posterior root), all in unscaled coordinates."""
    scaled = observation.scaled(transition)
    if root.shape[1] == 2 and not few(root):
        _, moved, noise = _stack(root, transition, gamma, compact=False)
        innovation, gain, posterior = condition_pairs(jnp.concatenate([moved, noise]), scaled)
    else:
        innovation, gain, posterior = rotate(extrapolate(root, transition, gamma), scaled)
    scales = transition.scaling.reshape(-1, *(1,) * (root.ndim - 2))
    unit = units(transition)
    return unit * innovation, gain * (scales / unit), posterior * scales


def process_std(transition: BlockTransition, observation: BlockObservation) -> Array:
    """√(H Σ Hᵀ)."""
    root = transition.scaled_root
    first = observation.scaled(transition).of(root[0, 0], root[0, 1])
    return units(transition) * jnp.sqrt(first**2 + root[1, 1] ** 2)


def process_gain(transition: BlockTransition, observation: BlockObservation) -> Array:
    """The entry for y of the gain that would result if the step's noise were the only uncertainty."""
    root = transition.scaled_root
    first = observation.scaled(transition).of(root[0, 0], root[0, 1])
    return y_per_residual(transition) * root[0, 0] * first / (first**2 + root[1, 1] ** 2)


def gain_of_y(root: Block, transition: BlockTransition, gamma: Array, observation: BlockObservation) -> Array:
    """The entry for y of the gain K, from the columns for y and y' of the stack [R Φᵀ ; γ R_Σ] alone."""
    scaled = root / transition.scaling.reshape(-1, *(1,) * (root.ndim - 2))
    noise = transition.scaled_root
    seen = observation.scaled(transition)
    value, slope = (_row(transition, scaled, q) for q in range(2))
    residual = seen.of(value, slope)
    first, second = gamma * noise[0, 0], gamma * noise[1, 1]
    of_noise = seen.of(first, gamma * noise[0, 1])
    square = jnp.sum(residual**2, axis=0) + of_noise**2 + second**2
    product = jnp.sum(value * residual, axis=0) + first * of_noise
    return y_per_residual(transition) * safe_divide(product, square)


def marginal_std(root: Block, row: Row, noise: Array, gamma: Array) -> Array:
    """√(φ RᵀR φᵀ + γ² noise) for one row φ of a transition."""
    projected = sum(p * root[:, j] for j, p in enumerate(row) if p is not None)
    return safe_sqrt(jnp.sum(projected**2, axis=0) + gamma**2 * noise)
