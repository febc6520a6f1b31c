"""The square-root algebra: exact constants, QR, and the three forms of the correction."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

import millipode as mp
import oracle
from common import jit
from millipode.covariance import blocks, dense
from millipode.covariance.observation import BlockObservation, DenseObservation
from millipode.linalg import qr
from millipode.linalg.triangular import eliminate, solve_upper
from millipode.model.priors.iwp import hilbert_root


@pytest.mark.parametrize("nu", range(1, 12))
def test_root_of_the_scaled_noise_is_exact_for_every_order(nu):
    n = nu + 1
    root = hilbert_root(n)
    exact = [[Fraction(1, 2 * n - 1 - i - j) for j in range(n)] for i in range(n)]
    product = [
        [sum(Fraction(root[k, i]) * Fraction(root[k, j]) for k in range(n)) for j in range(n)]
        for i in range(n)
    ]
    worst = max(abs(product[i][j] - exact[i][j]) / exact[i][j] for i in range(n) for j in range(n))
    assert worst < 1e-15 * n
    assert (np.diag(root) > 0).all()


@pytest.mark.parametrize("nu", [1, 3, 11])
@pytest.mark.parametrize("h", [1e-5, 0.3, 7.0])
def test_scaled_and_plain_transitions_are_the_same(nu, h):
    transition = mp.IWP(nu).transition(jnp.asarray(h))
    phi, sigma = oracle.transition(nu, h)
    plain = np.array([[0.0 if p is None else p for p in row] for row in transition.phi])
    np.testing.assert_allclose(plain, phi, rtol=1e-13)
    scaling = np.asarray(transition.scaling)
    rescaled = scaling[:, None] * np.asarray(transition.scaled_phi) / scaling
    np.testing.assert_allclose(rescaled, phi, rtol=1e-12)
    root = np.asarray(transition.scaled_root) * scaling
    np.testing.assert_allclose(root.T @ root, sigma, rtol=1e-12)
    row, noise = mp.IWP(nu).marginal(jnp.asarray(h))
    np.testing.assert_allclose(row, phi[0], rtol=1e-13)
    np.testing.assert_allclose(noise, sigma[0, 0], rtol=1e-12)


@pytest.mark.parametrize("nu", [1, 2, 4])
def test_the_prior_solves_its_stochastic_differential_equation(nu):
    # Φ = exp(Ah), and Σ from Van Loan's exponential of a block matrix.
    h, drift, noise = 0.7, np.diag(np.ones(nu), 1), np.diag(np.eye(nu + 1)[-1])
    blocked = expm(h * np.block([[drift, noise], [np.zeros_like(drift), -drift.T]]))
    phi, sigma = oracle.transition(nu, h)
    np.testing.assert_allclose(phi, blocked[: nu + 1, : nu + 1], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(sigma, blocked[: nu + 1, nu + 1 :] @ phi.T, rtol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 6, 12])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_merge_is_the_qr_of_the_stack(n, batch, rng):
    rows = jnp.asarray(rng.normal(size=(n - 1, n, *batch)))
    triangle = jnp.asarray(np.triu(np.abs(rng.normal(size=(*batch, n, n)))))
    triangle = jnp.moveaxis(triangle, (-2, -1), (0, 1))
    root = np.asarray(jit(qr.merge)(rows, triangle)[0])
    for index in np.ndindex(*batch):
        pick = (..., *index)
        have, a, b = root[pick], np.asarray(rows)[pick], np.asarray(triangle)[pick]
        np.testing.assert_allclose(have.T @ have, a.T @ a + b.T @ b, rtol=1e-12, atol=1e-13)
        np.testing.assert_array_equal(np.tril(have, -1), 0)


@pytest.mark.parametrize("batch", [(), (5,), (100,)], ids=["one", "few", "many"])
def test_a_root_does_not_depend_on_rounding(batch, rng):
    """A value and a derivative from two programs, which round differently, must be of the same root."""
    stack, change = (jnp.asarray(rng.normal(size=(7, 4, *batch))) for _ in range(2))
    stack = stack.at[:, 1].set(0.3 * stack[:, 0]).at[:, 3].set(0.0)  # known given the first; known
    change = change.at[:, 1].set(0.3 * change[:, 0]).at[:, 3].set(0.0)
    other = stack * (1 + 1e-15 * rng.normal(size=stack.shape))
    root, (_, slope) = qr.root_of(other), jax.jvp(qr.root_of, (stack,), (change,))
    gram = lambda a, b: np.einsum("ki...,kj...->ij...", a, b)
    np.testing.assert_allclose(gram(root, root), gram(stack, stack), atol=1e-11)
    have, want = gram(root, slope), gram(stack, change)
    np.testing.assert_allclose(have + have.swapaxes(0, 1), want + want.swapaxes(0, 1), atol=1e-10)


@pytest.mark.parametrize("j", [None, -3.0])
def test_the_correction_knows_the_derivative_exactly(j, rng):
    root = jnp.asarray(np.moveaxis(np.triu(rng.normal(size=(50, 5, 5))), 0, -1))
    posterior = blocks.rotate(root, BlockObservation(j if j is None else jnp.asarray(j)))[2]
    np.testing.assert_array_equal(posterior[:, 1], 0 if j is None else j * posterior[:, 0])


@pytest.mark.parametrize("n", [2, 4, 9])
@pytest.mark.parametrize("j", [0.0, -3.0, 50.0])
def test_three_forms_of_the_correction_agree(n, j, rng):
    root = jnp.asarray(np.triu(rng.normal(size=(n, n))) + 2 * np.eye(n))
    row = np.zeros((1, n))
    row[0, :2] = -j, 1
    measured = root @ row.T
    s = (row @ (root.T @ root) @ row.T).item()
    gain = root.T @ measured / s
    posterior = (np.eye(n) - gain @ row) @ (root.T @ root)

    rotated = blocks.rotate(root, BlockObservation(jnp.asarray(j)))
    joseph = dense.half_joseph(root, measured)
    textbook = dense.conventional(root, measured)
    for root_s, k, post in (
        rotated,
        (joseph[0], joseph[2][:, 0], joseph[3]),
        (textbook[0], textbook[1][:, 0], textbook[2]),
    ):
        np.testing.assert_allclose(np.abs(root_s).item(), np.sqrt(s), rtol=1e-12)
        np.testing.assert_allclose(k, gain[:, 0], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(post.T @ post, posterior, rtol=1e-10, atol=1e-12)


def test_correction_of_several_residuals_agrees_between_dense_forms(rng):
    d, n = 3, 4
    root = jnp.asarray(rng.normal(size=(n * d, n * d)))
    jacobian = jnp.asarray(rng.normal(size=(d, d)))
    measured = DenseObservation(jacobian).of(root)
    h = np.zeros((d, n * d))
    h[:, :d], h[:, d : 2 * d] = -jacobian, np.eye(d)
    np.testing.assert_allclose(measured, root @ h.T, atol=1e-13)
    s1, degenerate, k1, post1 = dense.half_joseph(root, measured)
    s2, k2, post2 = dense.conventional(root, measured)
    assert not degenerate.any()
    np.testing.assert_allclose(s1.T @ s1, s2.T @ s2, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(k1, k2, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(post1.T @ post1, post2.T @ post2, rtol=1e-9, atol=1e-11)


def test_a_residual_that_is_known_exactly_is_left_alone(rng):
    zero = jnp.zeros((3, 3))
    innovation, gain, posterior = blocks.rotate(zero, BlockObservation(None))
    assert innovation == 0 and not gain.any() and not posterior.any()
    measured = jnp.asarray(rng.normal(size=(6, 2))).at[:, 1].set(0.0)
    root = jnp.asarray(rng.normal(size=(6, 6)))
    _, degenerate, k, post = dense.half_joseph(root, measured)
    assert degenerate.tolist() == [False, True]
    assert not k[:, 1].any() and np.isfinite(post).all()


@pytest.mark.parametrize("shape", [(5, 3), (3, 3), (8, 4)])
def test_derivative_of_the_dense_qr_agrees_with_finite_differences(shape, rng):
    stack, direction = (jnp.asarray(rng.normal(size=shape)) for _ in range(2))
    _, tangent = jax.jvp(qr.triangularise, (stack,), (direction,))
    eps = 1e-6
    difference = qr.triangularise(stack + eps * direction) - qr.triangularise(stack - eps * direction)
    np.testing.assert_allclose(tangent, difference / (2 * eps), rtol=1e-7, atol=1e-8)
    # A zero stack is what a vanishing residual leaves behind.
    zero = jnp.zeros(shape)
    for value in jax.jvp(qr.triangularise, (zero,), (zero,)):
        assert np.isfinite(value).all()


@pytest.mark.parametrize("explicit", [False, True])
def test_pairs_are_conditioned_without_cancellation(explicit):
    """Against extended precision, where the entries of a root differ by up to eleven orders of magnitude."""
    rng = np.random.default_rng(8)
    stack = rng.normal(size=(3, 2, 200)) * 10.0 ** rng.uniform(-8, 3, size=(3, 2, 200))
    j = None if explicit else -(10.0 ** rng.uniform(-3, 5, 200))
    innovation, gain, posterior = blocks.condition_pairs(
        jnp.asarray(stack), BlockObservation(None if j is None else jnp.asarray(j))
    )
    s, x = stack.astype(np.longdouble), np.stack([0 * stack[0, 0] if j is None else -j, 1 + 0 * stack[0, 0]])
    covariance = np.einsum("kid,kjd->ijd", s, s)
    cross = np.einsum("ijd,jd->id", covariance, x)
    variance = np.sum(x * cross, axis=0)
    np.testing.assert_allclose(innovation**2, variance.astype(float), rtol=1e-12)
    size = np.sqrt(np.einsum("iid->id", covariance)).astype(float)
    assert (np.abs(gain - (cross / variance).astype(float)) <= 1e-12 * size / np.asarray(innovation)).all()
    # det C⁻/S, with the determinant from minors in extended precision: the difference C − KSKᵀ would cancel.
    pairs = [(0, 1), (0, 2), (1, 2)]
    minors = sum((s[a, 0] * s[b, 1] - s[a, 1] * s[b, 0]) ** 2 for a, b in pairs)
    left = np.sqrt(minors / variance).astype(float)
    slope = np.zeros(200) if j is None else j * left
    np.testing.assert_allclose(np.abs(posterior[0]), np.abs([left, slope]), rtol=1e-9)


@pytest.mark.parametrize("batch", [(), (5,), (100,)], ids=["one", "few", "many"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [1, 4, 20])
def test_one_triangular_solve_for_all_sizes(batch, transposed, n, rng):
    if n == 20 and len(batch):
        batch = (3,)
    triangle = rng.normal(size=(n, n, *batch)) + 3 * np.eye(n).reshape(n, n, *(1,) * len(batch))
    right = rng.normal(size=(n, 2, *batch))
    library = not batch and n > 4
    have = solve_upper(jnp.asarray(triangle), jnp.asarray(right), transposed=transposed, library=library)
    have = np.asarray(have)
    for index in np.ndindex(*batch):
        r, b, x = (a[(..., *index)] for a in (triangle, right, have))
        r = np.triu(r)
        np.testing.assert_allclose((r.T if transposed else r) @ x, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", [(), (100,)], ids=["one", "many"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [3, 20])
def test_a_pivot_of_mere_rounding_counts_as_known(batch, transposed, n, rng):
    if n == 20 and batch:
        batch = (70,)
    triangle = np.triu(rng.normal(size=(n, n))) + 3 * np.eye(n)
    triangle[1, 1] = 1e-15
    spread = jnp.asarray(np.broadcast_to(triangle.reshape(n, n, *(1,) * len(batch)), (n, n, *batch)))
    right = jnp.ones((n, 1, *batch))
    options = {"transposed": transposed, "library": not batch and n > 4}
    x = np.asarray(solve_upper(spread, right, known=1e-12, **options))
    assert np.isfinite(x).all() and not x[1].any() and x[0].all()
    assert np.abs(np.asarray(solve_upper(spread, right, **options))[1]).min() > 1e10


def test_elimination_solves_small_systems(rng):
    matrix = np.eye(3)[..., None] + 0.2 * rng.normal(size=(3, 3, 100))
    right = rng.normal(size=(3, 100))
    x = np.asarray(eliminate(jnp.asarray(matrix), jnp.asarray(right)))
    np.testing.assert_allclose(np.einsum("ijm,jm->im", matrix, x), right, rtol=1e-11, atol=1e-12)
