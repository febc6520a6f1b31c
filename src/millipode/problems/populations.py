"""Population models: logistic growth, and predators with prey."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.problems.problem import JacobianDiagonal, Problem


@dataclass(frozen=True)
class Logistic:
    """The right-hand side r y (1 − y)."""

    rate: float

    def __call__(self, t: Array, y: Float[Array, "1"]) -> Float[Array, "1"]:
        """f(t, y)."""
        return self.rate * y * (1 - y)

    def jacobian_diagonal(self, t: Array, y: Float[Array, "1"]) -> Float[Array, "1"]:
        """r (1 − 2y)."""
        return self.rate * (1 - 2 * y)


def logistic(rate: float = 2.0) -> Problem:
    """Logistic growth, whose solution is known: y(t) = 1/(1 + 9 exp(−r t)).

        y' = r y (1 − y)

    from y = 0.1, for t ∈ [0, 5].

    Args:
        rate: the growth rate r.
    """
    f = Logistic(rate)
    return Problem(f, jnp.array([0.1]), (0.0, 5.0), JacobianDiagonal(f))


def _lotka_volterra(t: Array, y: Float[Array, "2"]) -> Float[Array, "2"]:
    prey, predators = y
    meetings = 0.05 * prey * predators
    return jnp.stack([0.5 * prey - meetings, meetings - 0.5 * predators])


def _lotka_volterra_diagonal(t: Array, y: Float[Array, "2"]) -> Float[Array, "2"]:
    prey, predators = y
    return jnp.stack([0.5 - 0.05 * predators, 0.05 * prey - 0.5])


def lotka_volterra() -> Problem:
    """The Lotka–Volterra model of prey and predators, whose numbers oscillate.

        y₁' = 0.5 y₁ − 0.05 y₁y₂,   y₂' = −0.5 y₂ + 0.05 y₁y₂

    from y = (20, 20), for t ∈ [0, 20].
    """
    return Problem(
        _lotka_volterra,
        jnp.array([20.0, 20.0]),
        (0.0, 20.0),
        _lotka_volterra_diagonal,
        components=("prey", "predators"),
    )
