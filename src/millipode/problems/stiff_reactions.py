"""Equations whose stiffness no fast basis knows: reactions as stiff as diffusion, coefficients that vary."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from millipode.pde.grids import Grid
from millipode.problems.problem import Problem


@dataclass(frozen=True)
class Schnakenberg:
    """The right-hand side (aΔu + γ(¹⁄₁₀ − u + u²v), bΔv + γ(⁹⁄₁₀ − u²v)) for y = (u, v)."""

    a: float
    b: float
    rate: float
    grid: Grid

    def __call__(self, t: Array, y: Float[Array, "2 n n"]) -> Float[Array, "2 n n"]:
        """f(t, y)."""
        (u, v), laplacian = y, self.grid.laplacian
        meetings = u**2 * v
        return jnp.stack(
            [
                self.a * laplacian(u) + self.rate * (0.1 - u + meetings),
                self.b * laplacian(v) + self.rate * (0.9 - meetings),
            ]
        )


def schnakenberg(n: int, a: float = 1e-3, b: float = 4e-2, rate: float = 20.0, seed: int = 0) -> Problem:
    """Schnakenberg's model of Turing patterns, 2n² unknowns: its reaction is as stiff as its diffusion.

        ∂u/∂t = aΔu + γ(1/10 − u + u²v)
        ∂v/∂t = bΔv + γ(9/10 − u²v)

    on the periodic unit square, for t ∈ [0, 2], from its steady state with ten per cent of smooth noise.

    Source: J. Schnakenberg, *Simple chemical reaction systems with limit cycle behaviour*, Journal of
    Theoretical Biology 81, 1979.

    Args:
        n: the number of cells along each side.
        a: the diffusion coefficient of u.
        b: the diffusion coefficient of v.
        rate: the reaction rate γ.
        seed: the seed of the noise.
    """
    grid = Grid((n, n), boundary="periodic")
    noise = np.stack([_smooth_noise(grid, seed + i) for i in range(2)])
    y0 = jnp.asarray(np.array([1.0, 0.9])[:, None, None] * (1 + 0.1 * noise), jnp.result_type(float))
    f = Schnakenberg(a, b, rate, grid)
    return Problem(f, y0, (0.0, 2.0), grid=grid, linear=grid.diffusion([a, b]), components=("u", "v"))


@dataclass(frozen=True)
class VariableDiffusion:
    """The right-hand side ∇·(k∇u) + r(u − u³), where log k varies by the contrast."""

    diffusion: float
    contrast: float
    rate: float
    grid: Grid

    @property
    def coefficient(self) -> Float[Array, "n n"]:
        """The coefficient k, between ``diffusion`` and ``contrast`` times that."""
        x, y = (2 * math.pi * c for c in self.grid.coordinates)
        wave = (jnp.sin(2 * x) * jnp.cos(y) + jnp.sin(x + 3 * y)) / 2
        return self.diffusion * self.contrast ** ((1 + wave) / 2)

    def __call__(self, t: Array, u: Float[Array, "n n"]) -> Float[Array, "n n"]:
        """f(t, u)."""
        return self.grid.diffuse(self.coefficient.astype(u.dtype), u) + self.rate * (u - u**3)


def variable_diffusion(
    n: int, diffusion: float = 1e-3, contrast: float = 100.0, rate: float = 10.0, seed: int = 0
) -> Problem:
    """Phase separation in a medium whose diffusivity varies by a large factor, n² unknowns.

        ∂u/∂t = ∇·(k∇u) + r(u − u³),    k = D c^w,    w = ½ + ¼ (sin 4πx cos 2πy + sin 2π(x + 3y))

    on the periodic unit square, for t ∈ [0, 1], from smooth noise. No fast basis diagonalises the diffusion;
    as ``linear`` there is that of the mean coefficient.

    Source: the Allen–Cahn equation with a variable coefficient, as in the tests of multigrid methods.

    Args:
        n: the number of cells along each side.
        diffusion: D, the smallest coefficient.
        contrast: c, the largest coefficient over the smallest one.
        rate: the reaction rate r.
        seed: the seed of the initial values.
    """
    grid = Grid((n, n), boundary="periodic")
    f = VariableDiffusion(diffusion, contrast, rate, grid)
    u0 = jnp.asarray(0.5 * _smooth_noise(grid, seed), jnp.result_type(float))
    mean = float(jnp.mean(f.coefficient))
    return Problem(f, u0, (0.0, 1.0), grid=grid, linear=grid.diffusion(mean))


@dataclass(frozen=True)
class RobertsonCells:
    """Robertson's reactions of y = (y₁, y₂, y₃) in every cell, and the same diffusion of all three."""

    diffusion: float
    grid: Grid

    def __call__(self, t: Array, y: Float[Array, "3 n n"]) -> Float[Array, "3 n n"]:
        """f(t, y)."""
        slow, fast = 0.04 * y[0] - 1e4 * y[1] * y[2], 3e7 * y[1] ** 2
        return self.diffusion * self.grid.laplacian(y) + jnp.stack([-slow, slow - fast, fast])


def robertson_cells(n: int, diffusion: float = 1e-3) -> Problem:
    """Robertson's stiff chemistry in cells between which all species diffuse, 3n² unknowns.

        ∂y₁/∂t = DΔy₁ − 0.04 y₁ + 10⁴ y₂y₃
        ∂y₂/∂t = DΔy₂ + 0.04 y₁ − 10⁴ y₂y₃ − 3·10⁷ y₂²
        ∂y₃/∂t = DΔy₃ + 3·10⁷ y₂²

    on the unit square without flux, for t ∈ [0, 10⁴], from y₁ between ½ and 1 and none of the others.

    Source: H. H. Robertson, *The solution of a set of reaction rate equations*, 1966, as in Hairer, Wanner,
    *Solving Ordinary Differential Equations II*, IV.10.

    Args:
        n: the number of cells along each side.
        diffusion: D.
    """
    grid = Grid((n, n))
    x, y = grid.coordinates
    start = 0.75 + 0.25 * jnp.cos(math.pi * x) * jnp.cos(2 * math.pi * y)
    y0 = jnp.stack([start, jnp.zeros_like(start), jnp.zeros_like(start)])
    names = ("y₁", "y₂", "y₃")
    linear = grid.diffusion([diffusion] * 3)
    return Problem(
        RobertsonCells(diffusion, grid), y0, (0.0, 1e4), grid=grid, linear=linear, components=names
    )


@dataclass(frozen=True)
class BrusselatorLine:
    """The right-hand side (1 + u²v − 4u + αΔu, 3u − u²v + αΔv) with u = 1 and v = 3 at both ends."""

    alpha: float

    def __call__(self, t: Array, y: Float[Array, "2 n"]) -> Float[Array, "2 n"]:
        """f(t, y)."""
        (u, v), n = y, y.shape[1]
        ends = jnp.asarray([1.0, 3.0], y.dtype)[:, None]
        beyond = jnp.concatenate([ends, y, ends], axis=1)
        diffusion = self.alpha * (n + 1) ** 2 * (beyond[:, 2:] - 2 * y + beyond[:, :-2])
        meetings = u**2 * v
        return diffusion + jnp.stack([1 + meetings - 4 * u, 3 * u - meetings])


def brusselator_line(n: int = 500, alpha: float = 0.02) -> Problem:
    """The Brusselator on a line, 2n unknowns: BRUSS of the stiff test sets.

        ∂u/∂t = 1 + u²v − 4u + αΔu
        ∂v/∂t = 3u − u²v + αΔv

    on (0, 1) with u = 1 and v = 3 at both ends, for t ∈ [0, 10], from u = 1 + sin 2πx, v = 3. The n points
    lie inside, at i/(n + 1).

    Source: Hairer, Wanner, *Solving Ordinary Differential Equations II*, IV.10 (BRUSS).

    Args:
        n: the number of points.
        alpha: the diffusion coefficient α.
    """
    x = jnp.arange(1, n + 1) / (n + 1)
    y0 = jnp.stack([1 + jnp.sin(2 * math.pi * x), jnp.full_like(x, 3.0)])
    return Problem(BrusselatorLine(alpha), y0, (0.0, 10.0), components=("u", "v"))


def _smooth_noise(grid: Grid, seed: int) -> np.ndarray:
    """A random field of a few long waves, between −1 and 1, the same on every grid."""
    rng = np.random.default_rng(seed)
    angles = [2 * np.pi * np.asarray(c) for c in jax.device_get(grid.coordinates)]
    field = np.zeros(grid.shape)
    for _ in range(8):
        waves, phase = rng.integers(-4, 5, size=len(angles)), rng.uniform(0, 2 * np.pi)
        field += np.cos(sum(w * a for w, a in zip(waves, angles, strict=True)) + phase)
    return field / 8
