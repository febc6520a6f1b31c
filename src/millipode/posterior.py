"""The posterior that a solve leaves behind, and what can be asked of it.

What was saved decides: ``Marginals`` know y at single times, a ``Chain`` knows states and how neighbours
depend on each other, a ``Path`` knows every step and with it all times between. Means and covariances have
the time as leading axis; covariances are those of the filter's own diffusion, and ``scale`` calibrates them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from millipode.covariance import Covariance, Kernel
from millipode.covariance.kronecker import Kronecker
from millipode.fields import Field, Scale, dtype, map_leaves
from millipode.priors import Prior
from millipode.smoothing import (
    Gaussian,
    Links,
    Nodes,
    backward,
    led,
    move,
    near,
    negligible,
    pick,
    predict,
)

# What of a posterior does not have the time as leading axis.
TIMELESS = ("scale", "prior")


class Moments(NamedTuple):
    """Mean and standard deviation of one derivative; the latter may be shared by all unknowns."""

    mean: Field
    std: Scale


class Posterior(eqx.Module):
    """What is known of the solution at saved times.

    Attributes:
        mean: y and, where they were saved, the other fields of the prior's state.
        std: of y, calibrated; one number per time if all unknowns share it. The filter's or the smoother's.
        members: of the error of y, time first, then members; None if they were not transported.
    """

    mean: eqx.AbstractVar[tuple[Field, ...]]
    std: eqx.AbstractVar[Scale]
    members: eqx.AbstractVar[Field | None]

    def joined(self, others: Sequence["Posterior"], join: Callable[..., Array]) -> Self:
        """This one after the others, with ``join`` applied to each array that has a time axis."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in TIMELESS]
        parts = {
            name: jax.tree.map(join, *(getattr(p, name) for p in others), getattr(self, name))
            for name in names
        }
        return dataclasses.replace(self, **parts)


class Marginals(Posterior):
    """Mean and standard deviation of y, and members of its error if they were transported; nothing else."""

    mean: tuple[Field, ...]
    std: Scale
    members: Field | None


class Chain(Posterior):
    """States at given times, and how each hangs together with the one after it.

    ``covariance`` is that of the states in the chain, which a few saved times follow with a short lead.
    """

    mean: tuple[Field, ...]
    std: Scale
    members: Field | None
    covariance: Covariance
    links: Links
    scale: Scale
    prior: Prior

    def draw(self, key: Array, q: Array) -> Field:
        """One sample of the deviation of y^(q) from its mean, at all saved times."""
        size = self.links.lead.shape[0]
        last = Gaussian(pick(self.mean, -1), pick(self.covariance, -1))

        def link(i: Array) -> tuple[Kernel, Array, Scale]:
            return pick(tuple(self.links), i)

        return _draw_backwards(key, self.prior, last, link, jnp.arange(size), size, self.scale, q)


class Path(Posterior):
    """Every step, and therefore every time between.

    Attributes:
        mean: of the smoother, or of the filter if that is all there is.
        std: of y.
        members: of the error of y.
        covariance: likewise.
        filtered: the filter's covariance, if ``covariance`` is the smoother's; else None.
        gamma: γ̂ of the step that ended at each time, if dynamic.
        scale: what calibrates all covariances.
        prior: for the times between.
    """

    mean: tuple[Field, ...]
    std: Scale
    members: Field | None
    covariance: Covariance
    filtered: Covariance | None
    gamma: Scale | None
    scale: Scale
    prior: Prior

    def around(self, t: Array, times: Array) -> tuple["Node", "Node"]:
        """The steps at and after each of the times, for ``between``."""
        sign = direction(t)
        index = jnp.searchsorted(sign * t, sign * times, side="right") - 1
        index = jnp.clip(index, 0, t.size - 1)
        nodes = Node(t, Gaussian(self.mean, self.covariance), self.filtered, self.gamma)
        return pick(nodes, index), pick(nodes, jnp.minimum(index + 1, t.size - 1))

    def draw(self, key: Array, t: Array, nodes: Array, slots: Int[Array, " m"], size: int, q: Array) -> Field:
        """One sample of the deviation of y^(q) from its mean at some of the nodes.

        Args:
            key: of the random numbers.
            t: the times of the steps.
            nodes: times in order of integration, all steps among them.
            slots: where in the result each node goes; beyond its end for nowhere.
            size: the length of the result.
            q: the derivative.
        """
        sign = direction(t)
        index = jnp.clip(jnp.searchsorted(sign * t, sign * nodes, side="right") - 1, 0, t.size - 1)

        def state(i: Array) -> tuple[Array, Array]:
            """When the state of node i starts, and by how much the node leads it."""
            since = jnp.abs(nodes[i] - t[index[i]])
            h = jnp.abs(t[jnp.minimum(index[i] + 1, t.size - 1)] - t[index[i]])
            lead = jnp.where(since <= near(self.prior.order, h), since, 0)
            return nodes[i] - sign * lead, lead

        def link(i: Array) -> tuple[Kernel, Array, Scale]:
            k = index[i]
            following = jnp.minimum(k + 1, t.size - 1)
            gamma = jnp.ones_like(t[0]) if self.gamma is None else pick(self.gamma, following)
            y = pick(self.mean[0], 0)
            none = negligible(jnp.abs(t[following] - t[k]))
            (start, lead), (end, _) = state(i), state(jnp.minimum(i + 1, nodes.size - 1))
            since, until = jnp.abs(start - t[k]), jnp.abs(end - start)
            covariance: Covariance = pick(self.filtered, k)
            if nodes.size != t.size:
                covariance = predict(self.prior, covariance, since, gamma, y, since <= none)
            return backward(self.prior, covariance, until, gamma, y, until <= none), lead, gamma

        last = Gaussian(pick(self.mean, -1), pick(self.covariance, -1))
        return _draw_backwards(key, self.prior, last, link, slots, size, self.scale, q)


def direction(t: Array) -> Array:
    """+1 forwards in time, −1 backwards."""
    return jnp.where(t[-1] >= t[0], 1, -1)


class Node(NamedTuple):
    """One step, for ``between``."""

    t: Array
    state: Gaussian
    filtered: Covariance | None
    gamma: Scale | None


def marginal_std(prior: Prior, covariance: Covariance, y: Field, q: Array | int, scale: Scale) -> Scale:
    """The calibrated standard deviation of y^(q)."""
    zero = jnp.zeros((), dtype(y))
    return calibrate(covariance.std(y, prior.row(q, y), zero, zero), scale, y)


def certain(prior: Prior, like: Covariance) -> Covariance:
    """A covariance of zero: one for all unknowns where the prior does not tell them apart."""
    if not prior.is_shared:
        return jax.tree.map(jnp.zeros_like, like.square())
    n = prior.order + 1
    return Kronecker(jnp.zeros((n, n), dtype(like)))


def noise_of(prior: Prior, h: Array, like: Covariance, y: Field) -> Covariance:
    """Σ(h)."""
    transition = prior.transition(h)
    if not prior.is_shared:
        return certain(prior, like).predict(transition, jnp.ones_like(h), y)
    return Kronecker(transition.at(None).scaled_root * transition.scaling)


def calibrate(std: Scale, scale: Scale, y: Field) -> Scale:
    """Std · scale; a number if both are."""
    if isinstance(std, jax.Array) and std.ndim == 0 and isinstance(scale, jax.Array) and scale.ndim == 0:
        return std * scale
    return map_leaves(lambda _, s, c: s * c, y, std, scale)


def between(
    prior: Prior, scale: Scale, left: Node, right: Node, t: Array, sign: Array, q: Array, smoothed: bool
) -> Moments:
    """The posterior of y^(q) at a time t in the step from ``left`` to ``right``.

    The filter predicts from the left. Given the states at both ends the prior is a bridge that no data can
    influence any more, so the smoother's mean is the bridge between the smoother's means; its
    covariance is that of the right end, pushed through the kernel from there to t.
    """
    mean, y = left.state.mean, left.state.mean[0]
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
    std = marginal_std(prior, covariance, y, q, scale)
    now, later = (prior.derivative(x, q) for x in (mean, moved))
    value = jax.tree.map(lambda a, b: jnp.where(tau == 0, a, b), now, later)
    return Moments(in_user_time(value, sign, q), std)


def derivatives(posterior: "Path | Chain", q: Array) -> Field:
    """The mean of y^(q) at the saved times."""
    return jax.vmap(lambda state: posterior.prior.derivative(state, q))(posterior.mean)


def in_user_time(derivative: Field, sign: Array, q: Array) -> Field:
    """The filter's time always runs forwards; the user's may not."""
    return jax.tree.map(lambda x: x * (sign**q).astype(x.dtype), derivative)


def std_of(prior: Prior, states: Nodes | Gaussian, scale: Scale, q: Array | int = 0) -> Scale:
    """The calibrated standard deviations of y^(q), time first."""
    return jax.vmap(lambda c, y: marginal_std(prior, c, y, q, scale))(states.covariance, states.mean[0])


def chain_std(prior: Prior, states: Gaussian, links: Links, scale: Scale, q: Array | int) -> Scale:
    """The calibrated standard deviations of y^(q) at the saved times of a chain."""

    def one(c: Covariance, y: Field, lead: Array, gamma: Scale) -> Scale:
        return marginal_std(prior, led(prior, c, lead, gamma, y), y, q, scale)

    return jax.vmap(one)(states.covariance, states.mean[0], links.lead, links.scale)


def _draw_backwards(
    key: Array,
    prior: Prior,
    last: Gaussian,
    link: Callable[[Array], tuple[Kernel, Array, Scale]],
    slots: Int[Array, " m"],
    size: int,
    scale: Scale,
    q: Array,
) -> Field:
    """Deviations at all slots: draw the last state, then each one given the one after it."""
    y = last.mean[0]

    def calibrated(fields: tuple[Field, ...]) -> tuple[Field, ...]:
        return tuple(map_leaves(jnp.multiply, x, scale) for x in fields)

    def put(samples: Field, deviation: tuple[Field, ...], i: Array | int, lead: Array, gamma: Scale) -> Field:
        def lead_on() -> Field:
            """Φ times the state plus fresh noise, for a time that follows its state with a lead."""
            fresh = noise_of(prior, lead, last.covariance, y)
            noise = fresh.draw(jax.random.fold_in(key, i + count), y)
            noise = calibrated(tuple(map_leaves(jnp.multiply, x, gamma) for x in noise))
            return prior.derivative(jax.tree.map(jnp.add, move(prior, deviation, lead), noise), q)

        value = lax.cond(lead > 0, lead_on, lambda: prior.derivative(deviation, q))
        return jax.tree.map(lambda s, x: s.at[slots[i]].set(x, mode="drop"), samples, value)

    def step(carry: tuple, i: Array) -> tuple[tuple, None]:
        deviation, samples = carry
        kernel, lead, gamma = link(i)
        fresh = calibrated(kernel.noise.draw(jax.random.fold_in(key, i), y))
        deviation = jax.tree.map(jnp.add, kernel.apply(deviation), fresh)
        return (deviation, put(samples, deviation, i, lead, gamma)), None

    count = slots.shape[0]
    deviation = calibrated(last.covariance.draw(jax.random.fold_in(key, count - 1), y))
    samples = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), y)
    _, lead, gamma = link(jnp.asarray(count - 1))
    samples = put(samples, deviation, count - 1, lead, gamma)
    (_, samples), _ = lax.scan(step, (deviation, samples), jnp.arange(count - 1)[::-1])
    return samples
