"""Honest uncertainty: an ensemble of the filter's errors, transported by the true Jacobian.

For any gain K the error e = x − m of a filter obeys, to first order,

    e ← (I − K H)(Φ e + w),

with the true linearisation H of the information operator, whatever the filter itself knows of it; w is what
the prior's extrapolation misses in a step. A few *ensemble members* e are carried along beside the mean, each
for one JVP per step. They know therefore how the ODE amplifies early errors, and their spread is a standard
deviation at the cost O(S d).

What is w? ``noise="white"`` is the prior's own answer, w ~ N(0, γ² Σ(h)), independent in every step. But
solutions of ODEs are smooth: a step misses w = c v(h), where c is the next derivative of y and v(h) its
Taylor remainder, and c hardly changes from one step to the next. The residual z = −H(Φ e + w) reveals it,
except for two responses to earlier steps, by way of e. A steady one has a known share of z, which a filter
that is given c = 1 throughout can tell (the ``Lag``). One that flickers, changing sign from one step to the
next as it does at the limit of stability, drops out of a mean over two steps. So ``noise="defect"`` drives
member s with

    w = m_s c v(h),    c = the mean over two steps of −α (H v)⁻¹ z,

and random numbers m_s that persist from step to step as far as c does. Errors of smooth solutions then add
up with their signs, as they do in truth, and those of rough ones like independent numbers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, PyTree

from millipode.filter.defects import balanced, calmed, credible, no_defect, of_member
from millipode.filter.ensemble import UNKNOWN, Defect, Errors, Members, Transported, kind_of
from millipode.filter.error import moved_by
from millipode.filter.moving import moved
from millipode.filter.state import Attempt, Filter, State
from millipode.linalg.fields import (
    Coefficient,
    Field,
    Row,
    combine,
    dtype,
    map_leaves,
    safe_sqrt,
    scaled_rms,
    size,
)
from millipode.linalg.randomness import signs
from millipode.model.noise import noise_of
from millipode.model.priors.iwp import powers
from millipode.xla.autodiff import while_loop
from millipode.xla.ordering import Token, after, after_in_branch

# Up to this many unknowns, what the two JVPs of a single error have in common is computed once and stored.
# For larger ones, storing it would take longer than to compute it again.
SMALL = 2**10


def begin(model: Filter, state: State, local: Coefficient, time: Array) -> Members:
    """The ensemble at t₀, where only derivatives may have an error.

    Args:
        model: the filter.
        state: at t₀.
        local: γ̂ at t₀.
        time: the unit of time, of the size of a step.
    """
    plan, y, covariance = model.uncertainty, state.mean[0], state.covariance
    if not isinstance(plan, Transported):
        nothing = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), kind_of(y)), y)
        defect = no_defect(model, y, jnp.ones(1, dtype(y)))._replace(latest=None, mean=None)
        return Members(((nothing,) * (model.prior.order + 1),), time, defect)
    key = jax.random.wrap_key_data(plan.key)
    keys = jax.random.split(jax.random.fold_in(key, 0), plan.members)

    def draw(key: Array) -> tuple[Field, ...]:
        fields = tuple(_correlated(model, x) for x in covariance.draw(key, y, signs))
        if plan.noise == "defect" and not model.diffusion.is_dynamic:
            fields = tuple(map_leaves(jnp.multiply, x, local) for x in fields)
        return tuple(
            jax.tree.map(lambda leaf, c=c: (c * leaf).astype(kind_of(y)), x)
            for c, x in zip(powers(time, len(fields)), fields, strict=True)
        )

    chunks = tuple(jax.vmap(draw)(some) for some in keys.reshape(-1, plan.at_once(y)))
    if plan.sharding is not None:
        chunks = jax.tree.map(lambda x: lax.with_sharding_constraint(x, plan.sharding), chunks)
    if plan.noise == "white":
        return Members(chunks, time, None)
    persistent = balanced(jax.random.normal(jax.random.fold_in(key, 1), (plan.members,), dtype(y)))
    return Members(chunks, time, no_defect(model, y, persistent))


def _correlated(model: Filter, white: Field) -> Field:
    return white if model.space is None else model.space.correlate(white)


def _in_units(row: Row, kind: Any, time: Sequence[Array], unit: ArrayLike = 1) -> Row:
    """A row of Φ for fields of this dtype in units of time^−q, with a result in this ``unit``."""
    return tuple(
        None if p is None else jax.tree.map(lambda x, c=unit / c: (c * x).astype(kind), p)
        for p, c in zip(row, time, strict=True)
    )


def saved(model: Filter, state: State) -> Errors | None:
    """What to keep of the errors of a state."""
    members = state.members
    if members is None:
        return None
    if isinstance(model.uncertainty, Transported):
        return Errors(members.of_y, None)
    size = scaled_rms(jax.tree.map(lambda x: x.astype(dtype(state.mean[0])), members.of_y))
    return Errors(None, jnp.where(state.steps > 0, size, UNKNOWN))


def saved_between(model: Filter, state: State, a: Attempt, h: Array) -> Errors | None:
    """What to keep of the errors within an attempted step, a time h after its start.

    The size of an error is that at the start of the step: predictions are worse than what is left after their
    correction.
    """
    if isinstance(model.uncertainty, Transported):
        return Errors(_between(model, state, a, h), None)
    return saved(model, state)


def _between(model: Filter, state: State, a: Attempt, h: Array) -> Field:
    """The members of y within an attempted step, a time h after its start."""
    given, members, y = a.drive, state.members, state.mean[0]
    assert given is not None
    assert members is not None
    row, variance = model.prior.marginal(h)
    time = powers(members.time, len(row))
    row = _in_units(row, kind_of(y), time)
    v = model.prior.remainder(h)[0]

    def one(error: tuple[Field, ...], s: Array) -> Field:
        if given.defect is not None:
            w = of_member(given, s, v)
        else:
            noise = jax.tree.map(lambda x: x[0], signs(given.number(s), y, 1))
            std = jax.tree.map(safe_sqrt, variance)
            w = map_leaves(lambda x, t, c: t * c * x, _correlated(model, noise), std, a.calibration.gamma)
        return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), combine(row, error), w)

    parts, start = [], 0
    for chunk in members.chunks:
        parts.append(jax.vmap(one)(chunk, start + jnp.arange(_length(chunk))))
        start += _length(chunk)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def advance(
    model: Filter, state: State, a: Attempt, gain: PyTree[Array], token: Token, reverse: bool
) -> Members:
    """Move all members by an accepted step; after a rejected one return them as they are, at no cost.

    A loop of at most one turn, because that happens in place and a conditional would copy.

    Args:
        model: the filter.
        state: at the start of the step. Its members are overwritten.
        a: the attempt.
        gain: of the filter.
        token: known once nobody else reads the old members any more.
        reverse: whether loops must have the form that reverse mode supports.
    """
    members, given = state.members, a.drive
    assert members is not None
    assert given is not None

    def turn(carry: tuple) -> tuple:
        chunks, pending = carry
        move = _moving(model, state, a, gain, pending)
        done, start, wait = [], 0, Token(jnp.zeros((), a.prediction.h.dtype))
        for chunk in chunks:
            # One after the other, so that intermediate results stay in the cache.
            new, wait = move(chunk, start + jnp.arange(_length(chunk)), wait)
            done.append(new)
            start += _length(chunk)
        return tuple(done), jnp.zeros_like(pending)

    pending = token.hold(a.accept)
    chunks, _ = while_loop(
        lambda carry: carry[1], turn, (members.chunks, pending), reverse=reverse, max_steps=1
    )
    defect = _kept(a, members.defect, after(chunks))
    time = jnp.where(a.accept, a.prediction.h, members.time)
    return Members(chunks, time, defect)


def _kept(a: Attempt, old: Defect | None, token: Token) -> Defect | None:
    """The defect after an attempt; its fields overwrite those of the old one once the token is known."""
    assert a.drive is not None
    new = a.drive.defect
    if old is None or new is None:
        return None

    def either(x: PyTree[Array], y: PyTree[Array], token: Token) -> PyTree[Array]:
        return jax.tree.map(lambda x, y: jnp.where(a.accept, token.hold(x), y), x, y)

    numbers = [x._replace(latest=None, mean=None) for x in (new, old)]
    kept = jax.tree.map(lambda x, y: jnp.where(a.accept, x, y), *numbers)
    if old.mean is None:
        return kept
    mean = either(new.mean, old.mean, token)
    return kept._replace(latest=either(new.latest, old.latest, after(mean)), mean=mean)


def _length(chunk: tuple[Field, ...]) -> int:
    return jax.tree.leaves(chunk)[0].shape[0]


# (errors of a chunk, their numbers, a token to wait for) → the moved errors, and a token that waits for them.
Moving = Callable[[tuple[Field, ...], Array, Token], tuple[tuple[Field, ...], Token]]


def _moving(model: Filter, state: State, a: Attempt, gain: PyTree[Array], pending: Array) -> Moving:
    """The recursion for a chunk of members, with f linearised once for all of them."""
    prior, p, y, covariance = model.prior, a.prediction, state.mean[0], state.covariance
    assert state.members is not None
    phi = p.transition.phi
    kind = kind_of(y)
    before, time = powers(state.members.time, len(phi)), powers(p.h, len(phi))
    often = isinstance(model.uncertainty, Transported) or size(y) <= SMALL
    observation = model.information.exactly(p.t, p.y, prior.drift, often)
    drawn = _noise(model, state, a)
    rows = tuple(_in_units(row, kind, before) for row in phi[:2])
    in_units = tuple(_in_units(row, kind, before, c) for row, c in zip(phi, time, strict=True))
    wait_for = after_in_branch(pending)

    def predicted(q: int, error: tuple[Field, ...], s: Array, token: Token) -> Field:
        """Field q of Φ e + w."""
        x = jax.tree.map(jnp.add, combine(rows[q], error), drawn(q, s, 1 + token.zero))
        return jax.tree.map(lambda leaf: leaf.astype(kind), x)

    known = a.corrections.residual.observation.jacobian

    def idle(z: Field) -> Field:
        """What a correction that was not made leaves; of two, none is left out, and nothing is copied."""
        return jax.tree.map(jnp.zeros_like, z) if model.corrections == 2 else z

    def again(begun: Field, z: Field) -> Field:
        """What the error makes of the next residual: z_i = z₁ + (J − F) δ_{i−1}, as corrections do."""
        if a.corrections.gain is None:
            moved = moved_by(model, p, a.corrections.residual._replace(z=z))
        else:
            moved = a.corrections.gain.multiply(z)
        missed = jax.tree.map(jnp.subtract, observation.jacobian.multiply(moved), known.multiply(moved))
        return jax.tree.map(jnp.add, begun, missed)

    def shifts(z: Field, s: Array) -> tuple[Field, ...]:
        """What to subtract from the first two rows of Φ e + w, and from Φ e for all others."""
        found = []
        for q, shift in enumerate(covariance.apply_gain(gain, z)):
            x = jax.tree.map(lambda leaf, q=q: (time[q] * leaf).astype(kind), shift)
            found.append(x if q < 2 else jax.tree.map(jnp.subtract, x, drawn(q, s, time[q])))
        return tuple(found)

    def move(chunk: tuple[Field, ...], numbers: Array, token: Token) -> tuple[tuple[Field, ...], Token]:
        each = _alone if _length(chunk) == 1 else jax.vmap
        first, second = (each(functools.partial(predicted, q, token=token))(chunk, numbers) for q in range(2))

        def branch(taken: Array, function: Callable[[Field, Field], Field], *x: Field) -> Field:
            # What enters and leaves a branch is stored, and not computed again wherever it is used.
            return lax.cond(taken, each(_in_full(function, y)), lambda *x: idle(x[-1]), *x)

        z = begun = branch(pending, observation.of, first, second)
        for i in range(2, 1 + (1 if model.information.is_exact else model.corrections)):
            z = branch(pending & (i <= a.corrections.evaluations), again, begun, z)
        starts = first, jax.tree.map(lambda x: time[1].astype(kind) * x, second)
        calm = functools.partial(calmed, model, credible(a, z))
        shift = calm(each(shifts)(z, numbers))
        new = moved(calm(starts), calm(in_units), chunk, shift, after(z), wait_for)
        return new, Token(wait_for(jax.tree.leaves(new)[-1]).zero.astype(p.h.dtype))

    return move


def _noise(model: Filter, state: State, a: Attempt) -> Callable[[int, Array, ArrayLike], Field]:
    """A function (q, s, unit) → field q of w for member s, times the unit."""
    h, y, given = a.prediction.h, state.mean[0], a.drive
    assert given is not None
    if given.defect is not None:
        remainder = model.prior.remainder(h)
        return lambda q, s, unit: of_member(given, s, jax.tree.map(lambda v: unit * v, remainder[q]))
    noise = noise_of(model.prior, h, state.covariance, y)

    def white(q: int, s: Array, unit: ArrayLike) -> Field:
        field = _correlated(model, noise.draw(given.number(s), y, signs)[q])
        return map_leaves(lambda x, c: unit * c * x, field, a.calibration.gamma)

    return white


def _in_full(function: Callable[[Field, Field], Field], y: Field) -> Callable[[Field, Field], Field]:
    """A function of members, computed in the precision of y."""

    def call(*fields: Field) -> Field:
        fields = jax.tree.map(lambda x: x.astype(dtype(y)), fields)
        return jax.tree.map(lambda x: x.astype(kind_of(y)), function(*fields))

    return call


def _alone(function: Callable) -> Callable:
    """``jax.vmap`` over an axis of length one, without a trace of it in the compiled program."""

    def call(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], args)))

    return call
