"""What a spatial covariance changes: the FitzHugh–Nagumo PDE with and without a Matérn prior.

The length scales of the prior and the ratio of the components' variances maximise the evidence. Run
``python examples/spatial_prior.py --help`` for the options.
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from scipy.optimize import minimize

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import millipode as mp
from millipode.problems import Problem

SPAN, STEP = (0.0, 1.0), 0.02


def pattern(n: int) -> Problem:
    """The equation, with a pattern that has already formed as its initial value."""
    problem = mp.problems.fitzhugh_nagumo(n)
    solver = mp.SpectralEK1(order=2, linear=problem.linear)
    formed = mp.solve(problem.f, problem.y0, (0.0, 5.0), solver=solver, rtol=1e-5, save="end")
    return problem._replace(y0=formed.mean[-1])


def solve(problem: Problem, spatial: list[mp.Matern] | None, **options: object) -> mp.Solution:
    """Solve with fixed steps, because evidences can be compared only if the data are the same."""
    solver = mp.SpectralEK1(order=2, linear=problem.linear, spatial=spatial)
    return mp.solve(problem.f, problem.y0, SPAN, solver=solver, controller=mp.FixedStep(STEP), **options)


def models(problem: Problem, parameters: jax.Array) -> list[mp.Matern]:
    """The spatial covariances of u and v, from the logs of their lengths and of the ratio of variances."""
    u, v, ratio = jnp.exp(parameters)
    matern = partial(mp.Matern, problem.grid, 1.5)
    return [matern(length_scale=u), matern(length_scale=v, variance=ratio)]


def best(problem: Problem) -> np.ndarray:
    """The parameters with the highest evidence, by the BFGS method."""

    def loss(parameters: jax.Array) -> jax.Array:
        return -solve(problem, models(problem, parameters), save="end").log_evidence / problem.y0.size

    both = jax.jit(jax.value_and_grad(loss))
    start = np.log([0.05, 0.05, 0.1])
    found = minimize(lambda x: [np.asarray(v, float) for v in both(x)], start, jac=True, method="BFGS")
    return found.x


def report(problem: Problem, parameters: np.ndarray) -> None:
    """Print the error of the mean beside its standard deviation, without and with a spatial covariance."""
    solver = mp.SpectralEK1(order=3, linear=problem.linear)
    truth = mp.solve(problem.f, problem.y0, SPAN, solver=solver, rtol=1e-9, atol=1e-11, save="end").mean
    for name, spatial in (("independent", None), ("Matérn", models(problem, jnp.asarray(parameters)))):
        sol = solve(problem, spatial, save="end")
        error, std = (np.sqrt(np.mean(x**2, axis=(0, 2, 3))) for x in (sol.mean - truth, sol.std))
        numbers = ", ".join(f"{c} {e:.1e} ± {s:.1e}" for c, e, s in zip("uv", error, std, strict=True))
        print(f"{name + ':':14} error and standard deviation at t = 1: {numbers}")


def draw(problem: Problem, parameters: np.ndarray, path: Path) -> None:
    """Draw standard deviations and samples without and with a spatial covariance, and the evidence."""
    fig, axes = plt.subplot_mosaic(
        "abe;cde", figsize=(10.5, 4.6), layout="constrained", width_ratios=[1, 1, 1.4]
    )
    evidence = {}
    for name, spatial, (left, right) in (
        ("independent modes", None, "ab"),
        ("Matérn prior", models(problem, jnp.asarray(parameters)), "cd"),
    ):
        sol = solve(problem, spatial, save=[SPAN[1]])
        evidence[name] = float(sol.log_evidence)
        deviation = np.asarray(sol.sample(jax.random.key(0)) - sol.mean)[0, -1, 0]
        image = axes[left].imshow(np.asarray(sol.std)[-1, 0], cmap="magma", vmin=0)
        fig.colorbar(image, ax=axes[left], shrink=0.8)
        reach = np.abs(deviation).max()
        image = axes[right].imshow(deviation, cmap="RdBu_r", vmin=-reach, vmax=reach)
        fig.colorbar(image, ax=axes[right], shrink=0.8)
        axes[left].set_ylabel(name)
        for axis in (axes[left], axes[right]):
            axis.set(xticks=[], yticks=[])
    axes["a"].set_title("standard deviation of u")
    axes["b"].set_title("a sample minus the mean")
    value = jax.jit(lambda x: solve(problem, models(problem, x), save="end").log_evidence)
    for i, name in enumerate("uv"):
        lengths = np.exp(parameters[i]) * np.geomspace(0.2, 5, 15)
        logs = [jnp.asarray(parameters).at[i].set(np.log(length)) for length in lengths]
        gains = np.array([float(value(x)) for x in logs]) - evidence["independent modes"]
        (line,) = axes["e"].semilogx(
            lengths, gains, marker=".", label=f"of {name}, with the other at its best"
        )
        axes["e"].axvline(np.exp(parameters[i]), color=line.get_color(), lw=0.8, ls=":")
    axes["e"].set(xlabel="length scale", title="log evidence, gain over independence")
    axes["e"].grid(alpha=0.3)
    axes["e"].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main() -> None:
    """Choose the parameters, draw, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=32, help="cells along each side (default: 32)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/spatial_prior.png"), help="where to save the picture"
    )
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    problem = pattern(options.n)
    parameters = best(problem)
    draw(problem, parameters, options.out)
    u, v, ratio = np.exp(parameters)
    print(f"length scales  {u:.3f} of u, {v:.3f} of v")
    print(f"variances      that of v is {ratio:.2g} of that of u")
    report(problem, parameters)
    print(f"picture        {options.out.resolve()}")


if __name__ == "__main__":
    main()
