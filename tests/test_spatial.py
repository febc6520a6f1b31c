"""Models of space: Γ̆ against dense matrices, and the filter with Γ̆ against the textbook with Γ̆ ⊗ …"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from scipy.special import gamma, kv

import millipode as mp
from common import CONSTANT, DYNAMIC, DYNAMIC_VECTOR, name
from millipode.pde.bases import Identity
from oracle import ode_filter

pytestmark = pytest.mark.usefixtures("own_std")

RNG = np.random.default_rng(3)
LINE = mp.Grid(7, lengths=2.0, boundary="periodic")
BOX = mp.Grid((4, 3), lengths=(1.0, 2.0), boundary=("neumann", "dirichlet"))


def kernel(r, smoothness):
    """Of distances in units of the length scale."""
    z = np.sqrt(2 * smoothness) * np.where(r == 0, 1.0, r)
    return np.where(
        r == 0, 1.0, 2 ** (1 - smoothness) / gamma(smoothness) * z**smoothness * kv(smoothness, z)
    )


def images(grid, axis, wrapped):
    """All pairs of coordinates along an axis, as the boundary makes them: offsets and signs."""
    x = np.asarray(grid.coordinates[axis]).ravel()
    length, boundary = grid.lengths[axis], grid.boundary[axis]
    if boundary == "periodic":
        return [(x[:, None] - x + m * length, 1.0) for m in range(-wrapped, wrapped + 1)]
    sign = 1.0 if boundary == "neumann" else -1.0
    shifts = [2 * m * length for m in range(-wrapped, wrapped + 1)]
    return [(x[:, None] - x + s, 1.0) for s in shifts] + [(x[:, None] + x + s, sign) for s in shifts]


def matern_matrix(grid, smoothness, lengths, wrapped=12):
    """The kernel with all of its mirror images."""
    total = [(0.0, 1.0)]
    for axis, length in enumerate(lengths):
        pairs = images(grid, axis, wrapped)
        total = [(r + (x / length) ** 2, s * sign) for r, s in total for x, sign in pairs]
    return sum(sign * kernel(np.sqrt(r), smoothness) for r, sign in total)


def laplacian_matrix(grid):
    d = np.prod(grid.shape)
    return np.stack(
        [np.asarray(grid.laplacian(jnp.asarray(e).reshape(grid.shape))).ravel() for e in np.eye(d)]
    )


def operator_matrix(grid, kappa):
    return kappa**2 * np.eye(np.prod(grid.shape)) - laplacian_matrix(grid)


def random_covariance(d):
    root = RNG.normal(size=(d, d))
    return root @ root.T + 0.1 * np.eye(d)


COVARIANCE, VARIANCES = random_covariance(7), RNG.uniform(0.3, 3.0, 7)
PRECISION = sp.csc_matrix(operator_matrix(LINE, 1.2) + np.diag(RNG.uniform(0, 1, 7)))
POINTS = RNG.uniform(size=(7, 2))


def exponential(x, y):
    return jnp.exp(-2 * jnp.sqrt(jnp.sum((x - y) ** 2) + 1e-30))


# Each model, and the matrix that it stands for.
MODELS = {
    "identity": (mp.spatial.Identity((7,)), np.eye(7)),
    "diagonal": (mp.spatial.Diagonal(VARIANCES), np.diag(VARIANCES)),
    "dense": (mp.spatial.Dense(COVARIANCE), COVARIANCE),
    "kernel": (
        mp.spatial.Dense.of_kernel(exponential, POINTS, nugget=0.01),
        np.exp(-2 * np.linalg.norm(POINTS[:, None] - POINTS, axis=-1)) + 0.01 * np.eye(7),
    ),
    "matern": (mp.Matern(LINE, 1.5, 0.5, variance=2.0), 2 * matern_matrix(LINE, 1.5, [0.5])),
    "matern-box": (
        mp.Matern(BOX, smoothness=0.8, length_scale=(0.3, 0.5), nugget=0.02),
        matern_matrix(BOX, 0.8, [0.3, 0.5]) + 0.02 * np.eye(12),
    ),
    "gmrf-1": (mp.GMRF(LINE, kappa=1.5, alpha=1), np.linalg.inv(operator_matrix(LINE, 1.5))),
    "gmrf-2": (
        mp.GMRF(BOX, kappa=3.0, variance=2.0),
        2 * np.linalg.inv(np.linalg.matrix_power(operator_matrix(BOX, 3.0), 2)),
    ),
    "gmrf-3": (
        mp.GMRF(LINE, kappa=2.0, alpha=3),
        np.linalg.inv(np.linalg.matrix_power(operator_matrix(LINE, 2.0), 3)),
    ),
    "gmrf-2.5": (
        mp.GMRF(LINE, kappa=2.0, alpha=2.5),
        (lambda w, v: v @ np.diag(w**-2.5) @ v.T)(*np.linalg.eigh(operator_matrix(LINE, 2.0))),
    ),
    "sparse": (mp.GMRF(PRECISION), np.linalg.inv(PRECISION.toarray())),
}


@pytest.mark.parametrize("which", MODELS)
def test_models_are_their_matrices(which):
    model, matrix = MODELS[which]
    d = matrix.shape[0]
    assert np.prod(model.shape) == d
    scale = np.abs(matrix).max()
    np.testing.assert_allclose(model.to_dense(), matrix, atol=1e-12 * scale)
    root = jax.vmap(model.correlate)(jnp.eye(d).reshape(d, *model.shape)).reshape(d, d)
    np.testing.assert_allclose(root.T @ root, matrix, atol=1e-12 * scale)
    diagonal = np.broadcast_to(model.diagonal(), model.shape).ravel()
    np.testing.assert_allclose(diagonal, np.diag(matrix), rtol=1e-11)
    np.testing.assert_allclose(model.logdet(), np.linalg.slogdet(matrix)[1], rtol=1e-9, atol=1e-9)
    z = RNG.normal(size=d)
    want = z @ np.linalg.solve(matrix, z)
    np.testing.assert_allclose(model.quadratic(jnp.asarray(z).reshape(model.shape)), want, rtol=1e-9)
    draws = np.asarray(jax.vmap(model.sample)(jax.random.split(jax.random.key(0), 4000))).reshape(4000, d)
    error = np.sqrt((np.outer(diagonal, diagonal) + matrix**2) / 4000)
    assert (np.abs(draws.T @ draws / 4000 - matrix) < 5.5 * error).all()


@pytest.mark.parametrize("smoothness", [0.3, 0.5, 1.5, 2.2, 3.5])
@pytest.mark.parametrize("boundary", ["periodic", "neumann", "dirichlet"])
def test_matern_is_the_kernel_with_its_images(smoothness, boundary):
    grid = mp.Grid(12, boundary=boundary)
    for length in (0.02, 0.1, 0.6):
        want = matern_matrix(grid, smoothness, [length], wrapped=60)
        np.testing.assert_allclose(mp.Matern(grid, smoothness, length).to_dense(), want, atol=1e-13)


def test_the_squared_exponential_kernel_is_the_limit():
    grid = mp.Grid(12, boundary="periodic")
    x = np.arange(12) / 12
    want = sum(np.exp(-0.5 * ((x[:, None] - x + m) / 0.1) ** 2) for m in range(-3, 4))
    np.testing.assert_allclose(mp.Matern(grid, float("inf"), 0.1).to_dense(), want, atol=1e-14)
    np.testing.assert_allclose(mp.Matern(grid, 1e4, 0.1).to_dense(), want, atol=1e-3)


@pytest.mark.parametrize("boundary", ["neumann", "dirichlet"])
def test_a_few_lengths_from_walls_they_do_not_matter(boundary):
    """Between points in the middle, Γ̆ is the kernel itself; near the walls it is what is documented."""
    grid = mp.Grid((40, 30), lengths=(4.0, 3.0), boundary=boundary)
    model = mp.Matern(grid, 1.5, 0.1)
    row = np.asarray(model.correlate(_transposed_root(model, (20, 15))))
    x, y = (np.asarray(c) for c in grid.coordinates)
    distance = np.hypot(x - x[20, 15], y - y[20, 15])
    np.testing.assert_allclose(row, kernel(distance / 0.1, 1.5), atol=1e-9)
    variance = np.asarray(model.diagonal())
    np.testing.assert_allclose(variance[10:-10, 10:-10], 1, rtol=1e-6)
    mirrored = float(kernel(np.array(1.0), 1.5))  # half a cell from the wall, one length from the image
    np.testing.assert_allclose(
        variance[0, 15], 1 + (mirrored if boundary == "neumann" else -mirrored), rtol=1e-6
    )


def _transposed_root(model, at):
    """Lᵀ e, so that L times it is a row of Γ̆."""
    _, transpose = jax.vjp(model.correlate, jnp.zeros(model.shape))
    return transpose(jnp.zeros(model.shape).at[at].set(1.0))[0].reshape(model.shape)


def test_samples_have_the_spectrum_of_the_model():
    grid = mp.Grid((32, 32), boundary=("periodic", "neumann"))
    for model in (mp.Matern(grid, 2.5, 0.2), mp.GMRF(grid, kappa=8.0)):
        draws = jax.vmap(model.sample)(jax.random.split(jax.random.key(1), 500))
        power = jnp.mean(jax.vmap(grid.basis.to_modes)(draws) ** 2, axis=0) * model.precision
        assert float(jnp.abs(power - 1).max()) < 5.5 * np.sqrt(2 / 500)


def test_a_random_field_on_a_fine_grid_is_nearly_a_matern_process():
    """ν = α − D/2 and ℓ = √(2ν)/κ, up to the factor that γ calibrates."""
    grid = mp.Grid(400, lengths=10.0, boundary="periodic")
    field, matern = mp.GMRF(grid, kappa=4.0, alpha=2), mp.Matern(grid, 1.5, np.sqrt(3) / 4)
    have, want = (np.asarray(m.to_dense()) for m in (field, matern))
    np.testing.assert_allclose(have / have[0, 0], want, atol=2e-3)


@pytest.mark.thorough
def test_large_sparse_fields_are_estimated():
    """More points than variances are computed for one by one; on a grid, where they are known."""
    grid = mp.Grid((66, 64), lengths=(66.0, 64.0), boundary="periodic")
    n, m = grid.shape
    ring = [
        sp.diags_array([np.ones(k - 1), [1.0], [1.0], np.ones(k - 1)], offsets=[1, k - 1, 1 - k, -1])
        for k in (n, m)
    ]
    laplacian = (
        sp.kron(ring[0], sp.eye_array(m)) + sp.kron(sp.eye_array(n), ring[1]) - 4 * sp.eye_array(n * m)
    )
    exact = mp.GMRF(grid, kappa=0.7, alpha=1)
    for options in ({}, dict(method="matrix-free", iterations=40)):
        field = mp.GMRF(0.49 * sp.eye_array(n * m) - laplacian, probes=64, **options)
        assert np.std(field.diagonal() / exact.diagonal()) < np.sqrt(2 / 64)
        np.testing.assert_allclose(jnp.mean(field.diagonal()), exact.diagonal(), rtol=0.01)
        np.testing.assert_allclose(field.logdet(), exact.logdet(), rtol=0.01 if options else 1e-9)
        z = jax.random.normal(jax.random.key(0), grid.shape)
        np.testing.assert_allclose(field.quadratic(z.ravel()), exact.quadratic(z), rtol=1e-10)
        draw = field.sample(jax.random.key(2))
        np.testing.assert_allclose(field.quadratic(draw) / (n * m), 1, atol=5.5 * np.sqrt(2 / (n * m)))


A, B = (jnp.asarray(RNG.normal(size=(12, 12)) / 4) for _ in range(2))


def f(t, y):
    """With a full Jacobian, for any number of unknowns up to twelve."""
    flat = y.ravel()
    d = flat.size
    return (A[:d, :d] @ flat + jnp.sin(B[:d, :d] @ flat + t) * flat).reshape(y.shape)


def y_of(d):
    return jnp.linspace(-1.0, 1.0, d)


def check_filter(sol, want, gammas):
    """Means, all covariances of y, diffusion and evidence."""
    d = want.std.shape[1]
    times = len(sol.t)
    np.testing.assert_allclose(np.reshape(sol.mean, (times, d)), want.mean[:, 0], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(np.reshape(sol.std, (times, d)), want.std, rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(gammas, want.diffusion[:, 0], rtol=1e-8)
    np.testing.assert_allclose(sol.log_evidence, want.log_evidence, rtol=1e-8)


@pytest.mark.parametrize("diffusion", [DYNAMIC, CONSTANT], ids=name)
@pytest.mark.parametrize(
    "which", ["diagonal", "kernel", "matern", "matern-box", "gmrf-2", "gmrf-3", "sparse"]
)
@pytest.mark.wide(quick=4)
def test_the_filter_is_the_textbook_with_a_left_factor(which, diffusion):
    model, matrix = MODELS[which]
    d = matrix.shape[0]
    y0 = y_of(d).reshape(model.shape)
    solver = mp.EK0(2, spatial=model, diffusion=diffusion, initialise="taylor")
    sol = mp.solve(f, y0, (0.0, 1.0), solver=solver, rtol=1e-2, atol=1e-3, smooth=False)
    assert 8 < len(sol.t) < 200
    start = np.stack([np.ravel(x[0]) for x in sol.posterior.mean])
    flat = lambda t, y: f(t, jnp.asarray(y))
    want = ode_filter(
        flat,
        lambda t, y: np.zeros((d, d)),
        start,
        np.asarray(sol.t),
        nu=2,
        linearisation="ek0",
        dynamic=diffusion is DYNAMIC,
        vector=False,
        space=matrix,
        corrections=2,
    )
    gammas = sol.diffusion[1:] if diffusion is DYNAMIC else jnp.broadcast_to(sol.diffusion, len(sol.t) - 1)
    check_filter(sol, want, gammas)
    # Between points: C = Γ̆ ⊗ C̆.
    last = jax.tree.map(lambda x: x[-1], sol.posterior.covariance).root
    small = np.asarray(last.T @ last) * (1.0 if diffusion is DYNAMIC else float(sol.diffusion))
    size = np.sqrt(np.diag(want.covariance[-1]))
    assert (np.abs(np.kron(matrix, small) - want.covariance[-1]) <= 1e-8 * np.outer(size, size) + 1e-24).all()


@pytest.mark.parametrize("model", [mp.Matern(BOX, 1.5, 0.4), mp.GMRF(BOX, kappa=2.0)], ids=["matern", "gmrf"])
def test_the_spectral_filter_is_the_textbook_too(model):
    """In space: the dense EK1 with the Jacobian of the linear part, and Γ̆ as the left factor."""
    linear = BOX.diffusion(0.05, shift=-0.5)
    matrix = 0.05 * laplacian_matrix(BOX) - 0.5 * np.eye(12)
    y0 = y_of(12).reshape(BOX.shape)

    def g(t, y):
        return 0.05 * BOX.laplacian(y) - 0.5 * y + jnp.sin(y + t)

    solver = mp.SpectralEK1(2, linear=linear, spatial=model, initialise="taylor")
    sol = mp.solve(g, y0, (0.0, 1.0), solver=solver, rtol=1e-2, atol=1e-3, smooth=False)
    start = np.stack([np.ravel(sol(0.0, derivative=q).mean) for q in range(3)])
    want = ode_filter(
        lambda t, y: np.ravel(g(t, jnp.asarray(y).reshape(BOX.shape))),
        lambda t, y: matrix,
        start,
        np.asarray(sol.t),
        nu=2,
        linearisation=matrix,
        dynamic=True,
        vector=False,
        space=np.asarray(model.to_dense()),
        corrections=2,
    )
    check_filter(sol, want, sol.diffusion[1:])


@pytest.mark.thorough
def test_smoothing_and_samples_carry_the_model():
    """At given times and at every step: standard deviations and correlations between points are Γ̆'s."""
    grid = mp.Grid((3, 2))
    model = [mp.Matern(grid, 1.5, 0.8), mp.GMRF(grid, kappa=2.0)]
    matrices = [np.asarray(m.to_dense()) for m in model]
    y0 = y_of(12).reshape(2, 3, 2)
    linear = grid.diffusion([0.1, 0.2])
    for solver in (mp.EK0(1, spatial=model), mp.SpectralEK1(1, linear=linear, spatial=model)):
        options = dict(solver=solver, controller=mp.FixedStep(0.25))
        steps = mp.solve(f, y0, (0.0, 1.0), **options)
        sols = [(steps, 3)]
        if isinstance(solver, mp.EK0):
            sols += [(mp.solve(f, y0, (0.0, 1.0), save=[0.3, 0.75, 1.0], **options), 1)]
            np.testing.assert_allclose(sols[1][0].std, steps(sols[1][0].t).std, rtol=1e-8)
        num = 3000
        for sol, index in sols:
            draws = np.asarray(sol.sample(jax.random.key(5), num=num) - sol.mean)[:, index].reshape(num, 2, 6)
            std = np.asarray(sol.std)[index].reshape(2, 6)
            for component in range(2):
                have = np.cov(draws[:, component].T, bias=True) / np.outer(std[component], std[component])
                scale = np.sqrt(np.diag(matrices[component]))
                want = matrices[component] / np.outer(scale, scale)
                if isinstance(solver, mp.EK0):
                    assert (np.abs(have - want) < 5.5 * np.sqrt((1 + want**2) / num)).all()
                np.testing.assert_allclose(np.diag(have), 1, atol=5.5 * np.sqrt(2 / num))
            across = np.mean(draws[:, 0, :, None] * draws[:, 1, None, :], axis=0) / np.outer(*std)
            assert np.abs(across).max() < 5.5 / np.sqrt(num)


def test_smoothed_marginals_are_those_of_one_joint_gaussian():
    """Of a linear ODE with F_y = 0, where EK0 is exact: y' = g(t), observed at every step."""
    matrix = MODELS["matern"][1]
    solver = mp.EK0(2, spatial=MODELS["matern"][0], diffusion=CONSTANT, initialise="taylor")
    slope = lambda t, y: jnp.cos(3 * t + jnp.arange(7.0))
    options = dict(solver=solver, controller=mp.FixedStep(0.25))
    sol = mp.solve(slope, y_of(7), (0.0, 1.0), **options)
    alone = mp.solve(slope, y_of(7), (0.0, 1.0), **options | {"solver": mp.EK0(2, diffusion=CONSTANT)})
    # One unknown's posterior for γ = 1 is that without a model; Γ̆ is the left factor of all of it.
    small = alone.std / jnp.sqrt(alone.diffusion)
    want = jnp.sqrt(sol.diffusion * np.diag(matrix)) * small
    np.testing.assert_allclose(sol.std, want, rtol=1e-9, atol=1e-15)
    at = jnp.array([0.1, 0.6])
    between = alone(at).std / jnp.sqrt(alone.diffusion)
    np.testing.assert_allclose(sol(at).std, jnp.sqrt(sol.diffusion * np.diag(matrix)) * between, rtol=1e-9)


@pytest.mark.parametrize("spectral", [False, True])
def test_one_model_for_all_components_is_one_for_each(spectral):
    """Evidence, deviations and steps: as one dense matrix for all of y, too, where that is possible."""
    model = mp.Matern(LINE, 1.5, 0.5)
    y0 = y_of(12)[:4].reshape(4, 1) * jnp.linspace(0.5, 1.0, 7)

    def rhs(t, y):
        return 0.05 * LINE.laplacian(y) - y**3 + jnp.sin(t)

    def solve(spatial):
        kind = partial(mp.SpectralEK1, linear=LINE.diffusion(0.05)) if spectral else mp.EK0
        solver = kind(2, spatial=spatial, initialise="runge-kutta")
        return mp.solve(rhs, y0, (0.0, 1.0), solver=solver, rtol=1e-2, atol=1e-3, save="end")

    sols = [solve(model), solve([model] * 4)]
    if not spectral:
        sols.append(solve(mp.spatial.Dense(np.kron(np.eye(4), np.asarray(model.to_dense())))))
    for other in sols[1:]:
        assert int(other.stats.steps) == int(sols[0].stats.steps)
        np.testing.assert_allclose(other.log_evidence, sols[0].log_evidence, rtol=1e-9)
        np.testing.assert_allclose(other.std, sols[0].std, rtol=1e-8)


def test_steps_see_the_variances_of_points():
    """The paper's estimate has Γ̆'s diagonal: where tolerances are tight, variances shorten the steps.

    An unknown at rest has no say in γ, so that its own variance counts in the estimate alone.
    """
    tight = jnp.ones(7).at[0].set(1e-4)
    at_rest = lambda t, y: f(t, y).at[0].set(0.0)

    def steps(first):
        model = mp.spatial.Diagonal(np.array([first, 1, 1, 1, 1, 1, 1]))
        options = dict(rtol=0.0, atol=1e-3 * tight, save="end")
        solver = mp.EK0(2, spatial=model, corrections=1)
        sol = mp.solve(at_rest, y_of(7), (0.0, 1.0), solver=solver, **options)
        return int(sol.stats.steps)

    assert steps(1.0) > 2 * steps(1e-8)


def test_without_diffusion_modes_are_as_good_as_points():
    """SpectralEK1 with next to no linear part is EK0, from a Runge–Kutta start with its own γ on.

    With one correction: a second one is linearised where an own or where a steady gain leads to.
    """
    grid = mp.Grid(7)
    model = mp.Matern(grid, 1.5, 0.5)
    solvers = (
        mp.EK0(3, spatial=model, initialise="runge-kutta", corrections=1),
        mp.SpectralEK1(
            3, linear=grid.diffusion(1e-12), spatial=model, initialise="runge-kutta", corrections=1
        ),
    )
    options = dict(controller=mp.FixedStep(0.01), smooth=False)
    points, modes = (
        mp.solve(lambda t, y: jnp.sin(5 * y) - y**3, y_of(7) ** 3, (0.0, 0.02), solver=s, **options)
        for s in solvers
    )
    np.testing.assert_allclose(modes.mean, points.mean, rtol=1e-8, atol=1e-12)
    for q in (0, 3):
        np.testing.assert_allclose(modes.derivative(q).std, points.derivative(q).std, rtol=1e-6, atol=1e-12)
    assert (points.derivative(3).std[0] > 0).all()
    np.testing.assert_allclose(modes.log_evidence, points.log_evidence, rtol=1e-6)


def test_the_mean_depends_on_the_model_by_way_of_the_steps_only():
    model, _ = MODELS["matern"]
    options = dict(controller=mp.FixedStep(0.05), save="end")
    # Two programs round differently; a dynamic γ weighs steps against each other, and Γ̆ has a say in that.
    for diffusion, allowed in ((CONSTANT, 1e-13), (DYNAMIC, 1e-5)):
        solvers = [mp.EK0(2, spatial=m, diffusion=diffusion) for m in (None, model)]
        without, there = (mp.solve(f, y_of(7), (0.0, 1.0), solver=s, **options) for s in solvers)
        np.testing.assert_allclose(without.mean, there.mean, rtol=allowed)
        assert not np.allclose(without.std, there.std, rtol=0.01, atol=0)


def test_initial_uncertainty_has_the_model_s_shape():
    """Runge–Kutta inference calibrates its γ by Γ̆, too: with Γ̆ scaled by 4, γ² is a quarter."""
    solver = lambda m: mp.EK0(3, spatial=m, initialise="runge-kutta")
    models = mp.spatial.Dense(COVARIANCE), mp.spatial.Dense(4 * COVARIANCE), mp.spatial.Diagonal(VARIANCES)
    options = dict(controller=mp.FixedStep(0.01), save="end")
    one, four, other = (mp.solve(f, y_of(7), (0.0, 0.02), solver=solver(m), **options) for m in models)
    np.testing.assert_allclose(one.std, four.std, rtol=1e-9)
    np.testing.assert_allclose(one.diffusion, 4 * four.diffusion, rtol=1e-9)
    np.testing.assert_allclose(one.log_evidence, four.log_evidence, rtol=1e-9)
    assert not np.allclose(one.std, other.std, rtol=1e-3, atol=0)


@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.wide(quick=1)
def test_the_evidence_can_be_differentiated_by_the_model(spectral):
    grid = mp.Grid((6, 5))
    y0 = jnp.sin(3 * grid.coordinates[0]) * grid.coordinates[1]

    def evidence(parameters):
        length, nugget = parameters
        model = mp.Matern(grid, 1.5, length, nugget=nugget)
        solver = (
            mp.SpectralEK1(2, linear=grid.diffusion(0.1), spatial=model)
            if spectral
            else mp.EK0(2, spatial=model)
        )
        sol = mp.solve(
            lambda t, y: 0.1 * grid.laplacian(y) - y**3,
            y0,
            (0.0, 0.1),
            solver=solver,
            controller=mp.FixedStep(0.02),
            save="end",
        )
        return sol.log_evidence

    at = jnp.array([0.3, 0.05])
    value, gradient = jax.jit(jax.value_and_grad(evidence))(at)
    step = 1e-5
    evidence = jax.jit(evidence)
    want = [(evidence(at + step * e) - evidence(at - step * e)) / (2 * step) for e in jnp.eye(2)]
    np.testing.assert_allclose(gradient, want, rtol=1e-5)
    assert jnp.isfinite(value)


def test_pytrees_lists_batches_and_single_precision():
    grid = mp.Grid(6)
    matern, field = mp.Matern(grid, 1.5, 0.3), mp.GMRF(grid, kappa=3.0)
    y0 = {"u": jnp.ones((2, 6), jnp.float32), "v": jnp.linspace(0, 1, 6, dtype=jnp.float32)}
    rhs = lambda t, y: {"u": -y["u"] * y["v"], "v": grid.laplacian(y["v"]) * 0.01}
    options = dict(controller=mp.FixedStep(0.05), save="end")

    def solve(y0, spatial):
        return mp.solve(rhs, y0, (0.0, 0.1), solver=mp.EK0(1, spatial=spatial), **options)

    each = solve(y0, {"u": [matern, field], "v": field})
    np.testing.assert_allclose(each.std["u"][0, 1], each.std["v"][0], rtol=1e-6)
    assert not np.allclose(each.std["u"][0, 0], each.std["u"][0, 1], rtol=1e-2)
    sol = solve(y0, {"u": matern, "v": field})
    assert sol.std["u"].shape == (1, 2, 6) and sol.std["u"].dtype == jnp.float32
    ratio = sol.std["u"][0, 0] / sol.std["v"][0]
    np.testing.assert_allclose(ratio**2, matern.diagonal() / field.diagonal(), rtol=1e-4)
    np.testing.assert_array_equal(sol.std["u"][0, 0], sol.std["u"][0, 1])

    batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), y0)
    sols = jax.vmap(lambda y: solve(y, matern))(batch)
    assert sols.std["v"].shape == (3, 1, 6)
    for i in range(3):
        alone = solve(jax.tree.map(lambda x, i=i: x[i], batch), matern)
        np.testing.assert_allclose(sols.std["v"][i], alone.std["v"], rtol=1e-4)


def test_your_own_model():
    class Constant(mp.spatial.Spatial):
        """All points share most of what they do: Γ̆ = I + 11ᵀ."""

        shape: tuple[int, ...] = (7,)

        def quadratic(self, z):
            return jnp.sum(z**2) - jnp.sum(z) ** 2 / 8

        def correlate(self, white):
            return white + jnp.sum(white) * (jnp.sqrt(8.0) - 1) / 7

        def diagonal(self):
            return jnp.full(7, 2.0)

        def logdet(self):
            return jnp.log(8.0)

    options = dict(rtol=1e-2, save=[0.5, 1.0])
    own, dense = (
        mp.solve(f, y_of(7), (0.0, 1.0), solver=mp.EK0(2, spatial=m), **options)
        for m in (Constant(), mp.spatial.Dense(np.eye(7) + 1))
    )
    np.testing.assert_allclose(Constant().to_dense(), np.eye(7) + 1, atol=1e-12)
    np.testing.assert_allclose(own.std, dense.std, rtol=1e-9)
    np.testing.assert_allclose(own.log_evidence, dense.log_evidence, rtol=1e-9)
    assert own.sample(jax.random.key(0), num=2).shape == (2, 2, 7)


def solve_with(spatial, y0=None, **options):
    y0 = y_of(7) if y0 is None else y0
    return mp.solve(f, y0, (0.0, 0.1), solver=mp.EK0(1, spatial=spatial, **options), save="end")


BAD = {
    "not symmetric": (lambda: mp.spatial.Dense([[1.0, 0.5], [0.1, 1.0]]), "not symmetric.*A.T"),
    "indefinite": (lambda: mp.spatial.Dense([[1.0, 2.0], [2.0, 1.0]]), "not positive definite.*nugget"),
    "not square": (lambda: mp.spatial.Dense(np.ones((2, 3))), "square"),
    "NaN": (lambda: mp.spatial.Dense([[np.nan, 0.0], [0.0, 1.0]]), "NaN"),
    "a kernel of vectors": (lambda: mp.spatial.Dense.of_kernel(lambda x, y: x - y, POINTS), "number"),
    "zero variance": (lambda: mp.spatial.Diagonal([1.0, 0.0]), "variances must be positive"),
    "negative length": (lambda: mp.Matern(LINE, 1.5, -0.1), "length_scale must be positive"),
    "infinite length": (lambda: mp.Matern(LINE, 1.5, np.inf), "length_scale must be positive"),
    "too many lengths": (lambda: mp.Matern(LINE, 1.5, (0.1, 0.2)), "one per axis"),
    "no smoothness": (lambda: mp.Matern(LINE, 0.0), "smoothness must be"),
    "negative variance": (lambda: mp.Matern(LINE, variance=-1.0), "variance must be positive"),
    "negative nugget": (lambda: mp.Matern(LINE, nugget=-1.0), "nugget"),
    "several variances": (lambda: mp.Matern(LINE, variance=np.ones(7)), "single number"),
    "several lengths": (lambda: mp.Matern(BOX, length_scale=np.ones((2, 2))), "single number"),
    "too smooth": (lambda: mp.Matern(mp.Grid(256), float("inf"), 0.3), "nugget=1e-8"),
    "several kappas": (lambda: mp.GMRF(LINE, kappa=np.ones(7)), "single number"),
    "Dense, negative nugget": (lambda: mp.spatial.Dense(np.eye(3), nugget=-0.5), "at least 0"),
    "complex": (lambda: mp.spatial.Dense(1j * np.eye(3)), "real"),
    "no kappa": (lambda: mp.GMRF(LINE, kappa=0.0), "kappa must be positive"),
    "no alpha": (lambda: mp.GMRF(LINE, kappa=1.0, alpha=0), "alpha"),
    "precision not symmetric": (lambda: mp.GMRF(sp.csc_matrix([[1.0, 0.5], [0.0, 1.0]])), "not symmetric"),
    "precision indefinite": (lambda: mp.GMRF(np.array([[1.0, 2.0], [2.0, 1.0]])), "not positive definite"),
    "precision singular": (lambda: mp.GMRF(np.array([[1.0, -1.0], [-1.0, 1.0]])), "not positive definite"),
    "precision not square": (lambda: mp.GMRF(np.ones((2, 3))), "square"),
    "unknown method": (lambda: mp.GMRF(PRECISION, method="magic"), "method"),
    "too few iterations": (
        lambda: mp.GMRF(sp.diags_array(np.logspace(0, 8, 200)), method="matrix-free", iterations=3),
        "iterations",
    ),
    "wrong size": (lambda: solve_with(mp.spatial.Dense(np.eye(3))), "does not end with these axes"),
    "another grid": (lambda: solve_with(mp.Matern(BOX)), "does not end with these axes"),
    "as many cells": (
        lambda: solve_with(mp.Matern(mp.Grid(12)), y_of(12).reshape(3, 4)),
        "does not end with these axes",
    ),
    "one too many": (
        lambda: solve_with([mp.Matern(LINE)] * 3, jnp.ones((2, 7))),
        "3 covariances for 2 components",
    ),
    "another tree": (lambda: solve_with({"u": mp.Matern(LINE)}), "structure"),
    "vector diffusion": (lambda: solve_with(mp.Matern(LINE), diffusion=DYNAMIC_VECTOR), "scalar diffusion"),
    "one rate each": (
        lambda: solve_with(mp.Matern(LINE), prior=mp.IOUP(rate=-jnp.ones(7))),
        "same prior in time",
    ),
    "DiagonalEK1": (lambda: mp.DiagonalEK1(spatial=mp.Matern(LINE)), "DiagonalEK1.*mp.EK0"),
    "EK1": (lambda: mp.EK1(spatial=mp.Matern(LINE)), "EK1.*mp.SpectralEK1"),
    "spectral, another grid": (
        lambda: mp.solve(
            f,
            y_of(7),
            (0.0, 0.1),
            solver=mp.SpectralEK1(1, linear=mp.Grid(7).diffusion(0.1), spatial=mp.Matern(LINE)),
        ),
        "same mp.Grid",
    ),
    "spectral, another length": (
        lambda: mp.solve(
            f,
            y_of(7),
            (0.0, 0.1),
            solver=mp.SpectralEK1(
                1, linear=LINE.diffusion(0.1), spatial=mp.Matern(mp.Grid(7, 50.0, "periodic"), 1.5, 5.0)
            ),
        ),
        "same mp.Grid",
    ),
    "spectral, no waves": (
        lambda: mp.solve(
            f,
            y_of(7),
            (0.0, 0.1),
            solver=mp.SpectralEK1(linear=(Identity(), -np.ones(7)), spatial=mp.Matern(LINE)),
        ),
        "same mp.Grid",
    ),
    "spectral, dense": (
        lambda: mp.solve(
            f,
            y_of(7),
            (0.0, 0.1),
            solver=mp.SpectralEK1(1, linear=LINE.diffusion(0.1), spatial=mp.spatial.Dense(COVARIANCE)),
        ),
        "stationary covariance",
    ),
    "spectral, a reaction": (
        lambda: mp.solve(
            f,
            jnp.ones((2, 4)),
            (0.0, 0.1),
            solver=mp.SpectralEK1(
                1,
                linear=mp.Grid(4).diffusion([0.1, 0.1], reaction=np.eye(2)),
                spatial=[mp.Matern(mp.Grid(4)), mp.Matern(mp.Grid(4), 2.5)],
            ),
        ),
        "share one spatial covariance",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_remedy(case):
    make, match = BAD[case]
    with pytest.raises(ValueError, match=match):
        make()


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="mp.spatial.Spatial"):
        solve_with(np.eye(7))
    with pytest.raises(TypeError, match="mp.Grid"):
        mp.Matern((7,))


def test_a_reaction_between_components_shares_one_model():
    grid = mp.Grid(4)
    y0 = jnp.linspace(0.0, 1.0, 8).reshape(2, 4)
    linear = grid.diffusion([0.1, 0.3], reaction=np.array([[-1.0, 0.5], [0.2, -2.0]]))
    model = mp.Matern(grid, 1.5, 0.4)
    options = dict(controller=mp.FixedStep(0.05), save="end")
    sols = [
        mp.solve(
            f,
            y0,
            (0.0, 0.2),
            solver=mp.SpectralEK1(1, linear=linear, spatial=m, diffusion=CONSTANT),
            **options,
        )
        for m in (None, model)
    ]
    np.testing.assert_allclose(sols[0].mean, sols[1].mean, rtol=1e-12)
    assert sols[1].std.shape == (1, 2, 4) and bool((sols[1].std > 0).all())
    assert float(sols[1].log_evidence) != float(sols[0].log_evidence)
