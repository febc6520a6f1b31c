"""The posterior at any time: between steps, or looked up where it was saved."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from millipode.covariance.protocol import Covariance
from millipode.filter.ensemble import Errors
from millipode.linalg.fields import Coefficient, safe_divide
from millipode.model.noise import certain
from millipode.model.priors.protocol import Prior
from millipode.posterior import questions
from millipode.posterior.posterior import (
    Moments,
    Path,
    Posterior,
    States,
    direction,
    in_user_time,
    marginal_std,
)
from millipode.smooth.bridge import Gaussian, backward, move, negligible, pick, predict
from millipode.xla.compiling import compiled
from millipode.xla.tracing import is_traced

# Times and samples are processed in batches whose states take about this much memory.
BATCH_BYTES = 2**25

pick_compiled = compiled(pick)


class Node(NamedTuple):
    """One step of a path.

    Attributes:
        t: its end.
        state: there.
        filtered: the filter's covariance, if ``state`` is the smoother's.
        gamma: γ̂ of the step, if dynamic.
    """

    t: Array
    state: Gaussian
    filtered: Covariance | None
    gamma: Coefficient | None


class Context(NamedTuple):
    """What all steps of a path share.

    Attributes:
        prior: which relates states at different times.
        output_gamma: calibrates all covariances.
        first: the first time.
        last: the last time.
    """

    prior: Prior
    output_gamma: Coefficient
    first: Array
    last: Array


def saved_moments(posterior: Posterior, t: Array, q: int) -> Moments:
    """The posterior of the q-th derivative at the saved times."""
    return Moments(posterior.mean[0], posterior.std) if q == 0 else _derivative(posterior, t, q)


@compiled
def _derivative(posterior: States, t: Array, q: Array) -> Moments:
    return posterior.derivative(t, q)


def moments_at(posterior: Posterior, saved: Array, at: Array, q: int) -> Moments:
    """The posterior of y^(q) at a flat array of times: any, or those that were saved."""
    if isinstance(posterior, Path):
        return evaluate(posterior, saved, at, q)
    return pick_compiled(saved_moments(posterior, saved, q), questions.saved_index(saved, at))


def evaluate(path: Path, t: Array, at: Array, q: int) -> Moments:
    """Dense output at a flat array of times: a binary search and two states for each."""
    batch = max(1, BATCH_BYTES // bytes_per_state(path))
    parts = [_evaluate(path, t, at[i : i + batch], q) for i in range(0, at.size, batch)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _evaluate(path: Path, t: Array, at: Array, q: int) -> Moments:
    # The costly program depends on the number of times: a power of two, so that few numbers occur. It does
    # not depend on the number of steps, because states are picked in another.
    xp: Any = jnp if is_traced(at) else np
    count = at.size
    padded = xp.concatenate([at, xp.broadcast_to(at[-1], (round_up(count) - count,))])
    left, right = _around(path, t, padded)
    context = Context(path.prior, path.output_gamma, t[0], t[-1])
    moments = _between(context, left, right, padded, q, path.filtered is not None)
    return moments if padded.size == count else _cut(moments, count)


@compiled
def _around(path: Path, t: Array, at: Array) -> tuple[Node, Node]:
    """The steps before and after each of the times."""
    sign = direction(t)
    index = jnp.clip(jnp.searchsorted(sign * t, sign * at, side="right") - 1, 0, t.size - 1)
    nodes = Node(t, Gaussian(path.mean, path.covariance), path.filtered, path.gamma)
    return pick(nodes, index), pick(nodes, jnp.minimum(index + 1, t.size - 1))


@compiled(static_argnames="smoothed")
def _between(context: Context, left: Node, right: Node, t: Array, q: Array, smoothed: bool) -> Moments:
    first, last = context.first, context.last
    sign = direction(jnp.stack([first, last]))

    def one(left: Node, right: Node, t: Array) -> Moments:
        moments = between(context, left, right, t, q, smoothed)
        moments = Moments(in_user_time(moments.mean, sign, q), moments.std)
        inside = (sign * (t - first) >= 0) & (sign * (last - t) >= 0)  # traced times cannot be checked
        return jax.tree.map(lambda x: jnp.where(inside, x, jnp.nan), moments)

    return jax.vmap(one)(left, right, t)


def between(context: Context, left: Node, right: Node, t: Array, q: Array, smoothed: bool) -> Moments:
    """The posterior of y^(q), by the filter's time, at a time t in the step from ``left`` to ``right``.

    The filter predicts from the left. Given the states at both ends the prior is a bridge that no data can
    influence any more, so the smoother's mean is the bridge between the smoother's means; its
    covariance is that of the right end, pushed through the kernel from there to t.
    """
    prior, mean, y = context.prior, left.state.mean, left.state.mean[0]
    h, tau = jnp.abs(right.t - left.t), jnp.abs(t - left.t)
    gamma = jnp.ones_like(h) if left.gamma is None else right.gamma
    tiny = negligible(h)
    at_left, at_right = tau <= tiny, h - tau <= tiny
    now = left.filtered if smoothed else left.state.covariance
    assert now is not None
    covariance = predict(prior, now, tau, gamma, y, at_left)
    moved = move(prior, mean, tau)
    if smoothed:
        covariance = backward(prior, covariance, h - tau, gamma, y, at_right).push(right.state.covariance)
        one = jnp.ones_like(h)
        start = predict(prior, certain(prior, now), tau, one, y, at_left)
        bridge = backward(prior, start, h - tau, one, y, at_right & ~at_left)
        surprise = jax.tree.map(jnp.subtract, right.state.mean, move(prior, mean, h))
        moved = jax.tree.map(jnp.add, moved, bridge.apply(surprise))
        covariance = jax.tree.map(
            lambda a, b: jnp.where(at_left, a, b), left.state.covariance.square(), covariance
        )
    std = marginal_std(prior, covariance, y, q, context.output_gamma)
    here, later = (prior.derivative(x, q) for x in (mean, moved))
    return Moments(jax.tree.map(lambda a, b: jnp.where(tau == 0, a, b), here, later), std)


@compiled(static_argnums=1)
def _cut(moments: Moments, count: int) -> Moments:
    return jax.tree.map(lambda x: x[:count], moments)


def bytes_per_state(posterior: Posterior) -> int:
    """The memory that one saved time takes."""
    return sum(x.nbytes for x in jax.tree.leaves(posterior)) // jax.tree.leaves(posterior.mean)[0].shape[0]


def round_up(count: int) -> int:
    """The next power of two, so that few different lengths are compiled for."""
    return 2 ** (count - 1).bit_length()


def errors_at(posterior: Posterior, saved: Array, at: Array) -> Errors:
    """The errors of y (of its modes), between steps or at saved times if nothing else is known.

    Between two steps, members are interpolated, and sizes are those of the step before.
    """
    if posterior.is_continuous:
        return _interpolated(posterior.errors, saved, at)
    return pick_compiled(posterior.errors, questions.saved_index(saved, at))


@compiled
def _interpolated(errors: Errors, t: Array, at: Array) -> Errors:
    sign = direction(t)
    left = jnp.clip(jnp.searchsorted(sign * t, sign * at, side="right") - 1, 0, t.size - 1)
    right = jnp.minimum(left + 1, t.size - 1)
    share = safe_divide(at - t[left], t[right] - t[left])

    def leafwise(x: Array) -> Array:
        s = share.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(s == 0, x[left], (1 - s) * x[left] + s * x[right])

    size = None if errors.size is None else errors.size[left]
    return Errors(jax.tree.map(leafwise, errors.members), size)
