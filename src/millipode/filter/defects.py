"""The defects of steps, which drive ensemble members; ``members`` has the mathematics."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from millipode.filter.ensemble import Defect, Drive, Lag, Transported, kind_of
from millipode.filter.state import Attempt, Filter, State
from millipode.linalg.fields import Coefficient, Field, dtype, map_leaves, rms, safe_divide, safe_sqrt, total
from millipode.model.steady import scaled_step

# Residuals of members may be this many times those of the filter, of which steps forget this share.
CREDIBLE, FORGET = 3.0, 0.9


def no_defect(model: Filter, y: Field, persistent: Float[Array, " s"]) -> Defect:
    """That of no step."""
    n, kind = model.prior.order + 1, dtype(y)
    lag = Lag(jnp.zeros((n, n), kind), jnp.zeros(n, kind))
    nothing, zero = jax.tree.map(lambda x: jnp.zeros(x.shape, kind_of(y)), y), jnp.zeros((), kind)
    return Defect(nothing, nothing, jnp.zeros((), jnp.result_type(float)), zero, zero, persistent, lag, zero)


def balanced(x: Float[Array, " s"]) -> Float[Array, " s"]:
    """Numbers with a mean square of 1, so that one persistent defect has the right spread for any S."""
    return x * lax.rsqrt(jnp.mean(x**2))


def drive(model: Filter, state: State, a: Attempt) -> Drive:
    """What an attempted step does to the members, from its residual."""
    assert state.members is not None
    plan, h, before = model.uncertainty, a.prediction.h, state.members.defect
    key = None
    if isinstance(plan, Transported):
        key = jax.random.fold_in(jax.random.wrap_key_data(plan.key), 2 + state.steps)
    if before is None:
        return Drive(key)
    since = jnp.where(before.h > 0, safe_divide(h, before.h), 1)
    share, lag = _informative_share(model.prior.order, before.lag, since)
    v, residual = model.prior.remainder(h), a.corrections.residual
    explained = residual.observation.explain(residual.z, (v[0], v[1]))
    ratio = safe_divide(v[1], before.unit)  # in the units of this step; c itself might overflow
    recent = jnp.maximum(rms(residual.z), FORGET * ratio * before.residual)
    new = jax.tree.map(lambda x: jnp.where(a.accept, -share * x, 0), explained)  # NaN if rejected
    small = kind_of(residual.z)
    latest = jax.tree.map(lambda x: x.astype(small), new)
    if key is None:
        # Without a mean over two steps: fewer passes, and measured to be as good.
        defect = before._replace(mean=latest, unit=v[1], h=h, lag=lag, residual=recent)
        return Drive(None, defect, before.persistent)
    weight = h / (h + before.h)
    mean = jax.tree.map(
        lambda x, y: (weight * x + (1 - weight) * ratio * y).astype(small), new, before.latest
    )
    unit = lax.rsqrt(jnp.where(before.square > 0, before.square, 1)).astype(small)
    square, inner = _inner(mean, mean, unit), _inner(mean, before.mean, unit)
    rho = safe_divide(inner, safe_sqrt(square) * safe_sqrt(before.square))
    rho = jnp.clip(rho, 0, 1).astype(before.persistent.dtype)
    rho = jnp.where(before.unit > 0, rho, 1)  # the first step has nothing to differ from
    fresh = jax.random.normal(key, (2, *before.persistent.shape), rho.dtype)
    rest = safe_sqrt(1 - rho**2)
    persistent = balanced(rho * before.persistent + rest * fresh[0])
    multiplier = persistent + rest * balanced(fresh[1])
    return Drive(key, Defect(latest, mean, square, v[1], h, persistent, lag, recent), multiplier)


def _informative_share(order: int, lag: Lag, ratio: Array) -> tuple[Array, Lag]:
    """The share α of a residual that is information from this step, for a constant c; and the next lag.

    Only a few digits of it matter, so the covariance is carried as it is. With a root, this took half of what
    the error estimate costs on small problems.

    Args:
        order: ν.
        lag: after the last step.
        ratio: of this step to the last one.
    """
    kind = ratio.dtype
    # After steps that were much longer, all of a residual is a response to them. Without a bound, the units
    # of such steps overflow in single precision.
    ratio = jnp.maximum(ratio, float(jnp.finfo(kind).max) ** (-0.75 / (2 * order + 1)))
    phi, noise, remainder = (jnp.asarray(x, kind) for x in scaled_step(order))
    units = ratio ** -jnp.arange(order + 1, 0, -1, dtype=kind)
    units_of_root = units * jnp.sqrt(ratio)
    error = jnp.sum(phi * (units * lag.error), axis=1) + remainder
    earlier = jnp.outer(units_of_root, units_of_root) * lag.covariance
    predicted = _times(phi, _times(phi, earlier).T) + noise
    gain = predicted[:, 1] / predicted[1, 1]
    share = jnp.where(error[1] > 0, safe_divide(remainder[1], error[1]), 1)
    return share, Lag(predicted - jnp.outer(gain, predicted[1]), error - gain * error[1])


def _times(phi: Float[Array, "n n"], x: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Φ x as a sum: a call of a library takes longer, and cannot be part of a kernel."""
    return functools.reduce(jnp.add, [phi[:, k, None] * x[k] for k in range(len(x))])


def _inner(x: Field, y: Field, unit: Array) -> Array:
    """Σ_i x_i y_i, added up in double precision if there is any, in units in which no product underflows."""
    products = jax.tree.map(lambda a, b: jnp.sum((unit * a) * (unit * b), dtype=jnp.result_type(float)), x, y)
    return total(products) / unit.astype(jnp.result_type(float)) ** 2


def of_member(given: Drive, s: Array, v: Coefficient) -> Field:
    """One field of w for member s, from the entry of v(h) that belongs to it."""
    assert given.multiplier is not None
    assert given.defect is not None
    m = given.multiplier[s] / given.defect.unit
    return map_leaves(lambda g, v: (m * v).astype(g.dtype) * g, given.defect.mean, v)


def credible(a: Attempt, z: Field) -> Array:
    """The factor ≤ 1 that brings residuals z of errors back to what the residuals of the filter allow.

    In truth, the residual of the filter is that of its error. Where stability limits the steps of an EK0, the
    choice of steps keeps the error that flickers small. The linear recursion of members knows nothing of
    that: they would explode.
    """
    assert a.drive is not None
    kind = dtype(z)
    if a.drive.defect is None:
        return jnp.ones((), kind)
    recent = a.drive.defect.residual
    unit = jnp.where(recent > 0, CREDIBLE * recent, 1).astype(kind)
    size = rms(jax.tree.map(lambda x: x / unit, z))
    return jnp.where(size > 1, 1 / size, 1).astype(kind)


def calmed(model: Filter, factor: Array, rows: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rows of an error, of which the part that flickers is scaled; that of an EK0 alone does.

    At the limit of stability, next to all of it is in the derivatives from the second one on, if there are
    enough of them. Then y and y' are left alone, so that errors that do not flicker stay what they are.
    """
    if not model.information.is_explicit:
        return rows
    kept = 2 if model.prior.order > 2 else 0
    return (*rows[:kept], *(jax.tree.map(lambda x: factor * x, row) for row in rows[kept:]))
