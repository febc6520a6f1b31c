"""PDEs with diffusion: heat, Burgers, Kuramoto–Sivashinsky and Swift–Hohenberg."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from millipode.pde.grids import Grid
from millipode.problems.problem import Problem


@dataclass(frozen=True)
class Heat:
    """The right-hand side aΔu."""

    a: float
    grid: Grid

    def __call__(self, t: Array, u: Float[Array, "*grid"]) -> Float[Array, "*grid"]:
        """f(t, u)."""
        return self.a * self.grid.laplacian(u)


@dataclass(frozen=True)
class HeatKernel:
    """The exact solution exp(a t Δ) u₀ of the discretised equation."""

    f: Heat
    u0: Array

    def __call__(self, t: Array) -> Array:
        """u(t)."""
        basis = self.f.grid.basis
        decay = jnp.exp(self.f.a * t * self.f.grid.eigenvalues())
        return basis.from_modes(decay.astype(self.u0.dtype) * basis.to_modes(self.u0))


def heat(
    shape: int | tuple[int, ...],
    a: float = 1e-2,
    boundary: Literal["neumann", "dirichlet", "periodic"] = "neumann",
) -> Problem:
    """The heat equation on the unit interval, square or cube, whose discrete solution is known.

        ∂u/∂t = aΔu

    from a bump exp(−50 |x − x₀|²) with x₀ = (0.4, …), for t ∈ [0, 1]. ``Problem.solution`` is exact for the
    discretised equation.

    Args:
        shape: the number of cells along each axis.
        a: the conductivity.
        boundary: the boundary condition, as for ``mp.Grid``.
    """
    grid = Grid(shape, boundary=boundary)
    f = Heat(a, grid)
    square = sum((x - 0.4) ** 2 for x in grid.coordinates)
    y0 = jnp.exp(-50 * square)
    return Problem(f, y0, (0.0, 1.0), grid=grid, linear=grid.diffusion(a), solution=HeatKernel(f, y0))


@dataclass(frozen=True)
class Burgers:
    """The right-hand side νΔu − (u·∇)u, by central differences."""

    viscosity: float
    grid: Grid

    def __call__(self, t: Array, u: Float[Array, "*field"]) -> Float[Array, "*field"]:
        """f(t, u)."""
        velocity = [u] if len(self.grid.shape) == 1 else list(u)
        return self.viscosity * self.grid.laplacian(u) - self.grid.advection(velocity, u, "central")


def burgers(n: int, dimensions: Literal[1, 2] = 1, viscosity: float = 0.01) -> Problem:
    """Burgers' equation with viscosity, n unknowns in one dimension, 2n² in two: waves become fronts.

        ∂u/∂t = νΔu − (u·∇)u

    on the periodic unit interval or square, from a smooth wave, for t ∈ [0, 1]. Fronts are about 4ν wide:
    resolve them with at least n = 1/ν cells.

    Source: J. M. Burgers, *A mathematical model illustrating the theory of turbulence*, 1948.

    Args:
        n: the number of cells along each side.
        dimensions: 1 for u of shape (n,), or 2 for u of shape (2, n, n).
        viscosity: the viscosity ν.
    """
    if dimensions not in (1, 2):
        raise ValueError(f"burgers: dimensions must be 1 or 2, got {dimensions}.")
    grid = Grid((n,) * dimensions, boundary="periodic")
    if dimensions == 1:
        (x,) = grid.coordinates
        y0 = jnp.sin(2 * jnp.pi * x) + 0.5
    else:
        x, y = grid.coordinates
        wave = jnp.sin(2 * jnp.pi * x) * jnp.cos(2 * jnp.pi * y)
        y0 = jnp.stack([wave + 0.3, -jnp.cos(2 * jnp.pi * x) * jnp.sin(2 * jnp.pi * y)])
    return Problem(
        Burgers(viscosity, grid),
        y0,
        (0.0, 1.0),
        grid=grid,
        linear=grid.diffusion(viscosity),
        components=None if dimensions == 1 else ("u", "v"),
    )


@dataclass(frozen=True)
class KuramotoSivashinsky:
    """The right-hand side −u_xx − u_xxxx − ½(u²)_x, with exact derivatives of trigonometric polynomials."""

    grid: Grid

    def __call__(self, t: Array, u: Float[Array, " n"]) -> Float[Array, " n"]:
        """f(t, u)."""
        n, (length,) = u.shape[-1], self.grid.lengths
        k = (2 * np.pi / length * np.arange(n // 2 + 1)).astype(u.dtype)
        # The derivative of the highest wave vanishes on the grid; a resolved solution has no such wave.
        slope = np.where(2 * np.arange(n // 2 + 1) == n, 0, k)
        spectrum = jnp.fft.rfft(jnp.stack([u, u**2]))
        half = -0.5j * slope.astype(jax.dtypes.canonicalize_dtype(spectrum.dtype))
        return jnp.fft.irfft((k**2 - k**4) * spectrum[0] + half * spectrum[1], n)


def kuramoto_sivashinsky(n: int = 1024, length: float = 32 * np.pi) -> Problem:
    """The Kuramoto–Sivashinsky equation of flame fronts, n unknowns: chaos in space and time.

        ∂u/∂t = −∂²u/∂x² − ∂⁴u/∂x⁴ − ½ ∂(u²)/∂x

    on a periodic interval, from cos(x/16)(1 + sin(x/16)), for t ∈ [0, 150], with spectral derivatives in
    space. Long waves grow; short waves decay at a rate of their wave number to the fourth power. Only the
    decay is declared as ``linear``.

    Source: A.-K. Kassam and L. N. Trefethen, *Fourth-order time-stepping for stiff PDEs*, 2005.

    Args:
        n: the number of points.
        length: the length of the interval.
    """
    grid = Grid(n, length, "periodic")
    (x,) = grid.coordinates
    phase = 2 * jnp.pi * x / length
    linear = grid.operator(lambda laplacian: np.minimum(-laplacian - laplacian**2, 0), continuous=True)
    y0 = jnp.cos(phase) * (1 + jnp.sin(phase))
    return Problem(KuramotoSivashinsky(grid), y0, (0.0, 150.0), grid=grid, linear=linear)


@dataclass(frozen=True)
class SwiftHohenberg:
    """The right-hand side ru − (1 + Δ)²u + gu² − u³."""

    r: float
    g: float
    grid: Grid

    def __call__(self, t: Array, u: Float[Array, "n n"]) -> Float[Array, "n n"]:
        """f(t, u)."""
        inner = u + self.grid.laplacian(u)
        return self.r * u - inner - self.grid.laplacian(inner) + self.g * u**2 - u**3


def swift_hohenberg(
    n: int, r: float = 0.2, g: float = 0.0, length: float = 20 * np.pi, seed: int = 0
) -> Problem:
    """The Swift–Hohenberg equation of convection, n² unknowns: stripes (g = 0) or hexagons (g ≈ 1).

        ∂u/∂t = ru − (1 + Δ)²u + gu² − u³

    on a periodic square, from uniform noise on (−0.1, 0.1), for t ∈ [0, 100]. Patterns have a wavelength of
    about 2π.

    Source: J. Swift and P. C. Hohenberg, *Hydrodynamic fluctuations at the convective instability*, 1977.

    Args:
        n: the number of cells along each side.
        r: the distance from the onset of convection.
        g: the strength of the quadratic term.
        length: the length of a side.
        seed: the seed of the initial values.
    """
    grid = Grid((n, n), length, "periodic")
    linear = grid.operator(lambda laplacian: np.minimum(r - (1 + laplacian) ** 2, 0))
    y0 = jnp.asarray(np.random.default_rng(seed).uniform(-0.1, 0.1, size=(n, n)), jnp.result_type(float))
    return Problem(SwiftHohenberg(r, g, grid), y0, (0.0, 100.0), grid=grid, linear=linear)
