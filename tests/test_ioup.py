"""The integrated Ornstein–Uhlenbeck prior; ``test_posterior.py`` holds its posterior against an oracle."""

from functools import partial

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, final_carry, rmse
from millipode.model.priors.ioup import noise_root, phis
from millipode.pde.bases import Identity

X = np.array([0.0, -1e-7, -0.3, -1.99, -2.01, -6.0, -25.0, -1e4, 0.5, 8.0])


def exact_phi(k, x):
    return mpmath.hyp1f1(1, k + 1, x) / mpmath.factorial(k)


def exact_covariance(nu, x):
    """Of ν! ∫ s^ν φ_ν(xs) dβ and of ∫ s^k dβ, k = ν−1 … 0, by quadrature with 40 digits."""
    x = mpmath.mpf(float(x))
    layers = [mpmath.mpf(10) ** -k for k in range(4, 0, -1)] if x < -5 else []

    def integral(function):
        return mpmath.quad(function, [0, *layers, mpmath.mpf("0.4"), 1])

    def g(s):
        return mpmath.factorial(nu) * s**nu * exact_phi(nu, x * s)

    covariance = mpmath.matrix(nu + 1, nu + 1)
    covariance[0, 0] = integral(lambda s: g(s) ** 2)
    for i in range(1, nu + 1):
        covariance[0, i] = covariance[i, 0] = integral(lambda s, i=i: g(s) * s ** (nu - i))
        for j in range(1, nu + 1):
            covariance[i, j] = mpmath.mpf(1) / (2 * nu + 1 - i - j)
    return covariance


@pytest.mark.parametrize("nu", [1, 2, 3, 5])
def test_transition_against_high_precision(nu):
    with mpmath.workdps(40):
        want = np.array([[float(exact_phi(k, x)) for x in X] for k in range(nu + 1)])
        covariances = [exact_covariance(nu, x) for x in X]
        variances = np.array([[float(mpmath.sqrt(c[i, i])) for i in range(nu + 1)] for c in covariances])
    np.testing.assert_allclose(phis(jnp.asarray(X), nu), want, rtol=2e-14, atol=1e-300)
    root = np.asarray(noise_root(jnp.asarray(X), nu))
    assert not np.tril(root[..., 0], -1).any() and (np.einsum("iix->ix", root) > 0).all()
    for i, covariance in enumerate(covariances):
        have = root[..., i].T @ root[..., i] / np.outer(variances[i], variances[i])
        exact = np.array(covariance.tolist(), float) / np.outer(variances[i], variances[i])
        np.testing.assert_allclose(have, exact, atol=1e-14)
        # What w does not tell of y is in the second pivot.
        with mpmath.workdps(40):
            pivot = float(mpmath.cholesky(covariance)[1, 1])
        np.testing.assert_allclose(root[1, 1, i], pivot, atol=3e-14 * variances[i, 1])


@pytest.mark.parametrize("nu", [8, 11])
def test_high_orders_keep_their_digits(nu):
    with mpmath.workdps(40):
        want = np.array([[float(exact_phi(k, x)) for x in X] for k in range(nu + 1)])
    np.testing.assert_allclose(phis(jnp.asarray(X), nu), want, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("order", [1, 3])
def test_derivatives_of_the_transition(order):
    def both(x):
        return jnp.stack(phis(x, order)), noise_root(x, order)

    x = jnp.asarray(X)
    tangent = jax.jvp(both, (x,), (jnp.ones_like(x),))[1]
    h = 1e-6 * jnp.maximum(1e-2, jnp.abs(x))
    difference = jax.tree.map(lambda a, b: (a - b) / (2 * h), both(x + h), both(x - h))
    for a, b in zip(tangent, difference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_rate_of_zero_is_the_integrated_wiener_process():
    solver = partial(mp.SpectralEK1, 3, linear=(Identity(), np.zeros(2)))
    options = dict(rtol=1e-4, atol=1e-6)
    want, have = (
        mp.solve(
            lambda t, y: jnp.stack([-y[1], y[0] ** 3]), jnp.array([1.0, 0.5]), (0.0, 1.0), solver=s, **options
        )
        for s in (solver(), solver(prior=mp.IOUP()))
    )
    np.testing.assert_allclose(have.mean, want.mean, rtol=1e-12)
    np.testing.assert_allclose(have.std, want.std, rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(have.log_evidence, want.log_evidence, rtol=1e-10)


@pytest.mark.parametrize("boundary", ["neumann", "dirichlet"])
def test_a_linear_equation_is_solved_exactly(boundary):
    problem = mp.problems.heat((16, 12), a=1.0, boundary=boundary)
    solver = mp.SpectralEK1(2, linear=problem.linear, prior=mp.IOUP())
    sol = mp.solve(
        problem.f, problem.y0, problem.t_span, solver=solver, controller=mp.FixedStep(0.25), save="end"
    )
    assert rmse(sol.mean[-1], problem.solution(1.0)) < 1e-12


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_no_stiffness_is_too_much(order):
    """Nor any error of the gain: a force that is constant in time is followed for ever."""
    rates = -np.logspace(-2, 8, 41)
    solver = mp.SpectralEK1(order, linear=(Identity(), rates), prior=mp.IOUP(), diffusion=CONSTANT)
    options = dict(solver=solver, controller=mp.FixedStep(1.0), save="end")
    sol = mp.solve(lambda t, y: rates * (y - 1), jnp.full(41, 2.0), (0.0, 2000.0), **options)
    np.testing.assert_allclose(sol.mean[-1], 1.0, rtol=1e-6)
    assert bool(jnp.isfinite(sol.std).all())


def test_the_initial_covariance_is_in_the_prior_s_coordinates():
    """With a Runge–Kutta start, which is uncertain of higher derivatives."""
    rates = np.array([-3.0, -0.5])
    solver = mp.SpectralEK1(3, linear=(Identity(), rates), initialise="runge-kutta", diffusion=CONSTANT)
    ornstein = mp.SpectralEK1(
        3, linear=solver.linear, initialise="runge-kutta", diffusion=CONSTANT, prior=mp.IOUP()
    )
    y0 = jnp.array([1.0, 0.5])
    carries = [
        final_carry(lambda t, y: rates * y + y**2, y0, (0.0, 0.0), solver=s, save="end")[1]
        for s in (solver, ornstein)
    ]
    want, have = (c.state.covariance.to_dense(y0) for c in carries)
    change = np.eye(8)
    for q in range(3):
        change[2 * q + 2 : 2 * q + 4, 2 * q : 2 * q + 2] -= np.diag(rates)
    assert np.abs(np.asarray(want)).max() > 0
    np.testing.assert_allclose(have, change @ want @ change.T, rtol=1e-10, atol=1e-25)


@pytest.mark.thorough
def test_structures_agree_on_a_nonlinear_problem_with_two_fields():
    grid = mp.Grid((3, 2))
    linear = grid.diffusion({"u": 0.1, "v": 0.02}, shift={"u": -1.0, "v": -4.0})
    y0 = {"u": jnp.linspace(0, 1, 6).reshape(3, 2), "v": jnp.linspace(1, 0.5, 6).reshape(3, 2)}

    def f(t, y):
        u, v = y["u"], y["v"]
        return {
            "u": 0.1 * grid.laplacian(u) - u + v**2,
            "v": 0.02 * grid.laplacian(v) - 4 * (v - jnp.sin(u)),
        }

    sols = [
        mp.solve(
            f,
            y0,
            (0.5, 0.2),
            solver=mp.SpectralEK1(2, linear=linear, prior=mp.IOUP(), structure=s, refresh=3),
            **options,
        )
        for s in ("blockdiagonal", "dense")
        for options in [dict(controller=mp.FixedStep(0.01), save=jnp.array([0.4, 0.213]))]
    ]
    for a, b in ((sols[0].mean, sols[1].mean), (sols[0].std, sols[1].std)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-7), a, b)
    np.testing.assert_allclose(sols[0].log_evidence, sols[1].log_evidence, rtol=1e-10)


def test_filtering_at_given_times_is_the_filter_between_its_steps():
    solver = mp.SpectralEK1(2, linear=(Identity(), np.array([-30.0, -2.0, 0.5])), prior=mp.IOUP())
    times = jnp.array([0.21, 0.5, 0.87])
    options = dict(solver=solver, controller=mp.FixedStep(0.05), smooth=False)
    steps, there = (
        mp.solve(lambda t, y: jnp.sin(t) - y**3, jnp.ones(3), (0.0, 1.0), save=save, **options)
        for save in ("steps", times)
    )
    between = steps(times)
    np.testing.assert_allclose(there.mean, between.mean, rtol=1e-12)
    np.testing.assert_allclose(there.std, between.std, rtol=1e-9)


@pytest.mark.thorough
def test_gradients():
    def final(a):
        solver = mp.SpectralEK1(2, linear=(Identity(), -jnp.array([1.0, 30.0])), prior=mp.IOUP())
        options = dict(controller=mp.FixedStep(0.05), save="end")
        sol = mp.solve(
            lambda t, y, a: -a * y + jnp.sin(t), jnp.ones(2), (0.0, 0.5), args=a, solver=solver, **options
        )
        return sol.mean.sum() + 1e3 * sol.std.sum()

    a = jnp.array([1.1, 29.0])
    step = 1e-5 * jnp.eye(2)
    want = [(final(a + e) - final(a - e)) / 2e-5 for e in step]
    np.testing.assert_allclose(jax.grad(final)(a), want, rtol=1e-6)


def test_single_precision_while_double_is_allowed():
    solver = mp.SpectralEK1(2, linear=(Identity(), np.array([-2.0, -30.0, 0.0])), prior=mp.IOUP())
    sol = mp.solve(lambda t, y: -2 * y + y**2, jnp.full(3, 0.5, jnp.float32), (0.0, 1.0), solver=solver)
    for x in (sol.mean, sol.std, sol(0.3).std, sol.derivative(1).mean):
        assert x.dtype == jnp.float32 and bool(jnp.isfinite(x).all())


def test_single_precision(single_precision):
    problem = mp.problems.fitzhugh_nagumo(8)
    solver = mp.SpectralEK1(2, linear=problem.linear, prior=mp.IOUP())
    sol = mp.solve(problem.f, problem.y0, (0.0, 1.0), solver=solver, rtol=1e-3, atol=1e-4, save="end")
    assert sol.mean.dtype == sol.std.dtype == jnp.float32 and bool(jnp.isfinite(sol.std).all())


def test_where_it_cannot_be_used_it_is_refused():
    for solver in (mp.EK0, mp.EK1, mp.DiagonalEK1):
        with pytest.raises(ValueError, match="from the linear part.*SpectralEK1.*rate"):
            solver(prior=mp.IOUP())
    grid = mp.Grid(4)
    with pytest.raises(ValueError, match="reaction"):
        mp.SpectralEK1(linear=grid.diffusion([0.1, 0.2], reaction=np.eye(2)), prior=mp.IOUP())
    with pytest.raises(ValueError, match="contradicts"):
        mp.SpectralEK1(3, linear=grid.diffusion(0.1), prior=mp.IOUP(2))
    with pytest.raises(ValueError, match="from 1 to 11"):
        mp.IOUP(12)
    assert mp.SpectralEK1(linear=grid.diffusion(0.1), prior=mp.IOUP()).order_for(1e-3) == 3
