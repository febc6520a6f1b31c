"""Reaction–diffusion equations: Gray–Scott, Allen–Cahn, Fisher–KPP and the Brusselator."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from millipode.model.stencil import Stencil
from millipode.pde.grids import Boundary, Grid
from millipode.pde.linear import Linear
from millipode.problems.problem import JacobianDiagonal, Problem


@dataclass(frozen=True)
class GrayScott:
    """The right-hand side (aΔu − uv² + F(1 − u), bΔv + uv² − (F + k)v) for y = (u, v)."""

    a: float
    b: float
    feed: float
    kill: float
    grid: Grid

    def __call__(self, t: Array, y: Float[Array, "2 n n"]) -> Float[Array, "2 n n"]:
        """f(t, y)."""
        (u, v), laplacian = y, self.grid.laplacian
        meetings = u * v**2
        return jnp.stack(
            [
                self.a * laplacian(u) - meetings + self.feed * (1 - u),
                self.b * laplacian(v) + meetings - (self.feed + self.kill) * v,
            ]
        )

    def jacobian_diagonal(self, t: Array, y: Float[Array, "2 n n"]) -> Float[Array, "2 n n"]:
        """(a diag Δ − v² − F, b diag Δ + 2uv − F − k)."""
        (u, v), laplacian = y, self.grid.laplacian_diagonal(y[0])
        return jnp.stack(
            [
                self.a * laplacian - v**2 - self.feed,
                self.b * laplacian + 2 * u * v - self.feed - self.kill,
            ]
        )


def gray_scott(
    n: int, a: float = 2e-5, b: float = 1e-5, feed: float = 0.04, kill: float = 0.06, seed: int = 0
) -> Problem:
    """The Gray–Scott model of an autocatalytic reaction, 2n² unknowns: spots that divide.

        ∂u/∂t = aΔu − uv² + F(1 − u)
        ∂v/∂t = bΔv + uv² − (F + k)v

    on a periodic square of side 2.5, for t ∈ [0, 2000]. It starts at the trivial state (1, 0), except for a
    square in the middle at (½, ¼), with one per cent of noise.

    Source: J. E. Pearson, *Complex patterns in a simple system*, Science 261, 1993.

    Args:
        n: the number of cells along each side.
        a: the diffusion coefficient of u.
        b: the diffusion coefficient of v.
        feed: the feed rate F.
        kill: the kill rate k.
        seed: the seed of the noise.
    """
    grid = Grid((n, n), 2.5, "periodic")
    f = GrayScott(a, b, feed, kill, grid)
    x, y = grid.coordinates
    middle = (jnp.abs(x - 1.25) < 0.25) & (jnp.abs(y - 1.25) < 0.25)
    noise = 1 + 0.01 * np.random.default_rng(seed).normal(size=(2, n, n))
    y0 = jnp.stack([jnp.where(middle, 0.5, 1.0), jnp.where(middle, 0.25, 0.0)]) * noise
    linear = grid.diffusion([a, b], shift=[-feed, -feed - kill])
    return _problem(f, y0, 2000.0, grid, linear)


@dataclass(frozen=True)
class AllenCahn:
    """The right-hand side ε²Δu + u − u³."""

    epsilon: float
    grid: Grid

    def __call__(self, t: Array, u: Float[Array, "n n"]) -> Float[Array, "n n"]:
        """f(t, u)."""
        return self.epsilon**2 * self.grid.laplacian(u) + u - u**3

    def jacobian_diagonal(self, t: Array, u: Float[Array, "n n"]) -> Float[Array, "n n"]:
        """ε² diag Δ + 1 − 3u²."""
        return self.epsilon**2 * self.grid.laplacian_diagonal(u) + 1 - 3 * u**2


def allen_cahn(n: int, epsilon: float = 0.02, seed: int = 0, boundary: Boundary = "neumann") -> Problem:
    """The Allen–Cahn equation of phase separation, n² unknowns: domains of ±1 that shrink by curvature.

        ∂u/∂t = ε²Δu + u − u³

    on the unit square, from uniform noise on (−½, ½), for t ∈ [0, 20]. Interfaces are a few ε wide.

    Source: S. M. Allen and J. W. Cahn, *Acta Metallurgica* 27, 1979.

    Args:
        n: the number of cells along each side.
        epsilon: ε, which sets the width of interfaces.
        seed: the seed of the initial values.
        boundary: the boundary condition, as for ``mp.Grid``.
    """
    grid = Grid((n, n), boundary=boundary)
    f = AllenCahn(epsilon, grid)
    y0 = jnp.asarray(np.random.default_rng(seed).uniform(-0.5, 0.5, size=(n, n)), jnp.result_type(float))
    return _problem(f, y0, 20.0, grid, grid.diffusion(epsilon**2))


@dataclass(frozen=True)
class FisherKPP:
    """The right-hand side DΔu + r u(1 − u)."""

    diffusion: float
    rate: float
    grid: Grid

    def __call__(self, t: Array, u: Float[Array, " n"]) -> Float[Array, " n"]:
        """f(t, u)."""
        return self.diffusion * self.grid.laplacian(u) + self.rate * u * (1 - u)

    def jacobian_diagonal(self, t: Array, u: Float[Array, " n"]) -> Float[Array, " n"]:
        """D diag Δ + r(1 − 2u)."""
        return self.diffusion * self.grid.laplacian_diagonal(u) + self.rate * (1 - 2 * u)


def fisher_kpp(n: int, diffusion: float = 1.0, rate: float = 1.0, length: float = 100.0) -> Problem:
    """The equation of Fisher and of Kolmogorov, Petrovsky and Piskunov, n unknowns: an invading front.

        ∂u/∂t = D ∂²u/∂x² + r u(1 − u)

    on [0, L] without flux through the ends, for t ∈ [0, 40], from u = 1 on the left tenth and 0 elsewhere. A
    front runs to the right, at a speed that approaches 2√(rD) from below.

    Source: R. A. Fisher, *The wave of advance of advantageous genes*, 1937; Kolmogorov et al., 1937.

    Args:
        n: the number of cells.
        diffusion: the diffusion coefficient D.
        rate: the growth rate r.
        length: the length L of the interval.
    """
    grid = Grid(n, length)
    f = FisherKPP(diffusion, rate, grid)
    (x,) = grid.coordinates
    y0 = jnp.where(x < 0.1 * length, 1.0, 0.0)
    return _problem(f, y0, 40.0, grid, grid.diffusion(diffusion))


@dataclass(frozen=True)
class Brusselator:
    """The right-hand side (αΔu + A + u²v − (B + 1)u, αΔv + Bu − u²v) for y = (u, v)."""

    alpha: float
    a: float
    b: float
    grid: Grid

    def __call__(self, t: Array, y: Float[Array, "2 n n"]) -> Float[Array, "2 n n"]:
        """f(t, y)."""
        (u, v), laplacian = y, self.grid.laplacian
        meetings = u**2 * v
        return jnp.stack(
            [
                self.alpha * laplacian(u) + self.a + meetings - (self.b + 1) * u,
                self.alpha * laplacian(v) + self.b * u - meetings,
            ]
        )

    def jacobian_diagonal(self, t: Array, y: Float[Array, "2 n n"]) -> Float[Array, "2 n n"]:
        """(α diag Δ + 2uv − B − 1, α diag Δ − u²)."""
        (u, v), laplacian = y, self.alpha * self.grid.laplacian_diagonal(y[0])
        return jnp.stack([laplacian + 2 * u * v - self.b - 1, laplacian - u**2])


def brusselator(n: int, alpha: float = 0.1, a: float = 1.0, b: float = 3.4) -> Problem:
    """The Brusselator with diffusion, 2n² unknowns: an oscillating reaction in space.

        ∂u/∂t = αΔu + A + u²v − (B + 1)u
        ∂v/∂t = αΔv + Bu − u²v

    on the periodic unit square, for t ∈ [0, 11.5], from u = 22y(1 − y)^(3/2), v = 27x(1 − x)^(3/2).

    Source: Hairer, Wanner, *Solving Ordinary Differential Equations II*, IV.10 (BRUSS-2D, without its
    forcing).

    Args:
        n: the number of cells along each side.
        alpha: the diffusion coefficient α.
        a: the reaction parameter A.
        b: the reaction parameter B.
    """
    grid = Grid((n, n), boundary="periodic")
    f = Brusselator(alpha, a, b, grid)
    x, y = grid.coordinates
    y0 = jnp.stack([22 * y * (1 - y) ** 1.5, 27 * x * (1 - x) ** 1.5])
    return _problem(f, y0, 11.5, grid, grid.diffusion([alpha, alpha], shift=[-b - 1, 0.0]))


def _problem(f: Callable, y0: Array, t1: float, grid: Grid, linear: Linear) -> Problem:
    stencil = Stencil(
        axes=tuple(range(-len(grid.shape), 0)), periodic=tuple(b == "periodic" for b in grid.boundary)
    )
    components = ("u", "v") if y0.ndim > len(grid.shape) else None
    return Problem(f, y0, (0.0, t1), JacobianDiagonal(f), stencil, grid, linear, components=components)
