"""Regressions of speed, without a clock: passes over the state per step, and traces per problem."""

import jax.numpy as jnp
import pytest

import millipode as mp
from common import CONSTANT_VECTOR, DYNAMIC_VECTOR, compiled_loop

SOLVER, FILTER = mp.EK0(4), {"uncertainty": "filter"}
PROBLEM = mp.problems.lorenz96(2**17)
TIMES = jnp.linspace(3.0, 30.0, 10)
DIAGONAL = mp.DiagonalEK1(2, jacobian_diagonal=PROBLEM.jacobian_diagonal, diffusion=DYNAMIC_VECTOR)


def passes(solver, y0=PROBLEM.y0, **options):
    """How many fields one turn of the compiled loop reads or writes, what it does now and then included."""
    options = {"save": "end"} | options
    program, y0 = compiled_loop(PROBLEM.f, y0, PROBLEM.t_span, solver=solver, **options)
    return program.cost_analysis()["bytes accessed"] / y0.nbytes


@pytest.mark.parametrize(
    ("solver", "options", "recorded"),
    [
        (mp.EK0(4, corrections=1), {}, 40),
        (mp.EK0(4), FILTER, 53.1),
        (mp.EK0(4), {}, 81),
        (mp.EK0(2), {}, 56.1),
        (mp.EK0(4), {"y0": PROBLEM.y0.astype(jnp.float32)}, 104),
        (mp.EK0(4, diffusion=CONSTANT_VECTOR), FILTER, 55),
        (mp.EK0(3), {"save": TIMES, "smooth": False} | FILTER, 50),
        (mp.EK0(3), {"save": TIMES} | FILTER, 98),
        (DIAGONAL, FILTER, 73),  # a tile of the correction counts once, not for all tiles
    ],
    ids=str,
)
@pytest.mark.wide(quick=4)
def test_a_step_makes_no_more_passes_than_recorded(solver, options, recorded):
    measured = passes(solver, **options)
    # If it became less, record it.
    assert recorded - 1.5 < measured < recorded + 0.1


@pytest.mark.parametrize("save", ["end", "steps", (0.25, 0.5)], ids=["end", "steps", "times"])
@pytest.mark.wide(quick=2)
def test_a_problem_is_traced_once(save):
    traces = 0

    def f(t, y, rate):
        nonlocal traces
        traces += 1
        return -rate * y

    def solve(y0, t1, rate, rtol):
        return mp.solve(f, y0, (0.0, t1), args=rate, rtol=rtol, save=save, solver=SOLVER)

    solve(jnp.ones(3), 1.0, 1.0, 1e-3)
    first, traces = traces, 0
    # The loop, the checks, the first step, and two initialisations, one for where the other fails.
    assert first <= 14
    solve(2 * jnp.ones(3), 2.0, 3.0, 1e-6)
    assert traces == 0
