"""The diagonal of the Jacobian: exact, in as many JVPs as there are colours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from millipode.model.linearisation import StencilDiagonal
from millipode.model.vector_field import VectorField


def diagonal_of(f, y):
    flat, unravel = jax.flatten_util.ravel_pytree(y)
    jacobian = jax.jacfwd(lambda x: jax.flatten_util.ravel_pytree(f(0.3, unravel(x)))[0])(flat)
    return unravel(jnp.diagonal(jacobian))


def by_stencil(stencil, f, y, sign=1.0):
    field = VectorField(f, None, jnp.asarray(sign))
    return StencilDiagonal(stencil)(field, jnp.asarray(0.3), y)[1].values


@pytest.mark.parametrize(
    "problem",
    [
        mp.problems.lorenz96(12),
        mp.problems.lorenz96(13),
        mp.problems.lorenz96(4),
        mp.problems.fitzhugh_nagumo(5),
        mp.problems.pleiades(),
        mp.problems.van_der_pol(7.0),
    ],
    ids=["lorenz12", "lorenz13", "lorenz4", "fitzhugh-nagumo", "pleiades", "van-der-pol"],
)
def test_problems_know_their_diagonal(problem, rng):
    y = problem.y0 + jnp.asarray(rng.normal(size=problem.y0.shape))
    want = diagonal_of(problem.f, y)
    np.testing.assert_allclose(problem.jacobian_diagonal(0.3, y), want, rtol=1e-12, atol=1e-12)
    if problem.stencil is not None:
        have = by_stencil(problem.stencil, problem.f, y)
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)


def box(t, y):
    """A nine-point stencil with products between diagonal neighbours, periodic in one axis."""
    up, down = jnp.roll(y, 1, 0), jnp.roll(y, -1, 0)
    up, down = up.at[0].set(0), down.at[-1].set(0)
    return y**2 * jnp.roll(up, 1, 1) + down * jnp.roll(y, -1, 1) * y + jnp.roll(down, 1, 1) ** 3


@pytest.mark.parametrize("width", [6, 7, 8])
def test_box_stencil_with_one_periodic_axis(width, rng):
    y = jnp.asarray(rng.normal(size=(5, width)))
    stencil = mp.Stencil(axes=(-2, -1), shape="box", periodic=(False, True))
    np.testing.assert_allclose(by_stencil(stencil, box, y), diagonal_of(box, y), rtol=1e-12)


def test_channels_and_leaves_may_be_coupled_in_any_way(rng):
    y = {"a": jnp.asarray(rng.normal(size=(2, 6))), "b": jnp.asarray(rng.normal(size=6))}

    def f(t, y):
        a, b = y["a"], y["b"]
        return {"a": a**2 * a[::-1] * b + jnp.roll(a, 1, -1), "b": a[0] * a[1] * b**2}

    want = diagonal_of(f, y)
    have = by_stencil(mp.Stencil(periodic=True), f, y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), have, want)
    backwards = by_stencil(mp.Stencil(periodic=True), f, y, sign=-1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-12), backwards, want)


def test_the_number_of_jvps_does_not_grow_with_the_grid():
    star = mp.Stencil(axes=(-2, -1))
    assert star.colours((100, 100)) == star.colours((1000, 1000)) == 2
    assert star.colours((2, 1000, 1000)) == 4
    assert mp.Stencil(axes=(-2, -1), shape="box").colours((50, 60)) == 4
    assert mp.Stencil(radius=2, periodic=True).colours((10**6,)) <= 5


def test_small_problems_need_no_declaration_and_large_ones_are_told_what_to_do():
    problem = mp.problems.lorenz96(8)
    plain = mp.solve(problem.f, problem.y0, (0.0, 0.2), solver=mp.DiagonalEK1(2), save="end")
    told = mp.solve(
        problem.f,
        problem.y0,
        (0.0, 0.2),
        solver=mp.DiagonalEK1(2, jacobian_diagonal=problem.jacobian_diagonal),
        save="end",
    )
    np.testing.assert_allclose(plain.std, told.std, rtol=1e-12)
    with pytest.raises(ValueError, match=r"(?s)one JVP per unknown.*jacobian_diagonal=.*Stencil.*EK0"):
        mp.solve(problem.f, jnp.ones(10_000), (0.0, 1.0), solver=mp.DiagonalEK1())


def test_bad_declarations_are_refused():
    with pytest.raises(ValueError, match="negative integers"):
        mp.Stencil(axes=(0,))
    with pytest.raises(ValueError, match="radius"):
        mp.Stencil(radius=-1)
    with pytest.raises(ValueError, match="star"):
        mp.Stencil(shape="hexagon")
    with pytest.raises(ValueError, match="one bool per axis"):
        mp.Stencil(axes=(-1, -2), periodic=(True,))
    with pytest.raises(TypeError, match="jacobian_diagonal must be a function"):
        mp.DiagonalEK1(jacobian_diagonal=3.0)
    f = mp.problems.lorenz96(8).f
    with pytest.raises(ValueError, match="do not exist"):
        solver = mp.DiagonalEK1(jacobian_diagonal=mp.Stencil(axes=(-2,)))
        mp.solve(f, jnp.ones(8), (0.0, 1.0), solver=solver)
    with pytest.raises(ValueError, match=r"jacobian_diagonal\(t, y\) has shape \(7,\)"):
        solver = mp.DiagonalEK1(jacobian_diagonal=lambda t, y: y[1:])
        mp.solve(f, jnp.ones(8), (0.0, 1.0), solver=solver)
