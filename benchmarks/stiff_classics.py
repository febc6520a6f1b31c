"""Steps and errors of the EK1 on the stiff classics, beside SciPy's BDF.

Attempts are accepted and rejected steps (SciPy does not count its rejected ones). The error is the root mean
square at the end over all unknowns, each in units of atol + rtol |y|. Two tables:

- the EK1 as it comes, which has a Kronecker covariance, beside BDF at the same tolerances;
- the dense EK1 of three orders, and the paper's filter (``corrections=1``).

Run: ``python benchmarks/stiff_classics.py`` writes ``results/stiff_classics.md``; five minutes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import classics
import jax
import numpy as np
from scipy.integrate import solve_ivp

import millipode as mp

RESULT = Path(__file__).parent / "results" / "stiff_classics.md"
TOLERANCES, DENSE_TOLERANCES, ORDERS = (1e-4, 1e-6, 1e-8), (1e-4, 1e-6), (3, 4, 5)
# E5's unknowns end at 1e-20. With more than that as atol, negative values are tolerated, and may blow up.
SMALL, SMALLER = 1e-18, 1e-20
# atol over rtol, for other problems where it is not 1e-4.
SCALES: dict[str, float | np.ndarray] = {
    "Robertson to 1e5": np.array([1e-4, 1e-8, 1e-4]),
    "Robertson to 1e11": np.array([1e-4, 1e-8, 1e-4]),
    "Van der Pol, μ = 10⁶": 1.0,
}


class Found(NamedTuple):
    """Attempts, and the error in units of the tolerance; or the status of a failure."""

    attempts: int
    error: float
    status: str = ""

    def __str__(self) -> str:
        return self.status or f"{self.attempts}, {self.error:.2g}"


def absolute(name: str, rtol: float, smallest: float) -> float | np.ndarray:
    """The absolute tolerance of a problem."""
    return smallest if name == "E5" else rtol * SCALES.get(name, 1e-4)


def found(attempts: int, y: np.ndarray, name: str, rtol: float, smallest: float) -> Found:
    """A result beside the reference."""
    reference = classics.reference(name)
    error = (y - reference) / (absolute(name, rtol, smallest) + rtol * np.abs(reference))
    return Found(attempts, float(np.sqrt(np.mean(error**2))))


def ours(name: str, rtol: float, smallest: float, order: int | None = None, **options: object) -> Found:
    """An EK1."""
    p = classics.problem(name)
    sol = mp.solve(
        p.f,
        p.y0,
        p.t_span,
        solver=mp.EK1(order, **options),
        rtol=rtol,
        atol=absolute(name, rtol, smallest),
        save="end",
        throw=False,
    )
    attempts = int(sol.stats.steps + sol.stats.rejected)
    if not sol.success:
        return Found(attempts, np.inf, mp.Status(sol.status).name)
    return found(attempts, np.asarray(sol.mean[-1]), name, rtol, smallest)


def peer(name: str, rtol: float, smallest: float) -> Found:
    """SciPy's BDF."""
    p = classics.problem(name)
    f, jacobian = jax.jit(p.f), jax.jit(jax.jacfwd(p.f, argnums=1))
    sol = solve_ivp(
        lambda t, y: np.asarray(f(t, y)),
        p.t_span,
        np.asarray(p.y0),
        "BDF",
        rtol=rtol,
        atol=absolute(name, rtol, smallest),
        jac=lambda t, y: np.asarray(jacobian(t, y)),
    )
    return found(sol.t.size - 1, sol.y[:, -1], name, rtol, smallest)


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A table in Markdown, printed while it is made."""
    titles = list(titles)
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(map(str, row)) + " |")
        print(lines[-1], flush=True)
    return lines


def against_bdf() -> list[str]:
    """The EK1 as it comes."""
    rows, ratios, behind = [], [], []
    for name in (*classics.STIFF, *classics.STIFF_LINEAR):
        for rtol in TOLERANCES:
            mine, other = ours(name, rtol, SMALLER), peer(name, rtol, SMALLER)
            ratio = mine.attempts / other.attempts
            ratios.append(ratio)
            if not mine.error <= max(other.error, 3):
                behind.append(f"{name} at {rtol:g}")
            rows.append((name, f"{rtol:g}", mine, other, f"{ratio:.2f}"))
    mean = float(np.exp(np.mean(np.log(ratios))))
    return [
        *table(["problem", "rtol", "EK1()", "BDF (SciPy)", "attempts, ratio"], rows),
        "",
        f"The ratio of attempts is {mean:.2f} in the geometric mean, {max(ratios):.2f} at worst. The error "
        f"is larger than that of BDF and than 3 tolerances in {len(behind)} of {len(rows)} cases"
        f"{': ' + '; '.join(behind) if behind else ''}.",
    ]


def dense() -> list[str]:
    """The paper's EK1, with and without corrections."""
    rows = []
    for name in classics.STIFF:
        for rtol in DENSE_TOLERANCES:
            cells = [ours(name, rtol, SMALL, order, structure="dense") for order in ORDERS]
            rows.append(
                (
                    name,
                    f"{rtol:g}",
                    *cells,
                    ours(name, rtol, SMALL, 5, corrections=1),
                    peer(name, rtol, SMALL),
                )
            )
    titles = [f"dense EK1({order})" for order in ORDERS]
    return table(["problem", "rtol", *titles, "dense EK1(5), one correction", "BDF (SciPy)"], rows)


def main() -> None:
    """Measure, print and store both tables."""
    jax.config.update("jax_enable_x64", True)
    lines = ["# Stiff classics: attempts, and the final error in units of the tolerance", ""]
    lines += ["By `python benchmarks/stiff_classics.py`.", "", *against_bdf(), "", *dense(), ""]
    RESULT.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
