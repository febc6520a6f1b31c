"""How large may the part of f be that ``linear`` leaves out?

On y' = λy + μy the spectral EK1 knows λ only. In its steady state with steps h and two corrections, its error
follows the recursion (I − K (1 + μδ) H) Φ with the true H and δ = l₀ / (1 − l₀λ), by which a residual moves
the point of linearisation. This script finds the smallest |hμ| at which the recursion has a spectral radius
above one, for damping (μ < 0) and for oscillation (μ imaginary), from mild to very stiff hλ. Growth (μ > 0)
is left out, because the solution itself may grow then. The table of docs/pdes.md is from here.
Run: ``python benchmarks/explicit_part.py``.
"""

import jax.numpy as jnp
import numpy as np
from harness import publish, quick
from matplotlib.figure import Figure

import millipode as mp
from millipode.covariance import BlockDiagonal
from millipode.model.information import Predicted
from millipode.model.priors import Prior
from millipode.model.steady import lead
from millipode.paper.measuring import Row
from millipode.pde.bases import Identity
from millipode.prepare import prepare

STIFFNESS = -np.array([1e-2, 1.0, 10.0, 100.0, 1000.0])
SIZES = np.geomspace(1e-3, 1e4, 701)


def recursions(order: int, prior: Prior | None) -> tuple[np.ndarray, ...]:
    """Φ, the steady gain, the remainder of λ in the coordinates of the state, and δ, for every stiffness."""
    solver = mp.SpectralEK1(
        order, linear=(Identity(), STIFFNESS), prior=prior, diffusion=mp.ConstantDiffusion()
    )
    y = jnp.ones(STIFFNESS.size)
    setup, *_ = prepare(lambda t, y: STIFFNESS * y, y, (0.0, 1.0), solver=solver, save="end")
    model, one = setup.model, jnp.ones(())
    transition = model.prior.transition(one)
    residual = model.information.residual(one, y, Predicted(y, y), model.prior.drift, ())
    observation = residual.observation
    covariance = BlockDiagonal.initial(jnp.zeros((order, order + 1)), one, y)
    for _ in range(200):
        corrected = covariance.correct(transition, one, observation, y)
        covariance = corrected.covariance
    phi = np.broadcast_to(
        transition.at(jnp.asarray(STIFFNESS)).matrix.T, (y.size, order + 1, order + 1)
    ).swapaxes(1, 2)
    rest = np.asarray(observation.jacobian.diagonal(y))
    l0 = np.broadcast_to(lead(model.prior, one), rest.shape)
    return phi, np.asarray(corrected.gain).T, rest, l0 / (1 - l0 * rest)


def limit(parts: tuple[np.ndarray, ...], direction: complex) -> float:
    """The smallest unstable |hμ| in a direction of the complex plane."""
    phi, gain, rest, delta = parts
    n = gain.size
    for size in SIZES:
        mu = size * direction
        h = (1 + mu * delta) * (np.eye(n)[1] - (rest + mu) * np.eye(n)[0])
        if np.abs(np.linalg.eigvals((np.eye(n) - np.outer(gain, h)) @ phi)).max() > 1 + 1e-9:
            return float(size)
    return float("inf")


def measure() -> list[Row]:
    """One row per prior, order and direction."""
    rows = []
    for name, prior in (("IWP", None), ("IOUP", mp.IOUP())):
        for order in (1, 2, 3, 4):
            all_parts = recursions(order, prior)
            for what, direction in (("damping", -1.0), ("oscillation", 1j)):
                limits = [limit(parts, direction) for parts in zip(*all_parts, strict=True)]
                columns = {f"hλ = {x:g}": y for x, y in zip(STIFFNESS, limits, strict=True)}
                rows.append({"prior": name, "ν": order, "μ is": what} | columns)
    return rows


def draw(rows: list[Row]) -> Figure:
    """The limits against the stiffness."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axis, what in zip(figure.subplots(1, 2, sharey=True), ("damping", "oscillation"), strict=True):
        for row in rows:
            if row["μ is"] == what:
                style = "o-" if row["prior"] == "IWP" else "s--"
                label = f"{row['prior']}, ν = {row['ν']}"
                axis.loglog(
                    -STIFFNESS, list(row.values())[3:], style, color=f"C{row['ν']}", label=label, ms=4
                )
        axis.set(title=what, xlabel="−hλ")
    axis.figure.axes[0].set_ylabel("largest stable |hμ|")
    axis.legend(fontsize=7, ncols=2)
    return figure


def main() -> None:
    """Compute, print and publish."""
    short = quick()
    rows = measure()
    publish("explicit_part", "How large may be what linear leaves out?", rows, draw(rows), [], short)


if __name__ == "__main__":
    main()
