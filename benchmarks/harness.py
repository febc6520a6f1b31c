"""What the benchmarks share: the machine and its bandwidth, fair timing, and results on disk.

A benchmark is a list of rows (dictionaries) and a figure of them. ``publish`` writes both into
``benchmarks/results``: JSON with the machine, the date and all versions, a Markdown table, and a PNG.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "diffrax", "probdiffeq")

Row = dict[str, Any]


def bandwidth(size: int = 2**24, repeats: int = 7) -> float:
    """Bytes per second of a ← b + s a on arrays that fit in no cache: two are read, one is written."""

    @jax.jit
    def triad(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda _, a: b + 0.5 * a, a)

    a, b = jnp.ones(size), jnp.ones(size)
    (seconds,) = medians([lambda: triad(a, b)], repeats)
    return 10 * 3 * size * a.dtype.itemsize / seconds


def medians(functions: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each function, warm, called in turns so that noise hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        jax.block_until_ready(function())
    for _ in range(repeats):
        for function, record in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function())
            record.append(time.perf_counter() - start)
    return [float(np.median(record)) for record in times]


def per_step(run: Callable[[int], Callable[[], Any]], steps: int, repeats: int) -> float:
    """Marginal seconds of a step: the difference between runs of 2n and of n steps."""
    short, long = medians([run(steps), run(2 * steps)], repeats)
    return (long - short) / steps


def machine() -> Row:
    """Where and when, for the record."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        model = names[0].split(":")[1].strip() if names else model
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line per row, with the columns of the first."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [f"{x:.3g}" if isinstance(x, float) else str(x) for x in (row.get(c, "") for c in columns)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def publish(name: str, title: str, rows: Sequence[Row], figure: Figure, **context: Any) -> None:
    """Print the table, and write it beside the data and the picture."""
    RESULTS.mkdir(exist_ok=True)
    about = machine() | context
    text = table(rows)
    summary = f"{about['processor']}, {about['cores']} cores, {about['date']}, JAX {about['versions']['jax']}"
    (RESULTS / f"{name}.json").write_text(json.dumps({"about": about, "rows": list(rows)}, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(f"# {title}\n\n{summary}\n\n{text}\n")
    figure.savefig(RESULTS / f"{name}.png", dpi=150, bbox_inches="tight")
    print(text)
