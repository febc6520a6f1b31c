"""Problems and solvers by name, with descriptions from their docstrings."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import millipode as mp
from millipode.problems import Problem

SIZES: dict[str, int | tuple[int, ...]] = {
    "burgers": 256,
    "fisher_kpp": 256,
    "lorenz96": 40,
    "heat": (64, 64),
}
USUAL_SIZE = 64  # cells along each side of all other problems
DENSE = 30  # up to this many unknowns, a full Jacobian is the safe choice

SOLVERS: dict[str, type] = {
    "ek0": mp.EK0,
    "diagonal-ek1": mp.DiagonalEK1,
    "spectral-ek1": mp.SpectralEK1,
    "ek1": mp.EK1,
}
DIFFUSIONS = {
    "dynamic": mp.DynamicDiffusion(),
    "dynamic-vector": mp.DynamicDiffusion(vector=True),
    "constant": mp.ConstantDiffusion(),
    "constant-vector": mp.ConstantDiffusion(vector=True),
}


class UsageError(Exception):
    """The command line asks for something impossible; the message says why, and what to do instead."""


class Entry(NamedTuple):
    """A family of problems.

    Attributes:
        name: the name of its function.
        make: the function, which takes a size and parameters and returns a ``Problem``.
        title: the first line of the function's docstring.
        equation: the lines of the equation in that docstring.
        parameters: the names and defaults of the parameters other than the size.
        size: the name of the parameter that sets the size; None if the size is fixed.
    """

    name: str
    make: Callable[..., Problem]
    title: str
    equation: tuple[str, ...]
    parameters: dict[str, Any]
    size: str | None


def entry(name: str, make: Callable[..., Problem]) -> Entry:
    """The entry of a function, from its signature and docstring."""
    parameters = dict(inspect.signature(make).parameters)
    size = next((p for p in ("n", "d", "shape") if p in parameters), None)
    if size is not None:
        parameters.pop(size)
    lines = (inspect.getdoc(make) or name).splitlines()
    indented = [line for line in lines[: _sections(lines)] if line.startswith("    ")]
    defaults = {key: p.default for key, p in parameters.items()}
    return Entry(name, make, lines[0], tuple(line.strip() for line in indented), defaults, size)


def _sections(lines: list[str]) -> int:
    """The index of the line at which the arguments section begins."""
    return next((i for i, line in enumerate(lines) if line.startswith("Args:")), len(lines))


def problems() -> dict[str, Entry]:
    """All problems of ``mp.problems``, by name."""
    makers = {name: getattr(mp.problems, name) for name in mp.problems.__all__ if name != "Problem"}
    return {name: entry(name, make) for name, make in makers.items()}


def find(name: str) -> Entry:
    """The entry of a problem of the library; its name may have hyphens in place of underscores."""
    found = problems()
    key = name.replace("-", "_").lower()
    if key not in found:
        raise UsageError(
            f"There is no problem {name!r}. There are {', '.join(found)}; 'millipode problems' describes "
            "them. Pass your own with --from file.py:name."
        )
    return found[key]


def chosen(
    name: str | None, source: str | None, size: str | None, given: Sequence[str]
) -> tuple[str, Problem, dict[str, Any]]:
    """The name, the problem itself and the parameters that the command line asks for."""
    if (name is None) == (source is None):
        raise UsageError("Name a problem of the library, or pass your own with --from file.py:name.")
    found = find(name) if name is not None else load(source or "")
    if isinstance(found, Entry):
        return found.name, *make(found, size, given)
    if size is not None or given:
        raise UsageError("--size and --param are for functions that make problems; this is a problem.")
    return (source or "").rpartition(":")[2], found, {}


def load(source: str) -> Entry | Problem:
    """A user's own problem, or a function that makes one, from ``module:name`` or ``file.py:name``."""
    where, colon, name = source.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"--from takes file.py:name or module:name, got {source!r}.")
    value = getattr(_module(where), name, None)
    if value is None:
        raise UsageError(f"--from {source}: there is no {name!r} in {where}.")
    if isinstance(value, Problem):
        return value
    if callable(value):
        return entry(name, value)
    raise UsageError(
        f"--from {source}: {name} must be an mp.problems.Problem(f, y0, t_span, ...), or a function that "
        f"returns one, but it is a {type(value).__name__}."
    )


def _module(where: str) -> Any:
    path = Path(where)
    try:
        if path.suffix != ".py":
            sys.path.insert(0, "")
            return importlib.import_module(where)
        if not path.is_file():
            raise UsageError(f"--from: there is no file {where}.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module
    except UsageError:
        raise
    except Exception as error:  # a user's file may raise anything
        raise UsageError(f"--from: {where} cannot be imported: {type(error).__name__}: {error}") from error


def make(chosen: Entry, size: str | None, given: Sequence[str]) -> tuple[Problem, dict[str, Any]]:
    """The problem of a certain size, with parameters given as ``name=value``; and all of its parameters."""
    values = dict(_parameter(chosen, text) for text in given)
    if size is not None:
        if chosen.size is None:
            raise UsageError(f"{chosen.name} has a size of its own: leave out --size.")
        values[chosen.size] = _size(size, chosen.size == "shape")
    elif chosen.size is not None and chosen.size not in values:
        default = inspect.signature(chosen.make).parameters[chosen.size].default
        values[chosen.size] = default if default is not inspect.Parameter.empty else usual_size(chosen)
    missing = [k for k, v in chosen.parameters.items() if v is inspect.Parameter.empty and k not in values]
    if missing:
        raise UsageError(f"{chosen.name} needs {', '.join(f'--param {name}=...' for name in missing)}.")
    try:
        problem = chosen.make(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{chosen.name}: {error}") from error
    if not isinstance(problem, Problem):
        kind = type(problem).__name__
        raise UsageError(f"{chosen.name} must return an mp.problems.Problem(f, y0, t_span, ...), got {kind}.")
    defaults = {k: v for k, v in chosen.parameters.items() if v is not inspect.Parameter.empty}
    return problem, defaults | values


def usual_size(chosen: Entry) -> int | tuple[int, ...]:
    """The size of a problem if the command line does not set it."""
    return SIZES.get(chosen.name, USUAL_SIZE)


def _parameter(chosen: Entry, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    known = [*chosen.parameters, *([chosen.size] if chosen.size else [])]
    if not equals or name not in known:
        what = f"has {', '.join(known)}" if known else "has no parameters"
        raise UsageError(f"--param takes name=value; {chosen.name} {what}; got {text!r}.")
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
    default = chosen.parameters.get(name)
    return name, float(parsed) if isinstance(default, float) and isinstance(parsed, int) else parsed


def _size(text: str, several: bool) -> int | tuple[int, ...]:
    parts = text.lower().replace("x", ",").split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--size takes a positive number, or several such as 64x32, got {text!r}.")
    sizes = tuple(int(part) for part in parts)
    if len(sizes) > 1 and not several:
        raise UsageError(f"--size takes one number for this problem, got {text!r}.")
    return sizes if len(sizes) > 1 else sizes[0]


def solver(name: str | None, problem: Problem, order: int | None, diffusion: str | None) -> tuple[str, Any]:
    """The name of a solver and the solver: the one that is asked for, or else one that suits the problem."""
    unknowns = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(problem.y0))
    if name is None:
        stiff = "spectral-ek1" if problem.linear is not None else None
        name = stiff or ("ek1" if unknowns <= DENSE and diffusion in (None, "dynamic", "constant") else "ek0")
    options: dict[str, Any] = {} if diffusion is None else {"diffusion": DIFFUSIONS[diffusion]}
    if name == "spectral-ek1":
        if problem.linear is None:
            raise UsageError(
                "spectral-ek1 needs the linear part of a PDE on a grid, which this problem does not have: "
                "use --solver ek0, diagonal-ek1 or ek1."
            )
        options["linear"] = problem.linear
    if name == "diagonal-ek1":
        options["jacobian_diagonal"] = problem.jacobian_diagonal or problem.stencil
    try:
        return name, SOLVERS[name](order, **options)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def listing(rows: Mapping[str, tuple[str, ...]]) -> str:
    """A table with the names on the left and the lines of each name beside it."""
    width = max(map(len, rows)) + 2
    blocks = []
    for name, (title, *lines) in rows.items():
        blocks.append("\n".join([f"{name:<{width}}{title}", *(" " * width + line for line in lines)]))
    return "\n".join(blocks)


def list_problems() -> str:
    """All problems: one line for each, with the equation and the parameters below."""
    rows = {}
    for name, found in problems().items():
        size = [] if found.size is None else [f"--size, by default {_shown(found)}"]
        given = [f"{key}={value}" for key, value in found.parameters.items()]
        about = [f"({'; '.join([*size, *(['--param ' + ', '.join(given)] if given else [])])})"]
        rows[name] = (
            found.title,
            *(f"  {line}" for line in found.equation),
            *(about if size or given else []),
        )
    return listing(rows)


def _shown(found: Entry) -> str:
    default = inspect.signature(found.make).parameters[found.size or ""].default
    size = default if default is not inspect.Parameter.empty else usual_size(found)
    return "x".join(map(str, size)) if isinstance(size, tuple) else str(size)


def list_solvers() -> str:
    """All solvers: one line for each, with its linearisation."""
    return listing({name: ((inspect.getdoc(kind) or "").splitlines()[0],) for name, kind in SOLVERS.items()})
