"""The problems are those of the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp


def test_lorenz96_componentwise(rng):
    problem = mp.problems.lorenz96(6)
    y = rng.normal(size=6)
    want = [(y[(i + 1) % 6] - y[i - 2]) * y[i - 1] - y[i] + 8 for i in range(6)]
    np.testing.assert_allclose(problem.f(0.0, jnp.asarray(y)), want, rtol=1e-13)
    assert problem.y0.tolist() == [8.01] + [8.0] * 5 and problem.t_span == (0.0, 30.0)


def test_pleiades_pairwise(rng):
    problem = mp.problems.pleiades()
    state = np.asarray(problem.y0) + 0.1 * rng.normal(size=28)
    x, y, v, w = state.reshape(4, 7)
    ax, ay = np.zeros(7), np.zeros(7)
    for i in range(7):
        for j in set(range(7)) - {i}:
            r = ((x[i] - x[j]) ** 2 + (y[i] - y[j]) ** 2) ** 1.5
            ax[i] += (j + 1) * (x[j] - x[i]) / r
            ay[i] += (j + 1) * (y[j] - y[i]) / r
    want = np.concatenate([v, w, ax, ay])
    np.testing.assert_allclose(problem.f(0.0, jnp.asarray(state)), want, rtol=1e-12)
    assert np.isfinite(jax.jacfwd(problem.f, 1)(0.0, problem.y0)).all()
    assert problem.t_span == (0.0, 3.0)


def test_fitzhugh_nagumo_cell_by_cell(rng):
    n, a, b, k, tau = 4, 2.8e-4, 5e-3, -5e-3, 0.1
    problem = mp.problems.fitzhugh_nagumo(n)
    u, v = y = rng.normal(size=(2, n, n))

    def laplacian(w):
        padded = np.pad(w, 1, mode="edge")  # no flux: the cell beyond the edge has the same value
        middle = padded[1:-1, 1:-1]
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return (around - 4 * middle) * n**2

    want = [a * laplacian(u) + u - u**3 - v + k, (b * laplacian(v) + u - v) / tau]
    np.testing.assert_allclose(problem.f(0.0, jnp.asarray(y)), want, rtol=1e-11)
    assert problem.y0.shape == (2, n, n) and problem.t_span == (0.0, 20.0)
    assert (problem.y0 > 0).all() and (problem.y0 < 1).all()
    other = mp.problems.fitzhugh_nagumo(n, seed=1).y0
    assert not np.array_equal(problem.y0, other)
    np.testing.assert_array_equal(problem.y0, mp.problems.fitzhugh_nagumo(n).y0)


def test_laplacian_is_second_order_and_conserves_mass():
    for boundary, wave in (("neumann", 1), ("periodic", 2)):
        errors = []
        for n in (16, 32):
            grid = mp.grids.Grid((n, 2 * n), (1.0, 2.0), boundary)
            x, y = np.meshgrid((np.arange(n) + 0.5) / n, (np.arange(2 * n) + 0.5) / n, indexing="ij")
            u = np.cos(wave * np.pi * x) * np.cos(wave * np.pi * y)
            have = grid.laplacian(jnp.asarray(u))
            errors.append(np.abs(have + 2 * (wave * np.pi) ** 2 * u).max())
            assert abs(float(jnp.sum(have))) < 1e-9
        assert 3.8 < errors[0] / errors[1] < 4.2


def test_laplacian_diagonal_in_every_shape():
    for boundary in ("neumann", "periodic"):
        for shape in ((5,), (1, 4), (2, 3), (3, 3, 2)):
            grid = mp.grids.Grid(shape, tuple(1.0 + i for i in range(len(shape))), boundary)
            u = jnp.zeros(shape)
            matrix = jax.jacfwd(lambda w: grid.laplacian(w.reshape(shape)).ravel())(u.ravel())  # noqa: B023
            want = jnp.diagonal(matrix).reshape(shape)
            np.testing.assert_allclose(grid.laplacian_diagonal(u), want, atol=1e-9)


def test_van_der_pol():
    problem = mp.problems.van_der_pol(5.0)
    np.testing.assert_allclose(problem.f(0.0, jnp.array([2.0, 3.0])), [3.0, 5 * ((1 - 4.0) * 3.0 - 2.0)])
    assert problem.y0.tolist() == [2.0, 0.0] and problem.t_span == (0.0, 6.3)


def periodic_laplacian(u, dx):
    return sum(np.roll(u, s, a) for s in (1, -1) for a in (-2, -1)) / dx**2 - 4 * u / dx**2


def neumann_laplacian(u, dx):
    padded = np.pad(u, 1, mode="edge")
    return (padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2] - 4 * u) / dx**2


def reaction_diffusion_by_hand(name, y):
    u, v = y if np.ndim(y) == 3 else (y, None)
    if name == "gray_scott":
        lap = [periodic_laplacian(w, 2.5 / 6) for w in y]
        return [
            2e-5 * lap[0] - u * v**2 + 0.04 * (1 - u),
            1e-5 * lap[1] + u * v**2 - 0.1 * v,
        ]
    if name == "brusselator":
        lap = [periodic_laplacian(w, 1 / 6) for w in y]
        return [0.1 * lap[0] + 1 + u**2 * v - 4.4 * u, 0.1 * lap[1] + 3.4 * u - u**2 * v]
    if name == "allen_cahn":
        return 4e-4 * neumann_laplacian(u, 1 / 6) + u - u**3
    if name == "swift_hohenberg":
        inner = u + periodic_laplacian(u, 20 * np.pi / 6)
        return 0.2 * u - inner - periodic_laplacian(inner, 20 * np.pi / 6) - u**3
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["gray_scott", "brusselator", "allen_cahn", "swift_hohenberg"])
def test_pdes_cell_by_cell(name, rng):
    problem = getattr(mp.problems, name)(6)
    y = rng.normal(size=problem.y0.shape)
    want = np.asarray(reaction_diffusion_by_hand(name, y))
    np.testing.assert_allclose(problem.f(0.0, jnp.asarray(y)), want, rtol=1e-10, atol=1e-10)


def test_fisher_and_burgers_in_one_dimension(rng):
    u = rng.normal(size=8)
    padded = np.pad(u, 1, mode="edge")
    want = (padded[2:] + padded[:-2] - 2 * u) / 12.5**2 + u * (1 - u)
    np.testing.assert_allclose(mp.problems.fisher_kpp(8).f(0.0, jnp.asarray(u)), want, rtol=1e-12)
    left, right = np.roll(u, 1), np.roll(u, -1)
    want = 0.01 * (left + right - 2 * u) * 64 - u * (right - left) * 4
    np.testing.assert_allclose(mp.problems.burgers(8).f(0.0, jnp.asarray(u)), want, rtol=1e-11)


@pytest.mark.parametrize(
    "problem",
    [
        mp.problems.gray_scott(4),
        mp.problems.brusselator(4),
        mp.problems.allen_cahn(4),
        mp.problems.fisher_kpp(5),
        mp.problems.fitzhugh_nagumo(4),
        mp.problems.burgers(5),
        mp.problems.burgers(4, dimensions=2),
        mp.problems.swift_hohenberg(4),
        mp.problems.kuramoto_sivashinsky(9, length=6.0),
        mp.problems.heat((3, 4)),
    ],
    ids=lambda problem: type(problem.f).__name__,
)
@pytest.mark.wide(quick=4)
def test_what_a_pde_declares_of_its_jacobian_is_true(problem, rng):
    """The diagonal at any state; the linear part at rest, where what it leaves out stays within a cell."""
    y = jnp.asarray(rng.normal(size=problem.y0.shape))
    jacobian = jax.jacfwd(lambda x: problem.f(0.0, x.reshape(y.shape)).ravel())
    fitted = problem.linear.fitted(y)
    modes = jax.vmap(fitted.basis.to_modes)(jnp.eye(y.size).reshape(y.size, *y.shape)).reshape(y.size, -1)
    eigenvalues = fitted.eigenvalues.ravel()
    if type(problem.f).__name__ in ("KuramotoSivashinsky", "SwiftHohenberg"):  # declare decay, not growth
        eigenvalues += jnp.maximum(jnp.diagonal(modes.T @ jacobian(jnp.zeros(y.size)) @ modes), 0)
    linear = modes @ jnp.diag(eigenvalues) @ modes.T
    if problem.jacobian_diagonal is not None:
        diagonal = jnp.diagonal(jacobian(y.ravel()))
        np.testing.assert_allclose(problem.jacobian_diagonal(0.0, y).ravel(), diagonal, rtol=1e-9, atol=1e-9)
    rest = np.array(jacobian(jnp.zeros(y.size)) - linear)
    cells = np.arange(y.size) % int(np.prod(problem.grid.shape))
    rest[cells[:, None] == cells] = 0
    np.testing.assert_allclose(rest, 0, atol=1e-10 * max(1, float(jnp.abs(linear).max())))


def laplacian_around(w):
    n = w.shape[-1]
    around = sum(np.roll(w, shift, axis) for shift in (1, -1) for axis in (-2, -1))
    return (around - 4 * w) * n**2


def test_schnakenberg_cell_by_cell(rng):
    problem = mp.problems.schnakenberg(4, a=0.1, b=0.3, rate=7.0)
    u, v = y = rng.normal(size=(2, 4, 4))
    want = [
        0.1 * laplacian_around(u) + 7 * (0.1 - u + u**2 * v),
        0.3 * laplacian_around(v) + 7 * (0.9 - u**2 * v),
    ]
    np.testing.assert_allclose(problem.f(0.0, jnp.asarray(y)), want, rtol=1e-11, atol=1e-11)
    # The same waves on every grid, about a steady state of the reaction.
    fine = mp.problems.schnakenberg(64)
    assert (
        fine.y0.shape == (2, 64, 64) and abs(fine.y0 / jnp.array([1.0, 0.9])[:, None, None] - 1).max() < 0.11
    )


def test_variable_diffusion_cell_by_cell(rng):
    n = 4
    problem = mp.problems.variable_diffusion(n, diffusion=0.1, contrast=9.0, rate=2.0)
    u, (x, y) = rng.normal(size=(n, n)), (np.asarray(c) for c in problem.grid.coordinates)
    w = (1 + (np.sin(4 * np.pi * x) * np.cos(2 * np.pi * y) + np.sin(2 * np.pi * (x + 3 * y))) / 2) / 2
    k, want = 0.1 * 9.0**w, 2 * (u - u**3)
    for axis in range(2):
        for shift in (1, -1):
            want += (k + np.roll(k, shift, axis)) / 2 * (np.roll(u, shift, axis) - u) * n**2
    np.testing.assert_allclose(problem.f(0.0, jnp.asarray(u)), want, rtol=1e-11, atol=1e-11)
    k = np.asarray(mp.problems.variable_diffusion(64).f.coefficient)
    assert k.min() >= 1e-3 and k.max() <= 0.1 and k.max() / k.min() > 60
    np.testing.assert_allclose(
        problem.linear.fitted(jnp.asarray(u)).eigenvalues.min(), -8 * n**2 * k_mean(problem)
    )


def k_mean(problem):
    return float(jnp.mean(problem.f.coefficient))


def test_robertson_in_cells_conserves_mass(rng):
    problem = mp.problems.robertson_cells(4, diffusion=0.5)
    y = np.abs(rng.normal(size=(3, 4, 4)))
    value = np.asarray(problem.f(0.0, jnp.asarray(y)))
    assert abs(value.sum()) < 1e-9 * np.abs(value).sum()
    uniform = np.ones((3, 4, 4)) * np.array([0.7, 1e-5, 0.3])[:, None, None]
    slow, fast = 0.04 * 0.7 - 1e4 * 1e-5 * 0.3, 3e7 * 1e-10
    np.testing.assert_allclose(
        np.asarray(problem.f(0.0, jnp.asarray(uniform)))[:, 1, 2], [-slow, slow - fast, fast], rtol=1e-9
    )


def test_brusselator_on_a_line_point_by_point(rng):
    n, alpha = 5, 0.02
    problem = mp.problems.brusselator_line(n)
    y = rng.normal(size=(2, n))
    u, v = (np.array([end, *row, end]) for end, row in zip((1.0, 3.0), y, strict=True))
    want = np.array(
        [
            [
                1 + u[i] ** 2 * v[i] - 4 * u[i] + alpha * 36 * (u[i - 1] - 2 * u[i] + u[i + 1]),
                3 * u[i] - u[i] ** 2 * v[i] + alpha * 36 * (v[i - 1] - 2 * v[i] + v[i + 1]),
            ]
            for i in range(1, n + 1)
        ]
    ).T
    np.testing.assert_allclose(problem.f(0.0, jnp.asarray(y)), want, rtol=1e-11)
    np.testing.assert_allclose(problem.y0[0], 1 + np.sin(2 * np.pi * np.arange(1, 6) / 6), rtol=1e-12)
