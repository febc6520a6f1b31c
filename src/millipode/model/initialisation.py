"""The initial state: y(t₀) and its first ν derivatives.

Taylor mode is exact, but stores everything that f computes on the way. Runge–Kutta inference (the paper's
Section 2.3) costs O(dν²) and about as much memory as a state: it solves the ODE over ν tiny steps δ and
infers the derivatives at t₀ from the values there. The weights of that inference do not depend on d, so they
are computed once per ν, in exact fractions.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import comb, factorial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.jet import jet
from jax.extend.core import jaxprs_in_params
from jaxtyping import Array, Float

from millipode.linalg import exact
from millipode.linalg.exact import Matrix
from millipode.linalg.fields import Field, all_finite, dtype, rms, size
from millipode.model.vector_field import VectorField

# Up to this many unknowns, Taylor mode is the default.
TAYLOR_LIMIT = 10_000


class Initial(NamedTuple):
    """N(mean, diag(residual²) ⊗ rootᵀroot) at t₀, for y and its first ν derivatives.

    Attributes:
        mean: y and its first ν derivatives, n = ν+1 fields.
        root: one root for all unknowns, (k, n); zero if the derivatives are exact.
        residual: a field whose modulus is the quasi-MLE of γ from the inference, one value per unknown.
        f_evals: the number of evaluations of f.
    """

    mean: tuple[Field, ...]
    root: Float[Array, "k n"]
    residual: Field
    f_evals: Array


class Start(NamedTuple):
    """An initial value problem, and norms near t₀ from one explicit Euler step, which give its time scales.

    Attributes:
        field: f, in the filter's own time.
        t0: the start.
        y0: the initial value.
        span: |t₁ − t₀|.
        f0: f(t₀, y₀).
        d0: the norm of y₀, in units of the tolerance.
        d1: the norm of y', likewise.
        d2: the norm of y'', likewise.
    """

    field: VectorField
    t0: Array
    y0: Field
    span: Array
    f0: Field
    d0: Array
    d1: Array
    d2: Array

    @classmethod
    def of(cls, field: VectorField, t0: Array, y0: Field, weights: Field, span: Array) -> Self:
        """Measure the norms as Hairer, Nørsett and Wanner do (II.4).

        Args:
            field: f, in the filter's own time.
            t0: the start.
            y0: the initial value.
            weights: the tolerance of each unknown, like y.
            span: |t₁ − t₀|.
        """
        f0 = field(t0, y0)
        d0, d1 = (rms(jax.tree.map(jnp.divide, x, weights)) for x in (y0, f0))
        small = (d0 < 1e-5) | (d1 < 1e-5)
        reach = jnp.where(small, 1e-6 * span, 0.01 * d0 / jnp.where(small, 1, d1))
        reach = jnp.minimum(reach, span)
        moved = jax.tree.map(lambda y, f: y + reach * f, y0, f0)
        f1 = field(t0 + field.sign * reach, moved)
        change = jax.tree.map(lambda a, b, w: (a - b) / w, f1, f0, weights)
        d2 = rms(change) / jnp.where(reach > 0, reach, 1)
        return cls(field, t0, y0, span, f0, d0, d1, jnp.where(jnp.isfinite(d2), d2, 0))

    @property
    def time_scale(self) -> Array:
        """The time in which y or y' changes by its own size, at most the span."""
        return jnp.minimum(self._until(self.d0, self.d1), self.time_scale_of_slope)

    @property
    def time_scale_of_slope(self) -> Array:
        """The time in which y' changes by its own size, at most the span."""
        return self._until(self.d1, self.d2)

    def _until(self, size: Array, speed: Array) -> Array:
        """How long something takes to change by its own size, at most the span; the span if it is zero."""
        moves = (size > 0) & (speed > 0)
        return jnp.where(moves, jnp.minimum(self.span, size / jnp.where(moves, speed, 1)), self.span)


def initialise(method: str | None, start: Start, order: int) -> Initial:
    """Infer the initial state.

    Args:
        method: ``"taylor"``, ``"runge-kutta"``, or None to choose by size, order and the operations in f.
        start: the problem.
        order: ν.
    """
    limit = runge_kutta_limit(start.y0)
    if method == "runge-kutta" and order > limit:
        raise ValueError(
            f"initialise='runge-kutta' takes orders up to {limit} in this precision: derivative {order} "
            "would be lost to rounding. Use initialise='taylor' or a lower order."
        )
    if method == "runge-kutta" or (method is None and size(start.y0) > TAYLOR_LIMIT and order <= limit):
        return runge_kutta(start, order)
    try:
        exact = taylor(start, order)
    except Exception as error:
        # jet has no rule for some primitives, and raises various exceptions for them.
        if method == "taylor" or order > limit:
            raise NotImplementedError(
                "Taylor-mode differentiation does not know an operation in f "
                f"({type(error).__name__}: {error}). Use initialise='runge-kutta', which takes "
                f"orders up to {limit} in this precision."
            ) from error
        return runge_kutta(start, order)
    if method == "taylor" or order > limit or not _has_holes(start):
        return exact
    return lax.cond(all_finite(exact.mean), lambda: exact, lambda: runge_kutta(start, order))


# Operations for which jet's rules may fail where f is smooth: it treats y**2.0 as exp(2 log y), NaN at y = 0.
HOLES = {"pow", "sqrt", "rsqrt", "cbrt", "log", "log1p", "asin", "acos", "acosh"}


def _has_holes(start: Start) -> bool:
    """Whether Taylor mode may fail at single points of f's domain."""

    def primitives(jaxpr: Any) -> set[str]:
        inner = [primitives(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
        return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*inner)

    jaxpr = jax.make_jaxpr(lambda t, y: start.field(t, y))(start.t0, start.y0).jaxpr
    return bool(HOLES & primitives(jaxpr))


def runge_kutta_limit(y0: Field) -> int:
    """The highest order ν at which the ν-th derivative is not lost to rounding."""
    return 8 if dtype(y0).itemsize >= 8 else 4


def taylor(start: Start, order: int) -> Initial:
    """Exact derivatives by Taylor-mode automatic differentiation."""
    field, t0, y0 = start.field, start.t0, start.y0
    leaves, tree = jax.tree.flatten(y0)

    def flat(t: Array, *ys: Array) -> tuple[Array, ...]:
        return tuple(jax.tree.leaves(field(t, jax.tree.unflatten(tree, ys))))

    derivatives = [jax.tree.leaves(start.f0)]
    for k in range(1, order):
        # Along y(t), t has the derivatives 1, 0, 0, … in user time; y has those found so far.
        clock = [field.sign * jnp.ones_like(t0)] + [jnp.zeros_like(t0)] * (k - 1)
        series = [clock, *([d[i] for d in derivatives] for i in range(len(leaves)))]
        _, out = jet(flat, (t0, *leaves), tuple(series))
        derivatives.append([terms[k - 1] for terms in out])
    mean = (y0, *(jax.tree.unflatten(tree, d) for d in derivatives))
    root = jnp.zeros((order, order + 1), dtype(y0))
    return Initial(mean, root, jax.tree.map(jnp.zeros_like, y0), jnp.int32(order - 1))


def runge_kutta(start: Start, order: int) -> Initial:
    """The posterior of an IWP at t₀ given y₀, f₀ and y(t₀ + mδ), m = 1 … ν.

    The values come from the explicit Runge–Kutta method of order ν+1 that iterates collocation at
    these nodes: F ← f(y₀ + δ A F), ν sweeps, each of which raises the order by one. δ balances
    truncation against rounding, so that derivative q is right to (δ/s)^(ν+1−q) on a problem with
    time scale s.
    """
    nu, field, t0, y0 = order, start.field, start.t0, start.y0
    precision = float(jnp.finfo(dtype(y0)).eps)
    delta = start.time_scale * precision ** (1 / (nu + 1))
    delta = jnp.where(delta > 0, delta, 1)
    integrate = jnp.asarray(np.array(_collocation(nu), float), dtype(y0))

    def refine(slopes: Field, m: Array) -> tuple[Field, None]:
        weights = delta * integrate[m]
        y = jax.tree.map(lambda y, s: y + jnp.tensordot(weights, s, 1), y0, slopes)
        slope = field(t0 + field.sign * delta * m, y)
        return jax.tree.map(lambda s, new: s.at[m].set(new), slopes, slope), None

    slopes = jax.tree.map(lambda f: jnp.broadcast_to(f, (nu + 1, *f.shape)), start.f0)
    nodes = jnp.tile(jnp.arange(1, nu + 1), nu)
    slopes, _ = lax.scan(refine, slopes, nodes)

    weights, residual, root = _inference(nu)
    powers = jnp.asarray([float(q) for q in range(nu + 1)], dtype(y0))

    def project(row: Sequence[Fraction | float], power: Array | float) -> Field:
        coefficients = jnp.asarray([float(w) for w in row], dtype(y0)) * delta**power
        return jax.tree.map(lambda s: jnp.tensordot(coefficients, s, 1), slopes)

    higher = tuple(project(weights[q - 2], 1.0 - q) for q in range(2, nu + 1))
    misfit = project(residual, 0.5 - nu)
    scaled = jnp.asarray(root, dtype(y0)) * delta ** (nu + 0.5 - powers)
    return Initial((y0, start.f0, *higher), scaled, misfit, jnp.int32(nu * nu))


@cache
def _collocation(nu: int) -> Matrix:
    """A_mk = ∫₀^m ℓ_k for the Lagrange polynomials ℓ_k at 0, 1, …, ν."""
    rows = []
    for m in range(nu + 1):
        row = []
        for k in range(nu + 1):
            poly = [Fraction(1)]
            for j in (j for j in range(nu + 1) if j != k):
                shifted = [Fraction(0), *poly]
                poly = [(a - j * b) / (k - j) for a, b in zip(shifted, [*poly, Fraction(0)], strict=True)]
            terms = (c * Fraction(m) ** (i + 1) / (i + 1) for i, c in enumerate(poly))
            row.append(sum(terms, Fraction(0)))
        rows.append(row)
    return rows


@cache
def _inference(nu: int) -> tuple[Matrix, list[float], np.ndarray]:
    """Universal kriging at δ = 1: weights on the slopes, misfit, and root of the posterior.

    y₀ and f₀ fix two Taylor coefficients; b = (y'', …, y^(ν)) has a flat prior and is seen through
    r_m = y(m) − y₀ − m f₀ = Σ_q b_q m^q/q! + noise with the IWP's kernel K. There are ν values for ν−1
    unknowns, so one degree of freedom is left, whose square is the quasi-MLE of γ². Since r = A F − m f₀,
    everything is returned as weights on the slopes F, so that nothing cancels.
    """
    nodes, unknowns = range(1, nu + 1), nu - 1
    slopes = [[a - (m if k == 0 else 0) for k, a in enumerate(_collocation(nu)[m])] for m in nodes]
    kernel = [[_iwp_kernel(nu, s, t) for t in nodes] for s in nodes]
    if not unknowns:
        weights, covariance, misfit = [], [], slopes
    else:
        design = [[Fraction(m) ** q / factorial(q) for q in range(2, nu + 1)] for m in nodes]
        dual = exact.transpose(exact.solve(kernel, design))  # DᵀK⁻¹
        covariance = exact.solve(exact.product(dual, design), exact.identity(unknowns))
        weights = exact.product(covariance, exact.product(dual, slopes))
        fitted = exact.product(design, weights)
        misfit = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(slopes, fitted, strict=True)]
    # The misfit has rank one, v wᵀ, so γ² = (wᵀF)² vᵀK⁻¹v.
    v = [row[-1] for row in misfit]
    w = [entry / v[0] for entry in misfit[0]]
    length = float(exact.inner(v, exact.transpose(exact.solve(kernel, [[x] for x in v]))[0])) ** 0.5
    root = np.zeros((nu, nu + 1))
    root[:unknowns, 2:] = exact.right_root(covariance)
    return weights, [float(x) * length for x in w], root


def _iwp_kernel(nu: int, s: int, t: int) -> Fraction:
    """∫₀^min(s,t) (s−u)^ν (t−u)^ν / ν!² du, expanded in x = min(s,t) − u."""
    low, gap = min(s, t), abs(s - t)
    terms = (Fraction(comb(nu, i) * gap ** (nu - i) * low ** (nu + i + 1), nu + i + 1) for i in range(nu + 1))
    return sum(terms, Fraction(0)) / factorial(nu) ** 2
