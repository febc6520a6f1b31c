"""The automatic choice between explicit and implicit steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import millipode as mp
from common import rmse
from millipode.covariance import blocks
from millipode.filter.gains import gains, no_past, settled
from millipode.model.priors import IWP


def rigid(t, y):
    return jnp.stack([y[1] * y[2], -y[0] * y[2], -0.51 * y[0] * y[1]])


def relaxing(t, y, rate=1e4):
    """Towards cos t; for any start, cos t is left after a while."""
    return {"y": -rate * (y["y"] - jnp.cos(t)) - jnp.sin(t)}


def easing(t, y):
    """Stiff for 4 < t < 8."""
    rate = jnp.where((t > 4) & (t < 8), 1e5, 1.0)
    return -rate * (y - jnp.cos(t)) - jnp.sin(t)


def hires(t, y):
    a, b, c, d, e, f, g, h = y
    return jnp.stack([
        -1.71 * a + 0.43 * b + 8.32 * c + 0.0007,
        1.71 * a - 8.75 * b,
        -10.03 * c + 0.43 * d + 0.035 * e,
        8.32 * b + 1.71 * c - 1.12 * d,
        -1.745 * e + 0.43 * f + 0.43 * g,
        -280 * f * h + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g,
        280 * f * h - 1.81 * g,
        -280 * f * h + 1.81 * g,
    ])  # fmt: skip


HIRES = jnp.array([1.0, 0, 0, 0, 0, 0, 0, 0.0057])
ONE = {"y": jnp.ones(3)}


def test_what_is_not_stiff_is_solved_by_an_ek0():
    y0 = jnp.array([0.0, 1.0, 1.0])
    for rtol in (1e-4, 1e-8):
        options = {"rtol": rtol, "atol": rtol, "save": "end"}
        auto, ek0 = (mp.solve(rigid, y0, (0.0, 10.0), solver=s, **options) for s in (mp.Auto(), mp.EK0()))
        assert int(auto.stats.implicit) == 0
        assert int(auto.stats.steps) == int(ek0.stats.steps)
        np.testing.assert_allclose(auto.mean, ek0.mean, rtol=1e-13)
        np.testing.assert_allclose(auto.std, ek0.std, rtol=1e-6)


@pytest.mark.parametrize("rtol", [1e-4, 1e-6, 1e-9])
def test_what_is_stiff_is_solved_by_an_ek1(rtol):
    """By few steps, with an error of the size of the tolerance, and a std of the size of the error."""
    span = (0.0, 300.0)
    exact = solve_ivp(lambda t, y: np.asarray(hires(t, y)), span, HIRES, "Radau", rtol=1e-11, atol=1e-13).y[
        :, -1
    ]
    options = {"rtol": rtol, "atol": 1e-3 * rtol, "save": "end"}
    auto, ek1 = (mp.solve(hires, HIRES, span, solver=s, **options) for s in (None, mp.EK1(4)))
    explicit = int(auto.stats.steps - auto.stats.implicit)
    assert 0.5 * int(ek1.stats.steps) < int(auto.stats.implicit) < 1.2 * int(ek1.stats.steps)
    assert 0 < explicit < 1500
    error, std = rmse(auto.mean[-1], exact), float(jnp.sqrt(jnp.mean(auto.std[-1] ** 2)))
    assert error < 10 * rtol
    assert 0.05 < error / std < 20
    assert not bool(auto.stats.stiff)


@pytest.mark.parametrize("rtol", [1e-3, 1e-8], ids=["order 4", "order 6"])
def test_it_goes_back(rtol):
    """Where the problem is no longer stiff; explicit steps may have derivatives that implicit ones lack."""
    sol = mp.solve(easing, jnp.ones(2), (0.0, 40.0), rtol=rtol, atol=rtol, save="steps", smooth=False)
    late, early = int((sol.t > 10).sum()), int((sol.t < 4).sum())
    assert 0 < int(sol.stats.implicit) < int(((sol.t > 4) & (sol.t < 10)).sum())
    assert late < 15 * early
    assert float(jnp.max(jnp.abs(sol.mean - jnp.cos(sol.t)[:, None]))) < 300 * rtol


@pytest.mark.parametrize("save", ["steps", "end", np.linspace(0.5, 3.0, 6)], ids=["steps", "end", "times"])
@pytest.mark.parametrize("smooth", [True, False])
def test_every_way_of_saving_and_one_program_agree_with_the_solution(save, smooth):
    """Within the tolerance: explicit steps at the limit of stability make rounding errors grow to it."""
    options = {"save": save, "smooth": smooth, "rtol": 1e-5, "atol": 1e-7, "max_steps": 2000}
    plain = mp.solve(relaxing, ONE, (0.0, 3.0), **options)
    inside = jax.jit(lambda y0: mp.solve(relaxing, y0, (0.0, 3.0), **options))(ONE)
    for sol in (plain, inside):
        assert 0 < int(sol.stats.implicit) < int(sol.stats.steps)
        np.testing.assert_allclose(sol.mean["y"][1:, 0], np.cos(sol.t[1:]), atol=2e-5)
        assert bool(jnp.all(sol.std["y"][1:] > 0)) and bool(jnp.all(sol.std["y"] < 1e-4))
    if isinstance(save, str) and save == "steps":
        np.testing.assert_allclose(plain(1.234).mean["y"], np.cos(1.234), atol=2e-5)


def test_with_progress_backwards_in_single_precision():
    seen = []
    sol = mp.solve(
        lambda t, y: 1e3 * (y - jnp.cos(t)) - jnp.sin(t),
        jnp.ones(2, jnp.float32),
        (3.0, 0.0),
        progress=seen.append,
        save="end",
    )
    assert seen and int(sol.stats.implicit) > 0
    np.testing.assert_allclose(sol.mean[-1], np.cos(0.0), atol=2e-3)


def test_batches_decide_one_by_one():
    rates = jnp.array([1.0, 1e4])
    sol = jax.vmap(lambda r: mp.solve(relaxing, ONE, (0.0, 3.0), args=r, save="end", rtol=1e-5))(rates)
    assert int(sol.stats.implicit[0]) == 0 < int(sol.stats.implicit[1])
    alone = mp.solve(relaxing, ONE, (0.0, 3.0), args=1e4, save="end", rtol=1e-5)
    np.testing.assert_allclose(sol.mean["y"][1], alone.mean["y"], rtol=1e-8)


@pytest.mark.thorough
def test_gradients():
    def end(rate):
        y0 = {"y": jnp.array([2.0])}
        sol = mp.solve(
            lambda t, y, r: {"y": -1e3 * (y["y"] - r * jnp.cos(r * t))},
            y0,
            (0.0, 1.0),
            args=rate,
            save="end",
            rtol=1e-6,
            max_steps=2000,
        )
        return sol.mean["y"][-1, 0]

    # y = (cos t + ε sin t)/(1 + ε²) with t = r and ε = r/1000, times r, up to what has decayed
    exact = jax.grad(lambda r: r * (jnp.cos(r) + r / 1e3 * jnp.sin(r)) / (1 + (r / 1e3) ** 2))(1.3)
    step = 1e-4
    want = (end(1.3 + step) - end(1.3 - step)) / (2 * step)
    np.testing.assert_allclose(want, exact, rtol=1e-4)
    np.testing.assert_allclose(jax.jacfwd(end)(1.3), exact, rtol=1e-4)
    np.testing.assert_allclose(jax.grad(end)(1.3), exact, rtol=1e-4)


def test_members_and_evidence():
    options = {"rtol": 1e-7, "atol": 1e-10, "save": "end"}
    sol = mp.solve(hires, HIRES, (0.0, 50.0), uncertainty=mp.Transported(members=8), **options)
    exact = mp.solve(hires, HIRES, (0.0, 50.0), solver=mp.EK1(5), rtol=1e-10, atol=1e-13, save="end").mean
    assert sol.members.shape == (8, 1, 8) and int(sol.stats.implicit) > 0
    assert bool(jnp.isfinite(sol.log_evidence))
    assert 0.03 < rmse(sol.mean, exact) / rmse(sol.std, 0) < 10


def test_large_problems_go_over_without_a_second_start():
    grid = mp.Grid((40, 40), lengths=1.0, boundary="periodic")

    def f(t, u):
        return grid.laplacian(u) + 10 * (u - u**3)

    y0 = jnp.sin(2 * jnp.pi * grid.coordinates[0]) + 0.1 * jnp.cos(4 * jnp.pi * grid.coordinates[1])
    sol = mp.solve(f, y0, (0.0, 0.3), save="end", rtol=1e-5, atol=1e-7)
    known = mp.solve(f, y0, (0.0, 0.3), save="end", rtol=1e-8, atol=1e-10, solver=mp.EK1())
    assert int(sol.stats.iterations) > 0
    assert rmse(sol.mean[-1], known.mean[-1]) < 1e-4


def test_gains_are_settled_after_many_equal_steps():
    h = jnp.asarray(0.3)
    for order in (1, 2, 4, 5):
        past = no_past(order, h)
        for _ in range(100):
            known = gains(past, IWP(order).transition(h), h)
            past = known.past
        found = gains(settled(order, past, h), IWP(order).transition(h), h)
        np.testing.assert_allclose(found.accurate, known.accurate, rtol=1e-6)
        np.testing.assert_allclose(found.stiff, known.stiff, rtol=1e-6)


def test_forgetting_keeps_what_is_known_of_the_first_fields():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(5, 6))
    root[:, 1] = 0
    h, kept = 0.5, 4
    new = np.asarray(blocks.forget(jnp.asarray(root), kept, jnp.asarray(h)))
    before, after = root.T @ root, new.T @ new
    np.testing.assert_allclose(after[:kept, :kept], before[:kept, :kept], rtol=1e-12, atol=1e-12)
    size = 100 * before[kept - 1, kept - 1]
    np.testing.assert_allclose(np.diag(after)[kept:], [size / h**2, size / h**4], rtol=1e-12)
    assert np.all(after[:kept, kept:] == 0)


def test_fixed_steps_are_explicit_by_default():
    sol = mp.solve(rigid, jnp.ones(3), (0.0, 1.0), controller=mp.FixedStep(0.1))
    assert int(sol.stats.implicit) == 0 and int(sol.stats.steps) == 10


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mp.Auto(diffusion=mp.DynamicDiffusion(vector=True)), ValueError, "not Kronecker"),
        (lambda: mp.Auto(12), ValueError, "1 to 11"),
        (lambda: mp.Auto(linear_solver="LU"), TypeError, "mp.Direct"),
        (
            lambda: mp.solve(rigid, jnp.ones(3), (0.0, 1.0), solver=mp.Auto(), smooth="recompute"),
            ValueError,
            "mp.EK0",
        ),
    ],
)
def test_bad_options(make, error, message):
    with pytest.raises(error, match=message):
        make()
