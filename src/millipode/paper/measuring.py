"""Measurements: the machine and its bandwidth, fair timing, claims, and results on disk.

An experiment answers one question with rows (dictionaries), a figure of them, and claims, which compare a
promise with what was measured. ``write`` puts them into a folder: a JSON file with the machine, the date, all
versions and the bandwidth of the run, a Markdown table, and a PNG. The paper's figures and ``benchmarks/``
share all of this.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PACKAGES = ("millipode", "jax", "jaxlib", "numpy", "scipy", "diffrax", "exponax", "probdiffeq")

Row = dict[str, Any]


class Claim(NamedTuple):
    """A promise and its measurement.

    Attributes:
        what: the quantity, in words.
        promised: the bound on it, as text.
        measured: its measured value.
        holds: whether the measured value keeps the promise.
    """

    what: str
    promised: str
    measured: float
    holds: bool


def at_most(what: str, bound: float, measured: float) -> Claim:
    """The claim that a number is at most ``bound``."""
    return Claim(what, f"≤ {bound:g}", float(measured), bool(measured <= bound))


def at_least(what: str, bound: float, measured: float) -> Claim:
    """The claim that a number is at least ``bound``."""
    return Claim(what, f"≥ {bound:g}", float(measured), bool(measured >= bound))


def bandwidth(size: int = 2**24, repeats: int = 7) -> float:
    """Bytes per second of a ← b + s a, which reads two arrays and writes one, beyond the size of caches.

    Args:
        size: the number of entries of each array.
        repeats: how often to measure, for the median.
    """

    @jax.jit
    def triad(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda _, a: b + 0.5 * a, a)

    a, b = jnp.ones(size), jnp.ones(size)
    (seconds,) = medians([lambda: triad(a, b)], repeats)
    return 10 * 3 * size * a.dtype.itemsize / seconds


def timings(functions: Sequence[Callable[[], Any]], repeats: int) -> np.ndarray:
    """Seconds of warm calls, one row per function; functions take turns, so that noise affects all alike."""
    times = np.zeros((len(functions), repeats))
    for function in functions:
        jax.block_until_ready(function())
    for i in range(repeats):
        for j, function in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[j, i] = time.perf_counter() - start
    return times


def medians(functions: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each function."""
    return np.median(timings(functions, repeats), axis=1).tolist()


def processor() -> str:
    """The name of the processor, as far as it is known."""
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        if names:
            return names[0].split(":")[1].strip()
    return platform.processor()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> Row:
    """The date, the processor, all versions and the bandwidth of a run."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions(),
        "triad [GB/s]": bandwidth() / 1e9,
    }


def description(about: Row) -> str:
    """The result of ``machine`` as one line of text."""
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    bandwidth = f"triad {about['triad [GB/s]']:.0f} GB/s"
    return f"{about['date']}, {about['processor']}, {about['cores']} cores, {bandwidth}; {versions}."


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with all columns that occur."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["| " + " | ".join(map(_cell, columns)) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(x: Any) -> str:
    if isinstance(x, bool):
        return "yes" if x else "**no**"
    return "" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x).replace("|", r"\|")


def as_json(data: Any) -> str:
    """Data as JSON, with null for infinite and NaN numbers, which JSON does not have."""

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [plain(value) for value in x]
        return None if isinstance(x, float) and not np.isfinite(x) else x

    return json.dumps(plain(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write(
    folder: Path, name: str, question: str, rows: Sequence[Row], figure: Any, claims: Sequence[Claim]
) -> str:
    """Write the tables, the data and the picture into a folder, and return the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    about, promises = machine(), [claim._asdict() for claim in claims]
    data = {"question": question, "about": about, "claims": promises, "rows": list(rows)}
    (folder / f"{name}.json").write_text(as_json(data))
    parts = [f"# {question}", description(about), *([table(promises)] if promises else []), table(rows)]
    (folder / f"{name}.md").write_text("\n\n".join([*parts, f"![]({name}.png)"]) + "\n")
    figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
    return "\n\n".join(parts)
