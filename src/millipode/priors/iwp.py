"""The integrated Wiener process."""

from fractions import Fraction
from functools import cache
from math import comb, factorial

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from millipode.exact import right_root
from millipode.priors.transition import Prior, Transition

MAX_ORDER = 11


class IWP(Prior):
    """The ν-times integrated Wiener process: y^(ν) is a Wiener process.

    In the coordinates T⁻¹Y with T = diag(h^(ν−i+½)/(ν−i)!) its transition does not depend on the
    step: Ă_ij = C(ν−i, ν−j) and Q̆_ij = 1/(2ν+1−i−j). The root of Q̆ (a Hilbert matrix, nearly
    singular for large ν) comes from exact fractions, so nothing is lost to rounding.

    Args:
        order: ν, the number of derivatives in the state, 1 … 11.

    >>> import jax.numpy as jnp
    >>> [float(x) for x in IWP(2).transition(jnp.asarray(0.5)).phi[0]]
    [1.0, 0.5, 0.125]
    """

    order: int = eqx.field(static=True)

    def __check_init__(self) -> None:
        if isinstance(self.order, bool) or not isinstance(self.order, int | np.integer):
            raise TypeError(f"order must be an integer from 1 to {MAX_ORDER}, got {self.order!r}.")
        if not 1 <= self.order <= MAX_ORDER:
            raise ValueError(f"order must be from 1 to {MAX_ORDER}, got {self.order}.")

    def transition(self, h: Array) -> Transition:
        """Φ_ij = h^(j−i)/(j−i)! for j ≥ i; Ă, T and R̆ as above."""
        nu, n = self.order, self.order + 1
        power = _powers(h, n)
        root_h = jnp.sqrt(h)
        phi = tuple(
            tuple(power[j - i] / factorial(j - i) if j >= i else None for j in range(n)) for i in range(n)
        )
        scaling = jnp.stack([root_h * power[nu - i] / factorial(nu - i) for i in range(n)])
        pascal = [[comb(nu - i, nu - j) for j in range(n)] for i in range(n)]
        return Transition(phi, scaling, jnp.asarray(pascal, h.dtype), jnp.asarray(hilbert_root(n), h.dtype))

    def marginal(self, h: Array) -> tuple[tuple[Array | None, ...], Array]:
        """h^j/j! and h^(2ν+1)/((2ν+1) ν!²)."""
        nu = self.order
        power = _powers(h, 2 * nu + 2)
        row = tuple(power[j] / factorial(j) for j in range(nu + 1))
        return row, power[2 * nu + 1] / ((2 * nu + 1) * factorial(nu) ** 2)


@cache
def hilbert_root(n: int) -> np.ndarray:
    """Upper triangular R with (RᵀR)_ij = 1/(2n−1−i−j).

    For n = 12 the condition number of this (Hilbert) matrix is 1e16: floating point would fail.
    """
    return right_root([[Fraction(1, 2 * n - 1 - i - j) for j in range(n)] for i in range(n)])


def _powers(h: Array, n: int) -> list[Array]:
    power = [jnp.ones_like(h)]
    for _ in range(n - 1):
        power.append(power[-1] * h)
    return power
