"""What do a second correction, and the standard deviation as it comes, cost?

Lorenz96 from a state on its attractor, adaptive steps: the marginal time of a step of an EK0 with one
correction (the paper's filter), with two, and with two and the error estimate behind ``sol.std``. Beside it,
what the compiled loop reads and writes in a step, and what memory it needs beyond its state, both in copies
of y: these do not depend on the machine, whose caches hold a part of 10⁶ unknowns. Run: ``python
benchmarks/corrections.py [--quick]``.
"""

import jax
import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure

import millipode as mp
from millipode.paper.measuring import Claim, Row, at_most
from millipode.paper.methods import Method, ours
from millipode.paper.step_cost import marginals, pair, settled
from millipode.prepare import prepare
from millipode.problems import Problem
from millipode.run.packing import Packed
from millipode.run.programs import advance_in_place, begin

ONE, TWO, DEFAULT = "one correction", "two corrections", "two, and sol.std as it comes"


def options(name: str) -> tuple[int, str | None]:
    """Corrections and uncertainty of a way to solve."""
    return {ONE: (1, None), TWO: (2, "filter"), DEFAULT: (2, None)}[name]


def method(order: int, name: str) -> Method:
    """An EK0 of some order, in one of the three ways."""
    corrections, uncertainty = options(name)
    return ours(mp.EK0, order, corrections=corrections, uncertainty=uncertainty)


def inspected(problem: Problem, order: int, name: str) -> tuple[float, float]:
    """Passes over y in one turn of the compiled loop, and the memory that it allocates, in copies of y."""
    corrections, uncertainty = options(name)
    how = dict(solver=mp.EK0(order, corrections=corrections), uncertainty=uncertainty, save="end")
    setup, y0, *_ = prepare(problem.f, problem.y0, problem.t_span, **how)
    packed = Packed(setup)
    loop = advance_in_place.lower(packed, jax.eval_shape(begin, packed, y0), np.int32(1)).compile()
    return loop.cost_analysis()[
        "bytes accessed"
    ] / y0.nbytes, loop.memory_analysis().temp_size_in_bytes / y0.nbytes


def measure(orders: dict[int, list[int]], repeats: int) -> list[Row]:
    """One row per size, order and way."""
    rows: list[Row] = []
    for d in orders:
        problem = settled(d)
        for order in orders[d]:
            names = (ONE, TWO, DEFAULT)
            pairs = [pair(method(order, name), problem, 0.6) for name in names]
            seconds = marginals(pairs, repeats, 60)
            for name, time in zip(names, seconds, strict=True):
                passes, memory = inspected(problem, order, name)
                row: Row = {"d": d, "ν": order, "EK0 with": name, "step [ms]": 1e3 * time}
                row |= {"/ one correction": time / seconds[0], "/ two corrections": time / seconds[1]}
                rows.append(row | {"passes over y": passes, "memory [copies of y]": memory})
                print(rows[-1], flush=True)
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The promises: medians over the orders."""
    found = []
    for d in sorted({row["d"] for row in rows}):

        def over(name: str, column: str, d: int = d) -> float:
            return float(np.median([r[column] for r in rows if r["d"] == d and r["EK0 with"] == name]))

        what = f"EK0, d = {d}, median over orders:"
        found += [
            at_most(f"{what} a step with two corrections / with one", 1.45, over(TWO, "/ one correction")),
            at_most(f"{what} with sol.std as it comes / without", 1.5, over(DEFAULT, "/ two corrections")),
            at_most(
                f"{what} more memory for a second correction, copies of y",
                1.01,
                over(TWO, "memory [copies of y]") - over(ONE, "memory [copies of y]"),
            ),
        ]
    return found


def draw(rows: list[Row]) -> Figure:
    """The time of a step over that of one correction, one group of bars per size and order."""
    groups = list(dict.fromkeys((row["d"], row["ν"]) for row in rows))
    figure = Figure(figsize=(1.2 * len(groups) + 2, 3.5), layout="constrained")
    axis = figure.subplots()
    for i, name in enumerate((ONE, TWO, DEFAULT)):
        heights = [row["/ one correction"] for row in rows if row["EK0 with"] == name]
        axis.bar(np.arange(len(groups)) + 0.28 * (i - 1), heights, 0.26, label=name)
    axis.set_xticks(range(len(groups)), [f"d = {d:.0e}\nν = {order}" for d, order in groups])
    axis.set_ylabel("time of a step / one correction")
    axis.grid(alpha=0.3, axis="y")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def main() -> None:
    """Measure, print and publish."""
    few = quick()
    rows = measure({10**6: [4]} if few else {10**5: [4], 10**6: [3, 4, 5, 7], 2**24: [4]}, 3 if few else 5)
    publish("corrections", "What does a second correction cost?", rows, draw(rows), claims(rows), few)


if __name__ == "__main__":
    main()
