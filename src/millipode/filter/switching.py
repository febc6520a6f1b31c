"""When to go over from explicit steps to implicit ones, and back.

Explicit steps are cheap, and implicit ones may be longer. While steps are explicit, all that we can see is
whether stability limits them (``corrections.is_limited``). While they are implicit, a power iteration on the
Jacobian says how long an explicit step could be at most, so that we can compare how far both would get in the
same time. After a return that came too early, the next change takes twice as much evidence, which bounds what
wrong decisions cost.

EK0 and Kronecker EK1 share their state. But where tolerances are tight, an EK0 has more derivatives than any
stiffly stable gain can use. Those are forgotten when steps become implicit, and unknown when they become
explicit again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.filter.corrections import REAL_LIMITS, is_limited
from millipode.filter.gains import settled
from millipode.filter.state import Attempt, Filter, State
from millipode.linalg.fields import Field

# Stability has limited explicit steps for long enough once they took the time of this many implicit ones, and
# are at least and at most so many. A trial of implicit steps costs no more than that.
WAIT, LEAST, MOST_EXPLICIT = 8.0, 20.0, 1000.0
# Implicit steps get so many to settle: explicit ones at the limit of stability leave noise in the state.
TRIAL = 6.0
# Implicit steps end once so many in succession were dearer than explicit ones, and no longer grew by so much.
DEARER, GROWN = 3.0, 1.1
# If there were fewer cheaper ones than this, they were not worth it, and are tried later the next time.
WORTH = 30.0
# Of what the power iteration allows, explicit steps would be this long: it may not have found all.
SAFE = 0.5
# What an evaluation of f costs in explicit steps, and an iteration of GMRES.
EVALUATION, ITERATION = 0.5, 0.75
# How many times steps become implicit, at most: the last time is for good.
MOST = 32


class Switch(NamedTuple):
    """Which kind of steps to take, and what speaks for the other one.

    Attributes:
        stiff: whether steps are implicit.
        fresh: whether they have just become so or ceased to be so, and the state does not know it yet.
        times: how often they have become so.
        against: what speaks against the present kind of steps.
        worth: how many implicit steps were cheaper than explicit ones, this time.
        patience: how many times as much must speak against explicit steps as at first.
    """

    stiff: Array
    fresh: Array
    times: Array
    against: Array
    worth: Array
    patience: Array


def begin(like: Array) -> Switch:
    """Explicit steps."""
    zero, no = jnp.zeros_like(like), jnp.zeros((), bool)
    return Switch(no, no, jnp.zeros((), jnp.int32), zero, zero, zero + 1)


def after_explicit(switch: Switch, model: Filter, stiff: Filter, a: Attempt) -> Switch:
    """Go over to implicit steps if stability has limited explicit ones for long enough.

    Args:
        switch: the decision so far.
        model: the explicit filter.
        stiff: the implicit filter.
        a: an attempt of the explicit one.
    """
    cost = stiff.information.cost(a.prediction.t, a.prediction.y)
    attempts = min(max(WAIT * cost, LEAST), MOST_EXPLICIT)
    # A limited attempt counts twice, and any other takes one off: half of them may be of the other kind.
    step = jnp.where(is_limited(model, a.corrections), 2, -1).astype(switch.against.dtype)
    against = jnp.maximum(switch.against + step, 0)
    over = against >= jnp.minimum(2 * attempts * switch.patience, 2 * MOST_EXPLICIT)
    return switch._replace(
        stiff=over, fresh=over, times=switch.times + over, against=jnp.where(over, -TRIAL, against)
    )


def after_implicit(switch: Switch, model: Filter, a: Attempt, proposal: Array) -> Switch:
    """Go back to explicit steps if these would get further for the same work.

    Args:
        switch: the decision so far.
        model: the implicit filter.
        a: an attempt of it.
        proposal: the next step.
    """
    assert a.past is not None
    p, corrections, order = a.prediction, a.corrections, model.prior.order
    longest = SAFE * REAL_LIMITS[order - 1] / jnp.where(a.past.radius > 0, a.past.radius, jnp.inf)
    guess = model.information.cost(p.t, p.y)
    systems = jnp.where(corrections.iterations > 0, ITERATION * corrections.iterations, guess)
    cost = EVALUATION * corrections.evaluations + systems
    dearer = jnp.minimum(proposal, longest) * cost > proposal
    grows = proposal > GROWN * p.h
    against = jnp.where(dearer, jnp.where(grows, switch.against, switch.against + 1), 0)
    against = jnp.where(a.accept, against, switch.against)
    worth = switch.worth + jnp.where(dearer, 0, 1).astype(switch.worth.dtype)
    back = (against >= DEARER) & (switch.times < MOST)
    patience = jnp.where(worth >= WORTH, 1, 2 * switch.patience)
    return Switch(
        stiff=~back,
        fresh=back,
        times=switch.times,
        against=jnp.where(back, 0, against),
        worth=jnp.where(back, 0, worth),
        patience=jnp.where(back, patience, switch.patience),
    )


def to_implicit(switch: Switch, model: Filter, state: State, h: Array) -> tuple[Switch, State]:
    """What implicit steps start from, if there have been explicit ones; else the same as it is.

    Args:
        switch: the decision.
        model: the implicit filter.
        state: after the last explicit step.
        h: the next step.
    """
    assert state.past is not None
    over, kept = switch.stiff & switch.fresh, model.order + 1

    def reduced(fields: tuple[Field, ...]) -> tuple[Field, ...]:
        rest = (jax.tree.map(lambda x: jnp.where(over, 0, x), field) for field in fields[kept:])
        return (*fields[:kept], *rest)

    members = state.members
    if members is not None:
        members = members._replace(chunks=tuple(map(reduced, members.chunks)))
    past = _either(over, settled(model.order, state.past, h), state.past)
    state = state._replace(mean=reduced(state.mean), members=members, past=past)
    return switch._replace(fresh=switch.fresh & ~over), state


def to_explicit(switch: Switch, model: Filter, state: State, h: Array) -> tuple[Switch, State]:
    """The same for explicit steps after implicit ones."""
    over, kept = ~switch.stiff & switch.fresh, model.order + 1
    if kept < len(state.mean):
        unknown = state.covariance.forgetful(kept, h)
        state = state._replace(covariance=_either(over, unknown, state.covariance))
    return switch._replace(fresh=switch.fresh & ~over), state


def _either(condition: Array, x: Any, y: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)
