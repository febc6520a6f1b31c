"""Is the uncertainty of the right size? Error over standard deviation, for every solver on four problems.

Prints the table of docs/uncertainty.md. χ²/d is the mean over the unknowns of (error/std)² at the final time,
which is 1 if the standard deviations are right, and 100 if they are ten times too small. Coverage is the
share of all unknowns at all steps whose error is within two standard deviations (95 % if right).
Run: ``python benchmarks/calibration.py``
"""

import jax
import numpy as np
from scipy.integrate import solve_ivp

import millipode as mp

PROBLEMS = {
    "logistic": (mp.problems.logistic, None),
    "Lotka–Volterra": (mp.problems.lotka_volterra, None),
    "Pleiades": (mp.problems.pleiades, None),
    "Lorenz96, d = 20": (lambda: mp.problems.lorenz96(20), (0.0, 1.0)),
}
DIFFUSIONS = {
    "dynamic": mp.DynamicDiffusion(),
    "dynamic vector": mp.DynamicDiffusion(vector=True),
    "constant": mp.ConstantDiffusion(),
}
SOLVERS = [
    (mp.EK0, "dynamic"),
    (mp.EK0, "constant"),
    (mp.DiagonalEK1, "dynamic vector"),
    (mp.EK1, "dynamic"),
]
ORDER, RTOL, ATOL = 3, 1e-5, 1e-7


def reference(problem: mp.problems.Problem, t_span: tuple[float, float], t: np.ndarray) -> np.ndarray:
    """SciPy's DOP853 as tight as it goes."""
    f = jax.jit(problem.f)
    exact = solve_ivp(f, t_span, np.asarray(problem.y0), "DOP853", t, rtol=1e-13, atol=1e-13)
    return exact.y.T


def measure(name: str, kind: type, diffusion: str) -> tuple[float, float, float]:
    """RMSE and χ²/d at the final time, and coverage at all steps."""
    make, t_span = PROBLEMS[name]
    problem = make()
    t_span = t_span or problem.t_span
    solver = kind(ORDER, diffusion=DIFFUSIONS[diffusion])
    sol = mp.solve(problem.f, problem.y0, t_span, solver=solver, rtol=RTOL, atol=ATOL)
    error = np.asarray(sol.mean) - reference(problem, t_span, np.asarray(sol.t))
    std = np.asarray(sol.std)
    chi2 = np.mean((error[-1] / std[-1]) ** 2)
    covered = np.mean(np.abs(error[1:]) <= 2 * std[1:])
    return float(np.sqrt(np.mean(error[-1] ** 2))), float(chi2), float(covered)


def main() -> None:
    """Print the table."""
    jax.config.update("jax_enable_x64", True)
    print("| problem | solver | diffusion | RMSE | χ²/d | coverage |")
    print("|---|---|---|---|---|---|")
    for name in PROBLEMS:
        for kind, diffusion in SOLVERS:
            rmse, chi2, covered = measure(name, kind, diffusion)
            print(f"| {name} | {kind.__name__} | {diffusion} | {rmse:.1e} | {chi2:.2g} | {covered:.0%} |")


if __name__ == "__main__":
    main()
