"""Steps and errors of the dense EK1 on the stiff classics, beside SciPy's BDF.

Attempts are accepted and rejected steps. The error is the root mean square at the end over all unknowns, each
in units of atol + rtol |y|. The paper's filter (``corrections=1``) stands beside.

Run: ``python benchmarks/stiff_classics.py`` writes ``results/stiff_classics.md``; three minutes.
"""

from pathlib import Path

import classics
import jax
import numpy as np
from scipy.integrate import solve_ivp

import millipode as mp

RESULT = Path(__file__).parent / "results" / "stiff_classics.md"
TOLERANCES, ORDERS = (1e-4, 1e-6), (3, 4, 5)
# atol over rtol; E5 has atol = 1e-18 throughout, because its unknowns are that small.
SCALES: dict[str, float | np.ndarray] = {
    "Robertson to 1e5": np.array([1e-4, 1e-8, 1e-4]),
    "Robertson to 1e11": np.array([1e-4, 1e-8, 1e-4]),
    "Van der Pol, μ = 10⁶": 1.0,
}


def absolute(name: str, rtol: float) -> float | np.ndarray:
    """The absolute tolerance of a problem."""
    return 1e-18 if name == "E5" else rtol * SCALES.get(name, 1e-4)


def cell(attempts: int, y: np.ndarray, name: str, rtol: float) -> str:
    """Attempts, and the error in units of the tolerance."""
    reference = classics.reference(name)
    error = (y - reference) / (absolute(name, rtol) + rtol * np.abs(reference))
    return f"{attempts}, {np.sqrt(np.mean(error**2)):.2g}"


def ours(name: str, rtol: float, order: int, **options: int) -> str:
    """A cell for an EK1."""
    p = classics.problem(name)
    sol = mp.solve(
        p.f,
        p.y0,
        p.t_span,
        solver=mp.EK1(order, **options),
        rtol=rtol,
        atol=absolute(name, rtol),
        save="end",
        throw=False,
    )
    attempts = int(sol.stats.steps + sol.stats.rejected)
    return cell(attempts, np.asarray(sol.mean[-1]), name, rtol) if sol.success else mp.Status(sol.status).name


def peer(name: str, rtol: float) -> str:
    """A cell for SciPy's BDF; its rejected steps are not counted."""
    p = classics.problem(name)
    f, jacobian = jax.jit(p.f), jax.jit(jax.jacfwd(p.f, argnums=1))
    sol = solve_ivp(
        lambda t, y: np.asarray(f(t, y)),
        p.t_span,
        np.asarray(p.y0),
        "BDF",
        rtol=rtol,
        atol=absolute(name, rtol),
        jac=lambda t, y: np.asarray(jacobian(t, y)),
    )
    return cell(sol.t.size - 1, sol.y[:, -1], name, rtol)


def main() -> None:
    """Measure, print and store the table."""
    jax.config.update("jax_enable_x64", True)
    titles = ["problem", "rtol", *(f"EK1({o})" for o in ORDERS), "EK1(5), one correction", "BDF (SciPy)"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name in classics.STIFF:
        for rtol in TOLERANCES:
            cells = [ours(name, rtol, order) for order in ORDERS]
            cells += [ours(name, rtol, 5, corrections=1), peer(name, rtol)]
            lines.append("| " + " | ".join([name, f"{rtol:g}", *cells]) + " |")
            print(lines[-1], flush=True)
    text = ["# Stiff classics: attempts, and the final error in units of the tolerance", ""]
    RESULT.write_text("\n".join([*text, "By `python benchmarks/stiff_classics.py`.", "", *lines, ""]))


if __name__ == "__main__":
    main()
