"""The defects of steps, which drive ensemble members; ``members`` has the mathematics."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from millipode.filter.ensemble import Defect, Drive, Transported, kind_of
from millipode.filter.state import Attempt, Filter, State
from millipode.linalg.fields import Coefficient, Field, dtype, map_leaves, rms, safe_divide, safe_sqrt, total
from millipode.model.steady import informative_share

# Residuals of members may be this many times those of the filter, of which steps forget this share.
CREDIBLE, FORGET = 3.0, 0.9
# Members with residuals that are this many times larger than that are not to be relied on, and do not grow
# beyond this many times.
DOUBTFUL, MOST = 100 / CREDIBLE, 1000 / CREDIBLE


def no_defect(model: Filter, y: Field, persistent: Float[Array, " s"]) -> Defect:
    """That of no step."""
    nothing, zero = jax.tree.map(lambda x: jnp.zeros(x.shape, kind_of(y)), y), jnp.zeros((), dtype(y))
    return Defect(nothing, nothing, jnp.zeros((), jnp.result_type(float)), zero, zero, zero, persistent, zero)


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
    usual = jnp.where(before.usual > 0, before.usual, h)
    share, usual = informative_share(model.order, state.steps, h, usual)
    v, residual = model.remainder(h), a.corrections.residual
    explained = residual.observation.explain(residual.z, (v[0], v[1]))
    ratio = safe_divide(v[1], before.unit)  # in the units of this step; c itself might overflow
    # A residual that was large does not allow more because steps have grown since.
    recent = jnp.maximum(rms(residual.z), FORGET * jnp.minimum(ratio, 1) * before.residual)
    new = jax.tree.map(lambda x: jnp.where(a.accept, -share * x, 0), explained)  # NaN if rejected
    small = kind_of(residual.z)
    latest = jax.tree.map(lambda x: x.astype(small), new)
    if key is None:
        # Without a mean over two steps: fewer passes, and measured to be as good.
        defect = before._replace(mean=latest, unit=v[1], h=h, usual=usual, residual=recent)
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
    return Drive(key, Defect(latest, mean, square, v[1], h, usual, persistent, recent), multiplier)


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


def contradiction(a: Attempt, z: Field) -> Array:
    """How many times as large as the filter's residuals allow these residuals z of errors are; at least 1.

    In truth, the residual of the filter is that of its error. Where stability limits the steps of an EK0, the
    choice of steps keeps the error that flickers small. The linear recursion of members knows nothing of
    that: they would explode. Nor does it know that the errors of a chaotic solution end at its own size.
    """
    assert a.drive is not None
    kind = dtype(z)
    if a.drive.defect is None:
        return jnp.ones((), kind)
    recent = a.drive.defect.residual
    unit = jnp.where(recent > 0, CREDIBLE * recent, 1).astype(kind)
    return jnp.maximum(rms(jax.tree.map(lambda x: x / unit, z)), 1)


def calmed(model: Filter, contradiction: Array, rows: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rows of an error, of which the part that flickers is scaled; that of an EK0 alone does.

    At the limit of stability, next to all of it is in the derivatives from the second one on, if there are
    enough of them. Then y and y' are left alone, so that errors that do not flicker stay what they are, up to
    a bound.
    """
    bounded = jnp.minimum(1, MOST / contradiction)
    flickering = 1 / contradiction if model.information.is_explicit else bounded
    kept = 2 if model.prior.order > 2 else 0
    factors = (bounded if q < kept else flickering for q in range(len(rows)))
    return tuple(jax.tree.map(lambda x, c=c: c * x, row) for row, c in zip(rows, factors, strict=True))
