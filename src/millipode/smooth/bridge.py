"""From one time to another within a step: predictions, and the kernels that lead back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from millipode.covariance.protocol import Covariance, Kernel
from millipode.linalg.fields import Coefficient, Field, combine
from millipode.model.priors.protocol import Prior


class Gaussian(NamedTuple):
    """N(mean, covariance) of a state, or with a leading axis of many."""

    mean: tuple[Field, ...]
    covariance: Covariance


def pick(x: PyTree, i: Array | int) -> PyTree:
    """Entry i of everything that has the time as its leading axis."""
    return jax.tree.map(lambda leaf: leaf[i], x)


def negligible(h: Array) -> Array:
    """The longest time that counts as none beside a step h: the scaled coordinates of less would overflow."""
    return h * jnp.finfo(h.dtype).eps ** 0.75


def near(order: int, h: Array) -> Array:
    """The time after a step of length h within which a state is too close to the step's to tell them apart.

    The filter knows H Y(t) exactly, and next to nothing else. Seen from a time τ later, Y(t) is a difference
    quotient with 1/τ^ν in it, which rounding turns into ε (h/τ)^ν. Modelling Y(t+τ) as Φ(τ) Y(t) plus
    independent noise instead changes y by (τ/h)^(ν+1) of its standard deviation only. This is where both
    errors are equal, for standard deviations of 1e-5.
    """
    return h * (jnp.finfo(h.dtype).eps / 1e-5) ** (1 / (2 * order + 1))


def predict(prior: Prior, c: Covariance, tau: Array, gamma: Coefficient, y: Field, none: Array) -> Covariance:
    """The covariance a time τ later; the same one where ``none`` says that this is no time."""
    predicted = c.predict(prior.transition(jnp.where(none, 1, tau)), gamma, y)
    return jax.tree.map(lambda a, b: jnp.where(none, a, b), c.square(), predicted)


def backward(prior: Prior, c: Covariance, tau: Array, gamma: Coefficient, y: Field, none: Array) -> Kernel:
    """The kernel from a time τ later back to now; the identity where ``none`` says that this is no time."""
    kernel: Any = c.backward(prior.transition(jnp.where(none, 1, tau)), gamma, y)
    gain = jax.tree.map(lambda a, b: jnp.where(none, a, b), c.identity().gain, kernel.gain)
    noise = jax.tree.map(lambda x: jnp.where(none, 0, x), kernel.noise)
    return type(kernel)(gain, noise)


def move(prior: Prior, mean: tuple[Field, ...], tau: Array) -> tuple[Field, ...]:
    """Φ(τ) m, field by field."""
    return tuple(combine(row, mean) for row in prior.transition(tau).phi)
