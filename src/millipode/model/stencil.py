"""Declared stencils: the exact diagonal of a Jacobian from a few JVPs."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from millipode.linalg.fields import Field
from millipode.model.vector_field import VectorField
from millipode.xla.module import Module


def _as_tuple(axes: Any) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


class Stencil(Module):
    """A declaration that, along certain axes, f couples an unknown to near neighbours only.

    The diagonal of the Jacobian then takes a few JVPs, each seeded with every unknown of one
    colour, whatever the number of unknowns: on a regular grid in any number of dimensions a
    5- or 7-point Laplacian needs two colours. Axes that are not named (channels of a field, and
    the leaves of a pytree) may be coupled in any way; each of their entries is seeded on its own.

    Args:
        axes: the grid's axes in every leaf of y, counted from the end (negative).
        radius: the reach of the stencil along an axis.
        shape: ``"star"`` if neighbours lie along the axes, ``"box"`` if diagonally too.
        periodic: whether the stencil wraps around, for all axes or one per axis.

    >>> Stencil(axes=(-2, -1)).colours((2, 100, 100))  # two channels of a five-point stencil
    4
    """

    axes: tuple[int, ...] = eqx.field(static=True, default=(-1,), converter=_as_tuple)
    radius: int = eqx.field(static=True, default=1)
    shape: Literal["star", "box"] = eqx.field(static=True, default="star")
    periodic: bool | tuple[bool, ...] = eqx.field(
        static=True, default=False, converter=lambda p: p if isinstance(p, bool) else tuple(p)
    )

    def __check_init__(self) -> None:
        if not self.axes or any(a >= 0 for a in self.axes) or len(set(self.axes)) < len(self.axes):
            raise ValueError(
                "Stencil: axes must be distinct negative integers, counted from the last axis of "
                f"y, for example (-2, -1); got {self.axes}."
            )
        if self.radius < 0:
            raise ValueError(f"Stencil: radius must be at least 0, got {self.radius}.")
        if self.shape not in ("star", "box"):
            raise ValueError(f"Stencil: shape must be 'star' or 'box', got {self.shape!r}.")
        if not isinstance(self.periodic, bool) and len(self.periodic) != len(self.axes):
            raise ValueError("Stencil: periodic must be a bool or one bool per axis.")

    def colours(self, shape: tuple[int, ...]) -> int:
        """The number of JVPs that one leaf of this shape takes."""
        moduli = self._moduli(shape)
        return self._channels(shape) * (moduli[0] if self.shape == "star" else int(np.prod(moduli)))

    def diagonal(self, field: VectorField, t: Array, y: Field) -> tuple[Field, Field]:
        """f(t, y) and the diagonal of its Jacobian, both like y."""
        leaves, tree = jax.tree.flatten(y)
        value, jvp = jax.linearize(lambda x: field(t, x), y)
        zeros = [jnp.zeros_like(leaf) for leaf in leaves]
        diagonals = []
        for i, leaf in enumerate(leaves):
            colour = self._colour(leaf.shape)

            def add(total: Array, c: Array, i: int = i, colour: Array = colour) -> tuple:
                seed = (colour == c).astype(total.dtype)
                out = jvp(jax.tree.unflatten(tree, [*zeros[:i], seed, *zeros[i + 1 :]]))
                return total + seed * jax.tree.leaves(out)[i], None

            colours = jnp.arange(self.colours(leaf.shape))
            diagonals.append(lax.scan(add, jnp.zeros_like(leaf), colours)[0])
        return value, jax.tree.unflatten(tree, diagonals)

    def _wraps(self) -> tuple[bool, ...]:
        if isinstance(self.periodic, bool):
            return (self.periodic,) * len(self.axes)
        return self.periodic

    def _moduli(self, shape: tuple[int, ...]) -> list[int]:
        """Per axis, the smallest m such that x mod m tells an unknown from all its neighbours.

        Around a periodic axis of length n, neighbours across the seam differ by n − k for
        k = 1 … radius, none of which may be a multiple of m. A star needs one m for all axes.
        """
        if len(shape) < len(self.axes) or any(-a > len(shape) for a in self.axes):
            raise ValueError(f"Stencil: axes {self.axes} do not exist in a leaf of shape {shape}.")
        lengths = [shape[a] for a in self.axes]

        def works(m: int, length: int, wraps: bool) -> bool:
            return m >= length or not wraps or not 1 <= length % m <= self.radius

        def smallest(axes: list[tuple[int, bool]]) -> int:
            m = self.radius + 1
            while not all(works(m, length, wraps) for length, wraps in axes):
                m += 1
            return m

        axes = list(zip(lengths, self._wraps(), strict=True))
        if self.shape == "star":
            return [smallest(axes)] * len(axes)
        return [smallest([axis]) for axis in axes]

    def _channels(self, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape)) // int(np.prod([shape[a] for a in self.axes]))

    def _colour(self, shape: tuple[int, ...]) -> Array:
        """The colour of every unknown, computed from iotas, so that the program has no large constants."""
        moduli = self._moduli(shape)
        place = [lax.broadcasted_iota(jnp.int32, shape, a % len(shape)) for a in self.axes]
        if self.shape == "star":
            colour, count = jnp.asarray(sum(place)) % moduli[0], moduli[0]
        else:
            colour, count = jnp.zeros(shape, jnp.int32), 1
            for p, m in zip(place, moduli, strict=True):
                colour, count = colour + count * (p % m), count * m
        grid = {a % len(shape) for a in self.axes}
        for axis in (a for a in range(len(shape)) if a not in grid):
            colour = colour + count * lax.broadcasted_iota(jnp.int32, shape, axis)
            count *= shape[axis]
        return colour
