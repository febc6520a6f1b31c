"""Every filter, structure and diffusion against the textbook formulas in NumPy."""

import jax
import numpy as np
import pytest

import millipode as mp
from common import FILTERS, Y0, jacobian, name, nonlinear
from oracle import ode_filter, unknown_major

pytestmark = pytest.mark.usefixtures("own_std")

NU = 2
JACOBIAN = jacobian(nonlinear)
LINEARISATION = {"EK0": "ek0", "DiagonalEK1": "diagonal", "EK1": "ek1"}


@pytest.mark.parametrize("corrections", [2, 1])
@pytest.mark.parametrize(("kind", "structure", "diffusion"), FILTERS, ids=name)
@pytest.mark.wide(quick=16)
def test_filter_equals_the_textbook_on_an_adaptive_grid(kind, structure, diffusion, corrections):
    options = dict(diffusion=diffusion, structure=structure, corrections=corrections)
    solver = kind(NU, initialise="taylor", **options)
    options = dict(solver=solver, rtol=1e-2, atol=1e-3)
    sol = mp.solve(nonlinear, Y0, (0.2, 2.0), smooth=False, **options)
    state = np.stack(sol.posterior.mean, axis=1)
    assert 10 < int(sol.stats.steps) < 80
    d = Y0.size
    y1 = nonlinear(0.2, Y0)
    time_derivative = (nonlinear(0.2 + 1e-6, Y0) - nonlinear(0.2 - 1e-6, Y0)) / 2e-6
    exact = np.stack([Y0, y1, JACOBIAN(0.2, Y0) @ y1 + time_derivative])
    np.testing.assert_allclose(state[0], exact, rtol=1e-7)

    want = ode_filter(
        nonlinear,
        JACOBIAN,
        state[0],
        np.asarray(sol.t),
        nu=NU,
        linearisation=LINEARISATION[kind.__name__],
        dynamic=isinstance(diffusion, mp.DynamicDiffusion),
        vector=diffusion.vector,
        corrections=corrections,
        tolerances=(1e-2, 1e-3) if kind is mp.EK1 else None,
    )
    # The oracle forms covariances whose entries span h^5; it is good to about 1e-10.
    np.testing.assert_allclose(sol.mean, want.mean[:, 0], rtol=1e-9)
    np.testing.assert_allclose(sol.std, want.std, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(state, want.mean, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(sol.log_evidence, want.log_evidence, rtol=1e-9)

    dynamic = isinstance(diffusion, mp.DynamicDiffusion)
    gammas = want.diffusion if diffusion.vector else want.diffusion[:, 0]
    have = sol.diffusion[1:] if dynamic else np.broadcast_to(sol.diffusion, gammas.shape)
    np.testing.assert_allclose(have, gammas, rtol=1e-9)

    scale = np.ones(d) if dynamic else np.sqrt(np.broadcast_to(sol.diffusion, (d,)))
    root = np.kron(np.diag(scale), np.eye(NU + 1))
    last = jax.tree.map(lambda x: x[-1], sol.posterior.covariance)
    covariance = unknown_major(np.asarray(last.to_dense(Y0)), NU + 1, d)
    # Entry by entry, relative to the two standard deviations. EK0 knows y' exactly, which a factor
    # can only say up to rounding of its largest entries: the second and third terms.
    size = np.sqrt(np.diag(want.covariance[-1]))
    rounding = 1e-15 * size.max()
    allowed = 1e-9 * np.outer(size, size) + rounding * np.add.outer(size, size) + rounding**2
    assert (np.abs(root @ covariance @ root - want.covariance[-1]) <= allowed).all()
