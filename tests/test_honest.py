"""The standard deviation that users get who do not ask for any: a transported error gives it its size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import ALL, Y0, name, nonlinear, rmse

TIMES = np.array([0.2, 0.6, 1.0])
OPTIONS = dict(rtol=1e-5, atol=1e-7)
EXACT = mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK1(8), rtol=1e-13, atol=1e-13, save=TIMES)


def solve(**options):
    return mp.solve(nonlinear, Y0, (0.0, 1.0), **OPTIONS | options)


def rms(x):
    return float(np.sqrt(np.mean(np.asarray(x) ** 2)))


@pytest.mark.parametrize("diffusion", ALL, ids=name)
@pytest.mark.parametrize("kind", [mp.EK0, mp.DiagonalEK1])
@pytest.mark.wide(quick=3)
def test_it_has_the_size_of_the_error_at_all_times(kind, diffusion):
    sol = solve(solver=kind(3, diffusion=diffusion), save=TIMES)
    # With a constant γ, the first steps have gains of their own, and the estimate is more cautious there.
    for error, std in zip(sol.mean - EXACT.mean, sol.std, strict=True):
        assert 1 / 10 < rms(error) / rms(std) < 5


def test_the_filter_alone_is_too_cautious_by_far_at_high_order():
    sol = solve(solver=mp.EK0(7), save="end", rtol=1e-9, atol=1e-9)
    error = rms(sol.mean[-1] - EXACT.mean[-1])
    assert error < rms(sol.filter_std[-1]) / 10
    assert 1 / 5 < error / rms(sol.std[-1]) < 5


@pytest.mark.parametrize("structure", ["blockdiagonal", "dense"])
def test_structures_agree(structure):
    one, other = (solve(solver=mp.EK0(3, structure=s)) for s in ("kronecker", structure))
    np.testing.assert_allclose(other.std, one.std, rtol=1e-7)


def test_all_ways_of_saving_tell_the_same_story():
    steps, end, times = (solve(save=save) for save in ("steps", "end", TIMES))
    np.testing.assert_allclose(end.std[-1], steps.std[-1], rtol=1e-6)
    np.testing.assert_allclose(times.std, steps(TIMES).std, rtol=1e-6)
    np.testing.assert_allclose(steps(steps.t).std, steps.std, rtol=1e-6, atol=1e-20)
    again = solve(smooth="recompute")
    np.testing.assert_allclose(again.std, steps.std, rtol=1e-6)
    # The shape in time and space is the smoother's; only the size is another.
    np.testing.assert_allclose(
        steps.std[5] / rms(steps.std[5]), steps.filter_std[5] / rms(steps.filter_std[5])
    )


def test_samples_have_its_size():
    sol = solve()
    draws = np.asarray(sol.sample(jax.random.key(0), 2000, at=TIMES))
    np.testing.assert_allclose(np.std(draws, axis=0), sol(TIMES).std, rtol=0.1)
    np.testing.assert_allclose(
        np.std(np.asarray(sol.sample(jax.random.key(1), 2000))[:, -1], axis=0), sol.std[-1], rtol=0.1
    )


def test_it_leaves_the_mean_and_the_filter_alone():
    default, plain = solve(), solve(uncertainty="filter")
    np.testing.assert_allclose(default.mean, plain.mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(default.filter_std, plain.std, rtol=1e-7, atol=1e-20)
    for own in (plain, solve(solver=mp.EK0(3, corrections=1)), solve(solver=mp.EK1(3, structure="dense"))):
        np.testing.assert_array_equal(own.std, own.filter_std)


def test_transformations():
    def std(y0):
        return mp.solve(nonlinear, y0, (0.0, 1.0), save="end", controller=mp.FixedStep(0.05)).std

    want = std(Y0)
    np.testing.assert_allclose(jax.jit(std)(Y0), want, rtol=1e-8)
    np.testing.assert_allclose(jax.vmap(std)(jnp.stack([Y0, 2 * Y0]))[0], want, rtol=1e-8)
    direction, h = jnp.array([1.0, -0.5, 0.3]), 1e-6
    forward = jax.jvp(std, (Y0,), (direction,))[1]
    quotient = (std(Y0 + h * direction) - std(Y0 - h * direction)) / (2 * h)
    np.testing.assert_allclose(forward, quotient, rtol=1e-4)
    reverse = jax.grad(lambda y: std(y).sum())(Y0) @ direction
    np.testing.assert_allclose(reverse, forward.sum(), rtol=1e-6)


def test_backwards_and_in_single_precision():
    back = mp.solve(nonlinear, EXACT.mean[-1], (1.0, 0.0), save="end", **OPTIONS)
    assert 1 / 10 < rmse(back.mean[-1], Y0) / rms(back.std[-1]) < 10
    single, double = (
        mp.solve(lambda t, y: -(y**2), jnp.ones(3, kind), (0.0, 1.0), save="end", rtol=1e-3)
        for kind in (jnp.float32, jnp.float64)
    )
    np.testing.assert_allclose(single.std, double.std, rtol=0.2)


@pytest.mark.parametrize("bad", [3, "members", True])
def test_bad_uncertainties_are_refused(bad):
    with pytest.raises(TypeError, match="uncertainty must be"):
        solve(uncertainty=bad)
