"""The noise of a prior over a step, as a covariance of the state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from millipode.covariance.kronecker import Kronecker
from millipode.covariance.protocol import Covariance
from millipode.linalg.fields import Field, dtype
from millipode.model.priors.protocol import Prior


def certain(prior: Prior, like: Covariance) -> Covariance:
    """A covariance of zero: one block for all unknowns if the prior treats them alike."""
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
