"""The integrated Ornstein–Uhlenbeck process: exact for the linear part of an ODE.

With the rate λ of an unknown, w = y' − λy is a (ν−1)-times integrated Wiener process. The state is (y, w, w',
…, w^(ν−1)) and not (y, y', …), because derivatives of stiff unknowns cancel: y^(q) ≈ λ^q y. In these
coordinates only the first row of Φ and the first column of the noise's root depend on λ, by way of x = λh.

    y(h) = e^x y + Σ_j h^(j+1) φ_{j+1}(x) w^(j) + h^(ν+½) ∫₀¹ s^ν φ_ν(xs) dβ(s),    φ_k(x) = Σ_m x^m/(m+k)!

All of it is computed without cancellation for x from −∞ to about 10: the integrand is expanded in Legendre
polynomials, in which the integration that leads from φ_k to φ_{k+1} is tridiagonal.
"""

import math
from functools import cache, reduce
from math import factorial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from millipode.covariance.transition import BlockTransition, Transition
from millipode.linalg.arguments import as_integer
from millipode.linalg.fields import Coefficient, Field, Row, dtype, safe_divide, safe_sqrt, same_structure
from millipode.model.priors.iwp import check_order, next_column, powers, scaling, taylor
from millipode.model.priors.reverting import Integers, Reverting
from millipode.xla.tracing import is_traced


class IOUP(Reverting):
    """The ν-times integrated Ornstein–Uhlenbeck process, y^(ν+1) = λ y^(ν) + noise.

    With ``mp.SpectralEK1(linear=..., prior=mp.IOUP())`` every mode has its rate λ from ``linear``. A purely
    linear equation is then solved exactly, except for errors of the initial state if that is not from a
    Taylor series. The rest of f is extrapolated by itself, as in exponential integrators.

    With any other solver, the user gives the rate: one for all unknowns, or one for each. A rate does not
    make EK0 implicit: for stiff unknowns it still needs steps with small hλ.

    Derivatives of stiff unknowns suffer from cancellation: y' is exact up to rounding, and y^(q) up to about
    |λ|^(q−1) times that.

    Args:
        order: ν, the number of derivatives of y that the model has, 1 … 11; 0 for that of the solver.
        rate: λ, in units of 1/time and negative for decay: a number, or a field like y. None for the rates of
            ``linear``.

    >>> import millipode as mp
    >>> mp.EK0(order=3, prior=IOUP(rate=-2.0)).structure
    'kronecker'
    >>> mp.EK0(order=3, prior=IOUP(rate=jnp.array([-2.0, -0.5]))).structure
    'blockdiagonal'
    """

    order: int = eqx.field(static=True, default=0, converter=lambda order: as_integer(order, "order"))
    rate: PyTree = eqx.field(default=None, converter=lambda rate: jax.tree.map(_as_rate, rate))
    _sign: Any = 1.0

    def __check_init__(self) -> None:
        if self.order != 0:
            check_order(self.order)

    @property
    def is_shared(self) -> bool:
        """Whether there is one rate for all unknowns."""
        return isinstance(self.rate, np.ndarray | jax.Array) and self.rate.ndim == 0

    @property
    def needs_rates(self) -> bool:
        """Whether no rate was given."""
        return self.rate is None

    def fitted(self, rates: Field | None, sign: Array, y: Field) -> "IOUP":
        """The prior with the rates of a certain problem."""
        rate = rates if self.rate is None else self.rate
        assert rate is not None  # solvers make sure of that
        if self.is_shared:
            return IOUP(self.order, jnp.asarray(rate, dtype(y)), sign)
        if self.rate is None:
            return IOUP(self.order, rate, sign)
        try:
            if not same_structure(rate, y):
                raise ValueError(f"its structure is {jax.tree.structure(rate)}")
            spread = jax.tree.map(lambda r, x: jnp.broadcast_to(jnp.asarray(r, x.dtype), x.shape), rate, y)
        except ValueError as error:
            raise ValueError(f"IOUP: rate must be a number or shaped like y: {error}.") from error
        return IOUP(self.order, spread, sign)

    @property
    def drift(self) -> Coefficient:
        """The rate λ in the filter's own time, a number or a field."""
        return jax.tree.map(lambda r: self._sign * r, self.rate)

    @property
    def forwards(self) -> Integers:
        """w^(m) = y^(m+1) − λ y^(m)."""
        n = self.order + 1
        return [[1 if j == q else -1 if j == q - 1 else 0 for j in range(n)] for q in range(n)]

    @property
    def backwards(self) -> Integers:
        """y^(q) = λ^q y + Σ_m λ^(q−1−m) w^(m)."""
        n = self.order + 1
        return [[int(j <= q) for j in range(n)] for q in range(n)]

    def transition(self, h: Array) -> Transition:
        """Φ and Σ over a step h; one block if all unknowns share λ, else blocks that are made on demand."""
        n = self.order + 1
        phi = (self._first_row(h), *_other_rows(h, n))
        transition = ExponentialTransition(phi, scaling(h, n), h, self._sign, self.rate)
        return transition.at(self.rate) if self.is_shared else transition

    def _first_row(self, h: Array) -> Row:
        leaves, tree = jax.tree.flatten(self.drift)
        columns = zip(*(_first_row(h, h * rate, self.order + 1) for rate in leaves), strict=True)
        return tuple(jax.tree.unflatten(tree, column) for column in columns)

    def marginal(self, h: Array) -> tuple[Row, Field]:
        """Row 0 of Φ, and Σ₀₀ = h^(2ν+1) ∫₀¹ (s^ν φ_ν(xs))² ds."""
        n = self.order + 1

        def noise(rate: Array) -> Array:
            return powers(h, 2 * n)[2 * n - 1] * jnp.sum(projected(h * rate, n - 1) ** 2, axis=0)

        return self._first_row(h), jax.tree.map(noise, self.drift)

    def remainder(self, h: Array) -> tuple[Coefficient, ...]:
        """h^(ν+1) φ_{ν+1}(x) for y, and the remainder of an IWP for w and its derivatives."""
        n = self.order + 1

        def first(rate: Array) -> Array:
            return powers(h, n + 1)[n] * phis(h * rate, n)[n]

        return (jax.tree.map(first, self.drift), *next_column(h, n - 1))


def _as_rate(rate: Any) -> Any:
    """The rate as an array, so that it is traced and not hashed; raise ``ValueError`` unless it is finite."""
    if is_traced(rate):
        return rate
    value = rate if isinstance(rate, jax.Array) else np.asarray(rate, float)
    if not np.isfinite(value).all():
        raise ValueError(f"IOUP: rate must be finite, got {rate}.")
    return value


class ExponentialTransition(Transition):
    """Φ and Σ of an IOUP. Blocks are computed where they are needed, and never stored for all unknowns.

    Attributes:
        h: the step, a number.
        sign: +1, or −1 if the user integrates backwards in time.
        rate: λ in user time, a field.
    """

    phi: tuple[Row, ...]
    scaling: Float[Array, " n"]
    h: Array
    sign: Array
    rate: Field

    def rates(self, y: Field) -> list[Array | None]:
        """λ in user time, one array per leaf of y."""
        return jax.tree.leaves(self.rate)

    def at(self, rate: Array | None) -> BlockTransition:
        """The blocks of those unknowns that have these rates λ."""
        assert rate is not None
        n, x, zero = len(self.scaling), self.sign * self.h * rate, jnp.zeros((), self.h.dtype)
        phi = (_first_row(self.h, x, n), *_other_rows(self.h, n))
        scaled = [
            [zero if p is None else p * self.scaling[j] / self.scaling[i] for j, p in enumerate(row)]
            for i, row in enumerate(phi)
        ]
        return BlockTransition(phi, self.scaling, _stacked(scaled, x), noise_root(x, n - 1))


def _first_row(h: Array, x: Array, n: int) -> tuple[Array, ...]:
    """The first row of Φ: e^x, hφ₁(x), h²φ₂(x), …, of the shape of x."""
    return tuple(p * q for p, q in zip(powers(h, n), phis(x, n - 1), strict=True))


def _other_rows(h: Array, n: int) -> tuple[Row, ...]:
    """The other rows of Φ, which are those of an IWP for w."""
    return tuple((None, *row) for row in taylor(h, n - 1))


def _stacked(rows: list[list[Any]], x: Array) -> Float[Array, "n n *batch"]:
    """One matrix for every entry of x, from entries that broadcast to the shape of x."""
    return jnp.stack([jnp.stack([jnp.broadcast_to(p, x.shape) for p in row]) for row in rows])


def phis(x: Array, nu: int) -> list[Array]:
    """φ₀(x) = e^x, φ₁(x), …, φ_ν(x), each of the shape of x.

    Near 0 they follow downwards from a series for φ_ν, elsewhere upwards from φ₀, where that is stable.
    """
    limit = max(2, nu / 3)
    near = jnp.abs(x) < limit
    small, large = jnp.where(near, x, 0), jnp.where(near, -limit, x)
    series = jnp.zeros_like(x)
    for m in range(24, -1, -1):
        series = series * small + 1 / factorial(m + nu)
    down = [series]
    for k in range(nu - 1, -1, -1):
        down.append(small * down[-1] + 1 / factorial(k))
    up = [jnp.exp(large), jnp.expm1(large) / large]
    for k in range(1, nu):
        up.append((up[k] - 1 / factorial(k)) / large)
    return [jnp.where(near, a, b) for a, b in zip(down[::-1], up, strict=True)]


def noise_root(x: Array, nu: int) -> Float[Array, "n n *batch"]:
    """Upper triangular R, RᵀR the covariance of ∫ ν! s^ν φ_ν(xs) dβ and of ∫ s^k dβ for k = ν−1, …, 0.

    In orthonormal coordinates for the latter, in their order, only the first column c depends on x. Rotations
    from the bottom gather it in the first row. Their effect on the other columns is written out here, because
    XLA would repeat a chain of rotations for every entry of the result.
    """
    rotation, triangle = _monomials(nu)
    coefficients = projected(x, nu)
    c = [reduce(jnp.add, (rotation[k][i] * coefficients[k] for k in range(nu))) for i in range(nu)]
    lengths = [coefficients[nu]]
    for k in range(nu - 1, -1, -1):
        lengths.insert(0, safe_sqrt(c[k] ** 2 + lengths[0] ** 2))
    inverse = [safe_divide(jnp.ones_like(x), length) for length in lengths[:nu]]

    def below(k: int, j: int) -> Array:
        return reduce(jnp.add, (c[i] * triangle[i][j] for i in range(k, j + 1)))

    rows = [[factorial(nu) * lengths[0], *(inverse[0] * below(0, j) for j in range(nu))]]
    for k in range(nu):
        row = [jnp.zeros_like(x)] * (k + 1)
        for j in range(k, nu):
            kept = lengths[k + 1] * inverse[k] * triangle[k][j]
            row.append(kept if j == k else kept - c[k] * inverse[k] * inverse[k + 1] * below(k + 1, j))
        rows.append(row)
    return _stacked(rows, x)


@cache
def _monomials(nu: int) -> tuple[list[list[float]], list[list[float]]]:
    """Q and R of the QR decomposition of the Legendre coefficients of s^(ν−1), …, s, 1 on [0, 1]."""
    coefficients = np.zeros((nu, nu))
    for column, m in enumerate(range(nu - 1, -1, -1)):
        for k in range(m + 1):
            binomials = factorial(m) ** 2 / (factorial(m - k) * factorial(m + k + 1))
            coefficients[k, column] = math.sqrt(2 * k + 1) * binomials
    rotation, triangle = np.linalg.qr(coefficients)
    signs = np.sign(np.diagonal(triangle))
    return (rotation * signs).tolist(), (
        triangle * signs[:, None]
    ).tolist()  # Python floats adopt the precision of x


def projected(x: Array, nu: int) -> Float[Array, " n *batch"]:
    """The first ν Legendre coefficients of s^ν φ_ν(xs) on [0, 1], and the norm of all others together.

    The coefficients of e^{xs} are √(2k+1) (x/2)^k a_k e^max(x,0), and coefficient k ≥ m of s^m φ_m(xs) is
    x^(−m) times that. Those with k < m follow from m − 1 by integration.
    """
    a, rest = _bessel(jnp.abs(x) / 2, nu)
    lower: list[Array] = []
    for m in range(nu):
        # For this m, coefficients 0 … m−1 are known, and so are the next two.
        upper = [math.sqrt(2 * m + 1) * 2.0**-m * a[m], math.sqrt(2 * m + 3) * 2.0 ** -(m + 1) * x * a[m + 1]]
        known = [*lower, *upper]
        lower = [0.5 * known[0] - _integral(1) * known[1]]
        lower += [_integral(k) * known[k - 1] - _integral(k + 1) * known[k + 1] for k in range(1, m + 1)]
    return jnp.exp(jnp.maximum(x, 0)) * jnp.stack([*lower, 2.0**-nu * rest])


def _integral(k: int) -> float:
    """α_k in ∫₀ˢ p_k = α_{k+1} p_{k+1} − α_k p_{k−1}, for the orthonormal Legendre polynomials p_k."""
    return 1 / (2 * math.sqrt(4 * k * k - 1))


def _bessel(z: Array, nu: int) -> tuple[list[Array], Array]:
    """a_k = e^{−z} i_k(z)/z^k for k = 0 … ν, and √(Σ_{k≥ν} (2k+1) (a_k z^(k−ν))²).

    The modified spherical Bessel functions i_k come from their continued fraction, of which all terms are
    positive. For large z they come from the upward recurrence, and the sum is the difference between the sum
    over all k, Σ_k (2k+1)(a_k z^k)² = (1−e^{−4z})/4z, and its first ν terms.
    """
    limit = nu**2 / 3 + 0.7
    terms = math.ceil(6 * math.sqrt(limit)) + nu
    far = z > limit
    near = jnp.where(far, limit, z)
    square, ratio, tail = near**2, jnp.full_like(z, 1 / (2 * terms + 3)), jnp.full_like(z, 2 * terms + 1)

    def term(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        k, (ratio, tail) = terms - i, carry
        ratio = 1 / ((2 * k + 1) + square * ratio)  # i_k / (z i_{k−1})
        return ratio, (2 * k - 1) + square * ratio**2 * tail

    # This is a loop, because XLA would repeat unrolled operations for every result that depends on them.
    ratio, tail = lax.fori_loop(0, terms - nu, term, (ratio, tail))
    ratios: list[Array] = []
    for k in range(nu, 0, -1):
        ratio = 1 / ((2 * k + 1) + square * ratio)
        ratios.append(ratio)
    nonzero = jnp.where(near > 0, near, 1)
    a = [jnp.where(near > 0, -jnp.expm1(-2 * nonzero) / (2 * nonzero), 1)]
    for ratio in reversed(ratios):
        a.append(a[-1] * ratio)
    rest = a[nu] * jnp.sqrt(tail)

    large = jnp.where(far, z, limit)
    small = jnp.exp(-2 * large)
    b = [(1 - small) / (2 * large), (1 + small) / (2 * large) - (1 - small) / (2 * large**2)]
    for k in range(1, nu):
        b.append(b[k - 1] - (2 * k + 1) / large * b[k])
    missing = (1 - small**2) / (4 * large) - sum((2 * k + 1) * b[k] ** 2 for k in range(nu))
    power = powers(large, nu + 1)
    a = [jnp.where(far, q / power[k], p) for k, (p, q) in enumerate(zip(a, b, strict=True))]
    return a, jnp.where(far, safe_sqrt(jnp.maximum(missing, 0)) / power[nu], rest)
