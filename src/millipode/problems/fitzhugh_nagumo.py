"""The FitzHugh–Nagumo PDE, in which patterns grow from noise."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from millipode.model.stencil import Stencil
from millipode.pde.grids import Grid
from millipode.problems.problem import JacobianDiagonal, Problem


@dataclass(frozen=True)
class FitzHughNagumo:
    """The right-hand side (aΔu + u − u³ − v + k, (bΔv + u − v)/τ) for y = (u, v)."""

    a: float
    b: float
    k: float
    tau: float
    grid: Grid

    def __call__(self, t: Array, y: Float[Array, "2 n n"]) -> Float[Array, "2 n n"]:
        """f(t, y)."""
        (u, v), laplacian = y, self.grid.laplacian
        return jnp.stack(
            [self.a * laplacian(u) + u - u**3 - v + self.k, (self.b * laplacian(v) + u - v) / self.tau]
        )

    def jacobian_diagonal(self, t: Array, y: Float[Array, "2 n n"]) -> Float[Array, "2 n n"]:
        """(a diag Δ + 1 − 3u², (b diag Δ − 1)/τ)."""
        laplacian = self.grid.laplacian_diagonal(y[0])
        return jnp.stack([self.a * laplacian + 1 - 3 * y[0] ** 2, (self.b * laplacian - 1) / self.tau])


def fitzhugh_nagumo(
    n: int,
    a: float = 2.8e-4,
    b: float = 5e-3,
    k: float = -5e-3,
    tau: float = 0.1,
    seed: int = 0,
    *,
    length: float = 1.0,
) -> Problem:
    """The FitzHugh–Nagumo model of excitable tissue on a square, 2n² unknowns.

        ∂u/∂t = aΔu + u − u³ − v + k
        ∂v/∂t = (bΔv + u − v)/τ

    with no flux through the boundary, second-order central differences on n × n cells, uniform random
    initial values on (0, 1), for t ∈ [0, 20]. u and v are stacked: y has the shape (2, n, n). The noise is
    smoothed at once; from t ≈ 5 on, spots and labyrinths grow to a width of about 0.1.

    Source: Ambrosio and Françoise, *Propagation of bursting oscillations*, 2009; Krämer et al. (2022), E.3,
    who print a = 208·10⁻⁴. With that value no pattern forms; the authors' code has 2.8·10⁻⁴.

    Args:
        n: the number of cells along each side.
        a: the diffusion coefficient of u.
        b: the diffusion coefficient of v.
        k: the constant feed of u.
        tau: the time scale τ of v.
        seed: the seed of the initial values.
        length: the length of a side.
    """
    if n < 2:
        raise ValueError(f"fitzhugh_nagumo: n must be at least 2, got {n}.")
    grid = Grid((n, n), length, "neumann")
    f = FitzHughNagumo(a, b, k, tau, grid)
    linear = grid.diffusion([a, b / tau], shift=[0.0, -1 / tau])
    y0 = jnp.asarray(np.random.default_rng(seed).uniform(size=(2, n, n)), jnp.result_type(float))
    return Problem(
        f, y0, (0.0, 20.0), JacobianDiagonal(f), Stencil(axes=(-2, -1)), grid, linear, components=("u", "v")
    )
