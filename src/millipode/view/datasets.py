"""Solutions as labelled ``xarray`` datasets, and their files."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from millipode.pde.grids import Grid
from millipode.view.viewable import Viewable, check_single

AXES = ("x", "y", "z")


def to_dataset(
    sol: Viewable,
    *,
    grid: Grid | None = None,
    components: Sequence[str] | None = None,
    samples: PyTree | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Any:
    """Mean, standard deviation and diffusion of a solution, with names for all axes.

    Args:
        sol: the solution, with concrete values.
        grid: the grid of the last axes of y, which become x, y, z with the cell centres as coordinates.
        components: names along the first axis of y.
        samples: samples from ``sol.sample``, to be included.
        attributes: attributes of the dataset; values that are neither numbers nor strings become JSON.

    Returns:
        An ``xarray.Dataset``. For an array y its variables are ``mean``, ``std`` and perhaps ``sample``;
        for a pytree there is one of each per leaf, such as ``mean_position``.
    """
    xarray = _needed("xarray")
    check_single(sol, "to_xarray takes")
    names = {"time": ("time", np.asarray(sol.t), {"long_name": "time", "units": "1"})}
    variables: dict[str, Any] = {}
    means = jax.tree_util.tree_leaves_with_path(sol.mean)
    draws = [None] * len(means) if samples is None else jax.tree.leaves(samples)
    for (path, mean), std, draw in zip(means, jax.tree.leaves(sol.std), draws, strict=True):
        leaf = jax.tree_util.keystr(path, simple=True, separator="_")
        suffix = f"_{leaf}" if leaf else ""
        dims, coordinates = _dimensions(mean.shape[1:], grid, components, leaf)
        names |= coordinates
        variables[f"mean{suffix}"] = (("time", *dims), np.asarray(mean), _about("posterior mean", leaf))
        variables[f"std{suffix}"] = (
            ("time", *dims),
            np.asarray(std),
            _about("posterior standard deviation", leaf),
        )
        if draw is not None:
            about = _about("joint samples of the posterior", leaf)
            variables[f"sample{suffix}"] = (("draw", "time", *dims), np.asarray(draw), about)
    variables |= _diffusion(sol)
    found = {key: _plain(value) for key, value in (attributes or {}).items()}
    outcome: dict[str, Any] = {
        "status": sol.status.name,
        "message": sol.message,
        "log_evidence": float(sol.log_evidence),
    }
    counts = {key: int(value) for key, value in sol.stats._asdict().items()}
    return xarray.Dataset(variables, names, {**outcome, **counts, **found})


def write(dataset: Any, path: Path) -> Path:
    """Write a dataset as NetCDF (``.nc``) or as Zarr (``.zarr``), and return the path.

    Args:
        dataset: the result of ``to_dataset``.
        path: the file to write, or to replace; its ending selects the format.
    """
    if path.suffix == ".zarr":
        _needed("zarr")
        dataset.to_zarr(path, mode="w", zarr_format=2)
    elif path.suffix == ".nc":
        _needed("h5netcdf")
        packed = {name: {"zlib": True, "complevel": 1} for name, x in dataset.data_vars.items() if x.size > 1}
        dataset.to_netcdf(path, engine="h5netcdf", encoding=packed)
    else:
        raise ValueError(f"A dataset is written as .nc or .zarr, got {path.name!r}.")
    return path


def _dimensions(
    shape: tuple[int, ...], grid: Grid | None, components: Sequence[str] | None, leaf: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of y's axes, and the coordinates of those axes that have coordinates."""
    prefix = f"{leaf}_" if leaf else ""
    rank = 0 if grid is None or shape[-len(grid.shape) :] != grid.shape else len(grid.shape)
    coordinates: dict[str, Any] = {}
    space: tuple[str, ...] = ()
    if grid is not None and rank:
        space = AXES[:rank] if rank <= len(AXES) else tuple(f"x{i}" for i in range(rank))
        for name, n, dx in zip(space, grid.shape, grid.spacing, strict=True):
            about = {"long_name": "cell centres", "units": "1"}
            coordinates[name] = (name, (np.arange(n) + 0.5) * dx, about)
    before = shape[: len(shape) - rank]
    stem = f"{prefix}component" if rank else f"{prefix}unknown"
    leading = (stem,) if len(before) == 1 else tuple(f"{stem}_{i}" for i in range(len(before)))
    if components is not None and not leaf and before and len(components) == before[0]:
        coordinates[leading[0]] = (leading[0], np.array(components, dtype=object), {})
    return (*leading, *space), coordinates


def _diffusion(sol: Viewable) -> dict[str, Any]:
    """The variables for γ̂², leaf by leaf: one number, one per time, one per unknown, or one per both."""
    found = {}
    shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(sol.mean)]
    leaves = jax.tree_util.tree_leaves_with_path(sol.diffusion)
    for (path, values), shape in zip(leaves, shapes, strict=False):
        leaf = jax.tree_util.keystr(path, simple=True, separator="_")
        values, times = np.asarray(values), len(sol.t)
        # If there are as many unknowns as times, one number per time cannot be told from one per unknown.
        if values.shape == shape == (times,):
            continue
        is_dynamic = values.ndim == len(shape) + 1 or (values.ndim == 1 and values.shape[0] == times)
        # If the solver works in another basis than the user, one value per unknown is one per mode.
        kind = "mode" if sol.is_in_modes else "unknown"
        stem = f"diffusion_{leaf}" if leaf else "diffusion"
        rest = tuple(f"{stem}_{kind}_{i}" for i in range(values.ndim - is_dynamic))
        dims = (*(("time",) if is_dynamic else ()), *rest)
        found[stem] = (dims, values, _about("calibrated diffusion γ²", leaf))
    return found


def _about(what: str, leaf: str) -> dict[str, str]:
    return {"long_name": f"{what} of {leaf or 'y'}", "units": "1"}


def _plain(value: Any) -> Any:
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)  # NetCDF has no booleans
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"Writing datasets needs {name}: pip install 'millipode[io]'.") from error
