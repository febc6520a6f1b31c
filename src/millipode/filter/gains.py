"""Gains of two scalar filters, which depend on the ratios of steps and on nothing else.

One observes y' (as an EK0 does), the other y itself. Both take the noise of a step to be 1 in units of that
step: in the coordinates y^(q) h^q it does not depend on h, and what is known of earlier steps is rescaled.
With a constant γ instead, whose noise grows like h^(2ν+1), a filter forgets the past while steps grow, and
its gains become those of a first step: then what is wrong in high derivatives is amplified in every step, by
the factor 25 for ν = 5 and steps that double. With this noise it is damped in stiff directions, whatever the
ratio of steps is, which variable-step BDF methods cannot say of themselves (``tests/test_implicit.py`` has
the numbers).
"""

from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from millipode.covariance.blocks import rotate
from millipode.covariance.observation import BlockObservation
from millipode.covariance.transition import Transition
from millipode.filter.state import Past
from millipode.filter.strictness import sketch
from millipode.linalg.fields import Field, dtype
from millipode.linalg.qr import merge
from millipode.model.priors.iwp import powers
from millipode.model.steady import scaled_step

# After this many equal steps, gains are steady up to rounding.
_STEPS = 200


class Gains(NamedTuple):
    """Gains of the fields of a state, relative to that of y'.

    Attributes:
        accurate: l⁰, of the filter that observes y'.
        stiff: l^∞, of the filter that observes y.
        past: what the next step needs to know.
    """

    accurate: Float[Array, " n"]
    stiff: Float[Array, " n"]
    past: Past


def no_past(order: int, y: Field) -> Past:
    """Nothing is uncertain at t₀, where the state is y."""
    root = jnp.zeros((order, order + 1), dtype(y))
    one, zero = jnp.ones((), root.dtype), jnp.zeros((), root.dtype)
    return Past(root, root, h=one, rate=one, share=one, sketch=jnp.zeros_like(sketch(y)), radius=zero)


def settled(order: int, past: Past, h: Array) -> Past:
    """What is known after many steps of length h."""
    accurate, stiff = (jnp.asarray(_settled(order, observed), h.dtype) for observed in (1, 0))
    return past._replace(accurate=accurate, stiff=stiff, h=h, rate=jnp.ones_like(h))


@cache
def _settled(order: int, observed: int) -> np.ndarray:
    """The root of the covariance of a scalar filter after many equal steps."""
    phi, noise, _ = scaled_step(order)
    covariance = np.zeros_like(phi)
    for _ in range(_STEPS):
        predicted = phi @ covariance @ phi.T + noise
        left = np.eye(order + 1)
        left[:, observed] -= predicted[:, observed] / predicted[observed, observed]
        covariance = left @ predicted @ left.T
    unknown = np.delete(np.arange(order + 1), observed)
    root = np.zeros((order, order + 1))
    root[:, unknown] = np.linalg.cholesky(covariance[np.ix_(unknown, unknown)]).T
    return root


def gains(past: Past, transition: Transition, h: Array) -> Gains:
    """The gains of a step of length h."""
    block = transition.at(None)
    n = block.scaling.shape[0]
    stretch = jnp.stack(powers(h / past.h, n))
    units = block.scaling / block.scaling[1]

    def predicted(root: Array) -> Array:
        """An upper triangular root of C⁻ = Φ C Φᵀ + Σ, in units of this step."""
        return merge((root * stretch) @ block.scaled_phi.T, block.scaled_root)[0]

    _, gain, accurate = rotate(predicted(past.accurate), BlockObservation(None))
    # The first row of a triangular root is what observing y reveals; the others are what is left.
    root = predicted(past.stiff)
    return Gains(
        accurate=units * gain / gain[1],
        stiff=units * root[0] / root[0, 1],
        past=past._replace(accurate=accurate, stiff=root[1:].at[:, 0].set(0), h=h),
    )
