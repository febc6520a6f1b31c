"""The commands and options of ``millipode``."""

import enum
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError as error:
    raise SystemExit("The millipode command needs typer: pip install 'millipode[cli]'.") from error

from millipode import __version__
from millipode.cli import catalogue, options
from millipode.cli.catalogue import UsageError
from millipode.run.progress import Interruption

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Figure(enum.StrEnum):
    """The paper's figures that can be measured again, or all of them."""

    showcase = "showcase"
    step_cost = "step-cost"
    pleiades = "pleiades"
    high_dimensional = "high-dimensional"
    stability = "stability"
    all = "all"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"millipode {__version__}")
        raise typer.Exit


@app.callback()
def millipode(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Solve differential equations with uncertainty, from one unknown to tens of millions."""


@contextmanager
def _errors_told() -> Iterator[None]:
    """Exit with a message and a code for bad usage, and for Ctrl-C before there was anything to save."""
    try:
        yield
    except UsageError as error:
        typer.echo(f"millipode: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("Interrupted before there was anything to save.", err=True)
        raise typer.Exit(1) from None


@app.command()
def solve(
    problem: options.Problem = None,
    *,
    source: options.Source = None,
    size: options.Size = None,
    param: options.Param = None,
    t1: options.T1 = None,
    solver: options.Solver = None,
    order: options.Order = None,
    rtol: options.Rtol = 1e-3,
    atol: options.Atol = 1e-6,
    diffusion: options.Diffusion = None,
    save_at: options.SaveAt = None,
    smooth: options.Smooth = None,
    members: options.Members = 0,
    samples: options.Samples = 0,
    seed: options.Seed = 0,
    float32: options.Float32 = False,
    max_steps: options.MaxSteps = 1_000_000,
    animate: options.Animate = None,
    file_format: options.FileFormat = options.Format.nc,
    plot: options.Plot = True,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Solve a problem; write solution.nc, solution.png and summary.json.

    Exit codes: 0 if the problem was solved, 1 if the solver failed or was interrupted (what was saved until
    then is written nevertheless), 2 for bad usage.
    """
    import jax

    if not float32:
        jax.config.update("jax_enable_x64", True)
    _without_a_screen()
    from millipode.cli import solving

    with _errors_told():
        name, given, parameters = catalogue.chosen(problem, source, size, param or [])
        given = solving.span(given, t1, float32)
        kinds = (solver and solver.value, diffusion and diffusion.value)
        solver_name, recipe = catalogue.solver(kinds[0], given, order, kinds[1])
        save = solving.save_plan(save_at, given, animate is not None)
        show = (lambda now: None) if quiet else True
        job = solving.Job(
            name, given, parameters, solver_name, recipe, rtol, atol, save, smooth, members, max_steps, show
        )
        folder = Path("out") / name if out is None else out
        outputs = solving.Outputs(folder, file_format.value, samples, seed, animate and animate.value, plot)
        solving.check_outputs(outputs, job)
        if not quiet:
            how = f"{type(recipe).__name__}({recipe.order_for(rtol)})"
            typer.echo(f"{name}: {solving.unknowns(given)} unknowns, {how}", err=True)
        with _terminated_as_interrupted():
            solution, seconds = solving.run(job)
            with Interruption():  # so that no file is left half written
                summary = solving.write(job, outputs, solution, seconds)
    _tell(summary, folder)
    if not summary["success"]:
        raise typer.Exit(1)


@app.command()
def reproduce(
    figure: Annotated[Figure, typer.Argument(help="Which of the paper's figures.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version, in less than two minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("out/paper"),
) -> None:
    """Measure a figure of the paper again, and compare the paper's claims with the measurements.

    An interrupted run continues where it stopped: data points are stored in the folder.
    """
    import jax

    jax.config.update("jax_enable_x64", True)
    _without_a_screen()
    try:
        from tqdm import tqdm

        from millipode.paper import EXPERIMENTS
        from millipode.paper import reproduce as measure
    except ImportError as error:
        raise SystemExit(f"reproduce needs more packages: pip install 'millipode[cli]' ({error}).") from error
    names = list(EXPERIMENTS) if figure is Figure.all else [figure.value]
    for name in names:
        experiment = EXPERIMENTS[name]
        with tqdm(total=1, desc=name, bar_format="{desc}: {n_fmt}/{total_fmt} {bar} [{elapsed}]") as bar:

            def show(done: int, total: int, what: str, bar: Any = bar, name: str = name) -> None:
                bar.total, bar.n = total, done
                bar.set_description_str(f"{name}: {what}")

            try:
                report = measure(experiment, out, quick, show)
            except KeyboardInterrupt:
                bar.close()
                typer.echo(f"Interrupted. The same command goes on from here; points are in {out}.", err=True)
                raise typer.Exit(1) from None
        typer.echo(experiment.claimed)
        for claim in report.claims:
            verdict = "holds" if claim.holds else "DOES NOT HOLD"
            typer.echo(f"  {claim.what}: measured {claim.measured:.3g}, promised {claim.promised}: {verdict}")
        typer.echo(f"picture  {report.picture.resolve()}")


@app.command()
def problems() -> None:
    """List all problems, with their equations."""
    typer.echo(catalogue.list_problems())


@app.command()
def solvers() -> None:
    """List all solvers, and what they know of the Jacobian."""
    typer.echo(catalogue.list_solvers())


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Print versions, devices, memory and bandwidth, for a bug report."""
    from millipode.cli.doctor import as_text, report

    found = report()
    typer.echo(json.dumps(found, indent=1) if as_json else as_text(found))
    if found["self-test"] != "ok":
        raise typer.Exit(1)


def _without_a_screen() -> None:
    import matplotlib

    matplotlib.use("Agg")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM, which batch systems send before they stop a job, like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(summary: dict[str, Any], folder: Path) -> None:
    """Print the outcome of a solve, and where its files are."""
    stats = summary["stats"]
    if not summary["success"]:
        typer.echo(summary["message"], err=True)
        kept = f"{summary['saved_times']} saved times" if summary["saved_times"] else "nothing"
        typer.echo(f"Saved until then: {kept}, up to t = {summary['reached']:.6g}.", err=True)
    lines = {
        "steps": f"{stats['steps']} accepted, {stats['rejected']} rejected, {stats['f_evals']} evaluations",
        "time": f"{summary['seconds']:.2f} s, compilation included",
    }
    if "final" in summary:
        final = summary["final"]
        error = f", error {final['rms_error']:.3g}" if "rms_error" in final else ""
        lines[f"t = {final['t']:.6g}"] = (
            f"rms mean {final['rms_mean']:.4g}, std {final['rms_std']:.3g}{error}"
        )
    lines["files"] = ", ".join([*summary["files"], "summary.json"])
    lines["folder"] = str(folder.resolve())
    for key, value in lines.items():
        typer.echo(f"{key:<10}{value}")


def explicit(words: list[str]) -> list[str]:
    """The words of a command line, with ``gif`` after an ``--animate`` that has no value.

    This is needed because the value of a typer option cannot be left out.

    >>> explicit(["solve", "heat", "--animate", "--quiet"])
    ['solve', 'heat', '--animate', 'gif', '--quiet']
    >>> explicit(["solve", "heat", "--animate", "mp4"])
    ['solve', 'heat', '--animate', 'mp4']
    """
    found = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        found += [word, "gif"] if word == "--animate" and following not in list(options.Movie) else [word]
    return found


def main() -> None:
    """Run the command."""
    sys.exit(app(explicit(sys.argv[1:])))
