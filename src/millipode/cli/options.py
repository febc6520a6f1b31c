"""The options of ``millipode solve``."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from millipode.cli import catalogue

SolverName = enum.Enum("SolverName", {name: name for name in catalogue.SOLVERS}, type=str)  # type: ignore[misc]
DiffusionName = enum.Enum(  # type: ignore[misc]
    "DiffusionName", {name: name for name in catalogue.DIFFUSIONS}, type=str
)


class Format(enum.StrEnum):
    """The file formats of the dataset."""

    nc = "nc"
    zarr = "zarr"


class Movie(enum.StrEnum):
    """The file formats of the animation."""

    gif = "gif"
    mp4 = "mp4"


Problem = Annotated[
    str | None, typer.Argument(help="A problem of the library; 'millipode problems' lists them.")
]
Source = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE.PY:NAME",
        help="Your own problem instead: an mp.problems.Problem, or a function that returns one, in a "
        "file or a module.",
    ),
]
Size = Annotated[
    str | None, typer.Option(help="The number of unknowns, or of cells along each side: 64 or 64x32.")
]
Param = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A parameter of the problem; can be repeated."),
]
T1 = Annotated[float | None, typer.Option(help="The end of the time span, if not the problem's own.")]
Solver = Annotated[
    SolverName | None,
    typer.Option(help="By default spectral-ek1 for PDEs on grids, ek1 for a few unknowns, else ek0."),
]
Order = Annotated[int | None, typer.Option(min=1, max=11, help="ν, the number of derivatives in the state.")]
Rtol = Annotated[float, typer.Option(help="Relative tolerance.")]
Atol = Annotated[float, typer.Option(help="Absolute tolerance.")]
Diffusion = Annotated[
    DiffusionName | None, typer.Option(help="How γ of the prior is calibrated; dynamic by default.")
]
SaveAt = Annotated[
    str | None,
    typer.Option(
        metavar="5|T,T,...|steps|end",
        help="How many times to save, or which times, such as 0,0.5,1; or 'steps', or 'end'. By default "
        "5 for fields, and every step for a few unknowns.",
    ),
]
Smooth = Annotated[
    bool | None,
    typer.Option(help="Condition on all steps, or only on those before each time."),
]
Members = Annotated[
    int,
    typer.Option(
        min=0,
        help="The number of ensemble members, which make standard deviations reliable over long times. "
        "16 are plenty; 0 for the filter's own standard deviations.",
    ),
]
Samples = Annotated[int, typer.Option(min=0, help="The number of joint samples to write.")]
Seed = Annotated[int, typer.Option(help="The seed of the samples.")]
Float32 = Annotated[bool, typer.Option("--float32", help="Single precision.")]
MaxSteps = Annotated[int, typer.Option(min=1, help="The largest number of attempted steps.")]
Animate = Annotated[
    Movie | None,
    typer.Option(
        help="Also write an animation of a field, by default as a GIF with 60 times unless --save-at "
        "sets others."
    ),
]
FileFormat = Annotated[Format, typer.Option("--format", help="NetCDF or Zarr.")]
Plot = Annotated[bool, typer.Option(help="Draw a picture.")]
Out = Annotated[Path | None, typer.Option(help="The folder to write to; out/PROBLEM by default.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
