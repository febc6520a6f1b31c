"""Matérn covariances on regular grids, exact in the grid's own basis.

A Matérn kernel is a mixture of Gaussians: with t ~ Gamma(ν, 1) and z = √(2ν) r/ℓ,

    k(r) = 2^(1−ν)/Γ(ν) z^ν K_ν(z) = E[exp(−z²/4t)].

A Gaussian is a product over the axes. Along one axis, the eigenvalue of its matrix for a wave of phase φ from
cell to cell is a theta function, Σ_j exp(−j²/2s²) cos(jφ). A few terms of a series give it up to rounding:
this one for s = σ/dx below 0.4, and the one from Poisson's summation formula above. The expectation is then
a sum over the nodes of a quadrature in log t. All its terms are positive, so nothing cancels. The same
formula holds for every smoothness, length and number of dimensions, and it is differentiated as it stands.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from millipode.linalg.arguments import as_positive, check_fraction, check_positive
from millipode.pde.grids import Grid
from millipode.pde.linear import Linear
from millipode.spatial.protocol import Spatial
from millipode.xla.ordering import stored
from millipode.xla.tracing import is_traced

# The largest number of entries in a table of theta functions.
PIECE = 2**18


class Stationary(Spatial):
    """Spatial covariances that are diagonal in the basis of a grid.

    Attributes:
        grid: the grid of the points.
        precision: the inverse variance of each mode, like the modes.
    """

    grid: eqx.AbstractVar[Grid]
    precision: eqx.AbstractVar[Float[Array, "*modes"]]

    def quadratic(self, z: Array) -> Array:
        """zᵀ Γ̆⁻¹ z, computed in modes."""
        modes = self.grid.basis.to_modes(z)
        return stored(lambda x, p: jnp.sum(x**2 * p), modes, self.precision)

    def correlate(self, white: Array) -> Array:
        """V P^(−½) x for the precisions P: white noise can be taken as modes, because V is orthonormal."""
        return self.grid.basis.from_modes(white.reshape(self.precision.shape) / jnp.sqrt(self.precision))

    def diagonal(self) -> Array:
        """The variances, by one transform; one number if the grid has no walls."""
        if set(self.grid.boundary) == {"periodic"}:
            return jnp.mean(1 / self.precision)
        return self.grid.basis.variance(1 / self.precision)

    def logdet(self) -> Array:
        """Minus the sum of the logarithms of the precisions."""
        return -jnp.sum(jnp.log(self.precision))

    def spectrum(self, linear: Linear) -> Array:
        """The variance of each mode; raise ``ValueError`` unless ``linear`` is on the same grid."""
        if linear.basis != self.grid.basis:
            raise ValueError(
                f"spatial is for the modes of {self.grid.basis}, but linear is for those of {linear.basis}. "
                "Make both from the same mp.Grid."
            )
        if linear.lengths not in (None, self.grid.lengths):
            raise ValueError(
                f"spatial is for a grid with sides of length {self.grid.lengths}, but linear is for one with "
                f"{linear.lengths}. Make both from the same mp.Grid."
            )
        return 1 / self.precision


class Matern(Stationary):
    """Γ̆ = k(X, X) for a Matérn kernel k and the cell centres X of a grid; O(d log d), and O(d) memory.

    Around a periodic axis the kernel wraps around. At a wall it is reflected like the grid's fields, to
    k(x, x') ± k(x, −x'): towards a Neumann wall the variance grows up to twofold, and towards a Dirichlet
    wall it goes to zero. A few lengths away from the walls this effect is negligible.

    Args:
        grid: the ``mp.Grid`` that y lives on.
        smoothness: ν > 0, how often samples can be differentiated in space; ``float("inf")`` for the squared
            exponential kernel.
        length_scale: ℓ > 0, in the units of the grid's lengths: one number, or one per axis.
        variance: the variance of each point, k(x, x). Only its ratios between components matter, because γ is
            calibrated.
        nugget: the variance of additional white noise, as a fraction of ``variance``. Smooth kernels on fine
            grids give the shortest waves almost no variance, so that rounding errors in residuals weigh too
            much; 1e-8 prevents that.

    >>> grid = Grid((64, 64), boundary="periodic")
    >>> model = Matern(grid, smoothness=1.5, length_scale=0.1)
    >>> bool(jnp.isclose(model.diagonal(), 1.0, rtol=1e-5))
    True
    """

    grid: Grid
    precision: Float[Array, "*modes"]
    shape: tuple[int, ...] = eqx.field(static=True)
    smoothness: float = eqx.field(static=True)

    def __init__(
        self,
        grid: Grid,
        smoothness: float = 1.5,
        length_scale: ArrayLike | Sequence[ArrayLike] = 0.1,
        variance: ArrayLike = 1.0,
        nugget: Array | float = 0.0,
    ):
        check_grid(grid, "Matern")
        check_positive(smoothness, "Matern: smoothness", infinite=True)
        is_several = isinstance(length_scale, Sequence) or np.ndim(length_scale) == 1
        lengths = tuple(length_scale) if is_several else (length_scale,)  # type: ignore[arg-type]
        if len(lengths) not in (1, len(grid.shape)):
            raise ValueError(
                f"Matern: one length_scale, or one per axis of the grid {grid.shape}; got {len(lengths)}."
            )
        lengths = tuple(as_positive(x, "Matern: length_scale", scalar=True) for x in lengths) * (
            len(grid.shape) if len(lengths) == 1 else 1
        )
        check_fraction(nugget, "Matern: nugget")
        self.grid, self.shape, self.smoothness = grid, grid.shape, float(smoothness)
        variance = as_positive(variance, "Matern: variance", scalar=True)
        spectrum = _spectrum(grid, self.smoothness, lengths, variance, nugget)
        _check_spectrum(spectrum)
        self.precision = 1 / spectrum


def check_grid(grid: Any, name: str) -> None:
    """Raise ``TypeError`` unless ``grid`` is an ``mp.Grid``."""
    if not isinstance(grid, Grid):
        raise TypeError(f"{name}: grid must be an mp.Grid, got {type(grid).__name__}.")


def _check_spectrum(spectrum: Array) -> None:
    """Raise ``ValueError`` if the rounding of a residual would outweigh the residual itself in zᵀ Γ̆⁻¹ z."""
    if is_traced(spectrum):
        return
    smallest, largest = float(jnp.min(spectrum)), float(jnp.max(spectrum))
    if not smallest > float(jnp.finfo(spectrum.dtype).eps) ** 2 * largest:
        raise ValueError(
            f"Matern: on this grid the kernel is not positive definite up to rounding, the variances of its "
            f"modes reach from {smallest:.3g} to {largest:.3g}. Pass nugget=1e-8, or choose a rougher "
            "kernel, a shorter length_scale or a coarser grid."
        )


@partial(jax.jit, static_argnums=(0, 1))
def _spectrum(
    grid: Grid, smoothness: float, lengths: tuple[Array, ...], variance: Array, nugget: Array
) -> Float[Array, "*modes"]:
    """The variance of each mode, like the modes."""
    nodes, weights = _mixture(smoothness)
    kind = jnp.result_type(float)
    phases = [jnp.asarray(p, kind) for p in grid.basis.frequencies()]
    widths = [jnp.asarray(x, kind) / dx * nodes for x, dx in zip(lengths, grid.spacing, strict=True)]

    def factor(phases: Array, width: Array) -> Float[Array, "q n"]:
        return jax.vmap(lambda s: _theta(phases, s))(width)

    # The longest axis is processed in pieces, so that no array is much larger than the spectrum.
    longest = int(np.argmax([p.size for p in phases]))
    others = [factor(p, w) for i, (p, w) in enumerate(zip(phases, widths, strict=True)) if i != longest]
    letters = "abcdefgh"[: len(phases)]
    terms = ",".join(f"q{c}" for c in letters)

    @jax.checkpoint
    def piece(phases: Array) -> Array:
        first = factor(phases, widths[longest]) * jnp.asarray(weights, kind)[:, None]
        return jnp.einsum(f"{terms}->{letters}", first, *others, precision="highest")

    n = phases[longest].size
    count = -(-n * nodes.size // PIECE)
    size = -(-n // count)
    pieces = jnp.pad(phases[longest], (0, count * size - n)).reshape(count, size)
    total = piece(pieces[0])[None] if count == 1 else jax.lax.map(piece, pieces)
    total = jnp.moveaxis(total.reshape(-1, *total.shape[2:])[:n], 0, longest)
    return grid.basis.arranged(variance * (total + nugget))


@cache
def _mixture(smoothness: float) -> tuple[np.ndarray, np.ndarray]:
    """Widths of Gaussians as multiples of ℓ, and their weights, by the trapezoidal rule in log t.

    The integrand is analytic where |Im log t| < π/2, so steps of 0.2 are exact up to rounding. For large ν it
    is narrow, and the steps are shorter.
    """
    if smoothness == math.inf:
        return np.ones(1), np.ones(1)
    reach, step = 10 / math.sqrt(smoothness), min(0.2, 0.5 / math.sqrt(smoothness))
    u = math.log(smoothness) + np.arange(-45 / smoothness - reach, math.log1p(60 / smoothness) + reach, step)
    log = smoothness * (u - math.log(smoothness)) - (np.exp(u) - smoothness)
    u, log = u[log > -42], log[log > -42]
    weights = np.exp(log)
    return np.sqrt(np.exp(u) / smoothness), weights / weights.sum()


def _theta(phases: Array, s: Array) -> Array:
    """Σ_j exp(−j²/2s²) cos(jφ) over all integers j, for phases from 0 to π."""
    narrow = s < 0.4
    # A kernel narrower than 0.05 is white up to rounding, and one over its square would overflow.
    small, large = jnp.where(narrow, jnp.maximum(s, 0.05), 0.4), jnp.where(narrow, 0.4, s)
    direct = 1 + 2 * sum(jnp.exp(-(j**2) / (2 * small**2)) * jnp.cos(j * phases) for j in range(1, 6))
    dual = sum(jnp.exp(-0.5 * (large * (phases + 2 * math.pi * m)) ** 2) for m in range(-4, 5))
    return jnp.where(narrow, direct, math.sqrt(2 * math.pi) * large * dual)
