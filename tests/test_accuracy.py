"""Against SciPy at tight tolerance, and convergence orders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import millipode as mp
from common import CONSTANT_VECTOR, DYNAMIC_VECTOR, rmse


def reference(problem, t1):
    f = jax.jit(problem.f)
    shape = problem.y0.shape
    solution = solve_ivp(
        lambda t, y: np.asarray(f(t, y.reshape(shape))).ravel(),
        (0.0, t1),
        np.asarray(problem.y0).ravel(),
        method="DOP853",
        rtol=1e-13,
        atol=1e-13,
    )
    return solution.y[:, -1].reshape(shape)


@pytest.fixture(scope="module")
def pleiades_reference():
    return reference(mp.problems.pleiades(), 3.0)


@pytest.mark.parametrize(
    ("solver", "bound"),
    [
        (mp.EK0(5), 1e-5),
        (mp.EK0(5, diffusion=CONSTANT_VECTOR), 1e-5),
        (mp.DiagonalEK1(5, diffusion=DYNAMIC_VECTOR), 1e-5),
        (mp.EK1(5), 1e-4),  # less accurate than explicit solvers, but more so than a BDF method
    ],
    ids=["EK0", "EK0-constant-vector", "DiagonalEK1", "EK1"],
)
@pytest.mark.wide(quick=2)
def test_pleiades(solver, bound, pleiades_reference):
    problem = mp.problems.pleiades()
    tolerance = 1e-6 if isinstance(solver, mp.EK1) else 1e-7
    sol = mp.solve(
        problem.f,
        problem.y0,
        problem.t_span,
        solver=solver,
        rtol=tolerance,
        atol=tolerance,
        save="end",
    )
    assert rmse(sol.mean[-1], pleiades_reference) < bound


@pytest.mark.parametrize("solver", [mp.EK0(4), mp.DiagonalEK1(3), mp.EK1(3)], ids=lambda s: type(s).__name__)
def test_lorenz96_before_chaos(solver):
    problem = mp.problems.lorenz96(20)
    want = reference(problem, 0.5)
    sol = mp.solve(problem.f, problem.y0, (0.0, 0.5), solver=solver, rtol=1e-6, atol=1e-6, save="end")
    # y = F is unstable with rate 8: relative errors of 1e-6 in y = 8 grow by e⁴ = 55.
    assert rmse(sol.mean[-1], want) < 4e-4


@pytest.mark.parametrize(
    ("mu", "solver"),
    [
        (1.0, mp.EK1(4)),
        (1e3, mp.EK0(2)),
        (1e3, mp.DiagonalEK1(4)),
        (1e6, mp.EK1(4)),
    ],
    ids=lambda x: x if isinstance(x, float) else type(x).__name__,
)
@pytest.mark.wide(quick=2)
@pytest.mark.filterwarnings("ignore:Stability rather than accuracy")
def test_van_der_pol_from_mild_to_famously_stiff(mu, solver):
    problem = mp.problems.van_der_pol(mu)
    want = solve_ivp(
        lambda t, y: [y[1], mu * ((1 - y[0] ** 2) * y[1] - y[0])],
        problem.t_span,
        [2.0, 0.0],
        method="Radau",
        rtol=1e-9,
        atol=1e-11,
    ).y[:, -1]
    sol = mp.solve(problem.f, problem.y0, problem.t_span, solver=solver, rtol=1e-5, atol=1e-7, save="end")
    # At the end y₁ moves on the slow manifold; an error in the time of the last jump is all there is.
    np.testing.assert_allclose(sol.mean[-1, 0], want[0], rtol=1e-3)


@pytest.mark.filterwarnings("ignore:Stability rather than accuracy")
@pytest.mark.parametrize("nu", [4, 5])
def test_jacobian_information_saves_steps_on_van_der_pol(nu):
    def f(t, y, mu):  # with an argument, so that each solver compiles once
        return jnp.stack([y[1], mu * ((1 - y[0] ** 2) * y[1] - y[0])])

    for mu in (1.0, 10.0, 100.0):
        y0, t_span = mp.problems.van_der_pol(mu).y0, mp.problems.van_der_pol(mu).t_span
        ek1, diagonal, ek0 = (
            int(mp.solve(f, y0, t_span, args=jnp.asarray(mu), solver=s, save="end").stats.steps)
            for s in (mp.EK1(nu), mp.DiagonalEK1(nu), mp.EK0(nu))
        )
        # At μ = 1 nothing is stiff, and the constants of the error estimates decide.
        assert ek1 <= diagonal <= (1.05 if mu == 1 else 1) * ek0
    assert ek1 < 0.9 * diagonal < 0.81 * ek0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: mp.EK0(2),
        lambda p: mp.DiagonalEK1(2, jacobian_diagonal=p.jacobian_diagonal, diffusion=DYNAMIC_VECTOR),
        lambda p: mp.DiagonalEK1(2, jacobian_diagonal=p.stencil),
    ],
    ids=["EK0", "DiagonalEK1", "DiagonalEK1-stencil"],
)
@pytest.mark.thorough
def test_fitzhugh_nagumo(make):
    problem = mp.problems.fitzhugh_nagumo(16)
    want = reference(problem, 1.0)
    sol = mp.solve(problem.f, problem.y0, (0.0, 1.0), solver=make(problem), rtol=1e-6, atol=1e-6, save="end")
    assert rmse(sol.mean[-1], want) < 1e-5


def predator_prey(t, y):
    return jnp.stack([y[0] * (1 - y[1]), y[1] * (y[0] - 1)])


@pytest.mark.parametrize("kind", [mp.EK0, mp.DiagonalEK1, mp.EK1])
@pytest.mark.parametrize("nu", [1, 2, 3, 4])
@pytest.mark.wide(quick=4)
def test_convergence_order_is_one_more_than_guaranteed(kind, nu):
    # Theory guarantees ν for the mean; on this smooth problem all three filters show ν+1.
    problem = mp.problems.Problem(predator_prey, jnp.array([1.5, 1.0]), (0.0, 1.0))
    want = reference(problem, 1.0)
    steps = np.array([16, 32, 64, 128])
    errors = [
        rmse(
            mp.solve(
                predator_prey,
                problem.y0,
                problem.t_span,
                solver=kind(nu, corrections=1),  # tests/test_corrections.py has two
                controller=mp.FixedStep(1 / n),
                save="end",
            ).mean[-1],
            want,
        )
        for n in steps
    ]
    slope = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert abs(slope - (nu + 1)) < 0.3, (slope, errors)
