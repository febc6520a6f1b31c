"""Fixed-point smoothing: the posterior of earlier states while the filter runs, with nothing stored per step.

An *anchor* remembers one earlier state X and how it depends on the present one, X | Y(t) ~ N(E[X] + G (Y(t)
− E[Y(t)]), P). A residual that moves the filter's mean by −K z then moves that of X by −G K z: one more
field is read per step, and memory does not grow with the number of steps.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from millipode.covariance.protocol import Covariance, Kernel
from millipode.filter.moving import shift
from millipode.filter.state import Move
from millipode.linalg.fields import Coefficient, Field
from millipode.model.priors.protocol import Prior
from millipode.smooth.bridge import Gaussian, move, pick, predict
from millipode.xla.autodiff import backwards, both_ways


class Anchor(NamedTuple):
    """An earlier state X, given all data so far.

    Attributes:
        mean: of X.
        kernel: of X | Y(t).
        pull: another kernel, by which residuals move the mean, if steps may solve linear systems: that of a
            bridge between the ends of such a step, after which they leave X alone (``interval`` says why).
    """

    mean: tuple[Field, ...]
    kernel: Kernel
    pull: Kernel | None = None

    @property
    def moving(self) -> Kernel:
        """The kernel by which the mean moves."""
        return self.kernel if self.pull is None else self.pull

    def corrected(self, covariance: Covariance, moves: tuple[Move, ...]) -> "Anchor":
        """After the filter has moved its mean by −Σ k ⊗ x, which is −K z for most of them."""
        moved = shift(covariance, tuple(Move(self.moving.through(m.gain), m.field) for m in moves))
        return self._replace(mean=jax.tree.map(jnp.subtract, self.mean, moved))


class Links(NamedTuple):
    """How neighbours in a chain of states depend on each other, time first.

    Attributes:
        kernel: from each state back to the one before it.
        lead: how long after its state each saved time lies (zero for nearly all, see ``bridge.near``).
        gamma: γ there.
        pull: the kernel by which means depend on each other, if that is another one.
    """

    kernel: Kernel
    lead: Array
    gamma: Coefficient
    pull: Kernel | None = None


def led(prior: Prior, c: Covariance, lead: Array, gamma: Coefficient, y: Field) -> Covariance:
    """The covariance at a saved time, from that of its state."""
    return predict(prior, c, lead, gamma, y, lead <= 0)


def chain(prior: Prior, offsets: tuple[Field, ...], links: Links, count: Array, last: Gaussian) -> Gaussian:
    """The posterior at a chain of states X_j = b_j + G_j X_{j+1} + noise, with means at the saved times.

    Number count−1 is ``last``.
    """

    def run(inputs: tuple, reverse: bool) -> Gaussian:
        arrays, offsets, links, count, last = inputs
        prior = eqx.combine(arrays, static)

        def step(later: Gaussian, link: tuple, here: Gaussian) -> tuple[Gaussian, Gaussian]:
            kernel, lead, pull = link
            mean = jax.tree.map(jnp.add, here.mean, (kernel if pull is None else pull).apply(later.mean))
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
            step,
            last,
            lambda j: pick((links.kernel, links.lead, links.pull), j),
            result,
            count - 1,
            reverse=reverse,
        )

    arrays, static = eqx.partition(prior, eqx.is_array)
    return both_ways(run, (arrays, offsets, links, count, last))
