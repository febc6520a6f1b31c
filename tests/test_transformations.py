"""jit, vmap, and derivatives in both modes; one trace per problem."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR, jit, name


def lotka_volterra(t, y, p):
    return jnp.stack([p[0] * y[0] - p[1] * y[0] * y[1], -p[2] * y[1] + p[1] * y[0] * y[1]])


Y0 = jnp.array([2.0, 1.5])
P = jnp.array([1.0, 0.7, 0.8])

ADAPTIVE, FIXED = mp.PIController(), mp.FixedStep(0.125)
GRADIENTS = [
    (mp.EK0(2, diffusion=DYNAMIC), "end", ADAPTIVE),
    (mp.EK0(2, diffusion=CONSTANT_VECTOR), (0.5, 1.0), FIXED),
    (mp.DiagonalEK1(2, diffusion=DYNAMIC_VECTOR), "steps", ADAPTIVE),
    (mp.EK1(2, diffusion=CONSTANT, structure="dense"), (0.3, 1.0), FIXED),
    (mp.EK1(2), (0.3, 1.0), FIXED),
    (mp.EK1(2, linear_solver=mp.GMRES(rtol=1e-9)), "end", FIXED),
]


@pytest.mark.parametrize(
    ("solver", "save", "controller"), GRADIENTS, ids=lambda x: name(getattr(x, "diffusion", x))[:20]
)
@pytest.mark.wide(quick=1)
def test_gradients_agree_with_finite_differences(solver, save, controller):
    """Of mean, standard deviation and evidence, in forward and reverse mode, by args and by y0."""
    save = save if isinstance(save, str) else jnp.array(save)

    def outputs(x):
        sol = mp.solve(
            lotka_volterra,
            x[:2],
            (0.0, 1.0),
            args=x[2:],
            solver=solver,
            save=save,
            smooth=False,  # tests/test_queries.py differentiates the smoother
            controller=controller,
            max_steps=40,
        )
        return jnp.stack([jnp.sum(sol.mean**2), 100 * jnp.sum(sol.std), sol.log_evidence])

    x = jnp.concatenate([Y0, P])
    directional = jit(lambda x, dx: jax.jvp(outputs, (x,), (dx,)))
    reverse = jit(jax.jacrev(outputs))(x)
    forward = jnp.stack([directional(x, e)[1] for e in jnp.eye(5)], axis=1)
    np.testing.assert_allclose(reverse, forward, rtol=1e-6, atol=1e-8)
    assert np.isfinite(forward).all() and (np.abs(forward).max(axis=1) > 1e-3).all()
    step = 2e-6
    differences = jnp.stack(
        [
            (directional(x + step * e, e)[0] - directional(x - step * e, e)[0]) / (2 * step)
            for e in jnp.eye(5)
        ],
        axis=1,
    )
    # Central differences: rounding ∝ ε/step, and truncation ∝ step² with the large third derivatives
    # that the step-size control has.
    scale = np.abs(differences).max(axis=1, keepdims=True)
    np.testing.assert_allclose(forward / scale, differences / scale, atol=2e-5)


def test_closed_over_values_are_differentiated():
    def loss(rate):
        return mp.solve(lambda t, y: -rate * y, jnp.ones(2), (0.0, 1.0), rtol=1e-6, save="end").mean[-1, 0]

    for derivative in (jit(jax.grad(loss)), jax.jacfwd(loss)):
        np.testing.assert_allclose(derivative(2.0), -np.exp(-2), rtol=1e-3)

    def by_diagonal(rate):
        solver = mp.DiagonalEK1(2, jacobian_diagonal=lambda t, y: -rate * jnp.ones_like(y))
        return mp.solve(lambda t, y: -rate * y, jnp.ones(2), (0.0, 1.0), solver=solver, save="end").mean[
            -1, 0
        ]

    np.testing.assert_allclose(jit(jax.jacfwd(by_diagonal))(2.0), -np.exp(-2), rtol=1e-2)


@pytest.mark.parametrize(
    "solver",
    [mp.EK0(2), mp.DiagonalEK1(2, diffusion=DYNAMIC_VECTOR), mp.EK1(2)],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.wide(quick=1)
def test_vmap_is_a_loop_over_solves(solver):
    batch = jnp.stack([P, 1.5 * P, 0.2 * P])
    times = jnp.array([0.4, 1.7, 2.0])

    def one(p):
        return mp.solve(lotka_volterra, Y0, (0.0, 2.0), args=p, solver=solver, save=times)

    together = jax.vmap(one)(batch)
    assert together.mean.shape == (3, 3, 2) and together.success.all()
    for i, p in enumerate(batch):
        alone = one(p)
        np.testing.assert_allclose(together.mean[i], alone.mean, rtol=1e-10)
        np.testing.assert_allclose(together.std[i], alone.std, rtol=1e-7)
        assert together.stats.steps[i] == alone.stats.steps


def test_vmap_over_initial_values():
    def one(y):
        return mp.solve(lotka_volterra, y, (0.0, 1.0), args=P, solver=mp.EK0(2), save="end").mean[-1]

    starts = jnp.stack([Y0, 2 * Y0])
    np.testing.assert_allclose(jax.vmap(one)(starts)[1], one(starts[1]), rtol=1e-10)


@pytest.mark.thorough
def test_vmapped_gradients():
    def loss(p):
        return jnp.sum(mp.solve(lotka_volterra, Y0, (0.0, 1.0), args=p, solver=mp.EK0(2), save="end").mean)

    batch = jnp.stack([P, 1.3 * P])
    together = jit(jax.vmap(jax.grad(loss)))(batch)
    alone = jit(jax.jacfwd(loss))(batch[1])
    np.testing.assert_allclose(together[1], alone, rtol=1e-7)


def test_a_second_call_traces_nothing():
    traces = []

    def f(t, y, a):
        traces.append(1)
        return -a * y

    for save in ("end", "steps", np.array([0.5, 1.0])):
        mp.solve(f, jnp.ones(2), (0.0, 1.0), args=1.0, solver=mp.EK0(2), save=save)
        assert traces
        traces.clear()
        # Other values, the same shapes: y0, span, args, tolerances, times, all of them traced.
        save = 0.9 * save if isinstance(save, np.ndarray) else save
        mp.solve(
            f,
            2 * jnp.ones(2),
            (0.5, 3.0 if isinstance(save, str) else 1.4),
            args=2.0,
            solver=mp.EK0(2),
            save=save if isinstance(save, str) else save + 0.1,
            rtol=1e-5,
        )
        assert not traces


def test_making_the_same_problem_twice_compiles_once():
    traces = []
    monitor = jax.monitoring.register_event_duration_secs_listener
    monitor(lambda event, *_, **__: traces.append(event) if "jaxpr_trace" in event else None)
    for _ in range(2):
        traces.clear()
        for problem in (
            mp.problems.fitzhugh_nagumo(4),
            mp.problems.lorenz96(5),
            mp.problems.van_der_pol(2.0),
            mp.problems.pleiades(),
        ):
            solver = mp.DiagonalEK1(1, jacobian_diagonal=problem.jacobian_diagonal)
            mp.solve(problem.f, problem.y0, (0.0, 0.01), solver=solver, save="end")
    assert not traces


def test_under_jit_a_failure_is_a_status_not_an_exception():
    explode = jit(lambda y: mp.solve(lambda t, y: y**2, y, (0.0, 2.0), save="end"))
    sol = explode(jnp.ones(1))
    assert not sol.success and sol.status in (mp.Status.STEP_TOO_SMALL, mp.Status.NON_FINITE)
    assert float(sol.t[0]) == pytest.approx(1.0, abs=1e-3)
    batch = jax.vmap(lambda y: mp.solve(lambda t, y: y**2, y, (0.0, 2.0), save=[0.5, 2.0]))(
        jnp.array([[1.0], [-1.0]])
    )
    assert batch.success.tolist() == [False, True]
    assert "1 × SUCCESS" in batch.message
    assert np.isfinite(batch.mean[1]).all() and np.isfinite(batch.mean[0, 0]).all()
    assert np.isnan(batch.mean[0, 1]).all()
    with pytest.raises(ValueError, match="progress=True needs concrete values"):
        jit(lambda y: mp.solve(lambda t, y: -y, y, (0.0, 1.0), progress=True))(jnp.ones(1))


def test_integers_and_flags_in_args_may_steer_f():
    def f(t, y, args):
        rate, power, negative = args
        for _ in range(power):
            rate = rate * rate
        return -rate * y if negative else rate * y

    sol = mp.solve(f, jnp.ones(1), (0.0, 1.0), args=(2.0, 1, True), rtol=1e-6, save="end")
    np.testing.assert_allclose(sol.mean[-1], np.exp(-4), rtol=1e-3)


class Network(eqx.Module):
    activation: Callable
    weight: jax.Array

    def __call__(self, t, y):
        return -self.activation(self.weight * y)


def test_modules_and_functions_in_args_work_under_transformations():
    network = Network(jnp.tanh, jnp.array(2.0))

    def by_module(weight):
        f = Network(jnp.tanh, weight)
        return mp.solve(f, jnp.ones(2), (0.0, 0.1), solver=mp.EK0(2), save="end").mean[-1, 0]

    def by_args(weight):
        f = lambda t, y, args: -args[0](args[1] * y)
        return mp.solve(
            f, jnp.ones(2), (0.0, 0.1), args=(jnp.tanh, weight), solver=mp.EK0(2), save="end"
        ).mean[-1, 0]

    plain = mp.solve(network, jnp.ones(2), (0.0, 0.1), solver=mp.EK0(2), save="end").mean[-1, 0]
    for f in (by_module, by_args):
        value, slope = jit(jax.value_and_grad(f))(2.0)
        np.testing.assert_allclose(value, plain, rtol=1e-12)
        np.testing.assert_allclose(slope, (f(2.0 + 1e-5) - f(2.0 - 1e-5)) / 2e-5, rtol=1e-4)


def test_traced_save_times_outside_the_span_are_not_made_up():
    @jit
    def solve(times):
        return mp.solve(lambda t, y: -y, jnp.ones(1), (0.0, 1.0), solver=mp.EK0(2), save=times)

    inside = solve(jnp.array([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(inside.mean[:, 0], np.exp([0.0, -0.5, -1.0]), rtol=1e-2)
    assert np.isnan(solve(jnp.array([0.0, 0.5, 1.5])).mean[2, 0])
    assert np.isnan(solve(jnp.array([-0.5, 0.5, 1.0])).mean[0, 0])


def test_what_cannot_be_hashed_is_named():
    class Unhashable:
        __hash__ = None

        def __call__(self, t, y):
            return -y

    with pytest.raises(TypeError, match=r"must be hashable.*frozen dataclass"):
        mp.solve(Unhashable(), jnp.ones(1), (0.0, 1.0))


def test_second_derivatives_are_refused():
    def value(y):
        return mp.solve(
            lambda t, y: -(y**2), y, (0.0, 1.0), save="end", controller=mp.FixedStep(0.25)
        ).mean.sum()

    y, v = jnp.ones(2), jnp.ones(2)
    first = lambda y: jax.jvp(value, (y,), (v,))[1]
    assert np.isfinite(first(y))
    for second in (
        lambda: jax.jvp(first, (y,), (v,)),
        lambda: jax.grad(first)(y),
        lambda: jax.jvp(jax.grad(value), (y,), (v,)),
    ):
        with pytest.raises(NotImplementedError, match="Second derivatives"):
            second()


def test_constants_of_different_types_have_programs_of_their_own():
    def f(t, y, flag):
        return -y if flag is True else -2 * y

    ends = [
        mp.solve(f, jnp.ones(1), (0.0, 1.0), args=a, save="end", rtol=1e-6).mean.item() for a in (True, 1)
    ]
    np.testing.assert_allclose(ends, np.exp([-1, -2]), rtol=1e-4)
