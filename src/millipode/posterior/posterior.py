"""The posterior that a solve leaves behind.

What was saved decides how much is known: ``Marginals`` know y at single times, a ``Chain`` knows states and
how neighbours depend on each other, a ``Path`` knows every step and with it all times between. Means and
covariances have the time as leading axis; covariances are those under the filter's own γ, and
``output_gamma`` calibrates them.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.covariance.protocol import Covariance
from millipode.filter.ensemble import Errors
from millipode.linalg.fields import Coefficient, Field, dtype, map_leaves, same_structure
from millipode.model.priors.protocol import Prior
from millipode.smooth.bridge import Gaussian
from millipode.smooth.interval import Nodes
from millipode.smooth.point import Links, led
from millipode.xla.module import Module

# Those fields of a posterior that do not have the time as leading axis.
TIMELESS = ("output_gamma", "prior")


class Moments(NamedTuple):
    """Mean and standard deviation of one derivative; the latter may be shared by all unknowns."""

    mean: Field
    std: Coefficient


class Posterior(Module):
    """What is known of the solution at saved times.

    Attributes:
        mean: y and, where they were saved, the other fields of the prior's state.
        std: of y, calibrated; one number per time if all unknowns share it. The filter's or the smoother's.
        errors: ensemble members or the size of the error of y, time first; None if there are neither.
        is_continuous: whether all times between the saved ones are known, too.
    """

    is_continuous: ClassVar[bool] = False

    mean: eqx.AbstractVar[tuple[Field, ...]]
    std: eqx.AbstractVar[Coefficient]
    errors: eqx.AbstractVar[Errors | None]

    @property
    def members(self) -> Field | None:
        """The ensemble of errors of y, time first, then members."""
        return None if self.errors is None else self.errors.members

    @property
    def is_joint(self) -> bool:
        """Whether it is known how the saved times depend on each other, so that samples can be drawn."""
        return False

    def derivative(self, t: Array, q: Array) -> Moments:
        """The moments of y^(q) at the saved times t, in user time."""
        raise TypeError(f"{type(self).__name__} know nothing of derivatives.")

    def joined(self, others: Sequence["Posterior"], join: Callable[..., Array]) -> Self:
        """This one after the others, with ``join`` applied to each array that has a time axis."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in TIMELESS]
        parts = {
            name: jax.tree.map(join, *(getattr(p, name) for p in others), getattr(self, name))
            for name in names
        }
        return dataclasses.replace(self, **parts)


class Marginals(Posterior):
    """Mean and standard deviation of y, and its errors if they are known; nothing else."""

    mean: tuple[Field, ...]
    std: Coefficient
    errors: Errors | None


class States(Posterior):
    """A posterior that knows whole states.

    Attributes:
        covariance: of the states.
        output_gamma: calibrates all covariances.
        prior: which relates states to derivatives, and to other times.
    """

    covariance: eqx.AbstractVar[Covariance]
    output_gamma: eqx.AbstractVar[Coefficient]
    prior: eqx.AbstractVar[Prior]

    def derivative(self, t: Array, q: Array) -> Moments:
        """The moments of y^(q) at the saved times t, in user time."""
        return Moments(in_user_time(self.derivatives(q), direction(t), q), self.stds(q))

    def derivatives(self, q: Array) -> Field:
        """The means of y^(q) at the saved times, in the filter's time."""
        return jax.vmap(lambda state: self.prior.derivative(state, q))(self.mean)

    @abc.abstractmethod
    def stds(self, q: Array) -> Coefficient:
        """The calibrated standard deviations of y^(q) at the saved times."""


class Chain(States):
    """States at given times, and how each depends on the one after it.

    Attributes:
        links: between neighbours. A few saved times follow their states with a short lead.
    """

    mean: tuple[Field, ...]
    std: Coefficient
    errors: Errors | None
    covariance: Covariance
    links: Links
    output_gamma: Coefficient
    prior: Prior

    @property
    def is_joint(self) -> bool:
        """Always."""
        return True

    def stds(self, q: Array) -> Coefficient:
        """Those of the states, followed by their leads."""
        return chain_std(self.prior, Gaussian(self.mean, self.covariance), self.links, self.output_gamma, q)


class Path(States):
    """Every step, and therefore every time between.

    Attributes:
        mean: of the smoother, or of the filter if that is all there is.
        covariance: likewise.
        filtered: the filter's covariance, if ``covariance`` is the smoother's; else None.
        gamma: γ̂ of the step that ended at each time, if dynamic.
    """

    is_continuous: ClassVar[bool] = True

    mean: tuple[Field, ...]
    std: Coefficient
    errors: Errors | None
    covariance: Covariance
    filtered: Covariance | None
    gamma: Coefficient | None
    output_gamma: Coefficient
    prior: Prior

    @property
    def is_joint(self) -> bool:
        """Whether the smoother has seen it."""
        return self.filtered is not None

    def stds(self, q: Array) -> Coefficient:
        """Those of the states."""
        return std_of(self.prior, Gaussian(self.mean, self.covariance), self.output_gamma, q)


def direction(t: Array) -> Array:
    """+1 forwards in time, −1 backwards, for times in order."""
    return jnp.where(t[-1] >= t[0], 1, -1)


def in_user_time(derivative: Field, sign: Array, q: Array) -> Field:
    """The q-th derivative by the user's time, from that by the filter's, which always runs forwards."""
    return jax.tree.map(lambda x: x * (sign**q).astype(x.dtype), derivative)


def calibrate(std: Coefficient, output_gamma: Coefficient, y: Field) -> Coefficient:
    """The product of a standard deviation and γ; a number if both are."""
    if all(same_structure(x, 0) and x.ndim == 0 for x in (std, output_gamma)):
        return std * output_gamma
    return map_leaves(lambda _, s, c: s * c, y, std, output_gamma)


def marginal_std(
    prior: Prior, covariance: Covariance, y: Field, q: Array | int, output_gamma: Coefficient
) -> Coefficient:
    """The calibrated standard deviation of y^(q)."""
    zero = jnp.zeros((), dtype(y))
    return calibrate(covariance.std(y, prior.row(q, y), zero, zero), output_gamma, y)


def std_of(
    prior: Prior, states: Nodes | Gaussian, output_gamma: Coefficient, q: Array | int = 0
) -> Coefficient:
    """The calibrated standard deviations of y^(q), time first."""

    def one(c: Covariance, y: Field) -> Coefficient:
        return marginal_std(prior, c, y, q, output_gamma)

    return jax.vmap(one)(states.covariance, states.mean[0])


def chain_std(
    prior: Prior, states: Gaussian, links: Links, output_gamma: Coefficient, q: Array | int
) -> Coefficient:
    """The calibrated standard deviations of y^(q) at the saved times of a chain."""

    def one(c: Covariance, y: Field, lead: Array, gamma: Coefficient) -> Coefficient:
        return marginal_std(prior, led(prior, c, lead, gamma, y), y, q, output_gamma)

    return jax.vmap(one)(states.covariance, states.mean[0], links.lead, links.gamma)
