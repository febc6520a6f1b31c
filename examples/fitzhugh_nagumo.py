"""The FitzHugh–Nagumo PDE, solved with uncertainty: the paper's first figure.

Run ``python examples/fitzhugh_nagumo.py --help`` for the options.
"""

import argparse
import time
from pathlib import Path

import jax
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import LogNorm

import millipode as mp


def solve(n: int, order: int) -> tuple[mp.Solution, float]:
    """Solve on an n × n grid and save five times."""
    problem = mp.problems.fitzhugh_nagumo(n)
    solver = mp.DiagonalEK1(
        order,
        jacobian_diagonal=problem.jacobian_diagonal,
        diffusion=mp.DynamicDiffusion(vector=True),
    )
    times = np.linspace(*problem.t_span, 5)
    start = time.perf_counter()
    sol = mp.solve(
        problem.f,
        problem.y0,
        problem.t_span,
        solver=solver,
        rtol=1e-5,
        atol=1e-7,
        save=times,
        smooth=False,  # half the time; at the last of the five times there is no difference
        max_steps=10**7,
        progress=True,
    )
    return sol, time.perf_counter() - start


def draw(sol: mp.Solution, path: Path) -> None:
    """Means of u in the top row, standard deviations in the bottom row."""
    means, stds = np.asarray(sol.mean[:, 0]), np.asarray(sol.std[:, 0])
    reach = np.abs(means[1:]).max()
    # At t₀ the solution is known: its standard deviation is zero, the bottom of the scale.
    norm = LogNorm(1e-3 * stds.max(), stds.max(), clip=True)
    fig, axes = plt.subplots(2, len(sol.t), figsize=(2.3 * len(sol.t), 4.6), layout="constrained")
    for column, (t, mean, std) in enumerate(zip(np.asarray(sol.t), means, stds, strict=True)):
        top = axes[0, column].imshow(mean, cmap="RdBu_r", vmin=-reach, vmax=reach)
        bottom = axes[1, column].imshow(np.maximum(std, norm.vmin), cmap="magma", norm=norm)
        axes[0, column].set_title(f"t = {t:g}")
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel("mean of u")
    axes[1, 0].set_ylabel("standard deviation")
    for row, image in enumerate((top, bottom)):
        fig.colorbar(image, ax=axes[row], shrink=0.9)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main() -> None:
    """Solve, draw, and say what was done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=64, help="cells along each side")
    parser.add_argument("--order", type=int, default=1, help="order ν of the solver")
    parser.add_argument("--out", type=Path, default=Path("out/fitzhugh_nagumo.png"))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    sol, seconds = solve(options.n, options.order)
    draw(sol, options.out)
    print(f"picture    {options.out.resolve()}")
    print(f"dimension  {2 * options.n**2}")
    print(f"steps      {int(sol.stats.steps)} accepted, {int(sol.stats.rejected)} rejected")
    print(f"time       {seconds:.1f} s, compilation included")


if __name__ == "__main__":
    main()
