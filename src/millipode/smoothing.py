"""Smoothing: from what the past says of a state to what all of the data say.

Fixed-interval smoothing (Rauch, Tung, Striebel) walks back over stored filter states. Fixed-point smoothing
needs none: while the filter runs, an *anchor* remembers one earlier state X and how it depends on the
present one, X | Y(t) ~ N(E[X] + G (Y(t) − E[Y(t)]), P). A residual that moves the filter's mean by −K z then
moves that of X by −G K z: one more field is read per step, and memory does not grow with the number of steps.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from millipode.autodiff import backwards, both_ways
from millipode.covariance import Covariance, Kernel
from millipode.fields import Field, Scale, combine
from millipode.priors import Prior


class Nodes(NamedTuple):
    """Filter states at the steps of a solve, time first.

    Attributes:
        t: the times.
        mean: one field per derivative.
        covariance: under the filter's own diffusion.
        gamma: γ̂ of the step that ended here, if dynamic.
        members: of the error of y, if there are any.
    """

    t: Array
    mean: tuple[Field, ...]
    covariance: Covariance
    gamma: Scale | None
    members: Field | None = None


class Gaussian(NamedTuple):
    """N(mean, covariance) of a state, or with a leading axis of many."""

    mean: tuple[Field, ...]
    covariance: Covariance


def pick(x: PyTree, i: Array | int) -> PyTree:
    """Entry i of everything that has the time as its leading axis."""
    return jax.tree.map(lambda leaf: leaf[i], x)


def negligible(h: Array) -> Array:
    """What counts as no time at all next to a step h: the scaled coordinates of less would overflow."""
    return h * jnp.finfo(h.dtype).eps ** 0.75


def near(order: int, h: Array) -> Array:
    """How soon after a step a state is too close to it to tell the two apart.

    The filter knows H Y(t) exactly, and next to nothing else. Seen from a time τ later, Y(t) is a difference
    quotient with 1/τ^ν in it, which rounding turns into ε (h/τ)^ν. To say that Y(t+τ) is Φ(τ) Y(t) plus
    independent noise instead costs y only (τ/h)^(ν+1) of its standard deviation. The two meet here, for
    standard deviations of 1e-5.
    """
    return h * (jnp.finfo(h.dtype).eps / 1e-5) ** (1 / (2 * order + 1))


def predict(prior: Prior, c: Covariance, tau: Array, scale: Scale, y: Field, none: Array) -> Covariance:
    """The covariance a time ``tau`` later; the same one if that is no time at all."""
    predicted = c.predict(prior.transition(jnp.where(none, 1, tau)), scale, y)
    return jax.tree.map(lambda a, b: jnp.where(none, a, b), c.square(), predicted)


def backward(prior: Prior, c: Covariance, tau: Array, scale: Scale, y: Field, none: Array) -> Kernel:
    """The kernel from a time ``tau`` later back to now; the identity if that is no time at all."""
    kernel: Any = c.backward(prior.transition(jnp.where(none, 1, tau)), scale, y)
    gain = jax.tree.map(lambda a, b: jnp.where(none, a, b), c.identity().gain, kernel.gain)
    noise = jax.tree.map(lambda x: jnp.where(none, 0, x), kernel.noise)
    return type(kernel)(gain, noise)


def move(prior: Prior, mean: tuple[Field, ...], tau: Array) -> tuple[Field, ...]:
    """Φ(τ) m."""
    return tuple(combine(row, mean) for row in prior.transition(tau).phi)


def fixed_interval(prior: Prior, nodes: Nodes, count: Array, last: Gaussian) -> Gaussian:
    """The posterior at the first ``count`` nodes, given it at node count−1."""

    def run(inputs: tuple, reverse: bool) -> Gaussian:
        arrays, nodes, count, last = inputs
        prior = eqx.combine(arrays, static)

        def read(i: Array) -> tuple[Array, Scale, Covariance]:
            following = jnp.minimum(i + 1, nodes.t.size - 1)
            h = jnp.abs(nodes.t[following] - nodes.t[i])
            scale = jnp.ones_like(h) if nodes.gamma is None else pick(nodes.gamma, following)
            return h, scale, pick(nodes.covariance, i)

        def step(later: Gaussian, inputs: tuple, here: Gaussian) -> tuple[Gaussian, Gaussian]:
            h, scale, covariance = inputs
            kernel = backward(prior, covariance, h, scale, here.mean[0], h <= 0)
            surprise = jax.tree.map(jnp.subtract, later.mean, move(prior, here.mean, h))
            mean = jax.tree.map(jnp.add, here.mean, kernel.apply(surprise))
            smoothed = Gaussian(mean, kernel.push(later.covariance))
            return smoothed, smoothed

        result = Gaussian(nodes.mean, jax.vmap(type(nodes.covariance).square)(nodes.covariance))
        result = jax.tree.map(lambda x, new: x.at[count - 1].set(new), result, last)
        return backwards(step, last, read, result, count - 1, reverse=reverse)

    arrays, static = eqx.partition(prior, eqx.is_array)
    return both_ways(run, (arrays, nodes, count, last))


class Anchor(NamedTuple):
    """An earlier state X, given all data so far: its mean, and the kernel of X | Y(t)."""

    mean: tuple[Field, ...]
    kernel: Kernel

    def corrected(self, covariance: Covariance, gain: PyTree, z: Field) -> "Anchor":
        """After the filter has moved its mean by −K z."""
        moved = covariance.apply_gain(self.kernel.through(gain), z)
        return Anchor(jax.tree.map(jnp.subtract, self.mean, moved), self.kernel)


class Links(NamedTuple):
    """How a chain of states hangs together, time first.

    Attributes:
        kernel: from each state back to the one before it.
        lead: how long after its state each saved time lies (zero for nearly all, see ``near``).
        scale: γ there.
    """

    kernel: Kernel
    lead: Array
    scale: Scale


def led(prior: Prior, c: Covariance, lead: Array, scale: Scale, y: Field) -> Covariance:
    """The covariance at a saved time, from that of its state."""
    return predict(prior, c, lead, scale, y, lead <= 0)


def chain(prior: Prior, offsets: tuple[Field, ...], links: Links, count: Array, last: Gaussian) -> Gaussian:
    """The posterior at a chain of states X_j = b_j + G_j X_{j+1} + noise, with means at the saved times.

    Number count−1 is ``last``.
    """

    def run(inputs: tuple, reverse: bool) -> Gaussian:
        arrays, offsets, links, count, last = inputs
        prior = eqx.combine(arrays, static)

        def step(later: Gaussian, link: tuple, here: Gaussian) -> tuple[Gaussian, Gaussian]:
            kernel, lead = link
            mean = jax.tree.map(jnp.add, here.mean, kernel.apply(later.mean))
            covariance = kernel.push(later.covariance)
            return Gaussian(mean, covariance), Gaussian(move(prior, mean, lead), covariance)

        slot = jnp.maximum(count - 1, 0)
        unknown = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), links.kernel.noise)
        saved = Gaussian(move(prior, last.mean, links.lead[slot]), last.covariance)
        result = jax.tree.map(
            lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0),
            Gaussian(offsets, unknown),
            saved,
        )
        return backwards(
            step, last, lambda j: pick((links.kernel, links.lead), j), result, count - 1, reverse=reverse
        )

    arrays, static = eqx.partition(prior, eqx.is_array)
    return both_ways(run, (arrays, offsets, links, count, last))
