"""The spectral EK1: the dense EK1 with a Jacobian V diag(λ) Vᵀ, and stable however stiff that is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import millipode as mp
from common import CONSTANT, DYNAMIC, final_carry, jit, rmse
from millipode.covariance.observation import Observation
from millipode.linalg.jacobians import DenseJacobian, DiagonalJacobian
from millipode.model.linearisation import Linearisation
from millipode.pde.bases import Identity
from test_basis import matrix

pytestmark = pytest.mark.usefixtures("own_std")

GRID = mp.Grid((4, 3), (1.0, 1.5), ("neumann", "periodic"))
LINEAR = GRID.diffusion({"u": 0.1, "v": 0.02}, shift={"u": -1.0, "v": 0.0})


def reaction_diffusion(t, y):
    u, v = y["u"], y["v"]
    return {
        "u": 0.1 * GRID.laplacian(u) - u + jnp.sin(t) * v,
        "v": 0.02 * GRID.laplacian(v) + u**2 - v**3,
    }


def start(seed=3):
    u, v = np.random.default_rng(seed).normal(size=(2, 4, 3))
    return {"u": jnp.asarray(u), "v": jnp.asarray(v)}


class Given(Linearisation):
    """A Jacobian that does not depend on y, as a matrix."""

    matrix: jax.Array

    def __call__(self, field, t, y, memory=()):
        return field(t, y), DenseJacobian(field.sign * self.matrix)


REACTION = np.array([[-20.0, 9.0], [4.0, -30.0]])
COUPLED = GRID.diffusion({"u": 0.1, "v": 0.02}, reaction=REACTION)


class DenseWithGiven(mp.EK1):
    """The oracle."""

    reaction: np.ndarray

    def __init__(self, order, reaction, diffusion):
        super().__init__(order, diffusion=diffusion, structure="dense", corrections=2)
        self.reaction = reaction

    def linearisation(self, y):
        laplacian = matrix(GRID.laplacian, GRID.shape)
        diffusion = np.kron(np.diag([0.1, 0.02]), laplacian)
        return Given(jnp.asarray(diffusion + np.kron(self.reaction, np.eye(12))))


@pytest.mark.parametrize(
    ("order", "diffusion", "coupled", "span"),
    [
        (1, CONSTANT, False, (0.2, 0.0)),
        (2, DYNAMIC, False, (0.0, 1.0)),
        (3, DYNAMIC, False, (0.0, 1.0)),
        (2, CONSTANT, True, (0.0, 1.0)),
        (3, DYNAMIC, True, (0.0, 1.0)),
    ],
)
@pytest.mark.wide(quick=2)
def test_it_is_the_dense_ek1_in_another_basis(order, diffusion, coupled, span):
    linear, reaction = (COUPLED, REACTION) if coupled else (LINEAR, np.diag([-1.0, 0.0]))
    sols = [
        mp.solve(
            reaction_diffusion,
            start(),
            span,
            solver=solver,
            controller=mp.FixedStep(0.05),
        )
        for solver in (
            mp.SpectralEK1(order, linear=linear, diffusion=diffusion),
            DenseWithGiven(order, reaction, diffusion),
        )
    ]
    spectral, dense = sols
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
        (spectral.mean, spectral.diffusion),
        (dense.mean, dense.diffusion),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-12), spectral.std, dense.std
    )
    np.testing.assert_allclose(spectral.log_evidence, dense.log_evidence, rtol=1e-10)
    at = span[0] + (span[1] - span[0]) * jnp.array([0.0, 0.03, 0.777, 1.0])
    for q in range(min(order, 2)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9),
            spectral(at, derivative=q)[1:],
            dense(at, derivative=q)[1:],
        )


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.wide(quick=2)
def test_no_stiffness_is_too_much(order):
    """The spectral radius of the filter's own recursion, (I − K H) Φ, in its steady state."""
    stiffness = -np.logspace(-2, 8, 41)
    solver = mp.SpectralEK1(order, linear=(Identity(), stiffness), diffusion=CONSTANT)
    options = dict(solver=solver, controller=mp.FixedStep(1.0), save="end", max_steps=60)
    setup, carry = final_carry(lambda t, y: stiffness * y, jnp.ones(41), (0.0, 100.0), **options)
    transition = setup.model.prior.transition(jnp.ones(()))
    covariance = carry.state.covariance
    one, observation = jnp.ones(()), Observation(DiagonalJacobian(jnp.asarray(stiffness)))
    gains = np.asarray(covariance.correct(transition, one, observation, jnp.ones(41)).gain)
    for i, z in enumerate(stiffness):
        h = np.eye(order + 1)[1] - z * np.eye(order + 1)[0]
        recursion = (np.eye(order + 1) - np.outer(gains[:, i], h)) @ np.asarray(transition.matrix)
        radius = np.abs(np.linalg.eigvals(recursion)).max()
        assert radius < 1, (z, radius)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("boundary", ["neumann", "periodic"])
def test_heat_converges_at_the_order(order, boundary):
    problem = mp.problems.heat(32, a=0.02, boundary=boundary)
    solver = mp.SpectralEK1(order, linear=problem.linear, diffusion=CONSTANT)
    steps = np.array([20, 40, 80, 160])

    def error(n):
        options = dict(solver=solver, controller=mp.FixedStep(1 / n), save="end")
        return rmse(mp.solve(problem.f, problem.y0, (0.0, 1.0), **options).mean[-1], problem.solution(1.0))

    slope = -np.polyfit(np.log(steps), np.log([error(int(n)) for n in steps]), 1)[0]
    assert abs(slope - (order + 1)) < 0.3, slope


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("boundary", ["neumann", "dirichlet", "periodic"])
def test_heat_knows_its_error(order, boundary):
    """With one γ per mode; a single one lets short waves, which vanish at once, blur the long ones."""
    problem = mp.problems.heat(32, a=0.02, boundary=boundary)
    options = dict(diffusion=mp.DynamicDiffusion(vector=True), corrections=1)
    solver = mp.SpectralEK1(order, linear=problem.linear, **options)
    # Steps that grow slowly leave next to no error here.
    options = dict(solver=solver, rtol=1e-3, atol=1e-5, controller=mp.PIController(grow=10.0))
    sol = mp.solve(problem.f, problem.y0, (0.0, 1.0), save="end", **options)
    error, std = rmse(sol.mean[-1], problem.solution(1.0)), rmse(sol.std[-1], 0)
    assert 0.1 < error / std < 10


def test_fitzhugh_nagumo_takes_few_steps_at_any_resolution():
    attempts = []
    for n in (16, 32):
        problem = mp.problems.fitzhugh_nagumo(n)
        sol = mp.solve(
            problem.f,
            problem.y0,
            (0.0, 2.0),
            solver=mp.SpectralEK1(2, linear=problem.linear),
            rtol=1e-3,
            atol=1e-5,
            save="end",
        )
        f = jit(problem.f)
        truth = solve_ivp(
            lambda t, y, f=f, n=n: np.asarray(f(t, y.reshape(2, n, n))).ravel(),
            (0.0, 2.0),
            np.asarray(problem.y0).ravel(),
            "DOP853",
            rtol=1e-8,
            atol=1e-8,
        ).y[:, -1]
        assert rmse(sol.mean[-1].ravel(), truth) < 2e-3
        attempts.append(int(sol.stats.steps + sol.stats.rejected))
    assert attempts[1] < 1.3 * attempts[0] < 200


def etdrk4(linear, nonlinear, modes, h, steps):
    """Cox and Matthews' scheme with Kassam and Trefethen's contour integrals, for y' = L y + N(y)."""
    circle = np.exp(1j * np.pi * (np.arange(1, 33) - 0.5) / 32)
    z = h * linear[:, None] + circle
    e, e2 = np.exp(h * linear), np.exp(h * linear / 2)
    q = h * np.mean((np.exp(z / 2) - 1) / z, axis=1).real
    f1 = h * np.mean((-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3, axis=1).real
    f2 = h * np.mean((2 + z + np.exp(z) * (-2 + z)) / z**3, axis=1).real
    f3 = h * np.mean((-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3, axis=1).real
    for _ in range(steps):
        n = nonlinear(modes)
        a = e2 * modes + q * n
        na = nonlinear(a)
        b = e2 * modes + q * na
        nb = nonlinear(b)
        c = e2 * a + q * (2 * nb - n)
        modes = e * modes + f1 * n + 2 * f2 * (na + nb) + f3 * nonlinear(c)
    return modes


def test_kuramoto_sivashinsky_against_an_exponential_integrator():
    n = 1024
    problem = mp.problems.kuramoto_sivashinsky(n)
    (length,) = problem.grid.lengths
    k = 2 * np.pi / length * np.arange(n // 2 + 1)

    def nonlinear(modes):
        return -0.5j * k * np.fft.rfft(np.fft.irfft(modes, n) ** 2)

    start = np.fft.rfft(np.asarray(problem.y0))
    coarse, fine = (np.fft.irfft(etdrk4(k**2 - k**4, nonlinear, start, 50 / m, m), n) for m in (1000, 2000))
    assert rmse(coarse, fine) < 1e-5
    sol = mp.solve(
        problem.f,
        problem.y0,
        (0.0, 50.0),
        solver=mp.SpectralEK1(4, linear=problem.linear),
        rtol=1e-5,
        atol=1e-5,
        save="end",
    )
    assert rmse(sol.mean[-1], fine) < 1e-2 * np.sqrt(np.mean(fine**2))


def test_chaos_does_not_shorten_the_steps():
    """They did so without end while the growth of long waves was part of the linearisation."""
    problem = mp.problems.kuramoto_sivashinsky(128)
    solver = mp.SpectralEK1(2, linear=problem.linear)
    sol = mp.solve(problem.f, problem.y0, (0.0, 200.0), solver=solver, rtol=1e-3, atol=1e-5, save="end")
    assert sol.stats.steps < 2000


def test_growth_over_a_long_time_gets_a_warning():
    linear = GRID.operator(lambda laplacian: 0.5 + laplacian)
    with pytest.warns(UserWarning, match=r"grow by e\^20 .*leave it out of linear"):
        mp.solve(
            lambda t, u: GRID.laplacian(u),
            jnp.ones((4, 3)),
            (0.0, 40.0),
            solver=mp.SpectralEK1(2, linear=linear),
        )


LINEAR_RATES = np.array([[-2.0, 0.7], [0.3, -5.0]])


def linear_reaction(t, y):
    return {
        "u": 0.1 * GRID.laplacian(y["u"]) + LINEAR_RATES[0, 0] * y["u"] + LINEAR_RATES[0, 1] * y["v"],
        "v": 0.02 * GRID.laplacian(y["v"]) + LINEAR_RATES[1, 0] * y["u"] + LINEAR_RATES[1, 1] * y["v"],
    }


@pytest.mark.parametrize(
    ("refresh", "coupled", "span"),
    [(1, False, (0.0, 0.5)), (3, False, (0.0, 0.5)), (1, True, (0.5, 0.0)), (3, True, (0.0, 0.5))],
)
def test_a_refreshed_reaction_is_the_declared_one_where_that_is_constant(refresh, coupled, span):
    a = {"u": 0.1, "v": 0.02}
    if coupled:
        declared, silent = (GRID.diffusion(a, reaction=r) for r in (LINEAR_RATES, np.zeros((2, 2))))
    else:
        declared, silent = GRID.diffusion(a, shift={"u": -2.0, "v": -5.0}), GRID.diffusion(a)
    solvers = mp.SpectralEK1(2, linear=declared), mp.SpectralEK1(2, linear=silent, refresh=refresh)
    options = dict(controller=mp.FixedStep(0.05), save="end")
    want, got = (mp.solve(linear_reaction, start(), span, solver=s, **options) for s in solvers)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9), (got.mean, got.std), (want.mean, want.std)
    )


OPTIONS = dict(solver=mp.SpectralEK1(2, linear=LINEAR), rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_all_that_solve_offers():
    times = jnp.array([0.2, 0.5, 1.0])
    whole = mp.solve(reaction_diffusion, start(), (0.0, 1.0), **OPTIONS)
    some = mp.solve(reaction_diffusion, start(), (0.0, 1.0), save=times, **OPTIONS)
    end = mp.solve(reaction_diffusion, start(), (0.0, 1.0), save="end", **OPTIONS)
    assert whole.mean["u"].shape == whole.std["u"].shape == (whole.t.size, 4, 3)

    def close(a, b, rtol=1e-6):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-9), a, b)

    close(some(times)[1:], whole(times)[1:], 1e-5)
    close((some.mean["v"][-1], some.std["v"][-1]), (end.mean["v"][-1], end.std["v"][-1]))

    samples = whole.sample(jax.random.key(0), num=2000, at=times)
    assert samples["u"].shape == (2000, 3, 4, 3)
    for field in ("u", "v"):
        got, want = samples[field], whole(times)
        np.testing.assert_allclose(got.std(axis=0), want.std[field], rtol=0.12, atol=1e-12)
        bias = np.abs(got.mean(axis=0) - want.mean[field]) / want.std[field]
        assert bias.max() < 5 / np.sqrt(2000)


@pytest.mark.thorough
def test_transformations():
    def final(scale):
        y0 = jax.tree.map(lambda x: scale * x, start())
        options = dict(save="end", controller=mp.FixedStep(0.05), solver=OPTIONS["solver"])
        sol = mp.solve(reaction_diffusion, y0, (0.0, 0.5), **options)
        return jnp.sum(sol.mean["v"]) + 100 * jnp.sum(sol.std["u"])

    value, slope = jax.value_and_grad(final)(1.0)
    eps = 1e-5
    np.testing.assert_allclose(slope, (final(1 + eps) - final(1 - eps)) / (2 * eps), rtol=1e-5)
    np.testing.assert_allclose(jit(final)(1.0), value, rtol=1e-10)
    np.testing.assert_allclose(jax.vmap(final)(jnp.array([1.0, 0.5]))[0], value, rtol=1e-10)


def test_backwards_in_time_where_the_equation_allows_it():
    tight = OPTIONS | dict(save="end", rtol=1e-8, atol=1e-9)
    there = mp.solve(reaction_diffusion, start(), (0.0, 0.2), **tight)
    y1 = jax.tree.map(lambda x: x[-1], there.mean)
    back = mp.solve(reaction_diffusion, y1, (0.2, 0.0), **tight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[-1], b, atol=1e-5), back.mean, start())


def test_single_precision(single_precision):
    problem = mp.problems.allen_cahn(16)
    assert problem.y0.dtype == jnp.float32
    sol = mp.solve(problem.f, problem.y0, (0.0, 1.0), solver=mp.SpectralEK1(2, linear=problem.linear))
    assert sol.mean.dtype == sol.std.dtype == jnp.float32 and sol.success


def test_anti_diffusion_is_allowed_with_a_warning():
    solver = mp.SpectralEK1(2, linear=GRID.diffusion(-0.01))
    with pytest.warns(UserWarning, match="diffusion backwards in time") as caught:
        mp.solve(lambda t, u: -0.01 * GRID.laplacian(u), jnp.ones((4, 3)), (0.0, 0.1), solver=solver)
    assert caught[0].filename == __file__  # where the user called


@pytest.mark.parametrize(
    ("linear", "y0", "message"),
    [
        (LINEAR, jnp.ones((4, 3)), r"'u'.*'v'.*PyTreeDef\(\*\)"),
        (LINEAR, {"u": jnp.ones((4, 3)), "w": jnp.ones((4, 3))}, "'v'.*'w'"),
        (GRID.diffusion(0.1), jnp.ones((3, 4)), r"\(4, 3\).*\(3, 4\)"),
        (GRID.diffusion([0.1, 0.2, 0.3]), jnp.ones((2, 4, 3)), r"\(3, 3, 4\).*\(2, 3, 4\)"),
    ],
)
def test_a_linear_part_that_does_not_fit_is_refused(linear, y0, message):
    with pytest.raises(ValueError, match=message):
        mp.solve(lambda t, y: y, y0, (0.0, 1.0), solver=mp.SpectralEK1(2, linear=linear))


def test_what_is_no_linear_part_is_refused():
    with pytest.raises(TypeError, match="mp.Grid"):
        mp.SpectralEK1(2, linear=0.1)
    with pytest.raises(ValueError, match="refresh"):
        mp.SpectralEK1(2, linear=LINEAR, refresh=0)
    with pytest.raises(ValueError, match="not Kronecker"):
        mp.SpectralEK1(2, linear=LINEAR, structure="kronecker")
