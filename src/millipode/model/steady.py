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
# A small relative change of the step, and |log| of odds that count as extreme.
_LITTLE, _EXTREME = 1e-4, 40.0


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
    covariance, error = np.zeros((n, n)), np.zeros(n)
    course = []
    for _ in range(_STEPS):
        covariance, error, gain, missed = _corrected(
            phi @ covariance @ phi.T + noise, phi @ error + remainder
        )
        course.append((gain / order, missed))  # T₀/T₁ = h/ν leads to the coordinates of y
    return _Course(*np.array(course).T)


def _corrected(covariance: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """A predicted covariance and error after their correction; the gain of y, and the residual."""
    gain = covariance[:, 1] / covariance[1, 1]
    left = np.eye(error.size)
    left[:, 1] -= gain
    return left @ covariance @ left.T, left @ error, gain[0], error[1]


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


class Response(NamedTuple):
    """How the share of a residual that is information from its own step follows changes of the step size.

    Attributes:
        power: p; if a step is r times as long as those before, the odds that a residual is a response to
            earlier steps are r^−p times what they were.
        memory: the weight of a step in the mean step, over that of the next one.
    """

    power: float
    memory: float


@cache
def response(order: int) -> Response:
    """Fitted to how a steady filter responds to one step size that differs a little."""
    settled = np.ones(_STEPS)
    longer = settled.copy()
    longer[_STEPS // 2 :] *= 1 + _LITTLE
    shares = [_shares(order, steps)[_STEPS // 2 :] for steps in (settled, longer)]
    reaction = (np.log(shares[1]) - np.log(shares[0])) / np.log1p(_LITTLE)
    if shares[0][-1] == 1:  # order 1: nothing is a response
        return Response(0.0, 0.0)
    memories = np.linspace(0, 0.95, 96)
    misfits = [np.sum((reaction - reaction[0] * m ** np.arange(reaction.size)) ** 2) for m in memories]
    return Response(float(reaction[0] / (1 - shares[0][-1])), float(memories[np.argmin(misfits)]))


def _shares(order: int, steps: np.ndarray) -> np.ndarray:
    """The share of every residual that is information from its own step, if derivative ν+1 is constant."""
    n = order + 1
    phi, noise, remainder = scaled_step(order)
    covariance, error, shares = np.zeros((n, n)), np.zeros(n), []
    for ratio in np.divide(steps, np.roll(steps, 1)):
        units = ratio ** -np.arange(n, 0, -1.0)
        covariance, error = ratio * np.outer(units, units) * covariance, units * error
        covariance, error, _, missed = _corrected(phi @ covariance @ phi.T + noise, phi @ error + remainder)
        shares.append(remainder[1] / missed)
    return np.array(shares)


def informative_share(order: int, steps: Array, h: Array, usual: Array) -> tuple[Array, Array]:
    """The share of a residual that is information from its own step; and the mean step, from now on.

    The rest is a response to earlier steps, by way of the errors that they have left.

    Args:
        order: ν.
        steps: how many came before.
        h: this step.
        usual: a geometric mean of the steps so far, in which the latest counts most.
    """
    power, memory = response(order)
    steady = 1 / (order * float(_course(order).residuals[-1]))
    share = steady * unsettled(order, steps, h.dtype)
    # Beyond these bounds, the odds are as good as zero or infinite, and single precision might overflow.
    change = jnp.clip(jnp.log(h / usual), -_EXTREME / max(power, 1), _EXTREME / max(power, 1))
    odds = jnp.maximum(1 / share - 1, 0) * jnp.exp(-power * change)
    return 1 / (1 + odds), usual * jnp.exp((1 - memory) * jnp.log(h / usual))


def lead(prior: Prior, h: Coefficient) -> Coefficient:
    """l₀: by how much y moves for a residual of 1 in a step h, as far as that does not depend on the ODE.

    That of a steady EK0, times what the prior's own dynamics make of it.
    """
    v = prior.remainder(h)
    return map_leaves(lambda a, b: steady_gain(prior.order) * (prior.order + 1) * a / b, v[0], v[1])
