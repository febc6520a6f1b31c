"""Steps of an EK1 whose covariance is Kronecker: a gain of the whole Jacobian, by linear systems.

For any gain a filter is a filter, so we choose one that needs no covariance per unknown. A scalar filter that
observes E₁ − λ̄ E₀ has a gain k̆ ∈ R^(ν+1); with l = k̆/k̆₁,

    K = l ⊗ (I − l₀ F)⁻¹

satisfies H K = I: the linearised ODE holds after the correction, as with the textbook's EK1, whose gain this
is in the direction of λ̄. At λ̄ = 0 the scalar filter is that of an EK0 (its l is l⁰), which is accurate; as
λ̄ → −∞ it observes y itself (l^∞), which is stiffly stable: a BDF method in Nordsieck's form, with a prior.
Mixtures keep H K = I, also with weights that are functions of F:

    K = l⁰ ⊗ (I − l⁰₀ F)⁻¹ w + l^∞ ⊗ (I − l^∞₀ F)⁻¹ (I − w),    w = (I − γhF)⁻²,

is the one where hλ is small and the other one where it is large: of order ν + 1, and stiffly stable. It takes
four systems with three matrices. Where every system is expensive, l^∞ alone takes one.

The first residual is corrected by K. What that leaves is small, and corrected by l^∞ alone until the ODE
holds, with the Jacobian at the prediction.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.filter.control import Controller
from millipode.filter.corrections import UNCOUPLED, calibrate, evaluate, left_of_series, slope
from millipode.filter.error import Norm
from millipode.filter.gains import Gains, gains, no_past
from millipode.filter.state import Attempt, Corrections, Filter, Move, Past, Prediction, State
from millipode.filter.strictness import adapted, sketch
from millipode.linalg.fields import Field, map_leaves, safe_divide, scaled_rms
from millipode.linalg.jacobians import Jacobian, Solved
from millipode.model.information import Predicted, Residual
from millipode.model.priors.iwp import IWP
from millipode.model.steady import unsettled
from millipode.xla.autodiff import while_loop

# γ, for steps of any order; docs/design.md shows the regions of stability that it was chosen by.
WEIGHT = 0.17
# What corrections may leave undone, in units of the tolerance.
LEFT = 0.03
# Corrections that were not measured are taken to contract by this much less than those of the step before.
DOUBT = 1.5
# The local error over the first correction of y, for ν = 1, 2, …: of the mixture, and of l^∞ alone.
MIXED = (0.04,) * 11
ALONE = (2.0, 4.0, *9 * (8.0,))


class First(NamedTuple):
    """The first correction of a residual.

    Attributes:
        calm: w z or (I − l^∞₀ F)⁻¹ z, the residual without what is stiff in it.
        moves: of the state.
        iterations: of the linear solver.
        solved: whether it has converged.
    """

    calm: Field
    moves: tuple[Move, ...]
    iterations: Array
    solved: Array


class _Turn(NamedTuple):
    """Between two corrections.

    Attributes:
        stiff: what l^∞ moves the state by.
        done: the number of evaluations of f.
        iterations: of the linear solver.
        solved: whether it has always converged.
        change: the size of the last correction, in units of the tolerance.
        rate: by how much it was smaller than the one before.
        left: the size of all others that would follow.
    """

    stiff: Field
    done: Array
    iterations: Array
    solved: Array
    change: Array
    rate: Array
    left: Array


def begin(model: Filter, y: Field, direction: Field | None = None) -> Past | None:
    """What the first step knows of earlier ones; None for filters of another kind.

    Args:
        model: the filter.
        y: the state at t₀.
        direction: where a power iteration on the Jacobian starts, if there is to be one.
    """
    if not model.information.is_implicit:
        return None
    return no_past(model.order, y)._replace(direction=direction)


def attempt(
    model: Filter, state: State, p: Prediction, norm: Norm, controller: Controller, reverse: bool
) -> Attempt:
    """A step from its prediction, without the correction of the state."""
    assert state.past is not None
    order, past = model.order, state.past
    known, predicted = _gains(model, past, p), Predicted(p.y, slope(state, p))
    residual = evaluate(model, state, p, p.y)
    jacobian = residual.observation.jacobian
    systems = _Systems(known, jacobian, norm, model.information.mixes, past.share)
    first = systems.first(residual.z)
    correction = _sum(first.moves)
    size = norm(correction)
    constant = (MIXED if systems.mixes else ALONE)[order - 1]
    error = constant * size * unsettled(order, state.steps, size.dtype)
    promising = controller.accepts(error) & first.solved
    expected = past.rate * size  # at the first step, nothing is known
    start = _Turn(
        first.moves[-1].field,
        jnp.ones((), jnp.int32),
        first.iterations,
        first.solved,
        size,
        past.rate,
        expected,
    )
    turn = _refined(
        model, p, systems, _after(predicted, first.moves[:-1]), start, promising=promising, reverse=reverse
    )
    left_too_much = ~(turn.left <= LEFT) if model.corrections > 1 else jnp.zeros((), bool)
    diverged = promising & (left_too_much | ~turn.solved)
    error = controller.if_diverged(error, diverged | ~turn.solved, order)
    calm = Residual(first.calm, UNCOUPLED)
    corrections = Corrections(
        residual=calm,
        gain=None,
        evaluations=turn.done,
        contraction=turn.rate,
        diverged=diverged,
        moves=(*first.moves[:-1], Move(known.stiff, turn.stiff)),
        iterations=turn.iterations,
        unsolved=~turn.solved,
        respond=lambda z: tuple(move.field for move in systems.first(z).moves),
    )
    rate = jnp.where(turn.done > 1, turn.rate, jnp.minimum(1, DOUBT * past.rate))
    return Attempt(
        prediction=p,
        corrections=corrections,
        calibration=calibrate(model, state, p, calm, norm),
        error=error,
        accept=controller.accepts(error),
        past=_watched(_stricter(known.past._replace(rate=rate), correction, norm), jacobian),
    )


def _refined(
    model: Filter,
    p: Prediction,
    systems: "_Systems",
    at: Predicted,
    start: _Turn,
    *,
    promising: Array,
    reverse: bool,
) -> _Turn:
    """Evaluate and correct again by l^∞, until nothing changes any more or often enough.

    Args:
        model: the filter.
        p: the extrapolated state.
        systems: the linear systems of the step.
        at: the prediction, moved by all of the first correction but the part of l^∞.
        start: that part.
        promising: whether the step will be accepted if its corrections converge; else nothing is done.
        reverse: whether loops must have the form that reverse mode supports.
    """
    gain = systems.known.stiff

    def again(turn: _Turn) -> _Turn:
        moved = _after(at, (Move(gain, turn.stiff),))
        step = systems.stiff(model.information.discrepancy(p.t, moved, model.prior.drift))
        change = systems.norm(jax.tree.map(lambda x: gain[0] * x, step.x))
        rate = safe_divide(change, turn.change)
        return _Turn(
            stiff=jax.tree.map(jnp.add, turn.stiff, step.x),
            done=turn.done + 1,
            iterations=turn.iterations + step.iterations,
            solved=turn.solved & step.converged,
            change=change,
            rate=rate,
            left=left_of_series(change, rate, LEFT),
        )

    def unfinished(turn: _Turn) -> Array:
        return promising & (turn.done < model.corrections) & (turn.left > LEFT) & (turn.left < jnp.inf)

    most = max(model.corrections - 1, 1)
    return while_loop(unfinished, again, start, reverse=reverse, max_steps=most)


def _gains(model: Filter, past: Past, p: Prediction) -> Gains:
    """The gains of a step, zero for derivatives that they do not move."""
    if model.order == model.prior.order:
        return gains(past, p.transition, p.h)
    known, rest = gains(past, IWP(model.order).transition(p.h), p.h), model.prior.order - model.order
    return known._replace(accurate=jnp.pad(known.accurate, (0, rest)), stiff=jnp.pad(known.stiff, (0, rest)))


def _stricter(past: Past, correction: Field, norm: Norm) -> Past:
    """With the strictness of the next step's linear systems."""
    new = sketch(lax.stop_gradient(jax.tree.map(jnp.divide, correction, norm.tolerated)))
    return past._replace(share=adapted(past.share, new, past.sketch), sketch=new)


def _watched(past: Past, jacobian: Jacobian) -> Past:
    """With one more power iteration."""
    if past.direction is None:
        return past
    image = lax.stop_gradient(jacobian.multiply(past.direction))
    radius = scaled_rms(image)
    direction = jax.tree.map(lambda x: safe_divide(x, radius), image)
    return past._replace(radius=radius, direction=direction)


class _Systems:
    """The linear systems of a step.

    Attributes:
        known: the gains.
        norm: that of the tolerances.
        mixes: whether the first correction is that of both gains.
        stiff: solves (I − l^∞₀ F) x = r.
    """

    def __init__(self, known: Gains, jacobian: Jacobian, norm: Norm, mixes: bool, share: Array):
        self.known, self.norm, self.mixes = known, norm, mixes
        unit = norm.tolerated
        self.stiff = jacobian.system(known.stiff[0], unit, share)
        if mixes:
            self._accurate = jacobian.system(known.accurate[0], unit, share)
            self._weigh = jacobian.system(WEIGHT * known.past.h, unit, share)

    def first(self, z: Field) -> First:
        """K z, as the sum of moves; l^∞ is the last one."""
        if not self.mixes:
            calm = self.stiff(z)
            return First(calm.x, (Move(self.known.stiff, calm.x),), calm.iterations, calm.converged)
        half = self._weigh(z)
        calm = self._weigh(half.x)
        accurate = self._accurate(calm.x)
        rest = self.stiff(jax.tree.map(jnp.subtract, z, calm.x))
        solved = (half, calm, accurate, rest)
        moves = Move(self.known.accurate, accurate.x), Move(self.known.stiff, rest.x)
        return First(calm.x, moves, _iterations(solved), _converged(solved))


def _iterations(solved: tuple[Solved, ...]) -> Array:
    return functools.reduce(jnp.add, [s.iterations for s in solved])


def _converged(solved: tuple[Solved, ...]) -> Array:
    return functools.reduce(jnp.logical_and, [s.converged for s in solved])


def _leading(move: Move) -> Array:
    """The entry for y of its gain."""
    assert move.gain is not None
    return move.gain[0]


def _sum(moves: tuple[Move, ...]) -> Field:
    """The correction of y."""
    parts = [map_leaves(jnp.multiply, move.field, _leading(move)) for move in moves]
    return jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts)


def _after(at: Predicted, moves: tuple[Move, ...]) -> Predicted:
    """Fields 0 and 1 of a state that was moved."""
    for move in moves:
        y = jax.tree.map(jnp.subtract, at.y, map_leaves(jnp.multiply, move.field, _leading(move)))
        at = Predicted(y, jax.tree.map(jnp.subtract, at.slope, move.field))
    return at
