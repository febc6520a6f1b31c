"""What do spatial covariances and priors with a rate cost?

The time of a step on a grid with 10⁶ cells, relative to a step with independent unknowns, for EK0 and
SpectralEK1. All solvers take the same fixed steps. Run: ``python benchmarks/spatial.py [--quick]``.
"""

from collections.abc import Callable
from typing import Any

import jax
from harness import publish, quick
from jaxtyping import Array
from matplotlib.figure import Figure

import millipode as mp
from millipode.paper.measuring import Claim, Row, at_most, medians

STEP, FEW_STEPS, STEPS = 1e-4, 4, 24


def equation(grid: mp.Grid) -> Callable[[Array, Array], Array]:
    """The right-hand side of a bistable reaction with a little diffusion, which is not stiff."""
    return lambda t, y: 1e-7 * grid.laplacian(y) + y * (1 - y) * (y - 0.3)


def solvers(grid: mp.Grid) -> dict[str, dict[str, Any]]:
    """The solvers in groups; times are relative to the first of each group."""
    models = {
        "independent": None,
        "Matérn": mp.Matern(grid, 1.5, 0.1, nugget=1e-6),
        "random field, α = 2": mp.GMRF(grid, kappa=20.0),
    }
    linear = grid.diffusion(1e-7)
    ek0 = {name: mp.EK0(4, spatial=model) for name, model in models.items()}
    ek0["IOUP, one rate"] = mp.EK0(4, prior=mp.IOUP(rate=-1.0))
    ek0["Matérn process"] = mp.EK0(4, prior=mp.MaternProcess(length_scale=1.0))
    spectral = {name: mp.SpectralEK1(2, linear=linear, spatial=model) for name, model in models.items()}
    return {"EK0(4)": ek0, "SpectralEK1(2)": spectral}


def measure(few: bool) -> list[Row]:
    """One row per boundary and solver."""
    n = 256 if few else 1000
    rows: list[Row] = []
    for boundary in ("neumann", "periodic"):
        grid = mp.Grid((n, n), boundary=boundary)
        f, y0 = equation(grid), jax.random.uniform(jax.random.key(0), grid.shape)
        for kind, group in solvers(grid).items():

            def solve(solver: Any, steps: int, f: Any = f, y0: Array = y0) -> Array:
                span, controller = (0.0, steps * STEP), mp.FixedStep(STEP)
                return mp.solve(f, y0, span, solver=solver, controller=controller, save="end").mean

            calls = [lambda s=s, k=k: solve(s, k) for s in group.values() for k in (FEW_STEPS, STEPS)]
            seconds = medians(calls, 3 if few else 7)
            per_step = [
                (long - short) / (STEPS - FEW_STEPS)
                for short, long in zip(seconds[::2], seconds[1::2], strict=True)
            ]
            for name, time in zip(group, per_step, strict=True):
                row: Row = {"solver": kind, "boundary": boundary, "prior": name, "step [ms]": 1e3 * time}
                rows.append(row | {"/ independent": time / per_step[0]})
                print(rows[-1], flush=True)
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The promises about a Matérn covariance."""
    return [
        at_most(
            f"{kind}, 1000² cells, {boundary}: a step with a Matérn model / with independent unknowns",
            bound,
            next(
                row["/ independent"]
                for row in rows
                if (row["solver"], row["boundary"], row["prior"]) == (kind, boundary, "Matérn")
            ),
        )
        for kind, bound in (("EK0(4)", 3.0), ("SpectralEK1(2)", 1.3))
        for boundary in ("neumann", "periodic")
    ]


def draw(rows: list[Row]) -> Figure:
    """The relative times as bars."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    names = list(dict.fromkeys((row["solver"], row["prior"]) for row in rows))
    for i, boundary in enumerate(("neumann", "periodic")):
        mine = [row for row in rows if row["boundary"] == boundary]
        axis.barh(
            [j + 0.4 * (i - 0.5) for j in range(len(names))],
            [row["/ independent"] for row in mine],
            0.38,
            label=boundary,
        )
    axis.set(
        yticks=range(len(names)),
        yticklabels=[f"{kind}, {prior}" for kind, prior in names],
        xlabel="time per step / with independent unknowns",
    )
    axis.axvline(1, color="k", lw=0.8)
    axis.invert_yaxis()
    axis.grid(alpha=0.3, axis="x")
    axis.legend()
    return figure


def main() -> None:
    """Measure, print and publish."""
    jax.config.update("jax_enable_x64", True)
    few = quick()
    rows = measure(few)
    publish("spatial", "What do spatial covariances cost?", rows, draw(rows), claims(rows), few)


if __name__ == "__main__":
    main()
