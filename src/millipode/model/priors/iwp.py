"""The integrated Wiener process."""

from fractions import Fraction
from functools import cache
from math import comb, factorial
from typing import Any, Self

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from millipode.covariance.transition import BlockTransition
from millipode.linalg.arguments import as_integer
from millipode.linalg.exact import right_root
from millipode.linalg.fields import Coefficient, Field, Row, dtype
from millipode.model.priors.protocol import Prior

MAX_ORDER = 11


class IWP(Prior):
    """The ν-times integrated Wiener process: y^(ν) is a Wiener process.

    In the coordinates T⁻¹Y with T = diag(h^(ν−i+½)/(ν−i)!) its transition does not depend on the
    step: Ă_ij = C(ν−i, ν−j) and Q̆_ij = 1/(2ν+1−i−j). The root of Q̆ (a Hilbert matrix, nearly
    singular for large ν) comes from exact fractions, so nothing is lost to rounding.

    Args:
        order: ν, the number of derivatives in the state, 1 … 11; 0 for that of the solver.

    >>> import jax.numpy as jnp
    >>> [float(x) for x in IWP(2).transition(jnp.asarray(0.5)).phi[0]]
    [1.0, 0.5, 0.125]
    """

    order: int = eqx.field(static=True, default=0, converter=lambda order: as_integer(order, "order"))

    def __check_init__(self) -> None:
        if self.order != 0:
            check_order(self.order)

    @property
    def is_shared(self) -> bool:
        """Always."""
        return True

    def fitted(self, rates: Field | None, sign: Array, y: Field) -> Self:
        """The same prior for every problem."""
        return self

    def transition(self, h: Array) -> BlockTransition:
        """Φ_ij = h^(j−i)/(j−i)! for j ≥ i; Ă, T and R̆ as above."""
        n = self.order + 1
        phi = taylor(h, n)
        pascal = [[comb(n - 1 - i, n - 1 - j) for j in range(n)] for i in range(n)]
        return BlockTransition(
            phi, scaling(h, n), jnp.asarray(pascal, h.dtype), jnp.asarray(hilbert_root(n), h.dtype)
        )

    def marginal(self, h: Array) -> tuple[Row, Array]:
        """The row h^j/j!, and the variance h^(2ν+1)/((2ν+1) ν!²)."""
        nu = self.order
        power = powers(h, 2 * nu + 2)
        row = tuple(power[j] / factorial(j) for j in range(nu + 1))
        return row, power[2 * nu + 1] / ((2 * nu + 1) * factorial(nu) ** 2)

    def remainder(self, h: Array) -> tuple[Coefficient, ...]:
        """The Taylor terms h^(ν+1−i)/(ν+1−i)!."""
        return next_column(h, self.order + 1)

    def state(self, derivatives: tuple[Field, ...]) -> tuple[Field, ...]:
        """The derivatives themselves."""
        return derivatives

    def root(self, root: Float[Array, "k n"]) -> Float[Array, "k n"]:
        """The same root."""
        return root

    def row(self, q: Array | int, y: Field) -> Row:
        """A unit row: field q is y^(q)."""
        n, kind = self.order + 1, dtype(y)
        if isinstance(q, int):
            return unit_row(q, n, kind)
        return tuple(jnp.where(q == j, 1, 0).astype(kind) for j in range(n))

    def derivative(self, state: tuple[Field, ...], q: Array) -> Field:
        """Field q."""
        return lax.switch(q, [lambda x=x: x for x in state])


def check_order(order: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``order`` is an integer from 1 to 11."""
    if not 1 <= as_integer(order, "order") <= MAX_ORDER:
        raise ValueError(f"order must be from 1 to {MAX_ORDER}, got {order}.")


@cache
def hilbert_root(n: int) -> np.ndarray:
    """Upper triangular R with (RᵀR)_ij = 1/(2n−1−i−j).

    For n = 12 the condition number of this (Hilbert) matrix is 1e16: floating point would fail.
    """
    return right_root([[Fraction(1, 2 * n - 1 - i - j) for j in range(n)] for i in range(n)])


def unit_row(q: int, n: int, kind: Any) -> Row:
    """The unit row e_qᵀ of length n."""
    return tuple(jnp.ones((), kind) if j == q else None for j in range(n))


def taylor(h: Array, n: int) -> tuple[Row, ...]:
    """The matrix h^(j−i)/(j−i)! for j ≥ i, row by row."""
    power = powers(h, n)
    return tuple(
        tuple(power[j - i] / factorial(j - i) if j >= i else None for j in range(n)) for i in range(n)
    )


def next_column(h: Array, n: int) -> tuple[Array, ...]:
    """The column h^(n−i)/(n−i)!, by which one more derivative would enter."""
    power = powers(h, n + 1)
    return tuple(power[n - i] / factorial(n - i) for i in range(n))


def scaling(h: Array, n: int) -> Float[Array, " n"]:
    """The diagonal h^(ν−i+½)/(ν−i)! of T."""
    power, root_h = powers(h, n), jnp.sqrt(h)
    return jnp.stack([root_h * power[n - 1 - i] / factorial(n - 1 - i) for i in range(n)])


def powers(h: Array, n: int) -> list[Array]:
    """The powers 1, h, …, h^(n−1)."""
    power = [jnp.ones_like(h)]
    for _ in range(n - 1):
        power.append(power[-1] * h)
    return power
