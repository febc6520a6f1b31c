"""The gain of an EK0 that has taken many equal steps: a constant of the order ν."""

from functools import cache
from math import comb

import numpy as np

from millipode.linalg.fields import Coefficient, map_leaves
from millipode.model.priors.iwp import hilbert_root
from millipode.model.priors.protocol import Prior

# The recursion forgets its start like |ζ|^(2k), with |ζ| < 0.7 up to the largest order.
_STEPS = 200


@cache
def steady_gain(order: int) -> float:
    """By how much a steady EK0 moves y for a residual of 1, at the step size 1; the same as in units of h.

    >>> [round(steady_gain(order), 3) for order in (1, 2, 3, 4)]
    [0.5, 0.394, 0.356, 0.332]
    """
    n = order + 1
    phi = np.array([[comb(order - i, order - j) for j in range(n)] for i in range(n)], float)
    root = hilbert_root(n)
    noise, covariance, gain = root.T @ root, np.zeros((n, n)), np.zeros(n)
    for _ in range(_STEPS):
        predicted = phi @ covariance @ phi.T + noise
        gain = predicted[:, 1] / predicted[1, 1]
        left = np.eye(n) - np.outer(gain, np.eye(n)[1])
        covariance = left @ predicted @ left.T
    return float(gain[0] / order)  # T₀/T₁ = h/ν leads from scaled coordinates to those of y


def lead(prior: Prior, h: Coefficient) -> Coefficient:
    """l₀: by how much y moves for a residual of 1 in a step h, as far as that does not depend on the ODE.

    That of a steady EK0, times what the prior's own dynamics make of it.
    """
    v = prior.remainder(h)
    return map_leaves(lambda a, b: steady_gain(prior.order) * (prior.order + 1) * a / b, v[0], v[1])
