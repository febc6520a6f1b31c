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
except for two responses to earlier steps, by way of e. A steady one has a known share of z
(``steady.informative_share``). One that flickers, changing sign from one step to the next as it does at the
limit of stability, drops out of a mean over two steps. So ``noise="defect"`` drives
member s with

    w = m_s c v(h),    c = the mean over two steps of −α (H v)⁻¹ z,

and random numbers m_s that persist from step to step as far as c does. Errors of smooth solutions then add
up with their signs, as they do in truth, and those of rough ones like independent numbers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from millipode.filter.defects import balanced, no_defect, of_member
from millipode.filter.ensemble import SMALL, UNKNOWN, Defect, Errors, Members, Transported, kind_of
from millipode.filter.recursion import all_at_once, correlated, in_place, in_units, length
from millipode.filter.state import Attempt, Filter, State
from millipode.linalg.fields import (
    Coefficient,
    Field,
    combine,
    dtype,
    map_leaves,
    safe_sqrt,
    scaled_rms,
    size,
)
from millipode.linalg.randomness import signs
from millipode.model.priors.iwp import powers
from millipode.xla.autodiff import while_loop
from millipode.xla.ordering import Token, after


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
        return Members(((nothing,) * (model.prior.order + 1),), time, defect, jnp.ones_like(time))
    key = jax.random.wrap_key_data(plan.key)
    keys = jax.random.split(jax.random.fold_in(key, 0), plan.members)

    def draw(key: Array) -> tuple[Field, ...]:
        fields = tuple(correlated(model, x) for x in covariance.draw(key, y, signs))
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
        return Members(chunks, time, None, jnp.ones_like(time))
    persistent = balanced(jax.random.normal(jax.random.fold_in(key, 1), (plan.members,), dtype(y)))
    return Members(chunks, time, no_defect(model, y, persistent), jnp.ones_like(time))


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
    row = in_units(row, kind_of(y), members.time)
    v = model.remainder(h)[0]

    def one(error: tuple[Field, ...], s: Array) -> Field:
        if given.defect is not None:
            w = of_member(given, s, v)
        else:
            noise = jax.tree.map(lambda x: x[0], signs(given.number(s), y, 1))
            std = jax.tree.map(safe_sqrt, variance)
            w = map_leaves(lambda x, t, c: t * c * x, correlated(model, noise), std, a.calibration.gamma)
        return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), combine(row, error), w)

    parts, start = [], 0
    for chunk in members.chunks:
        parts.append(jax.vmap(one)(chunk, start + jnp.arange(length(chunk))))
        start += length(chunk)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def advance(
    model: Filter, state: State, a: Attempt, gains: tuple[PyTree[Array], ...], token: Token, reverse: bool
) -> Members:
    """Move all members by an accepted step; after a rejected one return them as they are, at no cost.

    Args:
        model: the filter.
        state: at the start of the step. Its members are overwritten.
        a: the attempt.
        gains: of the filter's moves.
        token: known once nobody else reads the old members any more.
        reverse: whether loops must have the form that reverse mode supports.
    """
    members = state.members
    assert members is not None
    time = jnp.where(a.accept, a.prediction.h, members.time)
    if size(state.mean[0]) <= SMALL and len(members.chunks) == 1:
        chunk, worst = all_at_once(model, state, a, gains)
        worst = jnp.where(a.accept, worst, members.contradiction)
        return Members((chunk,), time, _kept(a, members.defect, after(chunk)), worst)

    def turn(carry: tuple) -> tuple:
        chunks, worst, pending = carry
        move = in_place(model, state, a, gains, pending)
        done, start, wait = [], 0, Token(jnp.zeros((), a.prediction.h.dtype))
        worst = jnp.ones_like(worst)
        for chunk in chunks:
            # One after the other, so that intermediate results stay in the cache.
            new, contradiction, wait = move(chunk, start + jnp.arange(length(chunk)), wait)
            done.append(new)
            worst = jnp.maximum(worst, contradiction)
            start += length(chunk)
        return tuple(done), worst, jnp.zeros_like(pending)

    # A loop of at most one turn, because that happens in place and a conditional would copy.
    start = members.chunks, members.contradiction, token.hold(a.accept)
    chunks, worst, _ = while_loop(lambda carry: carry[2], turn, start, reverse=reverse, max_steps=1)
    return Members(chunks, time, _kept(a, members.defect, after(chunks)), worst)


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
