"""The linear systems of an EK1: GMRES, how strictly it solves them, and what preconditions it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import compiled_loop, rmse, robertson
from millipode.filter import strictness
from millipode.linalg.krylov import gmres
from millipode.model.vector_field import VectorField

RNG = np.random.default_rng(0)


def ill_conditioned(d):
    """A symmetric matrix with eigenvalues from 1 to 100, and a right-hand side."""
    vectors = np.linalg.qr(RNG.normal(size=(d, d)))[0]
    return jnp.asarray(vectors @ np.diag(np.geomspace(1, 100, d)) @ vectors.T), jnp.asarray(
        RNG.normal(size=d)
    )


@pytest.mark.parametrize("stored", [None, jnp.float32], ids=["double", "single"])
@pytest.mark.parametrize("vectors", [60, 12])
def test_gmres_leaves_what_it_says(vectors, stored):
    """With restarts, and with vectors in single precision, which costs no digits of the solution."""
    matrix, right = ill_conditioned(60)
    found = gmres(lambda x: matrix @ x, right, 1e-5, vectors, stored)
    left = np.linalg.norm(right - matrix @ found.x) / np.linalg.norm(right)
    assert left < 1.01e-5 and float(found.left) == pytest.approx(left, rel=0.02)
    assert (int(found.iterations) > 12) and (int(found.iterations) <= 60 or vectors < 60)


def test_gmres_gives_up_where_restarts_do_not_help():
    """A cyclic shift, the textbook's example: nothing is gained before the last vector."""
    right = jnp.zeros(40).at[0].set(1.0)
    found = gmres(lambda x: jnp.roll(x, 1), right, 1e-3, 10)
    assert int(found.iterations) == 10 and float(found.left) > 0.5


@pytest.mark.parametrize("n", [70, 300], ids=["flattened", "by columns"])
def test_sketches_keep_angles(n):
    """Of waves, too, whose sums without random signs would vanish."""
    i, j = 2 * np.pi * np.mgrid[:n, :n] / n
    x, y = ({"a": f(i + 2 * j), "b": f(3 * i)[0]} for f in (np.sin, np.cos))
    for share in (0.0, 0.5, 0.9):
        z = jax.tree.map(lambda x, y, s=share: s * x + np.sqrt(1 - s**2) * y, x, y)
        a, b = (strictness.sketch(jax.tree.map(jnp.asarray, v)) for v in (x, z))
        lengths = float(jnp.linalg.norm(a)), float(jnp.linalg.norm(b))
        assert float(a @ b) / (lengths[0] * lengths[1]) == pytest.approx(share, abs=0.2)
        assert lengths[0] == pytest.approx(np.sqrt(sum(np.sum(v**2) for v in x.values())), rel=0.2)


def test_systems_are_solved_more_strictly_where_that_keeps_steps_short(monkeypatch):
    """What roughly solved systems leave in stiff directions would be most of what the next steps correct."""
    problem = mp.problems.robertson_cells(8)

    def attempts():
        options = dict(solver=mp.EK1(linear_solver=mp.GMRES()), atol=1e-8, save="end", uncertainty="filter")
        stats = mp.solve(problem.f, problem.y0, problem.t_span, **options).stats
        jax.clear_caches()
        return int(stats.steps + stats.rejected)

    assert attempts() < 250
    monkeypatch.setattr(strictness, "STRICTEST", 1.0)
    assert attempts() > 500


GRID = mp.Grid((16, 16), lengths=1.0, boundary="periodic")


def schnakenberg(t, y):
    u, v = y
    growth = u * u * v
    return jnp.stack(
        [
            1e-3 * GRID.laplacian(u) + 20 * (0.1 - u + growth),
            4e-2 * GRID.laplacian(v) + 20 * (0.9 - growth),
        ]
    )


X = np.stack(np.meshgrid(*(np.arange(16) / 16,) * 2))
PATTERN = jnp.asarray(
    np.stack([1 + 0.1 * np.cos(2 * np.pi * X.sum(0)), 0.9 + 0.05 * np.sin(2 * np.pi * X[0])])
)
DIFFUSION = GRID.diffusion([1e-3, 4e-2])


@functools.cache
def pattern_at_the_end():
    return np.asarray(
        mp.solve(
            schnakenberg,
            PATTERN,
            (0.0, 1.0),
            solver=mp.EK0(6),
            rtol=1e-9,
            atol=1e-9,
            save="end",
            uncertainty="filter",
        ).mean[-1]
    )


@pytest.mark.parametrize(
    ("preconditioner", "iterations"),
    [
        (None, 12),
        (DIFFUSION, 6),
        (mp.LocalBlocks(), 12),
        ([DIFFUSION, mp.LocalBlocks()], 6),
        (lambda c, t, y, args, r: DIFFUSION.jacobian(r).solve(c, r), 6),
    ],
    ids=["none", "linear", "blocks", "product", "function"],
)
def test_preconditioners(preconditioner, iterations):
    """All of them lead to the same solution, by fewer or more iterations per system."""
    solver = mp.EK1(4, linear_solver=mp.GMRES(preconditioner))
    sol = mp.solve(schnakenberg, PATTERN, (0.0, 1.0), solver=solver, rtol=1e-5, atol=1e-5, save="end")
    assert rmse(sol.mean[-1], pattern_at_the_end()) < 1e-4
    attempts = int(sol.stats.steps + sol.stats.rejected)
    assert attempts < 150 and 0 < int(sol.stats.iterations) < iterations * attempts


def test_blocks_are_exact_for_reactions_in_cells():
    """Robertson's reactions in cells without any coupling: one iteration solves every system."""
    start = jnp.zeros((3, 5)).at[0].set(jnp.linspace(0.5, 1.0, 5))
    field = VectorField(robertson, None, jnp.ones(()))
    y = start.at[1].set(3e-5).at[2].set(0.1)
    solver = mp.GMRES(mp.LocalBlocks())
    _, jacobian = solver.linearised(field, jnp.zeros(()), y)
    r = jnp.asarray(np.random.default_rng(0).normal(size=y.shape))
    solved = jacobian.system(jnp.asarray(0.3), jnp.ones_like(y))(r)
    assert int(solved.iterations) == 1 and solved.converged
    np.testing.assert_allclose(solved.x - 0.3 * jacobian.multiply(solved.x), r, atol=1e-8)


def test_backwards_in_time():
    solver = mp.EK1(4, linear_solver=mp.GMRES(lambda c, t, y, args, r: r / (1 - c * jnp.array([30.0, 1.0]))))
    rates = jnp.array([30.0, 1.0])
    sol = mp.solve(
        lambda t, y: rates * y, jnp.ones(2), (1.0, 0.0), solver=solver, rtol=1e-7, atol=1e-10, save="end"
    )
    np.testing.assert_allclose(sol.mean[-1], np.exp(-np.asarray(rates)), atol=1e-7)
    assert int(sol.stats.iterations) <= 2 * int(sol.stats.f_evals)


def test_systems_that_do_not_converge_are_said_to():
    solver = mp.EK1(3, linear_solver=mp.GMRES(vectors=1))
    sol = mp.solve(
        schnakenberg,
        PATTERN,
        (0.0, 50.0),
        solver=solver,
        max_steps=150,
        throw=False,
        save="end",
        uncertainty="filter",
    )
    assert not sol.success
    assert "linear systems" in sol.message and "preconditioner" in sol.message


def frozen_jacobian(solver, f, y):
    """What GMRES knows of f at y."""
    return solver.linearised(VectorField(f, None, jnp.ones(())), jnp.zeros(()), y)[1]


def iterations(preconditioner, f, y, c):
    solved = frozen_jacobian(mp.GMRES(preconditioner), f, y).system(jnp.asarray(c), jnp.ones_like(y))(
        jnp.asarray(np.random.default_rng(1).normal(size=y.shape))
    )
    assert solved.converged
    return int(solved.iterations)


@pytest.mark.parametrize("boundary", ["periodic", "neumann", "dirichlet"])
def test_a_linear_part_is_as_strong_as_f_is(boundary):
    """The diffusion of any coefficient preconditions one that varies by a factor of 243, as y does.

    With one strength for all points, systems take 14 to 40 iterations.
    """
    grid = mp.Grid((48, 48), boundary=boundary)
    x, y = grid.coordinates
    u = 1 + 0.5 * jnp.sin(2 * jnp.pi * x) * jnp.cos(2 * jnp.pi * y)
    for coefficient in (1.0, 20.0):
        assert iterations(grid.diffusion(coefficient), lambda t, u: grid.diffuse(u**5, u), u, 1.0) <= 8
    # As strong everywhere: A as it was given, also where cells have walls.
    assert iterations(grid.diffusion(1.0), lambda t, u: grid.laplacian(u), u, 1.0) == 1


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_linear_part_and_blocks_are_exact_in_both_limits(sign):
    """Reactions that are the same in all cells, and no diffusion: one iteration each, whatever is stiff."""
    grid = mp.Grid((8, 8), boundary="periodic")
    matrix = np.array([[-300.0, 50.0], [200.0, -100.0]])
    y = jnp.asarray(np.random.default_rng(0).uniform(1, 2, size=(2, 8, 8)))

    def coupled(t, y):
        diffusion = jnp.stack([grid.laplacian(y[0]), 0.1 * grid.laplacian(y[1])])
        return sign * (diffusion + jnp.tensordot(matrix, y, 1))

    def solves_at_once(f, linear, y):
        field = VectorField(f, None, jnp.asarray(sign))
        solver = mp.GMRES([linear, mp.LocalBlocks()])
        jacobian = solver.linearised(field, jnp.zeros(()), y)[1]
        r = jnp.asarray(np.random.default_rng(1).normal(size=y.shape))
        solved = jacobian.system(jnp.asarray(0.5), jnp.ones_like(y))(r)
        np.testing.assert_allclose(solved.x - 0.5 * jacobian.multiply(solved.x), r, atol=1e-4)
        return int(solved.iterations) == 1

    assert solves_at_once(coupled, grid.diffusion([sign, 0.1 * sign]), y)
    assert solves_at_once(lambda t, y: -sign * 1000 * y**3, grid.diffusion([0.0, 0.0]), y)


def test_stiff_reactions_with_diffusion():
    """Robertson's reactions in cells take no more steps than in one cell, and about one iteration each."""
    problem = mp.problems.robertson_cells(16)
    solver = mp.EK1(linear_solver=mp.GMRES([problem.linear, mp.LocalBlocks()]))
    sol = mp.solve(problem.f, problem.y0, problem.t_span, solver=solver, atol=1e-8, save="end")
    attempts = int(sol.stats.steps + sol.stats.rejected)
    assert attempts < 200 and int(sol.stats.iterations) < 2 * attempts
    total = np.asarray(sol.mean[-1]).sum(0)
    np.testing.assert_allclose(
        total.mean(), np.asarray(problem.y0).sum(0).mean(), rtol=1e-6
    )  # nothing is lost


@pytest.mark.thorough
def test_gradients_through_a_varying_linear_part():
    """Reverse mode transposes the preconditioner."""
    grid = mp.Grid((8, 8))
    x, _ = grid.coordinates

    def final(power):
        def f(t, u):
            return grid.diffuse(0.01 * 100.0 ** (power * x), u) + u - u**3

        solver = mp.EK1(3, linear_solver=mp.GMRES(grid.diffusion(0.1), rtol=1e-5))
        controller = mp.FixedStep(0.02)
        y0 = jnp.cos(jnp.pi * x)
        return jnp.sum(
            mp.solve(f, y0, (0.0, 0.2), solver=solver, controller=controller, save="end").mean ** 2
        )

    h = 1e-4
    difference = (final(1.0 + h) - final(1.0 - h)) / (2 * h)
    assert float(jax.grad(final)(1.0)) == pytest.approx(float(difference), rel=2e-3)
    assert float(jax.jvp(final, (1.0,), (1.0,))[1]) == pytest.approx(float(difference), rel=2e-3)


@pytest.mark.optimised
@pytest.mark.parametrize(("preconditioned", "copies"), [(False, 24), (True, 30)])
def test_memory_of_large_problems(preconditioned, copies):
    """The state, and few vectors in single precision, in copies of y."""
    problem = mp.problems.variable_diffusion(400)
    solver = mp.EK1(linear_solver=mp.GMRES(problem.linear if preconditioned else None))
    options = dict(solver=solver, save="end", uncertainty="filter")
    loop, y0 = compiled_loop(problem.f, problem.y0, problem.t_span, **options)
    used = loop.memory_analysis()
    assert used.temp_size_in_bytes + used.argument_size_in_bytes < copies * y0.nbytes
