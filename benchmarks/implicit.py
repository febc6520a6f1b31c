"""Stiff PDEs that no fast basis knows: the EK1 with GMRES beside SciPy's BDF, CVODE and diffrax.

Three equations on n × n cells: Schnakenberg's (its reaction is as stiff as its diffusion), phase
separation with a diffusivity that varies by a factor of 100, and FitzHugh–Nagumo. The root-mean-square error
of the final value against the time of a warm solve, at tolerances rtol = 100 atol.

- ``mp.EK1`` with GMRES, without a preconditioner and with the diffusion of the mean coefficient as one, and
  its filter's own standard deviation;
- CVODE (``scikit-sundae``) with its GMRES and no preconditioner, and SciPy's BDF with the exact sparse
  Jacobian, with f compiled by JAX: a call of it costs what ours costs beside some microseconds of Python;
- diffrax's Kvaerno5 with GMRES and no preconditioner.

The reference is the EK1 of order 5 with the mixture of gains, at 1e-9.

Run: ``python benchmarks/implicit.py [--quick]`` (needs the ``bench`` extra).
"""

import time
from collections.abc import Callable
from typing import Any

import diffrax
import jax
import lineax
import numpy as np
import optimistix
from harness import publish, quick
from matplotlib.figure import Figure
from scipy.integrate import solve_ivp
from scipy.sparse import csc_matrix
from sksundae.cvode import CVODE

import millipode as mp
from millipode.paper.measuring import Claim, Row, at_most
from millipode.problems import Problem

TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
RATIO = 1e-2  # atol / rtol
PATIENCE = 60.0  # seconds after which tighter tolerances are not tried

# (tolerance) → the final value and counts of steps, evaluations and iterations
Run = Callable[[float], tuple[np.ndarray, dict[str, int]]]


def problems(n: int) -> dict[str, Problem]:
    """The problems, by name."""
    fitzhugh_nagumo = mp.problems.fitzhugh_nagumo(n)._replace(t_span=(0.0, 5.0))
    return {
        f"Schnakenberg, {n}²": mp.problems.schnakenberg(n),
        f"variable diffusion, {n}²": mp.problems.variable_diffusion(n),
        f"FitzHugh–Nagumo, {n}²": fitzhugh_nagumo,
    }


def ours(problem: Problem, preconditioner: Any) -> Run:
    """The EK1 of the default order."""
    solver = mp.EK1(linear_solver=mp.GMRES(preconditioner))

    def run(rtol: float) -> tuple[np.ndarray, dict[str, int]]:
        sol = mp.solve(
            problem.f,
            problem.y0,
            problem.t_span,
            solver=solver,
            rtol=rtol,
            atol=RATIO * rtol,
            save="end",
            uncertainty="filter",
        )
        counts = {"steps": sol.stats.steps, "f": sol.stats.f_evals, "iterations": sol.stats.iterations}
        return np.asarray(sol.mean[-1]), {k: int(v) for k, v in counts.items()}

    return run


def flattened(problem: Problem) -> tuple[Callable, np.ndarray]:
    """f and y₀ as NumPy's vectors, with f compiled."""
    shape = problem.y0.shape
    f = jax.jit(lambda t, y: problem.f(t, y.reshape(shape)).ravel())
    return lambda t, y: np.asarray(f(t, y)), np.asarray(problem.y0).ravel()


def sparse_jacobian(problem: Problem) -> Callable:
    """∂f/∂y as a sparse matrix, by JVPs along colours that no stencil of five points mixes."""
    shape = problem.y0.shape
    cells = int(np.prod(shape[-2:]))
    components, n = problem.y0.size // cells, shape[-1]
    product = jax.jit(lambda t, y, v: jax.jvp(lambda x: problem.f(t, x), (y,), (v,))[1])
    i, j = np.meshgrid(np.arange(n), np.arange(n), indexing="ij")
    offsets = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]
    side = next(k for k in range(5, n + 1) if n % k == 0)  # colours repeat, also around the edge
    colour = (i + 2 * j) % 5 if n % 5 == 0 else (i % side) * side + j % side

    def jacobian(t: float, y: np.ndarray) -> csc_matrix:
        rows, columns, values = [], [], []
        for c in range(components):
            for k in np.unique(colour):
                seed = np.zeros((components, n, n))
                seed[c][colour == k] = 1
                column = np.asarray(product(t, y.reshape(shape), seed.reshape(shape))).reshape(
                    components, n, n
                )
                ci, cj = np.nonzero(colour == k)
                for di, dj in offsets:
                    ri, rj = (ci + di) % n, (cj + dj) % n
                    for row in range(components):
                        rows.append(row * cells + ri * n + rj)
                        columns.append(c * cells + ci * n + cj)
                        values.append(column[row, ri, rj])
        return csc_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))))

    return jacobian


def bdf(problem: Problem) -> Run:
    """SciPy's BDF."""
    f, y0 = flattened(problem)
    jacobian = sparse_jacobian(problem)

    def run(rtol: float) -> tuple[np.ndarray, dict[str, int]]:
        sol = solve_ivp(f, problem.t_span, y0, "BDF", rtol=rtol, atol=RATIO * rtol, jac=jacobian)
        return sol.y[:, -1].reshape(problem.y0.shape), {"steps": sol.t.size - 1, "f": sol.nfev}

    return run


def cvode(problem: Problem) -> Run:
    """CVODE's BDF with its own GMRES."""
    f, y0 = flattened(problem)

    def right(t: float, y: np.ndarray, yp: np.ndarray) -> None:
        yp[:] = f(t, y)

    def run(rtol: float) -> tuple[np.ndarray, dict[str, int]]:
        options = dict(linsolver="gmres", krylov_dim=20, max_num_steps=100_000)
        sol = CVODE(right, rtol=rtol, atol=RATIO * rtol, **options).solve(np.array(problem.t_span), y0)
        return sol.y[-1].reshape(problem.y0.shape), {"f": int(sol.nfev)}

    return run


def kvaerno(problem: Problem) -> Run:
    """An implicit Runge–Kutta method, without a matrix."""

    @jax.jit
    def solve(y0: jax.Array, rtol: float) -> Any:
        newton = optimistix.Newton(
            rtol=0.1 * rtol, atol=0.1 * RATIO * rtol, linear_solver=lineax.GMRES(1e-2, 1e-8)
        )
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: problem.f(t, y)),
            diffrax.Kvaerno5(root_finder=newton),
            *problem.t_span,
            None,
            y0,
            stepsize_controller=diffrax.PIDController(rtol=rtol, atol=RATIO * rtol),
            max_steps=None,
            adjoint=diffrax.ForwardMode(),
            throw=False,
        )

    def run(rtol: float) -> tuple[np.ndarray, dict[str, int]]:
        sol = solve(problem.y0, rtol)
        return np.asarray(sol.ys[-1]), {"steps": int(sol.stats["num_steps"])}

    return run


def methods(problem: Problem, few: bool) -> dict[str, Run]:
    """All of them, by name."""
    found = {
        "EK1, GMRES": ours(problem, None),
        "EK1, GMRES with the mean diffusion": ours(problem, problem.linear),
        "CVODE, GMRES": cvode(problem),
    }
    if problem.grid.shape[0] <= 256:
        found["BDF, sparse (SciPy)"] = bdf(problem)
    if not few and problem.grid.shape[0] <= 64:
        found["Kvaerno5, GMRES (diffrax)"] = kvaerno(problem)
    return found


def measure(name: str, problem: Problem, repeats: int, few: bool) -> list[Row]:
    """One row per method and tolerance."""
    exact = mp.solve(
        problem.f,
        problem.y0,
        problem.t_span,
        solver=mp.EK1(5, linear_solver=mp.GMRES(problem.linear, rtol=1e-4), mixture=True),
        rtol=1e-9,
        atol=1e-10,
        save="end",
        uncertainty="filter",
    )
    reference, rows = np.asarray(exact.mean[-1]), []
    for method, run in methods(problem, few).items():
        for rtol in TOLERANCES[1:4] if few else TOLERANCES:
            y, counts = run(rtol)  # compiles, if anything is to be compiled
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                run(rtol)
                seconds.append(time.perf_counter() - start)
            row: Row = {"problem": name, "method": method, "rtol": rtol}
            row |= {
                "time [s]": float(np.median(seconds)),
                "RMSE": float(np.sqrt(np.mean((y - reference) ** 2))),
            }
            rows.append(row | {key: counts.get(key, "") for key in ("steps", "f", "iterations")})
            print(rows[-1], flush=True)
            if rows[-1]["time [s]"] > PATIENCE:
                break
    return rows


def time_for(rows: list[Row], name: str, method: str, error: float) -> float:
    """How long a method takes for an error, by interpolation."""
    points = sorted((r["RMSE"], r["time [s]"]) for r in rows if (r["problem"], r["method"]) == (name, method))
    errors, seconds = np.log(np.array(points)).T
    return float(np.exp(np.interp(np.log(error), errors, seconds)))


def claims(rows: list[Row]) -> list[Claim]:
    """Times at equal errors, in the middle of what our preconditioned solver has reached."""
    found = []
    for name in dict.fromkeys(row["problem"] for row in rows):
        mine = "EK1, GMRES with the mean diffusion"
        error = float(np.median([r["RMSE"] for r in rows if (r["problem"], r["method"]) == (name, mine)]))
        for other, bound in (("CVODE, GMRES", 1.0), ("BDF, sparse (SciPy)", 0.2)):
            if any((r["problem"], r["method"]) == (name, other) for r in rows):
                ratio = time_for(rows, name, mine, error) / time_for(rows, name, other, error)
                found.append(at_most(f"{name}, RMSE {error:.1g}: time over that of {other}", bound, ratio))
    return found


def draw(rows: list[Row]) -> Figure:
    """Time against error, one panel per problem."""
    names = list(dict.fromkeys(row["problem"] for row in rows))
    columns = min(3, len(names))
    figure = Figure(figsize=(4.2 * columns, 3.6 * -(-len(names) // columns)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(-(-len(names) // columns), columns)).ravel()
    for axis, name in zip(axes, names, strict=False):
        for method in dict.fromkeys(row["method"] for row in rows):
            points = [
                (r["RMSE"], r["time [s]"]) for r in rows if (r["problem"], r["method"]) == (name, method)
            ]
            if points:
                axis.loglog(
                    *zip(*points, strict=True), "o-" if "EK1" in method else "s--", ms=4, label=method
                )
        axis.set(title=name, xlabel="RMSE at the end", ylabel="seconds")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def main() -> None:
    """Measure, print and publish."""
    few = quick()
    rows: list[Row] = []
    for n in (48,) if few else (48, 128, 256):
        for name, problem in problems(n).items():
            rows += measure(name, problem, 3, few)
    publish("implicit", "Stiff PDEs beyond fast bases", rows, draw(rows), claims(rows), few)


if __name__ == "__main__":
    main()
