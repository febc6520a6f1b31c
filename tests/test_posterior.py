"""The posterior against exact Gaussian-process conditioning, and against itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR, Y0, jit, name, nonlinear
from millipode.pde.bases import Identity
from millipode.posterior.posterior import marginal_std
from oracle import LinearPosterior, matern, ornstein_uhlenbeck

pytestmark = pytest.mark.usefixtures("own_std")

KEY = jax.random.key(0)
FULL = np.array([[-1.0, 0.7], [-0.4, -0.5]])
DIAGONAL = np.diag([-1.3, 0.6])
START = jnp.array([1.0, -0.5])
SPACE = np.array([[2.0, -1.2], [-1.2, 1.0]])
RATE, LENGTH = -0.8, 0.7
SPAN = (0.0, 1.2)


def full(t, y):
    return jnp.asarray(FULL) @ y


def diagonal(t, y):
    return jnp.asarray(np.diag(DIAGONAL)) * y


def quadrature(t, y):
    return jnp.stack([jnp.cos(3 * t), jnp.sin(2 * t + 1)])


def forcing(t):
    return np.array([np.cos(3 * t), np.sin(2 * t + 1)])


def forced(t, y):
    return diagonal(t, y) + quadrature(t, y)


class Ornstein(mp.SpectralEK1):
    """In the basis of the unknowns themselves, with the prior that knows their rates."""

    def __init__(self, order, **options):
        super().__init__(order, linear=(Identity(), np.diag(DIAGONAL)), prior=mp.IOUP(), **options)


class Correlated(mp.EK0):
    def __init__(self, order, **options):
        super().__init__(order, spatial=mp.spatial.Dense(SPACE), **options)


class OneRate(mp.EK0):
    def __init__(self, order, **options):
        super().__init__(order, prior=mp.IOUP(rate=RATE), **options)


class Rates(mp.EK0):
    def __init__(self, order, **options):
        super().__init__(order, prior=mp.IOUP(rate=jnp.asarray(np.diag(DIAGONAL))), **options)


class Full(mp.EK1):
    """With a rate that has nothing to do with the equation."""

    def __init__(self, order, **options):
        super().__init__(order, prior=mp.IOUP(rate=RATE), **options)


class Matern(mp.EK0):
    """In space and in time."""

    def __init__(self, order, **options):
        prior = mp.MaternProcess(length_scale=LENGTH)
        super().__init__(order, prior=prior, spatial=mp.spatial.Dense(SPACE), **options)


def on_diagonal(nu, h, i):
    return ornstein_uhlenbeck(nu, h, np.diag(DIAGONAL)[i])


def one_rate(nu, h, i):
    return ornstein_uhlenbeck(nu, h, RATE)


# What the oracle has to know of priors that are not integrated Wiener processes.
PROCESSES = {
    Ornstein: dict(process=on_diagonal),
    Correlated: dict(space=SPACE),
    OneRate: dict(process=one_rate),
    Rates: dict(process=on_diagonal),
    Full: dict(process=one_rate),
    Matern: dict(process=lambda nu, h, i: matern(nu, h, LENGTH), space=SPACE),
}


def powers(a):
    """The first derivatives at the start of y' = a y."""
    return np.stack([np.linalg.matrix_power(a, q) @ np.asarray(START) for q in range(4)])


# f, its Jacobian, its forcing, and the exact derivatives at t = 0.
PROBLEMS = {
    "full": (full, FULL, lambda t: np.zeros(2), powers(FULL)),
    "diagonal": (diagonal, DIAGONAL, lambda t: np.zeros(2), powers(DIAGONAL)),
    "quadrature": (
        quadrature,
        0 * FULL,
        forcing,
        np.array([START, [1.0, np.sin(1.0)], [0.0, 2 * np.cos(1.0)], [-9.0, -4 * np.sin(1.0)]]),
    ),
}
_, _, _, given = PROBLEMS["quadrature"]
derivatives = [np.asarray(START)]
for q in range(1, 4):
    derivatives.append(DIAGONAL @ derivatives[-1] + given[q])
PROBLEMS["forced"] = (forced, DIAGONAL, forcing, np.array(derivatives))

# Each filter on a problem where its linearisation is exact.
EXACT = [
    ("full", mp.EK1, "dense", DYNAMIC, 1),
    ("full", mp.EK1, "dense", CONSTANT, 2),
    ("full", mp.EK1, "dense", DYNAMIC, 3),
    ("diagonal", mp.DiagonalEK1, "blockdiagonal", DYNAMIC_VECTOR, 1),
    ("diagonal", mp.DiagonalEK1, "blockdiagonal", CONSTANT, 2),
    ("diagonal", mp.DiagonalEK1, "blockdiagonal", CONSTANT_VECTOR, 3),
    ("quadrature", mp.EK0, "kronecker", CONSTANT, 1),
    ("quadrature", mp.EK0, "kronecker", DYNAMIC, 2),
    ("quadrature", mp.EK0, "kronecker", CONSTANT_VECTOR, 3),
    ("forced", Ornstein, "blockdiagonal", DYNAMIC_VECTOR, 1),
    ("forced", Ornstein, "blockdiagonal", CONSTANT, 2),
    ("forced", Ornstein, "dense", DYNAMIC, 3),
    ("quadrature", Correlated, "kronecker", DYNAMIC, 2),
    ("quadrature", Correlated, "kronecker", CONSTANT, 3),
    ("quadrature", Correlated, "blockdiagonal", DYNAMIC, 1),
    ("quadrature", Correlated, "dense", CONSTANT, 1),
    ("quadrature", OneRate, "kronecker", CONSTANT, 2),
    ("quadrature", OneRate, "blockdiagonal", DYNAMIC_VECTOR, 1),
    ("quadrature", OneRate, "dense", DYNAMIC, 1),
    ("quadrature", Rates, "blockdiagonal", DYNAMIC, 3),
    ("full", Full, "dense", DYNAMIC, 1),
    ("quadrature", Matern, "kronecker", DYNAMIC, 2),
    ("quadrature", Matern, "kronecker", CONSTANT, 3),
]


@pytest.mark.parametrize(("problem", "kind", "structure", "diffusion", "order"), EXACT, ids=name)
@pytest.mark.wide(quick=3)
def test_posterior_is_gaussian_process_conditioning(problem, kind, structure, diffusion, order):
    f, a, g, derivatives = PROBLEMS[problem]
    solver = kind(order, structure=structure, diffusion=diffusion, initialise="taylor")
    options = dict(solver=solver, rtol=2e-2 if order < 3 else 1e-3, atol=1e-3)
    sol = mp.solve(f, START, SPAN, **options)
    grid = np.asarray(sol.t)
    assert 5 <= grid.size <= 80
    # Two times in one step, others in steps before the last, which may be short; next to a step, save times
    # are rounded (``bridge.near``).
    within, part = np.array([1, 1, 2, -3]), np.array([0.3, 0.4, 0.8, 0.5])
    extra = grid[within] + part * (grid[within + 1] - grid[within])

    dynamic = isinstance(diffusion, mp.DynamicDiffusion)
    gammas = np.asarray(sol.diffusion)[1:] if dynamic else np.asarray(sol.diffusion)[None]
    gammas = np.broadcast_to(gammas.reshape(len(gammas), -1), (len(gammas), 2))
    gammas = np.broadcast_to(gammas, (grid.size - 1, 2))
    want = LinearPosterior(a, g, derivatives[: order + 1], grid, extra, gammas, **PROCESSES.get(kind, {}))
    np.testing.assert_allclose(sol.log_evidence, want.log_evidence, rtol=1e-7)

    def check(have, index, q):
        """To rounding, of means and of the prior's variance, from which the oracle subtracts."""
        mean, variance = want.mean[index, :, q], np.einsum("tdtd->td", want.covariance[:, :, q, :, :, q])
        size = np.abs(want.mean[:, :, q]).max()
        np.testing.assert_allclose(have.mean, mean, rtol=1e-10, atol=1e-10 * size)
        allowed = 1e-9 * want.prior_variance[q]
        np.testing.assert_allclose(np.square(have.std), variance[index], rtol=1e-6, atol=allowed)

    anywhere = np.concatenate([extra, grid])
    for q in range(order + 1):
        dense = sol(anywhere, derivative=q)
        check(dense, want.at(anywhere), q)
        on_grid = sol.derivative(q)
        # Derivatives of a process with a rate are sums, which two programs may round in two ways.
        exactly = 1e-13 if "process" in PROCESSES.get(kind, {}) else 0.0
        np.testing.assert_allclose(dense.mean[extra.size :], on_grid.mean, rtol=exactly)
        np.testing.assert_allclose(dense.std[extra.size :], on_grid.std, rtol=exactly)
        if q == 0:
            np.testing.assert_array_equal(on_grid.mean, sol.mean)
            np.testing.assert_array_equal(on_grid.std, sol.std)

    if order != 2:  # the programs for what follows are large; one order per structure will do
        return
    times = np.sort(np.concatenate([extra, grid[[0, 3, -1]]]))
    chain = mp.solve(f, START, SPAN, save=times, **options)
    for q in range(order + 1):
        check(chain.derivative(q), want.at(times), q)
    np.testing.assert_array_equal(chain.derivative(0).std, chain.std)

    # Between different times, from joint samples.
    index = want.at(times)
    cross = want.covariance[np.ix_(index, range(2), [0], index, range(2), [0])][:, :, 0, :, :, 0]
    num = 4000
    key = jax.random.key(order)
    for draws in (sol.sample(key, num=num, at=times), chain.sample(key, num=num)):
        deviation = (np.asarray(draws) - want.mean[index, :, 0]).reshape(num, -1)
        have = deviation.T @ deviation / num
        truth = cross.reshape(have.shape)
        variance = np.diag(truth)
        # The standard error of an empirical covariance of Gaussians whose mean is known.
        error = np.sqrt((np.outer(variance, variance) + truth**2) / num)
        assert (np.abs(have - truth) <= 5.5 * error + 1e-7 * variance.max()).all()
        assert (np.abs(deviation.mean(axis=0)) <= 5.5 * np.sqrt(variance / num) + 1e-12).all()


# In both directions of time, by turns.
SPANS = [(0.0, 1.0), (1.0, 0.0)]
SMOOTHERS = [
    (mp.EK0, "kronecker", CONSTANT_VECTOR),
    (mp.EK0, "kronecker", DYNAMIC),
    (mp.EK0, "blockdiagonal", DYNAMIC_VECTOR),
    (mp.DiagonalEK1, "blockdiagonal", CONSTANT),
    (mp.DiagonalEK1, "dense", CONSTANT_VECTOR),
    (mp.EK1, "dense", DYNAMIC),
]


@pytest.mark.parametrize(
    ("kind", "structure", "diffusion", "t_span"),
    [(*f, SPANS[i % 2]) for i, f in enumerate(SMOOTHERS)],
    ids=name,
)
@pytest.mark.wide(quick=2)
def test_fixed_point_equals_fixed_interval_equals_the_filter_at_the_end(kind, structure, diffusion, t_span):
    solver = kind(2, structure=structure, diffusion=diffusion)
    options = dict(solver=solver, rtol=1e-4)
    steps = mp.solve(nonlinear, Y0, t_span, **options)
    end = mp.solve(nonlinear, Y0, t_span, save="end", **options)
    t = np.asarray(steps.t)
    np.testing.assert_allclose(steps.mean[-1], end.mean[-1], rtol=1e-13)
    np.testing.assert_allclose(steps.std[-1], end.std[-1], rtol=1e-12)
    np.testing.assert_allclose(steps.log_evidence, end.log_evidence, rtol=1e-12)
    path = steps.posterior
    filtered = jit(jax.vmap(lambda c: marginal_std(path.prior, c, Y0, 0, path.output_gamma)))(path.filtered)
    filtered = np.reshape(filtered, (t.size, -1))
    assert (steps.std <= filtered * (1 + 1e-10)).all()
    assert (steps.std < 0.999 * filtered).any()

    between = 0.3 * t[1:] + 0.7 * t[:-1]
    times = np.sort(np.concatenate([t[::5], between[::4], t[-1:]]))
    times = np.unique(times) if t_span[1] > t_span[0] else np.unique(times)[::-1]
    chain = mp.solve(nonlinear, Y0, t_span, save=times, **options)
    dense = steps(times)
    scale = float(steps.std.max())
    np.testing.assert_allclose(chain.mean, dense.mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(chain.std, dense.std, rtol=1e-8, atol=1e-11 * scale)
    on_grid = np.isin(times, t)
    index = [int(np.flatnonzero(t == s)[0]) for s in times[on_grid]]
    np.testing.assert_allclose(chain.mean[on_grid], steps.mean[np.array(index)], rtol=1e-12, atol=1e-12)
    for q in (1, 2):
        a, b = chain.derivative(q), steps(times, derivative=q)
        np.testing.assert_allclose(a.mean, b.mean, rtol=1e-9, atol=1e-9 * float(jnp.abs(b.mean).max()))
        np.testing.assert_allclose(a.std, b.std, rtol=1e-6, atol=1e-8 * float(b.std.max()))

    # The first derivative is f up to the uncertainty; a sign lost backwards in time would show.
    slope = jax.vmap(nonlinear)(steps.t, steps.mean)
    np.testing.assert_allclose(steps.derivative(1).mean, slope, atol=1e-3 * float(jnp.abs(slope).max()))
    inside, h = between[: times.size], 1e-5
    for q in (0, 1):
        difference = (steps(inside + h, derivative=q).mean - steps(inside - h, derivative=q).mean) / (2 * h)
        have = steps(inside, derivative=q + 1).mean
        np.testing.assert_allclose(have, difference, atol=1e-4 * float(jnp.abs(have).max()))


def test_more_save_times_change_nothing_at_the_others():
    times = np.linspace(0.05, 0.95, 19)
    few, many, one = (
        mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(2), save=s) for s in (times[::6], times, times[6:7])
    )
    np.testing.assert_allclose(few.mean, many.mean[::6], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(few.std, many.std[::6], rtol=1e-10)
    np.testing.assert_allclose(few.log_evidence, many.log_evidence, rtol=1e-13)
    np.testing.assert_allclose(one.mean, many.mean[6:7], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(one.std, many.std[6:7], rtol=1e-10)


@pytest.mark.parametrize("order", [1, 4])
@pytest.mark.wide(quick=1)
def test_save_times_close_to_steps(order):
    """A hair before or after a step there is no room for a difference quotient; y must not notice."""
    options = dict(solver=mp.EK0(order), rtol=1e-5 if order > 1 else 1e-3, max_steps=4000)
    sol = mp.solve(nonlinear, Y0, (0.0, 1.0), **options)
    steps = np.asarray(sol.t)[15:-3:6]
    solve = jit(lambda times: mp.solve(nonlinear, Y0, (0.0, 1.0), save=times, **options))
    for offset in (1e-15, 1e-13, 1e-11, 1e-9, 1e-7, 1e-5, 1e-4, 1e-3):
        for sign in (-1, 1):
            times = steps + sign * offset
            chain, dense = solve(times), sol(times)
            np.testing.assert_allclose(chain.mean, dense.mean, rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(chain.std, dense.std, rtol=1e-5)
            draws = sol.sample(KEY, num=1000, at=np.concatenate([times, steps]))
            spread = np.std(np.asarray(draws) - np.asarray(sol(np.concatenate([times, steps])).mean), axis=0)
            np.testing.assert_allclose(spread[: times.size], dense.std, rtol=5.5 / np.sqrt(800))
            np.testing.assert_allclose(spread[: times.size], spread[times.size :], rtol=0.1)
        np.testing.assert_allclose(chain.derivative(1).mean, sol(times, derivative=1).mean, rtol=1e-3)


def test_unknowns_are_independent_and_neighbouring_times_are_not():
    sol = mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(2), rtol=1e-3)
    num = 5000
    deviations = np.asarray(sol.sample(jax.random.key(3), num=num) - sol.mean)
    draws = deviations[:, 1:] / np.asarray(sol.std)[1:]
    bound = 5.5 / np.sqrt(num)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(np.mean(draws[:, :, i] * draws[:, :, j], axis=0)).max() < bound
    assert np.abs(np.mean(draws**2, axis=0) - 1).max() < bound * np.sqrt(2)
    neighbours = np.mean(draws[:, 1:, 0] * draws[:, :-1, 0], axis=0)
    assert neighbours.max() > 0.9
    # The model's own correlation: Cov(X_k, X_{k+1}) = G C_{k+1}, from a chain through the same steps.
    chain = mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(2), rtol=1e-3, save=sol.t)
    root, gain = np.asarray(chain.posterior.covariance.root), np.asarray(chain.posterior.links.kernel.gain)
    covariance = np.einsum("kpi,kpj->kij", root, root)
    cross = np.einsum("kij,kjl->kil", gain[1:-1], covariance[2:])[:, 0, 0]
    std = np.sqrt(covariance[:, 0, 0])
    np.testing.assert_allclose(neighbours, cross / (std[1:-1] * std[2:]), atol=bound * np.sqrt(2))
    np.testing.assert_array_equal(sol.sample(jax.random.key(3), num=num) - sol.mean, deviations)


@pytest.mark.thorough
def test_pytrees():
    def f(t, y):
        a, [b, c] = y
        return [-b * a, [jnp.sin(t) - b, 0.1 * c]]

    y0 = [jnp.ones((2, 3)), [jnp.array(0.5), jnp.arange(4.0)]]
    solver = mp.DiagonalEK1(1, diffusion=DYNAMIC_VECTOR)
    sol = mp.solve(f, y0, (0.0, 1.0), solver=solver)
    chain = mp.solve(f, y0, (0.0, 1.0), solver=solver, save=[0.25, 0.5, 1.0])
    dense = sol(chain.t)
    for have in (dense.mean, dense.std, chain.mean, chain.std):
        assert jax.tree.map(jnp.shape, have) == [(3, 2, 3), [(3,), (3, 4)]]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), dense.mean, chain.mean)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), dense.std, chain.std)
    draws = sol.sample(jax.random.key(0), num=2, at=0.3)
    assert jax.tree.map(jnp.shape, draws) == [(2, 2, 3), [(2,), (2, 4)]]
    assert jax.tree.map(jnp.shape, chain.sample(jax.random.key(0)))[0] == (1, 3, 2, 3)
    assert sol(jnp.full((3, 1), 0.4)).mean[0].shape == (3, 1, 2, 3)
