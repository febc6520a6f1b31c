"""Both initialisations: exact derivatives, and inference from a few tiny Runge–Kutta steps."""

from math import factorial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import millipode as mp
from common import rmse
from millipode.filter.control import weights
from millipode.model import initialisation as init
from millipode.model.vector_field import VectorField

pytestmark = pytest.mark.usefixtures("own_std")


def oscillator(t, y):
    return jnp.stack([y[1], -y[0] + 0 * t])


def setup(f, y0, t0=0.0, span=5.0, sign=1.0):
    y0 = jnp.asarray(y0)
    field = VectorField(f, None, jnp.asarray(sign, y0.dtype))
    t0, span = jnp.asarray(t0, y0.dtype), jnp.asarray(span, y0.dtype)
    return init.Start.of(field, t0, y0, weights(y0, 1e-3, 1e-6), span)


def test_taylor_mode_gives_the_derivatives():
    mean = init.taylor(setup(oscillator, [1.0, 0.0]), 7).mean
    np.testing.assert_allclose([m[0] for m in mean], [1, 0, -1, 0, 1, 0, -1, 0], atol=1e-14)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_taylor_mode_knows_that_time_passes(sign):
    # y' = t y from t = 2: y = exp((t² − 4)/2), derivatives by hand.
    mean = init.taylor(setup(lambda t, y: t * y, [1.0], t0=2.0, sign=sign), 3).mean
    np.testing.assert_allclose([m[0] for m in mean], [1, 2 * sign, 5, 14 * sign], rtol=1e-13)


@pytest.mark.parametrize("nu", range(1, 9))
@pytest.mark.parametrize("speed", [1e-6, 1.0, 1e6])
@pytest.mark.wide(quick=8)
def test_runge_kutta_agrees_with_taylor_on_every_time_scale(nu, speed):
    f = mp.problems.lorenz96(10).f
    y0 = 8 + jnp.sin(jnp.arange(10.0))
    start = setup(
        lambda t, y: speed * (f(t, y) + 20 * jnp.sin(3 * speed * t)), y0, t0=0.4 / speed, span=5 / speed
    )
    exact = init.taylor(start, nu).mean
    have = init.runge_kutta(start, nu).mean
    errors = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) for a, b in zip(exact, have)]
    # Truncation and rounding meet at ε^((ν+1−q)/(ν+1)); constants grow with the order.
    eps = np.finfo(float).eps
    bound = [1e3 * 3.0**nu * eps ** ((nu + 1 - q) / (nu + 1)) for q in range(nu + 1)]
    assert all(e <= b for e, b in zip(errors, bound)), (errors, bound)
    if nu <= 5:
        assert errors[-1] < 0.02


def brute_force(nu):
    """Generalised least squares for b = (y'', …, y^(ν)) in floating point."""
    nodes = np.arange(1, nu + 1)

    def kernel(a, b):
        polynomial = np.poly1d([-1, a]) ** nu * np.poly1d([-1, b]) ** nu
        return polynomial.integ()(min(a, b)) / factorial(nu) ** 2

    k = np.array([[kernel(a, b) for b in nodes] for a in nodes])
    design = np.array([[m**q / factorial(q) for q in range(2, nu + 1)] for m in nodes])
    whitened = np.linalg.solve(k, design)
    covariance = np.linalg.inv(design.T @ whitened)
    return nodes, k, design, covariance, covariance @ whitened.T


@pytest.mark.parametrize("nu", [2, 3, 4])
def test_inference_is_gaussian_conditioning(nu, rng):
    nodes, k, design, covariance, smoother = brute_force(nu)
    weights_, residual, root = init._inference(nu)
    slopes = rng.normal(size=nu + 1)
    collocation = np.array(init._collocation(nu), float)
    r = (collocation @ slopes)[1:] - nodes * slopes[0]
    np.testing.assert_allclose(np.array(weights_, float) @ slopes, smoother @ r, rtol=1e-6)
    np.testing.assert_allclose(root[:, 2:].T @ root[:, 2:], covariance, rtol=1e-6)
    misfit = r - design @ smoother @ r
    gamma = np.sqrt(misfit @ np.linalg.solve(k, misfit))
    np.testing.assert_allclose(abs(np.array(residual) @ slopes), gamma, rtol=1e-5)


def test_collocation_integrates_polynomials_exactly():
    for nu in (1, 4, 11):
        a = init._collocation(nu)
        for power in range(nu + 1):
            values = [m**power for m in range(nu + 1)]
            for m in range(nu + 1):
                integral = sum(w * v for w, v in zip(a[m], values, strict=True))
                assert integral * (power + 1) == m ** (power + 1)


@pytest.mark.parametrize("kind", [mp.EK0, mp.DiagonalEK1, mp.EK1])
def test_both_initialisations_lead_to_the_same_solution(kind):
    problem = mp.problems.van_der_pol(2.0)
    reference = solve_ivp(
        lambda t, y: np.asarray(problem.f(t, y)), (0.0, 2.0), problem.y0, rtol=1e-11, atol=1e-11
    ).y[:, -1]
    a, b = (
        mp.solve(
            problem.f,
            problem.y0,
            (0.0, 2.0),
            solver=kind(3, initialise=how),
            controller=mp.FixedStep(0.02),
            save="end",
        )
        for how in ("taylor", "runge-kutta")
    )
    assert rmse(a.mean, b.mean) < 0.3 * rmse(a.mean[-1], reference)
    # The inferred state is uncertain where the exact one is not: a part of the first step.
    np.testing.assert_allclose(a.std, b.std, rtol=0.2)


def test_an_operation_without_taylor_rule_falls_back_or_is_named():
    def f(t, y):
        return jnp.zeros_like(y).at[0].set(-y[0]).at[1].set(y[0] - y[1])

    y0 = jnp.array([1.0, 0.0])
    sol = mp.solve(f, y0, (0.0, 1.0), solver=mp.EK0(3), rtol=1e-6, save="end")
    np.testing.assert_allclose(sol.mean[-1], [np.exp(-1), np.exp(-1)], atol=1e-5)
    with pytest.raises(NotImplementedError, match="initialise='runge-kutta'"):
        mp.solve(f, y0, (0.0, 1.0), solver=mp.EK0(3, initialise="taylor"))
    with pytest.raises(ValueError, match="'taylor' or 'runge-kutta'"):
        mp.EK0(initialise="euler")


def test_equilibria_and_zero_states_initialise():
    for y0 in (jnp.zeros(3), jnp.ones(3)):
        mean = init.runge_kutta(setup(lambda t, y: jnp.zeros_like(y), y0), 4).mean
        assert all(np.isfinite(m).all() for m in mean)
        assert not any(m.any() for m in mean[1:])


def test_runge_kutta_allocates_a_few_states():
    d, nu = 10**6, 3
    f = mp.problems.lorenz96(d).f
    y0 = jax.ShapeDtypeStruct((d,), jnp.float64)

    def run(y0):
        return init.runge_kutta(setup(f, y0), nu)

    memory = jax.jit(run).lower(y0).compile().memory_analysis()
    state = (nu + 1) * d * 8
    assert memory.temp_size_in_bytes < 3 * state


def test_holes_in_taylor_rules_fall_back():
    """jet computes y**2.0 as exp(2 log y), which is NaN at 0 although f is smooth."""
    sol = mp.solve(lambda t, y: 1 - y**2.0, jnp.zeros(2), (0.0, 1.0), rtol=1e-5, save="end")
    np.testing.assert_allclose(sol.mean[-1], np.tanh(1.0), rtol=1e-4)
    failed = mp.solve(
        lambda t, y: 1 - y**2.0,
        jnp.zeros(2),
        (0.0, 1.0),
        solver=mp.EK0(3, initialise="taylor"),
        throw=False,
        save="end",
    )
    assert failed.status == mp.Status.NON_FINITE
    np.testing.assert_array_equal(failed.mean[-1], 0)


def test_orders_that_rounding_eats_are_refused():
    solver = mp.EK0(9, initialise="runge-kutta")
    with pytest.raises(ValueError, match="orders up to 8"):
        mp.solve(oscillator, jnp.array([1.0, 0.0]), (0.0, 1.0), solver=solver)
