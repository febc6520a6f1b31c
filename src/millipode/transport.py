"""Honest uncertainty: the filter's error, transported by the true Jacobian.

For any gain K the error e = x − m of a filter obeys, to first order,

    e ← (I − K H)(Φ e + w),    H = E₁ − J E₀,

with all of the Jacobian J of f, whatever the filter itself knows of it; w is what the prior's extrapolation
misses in a step. A few *members* e carried along beside the mean, each for one JVP per step, know therefore
how the ODE amplifies early errors, and their spread is a standard deviation at the cost O(S d).

What is w? ``noise="white"`` is the prior's own answer, w ~ N(0, γ² Σ(h)), independent in every step. But
solutions of ODEs are smooth: what a step misses is w = c v(h), where c is the next derivative of y and v(h)
its Taylor remainder, and c hardly changes from one step to the next. The residual z = −H(Φ e + w) reveals
it, but for two echoes of earlier steps, by way of e. A steady one has a known share of z, which a filter
that is given c = 1 throughout can tell (the ``Lag``). What flickers, changing sign from one step to the
next as it does at the limit of stability, drops out of a mean over two steps. So ``noise="defect"`` drives
member s with

    w = m_s c v(h),    c = the mean over two steps of −α (H v)⁻¹ z,

and random numbers m_s that persist from step to step as far as c does. Errors of smooth solutions then add
up with their signs, as they do in truth, and those of rough ones like independent numbers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from millipode.autodiff import while_loop, zero_after
from millipode.covariance import Covariance
from millipode.covariance.kronecker import Kronecker
from millipode.covariance.protocol import signs
from millipode.diffusion import ConstantDiffusion
from millipode.fields import Field, Scale, combine, dtype, map_leaves, safe_divide, safe_sqrt, size, total
from millipode.inplace import moved
from millipode.jacobians import Jacobian
from millipode.posterior import noise_of
from millipode.priors import IWP, Row
from millipode.priors.iwp import powers

# Members are noisy by themselves: more digits would cost time and memory, and say nothing.
KIND = jnp.float32
# So many numbers are moved at once: members of small problems together, those of large ones one by one.
TOGETHER = 2**19
# There are at most so many chunks, because each is a program of its own to compile.
CHUNKS = 32


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
        chunk: how many members are moved at once; automatic by default, and one if they are large.
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
        divisors = [k for k in range(1, self.members + 1) if self.members % k == 0]
        least = next(k for k in divisors if self.members <= k * CHUNKS)
        return max((k for k in divisors if k * size(y) <= TOGETHER), default=least)


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


class Defect(NamedTuple):
    """What a step has missed, and what goes with it from one step to the next.

    Attributes:
        latest: c v₁ of the last step alone, in the units of a residual.
        mean: that of the last two steps, weighted by their lengths.
        square: the sum of its squares.
        unit: v₁ of the last step; 0 before the first one.
        h: the last step; 0 before the first one.
        persistent: the part of m that persists.
        lag: what part of a residual is news.
    """

    latest: Field
    mean: Field
    square: Array
    unit: Array
    h: Array
    persistent: Float[Array, " s"]
    lag: Lag


class Members(NamedTuple):
    """What is carried from step to step.

    Attributes:
        chunks: e, some members at a time: one field per field of the prior's state, members in front. Field q
            is in units of time^−q, so that it has a size that ``KIND`` can hold.
        time: the unit of time.
        steps: how many they have made, for the random numbers.
        defect: of the last step, unless the noise is white.
    """

    chunks: tuple[tuple[Field, ...], ...]
    time: Array
    steps: Int[Array, ""]
    defect: Defect | None

    @property
    def of_y(self) -> Field:
        """All members of the error of y."""
        return jax.tree.map(lambda *x: jnp.concatenate(x), *(chunk[0] for chunk in self.chunks))


class Drive(NamedTuple):
    """What moves the members in one step: random numbers, and unless the noise is white a defect and m."""

    key: Array
    defect: Defect | None = None
    multiplier: Float[Array, " s"] | None = None


def begin(model: Any, covariance: Covariance, local: Scale, y: Field, time: Array) -> Members:
    """Members of the error at t₀, where only derivatives may have one; ``time`` is of the size of a step."""
    plan: Transported = model.uncertainty
    key = jax.random.wrap_key_data(plan.key)
    keys = jax.random.split(jax.random.fold_in(key, 0), plan.members)

    def draw(key: Array) -> tuple[Field, ...]:
        fields = covariance.draw(key, y, signs)
        if model.space is not None:
            fields = tuple(model.space.correlate(x) for x in fields)
        if plan.noise == "defect" and isinstance(model.diffusion, ConstantDiffusion):
            fields = tuple(map_leaves(jnp.multiply, x, local) for x in fields)
        return tuple(
            jax.tree.map(lambda leaf, c=c: (c * leaf).astype(KIND), x)
            for c, x in zip(powers(time, len(fields)), fields, strict=True)
        )

    chunks = tuple(jax.vmap(draw)(some) for some in keys.reshape(-1, plan.at_once(y)))
    if plan.sharding is not None:
        chunks = jax.tree.map(lambda x: lax.with_sharding_constraint(x, plan.sharding), chunks)
    steps = jnp.zeros((), jnp.int32)
    if plan.noise == "white":
        return Members(chunks, time, steps, None)
    n, kind = model.prior.order + 1, dtype(y)
    lag = Lag(Kronecker(jnp.zeros((n - 1, n), kind)), jnp.zeros(n, kind))
    persistent = _balanced(jax.random.normal(jax.random.fold_in(key, 1), (plan.members,), kind))
    nothing, zero = jax.tree.map(lambda x: jnp.zeros(x.shape, KIND), y), jnp.zeros((), kind)
    defect = Defect(nothing, nothing, jnp.zeros((), float), zero, zero, persistent, lag)
    return Members(chunks, time, steps, defect)


def _balanced(x: Float[Array, " s"]) -> Float[Array, " s"]:
    """With a mean square of 1 exactly, so that a single persistent defect has the right spread for any S."""
    return x * lax.rsqrt(jnp.mean(x**2))


def drive(model: Any, members: Members, a: Any, accept: Array) -> Drive:
    """What an attempted step does to the members, from its residual."""
    plan: Transported = model.uncertainty
    key = jax.random.fold_in(jax.random.wrap_key_data(plan.key), 2 + members.steps)
    if plan.noise == "white":
        return Drive(key)
    assert members.defect is not None
    before = members.defect
    news, lag = _news(model.prior.order, before.lag, a.h)
    v = model.prior.remainder(a.h)
    explained = _explained(a.jacobian, jax.tree.map(lambda x: x / v[1], v[0]), a.z)
    ratio = safe_divide(v[1], before.unit)  # in the units of this step; c itself might overflow
    share = a.h / (a.h + before.h)
    new = jax.tree.map(lambda x: jnp.where(accept, -news * x, 0), explained)  # NaN if rejected
    mean = jax.tree.map(lambda x, y: share * x + (1 - share) * ratio * y, new, before.latest)
    latest, mean = jax.tree.map(lambda x: x.astype(KIND), (new, mean))
    scale = lax.rsqrt(jnp.where(before.square > 0, before.square, 1)).astype(KIND)
    square, product = _inner(mean, mean, scale), _inner(mean, before.mean, scale)
    rho = safe_divide(product, safe_sqrt(square) * safe_sqrt(before.square))
    rho = jnp.clip(rho, 0, 1).astype(before.persistent.dtype)
    rho = jnp.where(before.unit > 0, rho, 1)  # the first step has nothing to differ from
    fresh = jax.random.normal(key, (2, plan.members), rho.dtype)
    rest = safe_sqrt(1 - rho**2)
    persistent = _balanced(rho * before.persistent + rest * fresh[0])
    multiplier = persistent + rest * _balanced(fresh[1])
    return Drive(key, Defect(latest, mean, square, v[1], a.h, persistent, lag), multiplier)


def _explained(jacobian: Any, ratio: Scale, z: Field) -> Field:
    """v₁ (H v)⁻¹ z, with v₀/v₁ and what the filter knows of F_y; growth is not stiff, and left out."""
    if jacobian is None:
        return z
    if isinstance(jacobian, Jacobian):
        return jacobian.solve(1.0, ratio, z)
    return map_leaves(lambda z, j, b: z / (1 - b * jnp.minimum(j, 0)), z, jacobian, ratio)


def _news(order: int, lag: Lag, h: Array) -> tuple[Array, Lag]:
    """The share α of a residual that is not an echo of earlier steps, for a constant c."""
    prior = IWP(order)
    transition, v = prior.transition(h), jnp.stack(prior.remainder(h))
    moved = jnp.sum(transition.matrix * lag.error, axis=1) + v
    corrected = lag.filter.correct(transition, jnp.ones_like(h), None, moved[1])
    share = jnp.where(moved[1] > 0, safe_divide(v[1], moved[1]), 1)
    return share, Lag(corrected.covariance, moved - corrected.gain * moved[1])


def _inner(x: Field, y: Field, scale: Array) -> Array:
    """Σ_i x_i y_i, added up in double precision if there is any; scaled, so that no product underflows."""
    scaled = jax.tree.map(lambda a, b: jnp.sum((scale * a) * (scale * b), dtype=float), x, y)
    return total(scaled) / scale.astype(float) ** 2


def _defect(given: Drive, s: Array, v: Scale) -> Field:
    """One field of w for member s, by the entry of v(h) that goes with it."""
    assert given.multiplier is not None
    assert given.defect is not None
    m = given.multiplier[s] / given.defect.unit
    return map_leaves(lambda g, v: (m * v).astype(KIND) * g, given.defect.mean, v)


def _in_units(row: Row, time: Sequence[Array], unit: ArrayLike = 1) -> Row:
    """A row of Φ for fields in units of time^−q, with a result in this ``unit``."""
    return tuple(
        None if p is None else jax.tree.map(lambda x, c=unit / c: (c * x).astype(KIND), p)
        for p, c in zip(row, time, strict=True)
    )


def between(model: Any, state: Any, a: Any, h: Array) -> Field:
    """The members of y within a step, a time h after its start."""
    given, y = a.drive, state.mean[0]
    row, variance = model.prior.marginal(h)
    time = powers(state.members.time, len(row))
    row = _in_units(row, time)
    v = model.prior.remainder(h)[0]

    def one(error: tuple[Field, ...], s: Array) -> Field:
        if given.defect is not None:
            w = _defect(given, s, v)
        else:
            noise = jax.tree.map(lambda x: x[0], signs(jax.random.fold_in(given.key, s), y, 1))
            noise = noise if model.space is None else model.space.correlate(noise)
            std = jax.tree.map(safe_sqrt, variance)
            w = map_leaves(lambda x, t, c: t * c * x, noise, std, a.filter_scale)
        return jax.tree.map(lambda x, y: (x + y).astype(KIND), combine(row, error), w)

    parts, start = [], 0
    for chunk in state.members.chunks:
        parts.append(jax.vmap(one)(chunk, start + jnp.arange(_length(chunk))))
        start += _length(chunk)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def advance(model: Any, state: Any, a: Any, gain: Any, accept: Array, reverse: bool) -> Members:
    """Move all members by one step, or not at all; nothing is computed for a rejected one.

    A loop of at most one turn, because that happens in place and a conditional would copy.
    """
    members, given = state.members, a.drive

    def turn(carry: tuple) -> tuple:
        chunks, pending = carry
        move = _moving(model, state, a, gain, pending)
        done, start, wait = [], 0, jnp.zeros((), a.h.dtype)
        for chunk in chunks:
            # One after the other: what is between then stays in the cache.
            new, wait = move(chunk, start + jnp.arange(_length(chunk)), wait)
            done.append(new)
            start += _length(chunk)
        return tuple(done), jnp.zeros_like(pending)

    chunks, _ = while_loop(
        lambda carry: carry[1], turn, (members.chunks, accept), reverse=reverse, max_steps=1
    )
    defect = jax.tree.map(lambda x, y: jnp.where(accept, x, y), given.defect, members.defect)
    steps = members.steps + accept.astype(members.steps.dtype)
    return Members(chunks, members.time, steps, defect)


def _length(chunk: tuple[Field, ...]) -> int:
    return jax.tree.leaves(chunk)[0].shape[0]


# (errors of a chunk, their numbers, a zero to wait for) → what they become, and a zero that waits for it.
Moving = Callable[[tuple[Field, ...], Array, Array], tuple[tuple[Field, ...], Array]]


def _moving(model: Any, state: Any, a: Any, gain: Any, pending: Array) -> Moving:
    """The recursion for a chunk of members, with f linearised once for all of them."""
    basis, field, prior, given = model.linearisation.basis, model.vector_field, model.prior, a.drive
    covariance, y, phi, remainder = state.covariance, state.mean[0], a.transition.phi, prior.remainder(a.h)
    time = powers(state.members.time, len(phi))
    _, jvp = jax.linearize(lambda x: basis.to_modes(field(a.t, basis.from_modes(x))), a.predicted)
    noise = None if model.uncertainty.noise == "defect" else noise_of(prior, a.h, covariance, y)
    rows = tuple(_in_units(row, time) for row in phi[:2])
    scaled = tuple(_in_units(row, time, c) for row, c in zip(phi, time, strict=True))

    def drawn(q: int, s: Array, unit: ArrayLike = 1) -> Field:
        """Field q of w, times the unit."""
        if noise is None:
            return _defect(given, s, jax.tree.map(lambda v: unit * v, remainder[q]))
        field = noise.draw(jax.random.fold_in(given.key, s), y, signs)[q]
        field = field if model.space is None else model.space.correlate(field)
        return map_leaves(lambda x, c: unit * c * x, field, a.filter_scale)

    def predicted(q: int, error: tuple[Field, ...], s: Array, wait: Array) -> Field:
        """Field q of Φ e + w."""
        x = jax.tree.map(jnp.add, combine(rows[q], error), drawn(q, s, 1 + wait))
        return jax.tree.map(lambda leaf: leaf.astype(KIND), x)

    def residual(first: Field, second: Field) -> Field:
        first, second = jax.tree.map(lambda x: x.astype(dtype(y)), (first, second))
        z, _ = prior.residual(first, second, jvp(first), None)
        return jax.tree.map(lambda x: x.astype(KIND), z)

    def shifts(z: Field, s: Array) -> tuple[Field, ...]:
        """What to subtract from the first two rows of Φ e + w, and from Φ e for all others."""
        found = []
        for q, shift in enumerate(covariance.apply_gain(gain, z)):
            x = jax.tree.map(lambda leaf, q=q: (time[q] * leaf).astype(KIND), shift)
            found.append(x if q < 2 else jax.tree.map(jnp.subtract, x, drawn(q, s, time[q])))
        return tuple(found)

    def after(x: Array) -> Array:
        """A zero; in a branch, because XLA would compute a single number again rather than wait for it."""
        return lax.cond(pending, zero_after, lambda x: jnp.zeros((), x.dtype), x)

    def move(chunk: tuple[Field, ...], numbers: Array, wait: Array) -> tuple[tuple[Field, ...], Array]:
        each = _alone if _length(chunk) == 1 else jax.vmap
        first, second = (each(functools.partial(predicted, q, wait=wait))(chunk, numbers) for q in range(2))
        # In a branch, because what enters and leaves it is stored and not computed again wherever it is used.
        z = lax.cond(pending, each(residual), lambda *x: jax.tree.map(jnp.zeros_like, x[1]), first, second)
        starts = first, jax.tree.map(lambda x: time[1].astype(KIND) * x, second)
        new = moved(starts, scaled, chunk, each(shifts)(z, numbers), zero_after(z), after)
        return new, after(jax.tree.leaves(new)[-1]).astype(a.h.dtype)

    return move


def _alone(function: Callable) -> Callable:
    """``vmap`` over an axis of length one, without a trace of it in the compiled program."""

    def call(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

    return call
