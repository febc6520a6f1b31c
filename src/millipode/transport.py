"""Honest uncertainty: the filter's error, transported by the true Jacobian.

For any gain K the error e = x − m of a filter obeys, to first order,

    e ← (I − K H)(Φ e + w),    H = E₁ − J E₀,

with all of the Jacobian J of f, whatever the filter itself knows of it; w is what the prior's extrapolation
misses in a step. A few *members* e carried along beside the mean, each for one JVP per step, know therefore
how the ODE amplifies early errors, and their spread is a standard deviation at the cost O(S d).

What is w? ``noise="white"`` is the prior's own answer, w ~ N(0, γ² Σ(h)), independent in every step. But
solutions of ODEs are smooth: what a step misses is w = c v(h), where c is the next derivative of y and v(h)
its Taylor remainder, and c hardly changes from one step to the next. The residual z = −H(Φ e + w) reveals
it. Part of z is an echo of earlier steps, by way of e; which part, a filter that is given c = 1 throughout
can tell (the ``Lag``). So ``noise="defect"`` drives member s with

    w = m_s c v(h),    c = −α (H v)⁻¹ z,

and random numbers m_s that persist from step to step as far as the residual does. Errors of smooth solutions
then add up with their signs, as they do in truth; where residuals flicker (at the limit of stability they
change sign in every step), errors add up like those of independent steps.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from millipode.autodiff import while_loop, zero_after
from millipode.covariance import Covariance
from millipode.covariance.kronecker import Kronecker
from millipode.covariance.protocol import signs
from millipode.diffusion import ConstantDiffusion
from millipode.fields import Field, Scale, combine, dtype, map_leaves, safe_divide, safe_sqrt, size, total
from millipode.jacobians import Jacobian
from millipode.posterior import noise_of
from millipode.priors import IWP

# So many numbers are moved at once: members of small problems together, those of large ones one by one.
TOGETHER = 2**16


def _key_data(key: Any) -> Any:
    """A key as plain numbers, which can be traced, hashed and saved like all others."""
    if key is None:
        return np.asarray(jax.random.key_data(jax.random.key(0)))
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if is_key and key.ndim == 0:
        return jax.random.key_data(key)
    if getattr(key, "dtype", None) == jnp.uint32 and getattr(key, "ndim", None) == 1:
        return key
    raise TypeError(f"Transported: key must be one key such as jax.random.key(0), got {key!r}.")


class Transported(eqx.Module):
    """Uncertainty that knows how the ODE amplifies errors: for ``mp.solve(..., uncertainty=...)``.

    A number of members of the filter's error are carried along beside the mean, with the true Jacobian (one
    JVP of f per member and step). ``sol.std`` is their spread, ``sol.members`` the members themselves, and
    ``sol.filter_std`` what the filter would have said. The mean and the steps stay what they are.

    Args:
        members: how many, at least 2. Their spread is noisy by about 1/√(2·members).
        key: of the random numbers; ``jax.random.key(0)`` by default. The same key gives the same members.
        noise: ``"defect"`` (the steps' own defects, which persist as far as residuals do), or ``"white"``
            (the prior's noise, independent in every step: with it, and a dense EK1, members have the
            filter's own covariance).
        chunk: how many members are moved at once; automatic by default, one if they are large.
        sharding: of an array with the members' axis in front, to spread members over devices.

    >>> import jax.numpy as jnp, millipode as mp
    >>> sol = mp.solve(lambda t, y: -y, jnp.ones(2), (0.0, 1.0), uncertainty=mp.Transported(members=8))
    >>> sol.members.shape == (8, *sol.mean.shape), sol.std.shape == sol.mean.shape
    (True, True)
    """

    members: int = eqx.field(static=True)
    key: Any
    noise: Literal["defect", "white"] = eqx.field(static=True)
    chunk: int | None = eqx.field(static=True)
    sharding: Any = eqx.field(static=True)

    def __init__(
        self,
        members: int = 16,
        key: Array | None = None,
        noise: Literal["defect", "white"] = "defect",
        chunk: int | None = None,
        sharding: Any = None,
    ):
        self.members = _count(members, "members", 2)
        self.key = _key_data(key)
        if noise not in ("defect", "white"):
            raise ValueError(f"Transported: noise must be 'defect' or 'white', got {noise!r}.")
        self.noise = noise
        self.chunk = None if chunk is None else _count(chunk, "chunk", 1)
        if self.chunk is not None and self.members % self.chunk:
            raise ValueError(f"Transported: chunk must divide members = {members}, got {chunk}.")
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise TypeError(f"Transported: sharding must be a jax.sharding.Sharding, got {sharding!r}.")
        self.sharding = sharding

    def at_once(self, y: Field) -> int:
        """How many members to move at once; those that are spread over devices all together."""
        if self.chunk is not None:
            return self.chunk
        if self.sharding is not None:
            return self.members
        fitting = [k for k in range(1, self.members + 1) if self.members % k == 0 and k * size(y) <= TOGETHER]
        return max(fitting, default=1)


def _count(number: Any, name: str, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise TypeError(f"Transported: {name} must be an integer, got {number!r}.")
    if number < least:
        raise ValueError(f"Transported: {name} must be at least {least}, got {number}.")
    return int(number)


class Lag(NamedTuple):
    """The error of an EK0 per unit of a constant c, and the filter that makes it.

    Its residual would be H (Φ ``error`` + v), of which H v is news and the rest an echo.
    """

    filter: Kronecker
    error: Float[Array, " n"]


class Members(NamedTuple):
    """What is carried from step to step.

    Attributes:
        error: e, one field per field of the prior's state, the members' axis in front.
        steps: how many they have made, for the random numbers.
        persistent: the part of m that persists.
        defect: of the last step.
        lag: what part of a residual is news.
    """

    error: tuple[Field, ...]
    steps: Int[Array, ""]
    persistent: Float[Array, " s"] | None
    defect: Field | None
    lag: Lag | None


class Drive(NamedTuple):
    """What moves the members in one step.

    Attributes:
        key: of the step.
        multiplier: m, of the defect noise.
        persistent: the next one.
        defect: c v₁, in the units of a residual.
        unit: v₁.
        lag: the next one.
    """

    key: Array
    multiplier: Float[Array, " s"] | None = None
    persistent: Float[Array, " s"] | None = None
    defect: Field | None = None
    unit: Array | None = None
    lag: Lag | None = None


def begin(model: Any, covariance: Covariance, local: Scale, y: Field) -> Members:
    """Members of the error at t₀, where only derivatives may have one."""
    plan: Transported = model.uncertainty
    key = jax.random.wrap_key_data(plan.key)
    keys = jax.random.split(jax.random.fold_in(key, 0), plan.members)

    def draw(key: Array) -> tuple[Field, ...]:
        fields = covariance.draw(key, y, signs)
        if model.space is not None:
            fields = tuple(model.space.correlate(x) for x in fields)
        if plan.noise == "defect" and isinstance(model.diffusion, ConstantDiffusion):
            fields = tuple(map_leaves(jnp.multiply, x, local) for x in fields)
        return fields

    error = lax.map(draw, keys, batch_size=plan.at_once(y))
    if plan.sharding is not None:
        error = jax.tree.map(lambda x: lax.with_sharding_constraint(x, plan.sharding), error)
    steps = jnp.zeros((), jnp.int32)
    if plan.noise == "white":
        return Members(error, steps, None, None, None)
    n, kind = model.prior.order + 1, dtype(y)
    lag = Lag(Kronecker(jnp.zeros((n - 1, n), kind)), jnp.zeros(n, kind))
    persistent = _balanced(jax.random.normal(jax.random.fold_in(key, 1), (plan.members,), kind))
    return Members(error, steps, persistent, jax.tree.map(jnp.zeros_like, y), lag)


def _balanced(x: Float[Array, " s"]) -> Float[Array, " s"]:
    """With a mean square of 1 exactly, so that a single persistent defect has the right spread for any S."""
    return x * lax.rsqrt(jnp.mean(x**2))


def drive(model: Any, members: Members, a: Any, accept: Array) -> Drive:
    """What an attempted step does to the members, from its residual."""
    plan: Transported = model.uncertainty
    key = jax.random.fold_in(jax.random.wrap_key_data(plan.key), 2 + members.steps)
    if plan.noise == "white":
        return Drive(key)
    assert members.lag is not None
    assert members.persistent is not None
    news, lag = _news(model.prior.order, members.lag, a.h)
    v = model.prior.remainder(a.h)
    defect = map_leaves(
        lambda z, s: jnp.where(accept, -news * s * z, 0),  # a rejected residual may be NaN
        _explained(a.jacobian, v, a.z),
        v[1],
    )
    rho = jnp.maximum(_correlation(defect, members.defect), 0)
    fresh = jax.random.normal(key, (2, plan.members), rho.dtype)
    persistent = _balanced(rho * members.persistent + safe_sqrt(1 - rho**2) * fresh[0])
    multiplier = persistent + safe_sqrt(1 - rho**2) * _balanced(fresh[1])
    return Drive(key, multiplier, persistent, defect, v[1], lag)


def _explained(jacobian: Any, v: tuple[Scale, ...], z: Field) -> Field:
    """(H v)⁻¹ z = (v₁ − v₀ F_y)⁻¹ z, with what the filter knows of F_y; growth is not stiff, and left out."""
    if isinstance(jacobian, Jacobian):
        return jacobian.solve(v[1], v[0], z)
    if jacobian is None:
        return jax.tree.map(lambda leaf: leaf / v[1], z)
    return map_leaves(lambda z, j, v0: z / (v[1] - v0 * jnp.minimum(j, 0)), z, jacobian, v[0])


def _news(order: int, lag: Lag, h: Array) -> tuple[Array, Lag]:
    """The share α of a residual that is not an echo of earlier steps, for a constant c."""
    prior = IWP(order)
    transition, v = prior.transition(h), jnp.stack(prior.remainder(h))
    moved = jnp.sum(transition.matrix * lag.error, axis=1) + v
    corrected = lag.filter.correct(transition, jnp.ones_like(h), None, moved[1])
    share = jnp.where(moved[1] > 0, safe_divide(v[1], moved[1]), 1)
    return share, Lag(corrected.covariance, moved - corrected.gain * moved[1])


def _correlation(x: Field, y: Field) -> Array:
    xy, xx, yy = (total(jax.tree.map(jnp.multiply, a, b)) for a, b in ((x, y), (x, x), (y, y)))
    return jnp.clip(safe_divide(xy, safe_sqrt(xx) * safe_sqrt(yy)), -1, 1)


def _driven(moved: Field, given: Drive, s: Array, v: Scale) -> Field:
    """Φ e + w, field by field, for member s."""
    assert given.multiplier is not None
    assert given.unit is not None
    m = given.multiplier[s] / given.unit
    return map_leaves(lambda x, g, v: x + (m * v) * g, moved, given.defect, v)


def between(model: Any, state: Any, a: Any, h: Array) -> Field:
    """The members of y within a step, a time h after its start."""
    plan: Transported = model.uncertainty
    members, given = state.members, a.drive
    row, variance = model.prior.marginal(h)
    y = state.mean[0]

    def one(error: tuple[Field, ...], s: Array) -> Field:
        moved = combine(row, error)
        if plan.noise == "defect":
            return _driven(moved, given, s, model.prior.remainder(h)[0])
        noise = jax.tree.map(lambda x: x[0], signs(jax.random.fold_in(given.key, s), y, 1))
        if model.space is not None:
            noise = model.space.correlate(noise)
        std = jax.tree.map(safe_sqrt, variance)
        return map_leaves(lambda x, e, t, c: x + t * c * e, moved, noise, std, a.filter_scale)

    return lax.map(lambda pair: one(*pair), (members.error, jnp.arange(plan.members)))


def advance(model: Any, state: Any, a: Any, gain: Any, accept: Array, reverse: bool) -> Members:
    """Move all members by one step, or not at all; nothing is computed for a rejected one.

    A loop of at most one turn around one over the members, because loops work in place.
    """
    plan: Transported = model.uncertainty
    members, given = state.members, a.drive
    chunk = plan.at_once(state.mean[0])

    def turn(carry: tuple) -> tuple:
        error, pending = carry
        move = _moving(model, state.covariance, a, gain, state.mean[0])

        def visit(inner: tuple) -> tuple:
            error, start = inner
            return _in_place(move, error, start, chunk), start + chunk

        error, _ = while_loop(
            lambda inner: inner[1] < plan.members,
            visit,
            (error, jnp.zeros((), jnp.int32)),
            reverse=reverse,
            max_steps=plan.members // chunk,
        )
        return error, jnp.zeros_like(pending)

    error, _ = while_loop(lambda carry: carry[1], turn, (members.error, accept), reverse=reverse, max_steps=1)

    def kept(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(accept, x, y), new, old)

    return Members(
        error,
        members.steps + accept.astype(members.steps.dtype),
        kept(given.persistent, members.persistent),
        kept(given.defect, members.defect),
        kept(given.lag, members.lag),
    )


# (error, its number) → what it becomes.
Moving = Callable[[tuple[Field, ...], Array], tuple[Field, ...]]


def _moving(model: Any, covariance: Covariance, a: Any, gain: Any, y: Field) -> Moving:
    """The recursion for one member, with f linearised once for all of them."""
    basis, field, prior, given = model.linearisation.basis, model.vector_field, model.prior, a.drive
    phi, remainder = a.transition.phi, prior.remainder(a.h)
    _, jvp = jax.linearize(lambda x: basis.to_modes(field(a.t, basis.from_modes(x))), a.predicted)
    noise = None if model.uncertainty.noise == "defect" else noise_of(prior, a.h, covariance, y)

    def drawn(s: Array) -> tuple[Field, ...]:
        assert noise is not None
        fields = noise.draw(jax.random.fold_in(given.key, s), y, signs)
        if model.space is not None:
            fields = tuple(model.space.correlate(x) for x in fields)
        return tuple(map_leaves(jnp.multiply, x, a.filter_scale) for x in fields)

    def move(error: tuple[Field, ...], s: Array) -> tuple[Field, ...]:
        fresh = drawn(s) if noise is not None else None

        def predicted(q: int) -> Field:
            moved = combine(phi[q], error)
            if fresh is not None:
                return jax.tree.map(jnp.add, moved, fresh[q])
            return _driven(moved, given, s, remainder[q])

        first = predicted(0)
        residual, _ = prior.residual(first, predicted(1), jvp(first), None)
        corrections = covariance.apply_gain(gain, residual)
        return tuple(jax.tree.map(jnp.subtract, predicted(q), x) for q, x in enumerate(corrections))

    return move


def _in_place(move: Moving, error: tuple[Field, ...], start: Array, chunk: int) -> tuple[Field, ...]:
    """Overwrite a chunk of members, field by field.

    Φ is upper triangular, so field q may be overwritten once fields 0 … q−1 are. XLA does so only if the
    order is forced on it, and copies all members otherwise.
    """
    numbers = start + jnp.arange(chunk)
    taken = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, chunk), error)
    written: list[Field] = []
    for old, new in zip(error, jax.vmap(move)(taken, numbers), strict=True):
        place = start + zero_after(written).astype(start.dtype) if written else start
        update = functools.partial(lax.dynamic_update_slice_in_dim, start_index=place, axis=0)
        written.append(jax.tree.map(update, old, new))
    return tuple(written)
