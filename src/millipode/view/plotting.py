"""Plots of a posterior: lines with bands for a few unknowns, images for fields."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from millipode.view.viewable import Viewable, check_single

MAX_LINES = 12  # more unknowns than this are drawn as a field
MAX_COMPONENTS = 4  # a leading axis of at most this length numbers the components of a field
MAX_PIXELS = 512  # the largest number of pixels along a side of an image
PANELS = 5  # times at which a field in two dimensions is drawn, by default


def plot(
    sol: Viewable,
    *,
    components: Sequence[int] | None = None,
    samples: int = 0,
    key: Array | None = None,
    times: ArrayLike | None = None,
    points: int = 300,
    names: Sequence[str] | None = None,
) -> Any:
    """Draw a solution: mean and two standard deviations, or images of a field's mean and log10 std.

    A few unknowns are lines. A field with one axis in space is an image over space and time; one with two
    is a row of images at selected times. A short leading axis numbers the components of a field.

    Args:
        sol: the solution.
        components: unknowns to draw as lines, as indices into the flattened y.
        samples: the number of joint samples to draw beside the lines; needs ``smooth=True``.
        key: the random key of the samples, ``jax.random.key(0)`` by default.
        times: the times to draw; by default evenly spaced ones if the solution is continuous in time, else
            saved ones.
        points: the number of times at which lines and space–time images are evaluated.
        names: names along the first axis of y, if y is an array.

    Returns:
        The matplotlib figure.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'millipode[plot]'.") from error
    check_single(sol, "plot draws")
    shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(sol.mean)]
    unknowns = sum(int(np.prod(shape)) for shape in shapes)
    if components is not None or unknowns <= MAX_LINES:
        chosen = _chosen(components, unknowns)
        at = _times(sol, times, points)
        draws = None
        if samples:
            key = jax.random.key(0) if key is None else key
            draws = _flat(sol.sample(key, num=samples, at=at), 2)
        return _lines(plt, sol, chosen, at, names, draws)
    if samples:
        raise ValueError("samples are drawn as lines: choose unknowns with components=[...].")
    if any(_rank(shape) == 2 for shape in shapes):
        return _panels(plt, sol, _times(sol, times, PANELS), names)
    if all(_rank(shape) == 1 for shape in shapes):
        return _space_time(plt, sol, _times(sol, times, points), names)
    raise ValueError(
        "plot draws fields with one or two axes in space; for others, draw single unknowns with "
        "components=[...]."
    )


def _chosen(components: Sequence[int] | None, unknowns: int) -> list[int]:
    chosen = list(range(unknowns)) if components is None else [int(c) for c in components]
    if not chosen or not all(0 <= c < unknowns for c in chosen):
        raise ValueError(f"components must be indices from 0 to {unknowns - 1}, got {components}.")
    return chosen


def _times(sol: Viewable, times: ArrayLike | None, count: int) -> Array:
    """The given times, or else evenly spaced ones if the solution is continuous, or else saved ones."""
    if times is not None:
        return jnp.atleast_1d(jnp.asarray(times, sol.t.dtype))
    t = np.asarray(sol.t)
    if sol.is_continuous:
        inner = np.linspace(t[0], t[-1], count)
        # Curves include the steps; a few images are better evenly spaced.
        spread = np.union1d(t, inner) if count > PANELS and t.size <= 2 * count else inner
        return jnp.asarray(spread if t[-1] >= t[0] else np.sort(spread)[::-1])
    return jnp.asarray(t[np.unique(np.linspace(0, t.size - 1, min(count, t.size)).astype(int))])


class _Series(NamedTuple):
    """One field over time, with its name."""

    label: str
    mean: np.ndarray
    std: np.ndarray


def _series(sol: Viewable, times: Array, names: Sequence[str] | None) -> list[_Series]:
    """One series per leaf of y and per component of a field."""
    marginal = sol(times)
    result = []
    stds = jax.tree.leaves(marginal.std)
    for (path, mean), std in zip(jax.tree_util.tree_leaves_with_path(marginal.mean), stds, strict=True):
        label = "y" + jax.tree_util.keystr(path, simple=True, separator=".").join(
            ["_", ""] if path else ["", ""]
        )
        mean, std = np.asarray(mean), np.asarray(std)
        if _has_components(mean.shape[1:]):
            named = names if not path and names is not None and len(names) == mean.shape[1] else None
            labels = named or [f"{label}[{c}]" for c in range(mean.shape[1])]
            result += [_Series(labels[c], mean[:, c], std[:, c]) for c in range(mean.shape[1])]
        else:
            result.append(_Series(label, mean, std))
    return result


def _has_components(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and shape[0] <= MAX_COMPONENTS


def _rank(shape: tuple[int, ...]) -> int:
    return len(shape) - _has_components(shape)


def _names(sol: Viewable, given: Sequence[str] | None) -> list[str]:
    """A name for every unknown, in the order of the flattened y."""
    if given is not None and getattr(sol.mean, "shape", ())[1:] == (len(given),):
        return list(given)
    names = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(sol.mean):
        stem = jax.tree_util.keystr(path, simple=True, separator=".") or "y"
        for index in np.ndindex(leaf.shape[1:]):
            names.append(stem + (f"[{', '.join(map(str, index))}]" if index else ""))
    return names


def _flat(x: Any, leading: int) -> np.ndarray:
    """All unknowns of a pytree along one last axis."""
    leaves = [np.asarray(leaf).reshape(*leaf.shape[:leading], -1) for leaf in jax.tree.leaves(x)]
    return np.concatenate(leaves, axis=-1)


def _lines(
    plt: Any,
    sol: Viewable,
    chosen: list[int],
    times: Array,
    given: Sequence[str] | None,
    draws: np.ndarray | None,
) -> Any:
    """Mean and two standard deviations of some unknowns; draws are (sample, time, unknown)."""
    marginal, names = sol(times), _names(sol, given)
    t, mean, std = np.asarray(times), _flat(marginal.mean, 1), _flat(marginal.std, 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=[3, 1.3], layout="constrained"
    )
    marker = None if sol.is_continuous else "."
    for order, i in enumerate(chosen):
        colour = f"C{order % 10}"
        top.plot(t, mean[:, i], color=colour, label=names[i], marker=marker)
        top.fill_between(
            t, mean[:, i] - 2 * std[:, i], mean[:, i] + 2 * std[:, i], color=colour, alpha=0.25, lw=0
        )
        if draws is not None:
            top.plot(t, draws[:, :, i].T, color=colour, alpha=0.4, lw=0.6)
        positive = np.where(std[:, i] > 0, std[:, i], np.nan)
        bottom.semilogy(t, positive, color=colour, marker=marker, lw=1)
    top.set_ylabel("mean ± 2 std" + ("" if draws is None else f", {len(draws)} samples"))
    top.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    bottom.set_ylabel("std")
    bottom.set_xlabel("t")
    if t.size > 1:
        bottom.set_xlim(t.min(), t.max())
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _log10(std: np.ndarray) -> np.ndarray:
    return np.log10(np.where(std > 0, std, np.nan))


def _thinned(x: np.ndarray, axis: int) -> np.ndarray:
    stride = -(-x.shape[axis] // MAX_PIXELS)
    return x[(slice(None),) * (axis % x.ndim) + (slice(None, None, stride),)]


def _space_time(plt: Any, sol: Viewable, times: Array, names: Sequence[str] | None) -> Any:
    series, t = _series(sol, times, names), np.asarray(times)
    figure, grid = plt.subplots(
        len(series),
        2,
        figsize=(9, 0.6 + 2.6 * len(series)),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for row, s in zip(grid, series, strict=True):
        space = _thinned(np.arange(s.mean.shape[1]), 0)
        images = ((s.mean, "viridis", f"{s.label}, mean"), (_log10(s.std), "magma", f"{s.label}, log10 std"))
        for axes, (values, colours, title) in zip(row, images, strict=True):
            mesh = axes.pcolormesh(
                t, space, _thinned(values, 1).T, cmap=colours, shading="nearest", rasterized=True
            )
            figure.colorbar(mesh, ax=axes)
            axes.set_title(title)
        row[0].set_ylabel("unknown")
    for axes in grid[-1]:
        axes.set_xlabel("t")
    return figure


def _panels(plt: Any, sol: Viewable, times: Array, names: Sequence[str] | None) -> Any:
    series, t = [s for s in _series(sol, times, names) if s.mean.ndim == 3], np.asarray(times)
    rows = [(s.mean, "viridis", s.label) for s in series]
    rows += [(_log10(s.std), "magma", f"{s.label}, log10 std") for s in series]
    figure, grid = plt.subplots(
        len(rows),
        t.size,
        figsize=(1.2 + 2 * t.size, 0.4 + 2.1 * len(rows)),
        squeeze=False,
        layout="constrained",
    )
    for axes_row, (values, colours, label) in zip(grid, rows, strict=True):
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
        for axes, value in zip(axes_row, values, strict=True):
            image = axes.imshow(
                _thinned(_thinned(value, 0), 1), cmap=colours, vmin=low, vmax=high, origin="lower"
            )
            axes.set_xticks([])
            axes.set_yticks([])
        axes_row[0].set_ylabel(label)
        figure.colorbar(image, ax=list(axes_row), shrink=0.85)
    for axes, time in zip(grid[0], t, strict=True):
        axes.set_title(f"t = {time:.3g}")
    return figure
