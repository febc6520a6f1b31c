"""Structured and dense covariances are one model: they agree to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
import oracle
from common import CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR, name
from millipode.covariance import BlockDiagonal, Coupled, Dense, Kronecker, tiles
from millipode.covariance.observation import Observation
from millipode.linalg.jacobians import CoupledJacobian, DenseJacobian, DiagonalJacobian, ZeroJacobian


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
@pytest.mark.wide(quick=2)
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
    monkeypatch.setattr(tiles, "TILE", d)
    jax.clear_caches()
    whole = mp.solve(problem.f, y0, (0.0, 0.1), **options)
    np.testing.assert_allclose(tiled.mean, whole.mean, rtol=1e-13)
    np.testing.assert_allclose(tiled.std, whole.std, rtol=1e-10)
    np.testing.assert_allclose(tiled.log_evidence, whole.log_evidence, rtol=1e-12)


def test_impossible_combinations_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="no constant vector-valued diffusion.*couples"):
        mp.EK1(diffusion=CONSTANT_VECTOR, structure="dense")
    with pytest.raises(ValueError, match="couples all unknowns"):
        mp.EK1(structure="blockdiagonal")
    with pytest.raises(ValueError, match="own history of covariances"):
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
    assert mp.EK1().structure == "kronecker"
    assert mp.EK1(corrections=1).structure == mp.EK1(diffusion=DYNAMIC_VECTOR).structure == "dense"


FULL = np.random.default_rng(5).normal(size=(3, 3))


@pytest.mark.parametrize(
    ("structure", "given", "matrix"),
    [
        (Kronecker, ZeroJacobian(), np.zeros((3, 3))),
        (BlockDiagonal, DiagonalJacobian(jnp.asarray(np.diag(FULL))), np.diag(np.diag(FULL))),
        (Dense, ZeroJacobian(), np.zeros((3, 3))),
        (Dense, DiagonalJacobian(jnp.asarray(np.diag(FULL))), np.diag(np.diag(FULL))),
        (Dense, DenseJacobian(jnp.asarray(FULL)), FULL),
        (Coupled, CoupledJacobian(jnp.zeros((3,)), jnp.asarray(FULL)), FULL),
    ],
)
def test_what_a_residual_moves_y_by(structure, given, matrix):
    """By the step's noise alone: E₀ Σ Hᵀ (H Σ Hᵀ)⁻¹ z, as in the textbook."""
    z, h = jnp.array([0.3, -1.0, 2.0]), 0.2
    _, sigma = oracle.transition(2, h)
    noise = np.kron(sigma, np.eye(3))  # derivative-major
    observed = np.hstack([-matrix, np.eye(3), np.zeros((3, 3))])
    want = (noise @ observed.T @ np.linalg.solve(observed @ noise @ observed.T, z))[:3]
    root = jnp.zeros((3, 3)) if structure is Kronecker else jnp.zeros((2, 3))
    covariance = structure.initial(root, jnp.ones(()), z)
    transition = mp.IWP(2).transition(jnp.asarray(h))
    have = covariance.process_correction(transition, Observation(given), z)
    np.testing.assert_allclose(have, want, rtol=1e-10)
