"""Priors with a rate, for all solvers; ``test_posterior.py`` holds their posteriors against an oracle."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, Y0, name, nonlinear, rmse
from millipode.model.priors.matern import gram_root

pytestmark = pytest.mark.usefixtures("own_std")

STEPS = [1e-8, 1e-4, 0.03, 1.0, 30.0, 54.0, 56.0, 1e2]


def exact(nu, h, length_scale):
    """Φ and Σ of y, y', … with 200 digits: the companion matrix's exponential, and an integral of it."""
    n = nu + 1
    rate = mpmath.sqrt(2 * (nu + mpmath.mpf(1) / 2)) / length_scale
    a = mpmath.zeros(n, n)
    for j in range(n):
        a[n - 1, j] = -mpmath.binomial(n, j) * rate ** (n - j)
        if j:
            a[j - 1, j] = 1
    phi = mpmath.expm(a * h, method="taylor")
    stationary = stationary_covariance(nu, rate)
    return phi, stationary - phi * stationary * phi.T, stationary


def stationary_covariance(nu, rate):
    """By the spectral density 1/(ω² + λ²)^(ν+1): E[y^(i) y^(j)] = (−1)^((i−j)/2) ∫ω^(i+j) S dω/2π."""
    n = nu + 1
    p = mpmath.zeros(n, n)
    for i in range(n):
        for j in range(n):
            if (i + j) % 2 == 0:
                k = (i + j) // 2
                moment = mpmath.beta(k + mpmath.mpf(1) / 2, n - k - mpmath.mpf(1) / 2) / (2 * mpmath.pi)
                p[i, j] = (-1) ** ((i - j) // 2) * moment * rate ** (2 * k + 1 - 2 * n)
    return p


def in_derivatives(prior):
    """The matrix that turns the prior's state into y and its derivatives."""
    n = prior.order + 1
    rows = [prior.row(q, jnp.zeros(1)) for q in range(n)]
    return np.array([[0.0 if c is None else float(c) for c in row] for row in rows])


@pytest.mark.parametrize("nu", [1, 2, 4])
@pytest.mark.parametrize("length_scale", [0.5, 3.0])
def test_matern_transition_against_high_precision(nu, length_scale):
    prior = mp.MaternProcess(nu, length_scale).fitted(None, jnp.ones(()), jnp.zeros(1))
    back = in_derivatives(prior)
    for h in STEPS:
        with mpmath.workdps(200):
            phi, sigma, _ = exact(nu, mpmath.mpf(h), mpmath.mpf(length_scale))
            scale = [mpmath.sqrt(sigma[i, i]) for i in range(nu + 1)]
            correlation = np.array(
                [[float(sigma[i, j] / scale[i] / scale[j]) for j in range(nu + 1)] for i in range(nu + 1)]
            )
            scale = np.array([float(s) for s in scale])
            phi = np.array(phi.tolist(), float)
        transition = prior.transition(jnp.asarray(h))
        matrix, root = np.asarray(transition.matrix), np.asarray(transition.scaled_root * transition.scaling)
        assert not np.tril(root, -1).any() and (np.diagonal(root) > 0).all()
        have = root @ back.T / scale
        np.testing.assert_allclose(have.T @ have, correlation, atol=1e-11)
        moved = back @ matrix @ np.linalg.inv(back)
        # Entry ij is of the size of h^(j−i) or of λ^(i−j), times e^(−λh).
        rate = np.sqrt(2 * nu + 1) / length_scale
        sizes = np.array([[rate ** (i - j) for j in range(nu + 1)] for i in range(nu + 1)])
        np.testing.assert_allclose(moved / sizes, phi / sizes, atol=1e-12, rtol=1e-9)
        row, noise = prior.marginal(jnp.asarray(h))
        np.testing.assert_allclose(row, matrix[0], rtol=1e-13)
        np.testing.assert_allclose(np.sqrt(noise), scale[0], rtol=1e-11)


def exact_gram(x, nu):
    """∫₀¹ e^(−2xs) s^(2ν−i−j) ds as incomplete gamma functions, entries divided by roots of the diagonal."""

    def integral(k):
        return mpmath.gammainc(k + 1, 0, 2 * x) / (2 * x) ** (k + 1) if x else mpmath.mpf(1) / (k + 1)

    powers = range(nu, -1, -1)
    return [
        [float(integral(i + j) / mpmath.sqrt(integral(2 * i) * integral(2 * j))) for j in powers]
        for i in powers
    ]


@pytest.mark.parametrize("nu", [8, 11])
def test_the_gram_matrix_of_high_orders(nu):
    for x in (0.0, 1e-6, 0.5, 20.0, 54.9, 55.1, 3e3):
        root = np.asarray(gram_root(jnp.asarray(x), nu))
        with mpmath.workdps(60):
            want = exact_gram(mpmath.mpf(x), nu)
        unit = root / np.sqrt(np.sum(root**2, axis=0))
        np.testing.assert_allclose(unit.T @ unit, want, atol=1e-13)


@pytest.mark.parametrize("nu", [1, 3])
def test_the_matern_process_is_stationary_and_has_its_smoothness(nu):
    """Φ P∞ Φᵀ + Σ = P∞, and its covariance in time is the Matérn kernel of smoothness ν + ½."""
    length_scale = 0.7
    prior = mp.MaternProcess(nu, length_scale).fitted(None, jnp.ones(()), jnp.zeros(1))
    back = in_derivatives(prior)
    rate = np.sqrt(2 * nu + 1) / length_scale
    stationary = np.array(stationary_covariance(nu, mpmath.mpf(rate)).tolist(), float)
    size = np.sqrt(np.diag(stationary))
    for h in (1e-3, 0.2, 1.5, 40.0):
        transition = prior.transition(jnp.asarray(h))
        phi = back @ np.asarray(transition.matrix) @ np.linalg.inv(back)
        root = np.asarray(transition.scaled_root * transition.scaling) @ back.T
        have = phi @ stationary @ phi.T + root.T @ root
        np.testing.assert_allclose(have / np.outer(size, size), stationary / np.outer(size, size), atol=1e-12)
        z = rate * h
        kernel = {1: 1 + z, 3: 1 + z + 2 * z**2 / 5 + z**3 / 15}[nu] * np.exp(-z)
        np.testing.assert_allclose((phi @ stationary)[0, 0] / stationary[0, 0], kernel, rtol=1e-11)


LIMITS = {
    "IOUP": mp.IOUP(rate=0.0),
    "IOUP, one rate each": mp.IOUP(rate=jnp.zeros(3)),
    "Matérn": mp.MaternProcess(length_scale=1e12),
}


@pytest.mark.parametrize("which", LIMITS)
def test_without_a_rate_it_is_the_integrated_wiener_process(which):
    options = dict(rtol=1e-3, save="end")
    want, have = (
        mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(3, prior=prior), **options)
        for prior in (None, LIMITS[which])
    )
    np.testing.assert_allclose(have.mean, want.mean, rtol=1e-10)
    np.testing.assert_allclose(have.std, want.std, rtol=1e-7)
    np.testing.assert_allclose(have.log_evidence, want.log_evidence, rtol=1e-9)


PRIORS = {
    "IOUP": mp.IOUP(rate=-1.5),
    "rates": mp.IOUP(rate=jnp.array([-1.0, 0.5, -3.0])),
    "Matérn": mp.MaternProcess(length_scale=0.8),
}


@pytest.mark.parametrize("which", PRIORS)
@pytest.mark.parametrize("kind", [mp.EK0, mp.EK1, mp.DiagonalEK1], ids=name)
@pytest.mark.wide(quick=3)
def test_structures_agree(kind, which):
    """In both directions of time, filtered and with Runge–Kutta's start, which is uncertain."""
    span = (0.0, 0.5) if which == "IOUP" else (0.5, 0.0)
    options = dict(controller=mp.FixedStep(0.02), save="end")
    structures = {mp.EK0: ["kronecker", "blockdiagonal", "dense"], mp.DiagonalEK1: ["blockdiagonal", "dense"]}
    names = structures.get(kind, ["dense"])
    names = names[1:] if which == "rates" and kind is mp.EK0 else names
    sols = [
        mp.solve(
            nonlinear,
            Y0,
            span,
            solver=kind(2, prior=PRIORS[which], structure=s, initialise="runge-kutta"),
            **options,
        )
        for s in names
    ]
    for sol in sols[1:]:
        np.testing.assert_allclose(sol.mean, sols[0].mean, rtol=1e-9)
        np.testing.assert_allclose(sol.std, sols[0].std, rtol=1e-7)
        np.testing.assert_allclose(sol.log_evidence, sols[0].log_evidence, rtol=1e-8)
    truth = mp.solve(nonlinear, Y0, span, solver=mp.EK0(6), rtol=1e-11, atol=1e-12, save="end")
    assert rmse(sols[0].mean, truth.mean) < 1e-2


@pytest.mark.parametrize("which", ["IOUP", "Matérn"])
@pytest.mark.parametrize("order", [2, 3])
def test_they_converge_with_their_order(which, order):
    truth = mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(6), rtol=1e-12, atol=1e-13, save="end").mean
    solver = mp.EK0(order, prior=PRIORS[which], diffusion=CONSTANT)
    steps = [0.04, 0.02, 0.01]
    errors = [
        rmse(
            mp.solve(nonlinear, Y0, (0.0, 1.0), solver=solver, controller=mp.FixedStep(h), save="end").mean,
            truth,
        )
        for h in steps
    ]
    slope = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert slope > order - 0.2


def test_the_rate_is_a_rate_of_the_user_s_time():
    """What decays forwards grows backwards; an equation with that rate is solved without any error."""
    rate = jnp.array([-2.0, 0.7])
    solver = mp.DiagonalEK1(2, prior=mp.IOUP(rate=rate))
    for span in ((0.0, 1.0), (1.0, 0.0)):
        sol = mp.solve(
            lambda t, y: rate * y, jnp.ones(2), span, solver=solver, controller=mp.FixedStep(0.25), save="end"
        )
        np.testing.assert_allclose(sol.mean[-1], jnp.exp(rate * (span[1] - span[0])), rtol=1e-12)
    explicit = mp.EK0(2, prior=mp.IOUP(rate=-2.0))
    sol = mp.solve(
        lambda t, y: -2 * y,
        jnp.ones(2),
        (0.0, 1.0),
        solver=explicit,
        controller=mp.FixedStep(0.25),
        save="end",
    )
    np.testing.assert_allclose(sol.mean[-1], np.exp(-2.0), rtol=1e-12)


@pytest.mark.parametrize("kind", [mp.EK0, mp.DiagonalEK1], ids=name)
def test_backwards_is_the_reflected_problem_with_the_opposite_rate(kind):
    """Uncertainty and evidence as well: the noise of a step knows the direction of time."""
    rate = jnp.array([-2.0, 0.7, 1.3])
    slope = lambda t, y: jnp.sin(y + t) - y
    options = dict(controller=mp.FixedStep(0.25), save="end")
    y0 = jnp.array([0.3, -0.2, 1.0])
    there = mp.solve(slope, y0, (1.0, 0.0), solver=kind(2, prior=mp.IOUP(rate=rate)), **options)
    mirrored = lambda s, y: -slope(1.0 - s, y)
    back = mp.solve(mirrored, y0, (0.0, 1.0), solver=kind(2, prior=mp.IOUP(rate=-rate)), **options)
    np.testing.assert_allclose(there.mean, back.mean, rtol=1e-10)
    np.testing.assert_allclose(there.std, back.std, rtol=1e-8)
    np.testing.assert_allclose(there.log_evidence, back.log_evidence, rtol=1e-8)


def test_spectral_filters_take_a_single_rate_too():
    """Any prior is a model of the same equation: with short steps they agree."""
    grid = mp.Grid((3, 2))
    y0 = jnp.linspace(0.0, 1.0, 12).reshape(2, 3, 2)
    rhs = lambda t, y: 0.1 * grid.laplacian(y) - y**3
    options = dict(controller=mp.FixedStep(0.01), save="end")
    plain, reaction = (
        grid.diffusion([0.1, 0.1], reaction=r) for r in (None, np.array([[-1.0, 0.3], [0.0, -0.5]]))
    )
    truth = mp.solve(rhs, y0, (0.0, 0.3), solver=mp.EK0(5), rtol=1e-10, atol=1e-12, save="end").mean
    for linear in (plain, reaction):
        for prior in (mp.IOUP(rate=-0.7), mp.MaternProcess(length_scale=1.0)):
            sol = mp.solve(
                rhs, y0, (0.0, 0.3), solver=mp.SpectralEK1(2, linear=linear, prior=prior), **options
            )
            assert rmse(sol.mean, truth) < 1e-6 and bool((sol.std > 0).all())


@pytest.mark.parametrize("prior", [lambda x: mp.IOUP(rate=-x), lambda x: mp.MaternProcess(length_scale=x)])
@pytest.mark.wide(quick=1)
def test_the_evidence_can_be_differentiated_by_the_rate(prior):
    def evidence(x):
        options = dict(controller=mp.FixedStep(0.05), save="end")
        return mp.solve(nonlinear, Y0, (0.0, 0.2), solver=mp.EK0(2, prior=prior(x)), **options).log_evidence

    x, step = jnp.asarray(0.8), 1e-5
    value = jax.jit(evidence)
    want = (value(x + step) - value(x - step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.grad(evidence))(x), want, rtol=1e-6)


def test_another_rate_compiles_nothing():
    from millipode.run.programs import at_once

    options = dict(controller=mp.FixedStep(0.05), save="end")
    counts = []
    for rate in (-0.5, -0.6):
        solver = mp.EK0(1, prior=mp.IOUP(rate=rate))
        mp.solve(nonlinear, Y0, (0.0, 0.2), solver=solver, **options)
        counts.append(sum(program._cache_size() for program in at_once._ways.values()))
    assert counts[0] == counts[1] > 0


@pytest.mark.thorough
def test_single_precision_while_double_is_allowed():
    y0 = jnp.asarray(Y0, jnp.float32)
    for prior in (
        mp.IOUP(rate=-1.0),
        mp.IOUP(rate=np.array([-1.0, 0.5, 2.0])),
        mp.MaternProcess(length_scale=0.5),
    ):
        sol = mp.solve(lambda t, y: -2 * y + y**2, y0 / 3, (0.0, 1.0), solver=mp.EK0(2, prior=prior))
        for x in (sol.mean, sol.std, sol(0.3).std, sol.derivative(1).mean):
            assert x.dtype == jnp.float32 and bool(jnp.isfinite(x).all())


def test_pytrees():
    y0 = {"a": jnp.ones(2), "b": jnp.ones((1, 3))}
    rate = {"a": jnp.array([-1.0, -2.0]), "b": -0.5}
    rhs = lambda t, y: jax.tree.map(lambda x: -(x**2), y)
    options = dict(controller=mp.FixedStep(0.02), save="end")
    sol = mp.solve(rhs, y0, (0.0, 1.0), solver=mp.EK0(2, prior=mp.IOUP(rate=rate)), **options)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 0.5, rtol=1e-4), sol.mean)
    assert not np.allclose(sol.std["a"][0, 0], sol.std["a"][0, 1], rtol=1e-6, atol=0)


def test_bad_input_is_refused():
    for bad, match in ((np.nan, "finite"), (np.array([1.0, np.inf]), "finite")):
        with pytest.raises(ValueError, match=match):
            mp.IOUP(rate=bad)
    for bad in (0.0, -1.0, np.inf, np.ones(2)):
        with pytest.raises(ValueError, match="length_scale must be a positive number"):
            mp.MaternProcess(length_scale=bad)
    with pytest.raises(ValueError, match="from 1 to 11"):
        mp.MaternProcess(12)
    with pytest.raises(ValueError, match="contradicts"):
        mp.EK0(3, prior=mp.MaternProcess(2))
    with pytest.raises(ValueError, match="not Kronecker"):
        mp.EK0(prior=mp.IOUP(rate=jnp.ones(3)), structure="kronecker")
    with pytest.raises(ValueError, match="shaped like y"):
        mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(prior=mp.IOUP(rate=jnp.ones(2))))
    with pytest.raises(ValueError, match="shaped like y"):
        mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(prior=mp.IOUP(rate={"a": 1.0})))
    with pytest.raises(ValueError, match="those of linear"):
        mp.SpectralEK1(linear=mp.Grid(4).diffusion(0.1), prior=mp.IOUP(rate=jnp.ones(4)))
