"""What do transported ensemble members cost?

The time of a step of EK0(3) on Lorenz96 with 10⁶ unknowns and 2 to 16 members, relative to a step without;
and the time of a solve of the FitzHugh–Nagumo PDE on 250² cells until T = 20 with SpectralEK1(2), with and
without 16 members: of the first solve (with compilation) and of the second. Run: ``python
benchmarks/members.py [--quick]``.
"""

import time
from typing import Any

import jax
from harness import publish, quick
from jaxtyping import Array
from matplotlib.figure import Figure

import millipode as mp
from millipode.paper.measuring import Claim, Row, at_most, timings

STEP, FEW_STEPS, STEPS = 1e-4, 10, 50
MEMBERS = (2, 4, 8, 16)


def steps(few: bool) -> list[Row]:
    """One row per number of members and kind of noise."""
    problem = mp.problems.lorenz96(100_000 if few else 1_000_000)
    kinds: list[Any] = [None, *(mp.Transported(s) for s in MEMBERS), mp.Transported(8, noise="white")]

    def solve(uncertainty: Any, count: int) -> Array:
        span, controller = (0.0, count * STEP), mp.FixedStep(STEP)
        return mp.solve(
            problem.f,
            problem.y0,
            span,
            solver=mp.EK0(3),
            controller=controller,
            save="end",
            uncertainty=uncertainty,
        ).posterior.mean

    calls = [lambda u=u, k=k: solve(u, k) for u in kinds for k in (FEW_STEPS, STEPS)]
    # The minimum over repeats, because disturbances only make a step longer, and plain steps are short.
    seconds = timings(calls, 3 if few else 7).min(axis=1).tolist()
    per_step = [(b - a) / (STEPS - FEW_STEPS) for a, b in zip(seconds[::2], seconds[1::2], strict=True)]
    return [
        {
            "problem": f"Lorenz96, {problem.y0.size} unknowns, EK0(3)",
            "members": 0 if u is None else u.members,
            "noise": None if u is None else u.noise,
            "step [ms]": 1e3 * t,
            "/ plain": t / per_step[0],
        }
        for u, t in zip(kinds, per_step, strict=True)
    ]


def solves(few: bool) -> list[Row]:
    """The solves of the FitzHugh–Nagumo PDE, without and with ensemble members."""
    problem = mp.problems.fitzhugh_nagumo(64 if few else 250)
    rows: list[Row] = []
    for uncertainty in (None, mp.Transported(16)):
        taken = []
        for _ in range(2):
            start = time.perf_counter()
            sol = mp.solve(
                problem.f,
                problem.y0,
                (0.0, 20.0),
                solver=mp.SpectralEK1(2, linear=problem.linear),
                rtol=1e-3,
                atol=1e-5,
                save="end",
                uncertainty=uncertainty,
            )
            jax.block_until_ready(sol.std)
            taken.append(time.perf_counter() - start)
        members = 0 if uncertainty is None else uncertainty.members
        row: Row = {"problem": f"FitzHugh–Nagumo, {problem.y0.size} unknowns, SpectralEK1(2)"}
        rows.append(row | {"members": members, "first solve [s]": taken[0], "solve [s]": taken[1]})
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The promises about the cost of ensemble members."""
    ratio = next(r["/ plain"] for r in rows if r["members"] == 8 and r["noise"] == "defect")
    first = next(r["first solve [s]"] for r in rows if "first solve [s]" in r and r["members"] == 16)
    return [
        at_most("EK0(3), 8 members: a step / a plain step", 8, ratio),
        at_most("FitzHugh–Nagumo until T = 20, 16 members, the first time [s]", 60, first),
    ]


def draw(rows: list[Row]) -> Figure:
    """The cost of a step against the number of ensemble members."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axis = figure.subplots()
    counted = [r for r in rows if "/ plain" in r and r.get("noise") != "white"]
    axis.plot([r["members"] for r in counted], [r["/ plain"] for r in counted], "o-")
    axis.set(xlabel="members", ylabel="time of a step / of a plain step", title=counted[0]["problem"])
    axis.grid(alpha=0.3)
    return figure


def main() -> None:
    """Measure, print and publish."""
    few = quick()
    rows = [*steps(few), *solves(few)]
    publish("members", "What do transported members cost?", rows, draw(rows), claims(rows), few)


if __name__ == "__main__":
    main()
