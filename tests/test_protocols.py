"""Users' own parts, with functions inside that are differentiated, work wherever built-in ones do."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from millipode.covariance.transition import BlockTransition
from millipode.filter.calibration import Diffusion
from millipode.linalg.jacobians import DiagonalJacobian, Jacobian
from millipode.model.linearisation import Linearisation
from millipode.model.priors import IWP, Prior
from millipode.solvers import Solver

D = 4
Y0 = jnp.array([0.5, -0.2, 0.8, 0.3])
STIFF = jnp.array([-1.0, -2.0, -0.5, -3.0])


def f(t, y):
    return STIFF * y + 0.5 * jnp.sin(jnp.roll(y, 1) + t)


class Noisy(Prior):
    """An integrated Wiener process whose noise depends on the step by a user's function."""

    order: int = eqx.field(static=True)
    level: Callable

    @property
    def is_shared(self):
        return True

    def fitted(self, rates, sign, y):
        return self

    def transition(self, h):
        t = IWP(self.order).transition(h)
        return BlockTransition(t.phi, t.scaling, t.scaled_phi, self.level(h) * t.scaled_root)

    def marginal(self, h):
        row, noise = IWP(self.order).marginal(h)
        return row, self.level(h) ** 2 * noise

    def remainder(self, h):
        return IWP(self.order).remainder(h)

    def state(self, derivatives):
        return derivatives

    def root(self, root):
        return root

    def row(self, q, y):
        return IWP(self.order).row(q, y)

    def derivative(self, state, q):
        return IWP(self.order).derivative(state, q)


class Cautious(Diffusion):
    """A dynamic diffusion that inflates the local estimate by a user's function."""

    is_dynamic: ClassVar[bool] = True
    inflate: Callable
    vector: bool = eqx.field(static=True, default=False)

    def filter_gamma(self, local):
        return jax.tree.map(self.inflate, local)

    def accumulate(self, calibration, local, innovation, z):
        return self.filter_gamma(local)

    def calibrated(self, calibration, steps, y):
        return jax.tree.map(jnp.square, calibration)

    def output_gamma(self, diffusion):
        return jnp.ones(())

    def log_evidence(self, evidence):
        return -(evidence.rank * jnp.log(2 * jnp.pi) + evidence.log_det + evidence.quadratic) / 2


class Given(Linearisation):
    """A diagonal Jacobian from a user's function of time."""

    rate: Callable

    def __call__(self, field, t, y, memory=()):
        return field(t, y), DiagonalJacobian(field.sign * self.rate(t) * jnp.ones_like(y))


class Own(Solver):
    """A solver with a linearisation of its own."""

    prior: Prior
    diffusion: Diffusion
    rate: Callable
    structure: str = eqx.field(static=True, default="blockdiagonal")
    initialise: str | None = eqx.field(static=True, default=None)

    def linearisation(self, y):
        return Given(self.rate)


class Weighted(mp.spatial.Spatial):
    """Independent points, with variances from a user's function of their number."""

    variance: Callable
    shape: tuple[int, ...] = eqx.field(static=True, default=(D,))

    def diagonal(self):
        return self.variance(jnp.arange(float(D)))

    def quadratic(self, z):
        return jnp.sum(z**2 / self.diagonal())

    def correlate(self, white):
        return jnp.sqrt(self.diagonal()) * white

    def logdet(self):
        return jnp.sum(jnp.log(self.diagonal()))

    def spectrum(self, linear):
        return self.diagonal()


class Reflected(mp.basis.Basis):
    """A Householder reflection, along a vector that comes from a user's function."""

    vector: Callable

    def matrix(self):
        v = self.vector(jnp.arange(1.0, D + 1))
        return jnp.eye(D) - 2 * jnp.outer(v, v) / jnp.sum(v**2)

    def to_modes(self, y):
        return self.matrix().T @ y

    def from_modes(self, modes):
        return self.matrix() @ modes

    def variance(self, variances):
        return self.matrix() ** 2 @ variances


def with_prior(a):
    return mp.EK0(2, prior=Noisy(2, lambda h: 1 + a * h), diffusion=mp.ConstantDiffusion())


def with_diffusion(a):
    return mp.DiagonalEK1(2, diffusion=Cautious(lambda g: (1 + a) * g))


def with_vector_diffusion(a):
    return mp.EK0(2, diffusion=Cautious(lambda g: (1 + a) * g, vector=True))


def with_linearisation(a):
    return Own(mp.IWP(2), mp.DynamicDiffusion(), lambda t: -a * (1 + t))


def with_spatial(a):
    return mp.EK0(2, spatial=Weighted(lambda i: 1 + a * i))


def with_basis(a):
    linear = (Reflected(lambda i: i**a), -jnp.arange(1.0, D + 1))
    return mp.SpectralEK1(2, linear=linear)


def with_spatial_in_basis(a):
    linear = (Reflected(lambda i: 1.0 + 0 * i), -jnp.arange(1.0, D + 1))
    return mp.SpectralEK1(2, linear=linear, spatial=Weighted(lambda i: 1 + a * i))


OWN = [
    with_prior,
    with_diffusion,
    with_vector_diffusion,
    with_linearisation,
    with_spatial,
    with_basis,
    with_spatial_in_basis,
]
TIMES = np.array([0.1, 0.35, 0.6])
# The last step is shorter, so that no part of the model is left to γ alone.
FIXED = {"controller": mp.FixedStep(0.1)}


@pytest.mark.parametrize("make", OWN, ids=lambda make: make.__name__)
@pytest.mark.wide(quick=1)
def test_own_parts_work_with_every_save_mode_and_question(make):
    solver = make(0.7)
    exact = mp.solve(f, Y0, (0.0, 0.6), solver=mp.EK1(5), rtol=1e-10, atol=1e-12, save=TIMES).mean
    options = {"solver": solver, "rtol": 1e-6, "atol": 1e-8}
    for more in (
        {"save": "end"},
        {"save": TIMES},
        {"save": TIMES, "smooth": False},
        {"save": "steps"},
        {"save": "steps", "smooth": False},
        {"save": "steps", "smooth": "recompute"},
        {"save": TIMES, "uncertainty": mp.Transported(4)},
        {"save": "steps", "uncertainty": mp.Transported(4, noise="white")},
    ):
        sol = mp.solve(f, Y0, (0.0, 0.6), **options, **more)
        assert sol.success and sol.std.shape == sol.mean.shape and (sol.std[-1] > 0).all()
        assert np.isfinite(sol.log_evidence)
        if sol.is_continuous:
            np.testing.assert_allclose(sol(TIMES).mean, exact, atol=1e-4)
            assert np.isfinite(sol(TIMES).std).all()
        else:
            np.testing.assert_allclose(sol.mean[-1], exact[-1], atol=1e-4)
        if sol.posterior.is_joint:
            assert np.isfinite(sol.sample(jax.random.key(0), 3)).all()
            assert sol.derivative(1).mean.shape == sol.mean.shape


@pytest.mark.parametrize("save", ["end", TIMES], ids=["end", "times"])
@pytest.mark.parametrize("make", OWN, ids=lambda make: make.__name__)
@pytest.mark.wide(quick=1)
def test_functions_inside_of_own_parts_are_differentiated_in_both_modes(make, save):
    def value(a):
        sol = mp.solve(f, Y0, (0.0, 0.65), solver=make(a), save=save, **FIXED)
        return jnp.sum(jnp.sin(3 * sol.mean[-1])) + 10 * jnp.sum(sol.std[-1]) + 0.01 * sol.log_evidence

    a, step = 0.7, 1e-5
    compiled = jax.jit(value)
    want = (compiled(a + step) - compiled(a - step)) / (2 * step)
    assert abs(want) > 1e-7
    np.testing.assert_allclose(jax.jvp(value, (a,), (1.0,))[1], want, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(jax.grad(value))(a), want, rtol=1e-4)
    np.testing.assert_allclose(jax.grad(compiled)(a), want, rtol=1e-4)
    np.testing.assert_allclose(jax.vmap(value)(jnp.array([a, a + step]))[0], compiled(a), rtol=1e-10)


def test_an_own_jacobian_needs_no_more_than_its_products():
    class LowRank(Jacobian):
        left: jax.Array
        right: jax.Array

        def multiply(self, x):
            return self.left @ (self.right.T @ x)

        def solve(self, c, r):
            small = jnp.eye(self.left.shape[1]) - c * self.right.T @ self.left
            return r + c * self.left @ jnp.linalg.solve(small, self.right.T @ r)

        def minus(self, rate):
            raise NotImplementedError

    class Low(Linearisation):
        def __call__(self, field, t, y, memory=()):
            return field(t, y), LowRank(jnp.ones((D, 1)), -jnp.ones((D, 1)))

    class Blocks(mp.DiagonalEK1):
        def linearisation(self, y):
            return Low()

    class Solver(mp.EK1):
        def linearisation(self, y):
            return Low()

    sol = mp.solve(
        f, Y0, (0.0, 0.6), solver=Solver(3, structure="dense"), rtol=1e-6, uncertainty=mp.Transported(4)
    )
    assert sol.success and np.isfinite(sol.std).all()
    with pytest.raises(TypeError, match=r"LowRank is not diagonal.*structure='dense'"):
        mp.solve(f, Y0, (0.0, 0.6), solver=Blocks(3))


def test_a_solution_with_own_functions_inside_leaves_jit():
    sol = jax.jit(lambda y: mp.solve(f, y, (0.0, 0.6), solver=with_prior(0.7), save=TIMES))(Y0)
    assert sol.sample(jax.random.key(0), 2).shape == (2, 3, D)


class Rotated(mp.basis.Basis):
    """An orthonormal matrix, as an array."""

    matrix: jax.Array

    def to_modes(self, y):
        return self.matrix.T @ y

    def from_modes(self, modes):
        return self.matrix @ modes

    def variance(self, variances):
        return self.matrix**2 @ variances


def test_a_batch_of_solutions_has_a_batch_of_bases():
    matrices = jnp.stack([jnp.linalg.qr(jax.random.normal(jax.random.key(i), (D, D)))[0] for i in range(3)])

    def solved(matrix, **options):
        solver = mp.SpectralEK1(2, linear=(Rotated(matrix), -jnp.arange(1.0, D + 1)))
        return mp.solve(f, Y0, (0.0, 0.65), solver=solver, save=TIMES, **FIXED, **options)

    for options in ({}, {"uncertainty": mp.Transported(4)}):
        batch = jax.vmap(lambda m, options=options: solved(m, **options))(matrices)
        for i, matrix in enumerate(matrices):
            one = solved(matrix, **options)
            np.testing.assert_allclose(batch.mean[i], one.mean, rtol=1e-9)
            np.testing.assert_allclose(batch.std[i], one.std, rtol=1e-5)


def test_a_kronecker_covariance_refuses_jacobians_that_differ_between_unknowns():
    own = Own(mp.IWP(2), mp.DynamicDiffusion(), lambda t: -1.0, structure="kronecker")
    with pytest.raises(TypeError, match="structure='blockdiagonal'"):
        mp.solve(f, Y0, (0.0, 0.6), solver=own)
