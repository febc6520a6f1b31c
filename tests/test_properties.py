"""Symmetries of the model, for any problem of a random family."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millipode as mp
from common import CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR

SOLVERS = [
    mp.EK0(3, diffusion=DYNAMIC),
    mp.EK0(3, diffusion=CONSTANT_VECTOR),
    mp.DiagonalEK1(3, diffusion=DYNAMIC_VECTOR),
    mp.EK1(3, diffusion=CONSTANT, structure="dense"),
    mp.EK1(3, diffusion=CONSTANT),
]
NAMES = [
    *("EK0-dynamic", "EK0-constant-vector", "DiagonalEK1-dynamic-vector"),
    *("EK1-dense-constant", "EK1-constant"),
]
TIMES = np.array([0.3, 1.0])


def family(t, y, args):
    """c·g((y)/c) with parameters; the clock enters as t − start."""
    matrix, scale, start = args
    x = y / scale
    return scale * (matrix @ x + jnp.sin(x) * jnp.cos(3 * (t - start)))


def run(solver, y0, matrix, scale=1.0, start=0.0):
    args = (jnp.asarray(matrix), jnp.asarray(float(scale)), jnp.asarray(float(start)))
    return mp.solve(
        family,
        jnp.asarray(y0),
        (start, start + 1.0),
        args=args,
        solver=solver,
        save=start + TIMES,
        rtol=1e-4,
        atol=1e-5 * scale,
    )


numbers = st.floats(-2, 2).map(lambda x: round(x, 3))
problems = st.tuples(
    st.lists(numbers, min_size=3, max_size=3).map(np.array),
    st.lists(numbers, min_size=9, max_size=9).map(lambda x: np.array(x).reshape(3, 3) - 2 * np.eye(3)),
)


@pytest.mark.parametrize("solver", SOLVERS, ids=NAMES)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(problem=problems, power=st.integers(-30, 30), start=st.sampled_from([-4.0, 0.5, 16.0]))
@pytest.mark.wide(quick=2)
def test_scaling_shifting_and_permuting(solver, problem, power, start):
    y0, matrix = problem
    base = run(solver, y0, matrix)

    # A power of two: floating-point arithmetic itself is invariant.
    c = 2.0**power
    scaled = run(solver, c * y0, matrix, scale=c)
    np.testing.assert_allclose(scaled.mean, c * base.mean, rtol=1e-9, atol=1e-12 * c)
    np.testing.assert_allclose(scaled.std, c * base.std, rtol=1e-7, atol=1e-15 * c)

    # A shift rounds the clock, which moves adaptive steps by some ulps.
    shifted = run(solver, y0, matrix, start=start)
    np.testing.assert_allclose(shifted.mean, base.mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(shifted.std, base.std, rtol=1e-3, atol=1e-12)

    order = np.array([2, 0, 1])
    permuted = run(solver, y0[order], matrix[np.ix_(order, order)])
    np.testing.assert_allclose(permuted.mean, base.mean[:, order], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(permuted.std, base.std[:, order], rtol=1e-3, atol=1e-12)
