"""The Matérn process in time: mean reversion, and a stationary distribution.

With λ = √(2ν+1)/ℓ, w_q = (d/dt + λ)^q y obeys w_q' = −λ w_q + w_{q+1}, and noise drives the last of them. In
these coordinates the transition is e^(−λh) times that of the integrated Wiener process, and its noise has
the Gram matrix of monomials under the weight e^(−2λs). Other formulas for it, such as P∞ − Φ P∞ Φᵀ, suffer
from cancellation. Here its root comes from the QR decomposition of the monomials at the nodes of a
quadrature.
"""

import math
from functools import cache
from math import comb, factorial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from millipode.covariance.transition import BlockTransition
from millipode.linalg.arguments import as_integer
from millipode.linalg.fields import Coefficient, Field, Row, dtype
from millipode.linalg.qr import triangularise
from millipode.model.priors.iwp import check_order, powers, scaling, taylor
from millipode.model.priors.reverting import Integers, Reverting
from millipode.xla.tracing import is_traced

# Beyond λs = 55 the monomials times the weight e^(−2λs) are negligible.
REACH, NODES = 55.0, 64


class MaternProcess(Reverting):
    """The Matérn process in time, with ν derivatives, smoothness ν + ½ and length scale ℓ.

    It is meant for solutions that fluctuate about zero or are pulled towards it; for ℓ → ∞ it becomes
    ``mp.IWP``. γ² is the intensity of the noise, as for the other priors; the variance that the process tends
    to is γ² (2ν)! / (ν!² (2λ)^(2ν+1)) with λ = √(2ν+1)/ℓ.

    Args:
        order: ν, 1 … 11; 0 for that of the solver.
        length_scale: ℓ > 0, a number in units of time.

    >>> import millipode as mp
    >>> mp.EK0(order=3, prior=MaternProcess(length_scale=0.5)).structure
    'kronecker'
    """

    order: int = eqx.field(static=True, default=0)
    length_scale: Any = 1.0

    def __init__(self, order: int = 0, length_scale: ArrayLike = 1.0):
        if order != 0:
            check_order(order)
        self.order = as_integer(order, "order")
        if not is_traced(length_scale):
            if np.ndim(length_scale) or not 0 < float(np.asarray(length_scale)) < math.inf:
                raise ValueError(
                    f"MaternProcess: length_scale must be a positive number, got {length_scale}."
                )
            length_scale = jnp.asarray(length_scale, getattr(length_scale, "dtype", float))
        self.length_scale = length_scale

    @property
    def is_shared(self) -> bool:
        return True

    def fitted(self, rates: Field | None, sign: Array, y: Field) -> "MaternProcess":
        """The prior in the precision of y; it does not depend on the rates or on the direction of time."""
        return MaternProcess(self.order, jnp.asarray(self.length_scale, dtype(y)))

    @property
    def drift(self) -> Array:
        """The rate −λ, a number."""
        return -math.sqrt(2 * self.order + 1) / jnp.asarray(self.length_scale)

    @property
    def forwards(self) -> Integers:
        """w_q = Σ_j C(q, j) λ^(q−j) y^(j)."""
        n = self.order + 1
        return [[comb(q, j) * (-1) ** (q - j) if j <= q else 0 for j in range(n)] for q in range(n)]

    @property
    def backwards(self) -> Integers:
        """y^(q) = Σ_j C(q, j) (−λ)^(q−j) w_j."""
        n = self.order + 1
        return [[comb(q, j) for j in range(n)] for q in range(n)]

    def transition(self, h: Array) -> BlockTransition:
        """Φ is e^(−λh) times that of the integrated Wiener process, and Σ is from ``gram_root``."""
        n, x = self.order + 1, -self.drift * h
        decay = jnp.exp(-x)
        phi = tuple(tuple(None if p is None else decay * p for p in row) for row in taylor(h, n))
        pascal = [[comb(n - 1 - i, n - 1 - j) for j in range(n)] for i in range(n)]
        return BlockTransition(
            phi, scaling(h, n), decay * jnp.asarray(pascal, h.dtype), gram_root(x, self.order)
        )

    def marginal(self, h: Array) -> tuple[Row, Array]:
        """Row 0 of Φ, and Σ₀₀ = h^(2ν+1)/ν!² ∫₀¹ e^(−2xs) s^(2ν) ds with x = λh."""
        nu, x = self.order, -self.drift * h
        row = tuple(jnp.exp(-x) * p / factorial(j) for j, p in enumerate(powers(h, nu + 1)))
        noise = jnp.sum(_weighted(x, nu)[:, 0] ** 2)
        return row, powers(h, 2 * nu + 2)[2 * nu + 1] / factorial(nu) ** 2 * noise

    def remainder(self, h: Array) -> tuple[Coefficient, ...]:
        """h^(ν+1−i)/(ν−i)! ∫₀¹ e^(−xs) s^(ν−i) ds for field i, with x = λh."""
        nu, x = self.order, -self.drift * h
        nodes, weights = (jnp.asarray(v, x.dtype) for v in _quadrature())
        reach = jnp.where(x > REACH, REACH / jnp.where(x > REACH, x, 1), 1)
        s, power = reach * nodes, powers(h, nu + 2)
        envelope = reach * weights * jnp.exp(-x * s)
        return tuple(
            power[nu + 1 - i] / factorial(nu - i) * jnp.sum(envelope * s ** (nu - i)) for i in range(nu + 1)
        )


def gram_root(x: Array, nu: int) -> Float[Array, "n n"]:
    """Upper triangular R with (RᵀR)_ij = ∫₀¹ e^(−2xs) s^(2ν−i−j) ds, for x ≥ 0."""
    return triangularise(_weighted(x, nu))


def _weighted(x: Array, nu: int) -> Float[Array, "m n"]:
    """√weight e^(−xs) s^(ν−j) at the nodes, which lie where e^(−2xs) is not negligible."""
    nodes, weights = (jnp.asarray(v, x.dtype) for v in _quadrature())
    reach = jnp.where(x > REACH, REACH / jnp.where(x > REACH, x, 1), 1)
    s = reach * nodes
    envelope = jnp.sqrt(reach * weights) * jnp.exp(-x * s)
    return jnp.stack([envelope * s ** (nu - j) for j in range(nu + 1)], axis=1)


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """The nodes and weights of Gauss–Legendre quadrature on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return (nodes + 1) / 2, weights / 2
