"""The EK1 with a Kronecker covariance: its gains, its linear systems, and what is built on them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import millipode as mp
import oracle
from common import Y0, nonlinear, rmse, robertson
from millipode.filter.control import Replay
from millipode.filter.error import Norm
from millipode.filter.gains import gains, no_past
from millipode.filter.implicit import WEIGHT, _Systems
from millipode.linalg.jacobians import DenseJacobian
from millipode.model.linear_solvers import KrylovJacobian
from millipode.model.priors import IWP

kronecker = functools.partial(mp.EK1, structure="kronecker")
ORDERS = (1, 2, 3, 4, 5, 6)


def scalar_gains(order, steps, observed):
    """The gains of a scalar filter with unit noise in units of every step, relative to y', in NumPy."""
    n = order + 1
    phi, sigma = oracle.transition(order, 1.0)
    c, found = np.zeros((n, n)), []
    for before, h in zip([steps[0], *steps[:-1]], steps, strict=True):
        units = np.diag((h / before) ** np.arange(n))
        predicted = phi @ units @ c @ units @ phi.T + sigma
        k = predicted[:, observed] / predicted[observed, observed]
        left = np.eye(n)
        left[:, observed] -= k
        c = left @ predicted @ left.T
        found.append(k / k[1] * h ** (1.0 - np.arange(n)))
    return np.array(found)


@functools.cache
def steady(order, ratio=1.0):
    """l⁰ and l^∞ after many steps, each this many times as long as the one before, in units of the last."""
    steps = ratio ** np.arange(120.0)
    units = steps[-1] ** (np.arange(order + 1.0) - 1)
    return [scalar_gains(order, steps, q)[-1] * units for q in (1, 0)]


def amplification(order, z, ratio=1.0):
    """The eigenvalues of a step for hλ = z, in units of the step; the next one is ``ratio`` times as long."""
    n = order + 1
    accurate, stiff = steady(order, ratio)
    phi, _ = oracle.transition(order, 1.0)
    w = (1 - WEIGHT * z) ** -2
    k = accurate / (1 - accurate[0] * z) * w + stiff / (1 - stiff[0] * z) * (1 - w)
    h = np.eye(n)[1] - z * np.eye(n)[0]
    return np.linalg.eigvals(np.diag(ratio ** np.arange(n)) @ (np.eye(n) - np.outer(k, h)) @ phi)


@pytest.mark.parametrize("order", ORDERS)
def test_gains_are_those_of_two_scalar_filters(order):
    steps = np.exp(np.random.default_rng(order).uniform(-1, 1, 12)) * 1e-3
    past, found = no_past(order, jnp.zeros(())), []
    prior = IWP(order)
    for h in steps:
        new = gains(past, prior.transition(jnp.asarray(h)), jnp.asarray(h))
        past = new.past
        found.append((new.accurate, new.stiff))
    for i, observed in enumerate((1, 0)):
        np.testing.assert_allclose([f[i] for f in found], scalar_gains(order, steps, observed), rtol=1e-6)


@pytest.mark.parametrize(("order", "angle"), [(1, 90), (2, 90), (3, 90), (4, 87.4), (5, 69.4)])
def test_sectors_of_stability(order, angle):
    """The angles that docs/design.md reports, to one degree."""

    def is_stable(degrees):
        rays = -np.logspace(-3, 5, 200) * np.exp(1j * np.deg2rad(degrees))
        return all(np.abs(amplification(order, z)).max() <= 1 + 1e-9 for z in rays)

    assert is_stable(max(angle - 1, 0))
    assert angle == 90 or not is_stable(angle + 1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ratio", [1.1, 1.5, 2.0])
def test_steps_that_grow_amplify_nothing(order, ratio):
    """Where a step is stiff, nothing that is wrong in derivatives grows relative to them."""
    assert np.abs(amplification(order, -1e8, ratio)).max() < 0.95


def test_with_constant_noise_they_would():
    """What a constant γ makes of it, as variable-step BDF methods do."""
    order, ratio, n = 5, 2.0, 6
    phi, sigma = oracle.transition(order, 1.0)
    c, units = np.zeros((n, n)), np.diag(ratio ** np.arange(n))
    for _ in range(20):
        predicted = phi @ c @ phi.T + sigma
        k = predicted[:, 0] / predicted[0, 0]
        left = np.eye(n) - np.outer(k, np.eye(n)[0])
        c = units @ left @ predicted @ left.T @ units / ratio ** (2 * order + 1)
    assert np.abs(np.linalg.eigvals(units @ left @ phi)).max() > 20


def systems_for(matrix, mixes, krylov):
    h = jnp.asarray(0.1)
    order = 3
    past = no_past(order, h)
    for _ in range(4):
        known = gains(past, IWP(order).transition(h), h)
        past = known.past
    jacobian = DenseJacobian(matrix)
    if krylov:
        jacobian = KrylovJacobian(lambda x: matrix @ x, None, matrix.shape[0], 1e-13, is_rough=False)

    class Unit(Norm):
        tolerated = jnp.ones(matrix.shape[0])

    return known, _Systems(known, jacobian, Unit(None, None, None), mixes, 1.0)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("krylov", [True, False])
def test_every_gain_satisfies_the_linearised_ode(mixes, krylov):
    """H K = I, which is what makes the filter's residual zero after a correction."""
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(rng.normal(size=(12, 12)) - 30 * np.diag(rng.uniform(size=12)))
    _, systems = systems_for(matrix, mixes, krylov)
    z = jnp.asarray(rng.normal(size=12))
    first = systems.first(z)
    assert first.solved
    value, slope = (sum(m.gain[q] * m.field for m in first.moves) for q in (0, 1))
    np.testing.assert_allclose(slope - matrix @ value, z, rtol=1e-9, atol=1e-9)


def textbook(f, jacobian, derivatives, grid, order, mixes):
    """The filter's mean on a grid, by matrices over all unknowns, in NumPy."""
    d, n = derivatives.shape[1], order + 1
    m, means, one = derivatives.copy(), [derivatives[0]], np.eye(derivatives.shape[1])
    steps = np.diff(grid)
    accurate, stiff = (scalar_gains(order, steps, q) for q in (1, 0))
    for i, (t, h) in enumerate(zip(grid[1:], steps, strict=True)):
        phi, _ = oracle.transition(order, h)
        m = phi @ m
        z, big = m[1] - f(t, m[0]), np.asarray(jacobian(t, m[0]))
        inverse = np.linalg.inv(one - stiff[i][0] * big)
        half = np.linalg.inv(one - WEIGHT * h * big)
        w = half @ half if mixes else np.zeros((d, d))
        k = np.kron(accurate[i][:, None], np.linalg.inv(one - accurate[i][0] * big) @ w)
        k += np.kron(stiff[i][:, None], inverse @ (one - w))
        m = m - (k @ z).reshape(n, d)
        for _ in range(50):
            m = m - np.outer(stiff[i], inverse @ (m[1] - f(t, m[0])))
        means.append(m[0])
    return np.array(means)


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("linear_solver", [mp.Direct(), mp.GMRES(rtol=1e-11)], ids=["direct", "gmres"])
@pytest.mark.parametrize("order", [2, 4])
def test_mean_is_that_of_the_textbook(mixes, linear_solver, order):
    """On a grid of steps that vary by factors of two, to what corrections may leave."""
    times = np.cumsum(0.02 * np.exp(np.random.default_rng(3).uniform(-0.7, 0.7, 30)))
    solver = kronecker(order, linear_solver=linear_solver, mixture=mixes, corrections=20)
    derivatives = mp.solve(nonlinear, Y0, (0.0, 1e-9), solver=solver, save="steps", rtol=1e-3, atol=1e-3)
    start = np.array([np.asarray(derivatives.derivative(q).mean[0]) for q in range(order + 1)])
    sol = mp.solve(
        nonlinear,
        Y0,
        (0.0, float(times[-1])),
        solver=solver,
        controller=Replay(times, 0),
        smooth=False,
        rtol=1e-13,
        atol=1e-13,
    )
    jacobian = jax.jit(jax.jacfwd(nonlinear, argnums=1))
    f = jax.jit(nonlinear)
    want = textbook(lambda t, y: np.asarray(f(t, y)), jacobian, start, [0.0, *times], order, mixes)
    np.testing.assert_allclose(sol.mean, want, rtol=1e-9, atol=1e-9)
    assert (int(sol.stats.iterations) > 0) == isinstance(linear_solver, mp.GMRES)


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("mixes", [True, False])
def test_order_of_convergence(order, mixes):
    """ν + 1 for the mixture, ν for the stiff gain alone."""
    y0, span = jnp.array([1.0, 0.0]), (0.0, 2.0)

    def f(t, y):
        return jnp.stack([y[1], -jnp.sin(y[0])])

    exact = solve_ivp(lambda t, y: [y[1], -math.sin(y[0])], span, y0, "DOP853", rtol=1e-13, atol=1e-13).y[
        :, -1
    ]
    errors = []
    for steps in (40, 80) if order < 4 else (20, 40):
        sol = mp.solve(
            f,
            y0,
            span,
            solver=kronecker(order, mixture=mixes, corrections=10),
            controller=mp.FixedStep(2.0 / steps),
            save="end",
            rtol=1e-11,
            atol=1e-11,
        )
        errors.append(rmse(sol.mean[-1], exact))
    measured = math.log2(errors[0] / errors[1])
    assert order + mixes - 0.3 < measured < order + mixes + 1.3


ROBERTSON = dict(rtol=1e-6, atol=jnp.array([1e-10, 1e-14, 1e-10]), save="end")


@pytest.mark.parametrize("order", [3, 4, 5])
def test_fewer_steps_than_bdf_on_a_stiff_classic(order):
    start, span = np.array([1.0, 0.0, 0.0]), (0.0, 1e5)
    sol = mp.solve(robertson, jnp.asarray(start), span, solver=mp.EK1(order), **ROBERTSON)
    f, jacobian = jax.jit(robertson), jax.jit(jax.jacfwd(robertson, argnums=1))
    options = dict(atol=np.asarray(ROBERTSON["atol"]), jac=lambda t, y: np.asarray(jacobian(t, y)))

    def reference(method, rtol):
        return solve_ivp(lambda t, y: np.asarray(f(t, y)), span, start, method, rtol=rtol, **options)

    bdf, exact = reference("BDF", 1e-6), reference("Radau", 1e-11).y[:, -1]
    assert int(sol.stats.steps + sol.stats.rejected) < 0.9 * bdf.t.size
    scaled = (np.asarray(sol.mean[-1]) - exact) / (np.asarray(ROBERTSON["atol"]) + 1e-6 * np.abs(exact))
    assert np.abs(scaled).max() < 5


def test_steps_may_double_from_the_smallest_to_the_largest():
    """Robertson's problem to 10¹¹: sixteen orders of magnitude in the step, at order 5."""
    y0 = jnp.array([1.0, 0.0, 0.0])
    sol = mp.solve(robertson, y0, (0.0, 1e11), solver=mp.EK1(5), **{**ROBERTSON, "rtol": 1e-4})
    assert sol.success and int(sol.stats.steps) < 350


def test_corrections_stop_when_nothing_changes():
    """A linear problem takes one evaluation of f per step, once that is known to be enough."""
    matrix = jnp.asarray([[-100.0, 1.0], [1.0, -0.5]])
    sol = mp.solve(lambda t, y: matrix @ y, jnp.ones(2), (0.0, 10.0), solver=kronecker(4), save="end")
    attempts = int(sol.stats.steps + sol.stats.rejected)
    assert attempts < int(sol.stats.f_evals) < attempts + 20


@pytest.mark.parametrize("linear_solver", [mp.Direct(), mp.GMRES()], ids=["direct", "gmres"])
def test_nothing_gets_past_a_jacobian_with_nan(linear_solver):
    def f(t, y):
        return jnp.where(t > 1, jnp.nan, -1.0) * y

    solver = mp.EK1(linear_solver=linear_solver)
    sol = mp.solve(f, jnp.ones(8), (0.0, 2.0), solver=solver, throw=False, save="end")
    assert sol.status in (mp.Status.STEP_TOO_SMALL, mp.Status.NON_FINITE)
    np.testing.assert_allclose(sol.mean[-1], np.exp(-1), rtol=1e-2)


@pytest.mark.parametrize("linear_solver", [mp.Direct(), mp.GMRES(rtol=1e-8)], ids=["direct", "gmres"])
@pytest.mark.parametrize("mixes", [True, False])
def test_gradients(linear_solver, mixes):
    """Both modes, against finite differences."""
    solver = kronecker(3, linear_solver=linear_solver, mixture=mixes)

    def loss(rate):
        def f(t, y):
            return jnp.stack([-rate * y[0] * y[1], rate * y[0] * y[1] - 20 * y[1] ** 2])

        options = dict(rtol=1e-9, atol=1e-9, save="end", uncertainty="filter", max_steps=400)
        return mp.solve(f, jnp.array([1.0, 0.1]), (0.0, 0.5), solver=solver, **options).mean[-1, 1]

    rate, step = 2.0, 1e-4
    want = (loss(rate + step) - loss(rate - step)) / (2 * step)
    np.testing.assert_allclose(jax.jvp(loss, (rate,), (1.0,))[1], want, rtol=1e-4)
    np.testing.assert_allclose(jax.grad(loss)(rate), want, rtol=1e-4)


def test_std_has_the_size_of_the_error():
    """The filter's own one knows nothing of the Jacobian: it is far too large where the problem is stiff."""
    y0 = jnp.array([1.0, 0.0, 0.0])
    sol = mp.solve(robertson, y0, (0.0, 1e4), solver=mp.EK1(4), **ROBERTSON)
    exact = solve_ivp(
        lambda t, y: np.asarray(robertson(t, y)), (0.0, 1e4), y0, "Radau", rtol=1e-10, atol=1e-14
    ).y[:, -1]
    error, std, own = (
        float(np.sqrt(np.mean(np.square(x)))) for x in (sol.mean[-1] - exact, sol.std[-1], sol.filter_std[-1])
    )
    assert std / 10 < error < 10 * std and own > 3 * std


def test_members_solve_the_same_systems():
    """White members of a linear problem are what the recursion with this gain makes of their noise."""
    matrix = jnp.asarray([[-50.0, 1.0, 0.0], [2.0, -1.0, 0.3], [0.0, 1.0, -0.1]])
    sol = mp.solve(
        lambda t, y: matrix @ y,
        jnp.ones(3),
        (0.0, 2.0),
        solver=kronecker(3),
        save="end",
        uncertainty=mp.Transported(32),
    )
    exact = jax.scipy.linalg.expm(2 * matrix) @ jnp.ones(3)
    assert rmse(sol.mean[-1], exact) < 10 * rmse(sol.std[-1], 0) < 1e-2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: kronecker(linear_solver=3), TypeError, "mp.Direct"),
        (lambda: kronecker(mixture="yes"), TypeError, "mixture"),
        (lambda: kronecker(diffusion=mp.DynamicDiffusion(vector=True)), ValueError, "history of covariances"),
        (lambda: kronecker(prior=mp.IOUP(rate=jnp.ones(3), order=2)), ValueError, "rate per unknown"),
        (lambda: mp.EK1(structure="dense", linear_solver=mp.Direct()), ValueError, "kronecker"),
        (lambda: mp.EK1(structure="blockdiagonal"), ValueError, "couples all unknowns"),
        (lambda: mp.GMRES(3), TypeError, "preconditioner must be"),
        (lambda: mp.GMRES([]), TypeError, "preconditioner must be"),
        (lambda: mp.GMRES(vectors=0), ValueError, "at least 1"),
        (lambda: mp.GMRES(rtol=2.0), ValueError, "between 0 and 1"),
        (lambda: mp.LocalBlocks(0.5), TypeError, "integer"),
    ],
)
def test_bad_options(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("preconditioner", "y0", "message"),
    [
        (mp.LocalBlocks(2), jnp.ones((2, 3)), "without such an axis"),
        (mp.LocalBlocks(), [jnp.ones(2), jnp.ones(3)], "the same cells"),
        (mp.Grid((16, 16)).diffusion([1.0, 2.0]), jnp.ones((3, 16, 16)), "eigenvalues|components"),
        (lambda c, t, y, args, r: r[:1], jnp.ones(3), "preconditioner"),
    ],
)
def test_preconditioners_that_do_not_fit(preconditioner, y0, message):
    solver = mp.EK1(linear_solver=mp.GMRES(preconditioner))
    with pytest.raises((ValueError, TypeError), match=message):
        mp.solve(lambda t, y: jax.tree.map(jnp.negative, y), y0, (0.0, 1.0), solver=solver)


def test_the_default_is_what_is_said():
    assert mp.EK1().structure == "kronecker" and mp.EK1(linear_solver=mp.GMRES()).structure == "kronecker"
    assert mp.EK1(corrections=1).structure == "dense"
    assert mp.EK1(diffusion=mp.DynamicDiffusion(vector=True)).structure == "dense"
    small, large = mp.EK1().linearisation(jnp.ones(3)), mp.EK1().linearisation(jnp.ones(10_000))
    assert isinstance(small.solver, mp.Direct) and small.mixes
    assert isinstance(large.solver, mp.GMRES) and not large.mixes
