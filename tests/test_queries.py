"""What can be asked of a solution, in every setting, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, DYNAMIC, DYNAMIC_VECTOR, jit

pytestmark = pytest.mark.usefixtures("own_std")

KEY = jax.random.key(0)
SOLVER = mp.EK0(2)


def decay(t, y):
    return -y * jnp.array([1.0, 2.0])


@pytest.fixture(scope="module")
def steps():
    return mp.solve(decay, jnp.ones(2), (0.0, 1.0), solver=SOLVER)


@pytest.fixture(scope="module")
def filtered():
    return mp.solve(decay, jnp.ones(2), (0.0, 1.0), solver=SOLVER, smooth=False)


@pytest.fixture(scope="module")
def chain():
    return mp.solve(decay, jnp.ones(2), (0.0, 1.0), solver=SOLVER, save=[0.25, 0.5, 1.0])


@pytest.fixture(scope="module")
def end():
    return mp.solve(decay, jnp.ones(2), (0.0, 1.0), solver=SOLVER, save="end")


@pytest.mark.wide(quick=1)
def test_shapes(steps, chain):
    at_one, at_many = steps(0.3), steps([[0.1, 0.2, 0.9]])
    assert at_one.mean.shape == (2,) and at_one.t.shape == () and at_many.std.shape == (1, 3, 2)
    np.testing.assert_allclose(at_one.mean, np.exp([-0.3, -0.6]), rtol=1e-3)
    np.testing.assert_allclose(steps(0.3, derivative=1).mean, -np.array([1, 2]) * at_one.mean, rtol=1e-2)
    assert steps.sample(KEY).shape == (1, steps.t.size, 2)
    assert steps.sample(KEY, num=4, at=[[0.9], [0.1]]).shape == (4, 2, 1, 2)
    assert chain.sample(KEY, num=3).shape == (3, 3, 2) and chain.sample(KEY, at=0.5).shape == (1, 2)
    np.testing.assert_array_equal(chain(0.5).mean, chain.mean[1])
    np.testing.assert_array_equal(chain([1.0, 0.25], derivative=2).std, chain.derivative(2).std[::-2])


def test_samples_keep_to_the_order_that_was_asked_for(steps):
    there = steps.sample(KEY, num=2000, at=[0.1, 0.9])
    back = steps.sample(KEY, num=2000, at=[0.9, 0.1])
    np.testing.assert_array_equal(there, back[:, ::-1])
    # Twice the same time is twice the same number, as it must be for a joint sample.
    twice = steps.sample(KEY, num=3, at=[0.4, 0.4])
    np.testing.assert_allclose(twice[:, 0], twice[:, 1], rtol=1e-14)
    old = steps.sample(jax.random.PRNGKey(0), num=2)
    np.testing.assert_array_equal(old, steps.sample(KEY, num=2))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda steps, *_: steps(1.5), "outside of the solved span, 0.0 to 1.0"),
        (lambda steps, *_: steps([0.5, -0.1]), "-0.1 is outside"),
        (lambda steps, *_: steps([]), "empty"),
        (lambda steps, *_: steps(0.5, derivative=3), "y has 2 derivatives.*order 3 or higher"),
        (lambda steps, *_: steps(0.5, derivative=-1), "from 0 to 2"),
        (lambda steps, *_: steps.derivative(7), "order 7 or higher"),
        (lambda steps, *_: steps.sample(KEY, num=0), "num must be at least 1"),
        (lambda steps, *_: steps.sample(KEY, at=[]), "empty"),
        (lambda steps, *_: steps.sample(KEY, at=[2.0]), "outside"),
        (lambda _, filtered, *__: filtered.sample(KEY), "smooth=True"),
        (lambda _, __, chain, ___: chain(0.3), "0.3 was not saved.*save='steps'"),
        (lambda _, __, chain, ___: chain.sample(KEY, at=[0.3]), "0.3 was not saved.*save='steps'"),
        (lambda *a: a[3](0.5), "0.5 was not saved.*save='steps'"),
        (lambda *a: a[3].derivative(1), "save='steps', or save=times with smooth=True"),
        (lambda *a: a[3].sample(KEY), "smooth=True.*save='steps' or save=times"),
    ],
)
def test_what_cannot_be_answered_says_what_to_do(ask, message, steps, filtered, chain, end):
    with pytest.raises(ValueError, match=message):
        ask(steps, filtered, chain, end)


def test_wrong_types(steps):
    with pytest.raises(TypeError, match="jax.random.key"):
        steps.sample(3)
    with pytest.raises(TypeError, match="num must be an integer"):
        steps.sample(KEY, num=1.5)
    with pytest.raises(TypeError, match="derivative must be an integer"):
        steps(0.5, derivative=0.5)
    with pytest.raises(TypeError, match="a time or an array of times"):
        steps("noon")
    for smooth in (2, "no", "yes"):
        with pytest.raises(ValueError, match="smooth must be True, False or 'recompute'"):
            mp.solve(decay, jnp.ones(2), (0.0, 1.0), smooth=smooth)
    with pytest.raises(ValueError, match="smooth='recompute'.*save='steps'"):
        mp.solve(decay, jnp.ones(2), (0.0, 1.0), smooth="recompute", save="end")
    with pytest.raises(ValueError, match="smooth='recompute' needs concrete values"):
        jit(lambda y: mp.solve(decay, y, (0.0, 1.0), smooth="recompute").mean)(jnp.ones(2))


def test_filter_only_and_the_end_still_know_their_own_times(filtered, end):
    np.testing.assert_array_equal(end(1.0).mean, end.mean[0])
    np.testing.assert_array_equal(filtered(filtered.t[2]).std, filtered.std[2])
    assert filtered.derivative(2).mean.shape == filtered.mean.shape
    mid = float(filtered.t[3] + filtered.t[4]) / 2
    assert (filtered(mid).std > filtered.std[3]).all()


def test_queries_under_jit_and_vmap(steps):
    @jit
    def answer(y0, t):
        sol = mp.solve(decay, y0, (0.0, 1.0), solver=SOLVER, max_steps=50)
        return sol(t), sol.derivative(1), sol.sample(KEY, num=2, at=jnp.stack([t, 0.5]))

    dense, slope, draws = answer(jnp.ones(2), 0.3)
    want = steps(0.3)
    np.testing.assert_allclose(dense.mean, want.mean, rtol=1e-12)
    np.testing.assert_allclose(dense.std, want.std, rtol=1e-9)
    n = steps.t.size
    np.testing.assert_allclose(slope.mean[:n], steps.derivative(1).mean, rtol=1e-11)
    assert draws.shape == (2, 2, 2) and np.isfinite(draws).all()
    assert np.isnan(answer(jnp.ones(2), 1.7)[0].mean).all()  # cannot be checked, so not made up either

    many = jax.vmap(lambda y0: mp.solve(decay, y0, (0.0, 1.0), solver=SOLVER, max_steps=50))(
        jnp.array([[1.0, 1], [2, 3]])
    )
    assert many.std.shape == many.mean.shape == (2, 51, 2)
    with pytest.raises(ValueError, match="batch of solutions.*vmap"):
        many(0.3)
    np.testing.assert_allclose(jax.vmap(lambda s: s(0.3).mean)(many)[0], want.mean, rtol=1e-11)


@pytest.mark.parametrize(
    ("save", "solver"),
    [
        ("steps", mp.EK0(2, diffusion=CONSTANT)),
        ("times", mp.DiagonalEK1(1, diffusion=DYNAMIC_VECTOR)),
        ("steps", mp.EK1(2)),
    ],
    ids=["EK0-steps", "DiagonalEK1-times", "EK1-steps"],
)
@pytest.mark.wide(quick=1)
def test_gradients_through_smoothing(save, solver):
    """Forward and reverse mode agree with each other, and with finite differences of the program."""
    times = jnp.array([0.1, 0.33, 0.35, 0.8])

    def f(t, y, rate):
        return jnp.stack([-rate * y[0] + y[1], jnp.sin(rate * t) - y[0] * y[1]])

    def program(rate):
        sol = mp.solve(
            f,
            jnp.array([1.0, 0.2]),
            (0.0, 1.0),
            args=rate,
            solver=solver,
            controller=mp.FixedStep(0.1),
            save=times if save == "times" else "steps",
            max_steps=12,
        )
        moments = (sol.mean, 1e3 * sol.std) if save == "times" else sol(times)[1:]
        weights = jnp.cos(jnp.arange(8.0)).reshape(4, 2)
        slope = sol.derivative(1)
        return jnp.stack(
            [*(jnp.sum(weights * x) for x in moments), slope.mean[2, 0], slope.std[2, 1], sol.log_evidence]
        )

    rate, h = 1.3, 1e-5
    derivative = jit(lambda rate: jax.jvp(program, (rate,), (1.0,)))
    (_, forward), (above, _), (below, _) = derivative(rate), derivative(rate + h), derivative(rate - h)
    np.testing.assert_allclose(forward, jit(jax.jacrev(program))(rate), rtol=1e-9, atol=1e-15)
    difference = (above - below) / (2 * h)
    np.testing.assert_allclose(forward, difference, rtol=1e-6, atol=1e-10)


@pytest.mark.optimised
@pytest.mark.thorough
def test_order_eight_with_tiny_steps_stays_positive_definite():
    def f(t, y):
        return jnp.stack([y[1], -y[0]])

    y0, times = jnp.array([1.0, 0.0]), np.array([1.05e-4, 2e-4])
    kronecker, dense = (
        dict(solver=s, controller=mp.FixedStep(1e-5))
        for s in (mp.EK0(8, corrections=1), mp.EK1(8, corrections=1))
    )
    sol = mp.solve(f, y0, (0.0, 3e-4), **kronecker)
    chain = mp.solve(f, y0, (0.0, 3e-4), save=times, **kronecker)
    for x in (sol, chain, sol(np.linspace(1e-6, 2.99e-4, 64)), mp.solve(f, y0, (0.0, 3e-4), **dense)):
        exact = np.stack([np.cos(x.t), -np.sin(x.t)], axis=1)
        np.testing.assert_allclose(x.mean, exact, rtol=1e-13, atol=1e-13)
        assert np.isfinite(x.std).all() and (x.std < 1e-12).all()
    assert np.isfinite(sol.sample(KEY, num=2)).all()


@pytest.mark.parametrize(
    "solver",
    [mp.EK0(3), mp.DiagonalEK1(3, diffusion=DYNAMIC_VECTOR), mp.EK1(3)],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.wide(quick=1)
def test_single_precision(solver, single_precision):
    y0 = jnp.ones(2, jnp.float32)
    sol = mp.solve(decay, y0, (0.0, 1.0), solver=solver)
    # Late in a step: in its first half, single precision cannot tell a state from that at its start, and
    # saved times are modelled as that plus independent noise (bridge.near).
    late = 0.2 * sol.t[1:-2] + 0.8 * sol.t[2:-1]
    chain = mp.solve(decay, y0, (0.0, 1.0), solver=solver, save=jnp.append(late, 1.0))
    dense = sol(chain.t)
    for x in (sol, chain, dense):
        assert x.mean.dtype == x.std.dtype == jnp.float32
        assert np.isfinite(x.std).all() and (x.std[1:] > 0).all()
    np.testing.assert_allclose(dense.mean, chain.mean, rtol=3e-6)
    np.testing.assert_allclose(dense.std, chain.std, rtol=0.02)
    assert sol.sample(KEY, num=2).dtype == jnp.float32


@pytest.mark.thorough
def test_exactly_known_unknowns_stay_exactly_known():
    """A component that does not move has a zero residual, a zero γ, and nothing to divide by."""

    def f(t, y):
        return jnp.stack([jnp.zeros_like(y[0]), -y[1]])

    for solver in (
        mp.EK0(1, diffusion=mp.ConstantDiffusion(vector=True)),
        mp.DiagonalEK1(1, diffusion=DYNAMIC_VECTOR),
    ):
        sol = mp.solve(f, jnp.ones(2), (0.0, 1.0), solver=solver)
        chain = mp.solve(f, jnp.ones(2), (0.0, 1.0), solver=solver, save=[0.3, 1.0])
        for x in (sol, chain, sol(np.array([0.1, 0.7]))):
            np.testing.assert_array_equal(x.mean[:, 0], 1.0)
            np.testing.assert_array_equal(x.std[:, 0], 0.0)
            assert np.isfinite(x.std).all() and (x.std[-1, 1] > 0).all()
        np.testing.assert_array_equal(sol.sample(KEY, num=2)[..., 0], 1.0)
    # Nothing moves at all: γ = 0 throughout.
    still = mp.solve(lambda t, y: 0 * y, jnp.ones(2), (0.0, 1.0), solver=SOLVER)
    np.testing.assert_array_equal(still(0.5).std, 0.0)


def test_a_span_of_no_length_and_a_failed_solve():
    sol = mp.solve(decay, jnp.ones(2), (0.3, 0.3), solver=SOLVER)
    np.testing.assert_array_equal(sol(0.3).mean, jnp.ones(2))
    np.testing.assert_array_equal(sol.sample(KEY, num=2), jnp.ones((2, 1, 2)))

    failed = mp.solve(lambda t, y: y**2, jnp.ones(1), (0.0, 2.0), solver=SOLVER, throw=False)
    assert not failed.success and np.isfinite(failed.mean).all() and np.isfinite(failed(0.5).std).all()
    options = dict(solver=SOLVER, save=[0.25, 0.5, 1.5], throw=False)
    chain = mp.solve(lambda t, y: y**2, jnp.ones(1), (0.0, 2.0), **options)
    assert chain.t.tolist() == [0.25, 0.5] and np.isfinite(chain.mean).all()
    np.testing.assert_allclose(chain.mean[:, 0], 1 / (1 - chain.t), rtol=1e-2)


@pytest.mark.parametrize("t_span", [(0.0, 8.0), (8.0, 0.0)], ids=["forwards", "backwards"])
@pytest.mark.parametrize("diffusion", [CONSTANT, DYNAMIC], ids=["constant", "dynamic"])
def test_recomputation_changes_nothing(t_span, diffusion):
    problem = mp.problems.lotka_volterra()
    options = dict(solver=mp.EK0(2, diffusion=diffusion), rtol=1e-6)
    plain = mp.solve(problem.f, problem.y0, t_span, **options)
    again = mp.solve(problem.f, problem.y0, t_span, smooth="recompute", **options)
    assert int(plain.stats.steps) > 300  # so that states were dropped on the way
    assert again.stats == plain.stats
    np.testing.assert_array_equal(again.t, plain.t)
    np.testing.assert_allclose(again.mean, plain.mean, rtol=1e-11)
    np.testing.assert_allclose(again.std, plain.std, rtol=1e-8)
    np.testing.assert_allclose(again.diffusion, plain.diffusion, rtol=1e-11)
    np.testing.assert_allclose(again.log_evidence, plain.log_evidence, rtol=1e-12)
    with pytest.raises(ValueError, match="smooth=True"):
        again.sample(KEY)


@pytest.mark.thorough
def test_a_million_unknowns_are_sampled_in_the_memory_of_the_samples():
    from millipode.posterior.sampling import Wanted, draw_chain, draw_nodes

    problem = mp.problems.lorenz96(10**6)
    options = dict(solver=mp.EK0(2), controller=mp.FixedStep(1e-3))
    sol = mp.solve(problem.f, problem.y0, (0.0, 3e-3), save=[1e-3, 2e-3, 3e-3], **options)
    draws = sol.sample(KEY, num=2)
    assert draws.shape == (2, 3, 10**6)
    deviation = np.asarray(draws - sol.mean) / np.asarray(sol.std)
    np.testing.assert_allclose(deviation.std(axis=-1), 1, atol=5.5 / np.sqrt(2e6))
    assert abs(np.mean(deviation[0, 0, 1:] * deviation[0, 0, :-1])) < 5.5e-3

    keys = jax.random.split(KEY, 4)
    lowered = draw_chain.lower(sol.posterior, None, (sol.t, None), keys, 0, 1)
    used = lowered.compile().memory_analysis()
    beyond = (used.temp_size_in_bytes + used.output_size_in_bytes) / problem.y0.nbytes - 4 * 3
    assert beyond < 30  # a few states of three fields and their random bits

    every = mp.solve(problem.f, problem.y0, (0.0, 3e-3), **options)
    wanted = Wanted(every.t, every.t, np.arange(4), None)
    lowered = draw_nodes.lower(every.posterior, None, wanted, keys, 0, (4, 1))
    used = lowered.compile().memory_analysis()
    beyond = (used.temp_size_in_bytes + used.output_size_in_bytes) / problem.y0.nbytes - 4 * 4
    assert beyond < 30
