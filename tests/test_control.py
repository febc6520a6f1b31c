"""Step-size control: exact ends, fixed steps, tolerances, the first step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import rmse


def decay(t, y):
    return -y


def slow(t, y):
    return -0.1 * y


@pytest.mark.parametrize("t_span", [(0.0, 1.0), (1.0, 0.0), (-3.0, 4.1), (1e3, 1e3 + 0.7)], ids=str)
def test_the_end_is_hit_exactly(t_span):
    for controller in (None, mp.FixedStep(0.1), mp.FixedStep(1 / 3)):
        sol = mp.solve(slow, jnp.ones(2), t_span, controller=controller, smooth=False)
        assert float(sol.t[-1]) == t_span[1] and float(sol.t[0]) == t_span[0]
        np.testing.assert_allclose(sol.mean[-1], np.exp(-0.1 * (t_span[1] - t_span[0])), rtol=1e-3)


def test_fixed_steps_are_counted_not_accumulated():
    for n in (10, 49, 1000):
        sol = mp.solve(decay, jnp.ones(1), (0.0, 1.0), controller=mp.FixedStep(1 / n), smooth=False)
        assert int(sol.stats.steps) == n and int(sol.stats.rejected) == 0
        np.testing.assert_allclose(np.diff(sol.t), 1 / n, rtol=1e-10)
    ragged = mp.solve(decay, jnp.ones(1), (0.0, 1.0), controller=mp.FixedStep(0.3), smooth=False)
    np.testing.assert_allclose(ragged.t, [0, 0.3, 0.6, 0.9, 1.0], rtol=1e-15)
    assert int(ragged.stats.f_evals) >= 4


@pytest.mark.parametrize("solver", [mp.EK0(3), mp.DiagonalEK1(3), mp.EK1(3)], ids=lambda s: type(s).__name__)
def test_errors_follow_the_tolerance(solver):
    def f(t, y):
        return jnp.stack([y[1], -y[0]])

    exact = jnp.array([np.cos(5.0), -np.sin(5.0)])
    errors = []
    for tolerance in (1e-3, 1e-5, 1e-7):
        sol = mp.solve(
            f,
            jnp.array([1.0, 0.0]),
            (0.0, 5.0),
            solver=solver,
            rtol=tolerance,
            atol=tolerance,
            save="end",
        )
        errors.append(rmse(sol.mean[-1], exact))
        assert errors[-1] < 10 * tolerance
    assert errors[0] > 3 * errors[1] and errors[1] > 10 * errors[2]


def test_tolerances_may_be_shaped_like_y():
    y0 = {"a": jnp.array([1.0, 1e-6]), "b": jnp.array(5.0)}
    f = lambda t, y: jax.tree.map(lambda x: -3 * x, y)
    mixed = {"a": jnp.array([1e-3, 1e-12]), "b": jnp.array(1e-3)}
    solve = partial(mp.solve, f, y0, (0.0, 1.0), solver=mp.EK0(3), smooth=False)
    sol, same = solve(atol=mixed, rtol=0.0), solve(atol=1e-3, rtol=0.0)
    assert sol.success and sol.stats.steps > same.stats.steps
    by_array, by_scalar = solve(rtol=jax.tree.map(lambda x: 1e-4 * jnp.ones_like(x), y0)), solve(rtol=1e-4)
    np.testing.assert_array_equal(by_array.t, by_scalar.t)


def test_steps_do_not_depend_on_the_unit_of_time():
    def f(t, y, scale):
        return jnp.stack([y[1], -y[0]]) / scale

    def relative_steps(scale, y0):
        sol = mp.solve(f, y0, (0.0, 5 * scale), args=jnp.asarray(scale), solver=mp.EK0(3), smooth=False)
        assert int(sol.stats.rejected) < 0.2 * int(sol.stats.steps)
        return np.diff(sol.t) / scale

    for y0 in (jnp.array([1.0, 0.0]), jnp.array([0.0, 1e-3])):
        one = relative_steps(1.0, y0)
        assert 1e-5 < one[0] < 0.5
        for scale in (1e-8, 1e8):
            # The last step is what the others leave, rounding and all.
            np.testing.assert_allclose(relative_steps(scale, y0)[:-1], one[:-1], rtol=1e-5)


def test_dt0_is_used():
    sol = mp.solve(decay, jnp.ones(2), (0.0, 1.0), dt0=1e-3, smooth=False)
    assert float(sol.t[1]) == pytest.approx(1e-3)


def test_the_end_of_the_span_does_not_change_the_steps_before_it():
    short, long = (mp.solve(decay, jnp.ones(2), (0.0, t1), dt0=1e-2, smooth=False) for t1 in (1.0, 3.0))
    n = short.t.size - 2
    np.testing.assert_allclose(short.t[:n], long.t[:n], rtol=1e-13)
