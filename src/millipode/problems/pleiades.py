"""The Pleiades problem: seven stars in a plane."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.problems.problem import Problem


def _f(t: Array, state: Float[Array, "28"]) -> Float[Array, "28"]:
    x, y, v, w = state.reshape(4, 7)
    masses = jnp.arange(1.0, 8.0, dtype=state.dtype)
    dx, dy = x[None] - x[:, None], y[None] - y[:, None]
    # On the diagonal the distance is set to 1: the force there is 0 either way.
    square = dx**2 + dy**2 + jnp.eye(7, dtype=state.dtype)
    pull = masses / (square * jnp.sqrt(square))
    return jnp.concatenate([v, w, jnp.sum(pull * dx, axis=1), jnp.sum(pull * dy, axis=1)])


def _jacobian_diagonal(t: Array, state: Float[Array, "28"]) -> Float[Array, "28"]:
    return jnp.zeros_like(state)


def pleiades() -> Problem:
    """Seven stars of masses m_i = i under gravity, as 28 first-order equations.

        x_i' = v_i,   v_i' = Σ_{j≠i} m_j (x_j − x_i)/r_ij
        y_i' = w_i,   w_i' = Σ_{j≠i} m_j (y_j − y_i)/r_ij,   r_ij = ((x_i − x_j)² + (y_i − y_j)²)^(3/2)

    for t ∈ [0, 3]; the state is (x, y, v, w). Close encounters make it demanding: the step size varies by two
    orders of magnitude. The diagonal of its Jacobian is zero.

    Source: Hairer, Nørsett, Wanner, *Solving Ordinary Differential Equations I*, II.10.
    """
    x, y = [3.0, 3, -1, -3, 2, -2, 2], [3.0, -3, 2, 0, 0, -4, 4]
    v, w = [0.0, 0, 0, 0, 0, 1.75, -1.5], [0.0, 0, 0, -1.25, 1, 0, 0]
    y0 = jnp.array([*x, *y, *v, *w])
    names = tuple(f"{quantity}{i}" for quantity in "xyvw" for i in range(1, 8))
    return Problem(_f, y0, (0.0, 3.0), _jacobian_diagonal, components=names)
