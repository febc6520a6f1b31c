"""float32 is a first-class citizen, and x64 is the user's business."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, DYNAMIC_VECTOR


def lotka_volterra(t, y):
    return jnp.stack([y[0] * (1 - y[1]), y[1] * (y[0] - 1)])


SOLVERS = [
    mp.EK0(4),
    mp.EK0(4, diffusion=CONSTANT),
    mp.DiagonalEK1(4, diffusion=DYNAMIC_VECTOR),
    mp.EK1(4, structure="dense"),
    mp.EK1(4),
    mp.EK1(3, linear_solver=mp.GMRES()),
    mp.EK0(3, initialise="runge-kutta"),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: f"{type(s).__name__}-{s.structure}-{s.order}")
@pytest.mark.wide(quick=2)
def test_single_precision_behaves_up_to_order_four(solver, single_precision):
    y0 = jnp.array([1.5, 1.0], jnp.float32)
    options = dict(solver=solver, rtol=1e-4, atol=1e-6, smooth=False)
    sol = mp.solve(lotka_volterra, y0, (0.0, 5.0), **options)
    for leaf in jax.tree.leaves((sol.t, sol.mean, sol.std, sol.diffusion, sol.log_evidence)):
        assert leaf.dtype == jnp.float32 and np.isfinite(leaf).all()
    assert sol.success and int(sol.stats.steps) < 2000
    with jax.enable_x64(True):
        double = mp.solve(lotka_volterra, y0.astype(float), (0.0, 5.0), **options)
        std = np.median(double.filter_std, axis=0)
    np.testing.assert_allclose(sol.mean[-1], double.mean[-1], rtol=1e-3)
    assert abs(int(sol.stats.steps) - int(double.stats.steps)) < 0.2 * int(double.stats.steps)
    # Rounding must not show in the uncertainty: it is that of the discretisation. At single times it depends
    # on where the steps happen to end.
    np.testing.assert_allclose(np.median(sol.filter_std, axis=0), std, rtol=0.2)


def test_single_precision_under_x64_stays_single():
    y0 = jnp.array([1.5, 1.0], jnp.float32)
    for solver in (mp.EK0(2), mp.DiagonalEK1(2), mp.EK1(2)):
        sol = mp.solve(lotka_volterra, y0, (0.0, 1.0), solver=solver)
        for leaf in jax.tree.leaves((sol.t, sol.mean, sol.std, sol.diffusion, sol.log_evidence)):
            assert leaf.dtype == jnp.float32


def test_a_python_float_in_args_does_not_promote():
    y0 = jnp.ones(2, jnp.float32)
    sol = mp.solve(lambda t, y, rate: -rate * y, y0, (0.0, 0.1), args=2.0, save="end")
    assert sol.mean.dtype == jnp.float32


def test_double_precision_input_without_x64_warns(single_precision):
    with pytest.warns(UserWarning, match="float64, but JAX computes in float32.*jax_enable_x64"):
        sol = mp.solve(lotka_volterra, np.array([1.5, 1.0]), (0.0, 1.0), save="end")
    assert sol.mean.dtype == jnp.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mp.solve(lotka_volterra, np.array([1.5, 1.0], np.float32), (0.0, 1.0), save="end")


def test_tolerances_beyond_the_precision_are_raised_with_a_warning(single_precision):
    y0 = jnp.array([1.5, 1.0])
    with pytest.warns(UserWarning, match=r"rtol is below what float32 can deliver; 1\.2e-05"):
        tight = mp.solve(lotka_volterra, y0, (0.0, 1.0), rtol=1e-12, save="end")
    floor = 100 * np.finfo(np.float32).eps
    same = mp.solve(lotka_volterra, y0, (0.0, 1.0), rtol=floor, save="end")
    assert tight.stats.steps == same.stats.steps
    with pytest.warns(UserWarning, match="atol is below what float32 can deliver"):
        mp.solve(lotka_volterra, y0, (0.0, 1.0), rtol=0.0, atol=1e-12, save="end")


def test_importing_changes_no_setting():
    import subprocess
    import sys

    code = (
        "import jax; before = dict(jax.config.values); import millipode; "
        "assert dict(jax.config.values) == before; assert not jax.config.jax_enable_x64"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_high_order_and_tiny_steps_keep_their_variances():
    """ν = 8 with h = 1e-5: nothing underflows, nothing turns indefinite."""
    sol = mp.solve(
        lotka_volterra,
        jnp.array([1.5, 1.0]),
        (0.0, 2e-3),
        solver=mp.EK0(8),
        controller=mp.FixedStep(1e-5),
    )
    assert np.isfinite(sol.std).all() and (sol.std[1:] > 0).all() and np.isfinite(sol.log_evidence)


@pytest.mark.parametrize("kind", [mp.EK0, mp.EK1])
def test_the_highest_order_works(kind):
    y0 = jnp.array([1.5, 1.0])
    tight = mp.solve(lotka_volterra, y0, (0.0, 1.0), solver=mp.EK1(6), rtol=1e-12, atol=1e-12, save="end")
    sol = mp.solve(lotka_volterra, y0, (0.0, 1.0), solver=kind(11), rtol=1e-8, atol=1e-8, save="end")
    np.testing.assert_allclose(sol.mean, tight.mean, atol=1e-8)
    assert (sol.std > 0).all()
