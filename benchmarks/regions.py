"""Where the gains of the Kronecker EK1 are stable, and how accurate they are, beside BDF methods.

With equal steps, a step for y' = λy multiplies the state by a matrix that depends on z = hλ only. The table
has the sector around the negative real axis in which it amplifies nothing, the order, and the error on
y' = (−1 + 2i) y; the picture has the regions. Everything is computed from the gains that the solver uses.

Run: ``python benchmarks/regions.py [--quick]``; seconds.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure

from millipode.filter.gains import gains, no_past, settled
from millipode.filter.implicit import WEIGHT
from millipode.model.priors import IWP
from millipode.paper.measuring import Claim, Row, at_least

ORDERS = (1, 2, 3, 4, 5)
MIXTURE, ALONE, PEER = "mixture", "l^∞ alone", "BDF"
# What the mixture is stable in, in degrees at least.
PROMISED = {(MIXTURE, 2): 90, (MIXTURE, 3): 89, (MIXTURE, 4): 87, (MIXTURE, 5): 67}
# Coefficients of y_n, y_{n−1}, …, and of h f(y_n).
BDF = {
    1: ([1, -1], 1),
    2: ([3, -4, 1], 2),
    3: ([11, -18, 9, -2], 6),
    4: ([25, -48, 36, -16, 3], 12),
    5: ([137, -300, 300, -200, 75, -12], 60),
}
LAMBDA = -1 + 2j


@functools.cache
def gains_of(order: int) -> tuple[np.ndarray, np.ndarray]:
    """l⁰ and l^∞ after many steps of length 1."""
    one = jnp.ones(())
    known = gains(settled(order, no_past(order, one), one), IWP(order).transition(one), one)
    return np.asarray(known.accurate), np.asarray(known.stiff)


def step(kind: str, order: int, z: complex) -> np.ndarray:
    """The matrix by which a step multiplies the state."""
    n = order + 1
    if kind == PEER:
        past, right = BDF[order]
        companion = np.eye(order, k=-1, dtype=complex)
        companion[0] = -np.array(past[1:]) / (past[0] - z * right)
        return companion
    accurate, stiff = gains_of(order)
    phi = np.array([[1 / math.factorial(j - i) if j >= i else 0 for j in range(n)] for i in range(n)])
    w = (1 - WEIGHT * z) ** -2 if kind == MIXTURE else 0
    k = accurate / (1 - accurate[0] * z) * w + stiff / (1 - stiff[0] * z) * (1 - w)
    return (np.eye(n) - np.outer(k, np.eye(n)[1] - z * np.eye(n)[0])) @ phi


def radius(kind: str, order: int, z: complex) -> float:
    """How much a step amplifies at most."""
    return float(np.abs(np.linalg.eigvals(step(kind, order, z))).max())


def sector(kind: str, order: int) -> float:
    """The largest angle to the negative real axis up to which nothing is amplified."""
    sizes = np.logspace(-3, 4, 150)
    for degrees in np.arange(90, -0.1, -0.25):
        ray = -sizes * np.exp(1j * np.deg2rad(degrees))
        if all(radius(kind, order, z) <= 1 + 1e-9 for z in ray):
            return float(degrees)
    return 0.0


def error(kind: str, order: int, steps: int) -> float:
    """That of y(2) with y' = λy, from exact initial values."""
    h = 2 / steps
    past = np.exp(-LAMBDA * h * np.arange(order))
    derivatives = (LAMBDA * h) ** np.arange(order + 1)
    state = past if kind == PEER else derivatives
    matrix = step(kind, order, LAMBDA * h)
    for _ in range(steps):
        state = matrix @ state
    return float(abs(state[0] - np.exp(2 * LAMBDA)))


def measure() -> list[Row]:
    """One row per method and order."""
    rows: list[Row] = []
    for kind in (MIXTURE, ALONE, PEER):
        for order in ORDERS:
            coarse, fine = (error(kind, order, steps) for steps in (80, 160))
            row: Row = {"gain": kind, "ν": order, "sector [°]": sector(kind, order)}
            rows.append(row | {"order": math.log2(coarse / fine), "error": fine})
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """The sectors that the docs promise."""
    found = []
    for (kind, order), angle in PROMISED.items():
        row = next(r for r in rows if (r["gain"], r["ν"]) == (kind, order))
        found.append(
            at_least(f"{kind}, ν = {order}: sector of stability in degrees", angle, row["sector [°]"])
        )
    return found


def draw(points: int) -> Figure:
    """The regions in which nothing is amplified."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    x, y = np.meshgrid(np.linspace(-8, 20, points), np.linspace(0, 18, points))
    for axis, kind in zip(axes, (MIXTURE, ALONE, PEER), strict=True):
        for order, colour in zip(ORDERS, ("C0", "C1", "C2", "C3", "C4"), strict=True):
            sizes = np.vectorize(lambda re, im, k=kind, n=order: radius(k, n, complex(re, im)))(x, y)
            axis.contour(x, y, sizes, levels=[1.0], colors=colour)
            axis.plot([], [], colour, label=f"{order}")
        axis.axvline(0, color="black", lw=0.6)
        axis.set(title=kind, xlabel="Re hλ")
    axes[0].set_ylabel("Im hλ")
    axes[0].legend(title="ν")
    figure.suptitle("Stable to the left of, and outside of, each line", fontsize=10)
    return figure


def main() -> None:
    """Compute, print and publish."""
    short = quick()
    rows = measure()
    publish(
        "regions",
        "Where the gains of the EK1 are stable, and how accurate they are",
        rows,
        draw(40 if short else 160),
        claims(rows),
        short,
    )


if __name__ == "__main__":
    main()
