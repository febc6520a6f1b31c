"""How much time buys how much accuracy?

The paper's third figure: root-mean-square error of the final value against the time of a warm solve, for our
solvers and for those of probdiffeq, diffrax and SciPy. The tables also have the evaluations of f, and χ²/d,
the mean over the unknowns of (error / standard deviation)², which is 1 if the uncertainty is right.
``methods.py`` shows how each library is called. Explicit methods are left out of the stiff problem. On the
Pleiades, an EK0 also runs without the error estimate behind ``sol.std`` ("filter"), inside of a user's own
``jit``, and both. Run: ``python benchmarks/work_precision.py [--quick]`` (needs the ``bench`` extra).
"""

import re
from functools import partial

import diffrax
import numpy as np
from harness import publish, quick
from matplotlib import colormaps
from matplotlib.figure import Figure
from methods import DENSE, ISOTROPIC, evaluations, from_diffrax, from_probdiffeq, inside_jit

import millipode as mp
from millipode.paper import pleiades
from millipode.paper.measuring import Claim, Row, at_least, at_most
from millipode.paper.methods import Method, from_scipy, jax_jacobian, ours
from millipode.paper.pleiades import PATIENCE, Task, precision, reference, time_for

ACCURACIES = [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9]
VECTOR = mp.DynamicDiffusion(vector=True)
# An EK0 with the standard deviation as it comes, with that of the filter, and both inside of ``jit``.
FILTER, JIT, FILTER_JIT = "filter", "jit", "filter, jit"


def tasks(few: bool) -> dict[str, Task]:
    """The problems, by name."""
    found = {"Pleiades": pleiades.task()}
    if few:
        return found
    more = {
        "Van der Pol, μ = 1000": van_der_pol(1e3),
        "Lorenz96, d = 20": lorenz96(),
        "Lotka–Volterra": lotka_volterra(),
        "Van der Pol, μ = 10": van_der_pol(10),
    }
    return found | more


def lorenz96() -> Task:
    """Lorenz96 with 20 unknowns, for as long as its chaotic solution can be followed."""
    problem = mp.problems.lorenz96(20)._replace(t_span=(0.0, 5.0))
    # Slices of a padded copy, which is what np.roll would cost once, not three times.
    padded = np.empty(23)

    def f(t: float, y: np.ndarray) -> np.ndarray:
        padded[2:-1], padded[:2], padded[-1] = y, y[-2:], y[0]
        return (padded[3:] - padded[:-3]) * padded[1:-2] - y + 8.0

    return Task(problem, f, jax_jacobian(problem))


def lotka_volterra() -> Task:
    """The Lotka–Volterra equations."""

    def f(t: float, y: np.ndarray) -> list[float]:
        prey, predators = y
        meetings = 0.05 * prey * predators
        return [0.5 * prey - meetings, meetings - 0.5 * predators]

    def jacobian(t: float, y: np.ndarray) -> list[list[float]]:
        prey, predators = y
        return [[0.5 - 0.05 * predators, -0.05 * prey], [0.05 * predators, 0.05 * prey - 0.5]]

    return Task(mp.problems.lotka_volterra(), f, jacobian)


def van_der_pol(mu: float) -> Task:
    """Van der Pol's oscillator; it counts as stiff for μ > 100."""

    def f(t: float, y: np.ndarray) -> list[float]:
        return [y[1], mu * ((1 - y[0] ** 2) * y[1] - y[0])]

    def jacobian(t: float, y: np.ndarray) -> list[list[float]]:
        return [[0.0, 1.0], [-mu * (2 * y[0] * y[1] + 1), mu * (1 - y[0] ** 2)]]

    return Task(mp.problems.van_der_pol(mu), f, jacobian, stiff=mu > 100)


EXPLICIT_ORDERS = (3, 4, 5, 6, 7, 8)


def variants() -> dict[str, Method]:
    """An EK0 of every order, in those ways of calling it that are compared on the Pleiades only."""
    found = {}
    for order in EXPLICIT_ORDERS:
        solver = mp.EK0(order)
        found[f"EK0({order}), {FILTER}"] = ours(mp.EK0, order, corrections=2, uncertainty="filter")
        found[f"EK0({order}), {JIT}"] = inside_jit(solver)
        found[f"EK0({order}), {FILTER_JIT}"] = inside_jit(solver, uncertainty="filter")
    return found


def methods(task: Task, few: bool) -> dict[str, Method]:
    """All methods that are compared on a problem, by name."""
    d = task.problem.y0.size
    scipy = partial(from_scipy, f=task.f, jacobian=task.jacobian)
    implicit = {
        **{f"EK1({order})": ours(mp.EK1, order, corrections=4) for order in (3, 5) if d < 10},
        **{
            f"TS1({order}), dense (probdiffeq)": from_probdiffeq(DENSE, order, True)
            for order in (3, 5)
            if d < 10
        },
        "Kvaerno5 (diffrax)": from_diffrax(diffrax.Kvaerno5),
        "Radau (SciPy)": scipy("Radau"),
        "LSODA (SciPy)": scipy("LSODA"),
    }
    if task.stiff:
        return implicit
    explicit = {
        **{f"EK0({order})": ours(mp.EK0, order, corrections=2) for order in EXPLICIT_ORDERS},
        **(variants() if d == 28 else {}),
        "DiagonalEK1(4)": ours(mp.DiagonalEK1, 4, diffusion=VECTOR, corrections=2),
        **{
            f"TS0({order}), isotropic (probdiffeq)": from_probdiffeq(ISOTROPIC, order)
            for order in ((3, 5) if few else (3, 4, 5, 8))
        },
        "Tsit5 (diffrax)": from_diffrax(diffrax.Tsit5),
        "Dopri8 (diffrax)": from_diffrax(diffrax.Dopri8),
        "RK45 (SciPy)": scipy("RK45"),
        "DOP853 (SciPy)": scipy("DOP853"),
    }
    return explicit if few else explicit | implicit


def measure(name: str, task: Task, few: bool) -> list[Row]:
    """One row per method and tolerance."""
    problem, t1, truth = task.problem, task.problem.t_span[1], reference(task)
    rows = []
    for label, method in methods(task, few).items():
        run = method(problem)
        is_foreign = "diffrax" in label or "probdiffeq" in label
        counted = evaluations(method, problem) if is_foreign and not few else None
        for tolerance in np.logspace(-3, -11, 5 if few else 9):
            row = {"problem": name, "method": label, **precision(run, t1, tolerance, truth)}
            # Counting takes a callback per evaluation, some 50 µs each.
            if counted is not None and row["time [ms]"] < 50:
                row["evaluations"] = counted(t1, tolerance)
            rows.append(row)
            print(row, flush=True)
            if row["time [ms]"] > 1e3 * PATIENCE:
                break
    return rows


def best(rows: list[Row], pattern: str, accuracy: float) -> float:
    """Milliseconds to this accuracy, of the fastest method whose name matches a regular expression."""
    names = {row["method"] for row in rows if re.fullmatch(pattern, row["method"])}
    return min(time_for([row for row in rows if row["method"] == name], accuracy) for name in names)


def claims(rows: list[Row]) -> list[Claim]:
    """The promises about Pleiades: geometric means over accuracies, each with the best order."""
    rows = [row for row in rows if row["problem"] == "Pleiades"]

    def ratio(way: str, peer: str) -> float:
        """Our time, called in some way, over that of a peer."""
        name = r"EK0\(\d\)" + (f", {way}" if way else "")
        logs = [np.log(best(rows, name, a) / best(rows, peer, a)) for a in ACCURACIES]
        return float(np.exp(np.mean(logs)))

    what = "Pleiades, RMSE 1e-3 … 1e-9, EK0 of the best order, geometric mean:"
    found = [
        at_least(f"{what} times faster than SciPy's RK45", 6, 1 / ratio("", r"RK45 .*")),
        at_least(f"{what} times faster than probdiffeq's TS0", 3, 1 / ratio("", r"TS0.*")),
    ]
    ways = {"std as it comes": ("", JIT), "the filter's std": (FILTER, FILTER_JIT)}
    for std, (plain, inside) in ways.items():
        for peer, bound, bound_inside in (("Tsit5", 0.8, 1.2), ("Dopri8", 1.2, 1.8)):
            name, of = f"{peer} .*", f"time / that of diffrax's {peer}"
            found.append(at_most(f"{what} {std}, {of}", bound, ratio(plain, name)))
            found.append(at_most(f"{what} {std}, inside jit, {of}", bound_inside, ratio(inside, name)))
    return found


def draw(rows: list[Row]) -> Figure:
    """Time against error, one panel per problem, and the legend in a panel of its own."""
    names = list(dict.fromkeys(row["problem"] for row in rows))
    rows = [row for row in rows if not row["method"].endswith((FILTER, JIT))]
    labels = sorted({row["method"] for row in rows}, key=lambda m: (m.split("(")[-1], m))
    columns = min(len(names) + 1, 3)
    lines = -(-(len(names) + 1) // columns)
    figure = Figure(figsize=(4 * columns, 3.6 * lines), layout="constrained")
    *axes, last = figure.subplots(lines, columns, squeeze=False).ravel()[: len(names) + 1]
    last.axis("off")
    families = {"SciPy": ("s:", "Greys"), "diffrax": ("D--", "Greens"), "probdiffeq": ("^--", "Oranges")}
    for axis, name in zip(axes, names, strict=True):
        for label in labels:
            points = [
                (row["RMSE"], row["time [ms]"])
                for row in rows
                if row["problem"] == name and row["method"] == label
            ]
            if not points:
                continue
            family = label.split("(")[-1].rstrip(")")
            style, colours = families.get(family, ("o-", "Blues"))
            members = [
                x for x in labels if families.get(x.split("(")[-1].rstrip(")")) == families.get(family)
            ]
            shade = 0.45 + 0.5 * members.index(label) / max(len(members) - 1, 1)
            colour = colormaps[colours](shade)
            axis.loglog(*zip(*points, strict=True), style, color=colour, markersize=3.5, label=label)
        axis.set(title=name, xlabel="RMSE of the final value")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
    for axis in axes[::columns]:
        axis.set_ylabel("time of a solve [ms]")
    handles = {h.get_label(): h for axis in axes for h in axis.get_lines()}
    last.legend(handles.values(), handles.keys(), loc="center left", fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Measure, print and publish."""
    few = quick()
    rows = [row for name, task in tasks(few).items() for row in measure(name, task, few)]
    publish("work_precision", "How much time buys how much accuracy?", rows, draw(rows), claims(rows), few)


if __name__ == "__main__":
    main()
