"""The recursion of ensemble members, e ← (I − K H)(Φ e + w); ``members`` has the mathematics.

Large members are moved in place, some at a time. Small ones are moved all at once and field beside field,
because their time goes into starting kernels.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, PyTree

from millipode.covariance.observation import Observation
from millipode.filter.defects import calmed, contradiction, of_member
from millipode.filter.ensemble import Transported, kind_of
from millipode.filter.error import moved_by
from millipode.filter.moving import moved, shift
from millipode.filter.state import Attempt, Filter, Move, State
from millipode.linalg.fields import Field, Row, combine, dtype, map_leaves, where
from millipode.linalg.randomness import signs
from millipode.model.noise import noise_of
from millipode.model.priors.iwp import powers
from millipode.xla.ordering import Token, after, after_in_branch

# (number of an evaluation, function, its arguments) → its value if the step had that many evaluations, else
# anything that is like the last argument; or a tuple of such values, if ``parts`` says of how many.
IfDone = Callable[..., Field]


def all_at_once(
    model: Filter, state: State, a: Attempt, gains: tuple[PyTree[Array], ...]
) -> tuple[tuple[Field, ...], Array]:
    """The only chunk of small members after an accepted step, or the same after a rejected one.

    Also how much their residuals contradict those of the filter.
    """
    p, members, covariance = a.prediction, state.members, state.covariance
    assert members is not None
    (chunk,) = members.chunks
    phi, kind = p.transition.phi, kind_of(p.y)
    time = powers(p.h, len(phi))
    first_rows = tuple(in_units(row, kind, members.time) for row in phi[:2])
    rows = tuple(in_units(row, kind, members.time, c) for row, c in zip(phi, time, strict=True))
    drawn = _noise(model, state, a)
    numbers = jnp.arange(length(chunk))
    each = _alone if length(chunk) == 1 else jax.vmap

    def predicted(q: int, error: tuple[Field, ...], s: Array) -> Field:
        """Field q of Φ e + w, of which the first two are not yet in units of the step."""
        row, unit = (first_rows[q], 1) if q < 2 else (rows[q], time[q])
        return jax.tree.map(jnp.add, combine(row, error), drawn(q, s, unit))

    def if_done(i: int, function: Callable[..., Field], *x: Field, parts: int | None = None) -> Field:
        new = each(function)(*x)
        return new if i <= 2 else where(i <= a.corrections.evaluations, new, x[-1])

    # Here rather than in the branch, because XLA finds that f is evaluated at this point anyway.
    observation = model.information.exactly(p.t, p.y, model.prior.drift, True)

    def residual(value: Field, slope: Field) -> tuple[Field, ...]:
        return _remaining(model, a, observation, if_done, value, slope)

    def idle(value: Field, slope: Field) -> tuple[Field, ...]:
        return (jax.tree.map(jnp.zeros_like, slope),) * len(gains)

    first, second = (each(functools.partial(predicted, q))(chunk, numbers) for q in range(2))
    # What enters and leaves a branch is stored, and not computed again wherever it is used.
    z = lax.cond(a.accept, residual, idle, first, second)

    def corrected(
        error: tuple[Field, ...], s: Array, first: Field, second: Field, z: tuple[Field, ...]
    ) -> Any:
        corrections = shift(covariance, tuple(map(Move, gains, z)))
        ahead = (
            first,
            jax.tree.map(lambda x: time[1] * x, second),
            *(predicted(q, error, s) for q in range(2, len(phi))),
        )
        left = (
            jax.tree.map(lambda x, k, c=c: x - c * k, x, k)
            for x, k, c in zip(ahead, corrections, time, strict=True)
        )
        return calmed(model, contradicted, tuple(left))

    contradicted = contradiction(a, z[0])
    new = each(corrected)(chunk, numbers, first, second, z)
    return jax.tree.map(lambda x, y: jnp.where(a.accept, x, y), new, chunk), contradicted


def _remaining(
    model: Filter, a: Attempt, observation: Observation, if_done: IfDone, value: Field, slope: Field
) -> tuple[Field, ...]:
    """The fields of the moves of errors: what the corrections of a step have left of their residuals.

    z_i = z₁ + (J − F) δ_{i−1}, as corrections do: as many JVPs as there were evaluations. Where the gain
    solves linear systems, so do errors.

    Args:
        model: the filter.
        a: the attempt.
        observation: the true H.
        if_done: computes for all members what only some evaluations cause.
        value: field 0 of Φ e + w.
        slope: field 1.
    """
    corrections = a.corrections
    known = corrections.residual.observation.jacobian

    def again(begun: Field, z: Field) -> Field:
        if corrections.gain is None:
            moved = moved_by(model, a.prediction, corrections.residual._replace(z=z))
        else:
            moved = corrections.gain.multiply(z)
        missed = jax.tree.map(jnp.subtract, observation.jacobian.multiply(moved), known.multiply(moved))
        return jax.tree.map(jnp.add, begun, missed)

    if corrections.respond is not None:
        respond = corrections.respond
        return if_done(
            1, lambda v, s: respond(observation.of(v, s)), value, slope, parts=len(corrections.moves)
        )
    z = begun = if_done(1, observation.of, value, slope)
    for i in range(2, 1 + (1 if model.information.is_exact else model.corrections)):
        z = if_done(i, again, begun, z)
    return (z,)


# (errors of a chunk, their numbers, a token to wait for) → the moved errors, how much they contradict the
# filter's residuals, and a token that waits for them.
Moving = Callable[[tuple[Field, ...], Array, Token], tuple[tuple[Field, ...], Array, Token]]


def in_place(
    model: Filter, state: State, a: Attempt, gains: tuple[PyTree[Array], ...], pending: Array
) -> Moving:
    """The recursion for a chunk of members, with f linearised once for all of them.

    Args:
        model: the filter.
        state: at the start of the step.
        a: the attempt.
        gains: of the filter's moves.
        pending: whether the step was accepted, and the members are still to be moved.
    """
    prior, p, y, covariance = model.prior, a.prediction, state.mean[0], state.covariance
    assert state.members is not None
    phi = p.transition.phi
    kind = kind_of(y)
    before, time = state.members.time, powers(p.h, len(phi))
    # What the two JVPs of a single error have in common takes longer to store than to compute again.
    often = isinstance(model.uncertainty, Transported)
    observation = model.information.exactly(p.t, p.y, prior.drift, often)
    drawn = _noise(model, state, a)
    first_rows = tuple(in_units(row, kind, before) for row in phi[:2])
    rows = tuple(in_units(row, kind, before, c) for row, c in zip(phi, time, strict=True))
    wait_for = after_in_branch(pending)

    def predicted(q: int, error: tuple[Field, ...], s: Array, token: Token) -> Field:
        """Field q of Φ e + w."""
        x = jax.tree.map(jnp.add, combine(first_rows[q], error), drawn(q, s, 1 + token.zero))
        return jax.tree.map(lambda leaf: leaf.astype(kind), x)

    def idle(z: Field) -> Field:
        """What a correction that was not made leaves; of two, none is left out, and nothing is copied."""
        return jax.tree.map(jnp.zeros_like, z) if model.corrections == 2 else z

    def shifts(z: tuple[Field, ...], s: Array) -> tuple[Field, ...]:
        """What to subtract from the first two rows of Φ e + w, and from Φ e for all others."""
        found = []
        for q, field in enumerate(shift(covariance, tuple(map(Move, gains, z)))):
            x = jax.tree.map(lambda leaf, q=q: (time[q] * leaf).astype(kind), field)
            found.append(x if q < 2 else jax.tree.map(jnp.subtract, x, drawn(q, s, time[q])))
        return tuple(found)

    def move(
        chunk: tuple[Field, ...], numbers: Array, token: Token
    ) -> tuple[tuple[Field, ...], Array, Token]:
        each = _alone if length(chunk) == 1 else jax.vmap
        first, second = (each(functools.partial(predicted, q, token=token))(chunk, numbers) for q in range(2))

        def if_done(i: int, function: Callable[..., Field], *x: Field, parts: int | None = None) -> Field:
            # What enters and leaves a branch is stored, and not computed again wherever it is used.
            taken = pending & (i <= a.corrections.evaluations)
            other = idle if parts is None else lambda z: (idle(z),) * parts
            return lax.cond(taken, each(_in_full(function, y)), lambda *x: other(x[-1]), *x)

        z = _remaining(model, a, observation, if_done, first, second)
        starts = first, jax.tree.map(lambda x: time[1].astype(kind) * x, second)
        contradicted = contradiction(a, z[0])
        calm = functools.partial(calmed, model, contradicted)
        new = moved(calm(starts), calm(rows), chunk, calm(each(shifts)(z, numbers)), after(z), wait_for)
        wait = Token(wait_for(jax.tree.leaves(new)[-1]).zero.astype(p.h.dtype))
        return new, contradicted.astype(p.h.dtype), wait

    return move


def length(chunk: tuple[Field, ...]) -> int:
    """The number of members in a chunk."""
    return jax.tree.leaves(chunk)[0].shape[0]


def correlated(model: Filter, white: Field) -> Field:
    """White noise with the spatial covariance of the filter."""
    return white if model.space is None else model.space.correlate(white)


def in_units(row: Row, kind: Any, time: Array, unit: ArrayLike = 1) -> Row:
    """A row of Φ for fields of this dtype in units of time^−q, with a result in this ``unit``."""
    # One division, because XLA makes a kernel of every one.
    return tuple(
        None if p is None else jax.tree.map(lambda x, c=unit * c: (c * x).astype(kind), p)
        for p, c in zip(row, powers(1 / time, len(row)), strict=True)
    )


def _noise(model: Filter, state: State, a: Attempt) -> Callable[[int, Array, ArrayLike], Field]:
    """A function (q, s, unit) → field q of w for member s, times the unit."""
    h, y, given = a.prediction.h, state.mean[0], a.drive
    assert given is not None
    if given.defect is not None:
        remainder = model.remainder(h)
        return lambda q, s, unit: of_member(given, s, jax.tree.map(lambda v: unit * v, remainder[q]))
    noise = noise_of(model.prior, h, state.covariance, y)

    def white(q: int, s: Array, unit: ArrayLike) -> Field:
        field = correlated(model, noise.draw(given.number(s), y, signs)[q])
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
