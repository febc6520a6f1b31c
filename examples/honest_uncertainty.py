"""Error and standard deviation side by side: the FitzHugh–Nagumo PDE with transported ensemble members.

This is the paper's showcase, with a standard deviation that includes how the equation amplifies early errors.
Run ``python examples/honest_uncertainty.py --help`` for the options.
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
from millipode.problems import Problem

SPAN = (0.0, 20.0)


def solve(problem: Problem, members: int) -> mp.Solution:
    """Solve with a certain number of ensemble members."""
    return mp.solve(
        problem.f,
        problem.y0,
        SPAN,
        solver=mp.SpectralEK1(order=2, linear=problem.linear),
        rtol=1e-3,
        atol=1e-5,
        save="end",
        uncertainty=mp.Transported(members),
    )


def truth(problem: Problem) -> np.ndarray:
    """The final value on the same grid, at tolerances so tight that its error is negligible."""
    solver = mp.SpectralEK1(order=4, linear=problem.linear)
    sol = mp.solve(problem.f, problem.y0, SPAN, solver=solver, rtol=1e-8, atol=1e-10, save="end")
    return np.asarray(sol.mean[-1])


def draw(sol: mp.Solution, error: np.ndarray, path: Path) -> None:
    """Draw the mean, its error, and the standard deviations of the ensemble and of the filter alone."""
    fig, axes = plt.subplots(2, 4, figsize=(13, 6), layout="constrained")
    for row, name in enumerate("uv"):
        mean, wrong = np.asarray(sol.mean)[-1, row], np.abs(error[row])
        fields = [wrong, np.asarray(sol.std)[-1, row], np.asarray(sol.filter_std)[-1, row]]
        image = axes[row, 0].imshow(mean, cmap="viridis")
        fig.colorbar(image, ax=axes[row, 0], shrink=0.8)
        high = float(np.quantile(wrong, 0.999))
        norm = LogNorm(high / 3e3, high)
        for axis, field in zip(axes[row, 1:], fields, strict=True):
            image = axis.imshow(field, cmap="magma", norm=norm)
        fig.colorbar(image, ax=axes[row, 1:], shrink=0.8)
        axes[row, 0].set_ylabel(name)
    titles = ("mean at t = 20", "|error|", "std of the members", "std of the filter alone")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=100)
    plt.close(fig)


def main() -> None:
    """Solve, compare with a reference solution, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=100, help="cells along each side (default: 100)")
    parser.add_argument("--members", type=int, default=16, help="number of ensemble members (default: 16)")
    parser.add_argument("--out", type=Path, default=Path("out/honest.png"), help="where to save the picture")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    problem = mp.problems.fitzhugh_nagumo(options.n)
    start = time.perf_counter()
    sol = solve(problem, options.members)
    std, own = (np.asarray(x)[-1] for x in (sol.std, sol.filter_std))
    elapsed = time.perf_counter() - start
    error = np.asarray(sol.mean)[-1] - truth(problem)
    logs = np.log(np.abs(error[error != 0])), np.log(std[error != 0])
    draw(sol, error, options.out)
    print(f"unknowns       {error.size}, {int(sol.stats.steps)} steps, {elapsed:.1f} s with compilation")
    print(f"error          {np.sqrt(np.mean(error**2)):.1e} (root mean square)")
    for name, s in (("members", std), ("filter", own)):
        chi2, covered = np.mean((error / s) ** 2), np.mean(np.abs(error) < 1.645 * s)
        print(f"{name:14} std {np.sqrt(np.mean(s**2)):.1e}, χ²/d {chi2:.2g}, 90 % bands cover {covered:.0%}")
    print(f"correlation    of log |error| with log std: {np.corrcoef(*logs)[0, 1]:.2f}")
    print(f"picture        {options.out.resolve()}")


if __name__ == "__main__":
    main()
