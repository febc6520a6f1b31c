"""Bases are orthonormal, diagonalise the grids' Laplacians, and square as they should."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from millipode.pde.bases import Waves

KINDS = ["cosine", "sine", "fourier"]
BOUNDARIES = {"cosine": "neumann", "sine": "dirichlet", "fourier": "periodic"}


def matrix(function, shape):
    """The matrix of a linear function of fields."""
    size = int(np.prod(shape))
    columns = jax.jit(jax.vmap(function))(jnp.eye(size).reshape(size, *shape))
    return np.asarray(columns.reshape(size, -1)).T


SHAPES = [(n,) for n in (1, 2, 3, 4, 7, 8)] + [(3, 4)]
CASES = [(shape, kinds) for shape in SHAPES for kinds in itertools.product(KINDS, repeat=len(shape))]
CASES += [((2, 3, 4), ("fourier", "sine", "cosine"))]


@pytest.mark.parametrize(("shape", "kinds"), CASES, ids=str)
@pytest.mark.wide(quick=8)
def test_bases_are_orthonormal_and_diagonalise_the_laplacian(shape, kinds):
    basis, size = Waves(shape, kinds), int(np.prod(shape))
    to_modes = matrix(basis.to_modes, shape)
    modes = jax.eval_shape(basis.to_modes, jnp.zeros(shape)).shape
    np.testing.assert_allclose(to_modes @ to_modes.T, np.eye(size), atol=1e-13)
    np.testing.assert_allclose(matrix(basis.from_modes, modes), to_modes.T, atol=1e-13)
    np.testing.assert_allclose(matrix(basis.variance, modes), to_modes.T**2, atol=1e-13)

    lengths = tuple(1.0 + i for i in range(len(shape)))
    grid = mp.Grid(shape, lengths, tuple(BOUNDARIES[k] for k in kinds))
    assert grid.basis == basis
    laplacian = matrix(grid.laplacian, shape)
    rebuilt = to_modes.T @ np.diag(grid.eigenvalues().ravel()) @ to_modes
    np.testing.assert_allclose(rebuilt, laplacian, atol=1e-13 * max(1, np.abs(laplacian).max()))
    diagonal = grid.laplacian_diagonal(jnp.zeros(shape)).ravel()
    np.testing.assert_allclose(diagonal, np.diag(laplacian), atol=1e-12)


def test_waves_are_what_they_are_called():
    n = 8
    i = np.arange(n)
    cosine, sine, fourier = (matrix(Waves((n,), (k,)).from_modes, (n,)) for k in KINDS)
    np.testing.assert_allclose(cosine[:, 3], np.sqrt(2 / n) * np.cos(3 * np.pi * (i + 0.5) / n), atol=1e-14)
    np.testing.assert_allclose(sine[:, n - 3], np.sqrt(2 / n) * np.sin(3 * np.pi * (i + 0.5) / n), atol=1e-14)
    np.testing.assert_allclose(fourier[:, 3], np.sqrt(2 / n) * np.cos(6 * np.pi * i / n), atol=1e-14)
    np.testing.assert_allclose(fourier[:, n - 3], np.sqrt(2 / n) * np.sin(6 * np.pi * i / n), atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_continuous_eigenvalues_are_the_limit_of_discrete_ones(kind):
    def lowest(n, continuous):
        grid = mp.Grid(n, 3.0, BOUNDARIES[kind])
        return np.sort(grid.eigenvalues(continuous))[::-1][:5]

    exact = {"cosine": np.arange(5), "sine": np.arange(1, 6), "fourier": 2 * np.array([0, 1, 1, 2, 2])}[kind]
    np.testing.assert_allclose(lowest(64, True), -((exact * np.pi / 3) ** 2), rtol=1e-13)
    coarse, fine = (np.abs(lowest(n, False) - lowest(n, True)).max() for n in (32, 64))
    assert 3.8 < coarse / fine < 4.2


def test_pytrees_components_and_single_precision(rng):
    basis = Waves((4, 6), ("cosine", "fourier"))
    y = {"u": jnp.asarray(rng.normal(size=(4, 6))), "v": jnp.asarray(rng.normal(size=(2, 3, 4, 6)))}
    modes = basis.to_modes(y)
    np.testing.assert_allclose(modes["v"][1, 2], basis.to_modes(y["v"][1, 2]), atol=1e-14)
    back = basis.from_modes(modes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-14), back, y)
    single = basis.to_modes(y["u"].astype(jnp.float32))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, modes["u"], atol=1e-6)


def test_bad_bases_are_refused():
    with pytest.raises(ValueError, match="one kind per axis"):
        Waves((4, 4), ("cosine",))
    with pytest.raises(ValueError, match="kinds are"):
        Waves((4,), ("wavelet",))
