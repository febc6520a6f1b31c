"""Regular grids and their Laplacian."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Boundary = Literal["neumann", "periodic"]


class Grid(eqx.Module):
    """Cell centres of a regular grid on a box.

    Args:
        shape: the number of cells along each axis; these are the last axes of a field.
        lengths: the side lengths of the box.
        boundary: ``"neumann"`` (no flux) or ``"periodic"``.

    >>> Grid((4,), (2.0,)).spacing
    (0.5,)
    """

    shape: tuple[int, ...] = eqx.field(static=True)
    lengths: tuple[float, ...] = eqx.field(static=True)
    boundary: Boundary = eqx.field(static=True, default="neumann")

    def __check_init__(self) -> None:
        if len(self.shape) != len(self.lengths) or not self.shape:
            raise ValueError(f"Grid: one length per axis, got {self.shape} and {self.lengths}.")
        if any(n < 1 for n in self.shape) or any(not 0 < x < float("inf") for x in self.lengths):
            raise ValueError("Grid: numbers of cells and side lengths must be positive.")
        if self.boundary not in ("neumann", "periodic"):
            raise ValueError(f"Grid: boundary must be 'neumann' or 'periodic', got {self.boundary!r}.")

    @property
    def spacing(self) -> tuple[float, ...]:
        """The distance between cell centres along each axis."""
        return tuple(x / n for x, n in zip(self.lengths, self.shape, strict=True))

    def laplacian(self, u: Float[Array, "*field"]) -> Float[Array, "*field"]:
        """Δu by second-order central differences.

        Shifts by rolling, never by padding: a rolled array fuses with the arithmetic around it and
        needs the fewest exchanges when it is sharded.
        """
        total = jnp.zeros_like(u)
        for axis, dx in zip(range(-len(self.shape), 0), self.spacing, strict=True):
            left, right = (self._shift(u, axis, by) for by in (1, -1))
            total = total + (left + right - 2 * u) / dx**2
        return total

    def laplacian_diagonal(self, u: Float[Array, "*field"]) -> Array:
        """The diagonal of the Laplacian's matrix, as a field like u."""
        total = jnp.zeros_like(u)
        for axis, dx in zip(range(-len(self.shape), 0), self.spacing, strict=True):
            neighbours = 2 - sum(self._at_edge(u, axis, by).astype(u.dtype) for by in (1, -1))
            if u.shape[axis] == 1 and self.boundary == "periodic":
                neighbours = jnp.zeros_like(neighbours)
            total = total - neighbours / dx**2
        return total

    def _shift(self, u: Array, axis: int, by: int) -> Array:
        """The neighbour's value; at a Neumann edge, where there is none, one's own."""
        rolled = jnp.roll(u, by, axis)
        return jnp.where(self._at_edge(u, axis, by), u, rolled) if self._closed else rolled

    def _at_edge(self, u: Array, axis: int, by: int) -> Array:
        place = lax.broadcasted_iota(jnp.int32, u.shape, axis % u.ndim)
        edge = 0 if by == 1 else u.shape[axis] - 1
        return (place == edge) & self._closed

    @property
    def _closed(self) -> bool:
        return self.boundary == "neumann"
