"""From modes to space, and from what is stored to fields like y, with all axes of time and batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from millipode.linalg import fields
from millipode.linalg.fields import (
    Coefficient,
    Field,
    is_shared,
    safe_divide,
    safe_sqrt,
    same_structure,
    scaled_rms,
)
from millipode.pde.bases import Basis
from millipode.posterior.posterior import Moments
from millipode.xla.compiling import compiled


def _over(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """A function of fields, for fields with this many more axes in front."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


@compiled(static_argnums=3)
def of_y(basis: Basis, variation: Field | None, moments: Moments, axes: int) -> Moments:
    """The moments of y from those of its modes, with the standard deviations of a spatial covariance.

    The last of ``axes`` is time; those before it are batches, each with its own basis and variation.
    """

    def at_one_time(basis: Basis, std: Coefficient, mean: Field, variation: Field | None) -> Moments:
        if variation is not None:
            std = jax.tree.map(jnp.multiply, fields.expand(std, mean), variation)
        # One standard deviation for all modes is the same for all points.
        in_space = std if is_shared(std, mean) else basis.std(std)
        return Moments(basis.from_modes(mean), in_space)

    over_time = jax.vmap(at_one_time, in_axes=(None, 0, 0, None))
    return _over(over_time, axes - 1)(basis, moments.std, moments.mean, variation)


def _transformed(basis: Basis, modes: PyTree, axes: int, batches: int) -> PyTree:
    """Modes with ``axes`` more axes in front, behind those of batches, of which each has its own basis."""

    def one(basis: Basis, modes: PyTree) -> PyTree:
        return _over(basis.from_modes, axes)(modes)

    return _over(one, batches)(basis, modes)


@compiled(static_argnums=2)
def spread(basis: Basis, members: PyTree, axes: int) -> PyTree:
    """The spread in space; the members' axis comes after the first ``axes``, and their mean is zero."""
    in_space = _transformed(basis, members, 2, axes - 1)
    return jax.tree.map(lambda x: safe_sqrt(jnp.mean(x**2, axis=axes)), in_space)


@compiled
def resized(x: PyTree, std: PyTree, size: Array) -> PyTree:
    """Fields x, rescaled as standard deviations are that get a root mean square of this size, if it is known.

    Sizes have the axes of batches and time, which are the first ones of all fields.
    """

    def one(x: PyTree, std: PyTree, size: Array) -> PyTree:
        factor = jnp.where(size < 0, 1, safe_divide(size, scaled_rms(std)))
        return jax.tree.map(lambda leaf: factor * leaf, x)

    return _over(one, size.ndim)(x, std, size)


@compiled(static_argnums=2)
def members(basis: Basis, members: PyTree, axes: int) -> PyTree:
    """All members in space, with their axis before that of time."""
    in_space = _transformed(basis, members, 2, axes - 1)
    return jax.tree.map(lambda x: jnp.swapaxes(x, axes - 1, axes), in_space)


@compiled(static_argnums=2)
def from_modes(basis: Basis, samples: PyTree, axes: int) -> PyTree:
    """Samples in space, with this many axes in front."""
    return _transformed(basis, samples, axes, 0)


def expand(std: Coefficient, mean: PyTree) -> PyTree:
    """A standard deviation that all unknowns share, or any other, as a field like the mean."""

    def spread(s: Array, m: Array) -> Array:
        return jnp.broadcast_to(s.reshape(*s.shape, *(1,) * (m.ndim - s.ndim)), m.shape)

    if same_structure(std, mean):
        return jax.tree.map(spread, std, mean)
    return jax.tree.map(lambda m: spread(std, m), mean)


@compiled(static_argnums=1)
def in_shape(moments: Moments, shape: tuple[int, ...]) -> tuple[PyTree, PyTree]:
    """Mean and standard deviation as fields, with times in this shape."""
    both = moments.mean, expand(moments.std, moments.mean)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), both)
