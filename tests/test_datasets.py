"""Solutions as datasets: every axis has its name, every variable its values."""

import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import millipode as mp
from common import CONSTANT, CONSTANT_VECTOR, DYNAMIC, DYNAMIC_VECTOR, jit, name
from millipode.view import datasets


def decay(t, y):
    return -y


@pytest.mark.parametrize("diffusion", [CONSTANT, DYNAMIC, CONSTANT_VECTOR, DYNAMIC_VECTOR], ids=name)
def test_the_diffusion_has_as_many_axes_as_it_needs(diffusion):
    sol = mp.solve(decay, jnp.ones(3), (0.0, 1.0), solver=mp.EK0(1, diffusion=diffusion), save=[0.5, 1.0])
    data = sol.to_xarray(components=["a", "b", "c"])
    dims = (("time",) if diffusion in (DYNAMIC, DYNAMIC_VECTOR) else ()) + (
        ("diffusion_unknown_0",) if diffusion.vector else ()
    )
    assert data["diffusion"].dims == dims
    np.testing.assert_array_equal(data["diffusion"], sol.diffusion)
    np.testing.assert_array_equal(data["std"].sel(unknown="b"), sol.std[:, 1])


def test_modes_are_not_taken_for_points(tmp_path):
    grid = mp.Grid((4, 3), (2.0, 1.0))
    solver = mp.SpectralEK1(1, linear=grid.diffusion(0.1), diffusion=DYNAMIC_VECTOR)
    y0 = jnp.arange(12.0).reshape(4, 3)
    sol = mp.solve(lambda t, y: 0.1 * grid.laplacian(y), y0, (0.0, 1.0), solver=solver, save=[1.0])
    data = sol.to_xarray(grid=grid, attributes={"note": "x", "flag": True, "list": [1, 2]})
    assert data["mean"].dims == ("time", "x", "y") and data["diffusion"].dims[1:] == (
        "diffusion_mode_0",
        "diffusion_mode_1",
    )
    np.testing.assert_allclose(data["x"], [0.25, 0.75, 1.25, 1.75])
    for path in (tmp_path / "a.nc", tmp_path / "a.zarr"):
        datasets.write(data, path)
        datasets.write(data, path)  # replaces what was there
        with xarray.open_dataset(path, engine="h5netcdf" if path.suffix == ".nc" else "zarr") as again:
            xarray.testing.assert_identical(again.load(), data)


def test_pytrees_have_one_variable_per_leaf():
    y0 = {"position": jnp.ones((2, 2)), "speed": jnp.zeros(())}
    sol = mp.solve(lambda t, y: y, y0, (0.0, 0.1), save="end")
    data = sol.to_xarray()
    assert data["mean_position"].dims == ("time", "position_unknown_0", "position_unknown_1")
    assert data["std_speed"].dims == ("time",) and data.attrs["status"] == "SUCCESS"


def test_what_cannot_be_written_is_refused(tmp_path):
    sol = mp.solve(decay, jnp.ones(2), (0.0, 1.0), save="end")
    with pytest.raises(ValueError, match=".nc or .zarr"):
        datasets.write(sol.to_xarray(), tmp_path / "a.csv")
    with pytest.raises(ValueError, match="concrete values"):
        jit(lambda y: mp.solve(decay, y, (0.0, 1.0), save="end").to_xarray())(jnp.ones(2))
