"""Van der Pol's oscillator, with adjustable stiffness."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.problems.problem import JacobianDiagonal, Problem


@dataclass(frozen=True)
class VanDerPol:
    """The right-hand side (y₂, μ((1 − y₁²) y₂ − y₁))."""

    mu: float

    def __call__(self, t: Array, y: Float[Array, "2"]) -> Float[Array, "2"]:
        """f(t, y)."""
        return jnp.stack([y[1], self.mu * ((1 - y[0] ** 2) * y[1] - y[0])])

    def jacobian_diagonal(self, t: Array, y: Float[Array, "2"]) -> Float[Array, "2"]:
        """(0, μ(1 − y₁²))."""
        return jnp.stack([jnp.zeros_like(y[0]), self.mu * (1 - y[0] ** 2)])


def van_der_pol(mu: float = 1.0) -> Problem:
    """Van der Pol's oscillator.

        y₁' = y₂,   y₂' = μ((1 − y₁²) y₂ − y₁)

    from y = (2, 0), for t ∈ [0, 6.3]. It is mild for μ = 1. For large μ, y₁ moves slowly from ±2 to ±1 and
    then jumps within a time of 1/μ; explicit methods need steps of about 1/μ everywhere.

    Source: Hairer, Wanner, *Solving Ordinary Differential Equations II*; Krämer et al. (2022), E.4.

    Args:
        mu: the stiffness μ > 0.
    """
    if not mu > 0:
        raise ValueError(f"van_der_pol: mu must be positive, got {mu}.")
    f = VanDerPol(mu)
    y0 = jnp.array([2.0, 0.0])
    return Problem(f, y0, (0.0, 6.3), JacobianDiagonal(f), components=("y₁", "y₂"))
