"""Corrections: f linearised again at the corrected mean."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import millipode as mp
from common import CONSTANT, Y0, final_carry, nonlinear, rmse
from millipode.filter.step import attempt
from millipode.model import steady
from oracle import steady_gain

# |hλ| of an EK0 with two corrections, ν = 1 … 6, on the real and on the imaginary axis.
LIMITS = {"real": (2.0, 1.73, 1.16, 0.76, 0.50, 0.32), "imaginary": (1.28, 1.06, 0.50, 0.47, 0.30, 0.18)}


def spiral(t, y, coefficients):
    a, b = coefficients
    return jnp.stack([a * y[0] - b * y[1], b * y[0] + a * y[1]])


@pytest.mark.parametrize("axis", LIMITS)
@pytest.mark.parametrize("order", range(1, 7))
@pytest.mark.wide(quick=4)
def test_stability_limits_are_those_of_the_design(axis, order):
    solver, limit = mp.EK0(order, corrections=2, diffusion=CONSTANT), LIMITS[axis][order - 1]

    def is_stable(x):
        """Whether y stays as small as it is in truth; unstable modes start at the level of rounding."""
        rate = jnp.array([-x, 0.0] if axis == "real" else [0.0, x])
        options = dict(args=rate, solver=solver, controller=mp.FixedStep(1.0), uncertainty="filter")
        sol = mp.solve(spiral, jnp.array([1.0, 0.5]), (0.0, 8000.0), save="end", throw=False, **options)
        # On the imaginary axis, growth of less than a thousandth per step counts as stable.
        return bool(sol.success and np.abs(sol.mean[-1]).max() < np.exp(1e-3 * 8000))

    assert is_stable(0.95 * limit) and not is_stable(1.05 * limit)


@pytest.mark.parametrize("order", [1, 2, 3, 5, 8, 11])
def test_the_steady_gain_is_that_of_many_equal_steps(order):
    # At order 11, the plain recursion has lost half of its digits.
    np.testing.assert_allclose(steady.steady_gain(order), steady_gain(order), rtol=1e-6)


@pytest.mark.parametrize("kind", [mp.EK0, mp.DiagonalEK1, mp.EK1])
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.wide(quick=3)
def test_convergence_order_is_one_more_than_guaranteed(kind, order):
    def f(t, y):
        return jnp.stack([y[0] * (1 - y[1]), y[1] * (y[0] - 1)])

    y0, steps = jnp.array([1.5, 1.0]), np.array([16, 32, 64])
    want = solve_ivp(f, (0.0, 1.0), y0, "DOP853", rtol=1e-13, atol=1e-13).y[:, -1]
    errors = [
        rmse(
            mp.solve(
                f,
                y0,
                (0.0, 1.0),
                solver=kind(order, corrections=2, diffusion=CONSTANT),
                controller=mp.FixedStep(1 / n),
                save="end",
            ).mean[-1],
            want,
        )
        for n in steps
    ]
    slope = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert abs(slope - (order + 1)) < 0.3, (slope, errors)


def test_two_corrections_are_many_times_more_accurate_on_the_pleiades():
    problem = mp.problems.pleiades()._replace(t_span=(0.0, 1.5))  # equal steps miss a later encounter
    want = solve_ivp(problem.f, problem.t_span, problem.y0, "DOP853", rtol=1e-12, atol=1e-12).y[:, -1]
    one, two = (
        mp.solve(
            problem.f,
            problem.y0,
            problem.t_span,
            solver=mp.EK0(3, corrections=c),
            controller=mp.FixedStep(1e-3),
            save="end",
        )
        for c in (1, 2)
    )
    errors = [rmse(sol.mean[-1], want) for sol in (one, two)]
    assert errors[1] < errors[0] / 10
    assert int(two.stats.f_evals) <= 4 + 2 * int(two.stats.steps) + int(two.stats.rejected)


def test_scales_of_unknowns_do_not_matter():
    def f(t, y):
        return y * jnp.cos(t)

    def steps(a):
        options = dict(solver=mp.EK0(4, corrections=2), rtol=1e-5, atol=0.0, save="end")
        sol = mp.solve(f, jnp.array([a, 1 / a]), (0.0, 10.0), **options)
        assert sol.success
        return int(sol.stats.steps)

    assert steps(1e6) <= 1.1 * steps(1.0)
    assert steps(1e20) <= 1.1 * steps(1.0)


def test_a_stiff_chemistry_takes_few_steps():
    def robertson(t, y):
        slow, fast = -0.04 * y[0] + 1e4 * y[1] * y[2], 3e7 * y[1] ** 2
        return jnp.stack([slow, -slow - fast, fast])

    y0, span = jnp.array([1.0, 0.0, 0.0]), (0.0, 1e5)
    options = dict(solver=mp.EK1(5, corrections=4), rtol=1e-6, atol=1e-10, save="end")
    sol = mp.solve(robertson, y0, span, **options)
    want = solve_ivp(robertson, span, y0, "Radau", rtol=1e-10, atol=1e-14).y[:, -1]
    assert (np.abs(sol.mean[-1] - want) < 50 * (1e-10 + 1e-6 * np.abs(want))).all()
    assert int(sol.stats.steps + sol.stats.rejected) < 350  # the paper's filter takes 3169


def test_corrections_that_do_not_contract_reject_the_step():
    grid = mp.Grid((16, 16))

    def f(t, y):
        u, v = y
        return jnp.stack(
            [
                grid.laplacian(u) + 500 * (0.1 - u + u * u * v),
                40 * grid.laplacian(v) + 500 * (0.9 - u * u * v),
            ]
        )

    y0 = jnp.stack([1 + 0.05 * jnp.cos(jnp.arange(256.0)), jnp.full(256, 0.9)]).reshape(2, 16, 16)
    solver = mp.DiagonalEK1(2, jacobian_diagonal=mp.Stencil(axes=(-2, -1), radius=1))
    sol = mp.solve(f, y0, (0.0, 0.01), solver=solver, rtol=1e-5, atol=1e-5, save="end")
    want = mp.solve(f, y0, (0.0, 0.01), solver=mp.EK0(4), rtol=1e-8, atol=1e-8, save="end")
    assert int(sol.stats.diverged) > 10
    assert rmse(sol.mean[-1], want.mean[-1]) < 300e-5


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_bad_numbers_of_corrections_are_refused(bad):
    with pytest.raises((TypeError, ValueError), match="corrections must be"):
        mp.EK0(corrections=bad)


def test_stiffness_is_diagnosed_and_the_remedy_is_named(monkeypatch):
    def van_der_pol(t, y):
        return jnp.stack([y[1], 1e3 * ((1 - y[0] ** 2) * y[1] - y[0])])

    options = dict(rtol=1e-4, atol=1e-6, save="end")
    with pytest.raises(mp.SolveError, match=r"(?s)MAX_STEPS.*stiff.*solver=mp.EK1\(\)"):
        mp.solve(van_der_pol, jnp.array([2.0, 0.0]), (0.0, 2.0), solver=mp.EK0(), max_steps=1000, **options)
    sol = mp.solve(van_der_pol, jnp.array([2.0, 0.0]), (0.0, 2.0), solver=mp.EK1(), **options)
    assert not sol.stats.stiff and not sol.advice

    heat = mp.problems.heat((32, 32))
    monkeypatch.setattr(sys.modules["millipode.api"], "MANY", 10)
    with pytest.warns(UserWarning, match=r"stiff.*mp.SpectralEK1\(linear=mp.Grid\(\(32, 32\)"):
        sol = mp.solve(heat.f, heat.y0, (0.0, 5.0), solver=mp.EK0(), **options)
    assert sol.stats.stiff

    orbit = mp.solve(mp.problems.pleiades().f, mp.problems.pleiades().y0, (0.0, 1.0), **options)
    assert not orbit.stats.stiff


@pytest.mark.parametrize("k", [1.0, 2.0, 5.0, 10.0])
def test_kinks_are_noticed(k):
    def f(t, y, k):
        return jnp.sign(jnp.sin(k * t)) * jnp.ones_like(y)

    sol = mp.solve(f, jnp.zeros(1), (0.0, 10.0), args=k, rtol=1e-6, atol=1e-6, save="end")
    phase = (10 * k) % (2 * np.pi)
    assert abs(float(sol.mean[-1, 0]) - min(phase, 2 * np.pi - phase) / k) < 30e-6


@pytest.mark.parametrize(
    ("rtol", "order"), [(1e-3, 4), (1e-4, 5), (1e-6, 5), (1e-9, 6), (1e-10, 7), (1e-12, 8)]
)
def test_the_order_comes_from_the_tolerance(rtol, order):
    def solve(y0, **options):
        sol = mp.solve(lambda t, y: -y, y0, (0.0, 0.1), rtol=rtol, atol=rtol, smooth=False, **options)
        return len(sol.posterior.mean) - 1

    assert solve(jnp.ones(2)) == order
    assert solve(jnp.ones(2), solver=mp.EK0(3)) == 3
    assert mp.EK0().order is None
    if rtol >= 1e-4:
        assert solve(jnp.ones(2, jnp.float32)) == 4


def test_orders_beyond_the_precision_are_refused():
    with pytest.raises(ValueError, match=r"order=9 needs float64.*order 8 or less"):
        mp.solve(lambda t, y: -y, jnp.ones(2, jnp.float32), (0.0, 1.0), solver=mp.EK0(9))


@pytest.mark.parametrize(
    ("structure", "make"),
    [
        ("kronecker", lambda: mp.EK0(3)),
        ("blockdiagonal", lambda: mp.DiagonalEK1(3)),
        ("dense", lambda: mp.EK1(3, structure="dense")),
        ("coupled", None),
    ],
)
def test_the_gain_of_y_is_the_first_row_of_the_gain(structure, make):
    from test_spectral import COUPLED, reaction_diffusion, start

    f, y0 = (nonlinear, Y0) if make else (reaction_diffusion, start())
    solver = make() if make else mp.SpectralEK1(3, linear=COUPLED)
    setup, carry = final_carry(f, y0, (0.0, 0.5), solver=solver, rtol=1e-3, save="end")
    model, state, h = setup.model, carry.state, jnp.asarray(0.1)
    assert setup.structure == structure
    a = attempt(model, state, setup.controller, state.t + h, h, False)
    residual, gamma = a.corrections.residual, a.calibration.gamma
    arguments = (a.prediction.transition, gamma, residual.observation, residual.z)
    want = state.covariance.apply_gain(state.covariance.correct(*arguments).gain, residual.z)[0]
    have = state.covariance.gain_of_y(*arguments).multiply(residual.z)
    np.testing.assert_allclose(have, want, rtol=1e-9, atol=1e-14)
