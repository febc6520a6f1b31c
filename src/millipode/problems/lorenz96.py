"""Lorenz96: a chaotic system of any dimension."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from millipode.model.stencil import Stencil
from millipode.problems.problem import JacobianDiagonal, Problem


@dataclass(frozen=True)
class Lorenz96:
    """The right-hand side (y_{i+1} − y_{i−2}) y_{i−1} − y_i + F, with periodic indices."""

    forcing: float

    def __call__(self, t: Array, y: Float[Array, " d"]) -> Float[Array, " d"]:
        """f(t, y)."""
        return (jnp.roll(y, -1) - jnp.roll(y, 2)) * jnp.roll(y, 1) - y + self.forcing

    def jacobian_diagonal(self, t: Array, y: Float[Array, " d"]) -> Float[Array, " d"]:
        """−1 for every unknown."""
        return -jnp.ones_like(y)


def lorenz96(d: int, forcing: float = 8.0) -> Problem:
    """The Lorenz96 model of the atmosphere, d unknowns around a circle of latitude.

        y_i' = (y_{i+1} − y_{i−2}) y_{i−1} − y_i + F,   i = 1 … d, indices modulo d

    with y_1(0) = F + 0.01 and all other y_i(0) = F, for t ∈ [0, 30]. The perturbation stays small for a
    while; then chaos spreads from it. For F = 8, no method can follow one trajectory much beyond t = 10.

    Source: E. N. Lorenz, *Predictability: a problem partly solved*, 1996; Krämer et al. (2022), E.1.

    Args:
        d: the number of unknowns, at least 4.
        forcing: the forcing F.
    """
    if d < 4:
        raise ValueError(f"lorenz96: d must be at least 4, got {d}.")
    f = Lorenz96(forcing)
    y0 = jnp.full(d, float(forcing)).at[0].add(0.01)
    return Problem(f, y0, (0.0, 30.0), JacobianDiagonal(f), Stencil(axes=(-1,), radius=2, periodic=True))
