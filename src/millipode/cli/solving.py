"""``millipode solve``: solve a problem, write its solution to files, and draw it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import millipode as mp
from millipode.cli.catalogue import UsageError
from millipode.paper.measuring import as_json, versions
from millipode.problems import Problem
from millipode.view import animation, datasets
from millipode.view.plotting import MAX_LINES

STEPS = 1000  # up to this many unknowns, all steps are saved by default
FRAMES = 60  # the number of times of an animation, by default


class Job(NamedTuple):
    """What to solve, and how.

    Attributes:
        name: the name of the problem.
        problem: the problem.
        parameters: its parameters, by name.
        solver_name: the name of the solver on the command line.
        solver: the solver.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
        save: what to save, as for ``mp.solve``.
        smooth: whether to smooth, as for ``mp.solve``.
        members: the number of ensemble members; 0 for none.
        max_steps: the largest number of attempted steps.
        progress: how to show progress, as for ``mp.solve``.
    """

    name: str
    problem: Problem
    parameters: dict[str, Any]
    solver_name: str
    solver: Any
    rtol: float
    atol: float
    save: Any
    smooth: bool | None
    members: int
    max_steps: int
    progress: Any


class Outputs(NamedTuple):
    """What to write, and where.

    Attributes:
        folder: the folder of all files.
        suffix: the format of the dataset, ``"nc"`` or ``"zarr"``.
        samples: the number of joint samples to write.
        seed: the seed of the samples.
        animate: the format of an animation, ``"gif"`` or ``"mp4"``; None for no animation.
        pictures: whether to draw a picture.
    """

    folder: Path
    suffix: str
    samples: int
    seed: int
    animate: str | None
    pictures: bool


def span(problem: Problem, t1: float | None, single: bool) -> Problem:
    """The problem with another end time (unless t1 is None), in single or double precision."""
    t0, end = problem.t_span
    kind = jnp.float32 if single else None
    y0 = jax.tree.map(lambda x: jnp.asarray(x, kind or jnp.result_type(float)), problem.y0)
    return problem._replace(y0=y0, t_span=(t0, end if t1 is None else t1))


def unknowns(problem: Problem) -> int:
    """The number d of unknowns."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(problem.y0))


def save_plan(text: str | None, problem: Problem, animate: bool) -> Any:
    """The value of ``--save-at`` for ``mp.solve``: ``"steps"``, ``"end"`` or an array of times."""
    t0, t1 = problem.t_span
    if text is None:
        if animate:
            text = str(FRAMES)
        else:
            text = "5" if problem.grid is not None or unknowns(problem) > STEPS else "steps"
    if text in ("steps", "end"):
        return text
    try:
        if text.isdigit():
            count = int(text)
            if count < 1:
                raise ValueError
            return np.linspace(t0, t1, count) if count > 1 else np.array([t1])
        return np.array([float(part) for part in text.split(",")])
    except ValueError as error:
        raise UsageError(
            f"--save-at takes 'steps', 'end', a number of times such as 5, or times such as 0,0.5,1; got "
            f"{text!r}."
        ) from error


def run(job: Job) -> tuple[mp.Solution, float]:
    """The solution and the seconds it took; a failed or interrupted solve returns what it has reached."""
    problem, start = job.problem, time.perf_counter()
    try:
        sol = mp.solve(
            problem.f,
            problem.y0,
            problem.t_span,
            solver=job.solver,
            rtol=job.rtol,
            atol=job.atol,
            save=job.save,
            smooth=job.smooth,
            uncertainty=mp.Transported(job.members) if job.members else None,
            max_steps=job.max_steps,
            throw=False,
            progress=job.progress,
        )
    except mp.SolveInterrupted as interruption:
        sol = interruption.solution
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    jax.block_until_ready((sol.mean, sol.std))
    return sol, time.perf_counter() - start


def check_outputs(outputs: Outputs, job: Job) -> None:
    """Raise ``UsageError`` for outputs that cannot be written, before anything is solved."""
    try:
        outputs.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {outputs.folder} cannot be made: {error.strerror}.") from error
    is_joint = job.smooth is not False and not (isinstance(job.save, str) and job.save == "end")
    if outputs.samples > job.members > 0:
        raise UsageError(f"--samples {outputs.samples} needs as many members, and there are {job.members}.")
    if outputs.samples and not job.members and not is_joint:
        raise UsageError(
            "--samples needs --smooth and saved steps or times: joint samples are of the posterior given all "
            "data."
        )
    if outputs.animate is not None:
        try:
            animation.check(outputs.animate, job.problem.grid, job.problem.y0)
        except ValueError as error:
            raise UsageError(str(error)) from error


def write(job: Job, outputs: Outputs, sol: mp.Solution, seconds: float) -> dict[str, Any]:
    """Write all files, and return the summary, which is one of them."""
    folder, problem = outputs.folder, job.problem
    files: list[Path] = []
    about = description(job)
    if len(sol.t):
        draws = sol.sample(jax.random.key(outputs.seed), num=outputs.samples) if outputs.samples else None
        dataset = datasets.to_dataset(
            sol, grid=problem.grid, components=problem.components, samples=draws, attributes=about
        )
        files.append(datasets.write(dataset, folder / f"solution.{outputs.suffix}"))
        if outputs.pictures:
            files.append(_picture(sol, problem, folder / "solution.png"))
        if outputs.animate is not None and problem.grid is not None:
            movie = folder / f"solution.{outputs.animate}"
            files.append(animation.animate(sol, movie, grid=problem.grid, components=problem.components))
    summary = {**about, **outcome(problem, sol), "seconds": seconds, "files": [path.name for path in files]}
    (folder / "summary.json").write_text(as_json(summary))
    return summary


def description(job: Job) -> dict[str, Any]:
    """The settings of a job, as plain values."""
    solver, save = job.solver, job.save
    kind = type(solver.diffusion).__name__.removesuffix("Diffusion").lower()
    return {
        "problem": job.name,
        "parameters": {key: value for key, value in job.parameters.items() if _is_plain(value)},
        "unknowns": unknowns(job.problem),
        "t_span": [float(t) for t in job.problem.t_span],
        "solver": job.solver_name,
        "order": solver.order_for(job.rtol),
        "diffusion": kind + ("-vector" if solver.diffusion.vector else ""),
        "structure": solver.structure,
        "rtol": job.rtol,
        "atol": job.atol,
        "save": save if isinstance(save, str) else [float(t) for t in save],
        "smooth": True if job.smooth is None else job.smooth,
        "members": job.members,
        "dtype": str(jax.tree.leaves(job.problem.y0)[0].dtype),
        "versions": versions(),
    }


def outcome(problem: Problem, sol: mp.Solution) -> dict[str, Any]:
    """The outcome of a solve, as plain values."""
    found = {
        "success": sol.success,
        "status": sol.status.name,
        "message": sol.message,
        "reached": float(sol.reached[0]),
        "saved_times": len(sol.t),
        "stats": {key: int(value) for key, value in sol.stats._asdict().items()},
        "log_evidence": float(sol.log_evidence),
    }
    if len(sol.t):
        final = [jax.tree.map(lambda x: x[-1], x) for x in (sol.mean, sol.std)]
        found["final"] = {"t": float(sol.t[-1]), "rms_mean": _rms(final[0]), "rms_std": _rms(final[1])}
        if problem.solution is not None:
            error = jax.tree.map(jnp.subtract, final[0], problem.solution(sol.t[-1]))
            found["final"]["rms_error"] = _rms(error)
    return found


def _picture(sol: mp.Solution, problem: Problem, path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure = sol.plot(names=problem.components, components=_shown(problem))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _shown(problem: Problem) -> list[int] | None:
    """The unknowns to draw: six evenly spread ones, or None for all if they are few or a 1D or 2D field."""
    d = unknowns(problem)
    if d <= MAX_LINES or (problem.grid is not None and len(problem.grid.shape) <= 2):
        return None
    return [int(i) for i in np.linspace(0, d - 1, 6)]


def _rms(x: Any) -> float:
    leaves: Sequence[Any] = jax.tree.leaves(x)
    flat = np.concatenate([np.asarray(leaf, float).ravel() for leaf in leaves])
    return float(np.sqrt(np.mean(flat**2)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | tuple | list)
