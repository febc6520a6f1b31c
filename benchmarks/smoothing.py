"""What do smoothing and sampling cost on top of filtering?

The time of a solve relative to the same solve with ``save="end"``, which runs the filter alone: with ten
saved times and with all steps saved, each filtered, smoothed, and with joint samples. Run: ``python
benchmarks/smoothing.py [--quick]``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import publish, quick
from matplotlib.figure import Figure

import millipode as mp
from millipode.paper.measuring import Claim, Row, at_most, medians
from millipode.problems import Problem

VECTOR = mp.DynamicDiffusion(vector=True)


def cases(few: bool) -> dict[str, tuple[Problem, Any, dict]]:
    """Problem, solver and options by name; large problems take fixed steps, so that all do the same work."""
    large = mp.problems.lorenz96(10**6)._replace(t_span=(0.0, 0.1))
    fixed = dict(controller=mp.FixedStep(1e-3))
    found = {"Lorenz96, d = 10⁶, EK0(3)": (large, mp.EK0(3), fixed)}
    pleiades = mp.problems.pleiades()
    tight = dict(rtol=1e-6, atol=1e-6)
    found["Pleiades, EK0(4)"] = (pleiades, mp.EK0(4), tight)
    if not few:
        medium = mp.problems.lorenz96(10**5)._replace(t_span=(0.0, 0.05))
        diagonal = mp.DiagonalEK1(2, jacobian_diagonal=medium.jacobian_diagonal, diffusion=VECTOR)
        found["Lorenz96, d = 10⁵, DiagonalEK1(2)"] = (medium, diagonal, fixed)
        lotka_volterra = mp.problems.lotka_volterra()
        found["Lotka–Volterra, EK1(3)"] = (lotka_volterra, mp.EK1(3), dict(rtol=1e-5, atol=1e-5))
    return found


def ways(problem: Problem, solver: Any, options: dict, few: bool) -> dict[str, Callable[[], Any]]:
    """The calls that are compared, by name; all times are relative to the first."""
    f, y0, (t0, t1) = problem.f, problem.y0, problem.t_span
    times, key = jnp.linspace(t0, t1, 11)[1:], jax.random.key(0)

    def solve(**more: Any) -> Any:
        return mp.solve(f, y0, (t0, t1), solver=solver, **options, **more)

    found: dict[str, Callable[[], Any]] = {
        "filter": lambda: solve(save="end").mean,
        "ten times, filtered": lambda: solve(save=times, smooth=False).mean,
        "ten times, smoothed": lambda: solve(save=times).mean,
    }
    if not (few and y0.size >= 10**5):
        found["ten times, one sample"] = lambda: solve(save=times).sample(key, num=1)
    if y0.size < 10**5:
        found |= {
            "all steps, filtered": lambda: solve(save="steps", smooth=False).mean,
            "all steps, smoothed": lambda: solve(save="steps").mean,
            "all steps, ten samples": lambda: solve(save="steps").sample(key, num=10),
        }
    return found


def measure(few: bool) -> list[Row]:
    """One row per case and way."""
    rows = []
    for name, (problem, solver, options) in cases(few).items():
        found = ways(problem, solver, options, few)
        seconds = medians(list(found.values()), 3 if few else 5)
        for way, time in zip(found, seconds, strict=True):
            rows.append({"case": name, "way": way, "time [ms]": 1e3 * time, "/ filter": time / seconds[0]})
            print(rows[-1], flush=True)
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The promise about smoothing."""
    (ratio,) = [
        row["/ filter"] for row in rows if "10⁶" in row["case"] and row["way"] == "ten times, smoothed"
    ]
    return [at_most("EK0(3), d = 10⁶: smoothing at ten times / filter only", 2.0, ratio)]


def draw(rows: list[Row]) -> Figure:
    """The relative times as bars."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(8, 1.1 + 1.0 * len(names)), layout="constrained")
    axis = figure.subplots()
    ways = list(dict.fromkeys(row["way"] for row in rows))
    height = 0.8 / len(ways)
    for i, way in enumerate(ways):
        mine = [(names.index(row["case"]), row["/ filter"]) for row in rows if row["way"] == way]
        axis.barh(
            [y + (i - len(ways) / 2) * height for y, _ in mine], [x for _, x in mine], height, label=way
        )
    axis.set(
        yticks=range(len(names)), yticklabels=names, xlabel="time / time of the filter alone", xscale="log"
    )
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def main() -> None:
    """Measure, print and publish."""
    few = quick()
    rows = measure(few)
    publish("smoothing", "What do smoothing and sampling cost?", rows, draw(rows), claims(rows), few)


if __name__ == "__main__":
    main()
