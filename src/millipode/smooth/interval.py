"""Fixed-interval smoothing (Rauch, Tung, Striebel): a walk back over stored filter states."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from millipode.covariance.protocol import Covariance
from millipode.linalg.fields import Coefficient, Field
from millipode.model.priors.protocol import Prior
from millipode.smooth.bridge import Gaussian, backward, move, pick
from millipode.xla.autodiff import backwards, both_ways


class Nodes(NamedTuple):
    """Filter states at the steps of a solve, time first.

    Attributes:
        t: the times.
        mean: one field per derivative.
        covariance: under the filter's own γ.
        gamma: γ̂ of the step that ended here, if dynamic.
        errors: what is kept of errors of y, a pytree with the time first.
        firm: whether the step that ended here solved linear systems; None if none did.
    """

    t: Array
    mean: tuple[Field, ...]
    covariance: Covariance
    gamma: Coefficient | None
    errors: PyTree[Array] = None
    firm: Array | None = None


def fixed_interval(prior: Prior, nodes: Nodes, count: Array, last: Gaussian) -> Gaussian:
    """The posterior at the first ``count`` nodes, given it at node count−1.

    The covariance of a filter that solves linear systems knows nothing of what is stiff, so a mean that is
    smoothed by it may leave the values to which the ODE holds it. Such steps leave the mean at their start as
    the filter had it.
    """

    def run(inputs: tuple, reverse: bool) -> Gaussian:
        arrays, nodes, count, last = inputs
        prior = eqx.combine(arrays, static)

        def read(i: Array) -> tuple[Array, Coefficient, Covariance, Array | None]:
            following = jnp.minimum(i + 1, nodes.t.size - 1)
            h = jnp.abs(nodes.t[following] - nodes.t[i])
            gamma = jnp.ones_like(h) if nodes.gamma is None else pick(nodes.gamma, following)
            firm = None if nodes.firm is None else nodes.firm[following]
            return h, gamma, pick(nodes.covariance, i), firm

        def step(later: Gaussian, inputs: tuple, here: Gaussian) -> tuple[Gaussian, Gaussian]:
            h, gamma, covariance, firm = inputs
            kernel = backward(prior, covariance, h, gamma, here.mean[0], h <= 0)
            surprise = jax.tree.map(jnp.subtract, later.mean, move(prior, here.mean, h))
            change = kernel.apply(surprise)
            if firm is not None:
                change = jax.tree.map(lambda x: jnp.where(firm, 0, x), change)
            mean = jax.tree.map(jnp.add, here.mean, change)
            smoothed = Gaussian(mean, kernel.push(later.covariance))
            return smoothed, smoothed

        result = Gaussian(nodes.mean, jax.vmap(type(nodes.covariance).square)(nodes.covariance))
        result = jax.tree.map(lambda x, new: x.at[count - 1].set(new), result, last)
        return backwards(step, last, read, result, count - 1, reverse=reverse)

    arrays, static = eqx.partition(prior, eqx.is_array)
    return both_ways(run, (arrays, nodes, count, last))
