"""Large problems: memory of the compiled loop in copies of y, and of the whole process."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import millipode as mp
from common import CONSTANT_VECTOR, DYNAMIC_VECTOR, compiled_loop, name
from millipode.prepare import prepare
from millipode.run.packing import Packed
from millipode.run.programs import at_once

# The memory of the paper's filters; a second correction takes one more field (see below).
PAPER = {"diffusion": DYNAMIC_VECTOR, "corrections": 1}


def copies_of_y(problem, solver, save="end", controller=None, smooth=None, uncertainty=None):
    """Peak memory of the loop (its state included), and of the whole solve as one program."""
    given = dict(solver=solver, save=save, smooth=smooth, controller=controller, uncertainty=uncertainty)
    program, y0 = compiled_loop(problem.f, problem.y0, problem.t_span, **given)
    setup, *_ = prepare(problem.f, problem.y0, problem.t_span, **given)
    unit = y0.size * y0.dtype.itemsize
    loop = program.memory_analysis()
    whole = at_once.lower(Packed(setup), y0).compile().memory_analysis()
    used = loop.argument_size_in_bytes + loop.output_size_in_bytes - loop.alias_size_in_bytes
    return (
        (used + loop.temp_size_in_bytes) / unit,
        (whole.argument_size_in_bytes + whole.output_size_in_bytes + whole.temp_size_in_bytes) / unit,
    )


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.wide(quick=1)
def test_kronecker_loop_holds_its_state_and_two_fields(order):
    problem = mp.problems.lorenz96(200_000)
    paper, _ = copies_of_y(problem, mp.EK0(order, corrections=1))
    loop, whole = copies_of_y(problem, mp.EK0(order), uncertainty="filter")
    # The initialisation by Runge–Kutta inference is the peak of the whole: a few states.
    assert paper < order + 1 + 2.01 and whole < 4 * (order + 1) + 4
    # A second correction takes one more field: its residual.
    assert loop < paper + 1.01
    honest, _ = copies_of_y(problem, mp.EK0(order))
    # Halves of copies: n fields of the error, and a few between.
    assert honest < loop + (order + 1) / 2 + 3.01


def test_constant_vector_diffusion_costs_two_more_fields():
    problem = mp.problems.lorenz96(200_000)
    loop, _ = copies_of_y(problem, mp.EK0(2, diffusion=CONSTANT_VECTOR), uncertainty="filter")
    assert loop < 8.01


@pytest.mark.thorough
def test_members_cost_their_states_in_single_precision():
    problem, n = mp.problems.lorenz96(200_000), 4
    plain, _ = copies_of_y(problem, mp.EK0(n - 1))
    four, eight = (
        copies_of_y(problem, mp.EK0(n - 1), uncertainty=mp.Transported(s, chunk=1))[0] for s in (4, 8)
    )
    # Halves of copies: n fields of a state, and three between (E₀ and E₁ of Φ e + w, and its residual).
    assert (eight - four) / 4 < (n + 3) / 2 + 0.01
    assert eight < plain + 8 * (n + 3) / 2 + 8


def test_save_times_cost_what_they_save():
    problem = mp.problems.lorenz96(200_000)
    loop, _ = copies_of_y(
        problem, mp.EK0(2), save=jnp.linspace(0.0, 30.0, 10), smooth=False, uncertainty="filter"
    )
    assert loop < 7.01 + 10  # ten means; standard deviations are one number each


@pytest.mark.thorough
def test_smoothing_at_ten_times_takes_ten_states_and_sixteen_fields():
    """Nothing per step: what is saved, the state, the anchor, and room to work."""
    problem = mp.problems.lorenz96(10**6)
    times = jnp.linspace(3.0, 30.0, 10)
    loop, _ = copies_of_y(problem, mp.EK0(3, corrections=1), save=times)
    assert loop < 10 * 4 + 12.01

    def program(y0):
        return mp.solve(problem.f, y0, problem.t_span, solver=mp.EK0(3, corrections=1), save=times)

    used = jax.jit(program).lower(problem.y0).compile().memory_analysis()
    total = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
    assert total / problem.y0.nbytes < 10 * 4 + 16.01


@pytest.mark.thorough
def test_diagonal_ek1_on_the_fitzhugh_nagumo_pde():
    """125 000 unknowns: the state is 3 + 6 copies of y."""
    problem = mp.problems.fitzhugh_nagumo(250)
    solver = mp.DiagonalEK1(2, jacobian_diagonal=problem.jacobian_diagonal, **PAPER)
    loop, _ = copies_of_y(problem, solver, controller=mp.FixedStep(1e-5))
    assert loop < 22.01
    by_stencil = mp.DiagonalEK1(2, jacobian_diagonal=problem.stencil, **PAPER)
    loop, _ = copies_of_y(problem, by_stencil)
    assert loop < 26


@pytest.mark.parametrize(("prior", "copies"), [(None, 21), (mp.IOUP(), 24)], ids=["IWP", "IOUP"])
@pytest.mark.thorough
def test_spectral_ek1_on_the_fitzhugh_nagumo_pde(prior, copies):
    """The state is 3 + 6 copies of y; blocks that differ between modes exist in tiles only."""
    problem = mp.problems.fitzhugh_nagumo(128)
    loop, _ = copies_of_y(problem, mp.SpectralEK1(2, linear=problem.linear, prior=prior, corrections=1))
    assert loop < copies


@pytest.mark.parametrize(("boundary", "fields"), [("periodic", 1), ("neumann", 2)])
@pytest.mark.thorough
def test_models_of_space_take_their_own_fields_and_room_for_one_transform(boundary, fields):
    """Precisions of modes and, where there are walls, standard deviations; nothing else that lasts."""
    grid = mp.Grid((512, 500), boundary=boundary)
    problem = mp.problems.heat(grid.shape, boundary=boundary)
    plain, _ = copies_of_y(problem, mp.EK0(3, corrections=1))
    field, _ = copies_of_y(problem, mp.EK0(3, spatial=mp.GMRF(grid, kappa=5.0), corrections=1))
    matern, _ = copies_of_y(problem, mp.EK0(3, spatial=mp.Matern(grid), corrections=1))
    assert field < plain + fields + 1.01
    assert matern < plain + fields + 3.1
    # One transform per attempt, that is one FFT per axis.
    solver = mp.EK0(3, spatial=mp.Matern(grid), corrections=1)
    program, _ = compiled_loop(problem.f, problem.y0, (0.0, 1.0), solver=solver, save="end")
    assert len(re.findall(r" fft\(", program.as_text())) == 2


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("kind", [mp.EK0, mp.DiagonalEK1], ids=name)
@pytest.mark.wide(quick=3)
def test_nothing_is_gathered_densified_or_copied(kind, order):
    problem = mp.problems.lorenz96(4096)
    # The branch of a second correction copies a diagonal Jacobian, which a rejected step passes through.
    known = {"jacobian_diagonal": problem.jacobian_diagonal, "corrections": 1}
    solver = kind(order, **known if kind is mp.DiagonalEK1 else {})
    text = compiled_loop(problem.f, problem.y0, problem.t_span, solver=solver, save="end")[0].as_text()
    assert "gather(" not in text and "4096,4096" not in text
    assert not re.search(r"f64\[([\d,]+,)?4096\]\S* copy\(", text)


TEN_MILLION = """
import re
import jax
jax.config.update("jax_enable_x64", True)
import millipode as mp
problem = mp.problems.lorenz96(10**7)
sol = mp.solve(problem.f, problem.y0, (0.0, 0.02), solver=mp.EK0(order=2, corrections=1), save="end",
               controller=mp.FixedStep(1e-3))
assert int(sol.stats.steps) == 20 and sol.mean.dtype == "float64"
# VmHWM, because ru_maxrss remembers the process that started this one.
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.thorough
def test_ten_million_unknowns_in_two_and_a_half_gigabytes():
    run = subprocess.run(
        [sys.executable, "-c", TEN_MILLION],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert int(run.stdout.split()[-1]) < 2.5e6  # kilobytes
