"""Structured and dense covariances are one model: they agree to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR, name
from millipode.covariance import blockdiagonal


def stiffish(t, y):
    return {
        "u": -3 * y["u"] + jnp.sum(y["v"]) * jnp.ones_like(y["u"]),
        "v": jnp.cos(t) * y["v"] - y["v"] ** 3 + y["u"][0],
    }


Y0 = {"u": jnp.array([1.0, -0.5]), "v": jnp.array([[0.3, 0.9], [0.1, -1.2]])}


@pytest.mark.parametrize(
    ("kind", "diffusion", "structures"),
    [
        (mp.EK0, DYNAMIC, ["kronecker", "blockdiagonal", "dense"]),
        (mp.EK0, CONSTANT_VECTOR, ["kronecker", "blockdiagonal", "dense"]),
        (mp.EK0, DYNAMIC_VECTOR, ["blockdiagonal", "dense"]),
        (mp.DiagonalEK1, CONSTANT, ["blockdiagonal", "dense"]),
    ],
    ids=name,
)
def test_structures_agree_on_a_pytree(kind, diffusion, structures):
    first, *others = (
        mp.solve(
            stiffish,
            Y0,
            (0.0, 1.0),
            solver=kind(2, diffusion=diffusion, structure=s),
            controller=mp.FixedStep(0.04),
        )
        for s in structures
    )
    assert first.mean["v"].shape == (26, 2, 2)
    for other in others:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-15),
            (first.mean, first.std, first.log_evidence),
            (other.mean, other.std, other.log_evidence),
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8),
            first.diffusion,
            other.diffusion,
        )


@pytest.mark.parametrize("d", [1024, 1031])  # with a divisor near the tile's size, and a prime
def test_tiles_change_nothing(d, monkeypatch):
    problem = mp.problems.lorenz96(d)
    y0 = problem.y0 + jnp.sin(jnp.arange(d))
    solver = mp.DiagonalEK1(1, jacobian_diagonal=problem.jacobian_diagonal, diffusion=DYNAMIC_VECTOR)
    options = dict(solver=solver, controller=mp.FixedStep(0.01), save="end")
    tiled = mp.solve(problem.f, y0, (0.0, 0.1), **options)
    monkeypatch.setattr(blockdiagonal, "TILE", d)
    jax.clear_caches()
    whole = mp.solve(problem.f, y0, (0.0, 0.1), **options)
    np.testing.assert_allclose(tiled.mean, whole.mean, rtol=1e-13)
    np.testing.assert_allclose(tiled.std, whole.std, rtol=1e-10)
    np.testing.assert_allclose(tiled.log_evidence, whole.log_evidence, rtol=1e-12)


def test_impossible_combinations_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="no vector-valued diffusion.*couples"):
        mp.EK1(diffusion=CONSTANT_VECTOR)
    with pytest.raises(ValueError, match="couples all unknowns"):
        mp.EK1(structure="blockdiagonal")
    with pytest.raises(ValueError, match="own history of scales"):
        mp.EK0(diffusion=DYNAMIC_VECTOR, structure="kronecker")
    with pytest.raises(ValueError, match="DiagonalEK1 is not Kronecker"):
        mp.DiagonalEK1(structure="kronecker")
    with pytest.raises(ValueError, match="structure must be one of"):
        mp.EK0(structure="sparse")


def test_structures_are_chosen_by_what_the_paper_proves():
    assert mp.EK0().structure == "kronecker"
    assert mp.EK0(diffusion=CONSTANT_VECTOR).structure == "kronecker"
    assert mp.EK0(diffusion=DYNAMIC_VECTOR).structure == "blockdiagonal"
    assert mp.DiagonalEK1().structure == "blockdiagonal"
    assert mp.EK1().structure == "dense"
