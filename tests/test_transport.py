"""Members of the error: their covariance against Joseph's recursion, defects against known derivatives."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import millipode as mp
import oracle
from common import ALL, CONSTANT, DYNAMIC, Y0, D, final_carry, name, nonlinear
from millipode.filter import defects, members
from millipode.filter.step import attempt, correct
from millipode.model.steady import informative_share
from millipode.pde.bases import Identity
from millipode.run.outcome import finish
from millipode.xla.ordering import Token

STEPS, MANY = 6, 20_000
GRID = np.linspace(0.0, 0.6, STEPS + 1)
WHITE = mp.Transported(MANY, noise="white")


def derivatives(f, y0, nu):
    """y and its first ν derivatives at t = 0, by nested differentiation."""
    functions = [lambda t, y: y]
    for _ in range(nu):
        g = functions[-1]
        functions.append(lambda t, y, g=g: jax.jvp(g, (t, y), (jnp.ones_like(t), f(t, y)))[1])
    return np.array([np.asarray(g(jnp.zeros(()), y0)) for g in functions])


def covariance_of(members):
    """Of y at the end: the mean of members is zero."""
    last = np.asarray(members)[:, -1].reshape(len(members), -1)
    return last.T @ last / len(last)


def assert_within_noise(have, want):
    """A sample covariance entry of Gaussians has the variance (C_ii C_jj + C_ij²)/S; of signs, less."""
    noise = np.sqrt((np.outer(np.diag(want), np.diag(want)) + want**2) / MANY)
    assert np.abs(have - want).max() > 0
    assert np.all(np.abs(have - want) < 5 * noise)


def solve(f, y0, solver, uncertainty, **options):
    options = {"controller": mp.FixedStep(GRID[1]), "save": "end"} | options
    return mp.solve(f, y0, (0.0, GRID[-1]), solver=solver, uncertainty=uncertainty, **options)


@pytest.mark.parametrize("diffusion", ALL, ids=name)
@pytest.mark.parametrize("kind", [mp.EK0, mp.DiagonalEK1])
@pytest.mark.wide(quick=3)
def test_white_members_have_the_covariance_of_josephs_recursion(kind, diffusion):
    sol = solve(nonlinear, Y0, kind(2, diffusion=diffusion), WHITE)
    textbook = oracle.ode_filter(
        nonlinear,
        jax.jacfwd(nonlinear, argnums=1),
        derivatives(nonlinear, Y0, 2),
        GRID,
        nu=2,
        linearisation="ek0" if kind is mp.EK0 else "diagonal",
        dynamic=isinstance(diffusion, mp.DynamicDiffusion),
        vector=diffusion.vector,
        corrections=2,
    )
    want = textbook.transported[-1][::3, ::3]
    assert_within_noise(covariance_of(sol.members), want)
    np.testing.assert_allclose(np.asarray(sol.std[-1]), np.sqrt(np.diag(want)), rtol=0.03)
    # It is not what the filter says of itself, which knows a part of the Jacobian.
    assert np.abs(np.asarray(sol.filter_std[-1] / sol.std[-1]) - 1).max() > 0.05


@pytest.mark.parametrize("diffusion", [CONSTANT, DYNAMIC], ids=name)
def test_white_members_of_a_dense_ek1_have_the_filters_own_covariance(diffusion):
    sol = solve(nonlinear, Y0, mp.EK1(2, diffusion=diffusion, structure="dense"), WHITE)
    np.testing.assert_allclose(np.asarray(sol.std[-1]), np.asarray(sol.filter_std[-1]), rtol=0.03)


GRID_1D = mp.Grid((6,), boundary="neumann")
LINEAR = GRID_1D.diffusion(0.05)


def reacting(t, y):
    """Diffusion and a reaction that ``LINEAR`` knows nothing of."""
    return 0.05 * GRID_1D.laplacian(y) + 3 * y - y**3 + jnp.sin(t) * jnp.roll(y, 1)


def test_white_members_in_modes():
    y0 = jnp.linspace(0.2, 0.9, 6) ** 2
    sol = solve(reacting, y0, mp.SpectralEK1(2, linear=LINEAR, initialise="taylor"), WHITE)
    stiff = np.asarray(jax.jacfwd(lambda y: 0.05 * GRID_1D.laplacian(y))(y0))
    textbook = oracle.ode_filter(
        reacting,
        jax.jacfwd(reacting, argnums=1),
        derivatives(reacting, y0, 2),
        GRID,
        nu=2,
        linearisation=stiff,
        dynamic=True,
        vector=False,
        corrections=2,
    )
    assert_within_noise(covariance_of(sol.members), textbook.transported[-1][::3, ::3])


def test_white_members_inside_a_step_and_with_a_model_of_space():
    grid = mp.Grid((8,), boundary="periodic")
    space = mp.Matern(grid, 0.5)
    solver = mp.EK0(2, spatial=space, initialise="taylor")
    # Nothing but extrapolation: the first save time lies in the first step.
    sol = mp.solve(
        lambda t, y: -y, jnp.ones(8), (0.0, 1.0), solver=solver, controller=mp.FixedStep(1.0),
        save=np.array([0.5, 1.0]), uncertainty=WHITE, smooth=False,
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(sol.std[0]), np.asarray(sol.filter_std[0]), rtol=0.03)
    shape = np.asarray(sol.members)[:, 0]
    model = np.asarray(space.to_dense())
    want = model / np.mean(np.diag(model)) * float(np.mean(np.asarray(sol.filter_std[0]) ** 2))
    assert_within_noise(shape.T @ shape / MANY, want)


PRIORS = {"IWP": None, "IOUP": mp.IOUP(rate=-0.7), "MaternProcess": mp.MaternProcess(length_scale=3.0)}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("h", [0.01, 0.3])
def test_the_remainder_is_the_integral_of_the_transition(prior, h):
    fitted = (PRIORS[prior] or mp.IWP(3)).with_order(3).fitted(None, jnp.ones(()), Y0)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    columns = [
        [float(row[-1] if row[-1] is not None else 0) for row in fitted.transition(jnp.asarray(s)).phi]
        for s in h * (nodes + 1) / 2
    ]
    want = h / 2 * weights @ np.array(columns)
    np.testing.assert_allclose([float(x) for x in fitted.remainder(jnp.asarray(h))], want, rtol=1e-10)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.wide(quick=2)
def test_the_defect_of_a_polynomial_is_found_and_so_is_its_error(order):
    """If y^(ν+1) is constant, residuals tell it exactly, and what members spread by is the error itself."""
    top = np.array([2.0, -3.0])

    def f(t, y):
        return top * t**order + 1

    # With equal steps and a constant diffusion, the share of a residual that is new is known exactly.
    solver, t1 = mp.EK0(order, diffusion=CONSTANT), 0.87
    options = {"controller": mp.FixedStep(t1 / 40), "smooth": False, "uncertainty": mp.Transported(4)}
    options["save"] = "end"
    _, carry = final_carry(f, jnp.zeros(2), (0.0, t1), solver=solver, **options)
    defect = carry.state.members.defect
    derivative = top * float(np.prod(np.arange(1, order + 1)))
    np.testing.assert_allclose(np.asarray(defect.mean / defect.unit), derivative, rtol=1e-4)
    sol = mp.solve(f, jnp.zeros(2), (0.0, t1), solver=solver, **options)
    error = np.abs(np.asarray(sol.mean[-1]) - (top * t1 ** (order + 1) / (order + 1) + t1))
    np.testing.assert_allclose(np.asarray(sol.std[-1]), error, rtol=1e-3, atol=1e-10)


def test_the_spread_is_the_error_of_a_smooth_solution():
    """A nonlinear problem in a long run: right within a third, where the filter is wrong by a factor."""
    problem = mp.problems.fitzhugh_nagumo(12)
    options = {"solver": mp.SpectralEK1(2, linear=problem.linear), "save": "end", "smooth": False}
    exact = mp.solve(
        problem.f, problem.y0, (0.0, 5.0), solver=mp.SpectralEK1(5, linear=problem.linear), save="end",
        rtol=1e-11, atol=1e-12,
    )  # fmt: skip
    sol = mp.solve(
        problem.f, problem.y0, (0.0, 5.0), rtol=1e-5, atol=1e-7, uncertainty=mp.Transported(8), **options
    )
    error = np.asarray(sol.mean - exact.mean)
    chi2, own = (float(np.mean((error / np.asarray(s)) ** 2)) for s in (sol.std, sol.filter_std))
    assert 0.4 < chi2 < 2.5 and own > 2


SOLVERS = {
    "EK0": mp.EK0(2),
    "EK0-vector": mp.EK0(2, diffusion=mp.DynamicDiffusion(vector=True)),
    "EK0-dense": mp.EK0(2, structure="dense"),
    "DiagonalEK1": mp.DiagonalEK1(2),
    "EK1": mp.EK1(2),
    "EK1-dense": mp.EK1(2, structure="dense"),
    "IOUP": mp.EK0(2, prior=mp.IOUP(rate=-1.0)),
    "IOUP-vector": mp.EK0(2, prior=mp.IOUP(rate=jnp.array([-1.0, -0.5, -2.0]))),
    "Matern": mp.EK0(2, prior=mp.MaternProcess(length_scale=2.0)),
}


WITH_NOISE = [(solver, "defect") for solver in SOLVERS] + [("EK0", "white"), ("IOUP-vector", "white")]


@pytest.mark.parametrize(("solver", "noise"), WITH_NOISE)
@pytest.mark.wide(quick=2)
def test_every_solver_and_way_of_saving(solver, noise):
    uncertainty = mp.Transported(8, noise=noise)
    options = {"solver": SOLVERS[solver], "rtol": 1e-4, "atol": 1e-6, "uncertainty": uncertainty}
    plain = mp.solve(nonlinear, Y0, (0.0, 1.0), solver=SOLVERS[solver], rtol=1e-4, atol=1e-6)
    steps = mp.solve(nonlinear, Y0, (0.0, 1.0), **options)
    end = mp.solve(nonlinear, Y0, (0.0, 1.0), save="end", **options)
    times = mp.solve(nonlinear, Y0, (0.0, 1.0), save=np.array([0.3, 1.0]), **options)
    # The mean and the filter's own uncertainty stay what they are.
    np.testing.assert_allclose(np.asarray(steps.mean), np.asarray(plain.mean), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(np.asarray(steps.filter_std), np.asarray(plain.filter_std), rtol=1e-7)
    assert steps.members.shape == (8, len(steps.t), D) and steps.members.dtype == Y0.dtype
    np.testing.assert_allclose(
        np.asarray(steps.std), np.sqrt(np.mean(np.asarray(steps.members) ** 2, axis=0)), rtol=1e-12
    )
    for other in (end, times):
        np.testing.assert_allclose(np.asarray(other.std[-1]), np.asarray(steps.std[-1]), rtol=1e-4)
    # Within a step: a prediction, with more error than its correction leaves at the end.
    assert 0.05 < np.linalg.norm(times.std[0]) / np.linalg.norm(steps(0.3).std) < 10
    assert np.all(np.asarray(steps.std[1:]) > 0) and np.all(np.asarray(steps.std[0]) < 1e-12)


@pytest.mark.parametrize("uncertainty", [None, mp.Transported(4), mp.Transported(4, noise="white")])
@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "EK0-vector"])
@pytest.mark.wide(quick=2)
def test_small_problems_are_moved_all_at_once_to_the_same_place(solver, uncertainty, monkeypatch):
    def std():
        options = {"rtol": 1e-4, "atol": 1e-6, "save": "end", "uncertainty": uncertainty}
        return mp.solve(lambda t, y: nonlinear(t, y), Y0, (0.0, 1.0), solver=SOLVERS[solver], **options).std

    at_once = std()
    monkeypatch.setattr(members, "SMALL", 0)
    np.testing.assert_allclose(np.asarray(at_once), np.asarray(std()), rtol=1e-9)


def test_coupled_modes_and_chunks():
    problem = mp.problems.gray_scott(8)
    linear = problem.grid.diffusion((0.1, 0.05), reaction=np.array([[-1.0, 0.5], [0.2, -0.3]]))
    stds = []
    for chunk in (None, 1, 2, 4):
        sol = mp.solve(
            problem.f, problem.y0, (0.0, 2.0), solver=mp.SpectralEK1(2, linear=linear), save="end",
            uncertainty=mp.Transported(4, chunk=chunk),
        )  # fmt: skip
        stds.append(np.asarray(sol.std))
        assert sol.std.shape == sol.mean.shape and np.all(sol.std > 0)
    for std in stds[1:]:
        np.testing.assert_allclose(std, stds[0], rtol=1e-3)


def test_a_key_says_all():
    def std(**options):
        sol = solve(nonlinear, Y0, mp.EK0(2), mp.Transported(4, noise="white", **options))
        return np.asarray(sol.std)

    default, again, legacy = std(), std(key=jax.random.key(0)), std(key=jax.random.PRNGKey(0))
    np.testing.assert_array_equal(default, again)
    np.testing.assert_array_equal(default, legacy)
    assert np.all(default != std(key=jax.random.key(1)))


def test_samples_are_the_mean_plus_members():
    sol = mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(2), uncertainty=mp.Transported(8))
    samples = np.asarray(sol.sample(jax.random.key(3), 8))
    want = np.asarray(sol.mean + sol.members)
    np.testing.assert_allclose(np.sort(samples, axis=0), np.sort(want, axis=0), rtol=1e-12)
    assert sol.sample(jax.random.key(3), 2, at=np.array([0.2, 0.1, 0.7])).shape == (2, 3, D)
    with pytest.raises(ValueError, match="has 8 ensemble members"):
        sol.sample(jax.random.key(3), 9)
    with pytest.raises(ValueError, match="of y, not of its derivatives"):
        sol.sample(jax.random.key(3), 2, derivative=1)
    with pytest.raises(ValueError, match="has no members"):
        _ = mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(2)).members


def test_between_steps_members_are_interpolated():
    sol = mp.solve(nonlinear, Y0, (0.0, 1.0), solver=mp.EK0(2), uncertainty=mp.Transported(8))
    t = np.asarray(sol.t)
    np.testing.assert_allclose(np.asarray(sol(t[3]).std), np.asarray(sol.std[3]), rtol=1e-12)
    half = np.asarray(sol.members[:, 3] + sol.members[:, 4]) / 2
    have = np.asarray(sol((t[3] + t[4]) / 2).std)
    np.testing.assert_allclose(have, np.sqrt(np.mean(half**2, axis=0)), rtol=1e-6)


def test_pytrees_float32_and_backwards_in_time(single_precision):
    def f(t, y):
        return {"a": -y["b"] * y["a"], "b": jnp.sum(y["a"]) + 0 * y["b"]}

    y0 = {"a": jnp.ones(2, jnp.float32), "b": jnp.zeros((), jnp.float32)}
    sol = mp.solve(f, y0, (0.0, -2.0), solver=mp.EK0(2), uncertainty=mp.Transported(4))
    assert sol.std["a"].shape == sol.mean["a"].shape and sol.std["b"].dtype == jnp.float32
    assert sol.members["b"].shape == (4, len(sol.t)) and bool(jnp.all(sol.std["a"][-1] > 0))


@pytest.mark.thorough
def test_jit_vmap_and_gradients():
    uncertainty = mp.Transported(4)

    def std(scale, save="end"):
        sol = mp.solve(
            lambda t, y, a: a * nonlinear(t, y), Y0, (0.0, 0.5), args=scale, solver=mp.EK0(2), save=save,
            controller=mp.FixedStep(0.1), uncertainty=uncertainty,
        )  # fmt: skip
        return sol.std[-1]

    want = np.asarray(std(1.3))
    np.testing.assert_allclose(np.asarray(jax.jit(std)(1.3)), want, rtol=1e-4)
    batch = jax.vmap(std)(jnp.array([1.0, 1.3]))
    np.testing.assert_allclose(np.asarray(batch[1]), want, rtol=1e-4)
    keys = jax.random.split(jax.random.key(0), 3)

    def with_key(key):
        uncertainty = mp.Transported(4, key, noise="white")
        return mp.solve(nonlinear, Y0, (0.0, 0.5), solver=mp.EK0(2), save="end", uncertainty=uncertainty).std

    stds = jax.vmap(with_key)(keys)
    assert len(np.unique(np.asarray(stds)[:, 0, 0])) == 3
    forward = jax.jvp(lambda a: jnp.log(std(a).sum()), (1.3,), (1.0,))[1]
    reverse = jax.grad(lambda a: jnp.log(std(a).sum()))(1.3)
    quotient = (np.log(np.asarray(std(1.31)).sum()) - np.log(np.asarray(std(1.29)).sum())) / 0.02
    np.testing.assert_allclose([float(forward), float(reverse)], quotient, rtol=2e-2)


def test_a_rejected_step_leaves_members_alone():
    options = {"save": "end", "smooth": False, "uncertainty": mp.Transported(4)}
    setup, carry = final_carry(nonlinear, Y0, (0.0, 0.5), solver=mp.EK0(2), **options)
    state = carry.state
    for accept in (jnp.asarray(False), jnp.asarray(True)):
        a = attempt(setup.model, state, setup.controller, state.t + 0.1, jnp.asarray(0.1), False)
        a = a._replace(accept=accept)
        a = a._replace(drive=defects.drive(setup.model, state, a))
        taken = correct(setup.model, state, a, Token(jnp.zeros(())))
        after = members.advance(setup.model, state, a, taken.gains, Token(jnp.zeros(())), reverse=False)
        same = [
            bool(jnp.all(x == y)) for x, y in zip(*map(jax.tree.leaves, (after, state.members)), strict=True)
        ]
        assert all(same) is not bool(accept)


def test_members_that_leave_the_numbers_say_so():
    """No problem is known any more on which they do, so they are sent there by hand."""
    options = {"save": "end", "smooth": False, "uncertainty": mp.Transported(4)}
    setup, carry = final_carry(nonlinear, Y0, (0.0, 0.5), solver=mp.EK0(2), **options)
    assert finish(setup, carry).status == mp.Status.SUCCESS
    lost = jax.tree.map(lambda x: jnp.inf * x, carry.state.members.chunks)
    state = carry.state._replace(members=carry.state.members._replace(chunks=lost))
    outcome = finish(setup, carry._replace(state=state))
    assert outcome.status == mp.Status.MEMBERS_NON_FINITE
    assert "uncertainty" in mp.Status.MEMBERS_NON_FINITE.explanation


@pytest.mark.parametrize("solver", [mp.EK0(3), mp.DiagonalEK1(3)], ids=["EK0", "DiagonalEK1"])
@pytest.mark.parametrize("small", [2**10, 0], ids=["small", "large"])
def test_errors_that_contradict_the_residuals_are_doubtful_and_bounded(solver, small, monkeypatch):
    """Errors are multiplied by hand before the last step."""
    monkeypatch.setattr(members, "SMALL", small)
    setup, carry = final_carry(nonlinear, Y0, (0.0, 0.5), solver=solver, save="end", rtol=1e-6, atol=1e-6)
    assert not finish(setup, carry).stats.doubtful

    def after_a_step(factor):
        chunks = jax.tree.map(lambda x: factor * x, carry.state.members.chunks)
        state = carry.state._replace(members=carry.state.members._replace(chunks=chunks))
        h = jnp.asarray(0.01)
        a = attempt(setup.model, state, mp.FixedStep(0.01), state.t + h, h, False)
        a = a._replace(drive=defects.drive(setup.model, state, a))
        token = Token(jnp.zeros(()))
        taken = correct(setup.model, state, a, token)
        ensemble = members.advance(setup.model, state, a, taken.gains, token, False)
        size = float(jnp.max(jnp.abs(ensemble.of_y)))
        return finish(
            setup, carry._replace(state=taken.state._replace(members=ensemble))
        ).stats.doubtful, size

    doubtful, size = after_a_step(1.0)
    assert not doubtful
    doubtful, larger = after_a_step(1e9)
    assert doubtful and larger < 1e6 * size


@pytest.mark.parametrize("uncertainty", [None, mp.Transported(4)], ids=["default", "members"])
def test_what_is_left_of_a_chaotic_solution_is_known_in_size(uncertainty):
    """Two runs with other tolerances differ by the size of the attractor; a linear error would be 10²⁰."""
    problem = mp.problems.lorenz96(40)
    options = dict(save="end", uncertainty=uncertainty, smooth=False)
    with pytest.warns(UserWarning, match="outgrown their linear model"):
        sol, other = (
            mp.solve(problem.f, problem.y0, (0.0, 30.0), rtol=rtol, **options) for rtol in (1e-3, 1e-4)
        )
    assert sol.success and sol.stats.doubtful
    error, std = (float(np.sqrt(np.mean(np.square(x)))) for x in (sol.mean - other.mean, sol.std))
    assert 1 < error < 10 and error / 10 < std < 10 * error


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"members": 1}, ValueError, "at least 2"),
        ({"members": 2.0}, TypeError, "integer"),
        ({"members": True}, TypeError, "integer"),
        ({"key": 0}, TypeError, "jax.random.key"),
        ({"key": jnp.zeros(2)}, TypeError, "jax.random.key"),
        ({"key": jax.random.split(jax.random.key(0))}, TypeError, "one key"),
        ({"noise": "pink"}, ValueError, "'defect' or 'white'"),
        ({"chunk": 3}, ValueError, "divide members"),
        ({"chunk": 0}, ValueError, "at least 1"),
        ({"sharding": "all"}, TypeError, "Sharding"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        mp.Transported(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"uncertainty": 16}, TypeError, "mp.Transported"),
        ({"smooth": "recompute"}, ValueError, "smooth=True"),
        ({"uncertainty": mp.Transported(10**12)}, ValueError, "fewer members"),
        ({"uncertainty": mp.Transported(10**9), "save": np.linspace(0, 1, 1000)}, ValueError, "ewer"),
    ],
)
def test_bad_combinations(options, error, message):
    with pytest.raises(error, match=message):
        mp.solve(nonlinear, Y0, (0.0, 1.0), **({"uncertainty": mp.Transported()} | options))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, millipode as mp
mesh = jax.sharding.Mesh(jax.devices(), ("members",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("members"))
problem = mp.problems.lorenz96(64)
def std(**options):
    return mp.solve(problem.f, problem.y0, (0.0, 0.5), solver=mp.EK0(2), save="end",
                    uncertainty=mp.Transported(8, **options))
sol = std(sharding=sharding)
assert len(sol.posterior.members.sharding.device_set) == 2, sol.posterior.members.sharding
np.testing.assert_allclose(sol.std, std().std, rtol=1e-3)
"""


@pytest.mark.thorough
def test_members_can_be_spread_over_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=os.environ | flags, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_basis_is_left_where_there_is_one():
    problem = mp.problems.heat(8)
    sol = mp.solve(
        problem.f, problem.y0, (0.0, 0.01), solver=mp.SpectralEK1(2, linear=problem.linear),
        uncertainty=mp.Transported(4),
    )  # fmt: skip
    assert not isinstance(sol.basis, Identity)
    assert sol.members.shape == (4, *sol.mean.shape) and sol.sample(jax.random.key(0), 3).shape[0] == 3
    np.testing.assert_allclose(
        np.asarray(sol.std), np.sqrt(np.mean(np.asarray(sol.members) ** 2, axis=0)), rtol=1e-5, atol=1e-12
    )


@pytest.mark.parametrize("noise", ["defect", "white"])
@pytest.mark.wide(quick=1)
def test_the_unit_of_time_does_not_matter(noise):
    """High derivatives of fast problems are beyond single precision, but members are not."""
    unit, solver, uncertainty = 1e-9, mp.EK0(7), mp.Transported(4, noise=noise)
    options = {"solver": solver, "rtol": 1e-8, "atol": 1e-10, "save": "end", "uncertainty": uncertainty}
    slow = mp.solve(nonlinear, Y0, (0.0, 1.0), **options)
    fast = mp.solve(lambda t, y: nonlinear(t / unit, y) / unit, Y0, (0.0, unit), **options)
    np.testing.assert_allclose(np.asarray(fast.std), np.asarray(slow.std), rtol=1e-2)
    assert np.all(np.asarray(slow.std) > 0)


def decay_chain(t, y):
    """Problem C2 of DETEST: y_i' = (i−1) y_{i−1} − i y_i, which stability limits at high orders."""
    rates = jnp.arange(1.0, 10.0)
    return jnp.concatenate([-y[:1], rates[:-1] * y[:-2] - rates[1:] * y[1:-1], rates[-1:] * y[-2:-1]])


@pytest.mark.parametrize("uncertainty", [None, mp.Transported(8)], ids=["default", "members"])
def test_errors_do_not_explode_at_the_limit_of_stability(uncertainty):
    start, span = jnp.eye(10)[0], (0.0, 20.0)
    want = solve_ivp(decay_chain, span, start, "DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    options = dict(solver=mp.EK0(5), rtol=1e-7, atol=1e-7, save="end", uncertainty=uncertainty)
    sol = mp.solve(decay_chain, start, span, **options)
    assert sol.stats.stiff
    error, std = (float(np.sqrt(np.mean(np.square(x)))) for x in (sol.mean[-1] - want, sol.std[-1]))
    assert error < 1e-8
    # Without ``defects.calmed``, the standard deviation is larger than 1.
    assert 1e-10 < std < 1e-7


def test_members_are_not_allowed_more_by_steps_that_grow():
    """Problem C3 of DETEST, the heat equation, which ends at rest: steps grow until stability stops them."""

    def heat(t, y):
        padded = jnp.pad(y, 1)
        return padded[2:] - 2 * y + padded[:-2]

    options = dict(solver=mp.EK0(3), rtol=1e-4, atol=1e-4, save="end", uncertainty=mp.Transported(16))
    sol = mp.solve(heat, jnp.eye(10)[0], (0.0, 20.0), **options)
    # Where residuals of steps that grew counted for more than they were, this was a hundred tolerances.
    assert 1e-9 < float(jnp.max(sol.std)) < 1e-4


def exact_shares(order, steps):
    """The share of every residual that is new, by an EK0 in plain derivatives, and NumPy."""
    covariance, error, shares = np.zeros((order + 1, order + 1)), np.zeros(order + 1), []
    for h in steps:
        phi, sigma = oracle.transition(order, h)
        v = np.array([h ** (order + 1 - i) / math.factorial(order + 1 - i) for i in range(order + 1)])
        predicted, missed = phi @ covariance @ phi.T + sigma, phi @ error + v
        gain = predicted[:, 1] / predicted[1, 1]
        covariance, error = predicted - np.outer(gain, predicted[1]), missed - gain * missed[1]
        shares.append(v[1] / missed[1])
    return np.array(shares)


def shares_of(order, steps, kind=np.float64):
    shares, usual = [], jnp.asarray(steps[0], kind)
    for i, h in enumerate(steps):
        share, usual = informative_share(order, jnp.asarray(i), jnp.asarray(h, kind), usual)
        shares.append(float(share))
    assert np.isfinite(usual)
    return np.array(shares)


@pytest.mark.parametrize(("order", "share"), [(1, 1.0), (2, 0.634), (3, 0.249), (4, 0.0725), (5, 0.0168)])
def test_the_share_of_a_residual_that_is_new_is_that_of_a_textbook_filter(order, share):
    equal = np.full(60, 0.1)
    np.testing.assert_allclose(shares_of(order, equal), exact_shares(order, equal), rtol=0.01)
    np.testing.assert_allclose(shares_of(order, equal)[-1], share, rtol=0.01)
    # Steps as controllers choose them: they follow a smooth solution, and double or halve now and then.
    changes = (
        0.1 * np.sin(0.3 * np.arange(80)) + np.log(2) * (np.arange(80) == 30) - 0.7 * (np.arange(80) == 55)
    )
    varied = 0.1 * np.exp(np.cumsum(changes))
    off = np.log(shares_of(order, varied) / exact_shares(order, varied))
    assert np.abs(off).max() < 0.35 and np.median(np.abs(off)) < 0.05


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("order", [1, 4, 8, 11])
def test_the_share_is_a_number_after_any_change_of_the_step(order, kind):
    shares = shares_of(order, [1.0, 1.0, 2.0, 1e-6, 1e-6, 1.0, 1e-12, 1e-12, 1e12], kind)
    assert (shares >= 0).all() and (shares <= 1).all()
