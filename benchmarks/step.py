"""What does one step cost, from ten unknowns to sixteen million?

The paper's second figure: Lorenz96, adaptive steps with error estimate and control, ν = 2, 4, 6, from
states on its attractor. "In a loop" is the marginal cost inside one compiled program: the time between a long
and a short solve, divided by the difference of their accepted steps. "Per call" is the time of one compiled
call per step. For the other libraries it calls their solver's ``step`` alone, which has no error estimate and
no step-size control; it is used for comparison if a solve with one of them takes too long. The traffic bound
is the time of 3n + 6 passes over y at the triad bandwidth, n = ν + 1. Run: ``python benchmarks/step.py
[--quick]`` (needs the ``bench`` extra).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure
from methods import BLOCK_DIAGONAL, ISOTROPIC, from_diffrax, from_probdiffeq, probdiffeq_parts

import millipode as mp
from millipode.paper.measuring import Claim, Row, at_least, at_most, bandwidth, medians, timings
from millipode.paper.methods import Method, ours
from millipode.paper.step_cost import TOLERANCE, marginals, pair, settled
from millipode.prepare import prepare
from millipode.problems import Problem
from millipode.run.packing import Packed
from millipode.run.programs import advance_in_place, begin

LONG = 20  # seconds after which a single measurement will do

VECTOR = mp.DynamicDiffusion(vector=True)
CONSTANT_VECTOR = mp.ConstantDiffusion(vector=True)
MAIN, CONSTANT, DIAGONAL = "EK0", "EK0, constant vector", "DiagonalEK1, vector"
SINGLE, REJECTED = "EK0, float32", "DiagonalEK1, vector, rejected"
TSIT5, TS0, TS1 = "Tsit5 (diffrax)", "TS0 isotropic (probdiffeq)", "TS1 block-diagonal (probdiffeq)"


class Contender(NamedTuple):
    """A method, a function that makes single steps with it, and the largest d for steps and for solves."""

    method: Method
    stepper: Callable[[Problem], Callable[[], Any]] | None
    largest: int
    largest_loop: int = 2**24


def contenders(order: int, short: bool) -> dict[str, Contender]:
    """All methods that are compared, by name."""
    diagonal = ours(mp.DiagonalEK1, order, diffusion=VECTOR)
    dense, large_loop = (0, 10**4) if short else (100, 10**6)
    constant = ours(mp.EK0, order, diffusion=CONSTANT_VECTOR)
    return {
        MAIN: Contender(ours(mp.EK0, order), our_step(mp.EK0(order)), 2**24),
        SINGLE: Contender(
            lambda p: ours(mp.EK0, order)(p._replace(y0=p.y0.astype(jnp.float32))),
            None,
            2**24 if order <= 4 and not short else 0,
        ),
        CONSTANT: Contender(constant, None, 2**24),
        DIAGONAL: Contender(diagonal, None, 2**21),
        "EK0, dense": Contender(ours(mp.EK0, order, structure="dense"), None, dense),
        "EK1": Contender(ours(mp.EK1, order), None, dense),
        TSIT5: Contender(from_diffrax(diffrax.Tsit5), tsit5_step, 2**24 if order == 4 else 0, large_loop),
        TS0: Contender(
            from_probdiffeq(ISOTROPIC, order),
            probdiffeq_step(ISOTROPIC, order, False),
            2**24 if order == 4 else 10**6,
            min(large_loop, 10**6 if order == 4 else 10**5),
        ),
        TS1: Contender(
            from_probdiffeq(BLOCK_DIAGONAL, order, True),
            probdiffeq_step(BLOCK_DIAGONAL, order, True),
            10**6 if order == 4 and not short else 0,
            10**4,
        ),
    }


def our_step(solver: mp.EK0) -> Callable[[Problem], Callable[[], Any]]:
    """A function that attempts one step per call, in place, as with a progress bar."""

    def stepper(problem: Problem) -> Callable[[], Any]:
        options = dict(solver=solver, rtol=TOLERANCE, atol=TOLERANCE, save="end")
        setup, y0, *_ = prepare(problem.f, problem.y0, problem.t_span, **options)
        packed = Packed(setup)
        carry, attempts = begin(packed, y0), 0

        def step() -> Any:
            nonlocal carry, attempts
            attempts += 1
            carry = advance_in_place(packed, carry, np.int32(attempts))
            return carry

        return step

    return stepper


def tsit5_step(problem: Problem) -> Callable[[], Any]:
    """A function that makes one step per call with diffrax's Tsit5."""
    term, solver = diffrax.ODETerm(lambda t, y, args: problem.f(t, y)), diffrax.Tsit5()

    @jax.jit
    def advance(y: Any, state: Any) -> Any:
        y, _, _, state, _ = solver.step(term, 0.0, 1e-3, y, None, state, made_jump=False)
        return y, state

    carry = (problem.y0, solver.init(term, 0.0, 1e-3, problem.y0, None))

    def step() -> Any:
        nonlocal carry
        carry = advance(*carry)
        return carry

    return step


def probdiffeq_step(model: Any, order: int, first_order: bool) -> Callable[[Problem], Callable[[], Any]]:
    """A function that makes one step per call with a filter of probdiffeq."""

    def stepper(problem: Problem) -> Callable[[], Any]:
        solver, _, initialise = probdiffeq_parts(problem, model, order, first_order)
        start = jax.jit(lambda y: solver.init(t=jnp.zeros(()), u=initialise(y), damp=0.0))
        advance = jax.jit(lambda state: solver.step(state=state, dt=1e-3, damp=0.0))
        state = start(problem.y0)

        def step() -> Any:
            nonlocal state
            state = advance(state)
            return state

        return step

    return stepper


class NeverAccept(mp.PIController):
    """A controller that rejects every step and tries the same one again, to measure what that costs."""

    def accepts(self, error: jax.Array) -> jax.Array:
        return error < 0

    def next_step(self, h: jax.Array, error: jax.Array, previous: jax.Array, order: int) -> jax.Array:
        return h


def rejected(problem: Problem, order: int, repeats: int, steps: int = 20) -> float:
    """The marginal seconds of a rejected step of DiagonalEK1."""
    solver = mp.DiagonalEK1(order, jacobian_diagonal=problem.jacobian_diagonal, diffusion=VECTOR)

    def run(max_steps: int) -> Callable[[], Any]:
        options = dict(solver=solver, controller=NeverAccept(), save="end", max_steps=max_steps, throw=False)
        return lambda: mp.solve(problem.f, problem.y0, problem.t_span, **options).mean

    short, long = timings([run(steps), run(2 * steps)], repeats)
    return float(np.median(long - short)) / steps


def enough(d: int, short: bool) -> float:
    """The seconds by which two solves should differ; more for large arrays, whose allocation times vary."""
    return 2.0 if d >= 10**6 and not short else 0.6 if short else 0.3


def measure(sizes: dict[int, list[int]], repeats: int, short: bool) -> list[Row]:
    """One row per order, size and contender."""
    rows: list[Row] = []
    for order in sizes:
        for d in sizes[order]:
            problem = settled(d)
            entered = {
                name: contender
                for name, contender in contenders(order, short).items()
                if d <= contender.largest
            }
            calls = {
                name: medians([c.stepper(problem)], 5 if d > 10**5 else 51)[0]
                for name, c in entered.items()
                if c.stepper is not None
            }
            looped = {name: c for name, c in entered.items() if d <= c.largest_loop}
            pairs = [pair(c.method, problem, enough(d, short)) for c in looped.values()]
            loops: dict[str, float | None] = dict.fromkeys(entered)
            loops |= dict(zip(looped, marginals(pairs, repeats, 2 if short else LONG), strict=True))
            if d == 10**6:
                loops[REJECTED] = rejected(problem, order, repeats)
            bound = (3 * (order + 1) + 6) * 8 * d / bandwidth()
            for name, loop in loops.items():
                call = calls.get(name)
                row = {"ν": order, "d": d, "solver": name, "in a loop [ms]": loop and 1e3 * loop}
                row |= {"per call [ms]": call and 1e3 * call, "traffic bound [ms]": 1e3 * bound}
                rows.append(row | {"/ traffic bound": loop and loop / bound})
                print(rows[-1], flush=True)
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The promises about the cost of a step."""
    found = []
    times = {(row["ν"], row["d"], row["solver"]): row for row in rows}

    def cost(d: int, name: str) -> float:
        row = times[4, d, name]
        return row["in a loop [ms]"] or row["per call [ms]"]

    for d in sorted({row["d"] for row in rows if row["d"] >= 10**6}):
        where = f"ν = 4, d = {d}"
        main = cost(d, MAIN)
        found += [
            at_most(f"EK0, {where}: time / traffic bound", 2.0, times[4, d, MAIN]["/ traffic bound"]),
            at_least(f"EK0, {where}: times faster than probdiffeq, isotropic", 8, cost(d, TS0) / main),
            at_most(
                f"EK0, {where}: constant vector diffusion / dynamic scalar", 1.3, cost(d, CONSTANT) / main
            ),
        ]
        if d == 2**24:
            found.append(at_least(f"EK0, {where}: float32, times faster", 1.7, main / cost(d, SINGLE)))
        if d == 10**6:
            accepted, what = cost(d, DIAGONAL), f"DiagonalEK1, {where}:"
            found.append(at_most(f"{what} rejected step / accepted", 0.3, cost(d, REJECTED) / accepted))
            if (4, d, TS1) in times:
                faster = cost(d, TS1) / accepted
                found.append(at_least(f"{what} times faster than probdiffeq, block-diagonal", 15, faster))
    return found


def draw(rows: list[Row]) -> Figure:
    """Time per step against d, one panel per order."""
    orders = sorted({row["ν"] for row in rows})
    figure = Figure(figsize=(3.6 * len(orders) + 2.4, 3.8), layout="constrained")
    axes = figure.subplots(1, len(orders), sharey=True, squeeze=False)[0]
    names = [name for name in dict.fromkeys(row["solver"] for row in rows) if name not in (SINGLE, REJECTED)]
    for axis, order in zip(axes, orders, strict=True):
        for i, name in enumerate(names):
            points = [
                (row["d"], row["in a loop [ms]"] or row["per call [ms]"])
                for row in rows
                if row["solver"] == name and (row["ν"] == order or name == TSIT5)
            ]
            style = "s--" if "(" in name else "o-"
            if points:
                axis.loglog(*zip(*points, strict=True), style, color=f"C{i}", markersize=4, label=name)
        bounds = {row["d"]: row["traffic bound [ms]"] for row in rows if row["ν"] == order}
        axis.loglog(bounds.keys(), bounds.values(), "k:", label="traffic bound")
        axis.set(title=f"ν = {order}", xlabel="number of unknowns d")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time per step [ms]")
    handles = {h.get_label(): h for axis in axes for h in axis.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    return figure


def main() -> None:
    """Measure, print and publish."""
    short = quick()
    many = [10, 100, 10**3, 10**5, 10**6, 2**24]
    sizes = {4: [10**6]} if short else {2: many[:-1], 4: many, 6: many[:-1]}
    rows = measure(sizes, 3 if short else 5, short)
    publish("step", "What does one step cost?", rows, draw(rows), claims(rows), short)


if __name__ == "__main__":
    main()
