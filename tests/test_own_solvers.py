"""Linear solvers and preconditioners that users bring along."""

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest

import millipode as mp

NETWORK = mp.problems.reaction_network(24)
SPAN = (0.0, 2.0)


def solved(linear_solver, f=NETWORK.f, y0=NETWORK.y0, **options):
    solver = mp.EK1(4, linear_solver=linear_solver, mixture=True)
    return mp.solve(f, y0, SPAN, solver=solver, rtol=1e-5, atol=1e-8, save="end", **options)


def by_elimination(c, t, y, args, r):
    return jnp.linalg.solve(jnp.eye(r.size) - c * jax.jacfwd(NETWORK.f, argnums=1)(t, y), r)


@pytest.mark.parametrize(
    "own",
    [by_elimination, lineax.LU(), lineax.GMRES(rtol=1e-10, atol=1e-14)],
    ids=["function", "lineax LU", "lineax GMRES"],
)
def test_it_solves_as_the_direct_solver_does(own):
    want, found = solved(mp.Direct()), solved(own)
    assert int(found.stats.steps) == int(want.stats.steps)
    np.testing.assert_allclose(found.mean, want.mean, rtol=1e-8)
    assert int(found.stats.iterations) > 0  # counted, one per system


def test_a_function_in_user_time_backwards_and_on_a_pytree():
    def f(t, y):
        return {"y": -50.0 * (y["y"] - jnp.cos(t))}

    def own(c, t, y, args, r):
        return {"y": r["y"] / (1 + 50 * c)}

    y0 = {"y": jnp.array([1.0, 2.0])}
    options = {"rtol": 1e-5, "atol": 1e-8, "save": "end"}
    for span in ((0.0, 1.0), (0.0, -0.1)):
        want, found = (
            mp.solve(f, y0, span, solver=mp.EK1(3, linear_solver=s), **options)
            for s in (mp.GMRES(rtol=1e-9), own)
        )
        np.testing.assert_allclose(found.mean["y"], want.mean["y"], rtol=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("own", [by_elimination, lineax.LU()], ids=["function", "lineax"])
def test_gradients_go_through_it(own):
    def end(factor, linear_solver):
        sol = solved(linear_solver, f=lambda t, y: factor * NETWORK.f(t, y), max_steps=500)
        return sol.mean[-1, 0]

    want = jax.jacfwd(end)(1.0, mp.Direct())
    np.testing.assert_allclose(jax.jacfwd(end)(1.0, own), want, rtol=1e-4)


def test_one_that_does_not_solve_is_found_out():
    """Its result is checked by a product with the true Jacobian."""
    sol = solved(lambda c, t, y, args, r: -r, throw=False)
    assert not sol.success
    assert int(sol.stats.unsolved) > 0


@pytest.mark.filterwarnings("ignore:Linear systems took")
@pytest.mark.parametrize(
    "jacobian_diagonal",
    [NETWORK.jacobian_diagonal, None, mp.Stencil(-1, radius=24)],
    ids=["given", "whole", "stencil"],
)
def test_the_diagonal_saves_iterations(jacobian_diagonal):
    def f(t, y):  # decay at very different rates, and a weak network
        return -jnp.logspace(0, 5, 24) * y + 0.01 * NETWORK.f(t, y)

    def diagonal(t, y):
        return -jnp.logspace(0, 5, 24) + 0.01 * NETWORK.jacobian_diagonal(t, y)

    known = diagonal if callable(jacobian_diagonal) else jacobian_diagonal
    plain, better = (
        solved(mp.GMRES(p, vectors=24), f=f, y0=jnp.ones(24)) for p in (None, mp.Diagonal(known))
    )
    assert int(better.stats.iterations) < int(plain.stats.iterations) / 3
    np.testing.assert_allclose(better.mean, plain.mean, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mp.EK1(linear_solver="LU"), TypeError, "mp.GMRES"),
        (lambda: mp.EK1(linear_solver=mp.GMRES), TypeError, "got GMRES"),
        (lambda: mp.Diagonal(3.0), TypeError, "function"),
        (lambda: solved(lambda c, t, y, args, r: r[:3]), ValueError, "shape"),
        (lambda: solved(mp.GMRES(mp.Diagonal(lambda t, y: y[:3]))), ValueError, "jacobian_diagonal"),
        (lambda: solved(mp.GMRES(mp.Diagonal()), y0=jnp.ones(1000)), ValueError, "mp.Stencil"),
    ],
)
def test_bad_ones(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_diagonal_of_a_network_is_exact():
    y = jnp.asarray(np.random.default_rng(0).uniform(size=24))
    want = jnp.diagonal(jax.jacfwd(NETWORK.f, argnums=1)(0.0, y))
    np.testing.assert_allclose(NETWORK.jacobian_diagonal(0.0, y), want, rtol=1e-12)
    np.testing.assert_allclose(jnp.sum(NETWORK.f(0.0, y)), 0, atol=1e-10)
