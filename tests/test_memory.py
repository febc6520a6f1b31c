"""What fits into memory: what structures store, and what is free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millipode as mp
from common import CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR, final_carry
from millipode import memory
from millipode.covariance import STRUCTURES


def nbytes(x):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(x))


GRID = mp.Grid((5, 4))
LINEAR = GRID.diffusion(np.array([0.1, 0.02]), reaction=[[-1.0, 0.5], [2.0, -3.0]])


@pytest.mark.parametrize(
    "solver",
    [
        mp.EK0(3),
        mp.EK0(2, diffusion=CONSTANT_VECTOR),
        mp.DiagonalEK1(2, diffusion=DYNAMIC),
        mp.DiagonalEK1(2, diffusion=DYNAMIC_VECTOR),
        mp.EK1(2, structure="dense"),
        mp.EK1(2),
        mp.SpectralEK1(2, linear=LINEAR),
    ],
    ids=lambda s: f"{type(s).__name__}-{s.structure}-{s.diffusion.vector}",
)
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.wide(quick=4)
def test_what_is_planned_for_a_step_is_what_is_saved(solver, smooth):
    y0 = jnp.ones((2, 5, 4))
    sol = mp.solve(lambda t, y: -y, y0, (0.0, 1.0), solver=solver, smooth=smooth)
    needs = memory.Needs.of(y0, solver, solver.order, None)
    parts = [sol.posterior.mean, sol.posterior.std, sol.posterior.covariance, sol.posterior.filtered]
    if solver.diffusion.vector:
        parts.append(sol.posterior.gamma)
    assert needs.per_step(smooth) == nbytes(parts) / len(sol.t)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_know_their_own_storage(structure):
    solvers = {
        "kronecker": mp.EK0(2),
        "blockdiagonal": mp.DiagonalEK1(2),
        "dense": mp.EK1(2, structure="dense"),
        "coupled": mp.SpectralEK1(2, linear=LINEAR),
    }
    solver = solvers[structure]
    y0 = jnp.ones((2, 5, 4))
    _, carry = final_carry(lambda t, y: -y, y0, (0.0, 0.1), solver=solver, save="end")
    storage = STRUCTURES[structure].storage(y0.size, 3, solver.components)
    assert 8 * storage.root == nbytes(carry.state.covariance)
    assert 8 * storage.smoothed == nbytes(carry.state.covariance.square())


def test_members_count_as_the_single_precision_that_they_are():
    y0, uncertainty = jnp.ones(2**14), mp.Transported(4)
    needs = memory.Needs.of(y0, mp.EK0(2), 2, uncertainty)
    _, carry = final_carry(
        lambda t, y: -y, y0, (0.0, 0.1), solver=mp.EK0(2), save="end", uncertainty=uncertainty
    )
    assert needs.members == nbytes(carry.state.members.chunks) == 4 * 3 * 2**14 * 4
    assert needs.per_saved_members == 4 * 2**14 * 4


def group(root, path, limit, used, caches=0, version=2):
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    for name, value in zip(names, (limit, used)):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {caches}\n")


def test_limits_of_containers_count(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("0::/outer/inner\n")
    group(tmp_path, "outer", 1000, 300)
    group(tmp_path, "outer/inner", "max", 200)
    assert memory._free_in_groups(proc, tmp_path) == [700]
    group(tmp_path, "outer/inner", 800, 500, caches=100)
    assert sorted(memory._free_in_groups(proc, tmp_path)) == [400, 700]
    proc.write_text("3:cpu,memory:/job\n2:pids:/\n")
    group(tmp_path, "memory/job", 640, 40, version=1)
    assert memory._free_in_groups(proc, tmp_path) == [600]
    assert memory._free_in_groups(tmp_path / "nothing", tmp_path) == []


def test_what_is_promised_is_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "_last", memory._Look())
    assert 0 < memory.available() <= memory._free_on_machine() * 1.1
    monkeypatch.setattr(memory, "_free_in_groups", lambda: [12_345])
    assert memory.available() > 12_345  # looked up a moment ago
    monkeypatch.setattr(memory, "_last", memory._Look())
    assert memory.available() == 12_345
    with pytest.raises(ValueError, match=r"(?s)dense covariance.*is available"):
        mp.solve(lambda t, y: -y, jnp.ones(100), (0.0, 1.0), solver=mp.EK1(3, structure="dense"))
