"""An EK0 that takes equal steps, from an exact start until it is steady: constants of the order ν."""

from functools import cache
from math import comb
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from millipode.linalg.fields import Coefficient, map_leaves
from millipode.model.priors.iwp import hilbert_root
from millipode.model.priors.protocol import Prior

# The recursion forgets its start like |ζ|^(2k), with |ζ| < 0.7 up to the largest order.
_STEPS = 200
# A residual this close to its steady value counts as steady.
_SETTLED = 1.01


class ScaledStep(NamedTuple):
    """A step of an integrated Wiener process, in coordinates in which it does not depend on h.

    Attributes:
        phi: Φ, (n, n).
        noise: Σ, (n, n).
        remainder: v, what Taylor's series misses per unit of derivative ν+1, (n,).
    """

    phi: np.ndarray
    noise: np.ndarray
    remainder: np.ndarray


@cache
def scaled_step(order: int) -> ScaledStep:
    """Field i in units of h^(ν−i) / (ν−i)!, and of √h more for Σ, or h more for v."""
    n = order + 1
    phi = np.array([[comb(order - i, order - j) for j in range(n)] for i in range(n)], float)
    root = hilbert_root(n)
    return ScaledStep(phi, root.T @ root, 1 / np.arange(n, 0, -1))


class _Course(NamedTuple):
    """The gains of y and the residuals of all steps, for a solution whose derivative ν+1 is constant."""

    gains: np.ndarray
    residuals: np.ndarray


@cache
def _course(order: int) -> _Course:
    n = order + 1
    phi, noise, remainder = scaled_step(order)
    unit, covariance, error = np.eye(n)[1], np.zeros((n, n)), np.zeros(n)
    course = []
    for _ in range(_STEPS):
        predicted, missed = phi @ covariance @ phi.T + noise, phi @ error + remainder
        gain = predicted[:, 1] / predicted[1, 1]
        left = np.eye(n) - np.outer(gain, unit)
        covariance, error = left @ predicted @ left.T, left @ missed
        course.append((gain[0] / order, missed[1]))  # T₀/T₁ = h/ν leads to the coordinates of y
    return _Course(*np.array(course).T)


def steady_gain(order: int) -> float:
    """By how much a steady EK0 moves y for a residual of 1, at the step size 1; the same as in units of h.

    >>> [round(steady_gain(order), 3) for order in (1, 2, 3, 4)]
    [0.5, 0.394, 0.356, 0.332]
    """
    return float(_course(order).gains[-1])


@cache
def settling(order: int) -> tuple[float, ...]:
    """How many times larger the residual of each of the first steps would be in a steady filter.

    At an exact start, a prediction misses only the next derivative of y; later ones also repeat the errors
    that earlier steps have left in all derivatives.

    >>> [round(x, 2) for x in settling(2)]
    [1.58, 1.05, 1.0]
    """
    residuals = _course(order).residuals
    factors = residuals[-1] / residuals
    last = int(np.argmax(np.maximum.accumulate(np.abs(factors[::-1] - 1))[::-1] < _SETTLED - 1))
    return (*(float(x) for x in factors[:last]), 1.0)


def unsettled(order: int, steps: Array, kind: Any) -> Array:
    """The entry of ``settling`` for a step after this many others."""
    factors = jnp.asarray(settling(order), kind)
    return factors[jnp.minimum(steps, factors.size - 1)]


def lead(prior: Prior, h: Coefficient) -> Coefficient:
    """l₀: by how much y moves for a residual of 1 in a step h, as far as that does not depend on the ODE.

    That of a steady EK0, times what the prior's own dynamics make of it.
    """
    v = prior.remainder(h)
    return map_leaves(lambda a, b: steady_gain(prior.order) * (prior.order + 1) * a / b, v[0], v[1])
