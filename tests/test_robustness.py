"""Bad input is refused before any work; trouble on the way ends with a status."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR, FILTERS, jit, name

pytestmark = pytest.mark.usefixtures("own_std")

ONE = jnp.ones(2)


def decay(t, y):
    return jax.tree.map(lambda leaf: -leaf, y)


def never(t, y):
    raise AssertionError("bad input must be refused before f is called")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(y0=jnp.array([1.0, jnp.nan])), ValueError, "y0 has infinite or NaN"),
        (dict(y0=jnp.array([1.0, jnp.inf])), ValueError, "y0 has infinite or NaN"),
        (dict(y0=jnp.array([1.0 + 1j])), TypeError, "complex.*real and imaginary"),
        (dict(y0=jnp.array([True])), TypeError, "dtype bool"),
        (dict(y0=jnp.array([1.0], jnp.float16)), TypeError, "float32 or float64"),
        (dict(y0={}), ValueError, "y0 is empty"),
        (dict(y0=jnp.zeros(0)), ValueError, "without entries"),
        (dict(y0="one"), TypeError, "not an array of numbers"),
        (dict(t_span=(0.0, np.inf)), ValueError, "t_span must be finite"),
        (dict(t_span=(np.nan, 1.0)), ValueError, "t_span must be finite"),
        (dict(t_span=1.0), ValueError, r"pair \(t0, t1\)"),
        (dict(t_span=(0.0, 1.0, 2.0)), ValueError, r"pair \(t0, t1\)"),
        (dict(t_span=(np.zeros(2), 1.0)), ValueError, "two scalars"),
        (dict(rtol=-1e-3), ValueError, "rtol must not be negative"),
        (dict(atol=jnp.array([1e-3, -1.0])), ValueError, "atol must not be negative"),
        (dict(rtol=np.nan), ValueError, "rtol must be finite"),
        (dict(atol=np.inf), ValueError, "atol must be finite"),
        (dict(rtol=0.0, atol=0.0), ValueError, "both zero"),
        (dict(atol=jnp.ones(3)), ValueError, "shaped like y0"),
        (dict(rtol={"a": 1.0}), ValueError, "shaped like y0"),
        (dict(save="everything"), ValueError, "'steps', 'end' or an array"),
        (dict(save=None), ValueError, "'steps', 'end' or an array"),
        (dict(save=[0.5, 1.5]), ValueError, r"inside t_span.*1\.5 does not"),
        (dict(save=[0.5, 0.4]), ValueError, "strictly increasing"),
        (dict(save=[0.5, 0.5]), ValueError, "strictly increasing"),
        (dict(save=[0.5, 0.6], t_span=(1.0, 0.0)), ValueError, "strictly decreasing"),
        (dict(save=[np.nan]), ValueError, "save times must be finite"),
        (dict(save=np.zeros((2, 2))), ValueError, "one-dimensional"),
        (dict(save=[]), ValueError, "non-empty"),
        (dict(solver="EK0"), TypeError, "solver must be a solver"),
        (dict(solver=mp.EK0), TypeError, "solver must be a solver"),
        (dict(controller=0.1), TypeError, "controller must be"),
        (dict(max_steps=0), ValueError, "max_steps"),
        (dict(max_steps=1.5), ValueError, "max_steps"),
        (dict(dt0=-0.1), ValueError, "dt0 must be a positive"),
        (dict(dt0=jnp.ones(1)), ValueError, "dt0 must be a positive"),
        (dict(controller=mp.FixedStep(jnp.array(-0.1))), ValueError, "FixedStep: h must be a positive"),
        (dict(controller=mp.FixedStep(jnp.array(0.0))), ValueError, "FixedStep: h must be a positive"),
        (dict(dt0=0.1, controller=mp.FixedStep(0.1)), ValueError, "dt0 has no meaning"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_input_is_refused(change, error, message):
    arguments = dict(y0=ONE, t_span=(0.0, 1.0)) | change
    y0, t_span = arguments.pop("y0"), arguments.pop("t_span")
    with pytest.raises(error, match=message):
        mp.solve(never, y0, t_span, **arguments)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: mp.solve(decay, jnp.ones(1), (0, 1), controller=mp.FixedStep("0.1")),
            TypeError,
            "FixedStep",
        ),
        (lambda: mp.solve(decay, jnp.ones(1), (0, 1), controller=mp.FixedStep(True)), TypeError, "FixedStep"),
        (lambda: mp.EK0(order=0), ValueError, "order must be from 1 to 11, got 0"),
        (lambda: mp.EK1(order=12), ValueError, "order must be from 1 to 11, got 12"),
        (lambda: mp.DiagonalEK1(order=2.5), TypeError, "order must be an integer"),
        (lambda: mp.EK0(order=3, prior=mp.IWP(2)), ValueError, "contradicts the prior"),
        (lambda: mp.EK0(prior=3), TypeError, "prior must be a prior"),
        (lambda: mp.EK0(diffusion="constant"), TypeError, "diffusion must be"),
        (lambda: mp.EK0(orders=3), TypeError, "unexpected keyword argument 'orders'"),
        (lambda: mp.FixedStep(0.0), ValueError, "positive and finite"),
        (lambda: mp.FixedStep(np.inf), ValueError, "positive and finite"),
        (lambda: mp.PIController(shrink=2.0), ValueError, "0 < shrink < 1 < grow"),
        (lambda: mp.problems.lorenz96(3), ValueError, "at least 4"),
        (lambda: mp.problems.van_der_pol(-1.0), ValueError, "positive"),
        (lambda: mp.problems.fitzhugh_nagumo(1), ValueError, "at least 2"),
        (lambda: mp.grids.Grid((3,), (1.0, 1.0)), ValueError, "one positive length per axis"),
        (lambda: mp.grids.Grid((3,), (-1.0,)), ValueError, "positive"),
        (lambda: mp.grids.Grid((3,), (1.0,), "open"), ValueError, "boundary"),
    ],
)
def test_bad_parts_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda t, y: y[:1], ValueError, r"f\(t, y\) has shape \(1,\), but y has shape \(2,\)"),
        (lambda t, y: (y, y), TypeError, "f returned the structure.*PyTreeDef"),
        (lambda t, y: [-y[0], -y[1]], TypeError, r"return one array, for example with jnp\.stack"),
        (lambda t, y: y.astype(jnp.float32), TypeError, "float32, but y has dtype float64"),
        (lambda t, y: y * 1j, TypeError, "complex128, but y has dtype float64"),
        (3.0, TypeError, "f must be callable"),
    ],
    ids=["shape", "structure", "list", "precision", "complex", "callable"],
)
def test_an_f_that_does_not_return_something_like_y_is_refused(f, error, message):
    with pytest.raises(error, match=message):
        mp.solve(f, ONE, (0.0, 1.0))
    if callable(f):
        with pytest.raises(error, match=message):
            jit(lambda y: mp.solve(f, y, (0.0, 1.0), save="end").mean)(ONE)


def test_a_list_of_numbers_is_explained():
    with pytest.raises(TypeError, match="for a vector, pass an array"):
        mp.solve(lambda t, y: jnp.array([y[1], -y[0]]), [1.0, 0.0], (0.0, 1.0))


def test_a_dense_covariance_that_cannot_fit_is_refused():
    with pytest.raises(ValueError, match=r"(?s)dense covariance.*GB.*EK0 or.*DiagonalEK1"):
        mp.solve(never, jnp.ones(100_000), (0.0, 1.0), solver=mp.EK1(structure="dense"))


def test_integers_become_floats_and_scalars_stay_scalars():
    sol = mp.solve(decay, np.array([1, 2]), (0, 1), rtol=1e-6, save="end")
    assert sol.mean.dtype == jnp.float64
    np.testing.assert_allclose(sol.mean[-1], np.exp(-1) * np.array([1, 2]), atol=1e-5)
    scalar = mp.solve(decay, 1.0, (0.0, 1.0), solver=mp.EK1(2))
    assert scalar.mean.shape == scalar.t.shape


@pytest.mark.parametrize("save", ["steps", "end", [2.0]], ids=str)
def test_an_empty_time_span_returns_y0(save):
    sol = mp.solve(decay, ONE, (2.0, 2.0), save=save)
    assert sol.success and sol.t.tolist() == [2.0] and sol.stats.steps == 0
    np.testing.assert_array_equal(sol.mean, ONE[None])
    np.testing.assert_array_equal(sol.std, 0 * ONE[None])


@pytest.mark.parametrize(("kind", "structure", "diffusion"), FILTERS, ids=name)
@pytest.mark.wide(quick=6)
def test_exact_components_and_constant_solutions_work(kind, structure, diffusion):
    """A residual of exactly zero: everywhere, and in one component only (a Dirichlet node)."""
    solver = kind(2, diffusion=diffusion, structure=structure)

    def f(t, y, rates):
        return rates * y

    for rates, y0 in (
        (jnp.zeros(3), jnp.ones(3)),
        (jnp.array([-1.0, 0.0, -0.5]), jnp.array([1.0, 2.0, 3.0])),
    ):
        sol = mp.solve(f, y0, (0.0, 1.0), args=rates, solver=solver, rtol=1e-5, smooth=False)
        assert sol.success
        for value in (sol.mean, sol.std, sol.diffusion, sol.log_evidence):
            assert np.isfinite(value).all()
        np.testing.assert_array_equal(sol.mean[:, 1], y0[1])
        if diffusion.vector and kind is not mp.EK1:  # which keeps every γ away from zero
            np.testing.assert_array_equal(sol.std[:, 1], 0)


@pytest.mark.thorough
def test_a_constant_solution_has_finite_gradients():
    def loss(a, solver):
        sol = mp.solve(
            lambda t, y: a * jnp.array([0.0, 1.0]) * y,
            jnp.array([1.0, 0.0]),
            (0.0, 1.0),
            solver=solver,
            save="end",
            max_steps=50,
        )
        return jnp.sum(sol.mean) + jnp.sum(sol.std)

    for solver in (mp.EK0(2), mp.DiagonalEK1(2, diffusion=DYNAMIC_VECTOR), mp.EK1(2)):
        assert np.isfinite(jit(jax.grad(partial(loss, solver=solver)))(1.0))


def test_blow_up_ends_with_a_status_and_keeps_what_was_solved():
    with pytest.raises(mp.SolveError) as caught:
        mp.solve(lambda t, y: y**2, jnp.ones(1), (0.0, 2.0))
    error = caught.value
    assert error.status in (mp.Status.STEP_TOO_SMALL, mp.Status.NON_FINITE)
    assert error.t == pytest.approx(1.0, abs=1e-3) and error.h >= 0
    assert f"{error.t:.6g}" in str(error)
    partial = error.solution
    assert partial.t.size == int(partial.stats.steps) + 1 and np.isfinite(partial.mean).all()
    quiet = mp.solve(lambda t, y: y**2, jnp.ones(1), (0.0, 2.0), save=[0.5, 0.9, 1.5], throw=False)
    assert not quiet.success and quiet.t.tolist() == [0.5, 0.9]
    np.testing.assert_allclose(quiet.mean[0], 2.0, rtol=1e-2)


def test_non_finite_f_is_retried_with_a_smaller_step():
    """√(1.1 − t) is NaN beyond the span only; a long first step must be taken back."""

    def f(t, y):
        return jnp.where(t > 1.0, jnp.nan, -y)

    sol = mp.solve(f, ONE, (0.0, 1.0), dt0=0.9, controller=mp.PIController(grow=50.0), save="end")
    assert sol.success

    def wall(t, y):
        return jnp.where(t > 0.5, jnp.nan, -y)

    for span, at in (((0.0, 1.0), 0.5), ((1.0, 0.0), 1.0)):
        sol = mp.solve(wall, ONE, span, smooth=False, throw=False)
        assert sol.status == mp.Status.NON_FINITE
        assert float(sol.reached[0]) == pytest.approx(at, abs=1e-6)
        assert int(sol.stats.rejected) < 200
    fixed = mp.solve(wall, ONE, (0.0, 1.0), controller=mp.FixedStep(0.1), smooth=False, throw=False)
    assert fixed.status == mp.Status.NON_FINITE and fixed.t.size == 6


def test_unstable_fixed_steps_do_not_pass_for_success():
    f, controller = lambda t, y: -1e8 * y, mp.FixedStep(1.0)
    sol = mp.solve(f, ONE, (0.0, 100.0), controller=controller, save="end", throw=False)
    assert sol.status == mp.Status.NON_FINITE


def test_max_steps_and_step_too_small():
    sol = mp.solve(decay, ONE, (0.0, 100.0), rtol=1e-8, max_steps=7, smooth=False, throw=False)
    assert sol.status == mp.Status.MAX_STEPS and "Raise max_steps" in sol.message
    assert int(sol.stats.steps + sol.stats.rejected) == 7 and sol.t.size == int(sol.stats.steps) + 1
    # A jump in f at t = 0.5 that no step size resolves.
    sol = mp.solve(
        lambda t, y: jnp.where(t > 0.5, 1e12, 0.0) * jnp.ones_like(y),
        ONE,
        (0.0, 1.0),
        solver=mp.EK0(1),
        rtol=1e-13,
        atol=1e-13,
        save="end",
        throw=False,
    )
    assert sol.status == mp.Status.STEP_TOO_SMALL and "t = 0.5" in sol.message


def test_y0_survives_in_place_work():
    y0 = jnp.arange(3.0)
    for save in ("end", "steps"):
        mp.solve(decay, y0, (0.0, 1.0), solver=mp.EK0(1), save=save)
        assert not y0.is_deleted()
    np.testing.assert_array_equal(y0, np.arange(3.0))


def test_scalar_calibration_ignores_no_component_and_vector_calibration_mixes_none():
    """Trap: S[0, 0] for every unknown, the first innovation dropped, √N divided out twice."""
    rates = jnp.array([0.5, 3.0])
    scales = jnp.array([1.0, 1000.0])
    for diffusion in (CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR):
        solver = mp.DiagonalEK1(2, diffusion=diffusion)
        sol = mp.solve(
            lambda t, y: -rates * y,
            scales,
            (0.0, 1.0),
            solver=solver,
            controller=mp.FixedStep(0.1),
            save="end",
        )
        if diffusion.vector:
            alone = mp.solve(
                lambda t, y: -rates[1:] * y,
                scales[1:],
                (0.0, 1.0),
                solver=solver,
                controller=mp.FixedStep(0.1),
                save="end",
            )
            np.testing.assert_allclose(sol.std[0, 1], alone.std[0, 0], rtol=1e-12)


def test_repr_and_messages_are_readable():
    sol = mp.solve(decay, ONE, (0.0, 1.0), save="end")
    assert repr(sol).startswith("Solution(SUCCESS, d=2, ")
    assert sol.message == "The solver reached the end of the time span."
    assert sol.status is mp.Status.SUCCESS
