"""The paper's fifth figure: how many steps does a stiff problem take?

Van der Pol's oscillator for growing μ, all steps adaptive.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import millipode as mp
from millipode.paper.experiment import Experiment, Point
from millipode.paper.measuring import Claim, Row, at_least

ORDER, RTOL, ATOL = 4, 1e-4, 1e-6
SOLVERS = {"EK0": mp.EK0, "DiagonalEK1": mp.DiagonalEK1, "EK1": mp.EK1}
STYLES = {"EK0": "o-", "DiagonalEK1": "^-", "EK1": "s-"}


def points(quick: bool) -> list[Point]:
    """Every solver at powers of ten of μ; each power takes an explicit solver ten times as many steps."""
    limit = 10**6 if quick else 10**9
    return [
        {"solver": name, "μ": 10.0**k, "limit": limit}
        for name in SOLVERS
        for k in (range(0, 7, 2) if quick else range(7))
    ]


def measure(point: Point, rows: Sequence[Row], folder: Path) -> Row:
    """The numbers of accepted and rejected steps; None if there would be too many."""
    name, mu = point["solver"], point["μ"]
    row: Row = {"solver": name, "μ": mu}
    before = [r for r in rows if r["solver"] == name]
    if before and before[-1]["steps"] is None:
        return row | {"steps": None, "rejected": None, "status": "not tried"}
    problem = mp.problems.van_der_pol(mu)
    diagonal = {"jacobian_diagonal": problem.jacobian_diagonal} if name == "DiagonalEK1" else {}
    sol = mp.solve(
        problem.f,
        problem.y0,
        problem.t_span,
        solver=SOLVERS[name](ORDER, corrections=1, **diagonal),
        rtol=RTOL,
        atol=ATOL,
        save="end",
        max_steps=point["limit"],
        throw=False,
    )
    steps, rejected = (int(sol.stats.steps), int(sol.stats.rejected)) if sol.success else (None, None)
    return row | {"steps": steps, "rejected": rejected, "status": sol.status.name}


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The ratios of the three solvers' steps, and whether DiagonalEK1 solves the stiffest problem."""
    steps = {(r["solver"], r["μ"]): r["steps"] for r in rows}
    found = []
    for mu in sorted({r["μ"] for r in rows}):
        diagonal, full, explicit = (steps[name, mu] for name in ("DiagonalEK1", "EK1", "EK0"))
        if explicit and diagonal and mu >= 100:
            ratio = explicit / diagonal
            found.append(at_least(f"μ = {mu:g}: steps of EK0 / DiagonalEK1 (the paper: > 1)", 1, ratio))
        if diagonal and full and mu >= 100:
            ratio = diagonal / full
            found.append(at_least(f"μ = {mu:g}: steps of DiagonalEK1 / EK1 (the paper: > 1)", 1, ratio))
    largest = max(r["μ"] for r in rows)
    solved = steps["DiagonalEK1", largest] is not None
    found.append(Claim(f"DiagonalEK1 solves μ = {largest:g}", "yes", float(solved), solved))
    return found


def draw(rows: Sequence[Row], folder: Path) -> Any:
    """Steps against μ, and two trajectories beside them."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, style in STYLES.items():
        mine = [r for r in rows if r["solver"] == name and r["steps"]]
        left.loglog([r["μ"] for r in mine], [r["steps"] for r in mine], style, label=name)
    left.set(
        xlabel="stiffness μ", ylabel="accepted steps", title=f"Van der Pol, ν = {ORDER}, rtol = {RTOL:g}"
    )
    left.grid(alpha=0.3)
    left.legend()
    for mu in (1.0, 100.0):
        problem = mp.problems.van_der_pol(mu)
        sol = mp.solve(
            problem.f, problem.y0, problem.t_span, solver=mp.EK1(ORDER, corrections=1), rtol=RTOL, atol=ATOL
        )
        right.plot(np.asarray(sol.t), np.asarray(sol.mean[:, 0]), label=f"μ = {mu:g}")
    right.set(xlabel="t", ylabel="y₁", title="mean of the EK1")
    right.legend()
    return figure


STABILITY = Experiment(
    "stability",
    "How many steps does a stiff problem take?",
    "The paper (Fig. 5): the diagonal EK1 is more stable than the EK0, less stable than the EK1, and solves "
    "Van der Pol for large μ.",
    points,
    measure,
    claims,
    draw,
)
