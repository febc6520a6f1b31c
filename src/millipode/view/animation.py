"""Animations of fields: mean and standard deviation over time, as GIF or MP4."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from millipode.pde.grids import Grid
from millipode.view.viewable import Viewable

FRAMES_PER_SECOND = 12


def check(kind: str, grid: Grid | None, y: PyTree) -> None:
    """Raise ``ValueError`` if an animation cannot be made.

    Args:
        kind: the format, ``"gif"`` or ``"mp4"``.
        grid: the grid of the solution, if there is one.
        y: the initial value or the mean, for its structure.
    """
    if kind not in ("gif", "mp4"):
        raise ValueError(f"Animations are gif or mp4, got {kind!r}.")
    if grid is None or len(grid.shape) > 2 or not hasattr(y, "shape"):
        raise ValueError("Only fields on a grid with one or two axes can be animated.")
    if kind == "mp4" and _ffmpeg() is None:
        raise ValueError("An mp4 needs ffmpeg: install it, or pip install imageio-ffmpeg, or choose gif.")


def animate(
    sol: Viewable, path: Path, *, grid: Grid, components: Sequence[str] | None = None, dpi: int = 90
) -> Path:
    """Draw every saved time as a frame, and return the path.

    Args:
        sol: a solution with fields on the grid.
        path: the file to write, ending in .gif or .mp4.
        grid: the grid of the last axes of y.
        components: names along the first axis of y, if there is one before the grid's.
        dpi: dots per inch; a panel is about three inches wide.
    """
    check(path.suffix[1:], grid, sol.mean)
    from matplotlib import animation as movies
    from matplotlib import pyplot as plt
    from matplotlib import rcParams

    figure, draw = (_lines if len(grid.shape) == 1 else _images)(plt, sol, grid, components)
    if path.suffix == ".gif":
        writer: Any = movies.PillowWriter(fps=FRAMES_PER_SECOND)
    else:
        rcParams["animation.ffmpeg_path"] = _ffmpeg()
        writer = movies.FFMpegWriter(
            fps=FRAMES_PER_SECOND, extra_args=["-vf", "crop=trunc(iw/2)*2:trunc(ih/2)*2"]
        )
    movies.FuncAnimation(figure, draw, frames=len(sol.t)).save(path, writer=writer, dpi=dpi)
    plt.close(figure)
    return path


def _ffmpeg() -> str | None:
    found = shutil.which("ffmpeg")
    if found is not None:
        return found
    try:
        import imageio_ffmpeg
    except ImportError:
        return None
    return imageio_ffmpeg.get_ffmpeg_exe()


def _fields(
    sol: Viewable, grid: Grid, components: Sequence[str] | None
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """The name, the mean and the standard deviation of each component, as arrays (time, *grid)."""
    mean, std = (np.asarray(x).reshape(len(sol.t), -1, *grid.shape) for x in (sol.mean, sol.std))
    count = mean.shape[1]
    named = components if components is not None and len(components) == count else None
    names = named or (["u"] if count == 1 else [f"y[{i}]" for i in range(count)])
    return [(name, mean[:, i], std[:, i]) for i, name in enumerate(names)]


def _lines(plt: Any, sol: Viewable, grid: Grid, components: Sequence[str] | None) -> Any:
    fields = _fields(sol, grid, components)
    (x,) = (np.asarray(axis) for axis in grid.coordinates)
    figure, axes = plt.subplots(
        len(fields), 1, figsize=(6, 0.8 + 2.4 * len(fields)), squeeze=False, sharex=True, layout="constrained"
    )

    def draw(frame: int) -> None:
        for axis, (name, mean, std) in zip(axes[:, 0], fields, strict=True):
            axis.clear()
            low, high = (mean - 2 * std).min(), (mean + 2 * std).max()
            band = mean[frame] - 2 * std[frame], mean[frame] + 2 * std[frame]
            axis.fill_between(x, *band, alpha=0.3, lw=0)
            axis.plot(x, mean[frame])
            axis.set(ylabel=f"{name}, mean ± 2 std", ylim=(low, high + 1e-12), xlim=(0, grid.lengths[0]))
        axes[-1, 0].set_xlabel("x")
        figure.suptitle(f"t = {float(sol.t[frame]):.4g}")

    return figure, draw


def _images(plt: Any, sol: Viewable, grid: Grid, components: Sequence[str] | None) -> Any:
    fields = _fields(sol, grid, components)
    columns = len(fields)
    figure, axes = plt.subplots(
        2, columns, figsize=(0.6 + 3.4 * columns, 6.2), squeeze=False, layout="constrained"
    )
    extent = (0, grid.lengths[0], 0, grid.lengths[1])
    images = []
    for column, (name, mean, std) in enumerate(fields):
        known = np.log10(np.where(std > 0, std, np.nan))
        for row, (values, colours, title) in enumerate(
            ((mean, "viridis", f"{name}, mean"), (known, "magma", f"{name}, log10 std"))
        ):
            finite = values[np.isfinite(values)]
            low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
            image = axes[row, column].imshow(
                np.swapaxes(values[0], 0, 1), cmap=colours, vmin=low, vmax=high, origin="lower", extent=extent
            )
            figure.colorbar(image, ax=axes[row, column], shrink=0.85)
            axes[row, column].set(title=title, xticks=[], yticks=[])
            images.append((image, values))

    def draw(frame: int) -> None:
        for image, values in images:
            image.set_data(np.swapaxes(values[frame], 0, 1))
        figure.suptitle(f"t = {float(sol.t[frame]):.4g}")

    return figure, draw
