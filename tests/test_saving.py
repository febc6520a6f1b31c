"""What is saved, and that saving changes nothing."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR, jit, name
from millipode import memory

LOTKA = jnp.array([20.0, 20.0])


def lotka_volterra(t, y):
    return jnp.stack([0.5 * y[0] - 0.05 * y[0] * y[1], -0.5 * y[1] + 0.05 * y[0] * y[1]])


SOLVERS = [
    mp.EK0(3, diffusion=DYNAMIC),
    mp.EK0(3, diffusion=CONSTANT_VECTOR),
    mp.DiagonalEK1(3, diffusion=DYNAMIC_VECTOR),
    mp.EK1(3, diffusion=CONSTANT, structure="dense"),
    mp.EK1(3, diffusion=CONSTANT),
    mp.EK1(3, linear_solver=mp.GMRES(rtol=1e-9)),
]
IDS = [
    *("EK0-dynamic", "EK0-constant-vector", "DiagonalEK1-dynamic-vector"),
    *("EK1-dense-constant", "EK1-constant", "EK1-GMRES"),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=IDS)
@pytest.mark.parametrize("t_span", [(0.0, 4.0), (4.0, 0.0)], ids=["forwards", "backwards"])
@pytest.mark.wide(quick=2)
def test_end_steps_and_times_tell_the_same_story(solver, t_span):
    steps = mp.solve(lotka_volterra, LOTKA, t_span, solver=solver, smooth=False)
    end = mp.solve(lotka_volterra, LOTKA, t_span, solver=solver, save="end")
    t = np.asarray(steps.t)
    assert t[0] == t_span[0] and t[-1] == t_span[1] and end.t.tolist() == [t_span[1]]
    assert steps.mean.shape == (t.size, 2) and end.mean.shape == (1, 2)
    np.testing.assert_array_equal(steps.mean[0], LOTKA)
    for a, b in ((steps.mean, end.mean), (steps.std, end.std)):
        np.testing.assert_allclose(a[-1], b[-1], rtol=1e-12)
    np.testing.assert_allclose(steps.log_evidence, end.log_evidence, rtol=1e-12)
    dynamic = isinstance(solver.diffusion, mp.DynamicDiffusion)
    # γ comes from a residual, a small difference, and the two programs start with other roundings.
    np.testing.assert_allclose(
        steps.diffusion[-1] if dynamic else steps.diffusion,
        end.diffusion[-1] if dynamic else end.diffusion,
        rtol=1e-10,
    )

    between = np.sort(np.concatenate([t[::4], 0.3 * t[1:-1:5] + 0.7 * t[2::5][: t[1:-1:5].size]]))
    between = between if t_span[1] > t_span[0] else between[::-1]
    times = mp.solve(lotka_volterra, LOTKA, t_span, solver=solver, save=between, smooth=False)
    assert int(times.stats.steps) == int(steps.stats.steps)
    dense = steps(between)
    np.testing.assert_allclose(dense.mean, times.mean, rtol=1e-12)
    np.testing.assert_allclose(dense.std, times.std, rtol=1e-10)
    on_grid = np.isin(between, t)
    index = np.searchsorted(t, between) if t[1] > t[0] else t.size - 1 - np.searchsorted(t[::-1], between)
    np.testing.assert_allclose(times.mean[on_grid], steps.mean[index[on_grid]], rtol=1e-12)
    np.testing.assert_allclose(times.std[on_grid], steps.std[index[on_grid]], rtol=1e-10)
    np.testing.assert_array_equal(times.t, between)
    if dynamic:
        assert times.diffusion.shape[0] == between.size

    # Fewer save times change nothing at those that stay.
    fewer = mp.solve(lotka_volterra, LOTKA, t_span, solver=solver, save=between[::2], smooth=False)
    np.testing.assert_array_equal(fewer.mean, times.mean[::2])
    np.testing.assert_array_equal(fewer.std, times.std[::2])


@pytest.mark.parametrize("solver", SOLVERS, ids=IDS)
def test_between_steps_the_model_predicts(solver):
    """At a save time inside a step: Φ m and ΦCΦᵀ + γ²Σ from the step's start, in NumPy."""
    from common import final_carry
    from oracle import transition

    h, t = 0.25, 0.6
    controller = mp.FixedStep(h)
    sol = mp.solve(
        lotka_volterra, LOTKA, (0.0, 1.0), solver=solver, controller=controller, save=[t], smooth=False
    )
    _, carry = final_carry(
        lotka_volterra, LOTKA, (0.0, 0.5), solver=solver, controller=controller, save="end"
    )
    phi, sigma = transition(3, t - 0.5)
    mean = np.tensordot(phi[0], np.stack(carry.state.mean), 1)
    np.testing.assert_allclose(sol.mean[0], mean, rtol=1e-12)
    state = np.asarray(carry.state.covariance.to_dense(LOTKA)).reshape(4, 2, 4, 2)
    variance = np.einsum("i,idjd,j->d", phi[0], state, phi[0])
    if isinstance(solver.diffusion, mp.DynamicDiffusion):
        variance = variance + np.broadcast_to(sol.diffusion[0], (2,)) * sigma[0, 0]
    else:
        variance = np.broadcast_to(sol.diffusion, (2,)) * (variance + sigma[0, 0])
    np.testing.assert_allclose(sol.filter_std[0], np.sqrt(variance), rtol=1e-9)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("t_span", [(0.0, 1.0), (1.0, 0.0), (1e3, 1e3 + 1)], ids=str)
def test_save_times_next_to_a_step_are_saved_after_its_correction(t_span, smooth):
    sign = 1 if t_span[1] > t_span[0] else -1

    def f(t, y):
        return sign * 20 * (jnp.cos(3 * (t - t_span[0])) - y)

    options = dict(solver=mp.EK0(2), controller=mp.FixedStep(0.1), smooth=smooth)
    want = mp.solve(f, jnp.zeros(2), t_span, **options)
    ends = np.asarray(want.t[2:9])
    for times in (np.nextafter(ends, -np.inf), ends, np.nextafter(ends, np.inf)):
        have = mp.solve(f, jnp.zeros(2), t_span, save=times, **options)
        np.testing.assert_allclose(have.mean, want.mean[2:9], rtol=1e-9)
        np.testing.assert_allclose(have.filter_std, want.filter_std[2:9], rtol=1e-6)
    # Two times where there is room for one: both are saved.
    pair = np.sort([np.nextafter(t_span[1], t_span[0]), t_span[1]])[::sign]
    have = mp.solve(f, jnp.zeros(2), t_span, save=pair, **options)
    assert have.mean.shape == (2, 2)
    np.testing.assert_allclose(have.mean[-1], want.mean[-1], rtol=1e-9)
    assert np.isfinite(have.mean).all()


def test_segments_join_seamlessly(monkeypatch):
    import sys

    front = sys.modules["millipode.prepare"]
    for solver in (SOLVERS[0], SOLVERS[1]):
        whole = mp.solve(lotka_volterra, LOTKA, (0.0, 4.0), solver=solver, rtol=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr(front, "SEGMENT_STEPS", 8)
            parts = mp.solve(lotka_volterra, LOTKA, (0.0, 4.0), solver=solver, rtol=1e-5)
        assert int(whole.stats.steps) > 24
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), whole.mean, parts.mean)
        np.testing.assert_array_equal(whole.t, parts.t)
        np.testing.assert_allclose(whole.std, parts.std, rtol=1e-13)
        np.testing.assert_allclose(whole.diffusion, parts.diffusion, rtol=1e-13)


def test_under_jit_steps_are_padded_with_the_last_one():
    solver = SOLVERS[0]
    plain = mp.solve(lotka_volterra, LOTKA, (0.0, 4.0), solver=solver)
    padded = jit(lambda y: mp.solve(lotka_volterra, y, (0.0, 4.0), solver=solver, max_steps=200))(LOTKA)
    n = int(plain.stats.steps)
    assert padded.t.shape == (201,) and padded.success
    # Not to the last bit: outermost programs are compiled with other options.
    np.testing.assert_allclose(padded.t[: n + 1], plain.t, rtol=1e-11)
    np.testing.assert_allclose(padded.mean[: n + 1], plain.mean, rtol=1e-11)
    assert (padded.t[n:] == 4.0).all()
    np.testing.assert_array_equal(padded.mean[n:], jnp.broadcast_to(padded.mean[n], (201 - n, 2)))
    np.testing.assert_array_equal(padded.std[n:], jnp.broadcast_to(padded.std[n], (201 - n, 2)))


def test_steps_of_a_very_large_problem_are_refused_with_numbers_and_a_remedy(monkeypatch):
    y0 = np.broadcast_to(np.float64(1.0), (4_000_000,))
    with pytest.raises(
        ValueError, match=r"(?s)0\.16 GB per step.*1000 steps.*160 GB.*save=times.*save='end'"
    ):
        mp.solve(lambda t, y: -y, y0, (0.0, 1.0))
    monkeypatch.setattr(memory, "available", lambda: 100 * 10**9)
    with pytest.raises(ValueError, match=r"(?s)160 GB.*smooth='recompute' \(32 GB, and a second pass\)"):
        mp.solve(lambda t, y: -y, y0, (0.0, 1.0))
    with pytest.raises(ValueError, match="100000 steps"):
        jit(lambda y: mp.solve(lambda t, y: -y, y, (0.0, 1.0)))(jnp.ones(20_000))


def test_running_out_of_memory_for_steps_keeps_what_was_solved(monkeypatch):
    monkeypatch.setattr(sys.modules["millipode.prepare"], "SEGMENT_STEPS", 8)
    monkeypatch.setattr(memory, "available", lambda: 2 * 20 * 8 * (5 * 2 + 5 * 4 + 1 + 5 * 5))
    monkeypatch.setattr(memory, "TYPICAL_STEPS", 10)
    monkeypatch.setattr(memory, "LITTLE", 0)
    with pytest.raises(mp.SolveError, match="save=times") as caught:
        mp.solve(lotka_volterra, LOTKA, (0.0, 40.0))
    partial = caught.value.solution
    assert caught.value.status == mp.Status.OUT_OF_MEMORY
    assert 10 < partial.t.size < 40 and np.isfinite(partial.mean).all()
    assert (np.diff(partial.t) > 0).all() and partial.t.size == int(partial.stats.steps) + 1


@pytest.mark.parametrize("diffusion", [CONSTANT, CONSTANT_VECTOR], ids=name)
def test_constant_diffusion_scales_everything_that_leaves(diffusion):
    """Multiplying the problem by 100 multiplies all standard deviations by 100, however saved."""

    def f(t, y):
        return -y * jnp.array([1.0, 2.0])

    for save in ("end", "steps", np.array([0.7, 1.0])):
        small, large = (
            mp.solve(
                f,
                c * jnp.ones(2),
                (0.0, 1.0),
                solver=mp.EK0(2, diffusion=diffusion),
                controller=mp.FixedStep(0.1),
                save=save,
            )
            for c in (1.0, 100.0)
        )
        assert (small.std[-1] > 0).all()
        np.testing.assert_allclose(large.std, 100 * small.std, rtol=1e-10)
        np.testing.assert_allclose(large.diffusion, 1e4 * small.diffusion, rtol=1e-10)
