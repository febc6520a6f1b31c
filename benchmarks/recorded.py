"""Does a change of the code change its results?

This script records means, standard deviations, diffusions, evidences and counts of small solves with every
solver, structure, diffusion, prior and save mode, through the public interface only. Run it before and after
a change that should not matter, and compare: ``python benchmarks/recorded.py write before.npz``, with the new
code ``python benchmarks/recorded.py write after.npz``, and then ``python benchmarks/recorded.py compare
before.npz after.npz``. It takes about ten minutes.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millipode as mp

TOLERANCE = 1e-12
TIMES = np.array([0.0, 0.13, 0.5, 0.9, 1.0])
SAVES: dict[str, dict[str, Any]] = {
    "end": {"save": "end"},
    "steps": {"save": "steps"},
    "filtered steps": {"save": "steps", "smooth": False},
    "times": {"save": TIMES},
    "filtered times": {"save": TIMES, "smooth": False},
    "recompute": {"save": "steps", "smooth": "recompute"},
    "members": {"save": TIMES, "uncertainty": mp.Transported(4)},
    "white members": {"save": "steps", "uncertainty": mp.Transported(4, noise="white")},
}
DIFFUSIONS = [
    kind(vector=vector) for kind in (mp.ConstantDiffusion, mp.DynamicDiffusion) for vector in (False, True)
]
GRID = mp.Grid((6, 5), boundary=("neumann", "periodic"))
RATES = np.array([0.02, 0.05])
REACTION = np.array([[0.5, -1.0], [0.3, -0.3]])


def vector(t: jax.Array, y: jax.Array) -> jax.Array:
    """Three coupled unknowns with a full Jacobian."""
    return jnp.array([[-2.0, 0.4, 0.1], [0.3, -1.0, -0.7], [0.2, 0.5, -1.5]]) @ y + jnp.sin(y[::-1] + t) * y


def tree(t: jax.Array, y: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A pytree with leaves of different rank."""
    return {"a": -y["a"] + y["b"].sum(), "b": jnp.sin(y["b"]) - 0.1 * y["a"].sum()}


def field(t: jax.Array, y: jax.Array) -> jax.Array:
    """A reaction–diffusion equation with two components."""
    u, v = y
    diffusion = [rate * GRID.laplacian(x) for rate, x in zip(RATES, y, strict=True)]
    return jnp.stack([diffusion[0] + u - u**3 - v, diffusion[1] + 0.3 * (u - v)])


def solvers() -> Iterator[tuple[str, Any]]:
    """Names and solvers for a vector: every structure and diffusion, several orders and priors."""
    for kind in (mp.EK0, mp.DiagonalEK1, mp.EK1):
        for structure in ("kronecker", "blockdiagonal", "dense"):
            for diffusion in DIFFUSIONS:
                try:
                    solver = kind(3, structure=structure, diffusion=diffusion)
                except ValueError:  # a combination that does not exist
                    continue
                how = f"{type(diffusion).__name__}(vector={diffusion.vector})"
                yield f"{kind.__name__} {structure} {how}", solver
        for order in (1, 2, 5):
            yield f"{kind.__name__}({order})", kind(order)
        for prior in (mp.IOUP(rate=-0.7), mp.MaternProcess(length_scale=0.8)):
            yield f"{kind.__name__} {type(prior).__name__}", kind(3, prior=prior)


def spectral() -> Iterator[tuple[str, Any]]:
    """Names and solvers for a field."""
    plain, coupled = GRID.diffusion(RATES), GRID.diffusion(RATES, reaction=REACTION)
    matern = mp.Matern(GRID, length_scale=0.3)
    yield "spectral", mp.SpectralEK1(2, linear=plain)
    yield "spectral IOUP", mp.SpectralEK1(2, linear=plain, prior=mp.IOUP())
    yield "spectral refreshed", mp.SpectralEK1(2, linear=plain, refresh=3)
    yield "spectral dense", mp.SpectralEK1(2, linear=plain, structure="dense")
    yield "spectral vector", mp.SpectralEK1(2, linear=plain, diffusion=mp.DynamicDiffusion(vector=True))
    yield "spectral Matérn", mp.SpectralEK1(2, linear=plain, spatial=matern)
    yield "coupled", mp.SpectralEK1(2, linear=coupled)
    yield "coupled GMRF", mp.SpectralEK1(2, linear=coupled, spatial=mp.GMRF(GRID, kappa=2.0))
    yield "EK0 Matérn", mp.EK0(3, spatial=matern)
    yield "stencil", mp.DiagonalEK1(2, jacobian_diagonal=mp.Stencil((-2, -1), periodic=(False, True)))


def record() -> dict[str, np.ndarray]:
    """All results, by name."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(7)
    values = {"a": jnp.array([1.0, 0.5]), "b": jnp.array([[0.1, 0.2], [0.3, 0.4]])}
    cases = [(name, vector, jnp.asarray(rng.normal(size=3)), solver) for name, solver in solvers()]
    cases += [(f"tree {kind.__name__}", tree, values, kind(2)) for kind in (mp.EK0, mp.DiagonalEK1, mp.EK1)]
    cases += [(name, field, jnp.asarray(0.3 * rng.normal(size=(2, 6, 5))), s) for name, s in spectral()]
    found: dict[str, np.ndarray] = {}
    for name, f, y0, solver in cases:
        for how, options in SAVES.items():
            sol = mp.solve(f, y0, (0.0, 1.0), solver=solver, rtol=1e-5, atol=1e-7, **options)
            results = {"t": sol.t, "mean": sol.mean, "std": sol.std, "diffusion": sol.diffusion}
            results |= {"evidence": sol.log_evidence, "stats": tuple(sol.stats)}
            for what, values in results.items():
                for i, leaf in enumerate(jax.tree.leaves(values)):
                    found[f"{name} | {how} | {what} {i}"] = np.asarray(leaf)
        jax.clear_caches()
    return found


def compare(before: str, after: str) -> bool:
    """Print the largest relative difference of every kind of result; return whether all are small."""
    old, new = np.load(before), np.load(after)
    worst: dict[str, tuple[float, str]] = {}
    for name in old.files:
        x, y = old[name], new[name]
        size = np.nanmax(np.abs(x)) or 1
        gap = float(np.nanmax(np.abs(x - y)) / size) if x.shape == y.shape else np.inf
        kind = "members" if "members |" in name else name.split(" | ")[2].split()[0]
        worst[kind] = max(worst.get(kind, (0.0, "")), (gap, name))
    for kind, (gap, name) in worst.items():
        print(f"{kind:10} {gap:.1e}  {name}")
    # Ensemble members are single precision.
    return all(gap <= (1e-6 if kind == "members" else TOLERANCE) for kind, (gap, _) in worst.items())


def main() -> None:
    """Write, or compare."""
    match sys.argv[1:]:
        case ["write", path]:
            np.savez(path, **record())  # type: ignore[arg-type]
        case ["compare", before, after]:
            raise SystemExit(0 if compare(before, after) else 1)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
